"""Hands the answers of the server to the recorder."""

import dataclasses

from specdec.server.engine import Job
from specdec.server.protocol import ChatRequest, CompletionRequest, Settings
from specdec.server.traffic import Answered, Asked, Recorder


def record(
    recorder: Recorder,
    settings: Settings,
    job: Job,
    *,
    name: str,
    text: str,
    finish: str,
    thinking: bool | None = None,
) -> None:
    """Records an answer that has ended. name: the id of the row; text: of the answer, as the client has it; thinking: the mode of
    requests that do not say theirs
    """
    generation = job.request.generation
    (tokens,), (accepted,) = generation.tokens, generation.accepted
    messages, prompt, mode, tools = None, None, None, None
    if isinstance(settings, ChatRequest):
        messages, tools = [message.to_row() for message in settings.messages], settings.offered
        mode = thinking if settings.thinking is None else settings.thinking
    elif isinstance(settings, CompletionRequest):
        prompt = settings.text
    asked = Asked(
        messages,
        prompt,
        dataclasses.asdict(job.sampling),
        settings.metadata,
        seed=settings.seed,
        grammar=grammar.to_row() if (grammar := settings.grammar()) else None,
        thinking=mode,
        tools=tools,
    )
    answered = Answered(
        text,
        finish,
        job.prompt + tokens,
        num_prompt=len(job.prompt),
        end=tokens[-1] if tokens[-1] in job.ends.tokens else None,
        rounds=len(accepted),
        drafted=sum(generation.drafted),
        accepted=accepted,
        name=name,
    )
    origin = recorder.origin and dataclasses.replace(recorder.origin, head=job.head)  # the newest head may be another
    recorder.record(asked, answered, origin)

"""Answers of a server with OpenAI's interface, many at once, in the order of the jobs.

vLLM takes and gives token ids. Other servers take messages and give text:

    way    request                        answer        chat template and tokens
    ids    v1/completions, ids            ids           of this project
    chat   v1/chat/completions, messages  text          of the server; the answer is tokenised again
"""

import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import PurePosixPath

from transformers import PreTrainedTokenizerBase

from specdec.core.untrusted import is_text
from train.answers.answering import AnswerJob, AnswerSettings, WrittenAnswer, make_answer
from train.data import chat_template
from train.features.engine_client import BadAnswer, EngineClient, Refused
from train.features.engine_features import discard_states

AHEAD = 4  # requests that wait for an earlier answer, for each one in flight
PATHS = {"ids": "v1/completions", "chat": "v1/chat/completions"}


class AnswerServer:
    """The target in one server, or in several that are used in turn, which answer jobs in their order.

    name: the target's, which the server's model is compared with
    example: a job, with which it is found out what the servers understand

    Raises ValueError, with what to do, if a server does not answer or has another tokenizer.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: PreTrainedTokenizerBase,
        settings: AnswerSettings,
        *,
        name: str,
        example: AnswerJob,
    ):
        self.client, self.tokenizer, self.settings = client, tokenizer, settings
        self.model, self.limit = self._choose_model(name)
        self._check_tokenizer(example)
        self.way = self._find_way(example)

    def write(self, jobs: Iterable[AnswerJob]) -> Iterator[list[tuple[AnswerJob, WrittenAnswer]]]:
        """What was written for the jobs, some of them at a time."""
        return in_order(self._submit, iter(jobs), ahead=AHEAD * self.client.in_flight)

    def _submit(self, job: AnswerJob) -> "Future[WrittenAnswer]":
        def read(answer: dict) -> WrittenAnswer:
            found = self.read_answer(answer, job)
            if found.tokens is not None:
                discard_states(answer, job.tokens + found.tokens)
            return found

        return self.client.submit(PATHS[self.way], self.make_body(job, self.settings, self.way), read)

    def make_body(self, job: AnswerJob, settings: AnswerSettings, way: str) -> dict:
        """The request for a job. What this interface leaves open is set here, so that the model's defaults do not count."""
        body = {
            "model": self.model,
            "max_tokens": settings.max_new_tokens,
            "temperature": job.temperature,
            "top_p": settings.top_p,
            "seed": settings.seed_of(job.id, bits=31),
        }
        if way == "chat":
            template = chat_template.template_arguments(self.tokenizer, job.options.get("thinking"))
            tools = {"tools": job.options["tools"]} if "tools" in job.options else {}
            return body | tools | {"messages": job.messages} | ({"chat_template_kwargs": template} if template else {})
        ends = {"stop_token_ids": sorted(settings.stop), "ignore_eos": True}  # only `stop` ends an answer
        others = {"return_token_ids": True, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        return body | {"prompt": job.tokens} | ends | others

    def read_answer(self, answer: dict, job: AnswerJob) -> WrittenAnswer:
        """What came back for a job. Raises BadAnswer for what may be right the next time."""
        try:
            choice = answer["choices"][0]
            finish = choice["finish_reason"]
            if self.way == "ids":
                return self._read_ids(choice["token_ids"], finish, job)
            said = choice["message"]
            text = said["content"] or ""
            removed = any(said.get(key) for key in ("reasoning", "reasoning_content", "tool_calls"))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise BadAnswer(f"it has no answer of the interface's form ({type(error).__name__}: {error})") from error
        if removed:
            raise ValueError(
                "The server takes thinking or calls of tools out of the answers, so it is not known what the target wrote. "
                "Start it without a reasoning parser and without a tool parser."
            )
        if finish not in ("stop", "length"):
            raise BadAnswer(f"the answer to {job.id} ended because of {finish!r}")
        if not is_text(text):  # half of a surrogate pair, where a server cut a character
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            text = text.rstrip("\ufffd") if finish == "length" else text
        usage = answer.get("usage") or {}
        return WrittenAnswer(text, finish, None, int(usage.get("completion_tokens") or 0))

    def _read_ids(self, tokens: list, finish: str, job: AnswerJob) -> WrittenAnswer:
        settings = self.settings
        if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
            raise BadAnswer(f"the answer to {job.id} has no token ids")
        ended = tokens[-1] in settings.stop
        if finish not in ("stop", "length") or (finish == "stop" and not ended):
            raise BadAnswer(
                f"the answer to {job.id} ended because of {finish!r} with token {tokens[-1]}, which is none of the "
                f"target's stop tokens {sorted(settings.stop)}"
            )
        if not ended and len(tokens) != settings.max_new_tokens:
            raise BadAnswer(f"the answer to {job.id} was cut after {len(tokens)} tokens, not {settings.max_new_tokens}")
        return make_answer(self.tokenizer, tokens, settings.stop, job.before)

    # What the servers are

    def check_length(self, longest: int, name: str) -> None:
        """Raises ValueError if a server cannot read so many tokens.

        longest: tokens of the longest prompt, which `name` names, and its answer
        """
        if self.limit is not None and self.limit < longest:
            raise ValueError(
                f"{name} and its answer may need {longest} tokens, and the server's max_model_len is {self.limit}. "
                f"Lower max_new_tokens=, leave long prompts out, or start the server with max_model_len={longest} or more."
            )

    def _choose_model(self, name: str) -> tuple[str, int | None]:
        """The name that all servers have for the target, and how many tokens they can read, if they say so."""
        found = [{str(model["id"]): model for model in models} for models in self.client.describe_models()]
        common = [each for each in found[0] if all(each in models for models in found)]
        if not common:
            names = "; ".join(", ".join(models) for models in found)
            raise ValueError(f"The servers have no model in common ({names}). Give those of one target.")
        last = PurePosixPath(name).name.lower()
        model = next((each for each in common if PurePosixPath(each).name.lower() == last), None)
        if model is None:
            model = common[0]
            warnings.warn(
                f"The server's model is called {model}, and target.name={name}: make sure that they are the same.",
                stacklevel=2,
            )
        limits = [models[model].get("max_model_len") for models in found]
        return model, min((limit for limit in limits if isinstance(limit, int)), default=None)

    def _check_tokenizer(self, example: AnswerJob) -> None:
        """Compares ids where servers have /tokenize, as vLLM has."""
        text = self.tokenizer.decode(example.tokens, clean_up_tokenization_spaces=False)
        wanted = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            for _ in self.client.urls:  # they are asked in turn
                found = self.client.post("tokenize", body, lambda answer: answer.get("tokens"))
                if isinstance(found, list) and found and found != wanted:
                    raise ValueError(
                        f"The server's tokenizer is not the target's: it gives {len(found)} ids for a prompt that has "
                        f"{len(wanted)}, or other ids. Serve the model that target.name= names."
                    )
        except Refused:
            return

    def _find_way(self, example: AnswerJob) -> str:
        """The first way that all servers support."""
        settings = AnswerSettings(stop=frozenset(), max_new_tokens=1)
        for way in PATHS if example.prompt is None else ("ids",):
            try:
                body, check = self.make_body(example, settings, way), functools.partial(self._check_way, example, way)
                for _ in self.client.urls:
                    self.client.post(PATHS[way], body, check)
                return way
            except Refused as error:
                reason = str(error)
        taken = "neither token ids nor messages" if example.prompt is None else "no token ids"
        raise ValueError(f"The server takes {taken}. {reason}")

    def _check_way(self, example: AnswerJob, way: str, answer: dict) -> None:
        """Raises Refused if an answer of one token is not of that way."""
        try:
            choice = answer["choices"][0]
            ids = choice.get("token_ids")
            if way == "ids" and not (isinstance(ids, list) and ids):
                raise Refused("It does not return token ids.")
            discard_states(answer, [*example.tokens, *(ids or ())])
            if way == "chat":
                choice["message"]["content"]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise Refused(f"Its answers have another form than OpenAI's ({reason}).") from error


def in_order(
    submit: Callable[[AnswerJob], "Future[WrittenAnswer]"], jobs: Iterator[AnswerJob], *, ahead: int
) -> Iterator[list[tuple[AnswerJob, WrittenAnswer]]]:
    """Yields the results of the first jobs as soon as they are there. ahead: jobs that may be under way behind the first one"""
    waiting: deque[tuple[AnswerJob, Future[WrittenAnswer]]] = deque()
    try:
        while True:
            while len(waiting) < ahead and (job := next(jobs, None)) is not None:
                waiting.append((job, submit(job)))
            if not waiting:
                return
            done = [(waiting[0][0], waiting[0][1].result())]
            waiting.popleft()
            while waiting and waiting[0][1].done() and waiting[0][1].exception() is None:  # else it raises next time
                job, future = waiting.popleft()
                done.append((job, future.result()))
            yield done
    finally:
        for _, future in waiting:
            future.cancel()

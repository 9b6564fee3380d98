"""Reads requests and answers that pass through the proxy, in OpenAI's form and with what vLLM adds to it."""

import json
from dataclasses import dataclass, field
from typing import Any

import pydantic

from specdec.server.protocol import Message, RequestError, Settings
from specdec.server.traffic import Answered, Asked

SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")
MORE = (
    "tools",
    "functions",
    "logit_bias",
    "prefix",
    "suffix",
    "echo",
)  # what decides about an answer and is not in a row
OWN_PROMPT: dict[str, tuple] = {  # fields by which a server makes a prompt otherwise than of its texts alone, with what changes nothing
    "continue_final_message": (False,), "add_generation_prompt": (True,), "documents": ([],),
    "chat_template": ("",), "truncate_prompt_tokens": (), "add_special_tokens": (),
}  # fmt: skip
OTHER_LAW: dict[
    str, tuple
] = {  # fields of vLLM, SGLang and llama.cpp that change the law of the tokens, with what changes nothing
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ("", [], {})),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "grammar", "bad_words", "allowed_token_ids"), ("", [], {})),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "min_tokens", "mirostat"), (0,)),
    **dict.fromkeys(("xtc_probability", "dry_multiplier", "dynatemp_range", "top_n_sigma"), (0,)),
    **dict.fromkeys(("typical_p", "repeat_penalty"), (1,)),
    "use_beam_search": (False,),
}
BESIDE = ("tool_calls", "function_call", "reasoning", "reasoning_content", "refusal", "audio")


@dataclass
class Said:
    """An answer, whole or joined from the chunks of a stream."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    finish: str | None = None
    ended_by: Any = None  # vLLM's stop_reason: the text or token of the request that ended it; None: the model did
    usage: dict = field(default_factory=dict)
    name: str | None = None
    plain: bool = True  # one answer, of text alone

    def add(self, document: dict, chat: bool) -> None:
        """document: an answer, or a chunk of one"""
        self.plain = self.plain and "error" not in document
        self.name, self.usage = self.name or document.get("id"), document.get("usage") or self.usage
        self.prompt = self.prompt or document.get("prompt_token_ids") or []
        for choice in document.get("choices") or []:
            part = choice.get("delta") or choice.get("message") or {} if chat else choice
            self.plain = self.plain and choice.get("index", 0) == 0 and not any(part.get(name) for name in BESIDE)
            self.text += part.get("content" if chat else "text") or ""
            self.prompt = self.prompt or choice.get("prompt_token_ids") or []
            self.tokens += choice.get("token_ids") or []
            self.finish, self.ended_by = choice.get("finish_reason") or self.finish, choice.get("stop_reason")


def read_asked(body: dict, chat: bool) -> Asked | None:
    """None for a request whose answer cannot be a row: with tools, images, several prompts, or the prompt in its answer."""
    if any(body.get(name) for name in MORE):
        return None
    messages, prompt = None, body.get("prompt")
    if chat:
        try:
            messages = [Message.model_validate(message).to_row() for message in body.get("messages") or []]
        except pydantic.ValidationError:
            return None
        if not messages:
            return None
        prompt = None
    elif isinstance(prompt, list):
        prompt = prompt[0] if len(prompt) == 1 and isinstance(prompt[0], str) else None
    arguments = body.get("chat_template_kwargs") or {}
    thinking = arguments.get("enable_thinking")
    grammar, known = _grammar(body)
    return Asked(
        messages,
        prompt,
        {name: body.get(name) for name in SAMPLING},
        body.get("metadata"),
        seed=body.get("seed"),
        grammar=grammar,
        thinking=thinking if isinstance(thinking, bool) else None,
        other_law=not known or _says(body, OTHER_LAW),
        own_prompt=_says(body, OWN_PROMPT) or _says(arguments, {"enable_thinking": (True, False)}, others=True),
    )


def _says(given: dict, harmless: dict[str, tuple], *, others: bool = False) -> bool:
    """Whether one of the fields has a value that is not harmless. others: whether fields of other names count too"""
    names = given if others else harmless
    return any(given.get(name) is not None and given[name] not in harmless.get(name, ()) for name in names)


def _grammar(body: dict) -> tuple[dict | None, bool]:
    """-> None for a free answer, and for one whose grammar is of a form that this project does not know; False then"""
    given = {name: body[name] for name in ("response_format", "structured_outputs") if body.get(name)}
    try:
        grammar = Settings.model_validate(given).grammar()
    except (pydantic.ValidationError, RequestError):
        return None, False
    return (grammar.to_row() if grammar else None), True


def read_answered(content: bytes, body: dict, asked: Asked, end: int | None) -> Answered | None:
    """None for an answer that cannot be a row: an error, cut off, several choices, calls of tools, hidden thoughts; and where
    the ids would have to be made of texts that they do not follow from.

    content: of the response; end: the token that ends an answer. Raises an error for an answer of another form.
    """
    said, chat = Said(), asked.messages is not None
    for document in _documents(content, bool(body.get("stream"))):
        said.add(document, chat)
    if not said.plain or said.finish not in ("stop", "length"):
        return None
    given = bool(said.prompt and said.tokens)
    bare = not chat and isinstance(body.get("prompt"), list) and not isinstance(body["prompt"][0], str)
    if not given and (bare or asked.own_prompt or not said.text):
        return None
    asked_to_stop = bool(body.get("stop") or body.get("stop_token_ids"))
    by_model = said.finish == "stop" and said.ended_by is None and (given or not asked_to_stop)
    counts = said.usage.get("speculation") or {}
    return Answered(
        said.text,
        said.finish,
        said.prompt + said.tokens if given else None,
        num_prompt=len(said.prompt) if given else 0,
        end=end if by_model else None,
        rounds=counts.get("rounds"),
        drafted=counts.get("drafted"),
        accepted=_accepted(counts) if counts else None,
        name=said.name,
    )


def _accepted(counts: dict) -> list[int]:
    """Drafts that each round kept, the longest first: the server tells only how many rounds reached each depth."""
    return [sum(num > place for num in counts["accepted_by_position"]) for place in range(counts["rounds"])]


def _documents(content: bytes, streamed: bool) -> list[dict]:
    if not streamed:
        return [json.loads(content)]
    lines = [line[5:].strip() for line in content.splitlines() if line.startswith(b"data:")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]

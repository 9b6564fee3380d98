"""What requests may hold, and how answers are written: OpenAI's interface, and what is beside it."""

import difflib
import json
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from specdec.core.sampling import Sampling
from specdec.core.untrusted import is_text
from specdec.tools.grammar.grammar import Grammar

# Fields of OpenAI and vLLM that change the answer in ways that this server cannot, with what they may be nevertheless
REFUSED: dict[str, tuple] = {
    "n": (1,), "best_of": (1,), "logprobs": (False,), "top_logprobs": (0,), "echo": (False,),
    "suffix": ("",), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "min_p": (0,),
}  # fmt: skip
FIELD_FORMS = {  # of fields that may hold several things
    "prompt": "a text, or the token ids of one prompt",
    "content": "a text, or a list of parts of type text",
    "stop": "a text, or a list of texts",
    "tool_choice": "none or auto, as this server cannot force a call",
    "response_format": 'a type: {"type": "json_schema", "json_schema": {"name": .., "schema": {..}}}, "json_object" or "text"',
    "chat_template_kwargs": 'variables of the chat template, such as {"enable_thinking": false}',
}
IGNORED = ("user", "service_tier", "prediction", "safety_identifier", "prompt_cache_key", "verbosity")
MAX_TOKENS = 1 << 20  # more than any request may ask for


class RequestError(Exception):
    """A request that cannot be answered. status: of HTTP; parameter: the field that is wrong"""

    def __init__(self, message: str, *, status: int = 400, parameter: str | None = None, headers: dict | None = None):
        super().__init__(message)
        self.message, self.status, self.parameter, self.headers = message, status, parameter, headers or {}

    def to_json(self) -> dict:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.parameter, "code": None}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    tool_calls: list[dict] | None = None
    function_call: dict | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    thoughts: str | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @pydantic.model_validator(mode="after")
    def _check_content(self) -> "Message":
        if self.content is None and not self.tool_calls and not self.function_call:
            raise PydanticCustomError("content", "a message needs a content, or calls of tools")
        return self

    def to_row(self) -> dict:
        """As chat templates take it."""
        content = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        more = self.model_dump(exclude={"role", "content"}, exclude_none=True)
        more = {name: value for name, value in more.items() if value}
        return {"role": "system" if self.role == "developer" else self.role, "content": content, **more}


class JsonSchema(BaseModel):
    """Of OpenAI's response_format; `schema` there."""

    model_config = ConfigDict(extra="ignore", strict=True)
    document: Annotated[dict | bool, Field(alias="schema")]


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> Grammar | None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise RequestError(
                "response_format needs json_schema with the type json_schema, and only with it.",
                parameter="response_format",
            )
        if self.json_schema is not None:
            return Grammar.from_row({"json_schema": self.json_schema.document})
        return None if self.type == "text" else Grammar.from_row({"json_schema": {"type": "object"}})


class StructuredOutputs(BaseModel):
    """vLLM's field, for what OpenAI's response_format has no place for."""

    model_config = ConfigDict(extra="forbid", strict=True)
    regex: str | None = None
    grammar_: Annotated[str | None, Field(alias="grammar")] = None  # in Lark's form

    def grammar(self) -> Grammar:
        rules = [("regex", self.regex), ("lark", self.grammar_)]
        try:
            return Grammar.from_row({kind: value for kind, value in rules if value is not None})
        except ValueError:
            raise RequestError("structured_outputs: give regex or grammar.", parameter="structured_outputs") from None


class RequestSettings(BaseModel):
    """What both kinds of requests share. speculate, details: of this server alone; return_token_ids: also of vLLM"""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    stop: str | list[str] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    speculate: bool = True
    details: bool = False
    return_token_ids: bool = False
    metadata: dict[str, Any] | None = None  # record.py reads `conversation`
    store: bool | None = None  # false: not recorded

    def sampling(self) -> Sampling:
        """Without fields as OpenAI says: temperature 1, no filters."""
        if self.temperature is not None and Sampling(self.temperature).greedy:
            return Sampling(repetition_penalty=self.repetition_penalty or 1.0)
        top_k = self.top_k if self.top_k and self.top_k > 0 else None
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p = None if self.top_p == 1 else self.top_p
        return Sampling(temperature, top_k, top_p, self.repetition_penalty or 1.0)

    def grammar(self) -> Grammar | None:
        """That the answer is to follow. Raises RequestError for fields that contradict each other."""
        fields_set = [field for field in (self.response_format, self.structured_outputs) if field is not None]
        rules = [rule for field in fields_set if (rule := field.grammar()) is not None]
        if len(rules) > 1 or (rules and self.ignore_eos):
            conflict = (
                "structured_outputs beside it"
                if len(rules) > 1
                else "ignore_eos, as the grammar says where answers end"
            )
            raise RequestError(f"An answer follows one grammar: leave out {conflict}.", parameter="response_format")
        return rules[0] if rules else None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        stop_texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not all(stop_texts) or len(stop_texts) > 16:
            raise RequestError("stop must be a text or up to 16 texts, none of them empty.", parameter="stop")
        return tuple(stop_texts)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens


class ChatRequest(RequestSettings):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[dict] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None  # how many calls an answer has is the model's to say

    @property
    def offered_tools(self) -> list[dict] | None:
        """The tools that the answer may call; None: none"""
        return None if self.tool_choice == "none" else self.tools or None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def template_row(self) -> dict[str, Any]:
        """What says how the messages are rendered, under the names that rows have for it."""
        row = {"chat_template_kwargs": self.chat_template_kwargs, "reasoning_effort": self.reasoning_effort}
        return {key: value for key, value in {**row, "tools": self.offered_tools}.items() if value is not None}


class CompletionRequest(RequestSettings):
    prompt: str | list[int]


def parse_request(kind: type[RequestSettings], body: bytes) -> Any:
    """Raises RequestError, with the field and what to change, for a body that is not such a request."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}.") from None
    if not isinstance(document, dict):
        raise RequestError("The body must be a JSON object.")
    if not is_text(document):
        raise RequestError(
            "The body has half of a surrogate pair (\\ud800 .. \\udfff), which is no character: repair the text."
        )
    for name in [name for name in document if name in REFUSED or name in IGNORED]:
        value = document.pop(name)
        if name in REFUSED and not _is_allowed(name, value):
            raise RequestError(f"This server cannot do {name}={_shorten(value)}: leave it out.", parameter=name)
    document = {name: value for name, value in document.items() if value is not None}
    try:
        return kind.model_validate(document)
    except pydantic.ValidationError as error:
        raise _explain_error(kind, error) from None


def _is_allowed(name: str, value: Any) -> bool:
    """Whether a field of REFUSED may have this value. False is not 0 there: chats have logprobs false, and completions a number of them."""
    return value is None or any(
        value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in REFUSED[name]
    )


def _explain_error(kind: type[RequestSettings], error: pydantic.ValidationError) -> RequestError:
    """The first thing that is wrong, in one sentence."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(key) for key in first["loc"] if not str(key).endswith("]") and key not in ("str", "list"))
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        close = difflib.get_close_matches(name, kind.model_fields, n=1)
        return RequestError(
            f"There is no field {field!r}." + (f" Did you mean {close[0]!r}?" if close else ""), parameter=field
        )
    if first["type"] == "missing":
        return RequestError(f"The field {field!r} is missing.", parameter=field)
    form = next((FIELD_FORMS[str(part)] for part in reversed(first["loc"]) if part in FIELD_FORMS), None)
    why = f"give {form}" if form else first["msg"]
    return RequestError(f"{field}={_shorten(first['input'])} cannot be used: {why}.", parameter=field)


def _shorten(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."

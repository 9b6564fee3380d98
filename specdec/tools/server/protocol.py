"""The requests that the server takes: OpenAI's interface and this project's own fields."""

import difflib
import json
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from specdec.core.sampling import Sampling
from specdec.core.untrusted import is_text
from specdec.tools.grammar.grammar import Grammar

# Fields of OpenAI and vLLM that change the answer in ways that this server cannot, with their harmless values
REFUSED: dict[str, tuple] = {
    "n": (1,), "best_of": (1,), "logprobs": (False,), "top_logprobs": (0,), "echo": (False,),
    "suffix": ("",), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "min_p": (0,),
}  # fmt: skip
FIELD_FORMS = {  # fields that may hold several types
    "prompt": "a text, or the token ids of one prompt",
    "content": "a text, or a list of parts of type text",
    "stop": "a text, or a list of texts",
    "tool_choice": "none or auto, as this server cannot force a call",
    "response_format": (
        'a type: {"type": "json_schema", "json_schema": {"name": .., "schema": {..}}}, "json_object" or "text"'
    ),
    "chat_template_kwargs": 'variables of the chat template, such as {"enable_thinking": false}',
}
IGNORED = ("user", "service_tier", "prediction", "safety_identifier", "prompt_cache_key", "verbosity")
MAX_TOKENS = 1 << 20  # bound of a request's tokens: targets have fewer positions


class RequestError(Exception):
    """A request that cannot be answered. status: status code of HTTP; parameter: field that is wrong"""

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
        """The message as chat templates take it."""
        content = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        fields = self.model_dump(exclude={"role", "content"}, exclude_none=True)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content, **{name: value for name, value in fields.items() if value}}


class JsonSchema(BaseModel):
    """The field json_schema of OpenAI's response_format. document: `schema` there"""

    model_config = ConfigDict(extra="ignore", strict=True)
    document: Annotated[dict | bool, Field(alias="schema")]


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> Grammar | None:
        """The grammar of the type; None for free text. Raises RequestError for a type without its schema."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise RequestError(
                "response_format needs json_schema with the type json_schema, and only with it.",
                parameter="response_format",
            )
        if self.json_schema is not None:
            return Grammar.from_row({"json_schema": self.json_schema.document})
        return None if self.type == "text" else Grammar.from_row({"json_schema": {"type": "object"}})


class StructuredOutputs(BaseModel):
    """vLLM's field for grammars that OpenAI's response_format has no type for."""

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
    """The fields that both kinds of requests share.

    speculate, details: fields of this server alone; return_token_ids: field of vLLM, too
    """

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
        """The settings of sampling. The defaults are OpenAI's: temperature 1, no filters."""
        if self.temperature is not None and Sampling(self.temperature).greedy:
            return Sampling(repetition_penalty=self.repetition_penalty or 1.0)
        top_k = self.top_k if self.top_k and self.top_k > 0 else None
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p = None if self.top_p == 1 else self.top_p
        return Sampling(temperature, top_k, top_p, self.repetition_penalty or 1.0)

    def grammar(self) -> Grammar | None:
        """The grammar that the answer follows. Raises RequestError for fields that contradict each other."""
        fields = [field for field in (self.response_format, self.structured_outputs) if field is not None]
        rules = [rule for rule in [field.grammar() for field in fields] if rule is not None]
        if len(rules) > 1:
            conflict = "structured_outputs beside it"
        elif rules and self.ignore_eos:
            conflict = "ignore_eos, as the grammar says where answers end"
        else:
            return rules[0] if rules else None
        raise RequestError(f"An answer follows one grammar: leave out {conflict}.", parameter="response_format")

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
        """The tools that the answer may call; None for none."""
        return None if self.tool_choice == "none" else self.tools or None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def list_messages(self) -> list[dict]:
        """The messages as chat templates take them."""
        return [message.to_row() for message in self.messages]

    def template_row(self) -> dict[str, Any]:
        """The fields that change how messages are rendered, under the names of rows."""
        row = {"chat_template_kwargs": self.chat_template_kwargs, "reasoning_effort": self.reasoning_effort}
        return {key: value for key, value in {**row, "tools": self.offered_tools}.items() if value is not None}


class CompletionRequest(RequestSettings):
    prompt: str | list[int]


class WeightsRequest(BaseModel):
    """A head for all later answers. folder: its checkpoint; version: a name for what it drafts"""

    model_config = ConfigDict(extra="forbid", strict=True)
    folder: Annotated[str, Field(min_length=1, max_length=4096)]
    version: Annotated[str, Field(min_length=1, max_length=200)]


def parse_request(kind: type[BaseModel], body: bytes) -> Any:
    """The request in a body. Raises RequestError, with the field and the fix, for a body that is no such request."""
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
    for name, value in document.items():
        if name in REFUSED and not _is_allowed(name, value):
            raise RequestError(f"This server cannot do {name}={_shorten(value)}: leave it out.", parameter=name)
    unread = {*REFUSED, *IGNORED}
    document = {name: value for name, value in document.items() if value is not None and name not in unread}
    try:
        return kind.model_validate(document)
    except pydantic.ValidationError as error:
        raise _explain_error(kind, error) from None


def _is_allowed(name: str, value: Any) -> bool:
    """Whether a field of REFUSED may have this value.

    False is not 0 there: chats have logprobs false, and completions a number of them.
    """
    return value is None or any(
        value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in REFUSED[name]
    )


def _explain_error(kind: type[BaseModel], error: pydantic.ValidationError) -> RequestError:
    """The first error of a request as a sentence."""
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
    advice = f"give {form}" if form else first["msg"]
    return RequestError(f"{field}={_shorten(first['input'])} cannot be used: {advice}.", parameter=field)


def _shorten(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."

"""Conversations as prompts and as rows of token ids with a mask."""

import bisect
import functools
import itertools
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import BatchEncoding, PreTrainedTokenizerBase

from specdec.core.answer_text import TextDecoder, TextStream
from specdec.core.untrusted import is_text
from specdec.text import answer_mask, chat_template, reading, token_text
from specdec.text.answer_mask import ADVICE
from specdec.text.chat_template import check_arguments, check_written, find_form, render
from specdec.text.messages import THOUGHTS, normalise_messages, read_arguments, write_arguments

if TYPE_CHECKING:  # decoding does not need it
    import rich.text


@dataclass(frozen=True)
class Prompt:
    """A prompt to decode.

    question: id of its question, which has a prompt for each turn; None: the prompt is the question
    """

    id: str
    category: str
    tokens: list[int]
    tags: tuple[str, ...] = ()
    question: str | None = None

    @property
    def question_id(self) -> str:
        """Id of its question, the unit of confidence intervals: turns of one question are strongly correlated"""
        return self.question or self.id


@dataclass(frozen=True)
class Row:
    """A conversation's token ids. `mask` is True for tokens of the assistant, its end-of-turn token included."""

    id: str
    category: str
    tokens: list[int]
    mask: list[bool]
    arguments: dict = field(default_factory=dict)  # known template arguments of its text
    num_left_out: int = 0  # unsupervised answers of the history, which the template writes otherwise


# The chat template


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], arguments: dict[str, Any] | None = None
) -> list[int]:
    """The tokens after which the target writes its answer.

    arguments: variables of the chat template, and `tools`, as messages.read_arguments names them
    Raises ValueError for messages that cannot be rendered or encoded,
    and for an argument that the template does not read.
    """
    if not is_text(messages):
        raise ValueError("The prompt has half of a surrogate pair, which is no character: was it typed in UTF-8?")
    arguments = arguments or {}
    messages = normalise_messages(messages)
    text = render(tokenizer, messages, arguments, add_generation_prompt=True)
    check_arguments(tokenizer, arguments)
    check_written(tokenizer, messages, arguments, text, add_generation_prompt=True)
    return tokenise(tokenizer, text)["input_ids"]


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, defaults: dict[str, Any], messages: list[dict], fields: dict[str, Any]
) -> tuple[list[int], dict[str, Any]]:
    """-> the tokens after which the target answers a request; the row fields with which its messages were rendered

    defaults: template arguments that the request may replace; fields: the request's fields, as of a row
    Raises ValueError as `encode_prompt` does.
    """
    arguments = {**defaults, **read_arguments(fields)}
    return encode_prompt(tokenizer, messages, arguments), write_arguments(arguments)


def tokenise(tokenizer: PreTrainedTokenizerBase, text: str, **options) -> BatchEncoding:
    """The encoding of a text. Raises ValueError for a token without an embedding in the target."""
    encoding = tokenizer(text, add_special_tokens=False, **options)
    token_text.check_ids(tokenizer, encoding["input_ids"])
    return encoding


def load_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str | None = None,
    limit: int | None = None,
    arguments: dict[str, Any] | None = None,
) -> list[Prompt]:
    """Prompts to decode, in any form that reading.load_prompts reads; `limit` of them, spread evenly over the rows.

    arguments: variables of the chat template that rows may replace
    Raises ValueError as reading.load_prompts and reading.spread_rows do, and for a prompt that the template refuses.
    """
    with reading.name_location(source):
        rows = reading.spread_rows(reading.load_prompts(source, split=split), limit)
        return encode_prompts(rows, tokenizer, arguments)


def encode_prompts(
    rows: list[dict], tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any] | None = None
) -> list[Prompt]:
    """Rows of reading.load_prompts as prompts to decode.

    arguments: variables of the chat template that rows may replace
    """
    check_arguments(tokenizer, arguments or {})
    return [
        Prompt(row["id"], row["category"], encode_row(tokenizer, row, arguments), tuple(row["tags"])) for row in rows
    ]


def encode_row(tokenizer: PreTrainedTokenizerBase, row: dict, arguments: dict[str, Any] | None = None) -> list[int]:
    """`encode_prompt` of a row of reading.load_prompts. A refusal names its place.

    A model without a chat template continues the row's `prompt`.
    arguments: variables of the chat template that the row may replace
    """
    with reading.name_location(row.get("place") or f"prompt {row['id']}"):
        if row.get("prompt") is None or tokenizer.chat_template or "tools" in row:
            return encode_prompt(tokenizer, row["messages"], merge_arguments(tokenizer, row, arguments))
        tokens = token_text.encode_text(tokenizer, row["prompt"])
        if not tokens:
            raise ValueError("The prompt is empty, and the target puts no token in front of texts: write one.")
        return tokens


def merge_arguments(
    tokenizer: PreTrainedTokenizerBase, row: dict, arguments: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Template arguments of a row, with `tools`, over those of a command.

    A mode that the template lacks is left out.
    """
    row_arguments = read_arguments(row)
    tools = {"tools": row_arguments["tools"]} if "tools" in row_arguments else {}
    return {**(arguments or {}), **chat_template.select_known_arguments(tokenizer, row_arguments), **tools}


def check_offsets(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError for a tokenizer that does not give the places of its tokens in a text."""
    if tokenizer.chat_template and not tokenizer.is_fast:
        raise ValueError(
            f"The tokenizer of {tokenizer.name_or_path} ({type(tokenizer).__name__}) has no fast form "
            "(tokenizer.json), which says where tokens begin, so answers cannot be told from prompts. Choose another "
            "target."
        )


@functools.lru_cache(maxsize=4)
def find_vocabulary(tokenizer: PreTrainedTokenizerBase, num_entries: int) -> tuple[str, int]:
    """-> digest of the text of every id, and the number of ids that the target reads

    num_entries: len(tokenizer), which changes with added tokens
    """
    return token_text.digest_vocabulary(tokenizer), token_text.count_ids(tokenizer)


def read_stored_ids(tokenizer: PreTrainedTokenizerBase, conversation: dict) -> Row | None:
    """The row with the ids that the target read and wrote: `tokens`, whose first `prompt_tokens` are the prompt.

    None if it has no ids, and with a warning if they belong to another tokenizer. Raises ValueError for impossible ids.
    """
    if not reading.has_ids(conversation):
        return None
    tokens = conversation["tokens"]
    num_prompt = conversation["prompt_tokens"]
    digest, size = find_vocabulary(tokenizer, len(tokenizer))
    if conversation.get("tokenizer") != digest:
        if conversation.get("messages") is None and reading.find_plain_text(conversation) is None:
            raise ValueError(
                f"Row {conversation['id']} has no messages, and its token ids are of another tokenizer than that of "
                f"{tokenizer.name_or_path}. Remove the row, or train with its own target."
            )
        warnings.warn(
            f"Row {conversation['id']} and perhaps others have token ids of another tokenizer than that of "
            f"{tokenizer.name_or_path}. Their text is encoded again, so it may be cut into other tokens.",
            stacklevel=2,
        )
        return None
    ids = isinstance(tokens, list) and all(type(token) is int and 0 <= token < size for token in tokens)
    if not ids or type(num_prompt) is not int or not 0 < num_prompt < len(tokens):
        raise ValueError(
            f"Row {conversation['id']}: tokens must be a list of ids from 0 to {size - 1}, and "
            f"prompt_tokens={num_prompt} at least 1 and below their number. Repair or remove the row."
        )
    mask = [False] * num_prompt + [True] * (len(tokens) - num_prompt)
    if read_last_weight(conversation) == 0:
        raise ValueError(
            f"Row {conversation['id']}: its last answer has weight 0, and it alone would count. Remove the row."
        )
    arguments = chat_template.select_known_arguments(tokenizer, read_arguments(conversation))
    return Row(conversation["id"], conversation["category"], tokens, mask, arguments)


def read_last_weight(conversation: dict) -> int:
    """The weight of a row's last message, 0 or 1"""
    messages = conversation.get("messages")
    return messages[-1].get("weight", 1) if messages else 1


def encode_plain(tokenizer: PreTrainedTokenizerBase, conversation: dict, prompt: str | None, completion: str) -> Row:
    """Tokens and mask of plain text. The completion is supervised, or all of a text without a prompt.

    A completion ends with the end-of-text token, unless the row has `finish: "length"`: then the target did not write
    one. Raises ValueError if no token can be guessed.
    """
    before, answer = token_text.encode_pair(tokenizer, prompt or "", completion)
    end = tokenizer.eos_token_id
    if prompt is not None and end is not None and conversation.get("finish") != "length" and answer[-1:] != [end]:
        answer = [*answer, end]
    if not (answer if before else answer[1:]):  # the first token has no context
        raise ValueError(f"Row {conversation['id']}: its text or completion is too short. Remove the row.")
    mask = [False] * len(before) + [True] * len(answer)
    mask[0] = False
    return Row(id=conversation["id"], category=conversation["category"], tokens=before + answer, mask=mask)


def encode(tokenizer: PreTrainedTokenizerBase, conversation: dict) -> Row:
    """Tokens and assistant mask of a row of `load_conversations`. Every assistant turn is supervised.

    A row with the target's token ids is used as it is, and its last answer is supervised. Plain text is encoded without
    the chat template. With a template, a prompt and its completion are a user's message and its answer. A row with
    `finish: "length"` is cut behind its last answer's content: the target did not write an end of turn there. Raises
    ValueError if nothing or everything would be supervised.
    """
    if (row := read_stored_ids(tokenizer, conversation)) is not None:
        return row
    if (plain := reading.find_plain_text(conversation)) is not None:
        prompt, completion = plain
        if prompt is None or not (tokenizer.chat_template or "tools" in read_arguments(conversation)):
            return encode_plain(tokenizer, conversation, prompt, completion)
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        conversation = {**conversation, "messages": messages}
    return encode_messages(tokenizer, conversation)


def encode_messages(tokenizer: PreTrainedTokenizerBase, conversation: dict) -> Row:
    """`encode` of a row with messages. Turns with weight 0 are context alone."""
    name = f"Row {conversation['id']}"
    messages = normalise_messages(conversation["messages"])
    if not tokenizer.chat_template:
        raise ValueError(f"{name} has messages. {chat_template.describe_missing_template(tokenizer)}")
    check_offsets(tokenizer)
    check_answers(name, messages)
    is_cut = conversation.get("finish") == "length"
    if is_cut and find_form(tokenizer).thoughts:
        messages[-1] = split_cut_thoughts(messages[-1])
    try:
        return _encode_rendered(tokenizer, conversation, messages, is_cut=is_cut)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _encode_rendered(
    tokenizer: PreTrainedTokenizerBase, conversation: dict, messages: list[dict], *, is_cut: bool
) -> Row:
    """`encode_messages`, for messages as the template takes them. is_cut: the last answer has no end of turn"""
    # Render the text, and refuse what the template leaves out
    arguments = merge_arguments(tokenizer, conversation)
    check_arguments(tokenizer, arguments)
    rendered = answer_mask.RenderedConversation(tokenizer, messages, arguments)
    check_written(tokenizer, messages, arguments, rendered.text, add_generation_prompt=False)
    # Find the assistant's turns in its tokens
    encoding = tokenise(tokenizer, rendered.text, return_offsets_mapping=True)
    tokens = encoding["input_ids"]
    starts = [first for first, _ in encoding["offset_mapping"]]
    if starts != sorted(starts):
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} says wrongly where its tokens begin in the text, so "
            "answers cannot be told from prompts. Choose another target, or another copy of its tokenizer."
        )
    spans = chat_template.find_spans(tokenizer, messages, arguments)
    turns, arguments = answer_mask.find_turns(rendered, spans)
    mask = answer_mask.mask_turns(rendered, tokens, starts, list(turns.values()))
    if spans is not None:
        mask = [*map(all, zip(mask, answer_mask.mask_spans(starts, spans)))]
    last = max(turns)
    if is_cut and not messages[last].get("tool_calls"):
        num_tokens = bisect.bisect_left(starts, turns[last].said_end)
        tokens = tokens[:num_tokens]
        mask = mask[:num_tokens]
    num_left_out = sum(message["role"] == "assistant" for message in messages) - len(turns)
    arguments = chat_template.select_known_arguments(tokenizer, arguments)
    row = Row(conversation["id"], conversation["category"], tokens, mask, arguments, num_left_out)
    if all(mask) or not any(mask):
        raise ValueError(
            f"{'everything' if any(mask) else 'nothing'} would be supervised. Look at its messages and their weights; "
            f"if they are right, {ADVICE}. The row: {show_row(tokenizer, row).markup[:1000]}"
        )
    return row


def check_answers(name: str, messages: list[dict]) -> None:
    """Raises ValueError for a conversation without an answer, or with one at its beginning. name: name of the row"""
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise ValueError(
            f"{name} has no assistant turn, only {', '.join(dict.fromkeys(roles))}. Let the target answer it first."
        )
    if roles[0] == "assistant":
        raise ValueError(f"{name} begins with the assistant's turn. Put a user message before it.")


def split_cut_thoughts(message: dict) -> dict:
    """The message with thoughts of their own, if it was cut inside of <think>."""
    begin, tag, thoughts = message["content"].partition("<think>")
    if not tag or begin.strip() or "</think>" in thoughts or THOUGHTS in message:
        return message
    return {**message, "content": "", THOUGHTS: thoughts.removeprefix("\n")}


def show_row(tokenizer: PreTrainedTokenizerBase, row: Row) -> "rich.text.Text":
    """The row's text, with the supervised part in green"""
    import rich.text

    text = rich.text.Text()
    stream = TextStream(TextDecoder.from_tokenizer(tokenizer, special=True))
    for supervised, group in itertools.groupby(zip(row.mask, row.tokens, strict=True), key=lambda pair: pair[0]):
        pieces = [stream.add(token) for _, token in group]
        text.append("".join(pieces), style="bold green" if supervised else "dim")
    return text.append(stream.end())


# Rows to batches


def find_last_answer(row: Row) -> tuple[int, int]:
    """Begin and end of the last supervised stretch, behind a prompt and perhaps earlier answers"""
    stop = len(row.mask) - row.mask[::-1].index(True)
    return stop - row.mask[stop - 1 :: -1].index(False), stop


def list_stop_tokens(tokenizer: PreTrainedTokenizerBase, generation_config) -> set[int]:
    """Ids that end an answer: the tokenizer's and the model's"""
    ends = generation_config.eos_token_id
    ids = ends if isinstance(ends, list) else [ends]
    return {int(token) for token in (tokenizer.eos_token_id, *ids) if token is not None}

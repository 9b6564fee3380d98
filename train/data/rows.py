"""Conversations to `TrainingBatch`: prompts and rows of token ids with their mask, truncation, collation."""

import functools
import itertools
import warnings
from dataclasses import dataclass

import rich.text
import torch
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase

from specdec.core import devices, token_text
from specdec.core.answer_text import TextDecoder, TextStream
from specdec.core.untrusted import is_text
from specdec.measuring.measure import Prompt
from specdec.proposers import datastore
from train.data import answer_mask, chat_template, reading
from train.data.answer_mask import ADVICE, find_special
from train.data.chat_template import check_written, find_form, options_of, render, template_arguments


@dataclass(frozen=True)
class Row:
    """One conversation. `mask` is True where the assistant wrote the token, its end-of-turn token included."""

    id: str
    category: str
    tokens: list[int]
    mask: list[bool]
    thinking: bool | None = None  # the mode in which it was written, if that is known


@dataclass(frozen=True)
class TrainingBatch:
    """Packed conversations. What follows from masks alone is computed on the host, without waiting for a device."""

    tokens: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool, True where the token is supervised, never at the start of a document
    documents: Tensor  # [B, T] int64, which packed document, -1 for padding
    positions: Tensor  # [B, T] int64, position inside its own document, 0 for padding

    host: "TrainingBatch | None" = None  # the same on the CPU; None: it is there

    @property
    def on_host(self) -> "TrainingBatch":
        return self.host or self

    def to(self, device: torch.device | str) -> "TrainingBatch":
        device = torch.device(device)
        if device.type == "cpu":
            return self.on_host
        tokens, loss_mask, documents, positions = (
            devices.send(each, device) for each in (self.tokens, self.loss_mask, self.documents, self.positions)
        )
        return TrainingBatch(tokens, loss_mask, documents, positions, host=self.on_host)

    def goals(self, supervise: str) -> Tensor:
        """[B, T] bool on the CPU: the tokens that a drafter is trained to guess.

        supervise: answers, or text for prompts too
        """
        host = self.on_host
        return host.positions > 0 if supervise == "text" else host.loss_mask

    def select(self, places: list[int]) -> "TrainingBatch":
        """Some of the batch's packs, on the CPU."""
        host = self.on_host
        return TrainingBatch(
            host.tokens[places], host.loss_mask[places], host.documents[places], host.positions[places]
        )


# The chat template


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    thinking: bool | None = None,
    *,
    tools: list[dict] | None = None,
) -> list[int]:
    """The tokens after which the target writes its answer. Raises ValueError for what cannot be rendered or encoded."""
    if not is_text(messages):
        raise ValueError("The prompt has half of a surrogate pair, which is no character: was it typed in UTF-8?")
    options = {"add_generation_prompt": True, "thinking": thinking, "tools": tools}
    text = render(tokenizer, messages, **options)
    check_written(tokenizer, messages, text, **options)
    return tokenise(tokenizer, text)["input_ids"]


def tokenise(tokenizer: PreTrainedTokenizerBase, text: str, **more) -> BatchEncoding:
    """The encoding of a text. Raises ValueError for a token that the target has no embedding for."""
    encoding = tokenizer(text, add_special_tokens=False, **more)
    token_text.check_ids(tokenizer, encoding["input_ids"])
    return encoding


def load_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str | None = None,
    limit: int | None = None,
    thinking: bool | None = None,
) -> list[Prompt]:
    """Prompts to decode, from any form that reading.load_prompts reads; `limit` of them, spread evenly over the rows.

    thinking: the mode of prompts that do not say theirs

    Raises ValueError as reading.load_prompts and reading.spread, and for a prompt that the template refuses.
    """
    with reading.at(source):
        rows = reading.spread(reading.load_prompts(source, split=split), limit)
        return encode_prompts(rows, tokenizer, thinking=thinking)


def encode_prompts(
    rows: list[dict], tokenizer: PreTrainedTokenizerBase, *, thinking: bool | None = None
) -> list[Prompt]:
    """Rows of reading.load_prompts as prompts to decode. thinking: the mode of prompts that do not say theirs"""
    chat_template.check_mode(tokenizer, thinking)
    encode = lambda row: encode_row(tokenizer, row, thinking=thinking)
    return [Prompt(row["id"], row["category"], encode(row), tuple(row["tags"])) for row in rows]


def encode_row(tokenizer: PreTrainedTokenizerBase, row: dict, *, thinking: bool | None = None) -> list[int]:
    """`encode_prompt` of a row of reading.load_prompts, whose place a refusal names.

    A model without a chat template continues the row's `prompt`. thinking: its mode, if it does not say it
    """
    with reading.at(row.get("place") or f"prompt {row['id']}"):
        if row.get("prompt") is None or tokenizer.chat_template or "tools" in row:
            return encode_prompt(tokenizer, row["messages"], **{"thinking": thinking, **options_of(row)})
        tokens = token_text.encode_text(tokenizer, row["prompt"])
        if not tokens:
            raise ValueError("The prompt is empty, and the target puts no token in front of texts: write one.")
        return tokens


def check_offsets(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError for a tokenizer that cannot say where in a text its tokens are."""
    if tokenizer.chat_template and not tokenizer.is_fast:
        raise ValueError(
            f"The tokenizer of {tokenizer.name_or_path} ({type(tokenizer).__name__}) has no fast form "
            "(tokenizer.json), which says where tokens begin, so answers cannot be told from prompts. Choose another "
            "target."
        )


@functools.lru_cache(maxsize=4)
def vocabulary(tokenizer: PreTrainedTokenizerBase, num_entries: int) -> tuple[str, int]:
    """-> digest of the text of every id, and the number of ids that the target reads.

    num_entries: len(tokenizer), which changes if tokens are added
    """
    return datastore.fingerprint(tokenizer), token_text.num_ids(tokenizer)


def take_kept_ids(tokenizer: PreTrainedTokenizerBase, conversation: dict) -> Row | None:
    """The row with the ids that the target read and wrote: `tokens`, of which the first `prompt_tokens` are the prompt.

    None if it has no ids, and with a warning if they belong to another tokenizer. Raises ValueError for impossible ids.
    """
    if not reading.has_ids(conversation):
        return None
    tokens, num_prompt = conversation["tokens"], conversation["prompt_tokens"]
    digest, size = vocabulary(tokenizer, len(tokenizer))
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
            f"Row {conversation['id']}: tokens must be a list of ids from 0 to {size - 1}, and prompt_tokens={num_prompt} "
            "at least 1 and below their number. Repair or remove the row."
        )
    mask = [False] * num_prompt + [True] * (len(tokens) - num_prompt)
    mode = chat_template.known_mode(tokenizer, options_of(conversation).get("thinking"))
    return Row(conversation["id"], conversation["category"], tokens, mask, mode)


def encode_plain(tokenizer: PreTrainedTokenizerBase, conversation: dict, prompt: str | None, completion: str) -> Row:
    """Tokens and mask of plain text; the completion is supervised, or all of a text without a prompt.

    A completion ends with the end-of-text token, unless the row has `finish: "length"`: the target did not write one
    there. Raises ValueError if nothing is left to guess.
    """
    before, said = token_text.encode_pair(tokenizer, prompt or "", completion)
    end = tokenizer.eos_token_id
    if prompt is not None and end is not None and conversation.get("finish") != "length" and said[-1:] != [end]:
        said = [*said, end]
    if not (said if before else said[1:]):  # nothing precedes the first token
        raise ValueError(f"Row {conversation['id']}: its text or completion is too short. Remove the row.")
    mask = [False] * len(before) + [True] * len(said)
    mask[0] = False
    return Row(id=conversation["id"], category=conversation["category"], tokens=before + said, mask=mask)


def encode(tokenizer: PreTrainedTokenizerBase, conversation: dict) -> Row:
    """Tokens and assistant mask of a row of `load_conversations`; every assistant turn is supervised.

    A row that holds the token ids of the target is used as it is, and its last answer is supervised. Plain text is
    encoded without the chat template; but with one, a prompt and its completion are a user's message and its answer. A
    row with `finish: "length"` is cut behind the content of its last answer, because the target did not write an end of
    turn there. Raises ValueError if nothing or everything would be supervised.
    """
    if (row := take_kept_ids(tokenizer, conversation)) is not None:
        return row
    if (plain := reading.find_plain_text(conversation)) is not None:
        prompt, completion = plain
        if prompt is None or not (tokenizer.chat_template or "tools" in options_of(conversation)):
            return encode_plain(tokenizer, conversation, prompt, completion)
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        conversation = {**conversation, "messages": messages}
    return encode_messages(tokenizer, conversation)


def encode_messages(tokenizer: PreTrainedTokenizerBase, conversation: dict) -> Row:
    """`encode` of a row with messages."""
    name, messages = f"Row {conversation['id']}", conversation["messages"]
    if not tokenizer.chat_template:
        raise ValueError(f"{name} has messages. {chat_template.without_template(tokenizer)}")
    check_offsets(tokenizer)
    options = {"thinking": None, **options_of(conversation)}
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise ValueError(f"{name} has no assistant turn, only {roles}. Let the target answer it first.")
    try:
        text = render(tokenizer, messages, add_generation_prompt=False, **options)
        check_written(tokenizer, messages, text, add_generation_prompt=False, **options)
        encoding = tokenise(tokenizer, text, return_offsets_mapping=True)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    tokens, mode = encoding["input_ids"], options["thinking"]
    starts = [first for first, _ in encoding["offset_mapping"]]
    if starts != sorted(starts):
        raise ValueError(
            f"{name}: the tokenizer of {tokenizer.name_or_path} says wrongly where its tokens begin in the text, so "
            "answers cannot be told from prompts. Choose another target, or another copy of its tokenizer."
        )
    arguments = template_arguments(tokenizer, mode, options.get("tools"))
    spans = chat_template.find_spans(tokenizer, find_form(tokenizer).fit(messages), arguments)
    if spans is not None:
        mask = answer_mask.mask_spans(starts, spans)
    else:
        turns, mode = answer_mask.find_turns(tokenizer, conversation, text, options)
        mask = answer_mask.derive_mask(tokens, starts, turns, find_special(tokenizer))
    if conversation.get("finish") == "length" and True in mask and not answers[-1].get("tool_calls"):
        last = len(mask) - 1 - mask[::-1].index(True)
        first = last - [*mask[last::-1], False].index(False) + 1
        content_end = answer_mask.find_content_end(text, answers[-1]["content"], starts[first], len(text))
        num_kept = sum(start < content_end for start in starts)
        tokens, mask = tokens[:num_kept], mask[:num_kept]
    mode = chat_template.known_mode(tokenizer, mode)
    row = Row(id=conversation["id"], category=conversation["category"], tokens=tokens, mask=mask, thinking=mode)
    if all(mask) or not any(mask):
        raise ValueError(
            f"{name}: {'everything' if any(mask) else 'nothing'} would be supervised. Look at its messages; if "
            f"they are right, {ADVICE}. The row: {show(tokenizer, row).markup[:1000]}"
        )
    return row


def show(tokenizer: PreTrainedTokenizerBase, row: Row) -> rich.text.Text:
    """The row's text, the supervised part in green."""
    text, stream = rich.text.Text(), TextStream(TextDecoder.of(tokenizer, special=True))
    for supervised, group in itertools.groupby(zip(row.mask, row.tokens, strict=True), key=lambda pair: pair[0]):
        pieces = [stream.add(token) for _, token in group]
        text.append("".join(pieces), style="bold green" if supervised else "dim")
    return text.append(stream.end())


# Rows to batches


def collate(packs: list[list[Row]], *, length: int, pad_token: int) -> TrainingBatch:
    """Lays each pack's rows one after the other and pads to `length`."""
    tokens = torch.full((len(packs), length), pad_token)  # [B, T]
    loss_mask = torch.zeros_like(tokens, dtype=torch.bool)  # [B, T]
    documents = torch.full_like(tokens, -1)  # [B, T]
    positions = torch.zeros_like(tokens)  # [B, T]
    for index, rows in enumerate(packs):
        start = 0
        for document, row in enumerate(rows):
            place = slice(start, start + len(row.tokens))
            tokens[index, place] = torch.tensor(row.tokens)
            loss_mask[index, place] = torch.tensor(row.mask)
            loss_mask[index, start] = False  # nothing precedes it in its document, so nothing can guess it
            documents[index, place] = document
            positions[index, place] = torch.arange(len(row.tokens))
            start = place.stop
    return TrainingBatch(tokens=tokens, loss_mask=loss_mask, documents=documents, positions=positions)


def last_answer(row: Row) -> tuple[int, int]:
    """Where the last supervised stretch begins and ends; before it are a prompt and perhaps earlier answers."""
    stop = len(row.mask) - row.mask[::-1].index(True)
    return stop - row.mask[stop - 1 :: -1].index(False), stop


def answers(batch: TrainingBatch, row: int) -> list[tuple[int, int]]:
    """Supervised stretches [start, stop) of one row of a batch."""
    keys = torch.where(batch.loss_mask[row], batch.documents[row], -1).tolist()
    cuts = [i for i in range(len(keys)) if i == 0 or keys[i] != keys[i - 1]] + [len(keys)]
    return [(a, b) for a, b in zip(cuts, cuts[1:]) if keys[a] >= 0]


def stop_tokens(tokenizer: PreTrainedTokenizerBase, generation_config) -> set[int]:
    """Ids that end an answer: the tokenizer's and the model's."""
    ends = generation_config.eos_token_id
    ids = ends if isinstance(ends, list) else [ends]
    return {int(token) for token in (tokenizer.eos_token_id, *ids) if token is not None}

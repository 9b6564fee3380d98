r"""Which tokens of a rendered conversation the assistant wrote.

Places come from rendering alone, never from the first place where a text occurs. A turn begins where the prompt before it
ends. What it says ends where the rendering changes if one more word is said.

    rendered   <user>Hi<end>\n<assistant>\nHello!<end>\n<user>Bye<end>\n<assistant>\nSee you!<end>\n
    prompt 1   <user>Hi<end>\n<assistant>\n
    more       <user>Hi<end>\n<assistant>\nHello!WORD<end>\n<user>Bye<end>\n<assistant>\nSee you!<end>\n
    mask                                   ^^^^^^^^^^^                               ^^^^^^^^^^^^^

A turn ends with the first special token behind what it says, which may be the token of the next role. Generation markers
of a template narrow this down: they say which turns count, and where a turn begins whose prompt the template rewrites.
"""

import bisect
import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from train.data import chat_template
from train.data.chat_template import OTHER, WORD, find_form, render
from train.data.messages import MODE, THOUGHTS

ADVICE = "add {% generation %} markers around what the assistant writes to its chat_template.jinja"
TAGS = re.compile(r"</?think(?:ing)?>|\[/?THINK\]|\s")  # what templates write anew around thoughts
EXCERPT = 40  # characters of a text that a message quotes


@dataclass(frozen=True)
class AssistantTurn:
    """Places in a rendered conversation, in characters.

    start: the first character that the target wrote
    said_end: the end of content, thoughts and calls
    end: the end of what the turn writes behind its calls; `said_end` for a turn without calls
    stop: the first character that the turn cannot have
    """

    start: int
    said_end: int
    end: int
    stop: int


class RenderedConversation:
    """A conversation with its text, and the text of the same conversation with one change.

    arguments: variables of the template; messages, arguments: as of chat_template.render
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, messages: list[dict], arguments: dict[str, Any]):
        self.tokenizer, self.messages, self.arguments = tokenizer, messages, arguments
        self.text = render(tokenizer, messages, arguments, add_generation_prompt=False)

    def prompt(self, index: int, arguments: dict[str, Any] | None = None) -> str:
        """The text that the answer `index` follows when it is written."""
        arguments = self.arguments if arguments is None else arguments
        return render(self.tokenizer, self.messages[:index], arguments, add_generation_prompt=True)

    def history(self, index: int) -> str:
        """The text of the messages before `index`; empty for none."""
        if index == 0:
            return ""
        return render(self.tokenizer, self.messages[:index], self.arguments, add_generation_prompt=False)

    def change(self, index: int, message: dict) -> str:
        """The text with another message in the place of one."""
        messages = [*self.messages[:index], message, *self.messages[index + 1 :]]
        return render(self.tokenizer, messages, self.arguments, add_generation_prompt=False)

    def find_end(self, index: int, key: str) -> int | None:
        """Where a field of a message ends in the text, in characters; None if the template leaves it out.

        key: content, THOUGHTS or tool_calls
        """
        message = self.messages[index]
        changed = self.change(index, _extend_call(message) if key == "tool_calls" else _extend_text(message, key))
        return None if changed == self.text else len(self.text) - _count_common(self.text[::-1], changed[::-1])

    def find_calls_end(self, index: int, said_end: int) -> int:
        """The end of what a turn writes behind its last call: as far as the same stands there without later messages."""
        try:
            alone = RenderedConversation(self.tokenizer, self.messages[: index + 1], self.arguments)
        except ValueError:  # it refuses a conversation that ends with calls
            return said_end
        place = alone.find_end(index, "tool_calls")
        return said_end if place is None else said_end + _count_common(self.text[said_end:], alone.text[place:])

    def find_left_out(self, index: int, start: int, said_end: int) -> str:
        """The beginning of what a message says and the template does not write; empty for nothing.

        All characters of a text must follow one another in the turn, but for blanks and the tags around thoughts. Where one
        does not, the text with a word put there decides.
        """
        message = self.messages[index]
        for key in (THOUGHTS, "content"):
            text = message.get(key) or ""
            place = _find_missing(text, self.text[start:said_end])
            if place is None:
                continue
            if OTHER not in self.change(index, {**message, key: f"{text[:place]}{OTHER}{text[place:]}"}):
                return text[place : place + EXCERPT].strip()
        return ""


def _extend_text(message: dict, key: str) -> dict:
    """The message with one more word in a field. The word ends otherwise than the field does, so that ends can be compared."""
    text = message.get(key) or ""
    return {**message, key: f"{text} {WORD}{'y' if text.rstrip().endswith('x') else 'x'}"}


def _extend_call(message: dict) -> dict:
    """The message with one more argument in its last call."""
    *calls, last = message["tool_calls"]
    return {**message, "tool_calls": [*calls, chat_template.extend_arguments(last)]}


def _count_common(text: str, other: str) -> int:
    """The number of equal first characters."""
    pairs = enumerate(zip(text, other))
    return next((number for number, (a, b) in pairs if a != b), min(len(text), len(other)))


def _find_missing(text: str, written: str) -> int | None:
    """The place of the first character of a text that does not follow the ones before it in `written`; None if all do."""
    skipped = {place for match in TAGS.finditer(text) for place in range(*match.span())}
    position = 0
    for place, character in enumerate(text):
        if place in skipped:
            continue
        position = written.find(character, position) + 1
        if position == 0:
            return place
    return None


# The turns of a conversation


def find_turns(
    conversation: RenderedConversation, spans: list[tuple[int, int]] | None
) -> tuple[dict[int, AssistantTurn], dict[str, Any]]:
    """-> the assistant's turns by the number of their message; the arguments, with the mode of the last answer where it shows

    spans: of the template's generation markers, in characters; None: it has none
    A turn of the history is missing if the template writes it otherwise than the target did: behind another prompt, or
    without its thoughts. Raises ValueError if that is so of the last turn.
    """
    messages = conversation.messages
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    starts, arguments = find_starts(conversation, answers)
    said_ends = [_find_said_end(conversation, index) for index in answers]
    if spans is not None:
        bounds = zip(answers, [0, *said_ends], said_ends)
        marked = [_find_marked_start(conversation, *bound, spans) for bound in bounds]
        starts = [mark if start is None else start for start, mark in zip(starts, marked)]
    turns: dict[int, AssistantTurn] = {}
    for number, index in enumerate(answers):
        start, said_end = starts[number], said_ends[number]
        left_out = "" if start is None else conversation.find_left_out(index, start, said_end)
        if index == answers[-1]:
            _check_last(conversation, start, left_out)
        if start is None or left_out:
            continue
        end = conversation.find_calls_end(index, said_end) if messages[index].get("tool_calls") else said_end
        following = [*starts[number + 1 :], len(conversation.text)]
        stop = next(place for place in following if place is not None)
        turns[index] = AssistantTurn(start, said_end, end, stop)
    return turns, arguments


def _find_said_end(conversation: RenderedConversation, index: int) -> int:
    """The end of content, thoughts and calls of an answer, in characters; 0 if the template writes none of them."""
    message = conversation.messages[index]
    keys = [key for key in (THOUGHTS, "content", "tool_calls") if message.get(key)] or ["content"]
    return max(conversation.find_end(index, key) or 0 for key in keys)


def _check_last(conversation: RenderedConversation, start: int | None, left_out: str) -> None:
    name = conversation.tokenizer.name_or_path
    if start is None:
        raise ValueError(
            f"The chat template of {name} rewrites history (a rendered prompt is not the beginning of the rendered "
            "conversation), so what the assistant wrote cannot be told from it. To train on such conversations, "
            f"{ADVICE}."
        )
    if left_out:
        raise ValueError(
            f'The chat template of {name} leaves out what the assistant says ("{left_out}"), so the target would not read '
            "it. Remove it, or choose a target whose chat template writes it."
        )


def _find_marked_start(
    conversation: RenderedConversation, index: int, behind: int, said_end: int, spans: list[tuple[int, int]]
) -> int | None:
    """The start of an answer by the first marked character of its turn, behind what the generation prompt supplies there.

    behind, said_end: where the turn's mark may begin, in characters
    """
    first = next((first for first, _ in spans if behind <= first <= said_end), None)
    if first is None:
        return None
    history = conversation.history(index)
    header = conversation.prompt(index).removeprefix(history)
    return first + len(header) if conversation.text.startswith(header, first) else first


def find_starts(conversation: RenderedConversation, answers: list[int]) -> tuple[list[int | None], dict[str, Any]]:
    """-> where the answers begin in the text, None if unknown; the arguments, with the mode of the last one where it shows

    What the template itself writes before an answer without thoughts is the end of a prompt without thinking. An answer in
    the history may follow another prompt than a new one.
    """
    form, arguments, text = find_form(conversation.tokenizer), conversation.arguments, conversation.text
    mode = arguments.get(MODE)
    starts = [_find_start(conversation, index, arguments) for index in answers]
    if None in starts and mode is not None:
        history = {key: value for key, value in arguments.items() if key != MODE}
        starts[:-1] = [_find_start(conversation, index, history) for index in answers[:-1]]
    last = starts[-1]
    if form.without and not mode:
        contents = [conversation.messages[index]["content"].strip() for index in answers]
        starts = [_skip_empty_thoughts(text, *pair, form.without) for pair in zip(starts, contents)]
    if mode is None and starts[-1] != last:
        return starts, {**arguments, MODE: False}
    return starts, arguments


def _find_start(conversation: RenderedConversation, index: int, arguments: dict[str, Any]) -> int | None:
    """The length of an answer's prompt, in characters; None if it is not the beginning of the conversation's text."""
    prompt = conversation.prompt(index, arguments)
    return len(prompt) if conversation.text.startswith(prompt) else None


def _skip_empty_thoughts(text: str, start: int | None, content: str, empty_thoughts: str) -> int | None:
    """The start of an answer, behind what a template writes in the place of thoughts."""
    if start is None or (content and text.startswith(content, start)):
        return start
    behind = start + len(empty_thoughts)
    return behind if text.startswith(empty_thoughts, start) and text.startswith(content, behind) else start


# Tokens


def find_special(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of special tokens, including those that a tokenizer marks as special without naming them."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def mask_spans(starts: list[int], spans: list[tuple[int, int]]) -> list[bool]:
    """Mask of the tokens that begin in a span [start, stop) of characters.

    starts: increasing places of the tokens' first characters
    This is not transformers' own mask: where a tokenizer drops white space, that one goes on to the end of the text.
    """
    mask = [False] * len(starts)
    for span in spans:
        first, last = (bisect.bisect_left(starts, place) for place in span)
        mask[first:last] = [True] * (last - first)
    return mask


def mask_turns(
    tokens: list[int], starts: list[int], turns: list[AssistantTurn], special: set[int], text: str
) -> list[bool]:
    """Mask of the tokens of some turns.

    tokens: ids of `text`; starts: increasing places of their first characters; special: ids of special tokens
    A turn ends with the first special token behind what it says, which may be that of the next role. Behind calls this is the
    last special token that the turn itself writes, if it ends with one. Without any, a turn ends with what it says.
    """
    mask = [False] * len(tokens)
    for turn in turns:
        places = turn.start, turn.said_end, turn.end, turn.stop
        first, said, written, stop = (bisect.bisect_left(starts, place) for place in places)
        while written > said and not text[starts[written - 1] : turn.end].strip():
            written -= 1
        if written > said and tokens[written - 1] in special:
            end = written
        else:
            end = next((index + 1 for index in range(written, stop) if tokens[index] in special), said)
        mask[first:end] = [True] * (end - first)
    return mask

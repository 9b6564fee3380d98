r"""Which tokens of a rendered conversation the assistant wrote.

Places come from renderings alone, never from a search for a text. A turn begins where the prompt before it ends. Its
said part ends where the rendering changes if the message has one more word.

    rendered   <user>Hi<end>\n<assistant>\nHello!<end>\n<user>Bye<end>\n<assistant>\nSee you!<end>\n
    prompt 1   <user>Hi<end>\n<assistant>\n
    one more   <user>Hi<end>\n<assistant>\nHello!WORD<end>\n<user>Bye<end>\n<assistant>\nSee you!<end>\n
    mask                                   ^^^^^^^^^^^                               ^^^^^^^^^^^^^

A turn ends with the first special token behind its said part, which may be the token of the next role. Generation
markers of a template narrow this down: they say which turns count, and where a turn with a rewritten prompt begins.
"""

import bisect
import itertools
import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.text import chat_template
from specdec.text.chat_template import OTHER_WORD, WORD, find_form, render
from specdec.text.messages import MODE, THOUGHTS

ADVICE = "add {% generation %} markers around what the assistant writes to its chat_template.jinja"
TAGS = re.compile(r"</?think(?:ing)?>|\[/?THINK\]|\s")  # parts that templates write anew around thoughts
HEADER_ENDS = ">\n"  # last characters of a generation prompt's parts: a special token, a line
EXCERPT = 40  # characters of a text that a message quotes


@dataclass(frozen=True)
class AssistantTurn:
    """Places of an assistant's turn in a rendered conversation, in characters.

    index: number of its message
    start: first character that the target wrote
    said_end: end of content, thoughts and calls
    stop: first character that cannot belong to the turn
    """

    index: int
    start: int
    said_end: int
    stop: int


class RenderedConversation:
    """A conversation with its text, and its texts after one change.

    messages, arguments: arguments of chat_template.render
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, messages: list[dict], arguments: dict[str, Any]):
        self.tokenizer = tokenizer
        self.messages = messages
        self.arguments = arguments
        self.text = render(tokenizer, messages, arguments, add_generation_prompt=False)

    def prompt(self, index: int, arguments: dict[str, Any]) -> str:
        """The prompt of the answer `index`, written with these template arguments"""
        return render(self.tokenizer, self.messages[:index], arguments, add_generation_prompt=True)

    def history(self, index: int) -> str:
        """The text of the messages before `index`; empty for none"""
        if index == 0:
            return ""
        return render(self.tokenizer, self.messages[:index], self.arguments, add_generation_prompt=False)

    def change(self, index: int, message: dict) -> str:
        """The text with another message in place of one"""
        messages = [*self.messages[:index], message, *self.messages[index + 1 :]]
        return render(self.tokenizer, messages, self.arguments, add_generation_prompt=False)

    def find_end(self, index: int, key: str) -> int | None:
        """The end of a message's field in the text, in characters; None if the template leaves the field out.

        key: content, THOUGHTS or tool_calls
        """
        message = self.messages[index]
        changed = self.change(index, _extend_call(message) if key == "tool_calls" else _extend_text(message, key))
        return None if changed == self.text else len(self.text) - _count_common(self.text[::-1], changed[::-1])

    def find_said_end(self, index: int) -> int:
        """The end of content, thoughts and calls of a message, in characters; 0 if the template writes none of them"""
        message = self.messages[index]
        keys = [key for key in (THOUGHTS, "content", "tool_calls") if message.get(key)] or ["content"]
        return max(self.find_end(index, key) or 0 for key in keys)

    def find_turn_end(self, turn: AssistantTurn) -> int:
        """The end of a turn's text behind its said part: as far as the same stands there without later messages"""
        if turn.index + 1 == len(self.messages):
            return len(self.text)
        try:
            alone = RenderedConversation(self.tokenizer, self.messages[: turn.index + 1], self.arguments)
        except ValueError:  # some templates refuse calls at the end
            return turn.said_end
        text_behind = alone.text[alone.find_said_end(turn.index) :]
        return turn.said_end + _count_common(self.text[turn.said_end :], text_behind)

    def find_left_out(self, index: int, start: int, said_end: int) -> str:
        """The beginning of a message's text that the template does not write; empty for none.

        All characters of a text must follow one another in the turn, but for blanks and tags around thoughts. If one
        does not, the rendering with a word at this place decides.
        """
        message = self.messages[index]
        for key in (THOUGHTS, "content"):
            text = message.get(key) or ""
            missing = _find_missing(text, self.text[start:said_end])
            if missing is None:
                continue
            if OTHER_WORD not in self.change(index, {**message, key: f"{text[:missing]}{OTHER_WORD}{text[missing:]}"}):
                return text[missing : missing + EXCERPT].strip()
        return ""


def _extend_text(message: dict, key: str) -> dict:
    """The message with one more word in a field. Its end differs from the field's, so that ends can be compared."""
    text = message.get(key) or ""
    return {**message, key: f"{text} {WORD}{'y' if text.rstrip().endswith('x') else 'x'}"}


def _extend_call(message: dict) -> dict:
    """The message with one more argument in its last call"""
    *calls, last = message["tool_calls"]
    return {**message, "tool_calls": [*calls, chat_template.extend_arguments(last)]}


def _count_common(text: str, second: str) -> int:
    """The number of equal first characters, by bisection, which is faster than a loop over characters"""
    lower = 0
    upper = min(len(text), len(second))
    while lower < upper:
        middle = (lower + upper + 1) // 2
        if text[lower:middle] == second[lower:middle]:
            lower = middle
        else:
            upper = middle - 1
    return lower


def _find_missing(text: str, written: str) -> int | None:
    """The number of the first character that does not follow the earlier ones in `written`; None if all do"""
    if text.strip() in written:
        return None
    skipped = {number for match in TAGS.finditer(text) for number in range(*match.span())}
    position = 0
    for number, character in enumerate(text):
        if number in skipped:
            continue
        position = written.find(character, position) + 1
        if position == 0:
            return number
    return None


# The turns of a conversation


def find_turns(
    conversation: RenderedConversation, spans: list[tuple[int, int]] | None
) -> tuple[dict[int, AssistantTurn], dict[str, Any]]:
    """-> assistant's turns by the number of their message; template
    arguments, with the mode of the last answer if it shows

    spans: the template's generation markers, in characters; None: it has none
    A turn of the history is missing if the template writes it otherwise than the target did: behind another prompt, or
    without its thoughts. Raises ValueError if that holds for the last turn.
    """
    messages = conversation.messages
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    starts, arguments = find_starts(conversation, answers)
    said_ends = [conversation.find_said_end(index) for index in answers]
    if spans is not None:
        starts = _add_marked_starts(conversation, answers, starts, said_ends, spans)
    turns: dict[int, AssistantTurn] = {}
    for number, index in enumerate(answers):
        start = starts[number]
        said_end = said_ends[number]
        left_out = "" if start is None else conversation.find_left_out(index, start, said_end)
        if index == answers[-1]:
            _check_last(conversation, start, left_out)
        if start is None or left_out:
            continue
        stop = next((start for start in starts[number + 1 :] if start is not None), len(conversation.text))
        turns[index] = AssistantTurn(index, start, said_end, stop)
    return turns, arguments


def _check_last(conversation: RenderedConversation, start: int | None, left_out: str) -> None:
    """Raises ValueError if the last turn has no start, or if the template leaves out a part of it."""
    name = conversation.tokenizer.name_or_path
    if start is None:
        raise ValueError(
            f"The chat template of {name} rewrites history (a rendered prompt is not the beginning of the rendered "
            "conversation), so what the assistant wrote cannot be told from it. To train on such conversations, "
            f"{ADVICE}."
        )
    if left_out:
        raise ValueError(
            f'The chat template of {name} leaves out what the assistant says ("{left_out}"), so the target would not '
            "read it. Remove it, or choose a target whose chat template writes it."
        )


def _add_marked_starts(
    conversation: RenderedConversation,
    answers: list[int],
    starts: list[int | None],
    said_ends: list[int],
    spans: list[tuple[int, int]],
) -> list[int | None]:
    """The starts of the answers; unknown ones from the template's generation markers, if there are some"""
    marked = list(starts)
    for number, (index, behind, said_end) in enumerate(zip(answers, [0, *said_ends], said_ends)):
        if marked[number] is None:
            marked[number] = _find_marked_start(conversation, index, behind, said_end, spans)
    return marked


def _find_marked_start(
    conversation: RenderedConversation, index: int, mark_start: int, said_end: int, spans: list[tuple[int, int]]
) -> int | None:
    """The start of an answer at the first marked character of its turn, behind the generation prompt's part there.

    mark_start, said_end: range of the marker's place, in characters
    """
    first = next((first for first, _ in spans if mark_start <= first <= said_end), None)
    if first is None:
        return None
    history = conversation.history(index)
    header = conversation.prompt(index, conversation.arguments).removeprefix(history)
    supplied = header[: _count_common(header, conversation.text[first:])]
    return first + max(supplied.rfind(end) for end in HEADER_ENDS) + 1


def find_starts(conversation: RenderedConversation, answers: list[int]) -> tuple[list[int | None], dict[str, Any]]:
    """-> places in the text where the answers begin, None if unknown;
    arguments, with the last answer's mode if it shows

    Without a stated mode, the longest prompt of all modes counts, as that of an answer without thoughts may end with
    empty ones. An answer in the history may follow another prompt than a new one: that of no stated mode.
    """
    stated = conversation.arguments
    unstated = {key: value for key, value in stated.items() if key != MODE}
    if MODE in stated:
        modes = [stated]
        history_modes = [stated, unstated]
    elif find_form(conversation.tokenizer).mode is not None:
        modes = history_modes = [stated, {**stated, MODE: False}, {**stated, MODE: True}]
    else:
        modes = history_modes = [stated]
    *history, last = answers
    starts = [_find_start(conversation, index, history_modes)[0] for index in history]
    start, arguments = _find_start(conversation, last, modes)
    return [*starts, start], arguments


def _find_start(
    conversation: RenderedConversation, index: int, candidates: list[dict[str, Any]]
) -> tuple[int | None, dict[str, Any]]:
    """-> length in characters of an answer's longest prompt that begins the text, None for none; its template arguments

    candidates: template arguments; of equally long prompts the first one counts
    """
    start = None
    arguments = candidates[0]
    for candidate in candidates:
        prompt = conversation.prompt(index, candidate)
        if conversation.text.startswith(prompt) and len(prompt) > (start or -1):
            start = len(prompt)
            arguments = candidate
    return start, arguments


# Tokens


def find_special(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of special tokens, including those that a tokenizer marks as special without a name"""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def mask_spans(starts: list[int], spans: list[tuple[int, int]]) -> list[bool]:
    """Mask of the tokens that begin in a span [start, stop) of characters.

    starts: increasing places of the tokens' first characters
    transformers' own mask differs: where a tokenizer drops white space, it goes on to the end of the text.
    """
    mask = [False] * len(starts)
    for span in spans:
        first, last = (bisect.bisect_left(starts, place) for place in span)
        mask[first:last] = [True] * (last - first)
    return mask


def mask_turns(
    conversation: RenderedConversation, tokens: list[int], starts: list[int], turns: list[AssistantTurn]
) -> list[bool]:
    """Mask of the tokens of turns, but for those with weight 0. Raises ValueError if no turn counts.

    tokens: ids of the conversation's text; starts: increasing places of their first characters
    """
    supervised_turns = [turn for turn in turns if conversation.messages[turn.index].get("weight", 1)]
    if not supervised_turns:
        raise ValueError("all answers that could count have weight 0. Remove the row.")
    mask = [False] * len(tokens)
    special = find_special(conversation.tokenizer)
    for turn in supervised_turns:
        first = bisect.bisect_left(starts, turn.start)
        end = _find_token_end(conversation, tokens, starts, turn, special)
        mask[first:end] = [True] * (end - first)
    return mask


def _find_token_end(
    conversation: RenderedConversation, tokens: list[int], starts: list[int], turn: AssistantTurn, special: set[int]
) -> int:
    """The number of the token behind a turn. special: ids of special tokens

    A turn ends with the first special token behind its said part, which may be that of the next role. If the turn
    itself writes several in a row, it ends with the end-of-text token among them, or the last one. Without any, it ends
    with its said part, or with the text that it writes behind its calls.
    """
    said, stop = (bisect.bisect_left(starts, place) for place in (turn.said_end, turn.stop))
    first = next((index for index in range(said, stop) if tokens[index] in special), None)
    if first is None and not conversation.messages[turn.index].get("tool_calls"):
        return said
    if first is None:
        return bisect.bisect_left(starts, len(conversation.text[: conversation.find_turn_end(turn)].rstrip()))
    run = [*itertools.takewhile(lambda index: tokens[index] in special, range(first, stop))]
    return 1 + (first if len(run) == 1 else _choose_last(conversation, tokens, starts, turn, run))


def _choose_last(
    conversation: RenderedConversation, tokens: list[int], starts: list[int], turn: AssistantTurn, run: list[int]
) -> int:
    """The last special token of a turn that has several in a row. run: their numbers"""
    end_of_text = conversation.tokenizer.eos_token_id
    if tokens[run[0]] == end_of_text:
        return run[0]
    limit = bisect.bisect_left(starts, conversation.find_turn_end(turn))
    written = [index for index in run if index < limit] or run[:1]
    return next((index for index in written if tokens[index] == end_of_text), written[-1])

r"""Which tokens of a rendered conversation the assistant wrote.

The mask comes from the chat template alone: from its generation markers, or from rendering the conversation up to each
assistant turn.

    rendered   <user>Hi<end>\n<assistant>\nHello!<end>\n<user>Bye<end>\n<assistant>\nSee you!<end>\n
    prompt 1   <user>Hi<end>\n<assistant>\n
    prompt 2   <user>Hi<end>\n<assistant>\nHello!<end>\n<user>Bye<end>\n<assistant>\n
    mask                                   ^^^^^^^^^^^                               ^^^^^^^^^^^^^

A turn ends with the first special token after its content. The template's text behind that token belongs to no turn.
"""

import bisect
import contextlib
import functools
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from train.data.chat_template import find_form, render

ADVICE = "add {% generation %} markers around what the assistant writes to its chat_template.jinja"


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


def find_content_end(text: str, content: str, start: int, stop: int) -> int:
    """Where `content` ends in text[start:stop]; `start` if it is not found because the template changed it."""
    for wanted in (content, content.strip()):
        found = text.find(wanted, start, stop)
        if found >= 0:
            return found + len(wanted)
    return start


def find_turns(
    tokenizer: PreTrainedTokenizerBase, conversation: dict, text: str, options: dict
) -> tuple[list[tuple[int, int | None, int]], bool | None]:
    """(start, content end, stop) of every assistant turn, in characters; the turn ends somewhere from content end to
    stop, and with the last special token before stop if content end is None, as calls of tools may hold such tokens.
    Beside them, the thinking mode of the last one. options: as `render`
    """
    messages = conversation["messages"]
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if answers[0] == 0:
        raise ValueError(f"Row {conversation['id']} begins with the assistant's turn. Put a user message before it.")
    starts, mode = find_answers(tokenizer, messages, options, text, answers)
    if starts is None:
        raise ValueError(
            f"Row {conversation['id']}: the chat template of {tokenizer.name_or_path} rewrites history (a rendered "
            f"prompt is not the beginning of the rendered conversation), so what the assistant wrote cannot be told "
            f"from it. To train on such conversations, {ADVICE}."
        )
    stops = starts[1:] + [len(text)]
    turns: list[tuple[int, int | None, int]] = []
    for index, start, stop in zip(answers, starts, stops, strict=True):
        end: int | None = find_content_end(text, messages[index]["content"], start, stop)
        if messages[index].get("tool_calls"):
            with contextlib.suppress(ValueError):  # it refuses a conversation that ends with calls
                until = render(tokenizer, messages[: index + 1], add_generation_prompt=False, **options)
                end, stop = (None, len(until)) if text.startswith(until) else (end, stop)
        turns.append((start, end, stop))
    return turns, mode


def find_answers(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], options: dict, text: str, answers: list[int]
) -> tuple[list[int] | None, bool | None]:
    """-> where in a conversation's text the answers begin, None if unknown; and the thinking mode of the last one

    What the template itself writes before an answer without thoughts is the end of a prompt with thinking=false. An
    answer in the history may follow another prompt than a new one.
    """
    form, mode = find_form(tokenizer), options["thinking"]
    rendered: Callable[..., str] = functools.partial(render, tokenizer, **options)
    starts = find_starts(rendered, messages, text, answers)
    as_new = starts is not None
    if starts is None and mode is not None:
        starts = find_starts(functools.partial(rendered, thinking=None), messages, text, answers)
    if starts is None:
        return None, mode
    last = starts[-1]
    for place, index in enumerate(answers if form.without and not mode else ()):
        content, start = messages[index]["content"].strip(), starts[place]
        behind = start + len(form.without)
        written = content and text.startswith(content, start)
        if not written and text.startswith(form.without, start) and text.startswith(content, behind):
            starts[place] = behind
    if not as_new and text[: starts[-1]] != rendered(messages[: answers[-1]], add_generation_prompt=True):
        return None, mode
    return starts, False if mode is None and starts[-1] > last else mode


def find_starts(rendered: Callable[..., str], messages: list[dict], text: str, answers: list[int]) -> list[int] | None:
    """How long the prompts of some answers are, in characters; None if one is not the beginning of `text`.

    rendered: `render` with all but messages and add_generation_prompt
    """
    starts = []
    for index in answers:
        prompt = rendered(messages[:index], add_generation_prompt=True)
        if not text.startswith(prompt):
            return None
        starts.append(len(prompt))
    return starts


def find_special(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of special tokens, including those that a tokenizer marks as special without naming them."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def derive_mask(
    tokens: list[int], starts: list[int], turns: list[tuple[int, int | None, int]], special: set[int]
) -> list[bool]:
    """Mask of the tokens that begin inside a turn; `starts`: increasing places of the tokens' first characters.

    A turn ends with the first special token after its content, or with its content where none follows; with the last
    one where the end of its content is None.
    """
    mask = [False] * len(tokens)
    for start, content_end, until in turns:
        first, stop = bisect.bisect_left(starts, start), bisect.bisect_left(starts, until)
        after = first if content_end is None else bisect.bisect_left(starts, content_end)
        ends = [index + 1 for index in range(after, stop) if tokens[index] in special]
        if content_end is None:
            end = ends[-1] if ends else stop
        else:
            end = ends[0] if ends else min(after, stop)
        mask[first:end] = [True] * (end - first)
    return mask

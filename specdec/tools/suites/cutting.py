"""Questions about long texts, without the middle of the text, so that a prompt has at most a chosen length in tokens.

Makers of such suites cut the middle, too: instructions and the question are at the ends.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from specdec.measuring.questions import Question

WINDOW = 16  # characters of each end that are encoded for a token of the length: more than a token has on average


def cut_questions(
    questions: Sequence[Question],
    lengths: Sequence[int],
    count_prompt: Callable[[dict], int],
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[Question], str]:
    """-> the questions at each length, and a sentence that says how many were cut

    count_prompt: tokens of the prompt of a row
    """
    new_questions, clauses = [], []
    for length in lengths:
        num_cut = 0
        for question in questions:
            (row,) = question.turns
            name, category = f"{question.id} at {length}", f"{question.category} {length}"
            turn = cut_row(row, length, count_prompt, tokenizer) | {"id": name, "category": category}
            num_cut += turn["messages"] != row["messages"]
            new_questions.append(replace(question, id=name, category=category, turns=(turn,)))
        clauses.append(f"{num_cut} of {len(questions)} at {length:,} tokens")
    return new_questions, f"cut in the middle: {', '.join(clauses)}"


def cut_row(row: dict, length: int, count_prompt: Callable[[dict], int], tokenizer: PreTrainedTokenizerBase) -> dict:
    """The row with the text of its user as `cut_middle` leaves it. count_prompt: tokens of the prompt of a row"""

    def replace_text(text: str) -> dict:
        messages = [*row["messages"][:-1], {**row["messages"][-1], "content": text}]
        return {**row, "prompt": row["prompt"] and text, "messages": messages}

    text = row["messages"][-1]["content"]
    return replace_text(cut_middle(text, length, lambda text: count_prompt(replace_text(text)), tokenizer))


def cut_middle(text: str, length: int, count_tokens: Callable[[str], int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text without its middle, so that its prompt has at most `length` tokens; a text that fits as it is.

    count_tokens: tokens of the prompt that a text makes
    Raises ValueError for a length that leaves nothing of the text.
    """
    window = WINDOW * length
    start, end = (tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in (text[:window], text[-window:]))
    if len(start) <= length and count_tokens(text) <= length:
        return text
    num_kept = length - count_tokens("a")
    while num_kept > 1:
        ends = start[: num_kept // 2], end[len(end) - num_kept // 2 :]
        cut = "".join(str(tokenizer.decode(part, clean_up_tokenization_spaces=False)) for part in ends)
        excess = count_tokens(cut) - length
        if excess <= 0:
            return cut
        num_kept -= excess
    raise ValueError(f"lengths={length} leaves nothing of the texts: give more tokens.")

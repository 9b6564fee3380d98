"""Prompts of a chosen length, for measuring at long contexts: many short notes, then a task about them."""

import random

from transformers import PreTrainedTokenizerBase

OPENING = "Here are my notes. I will give you the first words of one; then write out that note, word for word.\n\n"
LETTER = "Write a letter to the person who wrote all these notes, and mention as many of them as you can."
NUM_EXAMPLES = 2  # copies that the conversation shows before it asks for one
RESERVED = 400  # tokens that the task and the chat template take
FEWEST = 8  # notes in a prompt


def ask(note: str) -> str:
    return f'Write out the note that begins with "{" ".join(note.split()[:6])}".'


def copying(notes: list[str], random_source: random.Random) -> list[dict]:
    """A conversation in which some of the first half of the notes were copied, and the next copy is asked for."""
    messages, before = [], OPENING + "\n\n".join(notes) + "\n\n"
    *examples, wanted = random_source.sample(notes[: len(notes) // 2], 1 + NUM_EXAMPLES)
    for note in examples:
        messages += [{"role": "user", "content": before + ask(note)}, {"role": "assistant", "content": note}]
        before = ""
    return [*messages, {"role": "user", "content": ask(wanted)}]


def writing(notes: list[str], random_source: random.Random) -> list[dict]:
    """A request for a letter about all notes."""
    return [{"role": "user", "content": "\n\n".join([*notes, LETTER])}]


TASKS = {"copy": copying, "letter": writing}


def long_prompts(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, *, num_tokens: int, num: int, seed: int
) -> list[dict]:
    """`num` rows {id, category, messages} of about `num_tokens` tokens each, whose notes are drawn from `texts`.

    The tasks take turns. Raises ValueError if `num_tokens` is too small for eight notes.
    """
    random_source, rows = random.Random(seed), []
    for place in range(num):
        category = list(TASKS)[place % len(TASKS)]
        notes, room = [], num_tokens - RESERVED
        for text in random_source.sample(texts, len(texts)):
            room -= len(tokenizer(text)["input_ids"]) + 1
            if room < 0:
                break
            notes.append(text)
        if len(notes) < FEWEST:
            raise ValueError(f"{num_tokens} tokens hold fewer than eight notes: raise tokens=.")
        messages = TASKS[category](notes, random_source)
        rows.append({"id": f"long-{category}-{place:02d}", "category": category, "messages": messages})
    return rows

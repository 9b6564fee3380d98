"""python scripts/long_prompts.py out=long_4000.jsonl tokens=4000 num=8

Writes prompts of about so many tokens, for measuring at long contexts: many short notes (the prompts of another file),
then a task: to copy one of the first half, as a few were before, or to write a letter about all of them.
"""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

from helpers.options import options, run
from specdec import checkpoint
from specdec.target import load_tokenizer
from train import reading

OPENING = "Here are my notes. I will give you the first words of one; then write out that note, word for word.\n\n"
LETTER = "Write a letter to the person who wrote all these notes, and mention as many of them as you can."
SHOWN = 2  # copies that the prompt shows before it asks for one


def ask(note: str) -> str:
    return f'Write out the note that begins with "{" ".join(note.split()[:6])}".'


def copying(notes: list[str], chance: random.Random) -> list[dict]:
    """A conversation in which notes were copied, and the next is asked for."""
    messages, before = [], OPENING + "\n\n".join(notes) + "\n\n"
    *shown, wanted = chance.sample(notes[: len(notes) // 2], 1 + SHOWN)
    for note in shown:
        messages += [{"role": "user", "content": before + ask(note)}, {"role": "assistant", "content": note}]
        before = ""
    return [*messages, {"role": "user", "content": ask(wanted)}]


def writing(notes: list[str], chance: random.Random) -> list[dict]:
    return [{"role": "user", "content": "\n\n".join([*notes, LETTER])}]


TASKS = {"copy": copying, "letter": writing}


@dataclass(frozen=True)
class LongPrompts:
    out: str = field(metadata={"help": "JSONL to write: id, category, messages"})
    tokens: int = field(default=4000, metadata={"help": "length of each prompt, about"})
    num: int = field(default=8, metadata={"help": "so many prompts, in turn of each kind of task"})
    data: str = field(
        default="data/prompts_train.jsonl", metadata={"help": "rows with prompt or messages; each prompt is a note"}
    )
    target: str = field(default="targets/smollm2-135m", metadata={"help": "whose tokens are counted"})
    seed: int = field(default=0, metadata={"help": "of choosing notes"})


def main() -> None:
    chosen = options(LongPrompts, __doc__)
    if chosen.num < 1:
        raise ValueError(f"num={chosen.num} must be at least 1.")
    tokenizer, chance = load_tokenizer(chosen.target), random.Random(chosen.seed)
    texts = [row["messages"][-1]["content"] for row in reading.load_prompts(chosen.data)]
    lines = []
    for place in range(chosen.num):
        category = list(TASKS)[place % len(TASKS)]
        notes, left = [], chosen.tokens - 400  # what the task and the chat template take
        for text in chance.sample(texts, len(texts)):
            left -= len(tokenizer(text)["input_ids"]) + 1
            if left < 0:
                break
            notes.append(text)
        if len(notes) < 8:
            raise ValueError(f"tokens={chosen.tokens} holds fewer than eight notes of {chosen.data}: raise it.")
        row = {"id": f"long-{category}-{place:02d}", "category": category, "messages": TASKS[category](notes, chance)}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    checkpoint.write_text(Path(chosen.out), "".join(lines))


if __name__ == "__main__":
    run(main)

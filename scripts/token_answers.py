"""Keeps the token ids of answers without their prompts, and makes answers to train on of them again.

    python scripts/token_answers.py answers=answers.jsonl prompts=my_prompts.jsonl out=answers.npz
    python scripts/token_answers.py answers=answers.npz prompts=my_prompts.jsonl out=answers.jsonl

For prompts that may not be passed on with the answers, and because token ids take a tenth of the space. Answers are those of
scripts/answer.py, with token ids. Both directions need the same prompts, in the same order, and the same tokenizer, which is
checked. Beside the .npz file, OUT.meta.json holds what they were.
"""

from helpers import loading
from helpers.options import options, run

import hashlib
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy
from transformers import PreTrainedTokenizerBase

from specdec import checkpoint
from specdec.core import files, row_files
from specdec.target.model import load_tokenizer
from train import progress
from train.answers import answering
from train.data import reading
from train.data import rows as data
from train.data.chat_template import options_of

COLUMNS = ("prompt", "temperature", "stopped", "length", "tokens")


@dataclass(frozen=True, kw_only=True)
class TokenAnswers:
    answers: str = field(metadata={"help": "the .jsonl file of answers to keep, or the .npz file to make answers of"})
    prompts: str = field(metadata={"help": "the prompts that were answered: JSONL, folder or dataset"})
    out: str = field(metadata={"help": "the .npz or .jsonl file to write"})
    split: str | None = field(default=None, metadata={"help": f"of the prompts: {loading.SPLIT}"})
    thinking: bool | None = field(default=None, metadata={"help": "the thinking= with which the prompts were answered"})
    target: loading.TokenizerOptions = field(default_factory=loading.TokenizerOptions)


def about(tokenizer: PreTrainedTokenizerBase, prompts: list[dict]) -> dict:
    """By what a file of token ids is known to belong to these prompts."""
    asked = [[row["id"], row["messages"], *filter(None, [options_of(row)])] for row in prompts]
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    return {"tokenizer": data.vocabulary(tokenizer, len(tokenizer))[0], "num_prompts": len(prompts), "prompts": digest}


def pack(rows: list[dict], prompts: list[dict], *, tokenizer: str, source: str) -> dict[str, numpy.ndarray]:
    """The columns of the .npz file. tokenizer: digest of the vocabulary. Raises ValueError for rows that it cannot hold."""
    numbers = {f"{row['id']}@": number for number, row in enumerate(prompts)}
    found = []
    for row in rows:
        name, _, temperature = str(row.get("id")).rpartition("@")
        if f"{name}@" not in numbers or row.get("tokenizer") != tokenizer or float(temperature) != row["temperature"]:
            raise ValueError(
                f"{source}: the answer {row.get('id')} has no token ids of this tokenizer, or belongs to no prompt of prompts=. "
                "Give answers that scripts/answer.py wrote with this target, and their prompts."
            )
        if options_of(row) != options_of(prompts[numbers[f"{name}@"]]):
            raise ValueError(
                f"{source}: the answer {row['id']} was written with another thinking mode or other tools than its prompt says. Give "
                "the thinking= with which the prompts were answered."
            )
        found.append(
            (numbers[f"{name}@"], row["temperature"], row["finish"] == "stop", row["tokens"][row["prompt_tokens"] :])
        )
    number, temperatures, stopped, tokens = zip(*found)
    return {
        "prompt": numpy.array(number, numpy.uint32),
        "temperature": numpy.array(temperatures, numpy.float64),
        "stopped": numpy.array(stopped),
        "length": numpy.array([len(each) for each in tokens], numpy.uint32),
        "tokens": numpy.concatenate(tokens).astype(numpy.uint16 if max(map(max, tokens)) < 2**16 else numpy.uint32),
    }


def unpack(
    columns: dict[str, numpy.ndarray], prompts: list[dict], tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict]:
    """Rows as scripts/answer.py writes them."""
    digest = about(tokenizer, [])["tokenizer"]
    ends = columns["length"].astype(int).cumsum()
    for number, temperature, stopped, length, end in zip(
        *(columns[name].tolist() for name in COLUMNS[:4]), ends.tolist()
    ):
        prompt, tokens = prompts[number], columns["tokens"][end - length : end].tolist()
        (job,) = answering.Job.of(tokenizer, prompt, [float(temperature)])
        # `written` takes an answer to be ended if its last token is among these
        answer = answering.written(tokenizer, tokens, {tokens[-1]} if stopped else (), job.before)
        yield answering.conversation(job, answer, tokenizer=digest)


def read_columns(path: Path, expected: dict) -> dict[str, numpy.ndarray]:
    """Raises ValueError for a file that is damaged, or whose answers belong to other prompts or another tokenizer."""
    found = checkpoint.read_json(path.with_name(path.name + ".meta.json"))
    wrong = [key for key, value in expected.items() if found.get(key) != value]
    if wrong:
        raise ValueError(
            f"{path} was made with another {' and '.join(wrong)}. Give the prompts= that were answered, all of them and in their "
            "order, and the target.name= that answered."
        )
    try:
        with numpy.load(path) as file:
            return {name: file[name] for name in COLUMNS}
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged or not a file of token ids ({error}). Copy it again.") from None


def main() -> None:
    chosen = options(TokenAnswers, __doc__)
    source, out = Path(chosen.answers), Path(chosen.out)
    if {source.suffix, out.suffix} != {".npz", ".jsonl"}:
        raise ValueError(f"answers={source} and out={out}: one of them must be a .npz file, the other a .jsonl file.")
    if out.exists():
        raise ValueError(f"{out} exists; choose another out=FILE or delete it.")
    tokenizer = load_tokenizer(chosen.target.name, trust_remote_code=chosen.target.trust_remote_code)
    mode = {} if chosen.thinking is None else {"thinking": chosen.thinking}
    prompts = [mode | row for row in reading.load_prompts(chosen.prompts, split=chosen.split)]
    expected = about(tokenizer, prompts)
    if out.suffix == ".npz":
        rows = [row_files.parse_line(place, line) for place, line in row_files.read_lines(source)]
        if not rows:
            raise ValueError(f"{source} holds no answers.")
        numpy.savez_compressed(out, **pack(rows, prompts, tokenizer=expected["tokenizer"], source=str(source)))
        files.write_text(out.with_name(out.name + ".meta.json"), json.dumps(expected, indent=1) + "\n")
    else:
        rows = list(unpack(read_columns(source, expected), prompts, tokenizer))
        files.write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    progress.Results().print(f"{out}: {len(rows):,} answers")


if __name__ == "__main__":
    run(main)

"""python scripts/long_prompts.py out=long_4000.jsonl tokens=4000 num=8

Writes long prompts, for measuring at long contexts. Each holds many short notes (the prompts of another file) and then a
task: to copy one of the notes, as the conversation did before, or to write a letter about all of them.
"""

from helpers import loading
from helpers.options import options, run

import json
from dataclasses import dataclass, field
from pathlib import Path

from specdec.core import files
from specdec.target.model import load_tokenizer
from train import long_prompts
from train.data import reading


@dataclass(frozen=True)
class LongPrompts:
    out: str = field(metadata={"help": "JSONL file to write: id, category, messages"})
    tokens: int = field(default=4000, metadata={"help": "approximate length of each prompt, in tokens"})
    num: int = field(default=8, metadata={"help": "number of prompts; the two tasks take turns"})
    prompts: str = field(
        default="data/prompts_train.jsonl", metadata={"help": "rows with prompt or messages; each prompt is a note"}
    )
    split: str | None = field(default=None, metadata={"help": f"of prompts=: {loading.SPLIT}"})
    seed: int = field(default=0, metadata={"help": "seed of choosing notes"})
    target: loading.TokenizerOptions = field(default_factory=loading.TokenizerOptions)


def main() -> None:
    chosen = options(LongPrompts, __doc__)
    tokenizer = load_tokenizer(chosen.target.name, trust_remote_code=chosen.target.trust_remote_code)
    texts = [row["messages"][-1]["content"] for row in reading.load_prompts(chosen.prompts, split=chosen.split)]
    rows = long_prompts.long_prompts(texts, tokenizer, num_tokens=chosen.tokens, num=chosen.num, seed=chosen.seed)
    files.write_text(Path(chosen.out), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"written: {chosen.out}")


if __name__ == "__main__":
    run(main)

"""Conversations of random words, with the lengths of the project's own training data, to measure how data scales.

python -m scripts.helpers.synthetic NUM OUT.jsonl       writes them
python -m scripts.helpers.synthetic measure FILE CACHE  loads them as train.py does: seconds and memory of the process
"""

import argparse
import json
import random
import re
import time
from pathlib import Path

from specdec.target.model import load_tokenizer
from train.data import reading
from train.data.encoding import Encoding, load_packs
from train.data.packing import draft_vocab

ROOT = Path(__file__).resolve().parents[2]


def write(num: int, out: Path) -> None:
    """Each row has as many words as a row of data/train.jsonl, drawn from the words of all of them."""
    rows = reading.load_conversations(str(ROOT / "data" / "train.jsonl"))
    texts = [[message["content"].split() for message in row["messages"]] for row in rows]
    words = [word for text in texts for part in text for word in part]
    generator = random.Random(0)
    with out.open("w", encoding="utf-8") as file:
        for number in range(num):
            lengths = [len(part) for part in generator.choice(texts)]
            contents = [" ".join(generator.choices(words, k=max(1, length))) for length in lengths]
            roles = ("user", "assistant")
            messages = [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(contents)]
            file.write(json.dumps({"id": str(number), "messages": messages}) + "\n")


def measure(source: Path, cache: Path) -> dict:
    """Seconds until packs and a draft vocabulary are there, and the largest anonymous memory of this process in bytes."""
    tokenizer = load_tokenizer(str(ROOT / "targets" / "smollm2-135m"))
    before, start = anonymous_memory(), time.perf_counter()
    packs = load_packs(str(source), Encoding(tokenizer, cache), length=512, packed=True)
    loaded = time.perf_counter()
    draft_vocab(packs, "data", None, size=8192, num_tokens=len(tokenizer))
    end = time.perf_counter()
    return {
        "packs": len(packs), "rows": len(packs.members), "supervised": packs.num_supervised, "fingerprint": packs.fingerprint,
        "seconds_packs": round(loaded - start, 1), "seconds_vocabulary": round(end - loaded, 1),
        "anonymous_before": before, "anonymous_after": anonymous_memory(),
    }  # fmt: skip


def anonymous_memory() -> int:
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", help="a number of rows, or measure")
    parser.add_argument("file", type=Path)
    parser.add_argument("cache", type=Path, nargs="?")
    chosen = parser.parse_args()
    if chosen.what == "measure":
        print(json.dumps(measure(chosen.file, chosen.cache)))
    else:
        write(int(chosen.what), chosen.file)

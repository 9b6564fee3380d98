"""python scripts/datastore.py data=FILE out=FOLDER [target.name=targets/smollm2-135m keep=answers ...]

Makes the datastore that proposer=retrieval drafts from, out of conversations (rows with messages, as for training: what
the assistant wrote is kept) or of plain texts (rows with text, or one .txt file). The better its texts resemble what the
target writes, the more of its drafts are accepted: answers of the target itself (scripts/answer.py) are best.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import rich.console
import transformers
from rich.progress import track

import specdec
from helpers.options import options, run
from specdec import datastore
from specdec.target import load_tokenizer
from train import data, reading


@dataclass(frozen=True)
class TargetOptions:
    name: str = field(
        default="targets/smollm2-135m", metadata={"help": "folder or Hub name of the target, for its tokenizer"}
    )


@dataclass(frozen=True)
class Make:
    data: str = field(
        metadata={"help": "rows with messages or text: a .jsonl file, a folder of them, a dataset; or a .txt file"}
    )
    out: str = field(metadata={"help": "the folder to make"})
    keep: str = field(
        default="answers", metadata={"help": "of conversations: answers (the assistant's turns) or everything"}
    )
    length: int = field(default=16, metadata={"help": "sort by so many tokens: the longest match that can be found"})
    split: str = field(default="train", metadata={"help": "of a dataset"})
    limit: int | None = field(default=None, metadata={"help": "only the first so many rows"})
    target: TargetOptions = field(default_factory=TargetOptions)


def read_texts(chosen: Make, tokenizer: transformers.PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Tokens of every text that is not empty."""
    path = Path(chosen.data)
    if path.suffix == ".txt":
        if not path.is_file():
            raise ValueError(f"There is no file {path}. Give a .txt file, {reading.FORMS}.")
        yield from filter(None, [tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]])
        return
    special = data.find_special(tokenizer)
    rows = itertools.islice(reading.read_rows(chosen.data, chosen.split), chosen.limit)
    for number, (place, row) in enumerate(rows):
        if row.get("messages") is not None:
            reading.check_messages(row, place)
            encoded = data.encode(tokenizer, reading.named(row, number))
            yield from [encoded.tokens] if chosen.keep == "everything" else turns(encoded, special)
        elif isinstance(row.get("text"), str):
            yield from filter(None, [tokenizer(row["text"], add_special_tokens=False)["input_ids"]])
        else:
            raise ValueError(f'{place}: neither messages nor text. A row needs "messages": [...] or "text": "...".')


def turns(row: data.Row, special: set[int]) -> Iterator[list[int]]:
    """What the assistant wrote, turn by turn, and before it the template's opening of the turn: its beginning is then
    found by a text that ends with a prompt. The opening is taken from the special token on."""
    stretches = itertools.groupby(range(len(row.mask)), key=row.mask.__getitem__)
    for supervised, places in stretches:
        stretch = list(places)
        if supervised:
            opening = next((i for i in range(stretch[0] - 1, -1, -1) if row.tokens[i] in special), stretch[0])
            yield row.tokens[opening : stretch[-1] + 1]


def main() -> None:
    chosen = options(Make, __doc__)
    out = Path(chosen.out)
    if out.exists():
        raise ValueError(f"{out} exists; choose another out or delete it.")
    if chosen.keep not in ("answers", "everything"):
        raise ValueError(f"keep={chosen.keep} must be answers or everything.")
    if chosen.length < 1:
        raise ValueError(f"length={chosen.length} must be at least 1; 16 is usual.")
    start = time.perf_counter()
    console = rich.console.Console()
    tokenizer = load_tokenizer(chosen.target.name)
    texts = list(track(read_texts(chosen, tokenizer), description="tokenising", console=console, transient=True))
    if not texts:
        raise ValueError(f"data={chosen.data} holds no text, so there is nothing to retrieve: give some with text.")
    tokens = datastore.join(texts)
    read = time.perf_counter()
    suffixes = datastore.sort(
        tokens,
        chosen.length,
        progress=lambda rounds: track(rounds, description="sorting", console=console, transient=True),
    )
    document = {
        "tokenizer_fingerprint": datastore.fingerprint(tokenizer),
        "num_texts": len(texts),
        "length": chosen.length,
        "source": Path(chosen.data).name,
        "keep": chosen.keep,
        "limit": chosen.limit,
        "versions": {
            "specdec": specdec.__version__,
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
        },
    }
    datastore.write(out, tokens, suffixes, document)
    size = sum(path.stat().st_size for path in out.iterdir())
    end = time.perf_counter()
    console.print(
        f"{out}: {len(tokens) - len(texts) - 1:,} tokens in {len(texts):,} texts, {size / 1e6:.1f} MB; "
        f"{end - start:.0f} s, of which {read - start:.0f} s tokenising",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    run(main)

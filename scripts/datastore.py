"""Makes the datastore of texts that proposer=retrieval drafts from.

    specdec datastore data=data/train.jsonl out=datastore target.name=targets/smollm2-135m

Texts that resemble what the target writes are best: its own answers (specdec answer). Of conversations, the assistant's turns
are kept; of other rows, their text.
"""

from specdec.options.command_line import options, run

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import transformers

import specdec
from specdec import loading
from specdec.core import progress
from specdec.proposers import datastore
from specdec.proposers.datastore_texts import read_texts
from specdec.target.model import load_tokenizer
from specdec.text import token_text


@dataclass(frozen=True)
class DatastoreOptions:
    data: str = field(metadata={"help": "rows with messages or text: a .jsonl file, a folder of them, or a dataset"})
    out: str = field(metadata={"help": "folder to make", "folder": True})
    length: int = field(default=16, metadata={"help": "longest match that can be found, in tokens"})
    split: str | None = field(default=None, metadata={"help": loading.SPLIT})
    limit: int | None = field(default=None, metadata={"help": "read only the first LIMIT rows; null: all"})
    template: dict[str, str] = field(default_factory=dict, metadata=loading.TEMPLATE)
    target: loading.TokenizerOptions = field(default_factory=loading.TokenizerOptions)


def main(arguments: list[str] | None = None) -> None:
    chosen = options(DatastoreOptions, __doc__, arguments)
    out = Path(chosen.out)
    if out.exists():
        raise ValueError(f"{out} exists; choose another out=FOLDER or delete it.")
    console = progress.Results()

    start = time.perf_counter()
    tokenizer = load_tokenizer(chosen.target.name, trust_remote_code=chosen.target.trust_remote_code)
    template = loading.read_template(chosen.template, tokenizer)
    read = read_texts(chosen.data, tokenizer, split=chosen.split, limit=chosen.limit, arguments=template)
    texts = list(progress.track(read, "tokenising", unit="texts"))
    if not texts:
        raise ValueError(f"data={chosen.data} holds no text, so there is nothing to retrieve: give some with text.")
    tokenised = time.perf_counter()
    tokens = datastore.join(texts)
    rounds = lambda each: progress.track(each, "sorting", unit="rounds")
    document = {
        "tokenizer_fingerprint": token_text.fingerprint(tokenizer),
        "num_texts": len(texts),
        "length": chosen.length,
        "source": Path(chosen.data).name,
        "limit": chosen.limit,
        "versions": {module.__name__: module.__version__ for module in (specdec, transformers, numpy)},
    }
    datastore.write(out, tokens, datastore.sort(tokens, chosen.length, progress=rounds), document)
    size, end = sum(path.stat().st_size for path in out.iterdir()), time.perf_counter()
    console.print(
        f"{out}: {sum(map(len, texts)):,} tokens in {len(texts):,} texts, {size / 1e6:.1f} MB; {end - start:.0f} s, "
        f"{tokenised - start:.0f} s of them for tokenising"
    )


if __name__ == "__main__":
    run(main)

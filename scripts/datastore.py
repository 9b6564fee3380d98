"""Makes the datastore of texts that proposer=retrieval drafts from.

    specdec datastore data=data/train.jsonl out=datastore target.name=targets/smollm2-135m

Texts that resemble the target's own are best: its answers (specdec answer). Of conversations the assistant's turns are
kept, of other rows their text.
"""

from specdec.options.command_line import read_command

import functools
import time
from pathlib import Path

import numpy
import transformers

import specdec
from specdec import loading
from specdec.core import progress
from specdec.core.option_types import Count, Options, Text
from specdec.core.wording import format_count
from specdec.options.command_types import OutputFolder, TemplateSettings
from specdec.options.run_command import run_command
from specdec.options.target import TokenizerOptions
from specdec.proposers import datastore
from specdec.proposers.datastore_texts import read_texts
from specdec.target.model import load_tokenizer
from specdec.text import token_text


class DatastoreOptions(Options):
    data: Text
    out: OutputFolder
    length: Count
    split: Text | None
    limit: Count | None
    template: TemplateSettings
    target: TokenizerOptions


def main(arguments: list[str] | None = None) -> None:
    options = read_command("datastore", DatastoreOptions, __doc__, arguments)
    out = Path(options.out)
    if out.exists():
        raise ValueError(f"{out} exists; choose another out=FOLDER or delete it.")
    console = progress.Results()

    start_time = time.perf_counter()
    tokenizer = load_tokenizer(options.target.name, trust_remote_code=options.target.trust_remote_code)
    template = loading.read_template(options.template, tokenizer)
    texts_of_rows = read_texts(options.data, tokenizer, split=options.split, limit=options.limit, arguments=template)
    texts = list(progress.track_items(texts_of_rows, "tokenising", unit="texts"))
    if not texts:
        raise ValueError(f"data={options.data} holds no text, so there is nothing to retrieve: give some with text.")
    tokenised_time = time.perf_counter()
    tokens = datastore.join_texts(texts)
    track_rounds = functools.partial(progress.track_items, name="sorting", unit="rounds")
    document = {
        "tokenizer_fingerprint": token_text.digest_vocabulary(tokenizer),
        "num_texts": len(texts),
        "length": options.length,
        "source": Path(options.data).name,
        "limit": options.limit,
        "versions": {module.__name__: module.__version__ for module in (specdec, transformers, numpy)},
    }
    datastore.write_datastore(
        out, tokens, datastore.sort_places(tokens, options.length, progress=track_rounds), document
    )
    size = sum(path.stat().st_size for path in out.iterdir())
    seconds, tokenising_seconds = time.perf_counter() - start_time, tokenised_time - start_time
    console.say(
        f"{out}: {sum(map(len, texts)):,} tokens in {format_count(len(texts), 'text')}, {size / 1e6:.1f} MB; "
        f"{seconds:.0f} s, {tokenising_seconds:.0f} s of them for tokenising"
    )


if __name__ == "__main__":
    run_command(main, DatastoreOptions)

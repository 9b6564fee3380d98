"""Times engines on the same prompts, greedily, one request at a time and in turn: which is the fastest on this machine?

    python -m benchmarks.race limit=6 max_new_tokens=64 target.dtype=bfloat16
    python -m benchmarks.race cells='*/plain,specdec/eagle3,openvino/eagle3' compile=true out=race.json

A cell is ENGINE/DRAFTER, as of benchmarks.board, whose servers these are. While one answers, the others are stopped
(SIGSTOP), as the threads of an engine may spin for a while after their work. Read the ratios, which are medians over
prompts of neighbouring answers; absolute times say little on a shared machine. A cell that fails says why in its row.
"""

import contextlib
import json
import os
import signal
import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.board import HOST, PATIENCE, PLAIN, SPECDEC, BoardOptions, Cell, list_cells, make_line
from specdec.core import files, progress
from specdec.engines import launch
from specdec.engines.client import EngineClient
from specdec.measuring.report import compute_tau
from specdec.measuring.servers.referee import ServedAnswer, compare_ids, select_timed
from specdec.measuring.servers.server import EXTRA_FIELDS, PLAIN_FIELDS, Connection, Server
from specdec.target.model import load_tokenizer
from specdec.text import conversations as data

GREEDY = {"temperature": 0, "seed": 0, "stream": True, "stream_options": {"include_usage": True}}  # of all requests
WARM_UP_TOKENS = 8
ANSWER_MINUTES = 10.0  # minutes of an answer, at most
RACE = "race"  # set of questions in the names of cells and logs


@dataclass(frozen=True)
class RaceOptions:
    cells: str = "*/plain,*/eagle3"  # comma list of patterns of ENGINE/DRAFTER
    prompts: str = common.HELDOUT
    template: str = "{}"  # JSON of the template arguments of prompts that do not say them
    limit: int = 6
    max_new_tokens: int = 64
    repeats: int = 3  # times that every engine answers every prompt
    drafts: int = 3  # drafts of a round, of heads
    compile: bool = False  # this project's passes
    scratch: str = "board"  # exports and converted models
    out: str | None = None  # JSON file for the figures
    target_name: str = common.TARGET
    target_dtype: str = "bfloat16"
    port: int = 8030  # first port


@dataclass
class Entrant:
    """A server that takes part. answers: its answers, prompt after prompt; failure: sentence on why it has ended"""

    cell: Cell
    process: int = 0  # leader of its processes
    connection: Connection | None = None
    answers: list[ServedAnswer] = field(default_factory=list)
    failure: str | None = None

    @property
    def name(self) -> str:
        return f"{self.cell.engine}/{self.cell.drafter}"

    def answer(self, prompt: list[int], max_tokens: int, *, keep: bool = True) -> None:
        """Asks for an answer, while all others are stopped. A fault ends this entrant alone."""
        if self.connection is None:
            return
        os.killpg(self.process, signal.SIGCONT)
        try:
            batch = self.connection.send_requests([("prompt", {"prompt": prompt})], max_tokens=max_tokens)
            self.answers += batch.answers if keep else []
        except ValueError as error:
            self.failure, self.connection = str(error), None
        os.killpg(self.process, signal.SIGSTOP)

    @property
    def tau(self) -> float | None:
        """Emitted tokens a round over all answers; None where the server does not say."""
        counts = [answer.counts for answer in self.answers]
        known = [count for count in counts if count]
        has_rounds = any(count.num_rounds for count in known)
        return compute_tau(known) if has_rounds and len(known) == len(counts) else None


def start(entrant: Entrant, options: RaceOptions, port: int, stack: contextlib.ExitStack) -> None:
    """Starts the entrant's server, which is stopped until it is asked; where that fails, the entrant has ended."""
    cell = entrant.cell
    settings = {name: getattr(options, name) for name in ("scratch", "drafts", "target_name", "target_dtype")}
    log = Path(options.scratch, "logs", f"{RACE}-{entrant.name.replace('/', '-')}.log")
    # specdec serve always has a drafter, and leaves out its drafts where a request says so
    served_cell = replace(cell, drafter="ngram") if (cell.engine, cell.drafter) == (SPECDEC, PLAIN) else cell
    try:
        line = make_line(served_cell, BoardOptions(**settings), port, plain=False)
        if options.compile and cell.engine == SPECDEC:
            line = replace(line, words=[*line.words, "decode.compile=true"])
        process = stack.enter_context(launch.open_server(line, HOST, port, log=log, patience=PATIENCE)).pid
    except ValueError as error:
        entrant.failure = str(error)
        return
    url = launch.make_url(HOST, port)
    client = EngineClient(url, in_flight=1, patience=0.5, longest=ANSWER_MINUTES)
    ((model, *_),) = client.describe_models()
    kind, plain = str(model.get("owned_by")), PLAIN_FIELDS if cell.drafter == PLAIN else {}
    body = GREEDY | EXTRA_FIELDS.get(kind, {}) | plain.get(kind, {})
    described = Server(url, str(model["id"]), kind, "", body, 60 * ANSWER_MINUTES, print)
    entrant.process, entrant.connection = process, Connection(described, client)
    stack.callback(os.killpg, process, signal.SIGCONT)  # so that it can end
    stack.callback(client.close)
    os.killpg(process, signal.SIGSTOP)


def run_race(entrants: list[Entrant], prompts: list[list[int]], *, max_tokens: int, repeats: int) -> None:
    """Asks all servers for each prompt, in an order that rotates, `repeats` times."""
    for entrant in entrants:
        for prompt in (min(prompts, key=len), max(prompts, key=len)):  # they compile for both sizes
            entrant.answer(prompt, WARM_UP_TOKENS, keep=False)
    for number in progress.track_items(range(repeats * len(prompts)), "race", unit="prompts"):
        first = number % len(entrants)
        for entrant in [*entrants[first:], *entrants[:first]]:
            entrant.answer(prompts[number % len(prompts)], max_tokens)


def summarise_race(entrants: list[Entrant], num_prompts: int) -> dict[str, dict[str, Any]]:
    """Figures by name: tokens/s of a user, tau, and ratios to the engine's own plain decoding and to this project's.

    same: answers to the first `num_prompts` that equal those of the engine's plain decoding; None without token ids
    Answers of one token have no rate and are left out.
    """
    running = {entrant.name: entrant for entrant in entrants if entrant.failure is None}
    figures: dict[str, dict[str, Any]] = {}
    for entrant in entrants:
        if entrant.failure is not None:
            figures[entrant.name] = {"failure": entrant.failure}
            continue
        rates = [answer.rate for answer in entrant.answers if answer.rate > 0]
        row: dict[str, Any] = {"tokens_per_second": find_median(rates), "tau": entrant.tau}
        for key, engine in {"to_plain": entrant.cell.engine, "to_specdec": SPECDEC}.items():
            reference = running.get(f"{engine}/{PLAIN}")
            if reference is not None:
                timed = select_timed(zip(entrant.answers, reference.answers, strict=True))
                row[key] = find_median([answer.rate / reference_answer.rate for answer, reference_answer in timed])
        plain = running.get(f"{entrant.cell.engine}/{PLAIN}")
        if plain is not None:
            same = compare_ids(zip(entrant.answers[:num_prompts], plain.answers))
            row["same"] = sum(same) if same else None
        figures[entrant.name] = row
    return figures


def find_median(values: list[float]) -> float | None:
    """The median; None without values."""
    return statistics.median(values) if values else None


def main(arguments: list[str]) -> None:
    options = common.read_options(RaceOptions, __doc__, arguments)
    patterns = ",".join(f"{pattern}/{RACE}" for pattern in common.split_list(options.cells))
    entrants = [Entrant(cell) for cell in list_cells(patterns, [RACE])]
    tokenizer = load_tokenizer(options.target_name)
    rows = data.load_prompts(options.prompts, tokenizer, limit=options.limit, arguments=json.loads(options.template))
    prompts = [row.tokens for row in rows]
    with contextlib.ExitStack() as stack:
        for number, entrant in enumerate(progress.track_items(entrants, "start", unit="servers")):
            start(entrant, options, options.port + number, stack)
        run_race(entrants, prompts, max_tokens=options.max_new_tokens, repeats=options.repeats)
    figures = summarise_race(entrants, len(prompts))
    title = f"{options.target_name}, {options.target_dtype}; {len(prompts)} prompts x {options.repeats}"
    print(title, common.format_rows([{"cell": name} | row for name, row in figures.items()]), sep="\n\n")
    if options.out:
        files.write_text(Path(options.out), json.dumps({"options": asdict(options), "cells": figures}, indent=2) + "\n")


if __name__ == "__main__":
    common.run_main(main)

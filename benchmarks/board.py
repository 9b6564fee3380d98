"""Our board: each drafter in each engine on each set of questions, as records of specdec judge in results/board.

    python -m benchmarks.board limit=16 max_new_tokens=64 cells='vllm/*/*'
    python -m benchmarks.board spec_bench=downloads/Spec-Bench gsm8k=downloads/gsm8k
    specdec report board=results/board

A cell is ENGINE/DRAFTER/SUITE. Cells run one after the other; those that have a record of these options are left out,
so the same command continues. Where an engine cannot serve a drafter, its file says why. Engines that cannot leave
out drafts run twice, with drafts and plainly; the CPU time that the servers take while nobody asks them is measured
and recorded.
"""

import contextlib
import fnmatch
import itertools
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common
from scripts import export, judge
from specdec import checkpoint
from specdec.core import files
from specdec.engines import launch
from specdec.engines.exported import FORMATS, ExportedHead
from specdec.engines.start_lines import LINES, EngineStart, StartLine
from specdec.measuring.privacy import hide_places
from specdec.measuring.record import ABSENCE_SCHEMA, Absence, Record, read_record, write_record
from specdec.measuring.records import PLAIN
from specdec.measuring.servers.cpu_share import CpuMeter

SPECDEC = "specdec"
ENGINES = {SPECDEC: "specdec", "vllm": "vLLM", "llamacpp": "llama.cpp", "transformers": "transformers",
           "openvino": "OpenVINO GenAI"}  # fmt: skip
HEADS = {"eagle3": "checkpoints/shipped/eagle3", "mtp": "checkpoints/shipped/mtp"}
LOOKUPS = ("suffix", "ngram")
HELDOUT = "heldout"
SUITE_FILES = {"spec_bench": "question.jsonl", "gsm8k": "test.jsonl"}  # a line for each question
DOUBLED = ("vllm", "llamacpp", "openvino")  # engines that cannot leave out drafts
ALWAYS_DRAFTS = "specdec serve always has a drafter; records of its drafters have its plain speed, too."
VLLM_FLAGS = "--no-enable-prefix-caching --gpu-memory-utilization 0.2"  # answers share nothing; two servers at once
HOST = "127.0.0.1"  # address of all servers
PATIENCE = 240  # seconds that a server has to start
IDLE_SECONDS = 1.0  # seconds over which idle servers are watched
MAX_IDLE = 0.02  # share of a core that idle servers may take before the record has a note


@dataclass(frozen=True)
class BoardOptions:
    out: str = "results/board"
    scratch: str = "board"  # exports, converted models, and the rows of judgements under way
    cells: str = "*"  # comma list of patterns of ENGINE/DRAFTER/SUITE
    spec_bench: str | None = None  # folder with question.jsonl of Spec-Bench
    gsm8k: str | None = None  # folder with test.jsonl of GSM8K
    limit: int | None = None  # questions of each set; all without it
    max_new_tokens: int = 128
    batch: str = "1"
    drafts: int = 3  # drafts of a round, for heads
    target_name: str = common.TARGET
    target_dtype: str = "float32"
    port: int = 8010  # first of two ports

    @property
    def suites(self) -> list[str]:
        """The public suites whose files are here, or else the held-out questions of the repository."""
        return [name for name in SUITE_FILES if getattr(self, name)] or [HELDOUT]


@dataclass(frozen=True)
class Cell:
    engine: str
    drafter: str
    suite: str

    @property
    def name(self) -> str:
        return f"{self.engine}/{self.drafter}/{self.suite}"

    def find_file(self, out: str) -> Path:
        return Path(out, f"{self.name.replace('/', '-')}.json")


@dataclass(frozen=True)
class BoardServer:
    """A server that answers. process: the leader of its processes"""

    url: str
    line: StartLine
    process: subprocess.Popen


class PortTaken(ValueError):
    """Another program has a server's port: this says nothing of the engine."""


def list_cells(patterns: str, suites: list[str]) -> list[Cell]:
    """The wanted cells, those of an engine together. patterns: comma list, of names of cells

    Raises ValueError where no cell is wanted.
    """
    drafters = (PLAIN, *LOOKUPS, *HEADS)
    cells = [Cell(*names) for names in itertools.product(ENGINES, drafters, suites)]
    wanted = common.split_list(patterns)
    chosen = [cell for cell in cells if any(fnmatch.fnmatch(cell.name, pattern) for pattern in wanted)]
    if not chosen:
        raise ValueError(f"cells={patterns} fits none of {cells[0].name} .. {cells[-1].name}.")
    return chosen


def export_head(engine: str, name: str, options: BoardOptions) -> ExportedHead:
    """The export of a head for an engine, written once. Raises ValueError where there is none."""
    format_name = FORMATS[ENGINES[engine]]
    folder = Path(options.scratch, "exports", f"{name}-{format_name}")
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        target = [f"target.name={options.target_name}", f"target.dtype={options.target_dtype}"]
        export.main([f"checkpoint={HEADS[name]}", f"format={format_name}", f"out={folder}", *target])
    return ExportedHead.read(folder)


def make_line(cell: Cell, options: BoardOptions, port: int, *, plain: bool) -> StartLine:
    """The command of a cell's server. Raises ValueError where the engine does not have the drafter."""
    if cell.engine == SPECDEC:
        return make_own_line(cell, options, port)
    head = export_head(cell.engine, cell.drafter, options) if cell.drafter in HEADS and not plain else None
    start = EngineStart(
        options.target_name,
        port,
        options.target_dtype,
        head,
        cell.drafter if cell.drafter in LOOKUPS and not plain else None,
        options.drafts if head else None,
        folder=Path(options.scratch, "converted"),
        flags=VLLM_FLAGS,
    )
    return LINES[cell.engine](start)


def make_own_line(cell: Cell, options: BoardOptions, port: int) -> StartLine:
    """The command of specdec serve."""
    if cell.drafter == PLAIN:
        raise ValueError(ALWAYS_DRAFTS)
    target = [f"target.name={options.target_name}", f"target.dtype={options.target_dtype}", f"port={port}"]
    drafter = [f"proposer={cell.drafter}"]
    if cell.drafter in HEADS:
        drafter = ["proposer=head", f"checkpoint={HEADS[cell.drafter]}", f"decode.depth={options.drafts}"]
    words = [sys.executable, "-m", "scripts.serve", *target, *drafter]
    return StartLine(words, {"PYTHONPATH": str(common.ROOT)})


@contextlib.contextmanager
def open_server(line: StartLine, port: int, log: Path) -> Iterator[BoardServer]:
    """A server while it is used. Raises ValueError, with the end of its log, where it does not start, and PortTaken."""
    try:
        launch.check_address(HOST, port)
    except ValueError:
        raise PortTaken(f"Port {port} is in use: give another port=.") from None
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file, contextlib.ExitStack() as stack:
        try:
            process = stack.enter_context(launch.open_server(line, HOST, port, output=file, patience=PATIENCE))
        except ValueError:
            raise ValueError(f"It did not start: {read_error(log)}") from None
        yield BoardServer(launch.make_url(HOST, port), line, process)


def read_error(log: Path) -> str:
    """The last line of a log that names an error, or else its last line, without the parts that change."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(Error|error): ", line)]
    text = (errors or lines or ["its log is empty"])[-1]
    return re.sub(r"^\(.*?\)\s*|^error: ", "", text)[:400]


def measure_idle(servers: list[BoardServer]) -> float:
    """Share of a core that servers take while nobody asks them."""
    meter = CpuMeter(frozenset(server.process.pid for server in servers))
    before = meter.read().watched
    time.sleep(IDLE_SECONDS)
    return (meter.read().watched - before) / os.sysconf("SC_CLK_TCK") / IDLE_SECONDS


def judge_cell(cell: Cell, options: BoardOptions, servers: list[BoardServer]) -> Record:
    """The record of a cell. servers: with drafts, and plainly, if it is another one"""
    folder = find_rows(cell, options)
    file = getattr(options, cell.suite, None)
    questions = [f"suite={cell.suite}", f"prompts={file}"] if file else []
    head = [f"checkpoint={HEADS[cell.drafter]}"] if cell.drafter in HEADS else []
    arguments = [
        f"engine={servers[0].url}",
        f"target.name={options.target_name}",
        f"target.dtype={options.target_dtype}",
        f"max_new_tokens={options.max_new_tokens}",
        f"batch={options.batch}",
        f"limit={options.limit or 'null'}",
        f"flags={shlex.join(servers[0].line.words[1:])}",
        f"decode.depth={options.drafts}",
        f"out={folder}",
        *([f"baseline={servers[1].url}"] if len(servers) > 1 else []),
        *(head or ([f"drafter={cell.drafter}"] if cell.drafter != PLAIN else [])),
        *questions,
    ]
    judge.main(arguments)
    record = read_record(folder / "record.json")
    assert isinstance(record, Record)
    return record


# Records of earlier commands


def name_as_judge(cell: Cell) -> dict[str, str]:
    """The names of a cell's drafter, engine and suite in records."""
    head = HEADS.get(cell.drafter)
    drafter = checkpoint.name_checkpoint(Path(head)) if head else cell.drafter
    suite = Path(common.HELDOUT).stem if cell.suite == HELDOUT else cell.suite
    return {"drafter": drafter, "engine": cell.engine, "suite": suite}


def find_record(cell: Cell, options: BoardOptions) -> Record | None:
    """The record that a cell has. Raises ValueError for a file of another form."""
    path = cell.find_file(options.out)
    document = read_record(path) if path.is_file() else None
    return document if isinstance(document, Record) else None


def list_changes(record: Record, cell: Cell, options: BoardOptions) -> list[str]:
    """What the options ask otherwise than a record says. Raises OSError where the questions are not here."""
    protocol, load = record.protocol, record.loads[0]
    num = count_questions(cell.suite, options)
    pairs = {"max_new_tokens": (protocol.max_tokens, options.max_new_tokens)}
    if not load.failed:
        pairs["questions"] = (load.prompts, min(num, options.limit or num))
    if cell.drafter in HEADS and protocol.drafts is not None:
        pairs["drafts"] = (protocol.drafts, options.drafts)
    return [f"{name}={earlier}, now {wanted}" for name, (earlier, wanted) in pairs.items() if earlier != wanted]


def count_questions(suite: str, options: BoardOptions) -> int:
    """The questions of a suite's file."""
    path = Path(getattr(options, suite, None) or common.HELDOUT)
    path = path / SUITE_FILES[suite] if path.is_dir() else path
    with path.open() as file:
        return sum(bool(line.strip()) for line in file)


def find_rows(cell: Cell, options: BoardOptions) -> Path:
    """The folder of a cell's judgement. Where its record is of other options, the rows of these are elsewhere."""
    name, record = cell.name.replace("/", "-"), find_record(cell, options)
    if record is not None and list_changes(record, cell, options):
        name += f"-{options.limit or 'all'}-{options.max_new_tokens}-{options.drafts}"
    return Path(options.scratch, "judged", name)


def run_cell(cell: Cell, options: BoardOptions) -> Record | Absence:
    """The record of a cell, or why there is none. Raises ValueError where the judge fails or an engine is not here."""
    logs = Path(options.scratch, "logs")
    log = logs / f"{cell.name.replace('/', '-')}.log"
    with contextlib.ExitStack() as stack:
        try:
            line = make_line(cell, options, options.port, plain=False)
            servers = [stack.enter_context(open_server(line, options.port, log))]
        except PortTaken:
            raise
        except ValueError as error:
            if "make engines" in str(error):  # what is not installed says nothing of an engine
                raise
            names = name_as_judge(cell)
            return Absence.model_validate({"schema": ABSENCE_SCHEMA, **names, "reason": hide_places(str(error))})
        if cell.engine in DOUBLED and cell.drafter != PLAIN:
            plain = make_line(cell, options, options.port + 1, plain=True)
            servers.append(stack.enter_context(open_server(plain, options.port + 1, log.with_suffix(".plain.log"))))
        record = judge_cell(cell, options, servers)
        idle = measure_idle(servers)
    print(f"{cell.name}: the servers take {idle:.1%} of a core while nobody asks them")
    if idle <= MAX_IDLE or len(servers) == 1:
        return record
    note = f"Both servers were up: idle ones took {idle:.0%} of a core, which slows the one that is asked."
    return record.model_copy(update={"notes": [*record.notes, note]})


def main(arguments: list[str]) -> None:
    options = common.read_options(BoardOptions, __doc__, arguments)
    launch.exit_at_signals()  # servers end, too
    cells, failures = list_cells(options.cells, options.suites), []
    for name in HEADS.values():
        checkpoint.read_document(Path(name))
    for number, cell in enumerate(cells, 1):
        path, start = cell.find_file(options.out), time.monotonic()
        try:
            record = find_record(cell, options)
            changes = list_changes(record, cell, options) if record else []
            if record and not changes:
                print(f"{cell.name}: has a record")
                continue
            if changes:
                print(f"{cell.name}: its record has {'; '.join(changes)}, so it runs again", flush=True)
            document = run_cell(cell, options)
        except (ValueError, OSError) as error:
            failures.append(f"{cell.name}: {files.describe_error(error) if isinstance(error, OSError) else error}")
            print(failures[-1], flush=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(path, document)
        outcome = document.reason if isinstance(document, Absence) else f"tau {document.loads[0].tau}"
        print(f"{number} of {len(cells)}, {cell.name}, {time.monotonic() - start:.0f} s: {outcome}", flush=True)
    if failures:
        raise ValueError(f"{len(failures)} cells have no record, and the same command tries again: {failures[0]}")


if __name__ == "__main__":
    common.run_main(main)

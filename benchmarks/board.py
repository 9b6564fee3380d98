"""Our board: each drafter in each engine on each set of questions, as records of specdec judge in results/board.

    python -m benchmarks.board limit=16 max_new_tokens=64 cells='vllm/*/*'
    python -m benchmarks.board spec_bench=downloads/Spec-Bench gsm8k=downloads/gsm8k
    specdec report board=results/board

A cell is ENGINE/DRAFTER/SUITE. Cells run one after the other; those that have a record are left out, so the same
command continues. Where an engine cannot serve a drafter, its file says why. Engines that cannot leave out drafts run
twice, with drafts and plainly.
"""

import contextlib
import fnmatch
import itertools
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common
from scripts import export, judge
from specdec import checkpoint
from specdec.core import files
from specdec.core.wording import format_count
from specdec.engines import launch
from specdec.engines.exported import FORMATS, ExportedHead
from specdec.engines.start_lines import LINES, EngineStart, StartLine
from specdec.measuring.privacy import hide_places
from specdec.measuring.record import ABSENCE_SCHEMA, Absence, Record, read_record, write_record
from specdec.measuring.records import PLAIN

SPECDEC = "specdec"
ENGINES = {SPECDEC: "specdec", "vllm": "vLLM", "llamacpp": "llama.cpp", "transformers": "transformers",
           "openvino": "OpenVINO GenAI"}  # fmt: skip
HEADS = {"eagle3": "checkpoints/shipped/eagle3", "mtp": "checkpoints/shipped/mtp"}
LOOKUPS = ("suffix", "ngram")
HELDOUT = "heldout"
SUITES = ("spec_bench", "gsm8k")
DOUBLED = ("vllm", "llamacpp", "openvino")  # engines that cannot leave out drafts
ALWAYS_DRAFTS = "specdec serve always has a drafter; records of its drafters have its plain speed, too."
VLLM_FLAGS = "--no-enable-prefix-caching --gpu-memory-utilization 0.2"  # answers share nothing; two servers at once
HOST = "127.0.0.1"  # address of all servers
PATIENCE = 240  # seconds that a server has to start


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
        return [name for name in SUITES if getattr(self, name)] or [HELDOUT]


@dataclass(frozen=True)
class Cell:
    engine: str
    drafter: str
    suite: str

    @property
    def name(self) -> str:
        return f"{self.engine}/{self.drafter}/{self.suite}"

    @property
    def file_name(self) -> str:
        return self.name.replace("/", "-")


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


def judge_cell(cell: Cell, options: BoardOptions, line: StartLine, *, has_plain: bool) -> Record:
    """The record of a cell. line: command of its server; has_plain: whether another server answers plainly"""
    folder = Path(options.scratch, "judged", cell.file_name)
    file = getattr(options, cell.suite, None)
    urls = [launch.make_url(HOST, options.port + number) for number in range(2)]
    drafter = f"checkpoint={HEADS[cell.drafter]}" if cell.drafter in HEADS else f"drafter={cell.drafter}"
    arguments = [
        f"engine={urls[0]}",
        f"target.name={options.target_name}",
        f"target.dtype={options.target_dtype}",
        f"max_new_tokens={options.max_new_tokens}",
        f"batch={options.batch}",
        f"limit={options.limit or 'null'}",
        f"flags={shlex.join(line.words[1:])}",
        f"decode.depth={options.drafts}",
        f"out={folder}",
        *([f"baseline={urls[1]}"] if has_plain else []),
        *([drafter] if cell.drafter != PLAIN else []),
        *([f"suite={cell.suite}", f"prompts={file}"] if file else []),
    ]
    judge.main(arguments)
    record = read_record(folder / "record.json")
    assert isinstance(record, Record)
    return record


def name_as_judge(cell: Cell) -> dict[str, str]:
    """The names of a cell's drafter, engine and suite in records."""
    head = HEADS.get(cell.drafter)
    drafter = checkpoint.name_checkpoint(Path(head)) if head else cell.drafter
    suite = Path(common.HELDOUT).stem if cell.suite == HELDOUT else cell.suite
    return {"drafter": drafter, "engine": cell.engine, "suite": suite}


def run_cell(cell: Cell, options: BoardOptions) -> Record | Absence:
    """The record of a cell, or why there is none. Raises ValueError where the judge fails or an engine is not here."""
    has_plain = cell.engine in DOUBLED and cell.drafter != PLAIN
    ports = [options.port, options.port + 1][: 1 + has_plain]
    for port in ports:  # that it is taken says nothing of the engine
        launch.open_port(HOST, port).close()
    with contextlib.ExitStack() as stack:
        try:
            line = start(cell, options, options.port, stack, plain=False)
        except ValueError as error:
            if "make engines" in str(error):  # what is not installed says nothing of an engine
                raise
            names = name_as_judge(cell)
            return Absence.model_validate({"schema": ABSENCE_SCHEMA, **names, "reason": hide_places(str(error))})
        if has_plain:
            start(cell, options, options.port + 1, stack, plain=True)
        return judge_cell(cell, options, line, has_plain=has_plain)


def start(cell: Cell, options: BoardOptions, port: int, stack: contextlib.ExitStack, *, plain: bool) -> StartLine:
    """Starts a server of a cell, which ends with the stack. Raises ValueError where it does not start."""
    line = make_line(cell, options, port, plain=plain)
    log = Path(options.scratch, "logs", f"{cell.file_name}{'.plain' * plain}.log")
    stack.enter_context(launch.open_server(line, HOST, port, log=log, patience=PATIENCE))
    return line


def describe_record(record: Record, path: Path) -> str:
    """A sentence on the record of a cell, which may be of other options. path: its file"""
    questions = format_count(record.loads[0].prompts, "question")
    return (
        f"has a record of {questions} with max_new_tokens={record.protocol.max_tokens}: delete {path} to run it again"
    )


def main(arguments: list[str]) -> None:
    options = common.read_options(BoardOptions, __doc__, arguments)
    launch.exit_at_signals()  # servers end, too
    cells, failures = list_cells(options.cells, options.suites), []
    for name in HEADS.values():
        checkpoint.read_document(Path(name))
    for number, cell in enumerate(cells, 1):
        path, start = Path(options.out, f"{cell.file_name}.json"), time.monotonic()
        try:
            record = read_record(path) if path.is_file() else None
            if isinstance(record, Record):
                print(f"{cell.name}: {describe_record(record, path)}")
                continue
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

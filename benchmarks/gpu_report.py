"""The report of a GPU: whether all parts work on it, and how fast, in three parts of ten minutes, without a network.

    python -m benchmarks.gpu_report                 # as make gpu does; again: what is missing or has failed
    python -m benchmarks.gpu_report part=1          # decoding; 2: training and validation; 3: checks
    python -m benchmarks.gpu_report dry_run=true    # every line on a CPU, with a tiny target; its figures mean nothing

Each figure is written at once, as a line of NAME.jsonl. Figures of a group share a child process, its target and what
it has compiled. One that fails, or takes too long, is written with its error, and the next one begins. The page NAME.md
is made from the lines. Where a machine loses its disk: out= may be a folder elsewhere, and earlier= takes the lines of
an earlier run over. The target of the figures has random weights. docs/gpu.md explains them.
"""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from benchmarks import common
from benchmarks.gpu import checks, decoding, training
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.children import Children, run_figures
from benchmarks.gpu.figures import Figure, FigureFile, choose_path, list_missing
from benchmarks.gpu.machine import Machine, make_machine
from benchmarks.gpu.options import GpuReportOptions, check_options, make_tiny
from benchmarks.gpu.page import format_page
from specdec.core import files
from specdec.proposers import costs

DRY_SECONDS = 0.05  # seconds of a measurement of costs in a dry run


def list_figures(options: GpuReportOptions) -> list[Figure]:
    """All figures, part by part."""
    first = [*checks.list_first_figures(options), *decoding.list_figures(options)]
    return [*first, *training.list_figures(options), *checks.list_last_figures(options)]


def select_groups(figures: list[Figure], stage: int | None) -> dict[str, list[Figure]]:
    """The figures of a part by their groups, in order. stage: None for all parts"""
    groups: dict[str, list[Figure]] = {}
    for figure in figures:
        if stage in (None, figure.stage):
            groups.setdefault(figure.group, []).append(figure)
    return groups


@contextlib.contextmanager
def shortened(machine: Machine) -> Iterator[None]:
    """Within, a dry run measures costs of passes for a moment only."""
    with mock.patch.object(costs, "SECONDS", DRY_SECONDS) if machine.stand_in else contextlib.nullcontext():
        yield


def run_group(options: GpuReportOptions, group: str, file: FigureFile) -> None:
    """Measures what is missing of a group in this process."""
    machine = make_machine(dry_run=options.dry_run)
    figures = select_groups(list_figures(options), None)[group]
    missing = list_missing(figures, file, redo=options.redo, since=options.since)
    with shortened(machine):
        run_figures(missing, Bench(options, machine), file)


def write_page(options: GpuReportOptions, file: FigureFile) -> str:
    """Writes the page from the lines, and returns it."""
    figures = [figure for figure in list_figures(options) if options.part in (None, figure.stage)]
    page = format_page(file.read(), figures)
    files.write_text(file.path.with_suffix(".md"), page)
    return page


def main(arguments: list[str]) -> None:
    options = common.read_options(GpuReportOptions, __doc__, arguments)
    check_options(options)
    options = make_tiny(options) if options.dry_run else options
    file = FigureFile(choose_path(options.out, dry_run=options.dry_run))
    if options.only is not None:
        run_group(options, options.only, file)
        return
    if options.minutes:
        make_machine(dry_run=options.dry_run)  # refuses at once
    if options.earlier is not None:
        file.take_over(Path(options.earlier))
    children, groups = Children(options, file, arguments), select_groups(list_figures(options), options.part)
    for group, figures in groups.items():
        children.run_group(group, figures)
        write_page(options, file)
    print(write_page(options, file))
    finished = {name for name, line in file.read().items() if "values" in line}
    num_open = sum(figure.name not in finished for figures in groups.values() for figure in figures)
    if num_open:
        raise SystemExit(f"{num_open} figures failed or are missing. The same command tries them again.")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else a child would outlive this process
    common.run_main(main)

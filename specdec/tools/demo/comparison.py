"""Part 3 of the demo: questions that are decoded plainly and in three ways with drafts, in turn."""

import time
from collections.abc import Iterator
from pathlib import Path

import rich.table

from specdec.core import progress
from specdec.core.sampling import Sampling
from specdec.heads.base import Drafter
from specdec.loading import OpenTarget
from specdec.measuring import report
from specdec.measuring.measure import MeasureSettings, Method, PromptResult, measure
from specdec.measuring.page import format_figure
from specdec.options import decoding, proposers
from specdec.proposers.base import Proposer
from specdec.text.conversations import Prompt
from specdec.tools.demo.budget import COMPARED_TOKENS, DRAFTING, until


def make_auto(opened: OpenTarget, head: str) -> Proposer:
    """`auto` with a head, with the costs of this machine measured. head: checkpoint"""
    config = proposers.configure(proposers.AUTO, settings={}, drafting=DRAFTING, checkpoint=head)
    proposer = proposers.make_proposer(config, opened.target)
    decoding.show_measuring(proposer)
    return proposer


def compare_ways(
    opened: OpenTarget,
    heads: dict[str, Drafter],
    trained: Path,
    prompts: list[Prompt],
    *,
    seconds: float,
) -> tuple[list[list[str]], int]:
    """Decodes questions in each way, in turn. Returns the rows of `tabulate_ways`, and the number of questions.

    heads: drafters by name, the trained one last; trained: folder of the trained one
    """
    methods = [Method(name, opened.target, DRAFTING.proposer(head), DRAFTING) for name, head in heads.items()]
    methods.append(Method(f"auto with {list(heads)[-1]}", opened.target, make_auto(opened, str(trained)), DRAFTING))
    settings = MeasureSettings(Sampling(temperature=0), opened.stop, COMPARED_TOKENS)
    deadline = time.perf_counter() + seconds

    def track(groups: list) -> Iterator[list]:
        return until(deadline, progress.track_items(groups, "decoding", unit="questions"), least=2)

    results = [answers[0] for answers in measure(methods, prompts, settings, progress=track)]
    return tabulate_ways([method.name for method in methods], results), len(results)


def make_table(ways: list[list[str]], num_questions: int) -> rich.table.Table:
    """The rows of `compare_ways` for a terminal of 80 columns."""
    title = f"{num_questions} questions of the last days, at most {COMPARED_TOKENS} tokens each, in turn"
    table = rich.table.Table(title=title, title_justify="left")
    for head in ("way to decode", "tau", "tokens/s", "times plain (95 %)"):
        table.add_column(head, no_wrap=True)
    for way in ways:
        table.add_row(*way)
    return table


def tabulate_ways(names: list[str], results: list[dict[str, PromptResult]]) -> list[list[str]]:
    """Rows of way, tau, tokens/s and speedup; plain decoding first."""
    plain = report.compute_rate([result[names[0]] for result in results], "plain")
    rows = [["plain decoding", "1.00", f"{plain:.1f}", "1.00"]]
    for name in names:
        answers = [result[name] for result in results]
        interval = report.bootstrap_interval(answers, report.compute_speedup, 0)
        figures = format_figure(report.compute_tau(answers)), format_figure(report.compute_rate(answers), digits=1)
        rows.append([name, *figures, format_figure(report.compute_speedup(answers), interval)])
    return rows

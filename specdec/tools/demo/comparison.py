"""Parts 1 and 3 of the demo: an answer, and questions, that are decoded plainly and with drafts."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rich.table

from specdec.core import progress
from specdec.core.generation import Generation
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.heads.base import Drafter
from specdec.loading import OpenTarget
from specdec.measuring import report
from specdec.measuring.measure import MeasureSettings, Method, PromptResult, compute_top2_gap, measure
from specdec.measuring.page import format_figure
from specdec.measuring.streamed_answer import print_answer, print_comparison, print_rate
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


def show_head(
    opened: OpenTarget, head: str, prompt: list[int], max_new_tokens: int, console: progress.Results
) -> dict[str, Any]:
    """Streams an answer plainly and with `auto`, and says how they compare. head: checkpoint. Returns no results."""
    sampling, runner = Sampling(temperature=0), DRAFTING.runner()
    settings: dict[str, Any] = {"sampling": sampling, "stop": opened.stop, "runner": runner}
    plain = Decoder(opened.target, None, **settings)
    drafted = DRAFTING.decoder(opened.target, make_auto(opened, head), **settings)
    answers: list[Generation] = []
    for name, decoder in (("plain decoding", plain), ("with drafts, accepted ones in green", drafted)):
        decoder.generate([prompt], 4)  # a warm-up
        console.say(f"{name}:")
        answers.append(print_answer(opened, decoder, prompt, max_new_tokens, console, seed=0, constraints=None))
    plain_answer, drafted_answer = answers
    gap = compute_top2_gap(opened.target, prompt, drafted_answer.tokens[0], plain_answer.tokens[0], sampling)
    print_rate(drafted_answer, console, title=proposers.AUTO, temperature=sampling.temperature)
    print_comparison(drafted_answer, plain_answer, sampling, gap, console)
    return {}


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

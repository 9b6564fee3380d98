"""Decodes every prompt plainly and with drafts, in turn, and reports what the drafts gain.

    specdec evaluate checkpoint=checkpoints/shipped/eagle3 decode.temperature=0,1 limit=16
    specdec evaluate proposer=ngram prompts=data/prompts_copy.jsonl
    specdec evaluate checkpoint=checkpoints/a,checkpoints/b proposers=auto,suffix chains=2,4 trees=4x3x8 out=comparison
    specdec evaluate checkpoint=checkpoints/a batches=1,4,16 ignore_stop=true
    specdec evaluate checkpoint=checkpoints/a,checkpoints/b answers=my_answers.jsonl
    specdec evaluate checkpoint=checkpoints/a explain=true

Prints tau (the acceptance length: tokens emitted per target pass of a round, bonus or correction token counted), survival by
depth, speedup and whether answers are unchanged, with 95 % intervals over prompts. One method gives a report, OUT. Several heads,
proposers, shapes or batch sizes are compared in the folder OUT: comparison.html, report.json, and rows.jsonl with each finished
prompt, so that after Ctrl-C or a kill the same command continues. A proposer that holds a trained head is decoded with each of
the heads. With answers= nothing is decoded: tau of a chain follows from answers that the target wrote (docs/methods.md, section 2).
"""

from helpers import comparing, decoding, explaining, grammar_figures, loading, proposers
from helpers.options import MAIN, make_room, option, options, run, split

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import rich.console
import rich.table
from transformers import PreTrainedTokenizerBase

from specdec import checkpoint
from specdec.core import files, hub, rules
from specdec.core.clock import fastest_batch
from specdec.decoding.drafting import Drafting
from specdec.export.cards import SERVED
from specdec.heads.base import Drafter
from specdec.measuring import report as figures
from specdec.measuring.measure import MeasureSettings, Method, Prompt, PromptResult, measure
from specdec.measuring.report import TAU, Report, summarise_by_category
from specdec.proposers.auto import Auto
from specdec.proposers.heads import HeadProposer
from train import display, progress, validate
from train.data import reading
from train.data import rows as data
from train.validate import Written

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Evaluate(loading.PromptOptions, decoding.ShapesOptions, proposers.SeveralOptions):
    proposer: str | None = option(
        None,
        "what drafts: the name of a file in conf/proposer, where its settings are explained; null: a head's fixed shape",
    )
    chains: str = option(
        "", "comma list of chain lengths to compare; without chains= and trees= decode.depth and others"
    )
    trees: str = option("", "comma list of trees to compare, each DEPTHxWIDTHxNODES")
    batch: int | None = option(1, "prompts decoded at once; null: the fastest number, which is measured first")
    batches: str = option(
        "", "comma list of batch sizes to compare; prompts are repeated for batches larger than their number"
    )
    max_new_tokens: int = 128
    ignore_stop: bool = option(False, "answers go on after stop tokens, so that batches stay full")
    answers: str | None = option(
        None, "conversations whose last message the target wrote, to replay instead of decoding"
    )
    hold_out: int | None = option(
        60, "of answers=: use this many rows, the first at temperature 0; null: all rows at decode.temperature"
    )
    length: int = option(1024, "of answers=: longer rows are cut to this many tokens")
    auto: bool = option(True, "beside a head's fixed shape, also decode with proposer=auto")
    explain: bool = option(False, "also show what auto measured, expected and chose")
    seed: int = option(0, "seed of sampling")
    out: str | None = option(
        None, "report to write, of a comparison its folder; null: report.json, or comparison", folder=None
    )
    target: loading.SharedTargetOptions = field(default_factory=loading.SharedTargetOptions)
    decode: decoding.DecodeOptions = field(default_factory=decoding.DecodeOptions)


def main(arguments: list[str] | None = None) -> None:
    chosen = options(Evaluate, __doc__, arguments)
    console = progress.Results()
    if chosen.answers is not None:
        return replay(chosen, console)
    several = len(split(chosen.checkpoint)) > 1 or any((chosen.proposers, chosen.chains, chosen.trees, chosen.batches))
    out = Path(chosen.out or ("comparison" if several else "report.json"))
    make_room(f"out={out}", out, folder=several)
    if several:
        if chosen.explain or chosen.target.tp > 1:
            raise ValueError("explain=true and target.tp= are for one method: compare without them.")
        return comparing.compare(chosen, out, console)
    drafting, samplings = chosen.decode.drafting(), chosen.decode.samplings()
    usual = proposers.HEAD if chosen.proposer is None and not chosen.explain else chosen.proposer
    given = proposers.ProposerOptions(checkpoint=chosen.checkpoint or None, proposer=usual, settings=chosen.settings)
    loaded = proposers.load(given, chosen.target, drafting)
    if isinstance(loaded.proposer, HeadProposer):  # its own settings may have replaced those of decode
        drafting = replace(drafting, **asdict(loaded.proposer.shape), children=loaded.proposer.children)
    methods = make_methods(chosen, loaded, drafting)
    prompts = loading.load_prompts(chosen, loaded, split(chosen.checkpoint))
    ruled = decoding.Ruled.of(chosen.decode.grammar, loaded)
    if ruled:
        prompts = ruled.apply(prompts)
    head = loaded.checkpoint and hub.pinned(loaded.checkpoint)  # with the commit, of a head on the Hub
    console.print(f"{head or loaded.name} on {loaded.target.name}; tau: {TAU}")
    settings = MeasureSettings(
        samplings[0],
        set() if chosen.ignore_stop else loaded.stop,
        chosen.max_new_tokens,
        seed=chosen.seed,
        batch=chosen.batch or 1,
        grammars=ruled.grammars if ruled else None,
    )
    if chosen.batch is None:
        settings = replace(settings, batch=find_batch(methods[0], prompts, settings))
        console.print(f"decoding {settings.batch} prompts at once, which is fastest here; latency is that of the batch")
    reports, more = [], dict[str, list[dict]]()
    for sampling in samplings:
        report, results = evaluate(methods, prompts, replace(settings, sampling=sampling), chosen.prompts)
        reports.append(report)
        display.validation(console, report, loaded.title)
        console.print(by_category(report))
        if ruled:
            answers = [(result.prompt, result.drafted.tokens[0]) for result in results]
            more.setdefault("grammar", []).append(grammar_figures.measure(ruled.grammars, loaded, answers))
            console.say(grammar_figures.sentence(more["grammar"][-1]))
        auto = methods[-1].proposer
        if chosen.explain and isinstance(auto, explaining.ExplainedAuto):
            seconds = sum((result.auto or result.drafted).seconds for result in results)
            more.setdefault("explained", []).append(explaining.explain(auto, settings.batch, seconds))
            explaining.show(console, more["explained"][-1])
    document = {
        **reports[0].to_json(),
        "definition_of_tau": TAU,
        "served": read_served(loaded.checkpoint, console),
        "settings": {
            **asdict(chosen),
            "checkpoint": head,
            "batch": settings.batch,
            "drafting": asdict(drafting),
            **loading.machine(loaded.target),
        },
        "temperatures": [report.to_json() for report in reports],
        **more,
    }
    if MAIN:
        files.write_text(out, json.dumps(document, indent=2) + "\n")
    console.print(f"written: {out}")


def make_methods(chosen: Evaluate, loaded: proposers.Chosen, drafting: Drafting) -> list[Method]:
    """What is measured: the proposer, and beside a head's fixed shape auto, which is last."""
    target, proposer = loaded.target, loaded.proposer
    beside: Auto | None = proposer if isinstance(proposer, Auto) else None
    if chosen.auto and isinstance(proposer, HeadProposer) and loaded.name == proposers.HEAD:
        beside = Auto.usual(target, proposer)
    if chosen.explain:
        if beside is None:
            raise ValueError(f"explain=true explains proposer=auto, which {loaded.name} is not: leave proposer= out.")
        beside = explaining.ExplainedAuto.of(beside)
    if isinstance(proposer, Auto):
        assert beside is not None
        proposer, beside = beside, None
    for each in filter(None, (proposer, beside)):
        decoding.show_measuring(each)
    head = proposer.drafter if isinstance(proposer, HeadProposer) else None
    methods = [Method("drafted", target, proposer, drafting, head=head)]
    return methods + ([Method(AUTO, target, beside, drafting)] if beside else [])


def find_batch(method: Method, prompts: list[Prompt], settings: MeasureSettings) -> int:
    """The number of prompts at once that gives the most tokens/s."""
    target, drafting = method.target, method.drafting
    shared = {"sampling": settings.sampling, "stop": settings.stop, "runner": drafting.runner()}
    decoder = drafting.decoder(target, method.proposer, **shared)

    def rate(tokens: list[list[int]]) -> float:
        generation = decoder.generate(tokens, min(32, settings.max_new_tokens))
        here = sum(map(len, generation.tokens)) / (generation.prefill_seconds + generation.seconds)
        return target.share.all_say(here)[0]

    return fastest_batch(rate, [prompt.tokens for prompt in prompts])


def evaluate(
    methods: list[Method], prompts: list[Prompt], settings: MeasureSettings, source: str
) -> tuple[Report, list[PromptResult]]:
    """The report at one temperature, and what it is made of."""
    title = f"temperature {settings.sampling.temperature:g}"
    track = lambda groups: progress.track(groups, title, unit="prompts", size=len)
    first, *beside = methods
    results = [
        replace(each[first.name], auto=each[AUTO].drafted if beside else None)
        for group in measure(methods, prompts, settings, source=source, progress=track)
        for each in group
    ]
    report = summarise_by_category(
        results,
        depth=first.proposer.depth,
        temperature=settings.sampling.temperature,
        adapted=first.target.adapted,
        lossy=first.drafting.rule in rules.LOSSY,
    )
    if not beside or report.auto is None:
        return report, results
    auto = beside[0].proposer
    assert isinstance(auto, Auto)
    account = auto.account
    chosen_by = {"predicted_speedup": auto.predicted(), "head_rounds": account.head, "trials": account.trials}
    return replace(report, auto=report.auto | chosen_by), results


def by_category(report: Report) -> rich.table.Table:
    table = rich.table.Table(title=f"by category, temperature {report.temperature:g}", title_justify="left")
    table.add_column("category")
    for name in ("prompts", "tau", "95 % interval", "speedup", "95 % interval"):
        table.add_column(name, justify="right")
    for name, part in report.by_category.items():
        assert part.tau_ci is not None and part.speedup_ci is not None
        intervals = ["{:.2f} .. {:.2f}".format(*interval) for interval in (part.tau_ci, part.speedup_ci)]
        table.add_row(name, str(part.num_prompts), f"{part.tau:.2f}", intervals[0], f"{part.speedup:.2f}", intervals[1])
    return table


def read_served(folder: Path | None, console: rich.console.Console) -> dict:
    """What benchmarks/check_engines.py measured with this checkpoint in engines, which is printed; empty if nothing was."""
    path = folder and folder / SERVED
    served = checkpoint.read_json(path) if path and path.exists() else {}
    for engine, measured in served.items():
        console.print(
            f"{engine}: tau {measured['served_tau']:.3f}, here {measured['tau']:.3f} (chain of {measured['num_drafts']}, "
            f"{measured['num_prompts']} prompts, {measured['dtype']}, temperature 0)"
        )
    return served


# Replay along given answers


def replay(chosen: Evaluate, console: progress.Results) -> None:
    """Prints tau and survival by depth of each head's chain, and how the others differ from the first."""
    if not split(chosen.checkpoint):
        raise ValueError("answers= replays trained heads: give checkpoint=DIR.")
    for folder in split(chosen.checkpoint):
        if loading.adapts(folder):
            raise ValueError(f"{folder} adapts its target, which did not write these answers: leave answers= out.")
    sampling = chosen.decode.sampling()
    heads = loading.load_runs(chosen.checkpoint, chosen.target)
    texts, categories = read_answers(chosen, loading.shared_target(heads, chosen.target).tokenizer)
    first: list[figures.PromptCounts] = []
    for number, head in enumerate(heads):
        if not isinstance(head.drafter, Drafter):
            raise ValueError(f"{head.folder} does not draft by steps, so it cannot be replayed: leave answers= out.")
        judged = validate.replay_texts(head.drafter, texts, depth=chosen.decode.depth, what="replay")
        counts = validate.count_replays(judged)
        num_rounds = sum(rounds for rounds, _ in judged)
        survival = [sum(column) / num_rounds for column in zip(*(accepted.tolist() for _, accepted in judged))]
        low, high = figures.interval(counts, figures.tau, 0)
        console.print(
            f"{head.folder}: replayed tau {figures.tau(counts):.3f} ({low:.2f} .. {high:.2f}), chain of {len(survival)}, temperature "
            f"{sampling.temperature:g}, {len(texts)} answers, {sum(len(text.answer) - 1 for text in texts)} tokens, survival by depth "
            + " ".join(f"{value:.3f}" for value in survival)
        )
        if len(names := sorted(set(categories))) > 1:
            of = {name: [count for each, count in zip(categories, counts) if each == name] for name in names}
            console.print("  " + ", ".join(f"{name} {figures.tau(part):.2f}" for name, part in of.items()))
        first = counts if number == 0 else first
        if number > 0:
            change, (low, high) = figures.tau_difference(counts, first)
            console.print(f"  {change:+.3f} ({low:+.3f} .. {high:+.3f}) against {heads[0].folder}, the same answers")


def read_answers(chosen: Evaluate, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Written], list[str]]:
    """The answers to replay, all written at one temperature, cut, and their categories. Raises ValueError if there is none."""
    source, temperature = str(chosen.answers), chosen.decode.sampling().temperature
    rows = reading.load_conversations(source, split=chosen.split)
    if chosen.hold_out is not None:
        rows = [rows[i] for i in reading.hold_out([row.get("temperature") == 0 for row in rows], chosen.hold_out)]
    rows = [row for row in rows if row.get("temperature", temperature) == temperature]
    if not rows:
        raise ValueError(f"{source} has no row at decode.temperature={temperature:g}.")
    texts, categories = [], []
    for row in rows:
        with reading.at(source):
            encoded = data.encode(tokenizer, row)
        start, stop = data.last_answer(encoded)
        answer = encoded.tokens[start : min(stop, chosen.length)]
        if len(answer) >= 2:
            texts.append(Written(encoded.tokens[:start], answer, temperature))
            categories.append(encoded.category)
    if not texts:
        raise ValueError(f"No answer has a second token within length={chosen.length}: raise it.")
    return texts, categories


if __name__ == "__main__":
    run(main)

"""Decodes every prompt plainly and with drafts, in turn, and reports what the drafts gain.

    specdec evaluate checkpoint=checkpoints/shipped/eagle3 decode.temperature=0,1 limit=16
    specdec evaluate proposer=ngram prompts=data/prompts_copy.jsonl
    specdec evaluate checkpoint=checkpoints/a,checkpoints/b proposers=auto,suffix chains=2,4 trees=4x3x8 out=comparison
    specdec evaluate checkpoint=checkpoints/a batches=1,4,16 ignore_stop=true
    specdec evaluate checkpoint=checkpoints/a,checkpoints/b answers=my_answers.jsonl
    specdec evaluate checkpoint=checkpoints/a,checkpoints/b choose=true loads=1,4,16,64 out=choice
    specdec evaluate engine=http://localhost:8000 checkpoint=checkpoints/a requests=1,4,16,64 out=served

Prints tau (the acceptance length: tokens emitted per target pass of a round, bonus or correction token counted), survival by
depth, speedup and whether answers are unchanged, with 95 % intervals over prompts. One method gives a report, OUT. Several heads,
proposers, shapes or batch sizes are compared in the folder OUT: comparison.html, report.json, and rows.jsonl with each finished
prompt, so that after Ctrl-C or a kill the same command continues. A proposer that holds a trained head is decoded with each of
the heads. With answers= nothing is decoded: tau of a chain follows from answers that the target wrote (docs/methods.md, section 2).
With engine= a running server is judged, by its own counters and streams (docs/serving.md); checkpoint= is then the head it serves.
"""

from helpers import choosing, comparing, decoding, loading, proposers, serving
from helpers.options import make_room, option, options, run, split

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from specdec.core import files, hub
from specdec.decoding.drafting import Drafting
from specdec.heads.base import Drafter
from specdec.measuring import report as figures
from specdec.measuring import served
from specdec.measuring.measure import MeasureSettings, Method, Prompt, PromptResult, measure
from specdec.measuring.report import TAU, Report
from specdec.proposers.auto import Auto
from specdec.proposers.heads import HeadProposer
from train import display, progress, validate
from train.data import reading
from train.data import rows as data
from train.data.packing import warn_of_writers
from train.validate import Written

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    checkpoint: str = option("", loading.CHECKPOINTS)
    proposer: str | None = option(
        None,
        "what drafts: the name of a file in conf/proposer, where its settings are explained; null: a head's fixed shape",
    )
    proposers: str = option("", "comma list of files in conf/proposer, to compare too")
    settings: dict[str, str] = field(
        default_factory=dict,
        metadata={"prefix": "proposer.", "help": "KEY=VALUE, with proposers= NAME.KEY=VALUE: settings of a proposer, see "
                                                 "conf/proposer; checkpoint=DIR: its head"},
    )  # fmt: skip
    chains: str = option(
        "", "comma list of chain lengths to compare; without chains= and trees= decode.depth and others"
    )
    trees: str = option("", "comma list of trees to compare, each DEPTHxWIDTHxNODES")
    prompts: str = option("data/prompts_heldout.jsonl", "rows with a prompt or messages: JSONL, folder or dataset")
    split: str | None = option(None, loading.SPLIT)
    thinking: bool | None = option(
        None, f"{loading.THINKING}; null: as the checkpoint was trained, else the template's default"
    )
    limit: int | None = option(None, "decode this many prompts, spread over the file; null: all")
    batch: int = option(1, "prompts decoded at once")
    batches: str = option(
        "", "comma list of batch sizes to compare; prompts are repeated for batches larger than their number"
    )
    max_new_tokens: int = option(128, "longest answer, in tokens")
    ignore_stop: bool = option(False, "answers go on after stop tokens, so that batches stay full")
    answers: str | None = option(
        None, "conversations whose last message the target wrote, to replay instead of decoding"
    )
    hold_out: int | None = option(
        60, "of answers=: use this many rows, the first at temperature 0; null: all rows at decode.temperature"
    )
    length: int = option(1024, "of answers=: longer rows are cut to this many tokens")
    engine: str | None = option(
        None, "URL of a running server to judge instead of decoding: vLLM, SGLang, llama.cpp, ours or alike"
    )
    plain: str | None = option(None, "of engine=: URL of a server of the same model without drafts, to compare speeds")
    model: str | None = option(None, "of engine=: name of the model in requests; null: the server's first")
    requests: str = option("1", "of engine=: comma list of how many requests are under way at once")
    timeout: float = option(120.0, "of engine=: seconds without a word after which a request is sent again")
    auto: bool = option(True, "beside a head's fixed shape, also decode with proposer=auto")
    choose: bool = option(
        False, "which drafter and how many drafts pay at which load, without decoding at each of them"
    )
    loads: str = option(
        "1,2,4,8,16,32,64,128,256", "of choose=true: comma list of how many answers are written at once"
    )
    contexts: str = option(
        "", "of choose=true: comma list of tokens before a round; empty: what prompts= and their answers have"
    )
    costs: str = option(
        "", "of choose=true: a machine of conf/machine, an engine's files, or an earlier choice.json; empty: timed here"
    )
    seed: int = option(0, "seed of sampling")
    out: str | None = option(
        None,
        "report to write, of a comparison or a server its folder; null: report.json, comparison or served",
        folder=None,
    )
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: decoding.DecodeOptions = field(default_factory=decoding.DecodeOptions)


def main(arguments: list[str] | None = None) -> None:
    chosen = options(Evaluate, __doc__, arguments)
    console = progress.Results()
    if chosen.choose:
        return choosing.choose(chosen, Path(chosen.out or "choice"), console)
    if chosen.answers is not None:
        return replay(chosen, console)
    if chosen.engine is not None:
        out = Path(chosen.out or "served")
        make_room(f"out={out}", out, folder=True)
        return serving.judge(chosen, out, console)
    several = len(split(chosen.checkpoint)) > 1 or any((chosen.proposers, chosen.chains, chosen.trees, chosen.batches))
    out = Path(chosen.out or ("comparison" if several else "report.json"))
    make_room(f"out={out}", out, folder=several)
    if not several:
        return measure_one(chosen, out, console)
    comparing.compare(chosen, out, console)


def measure_one(chosen: Evaluate, out: Path, console: progress.Results) -> None:
    """Decodes with one method, and with auto beside a head's fixed shape."""
    given = proposers.ProposerOptions(
        checkpoint=chosen.checkpoint or None, proposer=chosen.proposer or proposers.HEAD, settings=chosen.settings
    )
    loaded = proposers.load(given, chosen.target, chosen.decode.drafting())
    methods = make_methods(chosen, loaded, chosen.decode.drafting())
    prompts = loading.load_prompts(chosen, loaded)
    head = loaded.checkpoint and hub.pinned(loaded.checkpoint)  # with the commit, of a head on the Hub
    console.print(f"{head or loaded.name} on {loaded.target.name}; tau: {TAU}")
    stop = set() if chosen.ignore_stop else loaded.stop
    promise = served.measure(loaded.target, methods[0].proposer)
    reports = []
    for sampling in chosen.decode.samplings():
        settings = MeasureSettings(sampling, stop, chosen.max_new_tokens, chosen.seed, chosen.batch)
        report, _ = evaluate(methods, prompts, settings, chosen.prompts)
        report = promise.add_to(report) if promise else report
        reports.append(report)
        display.validation(console, report, loaded.title)
        parts = ", ".join(f"{name} {part.tau:.2f}" for name, part in report.by_category.items())
        console.say(f"  tau by category: {parts}")
    document = {
        **reports[0].to_json(),
        "definition_of_tau": TAU,
        "settings": {
            **asdict(chosen),
            "checkpoint": head,
            "drafting": asdict(methods[0].drafting),
            **loading.machine(loaded.target),
        },
        "temperatures": [report.to_json() for report in reports],
    }
    files.write_text(out, json.dumps(document, indent=2) + "\n")
    console.print(f"written: {out}")


def make_methods(chosen: Evaluate, loaded: proposers.Chosen, drafting: Drafting) -> list[Method]:
    """What is measured: the proposer, and beside a head's fixed shape auto, which is last."""
    target, proposer = loaded.target, loaded.proposer
    methods = [Method("drafted", target, proposer, drafting)]
    if isinstance(proposer, HeadProposer):  # its own settings may have replaced those of decode
        drafting = replace(drafting, **asdict(proposer.shape), children=proposer.children)
        methods = [Method("drafted", target, proposer, drafting, head=proposer.drafter)]
        if chosen.auto and loaded.name == proposers.HEAD:
            methods.append(Method(AUTO, target, Auto.usual(target, proposer), drafting))
    for method in methods:
        decoding.show_measuring(method.proposer)
    return methods


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
    report = comparing.summarise(first, results, settings.sampling.temperature)
    auto = methods[-1].proposer
    if report.auto is None or not isinstance(auto, Auto):
        return report, results
    account = auto.account
    chosen_by = {"predicted_speedup": auto.predicted(), "head_rounds": account.head, "trials": account.trials}
    return replace(report, auto=report.auto | chosen_by), results


# Replay along given answers


def replay(chosen: Evaluate, console: progress.Results) -> None:
    """Prints tau and survival by depth of each head's chain, and how the others differ from the first."""
    if not split(chosen.checkpoint):
        raise ValueError("answers= replays trained heads: give checkpoint=DIR.")
    for folder in split(chosen.checkpoint):
        if loading.head_class(folder).adapts_target:
            raise ValueError(f"{folder} adapts its target, which did not write these answers: leave answers= out.")
    sampling = chosen.decode.sampling()
    heads = loading.load_runs(chosen.checkpoint, chosen.target)
    shared = loading.shared_target(heads, chosen.target)
    texts = read_answers(chosen, shared.tokenizer, shared.target.fingerprint())
    first: list[figures.PromptCounts] | None = None
    for head in heads:
        if not isinstance(head.drafter, Drafter):
            raise ValueError(f"{head.folder} does not draft by steps, so it cannot be replayed: leave answers= out.")
        judged = validate.replay_texts(head.drafter, texts, depth=chosen.decode.depth, what="replay")
        counts = validate.count_replays(judged)
        num_rounds = sum(each.counted[0] for each in judged)
        survival = [sum(column) / num_rounds for column in zip(*(each.counted[1].tolist() for each in judged))]
        known = figures.candidate_figures([each.candidates.tolist() for each in judged if each.candidates is not None])
        low, high = figures.interval(counts, figures.tau, 0)
        console.print(
            f"{head.folder}: replayed tau {figures.tau(counts):.3f} ({low:.2f} .. {high:.2f}), chain of {len(survival)}, temperature "
            f"{sampling.temperature:g}, {len(texts)} answers, {sum(len(text.answer) - 1 for text in texts)} tokens, survival by depth "
            + " ".join(f"{value:.3f}" for value in survival)
            + (f", candidates: {figures.describe_candidates(known)}" if known else "")
        )
        if first is not None:
            change, (low, high) = figures.tau_difference(counts, first)
            console.print(f"  {change:+.3f} ({low:+.3f} .. {high:+.3f}) against {heads[0].folder}, the same answers")
        first = first or counts


def read_answers(chosen: Evaluate, tokenizer: PreTrainedTokenizerBase, fingerprint: str) -> list[Written]:
    """The answers to replay, all written at one temperature, cut. Raises ValueError if there is none.

    fingerprint: of the target; answers of others are warned of
    """
    source, temperature = str(chosen.answers), chosen.decode.sampling().temperature
    rows = reading.load_conversations(source, split=chosen.split)
    if chosen.hold_out is not None:
        rows = [rows[i] for i in reading.hold_out([row.get("temperature") == 0 for row in rows], chosen.hold_out)]
    rows = [row for row in rows if row.get("temperature", temperature) == temperature]
    if not rows:
        raise ValueError(f"{source} has no row at decode.temperature={temperature:g}.")
    warn_of_writers([row.get("target_fingerprint") for row in rows], fingerprint)
    texts = []
    for row in rows:
        with reading.at(source):
            encoded = data.encode(tokenizer, row)
        start, stop = data.last_answer(encoded)
        answer = encoded.tokens[start : min(stop, chosen.length)]
        if len(answer) >= 2:
            texts.append(Written(encoded.tokens[:start], answer, temperature))
    if not texts:
        raise ValueError(f"No answer has a second token within length={chosen.length}: raise it.")
    return texts


if __name__ == "__main__":
    run(main)

"""Decodes every question plainly and with drafts, in turn, and reports what the drafts gain.

    specdec evaluate checkpoint=checkpoints/shipped/eagle3 decode.temperature=0,1 limit=16
    specdec evaluate checkpoint=checkpoints/a,checkpoints/b proposers=auto,suffix chains=2,4 trees=4x3x8 out=compared
    specdec evaluate checkpoint=checkpoints/a suite=spec_bench prompts=downloads/spec_bench chains=4
    specdec evaluate checkpoint=checkpoints/a suite=gsm8k protocol=deepspec
    specdec evaluate checkpoint=checkpoints/a batch=1,4,16,64 ignore_stop=true
    specdec evaluate checkpoint=checkpoints/a,checkpoints/b answers=my_answers.jsonl
    specdec evaluate checkpoint=checkpoints/a,checkpoints/b choose=true loads=1,4,16,64 out=choice
    specdec evaluate engine=http://localhost:8000 checkpoint=checkpoints/a batch=1,4,16,64 out=served

Prints tau (the acceptance length: tokens emitted per target pass of a round, bonus or correction token counted), speedup and whether
answers are unchanged, with 95 % intervals over questions; the protocol that the figures depend on; and the acceptance length as
publications count it (docs/suites.md). The folder OUT gets results.json, results.md, results.html, and rows.jsonl with each finished
request, so that after Ctrl-C or a kill the same command continues. A proposer that holds a trained head is decoded with each of
the heads. With answers= nothing is decoded: tau of a chain follows from answers that the target wrote (docs/methods.md, section 2).
With choose=true it says which drafter, and how many drafts, pay at which load (docs/choosing.md). With engine= a running server is
judged, by its own counters and streams (docs/serving.md); checkpoint= is then the head it serves.
"""

from specdec.options.command_line import CommandLineOptions, make_room, option, options, run, split

from dataclasses import dataclass, field
from pathlib import Path

from specdec import checkpoint, loading
from specdec.core import progress
from specdec.heads.base import Drafter
from specdec.measuring import evaluate
from specdec.measuring import report as figures
from specdec.measuring.replay import count_replays, replay_texts
from specdec.measuring.runs import load_runs, shared_target
from specdec.options import command_line, decoding
from specdec.tools.choose import choose as choosing
from specdec.tools.judge import judge
from specdec.tools.suites import suites


@dataclass(frozen=True, kw_only=True)
class Evaluate(CommandLineOptions):
    checkpoint: str = option("", command_line.CHECKPOINTS)
    proposers: str = option(
        "",
        "comma list of what else drafts: files in conf/proposer; empty: auto beside one head without chains= and trees=",
    )
    settings: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "prefix": "proposer.",
            "help": "NAME.KEY=VALUE: settings of a proposer, see conf/proposer; checkpoint=DIR: its head",
        },
    )
    chains: str = option(
        "", "comma list of chain lengths to compare; without chains= and trees= decode.depth and others"
    )
    trees: str = option("", "comma list of trees to compare, each DEPTHxWIDTHxNODES")
    suite: str | None = option(None, "public questions: the name of a file in conf/suite (docs/suites.md)")
    subset: str | None = option(
        None, "of suite=: one of its parts, or a category; null: the usual part, else all of them"
    )
    protocol: str | None = option(
        None,
        "settings, prompts and counting of a publication: the name of a file in conf/protocol; options that are given stay",
    )
    accept_licence: bool = option(False, "of suite=: you have read the licence beside its files, and it allows this")
    prompts: str | None = option(
        None,
        "rows with a prompt or messages: JSONL, folder or dataset; of suite= its file or folder. null: the suite by its name, else "
        f"{loading.PROMPTS}",
    )
    split: str | None = option(None, loading.SPLIT)
    template: dict[str, str] = field(default_factory=dict, metadata=loading.TRAINED_TEMPLATE)
    limit: int | None = option(None, "decode this many questions, spread over the source; null: all")
    batch: str = option(
        "1", "comma list: how many requests are decoded at once; questions are repeated for larger ones"
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
    timeout: float = option(120.0, "of engine=: seconds without a word after which a request is sent again")
    auto: bool = option(True, "beside one head's fixed shape, also decode with proposer auto")
    choose: bool = option(
        False, "which drafter and how many drafts pay at which load, without decoding at each of them"
    )
    loads: str = option(
        "1,2,4,8,16,32,64,128,256", "of choose=true: comma list of how many answers are written at once"
    )
    contexts: str = option(
        "", "of choose=true: comma list of tokens before a round; empty: what prompts= and their answers have"
    )
    costs: str = option("", "of choose=true: choice.json of an earlier choice; empty: timed here")
    predicted: str | None = option(None, "choice.json of choose=true, to put its speedups beside the measured ones")
    seed: int = option(0, "seed of sampling")
    out: str | None = option(None, "folder of the results; null: evaluation, of a server served", folder=True)
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: decoding.DecodeOptions = field(default_factory=decoding.DecodeOptions)


def main(arguments: list[str] | None = None) -> None:
    chosen = options(Evaluate, __doc__, arguments, presets=suites.presets_of)
    console = progress.Results()
    if chosen.answers is not None and not chosen.choose:
        return replay(chosen, console)
    out = Path(chosen.out or ("choice" if chosen.choose else "served" if chosen.engine else "evaluation"))
    make_room(f"out={out}", out, folder=True)
    if chosen.choose:
        return choosing.choose(chosen, out, console)
    if chosen.engine is not None:
        return judge.judge(chosen, out, console)
    evaluate.compare(chosen, out, console)


# Replay along given answers


def replay(chosen: Evaluate, console: progress.Results) -> None:
    """Prints tau and survival by depth of each head's chain, and how the others differ from the first."""
    if not split(chosen.checkpoint):
        raise ValueError("answers= replays trained heads: give checkpoint=DIR.")
    if chosen.suite or chosen.protocol:
        raise ValueError("answers= replays answers that are there: leave suite= and protocol= out.")
    for folder in split(chosen.checkpoint):
        if checkpoint.head_class(folder).adapts_target:
            raise ValueError(f"{folder} adapts its target, which did not write these answers: leave answers= out.")
    sampling = chosen.decode.sampling()
    heads = load_runs(chosen.checkpoint, chosen.target)
    shared = shared_target(heads, chosen.target)
    rows = choosing.read_answers(chosen, shared.tokenizer, shared.target)
    texts = choosing.encode_answers(chosen, rows, shared.tokenizer)
    for note in evaluate.note_copies(rows, {head.name: head.folder for head in heads}):
        console.say(note)
    first: list[figures.PromptCounts] | None = None
    for head in heads:
        if not isinstance(head.drafter, Drafter):
            raise ValueError(f"{head.folder} does not draft by steps, so it cannot be replayed: leave answers= out.")
        judged = replay_texts(head.drafter, texts, depth=chosen.decode.depth, what="replay")
        counts = count_replays(judged)
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


if __name__ == "__main__":
    run(main)

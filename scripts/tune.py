"""python scripts/tune.py checkpoint=DIR [limit=8 max_new_tokens=48 decode.compile=true decode.temperature=0 ...]

Measures this device, chooses how to draft on it, and writes that for decode.file=OUT. Every chain, every tree and a chain
that stops where drafts are unlikely to survive gets a predicted speedup, tokens a round times the cost of a plain round
over that of its own; then all are decoded again, in turn, to see whether the prediction holds.
"""

import json
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import rich.box
import rich.console
import rich.table
import torch
import yaml
from rich.progress import track

from helpers import loading
from helpers.options import options, run
from specdec import checkpoint, replay, speed
from specdec.compile import Runner
from specdec.decode import Decoder
from specdec.drafting import Drafting
from specdec.figures import rate_ratio_interval
from specdec.measurement import Prompt, PromptResult
from specdec.proposers.stopping import Stopping
from specdec.report import Report, summarise
from specdec.sampling import Sampling
from specdec.speed import Answer
from train import data, reading

PLAIN = "plain"
FIGURES = ("tau", "tau_ci", "speedup", "speedup_ci", "tokens_per_second", "baseline_tokens_per_second", "ms_per_round")


@dataclass(frozen=True)
class TuneDecodeOptions:
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy"})
    top_k: int | None = field(default=None, metadata={"help": "sample from so many tokens only"})
    top_p: float | None = field(default=None, metadata={"help": "sample from the likeliest tokens of this mass only"})
    repetition_penalty: float = field(default=1.0, metadata={"help": "above 1: tokens seen before are less likely"})
    children: str = field(
        default="chosen",
        metadata={"help": "of a tree, at temperature > 0: chosen, or sampled: distinct or independent"},
    )
    rule: str = field(default="token", metadata={"help": "token, block (whole paths) or typical (needs lossy=true)"})
    lossy: bool = field(default=False, metadata={"help": "allow rules that change what the target says"})
    compile: bool = field(
        default=False, metadata={"help": "compile for the shapes that occur: minutes at first, fast rounds"}
    )


@dataclass(frozen=True)
class Tune:
    checkpoint: str = field(metadata={"help": "a step's folder, or a run's folder for its best step"})
    prompts: str = field(default="data/prompts_heldout.jsonl", metadata={"help": "rows with prompt or messages"})
    limit: int = field(default=8, metadata={"help": "this many prompts, spread over the file"})
    max_new_tokens: int = field(default=48, metadata={"help": "an answer ends here at the latest"})
    chains: str = field(default="1,2,3,4,5", metadata={"help": "comma list of chain lengths to try"})
    trees: str = field(
        default="2x2x4,3x3x6,4x3x8,4x4x12",
        metadata={"help": "comma list of depth x width x nodes to try; empty: no tree"},
    )
    stopping: bool = field(
        default=True, metadata={"help": "also try a chain that stops where drafts are unlikely to survive"}
    )
    seed: int = field(default=0, metadata={"help": "of sampling"})
    out: str = field(default="tuned.yaml", metadata={"help": "the settings to write"})
    out_json: str | None = field(default=None, metadata={"help": "JSON file for all figures"})
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: TuneDecodeOptions = field(default_factory=TuneDecodeOptions)


@dataclass(frozen=True)
class Setting:
    """A way to draft, and what was measured of it before it was put to the test."""

    drafting: Drafting
    tau: float
    stages: dict[str, float]  # seconds a round
    plain: dict[str, float]  # of plain decoding, measured at the same time

    @property
    def name(self) -> str:
        return name_of(self.drafting)

    @property
    def predicted(self) -> float:
        return speed.predict(self.tau, self.stages, self.plain)

    def explain(self) -> str:
        return speed.explain(self.name, self.tau, self.stages, self.plain)


def main() -> None:
    chosen = options(Tune, __doc__)
    console = rich.console.Console(highlight=False, soft_wrap=True)
    given = chosen.decode
    sampling = Sampling(given.temperature, given.top_k, given.top_p, given.repetition_penalty)
    shapes = [*read_shapes("chains", chosen.chains, 1), *read_shapes("trees", chosen.trees, 3)]
    loaded = loading.load(chosen.checkpoint, chosen.target)
    prompts = [
        Prompt(row["id"], row["category"], data.encode_prompt(loaded.tokenizer, row["messages"]))
        for row in reading.spread(reading.load_prompts(chosen.prompts), chosen.limit)
    ]
    draftings = candidates(shapes, loaded.drafter.depth, given, console)
    conditions = describe(loaded, chosen, len(prompts))
    console.print(conditions)

    runner = Runner(given.compile)
    shared = {"sampling": sampling, "stop": loaded.stop, "runner": runner}
    plain = Decoder(loaded.target, None, **shared)

    def decoder(drafting: Drafting) -> Decoder:
        return drafting.decoder(loaded.target, drafting.proposer(loaded.drafter), **shared)

    def decode(decoders: dict[str, Decoder], *, seed: int, what: str) -> dict[str, list[Answer]]:
        """Every prompt by every decoder, which take turns in going first, after a warm-up."""

        def progress(items: list, what: str) -> Iterable:
            return track(items, description=what, console=console, transient=True)

        warm_up(
            decoders, prompts[0], chosen, lambda items: progress(items, "compiling" if given.compile else "warm-up")
        )
        return interleave(decoders, prompts, chosen.max_new_tokens, seed, lambda items: progress(items, what))

    decoders = {PLAIN: plain, **{name_of(drafting): decoder(drafting) for drafting in draftings}}
    chains = {drafting.depth: drafting for drafting in draftings if drafting.shape.chain}
    longest = max(chains, default=0)
    full = replace(chains[longest], stopping={}) if chosen.stopping and longest > 1 else None
    asked = {name_of(full): decoder(full)} if full else {}
    answers = decode({**decoders, **asked}, seed=chosen.seed, what="costs")
    if not any(answer.rounds for answer in answers[PLAIN]):
        raise ValueError("Every answer ended with its first token: give other prompts, or raise max_new_tokens.")
    costs = {name: speed.median_stages(found) for name, found in answers.items()}
    accepts = [
        replay.acceptance(
            loaded.drafter, prompt.tokens, answer.generation.tokens[0], depth=longest, temperature=given.temperature
        )
        for prompt, answer in zip(prompts, answers[PLAIN])
        if any(drafting.replayable(loaded.drafter, sampling) for drafting in chains.values())
    ]
    settings = []
    for drafting in draftings:
        name = name_of(drafting)
        replayed = drafting.replayable(loaded.drafter, sampling)
        tau = speed.replayed_tau(accepts, drafting.depth) if replayed else speed.decoded_tau(answers[name])
        settings.append(Setting(drafting, tau, costs[name], costs[PLAIN]))

    rounds = speed.whole_rounds(answers[name_of(full)]) if full else []
    if rounds:
        lengths = speed.chain_lengths(
            costs[PLAIN],
            {depth: costs[name_of(chain)] for depth, chain in chains.items()},
            costs[name_of(full)],
            longest,
        )
        depth, stopping = speed.plan(rounds, speed.fit_stopping(rounds), lengths)
        console.print(show_lengths(lengths))
        if stopping.threshold > 0:
            drafting = replace(chains[longest], depth=depth, nodes=depth, stopping=asdict(stopping))
            name = name_of(drafting)
            decoders[name] = decoder(drafting)
            answers = decode({PLAIN: plain, name: decoders[name]}, seed=chosen.seed, what="costs of stopping")
            costs = {name: speed.median_stages(found) for name, found in answers.items()}
            settings.append(Setting(drafting, speed.decoded_tau(answers[name]), costs[name], costs[PLAIN]))
        else:
            console.print("stopping: left out; it would not have paid")
    for setting in settings:
        console.print(setting.explain())

    answers = decode(decoders, seed=chosen.seed + len(prompts), what="verification")
    rows = {
        setting.name: [
            PromptResult(prompt, alone.generation, drafted.generation, float("nan"), [], None)
            for prompt, alone, drafted in zip(prompts, answers[PLAIN], answers[setting.name])
        ]
        for setting in settings
    }
    measured = {
        setting.name: summarise(rows[setting.name], depth=setting.drafting.depth, temperature=given.temperature)
        for setting in settings
    }
    expected = max(settings, key=lambda setting: setting.predicted)
    best = max(settings, key=lambda setting: measured[setting.name].speedup)
    interval = rate_ratio_interval(rows[expected.name], rows[best.name])
    final = expected if interval[1] >= 1 else best
    console.print(table(settings, measured, final))
    verdict = judge(expected, best, final, interval, measured)
    console.print(verdict)
    comment = f"# {conditions}\n# {final.name}: speedup {final.predicted:.2f} predicted, "
    comment += f"{measured[final.name].speedup:.2f} measured\n"
    checkpoint.write_text(Path(chosen.out), comment + yaml.safe_dump(asdict(final.drafting), sort_keys=False))
    console.print(f"written: {chosen.out}; use it with decode.file={chosen.out}")
    if chosen.out_json:
        document = {
            "conditions": conditions,
            "options": asdict(chosen),
            "verdict": verdict,
            "chosen": final.name,
            "settings": {
                setting.name: {
                    **asdict(setting),
                    "predicted": setting.predicted,
                    "measured": {name: getattr(measured[setting.name], name) for name in FIGURES},
                }
                for setting in settings
            },
        }
        checkpoint.write_text(Path(chosen.out_json), json.dumps(document, indent=2) + "\n")


def read_shapes(option: str, text: str, num_parts: int) -> list[list[int]]:
    """A comma list of numbers, or of `num_parts` numbers joined by x."""
    try:
        shapes = [[int(part) for part in item.split("x")] for item in text.split(",") if item.strip()]
        if any(len(shape) != num_parts for shape in shapes):
            raise ValueError
    except ValueError:
        example = "1,2,3" if num_parts == 1 else "2x2x4,4x3x8 (depth x width x nodes)"
        raise ValueError(f"{option}={text} cannot be read: give a comma list such as {example}.") from None
    return shapes


def candidates(
    shapes: list[list[int]], limit: int | None, given: TuneDecodeOptions, console: rich.console.Console
) -> list[Drafting]:
    """shapes: [depth] of chains, [depth, width, nodes] of trees; limit: the drafter's steps"""
    found = []
    for depth, *rest in shapes:
        width, nodes = rest or (1, depth)
        drafting = Drafting(depth, width, nodes, given.children, None, given.rule, given.lossy, given.compile)  # type: ignore[arg-type]  # it is checked there
        name = name_of(drafting)
        if limit is not None and depth > limit:
            console.print(f"left out: {name}; this drafter takes {limit} steps")
        elif name not in map(name_of, found):
            found.append(drafting)
    if not found:
        raise ValueError("chains and trees leave nothing to try: give a chain, such as chains=1.")
    return found


def name_of(drafting: Drafting) -> str:
    shape = drafting.shape
    if drafting.stopping is None:
        return str(shape) if shape.chain else f"tree of {shape.depth}x{shape.width}x{shape.nodes}"
    return f"chain of up to {drafting.depth}, stopping below {Stopping(**drafting.stopping).threshold:.2f}"


def describe(loaded: loading.Loaded, chosen: Tune, num_prompts: int) -> str:
    device = loaded.target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return (
        f"{loaded.folder} on {loaded.target.name}: {name}, {torch.get_num_threads()} threads, {chosen.target.dtype}, "
        f"{'compiled' if chosen.decode.compile else 'not compiled'}, temperature {chosen.decode.temperature:g}; "
        f"{num_prompts} prompts, <= {chosen.max_new_tokens} new tokens"
    )


def warm_up(decoders: dict[str, Decoder], prompt: Prompt, chosen: Tune, progress: Callable[[list], Iterable]) -> None:
    for decoder in progress(list(decoders.values())):
        generator = torch.Generator(decoder.target.device).manual_seed(chosen.seed)
        decoder.generate([prompt.tokens], min(8, chosen.max_new_tokens), generator=generator)


def interleave(
    decoders: dict[str, Decoder],
    prompts: list[Prompt],
    max_new_tokens: int,
    seed: int,
    progress: Callable[[list], Iterable],
) -> dict[str, list[Answer]]:
    """Every prompt by every decoder before the next prompt, in rotating order: what disturbs one disturbs all."""
    names = list(decoders)
    turns = [number % len(names) for number in range(len(prompts))]
    order = [(number, name) for number, turn in enumerate(turns) for name in names[turn:] + names[:turn]]
    found: dict[str, list[Answer]] = {name: [] for name in names}
    for number, name in progress(order):
        generator = torch.Generator(decoders[name].target.device).manual_seed(seed + number)
        found[name].append(speed.decode(decoders[name], prompts[number].tokens, max_new_tokens, generator))
    return found


def show_lengths(lengths: speed.Lengths) -> str:
    draft, verify = (" ".join(f"{1e3 * seconds:.1f}" for seconds in part) for part in (lengths.draft, lengths.verify))
    return f"chains of 0, 1, .. drafts that may stop, ms: draft {draft}; verify {verify}"


def table(settings: list[Setting], measured: dict[str, Report], final: Setting) -> rich.table.Table:
    table = rich.table.Table(
        title="Speedup over plain decoding: tokens by seconds of rounds, all prompts together (* chosen)",
        title_justify="left",
        box=rich.box.SIMPLE,
    )
    for name in ("setting", "tau", "predicted", "measured", "95 %", "off by"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    for setting in settings:
        found = measured[setting.name]
        table.add_row(
            setting.name + " *" * (setting == final),
            f"{setting.tau:.2f}",
            f"{setting.predicted:.2f}",
            f"{found.speedup:.2f}",
            "{:.2f} .. {:.2f}".format(*found.speedup_ci),
            f"{100 * (found.speedup / setting.predicted - 1):+.1f} %",
        )
    return table


def judge(expected: Setting, best: Setting, final: Setting, interval: list[float], measured: dict[str, Report]) -> str:
    """What was chosen, and whether it was the best measured."""
    if expected == best:
        text = f"{expected.name} was predicted to be the fastest, and was."
    else:
        text = "{} was predicted to be the fastest; {} was, and the former ran at {:.3f} .. {:.3f} of its speed (95 %). ".format(
            expected.name, best.name, *interval
        )
        text += (
            "That is within the noise: the prediction stands." if final == expected else "The measured best is written."
        )
    if measured[final.name].speedup_ci[1] < 1:
        text += f" Plain decoding is faster than {final.name}: on this device, do not draft with this checkpoint."
    return text


if __name__ == "__main__":
    run(main)

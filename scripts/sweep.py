"""python scripts/sweep.py checkpoint=DIR[,DIR] [batches=1,2,4,8,16,32 max_new_tokens=32 decode.depth=4 out=sweep ...]

Where speculation stops paying: decodes the same prompts plainly and with the drafts of every checkpoint, in turn, in
batches of every size. Rows that have ended stay in their batch; what is emitted counts. Writes OUT/sweep.png and, after
every size, OUT/sweep.json: after Ctrl-C the same command continues, and one with other batches= adds to it.
"""

import itertools
import json
import platform
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

import rich.console
import rich.table
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from rich.progress import track

from helpers import comparison, loading, options
from scripts import compare
from specdec import checkpoint
from specdec.compile import Runner
from specdec.decode import Decoder, Generation
from specdec.drafting import Drafting
from specdec.figures import TAU
from specdec.target import load_tokenizer
from train import data, reading

MEANING = (
    "tokens/s: of all rows together; ms/token: of one row; all without the prompts' passes and compiling. speedup: "
    "the median of ratios of decodings next to each other, the least and the most of them beside it. tau: " + TAU
)
Trial = dict[tuple[str, str], Generation]  # by (Run.plain, "plain") and (Run.name, "drafted")
Cells = dict[int, dict[str, dict]]  # batch size -> Run.name -> see `summarise`


@dataclass(frozen=True)
class Sweep:
    checkpoint: str = field(metadata={"help": "comma list of run folders (their best steps) or of steps' folders"})
    batches: str = field(default="1,2,4,8,16,32", metadata={"help": "comma list of batch sizes"})
    prompts: str = field(default="data/prompts_heldout.jsonl", metadata={"help": "rows with prompt or messages"})
    limit: int = field(default=32, metadata={"help": "this many prompts, spread over the file; larger batches repeat"})
    groups: int = field(default=4, metadata={"help": "batches of a size, at most"})
    repeats: int = field(default=2, metadata={"help": "times that every batch is decoded each way"})
    max_new_tokens: int = field(default=32, metadata={"help": "an answer ends here at the latest"})
    ignore_stop: bool = field(default=True, metadata={"help": "no answer ends before: batches are comparable"})
    out: str = field(default="sweep", metadata={"help": "folder for sweep.json and sweep.png"})
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: loading.DecodeOptions = field(default_factory=loading.DecodeOptions)


def main() -> None:
    chosen = options.options(Sweep, __doc__)
    console = rich.console.Console()
    loading.use_threads()
    batches, sampling, drafting = check(chosen), chosen.decode.samplings()[0], chosen.decode.drafting()
    runs = compare.load(compare.Compare(runs=chosen.checkpoint, target=chosen.target), {"drafted": drafting.shape})
    target = runs[0].drafter.target
    tokenizer = load_tokenizer(target.name)
    stop = set() if chosen.ignore_stop else data.stop_tokens(tokenizer, target.model.generation_config)
    rows = reading.spread(reading.load_prompts(chosen.prompts), chosen.limit)
    prompts = [data.encode_prompt(tokenizer, row["messages"]) for row in rows]
    settings = {
        **{name: value for name, value in asdict(chosen).items() if name not in ("batches", "out")},
        "drafting": asdict(drafting),
        "weights": [compare.digest((run.folder / "drafter.safetensors").read_bytes()) for run in runs],
        "prompts_digest": compare.digest(repr(prompts).encode()),
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    conditions = (
        f"{target.name}, {chosen.target.dtype}, {settings['device']}, {settings['threads']} threads; {drafting.shape}, "
        f"temperature {sampling.temperature:g}; {chosen.max_new_tokens} new tokens a row, stop tokens "
        f"{'ignored' if chosen.ignore_stop else 'heeded'}"
    )
    out = Path(chosen.out)
    cells = begin(out, settings)
    console.print(f"batch sizes {', '.join(map(str, cells)) or 'none'} are in {out} already", highlight=False)
    try:
        for batch in [batch for batch in batches if batch not in cells]:
            some = [group for group in groups(prompts, batch, chosen.groups) for _ in range(chosen.repeats)]
            ways = decoders(runs, drafting, sampling=sampling, stop=stop)
            decode(ways, some[0], 0, min(8, chosen.max_new_tokens))  # the first of a size is slow
            trials = track(some, description=f"batch {batch}", console=console, transient=True)
            found = [decode(ways, group, number, chosen.max_new_tokens) for number, group in enumerate(trials)]
            cells[batch] = summarise(found, runs)
            document = {"settings": settings, "conditions": conditions, "meaning": MEANING, "batches": cells}
            checkpoint.write_text(out / "sweep.json", json.dumps(document, indent=2) + "\n")
    finally:
        if cells:
            cells = dict(sorted(cells.items()))
            picture(runs, cells, conditions).savefig(out / "sweep.png", dpi=130)
            console.print(*(table(run.name, cells) for run in runs), f"{conditions}. {MEANING}", highlight=False)
            console.print(f"written: {out}/sweep.json, {out}/sweep.png", highlight=False)


def check(chosen: Sweep) -> list[int]:
    """The batch sizes. Raises ValueError for options that leave nothing to measure."""
    try:
        batches = sorted({int(part) for part in chosen.batches.split(",")})
    except ValueError:
        raise ValueError(f"batches={chosen.batches}: give numbers, such as 1,4,16.") from None
    if min(*batches, chosen.limit, chosen.groups, chosen.repeats, chosen.max_new_tokens - 1) < 1:
        raise ValueError("batches, limit, groups and repeats must be at least 1, and max_new_tokens at least 2.")
    if len(chosen.decode.samplings()) > 1:
        raise ValueError(f"decode.temperature={chosen.decode.temperature}: give one, and each its own out=FOLDER.")
    return batches


def begin(out: Path, settings: dict) -> Cells:
    """What was measured before under the same settings. Raises ValueError if they differ."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "sweep.json").exists():
        return {}
    document = checkpoint.read_json(out / "sweep.json")
    before = document["settings"]
    changed = [f"{key} (then {before[key]}, now {settings[key]})" for key in settings if before[key] != settings[key]]
    if changed:
        raise ValueError(f"{out} was begun with other settings: {'; '.join(changed)}. Choose another out=FOLDER.")
    return {int(batch): column for batch, column in document["batches"].items()}


def groups(prompts: list[list[int]], batch: int, most: int) -> list[list[list[int]]]:
    """At most `most` groups of `batch` prompts, each spread over the list, which is repeated if it is too short."""
    num = max(1, len(prompts) // batch)
    rows = list(itertools.islice(itertools.cycle(prompts), num * batch))
    return reading.spread([rows[first::num] for first in range(num)], most)


def decoders(runs: list[comparison.Run], drafting: Drafting, **shared) -> dict[tuple[str, str], Decoder]:
    """By the keys of a `Trial`; plain decoding once for each distinct target. shared: arguments of every Decoder"""
    found: dict[tuple[str, str], Decoder] = {}
    runners = {run.plain: Runner(drafting.compile) for run in runs}
    for run in runs:
        target, proposer, runner = run.drafter.target, drafting.proposer(run.drafter), runners[run.plain]
        found[run.plain, "plain"] = Decoder(target, None, runner=runner, **shared)
        found[run.name, "drafted"] = drafting.decoder(target, proposer, runner=runner, **shared)
    return found


def decode(ways: dict[tuple[str, str], Decoder], group: list[list[int]], number: int, max_new_tokens: int) -> Trial:
    """One group in all ways, in an order that rotates with its number."""
    found, turn = {}, number % len(ways)
    for key in [*ways][turn:] + [*ways][:turn]:
        generator = torch.Generator(ways[key].target.device).manual_seed(number)
        found[key] = ways[key].generate(group, max_new_tokens, generator=generator)
    return found


def figures(found: list[Generation]) -> dict[str, float]:
    """Of groups of one size, added up. An answer's first token comes from the prompt's pass and does not count."""
    seconds, num_tokens = sum(one.seconds for one in found), sum(len(row) - 1 for one in found for row in one.tokens)
    return {
        "tokens_per_second": num_tokens / seconds,
        "ms_per_round": 1e3 * seconds / sum(len(one.drafted) for one in found),
        "ms_per_token": 1e3 * seconds * len(found[0].tokens) / num_tokens,
        "tau": num_tokens / sum(len(accepted) for one in found for accepted in one.accepted),
    }


def summarise(found: list[Trial], runs: list[comparison.Run]) -> dict[str, dict]:
    """By Run.name: the figures of plain and drafted decoding, every trial's ratio of tokens/s, and their median."""
    found = [trial for trial in found if all(one.drafted for one in trial.values())]  # the others saw no round
    if not found:
        raise ValueError("All answers ended with their first tokens, before any round: set ignore_stop=true.")
    summary, rate = {}, lambda found: figures(found)["tokens_per_second"]
    for run in runs:
        plain, drafted = ([trial[key] for trial in found] for key in ((run.plain, "plain"), (run.name, "drafted")))
        ratios = [rate([one]) / rate([other]) for one, other in zip(drafted, plain)]
        each = {"plain": figures(plain), "drafted": figures(drafted), "ratios": ratios}
        summary[run.name] = {**each, "speedup": statistics.median(ratios)}
    return summary


def table(name: str, cells: Cells) -> rich.table.Table:
    paying = ", ".join(str(batch) for batch, column in cells.items() if column[name]["speedup"] > 1)
    title = f"\n{name}, plain -> drafted; faster at batch sizes: {paying or 'none'}"
    found = rich.table.Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in ("batch", "tokens/s", "ms/round", "ms/token", "tau", "speedup", "least", "most"):
        found.add_column(heading, justify="right")
    for batch, column in cells.items():
        plain, drafted, ratios = (column[name][key] for key in ("plain", "drafted", "ratios"))
        pairs = [(plain[key], drafted[key]) for key in ("tokens_per_second", "ms_per_round", "ms_per_token")]
        gains = [f"{gain:.2f}" for gain in (drafted["tau"], column[name]["speedup"], min(ratios), max(ratios))]
        found.add_row(str(batch), *(f"{before:.1f} -> {after:.1f}" for before, after in pairs), *gains)
    return found


def picture(runs: list[comparison.Run], cells: Cells, conditions: str) -> Figure:
    """tokens/s and speedup by batch size; a checkpoint has the same colour in both panels."""
    drawing = Figure(figsize=(11, 5), layout="constrained")
    left, right = drawing.subplots(1, 2)
    for plain, name in {run.plain: run.name for run in runs}.items():
        rates = [column[name]["plain"]["tokens_per_second"] for column in cells.values()]
        left.plot([*cells], rates, "s--", mfc="white", color="0.4", label=f"plain, {plain}")
    for run, colour in zip(runs, colormaps["tab10"].colors * len(runs)):
        columns = [column[run.name] for column in cells.values()]
        rates = [column["drafted"]["tokens_per_second"] for column in columns]
        left.plot([*cells], rates, "o-", color=colour, label=run.name)
        right.plot([*cells], [column["speedup"] for column in columns], "o-", color=colour)
        ends = [(min(one["ratios"]), max(one["ratios"])) for one in columns]
        right.vlines([*cells], *zip(*ends), color=colour, alpha=0.6)
    right.axhline(1, color="0.6", linewidth=0.8, linestyle=":")
    for axes, label in ((left, "tokens/s, all rows together"), (right, "speedup over plain decoding")):
        axes.set(xlabel="batch size", ylabel=label, xscale="log", xticks=[*cells], xticklabels=[*cells])
        axes.minorticks_off()
    left.set_ylim(0)
    drawing.legend(loc="outside upper left", ncols=4, frameon=False)
    drawing.supxlabel(f"{conditions}; bars: range", fontsize=8, color="0.4")
    return drawing


if __name__ == "__main__":
    options.run(main)

"""python scripts/compare.py runs=checkpoints/a,checkpoints/b [prompts=FILE temperature=0,1 chain=4 tree=4,3,8 ...]
python scripts/compare.py runs=checkpoints/a proposers=ngram,suffix [proposer.ngram.max=4 ...]

Trains nothing: decodes every prompt plainly, with the best checkpoint of every run, as a chain and as a tree, and with
proposers that need no training, in turn, and writes what each is worth to OUT/table.md and OUT/comparison.png. Every finished prompt is kept in
OUT/rows.jsonl: after Ctrl-C or a kill, the same command continues.
"""

import collections
import hashlib
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import rich.console
import torch
from rich.progress import track

from helpers import loading, options, proposers
from helpers.comparison import FROZEN, Run, Way, categories, conditions, differences, picture, table
from specdec import checkpoint, replay
from specdec.compile import Runner
from specdec.decode import Decoder, Generation
from specdec.drafting import Drafting
from specdec.measurement import Prompt, PromptResult, top2_gap
from specdec.proposers.base import Proposer
from specdec.report import Report, summarise_by_category
from specdec.sampling import Sampling
from specdec.target import Target, load_tokenizer
from specdec.tree import TreeShape
from train import data, reading

Decoders = dict[str, Decoder]  # by the name of a way; plain decoding by Way.plain


@dataclass(frozen=True)
class Compare(proposers.SeveralOptions):
    runs: str = field(
        default="", metadata={"help": "comma list of run folders (their best steps) or of steps' folders"}
    )
    checkpoint: str | None = field(default=None, metadata={"help": "the trained head of a proposer that holds one"})
    prompts: str = field(default="data/prompts_heldout.jsonl", metadata={"help": "rows with prompt or messages"})
    limit: int | None = field(default=None, metadata={"help": "this many prompts, spread over the file"})
    max_new_tokens: int = field(default=64, metadata={"help": "an answer ends here at the latest"})
    temperature: str = field(default="0,1", metadata={"help": "0 is greedy; a comma list measures each"})
    chain: int = field(default=4, metadata={"help": "drafts of a run's chain"})
    tree: str = field(default="4,3,8", metadata={"help": "depth,width,nodes of a run's tree; empty: no tree"})
    compile: bool = field(default=False, metadata={"help": "compile for the shapes that occur"})
    batch: int = field(default=1, metadata={"help": "prompts decoded at once; speedups are then those of the batch"})
    out: str = field(default="comparison", metadata={"help": "folder for table.md, comparison.png and rows.jsonl"})
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def digest_folder(folder: Path) -> str:
    found = []
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with path.open("rb") as file:
            found.append(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}")
    return digest("\n".join(found).encode())


def main() -> None:
    chosen = options.options(Compare, __doc__)
    console = rich.console.Console()
    loading.use_threads()
    temperatures = sorted(
        {each.temperature for each in loading.DecodeOptions(temperature=chosen.temperature).samplings()}
    )
    if chosen.batch < 1:
        raise ValueError(f"batch={chosen.batch} must be at least 1.")
    shapes = {"chain": TreeShape(chosen.chain, 1, chosen.chain)}
    if chosen.tree:
        shapes["tree"] = tree_shape(chosen.tree)
    runs = load(chosen, shapes)
    target = next((run.drafter.target for run in runs if run.plain == FROZEN), None)
    if target is None:  # there is no run, or each adapts a target of its own
        folder = runs[0].folder if runs else checkpoint.resolve(chosen.checkpoint) if chosen.checkpoint else None
        target = loading.load_target(chosen.target, default=folder and loading.target_of(folder)).target
    tokenizer = load_tokenizer(target.name)
    stop = data.stop_tokens(tokenizer, target.model.generation_config)
    prompts = [
        Prompt(row["id"], row["category"], data.encode_prompt(tokenizer, row["messages"]))
        for row in reading.spread(reading.load_prompts(chosen.prompts), chosen.limit)
    ]
    configs = proposers.configure_all(
        chosen.proposers,
        settings=chosen.settings,
        drafting=Drafting(chosen.chain, compile=chosen.compile),
        checkpoint=chosen.checkpoint and str(checkpoint.resolve(chosen.checkpoint)),
    )
    settings = {
        "runs": {run.name: f"{run.folder} {digest((run.folder / 'drafter.safetensors').read_bytes())}" for run in runs},
        "proposers": configs,
        "files": {folder: digest_folder(Path(folder)) for folder in sorted(proposers.folders(configs))},
        "prompts": chosen.prompts,
        "num_prompts": len(prompts),
        "prompts_digest": digest(repr(prompts).encode()),
        "max_new_tokens": chosen.max_new_tokens,
        "temperatures": temperatures,
        "shapes": {name: str(shape) for name, shape in shapes.items()},
        "compile": chosen.compile,
        "batch": chosen.batch,
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    untrained = {name: proposers.make(config, target) for name, config in configs.items()}
    runners: dict[str, Runner] = collections.defaultdict(lambda: Runner(chosen.compile))
    made = {temperature: decoders(runs, untrained, target, temperature, stop, runners) for temperature in temperatures}
    ways = made[temperatures[0]][0]
    out = Path(chosen.out)
    lines = begin(out, settings)
    done = {(line["number"], line["temperature"]) for line in lines}
    console.print(
        f"{len(done)} of {len(prompts) * len(temperatures)} prompts x temperatures are in {out}", highlight=False
    )
    for temperature in temperatures:
        left = [number for number in range(len(prompts)) if (number, temperature) not in done]
        groups = [left[start : start + chosen.batch] for start in range(0, len(left), chosen.batch)]
        if groups:
            list(decode(*made[temperature], prompts, [0], min(8, chosen.max_new_tokens)))  # a warm-up
        for proposer in untrained.values():
            proposer.forget()
        with (out / "rows.jsonl").open("a", buffering=1) as file:
            for numbers in track(groups, f"temperature {temperature:g}", console=console, transient=True):
                for line in decode(*made[temperature], prompts, numbers, chosen.max_new_tokens):
                    file.write(json.dumps(line) + "\n")
                    lines.append(line)
    lines.sort(key=lambda line: line["number"])

    rows = {temperature: {way.name: rows_of(lines, way, temperature) for way in ways} for temperature in temperatures}
    columns = {
        temperature: {
            way.name: summarise_by_category(
                each[way.name], depth=way.depth, temperature=temperature, adapted=way.plain != FROZEN
            )
            for way in ways
        }
        for temperature, each in rows.items()
    }
    ranked = sorted(ways, key=lambda way: -columns[temperatures[0]][way.name].tau)
    parts = [table(ranked, columns), categories(ranked, columns), differences(ranked, ways[0], rows)]
    text = "\n\n".join([*parts, *conditions(ranked, columns, settings, chosen.settings)])
    checkpoint.write_text(out / "table.md", text + "\n")
    picture(ranked, columns, settings).savefig(out / "comparison.png", dpi=130)
    print(text)
    console.print(f"written: {out}/table.md, {out}/comparison.png", highlight=False)


def tree_shape(text: str) -> TreeShape:
    try:
        depth, width, nodes = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"tree={text}: give depth,width,nodes, such as 4,3,8.") from None
    return TreeShape(depth, width, nodes)


def load(chosen: Compare, shapes: dict[str, TreeShape]) -> list[Run]:
    """Every run beside the one frozen target; a drafter that changes its target in place gets a target of its own."""
    given = [Path(part.strip()) for part in chosen.runs.split(",") if part.strip()]
    if not given and not proposers.names_in(chosen.proposers):
        raise ValueError(
            "There is nothing to compare: give runs=checkpoints/a,checkpoints/b, or proposers=ngram,suffix, or both."
        )
    names = loading.run_names(given)
    runs: list[Run] = []
    targets: dict[str, Target] = {}
    for name, folder in zip(names, map(checkpoint.resolve, given)):
        plain = name if proposers.adapts(folder) else FROZEN
        if plain not in targets:
            targets[plain] = loading.load_target(chosen.target, default=loading.target_of(folder)).target
        drafter = checkpoint.load(folder, targets[plain])
        deepest = drafter.depth or max(shape.depth for shape in shapes.values())
        cut = {kind: replace(shape, depth=min(shape.depth, deepest)) for kind, shape in shapes.items()}
        written = folder / "report.json"
        report = Report.from_json(checkpoint.read_json(written), source=str(written)) if written.exists() else None
        runs.append(Run(name, folder, drafter, cut, plain, report and report.training))
    return runs


def changes(before: dict, now: dict, prefix: str = "") -> Iterator[str]:
    for key in [*now, *(key for key in before if key not in now)]:
        then, value = before.get(key), now.get(key)
        if isinstance(then, dict) and isinstance(value, dict):
            yield from changes(then, value, f"{prefix}{key}.")
        elif then != value:
            yield f"{prefix}{key} (then {then}, now {value})"


def begin(out: Path, settings: dict) -> list[dict]:
    """What was decoded before under the same settings. Raises ValueError if they differ or a line cannot be read."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "settings.json").exists():
        checkpoint.write_text(out / "settings.json", json.dumps(settings, indent=2) + "\n")
    changed = list(changes(checkpoint.read_json(out / "settings.json"), settings))
    if changed:
        raise ValueError(f"{out} was begun with other settings: {'; '.join(changed)}. Choose another out=FOLDER.")
    path, lines = out / "rows.jsonl", []
    path.touch()
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        try:
            lines.append(json.loads(line if line.endswith("\n") else ""))  # without its end: killed while writing
        except json.JSONDecodeError:
            raise ValueError(f"{path}: line {number} is damaged: delete that line and run this again.") from None
    return lines


def decoders(
    runs: list[Run],
    untrained: dict[str, Proposer],
    target: Target,
    temperature: float,
    stop: set[int],
    runners: dict[str, Runner],
) -> tuple[list[Way], Decoders]:
    """The ways, and what decodes them at this temperature; plain decoding once for each distinct target.

    target: that of the untrained proposers; runners: by Way.plain, made where there is none
    """
    ways, found = [], {}

    def add(way: Way, target: Target, proposer: Proposer) -> None:
        if way.name in found:
            raise ValueError(f"Two ways are called {way.name}: rename a run's folder.")
        shared = {
            "sampling": Sampling(temperature),
            "stop": stop,
            "runner": runners[way.plain],
        }
        found.setdefault(way.plain, Decoder(target, None, **shared))
        found[way.name] = Decoder(target, proposer, **shared)
        ways.append(way)

    for run in runs:
        for kind, shape in run.shapes.items():
            drafting = Drafting(shape.depth, shape.width, shape.nodes, compile=runners[run.plain].compile)
            proposer = drafting.proposer(run.drafter)
            replayed = run.drafter if drafting.replayable(run.drafter, Sampling(temperature)) else None
            add(Way(f"{run.name}, {kind}", run, shape.depth, run.plain, replayed), run.drafter.target, proposer)
    for name, proposer in untrained.items():
        add(Way(name, None, proposer.depth, FROZEN, None), target, proposer)
    return ways, found


def decode(
    ways: list[Way], decoders: Decoders, prompts: list[Prompt], numbers: list[int], limit: int
) -> Iterator[dict]:
    """Some of the prompts, at once, in all ways, in an order that rotates. -> lines of rows.jsonl, see `rows_of`"""
    found: dict[str, list[Generation]] = {}
    turn = numbers[0] // len(numbers) % len(decoders)
    for name in [*decoders][turn:] + [*decoders][:turn]:
        generator = torch.Generator(decoders[name].target.device).manual_seed(numbers[0])
        tokens = [prompts[number].tokens for number in numbers]
        found[name] = decoders[name].generate(tokens, limit, generator=generator).split()
    temperature = decoders[ways[0].name].sampling.temperature
    for place, number in enumerate(numbers):
        prompt, drafted = prompts[number], {}
        for way in ways:
            target, alone, answer = decoders[way.name].target, found[way.plain][place].tokens[0], found[way.name][place]
            rounds, accepted, gap = float("nan"), torch.empty(0), None
            if way.replayed is not None:
                accept = replay.acceptance(way.replayed, prompt.tokens, alone, depth=way.depth, temperature=temperature)
                rounds, accepted = replay.rounds(accept)
            if temperature == 0:
                gap = top2_gap(target, prompt.tokens, alone, answer.tokens[0], Sampling())
            cell = {"replayed_rounds": rounds, "replayed_accepted": accepted.tolist(), "gap": gap}
            drafted[way.name] = {"drafted": asdict(answer), **cell}
        plain = {name: asdict(found[name][place]) for name in {way.plain for way in ways}}
        yield {
            "number": number,
            "temperature": temperature,
            "prompt": asdict(prompt),
            "plain": plain,
            "ways": drafted,
        }


def rows_of(lines: list[dict], way: Way, temperature: float) -> list[PromptResult]:
    """What `decode` wrote of one way at one temperature, in the order of the file."""
    found = []
    for line in (line for line in lines if line["temperature"] == temperature):
        cell = {**line["ways"][way.name]}
        plain, drafted = Generation(**line["plain"][way.plain]), Generation(**cell.pop("drafted"))
        found.append(PromptResult(Prompt(**line["prompt"]), plain, drafted, **cell))
    return found


if __name__ == "__main__":
    options.run(main)

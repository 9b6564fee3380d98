"""Shows what proposer=auto knows and does on this device: costs, chances, choices, and its speed beside fixed shapes.

    python scripts/tune.py checkpoint=checkpoints/shipped/mtp decode.compile=true out=tune.json picture=rounds.png
    python scripts/evaluate.py checkpoint=checkpoints/shipped/mtp decode.file=tune.json

All prompts are decoded plainly, by auto, and in every fixed shape, in turn. The speed of each is predicted from the costs
that auto measured (docs/methods.md, section 8). decode.file= takes the fastest of the fixed shapes from the file.
"""

from helpers import decoding, inspection, loading
from helpers.options import option, options, run

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from specdec.core import files
from specdec.core.tree import TreeShape
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.heads.base import Drafter
from specdec.measuring import comparing, tuning
from specdec.measuring.comparing import Decoders, Method
from specdec.measuring.measurement import Prompt, PromptResult, check_prompts, seeded_generator, turns
from specdec.measuring.report import summarise
from specdec.measuring.tuning import RecordedAcceptance, Way
from specdec.proposers.auto import Auto
from train import progress

AUTO, PLAIN = "auto", "plain"


@dataclass(frozen=True, kw_only=True)
class Tune(loading.PromptOptions, decoding.ShapesOptions):
    checkpoint: str = field(metadata={"help": loading.CHECKPOINT})
    limit: int = 8
    max_new_tokens: int = 48
    batch: int = option(1, "prompts decoded at once")
    chains: str = "1,2,3,4"
    trees: str = "2x2x4,3x3x6,4x3x8"
    costs: str | None = option(
        None, "JSON file with the costs of another machine (docs/auto.md); null: those of this one"
    )
    out: str = option("tune.json", "JSON file for all figures and the fastest fixed shape, for decode.file=")
    picture: str | None = option(None, "PNG file: what auto chooses in each round of one prompt")
    picture_prompt: int = option(1, "number of this prompt; auto decodes those before it first")
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: decoding.CommonDecodeOptions = field(default_factory=decoding.CommonDecodeOptions)


def main() -> None:
    chosen = options(Tune, __doc__)
    console = progress.Results()
    shapes, sampling = chosen.shapes(), chosen.decode.sampling()
    loaded = loading.load(chosen.checkpoint, chosen.target)
    prompts = loading.load_prompts(chosen, loaded, [chosen.checkpoint] if chosen.checkpoint else [])
    check(chosen, loaded, len(prompts))
    draftings, left_out = tuning.candidates(map(chosen.decode.drafting_of, shapes), loaded.drafter.depth)
    for name in left_out:
        console.say(f"left out: {name}; this drafter takes {loaded.drafter.depth} steps")
    auto = make_auto(chosen, loaded)
    decoding.show_measuring(auto)
    conditions = (
        f"{loaded.folder} on {loading.conditions(loaded.target)}, "
        f"{'compiled' if chosen.decode.compile else 'not compiled'}, temperature {sampling.temperature:g}; "
        f"{len(prompts)} prompts, batch {chosen.batch}, <= {chosen.max_new_tokens} new tokens"
    )
    console.say(conditions)
    methods = make_methods(chosen, loaded, auto, draftings)
    runners = {PLAIN: chosen.decode.runner()}
    decoders = comparing.make_decoders(methods, sampling, loaded.stop, runners)
    results = decode(chosen, methods, decoders, auto, prompts)
    document = inspection.figures_of(auto, chosen.batch, results[AUTO])
    ways = predict(chosen, methods, draftings, auto, results)
    inspection.show(console, [*inspection.tables(document), inspection.table_of_ways(ways)])
    console.say(inspection.sentences(document))
    shape = inspection.fixed_shape(auto, chosen.batch, greedy=sampling.greedy)
    console.say(inspection.fixed_shape_sentence(shape))
    verdict = tuning.verdict(ways)
    console.say(verdict)
    document = {"conditions": conditions, "options": asdict(chosen), "verdict": verdict} | document
    fixed = max((way for way in ways if way.drafting), key=lambda way: way.measured, default=None)
    document |= {"best_fixed_shape": shape, "ways": inspection.ways_to_json(ways)}
    document |= {"drafting": fixed and fixed.drafting and asdict(fixed.drafting)}
    files.write_text(Path(chosen.out), json.dumps(document, indent=2) + "\n")
    console.say(f"written: {chosen.out}" + (f"; decode.file={chosen.out} decodes as {fixed.name}" if fixed else ""))
    if chosen.picture:
        draw(chosen, decoders[AUTO], auto, prompts, conditions)
        console.say(f"written: {chosen.picture}")


def check(chosen: Tune, loaded: loading.Loaded, num_prompts: int) -> None:
    """Raises ValueError for what cannot be inspected."""
    if not isinstance(loaded.drafter, Drafter):
        raise ValueError(
            f"{type(loaded.drafter).__name__} drafts by Jacobi iteration, about which auto knows nothing: compare its chains with "
            "scripts/compare.py."
        )
    if not 1 <= chosen.picture_prompt <= num_prompts:
        raise ValueError(f"picture_prompt={chosen.picture_prompt} must be between 1 and {num_prompts}, the prompts.")


def make_auto(chosen: Tune, loaded: loading.Loaded) -> Auto:
    """The proposer that decodes by default with this checkpoint."""
    with_head = Drafting(1, compile=bool(chosen.decode.compile)).proposer(loaded.drafter)
    return Auto.usual(loaded.target, with_head, costs=chosen.costs)


def make_methods(chosen: Tune, loaded: loading.Loaded, auto: Auto, draftings: list[Drafting]) -> list[Method]:
    """auto first, then the fixed shapes."""
    any_shape = chosen.decode.drafting_of(TreeShape(1, 1, 1))
    fixed = [
        Method(tuning.name_of(each), loaded.target, each.proposer(loaded.drafter), each, each.depth, PLAIN)
        for each in draftings
    ]
    return [Method(AUTO, loaded.target, auto, any_shape, auto.depth, PLAIN), *fixed]


def decode(
    chosen: Tune, methods: list[Method], decoders: Decoders, auto: Auto, prompts: list[Prompt]
) -> dict[str, list[PromptResult]]:
    """All prompts by all methods, in turn, after a warm-up; auto then knows nothing but costs. -> results by method"""
    groups = turns(list(range(len(prompts))), chosen.batch)
    for decoder in decoders.values():
        check_prompts(decoder, prompts, chosen.max_new_tokens, source=chosen.prompts)
    first = [prompt.tokens for prompt in prompts[: chosen.batch]]
    for decoder in progress.track(list(decoders.values()), "warm-up", unit="ways"):
        decoder.generate(first, min(8, chosen.max_new_tokens), generator=seeded_generator(decoder.target, 0))
    assert auto.costs is not None
    auto.costs.prepare(1)  # inspected beside a batch too
    auto.forget()
    auto.acceptance = RecordedAcceptance()
    rows = [
        row
        for group in progress.track(groups, "decoding", unit="prompts", size=len)
        for row in comparing.compare_prompts(
            methods, decoders, prompts, group, chosen.max_new_tokens, batch=chosen.batch
        )
    ]
    temperature = decoders[AUTO].sampling.temperature
    results = {
        method.name: comparing.results_of(rows, name=method.name, baseline=PLAIN, temperature=temperature)
        for method in methods
    }
    if not any(result.num_rounds for result in results[AUTO]):
        raise ValueError("Every answer ended with its first token: give other prompts, or raise max_new_tokens.")
    return results


def predict(
    chosen: Tune, methods: list[Method], draftings: list[Drafting], auto: Auto, results: dict[str, list[PromptResult]]
) -> list[Way]:
    """auto and the fixed shapes with their predicted and measured speeds."""
    assert auto.costs is not None
    curve = auto.costs.curve(chosen.batch, auto.entries)
    steps = tuning.step_seconds(auto, chosen.batch)
    temperature = chosen.decode.sampling().temperature
    ways = []
    for method, drafting in zip(methods, [None, *draftings]):
        report = summarise(results[method.name], depth=method.depth, temperature=temperature)
        assert report.tau is not None
        predicted = auto.predicted() if drafting is None else tuning.predict(report.tau, curve, steps, drafting.shape)
        ways.append(Way(method.name, drafting, predicted, report, results[method.name]))
    return ways


def draw(chosen: Tune, decoder: Decoder, auto: Auto, prompts: list[Prompt], conditions: str) -> None:
    """The rounds of one prompt; auto has decoded those before it, and nothing else."""
    auto.forget()
    for number, prompt in enumerate(prompts[: chosen.picture_prompt]):
        generator = seeded_generator(auto.target, number)
        rounds = tuning.timed_rounds(decoder, prompt.tokens, chosen.max_new_tokens, generator)
    if not rounds:
        raise ValueError(f"picture_prompt={chosen.picture_prompt}: its answer has one token: give another prompt.")
    assert auto.costs is not None
    title = f"prompt {chosen.picture_prompt} ({prompt.id}); {conditions}"
    inspection.picture(rounds, auto.costs, tuning.step_seconds(auto, 1), title).savefig(chosen.picture, dpi=130)


if __name__ == "__main__":
    run(main)

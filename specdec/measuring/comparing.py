"""Several methods of drafting, decoded in turn on the same prompts, each beside plain decoding of its target."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

from specdec.core import rules
from specdec.core.compile import Runner
from specdec.core.generation import Generation
from specdec.core.grammar import Grammars
from specdec.core.sampling import Sampling
from specdec.core.timing import interleave
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.heads.base import Drafter
from specdec.measuring import measurement
from specdec.measuring.measurement import Prompt, PromptResult, seeded_generator
from specdec.measuring.report import Report, summarise_by_category
from specdec.proposers.base import Proposer
from specdec.target.model import Target


@dataclass(frozen=True)
class Method:
    """One method of drafting that is compared with others."""

    name: str
    target: Target
    proposer: Proposer
    drafting: Drafting
    depth: int  # the deepest draft
    baseline: str  # a name of the target's plain decoding; methods of one target share it
    drafter: Drafter | None = None  # to replay along plain answers; None for a proposer that is not trained

    def replayed(self, sampling: Sampling) -> Drafter | None:
        """The drafter, if replay applies at this temperature."""
        if self.drafter is None or not self.drafting.replayable(self.drafter, sampling):
            return None
        return self.drafter


Decoders = dict[str, Decoder]  # by Method.name; plain decoding by Method.baseline


def make_decoders(methods: list[Method], sampling: Sampling, stop: set[int], runners: Mapping[str, Runner]) -> Decoders:
    """A decoder for each method, and one of plain decoding for each baseline. runners: by baseline

    Raises ValueError if two methods have the same name.
    """
    decoders: Decoders = {}
    for method in methods:
        if method.name in decoders:
            raise ValueError(f"Two methods are called {method.name}: give them different names.")
        runner = runners[method.baseline]
        if method.baseline not in decoders:
            decoders[method.baseline] = Decoder(method.target, None, sampling=sampling, stop=stop, runner=runner)
        decoders[method.name] = method.drafting.decoder(
            method.target, method.proposer, sampling=sampling, stop=stop, runner=runner
        )
    return decoders


def decode_in_turn(
    decoders: Decoders, prompts: list[list[int]], *, turn: int, seed: int, max_new_tokens: int
) -> dict[str, Generation]:
    """The prompts, all at once, by each decoder, one decoder after the other. The order rotates with `turn`."""

    def decode(decoder: Decoder) -> Callable[[list[list[int]]], Generation]:
        return lambda tokens: decoder.generate(tokens, max_new_tokens, generator=seeded_generator(decoder.target, seed))

    return interleave({name: decode(decoder) for name, decoder in decoders.items()}, prompts, turn)


def compare_prompts(
    methods: list[Method],
    decoders: Decoders,
    prompts: list[Prompt],
    numbers: list[int],
    max_new_tokens: int,
    *,
    batch: int,
    grammars: Grammars | None = None,
) -> list[dict]:
    """Decodes the prompts of these numbers, `batch` at once, by all methods in turn. -> a row for JSON for each; see `results_of`

    grammars: compiles those of prompts; None: no answer follows one
    """
    sampling = decoders[methods[0].name].sampling
    tokens, turn = [prompts[number].tokens for number in numbers], numbers[0] // len(numbers)
    constraint = measurement.constrain_each(grammars, [prompts[number] for number in numbers])
    generations = measurement.answers(
        decoders, tokens, max_new_tokens, rows=batch, seeds=numbers, turn=turn, constraint=constraint
    )
    rows = []
    for place, number in enumerate(numbers):
        cells = {}
        for method in methods:
            result = measurement.compare(
                method.target,
                prompts[number],
                generations[method.baseline][place],
                generations[method.name][place],
                replayed=method.replayed(sampling) if sampling.greedy or not grammars else None,
                depth=method.depth,
                sampling=sampling,
                constraint=constraint(place),
            )
            figures = {name: getattr(result, name) for name in ("replayed_rounds", "replayed_accepted", "gap")}
            cells[method.name] = {"drafted": asdict(result.drafted), **figures}
        plain = {method.baseline: asdict(generations[method.baseline][place]) for method in methods}
        row = {"number": number, "temperature": sampling.temperature, "prompt": asdict(prompts[number])}
        rows.append({**row, "plain": plain, "methods": cells})
    return rows


def results_of(rows: list[dict], *, name: str, baseline: str, temperature: float) -> list[PromptResult]:
    """The results of one method at one temperature, by prompt. rows: as `compare_prompts` made them, in any order"""
    results = []
    for row in sorted(rows, key=lambda row: row["number"]):
        if row["temperature"] == temperature:
            cell = {**row["methods"][name]}
            plain, drafted = Generation(**row["plain"][baseline]), Generation(**cell.pop("drafted"))
            prompt = {key: value for key, value in row["prompt"].items() if key != "grammar"}
            results.append(PromptResult(Prompt(**prompt), plain, drafted, **cell))
    return results


def report_of(method: Method, results: list[PromptResult], temperature: float) -> Report:
    """The report of a method's results, with one for each category in it."""
    return summarise_by_category(
        results,
        depth=method.depth,
        temperature=temperature,
        adapted=method.target.adapted,
        lossy=method.drafting.rule in rules.LOSSY,
    )


def decode_batches(
    methods: list[Method],
    groups: list[list[list[int]]],
    *,
    sampling: Sampling,
    stop: set[int],
    max_new_tokens: int,
    progress: Callable[[list], Iterable] = iter,
) -> list[dict[str, Generation]]:
    """Groups of prompts, each at once by every method in turn, after a warm-up. -> as `decode_in_turn`, for each group

    All groups have the same size, and what is compiled is compiled for that size.
    """
    runners = {method.baseline: method.drafting.runner() for method in methods}
    decoders = make_decoders(methods, sampling, stop, runners)
    decode_in_turn(decoders, groups[0], turn=0, seed=0, max_new_tokens=min(8, max_new_tokens))
    return [
        decode_in_turn(decoders, group, turn=number, seed=number, max_new_tokens=max_new_tokens)
        for number, group in enumerate(progress(groups))
    ]

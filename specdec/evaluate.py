"""Validation is decoding: every prompt plainly and with drafts, in turn, and what that says.

tau is the number of tokens emitted per target pass of a round, the bonus or correction token counted:
tau = 1 + sum of survival. The first token of an answer comes from the prompt's pass and belongs to no round.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import torch

from specdec import replay
from specdec.compile import Runner
from specdec.decode import STAGES, Decoder, Generation
from specdec.drafter import Drafter, Head
from specdec.proposers.base import Proposer
from specdec.proposers.growth import Children, check_children
from specdec.proposers.heads import HeadProposer
from specdec.proposers.lookahead import Lookahead
from specdec.proposers.stopping import Stopping
from specdec.sampling import Sampling
from specdec.target import Target
from specdec.tree import TreeShape

TAU = "tokens emitted per target pass of a round, bonus or correction token counted; the prompt's own pass is no round"
RESAMPLES = 1000


@dataclass(frozen=True)
class Drafting:
    """How to draft and verify, as conf/decode says it.

    depth, width, nodes: see TreeShape; nodes: null: depth of a chain, else depth x width
    children, stopping: see HeadProposer; stopping holds the arguments of Stopping
    rule, lossy: see Decoder
    compile: whether the target's passes and the drafter's steps are compiled for the shapes that occur
    """

    depth: int
    width: int = 1
    nodes: int | None = None
    children: Children = "chosen"
    stopping: dict | None = None
    rule: str = "token"
    lossy: bool = False
    compile: bool = False

    def __post_init__(self):
        check_children(self.children)
        known = [field.name for field in fields(Stopping)]
        if not set(self.stopping or ()) <= set(known):
            raise ValueError(f"decode.stopping={self.stopping} may hold {', '.join(known)} and nothing else.")

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.depth, self.width, self.nodes or self.depth * self.width)

    def proposer(self, drafter: Head) -> Proposer:
        """What drafts with a trained drafter; a target that was trained to guess ahead of itself does so by Jacobi iteration."""
        if not isinstance(drafter, Drafter):
            if self.width > 1 or self.stopping is not None:
                raise ValueError(
                    f"{type(drafter).__name__} guesses by Jacobi iteration, a chain: set decode.width=1 (or tree= to compare) "
                    "and decode.stopping=null."
                )
            return Lookahead(drafter.target, window=self.depth, ngram=2, guesses=0, from_text=False)
        stopping = None if self.stopping is None else Stopping(**self.stopping)
        return HeadProposer(drafter, self.shape, children=self.children, stopping=stopping, compile=self.compile)

    def decoder(self, target: Target, proposer: Proposer | None, **arguments) -> Decoder:
        return Decoder(target, proposer, rule=self.rule, lossy=self.lossy, **arguments)

    def replayable(self, drafter: Head, sampling: Sampling) -> bool:
        """Whether replay tells tau under these settings: fixed chains of a drafter's steps, verified token by token."""
        if not isinstance(drafter, Drafter):
            return False
        plain = sampling == Sampling(temperature=sampling.temperature)
        return self.shape.chain and self.stopping is None and plain and (sampling.greedy or self.rule == "token")


@dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    tokens: list[int]


@dataclass(frozen=True)
class Row:
    """One prompt, decoded plainly and with drafts at one temperature."""

    prompt: Prompt
    plain: Generation
    drafted: Generation
    replayed_rounds: float  # expected rounds of drafting along the plain answer; nan without a drafter
    replayed_accepted: list[float]  # [K]
    gap: float | None  # at temperature 0, where the answers differ: the target's top-2 logit gap there; else None

    @property
    def num_rounds(self) -> int:
        return len(self.drafted.accepted[0])

    @property
    def num_emitted(self) -> int:
        """Tokens emitted by drafted rounds."""
        return sum(self.drafted.accepted[0]) + self.num_rounds


def measure(
    target: Target,
    proposer: Proposer,
    drafting: Drafting,
    prompts: list[Prompt],
    *,
    replayed: Head | None,
    sampling: Sampling,
    max_new_tokens: int,
    stop: set[int],
    seed: int,
    batch: int = 1,
    progress: Callable[[list], Iterable] = iter,
) -> list[Row]:
    """Each prompt is decoded plainly and with drafts, one after the other and in alternating order, after a warm-up.

    What compiling takes is not counted. What the proposer learned before is forgotten.
    replayed: the drafter to replay along the plain answers, where replay can tell tau
    batch: prompts decoded at once; rates are then those of the batch, shared out equally.
    """
    if batch < 1:
        raise ValueError(f"batch={batch} must be at least 1.")
    runner = Runner(drafting.compile)
    plain = Decoder(target, None, sampling=sampling, stop=stop, runner=runner)
    drafted = drafting.decoder(target, proposer, sampling=sampling, stop=stop, runner=runner)
    for decoder in (plain, drafted):
        decoder.generate([prompts[0].tokens], min(8, max_new_tokens), generator=_generator(target, seed, 0))
    proposer.forget()
    groups = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    rows = []
    for number, group in enumerate(progress(groups)):
        found: dict[Decoder, list[Generation]] = {}
        for decoder in (plain, drafted) if number % 2 else (drafted, plain):
            generator = _generator(target, seed, number)
            tokens = [prompt.tokens for prompt in group]
            found[decoder] = decoder.generate(tokens, max_new_tokens, generator=generator).split()
        for prompt, alone, together in zip(group, found[plain], found[drafted]):
            rounds, accepted, gap = float("nan"), [], None
            if isinstance(replayed, Drafter) and drafting.replayable(replayed, sampling):
                accept = replay.acceptance(
                    replayed, prompt.tokens, alone.tokens[0], depth=drafting.depth, temperature=sampling.temperature
                )
                rounds, counts = replay.rounds(accept)
                accepted = counts.tolist()
            if sampling.greedy:
                gap = top2_gap(target, prompt.tokens, alone.tokens[0], together.tokens[0], sampling)
            rows.append(Row(prompt, alone, together, rounds, accepted, gap))
    return rows


def _generator(target: Target, seed: int, number: int) -> torch.Generator:
    return torch.Generator(target.device).manual_seed(seed + number)


def top2_gap(
    target: Target, prompt: list[int], answer: list[int], other: list[int], sampling: Sampling
) -> float | None:
    """The gap between the target's two largest logits where two greedy answers part; None if they are the same."""
    if answer == other:
        return None
    same = next((i for i, (a, b) in enumerate(zip(answer, other)) if a != b), min(len(answer), len(other)))
    tokens = torch.tensor([prompt + answer[:same]], device=target.device)
    logits = target.logits(target.read(tokens, ()).final[:, -1:])  # [1, 1, V]
    before = torch.zeros_like(logits, dtype=torch.bool).scatter_(2, tokens[None], True)
    top = sampling.penalise(logits, before)[0, 0].topk(2).values
    return float(top[0] - top[1])


def summarise(
    rows: list[Row], *, depth: int, temperature: float, adapted: bool = False, lossy: bool = False, seed: int = 0
) -> dict:
    """One column of a report: overall figures with 95 % bootstrap intervals over prompts.

    adapted: `Target.adapted`; lossy: whether the rule that verified is one of rules.LOSSY
    """
    rounds = sum(row.num_rounds for row in rows)
    reached = [sum(a >= d for row in rows for a in row.drafted.accepted[0]) for d in range(1, depth + 1)]
    survival = [count / rounds if rounds else float("nan") for count in reached]
    before = [1.0, *survival[:-1]]
    stages = {name: 1e3 * sum(row.drafted.stages[name] for row in rows) / max(1, rounds) for name in STAGES}
    summary = {
        "temperature": temperature,
        "adapted_target": adapted,
        "lossy": lossy,
        "num_prompts": len(rows),
        "num_rounds": rounds,
        "tau": _tau(rows),
        "tau_ci": interval(rows, _tau, seed),
        "survival": survival,
        "acceptance": [s / b if b else float("nan") for s, b in zip(survival, before)],
        "tokens_per_second": rate(rows, "drafted"),
        "tokens_per_second_ci": interval(rows, lambda some: rate(some, "drafted"), seed),
        "baseline_tokens_per_second": rate(rows, "plain"),
        "speedup": _speedup(rows),
        "speedup_ci": interval(rows, _speedup, seed),
        "ms_per_round": stages,
    }
    if all(row.replayed_accepted for row in rows):
        summary["replayed_tau"] = _replayed_tau(rows)
        summary["replayed_tau_ci"] = interval(rows, _replayed_tau, seed)
    if temperature == 0:
        gaps = [row.gap for row in rows if row.gap is not None]
        summary["identical_outputs"] = 1 - len(gaps) / len(rows)
        summary["largest_gap_at_difference"] = max(gaps, default=None)
    else:
        summary["identical_outputs"] = None  # the law is the same, not the draw
    return summary


def report(rows: list[Row], **settings) -> dict:
    """`summarise` overall and by category."""
    categories = sorted({row.prompt.category for row in rows})
    by_category = {
        name: summarise([row for row in rows if row.prompt.category == name], **settings) for name in categories
    }
    return {**summarise(rows, **settings), "by_category": by_category}


def verdict(summary: dict) -> str:
    """One sentence on losslessness."""
    whose = "; outputs are those of the adapted target, not of the original one" if summary["adapted_target"] else ""
    if summary["lossy"]:
        return f"NOT lossless: this rule accepts what the target would seldom say, so answers follow another law{whose}"
    if summary["temperature"] > 0:
        return f"lossless by the acceptance rule (answers are draws from the same law, not the same draws){whose}"
    num = round(summary["identical_outputs"] * summary["num_prompts"])
    if num == summary["num_prompts"]:
        return f"lossless: all {num} answers equal plain decoding{whose}"
    return (
        f"{num} of {summary['num_prompts']} answers equal plain decoding; where they part, the target's two best logits "
        f"are at most {summary['largest_gap_at_difference']:.3g} apart (rounding, if that is small for the dtype){whose}"
    )


def by_depth(values: list[float]) -> str:
    """Survival or acceptance as a line of text, as far as it goes: drafts of some proposers are long and seldom."""
    last = max((depth for depth, value in enumerate(values, 1) if value >= 0.005), default=1)
    shown = values[: min(last, 8)]
    return " ".join(f"{value:.2f}" for value in shown) + (" .." if last > len(shown) else "")


def difference(rows: list[Row], others: list[Row], *, seed: int = 0) -> dict:
    """tau of `rows` minus tau of `others`, the same prompts in the same order, and its paired 95 % interval."""

    def statistic(pairs: list[tuple[Row, Row]]) -> float:
        return _tau([row for row, _ in pairs]) - _tau([other for _, other in pairs])

    pairs = list(zip(rows, others, strict=True))
    return {"tau_difference": statistic(pairs), "tau_difference_ci": interval(pairs, statistic, seed)}


def _tau(rows: list[Row]) -> float:
    rounds = sum(row.num_rounds for row in rows)
    return sum(row.num_emitted for row in rows) / rounds if rounds else float("nan")


def _replayed_tau(rows: list[Row]) -> float:
    rounds = sum(row.replayed_rounds for row in rows)
    return 1 + sum(sum(row.replayed_accepted) for row in rows) / rounds if rounds else float("nan")


def rate(rows: list[Row], kind: str) -> float:
    """Aggregate tokens over aggregate seconds of rounds."""
    generations = [row.drafted if kind == "drafted" else row.plain for row in rows]
    seconds = sum(generation.seconds for generation in generations)
    return sum(len(generation.tokens[0]) - 1 for generation in generations) / seconds if seconds else float("nan")


def _speedup(rows: list[Row]) -> float:
    return rate(rows, "drafted") / rate(rows, "plain")


def interval(rows: list, statistic: Callable[[list], float], seed: int) -> list[float]:
    """95 % percentile bootstrap over prompts: tokens of one prompt are strongly correlated."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(rows), (RESAMPLES, len(rows)), generator=generator).tolist()
    values = sorted(statistic([rows[i] for i in draw]) for draw in draws)
    cuts = statistics.quantiles(values, n=40)
    return [cuts[0], cuts[-1]]


def fastest_batch(
    decode: Callable[[list[list[int]]], float], prompts: list[list[int]], sizes: tuple[int, ...] = (1, 4, 16)
) -> int:
    """The size of group at which `decode`, which takes a group of prompts and returns its tokens/s, is fastest.

    Medians over the first three groups of each size, after a warm-up; sizes that the prompts do not fill are left out.
    """
    rates = {}
    for size in [size for size in sizes if size <= len(prompts)]:
        groups = [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)]
        decode(groups[0])
        rates[size] = statistics.median(map(decode, groups[:3]))
    return max(rates, key=lambda size: rates[size])

"""Drafting that chooses every round how much to draft, from a measured cost curve and calibrated acceptance probabilities.

A round with the drafts T takes V(1 + |T|) seconds to verify, and what drafting them took. It emits one token and the
accepted drafts: on average the sum of the probabilities of T's paths. Over many rounds the most tokens a second come from
choosing, in each round, what maximises

    expected tokens - rate * seconds

where `rate` is the tokens a second of such rounds (Dinkelbach's method for ratios). So a draft is worth verifying if its
probability exceeds rate times the seconds that it adds. The candidates of a round are text proposals, which cost nothing,
and those of a head, which grow one level at a time, as long as the next level is worth its step.

WHAT IS DECIDED WHEN. At temperature 0, and for chosen drafts at any temperature, each draft is a fixed token, and verifying
any set of them is lossless. A drafted token that was sampled from a distribution q may be left out only by what was known
before it was drawn: whether to draw at a depth is decided from q and from earlier draws, all of which are verified in any
case. What is verified beside draws is fixed before the first one (docs/methods.md, section 1).
"""

import statistics
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from specdec.core import masks
from specdec.core.constraint import Constraint
from specdec.core.devices import upload_values
from specdec.core.generation import Ends
from specdec.core.option_types import Text
from specdec.core.sampling import AnySampling, Randomness, RowSampling, draw_column, pick_tokens
from specdec.core.tree import Tree, make_one_hot, make_root, make_tree
from specdec.proposers.base import Proposer
from specdec.proposers.candidates import DECAY, Acceptance, BestSize, Candidates, Kind, RowCandidates
from specdec.proposers.costs import SIZES, Costs, MeasuredCosts, describe_conditions, find_costs_file, read_costs
from specdec.proposers.growth import widen_distribution
from specdec.proposers.heads import HeadProposer
from specdec.proposers.suffix import make_default_suffix
from specdec.proposers.text import Forced, TextProposer
from specdec.target.model import Target

SIBLINGS = 3  # candidates of a head for each token
MAX_HEAD_STEPS = 6  # steps of a head
RECENT_TIMINGS = 15  # timings whose median is the time of a step
LEARNING_SHARE = 0.01  # share of the time that rounds may cost which are made to learn something
MIN_PROBE_DISTANCE = 8  # rounds between two rounds without drafts that are made to measure one


@dataclass(frozen=True)
class AutoRound:
    """What one round drafts, and what is expected of it."""

    size: int  # nodes of a row's tree, the root included
    sources: Counter[str]  # drafts in the trees of all rows by Kind.source, without the copies that fill trees up
    head: bool  # whether the head drafts, even if none of its drafts was taken
    head_probe: bool  # whether it does to see whether it pays by now
    seconds: float  # expected, of verification and drafting
    plain_seconds: float  # seconds that plain decoding takes for as many tokens in as many rows
    head_seconds: float  # that the head took
    rows: list[RowCandidates]


@dataclass
class Account:
    """What was expected and observed since the last `reset_history`."""

    rounds: int = 0
    tokens: float = 0.0  # of all rows
    seconds: float = 0.0  # of verification and drafting, expected
    plain_seconds: float = 0.0  # seconds that plain decoding takes for the expected tokens, in as many rows
    head: int = 0  # rounds in which the head drafted
    sizes: Counter[int] = field(default_factory=Counter)  # rounds by the nodes of their trees

    def add(self, choice: AutoRound) -> None:
        """One round, before it is verified."""
        self.rounds += 1
        self.sizes[choice.size] += 1
        self.seconds += choice.seconds
        self.plain_seconds += choice.plain_seconds
        self.head += choice.head


class StepTimes:
    """Seconds of the parts of a round beside the target's pass, by name and rows: medians, as machines pause.

    A head's first step also reads prompts, and what was committed since it drafted. So one timing is not known yet.
    """

    def __init__(self) -> None:
        self.recent: dict[tuple[str, int], deque[float]] = {}

    def observe(self, name: str, batch_size: int, seconds: float) -> None:
        self.recent.setdefault((name, batch_size), deque(maxlen=RECENT_TIMINGS)).append(seconds)

    def seconds(self, name: str, batch_size: int) -> float:
        """For the nearest known number of rows; 0 for a step that is not known."""
        timings = [
            (abs(size - batch_size), times)
            for (step, size), times in self.recent.items()
            if step == name and len(times) > 1
        ]
        return statistics.median_low(min(timings, key=lambda timing: timing[0])[1]) if timings else 0.0


class AutoProposer(Proposer):
    """Chooses the drafts of its members, or none, by costs and acceptance probabilities. See the head of this file.

    members: at most one trained head, and text proposers; a head's shape is that of `steady`
    costs: user-supplied ones, or their file (costs.read_costs); None: those of this device are measured, or read from disk
    Raises ValueError for other members, and for a file that holds no costs.
    """

    def __init__(self, target: Target, *, members: list[Proposer], costs: Costs | Text | None = None):
        self.texts = [member for member in members if isinstance(member, TextProposer)]
        heads = [member for member in members if isinstance(member, HeadProposer)]
        if len(self.texts) + len(heads) < len(members) or len(heads) > 1 or not members:
            raise ValueError(
                "members= of auto must be one trained head (head, draft), or proposers that look at texts (suffix, ngram, "
                "retrieval), or both."
            )
        self.shaped_head = next(iter(heads), None)  # the head with its own shape
        self.head = self.shaped_head and self.shaped_head.as_chain(MAX_HEAD_STEPS)
        self.members: list[Proposer] = [*self.texts, *([self.head] if self.head else [])]
        self.target = target
        self.costs = read_costs(Path(costs)) if isinstance(costs, str) else costs
        self.measures_costs = costs is None
        self.costs_by_file: dict[Path, Costs] = {}  # of this device, by their files
        self.progress = lambda items, _: items  # of measuring
        self.target_layers = self.head.target_layers if self.head else ()
        self.selects = all(member.selects for member in members)
        self.linear = target.recurrent
        self.depth = min(max(SIZES) - 1, max(member.depth for member in self.members))
        self.reset_history()

    @classmethod
    def make_default(cls, target: Target, head: Proposer, *, costs: Costs | Text | None = None) -> "AutoProposer":
        """A trained head beside a suffix tree and what a grammar forces, as commands draft by default."""
        return cls(target, members=[Forced(target, num=16), make_default_suffix(target), head], costs=costs)

    def reset_history(self):
        for member in self.members:
            member.reset_history()
        self.acceptance, self.times, self.account = Acceptance(), StepTimes(), Account()
        # Rounds since the head drafted, since one had drafts, and since one had none
        self.rounds_since = Counter[str]()
        self.advantage = 1.0  # expected speed of the last round with drafts over plain decoding
        self.probing_head = False  # whether a trial goes on in the next round
        self.probe_seconds = 0.0  # of the head in the last one
        self.speedup = (0.0, 0.0)  # recent tokens, and seconds, in units of plain rounds
        self.num_rows = 0
        self.tokens_left, self.ends = (
            list[int](),
            Ends(frozenset()),
        )  # tokens that answers may still have; what ends them
        self.round: AutoRound | None = None  # the last one of this batch

    @property
    def compile_seconds(self) -> float:
        return sum(member.compile_seconds for member in self.members)

    @property
    def running(self) -> list[int]:
        """Rows whose answers have not ended."""
        return [row for row, num in enumerate(self.tokens_left) if num > 0]

    def steady(self):
        return self.shaped_head

    def predicted_speedup(self) -> float | None:
        """The speedup that was expected of all rounds since `reset_history`; None without a round."""
        return self.account.plain_seconds / self.account.seconds if self.account.seconds else None

    # A batch

    def attach_verifier(self, verifier, sampling):
        if not self.measures_costs:
            return
        sampling = sampling.costliest if isinstance(sampling, RowSampling) else sampling
        conditions = find_costs_file(describe_conditions(verifier, sampling))
        if conditions not in self.costs_by_file:
            progress = lambda items, title: self.progress(items, title)
            self.costs_by_file[conditions] = MeasuredCosts(verifier, sampling, linear=self.linear, progress=progress)
        self.costs = self.costs_by_file[conditions]
        if self.num_rows:
            self.costs.prepare(self.num_rows)

    def begin(self, tokens, num):
        for member in self.members:
            member.begin(tokens, num)
        self.newest, self.tokens_left = [0] * len(tokens), [sys.maxsize] * len(tokens)
        self.constraints: list[Constraint | None] = [None] * len(tokens)
        if self.num_rows != len(tokens):
            self.num_rows, self.speedup = len(tokens), (0.0, 0.0)
        self.round = None
        assert self.costs is not None
        self.costs.prepare(len(tokens))

    def commit(self, tokens, features, num, counts):
        if self.head:
            self.head.commit(tokens, features, num, counts)
        tokens = tokens.cpu()  # once for all that look at them
        for member in self.texts:
            member.commit(tokens, features[..., :0], num, counts)
        rows = [row[:count] for row, count in zip(tokens.tolist(), counts)]
        self.newest = [new[-1] if new else newest for new, newest in zip(rows, self.newest)]
        if self.round is None:
            return  # the prompts
        for candidates, new in zip(self.round.rows, rows):
            candidates.teach(new)
        tokens_got = sum(len(self.ends.cut_tokens([], new[:left])[0]) for new, left in zip(rows, self.tokens_left))
        gained, spent = self.speedup
        self.speedup = gained + tokens_got / max(1, len(self.running)), spent
        self.account.tokens += tokens_got

    def select(self, rows, answer_lengths):
        for member in self.members:
            member.select(rows, answer_lengths)
        self.newest = [self.newest[row] for row in rows]
        if len(rows) > self.num_rows and self.costs is not None:
            self.costs.prepare(len(rows))
        self.num_rows = len(rows)

    def replace(self, rows, answer_lengths, opening):
        for member in self.members:
            member.replace(rows, answer_lengths, opening)
        for row, following, count in zip(rows, opening.following.tolist(), opening.counts):
            self.newest[row] = following[count - 1]

    def attach_cache(self, cache):
        for member in self.members:
            member.attach_cache(cache)

    def finish(self, answer_lengths):
        for member in self.members:
            member.finish(answer_lengths)

    def limit(self, tokens_left, ends):
        self.tokens_left, self.ends = tokens_left, Ends(ends)

    def constrain(self, constraints):
        self.constraints = constraints
        for member in self.texts:
            member.constrain(constraints)

    # A round

    def propose(self, sampling, generator):
        assert self.costs is not None
        rows = [
            RowCandidates(self.acceptance, [token], tokens_left, self.ends.tokens, constraint)
            for token, tokens_left, constraint in zip(self.newest, self.tokens_left, self.constraints)
        ]
        curve, active = self.costs.curve(self.num_rows), len(self.running)
        fastest, (gained, spent) = min(curve.values()), self.speedup
        rate = active / fastest * (max(1.0, gained / spent) if spent else 1.0)  # never less than that of plain decoding
        candidates = Candidates(rows, self.running, curve, rate, self.linear)
        due = self.rounds_since["plain"] >= MIN_PROBE_DISTANCE and self._is_due(
            "plain", 2 * (self.advantage - 1) * fastest, fastest
        )
        plain_probe = due and self.costs.steps is None  # user-supplied costs need none
        # Where looking at texts takes long and nothing is worth drafting, most rounds do without
        unused = self.rounds_since["drafts"]
        if (
            unused < MIN_PROBE_DISTANCE
            or unused % MIN_PROBE_DISTANCE == 0
            or self._seconds("texts") < LEARNING_SHARE * fastest
        ):
            self._add_text_guesses(rows)
        head = head_probe = False
        distributions, drafting, head_seconds = list[Tensor](), 0.0, 0.0
        if self.head is not None and not plain_probe and candidates.room:
            head, head_probe = self._decide_head(self.head, candidates, fastest)
            if head:
                distributions, drafting, head_seconds = self._add_head_drafts(
                    self.head, candidates, sampling, generator
                )
        best = BestSize(1, curve[1], float(active)) if plain_probe else candidates.best()
        tree, sources = self._plant_tree(rows, best.size, distributions)
        self.round = AutoRound(
            size=tree.tokens.shape[1],
            sources=sources,
            head=head,
            head_probe=head_probe,
            seconds=best.seconds + drafting,
            plain_seconds=best.tokens * curve[1] / max(1, active),
            head_seconds=head_seconds,
            rows=rows,
        )
        self.speedup = DECAY * gained, DECAY * spent + self.round.seconds / fastest
        self.account.add(self.round)
        self._count(self.round)
        return tree

    def record_cost(self, cost):
        assert self.round is not None and self.costs is not None
        # Processes with one target must decide alike
        seconds = self.target.share.gather_values(cost.seconds - self.round.head_seconds)[0]
        self.costs.observe(self.num_rows, self.round.size, seconds)

    def _count(self, choice: AutoRound) -> None:
        """Counts rounds since rare events. A trial takes two: the first one reads what was committed meanwhile."""
        if choice.head_probe:
            self.probe_seconds = choice.head_seconds + (self.probe_seconds if self.probing_head else 0.0)
        self.probing_head = choice.head_probe and not self.probing_head
        for event, happened in (("head", choice.head), ("drafts", choice.sources), ("plain", choice.size == 1)):
            self.rounds_since[event] = 0 if happened else self.rounds_since[event] + 1
        if choice.size > 1:
            self.advantage = choice.plain_seconds / choice.seconds

    def _is_due(self, event: str, lost: float, fastest: float) -> bool:
        """Whether rounds that lose so many seconds cost less than the share LEARNING of the time since the last ones.

        fastest: seconds of the fastest round
        """
        return self.rounds_since[event] >= lost / (LEARNING_SHARE * fastest)

    def _add_text_guesses(self, rows: list[RowCandidates]) -> None:
        """Adds the guesses of text proposers."""
        start = time.perf_counter()
        for member in self.texts:
            for number, row in enumerate(rows):
                row.add_guesses(type(member).__name__, member.guess(number))
        for row in rows:
            row.normalise()
        self._observe("texts", start, self.compile_seconds)

    def _decide_head(self, head: HeadProposer, candidates: Candidates, fastest: float) -> tuple[bool, bool]:
        """Whether the head drafts, and whether only for a trial: to see whether it pays by now."""
        source = "drawn" if ("drawn", 1) in self.acceptance.counts else "head"
        typical = [self.acceptance.typical(source, depth) for depth in range(1, head.depth + 1)]
        gain = candidates.gain_of_head(typical, self._seconds("absorb"), self._seconds("step"))
        if gain > 0:
            return True, False
        lost = max(2 * -gain / candidates.rate, self.probe_seconds)
        head_probe = self.probing_head or self._is_due("head", lost, fastest)
        return head_probe, head_probe

    def _add_head_drafts(
        self, head: HeadProposer, candidates: Candidates, sampling: AnySampling, generator: Randomness
    ) -> tuple[list[Tensor], float, float]:
        """Adds the head's candidates, level by level.

        -> the distributions that were sampled from, [B, W] each; expected and observed seconds of the steps
        """
        rows, device, drafter = candidates.rows, self.target.device, head.drafter
        depth, timing_name, spent = min(head.depth, candidates.room), "absorb", 0.0
        start, compiled = time.perf_counter(), self.compile_seconds
        _, first = head.absorb()
        state, logits, _ = first
        seen = masks.causal_mask(depth, device).expand(len(rows), -1, -1)
        spine, distributions = [0] * len(rows), list[Tensor]()
        for level in range(1, depth + 1):
            if sampling.greedy:
                probabilities, tokens = head.likeliest(logits, min(SIBLINGS, drafter.vocab_size))
                spent += self._observe(timing_name, start, compiled)
                for number, row in enumerate(rows):
                    kinds = [
                        Kind("head", probability, level, rank) for rank, probability in enumerate(probabilities[number])
                    ]
                    nodes = [row.add(token, spine[number], kind) for token, kind in zip(tokens[number], kinds)]
                    spine[number] = next((node for node in nodes if node not in row.barred), nodes[0])
                drafts = upload_values([[row.tokens[node]] for row, node in zip(rows, spine)], device)
            else:
                distribution = sampling.distribution(logits[:, 0])  # [B, W]
                top_probabilities = distribution.max(-1).values.tolist()
                spent += self._observe(timing_name, start, compiled)
                kinds = [Kind("drawn", sure, level) for sure in top_probabilities]
                likely = [row.path_probability(node, kind) for row, node, kind in zip(rows, spine, kinds)]
                if not candidates.gain(likely, drawn=True) > 0:
                    break  # decided by distributions and earlier draws, not by this one
                if level == 1:
                    candidates.fix_nodes(likely)
                drafts = drafter.to_target(pick_tokens(distribution, draw_column(len(rows), generator, device)))[
                    :, None
                ]
                for number, (row, (token,)) in enumerate(zip(rows, drafts.tolist())):
                    spine[number] = row.add(token, spine[number], kinds[number], drawn=True)
                distributions.append(distribution)
            if level == depth:
                break
            following = self.acceptance.typical("head" if sampling.greedy else "drawn", level + 1)
            likely = [following * row.probabilities[node] * row.is_useful(level + 1) for row, node in zip(rows, spine)]
            if candidates.gain(likely, drawn=not sampling.greedy) <= candidates.rate * self._seconds("step"):
                break
            timing_name, start, compiled = "step", time.perf_counter(), self.compile_seconds
            state, logits, _ = head.step(level + 1, level - 1, state, drafts, seen[:, level - 1 : level, :level])
        head.cache.drop_pending()
        for row in rows:
            row.normalise()
        return distributions, self._seconds("absorb") + (level - 1) * self._seconds("step"), spent

    def _plant_tree(
        self, rows: list[RowCandidates], size: int, distributions: list[Tensor]
    ) -> tuple[Tree, Counter[str]]:
        """-> the tree of `size` nodes in each row, and who drafts them. distributions: [B, W] of each sampled level"""
        device, sources = self.target.device, Counter[str]()
        if size == 1:
            return make_root(upload_values(self.newest, device)), sources
        row_drafts = [row.choose(size - 1, chain=self.linear) for row in rows]
        for drafts in row_drafts:
            sources.update(drafts.sources)
        tree = make_tree(self.newest, [drafts.drafts for drafts in row_drafts], device)
        tree = tree.pad_to(min(size - 1, self.depth) if tree.linear else size - 1)
        if not distributions:
            return tree, sources
        assert self.head is not None
        probs = make_one_hot(tree.tokens, self.target.vocab_size, distributions[0].dtype)  # [B, N, V]
        for level, distribution in enumerate(distributions):
            places = upload_values([drafts.drawn[level] for drafts in row_drafts], device)
            probs[torch.arange(len(rows), device=device), places] = widen_distribution(self.head.drafter, distribution)
        return Tree(tree.tokens, tree.parents, probs, tree.linear), sources

    def _seconds(self, name: str) -> float:
        """Of a part of a round beside the target's pass."""
        user_seconds = None if self.costs is None else self.costs.steps
        return self.times.seconds(name, self.num_rows) if user_seconds is None else user_seconds.get(name, 0.0)

    def _observe(self, name: str, start: float, compiled: float) -> float:
        """Takes in the seconds of a step that began at `start`, unless it compiled something -> seconds without compiling

        compiled: compile_seconds then
        """
        seconds = self.target.share.gather_values(time.perf_counter() - start)[0]
        compiling = self.compile_seconds - compiled
        if not compiling:
            self.times.observe(name, self.num_rows, seconds)
        return max(0.0, seconds - compiling)

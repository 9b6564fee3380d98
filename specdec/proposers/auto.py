"""Drafting that chooses in every round how much to draft, from measured costs and calibrated acceptance probabilities.

A round with the drafts T takes V(1 + |T|) seconds to verify, and the seconds of drafting. It emits one token and the
accepted drafts: on average the sum of the probabilities of T's paths. Over many rounds, the most tokens a second come
from the choice that maximises in each round

    expected tokens - rate * seconds

where `rate` is the tokens a second of such rounds (Dinkelbach's method for ratios). So a draft is worth verifying if
its probability exceeds rate times the seconds that it adds. The candidates of a round are text proposals, which cost
nothing, and those of a head. They grow one level at a time, as long as the next level is worth its step.

WHAT IS DECIDED WHEN. At temperature 0, and for chosen drafts at any temperature, each draft is a fixed token, and
verifying any set of them is lossless. A draft that was sampled from a distribution q may be left out only by what was
known before it was drawn. So q and earlier draws decide whether a depth is drawn, and all draws are verified. The nodes
beside draws are fixed before the first draw (docs/methods.md, section 1).
"""

import statistics
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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

SIBLINGS = 3  # candidates of a head for each token; later ones are seldom accepted
MAX_HEAD_STEPS = 6  # steps of a head in a round, at most
RECENT_TIMINGS = 15  # timings whose median is the time of a step: machines pause
LEARNING_SHARE = 0.01  # share of the time that rounds may cost which are made to learn something
MIN_PROBE_DISTANCE = 8  # rounds between two rounds without drafts that measure the plain pass, at least


@dataclass(frozen=True)
class AutoRound:
    """The choice of one round, and its expected figures."""

    size: int  # nodes of a row's tree, with the root
    drafts: bool  # whether any row has drafts, copies that fill trees up aside
    head: bool  # whether the head drafts, even if none of its drafts is taken
    head_probe: bool  # whether the head drafts only to see if it pays by now
    seconds: float  # expected seconds of verification and drafting
    plain_seconds: float  # seconds of plain decoding for as many tokens in as many rows
    head_seconds: float  # observed seconds of the head
    rows: list[RowCandidates]


class HeadDrafts(NamedTuple):
    """The head's part in a round."""

    distributions: list[Tensor]  # [B, W] each, one for each sampled level
    expected_seconds: float  # seconds of its steps, by earlier rounds
    seconds: float  # observed seconds of its steps


class StepTimes:
    """Median seconds of the stages of a round beside the target's pass, by name and batch size.

    A head's first step also reads prompts, and all tokens since it drafted last. So one timing alone says nothing.
    Later steps seldom take longer, so they count as much as the shortest first step until they are known.
    """

    def __init__(self) -> None:
        self.recent: dict[tuple[str, int], deque[float]] = {}

    def observe(self, name: str, batch_size: int, seconds: float) -> None:
        """Adds one timing."""
        self.recent.setdefault((name, batch_size), deque(maxlen=RECENT_TIMINGS)).append(seconds)

    def seconds(self, name: str, batch_size: int) -> float:
        """Median seconds at the nearest batch size with two timings."""
        sizes = [size for (step, size), times in self.recent.items() if step == name and len(times) > 1]
        if sizes:
            nearest = min(sizes, key=lambda size: abs(size - batch_size))
            return statistics.median_low(self.recent[name, nearest])
        first_steps = [min(times) for (step, _), times in self.recent.items() if step == "absorb"]
        return min(first_steps, default=0.0) if name == "step" else 0.0


class AutoProposer(Proposer):
    """Chooses the drafts of its members, or none, by costs and acceptance probabilities. See the head of this file.

    members: at most one trained head, and text proposers; a head's shape is that of `steady`
    costs: costs or their file (costs.read_costs); None: this device's, measured or read from disk
    Raises ValueError for other members, and for a file that holds no costs.
    """

    def __init__(self, target: Target, *, members: list[Proposer], costs: Costs | Text | None = None):
        self.texts = [member for member in members if isinstance(member, TextProposer)]
        heads = [member for member in members if isinstance(member, HeadProposer)]
        if len(self.texts) + len(heads) < len(members) or len(heads) > 1 or not members:
            raise ValueError(
                "members= of auto must be one trained head (head, draft), or proposers that look at texts (suffix, "
                "ngram, retrieval), or both."
            )
        self.shaped_head: HeadProposer | None = None  # the head with its own shape
        self.head: HeadProposer | None = None  # the same as a chain
        self.target_layers: tuple[int, ...] = ()
        self.members: list[Proposer] = [*self.texts]
        for head in heads:
            self.shaped_head, self.head = head, head.as_chain(MAX_HEAD_STEPS)
            self.target_layers = self.head.target_layers
            self.members.append(self.head)
        self.depth = min(max(SIZES) - 1, max(member.depth for member in self.members))
        self.selects = all(member.selects for member in members)
        self.target, self.linear = target, target.recurrent
        self.costs = read_costs(Path(costs)) if isinstance(costs, str) else costs
        self.measures_costs = costs is None
        self.costs_by_file: dict[Path, Costs] = {}  # this device's
        self.progress = lambda items, _: items  # shows the measurement of costs
        self.reset_history()

    @classmethod
    def make_default(cls, target: Target, head: Proposer, *, costs: Costs | Text | None = None) -> "AutoProposer":
        """The default of commands: a trained head, a suffix tree, and the tokens that a grammar forces."""
        return cls(target, members=[Forced(target, num=16), make_default_suffix(target), head], costs=costs)

    def reset_history(self):
        for member in self.members:
            member.reset_history()
        self.acceptance = Acceptance()
        self.times = StepTimes()
        # Rounds since the head drafted, since a round had drafts, and since a round had none
        self.rounds_since = Counter[str]()
        self.advantage = 1.0  # expected speed of the last round with drafts over plain decoding
        self.probing_head = False  # whether the next round continues a probe of the head
        self.probe_seconds = 0.0  # seconds of the head in its last probe
        self.speedup = (0.0, 0.0)  # recent tokens, and seconds, in units of plain rounds
        self.num_rows = 0
        self.tokens_left: list[int] = []  # [B] tokens that each answer may still have
        self.ends = Ends(frozenset())
        self.round: AutoRound | None = None  # the last round of this batch

    @property
    def compile_seconds(self) -> float:
        return sum(member.compile_seconds for member in self.members)

    @property
    def running(self) -> list[int]:
        """Rows whose answers have not ended."""
        return [row for row, num in enumerate(self.tokens_left) if num > 0]

    def steady(self):
        return self.shaped_head

    # A batch

    def attach_verifier(self, verifier, sampling):
        if not self.measures_costs:
            return
        sampling = sampling.costliest if isinstance(sampling, RowSampling) else sampling
        conditions = find_costs_file(describe_conditions(verifier, sampling))
        if conditions not in self.costs_by_file:
            self.costs_by_file[conditions] = MeasuredCosts(verifier, sampling, linear=self.linear)
        self.costs = self.costs_by_file[conditions]
        if self.num_rows:
            self.costs.prepare(self.num_rows, self.progress)

    def begin(self, tokens, num):
        for member in self.members:
            member.begin(tokens, num)
        self.newest = [0] * len(tokens)  # [B] the last token of each row
        self.tokens_left = [sys.maxsize] * len(tokens)
        self.constraints: list[Constraint | None] = [None] * len(tokens)
        if self.num_rows != len(tokens):
            self.num_rows, self.speedup = len(tokens), (0.0, 0.0)
        self.round = None
        assert self.costs is not None
        self.costs.prepare(len(tokens), self.progress)

    def commit(self, tokens, features, num, counts):
        if self.head:
            self.head.commit(tokens, features, num, counts)
        tokens = tokens.cpu()  # once for all members
        for member in self.texts:
            member.commit(tokens, features[..., :0], num, counts)
        rows = [row[:count] for row, count in zip(tokens.tolist(), counts)]
        self.newest = [new[-1] if new else newest for new, newest in zip(rows, self.newest)]
        if self.round is None:
            return  # the prompts
        for candidates, new in zip(self.round.rows, rows):
            candidates.teach(new)
        emitted = sum(len(self.ends.cut_tokens([], new[:left])[0]) for new, left in zip(rows, self.tokens_left))
        gained, spent = self.speedup
        self.speedup = gained + emitted / max(1, len(self.running)), spent

    def select(self, rows, answer_lengths):
        for member in self.members:
            member.select(rows, answer_lengths)
        self.newest = [self.newest[row] for row in rows]
        if len(rows) > self.num_rows and self.costs is not None:
            self.costs.prepare(len(rows), self.progress)
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
        # Start without candidates. A round is worth its tokens less its seconds at the rate of recent rounds.
        rows = [
            RowCandidates(self.acceptance, [token], tokens_left, self.ends.tokens, constraint)
            for token, tokens_left, constraint in zip(self.newest, self.tokens_left, self.constraints)
        ]
        curve, num_running = self.costs.curve(self.num_rows), len(self.running)
        fastest = min(curve.values())
        candidates = Candidates(rows, self.running, curve, self._find_rate(fastest), self.linear)

        # Collect candidates: guesses of texts first, which cost nothing, then those of the head.
        if self._uses_texts(fastest):
            self._add_text_guesses(rows)
        plain_probe = self._is_plain_probe_due(candidates, fastest)
        head = head_probe = False
        head_drafts = HeadDrafts([], 0.0, 0.0)
        if self.head is not None and not plain_probe and candidates.room:
            head, head_probe = self._decide_head(self.head, candidates, fastest)
            if head:
                head_drafts = self._add_head_drafts(self.head, candidates, sampling, generator)

        # Take the best size, and plant the tree.
        best = BestSize(1, curve[1], float(num_running)) if plain_probe else candidates.best()
        tree, drafts = self._plant_tree(rows, best.size, head_drafts.distributions)

        # Remember the choice, by which later rounds are decided.
        self.round = AutoRound(
            size=tree.tokens.shape[1],
            drafts=drafts,
            head=head,
            head_probe=head_probe,
            seconds=best.seconds + head_drafts.expected_seconds,
            plain_seconds=best.tokens * curve[1] / max(1, num_running),
            head_seconds=head_drafts.seconds,
            rows=rows,
        )
        gained, spent = self.speedup
        self.speedup = DECAY * gained, DECAY * spent + self.round.seconds / fastest
        self._count(self.round)
        return tree

    def _find_rate(self, fastest: float) -> float:
        """Tokens a second of recent rounds in all running rows, never less than that of plain decoding."""
        gained, spent = self.speedup
        speedup = max(1.0, gained / spent) if spent else 1.0
        return len(self.running) / fastest * speedup

    def _is_plain_probe_due(self, candidates: Candidates, fastest: float) -> bool:
        """Whether this round drafts nothing, to measure the plain pass. User-supplied costs need no such round.

        candidates: guesses of texts alone; a round with good ones is none for it
        """
        assert self.costs is not None
        if self.costs.steps is not None or self.rounds_since["plain"] < MIN_PROBE_DISTANCE:
            return False
        advantage = max(self.advantage, candidates.advantage)
        return self._is_due("plain", 2 * (advantage - 1) * fastest, fastest)

    def _uses_texts(self, fastest: float) -> bool:
        """Whether text proposers are asked. If that takes long and never pays, most rounds do without."""
        unused = self.rounds_since["drafts"]
        if unused < MIN_PROBE_DISTANCE or unused % MIN_PROBE_DISTANCE == 0:
            return True
        return self._seconds("texts") < LEARNING_SHARE * fastest

    def record_cost(self, cost):
        assert self.round is not None and self.costs is not None
        # Processes with one target must decide alike
        seconds = self.target.share.gather_values(cost.seconds - self.round.head_seconds)[0]
        self.costs.observe(self.num_rows, self.round.size, seconds)

    def _count(self, choice: AutoRound) -> None:
        """Counts rounds since rare events. A probe of the head takes two rounds: the first also reads old tokens."""
        if choice.head_probe:
            self.probe_seconds = choice.head_seconds + (self.probe_seconds if self.probing_head else 0.0)
        self.probing_head = choice.head_probe and not self.probing_head
        for event, happened in (("head", choice.head), ("drafts", choice.drafts), ("plain", choice.size == 1)):
            self.rounds_since[event] = 0 if happened else self.rounds_since[event] + 1
        if choice.size > 1:
            self.advantage = choice.plain_seconds / choice.seconds

    def _is_due(self, event: str, lost: float, fastest: float) -> bool:
        """Whether rounds that lose `lost` seconds cost less than LEARNING_SHARE of the time since the last event.

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
        """Whether the head drafts, and whether it does so as a probe, to see whether it pays by now."""
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
    ) -> HeadDrafts:
        """Adds the head's candidates level by level, as long as the next level is worth its step."""
        rows, drawn = candidates.rows, not sampling.greedy
        depth = min(head.depth, candidates.room)
        seen = masks.causal_mask(depth, self.target.device).expand(len(rows), -1, -1)
        spine = [0] * len(rows)  # [B] node of each row that the next level continues
        distributions: list[Tensor] = []
        timing_name, spent = "absorb", 0.0
        start, compile_seconds = time.perf_counter(), self.compile_seconds
        _, (state, logits, _) = head.absorb()
        for level in range(1, depth + 1):
            # Draft this level. Sampled drafts are drawn only if they pay by distributions and earlier draws.
            if drawn:
                distribution = sampling.distribution(logits[:, 0])  # [B, W]
                likeliest = distribution.max(-1).values.tolist()
                spent += self._observe(timing_name, start, compile_seconds)
                kinds = [Kind("drawn", probability, level) for probability in likeliest]
                if not self._pays_draw(candidates, spine, kinds):
                    break
                indices = pick_tokens(distribution, draw_column(len(rows), generator, self.target.device))
                drafts = head.drafter.to_target(indices)[:, None]
                for row, (token,) in enumerate(drafts.tolist()):
                    spine[row] = rows[row].add(token, spine[row], kinds[row], drawn=True)
                distributions.append(distribution)
            else:
                siblings = zip(*head.likeliest(logits, min(SIBLINGS, head.drafter.vocab_size)))
                spent += self._observe(timing_name, start, compile_seconds)
                spine = [row.add_siblings(node, level, *pair) for row, node, pair in zip(rows, spine, siblings)]
                drafts = upload_values([[row.tokens[node]] for row, node in zip(rows, spine)], self.target.device)

            # Run the next step, if it pays.
            if level == depth or not self._pays_step(candidates, spine, level + 1, drawn=drawn):
                break
            timing_name, start, compile_seconds = "step", time.perf_counter(), self.compile_seconds
            state, logits, _ = head.step(level + 1, level - 1, state, drafts, seen[:, level - 1 : level, :level])
        head.cache.drop_pending()
        for row_candidates in rows:
            row_candidates.normalise()
        return HeadDrafts(distributions, self._seconds("absorb") + (level - 1) * self._seconds("step"), spent)

    def _pays_draw(self, candidates: Candidates, spine: list[int], kinds: list[Kind]) -> bool:
        """Whether a draw below these nodes [B] pays. Before the first draw, the nodes beside draws are fixed."""
        likely = [row.path_probability(node, kind) for row, node, kind in zip(candidates.rows, spine, kinds)]
        if not candidates.gain(likely, drawn=True) > 0:
            return False
        if kinds[0].depth == 1:
            candidates.fix_nodes(likely)
        return True

    def _pays_step(self, candidates: Candidates, spine: list[int], level: int, *, drawn: bool) -> bool:
        """Whether a step of the head below these nodes [B], for drafts of this level, pays."""
        acceptance = self.acceptance.typical("drawn" if drawn else "head", level)
        likely = [
            acceptance * row.probabilities[node] * row.is_useful(level) for row, node in zip(candidates.rows, spine)
        ]
        return candidates.gain(likely, drawn=drawn) > candidates.rate * self._seconds("step")

    def _plant_tree(self, rows: list[RowCandidates], size: int, distributions: list[Tensor]) -> tuple[Tree, bool]:
        """Returns the tree of `size` nodes in each row, and whether any row has drafts.

        distributions: [B, W] each, one for each sampled level
        """
        device = self.target.device
        if size == 1:
            return make_root(upload_values(self.newest, device)), False
        row_drafts = [row.choose(size - 1, chain=self.linear) for row in rows]
        has_drafts = any(drafts.nodes for drafts in row_drafts)
        tree = make_tree(self.newest, [drafts.nodes for drafts in row_drafts], device)
        tree = tree.pad_to(min(size - 1, self.depth) if tree.linear else size - 1)
        if not distributions:
            return tree, has_drafts
        assert self.head is not None
        probs = make_one_hot(tree.tokens, self.target.vocab_size, distributions[0].dtype)  # [B, N, V]
        for level, distribution in enumerate(distributions):
            places = upload_values([drafts.drawn[level] for drafts in row_drafts], device)
            probs[torch.arange(len(rows), device=device), places] = widen_distribution(self.head.drafter, distribution)
        return Tree(tree.tokens, tree.parents, probs, tree.linear), has_drafts

    def _seconds(self, name: str) -> float:
        """Seconds of a stage of a round beside the target's pass, user-supplied or observed."""
        user_seconds = None if self.costs is None else self.costs.steps
        return self.times.seconds(name, self.num_rows) if user_seconds is None else user_seconds.get(name, 0.0)

    def _observe(self, name: str, start: float, compile_seconds: float) -> float:
        """Notes the seconds of a stage since `start`, unless it compiled something; returns them without compiling.

        compile_seconds: total seconds of compiling at `start`
        """
        seconds = self.target.share.gather_values(time.perf_counter() - start)[0]
        compiling = self.compile_seconds - compile_seconds
        if not compiling:
            self.times.observe(name, self.num_rows, seconds)
        return max(0.0, seconds - compiling)

"""Drafting that chooses how much to draft, every round, from what a round costs here and how likely drafts are.

A round with the drafts T takes V(1 + |T|) seconds to verify, and what drafting them took; it emits one token and the
accepted drafts, of which sum(chance of each path in T) are expected. Over many rounds the most tokens a second come from
choosing, in each round, what maximises

    expected tokens - rate * seconds

where `rate` is the tokens a second of such rounds (Dinkelbach's method for ratios). So a draft is worth verifying if its
chance exceeds rate times the seconds that it adds. The candidates of a round are text proposals, which cost nothing, and
those of a head, which grow one level at a time, as long as the next level is worth its step.

WHAT IS DECIDED WHEN. At temperature 0, and for chosen drafts at any temperature, each draft is a fixed token, and verifying
any set of them is lossless. A drafted token that was sampled from a law q may be left out only by what was known before it
was drawn: whether to draw at a depth is decided from q and from earlier draws, all of which are verified in any case. What is
verified beside draws is fixed before the first one (docs/methods.md, section 1).
"""

import sys
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from specdec.core import masks
from specdec.core.cache import RowCache
from specdec.core.devices import given
from specdec.core.generation import Ends
from specdec.core.grammar import Constraint
from specdec.core.sampling import AnySampling, RowSampling, pick, uniforms
from specdec.core.tree import Tree, certain, plant, root
from specdec.proposers.account import Account, Choice
from specdec.proposers.backlog import Backlog
from specdec.proposers.base import Proposer
from specdec.proposers.candidates import Candidates
from specdec.proposers.chances import Chances, Kind
from specdec.proposers.costs import Conditions, Costs, Longer, open_costs, read_told
from specdec.proposers.forced import usual_forced
from specdec.proposers.growth import widened
from specdec.proposers.heads import HeadProposer
from specdec.proposers.pool import Pool
from specdec.proposers.realised import Realised
from specdec.proposers.rhythm import Rhythm
from specdec.proposers.round_value import RoundValue
from specdec.proposers.step_times import StepTimes
from specdec.proposers.suffix import usual_suffix
from specdec.proposers.text import TextProposer
from specdec.target.model import Target

SIBLINGS = 3  # candidates of a head for each token
FORGET = 0.98  # what a round counts for the rate after the next one
TRUST = 10.0  # accepted drafts, and rounds, for which chances and costs count as right at first
MOST = 31  # drafts
DEEPEST = 6  # steps of a head


class Auto(Proposer):
    """Chooses the drafts of its members, or none, by costs and chances. See the head of this file.

    members: at most one trained head, and proposers that look at texts; what a head's shape says is not used
    costs: given ones, or the file of given ones (costs.read_told); None: those of this device are measured, or read from disk
    Raises ValueError for other members, and for a file that holds no costs.
    """

    linear = False

    def __init__(self, target: Target, *, members: list[Proposer], costs: Costs | str | None = None):
        self.texts = [member for member in members if isinstance(member, TextProposer)]
        heads = [member for member in members if isinstance(member, HeadProposer)]
        if len(self.texts) + len(heads) < len(members) or len(heads) > 1 or not members:
            raise ValueError(
                "members= of auto must be one trained head (head, draft), or proposers that look at texts (suffix, ngram, "
                "retrieval), or both."
            )
        self.head = heads[0].as_chain(DEEPEST) if heads else None
        self.members: list[Proposer] = [*self.texts, *([self.head] if self.head else [])]
        costs = read_told(Path(costs)) if isinstance(costs, str) else costs
        self.target, self.given = target, costs
        self.target_layers = self.head.target_layers if self.head else ()
        self.selects = all(member.selects for member in members)
        self.linear = target.recurrent
        self.depth = min(MOST, max(member.depth for member in self.members))
        self.costs: Costs | None = costs
        self.opened: dict[Conditions, Costs] = {}
        self.longer: dict[int, Longer] = {}  # what longer contexts add, with laws of any kind
        self.progress = lambda items, _: items
        self.forget()

    @classmethod
    def usual(cls, target: Target, head: Proposer, *, costs: Costs | str | None = None) -> "Auto":
        """A trained head beside a suffix tree and what a grammar forces, as commands draft by default."""
        return cls(target, members=[usual_forced(target), usual_suffix(target), head], costs=costs)

    def forget(self):
        for member in self.members:
            member.forget()
        self.chances, self.account = Chances(), Account()
        self.gained, self.spent = 0.0, 0.0  # tokens and seconds, forgotten slowly
        self.steps = StepTimes()  # of the head's "absorb" and "step", and of "reading" a token that waited
        self.accepting = Realised(TRUST)  # accepted drafts
        # seconds of rounds without and with drafts
        self.lasting = {drafts: Realised(TRUST) for drafts in (False, True)}
        self.rhythm = Rhythm()
        self.stepped = 0.0  # seconds of the head in this round
        # late: tokens of the backlog that the head reads in this round, without those of the last round
        self.backlog, self.late = Backlog(), 0
        self.num_rows = 0
        self.left, self.ends = list[int](), Ends(frozenset())  # tokens that answers may still have; what ends them
        self.constraints = list[Constraint | None]()  # of the grammars that the answers follow
        self.cache: RowCache | None = None
        self.entries: int | None = None  # of the target's cache in this round

    @property
    def compile_seconds(self) -> float:
        return sum(member.compile_seconds for member in self.members)

    def meet(self, verifier, sampling):
        if self.given is None:
            sampling = sampling.costliest if isinstance(sampling, RowSampling) else sampling
            conditions = Conditions.of(verifier, sampling)
            if conditions not in self.opened:
                self.opened[conditions] = open_costs(
                    self.target, verifier, sampling, linear=self.linear, longer=self.longer,
                    progress=lambda *given: self.progress(*given),
                )  # fmt: skip
            self.costs = self.opened[conditions]
            if self.num_rows:
                self.costs.prepare(self.num_rows)

    def share(self, cache):
        self.cache = cache

    def begin(self, tokens, num):
        for member in self.members:
            member.begin(tokens, num)
        self.newest, self.left = [0] * len(tokens), [sys.maxsize] * len(tokens)
        self.constraints = [None] * len(tokens)
        self.backlog.begin(len(tokens))
        self.rhythm.begin()
        if self.num_rows != len(tokens):
            self.num_rows, self.gained, self.spent = len(tokens), 0.0, 0.0
        self.pools: list[Pool] | None = None
        assert self.costs is not None
        self.costs.prepare(len(tokens))

    @property
    def running(self) -> list[int]:
        """Rows whose answers have not ended."""
        return [row for row, num in enumerate(self.left) if num > 0]

    @property
    def num_active(self) -> int:
        return len(self.running)

    def commit(self, tokens, features, num, counts):
        if self.head:
            self.head.commit(tokens, features, num, counts)
        tokens = tokens.cpu()  # once for all that look at them
        for member in self.texts:
            member.commit(tokens, features[..., :0], num, counts)
        rows = [row[:count] for row, count in zip(tokens.tolist(), counts)]
        self.newest = [new[-1] if new else newest for new, newest in zip(rows, self.newest)]
        self.backlog.commit(counts, opening=self.pools is None)
        if self.pools is not None:
            for pool, new in zip(self.pools, rows):
                pool.teach(self.chances, new)
            taken = [self.ends.cut([], new[:left])[0] for new, left in zip(rows, self.left)]
            got, emitting = float(sum(map(len, taken))), sum(map(bool, rows))
            self.gained = FORGET * self.gained + got
            self.accepting.saw(self.hoped, got - emitting)
            self.account.tokens += got
            self.pools = None

    def select(self, rows, nums):
        for member in self.members:
            member.select(rows, nums)
        self.newest = [self.newest[row] for row in rows]
        if len(rows) > self.num_rows and self.costs is not None:
            self.costs.prepare(len(rows))
        self.spent *= self._plain(len(rows)) / self._plain(self.num_rows)
        self.num_rows = len(rows)
        self.backlog.select(rows)

    def replace(self, rows, nums, opening):
        for member in self.members:
            member.replace(rows, nums, opening)
        for row, following, count in zip(rows, opening.following.tolist(), opening.counts):
            self.newest[row] = following[count - 1]
        self.backlog.replace(rows, opening.counts)

    def finish(self, nums):
        for member in self.members:
            member.finish(nums)

    def timed(self, cost):
        say = self.target.share.all_say  # processes with one target must decide alike
        verifying, rest = say(cost.stages["verify"])[0], say(cost.seconds - cost.stages["verify"] - self.stepped)[0]
        if self.costs is not None:
            self.costs.saw(self.num_rows, self.size, verifying, self.entries)
        self.steps.saw("rest without drafts" if self.size == 1 else "rest", self.num_rows, rest)
        if self.costs is not None and self.costs.steps is None and not self.late:
            beside = rest - self._step_seconds("rest without drafts")
            self.lasting[self.size > 1].saw_ratio((verifying + self.stepped + beside) / self.expected_seconds)

    # A round

    def limit(self, left, ends):
        before = max(1, self.num_active)
        self.left, self.ends = left, Ends(ends)
        self.gained *= self.num_active / before  # fewer running rows emit fewer tokens in a round, in proportion

    def constrain(self, constraints):
        self.constraints = constraints
        for member in self.texts:
            member.constrain(constraints)

    def propose(self, sampling, generator):
        self._prepare()
        self.stepped, self.late = 0.0, 0
        self.backlog.next_round()
        pools = self.pools = [
            Pool([token], left, self.ends.tokens, constraint)
            for token, left, constraint in zip(self.newest, self.left, self.constraints)
        ]
        seconds, laws = 0.0, list[Tensor]()
        worth = trial = False
        check = self._checks_plain()
        fastest = min(self.value.curve.values())
        if not self.rhythm.rests(self._step_seconds("texts"), fastest, check=check):
            self._look()
        if self.head is not None and not check and self.value.room:
            gain, reading = self._gain_of_head(self.head), self._reading()
            # what joins in most rounds is in the gain
            worth = gain > (self.value.rate * reading / self._rounds_left() if self.rhythm.waited else 0.0)
            # a trial goes on for a second round, and what the head did not read while it waited, it reads in the trial
            trial = not worth and self.rhythm.tries(2 * max(0.0, -gain) / self.value.rate + reading, fastest)
            if worth or trial:
                self.account.head += 1
                self.account.trials += trial
                laws, levels = self._grow(self.head, sampling, generator)
                self.rhythm.head_drafted(trial=trial)
                seconds = self._step_seconds("absorb") + (levels - 1) * self._step_seconds("step")
                for pool in pools:
                    pool.settle()
            else:
                self.rhythm.head_waited()
        tree = self._plant(laws, seconds, plain=check)
        self.rhythm.ended(any_draft=bool(self.sources))
        self.account.choices.append(Choice(self.size, self.sources, worth or trial, trial))
        return tree

    def _look(self) -> None:
        """Adds what proposers of texts guess to the pools."""
        assert self.pools is not None
        start = time.perf_counter()
        for member in self.texts:
            for row, pool in enumerate(self.pools):
                pool.add_guesses(type(member).__name__, member.guess(row), self.chances)
        for pool in self.pools:
            pool.settle()
        self.steps.saw("texts", self.num_rows, self.target.share.all_say(time.perf_counter() - start)[0])

    def _checks_plain(self) -> bool:
        """Whether this round drafts nothing, to see what that takes. Told costs are believed."""
        assert self.costs is not None
        due = self.costs.steps is None and self.rhythm.checks_plain()
        self.account.checks += due
        return due

    def _plant(self, laws: list[Tensor], drafting: float, *, plain: bool) -> Tree:
        """The tree of the best size. laws: [B, W] of each level that was sampled; drafting: seconds so far; plain: no drafts"""
        assert self.pools is not None
        pools, num_rows = self.pools, self.num_rows
        if plain:
            num, verifying, expected = 1, self.value.curve[1], float(self.num_active)
        else:
            num, verifying, expected = self.candidates.best()
        self.size, self.hoped, self.sources = num, (expected - self.num_active) / self.value.faith, Counter[str]()
        self.spent = FORGET * self.spent + verifying + drafting
        self.expected_seconds = verifying / self.lasting[num > 1].ratio + drafting
        # seconds of plain decoding for as many tokens
        as_plain = expected * self.value.curve[1] / max(1, self.num_active)
        self.account.add(num, expected, verifying + drafting, as_plain)
        self.rhythm.chose(num, advantage=as_plain / (verifying + drafting))
        device = self.target.device
        if num == 1:
            return root(given(self.newest, device))
        rows = [pool.choose(num - 1, chain=self.linear) for pool in pools]
        for row in rows:
            self.sources.update(row.sources)
        tree = plant(self.newest, [row.drafts for row in rows], device)
        tree = tree.filled(min(num - 1, self.depth) if tree.linear else num - 1)
        self.size = tree.tokens.shape[1]
        if not laws:
            return tree
        assert self.head is not None
        probs = certain(tree.tokens, self.target.vocab_size, laws[0].dtype)  # [B, N, V]
        for level, law in enumerate(laws):
            places = given([row.drawn[level] for row in rows], device)
            probs[torch.arange(num_rows, device=device), places] = widened(self.head.drafter, law)
        return Tree(tree.tokens, tree.parents, probs, tree.linear)

    def _grow(
        self, head: HeadProposer, sampling: AnySampling, generator: torch.Generator | None
    ) -> tuple[list[Tensor], int]:
        """Adds the head's candidates to the pools, level by level -> the laws that were sampled from, [B, W] each; steps"""
        assert self.pools is not None
        pools, num_rows, device = self.pools, self.num_rows, self.target.device
        drafter, depth = head.drafter, min(head.depth, self.value.room)
        top = min(SIBLINGS, drafter.vocab_size)
        self.late = self.backlog.read()
        start, compiled = time.perf_counter(), head.compile_seconds
        _, first = head.absorb()
        state, logits, *_ = first
        seen = masks.causal(depth, device).expand(num_rows, -1, -1)
        spine, laws, step = [0] * num_rows, list[Tensor](), "absorb"
        for d in range(1, depth + 1):
            if sampling.greedy:
                chances, tokens = head.likeliest(logits, top)
                self._time(step, start, head.compile_seconds - compiled)
                for row, pool in enumerate(pools):
                    numbers = [
                        pool.add(token, spine[row], Kind("head", chance, d, place), self.chances)
                        for place, (chance, token) in enumerate(zip(chances[row], tokens[row]))
                    ]
                    spine[row] = next((number for number in numbers if number not in pool.barred), numbers[0])
                chosen = given([[pool.tokens[node]] for pool, node in zip(pools, spine)], device)
            else:
                law = sampling.law(logits[:, 0])  # [B, W]
                surest = law.max(-1).values.tolist()
                self._time(step, start, head.compile_seconds - compiled)
                kinds = [Kind("drawn", sure, d) for sure in surest]
                likely = [pool.path_chance(node, kind, self.chances) for pool, node, kind in zip(pools, spine, kinds)]
                if not self.candidates.gain(likely, drawn=True) > 0:
                    break  # decided by laws and by earlier draws, not by this one
                if d == 1:
                    self.candidates.settle_beside(likely)
                draft = drafter.to_target(pick(law, uniforms(num_rows, generator, device)))
                for row, (pool, token) in enumerate(zip(pools, draft.tolist())):
                    spine[row] = pool.add(token, spine[row], kinds[row], self.chances, drawn=True)
                laws.append(law)
                chosen = draft[:, None]
            if d == depth:
                break
            following = self.chances.typical("head" if sampling.greedy else "drawn", d + 1)
            likely = [following * pool.chances[node] * pool.wants(d + 1) for pool, node in zip(pools, spine)]
            if self.candidates.gain(likely, drawn=not sampling.greedy) <= self.value.rate * self._step_seconds("step"):
                break
            start, compiled, step = time.perf_counter(), head.compile_seconds, "step"
            state, logits, *_ = head.step(d + 1, d - 1, state, chosen, seen[:, d - 1 : d, :d])
        head.cache.drop_pending()
        return laws, d

    # What is worth it

    @property
    def candidates(self) -> Candidates:
        assert self.pools is not None
        return Candidates(self.pools, self.running, self.value, self.linear)

    def _prepare(self) -> None:
        """Fixes what the round is judged by. The rate is never less than that of plain decoding."""
        assert self.costs is not None
        self.entries = None if self.cache is None else self.cache.visible
        known = self.costs.curve(self.num_rows, self.entries)
        plain_rest = self._step_seconds("rest without drafts")
        more = max(0.0, self._step_seconds("rest") - plain_rest) if plain_rest else 0.0
        sizes = [num for num in self.costs.sizes if num in known and num <= 1 + MOST]
        curve = {num: (known[num] + more * (num > 1)) * self.lasting[num > 1].ratio for num in sizes}
        plain = self.num_active / min(curve.values())
        rate = max(plain, self.gained / self.spent) if self.spent else plain
        self.value = RoundValue(curve, rate, self.accepting.ratio, self.num_active)

    def _plain(self, num_rows: int) -> float:
        """Seconds of a round without drafts."""
        assert self.costs is not None
        return self.costs.best_size(num_rows, 1, self.entries)[1]

    def _gain_of_head(self, head: HeadProposer) -> float:
        """What the head is expected to add to the value of the round beside its steps, by what it was right about so far."""
        source = "drawn" if ("drawn", 1) in self.chances.depths else "head"
        typical = [self.chances.typical(source, d) for d in range(1, head.depth + 1)]
        first = self._step_seconds("absorb") + self.backlog.joining * self._step_seconds("reading")
        return self.candidates.gain_of_head(typical, first, self._step_seconds("step"))

    def _reading(self) -> float:
        """Seconds that the head needs, beside its first step, for what it did not read: prompts, and what came since it drafted."""
        return self.backlog.late * self._step_seconds("reading")

    def _rounds_left(self) -> float:
        """In which a head that reads now may draft: half of the tokens that the answers may still have."""
        return max(1.0, sum(self.left) / max(1, self.num_active) / 2)

    def _step_seconds(self, name: str) -> float:
        told = None if self.costs is None else self.costs.steps
        return self.steps.seconds(name, self.num_rows) if told is None else told.get(name, 0.0)

    def _time(self, name: str, start: float, compiling: float) -> None:
        """Takes in what a step has taken, unless it was compiled."""
        seconds = self.target.share.all_say(time.perf_counter() - start)[0]
        self.stepped += max(0.0, seconds - compiling)
        if compiling > 0:
            return
        if name == "absorb" and self.late:
            name, seconds = "reading", max(0.0, seconds - self._step_seconds("absorb")) / self.late
        self.steps.saw(name, self.num_rows, seconds)

    def predicted(self) -> float | None:
        """The speedup that was expected of all rounds since `forget`; None without a round."""
        return self.account.plain / self.account.seconds if self.account.seconds else None

"""Whether an engine drafts and decodes as this project's decoder does: greedy decodings of the same prompts, compared."""

import copy
from dataclasses import dataclass, field

from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.heads.base import Drafter
from specdec.heads.dflash import BlockDrafter
from specdec.heads.mtp import MTP
from specdec.measuring.measurement import top2_gap
from specdec.proposers.base import Proposer
from specdec.target.model import Target


@dataclass(frozen=True)
class Decoding:
    """What a decoder did with some prompts, P of them.

    answers: [P][.] token ids
    rounds: [P] passes of the target after the prompt's own
    drafted: by (prompt, tokens of the answer so far), the ids drafted there; empty where an engine does not report them
    accepted, offered: drafted tokens by the engine's own counters
    """

    answers: list[list[int]]
    rounds: list[int]
    drafted: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    accepted: int = 0
    offered: int = 0

    def tau(self, prompts: list[int] | None = None) -> float:
        """Over these prompts; None: all"""
        chosen = range(len(self.answers)) if prompts is None else prompts
        return sum(len(self.answers[n]) - 1 for n in chosen) / max(1, sum(self.rounds[n] for n in chosen))

    def share_right(self) -> float:
        """The share of rounds whose drafts are all what the answer then says."""
        right = [_agree(ids, self.answers[row][written:]) for (row, written), ids in self.drafted.items()]
        return sum(right) / len(right)


def _agree(ids: list[int], others: list[int]) -> bool:
    """Whether two lists are equal as far as the shorter one goes."""
    return ids[: len(others)] == others[: len(ids)]


class Recorder(Proposer):
    """Another proposer, whose trees are kept."""

    def __init__(self, proposer: Proposer):
        self.proposer, self.target_layers, self.depth = proposer, proposer.target_layers, proposer.depth
        self.trees: list[list[list[int]]] = []  # [rounds][B][1 + K] token ids, the root first

    def begin(self, tokens, num):
        self.proposer.begin(tokens, num)

    def commit(self, tokens, features, num, counts):
        self.proposer.commit(tokens, features, num, counts)

    def propose(self, sampling, generator):
        tree = self.proposer.propose(sampling, generator)
        self.trees.append(tree.tokens.tolist())
        return tree


def decode(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    *,
    num_drafts: int,
    max_new_tokens: int,
    stop: set[int],
    batch: int = 8,
) -> Decoding:
    """Greedy decoding with chains of `num_drafts`, by this project's decoder."""
    answers: list[list[int]] = []
    drafted: dict[tuple[int, int], list[int]] = {}
    rounds: list[int] = []
    for start in range(0, len(prompts), batch):
        recorder = Recorder(Drafting(depth=num_drafts).proposer(drafter))
        decoder = Decoder(target, recorder, sampling=Sampling(), stop=stop)
        generation = decoder.generate(prompts[start : start + batch], max_new_tokens)
        for row, accepted in enumerate(generation.accepted):
            written = 1  # by the prompt's own pass
            for trees, count in zip(recorder.trees, accepted):
                drafted[start + row, written] = trees[row][1:]
                written += count + 1
            rounds.append(len(accepted))
        answers += generation.tokens
    return Decoding(answers, rounds, drafted)


class FirstNormBlockDrafter(BlockDrafter):
    """A block drafter as vLLM's CPU build runs it: the first layer's weight norms the features' keys of all layers.

    vLLM norms them in one call of an operator that has a weight for each layer on a GPU, and one weight on a CPU.
    """

    def context(self, h, positions, cache):
        norms = [layer.k_norm for layer in self.layers]
        for layer in self.layers:
            layer.k_norm = norms[0]
        super().context(h, positions, cache)
        for layer, norm in zip(self.layers, norms):
            layer.k_norm = norm


def as_vllm_runs_it(drafter: Drafter) -> Drafter:
    """A copy that computes what vLLM on a CPU computes where that is known to differ."""
    drafter = copy.copy(drafter)
    if isinstance(drafter, MTP):
        drafter.zero_first = True
    elif type(drafter) is BlockDrafter:
        drafter.__class__ = FirstNormBlockDrafter
    return drafter


@dataclass(frozen=True)
class Agreement:
    """An engine's decoding beside this project's.

    tau, served_tau: of this project's decoder and of the engine
    difference: served_tau / tau - 1
    difference_as_run_there: the same against a drafter that computes what the engine is known to compute
    same_answers: prompts with the same answer
    largest_gap_at_difference: of the other prompts, the largest difference between the target's two best logits where
        the answers part; None if there are none
    difference_of_same_answers: as difference_as_run_there, over prompts with the same answer
    same_drafts, rounds_compared: rounds with the same drafts, of those that start at the same place; None where the
        engine does not report its drafts
    accepted, offered: drafted tokens, by the engine's counters
    """

    num_prompts: int
    tau: float
    served_tau: float
    difference: float
    difference_as_run_there: float
    same_answers: int
    largest_gap_at_difference: float | None
    difference_of_same_answers: float | None
    same_drafts: int | None
    rounds_compared: int | None
    accepted: int
    offered: int

    def __str__(self) -> str:
        parts = [
            f"tau {self.tau:.3f} here, {self.served_tau:.3f} in the engine ({100 * self.difference:+.1f} %)",
            f"{self.same_answers} of {self.num_prompts} answers are the same",
        ]
        if self.largest_gap_at_difference is not None:
            parts.append(
                f"the engine's tau on these {100 * (self.difference_of_same_answers or 0):+.1f} %; where the other answers "
                f"part, the target's two best logits differ by at most {self.largest_gap_at_difference:.2g}"
            )
        parts.append(f"the engine's counters: {self.accepted} of {self.offered} drafts accepted")
        if self.same_drafts is not None:
            parts.append(f"the same drafts in {self.same_drafts} of {self.rounds_compared} rounds")
        return "; ".join(parts)

    def faithful(self, *, exact: bool) -> bool:
        """Whether the engine drafts as trained: the same answers, and the same drafts but for near ties, or else as many
        accepted. exact: every draft of the head is right, so the engine must accept every one."""
        if self.same_answers < self.num_prompts or not self.offered:
            return False
        if exact and self.accepted < self.offered:
            return False
        if self.same_drafts is None or self.rounds_compared is None:
            return abs(self.difference_as_run_there) < 1e-6
        return self.rounds_compared > 0 and self.same_drafts >= 0.98 * self.rounds_compared


def compare(
    target: Target, prompts: list[list[int]], *, own: Decoding, as_run: Decoding, served: Decoding
) -> Agreement:
    """own: decoded here; as_run: here too, with a drafter that computes what the engine computes; served: by the engine"""
    alike = [n for n, pair in enumerate(zip(own.answers, served.answers)) if pair[0] == pair[1]]
    parted = [three for three in zip(prompts, own.answers, served.answers) if three[1] != three[2]]
    gaps = [top2_gap(target, *three, Sampling()) for three in parted]
    common = as_run.drafted.keys() & served.drafted.keys()
    same = sum(_agree(served.drafted[key], as_run.drafted[key]) for key in common)
    return Agreement(
        num_prompts=len(prompts),
        tau=own.tau(),
        served_tau=served.tau(),
        difference=served.tau() / own.tau() - 1,
        difference_as_run_there=served.tau() / as_run.tau() - 1,
        same_answers=len(alike),
        largest_gap_at_difference=max((gap for gap in gaps if gap is not None), default=None),
        difference_of_same_answers=served.tau(alike) / as_run.tau(alike) - 1 if alike else None,
        same_drafts=same if served.drafted else None,
        rounds_compared=len(common) if served.drafted else None,
        accepted=served.accepted,
        offered=served.offered,
    )

"""Whole rounds of a batch as one CUDA graph: draft, verify, accept, keep the path.

All that a round changes is in buffers that the graph reads and writes. So the device goes on from round to round
without the host, which reads the accepted tokens of a round while the next one runs. The host learns one round late
that an answer has ended: its row then runs one round in vain. docs/gpu.md says which decoders have such rounds.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.core import compile, rules
from specdec.core.cache import RowCache
from specdec.core.devices import LateValues, copy_from_host, upload_tensor, upload_values
from specdec.core.sampling import AnySampling, Randomness, Sampling
from specdec.core.tree import make_root
from specdec.proposers.base import Proposer
from specdec.proposers.heads import HeadProposer
from specdec.proposers.new_tokens import RoundState
from specdec.target.verifier import Verifier


@dataclass(frozen=True)
class RoundBuffers:
    """The state of B rows between two rounds, at fixed places in memory."""

    lengths: Tensor  # [B] committed entries of the target's cache
    skipped: Tensor  # [B] see RowCache
    newest: Tensor  # [B] newest token
    drafter: RoundState | None  # state of the head; None without one
    running: Tensor  # [B] 1 for a row that commits tokens, 0 for one that has ended
    numbers: Tensor  # [M] random numbers of a round, see `draw_numbers`
    result: Tensor  # [B, P + 1] tokens that follow the nodes of the accepted path, and their number

    def list_state(self) -> list[Tensor]:
        """What a round reads of the round before."""
        return [self.lengths, self.newest, *(self.drafter.list_tensors() if self.drafter else [])]


class DeviceRound:
    """A round of B rows that a device makes alone, captured.

    cache, verify, proposer: parts of a batch, of which only addresses stay here; proposer None: plain decoding
    """

    def __init__(self, cache: RowCache, verify: Verifier, proposer: HeadProposer | None, sampling: Sampling):
        self.sampling, self.num_drafts, self.num_drawn, depth = sampling, 0, 0, 0
        if proposer is not None:
            depth, self.num_drafts = proposer.depth, proposer.count_drafts(sampling)
            self.num_drawn = proposer.count_draws(sampling)  # random numbers of a row's drafts
        num_draws = 0 if sampling.greedy else self.num_drawn + self.num_drafts + 1
        num_rows, device = len(cache.lengths), cache.lengths.device
        self.buffers = RoundBuffers(
            lengths=cache.lengths.clone(),
            skipped=cache.skipped.clone(),
            newest=torch.zeros_like(cache.lengths),
            drafter=None if proposer is None else proposer.round_state().clone(),
            running=torch.ones_like(cache.lengths),
            numbers=torch.zeros(num_draws * num_rows, dtype=torch.float64, device=device),
            result=torch.zeros(num_rows, depth + 2, dtype=torch.long, device=device),
        )
        state = self.buffers.list_state()
        before = [tensor.clone() for tensor in state]

        def restore() -> None:
            for tensor, value in zip(state, before):
                tensor.copy_(value)

        run = functools.partial(self._run, cache, verify, proposer)
        self.start = compile.capture_step(run, device, (proposer or verify).runner.pool, restore=restore)

    def _run(self, cache: RowCache, verify: Verifier, proposer: HeadProposer | None) -> None:
        """Makes one round."""
        buffers, state = self.buffers, self.buffers.drafter
        num_rows = len(buffers.lengths)

        # Draft a tree.
        tree = make_root(buffers.newest)
        if proposer and state:
            draws = buffers.numbers[: self.num_drawn * num_rows].view(-1, num_rows, 1).unbind()
            tree, state = proposer.draft_from_state(state, self.sampling, draws)

        # Verify it.
        places = torch.arange(tree.tokens.shape[1], device=buffers.lengths.device)
        view = cache.with_tensors(
            cache.keys_and_values,
            buffers.lengths,
            skipped=buffers.skipped,
            slots=buffers.lengths[:, None] + places,
        )
        verdict = verify.decide(tree, view, self._fix_draws(), self.sampling)

        # Keep the accepted path, and change the state.
        path, following = verdict.follow_path(tree, proposer.depth if proposer else 0)
        features = verdict.output.features
        if not tree.linear:
            view.keep_path(path)
            features = features.gather(1, path[..., None].expand(-1, -1, features.shape[-1]))
        num_kept = verdict.num_kept * buffers.running
        buffers.result.copy_(torch.cat([following, verdict.num_kept[:, None]], dim=1))
        buffers.newest.copy_(verdict.next_token.clamp(min=0))
        buffers.lengths.add_(num_kept)
        if buffers.drafter and state:
            buffers.drafter.copy_(replace(state, tokens=following.clamp(min=0), features=features, num=num_kept))

    def _fix_draws(self) -> rules.Draws:
        """The random numbers of verification."""
        if self.sampling.greedy:
            return rules.Draws(None)
        num_rows = len(self.buffers.lengths)
        numbers = self.buffers.numbers[self.num_drawn * num_rows :]
        return rules.FixedDraws(numbers[:-num_rows].view(num_rows, self.num_drafts), numbers[-num_rows:, None])

    def draw_numbers(self, source: Randomness) -> None:
        """Draws the random numbers of a round: of drafts [num_drawn, B], verification [B, num_drafts], last tokens [B].

        A row's own generator gives them in the order in which a round with the host draws them.
        """
        numbers = self.buffers.numbers
        num = len(numbers) // len(self.buffers.lengths)
        if not num:
            return
        if not isinstance(source, Sequence):
            place = numbers.device if source is None else source.device
            values = torch.rand(len(numbers), generator=source, dtype=torch.float64, device=place)
        else:
            drawn_rows = [_draw_row(generator, num, numbers.device) for generator in source]
            if len({row.device for row in drawn_rows}) > 1:
                drawn_rows = [upload_tensor(row, numbers.device) for row in drawn_rows]
            rows = torch.stack(drawn_rows)
            drawn, verified, last = rows.split([self.num_drawn, self.num_drafts, 1], dim=1)
            values = torch.cat([drawn.T.flatten(), verified.flatten(), last.flatten()])
        copy_from_host(numbers, values)


def _draw_row(generator: torch.Generator | None, num: int, device: torch.device) -> Tensor:
    """[num] random numbers from [0, 1) in float64 of one row. device: place of those without a generator"""
    place = device if generator is None else generator.device
    return torch.rand(num, generator=generator, dtype=torch.float64, device=place)


class DeviceLoop:
    """Rounds of one batch on a device, one behind the other, and what the host knows of them.

    newest [B]: newest token of each row
    """

    def __init__(self, device_round: DeviceRound, cache: RowCache, proposer: HeadProposer | None, newest: Tensor):
        self.round, self.cache, self.proposer = device_round, cache, proposer
        self.running: list[bool] | None = None  # [B] rows that commit tokens
        self.host_lengths = list(cache.host_lengths)
        self.drafter_lengths, self.num_waiting = [0] * len(newest), [0] * len(newest)
        buffers = device_round.buffers
        for buffer, value in zip(
            (buffers.lengths, buffers.skipped, buffers.newest), (cache.lengths, cache.skipped, newest)
        ):
            buffer.copy_(value)
        if proposer is not None and buffers.drafter:
            buffers.drafter.copy_(proposer.round_state())
            self.drafter_lengths, self.num_waiting = list(proposer.cache.host_lengths), proposer.count_waiting()

    def launch(self, running: list[bool], source: Randomness) -> None:
        """Starts a round. running [B]: rows that commit tokens"""
        buffers = self.round.buffers
        if running != self.running:
            self.running = running
            buffers.running.copy_(upload_values([int(runs) for runs in running], buffers.running.device))
        self.round.draw_numbers(source)
        self.round.start()

    def copy_result(self) -> LateValues:
        """RoundBuffers.result of the round that was started last, to be read later."""
        return LateValues(self.round.buffers.result)

    def note_counts(self, counts: list[int]) -> None:
        """Notes the numbers of tokens [B] that a round committed."""
        self.host_lengths = [length + count for length, count in zip(self.host_lengths, counts)]
        self.drafter_lengths = [length + count for length, count in zip(self.drafter_lengths, self.num_waiting)]
        self.num_waiting = counts

    def leave(self) -> Tensor:
        """Gives the state back to cache and proposer, once all rounds are noted. Returns the newest tokens [B]."""
        buffers = self.round.buffers
        self.cache.rewind((buffers.lengths.clone(), self.host_lengths))
        if self.proposer is not None and buffers.drafter:
            self.proposer.restore_round(buffers.drafter.clone(), self.drafter_lengths, self.num_waiting)
        return buffers.newest.clone()


def find_device_round(
    cache: RowCache, verify: Verifier, proposer: Proposer | None, sampling: AnySampling
) -> DeviceRound | None:
    """The captured round of batches with these caches; None if the host has to take part (docs/gpu.md)."""
    if not isinstance(sampling, Sampling) or sampling.penalises or verify.distribution:
        return None
    if not verify.capturable or cache.memory is None:
        return None
    runner, shape, memory = verify.runner, None, [*cache.groups.values()]
    if proposer is not None:
        if not isinstance(proposer, HeadProposer) or not proposer.can_leave_host(sampling):
            return None
        runner, shape = proposer.runner, (proposer.shape, proposer.children)
        memory += proposer.cache.groups.values()
    key = "round", shape, len(cache.lengths), *verify.settings(sampling), compile.locate_memory(memory)
    return runner.find_graph(key, lambda: DeviceRound(cache, verify, proposer, sampling))

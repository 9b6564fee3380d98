"""Requests that are decoded together: the jobs, what happens to them, and the lane that they share."""

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from specdec.core.constraint import Constraint
from specdec.core.generation import Ends
from specdec.core.sampling import Sampling
from specdec.decoding.batch import Batch, BatchRound, Request
from specdec.decoding.decoder import Decoder
from specdec.decoding.prefill import Prefill
from specdec.measuring.contexts import TrainedLength

LOG = logging.getLogger(__name__)
MAX_PADDED_TOKENS = 8192  # tokens of prompts that are read together, padded to the longest; one prompt may have more
DECODE_FAILED = "The server could not decode this ({}: {})."
Reason = Literal["stop", "length", "timeout", "error"]


@dataclass(frozen=True)
class ServedRound:
    """The result of one round for one request.

    tokens: emitted tokens: accepted drafts, then the target's own token; empty where the answer had ended before
    accepted: number of accepted drafts
    drafted: nodes of the tree without the root; None for the first token, which comes from the prompt's pass
    milliseconds: time of the whole round, with all its rows
    """

    tokens: list[int]
    accepted: int = 0
    drafted: int | None = None
    milliseconds: float = 0.0


@dataclass(frozen=True)
class End:
    """The last event of a request. message: cause of a `timeout` or an `error`"""

    reason: Reason
    message: str = ""


Event = ServedRound | End


@dataclass(frozen=True)
class ServedDrafter:
    """What clients are told of a proposer.

    title: its shape or name, and its head's folder; checkpoint: name of the head's checkpoint, None without one
    version: text that came with weights while the server ran; None: it began with them
    num_drafts: drafts of a round; None: their number varies
    trained_length: longest text of the head's training; None without a head
    """

    title: str = ""
    checkpoint: str | None = None
    version: str | None = None
    num_drafts: int | None = None
    trained_length: TrainedLength | None = None

    def to_json(self) -> dict[str, Any]:
        return {"checkpoint": self.checkpoint, "version": self.version, "drafts": self.num_drafts}


@dataclass(eq=False)
class Job:
    """A request and its settings in the engine.

    deliver: function that is called with every event, in the engine's thread; it must not wait
    speculate: whether the answer is decoded with drafts
    deadline: time.monotonic() at which it is given up; None for never
    constraint: constraint of a grammar that the answer follows; None for a free answer
    `lane`: where it waits, is read and runs; None before, and after its end
    `drafter`, `shape`: those of its lane, which stay known
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    ends: Ends
    deliver: Callable[[Event], None]
    seed: int | None = None
    speculate: bool = True
    deadline: float | None = None
    constraint: Constraint | None = None
    request: Request = field(init=False)
    lane: "Lane | None" = None
    drafter: ServedDrafter | None = None
    shape: str | None = None

    def __post_init__(self):
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed % 2**63)
        self.request = Request(
            self.prompt, self.max_new_tokens, generator, self.sampling, self.ends, constraint=self.constraint
        )

    @property
    def fixes_drafts(self) -> bool:
        """Whether drafts may change with the answer's own random numbers only."""
        return self.seed is not None and not self.sampling.greedy

    def enter(self, lane: "Lane") -> None:
        """Puts it into the queue of a lane."""
        self.lane, self.drafter, self.shape = lane, lane.drafter, lane.shape
        lane.waiting.append(self)

    def deliver_event(self, event: Event) -> None:
        if isinstance(event, End):  # a client that does not read keeps the job, and must not keep the head
            self.lane = None
        try:
            self.deliver(event)
        except Exception:  # a client's fault must not end the others' answers
            LOG.exception("an event could not be delivered")
            self.request.tokens_left = 0


class Lane:
    """A batch, and the requests that wait to join it.

    max_requests: requests that are decoded at once; prefill_tokens: tokens of prompts that are read between two rounds
    drafter: description of the decoder's drafts for clients; None: it has none
    shape: words on drafts that differ from the usual ones; None: they do not
    """

    def __init__(
        self,
        decoder: Decoder,
        max_requests: int,
        prefill_tokens: int,
        *,
        drafter: ServedDrafter | None = None,
        shape: str | None = None,
    ):
        self.decoder, self.max_requests, self.prefill_tokens = decoder, max_requests, prefill_tokens
        self.drafter, self.shape = drafter, shape
        self.batch: Batch = decoder.batch(max_rows=max_requests)
        self.waiting: deque[Job] = deque()
        self.jobs: dict[int, Job] = {}  # {id of the request: job}, while they are read and run
        self.reading: tuple[list[Job], Prefill] | None = None  # jobs that join next

    def run_round(self) -> BatchRound | None:
        """Reads on in the prompts of requests that join, then makes one round. Returns it; None if nothing runs."""
        if self.reading is None:
            joining = self._take_waiting(self.batch.count_free(self.max_requests))
            if joining:
                self.jobs |= {id(job.request): job for job in joining}
                self.reading = joining, self.batch.prefill([job.request for job in joining])
        if self.reading is not None:
            self._read_prompts(*self.reading)
        return self.batch.run_round() if self.batch.running else None

    def _read_prompts(self, joining: list[Job], prefill: Prefill) -> None:
        try:
            self.batch.read(prefill, self.prefill_tokens)
        except Exception as error:  # the rows that run have not been touched
            LOG.exception("prompts could not be read")
            self.reading = None
            for job in joining:
                if self.jobs.pop(id(job.request), None):
                    job.deliver_event(End("error", DECODE_FAILED.format(type(error).__name__, error)))
            return
        if not prefill.complete:
            return
        self.reading = None
        for job, tokens in zip(joining, self.batch.admit([job.request for job in joining], prefill)):
            if id(job.request) in self.jobs:  # it was not given up
                job.deliver_event(ServedRound(tokens))
                self._end_finished(job)

    def deliver_round(self, step: BatchRound) -> None:
        """Delivers to each job the result of a round for it."""
        for request, tokens, accepted in zip(step.requests, step.tokens, step.accepted):
            job = self.jobs.get(id(request))
            if job is None:
                continue  # it was given up during the round
            job.deliver_event(ServedRound(tokens, accepted, step.num_drafted, 1e3 * step.cost.seconds))
            self._end_finished(job)

    def give_up(self, job: Job) -> None:
        """Removes the request before the next round, if it is here."""
        if job in self.waiting:
            self.waiting.remove(job)
        if self.jobs.pop(id(job.request), None):
            job.request.tokens_left = 0
        if self.reading is not None and not any(request_job.request.tokens_left for request_job in self.reading[0]):
            self.reading[1].cache.release()
            self.reading = None

    def fail_all(self, message: str) -> None:
        """Ends every running request with this message. Waiting requests stay."""
        failed, self.jobs = list(self.jobs.values()), {}
        with contextlib.suppress(Exception):  # whatever has failed may fail again
            self.batch.close()
        self.batch, self.reading = self.decoder.batch(max_rows=self.max_requests), None
        for job in failed:
            job.deliver_event(End("error", message))

    def _take_waiting(self, max_jobs: int) -> list[Job]:
        """Takes the waiting requests that join now, at most `max_jobs`, in the order of their arrival."""
        joining: list[Job] = []
        longest = 0
        while self.waiting and len(joining) < max_jobs:
            longest = max(longest, len(self.waiting[0].prompt))
            if joining and longest * (1 + len(joining)) > MAX_PADDED_TOKENS:
                break
            joining.append(self.waiting.popleft())
        return joining

    def _end_finished(self, job: Job) -> None:
        if not job.request.tokens_left:
            del self.jobs[id(job.request)]
            if job.request.fault:
                job.deliver_event(End("error", job.request.fault))
            else:
                job.deliver_event(End("stop" if job.request.ended else "length"))

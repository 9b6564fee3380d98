"""Decodes requests that come at any time, in one thread.

It has a batch of drafted answers, one of plain answers, and one of sampled answers with a seed, whose drafts must not
depend on clocks or on other requests.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from specdec.core.constraint import Constraint
from specdec.core.generation import Ends
from specdec.core.sampling import Sampling
from specdec.decoding.batch import Batch, BatchRound, Request
from specdec.decoding.decoder import Decoder
from specdec.decoding.prefill import Prefill

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


@dataclass(eq=False)
class Job:
    """A request and its settings in the engine.

    deliver: function that is called with every event, in the engine's thread; it must not wait
    speculate: whether the answer is decoded with drafts
    deadline: time.monotonic() at which it is given up; None for never
    constraint: constraint of a grammar that the answer follows; None for a free answer
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

    def __post_init__(self):
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed % 2**63)
        self.request = Request(
            self.prompt, self.max_new_tokens, generator, self.sampling, self.ends, constraint=self.constraint
        )

    def deliver_event(self, event: Event) -> None:
        try:
            self.deliver(event)
        except Exception:  # a client's fault must not end the others' answers
            LOG.exception("an event could not be delivered")
            self.request.tokens_left = 0


class Lane:
    """A batch, and the requests that wait to join it.

    max_requests: requests that are decoded at once; prefill_tokens: tokens of prompts that are read between two rounds
    """

    def __init__(self, decoder: Decoder, max_requests: int, prefill_tokens: int):
        self.decoder, self.max_requests, self.prefill_tokens = decoder, max_requests, prefill_tokens
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


class Engine:
    """Decodes jobs in a thread of its own, from `start` until `stop`.

    drafted, plain: decoders of one target; max_requests: requests of each that are decoded at once
    max_waiting: requests that may wait
    prefill_tokens: tokens of prompts that are read between two rounds, for which running requests wait
    """

    def __init__(
        self, drafted: Decoder, plain: Decoder, *, max_requests: int, max_waiting: int, prefill_tokens: int = 512
    ):
        self.drafted, self.plain = (Lane(decoder, max_requests, prefill_tokens) for decoder in (drafted, plain))
        steady = drafted.steady()
        if steady is drafted:
            self.seeded = self.drafted
        else:
            self.seeded = Lane(steady, max_requests, prefill_tokens) if steady.proposer else self.plain
        self.lanes = [*dict.fromkeys((self.drafted, self.plain, self.seeded))]
        self.max_waiting = max_waiting
        self.changed = threading.Condition()
        self.given_up: list[Job] = []
        self.arrived: list[Job] = []
        self.stopping = False
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Ends the thread once all submitted jobs have ended."""
        with self.changed:
            self.stopping = True
            self.changed.notify()
        if self.thread.ident is not None:
            self.thread.join()

    @property
    def alive(self) -> bool:
        return self.thread.is_alive()

    @property
    def num_running(self) -> int:
        return sum(len(lane.jobs) for lane in self.lanes)

    @property
    def num_waiting(self) -> int:
        return len(self.arrived) + sum(len(lane.waiting) for lane in self.lanes)

    def lane_of(self, job: Job) -> Lane:
        """The lane that decodes a job."""
        if not job.speculate:
            return self.plain
        return self.seeded if job.seed is not None and not job.sampling.greedy else self.drafted

    def describe_shape(self, job: Job) -> str | None:
        """The change of the drafts by a seed, in words; None for no change."""
        lane = self.lane_of(job)
        if not job.speculate or lane is self.drafted:
            return None
        return "none, because of seed" if lane is self.plain else "fixed, because of seed"

    def submit(self, job: Job) -> bool:
        """Queues a job. Returns whether there was room for it. Raises ValueError for one that cannot be decoded."""
        self.lane_of(job).decoder.check([job.prompt], job.max_new_tokens)
        with self.changed:
            if self.num_waiting >= self.max_waiting or self.stopping:
                return False
            self.arrived.append(job)
            self.changed.notify()
        return True

    def give_up(self, job: Job) -> None:
        """Ends a job before the next round. No event follows after that."""
        with self.changed:
            self.given_up.append(job)
            self.changed.notify()

    def _run(self) -> None:
        while True:
            with self.changed:
                while not (self.arrived or self.given_up or self._busy or self.stopping):
                    self.changed.wait()
                arrived, self.arrived = self.arrived, []
                for job in arrived:
                    self.lane_of(job).waiting.append(job)
                given_up, self.given_up = self.given_up, []
                if self.stopping and not self._busy:
                    return
            for job in given_up:
                self.lane_of(job).give_up(job)
            self._give_up_late()
            for lane in self.lanes:
                self._run_round(lane)

    def _run_round(self, lane: Lane) -> None:
        """Runs a round of a lane. One that fails ends the lane's requests, and the server goes on."""
        try:
            round_ = lane.run_round()
            if round_:
                lane.deliver_round(round_)
        except Exception as error:  # missing memory, or a mistake of this project
            LOG.exception("a round failed")
            lane.fail_all(DECODE_FAILED.format(type(error).__name__, error))

    @property
    def _busy(self) -> bool:
        return any(lane.waiting or lane.jobs for lane in self.lanes)

    def _give_up_late(self) -> None:
        now = time.monotonic()
        for lane in self.lanes:
            for job in [*lane.waiting, *lane.jobs.values()]:
                if job.deadline is not None and now > job.deadline:
                    lane.give_up(job)
                    num_tokens = len(job.request.tokens)
                    job.deliver_event(
                        End(
                            "timeout",
                            f"The request took longer than the server allows; {num_tokens} tokens were written.",
                        )
                    )

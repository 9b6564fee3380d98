"""Decodes requests that come at any time, in one thread.

It has a batch of drafted answers, one of plain answers, and one of sampled answers with a seed, whose drafts must not
depend on clocks or on other requests. What drafts can be replaced between two rounds: answers that run keep theirs.
"""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from specdec.decoding.decoder import Decoder
from specdec.tools.server.lane import DECODE_FAILED, End, Job, Lane, ServedDrafter

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftLanes:
    """The lanes of one drafter's answers.

    steady: lane of sampled answers with a seed; `usual` or the plain lane where no other is needed
    lanes: lanes of this drafter alone
    """

    usual: Lane
    steady: Lane
    lanes: list[Lane]

    @property
    def drafter(self) -> ServedDrafter:
        """The description for clients."""
        assert self.usual.drafter is not None
        return self.usual.drafter


@dataclass(frozen=True)
class Replacement:
    """What drafts next.

    warm_up: rounds that come before; result: True once it drafts, False if the engine has ended, or an error
    """

    drafts: DraftLanes
    warm_up: Iterator[None]
    result: Future[bool] = field(default_factory=Future)


class Engine:
    """Decodes jobs in a thread of its own, from `start` until `stop`, or in the one that calls `run_here`.

    drafted, plain: decoders of one target; max_requests: requests of each that are decoded at once
    max_waiting: requests that may wait
    prefill_tokens: tokens of prompts that are read between two rounds, for which running requests wait
    drafter: description of `drafted` for clients
    """

    def __init__(
        self,
        drafted: Decoder,
        plain: Decoder,
        *,
        max_requests: int,
        max_waiting: int,
        prefill_tokens: int = 512,
        drafter: ServedDrafter | None = None,
    ):
        self.make_lane = functools.partial(Lane, max_requests=max_requests, prefill_tokens=prefill_tokens)
        self.plain = self.make_lane(plain, shape="none, because of seed")
        self.drafts = self.make_lanes(drafted, drafter or ServedDrafter())
        self.draining: DraftLanes | None = None  # lanes of the drafter before, until its answers have ended
        self.replacement: Replacement | None = None
        self.max_waiting = max_waiting
        self.changed = threading.Condition()
        self.given_up: list[Job] = []
        self.arrived: list[Job] = []
        self.stopping = False
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def make_lanes(self, decoder: Decoder, drafter: ServedDrafter) -> DraftLanes:
        """Lanes of a decoder with drafts."""
        usual = self.make_lane(decoder, drafter=drafter)
        steady = decoder.steady()
        if steady is decoder:
            return DraftLanes(usual, usual, [usual])
        if steady.proposer is None:
            return DraftLanes(usual, self.plain, [usual])
        seeded = self.make_lane(steady, drafter=drafter, shape="fixed, because of seed")
        return DraftLanes(usual, seeded, [usual, seeded])

    def start(self) -> None:
        """Decodes in a new thread from now on, unless a thread does so already."""
        if self.thread.ident is None:
            self.thread.start()

    def run_here(self, tell: Callable[[], None]) -> None:
        """Decodes in this thread until `stop`. tell: called once requests may come"""
        self.thread = threading.current_thread()
        tell()
        self._run()

    def stop(self) -> None:
        """Ends the thread once all submitted jobs have ended."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        if self.thread.ident is not None:
            self.thread.join()

    @property
    def alive(self) -> bool:
        return self.thread.is_alive()

    @property
    def lanes(self) -> list[Lane]:
        """All lanes, in the order in which they decode."""
        draining = self.draining
        usual, *others = self.drafts.lanes
        return [usual, self.plain, *others, *(draining.lanes if draining else [])]

    @property
    def num_running(self) -> int:
        return sum(len(lane.jobs) for lane in self.lanes)

    @property
    def num_waiting(self) -> int:
        return len(self.arrived) + sum(len(lane.waiting) for lane in self.lanes)

    def lane_of(self, job: Job) -> Lane:
        """The lane that decodes a job: the one where it is, or would come to now."""
        if job.lane is not None:
            return job.lane
        if not job.speculate:
            return self.plain
        return self.drafts.steady if job.fixes_drafts else self.drafts.usual

    def submit(self, job: Job) -> bool:
        """Queues a job. Returns whether there was room for it. Raises ValueError for one that cannot be decoded."""
        self.lane_of(job).decoder.check([job.prompt], job.max_new_tokens)
        with self.changed:
            if self.num_waiting >= self.max_waiting or self.stopping:
                return False
            self.arrived.append(job)
            self.changed.notify_all()
        return True

    def give_up(self, job: Job) -> None:
        """Ends a job before the next round. No event follows after that."""
        with self.changed:
            self.given_up.append(job)
            self.changed.notify_all()

    # Another drafter

    def await_drained(self) -> bool:
        """Waits until answers of the drafter before this one have ended. Returns False if the engine stops."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopping or self.draining is None)
            return not self.stopping

    def replace_drafts(self, decoder: Decoder, drafter: ServedDrafter, warm_up: Iterator[None]) -> bool:
        """Lets another decoder draft all answers that were not begun, and waits until it does.

        warm_up: its steps run between rounds of the requests that run. Raises its error, and nothing has changed then.
        Returns False if the engine stops. One call at a time, after `await_drained`.
        """
        replacement = Replacement(self.make_lanes(decoder, drafter), warm_up)
        with self.changed:
            if self.stopping:
                return False
            self.replacement = replacement
            self.changed.notify_all()
        return replacement.result.result()

    def _go_on_replacing(self, replacement: Replacement) -> None:
        """Makes a step of the warm-up, or lets the new lanes take over after the last one."""
        try:
            if next(replacement.warm_up, self) is None:
                return
            self._take_over(replacement.drafts)
        except Exception as error:
            self.replacement = None
            replacement.result.set_exception(error)
            return
        self.replacement = None
        replacement.result.set_result(True)

    def _take_over(self, drafts: DraftLanes) -> None:
        with self.changed:
            self.draining, self.drafts = self.drafts, drafts
        for lane in self.draining.lanes:
            while lane.waiting:
                self._place(lane.waiting.popleft())

    def _end_draining(self, draining: DraftLanes) -> None:
        """Frees what the drafter before has, once its answers have ended."""
        if any(lane.jobs for lane in draining.lanes):
            return
        for lane in draining.lanes:
            with contextlib.suppress(Exception):  # a proposer that fails at its end is not needed any more
                lane.batch.close()
        with self.changed:
            self.draining = None
            self.changed.notify_all()

    # The thread

    def _run(self) -> None:
        try:
            while self._take_messages():
                self._give_up_late()
                for lane in self.lanes:
                    self._run_round(lane)
                if self.replacement is not None:
                    self._go_on_replacing(self.replacement)
                if self.draining is not None:
                    self._end_draining(self.draining)
        finally:  # whoever waits for the thread must not wait for ever
            with self.changed:
                self.stopping = True
                self.changed.notify_all()
            if self.replacement is not None:
                self.replacement.result.set_result(False)

    def _take_messages(self) -> bool:
        """Waits for work, and takes in the requests that came or went. Returns False at the end of all work."""
        with self.changed:
            while not (self.arrived or self.given_up or self._busy or self.stopping):
                self.changed.wait()
            arrived, self.arrived = self.arrived, []
            for job in arrived:
                self._place(job)
            given_up, self.given_up = self.given_up, []
            if self.stopping and not self._busy:
                return False
        for job in given_up:
            self.lane_of(job).give_up(job)
        return True

    def _place(self, job: Job) -> None:
        """Puts a job into the queue of its lane."""
        job.lane = None
        job.enter(self.lane_of(job))

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
        return self.replacement is not None or any(lane.waiting or lane.jobs for lane in self.lanes)

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

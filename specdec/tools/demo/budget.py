"""How much each part of the demo does, and how long it takes, from the speeds of this machine."""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.heads.base import Drafter
from specdec.measuring.replay import AnsweredPrompt
from specdec.unroll import replay

Item = TypeVar("Item")

DRAFTING = Drafting(depth=3)  # drafts of both heads
SHARES = (1 / 8, 5 / 8, 1 / 4)  # shares of the minutes that the parts may take
SHOWN_TOKENS = (32, 160)  # tokens of the first part's answer, at least and at most
JUDGED_ANSWERS = (8, 48)  # answers of the service that both heads are replayed along, at least and at most
COMPARED_QUESTIONS = (3, 12)  # questions that the last part decodes, at least and at most
COMPARED_TOKENS = 48  # tokens of each of their answers
ELSEWHERE_SHARE = 0.5  # answers to other questions for each answer of the service
NUM_CHOOSING = 6  # answers that choose the step of the training
NUM_VALIDATIONS = 3  # validations of the training, behind the one before it
EPOCHS = 3  # passes over the rows: the target reads a text in the first one only
MIN_ROWS = 8  # rows of the training, at least
JUDGING_SHARE = 0.25  # share of the second part for replaying both heads
COST_PASSES = 60  # passes of the target in which proposer=auto measures its costs, as plain tokens
TRAINING_STARTS = 3.0  # starts of a process that the launcher and train.py take together
# Time of a training step over the replay of its tokens, and of an update over the replay of a token. shipped/mtp had
# .34 and 9 (SmolLM2, two cores); padding, clipping and saved states add to that. A step has the head's part of a replay
# forward and backward, so other heads and machines need 3 at most: they end in time at the first validation
STEP_READS, UPDATE_READS = 0.8, 12
MEASURED_TOKENS = 24  # tokens that are decoded
OVERRUN = 1.25  # time of a part over what was said, at most


@dataclass(frozen=True)
class Speeds:
    """Seconds on this machine.

    start: loading of packages and target; token, drafted: a token of plain decoding, and with drafts
    read: replay along a token of a text
    """

    start: float
    token: float
    drafted: float
    read: float

    def find_step(self, num_tokens: float) -> float:
        """Seconds of the training on a token whose features are there. num_tokens: tokens of a step"""
        return self.read * (STEP_READS + UPDATE_READS / num_tokens)


def time_token(decoder: Decoder, prompt: list[int]) -> float:
    """Seconds of a decoded token, without the prompt's pass, in an answer after one that warms up."""
    decoder.generate([prompt], MEASURED_TOKENS)
    return 1 / (decoder.generate([prompt], MEASURED_TOKENS).tokens_per_second or math.inf)


def measure_speeds(drafter: Drafter, text: AnsweredPrompt) -> Speeds:
    """The speeds of decoding and of replay. text: one of the service"""
    start, target, pair = time.process_time(), drafter.target, (text.prompt, text.answer)
    plain = Decoder(target, None, sampling=Sampling(temperature=0), stop=set())
    drafting_decoder = DRAFTING.decoder(
        target, DRAFTING.proposer(drafter), sampling=plain.sampling, stop=set(), runner=plain.runner
    )
    token, drafted = (time_token(decoder, text.prompt) for decoder in (plain, drafting_decoder))
    for _ in range(2):  # the first one warms up
        begun = time.perf_counter()
        replay.replay_answers(drafter, [pair], depth=find_depth(drafter), temperature=0)
    return Speeds(start, token, drafted, (time.perf_counter() - begun) / text.length)


def find_depth(drafter: Drafter) -> int:
    """Steps of the training's unroll: the drafter's own number, or as many as a chain has drafts."""
    return drafter.depth or DRAFTING.depth


@dataclass(frozen=True)
class TextSizes:
    """The service's texts. rows: rows to train on; row_tokens: tokens of a prompt with its answer, on average

    heldout: answers of the last days; prompt_tokens, compared_tokens: tokens of their prompts, and of their answers
    as far as the comparison decodes them, on average; pack: tokens of a pack
    """

    rows: int
    row_tokens: float
    heldout: int
    prompt_tokens: float
    compared_tokens: float
    pack: int

    @property
    def step_tokens(self) -> float:
        """Tokens of a pack without padding: whole rows, as many as fit."""
        return max(1, int(self.pack / self.row_tokens)) * self.row_tokens

    def count_steps(self, num_rows: int) -> int:
        """Steps of EPOCHS passes over some rows."""
        return math.ceil(EPOCHS * num_rows * self.row_tokens / self.step_tokens)


@dataclass(frozen=True)
class DemoPlan:
    """What the parts do. seconds: time of each part

    shown_tokens: tokens of the first answer
    rows, pack, steps: newest rows that are trained on, tokens of a pack, and steps of the training
    judged_answers, other_answers: answers of the service and elsewhere that are replayed
    questions: questions that are decoded
    """

    shown_tokens: int
    rows: int
    pack: int
    steps: int
    judged_answers: int
    other_answers: int
    questions: int
    seconds: tuple[float, ...]


def bound(value: float, bounds: tuple[int, int]) -> int:
    """The whole number below a value, within bounds."""
    return min(max(int(value), bounds[0]), bounds[1])


def plan_demo(speeds: Speeds, sizes: TextSizes, *, minutes: float) -> DemoPlan:
    """The largest parts that fit into their shares of the minutes."""
    limits = [60 * minutes * share for share in SHARES]

    # The answer that is shown twice
    costs = COST_PASSES * speeds.token
    shown_seconds = speeds.token + speeds.drafted
    shown_tokens = bound((limits[0] - costs) / shown_seconds, SHOWN_TOKENS)

    # Training, and both heads on the last days and elsewhere
    judged_seconds = 1.3 * speeds.read * sizes.row_tokens * (1 + ELSEWHERE_SHARE)
    most = min(sizes.heldout, JUDGED_ANSWERS[1])
    num_judged = min(bound(JUDGING_SHARE * limits[1] / judged_seconds, (JUDGED_ANSWERS[0], most)), most)
    fixed = TRAINING_STARTS * speeds.start + num_judged * judged_seconds
    fixed += (1 + NUM_VALIDATIONS) * NUM_CHOOSING * sizes.row_tokens * speeds.read
    # The target reads each text once
    row_seconds = sizes.row_tokens * (speeds.read + EPOCHS * speeds.find_step(sizes.step_tokens))
    num_rows = min(bound((limits[1] - fixed) / row_seconds, (MIN_ROWS, sizes.rows)), sizes.rows)

    # The comparison: plain decoding and three ways to draft
    answer_seconds = sizes.compared_tokens * (speeds.token + 3 * speeds.drafted)
    question_seconds = answer_seconds + 4 * sizes.prompt_tokens * speeds.read
    questions = min(bound(limits[2] / question_seconds, COMPARED_QUESTIONS), sizes.heldout)
    seconds = (
        costs + shown_tokens * shown_seconds,
        fixed + num_rows * row_seconds,
        questions * question_seconds,
    )
    return DemoPlan(
        shown_tokens=shown_tokens,
        rows=num_rows,
        pack=sizes.pack,
        steps=sizes.count_steps(num_rows),
        judged_answers=num_judged,
        other_answers=max(1, int(ELSEWHERE_SHARE * num_judged)),
        questions=questions,
        seconds=seconds,
    )


def until(deadline: float, items: Iterable[Item], *, least: int) -> Iterator[Item]:
    """Yields the items until a moment of the clock, but at least some. least: number of items that are yielded"""
    for number, item in enumerate(items):
        if number >= least and time.perf_counter() > deadline:
            return
        yield item

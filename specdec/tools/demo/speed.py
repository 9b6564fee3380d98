"""The speeds of this machine, measured in a few seconds with the target and the head of the demo."""

import math
import time
from collections.abc import Callable

import torch

from specdec import checkpoint
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.heads.base import Drafter
from specdec.measuring.replay import AnsweredPrompt
from specdec.target.model import TargetOutput
from specdec.tools.demo.budget import DRAFTING, Speeds
from specdec.unroll import replay
from specdec.unroll.plan import plan_unroll, unroll

MEASURED_TOKENS = 24  # tokens that are decoded


def time_second_call(work: Callable[[], object]) -> float:
    """Seconds of a call after one that warms up."""
    work()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def time_token(decoder: Decoder, prompt: list[int]) -> float:
    """Seconds of a decoded token, without the prompt's pass, in an answer after one that warms up."""
    decoder.generate([prompt], MEASURED_TOKENS)
    return 1 / (decoder.generate([prompt], MEASURED_TOKENS).tokens_per_second or math.inf)


def measure_speeds(head: str, drafter: Drafter, text: AnsweredPrompt) -> Speeds:
    """The speeds of decoding, of replay and of training. head: folder of the drafter; text: one of the service"""
    start, target, pair = time.process_time(), drafter.target, (text.prompt, text.answer)
    plain = Decoder(target, None, sampling=Sampling(temperature=0), stop=set())
    drafting_decoder = DRAFTING.decoder(
        target, DRAFTING.proposer(drafter), sampling=plain.sampling, stop=set(), runner=plain.runner
    )
    token, drafted = (time_token(decoder, text.prompt) for decoder in (plain, drafting_decoder))
    read = time_second_call(lambda: replay.replay_answers(drafter, [pair], depth=find_depth(drafter), temperature=0))

    trained = checkpoint.load_for_training(head, target, {})[0]
    assert isinstance(trained, Drafter)
    optimizer = torch.optim.AdamW([each for each in trained.parameters() if each.requires_grad], lr=0.0)
    with torch.no_grad():
        output = replay.read_target(trained, [pair])

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # so that the second call has as much to do

    step = time_second_call(lambda: pass_text(trained, text, output))
    return Speeds(start, token, drafted, read / text.length, step / text.length, time_second_call(update))


def find_depth(drafter: Drafter) -> int:
    """Steps of the training's unroll: the drafter's own number, or as many as a chain has drafts."""
    return drafter.depth or DRAFTING.depth


def pass_text(drafter: Drafter, text: AnsweredPrompt, output: TargetOutput) -> None:
    """The passes of a training step on one text, forward and backward. output: the target's, of this text"""
    target = drafter.target
    tokens = torch.tensor([text.prompt + text.answer])
    positions = torch.arange(text.length)[None]
    goals = positions >= len(text.prompt)
    plan = plan_unroll(drafter, torch.zeros_like(tokens), positions, goals, depth=find_depth(drafter))
    plan = plan.move_to(target.device)
    with torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
        unrolled = unroll(drafter, tokens.to(target.device), output.features, plan)
        (chunk,) = plan.split_goals(len(plan.goals))
        rows, places = plan.goals.unbind(1)
        truth = drafter.goal_logits(output.final[rows, places - 1]).detach().float().softmax(-1)  # [G, W]
        loss = torch.zeros((), device=target.device)
        for depth, step in enumerate(plan.steps, start=1):
            logits = drafter.loss_logits(depth, unrolled.select(unrolled.readouts, depth, chunk)).float()
            loss = loss - (truth[step.goals] * logits.log_softmax(-1)).sum()
    loss.backward()

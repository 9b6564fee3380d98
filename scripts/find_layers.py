"""python scripts/find_layers.py [target.name=FOLDER prompts=FILE limit=8 max_new_tokens=64 depth=4 compile=true ...]

Which of a target's layers to draft with (proposer=layerskip; Draft & Verify, 2309.08168). The target answers some prompts;
then layers are taken away one by one, each time the one whose absence leaves the most first drafts right. What a round
would accept is replayed along the answers, exactly as decoding would have it, and passes are timed: that gives each size's
tau and speedup. Prints the best layers of every size and writes the fastest as a proposer's YAML.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import rich.box
import rich.console
import rich.table
import torch
from rich.progress import track
from torch import Tensor

from helpers import loading
from helpers.options import options, run
from specdec import checkpoint, masks, replay
from specdec.compile import Runner
from specdec.compiled_target import CompiledTarget
from specdec.decode import Decoder
from specdec.proposers.layerskip import LayerSkip, num_shared
from specdec.sampling import Sampling
from specdec.target import Target
from train import data, reading

REPEATS = 10  # of every timed pass


@dataclass(frozen=True)
class FindLayers:
    prompts: str = field(default="data/prompts_train.jsonl", metadata={"help": "rows with prompt or messages"})
    limit: int | None = field(default=8, metadata={"help": "this many prompts, spread over the file"})
    max_new_tokens: int = field(default=64, metadata={"help": "an answer ends here at the latest"})
    depth: int = field(default=4, metadata={"help": "most drafts a round"})
    tries: int = field(
        default=8, metadata={"help": "layers that each step tries to do without: those that mattered least so far"}
    )
    compile: bool = field(default=False, metadata={"help": "time compiled passes, for decode.compile=true"})
    out: str = field(default="layers.yaml", metadata={"help": "YAML to write, for conf/proposer"})
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)


class Text:
    """A prompt with the target's answer of n tokens, and all its rounds at once.

    Round s, for s in 1 .. n-1, starts when s tokens of the answer exist: its step d reads token s + d - 2 of the answer and
    drafts token s + d - 1. It sees what the whole target wrote of the tokens before its root, and its own steps:

        entries   prompt and answer, by the target | step 1: rounds 1 .. n-1 | step 2: rounds 1 .. n-1 | ...
        round s   those before answer token s - 1  | its own                 | its own                 |
    """

    def __init__(self, target: Target, prompt: list[int], answer: list[int]):
        device = target.device
        self.target, self.num_prompt = target, len(prompt)
        self.layered = CompiledTarget(target, Runner())
        self.answer = torch.tensor(answer, device=device)  # [n]
        self.starts = torch.arange(1, len(answer), device=device)  # [S], S = n - 1
        tokens = torch.tensor([prompt + answer[:-1]], device=device)  # [1, T]
        self.length = tokens.shape[1]
        self.cache = target.cache(1)
        self.cache.reserve(self.length)
        mask = masks.pending(masks.causal(self.length, device), self.cache.lengths, self.cache.visible)
        target.read(tokens, (), positions=self.cache.slots, mask=mask, cache=self.cache)
        self.cache.commit(torch.tensor([self.length], device=device), [self.length])

    def first_step(self, numbers: Sequence[int]) -> list[Tensor]:
        """h [1, S, D] before each of these layers and after the last"""
        self.cache.drop_pending()
        return self.run_layers(self.begin(1), numbers)

    def begin(self, d: int) -> Tensor:
        """-> h [1, S, D] that the first layer reads in step d; layers are run on step d from now on"""
        num = len(self.starts)
        places = (self.starts + d - 2).clamp(max=num)  # [S] in the answer; past its end nothing counts
        self.cache.reserve(num)
        entry = torch.arange(self.cache.visible, device=places.device)
        before = entry < (self.num_prompt + self.starts - 1)[:, None]  # [S, C]
        drafted = entry - self.length
        own = (drafted >= 0) & (drafted < d * num) & (drafted % num == (self.starts - 1)[:, None])
        self.mask = (before | own)[None, None]
        self.positions = (self.num_prompt + places)[None]
        h, *self.rotary = self.layered.begin(self.answer[None, places], self.positions)
        return h

    def run_layers(self, h: Tensor, numbers: Sequence[int]) -> list[Tensor]:
        return self.layered.run_layers(
            h,
            numbers,
            rotary=self.rotary,
            positions=self.positions,
            mask=self.mask,
            cache=self.cache,
        )

    def right(self, h: Tensor, d: int) -> Tensor:
        """h [1, S, D] after the last layer of step d -> [S] bool: whether each round's draft is the answer's token"""
        guess = self.target.logits(self.target.norm(h))[0].argmax(-1)  # [S]
        places = self.starts + d - 1
        return (places < len(self.answer)) & (guess == self.answer[places.clamp(max=len(self.answer) - 1)])

    def accept(self, numbers: Sequence[int], depth: int) -> Tensor:
        """[K, n] for replay.rounds, if these layers draft"""
        self.cache.drop_pending()
        found = torch.zeros(depth, len(self.answer), device=self.answer.device)
        for d in range(1, depth + 1):
            found[d - 1, 1:] = self.right(self.run_layers(self.begin(d), numbers)[-1], d)
        return found


def share(texts: list[Text], ends: Iterable[Tensor]) -> float:
    """The share of first drafts that are right; ends: of each text, h after the last layer of step 1"""
    found = torch.cat([text.right(h, 1) for text, h in zip(texts, ends)])
    return float(found.double().mean())


def search(
    texts: list[Text], tries: int, progress: Callable[[Iterable], Iterable] = iter
) -> dict[int, tuple[tuple[int, ...], float]]:
    """By size, the layers that were left and the share of first drafts that they have right.

    A layer's absence changes nothing before it, so that a trial begins where the layer was.
    """
    chosen = tuple(range(texts[0].target.num_layers))
    states = [text.first_step(chosen) for text in texts]
    found = {len(chosen): (chosen, share(texts, (some[-1] for some in states)))}
    worth = dict.fromkeys(chosen, 1.0)  # of first drafts, the share that was right without the layer when last tried
    for _ in progress(range(len(chosen) - 1)):
        tried = sorted(chosen, key=lambda number: -worth[number])[: tries if len(found) > 1 else None]
        for number in tried:
            place = chosen.index(number)
            rest = chosen[place + 1 :]
            worth[number] = share(texts, (text.run_layers(some[place], rest)[-1] for text, some in zip(texts, states)))
        best = max(tried, key=lambda number: worth[number])
        place = chosen.index(best)
        for text, some in zip(texts, states):
            some[place:] = text.run_layers(some[place], chosen[place + 1 :])
        chosen = chosen[:place] + chosen[place + 1 :]
        found[len(chosen)] = chosen, worth[best]
    return found


class Clock:
    """Seconds of a pass over some tokens through some layers down to the likeliest token, between measured corners."""

    def __init__(self, target: Target, num_tokens: int, *, compile: bool):
        self.num_tokens, self.num_layers, runner = num_tokens, target.num_layers, Runner(compile)
        corners = [(width, layers) for width in sorted({1, num_tokens}) for layers in sorted({1, target.num_layers})]
        found = [[time_pass(target, runner, *corner) for corner in corners] for _ in range(2 + REPEATS)]
        # In turn, and the fastest of each: what else the machine does must not look like a speedup.
        self.corners = dict(zip(corners, map(min, zip(*found[2:]))))

    def __call__(self, num_tokens: int, num_layers: int) -> float:
        wide = (num_tokens - 1) / max(1, self.num_tokens - 1)
        deep = (num_layers - 1) / max(1, self.num_layers - 1)
        low, high = (
            (1 - deep) * self.corners[width, 1] + deep * self.corners[width, self.num_layers]
            for width in (1, self.num_tokens)
        )
        return (1 - wide) * low + wide * high

    def speedup(self, tau: float, depth: int, numbers: tuple[int, ...]) -> float:
        """Over plain decoding, rounds of `depth` drafts by these layers."""
        reused = num_shared(numbers)
        drafting = depth * self(1, len(numbers)) + self(1, reused) - self(1, 0)  # the last draft runs what is reused
        return tau * self(1, self.num_layers) / (drafting + self(1 + depth, self.num_layers - reused))


def time_pass(target: Target, runner: Runner, num_tokens: int, num_layers: int) -> float:
    """Seconds, behind 128 committed tokens"""
    device = target.device
    cache = target.cache(1)
    cache.commit(torch.tensor([128], device=device), [128])
    tokens = torch.zeros(1, num_tokens, dtype=torch.long, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    cache.reserve(num_tokens)
    mask = masks.pending(masks.causal(num_tokens, device), cache.lengths, cache.visible)
    layered = CompiledTarget(target, runner)
    h, *rotary = runner("begin", layered.begin, tokens, cache.slots)
    *_, h = layered.run_layers(h, range(num_layers), rotary=rotary, positions=cache.slots, mask=mask, cache=cache)
    runner("end", lambda h: target.logits(target.norm(h)).argmax(-1), h).tolist()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Choice:
    """Layers to draft with, and what they promise: `right` is the share of first drafts."""

    numbers: tuple[int, ...]
    right: float
    depth: int
    tau: float
    speedup: float

    def __str__(self) -> str:
        return (
            f"{len(self.numbers)} layers: {self.right:.3f} of first drafts right; at depth {self.depth} tau "
            f"{self.tau:.3f}, predicted speedup {self.speedup:.2f}"
        )


def judge(texts: list[Text], numbers: tuple[int, ...], right: float, depth: int, clock: Clock) -> Choice:
    """At its best depth"""
    accepts = [text.accept(numbers, depth) for text in texts]
    emitted = sum(len(text.starts) for text in texts)
    best = []
    for num in range(1, depth + 1):
        tau = emitted / sum(replay.rounds(accept[:num])[0] for accept in accepts)
        best.append((clock.speedup(tau, num, numbers), num, tau))
    speedup, num, tau = max(best)
    return Choice(numbers, right, num, tau, speedup)


@torch.inference_mode()
def main() -> None:
    chosen = options(FindLayers, __doc__)
    console = rich.console.Console(highlight=False, soft_wrap=True)
    if min(chosen.depth, chosen.tries) < 1:
        raise ValueError(f"depth={chosen.depth} and tries={chosen.tries} must be at least 1.")
    opened = loading.load_target(chosen.target)
    target, tokenizer, stop = opened.target, opened.tokenizer, opened.stop
    LayerSkip(target, layers=1, depth=1)  # refuses targets that cannot
    prompts = [
        data.encode_prompt(tokenizer, row["messages"])
        for row in reading.spread(reading.load_prompts(chosen.prompts), chosen.limit)
    ]
    show = lambda items, what: track(items, description=what, console=console, transient=True)
    decoder = Decoder(target, None, sampling=Sampling(), stop=stop)
    answers = [decoder.generate([prompt], chosen.max_new_tokens).tokens[0] for prompt in show(prompts, "answers")]
    texts = [Text(target, prompt, answer) for prompt, answer in zip(prompts, answers) if len(answer) > 1]
    if not texts:
        raise ValueError("No answer has a second token: raise max_new_tokens or give other prompts.")
    rounds = sum(len(text.starts) for text in texts)
    console.print(f"{len(texts)} answers, {rounds} places where a round can start; now doing without layers")
    clock = Clock(target, 1 + chosen.depth, compile=chosen.compile)
    found = search(texts, chosen.tries, lambda items: show(items, "layers"))
    firsts = {
        size: share(texts, (text.first_step(range(size))[-1] for text in texts)) for size in show(found, "first layers")
    }
    choices = [judge(texts, *found[size], depth=chosen.depth, clock=clock) for size in show(sorted(found), "rounds")]
    table = rich.table.Table(
        title=f"{target.name}: {len(texts)} answers, {rounds} rounds",
        box=rich.box.SIMPLE,
    )
    for name in ("layers", "first drafts right", "of the first so many", "depth", "tau", "predicted speedup"):
        table.add_column(name, justify="right")
    table.add_column("which", justify="left")
    for choice in choices:
        size = len(choice.numbers)
        figures = f"{choice.right:.3f}", f"{firsts[size]:.3f}", str(choice.depth), f"{choice.tau:.3f}"
        table.add_row(str(size), *figures, f"{choice.speedup:.2f}", ranges(choice.numbers))
    console.print(table)
    best = max(choices, key=lambda choice: choice.speedup)
    if best.speedup <= 1:
        console.print("No layers are predicted to be faster than plain decoding; the least slow:")
    console.print(str(best))
    numbers = ",".join(map(str, best.numbers))
    console.print(f'proposer=layerskip "proposer.layers=[{numbers}]" proposer.depth={best.depth}')
    lines = [
        f"# Written by scripts/find_layers.py for {target.name} ({target.fingerprint()}), {chosen.target.dtype}, {target.device}",
        f"# {best}",
        "_target_: specdec.proposers.layerskip.LayerSkip",
        f"layers: [{numbers}]",
        f"depth: {best.depth}",
        "threshold: 0.0",
        "compile: ${decode.compile}",
        *(f"# {choice}: {list(choice.numbers)}" for choice in choices),
    ]
    checkpoint.write_text(Path(chosen.out), "\n".join(lines) + "\n")
    console.print(f"written: {chosen.out}")


def ranges(numbers: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) -> 0-2 5"""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return " ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


if __name__ == "__main__":
    run(main)

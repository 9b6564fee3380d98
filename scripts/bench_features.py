"""python scripts/bench_features.py engine=http://localhost:8000

Measures how fast a server gives the target's outputs, beside the target in this process: the same packs of training data, in
turns, and how far the two agree.
"""

from helpers import loading
from helpers.options import option, options, run

import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from specdec.target.model import Target
from train import progress
from train.data.encoding import Encoding, load_packs
from train.data.loader import Material
from train.features.engine_client import EngineClient
from train.features.engine_features import EngineTarget
from train.features.outputs import Features, Kept, Online, read_each


@dataclass(frozen=True)
class BenchFeatures:
    engine: str = field(metadata={"help": "URLs of servers that scripts/launch_engine.py has started"})
    layers: str = option("2,15,27", "comma list of the hidden states to read beside the final one")
    data: str = option("data/train.jsonl", "conversations")
    length: int = option(512, "tokens of a pack")
    packs: int = option(8, "packs that are read in each round")
    rounds: int = option(5, "rounds, each of both sources in turn; medians are reported")
    in_flight: int = option(16, "texts that the servers read at once")
    cache: str = option("checkpoints/data-cache", "folder of encoded data")
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)


def read(features: Features, material: Material, packs: range, target: Target) -> tuple[float, torch.Tensor]:
    """-> seconds, and features and final states of all packs, [packs, T, (F+1)*D]"""
    batches = [material.collate([index]) for index in packs]
    begun = time.perf_counter()
    outputs = [output for _, output in read_each(features, batches, target.device)]
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    seconds = time.perf_counter() - begun
    return seconds, torch.cat([torch.cat([each.features, each.final], dim=-1) for each in outputs])


def main() -> None:
    chosen = options(BenchFeatures, __doc__)
    console = progress.Results()
    opened = loading.load_target(chosen.target)
    target = opened.target
    layers = target.layer_ids([int(layer) for layer in chosen.layers.split(",")])
    packs = load_packs(chosen.data, Encoding(opened.tokenizer, Path(chosen.cache)), length=chosen.length, packed=True)
    material = Material(packs, chosen.length, None)
    client = EngineClient(chosen.engine, in_flight=chosen.in_flight)
    served = Kept(target, layers, folder=None, reader=EngineTarget(client, target, layers))
    sources: dict[str, Features] = {"online": Online(target, layers), "engine": served}
    rates: dict[str, list[float]] = {name: [] for name in sources}
    for number in progress.track(range(chosen.rounds), "measuring", unit="rounds"):
        which = range(number * chosen.packs, (number + 1) * chosen.packs)
        which = range(which.start % len(packs), min(len(packs), which.start % len(packs) + chosen.packs))
        states = {}
        for name in list(sources)[:: 1 if number % 2 else -1]:
            seconds, states[name] = read(sources[name], material, which, target)
            tokens = sum(int((material.collate([index]).documents >= 0).sum()) for index in which)
            rates[name].append(tokens / seconds)
        real = torch.cat([material.collate([index]).documents for index in which]) >= 0
        online, engine = (states[name][real].float() for name in ("online", "engine"))
        # the last position of a text is never judged, and engines need not compute it
        difference = float((online - engine).norm() / online.norm())
        console.print(
            f"round {number + 1}: " + ", ".join(f"{name} {rates[name][-1]:,.0f} tokens/s" for name in sources)
            + f", relative difference {difference:.1e}"
        )  # fmt: skip
    ratio = median(engine / online for online, engine in zip(rates["online"], rates["engine"]))
    print(
        f"engine / online: {ratio:.2f} (median of {chosen.rounds} rounds); online {median(rates['online']):,.0f} tokens/s"
    )
    client.close()


if __name__ == "__main__":
    run(main)

"""Measures training on a hybrid of recurrent and attention layers: packs beside one text a row, in turn.

    python -m benchmarks.packed_hybrids repetitions=5

The target is random, with layers as of Qwen3.5: three recurrent ones, then one with attention. A step reads all texts,
and computes the loss of an EAGLE-3 head and its gradients. Both ways train on the same tokens; packs are read in groups
of similar documents, as on a CPU, and in one call, as on a GPU. The medians of tokens/s are printed with their ratios.
"""

import statistics
import sys
import time
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import common
from specdec.core import fast
from specdec.heads.eagle import Eagle3
from specdec.target import attention
from specdec.target.model import Target
from specdec.text.conversations import Row
from train.data.batches import TrainingBatch, collate
from train.data.packing import pack_first_fit
from train.features.outputs import ComputedFeatures
from train.objective.objective import Objective
from train.settings.hydra_text import compose_options

LENGTHS = (62, 500, 90, 340, 121, 230, 165, 96)  # tokens of the texts
PACK = 1024  # tokens of a pack
PROMPT = 20  # tokens at the beginning of a text that nothing has to guess
VOCABULARY = 1024


@dataclass(frozen=True)
class PackOptions:
    repetitions: int = 5  # timings of each way; their median counts
    layers: int = 8  # number of its layers
    width: int = 256  # width of its states
    threads: int = 2  # number of threads


def make_hybrid(options: PackOptions) -> Target:
    """A random target with layers as of Qwen3.5."""
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    config = AutoConfig.for_model(
        "qwen3_5_text", vocab_size=VOCABULARY, hidden_size=options.width, intermediate_size=3 * options.width,
        num_hidden_layers=options.layers, layer_types=[kinds[n % 4] for n in range(options.layers)],
        num_attention_heads=4, num_key_value_heads=2, head_dim=options.width // 4, linear_num_key_heads=4,
        linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=32, max_position_embeddings=2 * PACK,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.IMPLEMENTATION)
    return Target(model, name="random hybrid")


def make_batches() -> dict[str, list[TrainingBatch]]:
    """The same texts one to a row, and in packs."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        rows.append(Row(str(number), "all", tokens, [place >= PROMPT for place in range(length)]))
    packs: dict[int, list[Row]] = {}
    for row, pack in zip(rows, pack_first_fit(list(LENGTHS), PACK).tolist(), strict=True):
        packs.setdefault(pack, []).append(row)
    alone = [collate([[row]], length=max(LENGTHS), pad_token=0) for row in rows]
    packed = [collate([members], length=PACK, pad_token=0) for members in packs.values()]
    return {"one text a row": alone, "packs, in groups": packed, "packs, in one call": packed}


def time_step(target: Target, head: Eagle3, objective: Objective, batches: list[TrainingBatch]) -> float:
    """Seconds of the target's passes, the loss and its gradients."""
    features, start = ComputedFeatures(target, head.target_layers), time.perf_counter()
    for batch in batches:
        objective(batch, features(batch)).total.backward()
    return time.perf_counter() - start


def main(arguments: list[str]) -> None:
    options = common.read_options(PackOptions, __doc__, arguments)
    torch.set_num_threads(options.threads)
    target = make_hybrid(options)
    head = Eagle3(target)
    settings = compose_options(["head=eagle3", "run=packed_hybrids"]).head.objective
    objective = Objective(head, **{key: value for key, value in settings.items() if key != "_target_"})
    seconds: dict[str, list[float]] = {}
    for repetition in range(options.repetitions + 1):
        for method, batches in make_batches().items():
            target.__dict__.pop("reads_segments", None)  # it is decided once, and here by the method
            with fast.force_paths(*(["varlen"] if method.endswith("call") else [])):
                duration = time_step(target, head, objective, batches)
            if repetition:  # the first one warms up
                seconds.setdefault(method, []).append(duration)
    rates = {method: sum(LENGTHS) / statistics.median(durations) for method, durations in seconds.items()}
    for method, rate in rates.items():
        print(f"{method:<20} {rate:7,.0f} tokens/s, {rate / rates['one text a row']:.2f} times one text a row")


if __name__ == "__main__":
    main(sys.argv[1:])

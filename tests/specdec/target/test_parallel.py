"""Tests of targets that two processes hold together: hidden states, logits and tokens are those of one process."""

import re

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from specdec.core.compile import Runner
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.measuring.measure import seeded_generator
from specdec.proposers.layerskip import LayerSkip
from specdec.target import parallel as target_parallel
from specdec.target.adapter import adapt
from specdec.target.model import Target
from tests import families
from tests.support import greedy, make_drafter, save_word_model
from tests.together import together
from train.data.rows import TrainingBatch
from train.features.outputs import Online
from train.objective import Objective

pytestmark = pytest.mark.full  # starts processes

# Transformers' experts compute in at most 32 bits
FAMILIES = {"phi3": "float64", "gemma4_text-shared": "float64", "qwen3_5_text": "float64", "deepseek_v3": "float32"}
PROMPTS = [[1, 2, 3, 4, 5], [7, 5], [9, 9, 9]]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    """What `compare` returns in each of two processes."""
    folder = tmp_path_factory.mktemp("parallel")
    for family in families.FAMILIES:
        if str(family) in {*FAMILIES, "cohere"}:
            families.make(family).save_pretrained(folder / str(family))
    save_word_model(folder / "plain", tied=True)
    return together(2, "tests.specdec.target.test_parallel:compare", str(folder))


def compare(folder: str) -> dict:
    """In each process: the same by a target that it holds alone and by one that both hold together."""
    dist.init_process_group("gloo")
    pairs = {
        name: [Target.load(f"{folder}/{name}", dtype=dtype, tp=tp) for tp in (1, 2)]
        for name, dtype in [*FAMILIES.items(), ("plain", "float64")]
    }
    return {
        "states": {name: difference(*pair) for name, pair in pairs.items()},
        "fingerprints": {name: [target.fingerprint() for target in pair] for name, pair in pairs.items()},
        "tokens": {name: [decode(target) for target in pair] for name, pair in pairs.items()},
        "cut": {name: share_of_weights(pair[1]) for name, pair in pairs.items()},
        "heads": heads(*pairs["plain"]),
        "sentences": sentences(f"{folder}/plain", pairs["plain"][1]),
        "said": pairs["plain"][1].share.all_say(10 + dist.get_rank()),
    }


@torch.no_grad()
def difference(alone: Target, together: Target) -> list[float]:
    """The largest difference of hidden states, relative to the largest state, and of logits."""
    tokens, layers = (torch.arange(40) * 5 + 3)[None] % 60, tuple(range(alone.num_layers + 1))
    one, two = (target.read(tokens, layers) for target in (alone, together))
    states = (one.features - two.features).abs().max() / one.features.abs().max()
    return [float(states), float((alone.logits(one.final) - together.logits(two.final)).abs().max())]


def share_of_weights(target: Target) -> list[int]:
    """How many of the numbers of the blocks this process holds, and how many there are. Embedding and LM head are whole."""
    parameters = [value for block in target.blocks for value in block.parameters()]
    parts = [value.to_local() if isinstance(value, DTensor) else value for value in parameters]
    ends = [target.embed.weight, target.lm_head.weight]
    assert not any(isinstance(value, DTensor) for value in ends)
    return [sum(part.numel() for part in parts), sum(value.numel() for value in parameters)]


def decode(target: Target) -> list:
    """Plain answers, at temperature 0 and 1."""
    answers = []
    for temperature in (0.0, 1.0):
        decoder = Decoder(target, None, sampling=Sampling(temperature), stop=set())
        answers.append(decoder.generate(PROMPTS, 10, generator=seeded_generator(target, 0)).tokens)
    return answers


def heads(*targets: Target) -> dict:
    """By head: answers with drafts of a chain and of a tree, and the loss of a batch with its gradient's norm."""
    found = {}
    for name in ("eagle3", "draft"):
        found[name] = []
        for target in targets:
            drafter = make_drafter(target, name, reduced=name == "eagle3")
            answers = [
                Drafting(depth, width, nodes).decoder(
                    target, Drafting(depth, width, nodes).proposer(drafter), sampling=Sampling(temperature), stop=set()
                ).generate(PROMPTS, 10, generator=seeded_generator(target, 3)).tokens
                for depth, width, nodes in ((2, 1, None), (2, 2, 4)) for temperature in (0.0, 1.0)
            ]  # fmt: skip
            found[name].append([answers, *loss(target, drafter)])
    skipping = [greedy(target, LayerSkip(target, layers=None, depth=3)).generate(PROMPTS, 10) for target in targets]
    found["layerskip"] = [[[each.tokens, each.accepted]] for each in skipping]
    return found


def loss(target: Target, drafter) -> list[float]:
    """The loss of a batch and the norm of its gradient."""
    torch.manual_seed(0)
    tokens = torch.randint(57, (2, 24))
    batch = TrainingBatch(tokens, torch.rand(2, 24) < 0.6, torch.zeros_like(tokens), torch.arange(24).expand(2, -1))
    batch.loss_mask[:, :2] = False
    settings = {"decay": 0.8, "weighting": "decay", "temperature": 1.0, "eta": 3.0, "noise": 0.0}
    objective = Objective(drafter, losses={"kl": 1.0}, depth=drafter.depth or 3, anchors=None, chunk=None, **settings)
    total = objective(batch, Online(target, drafter.target_layers)(batch)).total
    total.backward()
    norm = sum(float(p.grad.square().sum()) for p in drafter.parameters() if p.grad is not None) ** 0.5
    return [float(total), norm]


def sentences(folder: str, target: Target) -> list[str]:
    """What is refused in two processes."""
    attempts = [
        lambda: Target.load(folder, tp=3),
        lambda: Target.load(folder, tp=0),
        lambda: Target.load(folder, tp=2, device="auto"),
        lambda: Decoder(target, None, sampling=Sampling(), stop=set(), runner=Runner(compile=True)),
        lambda: adapt(target, rank=2, alpha=4, modules=["q_proj"]),
        lambda: Target.load(f"{folder}/../cohere", dtype="float32", tp=2),
    ]
    return [sentence(attempt) for attempt in attempts]


def sentence(attempt) -> str:
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def test_hidden_states_and_logits_are_those_of_one_process(results):
    for result in results:
        for name, (states, logits) in result["states"].items():
            exact = FAMILIES.get(name, "float64") == "float64"
            assert states < (1e-10 if exact else 1e-5), name
            assert logits < (1e-10 if exact else 1e-4), name


def test_each_process_holds_a_part_of_every_layer(results):
    for held, total in results[0]["cut"].values():
        assert held < 0.75 * total
    assert [result["said"] for result in results] == [[10.0, 11.0]] * 2


@pytest.mark.parametrize("what", ["fingerprints", "tokens", "heads"])
def test_two_processes_together_are_one(results, what):
    """The fingerprint, plain answers, answers with drafts of several heads, losses and gradients."""
    for result in results:
        for name, (alone, both) in result[what].items():
            if what == "heads":
                assert both[1:] == pytest.approx(alone[1:], rel=1e-10), name
                alone, both = alone[0], both[0]
            assert both == alone, name
    assert results[0]["heads"] == results[1]["heads"]


def test_what_cannot_be_cut_is_refused_in_a_sentence(results):
    three, zero, auto, compiled, adapted, unfit = results[0]["sentences"]
    assert re.match(
        r"tp=3 does not divide the 4 heads of attention and 2 heads of keys and values of .*: use tp=1 or 2\.",
        three,
    )
    assert zero.startswith("tp=0 must be at least 1")
    assert auto.startswith("device=auto spreads") and "use device=null with tp, or tp=1 with auto" in auto
    assert compiled.endswith("set compile=false.") and "held by 2 processes" in compiled
    assert "is cut over 2 processes" in adapted and adapted.endswith("or choose another head.")
    assert unfit.startswith("tp=2: transformers' plan of tensor parallelism may not fit.") and unfit.endswith(
        "Or set tp=1."
    )


@pytest.mark.parametrize(
    ("model_type", "fields", "quantisation", "message"),
    [
        ("gpt2", {}, None, "has no plan of tensor parallelism for gpt2 models"),
        (
            "llama",
            {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6},
            None,
            "use tp=1 or 2 or 3 or 6",
        ),
        ("llama", {}, "fp8", "is quantised"),
    ],
)
def test_a_configuration_that_cannot_be_cut(model_type, fields, quantisation, message):
    config = AutoConfig.for_model(model_type, **fields)
    with pytest.raises(ValueError, match=message):
        target_parallel.check(config, 4, "name", device="cpu", quantisation=quantisation)
    target_parallel.check(config, 1, "name", device="cpu", quantisation=quantisation)


def test_one_process_cannot_hold_a_part():
    with pytest.raises(ValueError, match="holds a target in 2 processes together, and 1 run: start a multiple of 2"):
        target_parallel.share(2, torch.device("cpu"))

"""Random tiny targets and drafters in float64, and the slow way to what a drafter says in decoding."""

import functools
from pathlib import Path

import hydra
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specdec import attention
from specdec.proposers.heads import HeadProposer
from specdec.sampling import Sampling
from specdec.target import Target
from specdec.tree import Tree, TreeShape

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[1]
HEADS_FOLDER = ROOT / "conf" / "head"
ADAPTING = ("medusa2", "consistency")  # they change the target, which tests share: they have tests of their own
HEADS = sorted(path.stem for path in HEADS_FOLDER.glob("*.yaml") if path.stem not in ADAPTING)
# name, reduced vocabulary or not, arguments
VARIANTS = [(head, reduced, {}) for head in HEADS for reduced in (False, True)]
VARIANTS += [
    ("eagle3", False, {"norm_features": True, "norm_output": True}),
    ("mtp", True, {"num_modules": 5}),
    ("medusa", True, {"own_output": True, "num_blocks": 2}),
    ("hydra", True, {"own_output": True}),
    ("draft", True, {"borrow_embeddings": False}),
    ("draft", False, {"width": 16}),
    ("dspark", False, {"fuse": True}),
    ("dflash", True, {"fuse": True}),
]
NAMES = ["-".join([head, "reduced" * reduced, *arguments]) for head, reduced, arguments in VARIANTS]


def make_target(vocab_size: int, *, num_layers: int = 8) -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab_size,
        max_position_embeddings=512,
        initializer_range=0.4,  # logits that are not flat
        attn_implementation=attention.NAME,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Target(LlamaForCausalLM(config).double(), name="tiny")


def scale_forward(target: Target, monkeypatch) -> None:
    """Makes the target do more than its layers one after the other."""
    forward = target.decoder.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.last_hidden_state = 1.5 * output.last_hidden_state
        return output

    monkeypatch.setattr(target.decoder, "forward", scaled)


def save_target(folder: Path, *, num_layers: int = 3, seed: int = 0) -> None:
    """A tiny target with the real tokenizer, as a folder that scripts and train.py load."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "targets" / "smollm2-135m")
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=num_layers,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=8, eos_token_id=2)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@functools.cache
def load_head(head: str) -> dict:
    """conf/head/<head>.yaml with what it stands on; tests name the objective's class themselves."""
    with hydra.initialize_config_dir(str(HEADS_FOLDER.parent), version_base="1.3"):
        config = OmegaConf.to_container(hydra.compose("train", overrides=[f"head={head}"]).head)
    del config["objective"]["_target_"]
    return config


def make_drafter(target: Target, head: str, reduced: bool = False, arguments: dict | None = None):
    """Every parameter is random, norms too. Reduced: two thirds of the vocabulary."""
    torch.manual_seed(1)
    vocab = torch.randperm(target.vocab_size)[: target.vocab_size * 2 // 3].sort().values if reduced else None
    drafter = instantiate({**load_head(head)["drafter"], **(arguments or {})}, target, vocab=vocab).double().eval()
    for parameter in drafter.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = noise / parameter.shape[1] ** 0.5 if parameter.dim() == 2 else 1 + 0.3 * noise
    return drafter


@pytest.fixture(scope="session")
def target() -> Target:
    return make_target(61)


@pytest.fixture(scope="session")
def small_target() -> Target:
    """So few tokens that a random drafter is often right."""
    return make_target(6)


@pytest.fixture(scope="session", params=HEADS)
def drafter(request, target):
    return make_drafter(target, request.param)


@pytest.fixture(scope="session", params=VARIANTS, ids=NAMES)
def any_drafter(request, target):
    return make_drafter(target, *request.param)


@pytest.fixture(scope="session", params=VARIANTS, ids=NAMES)
def small_drafter(request, small_target):
    return make_drafter(small_target, *request.param)


def chain_of(depth: int) -> TreeShape:
    return TreeShape(depth=depth, width=1, nodes=depth)


def random_tokens(seed: int, num: int, vocab_size: int) -> list[int]:
    return torch.randint(vocab_size, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_tree(generator: torch.Generator, num_nodes: int, vocab_size: int) -> Tree:
    """One row; parents at random, tokens of siblings distinct."""

    def pick(num: int) -> int:
        return int(torch.randint(num, (), generator=generator))

    tokens, parents = [pick(vocab_size)], [-1]
    while len(tokens) < num_nodes:
        parent, token = pick(len(tokens)), pick(vocab_size)
        if (parent, token) not in list(zip(parents, tokens)):
            parents.append(parent)
            tokens.append(token)
    return Tree(torch.tensor([tokens]), torch.tensor([parents]), None)


@torch.no_grad()
def follow(drafter, tokens, features, slot: int, depth: int, parts: tuple[int, ...] = ()):
    """What decoding says at one slot: true features up to there, then steps along the given tokens.

    tokens [T], features [T, F*D]; parts: slots committed by the rounds before, each of which drafted on its own
    -> states [H] and logits [W] of steps 1..depth
    """
    proposer = HeadProposer(drafter, chain_of(depth))
    proposer.begin(tokens[None], torch.tensor([len(tokens)]))
    first = 0
    for last in (*parts, slot):
        proposer.commit(
            tokens[None, first + 1 : last + 1], features[None, first:last], torch.tensor([last - first]), [last - first]
        )
        first = last
        if last != slot:
            proposer.propose(Sampling(), None)
    _, (state, said, _) = proposer.absorb()
    states, logits = [state[0, -1]], [said[0, -1]]
    for d in range(2, depth + 1):
        seen = torch.ones(1, 1, d - 1, dtype=torch.bool)
        state, said, _ = proposer.step(d, d - 2, state, tokens[None, [slot + d - 1]], seen)
        states.append(state[0, 0])
        logits.append(said[0, 0])
    return states, logits

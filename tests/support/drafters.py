"""Tiny drafters: every head in its variants."""

import functools
from pathlib import Path

import hydra
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from specdec import checkpoint
from specdec.core.cache import UnrollCache
from specdec.heads.eagle import Eagle
from specdec.options import config_files
from specdec.target.model import Target
from tests.support.commands import ROOT
from tests.support.reference_masks import document_mask
from train.settings.hydra_text import make_search_path
from train.settings.options import fill_arguments

HEADS_FOLDER = ROOT / "conf" / "head"


ADAPTING = ("medusa2",)  # they change the target, which tests share, so other tests cover them


HEADS = sorted(config_files.list_files("head").keys() - set(ADAPTING))


# (head, whether the draft vocabulary is reduced, arguments)
TABLE = {"kind": "markov", "rank": 64, "table": True}  # the paper's Markov head


VARIANTS = [(head, reduced, {}) for head in HEADS for reduced in (False, True)]


VARIANTS += [
    ("eagle3", False, {"norm_features": True, "norm_output": True}),
    ("eagle3", True, {"own_output": False}),
    ("mtp", True, {"num_modules": 5, "zero_first": False}),
    ("native_mtp", False, {"num_modules": 5, "zero_first": False}),
    ("medusa", True, {"own_output": True, "num_blocks": 2}),
    ("hydra", True, {"own_output": True}),
    ("draft", True, {"borrow_embeddings": False}),
    ("draft", False, {"width": 16}),
    ("dspark", False, {"fuse": True}),
    ("dflash", True, {"fuse": True}),
    ("eagle3", False, {"window": 7, "num_layers": 2, "full_layers": [1]}),
    ("peagle", True, {"window": 7, "full_layers": [0]}),
    ("dflash", True, {"window": 4, "full_layers": [1]}),
    ("eagle", True, {"window": 7}),
    ("mtp", False, {"window": 6}),
    ("mtp", True, {"num_modules": 5, "window": 7}),
    ("draft", True, {"window": 7}),
    ("dspark", True, {"dependence": TABLE}),
    ("dspark", False, {"dependence": {"kind": "markov", "rank": 8, "table": True, "form": "gated"}}),
    ("dspark", True, {"dependence": {"kind": "markov", "rank": 8, "form": "rnn"}}),
    ("dflash2", False, {"dependence": {"kind": "selector", "rank": 8, "top": 6, "table": True}, "convolution": 3}),
    ("dflash", True, {"sinks": True, "full_causal": True, "own_embedding": True, "own_output": True}),
    (
        "dspark",
        False,
        {
            "sinks": True,
            "window": 4,
            "dependence": TABLE,
            "own_embedding": True,
            "confidence_markov": False,
        },
    ),
    ("eagle3", True, {"own_embedding": True, "own_output": True, "block": {"qk_norm": True, "hidden_size": 24}}),
    ("peagle", False, {"own_embedding": True, "block": {"qk_norm": True}}),
    ("eagle", True, {"own_embedding": True}),
    ("dspark", False, {"window": 3, "window_causal": False}),
]


QUICK = [  # `make quick`: one variant for each kind of Drafter.context_kind
    ("eagle", False, {}),
    ("mtp", True, {"num_modules": 5}),
    ("dspark", False, {"fuse": True}),
    ("draft", True, {"borrow_embeddings": False}),
    ("hydra", True, {"own_output": True}),
]


NO_SOURCE = {"native_mtp": {"source": None, "layout": "deepseek"}}  # arguments of heads whose target ships no module


def name_of(variant: tuple[str, bool, dict]) -> str:
    head, reduced, arguments = variant
    return "-".join([head, "reduced" if reduced else "whole", *arguments])


def paired(names: str, variants: list, choices: list):
    """Pairs instead of a cross product: each variant with one of the others in turn, shifted by one after each round.

    The first name may be a fixture that takes variants, such as any_drafter.
    """
    assert len(variants) >= len(choices)
    num = len(choices)
    cases = [(variant, choices[(i + i // num) % num]) for i, variant in enumerate(variants)]
    first = names.split(",")[0]
    indirect = [first] if first.endswith("_drafter") else []

    def ids(value) -> str:
        return name_of(value) if any(value is variant for variant in VARIANTS) else str(value)

    return pytest.mark.parametrize(names, cases, ids=ids, indirect=indirect)


@functools.cache
def load_head(head: str) -> dict:
    """The composed configuration of conf/head/<head>.yaml, without the class of the objective."""
    with hydra.initialize_config_dir(str(HEADS_FOLDER.parent), version_base="1.3"):
        config = OmegaConf.to_container(
            hydra.compose("train", overrides=[f"head={head}", make_search_path()]).head, resolve=True
        )
    del config["objective"]["_target_"]
    config["drafter"] = fill_arguments(config["drafter"]) | NO_SOURCE.get(head, {})
    return config


def make_drafter(target: Target, head: str, reduced: bool = False, arguments: dict | None = None):
    """A drafter in float64 with random parameters, norms included. reduced: two thirds of the vocabulary."""
    torch.manual_seed(1)
    order = torch.randperm(target.vocab_size, device="cpu")  # as a vocabulary counted from data is
    vocab = order[: target.vocab_size * 2 // 3].sort().values if reduced else None
    drafter = instantiate({**load_head(head)["drafter"], **(arguments or {})}, target, vocab=vocab)
    drafter = drafter.double().to(target.device).eval()
    for parameter in drafter.parameters():
        noise = torch.randn_like(parameter)
        if parameter.requires_grad:  # the others are the target's
            parameter.data = noise / parameter.shape[1] ** 0.5 if parameter.dim() == 2 else 1 + 0.3 * noise
    if getattr(drafter, "embedding", None) is not None:  # it starts as a copy of the target's
        drafter.embedding = torch.randn_like(drafter.embedding)
    return drafter


def save_eagle(folder: Path, target: Target, *, seed: int = 0, **extra) -> None:
    """An untrained EAGLE head that drafts every fourth token, as a checkpoint."""
    torch.manual_seed(seed)
    drafter = Eagle(target, vocab=torch.arange(0, target.vocab_size, 4))
    checkpoint.save(folder, drafter, {"_target_": "specdec.heads.eagle.Eagle"}, **extra)


@torch.no_grad()
def text_logits(drafter, tokens: torch.Tensor) -> torch.Tensor:
    """Of a draft model: tokens [B, T] -> logits [B, T, W] of step 1 of every slot"""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    h = torch.zeros(*tokens.shape, 0)
    _, readout = drafter.step(
        1, h, tokens, positions, document_mask(torch.zeros_like(tokens)), UnrollCache().at_step(1)
    )
    return drafter.logits(1, readout)


def disturb(drafter):
    """Adds noise to the trainable parameters, as if the drafter had been trained. -> the drafter"""
    torch.manual_seed(2)
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return drafter

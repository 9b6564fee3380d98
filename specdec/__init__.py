"""Drafters for speculative decoding: train, decode, measure.

The names in __all__ are the public interface (docs/api.md).
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.core import threads

if TYPE_CHECKING:
    from specdec.chat import Chat
    from specdec.core.sampling import Sampling
    from specdec.decoding.decoder import Decoder
    from specdec.decoding.drafting import Drafting
    from specdec.heads.base import Head
    from specdec.hf import Speculative
    from specdec.target.model import Target

__version__ = "0.1.0"
DISTRIBUTION = "specdec-drafters"  # name for pip; `specdec` on PyPI is another project
__all__ = ["Decoder", "Drafting", "Sampling", "Speculative", "load", "load_head", "load_target"]

threads.limit_spinning()
threads.divide_compilers()

_CLASSES = {  # each is imported when it is first used, so that `import specdec` does not import torch
    "Decoder": "specdec.decoding.decoder",
    "Drafting": "specdec.decoding.drafting",
    "Sampling": "specdec.core.sampling",
    "Speculative": "specdec.hf",
}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_CLASSES[name]), name)


def load(
    checkpoint: str | Path, target: str | None = None, *, drafting: "Drafting | None" = None, **arguments: Any
) -> "Chat":
    """A trained head beside its target, ready to answer conversations.

    target: a folder, or a name on the Hugging Face Hub; None: the one that the head was trained for
    drafting: None: the number of drafts is chosen every round; arguments: dtype, device and others of load_target
    Raises ValueError as load_target and load_head.
    """
    import specdec.checkpoint
    from specdec import loading
    from specdec.chat import Chat
    from specdec.decoding.drafting import choose_proposer

    folder = specdec.checkpoint.resolve(checkpoint)
    opened = loading.open_target(load_target(loading.find_target_name(folder, target), **arguments))
    settings, proposer = choose_proposer(opened.target, load_head(folder, opened.target), drafting)
    return Chat(opened, proposer, settings, loading.find_trained_template([str(folder)]))


def load_target(
    name: str, *, dtype: str = "auto", device: str | None = None, trust_remote_code: bool = False
) -> "Target":
    """A frozen target.

    name: a folder, or a name on the Hugging Face Hub; device: None for CUDA if there is one, else the CPU
    dtype: bfloat16, float32, float16 or float64; auto: bfloat16 where the device computes in it, else float32
    Raises ValueError with what to do.
    """
    import torch

    from specdec.target.model import Target

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Target.load(name, dtype=dtype, device=place, trust_remote_code=trust_remote_code)


def load_head(checkpoint: str | Path, target: "Target") -> "Head":
    """A trained head for this target.

    checkpoint: a step's folder, a run's folder for its best step, or user/name on the Hub

    A head that adapts its target changes `target`. Raises ValueError if the head was trained for another target.
    """
    import specdec.checkpoint

    return specdec.checkpoint.load(checkpoint, target)

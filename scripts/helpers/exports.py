"""The formats of specdec/export, which of them a head has, and what a model card says of where it comes from."""

from helpers import loading

import importlib
from typing import Protocol

from specdec.export.serving import Form, Provenance
from specdec.heads.base import Drafter, Head
from specdec.target.model import Target

FORMATS = ("eagle", "gguf", "medusa", "safetensors", "sglang", "speculators", "transformers", "vllm")  # modules there


def form_of(drafter: Drafter, name: str) -> Form:
    """The form of a head in a format of FORMATS. Raises ValueError, with the closest form that works, if it has none."""
    return importlib.import_module(f"specdec.export.{name}").form(drafter)


def forms_of(drafter: Head) -> dict[str, Form]:
    """All forms that a head has, by format. Heads that are nothing but an adapter of their target have none."""
    found: dict[str, Form] = {}
    if not isinstance(drafter, Drafter):
        return found
    for name in FORMATS:
        try:
            found[name] = form_of(drafter, name)
        except ValueError:
            continue
    return found


class CardOptions(Protocol):
    """Options of a command that writes a model card."""

    @property
    def license(self) -> str: ...
    @property
    def data(self) -> str | None: ...
    @property
    def num_drafts(self) -> int | None: ...


def provenance_of(loaded: loading.Loaded, target: Target, chosen: CardOptions) -> Provenance:
    """For the model card of a checkpoint. target: the one that the head is for; data: None: as the run recorded it"""
    return Provenance.read(
        loaded.folder,
        target=target,
        license=chosen.license,
        data=chosen.data or loading.trained_on(loaded.folder),
        num_drafts=chosen.num_drafts,
    )

"""Helpers for tests of exported and published folders. tests/support/reference.py reads such folders independently."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hydra.utils import instantiate

from specdec import checkpoint
from specdec.export import published
from specdec.export.engines import ExportForm, make_form
from specdec.measuring.model_card import Provenance, write_export
from tests.support import reference
from tests.support.decoding import random_tokens
from tests.support.drafters import load_head, make_drafter
from tests.support.loops import follow

TOKENS = 1 + torch.tensor(random_tokens(3, 16, 60))  # without token 0, which DSpark uses as its mask
DEPTH = 4
SLOTS = (1, 2, 9)
# A Speculators container has norm_features (fc_norm) or norm_before_fc, not both
CONTAINED = {"norm_features": True, "norm_output": True, "norm_before_residual": True}
ALL_NORMS = {"norm_features": True, "norm_output": True, "norm_before_fc": True, "norm_before_residual": True}
OTHER_BLOCK = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
}


def make_exact(target, head: str, reduced: bool = False, arguments: dict | None = None):
    """A drafter of make_drafter in float64, with weights that float32 can represent, like published weights."""
    return make_drafter(target, head, reduced, {**(arguments or {}), "_convert_": "all"}).float().double()


def make_provenance(drafter, **changes) -> Provenance:
    document = {
        "_target_": f"specdec.heads.{type(drafter).__name__}",
        "versions": {"specdec": "1"},
        "reads_layers": list(drafter.target_layers),
    }
    fields = {"source": "run/step", "document": document, "target": "tiny", "fingerprint": "f00", "report": None,
             "records": {}, "training_data": "rows", "license": "mit", "num_drafts": 3, **changes}  # fmt: skip
    return Provenance(**fields)


def export(drafter, form: str, out: Path, *, dtype=torch.float64) -> ExportForm:
    exported_form = make_form(drafter, form)
    write_export(exported_form, out, dtype=dtype, provenance=make_provenance(drafter))
    return exported_form


def assert_same_drafts(path: Path, reader, drafter, *, slots=SLOTS) -> None:
    """Asserts that the engine has the drafter's logits at every step of a chain, and for the same tokens.

    reader: a function of tests/support/reference.py that reads the folder `path` as an engine does
    """
    target = drafter.target
    served = reference.serve(target.model, TOKENS)
    features = target.read(TOKENS[None], drafter.target_layers).features[0]
    for slot in slots:
        tokens = TOKENS.clone()
        if (
            getattr(drafter, "lattice", None) is not None
        ):  # candidates are scored behind candidates, as an engine walks through them
            for d in range(DEPTH - 1):
                tokens[slot + d + 1] = reader(path, served, tokens, slot, DEPTH).logits[d].argmax()
        _, logits = follow(drafter, tokens, features, slot, DEPTH)
        drafts = reader(path, served, tokens, slot, DEPTH)
        order = drafts.ids.argsort()  # published ones may be in any
        torch.testing.assert_close(drafts.logits[:, order], torch.stack(logits), atol=1e-9, rtol=1e-9)
        assert drafts.ids[order].tolist() == drafter.to_target(torch.arange(drafter.vocab_size)).tolist()


SGLANG1, SAFEAILAB1 = (partial(reference.eagle1, engine=engine) for engine in ("sglang", "safeailab"))
SGLANG3 = partial(reference.eagle3, engine="sglang")
OPENVINO3 = partial(reference.eagle3, engine="openvino")
SGLANG_BLOCK = partial(reference.block, engine="sglang")
UNBLANKED = partial(reference.mtp, blank=False)
REFERENCE_MEDUSA = partial(reference.medusa, engine="reference")


def assert_equal_drafters(drafter, expected) -> None:
    """Asserts that two heads have the same class, tensors and settings."""
    assert type(drafter) is type(expected)
    tensors, wanted = drafter.state_dict(), expected.state_dict()
    assert tensors.keys() == wanted.keys() and all(torch.equal(tensors[name], wanted[name]) for name in wanted)
    for name in ("target_layers", "depth", "norm_output", "norm_before_residual", "attention_bias", "num_drafts",
                 "anchor_predicts", "confident", "windows", "window_causal", "mask_token"):  # fmt: skip
        assert getattr(drafter, name, None) == getattr(expected, name, None), name
    if hasattr(expected, "config"):
        assert drafter.config.to_dict() == expected.config.to_dict()


def bring_in(path: Path, target):
    return checkpoint.load(path, target, exact=True)


def assert_given_back(path: Path, target, out: Path) -> None:
    """Asserts that format=published writes the folder's own tensors, to the last bit, and its configuration."""
    drafter = bring_in(path, target)
    checkpoint.save(
        out / "kept", drafter, {**checkpoint.read_document(path), **published.read_published(path, target)[0]}
    )
    for head in (drafter, checkpoint.load(out / "kept", target, exact=True)):
        form = make_form(head, "published")
        write_export(form, out / "back", dtype=torch.bfloat16, provenance=make_provenance(head))
        assert json.loads((out / "back/config.json").read_text()) == json.loads((path / "config.json").read_text())
        before, after = (weights(folder) for folder in (path, out / "back"))
        assert list(before) == list(after)
        assert [(value.dtype, value.shape) for value in before.values()] == [(v.dtype, v.shape) for v in after.values()]
        differs = [name for name in before if published.hash_tensor(before[name]) != published.hash_tensor(after[name])]
        assert not differs, differs
        for name in published.SIDE_FILES:
            assert (path / name).exists() == (out / "back" / name).exists()
            if (path / name).exists():
                contents = [torch.load(folder / name) for folder in (path, out / "back")]
                assert str(contents[0]) == str(contents[1]) and type(contents[0]) is type(contents[1])
        shutil.rmtree(out / "back")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All named tensors of a published folder, in the order of their names."""
    found = published.open_folder(folder).tensors
    return {name: found[name] for name in sorted(found)}


def make_medusa2(target):
    torch.manual_seed(1)
    drafter = instantiate(load_head("medusa2")["drafter"], target, vocab=None)
    for parameter in drafter.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    return drafter.eval()


# Figures of a report
REPORT = {"tau": 1.5, "tau_ci": [1.25, 1.75], "num_prompts": 8, "temperature": 0.0, "survival": [0.3, 0.15, 0.05],
          "ms_per_round": {"draft": 9.0, "verify": 25.0, "keep": 0.0, "other": 0.0}, "baseline_tokens_per_second": 50.0,
          "num_rounds": 20, "acceptance": [0.3, 0.5, 0.33], "tokens_per_second": 44.0, "tokens_per_second_ci": [40.0,
             48.0],
          "speedup": 0.88, "speedup_ci": [0.8, 0.96], "identical_outputs": 1.0}  # fmt: skip


def rewrite(path: Path, *, tensors=None, **config) -> None:
    """Changes fields of config.json, and tensors by name; the value None removes an entry."""
    document, weights = reference.read(path)
    for entries, changes in ((document, config), (weights, tensors or {})):
        entries |= changes
        for name in [name for name, value in changes.items() if value is None]:
            del entries[name]
    (path / "config.json").write_text(json.dumps(document))
    safetensors.torch.save_file(weights, path / "model.safetensors")


def refuse(path: Path, target, message: str) -> None:
    """Asserts that the folder is not read as a head of the target. message: an expression that the error matches"""
    with pytest.raises(ValueError, match=message):
        checkpoint.load(path, target)

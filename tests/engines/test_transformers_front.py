"""transformers' own generate behind front.py: its answers, and the rounds that the referee counts."""

import pytest
import torch
import transformers
from transformers import Glm4MoeForCausalLM

from specdec.engines.front.transformers_front import Transformers, TransformersOptions
from specdec.export.engines import make_form
from specdec.heads.draft import Draft
from specdec.measuring.model_card import write_export
from tests.engines.test_front import connect, serving
from tests.support.exports import make_provenance
from tests.support.native import save_native
from tests.support.targets import save_target

NEW = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and exports of draft models that are the target itself and the target with noise."""
    folder = tmp_path_factory.mktemp("generate")
    target = save_target(folder / "target")
    for name, noise in (("right", 0.0), ("noisy", 0.02)):
        torch.manual_seed(0)
        draft = Draft(target, copy_layers=list(range(target.num_layers)))
        for parameter in draft.parameters():
            parameter.data += noise * torch.randn_like(parameter)
        write_export(
            make_form(draft, "transformers"), folder / name, dtype=torch.float32, provenance=make_provenance(draft)
        )
    return folder


def answer(options: TransformersOptions, **fields):
    with serving(Transformers(options)) as url, connect(url).open() as connection:
        body = {"model": options.target, "max_tokens": NEW, **fields}
        return connection.send_requests([("a", {"prompt": [7, 8, 9]})], **body).answers[0]


def test_an_assistant_drafts_as_its_folder_says(folders):
    target = str(folders / "target")
    plain = answer(TransformersOptions(target), ignore_eos=True)
    assert (plain.server_counts.rounds, plain.server_counts.drafted) == (NEW - 1, 0) and len(plain.ids) == NEW
    right = answer(TransformersOptions(target, str(folders / "right")), ignore_eos=True)
    assert right.ids == plain.ids and set(right.server_counts.steps[:-1]) == {right.server_counts.longest} == {3}
    assert right.sizes[0] == 1 and right.server_counts.accepted == right.server_counts.drafted
    more = answer(TransformersOptions(target, str(folders / "right"), drafts=6), ignore_eos=True)
    assert more.ids == plain.ids and more.server_counts.longest == 6
    noisy = answer(TransformersOptions(target, str(folders / "noisy")), ignore_eos=True)
    assert noisy.ids == plain.ids and 0 < noisy.server_counts.accepted < noisy.server_counts.drafted
    left_out = answer(TransformersOptions(target, str(folders / "right")), ignore_eos=True, speculate=False)
    assert left_out.ids == plain.ids and left_out.server_counts.drafted == 0


def test_the_target_and_its_assistant_are_loaded_where_told(folders):
    target, assistant = str(folders / "target"), str(folders / "right")
    generator = Transformers(TransformersOptions(target, assistant, drafts=5, device="meta"))
    models = (generator.target, generator.arguments["assistant_model"])
    assert [model.device.type for model in models] == ["meta", "meta"]
    settings = models[1].generation_config  # as written by the export: every round has as many drafts
    assert (settings.num_assistant_tokens, settings.num_assistant_tokens_schedule) == (5, "constant")
    assert generator.version == transformers.__version__


def test_a_look_up_and_stop_tokens(folders):
    target = str(folders / "target")
    plain = answer(TransformersOptions(target), ignore_eos=True)
    found = answer(TransformersOptions(target, lookup=True, drafts=4), ignore_eos=True)
    assert found.ids == plain.ids and found.server_counts.longest <= 4
    generator = Transformers(TransformersOptions(target, str(folders / "right"), drafts=5))
    generator.stop = frozenset([plain.ids[8]])
    first = plain.ids.index(plain.ids[8])
    with serving(generator) as url, connect(url).open() as connection:
        ended = connection.send_requests([("a", {"prompt": [7, 8, 9]})], model=target, max_tokens=NEW).answers[0]
    assert ended.ids == plain.ids[: first + 1] and ended.ended


def test_the_targets_own_modules_draft(tmp_path, monkeypatch):
    save_native(tmp_path / "native", "glm4_moe")
    # transformers finds modules by the number of their layer in GLM-4.5, and not by that of the config
    monkeypatch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.4.*"])
    target = str(tmp_path / "native")
    plain = answer(TransformersOptions(target, dtype="float32"), ignore_eos=True)
    drafted = answer(TransformersOptions(target, mtp=True, dtype="float32"), ignore_eos=True)
    assert drafted.ids == plain.ids and drafted.server_counts.drafted > 0 and drafted.server_counts.longest == 1
    assert drafted.sizes[0] == 1
    save_target(tmp_path / "target")
    with pytest.raises(ValueError, match=r"has no MTP modules that transformers .* reads"):
        Transformers(TransformersOptions(str(tmp_path / "target"), mtp=True))

"""What a run leaves to `auto`: each rule by itself, on data and devices of several kinds, and what is given stays."""

import json
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from specdec import checkpoint
from specdec.core.precision import DtypeChoice
from specdec.options.config_files import flatten
from tests.support.drafters import load_head, make_drafter
from tests.support.runs import losses_of
from tests.train.composing import compose_options
from train.prepare import facts as prepare
from train.prepare.facts import PlannedFacts
from train.settings import decide
from train.settings.decide import Cost, Decided, Hardware, Memory, Pace, TargetFacts, TextLengths
from train.settings.options import DECIDED_ARGUMENTS, RunConfig, RunOptions, list_auto_options, read_settings

CPU, GPU = Hardware("cpu", 1, 24e9, 60e9), Hardware("cuda", 1, 80e9, 1e12)
FAST, SLOW = Pace(1 / 5000, 1 / 1500, 0.1), Pace(1 / 300, 1 / 120, 2.0)


class GivenFacts:
    """Facts as a test gives them. sizes: arguments of `count_memory`"""

    def __init__(
        self, lengths, hardware, pace, *, max_positions=8192, counts=(), depth=4, packed=True, memory=lambda sizes: None
    ):
        self.row_lengths, self.hardware, self.pace, self.memory = numpy.array(lengths), hardware, pace, memory
        self.counts, self.sizes, self.packed_lengths = numpy.array(counts, dtype=int), [], []
        self.target = TargetFacts(49152, max_positions, packed, depth)

    def choose_dtype(self):
        return DtypeChoice("float32", "as it is told")

    def read_target(self, dtype):
        return self.target

    cut_rows = PlannedFacts.cut_rows

    def pack_rows(self, length):
        self.packed_lengths.append(length)
        self.texts = replace(prepare.guess_packs(self.row_lengths, length), counts=self.counts)
        return self.texts

    def count_memory(self, sizes):
        self.sizes.append(sizes)
        return self.memory(sizes)

    def count_features(self):
        return 4608

    def measure_pace(self, sizes):
        return self.pace


def settings(*options: str) -> RunOptions:
    return compose_options("head=eagle3", *options)


def decide_all(lengths, hardware, pace, *options, **facts) -> tuple[RunConfig, dict[str, str], TextLengths]:
    """The decided configuration, and the reasons by option"""
    facts_given = GivenFacts(lengths, hardware, pace, **facts)
    decided: Decided = decide.decide(settings(*options), facts_given)
    assert {each.name for each in decided.decisions} == set(list_auto_options()) - (
        {f"head.drafter.{name}" for name in DECIDED_ARGUMENTS if name not in decided.config.head.drafter}
    )
    return decided.config, {each.name: each.reason for each in decided.decisions if each.reason}, facts_given.texts


def count_tokens(config: RunConfig, texts: TextLengths) -> float:
    return config.train.steps * config.train.batch * config.train.accumulation * texts.pack_tokens


def test_forty_rows():
    config, reasons, _ = decide_all([200] * 40, CPU, FAST, counts=range(900))
    assert config.data.length == 512 and config.train.epochs == 4 and config.features.mode == "cached"
    assert config.head.vocab_size == 8192  # what so few answers hold says little of others
    assert config.train.steps * 512 == pytest.approx(4 * 8000, rel=0.3) and config.train.batch == 1
    assert config.train.validate_every * 4 >= config.train.steps and "4 times 8,000 tokens" in reasons["train.steps"]


def test_many_short_rows_on_two_cores_take_no_longer_than_an_hour():
    for pace in (FAST, SLOW):
        config, reasons, texts = decide_all([100] * 40_000, CPU, pace)
        tokens = count_tokens(config, texts)
        spent = Cost(pace, texts.num_tokens, 1, cached=False).count_seconds(tokens, tokens / config.train.steps)
        assert 3000 < spent <= 3700 and "train.hours=1 allows" in reasons["train.steps"]
    assert config.train.batch * config.train.accumulation > 1  # Muon's own work is a small part of a slow step
    config, _, texts = decide_all([100] * 40_000, GPU, Pace(1e-5, 5e-5, 0.01))
    assert config.train.hours is None and config.train.epochs == 4 and config.features.mode == "online"


def test_long_rows_are_read_whole_as_far_as_target_and_device_allow():
    lengths = [16_000] * 200
    config, reasons, _ = decide_all(lengths, CPU, FAST)
    assert config.data.length == 4096 and "at most 4,096 on a CPU, for the time; cut: 200" in reasons["data.length"]
    config, reasons, _ = decide_all(lengths, GPU, FAST, max_positions=131_072)
    assert config.data.length == 16_000 and "cut: 0" in reasons["data.length"]
    config, reasons, _ = decide_all([100] * 190 + [100_000] * 10, GPU, FAST, max_positions=131_072)
    assert config.data.length == 100_032 and config.head.objective["gradient_checkpointing"] is False
    config, reasons, _ = decide_all(lengths, GPU, FAST, max_positions=2048)
    assert config.data.length == 2048 and "the target reads at most 2,048" in reasons["data.length"]


def test_much_data_on_gpus_is_read_once_in_large_steps():
    lengths = numpy.random.default_rng(0).integers(100, 3000, 700_000)
    config, _, _ = decide_all(lengths, Hardware("cuda", 8, 80e9, 1e12), Pace(1e-5, 5e-5, 0.01), max_positions=40_960)
    assert config.train.epochs == 1 and config.data.length == 4096
    assert config.train.batch * config.train.accumulation * config.data.length * 8 >= 32_768
    assert 10_000 < config.train.steps < 40_000 and config.validation.num_prompts == 64 and config.decode.depth == 4


def test_all_drafts_of_a_block_are_judged_on_a_gpu():
    for head, depths in (("head=dflash2", [2, 15]), ("head=medusa", [2, 4])):
        decided = [decide_all([300] * 400, hardware, FAST, head, depth=15)[0] for hardware in (CPU, GPU)]
        assert [config.decode.depth for config in decided] == depths


def test_long_runs_have_norms_in_place_of_a_start():
    for options, norm, packs in (
        (["train.tokens=300000"], False, 200),
        (["train.tokens=3000000"], True, 0),
        (["train.tokens=3000000", "solve_packs=50"], False, 50),
        (["train.tokens=3000000", "head.drafter.norm_features=false"], False, 200),
        (["train.tokens=3000000", "start=checkpoints/shipped/eagle3"], False, 200),
        (["train.tokens=3000", "head.drafter.norm_output=true"], True, 0),
        (["train.tokens=3000000", "head=mtp"], None, 200),
    ):
        config, _, _ = decide_all([300] * 400, CPU, FAST, *options)
        assert config.head.drafter.get("norm_features") is norm and config.solve_packs == packs, options


def test_a_vocabulary_covers_the_answers_within_bounds():
    for counts, size in (([5] * 100, 8192), ([1] * 12_000, 12_288), ([1] * 49_000, 32_768)):
        known = TextLengths(numpy.array([10]), 1, numpy.array(counts))
        assert decide.decide_vocabulary(settings(), known, 49_152).value == size
    assert decide.decide_vocabulary(settings(), known, 8000).value is None
    given = decide.decide_vocabulary(settings("head.vocab_size=99"), known, 49_152)
    assert (given.value, given.reason) == (99, "")


def test_activations_are_computed_again_before_rows_are_cut():
    def count(sizes):
        return Memory(1e9, 1e9, step=sizes.length * (2e6 if sizes.recompute else 4e6), start=0.0)

    for head, recompute, length in (("head=mtp", True, 16_000), ("head=dspark", False, 9536)):
        config, _, _ = decide_all(
            [16_000] * 40, replace(GPU, memory=46e9), FAST, head, max_positions=None, memory=count
        )
        assert (config.head.objective["gradient_checkpointing"], config.data.length) == (recompute, length)
    config, _, _ = decide_all([16_000] * 40, GPU, FAST, "head=mtp", max_positions=None, memory=count)
    assert config.head.objective["gradient_checkpointing"] is False  # it costs time


def test_what_is_in_memory_at_once_is_lowered_until_it_fits():
    memory = {"memory": lambda sizes: Memory(1e9, 1e9, step=sizes.batch * sizes.length * 1e7, start=0.0)}
    rows, small = [4000] * 400, replace(GPU, memory=35e9)
    config, reasons, _ = decide_all(rows, small, FAST, "data.length=2048", **memory)
    assert config.train.batch == 1 and "were too much for 35.0 GB" in reasons["train.batch"]
    config, reasons, _ = decide_all(rows, small, FAST, **memory)
    assert config.data.length == 2816 and "were too much for 35.0 GB" in reasons["data.length"]
    assert config.head.objective["gradient_checkpointing"] is True  # tried first, and worth less than the rest needs
    with pytest.raises(ValueError, match=r"^This run does not fit: a process needs .* lower data\.length=4096.* plan"):
        decide_all(rows, small, FAST, "data.length=4096", **memory)
    assert decide_all(rows, small, FAST, "data.length=4096", "plan=true", **memory)[0].data.length == 4096


def test_rows_are_packed_once_for_each_length_that_is_used():
    facts = GivenFacts(
        [4000] * 400, replace(GPU, memory=35e9), FAST, memory=lambda sizes: Memory(1e9, 1e9, sizes.length * 1e7, 0.0)
    )
    lengths = [decide.decide(settings(), facts).config.data.length, *(sizes.length for sizes in facts.sizes)]
    assert facts.packed_lengths == [8192, lengths[0]] and len(lengths) > 4 and facts.texts.lengths.max() == lengths[0]


GIVEN = {
    "data.length": 640, "head.vocab_size": 5000, "features.mode": "online", "decode.depth": 3, "train.steps": 77,
    "train.epochs": 2.5, "train.hours": 0.5, "train.batch": 3, "train.accumulation": 5, "train.validate_every": 9,
    "validation.num_prompts": 6, "validation.max_new_tokens": 20,
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("hardware", [CPU, GPU], ids=["cpu", "gpu"])
def test_what_is_given_is_never_changed(name, hardware):
    config, reasons, _ = decide_all([300] * 5000, hardware, FAST, f"{name}={GIVEN[name]}")
    assert flatten(config.document())[name] == GIVEN[name] and name not in reasons


def test_tokens_epochs_and_hours():
    for option, expected in (("train.tokens=300000", 3e5), ("train.epochs=2", 3e6), ("train.epochs=0.5", 7.5e5)):
        config, _, texts = decide_all([300] * 5000, CPU, SLOW, option)
        assert count_tokens(config, texts) == pytest.approx(expected, rel=0.02) and config.train.hours is None
    config, reasons, texts = decide_all([300] * 5000, CPU, SLOW, "train.epochs=2", "train.hours=0.25")
    assert count_tokens(config, texts) < 1.5e5 and "train.hours=0.25 allows" in reasons["train.steps"]


def test_a_share_of_the_steps_is_the_warm_up():
    for warmup, steps in (("0.05", 50), ("20", 20), ("0", 0)):
        assert settings(f"optimizer.warmup={warmup}").optimizer.warmup_steps(1000) == steps


def test_a_resumed_run_is_the_same_on_another_machine(fit, monkeypatch):
    path = Path("checkpoints/some/config.yaml")
    names = ("train.steps", "train.validate_every", "train.accumulation", "data.length")
    open_options = ("train.epochs=1", *(f"{name}=auto" for name in names))
    monkeypatch.setattr(prepare, "time_steps", lambda *_: FAST)
    fit("whole", *open_options)
    fit("some", *open_options)
    decided = flatten(read_settings(path)) | {"resume": None}
    path.with_name("finished").unlink()
    monkeypatch.setattr(prepare, "time_steps", lambda *_: pytest.fail("it was decided before"))
    fit("some", *open_options, "resume=true")
    assert decided == flatten(read_settings(path)) | {"resume": None}
    assert losses_of("some") == losses_of("whole") and all(decided.get(name) != "auto" for name in list_auto_options())


def test_the_speed_is_measured_with_a_drafter_that_is_thrown_away(fit, monkeypatch):
    monkeypatch.setattr(decide, "SHORT_RUN_STEPS", 0)
    fit("measured", "train.validate_every=auto")
    monkeypatch.setattr(decide, "SHORT_RUN_STEPS", 50)
    fit("brief", "train.validate_every=auto")
    assert losses_of("measured") == losses_of("brief")


def test_the_speed_is_measured_on_the_shapes_of_training(fit, monkeypatch):
    lengths = []

    class NotedFeatures(prepare.ComputedFeatures):
        def __call__(self, batch, *arguments):
            lengths.append(batch.tokens.shape[1])
            return super().__call__(batch, *arguments)

    monkeypatch.setattr(prepare, "ComputedFeatures", NotedFeatures)
    fit("measured", "plan=true", "data.length=2048")
    assert set(lengths) == {1024}  # of short packs


@pytest.mark.parametrize(
    "trained_length, longest, full_layers, decided",
    [(64, 128, (), 128), (64, 32, (), 64), (96, 128, (), None), (64, 128, (0,), None)],
)
def test_the_window_of_a_checkpoint_follows_longer_texts_if_it_was_auto(
    target, tmp_path, trained_length, longest, full_layers, decided
):
    arguments = {"window": 64, "num_layers": 2, "full_layers": [*full_layers]}
    drafter, spec = make_drafter(target, "eagle3", False, arguments), load_head("eagle3")["drafter"]
    checkpoint.save(tmp_path / "head", drafter, {**spec, **arguments, "trained_length": trained_length})
    texts = TextLengths(numpy.array([longest]), 1, numpy.zeros(0))
    (decision,) = decide.decide_window(settings(f"start={tmp_path}/head"), texts, 4)
    assert decision.value == decided and (decided is None or decision.reason.endswith(f"in training: {decided}"))
    further, document = checkpoint.load_for_training(tmp_path / "head", target, {"window": decided})
    assert document["window"] == (decided or 64)
    assert further.windows == [None if layer in full_layers else decided or 64 for layer in range(2)]


def test_a_window_is_the_longest_text_and_exceeds_all_drafts():
    for longest, options, window in ((1100, (), 1100), (3, (), 5), (3, ("decode.depth=9",), 10)):
        config, _, _ = decide_all([longest, 3], GPU, FAST, "data.length=8192", *options)
        assert config.head.drafter["window"] == window


@pytest.mark.parametrize("is_causal", [False, True])
def test_an_auto_window_leaves_blocks_as_they_are_without_one(is_causal):
    config, _, _ = decide_all([300] * 9, GPU, FAST, "head=dflash", f"+head.drafter.full_causal={is_causal}".lower())
    assert config.head.drafter["window"] == 300 and config.head.drafter["window_causal"] is is_causal


def test_further_training_on_shorter_texts_keeps_window_and_trained_length(fit):
    fit("long", "train.steps=1", "head=eagle", "head.drafter.window=auto")
    fit("short", "train.steps=1", "head=eagle", "head.drafter.window=auto", "start=checkpoints/long", "data.length=32")
    folder = Path("checkpoints/short/step_000001")
    window = json.loads((folder / "drafter.json").read_text())["window"]
    assert window == checkpoint.find_trained_length(folder) == 49  # the longest text of the first run

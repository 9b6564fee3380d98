"""Plans: every target on every machine fits or is refused, what a plan says, and paths that do not exist."""

import itertools

import numpy
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tests.support import ROOT, train_overrides
from train.prepare import build, facts, plan
from train.settings import decide, hydra_text
from train.settings.hydra_text import search_path
from train.settings.options import RunConfig

CPU = torch.device("cpu")
TARGETS = sorted(path.stem for path in (ROOT / "conf/target").glob("*.yaml"))
MACHINES = sorted(path.stem for path in (ROOT / "conf/machine").glob("*.yaml") if path.stem != "here")
TOO_LARGE = {
    (target, machine)
    for target, machine in itertools.product(TARGETS, MACHINES)
    if (machine == "laptop" and target not in ("smollm2-135m", "gemma-3-270m"))
    or (machine in ("h100", "h100x8") and target == "llama-3.3-70b")
}


def settings(*options: str) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed = compose("train", overrides=["run=some", *options, search_path()])
    return RunConfig.of(OmegaConf.to_container(composed, resolve=True)).with_precision("bf16", "bfloat16")


def outline_of(config: RunConfig):
    return plan.make_outline(config, plan.read_config(config))


@pytest.fixture(scope="module")
def outlines():
    return {name: outline_of(settings(f"target={name}", "machine=h100", "plan=true")) for name in TARGETS}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("target", TARGETS)
def test_every_target_on_every_machine_fits_or_is_refused(target, machine, outlines):
    config = settings("head=eagle3", f"target={target}", f"machine={machine}", "plan=true")
    place = plan.find_place(config, CPU, 1)
    lengths = numpy.random.default_rng(0).integers(50, 3000, 20_000)
    config = decide.settle(config, decide.reading(config, place, lengths, most=outlines[target].max_positions))
    texts = decide.TextLengths.guessed(lengths, config.data.length)
    config = decide.settle(config, decide.vocabulary(config, texts, all_tokens=outlines[target].vocab_size))
    config = decide.settle(config, decide.start(config, decide.tokens_wanted(config, texts)))
    config = decide.settle(config, decide.batches(config, place, texts))
    counted = plan.count_run(config, outlines[target], texts, place, build.make)
    config = decide.settle(config, decide.features(config, place, texts, bytes_per_token=8))
    config = decide.settle(config, decide.training(config, place, texts, counted.pace))
    made = plan.make_plan(config, counted.drafter, texts, place, counted.memory, counted.pace)
    print(made)
    assert not config.open and made.lines
    if (target, machine) in TOO_LARGE:
        assert "the target alone is too large. Give target.shard=true" in made.problems[0]
    else:
        assert not made.problems and counted.memory.most < plan.ROOM * place.memory


def test_a_plan_is_short_for_a_machine():
    assert hydra_text.with_plan(["head=mtp", "plan=h100x8"]) == ["head=mtp", "machine=h100x8", "plan=true"]
    assert hydra_text.with_plan(["plan=true"]) == ["plan=true"] and hydra_text.with_plan(["plan=false"]) == [
        "plan=false"
    ]


def test_an_outline_is_of_the_target_that_it_was_written_for():
    with pytest.raises(ValueError, match="some/other could not be loaded"):
        plan.read_config(settings("target=qwen3-8b", "target.name=some/other", "machine=h100", "plan=true"))


def test_a_plan_takes_steps_on_this_machine_and_writes_nothing(fit, capsys):
    before = torch.get_rng_state()
    assert fit("planned", "plan=true", "train.steps=8") == 0
    out = capsys.readouterr().out
    for line in ("plan for checkpoints/planned on this machine", "reads    ", "memory   ", "tokens/s", "network  none"):
        assert line in out
    assert not [path for path in (ROOT / "nowhere", *plan.Path("checkpoints/planned").glob("*")) if path.exists()]
    assert before.shape == torch.get_rng_state().shape


def test_a_run_that_cannot_fit_is_refused_before_the_target_is_loaded(fit, monkeypatch):
    monkeypatch.setattr(build, "load_target", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(ValueError, match=r"This run does not fit: a process needs .* GB .* lower data.length=64"):
        fit("large", "head=eagle3", "machine.memory=0.5")


@pytest.mark.parametrize(
    "option, said",
    [
        ("data.train=nowhere.jsonl", "nowhere.jsonl"),
        ("data.heldout=nowhere.jsonl", "nowhere.jsonl"),
        ("target.name=./nowhere", "folder ./nowhere does not exist"),
        ("target.name=nobody/nothing", "nobody/nothing could not be loaded"),
    ],
)
def test_a_wrong_path_is_said_before_anything_is_loaded(fit, monkeypatch, option, said):
    monkeypatch.setattr(build, "load_target", lambda *_: pytest.fail("the target was loaded"))
    monkeypatch.setattr("specdec.core.hub.in_reach", lambda: False)
    with pytest.raises((ValueError, OSError), match=said):
        fit("wrong", option)


def test_a_shorter_pack_is_tried_where_memory_does_not_suffice(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    given = [each for each in train_overrides(folder, "some") if not each.startswith("data.length")]
    config = settings(*given, "head=eagle3")
    needs = []

    def count_run(config, *_):
        needs.append(config.data.length)
        memory = plan.Memory(1.0, 1.0, config.data.length * 1e9, 0.0)
        drafter = type("Some", (), {"target_layers": (), "target": outline})
        return plan.Counted(drafter, memory, decide.Pace(0, 0, 0))

    outline = outline_of(config)
    monkeypatch.setattr(plan, "count_run", count_run)
    monkeypatch.setattr(decide, "SHORTEST", {"cpu": 64, "cuda": 64})
    monkeypatch.setattr(decide, "reading", lambda config, *_, **__: [decide.Decision("data.length", 512, "")])
    monkeypatch.setattr(plan, "find_place", lambda *_: decide.Place("cpu", 1, 150e9, 1e12))
    prepared = facts.prepare(config, CPU, 1)
    assert needs == [512, 256, 128] and prepared.config.data.length == prepared.packs.length == 128


def test_the_start_needs_memory_only_where_there_is_one(outlines):
    target = outlines["smollm2-135m"]
    texts = decide.TextLengths.guessed(numpy.full(400, 256), 512)
    memory = {}
    block = "head=dflash2", "head.drafter.num_drafts=15"
    heads = {"medusa": ("head=medusa",), "block": block, "fused": (*block, "head.drafter.fuse=true")}
    for name, options in {"solved": (), "random": ("solve_packs=0",), **heads}.items():
        config = settings("head=eagle3", "machine=h100", *options)
        config = config.settle(
            {
                name: 512 if "length" in name else 8192
                for name in config.open
                if name in ("data.length", "head.vocab_size")
            }
        )
        memory[name] = plan.count_run(config, target, texts, decide.Place("cuda", 1, 8e10, 1e12), build.make).memory
    assert memory["solved"].start > 1e9 and memory["random"].start == 0 < memory["medusa"].step
    assert memory["solved"].target == memory["medusa"].target > 2 * 134e6
    assert memory["block"].start == 0 and memory["fused"].start > memory["solved"].start


def test_the_figures_of_a_plan_are_sums():
    memory = plan.Memory(target=16e9, drafter=4e9, step=11e9, start=10e9, other=1e9)
    assert memory.most == 32e9 and memory.fixed == 21e9 and "target 16.00" in str(memory)
    assert "closed-form start" in str(plan.Memory(target=1.0, drafter=1.0, step=1.0, start=1e9))

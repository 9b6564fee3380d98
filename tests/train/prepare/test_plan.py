"""Plans: every target on every machine fits or is refused, what a plan says, and paths that do not exist."""

import functools
import itertools

import numpy
import pytest
import torch

from tests.support.commands import ROOT
from tests.train.composing import compose_options
from train.prepare import facts as prepare
from train.prepare import plan
from train.prepare.facts import PlannedFacts
from train.settings import decide, hydra_text
from train.settings.decide import RunSizes, TextLengths
from train.settings.options import RunOptions, fill_arguments

CPU = torch.device("cpu")
PLAN = ("machine=h100", "plan=true")
TARGETS = sorted(path.stem for path in (ROOT / "conf/target").glob("*.yaml") if path.stem != "base")
MACHINES = sorted(path.stem for path in (ROOT / "conf/machine").glob("*.yaml") if path.stem != "here")
EVERYWHERE = ("smollm2-135m", "qwen3-8b", "llama-3.3-70b")  # on all machines in the first tier of tests, too
SMALL = ("smollm2-135m", "gemma-3-270m", "qwen3.5-0.8b", "lfm2.5-1.2b")
LARGE = ("llama-3.3-70b", "gpt-oss-120b")  # for one GPU of 80 GB, the target alone
TOO_LARGE = {
    (target, machine)
    for target, machine in itertools.product(TARGETS, MACHINES)
    if (machine == "laptop" and target not in SMALL)
    or (machine.startswith("h100") and machine != "h100_engine" and target in LARGE)
}
# Numbers of parameters that publishers state, in billions, of the text part alone where it is stated so
SIZES = {
    "gemma-3-270m": 0.27, "gemma-4-12b": 12, "gemma-4-26b-a4b": 25.2, "gemma-4-31b": 30.7, "glm-4.7-flash": 30,
    "gpt-oss-120b": 117, "gpt-oss-20b": 20.9, "lfm2.5-1.2b": 1.17, "llama-3.1-8b": 8.03, "llama-3.3-70b": 70.6,
    "ministral-3-8b": 8.5, "nemotron-3-nano-30b-a3b": 31.6, "qwen3-30b-a3b": 30.5, "qwen3-8b": 8.2,
    "qwen3.5-0.8b": 0.75, "qwen3.5-9b": 9, "qwen3.6-27b": 27, "qwen3.6-35b-a3b": 35, "qwen3.8-27b": 27,
    "smollm2-135m": 0.135,
}  # fmt: skip


def outline_of(options: RunOptions):
    return plan.make_outline(options, plan.read_target_config(options), "bfloat16")


def sizes_of(options: RunOptions, **changed) -> RunSizes:
    sizes = {"precision": "bf16", "length": 512, "batch": 1, "vocab_size": 8192, "solve_packs": 200}
    return RunSizes(**sizes | changed, drafter=fill_arguments(options.head.drafter))


@functools.cache
def load_outline(name: str):
    return outline_of(compose_options(f"target={name}", *PLAN))


class RandomRows(PlannedFacts):
    """Facts of a plan with lengths of rows that no file has."""

    rows = None
    row_lengths = numpy.random.default_rng(0).integers(50, 3000, 20_000)


@pytest.mark.parametrize(
    ("target", "machine"),
    [
        pytest.param(target, machine, marks=() if machine == "h100" or target in EVERYWHERE else pytest.mark.full)
        for target, machine in itertools.product(TARGETS, MACHINES)
    ],
)
def test_every_target_on_every_machine_fits_or_is_refused(target, machine, monkeypatch):
    outline = load_outline(target)
    monkeypatch.setattr(plan, "make_outline", lambda *_: outline)
    facts = RandomRows(compose_options("head=eagle3", f"target={target}", f"machine={machine}", "plan=true"))
    config, run_count = decide.decide(facts.options, facts).config, facts.run_count
    printed_plan = plan.make_plan(config, run_count, facts.texts, facts.hardware, run_count.memory, facts.pace)
    print(printed_plan)
    assert printed_plan.lines and (config.precision, config.target.dtype) == ("bf16", "bfloat16")
    if (target, machine) in TOO_LARGE:
        assert "the target alone is too large. Give target.shard=true" in printed_plan.problems[0]
    else:
        assert not printed_plan.problems and run_count.memory.fits(facts.hardware)


@pytest.mark.parametrize("target", TARGETS)
def test_an_outline_has_the_sizes_of_its_target(target):
    if target == "gemma-4-e4b":
        pytest.skip("its stated size leaves out the embeddings of layers")
    shapes = load_outline(target)
    num = sum({id(weight): weight.numel() for weight in shapes.model.parameters()}.values())
    assert num / 1e9 == pytest.approx(SIZES[target], rel=0.02)


def test_an_option_that_the_file_of_a_target_does_not_list_is_refused():
    def rows(*options: str):
        facts = PlannedFacts(compose_options("target=qwen3.8-27b", *PLAN, *options))
        return facts.rows

    assert rows() is rows("+template.reasoning_effort=low", "+template.enable_thinking=false") is None
    for option, sentence in (
        ("template.reasoning_effort=high", "does not take it. It takes enable_thinking: true, false; "),
        ("template.thinking_effort=low", "It takes .*; reasoning_effort: xhigh, medium, low"),
    ):
        with pytest.raises(ValueError, match=f"^{option}: the chat template of Qwen/Qwen3.8-27B .*{sentence}"):
            rows(f"+{option}")
    assert rows("target.template_options=null", "+template.x=1") is None


def test_a_plan_is_short_for_a_machine():
    assert hydra_text.expand_plan(["head=mtp", "plan=h100x8"]) == ["head=mtp", "machine=h100x8", "plan=true"]
    assert hydra_text.expand_plan(["plan=true"]) == ["plan=true"] and hydra_text.expand_plan(["plan=false"]) == [
        "plan=false"
    ]


def test_an_outline_is_of_the_target_that_it_was_written_for():
    with pytest.raises(ValueError, match="some/other could not be loaded"):
        plan.read_target_config(compose_options("target=qwen3-8b", "target.name=some/other", *PLAN))


def test_a_plan_takes_steps_on_this_machine_and_writes_nothing(fit, capsys):
    before = torch.get_rng_state()
    assert fit("planned", "plan=true", "train.steps=8") == 0
    out = capsys.readouterr().out
    for line in ("plan for checkpoints/planned on this machine", "reads    ", "memory   ", "tokens/s", "network  none"):
        assert line in out
    assert not [path for path in (ROOT / "nowhere", *plan.Path("checkpoints/planned").glob("*")) if path.exists()]
    assert before.shape == torch.get_rng_state().shape


def test_a_run_that_cannot_fit_is_refused_before_the_target_is_loaded(fit, monkeypatch):
    monkeypatch.setattr(prepare, "load_target", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(ValueError, match=r"This run does not fit: a process needs .* GB .* lower data.length=64"):
        fit("large", "head=eagle3", "machine.memory=0.5")


@pytest.mark.parametrize(
    "option, sentence",
    [
        ("data.train=nowhere.jsonl", "nowhere.jsonl"),
        ("data.heldout=nowhere.jsonl", "nowhere.jsonl"),
        ("target.name=./nowhere", "folder ./nowhere does not exist"),
        ("target.name=nobody/nothing", "nobody/nothing could not be loaded"),
    ],
)
def test_a_wrong_path_is_said_before_anything_is_loaded(fit, monkeypatch, option, sentence):
    monkeypatch.setattr(prepare, "load_target", lambda *_: pytest.fail("the target was loaded"))
    monkeypatch.setattr("specdec.core.hub.is_hub_reachable", lambda: False)
    with pytest.raises((ValueError, OSError), match=sentence):
        fit("wrong", option)


@pytest.mark.parametrize("head", ["eagle3", pytest.param("mtp", marks=pytest.mark.full)])
def test_the_memory_of_a_step_is_linear_in_the_length_of_a_text(head):
    target, given = load_outline("smollm2-135m"), compose_options(f"head={head}", "machine=h100")

    def count(length: int, **changed) -> float:
        texts = TextLengths(numpy.full(4, length), 4, numpy.zeros(0))
        sizes = sizes_of(given, length=length, vocab_size=None, **changed)
        return plan.count_run(given, sizes, target, texts, decide.Hardware("cuda", 1, 8e10, 1e12)).memory.step

    steps = [count(length) for length in (1024, 2048, 4096)]
    assert steps[2] - steps[1] == pytest.approx(2 * (steps[1] - steps[0]), rel=0.05)
    assert count(4096, recompute=True) < 0.8 * steps[2]


def test_parts_of_a_text_are_counted_of_a_whole_one():
    """The last part of a pack with a shorter text would be padding, which needs little."""
    target, options = load_outline("smollm2-135m"), compose_options("head=eagle3", "machine=h100x8")
    steps = []
    for length in (700, 1024):
        texts = TextLengths(numpy.full(4, length), 4, numpy.zeros(0))
        sizes = sizes_of(options, length=1024, vocab_size=None)
        hardware = decide.Hardware("cuda", 8, 8e10, 1e12, group_size=4)
        steps.append(plan.count_run(options, sizes, target, texts, hardware).memory.step)
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    ("machine", "option", "sentence"),
    [
        ("h100", "train.context_parallel=8", "train.context_parallel=8 lets a group .* there is one process"),
        ("h100x8", "train.context_parallel=3", "train.context_parallel=3 .* 8 processes cannot form groups of 3"),
        ("h100x8", "target.shard=16", "target.shard=16 lets .* 8 processes cannot form groups of 16"),
        ("h100", "target.shard=true", "target.shard=true lets .* there is one process"),
        ("h100x32", "machine.nodes=5", "machine.nodes=5 must divide the 32 processes"),
    ],
)
def test_a_plan_refuses_groups_that_a_run_refuses(machine, option, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        PlannedFacts(compose_options("head=eagle3", f"machine={machine}", "plan=true", option))


def test_each_process_of_a_group_asks_an_engine_for_whole_texts():
    figures = []
    for size in (1, 2):
        options = compose_options(
            "head=eagle3", "target=smollm2-135m", "machine=h100x8", "plan=true", f"train.context_parallel={size}",
            "features.engine=http://localhost:1", "features.mode=engine",
        )  # fmt: skip
        facts = RandomRows(options)
        config, run_count = decide.decide(facts.options, facts).config, facts.run_count
        lines = plan.make_plan(config, run_count, facts.texts, facts.hardware, run_count.memory, facts.pace).lines
        tokens, sent = (float(lines[name].split()[0].replace(",", "")) for name in ("reads", "network"))
        figures.append(sent / tokens)
    assert figures[1] == pytest.approx(2 * figures[0], rel=0.01)


def test_the_start_needs_memory_only_where_there_is_one():
    target = load_outline("smollm2-135m")
    texts = prepare.guess_packs(numpy.full(400, 256), 512)
    memory = {}
    block = "head=dflash2", "head.drafter.num_drafts=15"
    heads = {"medusa": ("head=medusa",), "block": block, "fused": (*block, "head.drafter.fuse=true")}
    for name, options in {"solved": (), "random": ("solve_packs=0",), **heads}.items():
        given = compose_options("head=eagle3", "machine=h100", *options)
        sizes = sizes_of(given, solve_packs=0 if name == "random" else 200)
        memory[name] = plan.count_run(given, sizes, target, texts, decide.Hardware("cuda", 1, 8e10, 1e12)).memory
    assert memory["solved"].start > 1e9 and memory["random"].start == 0 < memory["medusa"].step
    assert memory["solved"].target == memory["medusa"].target > 2 * 134e6
    assert memory["block"].start == 0 and memory["fused"].start > memory["solved"].start

"""Tests of the documentation: links resolve, commands name existing options, the example of a new head works."""

from specdec.options.command_line import read_command

import ast
import importlib
import re
import shlex
import sys
import types
from pathlib import Path

import hydra
import pytest
import torch
import yaml
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import LlamaConfig, LlamaForCausalLM

import specdec
from benchmarks import common
from specdec import command
from specdec.core import extensions
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.decoder import Decoder
from specdec.options import config_files
from specdec.proposers.heads import HeadProposer
from specdec.target import attention
from specdec.target.model import Target
from specdec.text.conversations import Row
from tests.support.commands import ROOT, find_model
from train.data.batches import collate
from train.settings import hydra_text, usage

# Guides: their commands must work at this commit
GUIDES = [ROOT / "README.md", ROOT / "RESULTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Commands of logs need not work now: they belong to the commits that the logs name.
LOGS = [ROOT / "CHANGELOG.md", *sorted((ROOT / "results").glob("*.md"))]
PAGES = [*GUIDES, *LOGS, ROOT / "data" / "README.md", ROOT / "checkpoints" / "README.md"]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
START = re.compile(
    r"(python scripts/(?!VERB)\w+\.py|python train\.py"
    r"|accelerate launch\b.*train\.py|torchrun\b.*(train|scripts/\w+)\.py)"
)
VERB = re.compile(r"^specdec (\w+)(?= |$)")  # the console command; a verb is a file of scripts/, or train
FOREIGN_PATH = re.compile(r"(?<![\w.<-])/(?:home|root|tmp|work|mnt|opt|var|Users)/|\.\./shared\b")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(path: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def lines_of_code(path: Path) -> list[str]:
    """From code blocks and from code inside sentences."""
    text = path.read_text()
    blocks = "\n".join(body for _, body in FENCE.findall(text)).replace("\\\n", " ")
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    return [line.strip().removesuffix(" &") for line in [*blocks.splitlines(), *spans]]


def commands(path: Path) -> list[str]:
    """Commands that a page tells the reader to run."""
    return [line for line in map(as_script, lines_of_code(path)) if START.match(line)]


def as_script(line: str) -> str:
    """`specdec VERB key=value ..` as the command of its file; other lines, and a verb without options, as they are."""
    verb = VERB.match(line)
    if verb is None or verb.end() == len(line) or verb[1] == "VERB":
        return line
    path = command.find_verbs().get(verb[1], config_files.HOME / "scripts" / f"{verb[1]}.py")
    return f"python {path.relative_to(config_files.HOME)}{line[verb.end() :]}"


def listed(select) -> list:
    """One test parameter for every command that `select` accepts."""
    parameters = []
    for path in GUIDES:
        for line in filter(select, commands(path)):
            parameters.append(pytest.param(line, id=f"{name_of(path)}: {line[:90]}"))
    return parameters


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_resolve(path):
    for link in LINK.findall(without_code(path.read_text())):
        if "://" in link:
            continue
        place, _, anchor = link.partition("#")
        page = (path.parent / place).resolve() if place else path
        assert page.exists(), f"{link} does not exist"
        assert page.is_relative_to(ROOT), f"{link} leaves the repository"
        assert not anchor or anchor in anchors(page), f"{link}: no such heading"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_pages_are_ascii_and_name_no_path_of_one_machine(path):
    text = path.read_text()
    assert text.isascii() and not FOREIGN_PATH.findall(text)


def test_the_documentation_is_short_and_every_page_is_listed():
    lines = {path: len(path.read_text().splitlines()) for path in GUIDES}
    assert lines[ROOT / "README.md"] <= 120
    assert sum(count for path, count in lines.items() if path.parent == ROOT / "docs") <= 2200
    listed_pages = set(LINK.findall((ROOT / "docs" / "README.md").read_text()))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= listed_pages


def test_pages_install_this_distribution_and_not_its_namesake():
    lines = "\n".join(line for path in GUIDES for line in lines_of_code(path))
    assert set(re.findall(r"^pip install .*?\b(specdec[\w-]*)", lines, re.MULTILINE)) == {specdec.DISTRIBUTION}


# Commands


def test_verbs_of_the_console_command_exist():
    matches = [VERB.match(line) for path in GUIDES for line in lines_of_code(path)]
    verbs = {match[1] for match in matches if match}
    assert verbs - {"VERB"} <= set(command.find_verbs())


def option_class(file: str) -> type:
    """The dataclass that a benchmark passes to `read_options`. file: such as benchmarks/race.py"""
    tree = ast.parse((ROOT / file).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [call.args[0].id for call in calls if ast.unparse(call.func) == "common.read_options"]
    assert len(names) == 1, f"{file} should call read_options(DATACLASS, __doc__, ..) once, not {len(names)} times"
    return getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), names[0])


def check_files(arguments: list[str]) -> None:
    """Asserts that the files that a command reads from the repository exist."""
    for argument in arguments:
        for value in argument.partition("=")[2].split(","):
            if value.startswith(("data/", "checkpoints/shipped/")):
                assert (ROOT / value).exists(), f"{argument}: {value} is not in the repository"


def read_proposers(names: list[str]) -> dict[str, dict]:
    """{name: settings} of these proposers, and of those that they hold."""
    files = config_files.list_files("proposer")
    settings: dict[str, dict] = {}
    while names:
        name = names.pop()
        assert name in files, f"there is no proposer {name}"
        settings[name] = yaml.safe_load(files[name].read_text())
        held_names = [*settings[name].get("members", []), settings[name].get("inner")]
        names += [held for held in held_names if held and held not in settings]
    return settings


def check_proposers(arguments: list[str]) -> None:
    """Asserts that proposer=NAME, proposers=A,B and their settings exist in conf/proposer."""
    values = dict(argument.split("=", 1) for argument in arguments)
    names = [*values.get("proposer", "").split(","), *values.get("proposers", "").split(",")]
    settings = read_proposers(list(filter(None, names)))
    for key in values:
        if key.startswith("proposer."):
            *owner, last = key.split(".")[1:]
            if last == "checkpoint":  # the trained head of any proposer that holds one
                continue
            owners = [settings[owner[-1]]] if owner else list(settings.values())
            assert any(last in each for each in owners), f"{key} is no setting of {', '.join(settings)}"


@pytest.mark.parametrize("path", [*GUIDES, ROOT / "benchmarks" / "README.md"], ids=name_of)
def test_commands_of_benchmarks_name_existing_options(path):
    for line in lines_of_code(path):
        if match := re.match(r"python -m benchmarks\.(\w+)", line):
            declared = option_class(f"benchmarks/{match[1]}.py")
            common.read_options(declared, "", shlex.split(line, comments=True)[3:])


@pytest.mark.parametrize("command", listed(lambda command: " scripts/" in command))
def test_commands_of_scripts_name_existing_options(command, monkeypatch, tmp_path):
    words = shlex.split(command, comments=True)
    script, *arguments = words[next(place for place, word in enumerate(words) if word.startswith("scripts/")) :]
    assert (ROOT / script).exists(), f"{script} does not exist"
    monkeypatch.chdir(tmp_path)
    verb = Path(script).stem.rstrip("_")
    presets = {"prompts": "null"} if any(argument.startswith("suite=") for argument in arguments) else {}
    read_command(verb, find_model(verb), "", arguments, presets=lambda texts: presets)
    check_files(arguments)
    check_proposers([argument for argument in arguments if argument.startswith("proposer")])


def example_head(folder: Path) -> str:
    """Writes the YAML file of docs/new-head.md to folder/head/linear.yaml. -> the source of the class"""
    blocks = FENCE.findall((ROOT / "docs" / "new-head.md").read_text())
    source = next(body for language, body in blocks if language == "python" and "class Linear" in body)
    settings = next(body for language, body in blocks if language == "yaml")
    (folder / "head").mkdir(parents=True)
    (folder / "head" / "linear.yaml").write_text(settings)
    return source


def compose(overrides: list[str], folder: Path):
    """The configuration conf/train.yaml with these overrides; `folder` adds heads."""
    folders = ",".join(f"file://{path}" for path in extensions.list_conf_folders())
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return hydra.compose(
            "train", [*overrides, f"hydra.searchpath=[file://{folder},{folders}]"], return_hydra_config=True
        )


@pytest.mark.parametrize("command", listed(lambda command: "train.py" in command))
def test_commands_of_training_compose(command, tmp_path):
    words = shlex.split(command, comments=True)
    arguments = words[next(place for place, word in enumerate(words) if word.endswith("train.py")) + 1 :]
    example_head(tmp_path)
    placeholders = ("...", "--help", "head=NAME", "experiment=NAME")
    overrides = [each for each in arguments if each not in placeholders]
    if "--config-dir" in overrides:
        del overrides[:2]
    if "-m" in overrides:  # the first job of a multirun
        jobs = [each for each in overrides if not each.startswith(("-m", "hydra")) and "interval" not in each]
        overrides = [each.partition(",")[0] for each in jobs]
    try:
        OmegaConf.to_container(compose(overrides, tmp_path).head, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        pytest.fail(f"{command}: {error}")
    check_files(overrides)


@pytest.mark.parametrize(
    "command", listed(lambda command: "train.py head=" in command and "head=linear" not in command)
)
def test_no_command_of_training_is_refused(command):
    words = shlex.split(command.partition("train.py ")[2], comments=True)
    words = hydra_text.expand_plan([word for word in words if not word.endswith(("...", "=NAME"))])
    assert not words or usage.refuse_arguments(hydra_text.quote_arguments(words)) is None


@pytest.mark.parametrize("path", GUIDES, ids=name_of)
def test_targets_of_make_exist(path):
    defined = set(re.findall(r"^(\w[\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = path.read_text()
    lines = "\n".join(body for _, body in FENCE.findall(text)).splitlines() + re.findall(r"`([^`\n]+)`", text)
    matches = [re.match(r"make ([a-z][\w-]*)", line) for line in lines]
    named = {match[1] for match in matches if match}
    assert named <= defined, f"the Makefile has no target {', '.join(sorted(named - defined))}"


# The example of docs/new-head.md


def test_the_example_of_a_new_head_trains_and_decodes(tmp_path, monkeypatch):
    module = types.ModuleType("specdec.heads.linear")
    source = example_head(tmp_path)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("specdec.heads.linear", module, raising=False)
    exec(compile(source, "docs/new-head.md", "exec"), module.__dict__)
    config = compose(["head=linear"], tmp_path).head
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaConfig(
        **sizes, vocab_size=61, initializer_range=0.4, attn_implementation=attention.IMPLEMENTATION, eos_token_id=None
    )
    target = Target(LlamaForCausalLM(llama).double(), name="tiny")
    head = instantiate(config.drafter, target, vocab=None, _convert_="all").double()
    objective = instantiate(config.objective, head, _convert_="all")
    prompt = list(range(1, 6))
    plain = Decoder(target, None, sampling=Sampling(temperature=0.0), stop=set())
    answer = plain.generate([prompt], 24).tokens[0]
    row = Row(id="0", category="all", tokens=prompt + answer, mask=[False] * 5 + [True] * 24)
    batch = collate([[row]], length=29, pad_token=0)
    output = target.read(batch.tokens, head.target_layers)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = objective(batch, output)
        optimizer.zero_grad()
        (loss.total / loss.num_goals).backward()
        optimizer.step()
        losses.append(loss.total.item())
    assert losses[-1] < 0.5 * losses[0]
    for shape in (TreeShape(3, 1, 3), TreeShape(3, 2, 5)):
        drafted = Decoder(target, HeadProposer(head, shape), sampling=Sampling(temperature=0.0), stop=set())
        result = drafted.generate([prompt], 24)
        assert result.tokens[0] == answer
        assert sum(result.accepted[0]) > 0

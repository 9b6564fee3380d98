"""Helpers that tests share: tiny targets, drafters and tokenizers, scripted proposers, saved folders."""

import collections
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
import torch
import transformers
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec import checkpoint
from specdec.core import masks
from specdec.core.cache import UnrollCache
from specdec.core.option_types import Options
from specdec.core.sampling import Sampling
from specdec.core.tree import Tree, TreeShape, make_chain
from specdec.decoding.decoder import Decoder
from specdec.heads.eagle import Eagle
from specdec.options import config_files
from specdec.proposers.base import Proposer
from specdec.target import attention
from specdec.target.model import Target
from train.data.encoding import load_rows
from train.data.packing import Packs
from train.loop.trainer import Trainer
from train.settings.hydra_text import make_search_path
from train.settings.options import NORM_OPTIONS

ROOT = Path(__file__).resolve().parents[1]
REAL_TARGET = ROOT / "targets" / "smollm2-135m"
OLD_TRANSFORMERS = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 18)
HEADS_FOLDER = ROOT / "conf" / "head"
ADAPTING = ("medusa2", "consistency")  # they change the target, which tests share, so other tests cover them
HEADS = sorted(config_files.list_files("head").keys() - set(ADAPTING))
# (head, whether the draft vocabulary is reduced, arguments)
TABLE = {"kind": "markov", "rank": 64, "table": True}  # the paper's Markov head
VARIANTS = [(head, reduced, {}) for head in HEADS for reduced in (False, True)]
VARIANTS += [
    ("eagle3", False, {"norm_features": True, "norm_output": True}),
    ("eagle3", True, {"own_output": False}),
    ("mtp", True, {"num_modules": 5, "zero_first": False}),
    ("native_mtp", False, {"num_modules": 5, "recycle_norm": False}),
    ("medusa", True, {"own_output": True, "num_blocks": 2}),
    ("hydra", True, {"own_output": True}),
    ("draft", True, {"borrow_embeddings": False}),
    ("draft", False, {"width": 16}),
    ("dspark", False, {"fuse": True}),
    ("dflash", True, {"fuse": True}),
    ("eagle3", False, {"window": 7, "num_layers": 2, "full_layers": [1]}),
    ("peagle", True, {"window": 7, "full_layers": [0]}),
    ("dflash", True, {"window": 4, "full_layers": [1]}),
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
LENGTHS = (5, 12, 2, 9, 1)  # of prompts; more rows than specdec.target.attention leaves to sdpa
NUM_NEW = 24
# Layers of a target of eight that draft: the argument of LayerSkip
SUBSETS = {"first": 5, "both": [0, 1, 2, 4, 6, 7], "later": [1, 3, 4, 5, 6, 7], "all": 8}


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


def load_packs(train, encoding, *, length: int, packed: bool, **settings):
    """The packs of one or several sources, as train/prepare/build.py makes them"""
    rows, numbers = load_rows(train, encoding, **settings)
    return Packs(rows, length=length, packed=packed, row_numbers=numbers)


# Targets, drafters and their folders


def make_target(vocab_size: int, *, num_layers: int = 8, width: int = 32, device: torch.device | str = "cpu") -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab_size,
        max_position_embeddings=512,
        initializer_range=0.4,  # logits that are not flat
        attn_implementation=attention.IMPLEMENTATION,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Target(LlamaForCausalLM(config).double().to(device), name="tiny")


def scale_forward(target: Target, monkeypatch) -> None:
    """Makes the target scale the output of its layers, as a target does that is more than a sequence of layers."""
    forward = target.decoder.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.last_hidden_state = 1.5 * output.last_hidden_state
        return output

    monkeypatch.setattr(target.decoder, "forward", scaled)


@functools.cache
def load_head(head: str) -> dict:
    """The composed configuration of conf/head/<head>.yaml, without the class of the objective."""
    with hydra.initialize_config_dir(str(HEADS_FOLDER.parent), version_base="1.3"):
        config = OmegaConf.to_container(
            hydra.compose("train", overrides=[f"head={head}", make_search_path()]).head, resolve=True
        )
    del config["objective"]["_target_"]
    config["drafter"] |= NO_SOURCE.get(head, {}) | {name: False for name in NORM_OPTIONS if name in config["drafter"]}
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


TEMPLATE = (  # the chat template of SmolLM2
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = (  # frequent in tests and in the template; as single tokens they keep texts short
    "system user assistant You are a helpful AI named SmolLM trained by Hugging Face Count to from on is followed "
    "then number Say hello Hello world"
)


def merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    """The word with every occurrence of the pair as one symbol."""
    merged: list[str] = []
    for symbol in word:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


@functools.cache
def small_tokenizer() -> PreTrainedTokenizerFast:
    """SmolLM2's special tokens and chat template, all bytes, and some words: about 400 entries."""
    special = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    vocab = special | {symbol: 3 + n for n, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = [list(part) for word in WORDS.split() for part in (word, "\u0120" + word)]  # \u0120 stands for a space
    merges: list[tuple[str, str]] = []
    while pairs := collections.Counter(pair for word in words for pair in itertools.pairwise(word)):
        pair = max(pairs, key=lambda pair: (pairs[pair], pair))  # byte-pair encoding: the pair that occurs most often
        merges.append(pair)
        vocab["".join(pair)] = len(vocab)
        words = [merge(word, pair) for word in words]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=TEMPLATE,
    )


def byte_fallback_tokenizer(*, opening: bool = True) -> PreTrainedTokenizerFast:
    """SentencePiece's way: words with their space in front, and a token for each byte of what is no word or ASCII
    letter.

    opening: whether a text's first word has a space in front that its text lacks, as with Llama 2; Gemma has none
    """
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", "\ufffd", *map(chr, range(33, 127))]
    vocab = {piece: n for n, piece in enumerate(special + pieces)}
    merges: list[tuple[str, str]] = []
    for word in WORDS.split():
        for num in range(1, 1 + len(word)):
            merges.append((("\u2581" + word)[:num], word[num - 1]))
            vocab.setdefault("".join(merges[-1]), len(vocab))
    merges = list(dict.fromkeys(merges))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    space = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space]) if opening else space
    strip = [decoders.Strip(" ", 1, 0)] * opening
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="</s>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )
    assert len(fast_tokenizer) == len(vocab)
    return fast_tokenizer


def save_target(folder: Path, *, num_layers: int = 3, seed: int = 0, tokenizer=None) -> Target:
    """A tiny target, saved with a tokenizer as a folder that scripts and train.py load. -> that target, in float32"""
    tokenizer = tokenizer or small_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Target.load(str(folder), dtype="float32")


def save_eagle(folder: Path, target: Target, *, seed: int = 0, **extra) -> None:
    """An untrained EAGLE head that drafts every fourth token, as a checkpoint."""
    torch.manual_seed(seed)
    drafter = Eagle(target, vocab=torch.arange(0, target.vocab_size, 4))
    checkpoint.save(folder, drafter, {"_target_": "specdec.heads.eagle.Eagle"}, **extra)


def word_tokenizer(num_words: int, prefix: str = "w") -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({f"{prefix}{n}": n for n in range(num_words)}, unk_token=f"{prefix}0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=f"{prefix}0", eos_token=f"{prefix}1")


def save_word_model(
    path: Path, *, rows: int = 61, width: int = 32, tied: bool = False, prefix: str = "w", seed: int = 0
) -> Path:
    """A saved model whose tokenizer has 57 words and whose embedding has `rows` rows. -> path"""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=4,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    word_tokenizer(57, prefix).save_pretrained(path)
    return path


@torch.no_grad()
def text_logits(drafter, tokens: torch.Tensor) -> torch.Tensor:
    """Of a draft model: tokens [B, T] -> logits [B, T, W] of step 1 of every slot"""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    h = torch.zeros(*tokens.shape, 0)
    _, readout = drafter.step(
        1, h, tokens, positions, masks.document_mask(torch.zeros_like(tokens)), UnrollCache().at_step(1)
    )
    return drafter.logits(1, readout)


def disturb(drafter):
    """Adds noise to the trainable parameters, as if the drafter had been trained. -> the drafter"""
    torch.manual_seed(2)
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return drafter


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_prompts(path: Path, num: int) -> None:
    """Short prompts of two categories."""
    write_rows(path, [{"id": str(n), "category": "ab"[n % 2], "prompt": f"Count to {n}."} for n in range(num)])


@functools.cache
def train_command():
    """train.py as a module. `import train` imports the package, so the command is loaded by its path."""
    spec = importlib.util.spec_from_file_location("train_command", ROOT / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_overrides(folder: Path, run: str, *overrides: str) -> list[str]:
    """Arguments of train.py for a short run with the target and data in `folder`."""
    return [
        f"run={run}",
        f"target.name={folder}/target",
        "target.dtype=float32",
        f"data.train={folder}/train.jsonl",
        f"data.heldout={folder}/prompts.jsonl",
        f"data.cache={folder}/data-cache",
        "data.length=64",
        "precision=fp32",
        "features.mode=online",
        "threads=1",
        "validation.max_new_tokens=4",
        "train.steps=4",
        "train.batch=1",
        "train.accumulation=1",
        "train.validate_every=4",
        "train.save_every=2",
        "train.log_every=1",
        "optimizer.lr=1e-3",
        "optimizer.warmup=1",
        "head.vocab_size=200",
        *overrides,
    ]


def log_of(run: str) -> list[dict]:
    """The rows of the log of a run in the working directory, as are the next ones."""
    return [json.loads(line) for line in Path("checkpoints", run, "log.jsonl").read_text().splitlines()]


def losses_of(run: str) -> dict[int, float]:
    """The logged loss of each step."""
    return {row["step"]: row["loss"] for row in log_of(run) if "loss" in row}


def report_of(run: str, step: int = 4) -> dict:
    return json.loads(Path("checkpoints", run, f"step_{step:06d}", "report.json").read_text())


def weights_of(run: str, step: int = 4, *, state: bool = False) -> dict[str, torch.Tensor]:
    """Of a checkpoint, or of a state."""
    place = Path("checkpoints", run, *(["state"] if state else []), f"step_{step:06d}")
    return checkpoint.read_tensors(place / "drafter.safetensors")


def same_weights(weights: dict[str, torch.Tensor], other_weights: dict[str, torch.Tensor]) -> bool:
    """Bit for bit"""
    return weights.keys() == other_weights.keys() and all(
        torch.equal(value, other_weights[name]) for name, value in weights.items()
    )


def child_environment(**variables: str) -> dict[str, str]:
    """The environment of processes that tests start: the packages of this clone, one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **variables}


def start(
    arguments: list, *, cwd: Path = ROOT, errors: bool = False, file: Path | None = None, **variables: str
) -> subprocess.Popen:
    """Starts `python ARGUMENTS`, the first of which is a file.

    errors: stdout has what is printed on stderr, too; file: is written in place of `stdout`; variables: those of the
        environment
    """

    def opener(path, flags: int) -> int:
        return os.open(path, flags | os.O_NOCTTY)  # a terminal does not become that of the tests

    with contextlib.nullcontext(subprocess.PIPE) if file is None else open(file, "w", opener=opener) as out:
        merged = subprocess.STDOUT if errors else None
        command, env = [sys.executable, *map(str, arguments)], child_environment(**variables)
        return subprocess.Popen(command, cwd=cwd, env=env, stdout=out, stderr=merged, text=True)


# Prompts, trees and decoders


def chain_of(depth: int) -> TreeShape:
    return TreeShape(depth=depth, width=1, nodes=depth)


def random_tokens(seed: int, num: int, vocab_size: int) -> list[int]:
    return torch.randint(vocab_size, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_tree(generator: torch.Generator, num_nodes: int, vocab_size: int) -> Tree:
    """A tree of one row with random parents; siblings have distinct tokens."""

    def pick(num: int) -> int:
        return int(torch.randint(num, (), generator=generator))

    tokens, parents = [pick(vocab_size)], [-1]
    while len(tokens) < num_nodes:
        parent, token = pick(len(tokens)), pick(vocab_size)
        if (parent, token) not in list(zip(parents, tokens)):
            parents.append(parent)
            tokens.append(token)
    return Tree(torch.tensor([tokens]), torch.tensor([parents]), None)


def greedy(target, proposer, stop=frozenset()) -> Decoder:
    return Decoder(target, proposer, sampling=Sampling(0.0), stop=set(stop))


def prompts_of(target) -> list[list[int]]:
    return [random_tokens(seed, num, target.vocab_size) for seed, num in enumerate(LENGTHS)]


def check_counters(generation) -> None:
    for tokens, accepted in zip(generation.tokens, generation.accepted):
        assert len(tokens) == 1 + sum(count + 1 for count in accepted)


class Scripted(Proposer):
    """A proposer that is given the text of every row. drafts(text, place of the newest token) -> Tree of one row

    ends: how long prompt and answer of each row are, if the text goes on; what is committed behind them is not looked
        at
    """

    target_layers = (3, 8)

    def __init__(self, texts: list[list[int]], depth: int, drafts, *, ends: list[int] | None = None):
        self.texts, self.depth, self.drafts = texts, depth, drafts
        self.ends = ends or [sum(map(len, texts))] * len(texts)

    def begin(self, tokens, num):
        self.places = [0] * len(num)
        self.features = [[] for _ in num]

    def commit(self, tokens, features, num, counts):
        for row, count in enumerate(num.tolist()):
            first, self.places[row] = self.places[row] + 1, self.places[row] + count
            text = self.texts[row][first : first + count] if first < self.ends[row] else []
            assert tokens[row, : len(text)].tolist() == text  # the committed tokens are those of the text, in order
            self.features[row] += features[row, : len(text)]

    def propose(self, sampling, generator):
        trees = [self.drafts(text, min(place, len(text) - 1)) for text, place in zip(self.texts, self.places)]
        return Tree(torch.cat([tree.tokens for tree in trees]), torch.cat([tree.parents for tree in trees]), None)


def oracle(depth: int, *, wrong: int | None = None):
    """Drafts chains of the next tokens of the text; with `wrong`, chains of that token."""

    def drafts(text, position):
        known = [*text[position : position + 1 + depth], *[0] * (1 + depth)][: 1 + depth]
        return make_chain(torch.tensor([known if wrong is None else [known[0]] + [wrong] * depth]), None)

    return drafts


@contextlib.contextmanager
def before_steps(act):
    """Within, act(trainer) is called before each step of training."""
    take_step = Trainer.take_step

    def acting(trainer, **settings):
        act(trainer)
        return take_step(trainer, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "take_step", acting)
        yield


class PowerCutError(Exception):
    pass


def cut_power(step: int):
    """For `before_steps`: a run dies when so many steps are done."""

    def act(trainer):
        if trainer.step == step:
            raise PowerCutError

    return act


def fit_interrupted(fit, name: str, *overrides: str) -> None:
    """Trains a run that fails before its fourth step, and resumes it."""
    with before_steps(cut_power(3)), pytest.raises(PowerCutError):
        fit(name, *overrides)
    assert fit(name, *overrides, "resume=true") == 0


def find_model(verb: str) -> type[Options]:
    """The options of a verb, which its file passes to `read_command`."""
    text = (ROOT / "scripts" / f"{verb}.py").read_text()
    name, model = re.search(r'read_command\(\s*"(\w+)", (\w+),', text).groups()
    assert name == verb
    return getattr(importlib.import_module(f"scripts.{verb}"), model)

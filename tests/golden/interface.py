"""All that the golden record uses of the project: its commands, and a few classes. Only this file follows renames."""

import contextlib
import io
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor

from specdec import checkpoint
from specdec.core.generation import Generation
from specdec.core.sampling import Sampling
from specdec.decoding.batch import Request
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.measuring.measure import PromptResult
from specdec.measuring.report import TAU as TAU
from specdec.measuring.report import summarise
from specdec.options import proposers
from specdec.proposers.base import Proposer
from specdec.target.model import Target, load_tokenizer
from specdec.text import conversations as data
from specdec.text import reading
from specdec.text.conversations import Prompt
from specdec.tools.grammar.grammar import Grammar, GrammarCompiler
from train.data.packing import Packs
from train.loop.trainer import Trainer
from train.prepare import facts
from train.settings.hydra_text import make_search_path
from train.settings.options import read_run

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ("depth", "width", "nodes", "children")  # settings of conf/decode; the others are those of Decoder


def run_command(file: str, *arguments: str) -> str:
    """`python FILE ARGUMENTS` in this process and working directory -> what it printed. Raises RuntimeError if it
    fails.
    """
    printed, before = io.StringIO(), torch.get_num_threads()
    with mock.patch.object(sys, "argv", [file, *arguments]), contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(str(ROOT / file), run_name="__main__")
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise RuntimeError(f"{file}: {ended.code}") from ended
        finally:
            torch.set_num_threads(before)
            _forget_accelerator()
    return printed.getvalue()


@contextlib.contextmanager
def failing_at(step: int) -> Iterator[None]:
    """Within, training fails in the step after this one."""
    taken = Trainer.take_step

    def take(trainer, *arguments, **settings):
        if trainer.step == step:
            raise KeyError("power cut")
        return taken(trainer, *arguments, **settings)

    with mock.patch.object(Trainer, "take_step", take):
        yield


def read_packs(*overrides: str) -> list[list[tuple]]:
    """The packs that train.py trains on with these overrides: of each row its name, tokens and mask."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed = compose("train", overrides=[*overrides, make_search_path()])
    options = read_run(OmegaConf.to_container(composed, resolve=True))
    target = load_target(options.target.name, options.target.dtype)
    rows, numbers = facts.encode_rows(options, load_tokenizer(target.name))
    packed = facts.decide_packing(target, length=options.data.length, pack=options.data.pack)
    packs = Packs(rows, length=options.data.length, packed=packed, row_numbers=numbers)
    return [list(map(read_row, packs[number])) for number in range(len(packs))]


def read_row(row) -> tuple:
    return row.id, row.tokens, row.mask


def load_target(folder: str, dtype: str = "float64") -> Target:
    return Target.load(folder, dtype=dtype)


def load_head(folder: Path, target: Target) -> torch.nn.Module:
    return checkpoint.load(folder, target)


def make_proposer(target: Target, name: str, head: str | None, decode: dict, settings: dict[str, str]) -> Proposer:
    """The proposer conf/proposer/NAME.yaml. head: folder of a trained head; decode: settings of conf/decode"""
    drafting = Drafting(**{key: value for key, value in decode.items() if key in SHAPE})
    return proposers.make_proposer(
        proposers.configure(name, settings=settings, drafting=drafting, checkpoint=head), target
    )


def decode(
    target: Target,
    proposer: Proposer | None,
    prompts: list[list[int]],
    lengths: list[int],
    *,
    rows: int,
    stop: set[int],
    sampling: dict,
    **rules,
) -> tuple[list[list[int]], list[list[int]], list[tuple[list, list]], Tensor | None]:
    """Decodes at most `rows` prompts at once; when an answer ends, the next prompt joins.

    lengths: tokens that each answer may have; sampling: settings of Sampling; rules: those of the decoder
    -> the answers, accepted drafts of each of their rounds, the tree of each round [tokens, parents], and the
    distributions [B, N, V] that the first tree was drawn from, None if its drafts were chosen
    """
    decoder = Decoder(target, proposer, sampling=Sampling(**sampling), stop=stop, **rules)
    requests = [
        Request(prompt, length, generator=torch.Generator().manual_seed(number))
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    batch, waiting, trees, probs = decoder.batch(), list(requests), [], None
    while waiting or batch.running:
        free = batch.count_free(rows)
        coming, waiting = waiting[:free], waiting[free:]
        if coming:
            batch.admit(coming)
        if batch.running:
            step = batch.run_round()
            probs = step.tree.probs if not trees else probs
            trees.append((step.tree.tokens[step.row_indices].tolist(), step.tree.parents[step.row_indices].tolist()))
    batch.close()
    return (
        [request.generation.tokens[0] for request in requests],
        [request.generation.accepted[0] for request in requests],
        trees,
        probs,
    )


def decode_ruled(folder: str, source: str, temperature: float, length: int, *, rows: int) -> dict:
    """The report of answers that follow the grammars of rows, with what is forced as drafts."""
    target = load_target(folder)
    tokenizer, prompts = load_tokenizer(folder), reading.load_prompts(source)
    stop = data.list_stop_tokens(tokenizer, target.model.generation_config)
    grammars = GrammarCompiler(tokenizer, target.vocab_size, stop)
    rules = [row["grammar"] and Grammar.from_row(row["grammar"]) for row in prompts]
    tokens = [data.encode_row(tokenizer, row) for row in prompts]
    forced = make_proposer(target, "forced", None, {}, {})

    def answer(proposer: Proposer | None) -> list[Generation]:
        decoder = Decoder(target, proposer, sampling=Sampling(temperature), stop=stop)
        generations: dict[int, Generation] = {}
        for _, ended in decoder.rounds(
            tokens,
            length,
            batch_size=rows,
            generator=lambda number: torch.Generator().manual_seed(number),
            constraint=lambda number: grammars.make_constraint(rules[number]),
        ):
            generations |= dict(ended)
        return [generations[number] for number in range(len(prompts))]

    results = [
        PromptResult(
            Prompt(row["id"], row["category"], read),
            plain,
            drafted,
            float("nan"),
            [],
            None if plain.tokens == drafted.tokens or temperature else 0.0,
        )
        for row, read, plain, drafted in zip(prompts, tokens, answer(None), answer(forced))
    ]
    return summarise(results, depth=forced.depth, temperature=temperature).to_json()


def _forget_accelerator() -> None:
    """accelerate keeps the settings of the first Accelerator of a process, and refuses others later."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()

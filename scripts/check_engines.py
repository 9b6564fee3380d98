"""python scripts/check_engines.py checkpoint=checkpoints/shipped/eagle3 limit=16

Serves drafters in real engines (`make engines`) and compares tau, answers and drafts with this project's decoder, at
temperature 0. Without checkpoint=, it trains and serves tiny heads of every family instead: first with every draft right,
so that a faithful engine accepts all of them, then with noise on the weights, so that some drafts are wrong.
"""

from helpers import in_vllm as in_vllm_engine
from helpers import loading
from helpers.options import options, run, split

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import hydra
import rich.console
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from engine_clients import llamacpp_client
from scripts import get_engines
from specdec import checkpoint
from specdec.core import files, hub
from specdec.export.cards import SERVED, SERVED_FIELDS, Provenance
from specdec.export.engines import ExportForm, make_form
from specdec.export.folder import write_export
from specdec.export.layout import draft_from_all
from specdec.heads.base import Drafter
from specdec.heads.dflash import BlockDrafter
from specdec.measuring import served
from specdec.target.model import Target
from train import progress, tiny_heads
from train.data import reading
from train.data import rows as data

FORMATS = ("vllm", "speculators", "medusa", "gguf")
VLLM, LLAMA_CPP = f"vLLM {get_engines.VLLM}", f"llama.cpp, xllamacpp {get_engines.XLLAMACPP}"
HEADS = sorted({case.head for case in tiny_heads.CASES})
TOLERANCE = 0.02  # of tau, served against decoded here


@dataclass(frozen=True)
class Check:
    checkpoint: str | None = field(default=None, metadata={"help": f"{loading.CHECKPOINTS}; null: tiny heads"})
    only: str | None = field(default=None, metadata={"help": f"of the tiny heads, only {', '.join(HEADS)}; null: all"})
    formats: str | None = field(default=None, metadata={"help": f"comma list of {', '.join(FORMATS)}; null: all"})
    prompts: str = field(default="data/prompts_heldout.jsonl", metadata={"help": "rows with prompt or messages"})
    split: str | None = field(default=None, metadata={"help": loading.SPLIT})
    thinking: bool | None = field(default=None, metadata={"help": f"{loading.THINKING}; null: as the head was trained"})
    limit: int | None = field(default=16, metadata={"help": "use LIMIT prompts, spread over the file; null: all"})
    max_new_tokens: int = field(default=64, metadata={"help": "longest answer, in tokens"})
    num_drafts: int = field(
        default=tiny_heads.NUM_DRAFTS, metadata={"help": "drafts per round, at most as many as the head has"}
    )
    batch: int = field(default=8, metadata={"help": "prompts that this project decodes at once"})
    record: bool = field(default=False, metadata={"help": "write the figures to served.json beside each checkpoint"})
    out: str = field(default="engines.json", metadata={"help": "JSON file to write: one row per head and format"})
    target: loading.TargetOptions = field(default_factory=lambda: loading.TargetOptions(dtype="float32"))


@dataclass(frozen=True)
class Head:
    """A drafter to be served, and what to serve it with."""

    name: str
    drafter: Drafter
    prompts: list[list[int]]
    stop: set[int]
    provenance: Provenance

    @property
    def target(self) -> Target:
        return self.drafter.target


def check(head: Head, format_name: str, folder: Path, chosen: Check) -> tuple[dict, served.Agreement]:
    """Exports to `folder` and serves it. -> the row for `out`, and how far the engine and this decoder agree"""
    form, num = make_form(head.drafter, format_name), head.provenance.num_drafts
    write_export(form, folder, dtype=head.target.dtype, provenance=head.provenance)
    drafter = draft_from_all(head.drafter) if form.whole_vocabulary else head.drafter
    serve = in_llamacpp if format_name == "gguf" else in_vllm
    engine = serve(head, form, folder, chosen)
    sizes = {"num_drafts": num, "max_new_tokens": chosen.max_new_tokens, "stop": head.stop, "batch": chosen.batch}
    own = as_run = served.decode(head.target, drafter, head.prompts, **sizes)
    if format_name != "gguf" and (changed := served.as_vllm_runs_it(drafter)) is not drafter:
        as_run = served.decode(head.target, changed, head.prompts, **sizes)
    agreement = served.compare(head.target, head.prompts, own=own, as_run=as_run, served=engine)
    row = {
        "name": head.name,
        "engine": LLAMA_CPP if format_name == "gguf" else VLLM,
        "format": format_name,
        "num_drafts": num,
        "dtype": chosen.target.dtype_here,
        "max_new_tokens": chosen.max_new_tokens,
        **asdict(agreement),
        "launch": next(iter(form.launch_lines("DIR", num).values())),
    }
    return row, agreement


def in_vllm(head: Head, form: ExportForm, folder: Path, chosen: Check) -> served.Decoding:
    return in_vllm_engine.decode(
        head.target.name, form, folder, head.prompts, num_drafts=head.provenance.num_drafts,
        max_new_tokens=chosen.max_new_tokens, stop=head.stop, dtype=chosen.target.dtype_here,
    )  # fmt: skip


def in_llamacpp(head: Head, form: ExportForm, folder: Path, chosen: Check) -> served.Decoding:
    kind, num = form.settings["kind"], head.provenance.num_drafts
    whole, draft = str(folder.with_suffix(".target.gguf")), str(folder.with_suffix(".gguf"))
    llamacpp_client.convert(head.target.name, whole)
    llamacpp_client.convert(str(folder), draft, target=None if kind == "simple" else head.target.name)
    context = max(map(len, head.prompts)) + chosen.max_new_tokens + num + 2
    given = {"threads": torch.get_num_threads(), "context": context, "kind": kind, "num": num, "cache": "f32"}
    answers, counts = [], []
    with llamacpp_client.LlamaCpp(whole, draft=draft, **given) as engine:
        for prompt in head.prompts:
            answers.append(engine.generate(prompt, chosen.max_new_tokens, head.stop)[0])
            counts.append(engine.counts)
    accepted, offered = sum(each.accepted for each in counts), sum(each.drafted for each in counts)
    return served.Decoding(answers, [each.rounds for each in counts], accepted=accepted, offered=offered)


def head_config(head: str) -> dict:
    with hydra.initialize_config_dir(str(loading.CONF), version_base="1.3"):
        return OmegaConf.to_container(hydra.compose("train", overrides=[f"head={head}"]).head, resolve=True)


def check_tiny(chosen: Check) -> Iterator[tuple[dict, served.Agreement]]:
    """Rows of every tiny head in every format: with all drafts right, then with noise."""
    wanted = FORMATS if chosen.formats is None else chosen.formats.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        target = tiny_heads.make_target(Path(scratch, "target"), tokenizer="targets/smollm2-135m")
        num_tokens = chosen.max_new_tokens + 8
        prompts = tiny_heads.make_prompts(target, 4, num_tokens=num_tokens)
        rows = tiny_heads.answered(target, prompts, num_tokens)

        def share_right(drafter: Drafter) -> float:
            sizes = {
                "num_drafts": tiny_heads.NUM_DRAFTS,
                "max_new_tokens": chosen.max_new_tokens,
                "batch": chosen.batch,
            }
            return served.decode(target, drafter, prompts, stop=set(), **sizes).share_right()

        for number, case in enumerate(tiny_heads.CASES):
            formats = [name for name in case.formats if name in wanted]
            if chosen.only not in (None, case.head) or not formats:
                continue
            torch.manual_seed(1)
            config = head_config(case.head)
            vocab = tiny_heads.small_vocab(rows) if case.reduced else None
            drafter = instantiate({**config["drafter"], **case.arguments, "_convert_": "all"}, target, vocab=vocab)
            with progress.start(f"{case}: training until every draft is right"):
                right = tiny_heads.overfit(
                    drafter, rows, config["objective"], depth=tiny_heads.NUM_DRAFTS, share_right=share_right
                )
            noisy = tiny_heads.perturbed(right, share_right=share_right)
            document = {"_target_": f"specdec.tiny.{type(drafter).__name__}", "versions": {"specdec": "0"},
                        "reads_layers": list(drafter.target_layers)}  # fmt: skip
            provenance = Provenance("tiny", document, target.name, target.fingerprint(), None, {}, "its own answers",
                                  "other", tiny_heads.NUM_DRAFTS)  # fmt: skip
            for format_name in formats:
                for kind, each in (("", right), (", noisy", noisy)):
                    folder = Path(scratch, f"{number}-{format_name}{kind[2:]}")
                    row, agreement = check(
                        Head(f"{case}{kind}", each, prompts, set(), provenance), format_name, folder, chosen
                    )
                    yield row | {"faithful": agreement.faithful(exact=each is right)}, agreement


def check_real(chosen: Check, console: rich.console.Console) -> Iterator[tuple[dict, served.Agreement]]:
    """Rows of every checkpoint in every format that takes it."""
    for folder in split(chosen.checkpoint):
        loaded = loading.load(folder, chosen.target)
        if chosen.record and hub.pinned(loaded.folder) != str(loaded.folder):
            raise ValueError(
                f"record=true writes beside the checkpoint, and {folder} is on the Hub: download a copy and name that."
            )
        rows = reading.spread(reading.load_prompts(chosen.prompts, split=chosen.split), chosen.limit)
        thinking = loading.mode_of([folder]) if chosen.thinking is None else chosen.thinking
        prompts = [data.encode_row(loaded.tokenizer, row, thinking=thinking) for row in rows]
        depth, num = loaded.drafter.depth, chosen.num_drafts
        if depth is not None:
            num = depth if isinstance(loaded.drafter, BlockDrafter) else min(num, depth)
        name = checkpoint.name_of(loaded.folder)
        provenance = Provenance.read(loaded.folder, target=loaded.target, license="other", data=None, num_drafts=num)
        recorded = dict(provenance.served)
        for format_name in chosen.formats.split(",") if chosen.formats else FORMATS:
            try:
                make_form(loaded.drafter, format_name)
            except ValueError as error:  # the format has no such family
                console.print(f"{name}, format={format_name}: {error}")
                continue
            with tempfile.TemporaryDirectory() as scratch:
                head = Head(name, loaded.drafter, prompts, loaded.stop, provenance)
                row, agreement = check(head, format_name, Path(scratch, "head"), chosen)
            row |= {"prompts": Path(chosen.prompts).name, "faithful": abs(agreement.difference) < TOLERANCE}
            if chosen.record:
                recorded[f"{row['engine']}, format={format_name}"] = {key: row[key] for key in SERVED_FIELDS}
                files.write_text(loaded.folder / SERVED, json.dumps(recorded, indent=2) + "\n")
            yield row, agreement


def main() -> None:
    chosen = options(Check, __doc__)
    console = progress.Results()
    loading.use_threads()
    if chosen.formats is not None and not set(chosen.formats.split(",")) <= set(FORMATS):
        raise ValueError(f"formats={chosen.formats}: engines on a CPU take {', '.join(FORMATS)}.")
    if chosen.only not in (None, *HEADS):
        raise ValueError(f"only={chosen.only}: the tiny heads are {', '.join(HEADS)}.")
    if not (llamacpp_client.ENGINES / "ready").is_file():
        raise ValueError("There are no engines to check: `make engines` sets them up (4 GB, a few minutes).")
    rows = []
    for row, agreement in check_tiny(chosen) if chosen.checkpoint is None else check_real(chosen, console):
        verdict = "" if row["faithful"] else "; NOT FAITHFUL"
        console.print(f"{row['name']}, {row['engine']}, format={row['format']}: {agreement}{verdict}")
        rows.append(row)
        files.write_text(Path(chosen.out), json.dumps(rows, indent=2) + "\n")
    if not rows:
        raise ValueError("Nothing was served: none of the formats takes these drafters.")
    console.print(f"written: {chosen.out}")
    if wrong := [f"{row['name']} ({row['format']})" for row in rows if not row["faithful"]]:
        raise ValueError(f"the engine does not run these as they were trained: {', '.join(wrong)}.")
    console.print(f"{len(rows)} of {len(rows)} are faithful")


if __name__ == "__main__":
    run(main)

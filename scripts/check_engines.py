"""python scripts/check_engines.py [checkpoint=DIR,DIR,... prompts=FILE limit=16]

Serves drafters in real engines (`make engines`) and compares them with our decoder. Without a checkpoint: a tiny target,
and a head of each family that is trained until every draft is right, so that a faithful engine accepts every one; then the
same head with noise on its weights, which is right now and then, and whose drafts depend on all that it reads: a faithful
engine drafts the same tokens, or, where it does not tell them, accepts as many. With checkpoints: their exports on real
prompts at temperature 0, the engine's tau beside ours; record=true keeps both in served.json
beside the checkpoint, for model cards.
"""

import copy
import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import rich.console
import torch

from engine_clients import llamacpp_client, tiny_heads, vllm_client
from helpers import loading
from helpers.options import options, run
from scripts import get_engines
from specdec import checkpoint, serving
from specdec.decode import Decoder
from specdec.drafter import Drafter
from specdec.drafting import Drafting
from specdec.export import gguf, medusa, speculators
from specdec.export import vllm as vllm_export
from specdec.heads.dflash import BlockDrafter
from specdec.heads.mtp import MTP
from specdec.layouts.mtp import OVERRIDE
from specdec.measurement import top2_gap
from specdec.proposers.base import Proposer
from specdec.sampling import Sampling
from specdec.target import Target
from train import data, reading

FORMATS = {"vllm": vllm_export, "speculators": speculators, "medusa": medusa, "gguf": gguf}
VLLM, LLAMA_CPP = (
    name + get_engines.WHEELS[n].partition("==")[2] for name, n in (("vLLM ", 0), ("llama.cpp, xllamacpp ", 3))
)
NUM_DRAFTS = 3
# head, arguments, draft vocabulary or not; the formats in which engines on a CPU take it
TINY = [
    ("eagle", {}, False, ("vllm",)),
    ("eagle3", {}, True, ("vllm", "speculators", "gguf")),
    ("eagle3", {"target_layers": [1, 3, 6]}, False, ("vllm", "speculators", "gguf")),
    ("eagle3", {"norm_features": True, "norm_output": True}, True, ("vllm", "speculators")),
    ("eagle3", {"norm_before_fc": True, "norm_before_residual": True}, True, ("vllm", "speculators", "gguf")),
    ("medusa", {"num_heads": 3, "num_blocks": 2}, False, ("vllm",)),
    ("medusa", {"num_heads": 3, "own_output": True}, False, ("vllm", "medusa")),
    ("mtp", {}, False, ("vllm",)),
    ("dflash", {"num_drafts": NUM_DRAFTS}, True, ("vllm", "speculators")),
    ("dflash", {"num_drafts": NUM_DRAFTS}, False, ("vllm", "gguf")),
    ("dspark", {"num_drafts": NUM_DRAFTS, "markov_rank": 16}, True, ("gguf",)),
    ("draft", {}, False, ("vllm", "gguf")),
]
TOLERANCE = 0.02  # of tau, served against validated


@dataclass(frozen=True)
class Check:
    checkpoint: str | None = field(default=None, metadata={"help": "checkpoints, a comma list; null: tiny ones"})
    only: str | None = field(default=None, metadata={"help": "of the tiny ones, those of this head"})
    formats: str | None = field(default=None, metadata={"help": f"a comma list of {', '.join(FORMATS)}; null: all"})
    prompts: str = field(default="data/prompts_heldout.jsonl", metadata={"help": "rows with prompt or messages"})
    limit: int | None = field(default=16, metadata={"help": "this many prompts, spread over the file; null: all"})
    max_new_tokens: int = field(default=64, metadata={"help": "an answer ends here at the latest"})
    record: bool = field(default=False, metadata={"help": "keep the figures in served.json beside each checkpoint"})
    num_drafts: int = field(default=NUM_DRAFTS, metadata={"help": "drafts a round, at most those that the head has"})
    batch: int = field(default=8, metadata={"help": "prompts that our decoder reads at once"})
    out: str = field(default="engines.json", metadata={"help": "the table as JSON"})
    target: loading.TargetOptions = field(default_factory=lambda: loading.TargetOptions(dtype="float32"))


@dataclass(frozen=True)
class Told:
    """What a decoder did with the prompts: answers, and for each round what was drafted behind which length."""

    answers: list[list[int]]
    rounds: list[int]  # of each answer
    drafted: dict[tuple[int, int], list[int]]  # (prompt, tokens of the answer so far) -> draft ids
    accepted: int = 0  # by the engine's own counters
    offered: int = 0

    def tau(self, some: list[int] | None = None) -> float:
        """Over these prompts; None: all"""
        chosen = range(len(self.answers)) if some is None else some
        return sum(len(self.answers[n]) - 1 for n in chosen) / max(1, sum(self.rounds[n] for n in chosen))


class Recorder(Proposer):
    """Another proposer, whose trees are kept."""

    def __init__(self, proposer: Proposer):
        self.proposer, self.target_layers, self.depth = proposer, proposer.target_layers, proposer.depth
        self.trees: list[list[list[int]]] = []  # [rounds][B][1 + K] token ids, the root first

    def begin(self, tokens, num):
        self.proposer.begin(tokens, num)

    def commit(self, tokens, features, num, counts):
        self.proposer.commit(tokens, features, num, counts)

    def propose(self, sampling, generator):
        tree = self.proposer.propose(sampling, generator)
        self.trees.append(tree.tokens.tolist())
        return tree


def ours(target: Target, drafter: Drafter, prompts: list[list[int]], chosen: Check, num: int, stop: set[int]) -> Told:
    """Chains of `num` drafts, verified greedily."""
    answers: list[list[int]] = []
    drafted: dict[tuple[int, int], list[int]] = {}
    rounds: list[int] = []
    for start in range(0, len(prompts), chosen.batch):
        recorder = Recorder(Drafting(depth=num).proposer(drafter))
        decoder = Decoder(target, recorder, sampling=Sampling(), stop=stop)
        found = decoder.generate(prompts[start : start + chosen.batch], chosen.max_new_tokens)
        for row, accepted in enumerate(found.accepted):
            written = 1  # by the prompt's own pass
            for trees, count in zip(recorder.trees, accepted):
                drafted[start + row, written] = trees[row][1:]
                written += count + 1
            rounds.append(len(accepted))
        answers += found.tokens
    return Told(answers, rounds, drafted)


class Blanked(MTP):
    """As vLLM runs it: with no embedding in the first row of a prompt."""

    def step(self, d, h, tokens, positions, mask, cache):
        embedding = torch.where(positions[..., None] == self.first_slot, 0.0, self.embed(tokens))
        h = self.module(d)(embedding, h, self.rotary(h, positions), mask, cache)
        return h, h


class FirstNorm(BlockDrafter):
    """As vLLM's CPU build runs it: the features' keys of all layers are normed with the first layer's weight.

    It norms them in one call of an operator that knows a weight for each layer on a GPU and not here.
    """

    def context(self, h, positions, cache):
        own = [layer.k_norm for layer in self.layers]
        for layer in self.layers:
            layer.k_norm = own[0]
        super().context(h, positions, cache)
        for layer, norm in zip(self.layers, own):
            layer.k_norm = norm


AS_RUN = {MTP: Blanked, BlockDrafter: FirstNorm}


def as_vllm_runs_it(drafter: Drafter) -> Drafter:
    if type(drafter) in AS_RUN:
        drafter = copy.copy(drafter)
        drafter.__class__ = AS_RUN[type(drafter)]
    return drafter


def in_vllm(target: str, form: serving.Form, folder: str, prompts, chosen: Check, num: int, stop: set[int]) -> Told:
    settings = serving.settings(form, folder, num)
    longest = max(map(len, prompts)) + chosen.max_new_tokens + num + 1
    override = OVERRIDE if settings["method"] == "mtp" else None
    with vllm_client.Vllm(target, speculative=settings, dtype=chosen.target.dtype, max_model_len=longest + 8,
                   overrides=override, threads=torch.get_num_threads()) as engine:  # fmt: skip
        served = engine.generate(prompts, chosen.max_new_tokens, stop)
    drafted = {
        (row, len(before)): list(ids) for row, rounds in enumerate(served.rounds) for ids, before in rounds if ids
    }
    return Told(served.answers, list(map(len, served.rounds)), drafted, served.accepted, served.draft_tokens)


def _right(ids: list[int], answer: list[int]) -> bool:
    """Whether what was drafted is what the answer then says, as far as it goes."""
    return ids[: len(answer)] == answer[: len(ids)]


def in_llamacpp(target: str, form: serving.Form, folder: str, prompts, chosen: Check, num: int, stop: set[int]) -> Told:
    kind = form.settings["kind"]
    made, drafts = Path(folder).with_suffix(".target.gguf"), Path(folder).with_suffix(".gguf")
    llamacpp_client.convert(target, str(made))
    llamacpp_client.convert(folder, str(drafts), target=None if kind == "simple" else target)
    context = max(map(len, prompts)) + chosen.max_new_tokens + num + 2
    answers, rounds, drafted, accepted = [], [], 0, 0
    with llamacpp_client.LlamaCpp(str(made), threads=torch.get_num_threads(), context=context, draft=str(drafts), kind=kind,
                           num=num, cache="f32") as engine:  # fmt: skip
        for prompt in prompts:
            answers.append(engine.generate(prompt, chosen.max_new_tokens, stop)[0])
            rounds.append(engine.rounds)
            drafted, accepted = drafted + engine.drafted, accepted + engine.accepted
    return Told(answers, rounds, {}, accepted, drafted)


def compare(
    target, drafter, name, form: serving.Form, folder, facts, prompts, chosen: Check, num: int, stop: set[int]
) -> dict:
    """Exports to `folder`, serves it, and says how far the engine and our decoder agree."""
    serving.write(form, folder, dtype=target.dtype, facts=facts)
    served_drafter = serving.whole_vocabulary(drafter) if form.whole_vocabulary else drafter
    serve = in_llamacpp if name == "gguf" else in_vllm
    theirs = serve(target.name, form, str(folder), prompts, chosen, num, stop)
    mine = ours(target, served_drafter, prompts, chosen, num, stop)
    run_there = served_drafter if name == "gguf" else as_vllm_runs_it(served_drafter)
    told = mine if run_there is served_drafter else ours(target, run_there, prompts, chosen, num, stop)
    common_rounds = told.drafted.keys() & theirs.drafted.keys()
    alike = [n for n, pair in enumerate(zip(mine.answers, theirs.answers)) if pair[0] == pair[1]]
    answers = zip(prompts, mine.answers, theirs.answers)
    gaps = [top2_gap(target, *three, Sampling()) for three in answers if three[1] != three[2]]
    same = sum(_right(theirs.drafted[key], told.drafted[key]) for key in common_rounds)
    return {
        "engine": LLAMA_CPP if name == "gguf" else VLLM,
        "format": name,
        "num_drafts": num,
        "num_prompts": len(prompts),
        "dtype": chosen.target.dtype,
        "tau": mine.tau(),
        "served_tau": theirs.tau(),
        "difference": theirs.tau() / mine.tau() - 1,
        "difference_as_run_there": theirs.tau() / told.tau() - 1,
        "same_answers": len(alike),
        "largest_gap_at_difference": max(gaps, default=None),
        "difference_of_same_answers": theirs.tau(alike) / told.tau(alike) - 1 if alike else None,
        "same_drafts": same if theirs.drafted else None,
        "rounds_compared": len(common_rounds) if theirs.drafted else None,
        "accepted": theirs.accepted,
        "offered": theirs.offered,
        "launch": serving.filled(next(iter(form.engines.values())), "DIR", num),
    }


def faithful(row: dict, whole: bool) -> bool:
    """whole: the head's drafts are all right; else: the same drafts, but for a near tie, or as many accepted"""
    if row["same_answers"] < row["num_prompts"] or not row["offered"]:
        return False
    if whole and row["accepted"] < row["offered"]:
        return False
    if row["same_drafts"] is None:
        return abs(row["difference_as_run_there"]) < 1e-6
    return row["rounds_compared"] > 0 and row["same_drafts"] >= 0.98 * row["rounds_compared"]


def tiny(chosen: Check, console: rich.console.Console) -> Iterator[dict]:
    wanted = None if chosen.formats is None else chosen.formats.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        target = tiny_heads.make_target(Path(scratch, "target"))
        prompts = tiny_heads.make_prompts(target, 4, num_tokens=chosen.max_new_tokens + 8)
        for number, (head, arguments, reduced, formats) in enumerate(TINY):
            name = " ".join(
                [head, *(f"{key}={value}" for key, value in arguments.items()), "reduced" * reduced]
            ).strip()
            formats = tuple(f for f in formats if wanted is None or f in wanted)
            if chosen.only not in (None, head) or not formats:
                continue
            console.print(f"{name}: training until every draft is right ...", highlight=False)

            def share(some: Drafter) -> float:
                told = ours(target, some, prompts, chosen, NUM_DRAFTS, set())
                right = [_right(ids, told.answers[row][written:]) for (row, written), ids in told.drafted.items()]
                return sum(right) / len(right)

            drafter = tiny_heads.overfit(
                target, head, arguments, reduced, prompts, chosen.max_new_tokens + 8, depth=NUM_DRAFTS, share=share
            )
            document = {"_target_": f"specdec.tiny.{type(drafter).__name__}", "versions": {"specdec": "0"},
                        "reads_layers": list(drafter.target_layers)}  # fmt: skip
            facts = serving.Facts("tiny", document, target.name, target.fingerprint(), None, {}, "its own answers",
                                  "other", NUM_DRAFTS)  # fmt: skip
            noisy = tiny_heads.perturbed(drafter, share=share)
            for form_name, whole in itertools.product(formats, (True, False)):
                folder = Path(scratch, f"{number}-{form_name}-{whole}")
                head_there = drafter if whole else noisy
                form = FORMATS[form_name].form(head_there)
                row = compare(target, head_there, form_name, form, folder, facts, prompts, chosen, NUM_DRAFTS, set())
                row |= {"name": name if whole else f"{name}, noisy", "faithful": faithful(row, whole)}
                console.print(f"  {line(row)}", highlight=False)
                yield row


def real(chosen: Check, console: rich.console.Console) -> Iterator[dict]:
    for folder in str(chosen.checkpoint).split(","):
        loaded = loading.load(folder, chosen.target)
        rows = reading.spread(reading.load_prompts(chosen.prompts), chosen.limit)
        prompts = [data.encode_prompt(loaded.tokenizer, row["messages"]) for row in rows]
        depth, whole = loaded.drafter.depth, isinstance(loaded.drafter, BlockDrafter)
        num = depth if whole and depth else min(chosen.num_drafts, depth or chosen.num_drafts)
        called = loading.run_names([loaded.folder])[0]
        facts = serving.Facts.read(loaded.folder, target=loaded.target, license="other", data=None, num_drafts=num)
        served = dict(facts.served)
        for name in chosen.formats.split(",") if chosen.formats else FORMATS:
            try:
                form = FORMATS[name].form(loaded.drafter)
            except ValueError as error:  # the format has no such family
                console.print(f"{called}, format={name}: {error}", highlight=False)
                continue
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch, "head")
                row = compare(
                    loaded.target, loaded.drafter, name, form, folder, facts, prompts, chosen, num, loaded.stop
                )
            row |= {"name": called, "prompts": Path(chosen.prompts).name, "max_new_tokens": chosen.max_new_tokens}
            row["faithful"] = abs(row["difference"]) < TOLERANCE
            console.print(line(row), highlight=False)
            if chosen.record:
                entry = f"{row['engine']}, format={name}"
                served[entry] = {key: row[key] for key in serving.SERVED_FIELDS}
                checkpoint.write_text(loaded.folder / serving.SERVED, json.dumps(served, indent=2) + "\n")
            yield row


def line(row: dict) -> str:
    """One engine's answers against ours."""
    parts = [
        f"{row['name']}, {row['engine']}, format={row['format']}: tau {row['tau']:.3f} here, {row['served_tau']:.3f} there "
        f"({100 * row['difference']:+.1f} %)",
        f"{row['same_answers']} of {row['num_prompts']} answers are the same",
    ]
    if row["largest_gap_at_difference"] is not None:
        parts.append(
            f"their tau {100 * (row['difference_of_same_answers'] or 0):+.1f} %; where the others part, the target's two "
            f"best logits are at most {row['largest_gap_at_difference']:.2g} apart"
        )
    parts.append(f"its counters: {row['accepted']} of {row['offered']} accepted")
    if row["same_drafts"] is not None:
        parts.append(f"the same drafts in {row['same_drafts']} of {row['rounds_compared']} rounds")
    if not row.get("faithful", True):
        parts.append("NOT FAITHFUL")
    return "; ".join(parts)


def main() -> None:
    chosen = options(Check, __doc__)
    console = rich.console.Console()
    loading.use_threads()
    unknown = set((chosen.formats or "vllm").split(",")) - FORMATS.keys()
    if unknown:
        raise ValueError(f"formats={chosen.formats}: engines on a CPU take {', '.join(FORMATS)}.")
    if chosen.only not in (None, *(head for head, *_ in TINY)):
        raise ValueError(f"only={chosen.only}: the tiny heads are {', '.join(sorted({head for head, *_ in TINY}))}.")
    if not (llamacpp_client.ENGINES / "ready").is_file():
        raise ValueError("There are no engines to check: `make engines` sets them up (4 GB, a few minutes).")
    rows = []
    for row in tiny(chosen, console) if chosen.checkpoint is None else real(chosen, console):
        rows.append(row)
        checkpoint.write_text(Path(chosen.out), json.dumps(rows, indent=2) + "\n")
    if not rows:
        raise ValueError("Nothing was served: no format of those asked for takes these drafters.")
    console.print(f"written: {chosen.out}", highlight=False)
    if wrong := [f"{row['name']} ({row['format']})" for row in rows if not row.get("faithful", True)]:
        raise ValueError(f"these are not what was trained: {', '.join(wrong)}.")
    if chosen.checkpoint is None:
        console.print(f"{len(rows)} of {len(rows)} are faithful", highlight=False)


if __name__ == "__main__":
    run(main)

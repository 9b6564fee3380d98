"""python scripts/check_engines.py [checkpoint=DIR,DIR,... prompts=FILE limit=16]

Serves drafters in real engines (`make engines`) and compares them with our decoder. Without a checkpoint: a tiny target,
and a head of each family that is trained until every draft is right; a faithful engine then accepts every one. With
checkpoints: their exports on real prompts at temperature 0, the engine's tau beside ours, which served.json keeps beside
the checkpoint for model cards.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hydra
import rich.box
import rich.console
import rich.table
import torch
import transformers
from hydra.utils import instantiate

from scripts import common, llamacpp, vllm
from scripts.cli import options, run
from specdec import checkpoint, serving
from specdec.decode import Decoder
from specdec.drafter import Drafter
from specdec.evaluate import Drafting
from specdec.export import gguf, medusa, speculators
from specdec.export import vllm as vllm_export
from specdec.heads.dflash import BlockDrafter
from specdec.layouts.mtp import OVERRIDE
from specdec.proposers.base import Proposer
from specdec.sampling import Sampling
from specdec.target import Target
from train import data, reading
from train.features import Online
from train.objective import Objective

FORMATS = {"vllm": vllm_export, "speculators": speculators, "medusa": medusa, "gguf": gguf}
NUM_DRAFTS = 3
# head, arguments, draft vocabulary or not; the formats in which engines on a CPU take it
TINY = [
    ("eagle", {}, False, ("vllm",)),
    ("eagle3", {}, True, ("vllm", "speculators", "gguf")),
    ("eagle3", {"target_layers": [1, 3, 6]}, False, ("vllm", "speculators", "gguf")),
    ("medusa", {"num_heads": 3}, False, ("vllm",)),
    ("medusa", {"num_heads": 3, "own_output": True}, False, ("vllm", "medusa")),
    ("mtp", {}, False, ("vllm",)),
    ("dflash", {"num_drafts": NUM_DRAFTS}, True, ("vllm", "speculators")),
    ("dflash", {"num_drafts": 3}, False, ("vllm", "gguf")),
    ("dspark", {"num_drafts": 3, "markov_rank": 16}, True, ("gguf",)),
    ("draft", {}, False, ("vllm", "gguf")),
]
STEPS, EVERY = 1200, 50  # at most so many steps of overfitting, and how often it is decoded


@dataclass(frozen=True)
class Check:
    checkpoint: str | None = field(default=None, metadata={"help": "checkpoints, a comma list; null: tiny ones"})
    only: str | None = field(default=None, metadata={"help": "of the tiny ones, those of this head"})
    formats: str | None = field(default=None, metadata={"help": f"a comma list of {', '.join(FORMATS)}; null: all"})
    prompts: str = field(default="data/prompts_heldout.jsonl", metadata={"help": "rows with prompt or messages"})
    limit: int | None = field(default=16, metadata={"help": "this many prompts, spread over the file; null: all"})
    max_new_tokens: int = field(default=64, metadata={"help": "an answer ends here at the latest"})
    num_drafts: int = field(default=NUM_DRAFTS, metadata={"help": "drafts a round, at most those that the head has"})
    batch: int = field(default=8, metadata={"help": "prompts that our decoder reads at once"})
    out: str = field(default="engines.json", metadata={"help": "the table as JSON"})
    target: common.TargetOptions = field(default_factory=lambda: common.TargetOptions(dtype="float32"))


@dataclass(frozen=True)
class Told:
    """What a decoder did with the prompts: answers, and for each round what was drafted behind which length."""

    answers: list[list[int]]
    tau: float
    drafted: dict[tuple[int, int], list[int]]  # (prompt, tokens of the answer so far) -> draft ids
    all_accepted: bool
    counters: str = ""


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
    counts: list[int] = []
    for start in range(0, len(prompts), chosen.batch):
        recorder = Recorder(Drafting(depth=num).proposer(drafter))
        decoder = Decoder(target, recorder, sampling=Sampling(), stop=stop)
        found = decoder.generate(prompts[start : start + chosen.batch], chosen.max_new_tokens)
        for row, accepted in enumerate(found.accepted):
            written = 1  # by the prompt's own pass
            for trees, count in zip(recorder.trees, accepted):
                drafted[start + row, written] = trees[row][1:]
                written += count + 1
            counts += accepted
        answers += found.tokens
    tau = sum(count + 1 for count in counts) / max(1, len(counts))
    return Told(answers, tau, drafted, all_accepted=False)


def in_vllm(target: str, form: serving.Form, folder: str, prompts, chosen: Check, num: int, stop: set[int]) -> Told:
    settings = serving.settings(form, folder, num)
    longest = max(map(len, prompts)) + chosen.max_new_tokens + num + 1
    override = OVERRIDE if settings["method"] == "mtp" else None
    with vllm.Vllm(target, speculative=settings, dtype=chosen.target.dtype, max_model_len=longest + 8,
                   overrides=override, threads=torch.get_num_threads()) as engine:  # fmt: skip
        served = engine.generate(prompts, chosen.max_new_tokens, stop)
    drafted = {
        (row, len(before)): list(ids) for row, rounds in enumerate(served.rounds) for ids, before in rounds if ids
    }
    whole = all(_right(ids, served.answers[row][written:]) for (row, written), ids in drafted.items())
    counted = f"{served.accepted}/{served.draft_tokens} accepted"
    return Told(served.answers, served.tau, drafted, whole, counted)


def _right(ids: list[int], answer: list[int]) -> bool:
    """Whether what was drafted is what the answer then says, as far as it goes."""
    return ids[: len(answer)] == answer[: len(ids)]


def in_llamacpp(target: str, form: serving.Form, folder: str, prompts, chosen: Check, num: int, stop: set[int]) -> Told:
    kind = form.settings["kind"]
    made, drafts = Path(folder).with_suffix(".target.gguf"), Path(folder).with_suffix(".gguf")
    llamacpp.convert(target, str(made))
    llamacpp.convert(folder, str(drafts), target=None if kind == "simple" else target)
    context = max(map(len, prompts)) + chosen.max_new_tokens + num + 2
    answers, rounds, drafted, accepted = [], 0, 0, 0
    with llamacpp.LlamaCpp(str(made), threads=torch.get_num_threads(), context=context, draft=str(drafts), kind=kind,
                           num=num, cache="f32") as engine:  # fmt: skip
        for prompt in prompts:
            answers.append(engine.generate(prompt, chosen.max_new_tokens, stop)[0])
            rounds, drafted, accepted = rounds + engine.rounds, drafted + engine.drafted, accepted + engine.accepted
    emitted = sum(len(answer) - 1 for answer in answers)
    return Told(answers, emitted / max(1, rounds), {}, accepted == drafted, f"{accepted}/{drafted} accepted")


def exported(drafter: Drafter, name: str, folder: Path, facts: serving.Facts, dtype: torch.dtype):
    """-> the form, and the drafter as that form serves it"""
    form = FORMATS[name].form(drafter)
    serving.write(form, folder, dtype=dtype, facts=facts)
    return form, serving.whole_vocabulary(drafter) if form.whole_vocabulary else drafter


def compare(target, drafter, name, folder, facts, prompts, chosen: Check, num: int, stop: set[int]) -> dict:
    """Exports to `folder`, serves it, and says how far the engine and our decoder agree."""
    form, served_drafter = exported(drafter, name, folder, facts, target.dtype)
    serve = in_llamacpp if name == "gguf" else in_vllm
    theirs = serve(target.name, form, str(folder), prompts, chosen, num, stop)
    mine = ours(target, served_drafter, prompts, chosen, num, stop)
    common_rounds = mine.drafted.keys() & theirs.drafted.keys()
    same = sum(_right(theirs.drafted[key], mine.drafted[key]) for key in common_rounds)
    return {
        "engine": "llama.cpp" if name == "gguf" else "vLLM",
        "format": name,
        "num_drafts": num,
        "num_prompts": len(prompts),
        "dtype": chosen.target.dtype,
        "tau": mine.tau,
        "served_tau": theirs.tau,
        "difference": theirs.tau / mine.tau - 1,
        "same_answers": sum(a == b for a, b in zip(mine.answers, theirs.answers)),
        "same_drafts": same if theirs.drafted else None,
        "rounds_compared": len(common_rounds) if theirs.drafted else None,
        "all_accepted": theirs.all_accepted,
        "counters": theirs.counters,
        "launch": serving.filled(next(iter(form.engines.values())), "DIR", num),
    }


def tiny_target(folder: Path) -> Target:
    """Random, with the default target's tokenizer, which llama.cpp's converter asks for."""
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained("targets/smollm2-135m")
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, initializer_range=0.15, eos_token_id=2,
        bos_token_id=1, tie_word_embeddings=False)  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Target.load(str(folder), dtype="float32")


def overfit(
    target: Target, head: str, arguments: dict, reduced: bool, prompts: list[list[int]], chosen: Check
) -> Drafter:
    """A drafter that says beforehand what the target answers to these prompts. Raises ValueError if it does not learn it."""
    torch.manual_seed(1)
    plain = Decoder(target, None, sampling=Sampling(), stop=set()).generate(prompts, chosen.max_new_tokens + 8)
    rows = [
        data.Row(str(n), "all", prompt + answer, [False] * len(prompt) + [True] * len(answer))
        for n, (prompt, answer) in enumerate(zip(prompts, plain.tokens))
    ]
    vocab = None
    if reduced:
        vocab = torch.tensor(sorted({*range(100), *(token for row in rows for token in row.tokens)}))
    with hydra.initialize_config_dir(str(Path("conf").resolve()), version_base="1.3"):
        config = hydra.compose("train", overrides=[f"head={head}"]).head
    drafter = instantiate({**config.drafter, **arguments, "_convert_": "all"}, target, vocab=vocab)
    wanted = {"ce"} | ({"confidence"} if drafter.confident else set())
    weights = {name: float(name in wanted) for name in config.objective.losses}
    depth = 1 if drafter.attends == "text" else NUM_DRAFTS
    objective = Objective(drafter, **{**config.objective, "losses": weights, "depth": depth, "anchors": None})
    batch = data.collate([[row] for row in rows], length=max(len(row.tokens) for row in rows), pad_token=0)
    output = Online(target, drafter.target_layers)([0], batch)
    optimizer = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=2e-3)
    for step in range(1, STEPS + 1):
        loss = objective(batch, output)
        (loss.total / loss.num_goals).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            frozen = drafter.decodable()
            told = ours(target, frozen, prompts, chosen, NUM_DRAFTS, set())
            if all(_right(ids, told.answers[row][written:]) for (row, written), ids in told.drafted.items()):
                return frozen
    raise ValueError(f"The tiny {head} has not learned its answers in {STEPS} steps: tau {told.tau:.2f}.")


def tiny(chosen: Check, console: rich.console.Console) -> Iterator[dict]:
    wanted = None if chosen.formats is None else chosen.formats.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        target = tiny_target(Path(scratch, "target"))
        generator = torch.Generator().manual_seed(5)
        prompts = [torch.randint(100, 40_000, (8,), generator=generator).tolist() for _ in range(4)]
        for number, (head, arguments, reduced, formats) in enumerate(TINY):
            name = " ".join(
                [head, *(f"{key}={value}" for key, value in arguments.items()), "reduced" * reduced]
            ).strip()
            formats = tuple(f for f in formats if wanted is None or f in wanted)
            if chosen.only not in (None, head) or not formats:
                continue
            console.print(f"{name}: training until every draft is right ...", highlight=False)
            drafter = overfit(target, head, arguments, reduced, prompts, chosen)
            document = {"_target_": f"specdec.tiny.{type(drafter).__name__}", "versions": {"specdec": "0"},
                        "reads_layers": list(drafter.target_layers)}  # fmt: skip
            facts = serving.Facts("tiny", document, target.name, target.fingerprint(), None, {}, "its own answers",
                                  "other", NUM_DRAFTS)  # fmt: skip
            for form in formats:
                folder = Path(scratch, f"{number}-{form}")
                row = compare(target, drafter, form, folder, facts, prompts, chosen, NUM_DRAFTS, set())
                verdict = "every draft accepted" if row["all_accepted"] else f"NOT every draft: {row['counters']}"
                console.print(
                    f"  {row['engine']}, format={form}: {verdict}; tau {row['served_tau']:.2f}", highlight=False
                )
                yield {"name": name, **row}


def real(chosen: Check, console: rich.console.Console) -> Iterator[dict]:
    for folder in str(chosen.checkpoint).split(","):
        loaded = common.load(folder, chosen.target)
        rows = reading.spread(reading.load_prompts(chosen.prompts), chosen.limit)
        prompts = [data.encode_prompt(loaded.tokenizer, row["messages"]) for row in rows]
        depth, whole = loaded.drafter.depth, isinstance(loaded.drafter, BlockDrafter)
        num = depth if whole and depth else min(chosen.num_drafts, depth or chosen.num_drafts)
        name = common.run_names([loaded.folder])[0]
        facts = serving.Facts.read(loaded.folder, target=loaded.target, license="other", data=None, num_drafts=num)
        served = dict(facts.served)
        for form in FORMATS if chosen.formats is None else chosen.formats.split(","):
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    row = compare(loaded.target, loaded.drafter, form, Path(scratch, "head"), facts, prompts, chosen, num,
                                  loaded.stop)  # fmt: skip
                except ValueError as error:
                    console.print(f"{name}, format={form}: {error}", highlight=False)
                    continue
            console.print(f"{name}, {row['engine']}, format={form}: tau {row['tau']:.3f} here, {row['served_tau']:.3f} there",
                          highlight=False)  # fmt: skip
            kept = ("num_drafts", "num_prompts", "dtype", "tau", "served_tau")
            served[f"{row['engine']}, format={form}"] = {key: row[key] for key in kept}
            checkpoint.write_text(loaded.folder / serving.SERVED, json.dumps(served, indent=2) + "\n")
            yield {"name": name, **row}


def table(rows: list[dict]) -> rich.table.Table:
    """answers: that are ours too; drafts: rounds that both decoders had, and how many drafted the same; the engine's count"""
    shown = rich.table.Table(title="served and validated", title_justify="left", box=rich.box.SIMPLE, pad_edge=False)
    for name in ("drafter", "served by", "tau here, there", "answers", "drafts", "its counters"):
        shown.add_column(name)
    for row in rows:
        drafts = "" if row["same_drafts"] is None else f"{row['same_drafts']}/{row['rounds_compared']}"
        taus = f"{row['tau']:.3f} {row['served_tau']:.3f} {100 * row['difference']:+.1f} %"
        answers = f"{row['same_answers']}/{row['num_prompts']}"
        shown.add_row(row["name"], f"{row['engine']}, {row['format']}", taus, answers, drafts, row["counters"])
    return shown


def main() -> None:
    chosen = options(Check, __doc__)
    console = rich.console.Console()
    common.use_threads()
    unknown = set((chosen.formats or "vllm").split(",")) - FORMATS.keys()
    if unknown:
        raise ValueError(f"formats={chosen.formats}: engines on a CPU take {', '.join(FORMATS)}.")
    if not Path(vllm.PYTHON).is_file():
        raise ValueError("There are no engines to check: `make engines` sets them up (4 GB, a few minutes).")
    rows = []
    for row in tiny(chosen, console) if chosen.checkpoint is None else real(chosen, console):
        rows.append(row)
        checkpoint.write_text(Path(chosen.out), json.dumps(rows, indent=2) + "\n")
    console.print(table(rows))
    console.print(f"written: {chosen.out}", highlight=False)
    wrong = [
        f"{row['name']} ({row['format']})" for row in rows if chosen.checkpoint is None and not row["all_accepted"]
    ]
    if wrong:
        raise ValueError(f"not every draft was accepted: {', '.join(wrong)}.")


if __name__ == "__main__":
    run(main)

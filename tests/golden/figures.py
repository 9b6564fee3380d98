"""What the golden record holds: each function computes one entry of it, in a copy of the folder `today`."""

import hashlib
import json
import math
import shutil
from pathlib import Path

import safetensors.torch
import torch

from specdec import checkpoint
from specdec.export import published
from tests.golden import interface

GOLDEN = Path(__file__).parent
TODAY = GOLDEN / "today"  # targets, data, heads, a run and features, made by the code before the rebuild
STEPS, MIDDLE = 20, 10
STOP = 7  # of the target `small`, which has the tokens 0 .. 7
HEADS = sorted(path.name for path in (TODAY / "heads").glob("*"))
FORMATS = ("vllm", "sglang", "speculators", "eagle", "medusa", "transformers", "gguf", "safetensors")
SHIPPED = ("eagle3", "mtp")
ADAPTING = ("medusa2",)
# What differs from run to run or from machine to machine
PASSING = {
    "settings",
    "by_prompt",
    "by_category",
    "contexts",
    "replayed_contexts",
    "samples",
    "served",
    "training",
    "versions",
    "target_fingerprint",
    "target_embeddings",
    "transformers_version",
    "ms_per_round",
    "learn_more",
}

# Training: the arguments of train.py beside `basic`, by name

TRAINING = {
    **{
        head: (f"head={head}",)
        for head in (
            "dflash",
            "draft",
            "dspark",
            "eagle",
            "eagle3",
            "hass",
            "hydra",
            "medusa",
            "medusa2",
            "mtp",
            "peagle",
        )
    },
    "eagle cached": ("head=eagle", "features.mode=cached"),
    "eagle3 cached": ("head=eagle3", "features.mode=cached"),
    "losses in chunks": ("head=eagle3", "head.objective.chunk=16", "head.objective.gradient_checkpointing=true"),
    "dpace": ("head=medusa", "head.objective.weighting=dpace", "head.objective.supervise=text"),
    "batches": ("head=mtp", "train.batch=2", "train.accumulation=2", "train.max_grad_norm=0"),
    "muon": ("head=eagle", "optimizer.name=muon", "optimizer.schedule=wsd", "optimizer.weight_decay=0.1"),
    "average": ("head=eagle", "train.ema=0.9", "optimizer.schedule=constant", "validation.temperature=1"),
    "not packed": (
        "head=dspark",
        "head.objective.anchors=16",
        "data.pack=false",
        "data.train={train.jsonl: 2, texts.jsonl: 0.5}",
    ),
    "from a head": ("head=eagle", "start=trained", "start_vocab=data"),
}
PACKS = {
    "packed": (),
    "not packed": ("data.pack=false",),
    "short": ("data.length=48", "data.limit=9"),
    "several": ("data.train={train.jsonl: 2, texts.jsonl: 0.5}",),
    "held out": ("data.hold_out=2", "data.tokens=150"),
}


# Defaults of heads when the record was made
AS_RECORDED = {
    "eagle3": ["head.drafter.own_output=true", "head.objective.depth=7", "head.objective.supervise=answers"],
    "mtp": ["head.objective.depth=3", "head.objective.supervise=answers"],
}


def arguments(run: str, *overrides: str) -> list[str]:
    """Arguments of train.py for a short run."""
    settings = [
        f"run={run}",
        "target.name=target",
        "target.dtype=float32",
        "data.train=train.jsonl",
        "data.heldout=prompts.jsonl",
        "data.cache=data-cache",
        "data.length=64",
        "data.workers=1",
        "precision=fp32",
        "features.mode=online",
        f"threads={torch.get_num_threads()}",
        "validation.max_new_tokens=12",
        "validation.share=null",
        "validation.decode=end",
        "validation.auto=never",
        f"train.steps={STEPS}",
        f"train.validate_every={STEPS}",
        f"train.save_every={MIDDLE}",
        "train.save_minutes=null",
        "train.log_every=1",
        "optimizer.lr=3e-3",
        "optimizer.warmup=2",
        "head.vocab_size=200",
        "progress=quiet",
        "train.batch=1",
        "train.accumulation=1",
        "optimizer.name=adamw",
        "optimizer.weight_decay=0",
        "optimizer.schedule=cosine",
        "optimizer.final=0.05",
        "decode.depth=2",
        "validation.num_prompts=8",
    ]
    head = next((each.removeprefix("head=") for each in overrides if each.startswith("head=")), "eagle")
    settings += AS_RECORDED.get(head, [])
    names = {each.partition("=")[0] for each in overrides}
    return [*(each for each in settings if each.partition("=")[0] not in names), *overrides]


def train(run: str, *overrides: str) -> None:
    interface.run_command("train.py", *arguments(run, *overrides))


def read_log(run: str) -> dict:
    """Loss, gradient norm and learning rate of every step."""
    lines = [json.loads(line) for line in Path("checkpoints", run, "log.jsonl").read_text().splitlines()]
    steps = {line["step"]: [line["loss"], line["grad_norm"], line["learning_rate"]] for line in lines if "loss" in line}
    assert sorted(steps) == list(range(1, STEPS + 1))
    return {str(step): steps[step] for step in sorted(steps)}


def training(name: str) -> dict:
    train("new", *TRAINING[name])
    last = Path("checkpoints/new", f"step_{STEPS:06}")
    return {
        "log": read_log("new"),
        "report": lasting(json.loads((last / "report.json").read_text())),
        "weights": digests(last / "drafter.safetensors"),
    }


def packs(name: str) -> str:
    return digest(json.dumps(interface.read_packs(*arguments("new", *PACKS[name]))).encode())


# Decoding

CHAIN, TREE = {"depth": 3}, {"depth": 4, "width": 2, "nodes": 9}
WARM, CUT = {"temperature": 1.0}, {"temperature": 0.7, "top_k": 6, "top_p": 0.9, "repetition_penalty": 1.3}
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5, 5, 6], [0], [4, 1, 6, 2, 2, 0, 3, 5, 4, 1], [6, 3, 6, 3, 6], [2, 4]]
LENGTHS = [14, 5, 11, 9, 1, 8]


def cases() -> dict[str, dict]:
    """What is decoded: arguments of `answers`, by name."""
    figures: dict[str, dict] = {"plain": {}, "plain, warm": {"sampling": WARM}, "plain, cut": {"sampling": CUT}}
    for head in HEADS:
        usual = {"proposer": "head", "head": head}
        figures |= {f"{head}, chain": usual | CHAIN, f"{head}, warm chain": usual | CHAIN | {"sampling": WARM}}
        figures |= {
            f"{head}, tree": usual | TREE,
            f"{head}, warm tree": usual | TREE | {"sampling": WARM, "children": "chosen"},
        }
    for head in ("eagle", "medusa", "dspark"):
        usual = {"proposer": "head", "head": head, "sampling": WARM}
        figures |= {f"{head}, distinct": usual | TREE | {"children": "distinct"}}
        figures |= {f"{head}, block": usual | CHAIN | {"rule": "block"}}
        figures |= {f"{head}, cut": usual | TREE | {"sampling": CUT, "children": "chosen"}}
    texts = {
        "ngram": ("ngram", {"num": "4"}),
        "suffix": ("suffix", {"num": "6"}),
        "suffix, no memory": ("suffix", {"memory": "0", "factor": "1.0"}),
        "retrieval": ("retrieval", {"datastore": "datastore", "num": "6"}),
        "draft": ("draft", {"model": "other"}),
    }
    for name, (proposer, settings) in texts.items():
        usual = {"proposer": proposer, "settings": settings, "head": "eagle" if "head" in name else None} | CHAIN
        figures |= {name: usual, f"{name}, warm": usual | {"sampling": WARM}}
    figures["draft, tree"] = {"proposer": "draft", "settings": {"model": "other"}} | TREE
    figures["auto"] = {
        "proposer": "auto",
        "head": "eagle",
        "settings": {"costs": "costs.json", "members": "[suffix,head]"},
    }
    return figures


CASES = cases()


def answers(*, proposer=None, head=None, settings=None, sampling=None, rule="token", **decode) -> dict:
    """Of one row at a time, and of three rows that others join."""
    figures = {}
    for rows in (1, 3):
        target = interface.load_target("small")
        folder = head and f"heads/{head}"
        made = proposer and interface.make_proposer(target, proposer, folder, decode, settings or {})
        some = slice(None) if rows > 1 else slice(2)
        tokens, accepted, trees, probs = interface.decode(
            target,
            made,
            PROMPTS[some],
            LENGTHS[some],
            rows=rows,
            stop={STOP},
            sampling=sampling or {"temperature": 0.0},
            rule=rule,
        )
        figures[str(rows)] = {"answers": tokens}
        if proposer != "auto":  # which rounds draft what depends on times
            weights = None if probs is None else torch.arange(1, probs.numel() + 1).view(probs.shape).double().sqrt()
            figures[str(rows)] |= {
                "accepted": accepted,
                "first tree": trees[:1],
                "trees": digest(json.dumps(trees).encode()),
                "distributions": None if weights is None else float((probs.double() * weights).sum()),
            }
    return figures


# Exports


def exports(head: str, form: str) -> dict | None:
    """An export and what it gives when it is imported, as digests; None where the head has no such form."""
    adapted = ("merged_target=merged",) if head in ADAPTING else ()
    try:
        interface.run_command(
            "scripts/export.py",
            f"checkpoint=heads/{head}",
            f"format={form}",
            "target.dtype=float32",
            "out=out",
            *adapted,
        )
    except RuntimeError:
        return None
    figures = {}
    for folder in ("out", "merged"):
        for path in sorted(Path(folder).glob("*.safetensors")):
            figures[f"{folder}/{path.name}"] = digests(path)
        for path in sorted([*Path(folder).glob("config.json"), *Path(folder).glob("*.pt")]):
            figures[f"{folder}/{path.name}"] = digest_of(read_any(path))
    if head != "draft" and form != "safetensors" and head not in ADAPTING:  # the others are no heads of this target
        target = interface.load_target("small", "float32")
        spec, _ = published.read_published(Path("out"), target)
        checkpoint.save(Path("back"), checkpoint.load(Path("out"), target, exact=True), spec)
        figures["back"] = digests(Path("back/drafter.safetensors"))
        figures["back/drafter.json"] = digest_of(read_any(Path("back/drafter.json")))
    return figures


# Reports

ADDED = {"method", "batch", "acceptance_length", "difference"}  # to what reports had


def shipped(name: str) -> dict:
    """The figures of a head of checkpoints/shipped on the target that it was trained for."""
    interface.run_command(
        "scripts/evaluate.py",
        f"checkpoint={interface.ROOT}/checkpoints/shipped/{name}",
        "target.dtype=float32",
        f"target.name={interface.ROOT}/targets/smollm2-135m",
        "prompts=questions.jsonl",
        "max_new_tokens=8",
        "decode.temperature=0,1",
        "decode.depth=3",
        "auto=false",
        "out=evaluation",
        "progress=quiet",
    )
    found = json.loads(Path("evaluation/results.json").read_text())
    entries = found["results"]
    for entry in entries:
        for key in ADDED:
            entry.pop(key, None)
    return lasting({**entries[0], "definition_of_tau": found["definition_of_tau"], "temperatures": entries})


def ruled() -> dict:
    """Answers that follow grammars, with what is forced as drafts."""
    reports = [interface.decode_ruled("target", "ruled.jsonl", temperature, 40, rows=2) for temperature in (0.0, 1.0)]
    return lasting({**reports[0], "definition_of_tau": interface.TAU, "temperatures": reports})


# Digests and comparisons


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def digest_of(value) -> str:
    """Of what a JSON file or a file of torch.save holds."""
    if isinstance(value, torch.Tensor):
        data = value.contiguous().view(torch.uint8) if value.dim() else value.reshape(1).view(torch.uint8)
        return digest(f"{value.dtype}{list(value.shape)}".encode() + data.numpy().tobytes())
    if isinstance(value, dict):
        return digest(json.dumps({key: digest_of(part) for key, part in sorted(value.items())}).encode())
    return digest(json.dumps(value, sort_keys=True).encode())


def digests(path: Path) -> dict[str, str]:
    """Of each tensor of a file."""
    return {name: digest_of(value) for name, value in sorted(safetensors.torch.load_file(path).items())}


def read_any(path: Path):
    if path.suffix == ".json":
        return lasting(json.loads(path.read_text()))
    return torch.load(path, weights_only=True)


def lasting(value):
    """A document of JSON without what differs from run to run: times, versions, machines."""
    if isinstance(value, dict):
        kept = {
            key for key in value if key not in PASSING and not any(word in key for word in ("second", "speedup", "_ms"))
        }
        return {key: lasting(value[key]) for key in value if key in kept}
    return [lasting(part) for part in value] if isinstance(value, list) else value


def differences(measured, recorded, tolerance: float, name: str = "") -> list[str]:
    """Places where two documents of JSON are not the same. tolerance: relative, of numbers with a fraction; 0: bit for
    bit
    """
    if isinstance(recorded, dict) and isinstance(measured, dict):
        keys = dict.fromkeys([*recorded, *measured])
        pairs = [(key, measured.get(key, "nothing"), recorded.get(key, "nothing")) for key in keys]
    elif isinstance(recorded, list) and isinstance(measured, list) and len(measured) == len(recorded):
        pairs = list(zip(range(len(measured)), measured, recorded))
    elif equal_values(measured, recorded, tolerance):
        return []
    else:
        return [f"{name}: {measured!r}, recorded {recorded!r}"]
    return [line for key, new, old in pairs for line in differences(new, old, tolerance, f"{name}/{key}")]


def equal_values(measured, recorded, tolerance: float) -> bool:
    """Whether two values of JSON are the same: numbers with a fraction within the tolerance, all others exactly."""
    if not (isinstance(recorded, float) and isinstance(measured, float)):
        return type(measured) is type(recorded) and measured == recorded
    if math.isnan(measured) and math.isnan(recorded):
        return True
    if tolerance:
        return math.isclose(measured, recorded, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
    return measured == recorded


def copy_today(folder: Path) -> None:
    """The folder `today` where a command runs: `checkpoints` is what .gitignore leaves out."""
    shutil.copytree(TODAY, folder, dirs_exist_ok=True)
    (folder / "runs").rename(folder / "checkpoints")

"""python -m tests.golden.record --first-and-only

Made the golden record, on the code before the rebuild: the folder `today`, and the files anywhere.json and numbers.json. It
refuses to replace them. Whoever changes the record on purpose edits it by hand, and says in CHANGELOG.md what changed and why.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.golden import figures, interface, signature
from tests.golden.figures import GOLDEN, TODAY

# Each kind of machine whose numbers are recorded bit for bit: variables of the environment
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
KINDS = [
    {"OMP_NUM_THREADS": "1"},
    {"OMP_NUM_THREADS": "2"},
    {"OMP_NUM_THREADS": "1"} | AVX2,
    {"OMP_NUM_THREADS": "2"} | AVX2,
]
WIDE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
SCHEMA = {"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}, "number": {"enum": [1, 2]}},
          "required": ["sky", "number"], "additionalProperties": False}  # fmt: skip


def make_target(folder: str, tokenizer, *, seed: int, num_layers: int, spread: float, sizes: dict) -> None:
    """A random Llama in bfloat16, which is read in other dtypes without rounding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=num_layers, head_dim=8, max_position_embeddings=512,
                         initializer_range=spread, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, **sizes)  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write(path: str, rows: list[dict]) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_today() -> None:
    """Fills the working directory, which becomes the folder `today`."""
    from tests.support import small_tokenizer, word_tokenizer

    make_target("target", small_tokenizer(), seed=0, num_layers=8, spread=0.3, sizes=WIDE)
    make_target("small", word_tokenizer(8), seed=1, num_layers=8, spread=0.4, sizes=SMALL)
    make_target("other", word_tokenizer(8), seed=2, num_layers=2, spread=0.4, sizes=SMALL)
    rows = []
    for n in range(24):
        counting = [{"role": "user", "content": f"Count from {n}."},
                    {"role": "assistant", "content": f"{n} is followed by {n + 1}, then by {n + 2}."},
                    {"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "Hello world" * (n % 3 + 1)}]  # fmt: skip
        rows.append({"id": f"row-{n}", "temperature": n % 2, "messages": counting[: 4 if n % 4 == 0 else 2]})
    write("train.jsonl", rows)
    write("texts.jsonl", [{"id": f"text-{n}", "text": f"Hello from {n} to {n * n}: " * 3} for n in range(6)])
    write("prompts.jsonl", [{"id": f"p{n}", "category": "ab"[n % 2], "prompt": f"Count {text}."}
                            for n, text in enumerate(["from 3", "on", "to 8"])])  # fmt: skip
    write("questions.jsonl", [{"id": "a", "category": "qa", "prompt": "What is the capital of France?"},
                              {"id": "b", "category": "qa", "prompt": "Repeat: one two three one two three"}])  # fmt: skip
    grammars = [{"json_schema": SCHEMA}, {"regex": "(sky|blue){2,4}"}, None]
    write("ruled.jsonl", [{"id": f"r{n}", "prompt": f"Say {n}", "grammar": grammars[n % 3]} for n in range(4)])
    write(
        "words.jsonl",
        [{"id": f"t{n}", "text": " ".join(f"w{(n * k + k // 3) % 8}" for k in range(30))} for n in range(6)],
    )
    costs = {"plain_ms": 10.0, "ratios": {"1": 1, "4": 1.1, "8": 1.4, "16": 2.0}, "absorb_ms": 0.5, "step_ms": 0.5}
    Path("costs.json").write_text(json.dumps(costs))
    interface.run_command("scripts/datastore.py", "data=words.jsonl", "out=datastore", "target.name=small")
    make_heads()
    figures.train("trained", "head=eagle", "train.steps=4", "train.validate_every=4", "head.vocab_size=100")
    next(Path("checkpoints/trained").glob("step_*")).rename("trained")
    for path in Path("trained").glob("*.html"):
        path.unlink()
    cached = figures.TRAINING["eagle cached"]
    with interface.failing_at(figures.MIDDLE + 2), contextlib.suppress(RuntimeError):
        figures.train("today", *cached)
    shutil.rmtree("checkpoints/trained")
    shutil.rmtree("data-cache")
    Path("checkpoints").rename("runs")


def make_heads() -> None:
    """A head of each kind with random weights, some of them with a reduced vocabulary."""
    from specdec import checkpoint
    from tests.exports import make_medusa2
    from tests.support import HEADS, load_head, make_drafter

    for head in set(HEADS) - {"hass"}:  # it is eagle with other losses
        for reduced in (False, True) if head in ("eagle", "eagle3", "mtp", "medusa", "dspark") else (False,):
            drafter = make_drafter(interface.load_target("small"), head, reduced).float()
            checkpoint.save(Path("heads", head + "-reduced" * reduced), drafter, load_head(head)["drafter"])
    for head in figures.ADAPTING:
        target = interface.load_target("small", "float32")
        if head == "medusa2":
            drafter = make_medusa2(target)
        else:
            from hydra.utils import instantiate

            torch.manual_seed(3)
            drafter = instantiate(load_head(head)["drafter"] | {"lora_rank": 4}, target, vocab=None)
            for parameter in drafter.parameters():
                parameter.data = torch.randn_like(parameter) * 0.1
        spec = load_head(head)["drafter"] | ({"lora_rank": 4} if head == "consistency" else {})
        checkpoint.save(Path("heads", head), drafter.frozen_copy(), spec)


def compute(names: dict) -> dict:
    """{part: {entry: figures}}, each entry in a folder of its own. names: {part: (function, entries as arguments by name)}"""
    results: dict = {}
    for part, (function, entries) in names.items():
        for name, given in entries.items():
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                figures.copy_today(Path(folder))
                results.setdefault(part, {})[name] = function(*given[0], **given[1])
    return results


def anywhere() -> dict:
    exports = {f"{head}, {form}": ((head, form), {}) for head in figures.HEADS for form in figures.FORMATS}
    return compute({
        "packs": (figures.packs, {name: ((name,), {}) for name in figures.PACKS}),
        "answers": (figures.answers, {name: ((), given) for name, given in figures.CASES.items()}),
        "exports": (figures.exports, exports),
    })  # fmt: skip


def numbers() -> dict:
    return compute({
        "training": (figures.training, {name: ((name,), {}) for name in figures.TRAINING}),
        "shipped": (figures.shipped, {name: ((name,), {}) for name in figures.SHIPPED}),
        "ruled": (figures.ruled, {"grammars": ((), {})}),
    })  # fmt: skip


def main() -> None:
    if sys.argv[1:] == ["numbers"]:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        print("\n" + json.dumps({signature.name(): numbers()}))
        return
    if sys.argv[1:] == ["anywhere"]:
        print("\n" + json.dumps({"anywhere": anywhere()}))
        return
    if sys.argv[1:] != ["--first-and-only"]:
        raise SystemExit(__doc__)
    existing = [path.name for path in (TODAY, GOLDEN / "anywhere.json", GOLDEN / "numbers.json") if path.exists()]
    if existing:
        raise SystemExit(f"There is a golden record ({', '.join(existing)}), which is never recorded anew.")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        torch.set_num_threads(1)
        make_today()
        shutil.copytree(folder, TODAY)
    write_record("anywhere", [{"OMP_NUM_THREADS": "1"}])
    write_record("numbers", KINDS)


def write_record(group: str, kinds: list[dict]) -> None:
    """Writes what child processes find, one for each kind of machine."""
    results: dict = {}
    for kind in kinds:
        command = [sys.executable, "-m", "tests.golden.record", group]
        child = subprocess.run(
            command, cwd=interface.ROOT, env=os.environ | kind, stdout=subprocess.PIPE, text=True, check=True
        )
        results |= json.loads(child.stdout.splitlines()[-1])
    first, *others = results.values()
    for part, entries in (pair for other in others if group == "numbers" for pair in other.items()):
        same = [name for name, entry in entries.items() if json.dumps(entry) == json.dumps(first[part][name])]
        entries |= dict.fromkeys(same, "the same")  # as of the first kind of machine
    lines = [
        f" {json.dumps(kind)}: {{\n"
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
        + "\n }"
        for kind, entries in ((kind, flat(parts)) for kind, parts in results.items())
    ]
    (GOLDEN / f"{group}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def flat(figures: dict) -> dict:
    """Entries as PART: NAME, a line each."""
    return {f"{part}: {name}": entry for part, entries in figures.items() for name, entry in entries.items()}


if __name__ == "__main__":
    main()

"""python scripts/serve_heldout.py checkpoint=checkpoints/eagle3-smollm2-135m

Exports a checkpoint, serves it in vLLM on held-out prompts at temperature 0, and says the tau that vLLM's own rounds give,
beside the tau that validation replayed. Of the target it reads the embedding, the final norm and the LM head only; vLLM
holds the rest. train.py does the same at its end with validation.served=PYTHON.
"""

from helpers import in_vllm, loading
from helpers.options import option, options, run

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from engine_clients.vllm_client import PYTHON
from specdec import checkpoint
from specdec.core import files
from specdec.export.cards import Provenance
from specdec.export.engines import make_form
from specdec.export.folder import write_export
from specdec.measuring.report import Report
from specdec.target.model import Target, load_tokenizer
from train import progress
from train.data import rows as data
from train.naming import named


@dataclass(frozen=True)
class ServeHeldout:
    checkpoint: str = field(metadata={"help": loading.CHECKPOINT})
    prompts: str = option("data/prompts_heldout.jsonl", "rows with prompt or messages")
    split: str | None = option(None, loading.SPLIT)
    thinking: bool | None = option(None, f"{loading.THINKING}; null: as the checkpoint was trained")
    limit: int | None = option(8, "use LIMIT prompts, spread over the file; null: all")
    max_new_tokens: int = option(48, "longest answer, in tokens")
    num_drafts: int = option(2, "drafts per round: of the chain that was replayed")
    python: str = option(PYTHON, "interpreter with vLLM; `make engines` makes this one, for a CPU")
    out: str | None = option(None, "JSON file for the figures")
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)


def main() -> None:
    chosen = options(ServeHeldout, __doc__)
    folder = checkpoint.resolve(chosen.checkpoint)
    name = chosen.target.name or loading.target_of(folder)
    origin = {"trust_remote_code": chosen.target.trust_remote_code}
    with named("target"):
        target = Target.load_ends(name, dtype=chosen.target.dtype_here, **origin)
        tokenizer = load_tokenizer(name, **origin)
    drafter = checkpoint.load(folder, target)
    thinking = loading.mode_of([chosen.checkpoint]) if chosen.thinking is None else chosen.thinking
    found = data.load_prompts(chosen.prompts, tokenizer, split=chosen.split, limit=chosen.limit, thinking=thinking)
    prompts = [prompt.tokens for prompt in found]
    num = chosen.num_drafts if drafter.depth is None else min(chosen.num_drafts, drafter.depth)
    provenance = Provenance.read(folder, target=target, license="other", data=None, num_drafts=num)
    form = make_form(drafter, "vllm")
    with tempfile.TemporaryDirectory() as scratch:
        export = Path(scratch, "head")
        write_export(form, export, dtype=target.dtype, provenance=provenance)
        with progress.start("decoding in vLLM"):
            found = in_vllm.decode(
                name, form, export, prompts, num_drafts=num, max_new_tokens=chosen.max_new_tokens, python=chosen.python,
                stop=data.stop_tokens(tokenizer, target.model.generation_config), dtype=chosen.target.dtype_here,
            )  # fmt: skip
    figures = {
        "engine": "vLLM",
        "tau": found.tau(),
        "prompts": len(prompts),
        "rounds": sum(found.rounds),
        "num_drafts": num,
        "accepted": found.accepted,
        "drafted": found.offered,
    }
    print(
        f"tau served {figures['tau']:.3f}: {figures['prompts']} prompts, {figures['rounds']} rounds, chain of {num}; ",
        end="",
    )
    print(f"by vLLM's counters {found.accepted} of {found.offered} drafts were accepted")
    path = folder / "report.json"
    if path.exists() and (report := Report.from_json(checkpoint.read_json(path), source=str(path))).replayed_tau:
        difference = 100 * (figures["tau"] / report.replayed_tau - 1)
        print(
            f"tau replayed {report.replayed_tau:.3f} ({report.replayed_prompts} prompts): served is {difference:+.1f} %"
        )
    if chosen.out:
        files.write_text(Path(chosen.out), json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    run(main)

"""python scripts/evaluate.py checkpoint=DIR [prompts=FILE decode.temperature=0,1 decode.depth=4 decode.width=1 ...]
python scripts/evaluate.py proposer=ngram [proposer.max=4 ...]

Decodes every prompt plainly and with drafts, in turn, and prints what the drafting is worth: tau (tokens emitted per
target pass of a round, bonus or correction token counted), survival by depth, speedup, losslessness, each mean with a
95 % interval over prompts. Writes everything to report.json.
"""

import json
import platform
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import rich.console
import rich.table
import torch
from rich.progress import track

from helpers import loading, proposers
from helpers.options import options, run
from specdec import checkpoint, rules, serving
from specdec.compile import Runner
from specdec.figures import TAU
from specdec.measurement import Prompt, measure
from specdec.proposers.heads import HeadProposer
from specdec.report import Report, summarise_by_category
from specdec.timing import fastest_batch
from train import data, display, reading


@dataclass(frozen=True)
class Evaluate(proposers.ProposerOptions):
    prompts: str = field(
        default="data/prompts_heldout.jsonl", metadata={"help": "rows with prompt or messages (JSONL, folder, dataset)"}
    )
    limit: int | None = field(default=None, metadata={"help": "this many prompts, spread over the file"})
    max_new_tokens: int = field(default=128, metadata={"help": "an answer ends here at the latest"})
    batch: int | None = field(
        default=1,
        metadata={"help": "prompts decoded at once; null: the fastest, found out first; latency is that of 1"},
    )
    seed: int = field(default=0, metadata={"help": "of sampling"})
    out: str = field(default="report.json", metadata={"help": "the report to write"})
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: loading.DecodeOptions = field(default_factory=loading.DecodeOptions)


def main() -> None:
    chosen = options(Evaluate, __doc__)
    console = rich.console.Console()
    drafting, samplings = chosen.decode.drafting(), chosen.decode.samplings()
    loaded = proposers.load(chosen, chosen.target, drafting)
    proposer = loaded.proposer
    if isinstance(proposer, HeadProposer):  # its own settings may have replaced those of decode
        drafting = replace(drafting, **asdict(proposer.shape), children=proposer.children)
    prompts = [
        Prompt(row["id"], row["category"], data.encode_prompt(loaded.tokenizer, row["messages"]))
        for row in reading.spread(reading.load_prompts(chosen.prompts), chosen.limit)
    ]
    console.print(f"{loaded.checkpoint or chosen.proposer} on {loaded.target.name}; tau: {TAU}", highlight=False)
    batch = chosen.batch
    if batch is None:
        runner = Runner(drafting.compile)
        decoder = drafting.decoder(loaded.target, proposer, sampling=samplings[0], stop=loaded.stop, runner=runner)

        def rate(tokens: list[list[int]]) -> float:
            found = decoder.generate(tokens, min(32, chosen.max_new_tokens))
            return sum(map(len, found.tokens)) / (found.prefill_seconds + found.seconds)

        batch = fastest_batch(rate, [prompt.tokens for prompt in prompts])
        console.print(
            f"decoding {batch} prompts at once, which is fastest here; latency figures are those of the batch",
            highlight=False,
        )
    columns = []
    for sampling in samplings:
        rows = measure(
            loaded.target,
            proposer,
            drafting,
            prompts,
            replayed=proposer.drafter if isinstance(proposer, HeadProposer) else None,
            sampling=sampling,
            max_new_tokens=chosen.max_new_tokens,
            stop=loaded.stop,
            seed=chosen.seed,
            batch=batch,
            progress=lambda items, t=sampling.temperature: track(
                items, description=f"temperature {t:g}", console=console, transient=True
            ),
        )
        columns.append(
            summarise_by_category(
                rows,
                depth=proposer.depth,
                temperature=sampling.temperature,
                adapted=loaded.target.adapted,
                lossy=drafting.rule in rules.LOSSY,
            )
        )
        display.validation(console, columns[-1], loaded.what)
        console.print(by_category(columns[-1]))
    settings = {
        **asdict(chosen),
        "batch": batch,
        "drafting": asdict(drafting),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "device": str(loaded.target.device),
        "torch": torch.__version__,
    }
    path = loaded.checkpoint and loaded.checkpoint / serving.SERVED
    served = (
        checkpoint.read_json(path) if path and path.exists() else {}
    )  # what engines made of it: scripts/check_engines.py
    for engine, found in served.items():
        console.print(
            f"{engine}: tau {found['served_tau']:.3f}, here {found['tau']:.3f} (chain of {found['num_drafts']}, "
            f"{found['num_prompts']} prompts, {found['dtype']}, temperature 0)",
            highlight=False,
        )
    document = {
        **columns[0].to_json(),
        "definition_of_tau": TAU,
        "served": served,
        "settings": settings,
        "temperatures": [column.to_json() for column in columns],
    }
    checkpoint.write_text(Path(chosen.out), json.dumps(document, indent=2) + "\n")
    console.print(f"written: {chosen.out}", highlight=False)


def by_category(column: Report) -> rich.table.Table:
    table = rich.table.Table(title=f"by category, temperature {column.temperature:g}", title_justify="left")
    for name in ("category", "prompts", "tau", "95 %", "speedup", "95 %"):
        table.add_column(name, justify="left" if name == "category" else "right")
    for name, part in column.by_category.items():
        table.add_row(
            name,
            str(part.num_prompts),
            f"{part.tau:.2f}",
            "{:.2f} .. {:.2f}".format(*part.tau_ci),
            f"{part.speedup:.2f}",
            "{:.2f} .. {:.2f}".format(*part.speedup_ci),
        )
    return table


if __name__ == "__main__":
    run(main)

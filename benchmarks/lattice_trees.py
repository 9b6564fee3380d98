"""Trees that a block drafter's dependence scores against trees of its bare marginals and a chain, at equal nodes.

    python -m benchmarks.lattice_trees checkpoint=checkpoints/dflash2 nodes=24,48 temperatures=0,1 limit=24

The marginals are the same drafter without its dependence (DFlash 2 without its selector): each draft has the distribution of its own
position. All decode the same prompts, round by round in turn. Writes OUT.json, and OUT.md with a table. Intervals are of 95 % over
prompts, of the same prompts for a tree less the one of marginals and for its tokens/s over those of marginals.
"""

import copy
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import common
from specdec.core import files
from specdec.core.sampling import Sampling
from specdec.decoding.drafting import Drafting
from specdec.heads.base import Drafter
from specdec.heads.dflash import BlockDrafter
from specdec.measuring import report as figures
from specdec.measuring.measure import MeasureSettings, Method, PromptResult, measure
from train import progress
from train.data import rows as data


@dataclass(frozen=True)
class LatticeTreesOptions:
    checkpoint: str  # of a block drafter with a dependence
    target_name: str | None = None
    dtype: str = "bfloat16"
    device: str | None = None  # null: a GPU if there is one
    prompts: str = common.HELDOUT
    limit: int | None = 24
    max_new_tokens: int = 128
    nodes: str = "24,48"
    width: int = 16  # children of a node, at most
    depth: int | None = None  # null: as many as the drafter has
    temperatures: str = "0,1"
    rule: str = "token"  # above temperature 0
    seed: int = 0
    out: str = "results/data/lattice-trees"


def without_dependence(drafter: Drafter) -> BlockDrafter:
    """The same weights, with drafts that do not depend on each other. Raises ValueError for a head without a dependence."""
    if not isinstance(drafter, BlockDrafter) or drafter.dependence is None:
        raise ValueError(
            "checkpoint= must be a block drafter whose drafts depend on each other, such as dspark or dflash2."
        )
    bare = copy.copy(drafter)
    bare._modules = {name: part for name, part in drafter._modules.items() if name != "dependence"}
    bare.dependence, bare.has_candidates, bare.parallel = None, False, True
    return bare


def make_methods(drafter: Drafter, options: LatticeTreesOptions) -> list[Method]:
    """The chain first, then for each number of nodes the tree of marginals and that of the dependence"""
    bare, deepest = without_dependence(drafter), drafter.depth or 1
    depth = min(options.depth or deepest, deepest)
    drafting = Drafting(depth=depth, rule=options.rule)
    methods = [Method("chain", drafter.target, drafting.proposer(drafter), drafting)]
    for nodes in common.read_numbers("nodes", options.nodes, depth):
        drafting = Drafting(depth=depth, width=options.width, nodes=nodes, rule=options.rule)
        for kind, head in (("marginals", bare), ("dependence", drafter)):
            methods.append(Method(f"{kind}, {nodes} nodes", head.target, drafting.proposer(head), drafting))
    return methods


def speed_ratio(pairs: list[tuple[PromptResult, PromptResult]]) -> float:
    one, other = (figures.rate([pair[place] for pair in pairs], "drafted") for place in range(2))
    return one / other


def tabulate(found: dict[str, list[PromptResult]], temperature: float, seed: int) -> list[dict]:
    """A row for each method. A tree is compared with the one of marginals, and that one with the chain."""
    rows = []
    for name, results in found.items():
        row = {"temperature": temperature, "method": name, "tau": figures.tau(results)}
        row["tokens/s"], row["plain tokens/s"] = (figures.rate(results, kind) for kind in ("drafted", "plain"))
        row["answers as plain"] = (
            sum(result.first_difference is None for result in results) if not temperature else None
        )
        if name != "chain":
            other = name.replace("dependence", "marginals") if name.startswith("dependence") else "chain"
            row["minus"] = other
            row["tau difference"], (low, high) = figures.tau_difference(results, found[other], seed=seed)
            row["tau interval"] = f"{low:+.3f} to {high:+.3f}"
            pairs = list(zip(results, found[other], strict=True))
            row["speed ratio"] = speed_ratio(pairs)
            row["speed interval"] = "{:.3f} to {:.3f}".format(*figures.interval(pairs, speed_ratio, seed))
        rows.append(row)
    return rows


def main(arguments: list[str]) -> None:
    options = common.read_options(LatticeTreesOptions, __doc__, arguments)
    subject = common.load_subject(
        options.checkpoint, name=options.target_name, dtype=options.dtype, device=options.device
    )
    (drafter,) = subject.heads.values()
    methods = make_methods(drafter, options)
    prompts = data.load_prompts(options.prompts, subject.tokenizer, limit=options.limit)
    rows: list[dict] = []
    for temperature in map(float, common.split(options.temperatures)):
        settings = MeasureSettings(Sampling(temperature), subject.stop, options.max_new_tokens, options.seed)
        found: dict[str, list[PromptResult]] = {method.name: [] for method in methods}
        track = lambda groups, temperature=temperature: progress.track(
            groups, f"temperature {temperature:g}", unit="prompts"
        )
        groups = measure(methods, prompts, settings, source=options.prompts, progress=track)
        for name, result in (pair for group in groups for each in group for pair in each.items()):
            found[name].append(result)
        rows += tabulate(found, temperature, options.seed)
        document = {"options": asdict(options), "num_prompts": len(prompts), "tau": figures.TAU, "rows": rows}
        files.write_text(Path(f"{options.out}.json"), json.dumps(document, indent=1) + "\n")
        files.write_text(Path(f"{options.out}.md"), common.format_rows(rows) + "\n")
    print(common.format_rows(rows))


if __name__ == "__main__":
    common.run(main)

"""What proposer=auto measured, expected and chose, as a table and a sentence (docs/auto.md)."""

import rich.box
import rich.console
import rich.table

from specdec.proposers.auto import Auto


def explain(auto: Auto, rows: int, seconds: float) -> dict:
    """Figures of what auto knows and did, for JSON. rows: of the batch; seconds: of all its rounds"""
    assert auto.costs is not None
    account, rounds = auto.account, max(1, auto.account.rounds)
    curve = auto.costs.curve(rows)
    return {
        "pass_ms": {num: 1e3 * curve[num] for num in sorted(curve)},  # of the target, by nodes
        "head_ms": {name: 1e3 * auto.times.seconds(name, rows) for name in ("absorb", "step")},
        "by_nodes": {num: account.sizes[num] for num in sorted(account.sizes)},
        "rounds": account.rounds,
        "head_rounds": account.head,
        "trials": account.trials,
        "checks": account.checks,
        "drafts_by_source": dict(account.sources),
        "tokens_per_round": {"expected": account.expected / rounds, "measured": account.tokens / rounds},
        "ms_per_round": {"expected": 1e3 * account.seconds / rounds, "measured": 1e3 * seconds / rounds},
    }


def show(console: rich.console.Console, found: dict) -> None:
    """Prints the figures of `explain`."""
    passes, rounds = found["pass_ms"], max(1, found["rounds"])
    first = next(iter(passes.values()))
    table = rich.table.Table(box=rich.box.SIMPLE)
    for name in ("nodes", "ms a pass", "over one node", "rounds", "share of rounds"):
        table.add_column(name, justify="right", no_wrap=True)
    for num in sorted({*passes, *found["by_nodes"]}):
        measured = [f"{passes[num]:.1f}", f"{passes[num] / first:.2f}"] if num in passes else ["", ""]
        times = found["by_nodes"].get(num, 0)
        table.add_row(str(num), *measured, str(times), f"{times / rounds:.0%}")
    head = ", ".join(f"{name} {spent:.2f} ms" for name, spent in found["head_ms"].items())
    console.print(f"Costs of the target's passes, and choices, by the nodes of a row's tree; head: {head}", table)
    tokens, ms = found["tokens_per_round"], found["ms_per_round"]
    drafts = ", ".join(f"{source} {num}" for source, num in found["drafts_by_source"].items()) or "none"
    console.print(
        f"The head drafted in {found['head_rounds']} of {found['rounds']} rounds, {found['trials']} of them trials; "
        f"{found['checks']} rounds drafted nothing, to measure that. Verified drafts: {drafts}. "
        f"A round: {tokens['expected']:.2f} tokens expected, {tokens['measured']:.2f} measured; {ms['expected']:.1f} ms expected, "
        f"{ms['measured']:.1f} measured."
    )

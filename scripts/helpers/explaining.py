"""What proposer=auto measured, expected and chose, as tables (docs/auto.md)."""

from collections import defaultdict

import rich.box
import rich.console
import rich.table

from specdec.proposers.auto import Auto
from specdec.proposers.candidates import Acceptance, Kind

GROUPS = (0.1, 0.3, 0.5, 0.7, 0.9)  # bounds of the groups of estimates


class RecordedAcceptance(Acceptance):
    """Acceptance probabilities that keep every case from which they learn: the kind, the probability before, and the outcome."""

    def __init__(self) -> None:
        super().__init__()
        self.cases: list[tuple[Kind, float, bool]] = []

    def learn(self, kind: Kind, accepted: bool) -> None:
        self.cases.append((kind, self.probability(kind), accepted))
        super().learn(kind, accepted)


class ExplainedAuto(Auto):
    """Auto that records the outcome of every candidate."""

    @classmethod
    def of(cls, auto: Auto) -> "ExplainedAuto":
        """The same members and costs."""
        return cls(auto.target, members=auto.members, costs=auto.costs)

    def forget(self):
        super().forget()
        self.acceptance: RecordedAcceptance = RecordedAcceptance()


def explain(auto: ExplainedAuto, rows: int, seconds: float) -> dict:
    """Figures of what auto knows and did, for JSON. rows: of the batch; seconds: of all its rounds"""
    assert auto.costs is not None
    account, rounds = auto.account, max(1, auto.account.rounds)
    curve = auto.costs.curve(rows)
    return {
        "pass_ms": {num: 1e3 * curve[num] for num in sorted(curve)},  # of the target, by nodes
        "head_ms": {name: 1e3 * auto.times.seconds(name, rows) for name in ("absorb", "step")},
        "acceptance": calibrate(auto.acceptance),
        "by_nodes": {num: account.sizes[num] for num in sorted(account.sizes)},
        "rounds": account.rounds,
        "head_rounds": account.head,
        "trials": account.trials,
        "checks": account.checks,
        "drafts_by_source": dict(account.sources),
        "tokens_per_round": {"expected": account.expected / rounds, "measured": account.tokens / rounds},
        "ms_per_round": {"expected": 1e3 * account.seconds / rounds, "measured": 1e3 * seconds / rounds},
    }


def calibrate(recorded: RecordedAcceptance) -> list[dict]:
    """For drafts with an accepted parent, verified or not, by source and estimate: the mean probabilities by the drafter and by
    auto before it saw the text, and the acceptance rate."""
    groups = defaultdict(list)
    for case in recorded.cases:
        groups[case[0].source, sum(case[0].estimate >= bound for bound in GROUPS)].append(case)
    edges = (0.0, *GROUPS, 1.0)
    return [
        {
            "source": source,
            "low": edges[level],
            "high": edges[level + 1],
            "num": len(cases),
            "drafter": sum(kind.estimate for kind, _, _ in cases) / len(cases),
            "auto": sum(probability for _, probability, _ in cases) / len(cases),
            "accepted": sum(accepted for _, _, accepted in cases) / len(cases),
        }
        for (source, level), cases in sorted(groups.items())
    ]


def show(console: rich.console.Console, found: dict) -> None:
    """Prints the tables. found: by `explain`"""
    passes, rounds = found["pass_ms"], max(1, found["rounds"])
    first = next(iter(passes.values()))
    head = ", ".join(f"{name} {spent:.2f} ms" for name, spent in found["head_ms"].items())
    costs = make_table("nodes", "ms a pass", "over one node", "rounds", "share of rounds")
    for num in sorted({*passes, *found["by_nodes"]}):
        measured = [f"{passes[num]:.1f}", f"{passes[num] / first:.2f}"] if num in passes else ["", ""]
        times = found["by_nodes"].get(num, 0)
        costs.add_row(str(num), *measured, str(times), f"{times / rounds:.0%}")
    console.print(
        "Costs of the target's passes and choices, by the nodes of a row's tree with its root; head: " + head, costs
    )
    acceptance = make_table("source", "estimates", "drafts", "by the drafter", "by auto", "accepted")
    for each in found["acceptance"]:
        between = f"{each['low']:.1f} .. {each['high']:.1f}"
        means = [f"{each[name]:.2f}" for name in ("drafter", "auto", "accepted")]
        acceptance.add_row(each["source"], between, str(each["num"]), *means)
    console.print("Drafts with an accepted parent: mean probabilities, and the acceptance rate", acceptance)
    tokens, ms = found["tokens_per_round"], found["ms_per_round"]
    drafts = ", ".join(f"{source} {num}" for source, num in found["drafts_by_source"].items()) or "none"
    console.print(
        f"The head drafted in {found['head_rounds']} of {found['rounds']} rounds, {found['trials']} of them trials; "
        f"{found['checks']} rounds drafted nothing, to measure that. Verified drafts: {drafts}. "
        f"A round: {tokens['expected']:.2f} tokens expected, {tokens['measured']:.2f} measured; {ms['expected']:.1f} ms expected, "
        f"{ms['measured']:.1f} measured."
    )


def make_table(first: str, *others: str) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table

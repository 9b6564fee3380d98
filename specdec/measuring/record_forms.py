"""Records in the forms of others: evaluation results of a Hub repository, and specdec_bench's acceptance rates."""

import itertools
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from specdec.core import files, row_files
from specdec.measuring import records
from specdec.measuring.record import RECORD_FILE, Record
from specdec.measuring.report import TAU
from specdec.measuring.servers import referee
from specdec.measuring.servers.referee import ServedBatch

EVAL_RESULTS = Path(".eval_results", "specdec.yaml")  # in the repository of a model
TASK = "acceptance_length"  # a task of its own: the value is no score of the data set
RATES = "acceptance_rate.json"
ROWS = "rows.jsonl"  # beside RECORD_FILE: every batch that was asked
COMMIT = re.compile(r"[0-9a-f]{40}")


def write_eval_results(contents: Mapping[str, Record], out: Path, *, dataset: str, source: str | None) -> Path:
    """Writes EVAL_RESULTS into a folder, an entry for each record that has tau, and returns its path.

    dataset: user/name of the questions on the Hub; source: URL of the records
    Raises ValueError without any tau, and for several sets of questions.
    """
    suites = sorted({record.protocol.suite for record in contents.values()})
    drafting = [record for record in contents.values() if record.drafter is not None]
    entries = [make_entry(record, dataset, source) for record in drafting if record.loads[0].tau]
    if not entries:
        raise ValueError("None of these records has tau: dataset= wants a record of a server that drafts.")
    if len(suites) > 1:
        raise ValueError(f"dataset={dataset} is one set of questions, and the records are of {', '.join(suites)}.")
    path = out / EVAL_RESULTS
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, yaml.safe_dump(entries, sort_keys=False, allow_unicode=True))
    return path


def make_entry(record: Record, dataset: str, source: str | None) -> dict[str, Any]:
    """The entry of a record's first load, as huggingface_hub.EvalResultEntry writes it."""
    tau, protocol = record.loads[0].tau, record.protocol
    assert tau is not None
    entry: dict[str, Any] = {"dataset": {"id": dataset, "task_id": TASK}, "value": tau[0], "date": record.when}
    if protocol.revision and COMMIT.fullmatch(protocol.revision):
        entry["dataset"]["revision"] = protocol.revision
    if source:
        entry["source"] = {"url": source}
    return entry | {"notes": describe_record(record)}


def describe_record(record: Record) -> str:
    """A sentence with what the tau of a record's first load is, and all that it depends on."""
    load, single = record.loads[0], {"": record}
    clauses = [
        f"tau {records.show_figure(load.tau)}: {TAU}",
        f"95 % interval over {load.prompts} questions of {record.protocol.suite}, {load.at_once} at once",
        f"{records.name_drafter(record, single)} for {record.target.name} in {records.name_engine(record)}",
        records.describe_common(single),
    ]
    return "; ".join(clauses)


def write_rates(contents: Mapping[str, Record], folder: Path, out: Path) -> Path:
    """Writes RATES into a folder, an entry for each record with drafts, and returns its path.

    contents: records by the names of their files in `folder`
    """
    rates = [make_rates(record, folder / name) for name, record in contents.items() if record.drafter is not None]
    out.mkdir(parents=True, exist_ok=True)
    files.write_text(out / RATES, json.dumps(rates, indent=4) + "\n")
    return out / RATES


def make_rates(record: Record, path: Path) -> dict[str, Any]:
    """Figures of a record's first load by the names of specdec_bench. Keys are lengths: accepted drafts of a round + 1.

    path: file of the record. With its ROWS beside it, there are also figures of requests and counts of rounds.
    """
    shares = [1.0, *itertools.takewhile(bool, record.loads[0].by_position)]
    rates: dict[str, Any] = {"Notes": describe_record(record)}
    rows = path.with_name(ROWS)
    if path.name == RECORD_FILE and rows.exists():
        rates |= count_requests(read_batches(rows, record.loads[0].at_once))
    rates["Category_AL"] = {name: group.tau[0] for name, group in record.by.category.items() if group.tau}
    if len(shares) > 1:
        pairs = zip(shares, [1.0, *shares])  # of a length, and of the one before
        rates["Conditional_Acceptance_Rate"] = _number([share / previous for share, previous in pairs])
        rates["Joint_Acceptance_Rate"] = _number(shares)
    return rates


def _number(values: Sequence[float]) -> dict[str, float]:
    """The values by length, from 1."""
    return {str(length): value for length, value in enumerate(values, start=1)}


def read_batches(path: Path, at_once: int) -> list[tuple[int, ServedBatch]]:
    """The turn, from 0, and the answers of each drafted batch in ROWS. Raises ValueError for rows of another form."""
    batches = []
    for number, row in row_files.read_own_lines(path):
        try:
            if row is not None and row["requests"] == at_once and "check" not in row:
                batches.append((row["wave"], ServedBatch.from_row(row["drafted"])))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: no row of specdec judge ({error!r}). Move the file away."
            ) from None
    return batches


def count_requests(batches: Sequence[tuple[int, ServedBatch]]) -> dict[str, Any]:
    """Lengths of requests, their mean, and numbers of rounds by length; empty where the engine does not say enough."""
    served = [batch for _, batch in batches]
    counts = referee.count_answers(served)
    if not counts or not all(count.num_rounds for count in counts):
        return {}
    lengths: dict[str, dict[str, float]] = {}
    for (turn, prompt), count in zip(name_answers(batches), counts, strict=True):
        lengths.setdefault(prompt, {})[str(turn)] = count.num_emitted / count.num_rounds
    figures: dict[str, Any] = {"Request_AL": lengths}
    figures["Average_AL"] = statistics.fmean(length for turns in lengths.values() for length in turns.values())
    reaching = [sum(count.num_rounds for count in counts), *referee.count_accepted_positions(served, True)]
    if len(reaching) > 1:
        rounds = [round(least - further) for least, further in itertools.pairwise([*reaching, 0])]
        figures["Acceptance_Length_Histogram"] = _number(rounds)
    return figures


def name_answers(batches: Sequence[tuple[int, ServedBatch]]) -> list[tuple[int, str]]:
    """The turn and the question of each answer."""
    return [
        (turn, answer.prompt.removesuffix(f" turn {turn + 1}")) for turn, batch in batches for answer in batch.answers
    ]

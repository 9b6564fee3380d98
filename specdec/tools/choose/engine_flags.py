"""Lines that start engines with a head's best chain at each load."""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from specdec.export.engines import ExportForm, make_form
from specdec.heads.base import Drafter
from specdec.measuring.runs import ComparedHead
from specdec.tools.choose import choice
from specdec.tools.choose.choice import ShapeAcceptance
from specdec.tools.choose.round_costs import RoundCosts
from specdec.tools.choose.task import MAX_DRAFTS

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "gguf": "llama.cpp"}  # by format of export
SCHEDULE = "num_speculative_tokens_per_batch_size"
SCHEDULE_NOTE = (
    f"{SCHEDULE}: at 0 drafts vLLM still runs the drafter (7 to 22 % of a plain round where others measured it), its "
    "V1 runner then has piecewise CUDA graphs only, and with data parallelism it drops the schedule"
)
Step = tuple[int, int, int]  # first load, last load, drafts


def list_flags(
    runs: Sequence[ComparedHead],
    target: str,
    acceptance: list[ShapeAcceptance],
    costs: RoundCosts,
    *,
    loads: list[int],
    context: float,
    tokens: float,
) -> Iterator[dict[str, Any]]:
    """The lines that serve each head's best chain at each load in each engine, or the reason why there is none.

    Yields {drafter, engine, loads, line} or {drafter, engine, reason}. A block counts with all its drafts, as engines
    draft it whole.
    """
    for run, name in itertools.product(runs, ENGINES):
        entry = {"drafter": run.name, "engine": ENGINES[name]}
        assert isinstance(run.drafter, Drafter)
        try:
            form = make_form(run.drafter, name)
            steps = find_steps(run.name, form, acceptance, costs, loads=loads, context=context, tokens=tokens)
        except ValueError as error:
            yield entry | {"reason": str(error)}
            continue
        yield from [entry | line for line in make_lines(form, name, target, steps)]


def find_steps(
    drafter: str,
    form: ExportForm,
    acceptance: list[ShapeAcceptance],
    costs: RoundCosts,
    *,
    loads: list[int],
    context: float,
    tokens: float,
) -> list[Step]:
    """The best number of drafts by load. Raises ValueError where plain decoding is faster, and for too large blocks."""
    chains = [each for each in acceptance if each.costs == drafter]
    if form.whole_block:
        chains = [each for each in chains if each.drafts == form.limit_drafts(1)]
    if not chains:
        raise ValueError(f"its block has more than {MAX_DRAFTS} drafts")
    table = choice.choose_drafts(chains, costs, loads=loads, contexts=[context], tokens=tokens)
    steps = choice.find_schedule(table, drafter)
    if not any(num for *_, num in steps):
        raise ValueError("plain decoding is faster at every load")
    return steps


def make_lines(form: ExportForm, name: str, target: str, steps: list[Step]) -> list[dict[str, Any]]:
    """{loads, line} of each step with drafts; one line with a schedule where vLLM can change its drafts by load.

    steps: see `find_steps`
    """
    drafting = [step for step in steps if step[2]]
    max_drafts = max(num for *_, num in drafting)
    scheduled = name == "vllm" and len(steps) > 1 and not form.whole_block and form.settings["method"] != "medusa"
    if scheduled:
        drafting = [(1, steps[-1][1], max_drafts)]
    loads_of_line: dict[str, list[int]] = {}
    for first, last, num in drafting:
        num = max_drafts if name == "vllm" else num
        (line, *_), out = form.launch_lines(target=target, out=f"EXPORTED_{name}", num=num).values(), f"EXPORTED_{name}"
        settings = form.engine_settings(out, num)
        if scheduled:
            assert json.dumps(settings) in line
            line = line.replace(json.dumps(settings), json.dumps(settings | {SCHEDULE: steps}))
        loads_of_line.setdefault(line.splitlines()[-1], [first, last])[1] = last
    return [{"loads": loads, "line": line} for line, loads in loads_of_line.items()]

"""evaluate choose=true: which drafter, and how many drafts, pay at which load, before anything is served (docs/choosing.md)."""

from helpers import comparing, decoding, loading, proposers, serving
from helpers.loading import Run
from helpers.options import split

import contextlib
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import rich.table
import yaml

from specdec.core import files
from specdec.core.generation import reached
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.export.engines import make_form
from specdec.heads.base import Drafter
from specdec.measuring import choice, round_costs
from specdec.measuring.choice import Acceptance
from specdec.measuring.measure import MeasureSettings, Method, Prompt, measure
from specdec.measuring.report import PromptCounts, by_depth
from specdec.measuring.round_costs import CostPoint, DataSheet, RoundCosts
from specdec.proposers import costs as pass_costs
from specdec.proposers.base import Proposer
from train import progress, validate
from train.answers.answering import HeldoutAnswers
from train.answers.resumable import digest, resumable
from train.data import reading
from train.data.packing import warn_of_writers
from train.distributed import Group
from train.pages.charts import ChartCurve, lines
from train.pages.page import Section, Table, render_page, write_figure
from train.validate import Written

MOST_DRAFTS = 16
TIMED = (1, 2, 4, 8, 16)  # drafts of the chains whose rounds are timed
HOPELESS = (
    1.3  # times a drafter's largest tau: rounds that take more than so many plain ones cannot pay at larger loads
)
FEW = 8  # requests to a server at a load, at least, and prompts that are decoded at once


@dataclass(frozen=True)
class Shaped:
    """A drafter in one shape. make: a proposer of its own; chain: its drafts, 0 for what is no chain of a head"""

    drafter: str
    shape: str
    make: Callable[[], Proposer]
    drafting: Drafting
    chain: int = 0

    @property
    def costs(self) -> str:
        """The name of its points in the table of costs, which a drafter's chains share."""
        return self.drafter if self.chain or not self.shape else f"{self.drafter}, {self.shape}"


@dataclass(frozen=True)
class Case:
    """What is chosen from, for what. chosen: Evaluate; contexts: empty for that of the texts"""

    chosen: Any
    out: Path
    console: progress.Results
    loads: list[int]
    contexts: list[int]
    sampling: Sampling
    runs: list[Run]
    opened: loading.Opened


def choose(chosen: Any, out: Path, console: progress.Results) -> None:
    """chosen: Evaluate; out: the folder"""
    loads, contexts = read_numbers("loads", chosen.loads), read_numbers("contexts", chosen.contexts)
    sampling = chosen.decode.sampling()
    check_costs(chosen)
    for folder in split(chosen.checkpoint):
        if loading.head_class(folder).adapts_target:
            raise ValueError(f"{folder} adapts its target, so its plain decoding is another: leave choose=true out.")
    runs = loading.load_runs(chosen.checkpoint, chosen.target)
    opened = loading.shared_target(runs, chosen.target, head=chosen.settings.get("checkpoint"))
    case = Case(chosen, out, console, loads, contexts, sampling, runs, opened)
    shapes = list_shapes(case)
    out.mkdir(parents=True, exist_ok=True)
    prompts, texts = read_texts(case)
    acceptance = find_acceptance(case, shapes, prompts, texts)
    tokens = statistics.mean(len(text.answer) for text in texts)
    usual = statistics.mean(len(text.prompt) + len(text.answer) / 2 for text in texts)
    where = [float(length) for length in contexts] or [usual]
    costs = find_costs(case, shapes, acceptance, texts, where)
    crossings = partial(choice.find_crossings, acceptance, costs, most=loads[-1], tokens=tokens)
    given = ("checkpoint", "proposers", "prompts", "answers", "max_new_tokens", "engine", "seed")
    document = {
        "target": opened.target.name,
        "fingerprint": opened.target.fingerprint(),
        "settings": {name: getattr(chosen, name) for name in given} | asdict(sampling) | loading.machine(opened.target),
        "answers": len(texts),
        "tokens": tokens,
        "contexts": where,
        "loads": choice.choose_drafts(acceptance, costs, loads=loads, contexts=where, tokens=tokens),
        "plain_from": {f"{length:.0f}": crossings(context=length) for length in where},
        "flags": list(list_flags(case, acceptance, costs, where[0], tokens)),
        "acceptance": [asdict(each) for each in acceptance],
        "costs": costs.to_json(),
    }
    write(case, document)


def read_numbers(name: str, text: str) -> list[int]:
    """A comma list of whole numbers, in order."""
    if not all(each.isdecimal() and 0 < int(each) < 2**20 for each in split(text)):
        raise ValueError(f"{name}={text}: give numbers of 1 or more, such as 1,4,16.")
    return sorted({int(each) for each in split(text)})


# Acceptance


def list_shapes(case: Case) -> list[Shaped]:
    """Every head's chains and trees, no deeper than its steps, and every proposer. Raises ValueError where there is nothing."""
    chosen, found = case.chosen, list[Shaped]()
    for run in case.runs:
        limit = run.drafter.depth or MOST_DRAFTS
        for shape in decoding.read_shapes(",".join(map(str, range(1, min(limit, MOST_DRAFTS) + 1))), chosen.trees):
            if run.drafter.depth and shape.depth > run.drafter.depth:
                raise ValueError(f"trees={chosen.trees}: {run.name} takes {limit} steps, so no tree may be deeper.")
            drafting = chosen.decode.drafting(shape)
            label = str(shape) if shape.chain else f"tree of {shape.depth}x{shape.width}x{shape.nodes}"
            make = partial(drafting.proposer, run.drafter)
            found.append(Shaped(run.name, label, make, drafting, shape.depth if shape.chain else 0))
    drafting, folders = chosen.decode.drafting(), {run.name: str(run.folder) for run in case.runs}
    if {proposers.AUTO, proposers.HEAD} & set(split(chosen.proposers)):
        raise ValueError(
            "auto chooses in every round by itself, and head is checkpoint=: leave them out of proposers=."
        )
    given: dict[str, Any] = {"settings": chosen.settings, "drafting": drafting, "checkpoints": folders}
    for name, config in proposers.configure_all(chosen.proposers, **given).items():
        make = partial(proposers.make, config, case.opened.target)
        make()  # raises ValueError now
        found.append(Shaped(name, "", make, drafting))
    if not found:
        raise ValueError("There is nothing to choose from: give checkpoint=DIR,DIR, proposers=suffix,ngram, or both.")
    return found


def read_texts(case: Case) -> tuple[list[Prompt], list[Written]]:
    """The prompts with the target's own answers, which are read from answers=, or written now and kept in `out`."""
    chosen, opened, temperature = case.chosen, case.opened, case.sampling.temperature
    if chosen.answers is not None:
        rows = reading.load_conversations(chosen.answers, split=chosen.split)
        rows = reading.spread([row for row in rows if row.get("temperature", temperature) == temperature], chosen.limit)
        warn_of_writers([row.get("target_fingerprint") for row in rows], opened.target.fingerprint())
        with reading.at(chosen.answers):
            texts = [validate.encode_written(opened.tokenizer, row) for row in rows]
        texts = [Written(text.prompt, text.answer[: chosen.max_new_tokens], temperature) for text in texts]
        prompts = [Prompt(str(number), "", text.prompt) for number, text in enumerate(texts)]
    else:
        asked, stop = comparing.read_questions(chosen), set() if chosen.ignore_stop else opened.stop
        prompts, folder = comparing.first_prompts(asked, opened, chosen.max_new_tokens), case.out / "answers"
        kept = HeldoutAnswers(opened.target, case.sampling, chosen.max_new_tokens, stop, chosen.seed, folder)
        answers, _ = kept.get(prompts, Group(0, 1))
        texts = [Written(prompt.tokens, answer, temperature) for prompt, answer in zip(prompts, answers, strict=True)]
    pairs = [(prompt, text) for prompt, text in zip(prompts, texts) if len(text.answer) > 1]
    if len(pairs) < 2:
        raise ValueError(
            f"{chosen.answers or chosen.prompts or loading.PROMPTS} gives {len(pairs)} answers of two tokens or more at decode.temperature="
            f"{temperature:g}, and an interval over prompts needs two."
        )
    return [prompt for prompt, _ in pairs], [text for _, text in pairs]


def find_acceptance(case: Case, shapes: list[Shaped], prompts: list[Prompt], texts: list[Written]) -> list[Acceptance]:
    """Of all chains by one replay of each head; of what replay does not cover by decoding."""
    found, decoded = list[Acceptance](), [each for each in shapes if not each.chain]
    for run in case.runs:
        own, drafter = [each for each in shapes if each.chain and each.drafter == run.name], run.drafter
        if case.chosen.engine:
            server = serving.find_server(case.chosen.engine, case.chosen, case.console)
            drafter = serving.draft_as_engine(drafter, server.kind)
        if isinstance(drafter, Drafter) and own[0].drafting.replayable(drafter, case.sampling):
            judged = validate.replay_texts(drafter, texts, depth=own[-1].chain, what=f"replay of {run.name}")
            found += choice.accept_chains(run.name, [each.accept for each in judged], seed=case.chosen.seed)
        else:
            decoded += [each for each in own if each.chain in TIMED or each is own[-1]]
    return found + (decode_shapes(case, decoded, prompts) if decoded else [])


def decode_shapes(case: Case, shapes: list[Shaped], prompts: list[Prompt]) -> list[Acceptance]:
    chosen, stop = case.chosen, set() if case.chosen.ignore_stop else case.opened.stop
    named = {f"{each.drafter} {each.shape}": each for each in shapes}
    methods = [Method(name, case.opened.target, each.make(), each.drafting) for name, each in named.items()]
    settings = MeasureSettings(case.sampling, stop, chosen.max_new_tokens, chosen.seed, min(FEW, len(prompts)))
    track = partial(progress.track, what="decoding", unit="prompts", size=len)
    results = list(
        itertools.chain(*measure(methods, prompts, settings, source=chosen.prompts or loading.PROMPTS, progress=track))
    )
    found = []
    for method in methods:
        each, own = named[method.name], [result[method.name] for result in results if result[method.name].num_rounds]
        counts = [PromptCounts(result.num_rounds, result.num_emitted) for result in own]
        accepted = [num for result in own for num in result.drafted.accepted[0]]
        drafts = each.chain or statistics.mean(num for result in own for num in result.drafted.drafted)
        survival = [num / len(accepted) for num in reached(accepted, method.proposer.depth)]
        acceptance = Acceptance(each.drafter, each.shape, each.costs, drafts, 0.0, [], survival)
        found.append(choice.with_tau(acceptance, counts, seed=chosen.seed))
    return found


# What rounds cost


def check_costs(chosen: Any) -> None:
    """Raises ValueError for costs= that are nothing which is known, before anything is loaded."""
    machines = [path.stem for path in sorted((loading.CONF / "machine").glob("*.yaml")) if path.stem != "here"]
    if chosen.costs not in machines and not all(map(os.path.isfile, split(chosen.costs))):
        known = f"a machine of conf/machine ({', '.join(machines)})"
        raise ValueError(f"costs={chosen.costs} is neither {known} nor a comma list of files that exist.")
    if chosen.engine and (chosen.costs or len(split(chosen.checkpoint)) != 1):
        raise ValueError(
            "engine= gives the costs of one head: give that checkpoint=DIR, the one it serves, and no costs=."
        )


def find_costs(
    case: Case, shapes: list[Shaped], acceptance: list[Acceptance], texts: list[Written], contexts: list[float]
) -> RoundCosts:
    """From a server, files, a data sheet, or timed here."""
    given = split(case.chosen.costs)
    if case.chosen.engine:
        return serve_costs(case)
    if given and all(map(os.path.isfile, given)):
        return round_costs.read_costs(given, case.loads, MOST_DRAFTS)
    if given:
        heads = {run.name: run.drafter for run in case.runs if isinstance(run.drafter, Drafter)}
        if not {each.costs for each in acceptance} <= set(heads):
            raise ValueError(f"costs={given[0]} is for chains of trained heads: leave proposers= and trees= out.")
        about = yaml.safe_load((loading.CONF / "machine" / f"{given[0]}.yaml").read_text())["machine"]
        sheet = DataSheet(given[0], 1e12 * about["flops"], 1e9 * about["bandwidth"], 1e-6 * about.get("launch", 0))
        return round_costs.sheet_costs(sheet, case.opened.target, heads, case.loads, MOST_DRAFTS, contexts)
    points, drafts = list[CostPoint](), {(each.drafter, each.shape): each.drafts for each in acceptance}
    for name in dict.fromkeys(each.costs for each in acceptance):
        own = [each for each in shapes if each.costs == name and (each.drafter, each.shape) in drafts]
        timed = {drafts[each.drafter, each.shape]: each for each in own if each.chain in (0, *TIMED) or each is own[-1]}
        highest = max(each.tau for each in acceptance if each.costs == name)
        lengths: list[int | None] = [*case.contexts] or [None]
        for length in lengths:
            behind = [make_context(text, length) for text in texts]
            points += time_drafter(case, name, timed, behind, HOPELESS * highest)
    return RoundCosts(points, "rounds of this decoder, timed here")


def make_context(text: Written, length: int | None) -> list[int]:
    """A prompt with half of its answer, as a round has it on average before it; with a length, repeated and cut to that."""
    tokens = text.prompt + text.answer[: len(text.answer) // 2]
    return tokens if length is None else (tokens * -(-length // len(tokens)))[:length]


def time_drafter(
    case: Case, name: str, shapes: Mapping[float, Shaped], texts: list[list[int]], most: float
) -> Sequence[CostPoint]:
    """Timed now, or read from the file in which they were kept ($SPECDEC_CACHE). shapes: by their drafts; most: of `time_loads`"""
    chosen, first = case.chosen, next(iter(shapes.values()))
    common: dict[str, Any] = {"sampling": case.sampling, "stop": set(), "runner": first.drafting.runner()}
    plain = Decoder(case.opened.target, None, **common)
    drafted = lambda each: each.drafting.decoder(plain.target, each.make(), **common)
    make = lambda: {0: plain} | {num: drafted(each) for num, each in shapes.items()}
    conditions = pass_costs.describe_conditions(plain.verify, case.sampling)
    conditions |= {"checkpoint": chosen.checkpoint, "settings": chosen.settings}
    conditions |= {f"{name} {each.shape}": asdict(each.drafting) for each in shapes.values()}
    path = pass_costs.find_file(conditions).with_suffix(".rounds.json")
    known = round_costs.read_kept(path)
    track = progress.track(case.loads, f"rounds of {name}", unit="loads")
    found = round_costs.time_loads(name, make, texts, track, most=most, seed=chosen.seed, known=known)
    with contextlib.suppress(OSError):  # they are in memory, so the command goes on
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = RoundCosts([*(each for each in known if each not in found), *found], "").to_json()
        files.write_text(path, json.dumps({"conditions": conditions, **kept}, indent=1) + "\n")
    return found


def serve_costs(case: Case) -> RoundCosts:
    """From a few requests at each load to a server with drafts and to a plain one."""
    chosen, (run,) = case.chosen, case.runs
    server = serving.find_server(chosen.engine, chosen, case.console)
    tokenizer = serving.find_tokenizer(chosen, server, case.runs)
    questions = serving.Requests(comparing.read_questions(chosen), tokenizer).wave(0, {})
    plain, notes = serving.probe(chosen, server, questions[0], case.console)
    if plain is None:
        raise ValueError(" ".join(notes))
    settings = {name: getattr(chosen, name) for name in ("engine", "plain", "max_new_tokens", "seed")}
    settings |= {"decode": asdict(chosen.decode), "prompts": digest(repr(questions).encode())}
    drafted, base = [], {}
    out, advice = case.out, "Choose another out=FOLDER."
    with resumable(out / "settings.json", out / "rows.jsonl", settings, advice=advice) as results:
        for load in case.loads:
            serving.measure_missing({"drafted": server, "plain": plain}, questions[: max(FEW, load)], load, 0, results)
            turns = serving.read_pairs(results.rows, load)
            found, answers = serving.summarise(turns, chosen.seed), [each for turn, _ in turns for each in turn.answers]
            said = [each for each in (*(turn.counted for turn, _ in turns), *(each.said for each in answers)) if each]
            lengths = [len(dict(questions)[each.prompt]["prompt"]) + each.tokens / 2 for each in answers]
            about = {"tau": found["tau"] or 0.0, "drafts": max((each.longest or 0 for each in said), default=0)}
            seconds, base[load] = (1 / found[name]["tokens_per_second_of_a_user"] for name in ("drafted", "plain"))
            drafted.append({"rows": load, "seconds": seconds, "context": statistics.mean(lengths), **about})
    return round_costs.make_served(drafted, base, f"{server.model} of {server.kind}, requests at each load", run.name)


# Engines


def list_flags(
    case: Case, acceptance: list[Acceptance], costs: RoundCosts, context: float, tokens: float
) -> Iterator[dict]:
    """For each head and engine the lines that serve its best chain at each load: {drafter, engine, loads, line}"""
    for run in case.runs:
        assert isinstance(run.drafter, Drafter)
        chains = [each for each in acceptance if each.costs == run.name]
        table = choice.choose_drafts(chains, costs, loads=case.loads, contexts=[context], tokens=tokens)
        schedule = choice.find_schedule(table, run.name)
        drafting = [step for step in schedule if step[2]]
        for name in ("vllm", "sglang", "gguf") if drafting else ():
            with contextlib.suppress(ValueError):  # the engine does not take this head
                form, most = make_form(run.drafter, name), max(num for *_, num in drafting)
                for first, last, num in [(1, case.loads[-1], most)] if name == "vllm" else drafting:
                    num = form.num_drafts(num)
                    filled = form.launch_lines(target=case.opened.target.name, out=f"EXPORTED_{name}", num=num)
                    engine, line = next(iter(filled.items()))
                    settings = form.settings_for(f"EXPORTED_{name}", num)
                    if name == "vllm" and not form.whole_block and settings["method"] != "medusa":
                        more = {"num_speculative_tokens_per_batch_size": schedule}
                        line = line.replace(json.dumps(settings), json.dumps(settings | more))
                    yield {"drafter": run.name, "engine": engine, "loads": [first, last], "line": line.splitlines()[-1]}


# What is shown


def write(case: Case, document: dict) -> None:
    """Writes choice.json, table.md and page.html, and prints a table."""
    out, console = case.out, case.console
    files.write_text(out / "choice.json", json.dumps(document, indent=1) + "\n")
    table, notes = tabulate(document), list(describe(document))
    flags = ["{engine}, loads {loads[0]} to {loads[1]}: {line}".format(**each) for each in document["flags"]]
    about = (
        f"{document['target']}, temperature {case.sampling.temperature:g}, {document['answers']} answers. Costs: "
        f"{document['costs']['source']}. Intervals: 95 %, of tau over prompts and of timed seconds. *: extrapolated beyond the "
        "rows or drafts that costs are known of."
    )
    rows = [table.heads, ["---"] * len(table.heads), *table.rows]
    text = "".join(f"| {' | '.join(row)} |\n" for row in rows) + "\n" + "".join(f"- {note}\n" for note in notes)
    files.write_text(out / "table.md", f"{about}\n\n{text}" + "".join(f"\n```\n{line}\n```\n" for line in flags))
    sections = [
        Section(texts=[about]),
        Section("The choice", table=table, points=notes),
        Section("By load", charts=draw(document)),
        Section("Engines", points=flags),
    ]
    page = render_page("Which drafter, and how many drafts", data=document, sections=sections)
    files.write_text(out / "page.html", page)
    drawn = rich.table.Table(*table.heads)
    for row in table.rows:
        drawn.add_row(*row)
    console.say(about)
    console.print(drawn)
    console.say("\n".join([*notes, *flags]))
    console.print(f"written: {out}/choice.json, table.md and page.html")


def tabulate(document: dict) -> Table:
    """A row for each context and load: the best drafter and its shape, then the best shape of each drafter."""

    def cell(own: dict) -> str:
        figure = write_figure(own["speedup"], (own["low"], own["high"])) + (" *" if own["extrapolated"] else "")
        return f"{own['shape']}: {figure}" if own["shape"] else figure

    rows, names = [], list(document["loads"][0]["drafters"])
    for row in document["loads"]:
        best = ", ".join(filter(None, (row["best"], row["drafters"].get(row["best"], {}).get("shape"))))
        rows.append([str(row["load"]), f"{row['context']:.0f}", best, *(cell(row["drafters"][name]) for name in names)])
    return Table(["load", "context", "best", *names], rows)


def describe(document: dict) -> Iterator[str]:
    """From which load plain decoding is faster, and acceptance by position."""
    for context, found in document["plain_from"].items():
        for name, load in found.items():
            since = f"from load {load}" if load else f"at no load up to {document['loads'][-1]['load']}"
            yield f"behind {context} tokens plain is faster than {'everything' if name == 'all' else name} {since}"
    for name in document["loads"][0]["drafters"]:
        survival = max((each["survival"] for each in document["acceptance"] if each["drafter"] == name), key=len)
        given = [now / before if before else 0.0 for now, before in zip(survival, [1.0, *survival])]
        yield f"{name}: accepted by position {by_depth(survival)}; given the drafts before {by_depth(given)}"


def draw(document: dict) -> list:
    """Speedup and drafts of each drafter's best shape against the load, of the first context."""
    some = [row for row in document["loads"] if row["context"] == document["contexts"][0]]
    named = {"speedup": "Speedup of each drafter at its best shape", "drafts": "Drafts in a round of that shape"}
    curves = lambda figure: [
        ChartCurve(name, [(row["load"], row["drafters"][name][figure]) for row in some]) for name in some[0]["drafters"]
    ]
    return [lines(curves(figure), x="answers at once", y=figure, title=title) for figure, title in named.items()]

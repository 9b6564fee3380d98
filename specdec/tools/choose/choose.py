"""evaluate choose=true: which drafter, and how many drafts, pay at which load, before anything is served (docs/choosing.md)."""

from specdec.options.command_line import split

import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec import checkpoint, loading
from specdec.core import files, progress
from specdec.core.generation import reached
from specdec.core.group import Group
from specdec.core.lock import lock
from specdec.core.resumable import check_settings, digest, digest_folder, resumable
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.export.engines import make_form
from specdec.heads.base import Drafter
from specdec.measuring import evaluate, replay
from specdec.measuring.answers import HeldoutAnswers
from specdec.measuring.charts import ChartCurve, lines
from specdec.measuring.measure import MeasureSettings, Method, measure
from specdec.measuring.page import Section, Table, render_page, write_figure
from specdec.measuring.replay import Written, warn_of_writers
from specdec.measuring.report import PromptCounts, by_depth
from specdec.measuring.runs import Run, load_runs, shared_target
from specdec.options import decoding, proposers
from specdec.proposers import costs as pass_costs
from specdec.proposers.base import Proposer
from specdec.target.model import Target
from specdec.text import conversations as data
from specdec.text import reading
from specdec.text.conversations import Prompt
from specdec.tools.choose import choice, round_costs
from specdec.tools.choose.choice import ShapeAcceptance
from specdec.tools.choose.round_costs import CostPoint, RoundCosts
from specdec.tools.judge import judge

MOST_DRAFTS = 16
SETTINGS = ("checkpoint", "proposers", "settings", "trees", "prompts", "suite", "subset", "protocol", "split", "template", "limit",
            "answers", "hold_out", "length", "max_new_tokens", "ignore_stop", "engine", "plain", "costs", "loads", "contexts", "seed")  # fmt: skip
ADVICE = "Choose another out=FOLDER."
TIMED = (1, 2, 4, 8, 16)  # drafts of the chains whose rounds are timed
HOPELESS = 1.3  # times a drafter's largest tau: rounds of more plain ones than that cannot pay at larger loads
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "gguf": "llama.cpp"}  # by format of export
SCHEDULE = "num_speculative_tokens_per_batch_size"
FEW = 8  # requests to a server at a load, at least, and prompts that are decoded at once


@dataclass(frozen=True)
class Shaped:
    """A drafter in one shape. make: a proposer of its own; source: what it is made from

    chain: its drafts, 0 for what is no chain of a head
    """

    drafter: str
    shape: str
    make: Callable[[], Proposer]
    drafting: Drafting
    source: str
    chain: int = 0

    @property
    def costs(self) -> str:
        """The name of its points in the table of costs, which a drafter's chains share."""
        return self.drafter if self.chain or not self.shape else f"{self.drafter}, {self.shape}"


@dataclass(frozen=True)
class Case:
    """What is chosen from, for what. chosen: Evaluate; contexts: empty for that of the texts; given: costs="""

    chosen: Any
    out: Path
    console: progress.Results
    loads: list[int]
    contexts: list[int]
    sampling: Sampling
    runs: list[Run]
    opened: loading.Opened
    given: RoundCosts | None
    served: judge.TriedServer | None


def choose(chosen: Any, out: Path, console: progress.Results) -> None:
    """chosen: Evaluate; out: the folder"""
    loads, contexts = read_numbers("loads", chosen.loads, decoding.MOST), []
    if chosen.contexts:
        contexts = read_numbers("contexts", chosen.contexts, 2**20)
    refuse_unused(chosen)
    sampling, given = chosen.decode.sampling(), read_costs(chosen, contexts)
    heads = split(chosen.checkpoint)
    for folder in heads:
        if checkpoint.head_class(folder).adapts_target:
            raise ValueError(f"{folder} adapts its target, so its plain decoding is another: leave choose=true out.")
    served = None
    if chosen.engine:
        target = loading.target_of(checkpoint.resolve(heads[0]), chosen.target.name)
        served = judge.open_servers(chosen, evaluate.read_questions(chosen), target, console)
        if served.notes or served.plain is None:
            raise ValueError(" ".join(served.notes) or "engine= needs more: give plain=URL of a server without drafts.")
    runs = load_runs(chosen.checkpoint, chosen.target)
    opened = shared_target(runs, chosen.target, head=chosen.settings.get("checkpoint"))
    limit = opened.target.max_positions
    if limit and contexts and contexts[-1] + MOST_DRAFTS + 2 > limit:
        raise ValueError(
            f"contexts={chosen.contexts}: {opened.target.name} has {limit} positions, so {limit - MOST_DRAFTS - 2} is the most."
        )
    if given is not None and given.fingerprint is not None and not opened.target.matches(given.fingerprint):
        raise ValueError(f"costs={chosen.costs} are of another target than {opened.target.name}: choose with that one.")
    with lock(out / "choice.lock", of=out / "choice.json"):
        decide(Case(chosen, out, console, loads, contexts, sampling, runs, opened, given, served))


def decide(case: Case) -> None:
    """Writes the choice. Raises ValueError where one of other settings is there."""
    chosen, opened, loads = case.chosen, case.opened, case.loads
    settings = {name: getattr(chosen, name) for name in SETTINGS} | {"weights": evaluate.describe_weights(case.runs)}
    settings |= asdict(case.sampling) | loading.machine(opened.target)
    if (path := case.out / "choice.json").exists():
        check_settings(path, checkpoint.read_json(path).get("settings", {}), settings, advice=ADVICE)
    shapes = list_shapes(case)
    prompts, texts, notes = read_texts(case)
    for note in notes:
        progress.note(note)
    acceptance = find_acceptance(case, shapes, prompts, texts)
    tokens = statistics.mean(len(text.answer) for text in texts)
    usual = statistics.mean(len(text.prompt) + len(text.answer) / 2 for text in texts)
    where = [float(length) for length in case.contexts] or [usual]
    costs = find_costs(case, shapes, acceptance, texts)
    crossings = partial(choice.find_crossings, acceptance, costs, most=loads[-1], tokens=tokens)
    document = {
        "target": opened.target.name,
        "fingerprint": opened.target.fingerprint(),
        "settings": settings,
        "num_answers": len(texts),
        "notes": notes,
        "tokens": tokens,
        "contexts": where,
        "loads": choice.choose_drafts(acceptance, costs, loads=loads, contexts=where, tokens=tokens),
        "plain_from": {f"{length:.0f}": crossings(context=length) for length in where},
        "flags": list(list_flags(case, acceptance, costs, where[0], tokens)),
        "acceptance": [asdict(each) for each in acceptance],
        "costs": costs.to_json(),
    }
    write(case, document)


def read_numbers(name: str, text: str, most: int) -> list[int]:
    """A comma list of whole numbers, in order."""
    if not all(each.isdecimal() and 0 < int(each) <= most for each in split(text)):
        raise ValueError(f"{name}={text}: give numbers from 1 to {most}, such as 1,4,16.")
    return sorted({int(each) for each in split(text)})


def refuse_unused(chosen: Any) -> None:
    """Raises ValueError for options that were given and would change nothing."""
    if given := [name for name in ("batch", "predicted", "chains", *proposers.SHAPE) if name in chosen.given_names]:
        raise ValueError(
            f"choose=true has no use for {', '.join(f'{name}=' for name in given)}: it looks at chains of 1 to {MOST_DRAFTS} drafts, "
            "and at trees=, for each of loads=. Leave that out."
        )


# Acceptance


def list_shapes(case: Case) -> list[Shaped]:
    """Every head's chains and trees, no deeper than its steps, and every proposer. Raises ValueError where there is nothing."""
    chosen, found, weights = case.chosen, list[Shaped](), evaluate.describe_weights(case.runs)
    for run in case.runs:
        limit = run.drafter.depth or MOST_DRAFTS
        for shape in decoding.read_shapes(",".join(map(str, range(1, min(limit, MOST_DRAFTS) + 1))), chosen.trees):
            if run.drafter.depth and shape.depth > run.drafter.depth:
                raise ValueError(f"trees={chosen.trees}: {run.name} takes {limit} steps, so no tree may be deeper.")
            drafting = chosen.decode.drafting(shape)
            make, label = partial(drafting.proposer, run.drafter), evaluate.name_shape(shape)
            num = shape.depth if shape.chain else 0
            found.append(Shaped(run.name, label, make, drafting, weights[run.name].split()[-1], num))
    drafting, folders = chosen.decode.drafting(), {run.name: str(run.folder) for run in case.runs}
    if {proposers.AUTO, proposers.HEAD} & set(split(chosen.proposers)):
        raise ValueError(
            "auto chooses in every round by itself, and head is checkpoint=: leave them out of proposers=."
        )
    given: dict[str, Any] = {"settings": chosen.settings, "drafting": drafting, "checkpoints": folders}
    for name, config in proposers.configure_all(chosen.proposers, **given).items():
        make = partial(proposers.make, config, case.opened.target)
        make()  # raises ValueError now
        files_of = {folder: digest_folder(Path(folder)) for folder in proposers.drawn_from(config)}
        found.append(Shaped(name, "", make, drafting, json.dumps([config, files_of])))
    if not found:
        raise ValueError("There is nothing to choose from: give checkpoint=DIR,DIR, proposers=suffix,ngram, or both.")
    return found


def read_texts(case: Case) -> tuple[list[Prompt], list[Written], list[str]]:
    """The prompts with the target's own answers, read from answers=, or written now and kept in `out`; what is to be known of them."""
    chosen, opened, temperature = case.chosen, case.opened, case.sampling.temperature
    heads = evaluate.find_heads(case.runs, {})
    if chosen.answers is not None:
        rows = read_answers(chosen, opened.tokenizer, opened.target)
        texts, notes = encode_answers(chosen, rows, opened.tokenizer), [*evaluate.note_copies(rows, heads)]
        texts = [replace(text, answer=text.answer[: chosen.max_new_tokens]) for text in texts]
        prompts = [Prompt(str(number), "", text.prompt) for number, text in enumerate(texts)]
    else:
        asked, stop = evaluate.read_questions(chosen), set() if chosen.ignore_stop else opened.stop
        notes = [*evaluate.note_questions(asked, heads)]
        prompts, folder = evaluate.first_prompts(asked, opened, chosen.max_new_tokens), case.out / "answers"
        kept = HeldoutAnswers(opened.target, case.sampling, chosen.max_new_tokens, stop, chosen.seed, folder)
        answers, _ = kept.get(prompts, Group())
        texts = [Written(prompt.tokens, answer, temperature) for prompt, answer in zip(prompts, answers, strict=True)]
    pairs = [(prompt, text) for prompt, text in zip(prompts, texts) if len(text.answer) > 1]
    if len(pairs) < 2:
        raise ValueError(
            f"{chosen.answers or chosen.prompts or loading.PROMPTS} gives {len(pairs)} answers of two tokens or more at decode.temperature="
            f"{temperature:g}, and an interval over prompts needs two."
        )
    return [prompt for prompt, _ in pairs], [text for _, text in pairs], notes


def read_answers(chosen: Any, tokenizer: PreTrainedTokenizerBase, target: Target) -> list[dict]:
    """The rows of the answers to replay, all written at one temperature. Raises ValueError if there is none.

    target: answers of others are warned of
    """
    source, temperature = str(chosen.answers), chosen.decode.sampling().temperature
    arguments = loading.read_template(chosen.template, tokenizer, split(chosen.checkpoint))
    rows = reading.load_conversations(source, split=chosen.split, arguments=arguments)
    if chosen.hold_out is not None:
        rows = [rows[i] for i in reading.hold_out([row.get("temperature") == 0 for row in rows], chosen.hold_out)]
    rows = [row for row in rows if row.get("temperature", temperature) == temperature]
    if not rows:
        raise ValueError(f"{source} has no row at decode.temperature={temperature:g}.")
    rows = reading.spread(rows, chosen.limit)
    warn_of_writers([row.get("target_fingerprint") for row in rows], target)
    return rows


def encode_answers(chosen: Any, rows: list[dict], tokenizer: PreTrainedTokenizerBase) -> list[Written]:
    """The last answer of each row, cut. Raises ValueError if none has a second token."""
    texts, temperature = [], chosen.decode.sampling().temperature
    for row in rows:
        with reading.at(str(chosen.answers)):
            encoded = data.encode(tokenizer, row)
        start, stop = data.last_answer(encoded)
        answer = encoded.tokens[start : min(stop, chosen.length)]
        if len(answer) >= 2:
            texts.append(Written(encoded.tokens[:start], answer, temperature))
    if not texts:
        raise ValueError(f"No answer has a second token within length={chosen.length}: raise it.")
    return texts


def find_acceptance(
    case: Case, shapes: list[Shaped], prompts: list[Prompt], texts: list[Written]
) -> list[ShapeAcceptance]:
    """Of all chains by one replay of each head; of what replay does not cover by decoding."""
    found, decoded = list[ShapeAcceptance](), [each for each in shapes if not each.chain]
    for run in case.runs:
        own, drafter = [each for each in shapes if each.chain and each.drafter == run.name], run.drafter
        if case.served:
            drafter = judge.draft_as_engine(drafter, case.served.server.kind)
        if own[0].drafting.replayable(drafter, case.sampling):
            assert isinstance(drafter, Drafter)
            judged = replay.replay_texts(drafter, texts, depth=own[-1].chain, what=f"replay of {run.name}")
            found += choice.accept_chains(run.name, [each.accept for each in judged], seed=case.chosen.seed)
        else:
            decoded += [each for each in own if each.chain in TIMED or each is own[-1]]
    return found + (decode_shapes(case, decoded, prompts) if decoded else [])


def decode_shapes(case: Case, shapes: list[Shaped], prompts: list[Prompt]) -> list[ShapeAcceptance]:
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
        acceptance = ShapeAcceptance(each.drafter, each.shape, each.costs, drafts, 0.0, [], survival)
        found.append(choice.with_tau(acceptance, counts, seed=chosen.seed))
    return found


# What rounds cost


def read_costs(chosen: Any, contexts: list[int]) -> RoundCosts | None:
    """costs=; None: they are timed. Raises ValueError for a file that is no choice.json, or that does not fit to other options."""
    alone = len(split(chosen.checkpoint)) == 1 and not chosen.proposers and not chosen.trees
    if chosen.engine and (chosen.costs or contexts or not alone):
        raise ValueError(
            "engine= gives the costs of one head's chain behind its own requests: give that checkpoint=DIR, the one it serves, and no "
            "costs=, contexts=, proposers= or trees=."
        )
    if not chosen.costs:
        return None
    costs = round_costs.read_choice(chosen.costs)
    known_at = {each.context for each in costs.points}
    far = any(abs(length - where) > round_costs.NEAR * where for length in contexts for where in known_at)
    if len(known_at) == 1 and far:
        raise ValueError(
            f"contexts={chosen.contexts}: costs={chosen.costs} are known of one context only, so leave it out."
        )
    return costs


def find_costs(case: Case, shapes: list[Shaped], acceptance: list[ShapeAcceptance], texts: list[Written]) -> RoundCosts:
    """From a server, an earlier choice, or timed here."""
    if case.served:
        return serve_costs(case, case.served)
    if case.given is not None:
        return case.given
    points, drafts = list[CostPoint](), {(each.drafter, each.shape): each.drafts for each in acceptance}
    for name in dict.fromkeys(each.costs for each in acceptance):
        own = [each for each in shapes if each.costs == name and (each.drafter, each.shape) in drafts]
        timed = {drafts[each.drafter, each.shape]: each for each in own if each.chain in (0, *TIMED) or each is own[-1]}
        highest = max(each.tau for each in acceptance if each.costs == name)
        points += time_drafter(case, name, timed, texts, HOPELESS * highest)
    here = "{machine}, {threads} threads, {dtype}".format(**loading.machine(case.opened.target))
    return RoundCosts(points, f"rounds of this decoder, timed on {here}")


def make_context(text: Written, length: int | None) -> list[int]:
    """A prompt with half of its answer, as a round has it on average before it; with a length, repeated and cut to that."""
    tokens = text.prompt + text.answer[: len(text.answer) // 2]
    return tokens if length is None else (tokens * -(-length // len(tokens)))[:length]


def time_drafter(
    case: Case, name: str, shapes: Mapping[float, Shaped], texts: list[Written], most: float
) -> list[CostPoint]:
    """Timed now, or read from the file in which they were kept ($SPECDEC_CACHE). shapes: by their drafts; most: of `time_loads`"""
    first, found = next(iter(shapes.values())), list[CostPoint]()
    common: dict[str, Any] = {"sampling": case.sampling, "stop": set(), "runner": first.drafting.runner()}
    plain = Decoder(case.opened.target, None, **common)
    drafted = {num: each.drafting.decoder(plain.target, each.make(), **common) for num, each in shapes.items()}
    conditions = pass_costs.describe_conditions(plain.verify, case.sampling) | {"drafter": first.source}
    conditions |= {f"{name} {each.shape}": asdict(each.drafting) for each in shapes.values()}
    if not first.shape:  # how much a proposer drafts depends on what it reads
        conditions["texts"] = digest(repr(texts).encode())
    path = pass_costs.find_file(conditions).with_suffix(".rounds.json")
    known = round_costs.read_kept(path)

    def keep(points: list[CostPoint]) -> None:
        known.extend(points)
        document = {"conditions": conditions, "points": [asdict(each) for each in known]}
        files.keep_document(path, document, "Seconds of rounds")

    lengths: list[int | None] = [*case.contexts] or [None]
    for length in lengths:
        behind = [make_context(text, length) for text in texts]
        track = progress.track(case.loads, f"rounds of {name}", unit="loads")
        more: dict[str, Any] = {"most": most, "seed": case.chosen.seed, "known": known, "keep": keep}
        found += round_costs.time_loads(name, {0: plain} | drafted, behind, track, **more)
    return found


def serve_costs(case: Case, served: judge.TriedServer) -> RoundCosts:
    """From a few requests at each load to a server with drafts and to a plain one. Raises ValueError, naming the load, without figures."""
    (run,), questions = case.runs, served.first
    settings = served.settings | {"checkpoint": evaluate.describe_weights(case.runs), "drafts": served.longest}
    drafted, base = [], {}
    with resumable(case.out / "settings.json", case.out / "rows.jsonl", settings, advice=ADVICE) as results:
        for load in case.loads:
            both = {"drafted": served.server, "plain": served.plain}
            judge.measure_missing(both, questions[: max(FEW, load)], load, 0, results)
            pairs = judge.read_pairs(results.rows, load)
            turns = [turn for turn, _ in pairs]
            found, drafts = judge.summarise(pairs, case.chosen.seed), judge.find_longest(turns)
            speeds = [found[name]["tokens_per_second_of_a_user"] for name in ("drafted", "plain")]
            if not (found["tau"] and drafts and all(speeds)):
                lacks = "how many drafts the server accepts" if all(speeds) else "the seconds of a user's token"
                raise ValueError(
                    f"At load {load} {lacks} cannot be told from {found['answers']} answers: see that nobody else asks the server, "
                    f"raise max_new_tokens=. {ADVICE}"
                )
            seconds, base[load] = (1 / speed for speed in speeds)
            answers = [each for turn in turns for each in turn.answers]
            lengths = [len(dict(questions)[each.prompt]["prompt"]) + each.tokens / 2 for each in answers]
            about = {"rows": load, "seconds": seconds, "tau": found["tau"], "drafts": drafts}
            drafted.append({**about, "context": statistics.mean(lengths)})
    source = f"{served.server.model} of {served.server.kind}, requests at each load"
    return round_costs.make_served(drafted, base, source, run.name)


# Engines


def list_flags(
    case: Case, acceptance: list[ShapeAcceptance], costs: RoundCosts, context: float, tokens: float
) -> Iterator[dict]:
    """For each head and engine the lines that serve its best chain at each load: {drafter, engine, loads, line}, or why there is none:
    {drafter, engine, reason}. A block counts with all its drafts, as engines draft it whole.
    """
    for run, name in itertools.product(case.runs, ENGINES):
        why = {"drafter": run.name, "engine": ENGINES[name]}
        assert isinstance(run.drafter, Drafter)
        try:
            form = make_form(run.drafter, name)
        except ValueError as error:
            yield why | {"reason": str(error)}
            continue
        chains = [each for each in acceptance if each.costs == run.name]
        chains = [each for each in chains if not form.whole_block or each.drafts == form.num_drafts(1)]
        if not chains:
            yield why | {"reason": f"its block has more than {MOST_DRAFTS} drafts"}
            continue
        table = choice.choose_drafts(chains, costs, loads=case.loads, contexts=[context], tokens=tokens)
        schedule, lines = choice.find_schedule(table, run.name), dict[tuple[str, str], list[int]]()
        drafting = [step for step in schedule if step[2]]
        if not drafting:
            yield why | {"reason": "plain decoding is faster at every load"}
            continue
        most = max(num for *_, num in drafting)
        by_load = name == "vllm" and len(schedule) > 1 and not form.whole_block and form.settings["method"] != "medusa"
        for first, last, num in [(1, case.loads[-1], most)] if by_load else drafting:
            num = most if name == "vllm" else num
            filled = form.launch_lines(target=case.opened.target.name, out=f"EXPORTED_{name}", num=num)
            engine, line = next(iter(filled.items()))
            settings = form.settings_for(f"EXPORTED_{name}", num)
            if by_load:
                assert json.dumps(settings) in line
                line = line.replace(json.dumps(settings), json.dumps(settings | {SCHEDULE: schedule}))
            lines.setdefault((engine, line.splitlines()[-1]), [first, last])[1] = last
        for (engine, line), loads in lines.items():
            yield {"drafter": run.name, "engine": engine, "loads": loads, "line": line}


# What is shown


def write(case: Case, document: dict) -> None:
    """Writes choice.json, table.md and page.html, and prints a table."""
    out, console = case.out, case.console
    files.write_text(out / "choice.json", json.dumps(document, indent=1) + "\n")
    table, notes, known = tabulate(document), [*document["notes"], *describe(document)], document["flags"]
    flags = [
        "{drafter}, {engine}, loads {loads[0]} to {loads[1]}: {line}".format(**each) for each in known if "line" in each
    ]
    missing = ["{drafter}, no line for {engine}: {reason}".format(**each) for each in known if "reason" in each]
    if any(SCHEDULE in line for line in flags):
        notes.append(
            f"{SCHEDULE}: at 0 drafts vLLM still runs the drafter (7 to 22 % of a plain round where others measured it), its V1 runner "
            "then has piecewise CUDA graphs only, and with data parallelism it drops the schedule"
        )
    about = (
        f"{document['target']}, temperature {case.sampling.temperature:g}, {document['num_answers']} answers. Costs: "
        f"{document['costs']['source']}. Intervals: 95 %, of tau over prompts and of timed seconds. *: extrapolated beyond the "
        "rows, drafts or contexts that costs are known of."
    )
    listed = "".join(f"- {note}\n" for note in [*notes, *missing])
    text = f"{about}\n\n{table.to_markdown()}\n\n{listed}" + "".join(f"\n```\n{line}\n```\n" for line in flags)
    files.write_text(out / "table.md", text)
    sections = [
        Section(texts=[about]),
        Section("The choice", table=table, points=notes),
        Section("By load", charts=draw(document)),
        Section("Engines", points=[*flags, *missing]),
    ]
    page = render_page("Which drafter, and how many drafts", data=document, sections=sections)
    files.write_text(out / "page.html", page)
    console.say(about)
    console.print(evaluate.to_terminal("", table))
    console.say("\n".join([*notes, *flags, *missing]))
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
    last = document["loads"][-1]["load"]
    for context, found in document["plain_from"].items():
        for name, since in found.items():
            since = f"from load {since[0]}{' *' * since[1]}" if since else f"at no load up to {last}"
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

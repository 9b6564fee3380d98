"""evaluate: each request by every method in turn, at each temperature and batch size; resumable; as JSON, Markdown and a page."""

from specdec.options.command_line import split

import itertools
import json
import statistics
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import rich.table
from transformers import PreTrainedTokenizerBase

from specdec import checkpoint, loading
from specdec.core import files, hub, progress
from specdec.core.answer_text import StopStrings, TextDecoder
from specdec.core.generation import Generation
from specdec.core.resumable import Resumable, digest, digest_folder, resumable
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.loading import Opened
from specdec.measuring import counting, results_page, served, trained_prompts
from specdec.measuring.counting import AnswerCounts, Counting
from specdec.measuring.measure import FROZEN, MeasureSettings, Method, PromptResult, check_prompts, measure
from specdec.measuring.page import Table, finite
from specdec.measuring.report import TAU, summarise_by_category, tau_difference
from specdec.measuring.results_page import Entry
from specdec.measuring.runs import Run, load_runs, shared_target
from specdec.options import decoding, proposers
from specdec.target.model import Target
from specdec.text import chat_template, reading
from specdec.text.conversations import Prompt
from specdec.text.messages import describe_arguments
from specdec.tools.choose import choice
from specdec.tools.suites import suites
from specdec.tools.suites.suites import Question

STRIDE = 10**6  # between the numbers of requests of different turns


@dataclass(frozen=True)
class Asked:
    """What is asked. suite: None: rows of prompts=; protocol: None: this project's own"""

    questions: list[Question]
    suite: suites.Suite | None
    protocol: suites.Protocol | None
    arguments: dict[str, Any]  # of the chat template, for questions that do not say them

    @property
    def source(self) -> str:
        return self.suite.source if self.suite else loading.PROMPTS

    @property
    def stop(self) -> list[str]:
        """Texts that end an answer."""
        return self.protocol.stop.get(self.suite.name, []) if self.protocol and self.suite else []

    def stop_strings(self, tokenizer: PreTrainedTokenizerBase) -> StopStrings | None:
        """None without `stop`. Raises ValueError, naming the protocol, for a text that no answer can hold."""
        if self.protocol is None or not self.stop:
            return None
        with reading.at(f"protocol={self.protocol.name}"):
            return StopStrings(self.stop, TextDecoder.of(tokenizer))

    def prompt(self, question: Question, turn: int, answers: list[str], tokenizer: PreTrainedTokenizerBase) -> Prompt:
        """answers: of the target to the earlier turns. Raises ValueError for a prompt that cannot be encoded."""
        return suites.encode_turn(question, turn, answers, tokenizer, arguments=self.arguments, protocol=self.protocol)


def compare(chosen: Any, out: Path, console: progress.Results) -> None:
    """chosen: Evaluate; out: the folder"""
    loading.use_threads(out / "settings.json")
    samplings = sorted(set(chosen.decode.samplings()), key=lambda sampling: sampling.temperature)
    shapes = decoding.read_shapes(chosen.chains, chosen.trees)
    draftings = [chosen.decode.drafting(shape) for shape in shapes] or [chosen.decode.drafting()]
    batches = decoding.read_batches(chosen.batch)
    names = chosen.proposers
    if not names and not split(chosen.checkpoint):
        raise ValueError(
            "There is nothing to measure: give checkpoint=checkpoints/a,checkpoints/b, or proposers=ngram,suffix, or both."
        )
    asked, predictions = read_questions(chosen), read_predictions(chosen.predicted)
    runs = load_runs(chosen.checkpoint, chosen.target)
    opened = shared_target(runs, chosen.target, head=chosen.settings.get("checkpoint"))
    if chosen.auto and len(runs) == 1 and not names and not runs[0].drafter.adapts_target and not shapes:
        names = proposers.AUTO  # beside one head
    folders = {run.name: str(run.folder) for run in runs}
    configs = proposers.configure_all(names, settings=chosen.settings, drafting=draftings[0], checkpoints=folders)
    methods, run_of = make_methods(runs, configs, opened.target, draftings)
    settings = describe(chosen, asked, runs, configs, opened)
    notes = [*note_questions(asked, find_heads(runs, configs))]
    for note in notes:
        progress.note(note)
    check_turns(asked, opened.tokenizer)
    strings = asked.stop_strings(opened.tokenizer)
    waves = {batch: plan_waves(asked.questions, batch) for batch in batches}
    planned = {batch: [number_of(*request) for wave in waves[batch] for request in wave] for batch in batches}
    kept = {name: value for name, value in settings.items() if name != "fingerprint"}
    with resumable(out / "settings.json", out / "rows.jsonl", kept, advice="Choose another out=FOLDER.") as results:
        results.same(opened.target.identity)
        num = sum(map(len, planned.values())) * len(samplings)
        progress.note(f"{len(results.rows)} of {num} requests x temperatures x batch sizes are in {out}")
        stop = set() if chosen.ignore_stop else opened.stop
        for batch, sampling, turn in itertools.product(batches, samplings, range(len(waves[batches[0]]))):
            how = MeasureSettings(sampling, stop, chosen.max_new_tokens, chosen.seed, batch, strings)
            decode_missing(methods, waves[batch][turn], asked, opened, how, results, settings["prompts"])
        entries = []
        for sampling, batch in itertools.product(samplings, batches):
            fitting = fit_predictions(predictions, opened.target, sampling, notes)
            rows = find_rows(results.rows, sampling.temperature, batch, planned[batch])
            if missing := len(planned[batch]) - len(rows):
                notes.append(f"T={sampling.temperature:g}, batch {batch}: {missing} later turns did not fit: left out")
            every = [results_of(rows, method) for method in methods]
            made = []
            context = statistics.mean(len(each.prompt.tokens) + len(each.plain.tokens[0]) / 2 for each in every[0])
            for method, each in zip(methods, every):
                run = run_of.get(method.name)
                entry = make_entry(method, run, sampling.temperature, batch, each, every[0], settings["stop"])
                drafter, _, shape = method.name.partition(", ")
                found = choice.predict(fitting, drafter, shape, batch, context) if fitting else None
                made.append(replace(entry, predicted=found))
            entries += sorted(made, key=lambda entry: -(entry.report.tau or 0.0))
        document = {"form": 1, "definition_of_tau": TAU, "settings": settings, "notes": notes}
        write(out, console, entries, methods[0].name, asked, document)


def check_turns(asked: Asked, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError, before anything is decoded, for a target that has no form for later turns."""
    if several := next((each for each in asked.questions if len(each.turns) > 1), None):
        asked.prompt(several, 1, [""], tokenizer)


def find_heads(runs: list[Run], configs: Mapping[str, proposers.Config]) -> dict[str, Path]:
    """The folders of all trained heads, of the runs and inside proposers, by name."""
    folders = [Path(head) for config in configs.values() for head in proposers.heads(config)]
    names = {folder: checkpoint.name_of(folder) for folder in folders} | {run.folder: run.name for run in runs}
    return {name: folder for folder, name in names.items()}


def note_questions(asked: Asked, heads: Mapping[str, Path]) -> Iterator[str]:
    """What is not as published, and which questions a head was trained on, as far as that is known. heads: folders by name"""
    if asked.suite:
        yield from filter(None, (asked.suite.note, f"licence: {asked.suite.licence}"))
    yield from note_copies([{**question.turns[0], "id": question.id} for question in asked.questions], heads)


def note_copies(rows: Sequence[dict], heads: Mapping[str, Path]) -> Iterator[str]:
    """A sentence for each head that was trained on some of the prompts. heads: folders by name"""
    for name, folder in heads.items():
        digests = trained_prompts.read(folder)
        ids = [] if digests is None else trained_prompts.find(rows, digests)
        if ids:
            copies = trained_prompts.count_copies(ids, len(rows), "prompts")
            yield f"{copies} are among those that {name} was trained on: its figures flatter"


def read_predictions(path: str | None) -> dict[str, Any] | None:
    """A choice.json. Raises ValueError for one that does not exist, or is none."""
    if path is None:
        return None
    document = checkpoint.read_json(Path(path))
    choice.predict(document, "", "", 1)
    return document


def fit_predictions(
    predictions: dict[str, Any] | None, target: Target, sampling: Sampling, notes: list[str]
) -> dict[str, Any] | None:
    """The choice where it is of this target and sampling; else a note says so."""
    if predictions is None:
        return None
    of, made_for = predictions.get("settings", {}), predictions.get("fingerprint")
    wrong = [] if target.matches(made_for) else [f"fingerprint {made_for}"]
    wrong += [f"{name} {of.get(name)}" for name, value in asdict(sampling).items() if of.get(name) != value]
    if not wrong:
        return predictions
    note = f"T={sampling.temperature:g}: nothing is predicted, as predicted= is of {', '.join(wrong)}"
    notes += [note] if note not in notes else []
    return None


def read_questions(chosen: Any) -> Asked:
    """The questions, `limit` of them, spread over the source. Raises ValueError as `suites` does."""
    arguments = loading.read_template(chosen.template, heads=split(chosen.checkpoint))
    protocol = suites.read_protocol(chosen.protocol) if chosen.protocol else None
    if chosen.suite is None:
        found = suites.plain_questions(chosen.prompts or loading.PROMPTS, chosen.split)
        return Asked(reading.spread(found, chosen.limit), None, protocol, arguments)
    suite = suites.load_suite(
        chosen.suite,
        chosen.prompts,
        split=chosen.split,
        subset=chosen.subset,
        protocol=protocol,
        accepted=chosen.accept_licence,
    )
    return Asked(reading.spread(suite.questions, chosen.limit), suite, protocol, arguments)


def first_prompts(asked: Asked, opened: Opened, max_new_tokens: int) -> list[Prompt]:
    """Of first turns. Raises ValueError, naming the prompt, for one that is too long for the target."""
    prompts = [asked.prompt(question, 0, [], opened.tokenizer) for question in asked.questions]
    check_prompts(Decoder(opened.target, None, sampling=Sampling(), stop=set()), prompts, max_new_tokens)
    return prompts


def describe(
    chosen: Any, asked: Asked, runs: list[Run], configs: dict[str, proposers.Config], opened: Opened
) -> dict[str, Any]:
    """The settings that all rows have in common, and the protocol, which is printed beside every figure."""
    folders = sorted({folder for config in configs.values() for folder in proposers.drawn_from(config)})
    return {
        "checkpoint": describe_weights(runs),
        "proposers": configs,
        "files": {folder: digest_folder(Path(folder)) for folder in folders},
        "prompts": chosen.prompts or asked.source,
        **describe_questions(asked, opened.tokenizer),
        **{name: getattr(chosen, name) for name in ("max_new_tokens", "chains", "trees", "ignore_stop", "seed")},
        "decode": asdict(chosen.decode),
        "target": opened.target.name,
        "fingerprint": opened.target.fingerprint(),
        "stop": [] if chosen.ignore_stop else sorted(opened.stop),
        **loading.machine(opened.target),
    }


def describe_weights(runs: list[Run]) -> dict[str, str]:
    weights = {run.name: digest((run.folder / "drafter.safetensors").read_bytes()) for run in runs}
    return {run.name: f"{hub.pinned(run.folder)} {weights[run.name]}" for run in runs}


def describe_questions(asked: Asked, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    suite = asked.suite
    return {
        "suite": {name: getattr(suite, name) for name in ("name", "title", "digest")} if suite else None,
        "protocol": f"{asked.protocol.name} {asked.protocol.digest}" if asked.protocol else None,
        "num_questions": len(asked.questions),
        "questions_digest": reading.digest_of([row for question in asked.questions for row in question.turns]),
        "stop_texts": asked.stop,
        "chat": say_chat(asked.protocol, tokenizer),
        "template": asked.arguments if tokenizer is None else chat_template.known_arguments(tokenizer, asked.arguments),
    }


def say_chat(protocol: suites.Protocol | None, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The form in which questions are sent; rows that are plain text stay so."""
    if protocol is not None and protocol.chat != "target":
        return {"vicuna": "the conversation of Vicuna", "none": "bare text"}[protocol.chat]
    if tokenizer is None:
        return "the server's chat template"
    return f"chat template {digest(repr(tokenizer.chat_template).encode())}" if tokenizer.chat_template else "bare text"


def make_methods(
    runs: list[Run], configs: dict[str, proposers.Config], target: Target, draftings: list[Drafting]
) -> tuple[list[Method], dict[str, Run]]:
    """Every head in every shape, no deeper than its steps, and every proposer; the heads' runs by their methods' names."""
    methods: list[Method] = []
    run_of: dict[str, Run] = {}
    for run in runs:
        for shape in decoding.cut([drafting.shape for drafting in draftings], run.drafter.depth):
            drafting = replace(draftings[0], depth=shape.depth, width=shape.width, nodes=shape.nodes)
            proposer = drafting.proposer(run.drafter)
            name = f"{run.name}, {name_shape(shape)}"
            methods.append(Method(name, run.drafter.target, proposer, drafting, run.baseline, run.drafter))
            run_of[name] = run
    for name, config in configs.items():
        methods.append(Method(name, target, proposers.make(config, target), draftings[0]))
    for method in methods:
        decoding.show_measuring(method.proposer)
    return methods, run_of


def name_shape(shape: TreeShape) -> str:
    return str(shape) if shape.chain else f"tree of {shape.depth}x{shape.width}x{shape.nodes}"


# Decoding


def plan_waves(questions: list[Question], batch: int) -> list[list[tuple[int, Question, int]]]:
    """For each turn its requests (slot, question, turn): a turn follows when all answers to the one before are there.

    Questions are repeated for a batch larger than their number.
    """
    num = len(questions)
    slots = [(slot, questions[slot % num]) for slot in range(max(num, batch))]
    turns = range(max(len(question.turns) for question in questions))
    return [[(slot, each, turn) for slot, each in slots if len(each.turns) > turn] for turn in turns]


def number_of(slot: int, question: Question, turn: int) -> int:
    return turn * STRIDE + slot


def decode_missing(
    methods: list[Method],
    wave: list[tuple[int, Question, int]],
    asked: Asked,
    opened: Opened,
    settings: MeasureSettings,
    results: Resumable,
    source: str,
) -> None:
    """Decodes the requests of one turn that have no row with this temperature and batch size."""
    temperature, batch = settings.sampling.temperature, settings.batch
    same = {"temperature": temperature, "batch": batch}
    done = {row["number"]: row for row in results.rows if same.items() <= row.items()}
    plain = Decoder(opened.target, None, sampling=settings.sampling, stop=settings.stop)
    longest = settings.max_new_tokens + max(method.proposer.depth for method in methods)
    numbers, prompts = [], []
    for slot, question, turn in wave:
        if number_of(slot, question, turn) in done:
            continue
        before = [done.get(number_of(slot, question, earlier)) for earlier in range(turn)]
        said = [read_answer(row, opened, settings.stop) for row in before if row is not None]
        if len(said) < turn:
            continue
        prompt = asked.prompt(question, turn, said, opened.tokenizer)
        if turn and not fits(plain, prompt, longest):  # a first turn that does not fit is refused
            continue
        numbers.append(number_of(slot, question, turn))
        prompts.append(replace(prompt, question=str(slot % len(asked.questions))))
    if not prompts:
        return
    turn = wave[0][2]
    what = f"temperature {temperature:g}, batch {batch}" + (f", turn {turn + 1}" if turn else "")
    track = lambda groups: progress.track(groups, what, unit="requests", size=len)
    ahead = iter(numbers)
    for group in measure(methods, prompts, settings, numbers=numbers, source=source, progress=track):
        results.append(*({"number": next(ahead), **same, **to_row(methods, each)} for each in group))


def fits(plain: Decoder, prompt: Prompt, max_new_tokens: int) -> bool:
    try:
        check_prompts(plain, [prompt], max_new_tokens)
    except ValueError:
        return False
    return True


def read_answer(row: dict, opened: Opened, stop: set[int]) -> str:
    """What the frozen target answered plainly, as text."""
    plain = row["plain"].get(FROZEN) or next(iter(row["plain"].values()))
    tokens = [token for token in plain["tokens"][0] if token not in stop]
    return TextDecoder.of(opened.tokenizer).text(tokens)


def to_row(methods: list[Method], each: dict[str, PromptResult]) -> dict:
    """The results of one request for JSON; `results_of` reads them."""
    figures = ("replayed_rounds", "replayed_accepted", "gap", "candidates")
    cells = {
        name: {"drafted": asdict(result.drafted), **{figure: getattr(result, figure) for figure in figures}}
        for name, result in each.items()
    }
    plain = {method.baseline: asdict(each[method.name].plain) for method in methods}
    return {"prompt": asdict(each[methods[0].name].prompt), "plain": plain, "methods": cells}


def find_rows(rows: Iterable[dict], temperature: float, batch: int, planned: Iterable[int]) -> list[dict]:
    """Of these requests, in their order."""
    known = {row["number"]: row for row in rows if (row["temperature"], row["batch"]) == (temperature, batch)}
    return [known[number] for number in planned if number in known]


def results_of(rows: Iterable[dict], method: Method) -> list[PromptResult]:
    """The results of one method, by request."""
    results = []
    for row in rows:
        cell = {**row["methods"][method.name]}
        plain, drafted = Generation(**row["plain"][method.baseline]), Generation(**cell.pop("drafted"))
        results.append(PromptResult(Prompt(**row["prompt"]), plain, drafted, **cell))
    return results


# Results


def make_entry(
    method: Method,
    run: Run | None,
    temperature: float,
    batch: int,
    results: list[PromptResult],
    first: list[PromptResult],
    stop: Container[int],
) -> Entry:
    """The figures of one method at one temperature and batch size. first: the results of the first method"""
    report = summarise_by_category(
        results, depth=method.proposer.depth, temperature=temperature, adapted=method.target.adapted
    )
    if run is not None:
        report = replace(report, training=run.training)
        promise = served.measure(method.target, method.proposer)
        report = promise.add_to(report) if promise else report
    counts = [AnswerCounts.of(result, stop) for result in results]
    return Entry(method.name, temperature, batch, report, counts, tau_difference(results, first))


def write(
    out: Path,
    console: progress.Results,
    entries: list[Entry],
    first: str | None,
    asked: Asked,
    document: dict[str, Any],
    **more: Any,
) -> None:
    """Writes results.json, results.md and results.html, and prints the tables.

    first: the method of the differences; document: what is known beside the results; more: further parts of results.json
    """
    countings, settings = list_countings(), document["settings"]
    differs = (
        asked.protocol is not None and len(counting.join_equal({"": asked.protocol.counting, " ": counting.OURS})) > 1
    )
    own = asked.protocol.name if asked.protocol and differs else None
    document["protocol"] = protocol = say_protocol(settings, asked.protocol)
    document["counting"] = {name: str(each) for name, each in countings.items()}
    found = {"results": [entry.to_json(countings) for entry in entries], **more}
    files.write_text(out / "results.json", json.dumps(finite(document | found), indent=1) + "\n")
    page = results_page.ResultsPage(entries, countings, protocol, settings, document["notes"], first, own)
    files.write_text(out / "results.md", page.to_markdown())
    files.write_text(out / "results.html", page.to_html())
    for heading, table in page.tables():
        console.print(to_terminal(heading, table))
    for sentence in [*page.verdicts(), *document["notes"], f"protocol: {protocol}"]:
        console.say(sentence)
    console.print(f"written: {out}/results.json, results.md and results.html")


def list_countings() -> dict[str, Counting]:
    """This project's own, those of conf/protocol, and others."""
    known = {name: suites.read_protocol(name).counting for name in suites.protocol_names()}
    return {"specdec": counting.OURS, **known, **counting.OTHERS}


def say_protocol(settings: dict[str, Any], protocol: suites.Protocol | None) -> str:
    """What a figure depends on, in one sentence."""
    suite, decode = settings["suite"], settings["decode"]
    parts = [f"{settings['num_questions']} questions of {suite['title'] if suite else settings['prompts']}"]
    parts += [f"protocol {protocol.name} ({protocol.title})"] if protocol else []
    parts += [f"target {settings['target']}" + (f" ({settings['fingerprint']})" if settings["fingerprint"] else "")]
    parts += [f"in {settings['dtype']}"] * bool(settings["dtype"])
    parts += [
        settings["chat"],
        describe_arguments(settings["template"]),
        f"T={str(decode['temperature']).removesuffix('.0')}",
    ]
    parts += [f"{name}={decode[name]}" for name in ("top_p", "top_k") if decode[name] is not None]
    parts += [f"repetition_penalty={decode['repetition_penalty']}"] * (decode["repetition_penalty"] != 1)
    parts += [f"seed {settings['seed']}", f"at most {settings['max_new_tokens']} new tokens"]
    parts += ["answers go on behind stop tokens"] * settings["ignore_stop"]
    parts += [f"answers end with {', '.join(settings['stop_texts'])}"] * bool(settings["stop_texts"])
    parts += [f"rule {decode['rule']}"] if "rule" in decode else []
    parts += [f"tau: {counting.OURS}"]
    if protocol is not None and protocol.counting != counting.OURS:
        parts.append(f"column {protocol.name}: {protocol.counting}")
    if "machine" in settings:
        parts.append(f"{settings['machine']}, {settings['threads']} threads, torch {settings['torch']}")
    return "; ".join([*parts, *["compiled"] * bool(decode.get("compile"))])


def to_terminal(heading: str, table: Table) -> rich.table.Table:
    shown = rich.table.Table(title=heading, title_justify="left")
    places = [place for place, head in enumerate(table.heads) if not head.startswith(results_page.DETAILS)]
    for place in places:
        shown.add_column(table.heads[place], no_wrap=place == 0)
    for row in table.rows:
        shown.add_row(*(row[place] for place in places))
    return shown

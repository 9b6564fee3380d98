"""Tests of validation: replay along kept answers, decoding in a share of the training time, what reports say."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from rich.table import Table

from specdec import checkpoint
from specdec.core import fast, files
from specdec.core.group import Group
from specdec.core.sampling import Sampling
from specdec.decoding.drafting import Drafting
from specdec.measuring import answers, measure
from specdec.measuring import replay as written_replay
from specdec.measuring.measure import MeasureSettings, PromptReplay
from specdec.measuring.model_card import Provenance, choose_chain, write_expectations
from specdec.measuring.report import Report, compute_tau, describe_candidates, summarise_candidates
from specdec.target.model import Target, load_tokenizer
from specdec.text import reading
from specdec.text.conversations import Prompt
from specdec.unroll import replay
from tests.support.commands import write_rows
from tests.support.decoding import pretend_graphs, prompts_of, random_tokens
from tests.support.drafters import make_drafter
from tests.support.graphs import StepRecorder
from tests.support.loops import follow
from tests.support.runs import fit_interrupted, log_of, report_of, same_weights, weights_of
from train.loop import validate
from train.loop.state import RunFolder
from train.loop.trainer import Trainer
from train.loop.validate import Validation
from train.settings.options import ValidationOptions
from train.show import run_page

CHAIN = Drafting(depth=3)
SETTINGS = {"num_prompts": 5, "max_new_tokens": 24, "temperature": 0.0, "decode": "best", "auto": "never",
            "share": None, "answers": "answers", "engine": None, "baseline": None, "loads": [1], "engine_folder": None,
            "timeout": 9.0}  # fmt: skip


@pytest.fixture
def drafter(small_target):
    return make_drafter(small_target, "eagle").frozen_copy()


@pytest.fixture
def make(small_target, tmp_path, monkeypatch):
    """make(drafter, drafting, **settings) -> a Validation in a new working directory; it records what it shows"""
    monkeypatch.chdir(tmp_path)
    prompts = [Prompt(str(number), "", tokens) for number, tokens in enumerate(prompts_of(small_target))]

    def validation(drafter, drafting=CHAIN, **changed):
        settings = ValidationOptions(**SETTINGS | changed)
        shown = []
        console = SimpleNamespace(say=shown.append, print=shown.append)
        measuring = MeasureSettings(Sampling(settings.temperature), {5}, settings.max_new_tokens)
        options = {"options": settings, "drafting": drafting, "measuring": measuring, "console": console}
        made_validation = Validation(Accelerator(cpu=True), drafter, prompts, **options)
        made_validation.shown = shown
        return made_validation

    return validation


def judge(validation: Validation, drafter, *, step=1, trained=100.0, best=None, required=False) -> Report | None:
    judged = validation({"plain": drafter}, step=step, trained=trained, best=best, required=required)
    return judged and judged[1]


# Replay


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_batch_is_replayed_as_its_rows_are(small_drafter, temperature):
    """The padding of a batch changes nothing."""
    target = small_drafter.target
    texts = [(prompt, random_tokens(number, 9 - number, 6)) for number, prompt in enumerate(prompts_of(target))]
    options = {"depth": min(3, small_drafter.depth or 3), "temperature": temperature}
    batch = replay.replay_answers(small_drafter, texts, **options)
    for text, result in zip(texts, batch):
        (alone,) = replay.replay_answers(small_drafter, [text], **options)
        assert result.acceptance.shape == alone.acceptance.shape == (options["depth"], len(text[1]))
        assert (result.candidates is not None) == small_drafter.has_candidates
        torch.testing.assert_close(vars(result), vars(alone), rtol=1e-9, atol=1e-12)


def walk_rounds(listed: dict[tuple[int, int], bool], length: int, depth: int) -> int:
    """Rounds along an answer. listed: whether the token at depth d behind a start is a candidate, by (start, d)"""
    rounds, start = 0, 1
    while start < length:
        rounds += 1
        start += 1 + next((d - 1 for d in range(1, depth + 1) if not listed.get((start, d))), depth)
    return rounds


@pytest.mark.parametrize("reduced, temperature", [(False, 0.0), (True, 0.0), (True, 0.7)])
def test_candidates_are_counted_along_an_answer(target, make, reduced, temperature):
    """Against a walk from slot to slot, with candidates that the decoder's steps make."""
    selector = {"kind": "selector", "rank": 8, "top": 20, "table": False}
    drafter = make_drafter(target, "dflash2", reduced, {"dependence": selector})
    depth, texts = drafter.depth, [(random_tokens(seed, 3, 61), random_tokens(9 + seed, 12, 61)) for seed in range(2)]
    sums, rounds = torch.zeros(3, depth, dtype=torch.float64), 0
    for prompt, answer in texts:
        tokens = torch.tensor(prompt + answer)
        output = target.read(tokens[None], drafter.target_layers)
        probs = (target.logits(output.final)[0] / (temperature or 1)).softmax(-1)
        listed = {}
        for start in range(1, len(answer)):
            slot = len(prompt) + start - 1
            _, logits = follow(drafter, tokens, output.features[0], slot, min(depth, len(answer) - start))
            for d, depth_logits in enumerate(logits, start=1):
                candidates = drafter.to_target(depth_logits.isfinite().nonzero()[:, 0])
                listed[start, d] = int(tokens[slot + d]) in candidates
                sums[:, d - 1] += torch.tensor([1, listed[start, d], float(probs[slot + d - 1, candidates].sum())])
                assert len(candidates) == 20
        rounds += walk_rounds(listed, len(answer), depth)
    replays = replay.replay_answers(drafter, texts, depth=depth, temperature=temperature)
    figures = summarise_candidates([result.candidates.tolist() for result in replays])
    assert figures["recall"] == pytest.approx((sums[1] / sums[0]).tolist()) and 0 < min(figures["recall"]) < 1
    assert figures["mass"] == pytest.approx((sums[2] / sums[0]).tolist())
    num_tokens = sum(len(answer) - 1 for _, answer in texts)
    assert figures["oracle_tau"] == pytest.approx(num_tokens / rounds)
    assert figures["oracle_tau"] > num_tokens / sum(result.expected_rounds[0] for result in replays)


def test_a_report_has_the_candidates(make, target, tmp_path):
    """The table, the line of replay alone, report.json and the page; other heads have none."""
    drafter = make_drafter(target, "dflash2").frozen_copy()
    decoded, replayed = make(drafter), make(drafter, decode="end")
    report, again = judge(decoded, drafter), judge(replayed, drafter)
    known = report.candidates
    assert len(known["recall"]) == len(known["mass"]) == 3 and known["oracle_tau"] > report.replayed_tau
    assert again.candidates == known == Report.from_json(json.loads(json.dumps(report.to_json()))).candidates
    assert f"oracle tau {known['oracle_tau']:.3f}" in replayed.shown[-1]
    (table,) = (each for each in decoded.shown if isinstance(each, Table))
    assert describe_candidates(known) in [*table.columns[1].cells]
    sections = run_page.list_sections(report, [], {}, Path("a"))
    assert "tau, best candidates" in [name for name, *_ in sections[0].tiles]
    assert "Candidates: share" in "".join(chart for section in sections for chart in section.charts)
    other = make_drafter(target, "dflash").frozen_copy()
    assert "candidates" not in judge(make(other), other).to_json()


@pytest.mark.parametrize("head", ["eagle", "mtp", "dspark"])
def test_tau_along_kept_answers_is_the_decoded_tau(make, small_target, monkeypatch, head):
    """In float64 at temperature 0: what one validation wrote, another reads, and its tau is that of the decoder."""
    drafter = make_drafter(small_target, head).frozen_copy()
    first = make(drafter)
    written = judge(first, drafter)
    monkeypatch.setattr(answers, "Decoder", None)  # nothing can be written any more
    again = make(drafter)
    read = again.replay(drafter)
    assert again.replay(drafter) == read and judge(again, drafter, required=True).replayed_tau == written.replayed_tau
    assert [each.prompt.id for each in read] == ["0", "1", "2", "3", "4"]
    assert written.decoded and written.num_prompts == written.replayed_prompts == 5
    accepted = sum(sum(prompt.replayed_accepted) for prompt in read)
    tau = 1 + accepted / sum(prompt.replayed_rounds for prompt in read)
    assert tau == pytest.approx(written.replayed_tau, abs=1e-12)
    assert written.replayed_tau == pytest.approx(written.tau, abs=1e-9) and written.tau > 1
    assert written.replayed_survival == pytest.approx(written.survival, abs=1e-9)


def test_answers_are_written_again_if_they_are_damaged_or_of_other_settings_or_cannot_be_kept(make, drafter):
    make(drafter).replay(drafter)
    (path,) = Path("answers").iterdir()
    content = path.read_text()
    for damaged in (content[: len(content) // 2], content.replace('"answers": [[', '"answers": [[4, ', 1), "[]", ""):
        path.write_text(damaged)
        make(drafter).replay(drafter)
        assert json.loads(path.read_text())["answers"] == json.loads(content)["answers"]
    for changed in ({"max_new_tokens": 7}, {"temperature": 0.7}):
        make(drafter, **changed).replay(drafter)
    assert len(list(Path("answers").iterdir())) == 3
    Path("file").touch()
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert len(make(drafter, answers="file").replay(drafter)) == 5


def test_on_a_gpu_answers_come_from_graphs_and_on_a_cpu_from_plain_passes(make, drafter, monkeypatch):
    make(drafter).replay(drafter)
    (path,) = Path("answers").iterdir()
    document = json.loads(path.read_text())
    path.unlink()
    captured = pretend_graphs(monkeypatch)
    make(drafter).replay(drafter)
    assert json.loads(path.read_text())["answers"] == document["answers"] and captured
    assert answers.HeldoutAnswers(drafter.target, Sampling(), 4, set(), 0, path.parent).runner.undecided


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_long_prompt_is_answered_with_fewer_at_once_and_leaves_the_others_as_they_are(
    drafter, monkeypatch, tmp_path, temperature
):
    """Of 20 prompts the tenth is long: those beside it are answered two at a time, the others as without it."""
    monkeypatch.setattr(measure, "LONG_PROMPT", 8)
    prompts = [Prompt(str(number), "", random_tokens(number, 5, 6)) for number in range(20)]

    def write(*longer: int) -> list[list[int]]:
        texts = [replace(each, tokens=each.tokens * (5 if n in longer else 1)) for n, each in enumerate(prompts)]
        sizes.append(list(answers.split_heldout(texts).items()))
        return answers.HeldoutAnswers(drafter.target, Sampling(temperature), 4, set(), 0, tmp_path).get(texts, Group())[
            0
        ]

    sizes: list[list[tuple[int, int]]] = []
    first, second = write(), write(9)
    assert sizes == [[(0, 8), (8, 8), (16, 8)], [(0, 8), (8, 2), (10, 2), (12, 2), (14, 2), (16, 8)]]
    assert len(second) == 20 and first[:8] == second[:8] and first[16:] == second[16:] and first[9] != second[9]
    if not temperature:
        assert first[10:] == second[10:]


# When drafts are decoded


@pytest.fixture
def clock(monkeypatch):
    """Time that only decoding takes: 10 seconds a prompt. Answers and replays take none."""
    seconds = [0.0]
    monkeypatch.setattr(validate, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    monkeypatch.setattr(answers, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    measure = validate.measure

    def slow(*arguments, progress, **options):
        def iterate_groups(groups):
            for group in progress(groups):
                yield group
                seconds[0] += 10

        return measure(*arguments, progress=iterate_groups, **options)

    monkeypatch.setattr(validate, "measure", slow)
    return seconds


def test_decoding_keeps_to_its_share_of_the_training_time(make, drafter, clock):
    validation = make(drafter, share=0.1)
    validation.prompt_seconds = 10.0
    assert not judge(validation, drafter, trained=199.0).decoded  # 19.9 s are not enough for two prompts
    enough = make(drafter, share=0.1)
    enough.prompt_seconds = 10.0
    assert judge(enough, drafter, trained=200.0).num_prompts == 2
    report = judge(validation, drafter, trained=300.0)
    assert report.num_prompts == 3 and report.replayed_prompts == 5 and validation.seconds["decode"] == 30
    assert not judge(validation, drafter, trained=300.0).decoded  # spent
    assert not judge(validation, drafter, trained=9000.0, best=report.replayed_tau).decoded  # not better than the best
    assert judge(validation, drafter, trained=9000.0, best=1.0).num_prompts == 5
    assert "validation took 0.9 % of the 9000 s of training (decode 80.0 s)" in validation.describe_cost(9000.0)


def test_the_time_of_an_engine_does_not_put_off_the_figure_that_chooses(make, drafter, clock):
    """With decode=always there is no replay, so decoding alone chooses the best step."""
    validation = make(drafter, share=0.1, decode="always")
    validation.prompt_seconds, validation.seconds["engine"] = 10.0, 1000.0
    assert validation._affords_all_prompts(500.0) and not validation._affords_all_prompts(499.0)


def test_captured_rounds_serve_all_validations_of_a_run(make, small_target, drafter, monkeypatch):
    """The weights of each drafter are copied into one, whose rounds were captured in the first validation."""
    monkeypatch.delitem(small_target.__dict__, "reads_length", raising=False)
    later_drafter = drafter.frozen_copy()
    for parameter in later_drafter.parameters():
        parameter.data.mul_(0.5)
    with fast.force_paths("cache"):
        recorder = StepRecorder(monkeypatch)
        captured = make(drafter, replace(CHAIN, cuda_graphs=True), decode="always")
        plain = make(drafter, decode="always")
        for judged in (drafter, later_drafter, drafter):
            report, reference = judge(captured, judged), judge(plain, judged)
            assert (report.tau, report.num_prompts) == (reference.tau, 5) and report.ms_per_round.keys() == {"round"}
            assert same_weights(captured.twin.state_dict(), judged.state_dict())
    assert len(recorder.captured) == 2 and captured.runner.cuda_graphs  # a plain round, and one with drafts
    small_target.__dict__.pop("reads_length", None)


def test_the_end_decodes_at_least_two_prompts(make, drafter, clock):
    validation = make(drafter, share=0.0)
    report = judge(validation, drafter, required=True)
    assert not report.decoded and report.tau is None and report.speedup is None
    final = validation.decode_best(drafter, report, trained=100.0)
    assert final.num_prompts == 2 and final.replayed_tau == report.replayed_tau and final.step == report.step == 1
    assert make(drafter).decode_best(drafter, report, trained=0.0).num_prompts == 5  # share=null
    validation.prompts = validation.prompts[:1]
    assert validation.decode_best(drafter, report, trained=100.0).num_prompts == 1


def test_where_replay_does_not_apply_all_prompts_are_decoded_or_none(make, drafter, clock):
    tree = Drafting(depth=3, width=2, nodes=6)
    validation = make(drafter, tree, share=0.1)
    assert judge(validation, drafter, trained=100.0).num_prompts == 5 and validation.seconds["decode"] == 50
    assert judge(validation, drafter, trained=900.0) is None and "put off" in validation.shown[-1]
    assert judge(validation, drafter, trained=1000.0).num_prompts == 5
    assert judge(validation, drafter, trained=1000.0, required=True).num_prompts == 5
    report = judge(make(drafter, share=0.0, decode="always"), drafter)
    assert report.num_prompts == 5 and report.replayed_tau == pytest.approx(report.tau, abs=1e-9)
    assert judge(make(drafter, tree, decode="end"), drafter, trained=1e9).num_prompts == 5  # share=null


def test_the_better_candidate_is_kept(make, small_target):
    good = make_drafter(small_target, "eagle").frozen_copy()
    validation = make(good, share=0.0)
    bad = make_drafter(small_target, "eagle").frozen_copy()
    bad.fc.weight.zero_()
    taus = [judge(make(each, share=0.0), each).replayed_tau for each in (good, bad)]
    assert taus[0] != taus[1]
    for candidates in ({"plain": good, "average": bad}, {"plain": bad, "average": good}):
        kept, report = validation(candidates, step=1, trained=1.0, best=None, required=False)
        assert report.replayed_tau == max(taus) and candidates[report.ema["kept"]] is kept


# Decoding with auto


@pytest.mark.parametrize("drafting, temperature", [(CHAIN, 0.0), (CHAIN, 0.7), (Drafting(3, 2, 6), 0.0)])
def test_the_end_adds_auto_and_changes_nothing_else(make, drafter, drafting, temperature):
    validation = make(drafter, drafting, temperature=temperature, auto="end")
    report = judge(validation, drafter)
    assert report.decoded and report.auto is None and validation.needs_decoding(report)
    again = Report.from_json(report.to_json())  # as a resumed run reads it
    final = validation.decode_best(drafter, again, trained=100.0)
    assert replace(final, auto=None) == report and final.auto["num_prompts"] >= 2 and final.auto["speedup"] > 0
    assert sum(final.auto["sizes"].values()) >= final.auto["num_prompts"]  # a round for each prompt at least
    assert temperature or final.auto["identical_outputs"] == 1.0
    assert not validation.needs_decoding(final) and validation.seconds["auto"] > 0
    assert not make(drafter, drafting).needs_decoding(report)  # auto=never


def test_auto_takes_a_third_of_what_validation_took_at_most(make, drafter, clock):
    validation = make(drafter, auto="end")
    report = validation.decode_best(drafter, judge(validation, drafter), trained=100.0)
    assert report.num_prompts == 5 and validation.seconds["decode"] == 50
    assert report.auto["num_prompts"] == 2 and validation.seconds["auto"] == 20  # two at least: one has no interval
    validation.seconds["decode"] = 100.0
    report = validation.decode_best(drafter, replace(report, auto=None), trained=100.0)
    assert report.auto["num_prompts"] == 4  # a third of 120 s


def test_where_auto_cannot_draft_validation_goes_on(make, drafter, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("These layers see 8 positions.")

    validation = make(drafter, auto="end")
    monkeypatch.setattr(validate.AutoProposer, "make_default", refuse)
    report = validation.decode_best(drafter, judge(validation, drafter), trained=1.0)
    assert report.num_prompts == 5 and report.auto is None
    assert "speedup auto is left out: These layers see 8 positions." in validation.shown


# What a run leaves behind


@pytest.mark.full
def test_the_best_step_is_decoded_at_the_end(fit, monkeypatch, capsys):
    """Of three steps the second is the best. Only that is decoded, as reports, log and lines say."""
    judged = iter([0.1, 0.9, 0.5])
    validated, decoded = Validation.replay, []

    def replayed(self, frozen):
        share = next(judged)
        return [PromptReplay(each.prompt, 1.0, [share, 0.0]) for each in validated(self, frozen)]

    def decode(self, frozen, num):
        decoded.append({name: value.clone() for name, value in frozen.state_dict().items()})
        return original(self, frozen, num)

    original = Validation._decode
    monkeypatch.setattr(Validation, "replay", replayed)
    monkeypatch.setattr(Validation, "_decode", decode)
    fit("run", "train.steps=3", "train.validate_every=1", "validation.share=0.0")
    reports = [report_of("run", step) for step in (1, 2, 3)]
    assert Path("checkpoints/run/best").read_text().strip() == "step_000002"
    assert [report["tau"] is None for report in reports] == [True, False, True]
    assert [report["replayed_tau"] for report in reports] == [1.1, 1.9, 1.5] and reports[1]["num_prompts"] == 2
    assert len(decoded) == 1 and same_weights(weights_of("run", 2), decoded[0])
    assert reports[1]["training"]["tokens"] < reports[2]["training"]["tokens"]
    printed = capsys.readouterr().out
    assert "step 3, chain of 2, temperature 0, 2 held-out prompts replayed, not decoded: tau replayed 1.50" in printed
    assert "step 2, chain of 2, temperature 0, 2 held-out prompts" in printed and "best replayed tau 1.90" in printed
    assert [row["validation"]["step"] for row in log_of("run") if "validation" in row] == [1, 2, 3, 2]


@pytest.mark.full
@pytest.mark.parametrize(
    ("class_", "method"), [(Trainer, "_decode_best"), (RunFolder, "write_report"), (RunFolder, "finish")]
)
def test_a_run_that_died_at_its_last_decoding_does_it_when_resumed(fit, monkeypatch, class_, method):
    """Before it, between the log and the report, and after both: nothing is lost, and no line is there twice."""

    def die(*_):
        raise KeyError("power cut")

    options = ("train.steps=2", "train.validate_every=2", "train.save_every=1")
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(class_, method, die)
        fit("run", *options)
    (report,) = Path("checkpoints/run").glob("step_*/report.json")
    assert (json.loads(report.read_text())["tau"] is None) == (method != "finish")
    assert fit("run", *options, "resume=true") == 0
    document = json.loads(report.read_text())
    assert document["tau"] >= 1 and document["auto"]["sizes"] and Path("checkpoints/run/finished").exists()
    files.check_files(*report.parent.iterdir())
    lines = log_of("run")
    assert [(line["step"], "validation" in line) for line in lines] == [(1, False), (2, False), (2, True), (2, True)]
    assert lines[-2]["validation"]["tau"] is None and lines[-1]["validation"]["tau"] >= 1


def test_an_export_uses_a_report_without_decoding(make, small_target, drafter, tmp_path):
    report = judge(make(drafter, share=0.0), drafter)
    document = {"_target_": "specdec.heads.eagle.Eagle"}
    checkpoint.save(tmp_path / "step", drafter, document, extra={"report.json": report.to_json()})
    read = Provenance.read(tmp_path / "step", document, name="step", target=small_target, license="mit")
    assert read.report == report and read.num_drafts == 3
    assert f"5 prompts, temperature 0, chain of 3, by replay | {report.replayed_tau:.2f}" in write_expectations(read)
    decoded = judge(make(drafter), drafter)
    assert "by replay" not in write_expectations(replace(read, report=decoded)) and 1 <= choose_chain(decoded) <= 3
    assert choose_chain(replace(decoded, replayed_survival=[0.0] * 3)) == 1


# Along recorded answers, and the end of a training that no longer rises


def test_recorded_answers_are_replayed_each_at_its_temperature(fit, folder):
    """In place of data.heldout; the figure is that of the same answers alone."""
    tokenizer = load_tokenizer(str(folder / "target"))
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    rows = [{**row, "temperature": float(n % 3 == 0), "category": "ab"[n % 3 == 0]} for n, row in enumerate(rows)]
    write_rows(folder / "recorded.jsonl", rows)
    kept = f"validation.answers={folder / 'recorded.jsonl'}", "validation.num_prompts=6", "data.heldout=nowhere"
    assert fit("run", "head=mtp", *kept, "decode.depth=3", "validation.decode=end", "validation.auto=never") == 0
    report = report_of("run")
    drafter = checkpoint.load("checkpoints/run", Target.load(str(folder / "target"), dtype="float32"))
    chosen = reading.spread_rows(reading.load_conversations(str(folder / "recorded.jsonl")), 6)
    texts = [written_replay.encode_answered_prompt(tokenizer, row) for row in chosen]
    assert {text.temperature for text in texts} == {0.0, 1.0} and report["replayed_prompts"] == 6
    counts = written_replay.count_replays(written_replay.replay_texts(drafter, texts, depth=3, label=""))
    assert report["replayed_tau"] == pytest.approx(compute_tau(counts), abs=1e-6)
    assert set(report["by_category"]) == {"a", "b"}


def test_training_ends_after_validations_without_a_rise(fit, capsys):
    """With train.validate_first=true the start is validated, too."""
    often = "train.validate_every=2", "train.steps=40", "train.patience=2", "optimizer.lr=0", "validation.auto=never"
    assert fit("run", "head=mtp", *often, "train.validate_first=true") == 0
    assert [row["step"] for row in log_of("run") if "validation" in row and not row.get("last")] == [0, 2, 4]
    assert Path("checkpoints/run/finished").read_text() == "4\n"
    assert Path("checkpoints/run/best").read_text() == "step_000000\n"
    assert report_of("run", 0)["training"]["tokens"] == 0 and report_of("run", 0)["replayed_tau"] >= 1
    assert "tau has not risen in 2 validations" in capsys.readouterr().out
    fit_interrupted(fit, "died", "head=mtp", *often)  # what it waited for is in the state
    assert Path("checkpoints/died/finished").read_text() == "6\n"

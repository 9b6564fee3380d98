"""Tests of validation.engine=: heads go into a running engine, which answers the held-out prompts under load."""

from specdec.options.command_line import read_command

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specdec import checkpoint
from specdec.core import files
from specdec.core.sampling import Sampling
from specdec.engines import client
from specdec.engines.engine_target import EngineTarget
from specdec.heads.draft import Draft
from specdec.measuring.measure import MeasureSettings
from specdec.measuring.model_card import Provenance, write_expectations
from specdec.measuring.report import Report
from specdec.target.model import Target
from specdec.text.conversations import Prompt
from specdec.tools.server.app import make_app
from specdec.tools.server.serve import ServeOptions, find_presets, load_server
from tests.engines.tiny_engine import TinyEngine
from tests.support.commands import write_rows
from tests.support.drafters import make_drafter
from tests.support.processes import fit_together
from tests.support.runs import PowerCutError, before_steps, cut_power, log_of, report_of, train_overrides
from tests.support.small_server import SmallServer
from tests.support.targets import small_tokenizer
from tests.tools.judge.test_judge import Drafting, K, no_fault
from tests.tools.server.running import running
from train.loop.served_validation import ServedValidation
from train.processes import ProcessGroup
from train.settings.options import ValidationOptions
from train.show import run_page, tracking
from train.show.served import draw_served

NUM = 5  # held-out prompts
REPLAYED = {"replayed_prompts": 8, "replayed_tau": 1.8, "replayed_tau_ci": [1.7, 1.9], "shape": "chain of 2"}
CUT = ()  # reply of a server that cuts the connection
SHORT = (f"decode.depth={K}", "train.steps=4", "train.validate_every=2", "validation.share=null",
         "validation.loads=[1,4]", "validation.max_new_tokens=12", "validation.timeout=5", "validation.auto=never",
         "validation.decode=end", "head=eagle3")  # fmt: skip
OPTIONS = {"num_prompts": NUM, "max_new_tokens": 12, "temperature": 0.0, "decode": "best", "auto": "never",
           "share": None, "answers": "answers"}  # fmt: skip


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(client, "LONGEST_PAUSE", 0.02)


class TakingWeights(Drafting):
    """A stand-in for this project's server, with random rounds for each prompt. It takes every folder.

    refuse: called with path and body of every request; its reply takes the place of the usual one; CUT: none comes
    """

    def __init__(self, kind: str = "specdec", *, takes: bool = True, drafts: bool = True):
        super().__init__(kind, drafts=drafts)
        self.takes, self.versions = takes, list[str]()
        self.rows: int | None = None
        self.folders = list[Path]()
        self.refuse: Callable = no_fault

    def _reply(self, path: str, body: dict | None):
        if (reply := self.refuse(path, body, len(self.versions))) is not None:
            return None if reply == CUT else reply
        if path == "v1/models":
            draft = {"takes_weights": self.takes, "drafts": K if self.drafts else None}
            draft["version"] = self.versions[-1] if self.versions else None
            entry = {"id": "target", "owned_by": self.kind, "max_model_len": 64, "draft": draft, "rows": self.rows}
            return 200, {"data": [entry]}
        if path in ("init_weight_transfer_engine", "start_draft_weight_update", "finish_weight_update"):
            return 200, {}
        if path == "v1/draft_weights":
            self.versions.append(body["version"])
            self.folders.append(Path(body["folder"]))
            assert (self.folders[-1] / "drafter.safetensors").exists()
            return 200, {"version": body["version"], "seconds": 0.25}
        return super()._reply(path, body)


@pytest.fixture
def prompts(tmp_path) -> str:
    write_rows(tmp_path / "held-out.jsonl", [{"prompt": f"Count from {number}."} for number in range(NUM)])
    return f"data.heldout={tmp_path}/held-out.jsonl"


@pytest.fixture
def train(fit, prompts):
    """train(engine, "key=value", ...) trains with the engine; its exit status"""

    def run(engine: SmallServer, *overrides: str, name: str = "served") -> int:
        return fit(name, *SHORT, prompts, f"validation.engine={engine.url}", *overrides)

    return run


# What each validation leaves behind


def test_every_validation_asks_the_engine_with_its_head(train, capsys):
    with TakingWeights() as engine, Drafting("specdec", drafts=False) as baseline, pytest.warns(UserWarning) as warned:
        assert train(engine, f"validation.baseline={baseline.url}") == 0
    assert engine.versions == [f"served/step-{step}" for step in (0, 2, 4)]  # the end has nothing to add
    assert [path.name for path in Path("checkpoints/served/served").iterdir()] == ["step-4"]
    rows = [row for row in log_of("served") if "validation" in row]
    assert [list(row["validation"]["served"]["loads"]) for row in rows] == [["1", "4"]] * len(rows) and len(rows) > 1
    check_served(report_of("served", 2)["served"])
    (warning, *_) = [str(warning.message) for warning in warned if "NOT what was trained" in str(warning.message)]
    assert warning.startswith("step 2, 1 at once:") and warning.endswith("is the first.")
    printed = capsys.readouterr().out
    assert f"target of specdec at {engine.url} gets the head of each validation; 3 drafts a round, 1, 4" in printed
    assert f"step 2, served by specdec at {engine.url}: served/step-2, put in within" in printed
    assert "step 2, served, 4 at once: tau " in printed and "times plain" in printed and "; replayed" in printed


def check_served(served: dict) -> None:
    assert served["prompts"] == NUM and served["swap_seconds"] > 0 and served["kind"] == "specdec"
    for level in served["loads"].values():
        assert level["answers"] == NUM and 1 < level["tau"] < K + 1 and not level["failed"]
        assert level["user_speedup"] > 0 and level["speedup"] > 0 and level["user_tokens_per_second"] > 0
        assert level["difference"] == pytest.approx(level["tau"] - level["replayed_tau"])
        assert level["first_difference"]["served"] != level["first_difference"]["replayed"]


def test_time_for_the_engine_is_a_share_of_training_and_the_end_asks_all(train, capsys):
    with TakingWeights() as engine, pytest.warns(UserWarning):
        assert train(engine, "validation.share=0", "validation.loads=[2]") == 0
    rows = [row["validation"] for row in log_of("served") if "validation" in row]
    assert [row.get("served", {}).get("prompts") for row in rows] == [None, None, NUM]
    assert "step 2: the engine is not asked: validation.share leaves too little time" in capsys.readouterr().out


@pytest.mark.full
def test_a_resumed_run_asks_another_engine(fit, prompts):
    with TakingWeights() as engine, TakingWeights() as second, pytest.warns(UserWarning):
        run = (*SHORT, prompts, "validation.loads=[2]", "train.validate_every=1")
        with before_steps(cut_power(3)), pytest.raises(PowerCutError):
            fit("served", *run, f"validation.engine={engine.url}")
        assert fit("served", *run, f"validation.engine={second.url}", "validation.loads=[1]", "resume=true") == 0
    assert engine.versions == [f"served/step-{step}" for step in (0, 1, 2, 3)]
    assert second.versions[:3] == [f"served/step-{step}" for step in (0, 3, 4)]
    rows = {row["step"]: row["validation"]["served"] for row in log_of("served") if "validation" in row}
    assert [list(rows[step]["loads"]) for step in (1, 3)] == [["2"], ["1"]]
    names = {path.name for path in Path("checkpoints/served/served").iterdir()}
    assert names == {"step-3", Path(second.versions[-1]).name}  # an engine may have been started with the first


@pytest.mark.full
def test_two_processes_ask_once_and_both_know_the_figures(folder, prompts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with TakingWeights() as engine:
        engine.refuse = lambda path, body, num: (401, "no") if num == 3 and path == "v1/completions" else None
        overrides = train_overrides(folder, "served", *SHORT, prompts, f"validation.engine={engine.url}")
        outputs = fit_together(tmp_path, [{"run": "served", "overrides": overrides}])
    rows = [row["validation"]["served"] for row in log_of("served") if "validation" in row]
    assert engine.versions[:3] == [f"served/step-{step}" for step in (0, 2, 4)]
    assert list(rows[0]["loads"]) == ["1", "4"] and rows[0]["loads"]["1"]["replayed_tau"] >= 1
    assert "None of" in rows[1]["error"] and "step 2, served, 4 at once: tau" in outputs[0]


# What is refused before the first step


@pytest.fixture
def make(target, tmp_path):
    """make(engine, key=value ..) -> the validation of prompts by a tiny target in an engine, and its check"""

    def served(server: SmallServer, *, depth: int = K, **changed) -> ServedValidation:
        names = {"engine": server.url, "baseline": None, "loads": [1, 2], "engine_folder": None, "timeout": 5.0}
        options = ValidationOptions(**OPTIONS | names | changed)
        prompts = [Prompt(f"prompt {number}", "", [3, 4, number]) for number in range(NUM)]
        console = SimpleNamespace(say=lambda line: printed.append(line))
        spec, measuring = {"_target_": "specdec.heads.eagle.Eagle"}, MeasureSettings(Sampling(), {2}, 12)
        made = ServedValidation(options, depth, measuring, prompts, spec, tmp_path, ProcessGroup(0, 1), console)
        made.console.printed = printed = list[str]()
        return made

    return served


def check(served: ServedValidation, target, head: str = "eagle") -> str:
    return served.check_servers(target, small_tokenizer(), make_drafter(target, head).frozen_copy())


@pytest.mark.parametrize(
    ("settings", "changed", "sentence"),
    [
        ({}, {"depth": 2}, "drafts 3 tokens a round, and decode.depth=2: give decode.depth=3, or start the engine "
         "with proposer=head decode.depth=2"),
        ({"drafts": False}, {}, "does not draft: start it with a head"),
        ({"takes": False}, {}, "takes no draft weights. Start it again with allow_weights=FOLDER"),
        ({"kind": "llamacpp"}, {}, "takes no draft weights while it runs: restart it with each head"),
        ({}, {"engine": "http://127.0.0.1:9,http://127.0.0.1:8"}, "one engine is asked at a time, so give one URL"),
        ({}, {"engine": "here"}, "'here' is not the URL of a server"),
        ({}, {"engine": "http://127.0.0.1:9"}, "engine=http://127.0.0.1:9: No server with OpenAI's interface"),
        ({}, {"baseline": "http://127.0.0.1:9"}, "baseline=http://127.0.0.1:9: No server with OpenAI's interface"),
    ],
)  # fmt: skip
def test_servers_that_will_not_do_are_refused(make, target, settings, changed, sentence):
    with TakingWeights(**settings) as engine, pytest.raises(ValueError, match=f"^validation..*{sentence}"):
        check(make(engine, **changed), target)
    assert not engine.versions


def test_a_baseline_must_not_draft_and_may_be_the_engine_where_that_can_leave_drafts_out(make, target):
    with TakingWeights() as engine, Drafting("vllm") as baseline:
        with pytest.raises(ValueError, match=r"^validation.baseline=.* drafts, too: give the URL of a server of the"):
            check(make(engine, baseline=baseline.url), target)
        assert f"beside {engine.url} without drafts" in check(make(engine, baseline=engine.url), target)


def test_a_baseline_of_another_name_is_pointed_out_and_one_of_another_tokenizer_refused(make, target):
    with TakingWeights() as engine, Drafting("specdec", drafts=False) as baseline:
        note = "validation.baseline= serves small, and engine= target: make sure that they are the same."
        assert note in check(make(engine, baseline=baseline.url), target)
        reply = baseline.reply
        baseline.reply = lambda path, body: (200, {"tokens": [1] * 9}) if path == "tokenize" else reply(path, body)
        with pytest.raises(ValueError, match=rf"^validation.baseline={baseline.url}: The server's tokenizer is"):
            check(make(engine, baseline=baseline.url), target)


def test_the_start_says_why_a_prompt_is_refused_and_which_loads_wait(make, target):
    with TakingWeights() as engine:
        engine.rows = 4
        assert "Of 9 requests it answers 4 at once, and the others wait: start it with rows=9" in check(
            make(engine, loads=[1, 9]), target
        )
        engine.spoil = lambda *_: (400, "the prompt is too long")
        with pytest.raises(ValueError, match=r"^validation.engine=.*status 400: the prompt is too long"):
            check(make(engine), target)


@pytest.mark.parametrize(
    ("kind", "head", "path", "reply", "sentence"),
    [
        ("specdec", "eagle", "tokenize", {"tokens": [1] * 9}, "tokenizer is not the target's: it gives 9 ids"),
        ("specdec", "eagle", "v1/models", "nonsense", "No server with OpenAI's interface answers"),
        ("specdec", "eagle", "v1/draft_weights", "Weights are taken from /a (allow_weights=) only.",
         "Weights are taken from /a"),
        ("specdec", "eagle", "v1/draft_weights", "step-0 has another target.", "step-0 has another target"),
        ("vllm", "hydra", "", "", "format=vllm takes .* and not Hydra"),
    ],
)  # fmt: skip
def test_what_speaks_against_the_head_is_passed_on(make, target, kind, head, path, reply, sentence):
    status = {"v1/draft_weights": 403 if "allow" in reply else 400}.get(path, 200)
    with TakingWeights(kind) as engine:
        engine.refuse = lambda asked_path, *_: (status, reply) if asked_path == path else None
        with pytest.raises(ValueError, match=f"^validation.engine={engine.url}: .*{sentence}"):
            check(make(engine), target, head)


def test_heads_that_change_the_target_are_refused_and_a_plan_says_what_would_be_asked(train, capsys):
    with TakingWeights() as engine:
        with pytest.raises(ValueError, match="the head changes the target, and the engine has the original one"):
            train(engine, "head=medusa2")
        with pytest.raises(ValueError, match=r"validation.baseline=a is compared with an engine: give validation"):
            train(engine, "validation.engine=null", "validation.baseline=a")
        assert train(engine, "plan=true", "decode.depth=1") == 0
    printed = capsys.readouterr().out
    assert "does not fit: validation.engine=" in printed and "plan for checkpoints/served" in printed
    assert not engine.versions


# What happens to a running engine


def measure(served: ServedValidation, head, num: int = NUM, report: Report | None = None) -> Report:
    """The report of a validation of step 1."""
    report = report or Report(0.0, num_prompts=0, num_rounds=0, step=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rounds of the stand-in are not those of the head
        return served(report, head, num, served.options.loads)


@pytest.fixture
def head(target):
    return make_drafter(target, "eagle").frozen_copy()


def fail_after(num: int, reply: tuple) -> Callable:
    """A fault: after `num` requests for whole answers each has this reply"""
    count = itertools.count(1)
    return lambda path, body, _: reply if body and body.get("max_tokens") == 12 and next(count) > num else None


@pytest.mark.parametrize("reply", [(503, "restarting"), (429, "full", {"Retry-After": "0"}), (200, "{}"), CUT])
def test_an_engine_that_fails_is_named_and_what_it_answered_is_kept(make, head, reply):
    """At load 2; the next call measures all, and one that fails later takes nothing away."""
    with TakingWeights() as engine:
        served = make(engine, timeout=0.5)
        engine.refuse = fail_after(NUM, reply)
        report = measure(served, head)
        assert list(report.served["loads"]) == ["1"] and report.served["loads"]["1"]["answers"] == NUM
        assert "None of" in report.served["error"] or "No server has answered" in report.served["error"]
        assert any("left out until the next validation" in line for line in served.console.printed)
        assert served.is_partial(report)
        engine.refuse = no_fault
        report = measure(served, head)
        assert list(report.served["loads"]) == ["1", "2"] and not served.is_partial(report)
    assert measure(served, head, report=report) == report and "No server with OpenAI" in served.console.printed[-1]
    gone = measure(served, head)
    assert gone.served["loads"] == {} and "No server with OpenAI's interface answers" in gone.served["error"]


def test_a_silent_engine_is_given_up(make, head):
    with TakingWeights() as engine:
        engine.refuse = lambda path, body, _: time.sleep(1.0) if body and "prompt" in body else None
        started = time.monotonic()
        report = measure(make(engine, timeout=0.2), head)
    assert "No server has answered for" in report.served["error"] and time.monotonic() - started < 5


def test_an_engine_that_fails_takes_only_what_it_answers_again(make, head):
    """Loads of an earlier call stay where fewer are complete now, and are replaced by more answers."""
    with TakingWeights() as engine:
        served = make(engine, loads=[1, 2])
        engine.refuse = fail_after(2, (401, "no"))
        few = measure(served, head)
        engine.refuse = fail_after(2 * NUM - 2, (401, "no"))
        more = measure(served, head, report=few)
        assert more.served["loads"]["2"]["answers"] > 0 == len(few.served["loads"].get("2", []))
        engine.refuse = fail_after(3, (401, "no"))
        assert measure(served, head, report=more) == more and "None of" in served.console.printed[-2]


@pytest.mark.parametrize("load", [1, NUM])
def test_single_requests_that_fail_are_counted_and_the_rest_is_measured(make, head, load):
    """Also where the first one is refused, alone before the measurement."""
    with TakingWeights() as engine:
        engine.spoil = lambda path, body, times: (400, "too long") if body["prompt"] == [3, 4, 0] else None
        served = make(engine, loads=[load])
        level = measure(served, head).served["loads"][str(load)]
    assert level["answers"] == NUM - 1 and len(level["failed"]) == 1 and level["tau"] > 1
    assert "1 request failed" in served.console.printed[-1]


def test_one_prompt_gives_no_intervals_and_no_verdict(make, head):
    with TakingWeights() as engine, Drafting("specdec", drafts=False) as baseline:
        served = make(engine, baseline=baseline.url)
        report = Report(0.0, num_prompts=0, num_rounds=0, step=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            level = served(report, head, 1, served.options.loads).served["loads"]["2"]  # twice the same prompt
    assert level["tau"] > 1 and "cannot be told" in level["verdict"] and level["user_speedup"] > 0
    assert {level[name] for name in ("tau_ci", "difference_ci", "replayed_tau_ci", "user_speedup_ci")} == {None}
    assert any("; replayed" in line for line in served.console.printed)
    assert draw_served({1: {"served": {"loads": {"2": level}}}})[0].spans == [(level["tau"], level["tau"])]


def test_a_lost_baseline_costs_its_own_figures_only(make, head):
    with TakingWeights() as engine, Drafting("specdec", drafts=False) as baseline:
        served = make(engine, baseline=baseline.url)
        assert measure(served, head).served["loads"]["1"]["user_speedup"] > 0
    with engine:
        report = measure(served, head)
    assert report.served["loads"]["1"]["tau"] > 1 and "user_speedup" not in report.served["loads"]["1"]
    assert any("nothing is compared with plain answers" in line for line in served.console.printed)


def test_a_baseline_that_is_lost_in_the_middle_leaves_the_figures_before_and_the_drafts(make, head):
    with TakingWeights() as engine, Drafting("specdec", drafts=False) as baseline:
        count = itertools.count(1)
        baseline.spoil = lambda path, body, _: (401, "no") if body["max_tokens"] == 12 and next(count) > 3 else None
        served = make(engine, baseline=baseline.url)
        levels = measure(served, head).served["loads"]
    assert [level["answers"] for level in levels.values()] == [NUM, NUM]
    assert levels["1"]["user_speedup"] > 0 and "user_speedup" not in levels["2"]
    assert sum("nothing more is compared with plain answers" in line for line in served.console.printed) == 1


def test_a_head_of_another_run_at_the_same_engine_is_an_error(make, head):
    with TakingWeights() as engine:
        report = measure(make(engine, depth=2, loads=[1]), head)
        assert "drafts 3 tokens a round, and decode.depth=2" in report.served["error"]
        engine.refuse = lambda path, body, _: engine.versions.append("other/step-9") if path == "metrics" else None
        served = make(engine, loads=[1])
        report = measure(served, head)
    assert f"other/step-9 by now, not with {served.folder.name}/step-1" in report.served["error"]
    assert served.is_partial(report)
    assert report.served["loads"]["1"]["answers"] == NUM


def test_loads_above_the_rows_of_the_engine_and_repeated_prompts_are_labelled(make, head):
    with TakingWeights() as engine:
        engine.rows = 2
        served = make(engine, loads=[1, 4])
        report = measure(served, head, 2)
    assert "rows" not in report.served["loads"]["1"] and report.served["loads"]["4"]["prompts"] == 2
    line = served.console.printed[-1]
    assert line.startswith("step 1, served, 4 at once (2 of them, and others wait): tau ")
    assert "of 2 prompts, 4 answers; " in line


def test_under_a_share_few_requests_are_sent_until_their_time_is_known(make, head):
    with TakingWeights() as engine:
        served = make(engine, loads=[1, 8, 32])
        assert served.plan(None) == (NUM, [1, 8, 32]) and served.plan(0.0) == (0, [])
        assert served.plan(0.1) == (2, [1]) and make(engine, loads=[8]).plan(0.1) == (NUM, [8])
        report = measure(served, head, 2)
        assert served.request_seconds == report.served["seconds"] / (2 + 8 + 32)
        served.request_seconds = 1.0
        assert [served.plan(seconds) for seconds in (5.9, 14.0, 45.0)] == [(0, []), (4, [1, 8]), (NUM, [1, 8, 32])]
        assert served.is_partial(replace(report, served=report.served | {"prompts": NUM, "loads": {"1": {}}}))


def test_a_difference_below_the_tolerance_is_told_without_a_warning(make):
    served = make(TakingWeights())
    level = FIGURES["loads"]["1"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served._tell(1, FIGURES | {"loads": {"1": level | {"verdict": "served = trained: tau 1.9"}}})
        assert "step 1, 1 at once: the difference from replay is real, and below the 5%" in served.console.printed[-1]
        with pytest.raises(UserWarning, match="step 1, 1 at once: served is NOT what was trained Round 4 of prompt 7"):
            served._tell(1, FIGURES | {"loads": {"1": level}})


# The folders of heads


def test_folders_of_others_are_kept_and_named(make, head, tmp_path):
    """Of another run, of a user, and of an earlier launch of this run, with which an engine may have been started."""
    folder = tmp_path / "heads" / tmp_path.name
    for name in ("step-1", "step-7"):
        (folder / name).mkdir(parents=True)
        (folder / name / "SHA256SUMS").write_text("")
    with TakingWeights() as engine:
        served = make(engine, engine_folder=str(tmp_path / "heads"))
        report = measure(served, head)
        assert f"{folder}/step-1 exists, and {tmp_path} has not written it" in report.served["error"]
        (folder / "step-1" / "SHA256SUMS").unlink()
        (folder / "step-1").rmdir()
        for later in (served, make(engine, engine_folder=str(tmp_path / "heads"))):  # the second is a resumed run
            for step in (1, 2, 3):
                report = measure(later, head, report=Report(0.0, num_prompts=0, num_rounds=0, step=step))
                assert "error" not in report.served and engine.folders[-1] == folder / f"step-{step}"
    assert sorted(path.name for path in folder.iterdir()) == ["step-3", "step-7"]


def test_a_head_that_cannot_be_removed_costs_a_line_only(make, head, monkeypatch):
    def fail(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(files, "remove_folder", fail)
    with TakingWeights() as engine:
        served = make(engine, loads=[1])
        for step in (1, 2):
            report = measure(served, head, report=Report(0.0, num_prompts=0, num_rounds=0, step=step))
    assert "error" not in report.served and report.served["version"].endswith("step-2")
    assert any("A head that is not served any more stays: " in line for line in served.console.printed)


def test_answers_with_tokens_that_the_target_lacks_are_an_error(make, small_target):
    with TakingWeights() as engine:
        report = measure(make(engine), make_drafter(small_target, "eagle").frozen_copy())
    assert "tiny has 6 tokens: it serves another model" in report.served["error"] and not report.served["loads"]


def test_answers_are_replayed_by_the_servers_that_read_texts(make, head, target, tmp_path):
    """With features.engine=, whose loss costs the comparison only."""
    reading = TinyEngine(target, sorted({*head.target_layers, target.num_layers}), tmp_path)
    with TakingWeights() as engine:
        served = make(engine, loads=[1])
        expected = measure(served, head).served["loads"]["1"]
        with reading, contextlib.closing(client.EngineClient(reading.url, patience=0.001)) as opened:
            served.reader = EngineTarget(opened, target, head.target_layers)
            level = measure(served, head).served["loads"]["1"]
            assert level["replayed_tau"] == pytest.approx(expected["replayed_tau"]) and len(reading.completions) > NUM
            reading.spoil = lambda number, reply: reply.update(answer=None)
            level = measure(served, head).served["loads"]["1"]
    assert level["tau"] == expected["tau"] and "nothing is compared with replay: No server has" in level["verdict"]


# What is shown


FIGURES = {
    "url": "http://a", "baseline": "http://b", "drafts": 2, "kind": "vllm", "model": "m", "version": "step-4",
    "swap_seconds": 0.5, "prompts": 8, "seconds": 12.0,
    "loads": {
        "1": {"answers": 8, "failed": [], "tau": 1.9, "tau_ci": [1.8, 2.0], "user_tokens_per_second": 40.0,
              "replayed_tau": 1.8, "replayed_tau_ci": [1.7, 1.9], "difference": 0.1, "difference_ci": [0.05, 0.15],
              "verdict": "served is NOT what was trained", "first_difference": {"round": 3, "prompt": "7"}},
        "8": {"answers": 8, "failed": [], "tau": 1.7, "tau_ci": [1.6, 1.8], "user_speedup": 1.2, "verdict": "v",
              "user_speedup_ci": [1.1, 1.3]},
    },
}  # fmt: skip


def test_trackers_page_and_card_have_the_figures_of_the_engine():
    report = Report(0.0, num_prompts=0, num_rounds=0, step=4, served=FIGURES)
    assert Report.from_json(report.to_json()) == report and "served" not in replace(report, served=None).to_json()
    figures = tracking.list_figures("validation", report.to_json())
    assert (figures["served/1_tau"], figures["served/1_tau_low"], figures["served/8_user_speedup"]) == (1.9, 1.8, 1.2)
    assert figures["served/swap_seconds"] == 0.5 and not any(name.startswith("validation/served") for name in figures)
    assert tracking.list_figures("best", report.to_json())["best/served/1_difference_high"] == 0.15
    card = write_expectations(Provenance("a", {}, "b", "c", replace(report, **REPLAYED), {}, "d", "e", 2))
    assert "| vllm, while training | 8 prompts, 8 at once, chain of 2 | 1.70 (1.60 .. 1.80) |" in card
    (section,) = (section for section in run_page.list_sections(replace(report, **REPLAYED), [], {}, Path("a"))
                  if section.heading == "In an engine")  # fmt: skip
    assert section.table.rows[0][:5] == ["1", "8", "1.90 (1.80 .. 2.00)", "1.80",
                                         "+0.100 (+0.050 .. +0.150)"]  # fmt: skip
    assert "1 at once: served is NOT what was trained" in section.points
    rows = [{"step": step, "validation": {"served": FIGURES if step else {"error": "gone", "loads": {}}}}
            for step in (0, 2, 4)]  # fmt: skip
    curves = draw_served({row["step"]: row["validation"] for row in rows})
    assert [curve.points for curve in curves] == [[(2, 1.9), (4, 1.9)], [(2, 1.8), (4, 1.8)]]
    assert not any(curve.points for curve in draw_served({0: {}}))


# This project's own server


@contextlib.contextmanager
def own_server(folder: Path, allowed: Path, *, depth: int) -> Iterator[str]:
    """This project's server with the head in `folder`, in this process; its URL"""
    arguments = [f"checkpoint={folder}/head", f"target.name={folder}/target", "target.dtype=float64", "proposer=head",
                 f"decode.depth={depth}", f"allow_weights={allowed}", "rows=4"]  # fmt: skip
    served = load_server(read_command("serve", ServeOptions, "", arguments, presets=find_presets))
    with running(make_app(served)) as url:
        yield url


@pytest.fixture(scope="module")
def noisy_head(folder) -> Path:
    """A folder with a target, rows, and a head that is the target with noise."""
    target = Target.load(str(folder / "target"), dtype="float64")
    torch.manual_seed(0)
    head = Draft(target, copy_layers=list(range(target.num_layers)))
    for parameter in head.parameters():
        parameter.data += 0.004 * torch.randn_like(parameter)
    checkpoint.save(folder / "head", head, {"_target_": "specdec.heads.draft.Draft"})
    return folder


@pytest.mark.full
def test_the_server_of_this_project_serves_what_is_trained(fit, prompts, noisy_head, tmp_path, capsys):
    """Of a head that training spoils, each validation serves the tau that replay gives, round by round."""
    run = (*SHORT, "head=draft", "head.vocab_size=null", prompts, f"start={noisy_head}/head", "optimizer.lr=0.005",
           "train.validate_first=true", "target.dtype=float64", "validation.loads=[3]")  # fmt: skip
    with own_server(noisy_head, tmp_path, depth=K) as url:
        assert fit("served", *run, f"validation.engine={url}", f"validation.baseline={url}") == 0
    rows = {row["step"]: row["validation"] for row in log_of("served") if "validation" in row and not row.get("last")}
    taus = {step: row["served"]["loads"]["3"]["tau"] for step, row in rows.items()}
    assert list(taus) == [0, 2, 4] and taus[0] > 1.5 > 1.2 > taus[2]
    for step, row in rows.items():
        assert row["served"]["version"] == f"served/step-{step}" and "error" not in row["served"]
        for level in row["served"]["loads"].values():
            assert level["answers"] == NUM and level["tau"] == level["replayed_tau"] and level["difference"] == 0
            assert "served = trained" in level["verdict"] and level["first_difference"] is None
            assert level["user_speedup"] > 0
    assert "warning" not in capsys.readouterr().err

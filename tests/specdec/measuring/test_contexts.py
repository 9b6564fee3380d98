"""Acceptance by context: buckets computed by hand, sums that give the pooled tau, and pages with and without them."""

import json
import math
import types
from dataclasses import replace

import pytest
import torch

from specdec.core.generation import Generation
from specdec.measuring.contexts import (
    AXES,
    LAST,
    TrainedLength,
    count_contexts,
    count_decoded,
    find_bucket,
    find_end,
    list_context_sections,
    read_buckets,
    summarise_contexts,
)
from specdec.measuring.measure import PromptResult, make_prompt_replay
from specdec.measuring.report import (
    PromptCounts,
    Report,
    add_replays,
    bootstrap_interval,
    compute_tau,
    make_undecoded_report,
    summarise,
    summarise_by_category,
)
from specdec.measuring.results_page import ResultsPage
from specdec.measuring.servers.referee import ServedAnswer, Speculation
from specdec.text.conversations import Prompt
from specdec.unroll import replay


def make_results(num: int = 20) -> list[PromptResult]:
    """Answers of 40 rounds that accept 0 to 3 drafts, to prompts of 200, 400, 600 .. tokens."""
    generator = torch.Generator().manual_seed(0)
    results = []
    for number in range(num):
        accepted = torch.randint(4, (40,), generator=generator).tolist()
        tokens = [[0] * (1 + sum(accepted) + len(accepted))]
        drafted, plain = Generation(tokens, [accepted], [3] * 40, seconds=0.5), Generation(tokens, [[]], seconds=1.0)
        prompt = Prompt(str(number), "ab"[number % 2], [0] * (200 * number + 200))
        results.append(PromptResult(prompt, plain, drafted, math.nan, [], None))
    return results


def test_buckets_are_powers_of_two_without_gaps():
    for axis in AXES:
        firsts = sorted({find_bucket(num, axis) for num in range(2 * LAST + 9)})
        ends = [find_end(first, axis) for first in firsts]
        assert firsts[0] == 0 and ends == [*firsts[1:], None]
        assert all(find_bucket(end - 1, axis) == first for first, end in zip(firsts, ends) if end)
    assert (
        find_bucket(256, "context") == 256 and find_bucket(255, "context") == 0 and find_bucket(10**6, "answer") == LAST
    )


def test_rounds_are_counted_where_they_begin():
    """The first round begins behind the prompt's 253 tokens and the answer's first one."""
    counts = count_decoded("q", 253, [2, 3, 30, 1]).counts
    assert counts["context"] == {0: (1, 2), 256: (3, 34)}  # at 254, 256, 259, 289
    assert counts["answer"] == {0: (3, 35), 32: (1, 1)}  # at 1, 3, 6, 36
    unknown = count_decoded("q", None, [2, 3, 30, 1]).counts
    assert unknown == {"context": {}, "answer": counts["answer"]}


def test_the_sums_of_buckets_give_the_pooled_tau():
    results = make_results()
    report = summarise(results, depth=3, temperature=0)
    for axis in AXES:
        buckets = read_buckets(report.contexts, axis)
        assert len(buckets) > 2
        rounds = sum(bucket.rounds for bucket in buckets)
        emitted = sum(bucket.emitted for bucket in buckets)
        assert rounds == report.num_rounds and emitted / rounds == report.tau == compute_tau(results)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replayed_buckets_give_the_replayed_tau(temperature):
    """Also where acceptances are probabilities, and rounds begin at a place with one."""
    generator = torch.Generator().manual_seed(1)
    replays = []
    for number in range(9):
        acceptance = torch.rand(3, 60 + number, generator=generator, dtype=torch.float64)
        acceptance = acceptance if temperature else (acceptance > 0.5).double()
        replays.append(make_prompt_replay(Prompt(str(number), "", [0] * 230), replay.Replay(acceptance)))
    report = add_replays(make_undecoded_report(temperature), replays)
    for axis in AXES:
        buckets = read_buckets(report.replayed_contexts, axis)
        rounds = sum(bucket.rounds for bucket in buckets)
        emitted = sum(bucket.emitted for bucket in buckets)
        assert len(buckets) > 1 and emitted == pytest.approx(sum(59 + number for number in range(9)))
        assert emitted / rounds == pytest.approx(report.replayed_tau, rel=1e-12)


def test_intervals_are_those_of_the_bootstrap_and_small_buckets_have_none():
    results = make_results(20)
    buckets = read_buckets(summarise(results, depth=3, temperature=0).contexts, "answer")
    for bucket in buckets:
        counts = [result.contexts.counts["answer"].get(bucket.first) for result in results]
        items = [PromptCounts(*count) for count in counts if count]
        assert bucket.questions == len(items)
        assert bucket.tau_ci == pytest.approx(bootstrap_interval(items, compute_tau, 0))
    few = read_buckets(summarise(results[:7], depth=3, temperature=0).contexts, "answer")
    assert {bucket.tau_ci for bucket in few} == {None} and str(few[0]).endswith(", n 7")
    turns = [replace(result, prompt=replace(result.prompt, question="q")) for result in results]
    assert read_buckets(summarise(turns, depth=3, temperature=0).contexts, "answer")[0].questions == 1


def test_a_page_has_both_axes_and_an_older_report_has_none():
    report = summarise_by_category(make_results(), depth=3, temperature=0)
    read_back = Report.from_json(json.loads(json.dumps(report.to_json())))
    assert read_back == report and read_back.by_category["a"].contexts is None
    sections = list_context_sections({"head": read_back.contexts, "older": None})
    assert [section.heading for section in sections] == [f"Acceptance length by {unit}" for unit in AXES.values()]
    assert sections[0].table.heads[:3] == ["method", "0-255", "256-511"] and len(sections[0].table.rows) == 1
    assert ">2K<" in sections[0].charts[0] and "<path" in sections[0].charts[0]
    assert list_context_sections({"older": None}) == []
    one = summarise_contexts([count_contexts("q", 5, [(1, 1.0, 2.0)])])
    assert list_context_sections({"short": one}) == []  # one bucket is the pooled tau


def test_curves_of_replay_and_of_decoding_have_unlike_names():
    replayed, decoded = {"context": [], "answer": []}, {"context": []}
    common = {"temperature": 0.0, "batch": 1}
    reports = {
        "head": types.SimpleNamespace(replayed_contexts=replayed, contexts=decoded),
        "suffix": types.SimpleNamespace(replayed_contexts=None, contexts=decoded),
    }
    entries = [types.SimpleNamespace(method=name, report=report, **common) for name, report in reports.items()]
    page = ResultsPage(types.SimpleNamespace(entries=entries))
    assert dict(map(page.name_contexts, entries)) == {"head, replayed": replayed, "suffix": decoded}


def test_prompts_beyond_the_training_are_named_with_both_numbers_and_the_remedy():
    head = types.SimpleNamespace(windows=[None, 64])
    (sentence,) = TrainedLength.from_head("a", 2048, head).describe_longer([100, 5312, 4000])
    assert sentence.startswith(
        "2 of 3 prompts are longer than all texts that a was trained on (5,312 against 2,048 tok"
    )
    assert sentence.endswith("set decode.window=2048, or train with longer texts (data.length=5312).")
    (sentence,) = TrainedLength.from_head("a", 2048, object()).describe_longer([2049])
    assert sentence.startswith("A prompt is longer") and "decode.window" not in sentence
    assert TrainedLength.from_head("a", 2048, head).describe_longer([2048]) == []
    assert TrainedLength.from_head("a", None, head).describe_longer([10**6]) == []
    own = types.SimpleNamespace(windows=[4096], layout_window=4096)  # a native module's, which stays
    (sentence,) = TrainedLength.from_head("a", 2048, own).describe_longer([5000])
    assert "decode.window" not in sentence
    for windows, num in (([2048, 64], 0), ([64, 4096], 1)):
        windowed = types.SimpleNamespace(windows=windows)
        assert len(TrainedLength.from_head("a", 2048, windowed).describe_longer([5000])) == num


def test_a_served_answer_has_rounds_where_steps_or_events_tell():
    """Nine tokens: the first, then rounds of 3, 1 and 4 tokens."""

    def find_emitted(sizes: list[int], **counts) -> list[int] | None:
        return ServedAnswer("p", 9, 0.1, 1.0, None, sizes, Speculation(**counts) if counts else None).find_emitted()

    assert find_emitted([1] * 9, accepted=5, drafted=9, rounds=3, steps=[2, 0, 3]) == [3, 1, 4]
    assert find_emitted([1] * 9, accepted=7, drafted=9, rounds=3, steps=[2, 0, 5]) == [3, 1, 4]  # two behind the end
    assert find_emitted([1, 3, 1, 4], accepted=5, drafted=9, rounds=3) == [3, 1, 4]
    assert find_emitted([1, 3, 1, 4]) == [3, 1, 4]
    assert find_emitted([1] * 9, accepted=5, drafted=9, rounds=3) is None
    assert find_emitted([4, 1, 4], accepted=5, drafted=9, rounds=3) is None

"""Tests of the figures of servers: intervals are over questions, and pairs and rates are of what ran alike."""

import pytest

from specdec.core.sampling import Sampling
from specdec.measuring.report import PromptCounts
from specdec.measuring.servers import referee
from specdec.measuring.servers.referee import ServedAnswer, ServedBatch, Speculation
from specdec.measuring.servers.verdict import compare_tau, decide_verdict

RATES = {"a": 10.0, "b": 20.0, "c": 40.0}  # tokens/s of the answers to each question
ROUNDS = {"a": 3, "b": 6, "c": 11}  # of 11 emitted tokens
TURNS = {f"{name} turn {turn}": name for name in RATES for turn in (1, 2)}


def make_answer(prompt: str, rate: float | None = None) -> ServedAnswer:
    """An answer of 12 tokens. rate: tokens/s; None: that of the question"""
    counts = Speculation(11 - ROUNDS[prompt[0]], 30, ROUNDS[prompt[0]])
    return ServedAnswer(prompt, 12, 1.0, 1 + 11 / (rate or RATES[prompt[0]]), [1], [1], counts)


def make_batch(*answers: ServedAnswer, seconds: float = 1.0, repeats: int = 0) -> ServedBatch:
    return ServedBatch([*answers], [], seconds, 0.1, None, None, repeats)


def test_turns_of_a_question_and_its_repeats_are_one_item_of_every_interval():
    once = [make_batch(*map(make_answer, RATES))]
    repeated = [make_batch(*map(make_answer, [*RATES, *RATES]))]
    turns = [make_batch(make_answer(name)) for name in sorted(TURNS, key=lambda name: name[-1])]
    for batches, questions in ((repeated, {}), (turns, TURNS)):
        pairs, pairs_once = list(zip(batches, batches)), list(zip(once, once))
        expected = referee.summarise_drafts(once, 0)["tau_ci"]
        assert referee.summarise_drafts(batches, 0, questions)["tau_ci"] == expected and expected[0] < expected[1]
        name = "tokens_per_second_of_a_user_ci"
        speed = referee.summarise_speed(batches, 0, questions)
        assert speed[name] == referee.summarise_speed(once, 0)[name] and speed["tokens_per_second_ci"] is None
        speedup = referee.summarise_speedup(pairs, 0, questions)
        assert speedup["speedup_of_a_user_ci"] == referee.summarise_speedup(pairs_once, 0)["speedup_of_a_user_ci"]
        assert speedup["speedup_ci"] is None
    assert referee.summarise_drafts(turns, 0)["tau_ci"] != expected  # as if they were independent
    assert referee.summarise_speed(turns, 0)["tokens_per_second_ci"] is not None


def test_items_that_share_a_name_through_others_are_one_group():
    names = [{"a"}, {"b"}, {"c"}, {"a", "c"}, {"d"}]
    assert referee.group_items([0, 1, 2, 3, 4], names) == [[1], [0, 2, 3], [4]]


def test_one_question_has_no_interval_and_no_verdict():
    batches = [make_batch(make_answer("a")), make_batch(make_answer("a"))]
    figures = referee.summarise_drafts(batches, 0) | referee.summarise_speed(batches, 0)
    figures |= referee.summarise_speedup([(batch, batch) for batch in batches], 0)
    assert figures["tau"] and {figures[name] for name in figures if name.endswith("_ci")} == {None}
    counts, replayed = [PromptCounts(10, 20)], [PromptCounts(21, 40)]
    figures = compare_tau([{"a"}], counts, replayed, Sampling(1.0), 0)
    assert (figures["difference_ci"], figures["replayed_tau_ci"], decide_verdict(figures)) == (None, None, None)
    figures = compare_tau([{"a"}, {"b"}], counts * 2, replayed * 2, Sampling(1.0), 0)
    assert decide_verdict(figures) is False


def test_a_repeated_prompt_is_compared_with_the_plain_answer_beside_it():
    drafted = make_batch(make_answer("a", 20), make_answer("b", 30), make_answer("a", 90)), make_batch(make_answer("a"))
    plain = make_batch(make_answer("a", 10), make_answer("a", 30)), make_batch(make_answer("a", 5))
    speedup = referee.summarise_speedup(list(zip(drafted, plain)), 0)
    assert speedup["speedup_of_a_user"] == pytest.approx(2.0) and speedup["compared_answers"] == 3  # 2, 3 and 2


def test_batches_with_requests_that_were_sent_again_have_no_rate():
    whole, paused = make_batch(make_answer("a")), make_batch(make_answer("b"), seconds=100.0, repeats=1)
    speed = referee.summarise_speed([whole, paused], 0)
    assert speed["tokens_per_second"] == 12 and speed["tokens_per_second_of_a_user"] == pytest.approx(15)
    assert referee.summarise_speedup([(whole, whole), (paused, whole), (whole, paused)], 0)["speedup"] == 1
    assert referee.summarise_speed([paused], 0)["tokens_per_second"] is None
    assert referee.summarise_speedup([(whole, paused)], 0)["speedup"] is None


def test_rows_from_before_repeats_were_counted_are_read():
    row = {"answers": [], "failed": [], "seconds": 1.0, "busy": 0.1, "generated": None, "server_counts": None}
    assert ServedBatch.from_row(row).repeats == 0

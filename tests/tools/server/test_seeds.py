"""Requests with a seed: the same text each time, whatever else is asked, and however fast the machine seems to be."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.experiments.cascade.proposer import Cascade
from specdec.proposers.auto import AutoProposer
from specdec.proposers.costs import Costs
from specdec.proposers.heads import HeadProposer
from specdec.proposers.suffix import make_default_suffix
from specdec.proposers.text import Ngram
from tests.support.decoding import chain_of, random_tokens
from tests.support.drafters import make_drafter
from tests.tools.server.test_app import STOP, post, serving

SEEDED = {
    "prompt": "Say the sky is blue, the sky is",
    "seed": 3,
    "temperature": 0.8,
    "max_tokens": 40,
    "ignore_eos": True,
}
OTHER = {"prompt": "Say the sky is blue", "temperature": 1, "max_tokens": 30}


class UnsteadyCosts(Costs):
    """Those of a machine on which every pass may suddenly take longer."""

    def __init__(self) -> None:
        super().__init__({1: dict.fromkeys(range(1, 10), 1.0)}, sizes=[*range(1, 10)], steps={})
        self.draw = random.Random(0)

    def curve(self, rows):
        return {num: seconds * self.draw.uniform(0.5, 2) for num, seconds in super().curve(rows).items()}


def unsteady(target, *, head: bool = True) -> AutoProposer:
    heads = [HeadProposer(make_drafter(target, "eagle3"), chain_of(3))]
    return AutoProposer(target, members=[make_default_suffix(target), *heads[:head]], costs=UnsteadyCosts())


def ask(url: str, body: dict) -> dict:
    answer = post(url, "completions", **body)
    answer.raise_for_status()
    return answer.json()


def ask_in_turn(url: str) -> list[dict]:
    """The answers to a seeded request behind others, and beside others."""
    answers = []
    for number in range(2):
        answers.append(ask(url, SEEDED))
        ask(url, OTHER | {"seed": number})
        ask(url, SEEDED | {"seed": None})
    others = [SEEDED | {"seed": 4}, OTHER, SEEDED | {"speculate": False}, SEEDED, OTHER | {"seed": 3}, SEEDED]
    with ThreadPoolExecutor(len(others)) as pool:
        beside = list(pool.map(lambda body: ask(url, body), others))
    assert text_of(beside[0]) != text_of(answers[0])
    assert not any("shape" in counts_of(each) for each in beside[1:3])  # nothing changes about these
    return [*answers, beside[3], beside[5]]


def text_of(answer: dict) -> str:
    return answer["choices"][0]["text"]


def counts_of(answer: dict) -> dict:
    return answer["usage"]["speculation"]


KINDS = {  # what drafts, the shape that answers name, and the drafts of a round
    "a head beside texts": (unsteady, "fixed, because of seed", 3),
    "texts": (lambda target: unsteady(target, head=False), "none, because of seed", 0),
    "a head": (lambda target: HeadProposer(make_drafter(target, "eagle3"), chain_of(3)), None, 3),
    "n-grams": (lambda target: Ngram(target, min=1, max=6, num=8), "none, because of seed", 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_seeded_request_has_the_same_text_each_time(tiny, kind):
    """Alone, behind other requests, and beside others, with a seed and without, in one server and in the next."""
    make, shape, num = KINDS[kind]
    answers = []
    for _ in range(2):
        with serving(tiny, proposer=make(tiny)) as (url, _):
            answers += ask_in_turn(url)
            greedy = ask(url, SEEDED | {"temperature": 0})
    assert len(set(map(text_of, answers))) == 1
    for counts in map(counts_of, answers):
        assert counts.get("shape") == shape and counts["drafted"] == num * counts["rounds"]
    assert "shape" not in counts_of(greedy) and counts_of(greedy)["drafted"] > 0


def test_what_drafts_with_a_fixed_shape_drafts_seeded_requests_too(small_target):
    """Text proposers fill trees up by the longest of a batch, and a cascade drafts until its last row is done."""
    head = HeadProposer(make_drafter(small_target, "eagle"), chain_of(2))
    ngram = Ngram(small_target, min=1, max=6, num=8)
    cascade = Cascade(small_target, inner=ngram, num=4, sinks=2, window=16)
    for proposer in (head, None):
        decoder = Decoder(small_target, proposer, sampling=Sampling(), stop=STOP)
        assert decoder.steady() is decoder
    for proposer, steady in ((ngram, None), (cascade, None), (unsteady(small_target, head=False), None)):
        assert Decoder(small_target, proposer, sampling=Sampling(), stop=STOP).steady().proposer is steady
    both = AutoProposer(small_target, members=[make_default_suffix(small_target), head], costs=UnsteadyCosts())
    decoder = Decoder(small_target, both, sampling=Sampling(), stop=STOP, rule="block").steady()
    assert decoder.proposer is head and decoder.rule == "block" and decoder.stop == STOP
    assert decoder.generate([random_tokens(1, 5, small_target.vocab_size)], 9).tokens

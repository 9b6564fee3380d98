"""Decoding as measurement: several ways side by side."""

from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.measuring.measure import decode_side_by_side
from specdec.proposers.heads import HeadProposer
from tests.support import chain_of, greedy, make_drafter, prompts_of


def test_ways_go_on_side_by_side_with_the_answers_that_they_have_alone(small_target, monkeypatch):
    head = HeadProposer(make_drafter(small_target, "eagle"), chain_of(2))
    decoders = {"plain": greedy(small_target, None), "drafted": greedy(small_target, head)}
    prompts = prompts_of(small_target)
    alone = {
        name: decode_side_by_side({name: each}, prompts, 12, batch=2, seeds=[0] * 9)[name]
        for name, each in decoders.items()
    }
    order, rounds = [], Decoder.rounds

    def recorded(decoder, *given, **how):
        for emitted, ended in rounds(decoder, *given, **how):
            order.append(("plain" if decoder.proposer is None else "drafted", emitted))
            yield emitted, ended

    monkeypatch.setattr(Decoder, "rounds", recorded)
    for turn in range(2):
        order.clear()
        found = decode_side_by_side(decoders, prompts, 12, batch=2, seeds=[0] * 9, rotation=turn)
        for name, generations in found.items():
            assert [each.tokens for each in generations] == [each.tokens for each in alone[name]]
            assert [each.accepted for each in generations] == [each.accepted for each in alone[name]]
        assert order[0][0] == list(decoders)[turn]
        emitted, most = {"plain": 0, "drafted": 0}, max(num for _, num in order)
        for name, num in order:
            assert emitted[name] <= min(emitted.values()) + most
            emitted[name] += num
        assert len(set(emitted.values())) == 1


def test_the_random_numbers_of_an_answer_are_its_own(small_target):
    sampled = {name: Decoder(small_target, None, sampling=Sampling(1.0), stop=set()) for name in "ab"}
    prompts = prompts_of(small_target)[:3]
    found = decode_side_by_side(sampled, prompts, 6, batch=2, seeds=[5, 6, 7])
    assert [each.tokens for each in found["a"]] == [each.tokens for each in found["b"]]
    (again,) = decode_side_by_side({"a": sampled["a"]}, prompts[2:], 6, batch=1, seeds=[7])["a"]
    assert again.tokens == found["a"][2].tokens

"""Decoding as measurement: several methods side by side."""

import pytest

from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.measuring.measure import decode_side_by_side, limit_rows, split_prompts
from specdec.proposers.heads import HeadProposer
from tests.support.decoding import chain_of, greedy, prompts_of
from tests.support.drafters import make_drafter


class RecordedDecoder:
    """A decoder whose rounds are written into `order`: its name, and the tokens of the round."""

    def __init__(self, name: str, decoder: Decoder, order: list[tuple[str, int]]):
        self.name, self.decoder, self.order, self.target = name, decoder, order, decoder.target

    def rounds(self, *arguments, **options):
        for emitted, ended in self.decoder.rounds(*arguments, **options):
            self.order.append((self.name, emitted))
            yield emitted, ended


@pytest.mark.parametrize("rotation", [0, 1])
def test_methods_go_on_side_by_side_with_the_answers_that_they_have_alone(small_target, rotation):
    head = HeadProposer(make_drafter(small_target, "eagle"), chain_of(2))
    decoders = {"plain": greedy(small_target, None), "drafted": greedy(small_target, head)}
    prompts, order = prompts_of(small_target), []
    recorded = {name: RecordedDecoder(name, decoder, order) for name, decoder in decoders.items()}
    answers = decode_side_by_side(recorded, prompts, 12, batch=2, seeds=[0] * 9, rotation=rotation)
    for name, decoder in decoders.items():
        alone = decode_side_by_side({name: decoder}, prompts, 12, batch=2, seeds=[0] * 9)[name]
        for generation, expected in zip(answers[name], alone, strict=True):
            assert (generation.tokens, generation.accepted) == (expected.tokens, expected.accepted)
    assert order[0][0] == list(decoders)[rotation]
    emitted, largest_round = {"plain": 0, "drafted": 0}, max(num for _, num in order)
    for name, num in order:
        assert emitted[name] <= min(emitted.values()) + largest_round
        emitted[name] += num
    assert len(set(emitted.values())) == 1


def test_the_random_numbers_of_an_answer_are_its_own(small_target):
    sampled = {name: Decoder(small_target, None, sampling=Sampling(1.0), stop=set()) for name in "ab"}
    prompts = prompts_of(small_target)[:3]
    answers = decode_side_by_side(sampled, prompts, 6, batch=2, seeds=[5, 6, 7])
    assert [generation.tokens for generation in answers["a"]] == [generation.tokens for generation in answers["b"]]
    (again,) = decode_side_by_side({"a": sampled["a"]}, prompts[2:], 6, batch=1, seeds=[7])["a"]
    assert again.tokens == answers["a"][2].tokens


def test_groups_of_long_prompts_are_smaller():
    sizes = [len(group) for group in split_prompts(list(range(16)), 4)]
    assert sizes == [16] and [len(group) for group in split_prompts(list(range(16)), 4, longest=7000)] == [4] * 4
    assert [limit_rows(16, length) for length in (100, 2048, 2049, 7000, 40_000)] == [16, 16, 8, 4, 1]
    assert limit_rows(6, 2048) == 6 and limit_rows(6, 3000) == 4

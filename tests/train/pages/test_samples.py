"""Tests of sample answers: the rounds along them are those of replay, and their pieces are the whole text."""

import torch

from specdec.measuring.measure import Prompt
from specdec.unroll import replay
from tests.support import make_drafter, prompts_of, save_target, small_tokenizer
from train.pages.samples import TracedToken, _pieces, sample_answers, trace_rounds


def test_the_rounds_of_a_trace_are_those_of_replay():
    generator = torch.Generator().manual_seed(0)
    for num in (1, 2, 5, 40):
        accept = (torch.rand(3, num, generator=generator) < 0.6).double()
        guesses = torch.randint(100, (3, num), generator=generator)
        tokens = trace_rounds(accept, guesses)
        rounds, accepted = replay.rounds(accept)
        assert len(tokens) == num
        assert [sum(token.depth == d for token in tokens) for d in (1, 2, 3)] == accepted.tolist()
        assert (
            sum(token.depth == 0 for token in tokens[1:]) == rounds
        )  # each round ends with a token of the target's own


def test_refused_drafts_are_those_that_the_drafter_would_have_made(small_target):
    drafter = make_drafter(small_target, "eagle3")
    prompt, answer = prompts_of(small_target)[0], [1, 2, 3, 1, 2, 3, 4, 0, 1, 5]
    (accept,) = replay.acceptances(drafter, [(prompt, answer)], depth=3, temperature=0.0)
    (guesses,) = replay.guesses(drafter, [(prompt, answer)], depth=3)
    for depth in range(3):
        for start in range(1, len(answer) - depth):
            assert bool(accept[depth, start]) == (int(guesses[depth, start]) == answer[start + depth])
    for place, token in enumerate(trace_rounds(accept, guesses)):
        assert token.refused is None or token.refused != answer[place]


def test_characters_of_several_tokens_are_kept_whole():
    tokenizer = small_tokenizer()
    text = "Ein Stück Käse, 日本"
    answer = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = _pieces(tokenizer, answer, [TracedToken(place % 3, None) for place in range(len(answer))])
    assert "".join(piece["text"] for piece in pieces) == text and len(pieces) == len(answer)
    assert not any("\ufffd" in piece["text"] for piece in pieces)


def test_samples_name_what_was_asked(tmp_path):
    saved = save_target(tmp_path / "target")
    drafter = make_drafter(saved, "eagle3")
    found = sample_answers(
        drafter, small_tokenizer(), [(Prompt("a", "small", [1, 5, 6, 7]), "x" * 500, [8, 9, 10])], depth=2
    )
    assert found[0]["id"] == "a" and found[0]["prompt"].endswith("x ...") and len(found[0]["pieces"]) == 3

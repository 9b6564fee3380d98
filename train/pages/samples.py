"""Answers of the target with what a drafter would have drafted along them, by replay of a greedy chain."""

import json
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec import checkpoint
from specdec.core import files
from specdec.heads.base import Drafter
from specdec.measuring.measure import Prompt
from specdec.unroll import replay
from train.data import reading
from train.pages import run_page
from train.validate import Validation

NUM_SAMPLES = 6  # answers on the page of a run
LONGEST_PROMPT = 400  # characters that are shown of a prompt


class TracedToken(NamedTuple):
    """A token of an answer. depth: of the draft that it was; 0: the target's own. refused: the draft that the target refused there"""

    depth: int
    refused: int | None


def trace_rounds(accept: Tensor, guesses: Tensor) -> list[TracedToken]:
    """The rounds along an answer of n tokens. accept, guesses [K, n], placed as in `replay.rounds`; temperature 0"""
    depth, num = accept.shape
    found = [TracedToken(0, None)]  # the first token comes from the prompt's pass
    while (start := len(found)) < num:
        d = 1
        while d <= depth and start + d < num and accept[d - 1, start]:
            found.append(TracedToken(d, None))
            d += 1
        refused = d <= depth and start + d < num  # the last place is filled by the target's own token
        found.append(TracedToken(0, int(guesses[d - 1, start]) if refused else None))
    return found


def sample_answers(
    drafter: Drafter, tokenizer: PreTrainedTokenizerBase, texts: list[tuple[Prompt, str, list[int]]], *, depth: int
) -> list[dict]:
    """texts: prompts, what they ask, and greedy answers -> for each {id, category, prompt, pieces: [{text, depth, refused}]}"""
    pairs = [(prompt.tokens, answer) for prompt, _, answer in texts]
    output = replay.read(drafter, pairs)
    accepts = replay.acceptances(drafter, pairs, depth=depth, temperature=0.0, output=output)
    guessed = replay.guesses(drafter, pairs, depth=depth, output=output)
    found = []
    for (prompt, asked, answer), accept, guesses in zip(texts, accepts, guessed):
        shown = asked if len(asked) <= LONGEST_PROMPT else f"{asked[:LONGEST_PROMPT]} ..."
        pieces = _pieces(tokenizer, answer, trace_rounds(accept, guesses))
        found.append({"id": prompt.id, "category": prompt.category, "prompt": shown, "pieces": pieces})
    return found


def _pieces(tokenizer: PreTrainedTokenizerBase, answer: list[int], tokens: list[TracedToken]) -> list[dict]:
    """The text of each token; one that ends inside a character has none, and its text is that of the next one."""
    pieces, shown = [], ""
    for end, token in enumerate(tokens, start=1):
        text = str(tokenizer.decode(answer[:end]))
        whole = not text.endswith("\ufffd") or end == len(tokens)
        refused = None if token.refused is None else tokenizer.decode([token.refused])
        pieces.append({"text": text[len(shown) :] if whole else "", "depth": token.depth, "refused": refused})
        shown = text if whole else shown
    return pieces


def write_page(
    run: Path, validation: Validation, tokenizer: PreTrainedTokenizerBase, *, prompts: str, split: str | None = None
) -> Path:
    """The page of a run's best step, with sample answers where replay can give their drafts. prompts, split: what was judged on"""
    best = checkpoint.resolve(run)
    if validation.traceable:
        rows = reading.spread(reading.load_prompts(prompts, split=split), len(validation.prompts))
        asked = [row["messages"][-1]["content"] for row in rows]
        texts = list(zip(validation.prompts, asked, validation.answers or ()))[:NUM_SAMPLES]
        drafter = checkpoint.load(best, validation.target)
        assert isinstance(drafter, Drafter)
        found = sample_answers(drafter, tokenizer, texts, depth=validation.drafting.depth)
        files.write_text(best / run_page.SAMPLES, json.dumps(found) + "\n")
    return run_page.write(run)

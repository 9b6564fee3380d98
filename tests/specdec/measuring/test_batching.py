"""Groups of prompts of equal size, and the figures of decoding them."""

import json
from dataclasses import asdict

import pytest

from specdec.core.generation import Generation
from specdec.measuring.batching import BatchComparison, BatchFigures, group_prompts
from train.data import reading


def test_figures_add_up():
    """Two rows: 5 tokens in two rounds and 3 tokens in one round; the first token of each comes from the prefill."""
    first = Generation([[7] * 5, [7] * 3], [[2, 0], [1]], [2, 2], seconds=0.5)
    assert asdict(BatchFigures.of([first])) == {"tokens_per_second": 12, "ms_per_round": 250,
                                              "ms_per_token": pytest.approx(500 / 3), "tau": 2}  # fmt: skip
    second = Generation([[7] * 2, [7] * 2], [[0], [0]], [2], seconds=1.5)
    figures = BatchFigures.of([first, second])
    assert figures.tokens_per_second == 4 and figures.tau == 8 / 5
    prefill_only = Generation([[7], [7]], [[], []])
    comparison = BatchComparison.of([second, first, prefill_only], [first, first, first])
    assert comparison.ratios == [pytest.approx(9), 1] and comparison.speedup == pytest.approx(5)
    assert BatchComparison.from_json(json.loads(json.dumps(comparison.to_json()))) == comparison
    with pytest.raises(ValueError, match="before any round"):
        BatchComparison.of([prefill_only], [prefill_only])


@pytest.mark.parametrize(("num", "batch", "most", "wanted"), [
    (8, 2, 9, [[0, 4], [1, 5], [2, 6], [3, 7]]),
    (8, 2, 2, [[1, 5], [3, 7]]),
    (8, 3, 9, [[0, 2, 4], [1, 3, 5]]),
    (8, 8, 9, [[*range(8)]]),
    (3, 5, 9, [[0, 1, 2, 0, 1]]),
])  # fmt: skip
def test_groups_hold_the_same_prompts_at_every_size(num, batch, most, wanted):
    groups = reading.spread(group_prompts([[n] for n in range(num)], batch), most)
    assert groups == [[[n] for n in group] for group in wanted]

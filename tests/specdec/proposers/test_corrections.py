"""Costs that are learnt while a machine's load wanders, without a clock."""

import math
import random

import pytest

from specdec.proposers.corrections import Corrections

TRUE = {1: 1.0, 2: 1.3, 3: 1.45, 4: 1.6, 5: 1.8}  # seconds by nodes
CHECK = 40  # rounds after which one without drafts is made


def speed_over_best(gain: float, seed: int, *, rounds: int = 1000, load: float = 0.2, turn: int = 60) -> float:
    """Tokens a second of choosing by what is learnt, over those of the best fixed size.

    gain: chance of a first draft; load: deviation of the logarithm of all costs, which wanders within `turn` passes
    """
    generator, learnt = random.Random(seed), Corrections()
    told = {num: seconds * math.exp(generator.gauss(0, 0.1)) for num, seconds in TRUE.items()}  # measured wrongly
    state, drafted, spent, emitted = 0.0, 0, 0.0, 0.0
    all_tokens, all_seconds = dict.fromkeys(TRUE, 0.0), dict.fromkeys(TRUE, 0.0)
    recent = [0.0, 0.0]
    for _ in range(rounds):
        state = state * (1 - 1 / turn) + generator.gauss(0, load * math.sqrt(2 / turn))
        chance = gain * math.exp(generator.gauss(0, 0.25))
        tokens = {num: 1 + chance * sum(0.6**place for place in range(num - 1)) for num in TRUE}
        costs = {num: told[num] * learnt.factor(num) for num in TRUE}
        rate = max(1 / costs[1], recent[0] / recent[1] if recent[1] else 0.0)
        num = 1 if drafted >= CHECK else max(TRUE, key=lambda each: tokens[each] - rate * costs[each])
        drafted = 0 if num == 1 else drafted + 1
        seconds = TRUE[num] * math.exp(state + generator.gauss(0, 0.06))
        learnt.saw(num, seconds / told[num])
        recent = [0.98 * recent[0] + tokens[num], 0.98 * recent[1] + seconds]
        emitted, spent = emitted + tokens[num], spent + seconds
        for each in TRUE:
            all_tokens[each] += tokens[each]
            all_seconds[each] += TRUE[each] * math.exp(state)
    return emitted / spent / max(all_tokens[each] / all_seconds[each] for each in TRUE)


@pytest.mark.parametrize("gain, least", [(0.1, 0.98), (0.3, 1.0), (0.4, 0.985), (0.6, 0.98)])
def test_what_is_chosen_is_near_the_best_fixed_size_while_the_load_wanders(gain, least):
    speeds = [speed_over_best(gain, seed) for seed in range(12)]
    assert sum(speeds) / len(speeds) > least and min(speeds) > 0.93, speeds


def test_sizes_that_are_not_seen_follow_within_a_few_passes():
    """All passes become faster: what was last seen before is not taken for dear."""
    learnt = Corrections()
    for _ in range(60):
        learnt.saw(1, 1.5)
        learnt.saw(2, 1.5)
    for _ in range(25):
        learnt.saw(2, 1.0)
    assert learnt.factor(2) < 1.05 and learnt.factor(1) < 1.15

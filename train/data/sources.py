"""Where conversations come from, and how often each source is read.

data.train=a.jsonl                       one source
data.train=[a.jsonl,b.jsonl]             several, each read once an epoch
'data.train={a.jsonl: 2, b.jsonl: 0.5}'  an epoch has a twice and every second row of b
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy
import yaml
from numpy import ndarray

LONGEST_TURN = 10_000  # rows after which the order of sources in a stream repeats


@dataclass(frozen=True)
class Source:
    name: str  # a form that reading.find_files or reading.open_dataset takes
    weight: Fraction


def read_sources(train: str | Sequence[str] | Mapping[str, float]) -> list[Source]:
    """The setting `train` in one of its three forms. Raises ValueError for weights that are not above 0 or no source."""
    if isinstance(train, str):
        weighted = _weighted(train) if train.startswith("{") and not Path(train).exists() else None
        train = weighted if isinstance(weighted, dict) else [train]  # overrides.py leaves such a text
    weights = dict(train) if isinstance(train, Mapping) else dict.fromkeys(train, 1)
    if not weights or (not isinstance(train, Mapping) and len(weights) < len(train)):
        raise ValueError(f"train={train}: give at least one source, and each once (a weight of 2 reads it twice).")
    sources = []
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ValueError(f"train={weights}: the weight of {name} must be a number above 0, such as 2 or 0.5.")
        sources.append(Source(str(name), Fraction(str(weight))))
    return sources


def _weighted(text: str) -> object:
    """A dict as it is written on a command line; None for other texts."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def copies(num: int, weight: Fraction) -> ndarray:
    """How often each of `num` rows occurs in an epoch, [num]: row i floor((i + 1) w) - floor(i w) times.

    So weight 2 has every row twice, 0.5 every second row, and 1.5 every row once and every second row once more.
    """
    totals = numpy.array([place * weight.numerator // weight.denominator for place in range(num + 1)])
    return numpy.diff(totals)


def turns(sources: Sequence[Source]) -> list[int]:
    """The order in which a stream draws rows from its sources, over and over: shares of rows equal the weights."""
    scale = math.lcm(*(source.weight.denominator for source in sources))
    shares = [int(source.weight * scale) for source in sources]
    shares = [share // math.gcd(*shares) for share in shares]
    if sum(shares) > LONGEST_TURN:
        raise ValueError(
            f"The weights {', '.join(str(float(source.weight)) for source in sources)} have too many digits."
        )
    places = [((turn + 1) / share, index) for index, share in enumerate(shares) for turn in range(share)]
    return [index for _, index in sorted(places)]

"""Long questions of RULER's kinds (2404.06654), written here: any length in tokens, and the values of a right answer.

retrieval  the codes of one place among those of others: several keys, several values of each
tracing    the variables to which a chain of assignments gives one value, among other chains
counting   the words that are most frequent in a list

The texts are this project's own. A question depends on its split, kind, length and number alone.
"""

import bisect
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from specdec.core.option_types import describe_unknown_choice

SAMPLE = 64  # pieces of filler whose tokens are counted to estimate those of all
SHORTEST = 1024  # tokens: a sentence is less than 2 % of them, and what must not be left out fits
TIMES = ("At dawn", "After lunch", "Last winter", "On Tuesday", "Before the storm", "In the evening", "Once again")
PEOPLE = (
    "the ferry pilot", "a young baker", "the old gardener", "my neighbour", "a visiting painter", "the station master",
    "one of the twins", "the violin teacher", "a tired messenger", "the new mayor", "a patient nurse", "the watchmaker",
)  # fmt: skip
DEEDS = (
    "repaired", "painted", "carried", "forgot", "borrowed", "described", "measured", "cleaned", "returned",
    "photographed", "wrapped", "weighed", "hid", "sold", "labelled",
)  # fmt: skip
THINGS = (
    "a copper kettle", "the wooden ladder", "two woollen blankets", "an empty notebook", "the spare lantern",
    "a basket of pears", "the cracked mirror", "a roll of canvas", "three clay bowls", "the garden gate",
    "a heavy trunk", "some dried herbs", "the brass telescope", "a paper kite",
)  # fmt: skip
PLACES = (
    "behind the mill", "near the old bridge", "in the upper hall", "beside the canal", "at the northern gate",
    "under the chestnut tree", "along the quiet street", "in a narrow yard", "outside the library", "by the river",
)  # fmt: skip
COLOURS = "amber azure crimson golden ivory jade scarlet silver".split()
ROOMS = "archive cellar chapel foundry granary harbour museum observatory".split()
SYLLABLES = "ba ce do fi gu ha je ki lo mu na pe ri so tu va we xi yo zu".split()


@dataclass(frozen=True)
class LongQuestion:
    """A question whose text grows with its filler.

    needles: sentences of the text in their order; depths: place of each, from 0 to 1, increasing
    fillers: pieces of filler, of which the first ones are used; expected: values of a right answer
    """

    before: str
    after: str
    needles: Sequence[str]
    depths: Sequence[float]
    fillers: Sequence[str]
    expected: Sequence[str]

    def write(self, num: int) -> str:
        """The text with `num` pieces of filler."""
        places = [0, *(int(depth * num) for depth in self.depths), num]
        parts = [*self.fillers[: places[1]]]
        for needle, (start, end) in zip(self.needles, itertools.pairwise(places[1:])):
            parts += [needle, *self.fillers[start:end]]
        return f"{self.before}\n\n{' '.join(parts)}\n\n{self.after}"


def make_rows(
    subset: str | None, lengths: Sequence[int], num: int, count_tokens: Callable[[str], int], *, split: str
) -> list[dict]:
    """Rows as of reading.load_prompts, `num` at each length, with `expected`: the values of a right answer.

    subset: a kind; None: all, in turn. split: test or train
    Raises ValueError for another split or subset, and as `make_question`.
    """
    if split not in ("test", "train"):
        raise ValueError(f"split={split}: suite=ruler has test and train.")
    if subset not in (None, *KINDS):
        raise ValueError(describe_unknown_choice("subset", str(subset), list(KINDS)))
    kinds = list(KINDS) if subset is None else [subset]
    rows = []
    for length, index in itertools.product(lengths, range(num)):
        kind, number = kinds[index % len(kinds)], index // len(kinds)
        text, expected = make_question(kind, length, number, count_tokens, split=split)
        common = {"id": f"{kind}/{length}/{number}", "category": f"{kind} {length}", "prompt": text}
        rows.append({**common, "messages": [{"role": "user", "content": text}], "tags": [], "expected": expected})
    return rows


def make_question(
    kind: str, length: int, number: int, count_tokens: Callable[[str], int], *, split: str
) -> tuple[str, list[str]]:
    """-> the text of a question, and the values of a right answer

    length: most tokens of the prompt; it has less than one sentence fewer. split: test, or train for other questions
    count_tokens: tokens of the prompt that a text makes
    Raises ValueError for a length that is too short.
    """
    question = KINDS[kind](random.Random(f"{split} {kind} {length} {number}"), length)
    shortest, sample = count_tokens(question.write(0)), count_tokens(question.write(SAMPLE))
    if length < max(SHORTEST, shortest):
        raise ValueError(f"lengths={length} is too short for suite=ruler: give {max(SHORTEST, shortest)} or more.")
    num = int((length - shortest) * SAMPLE / (sample - shortest))
    candidates = range(num * 11 // 10 + SAMPLE)  # the first one fits
    index = bisect.bisect_right(candidates, length, key=lambda num: count_tokens(question.write(num)))
    return question.write(candidates[index - 1]), list(question.expected)


def draw_sentences(generator: random.Random, length: int) -> list[str]:
    """Sentences without a meaning for the question, at least `length` tokens."""
    lists = (TIMES, PEOPLE, DEEDS, THINGS, PLACES)
    return ["{}, {} {} {} {}.".format(*map(generator.choice, lists)) for _ in range(length // 8)]


def draw_words(generator: random.Random, num: int) -> list[str]:
    """Different words that no language has."""
    words: dict[str, None] = {}
    while len(words) < num:
        words["".join(generator.choices(SYLLABLES, k=3))] = None
    return list(words)


def draw_depths(generator: random.Random, num: int) -> list[float]:
    """Increasing places in a text, from 0 to 1."""
    return sorted(generator.random() for _ in range(num))


def ask_retrieval(generator: random.Random, length: int) -> LongQuestion:
    """Six places with four codes each; the codes of one are asked for."""
    places = [f"{colour} {room}" for colour, room in itertools.product(COLOURS, ROOMS)]
    keys = generator.sample(places, 6)
    codes = map(str, generator.sample(range(100_000, 1_000_000), 24))
    pairs = list(zip(generator.sample(keys * 4, 24), codes))
    return LongQuestion(
        "Read this text. Some of its sentences give codes of places.",
        f"The {keys[0]} has four codes in the text above. List them in the order of the text. Behind each code, "
        "repeat the whole sentence that gives it.",
        [f"A code of the {key} is {code}." for key, code in pairs],
        draw_depths(generator, len(pairs)),
        draw_sentences(generator, length),
        [code for key, code in pairs if key == keys[0]],
    )


def ask_tracing(generator: random.Random, length: int) -> LongQuestion:
    """Four chains of five variables; those of one chain are asked for."""
    names = [word.upper() for word in draw_words(generator, 20)]
    chains = [names[start : start + 5] for start in range(0, 20, 5)]
    values = generator.sample(range(10_000, 100_000), len(chains))
    waiting = [list(write_assignments(chain, value)) for chain, value in zip(chains, values)]
    order = generator.sample([*range(len(chains))] * 5, 20)
    return LongQuestion(
        "Read this text. Some of its sentences set variables.",
        f"Which five variables have the value {values[0]} in the end? List them in the order in which they were set. "
        "Behind each name, repeat the whole sentence that sets it.",
        [waiting[index].pop(0) for index in order],
        draw_depths(generator, len(order)),
        draw_sentences(generator, length),
        chains[0],
    )


def write_assignments(chain: Sequence[str], value: int) -> Iterator[str]:
    """Yields the sentences that set the variables of a chain, in their order."""
    yield f"Set {chain[0]} to {value}."
    for earlier, name in itertools.pairwise(chain):
        yield f"Set {name} to the value of {earlier}."


def ask_counting(generator: random.Random, length: int) -> LongQuestion:
    """A list of words, of which eight are frequent."""
    words = draw_words(generator, 500)
    weights = [60] * 8 + [1] * (len(words) - 8)
    return LongQuestion(
        "Read this list of words.",
        "Which eight words occur most often in the list above? Give each of them a line of its own with this sentence: "
        "The word WORD is one of the most frequent words of the list.",
        (),
        (),
        generator.choices(words, weights, k=length),
        words[:8],
    )


KINDS: dict[str, Callable[[random.Random, int], LongQuestion]] = {
    "retrieval": ask_retrieval,
    "tracing": ask_tracing,
    "counting": ask_counting,
}

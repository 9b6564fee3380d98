"""Suffix decoding against counts and searches in plain lists."""

import itertools
import random
from types import SimpleNamespace

import pytest

from specdec.core.sampling import Sampling
from specdec.decoding.drafting import Drafting
from specdec.measuring.measure import MeasureSettings, Method, measure
from specdec.proposers import datastore as store
from specdec.proposers import suffix
from specdec.proposers.suffix import NOWHERE, Automaton, Suffix, SuffixMatch
from specdec.text import token_text
from specdec.text.conversations import Prompt
from tests.support.decoding import random_tokens
from tests.support.texts import begin, check_rounds, commit, repeating_texts


def automaton_of(texts: list[list[int]]) -> Automaton:
    automaton = Automaton()
    for text in texts:
        automaton.start_text()
        for token in text:
            automaton.append(token)
    return automaton


def occurrences(texts: list[list[int]], substring: tuple[int, ...]) -> list[tuple[int, int]]:
    """(number of the text, place after the part) of every occurrence, in order."""
    num, places = len(substring), []
    for number, text in enumerate(texts):
        ends = (place for place in range(num, len(text) + 1) if tuple(text[place - num : place]) == substring)
        places += [(number, place) for place in ends]
    return places


def following(texts: list[list[int]], substring: tuple[int, ...]) -> dict[int, int]:
    """How often each token follows `part`, in the order of first occurrence."""
    counts: dict[int, int] = {}
    for number, place in occurrences(texts, substring):
        if place < len(texts[number]):
            token = texts[number][place]
            counts[token] = counts.get(token, 0) + 1
    return counts


def best_first(texts: list[list[int]], substring: tuple[int, ...], num: int, least: float) -> list[tuple[int, int]]:
    """The drafts after `part`: the most likely candidate of a plain list is taken repeatedly."""
    draft, candidates, probability = [], [], 1.0
    while True:
        while substring and not following(texts, substring):
            substring = substring[1:]
        counts = following(texts, substring) if substring else {}
        for token, count in counts.items():
            share = probability * count / sum(counts.values())
            if share >= least:
                candidates.append((share, token, len(draft), (*substring, token)))
        if not candidates or len(draft) == num:
            return draft
        best = max(candidates, key=lambda candidate: candidate[0])  # the first of equal ones
        candidates.remove(best)
        probability, token, parent, substring = best
        draft.append((token, parent))


@pytest.mark.parametrize(
    "texts", [*([text] for text in repeating_texts(3, 50)), repeating_texts(3, 30), repeating_texts(2, 20)], ids=len
)
def test_states_and_counts_equal_those_of_a_naive_search(texts):
    automaton = automaton_of(texts)
    for num in range(1, 7):
        for substring in itertools.product(range(3), repeat=num):
            count = len(occurrences(texts, substring))
            match = NOWHERE
            for token in substring:
                match = automaton.follow(match, token)
            assert (match.length == num) == (count > 0)
            if count:
                assert automaton.counts[match.state] == count
    parts = {
        tuple(text[start:end]) for text in texts for start in range(len(text)) for end in range(start, len(text) + 1)
    }
    classes = {tuple(occurrences(texts, part)) for part in parts}  # classes of substrings that end at the same places
    assert len(automaton.counts) == len(classes) <= 2 * automaton.num_tokens == 2 * sum(map(len, texts))


def find_longest_end(text: list[int], is_match) -> tuple[int, ...]:
    """The longest end of the text for which is_match holds."""
    ends = (tuple(text[start:]) for start in range(len(text)))
    return next((substring for substring in ends if is_match(substring)), ())


def check_trees(automaton: Automaton, texts: list[list[int]], state: int, substring: tuple[int, ...]) -> list:
    """The drafts after a match equal those of a naive search, for two limits -> the drafts for the second one"""
    for num, least in ((20, 0.3), (9, 0.07)):
        guesses = automaton.most_likely(SuffixMatch(state, len(substring)), num, least)
        draft = [(guess.token, guess.parent) for guess in guesses]
        assert draft == best_first(texts, substring, num, least)
    return draft


def test_matches_and_trees_along_a_text():
    """For every prefix: its longest suffix that occurred before, in its own or another text, and the trees after it."""
    other_texts = repeating_texts(3, 24)[:3]
    memory = automaton_of(other_texts)
    drafts = []
    for text in repeating_texts(3, 40):
        own_automaton, match = Automaton(), NOWHERE
        for end, token in enumerate(text, start=1):
            own_automaton.append(token)
            match = memory.follow(match, token)
            start = text[:end]
            repeated = find_longest_end(start, lambda end, start=start: len(occurrences([start], end)) > 1)
            matched = find_longest_end(start, lambda end: occurrences(other_texts, end))
            state, length = own_automaton.find_repeated()
            assert length == len(repeated) and match.length == len(matched)
            drafts.append(check_trees(own_automaton, [start], state, repeated))
            drafts.append(check_trees(memory, other_texts, match.state, matched))
    branched = [draft for draft in drafts if [parent for _, parent in draft] != list(range(len(draft)))]
    assert len(branched) > 100 and sum(len(draft) == 9 for draft in drafts) > 100


def make(**changed) -> Suffix:
    return Suffix(None, **{"num": 16, "factor": 2.0, "offset": 4, "least": 0.1, "memory": 1000, **changed})


def tokens(draft) -> list[int]:
    return [token for token, _ in draft]


def begin_next_batch(proposer: Suffix, prompts, *, cut: int = 0) -> None:
    """Ends the batch with answers that lack their last `cut` committed tokens, and begins the next batch."""
    proposer.finish([len(text) - state.start - cut for text, state in zip(proposer.texts, proposer.states)])
    begin(proposer, prompts)


def test_tokens_after_the_end_of_an_answer_are_not_remembered():
    proposer = make()
    begin(proposer, [[1, 2, 10]])
    commit(proposer, [[11, 12, 13, 14]])
    begin_next_batch(proposer, [[1, 10, 11]], cut=2)
    assert tokens(proposer.draft(0)) == [12]
    begin(proposer, [[5, 6]])  # the batch before was not finished
    assert proposer.younger.num_tokens == 3


def test_the_last_texts_of_a_datastore_are_remembered_from_the_start(tmp_path, monkeypatch):
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0})
    monkeypatch.setattr(suffix, "load_tokenizer", lambda name, **_: tokenizer)
    texts = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    joined = store.join_texts(texts)
    document = {"tokenizer_fingerprint": token_text.digest_vocabulary(tokenizer), "num_texts": 3, "length": 2}
    store.write_datastore(tmp_path / "texts", joined, store.sort_places(joined, 2), document)
    target = SimpleNamespace(name="tiny", trust_remote_code=False)
    for memory, known in ((1000, texts), (6, [[5, 6, 7], [8, 9]]), (0, [])):
        assert suffix.read_last_texts(target, str(tmp_path / "texts"), memory) == known
    monkeypatch.setattr(suffix, "read_last_texts", lambda target, folder, num: texts)
    proposer = make(datastore="texts")
    for _ in range(2):
        begin(proposer, [[20, 4, 5]])
        assert tokens(proposer.draft(0)) == [6, 7]
        proposer.reset_history()  # of what it was given it forgets nothing


def test_answers_are_remembered_from_the_next_batch_on():
    text = list(range(10, 30))
    proposer = make()
    begin(proposer, [[1, 2, text[0]], text[:3]])
    commit(proposer, [text[1:], [2, *text[:3]]])
    assert tokens(proposer.draft(1))[:4] == [2, *text[:3]]  # from its own text, and not from the other row
    begin_next_batch(proposer, [text[:3], [40, 1]])
    assert tokens(proposer.draft(0)) == text[3:13]  # 2 * 3 + 4
    assert proposer.draft(1) == []  # prompts are not remembered
    commit(proposer, [[50], text[5:7]])
    assert proposer.draft(0) == []
    assert tokens(proposer.draft(1)) == text[7:15]


def test_the_longest_match_is_used_and_of_equal_ones_the_own_text():
    proposer = make(num=1)
    begin(proposer, [[99, 98]])
    commit(proposer, [[1, 2, 3, 4]])
    begin_next_batch(proposer, [[2, 3, 5, 6, 2, 3]])
    assert tokens(proposer.draft(0)) == [5]  # two tokens match in both
    begin_next_batch(proposer, [[2, 3, 5, 1, 2, 3]])
    assert tokens(proposer.draft(0)) == [4]  # three in the memory


def test_drafts_keep_the_limits_of_num_factor_offset_and_least():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    for changed, num in (
        ({}, 8),
        ({"num": 3}, 3),
        ({"factor": 0.7, "offset": 0}, 2),
        ({"factor": 0.0, "offset": 1}, 1),
    ):
        proposer = make(**changed)
        begin(proposer, [text])
        assert proposer.draft(0) == list(zip([3, 4, 5, 6, 7, 8, 9, 1], range(num)))
    proposer = make(least=0.3, offset=0)
    begin(proposer, [[1, 2, 1, 2, 1, 3, 1, 4, 1]])
    assert proposer.draft(0) == [(2, 0), (1, 1)]  # 2 with 2 / 4; 3 and 4 with 1 / 4; 2 1 2 with 1 / 4


def test_memory_is_bounded():
    draw = random.Random(0)
    proposer = make(memory=100)
    younger, older = [], []
    for _ in range(200):
        answer = [draw.randrange(5) for _ in range(draw.randrange(2, 40))]
        begin(proposer, [[9, 9, answer[0]]])
        for known, goal in ((proposer.younger, younger), (proposer.older, older)):
            assert vars(known) == vars(automaton_of(goal))
            assert known.num_tokens <= 100 and len(known.counts) <= 201
        commit(proposer, [answer[1:]])
        proposer.finish([len(answer)])
        if sum(map(len, younger)) + len(answer) > 100:
            younger, older = [], younger
        younger.append(answer)
    begin(proposer, [[9, 9, 8]])
    commit(proposer, [list(range(500))])  # longer than the memory
    begin_next_batch(proposer, [[9, 9]])
    assert proposer.younger.num_tokens == 100
    none = make(memory=0)
    for _ in range(3):
        begin(none, [[1, 2]])
        commit(none, [[3, 4, 5]])
        none.finish([4])
    assert none.younger.num_tokens == none.older.num_tokens == 0


@pytest.mark.full
def test_decoding_accepts_the_drafts_of_a_naive_search(small_target):
    def drafts_after(prompt, answer):
        text = prompt + answer
        part = find_longest_end(text, lambda end: len(occurrences([text], end)) > 1)
        return best_first([text], part, min(8, len(part) + 2), 0.2) if part else []

    proposer = make(num=8, factor=1.0, offset=2, least=0.2, memory=0)
    check_rounds(small_target, proposer, drafts_after)


@pytest.mark.full
def test_a_measurement_begins_without_memory(small_target):
    """Although the warm-up decodes the first prompt."""
    prompts = [Prompt(str(seed), "", random_tokens(seed, 9, 6)) for seed in (0, 1, 0)]
    method = Method("drafted", small_target, make(num=8, offset=8, least=0.0), Drafting(2))
    settings = MeasureSettings(Sampling(0.0), set(), 30)
    first, again = (list(itertools.chain(*measure([method], prompts, settings))) for _ in range(2))
    accepted = [row["drafted"].drafted.accepted for row in first]
    assert accepted == [row["drafted"].drafted.accepted for row in again]
    # the third prompt is the first one again, so its answer comes from memory
    assert len(accepted[2][0]) < len(accepted[0][0])


def test_settings_that_draft_nothing_are_refused():
    with pytest.raises(ValueError, match=r"^factor=0\.0 with offset=0 drafts nothing"):
        make(factor=0.0, offset=0)

"""The ends of answers in every row of a batch, trees of fixed shape, and the settings of decoding."""

import collections
import itertools

import pytest
from omegaconf import OmegaConf

from specdec.core.answer_text import StopStrings, TextDecoder
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.options.command_defaults import read_group
from specdec.options.decoding import DecodeOptions
from specdec.proposers.growth import FIRST_CHILD, NEXT_CHILD, find_static_parents
from specdec.proposers.heads import HeadProposer
from specdec.target.model import Target
from tests.support.commands import ROOT
from tests.support.decoding import (
    NUM_NEW,
    Scripted,
    chain_of,
    check_counters,
    oracle,
    prompts_of,
)
from tests.support.drafters import make_drafter
from tests.support.loops import transformers_answer
from tests.support.targets import make_target

pytestmark = pytest.mark.full

CHAIN, TREE = chain_of(4), TreeShape(depth=3, width=3, nodes=8)
WAYS = {"plain": None, "oracle": None, "chain": CHAIN, "tree": TREE}
PENALTIES = (1.0, 1.3)
CONF = ROOT / "conf" / "decode"


def decoder_of(
    target, proposer_kind: str, *, proposer=None, penalty: float = 1.0, stop=frozenset(), strings=None
) -> Decoder:
    if WAYS[proposer_kind] is not None:
        proposer = HeadProposer(make_drafter(target, "eagle"), WAYS[proposer_kind])
    sampling = Sampling(repetition_penalty=penalty)
    return Decoder(target, proposer, sampling=sampling, stop=set(stop), stop_strings=strings)


# Rows of a batch


@pytest.fixture(scope="module")
def middling() -> Target:
    """A target with few tokens, but more than the prompts contain, so that a penalty changes answers."""
    return make_target(12)


@pytest.fixture(scope="module")
def answers(middling) -> dict[float, list[list[int]]]:
    """The answers of transformers under each penalty."""
    answers = {}
    for penalty in PENALTIES:
        answers[penalty] = [transformers_answer(middling, text, NUM_NEW, penalty) for text in prompts_of(middling)]
    return answers


@pytest.mark.parametrize("proposer_kind", WAYS)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_rows_of_a_batch_end_where_single_answers_end(middling, answers, proposer_kind, penalty):
    """Answers end by a stop token, a text or the budget, as cut answers of transformers do."""
    whole = answers[penalty]
    texts = [prompt + answer for prompt, answer in zip(prompts_of(middling), whole)]
    ends = set()
    for stop, strings in itertools.product((set(), {whole[0][6]}), (None, spell(whole[1][5:9]), spell(whole[1][:1]))):
        expected = [cut(answer, stop, strings) for answer in whole]
        ends |= set(map(len, expected))
        lengths = [len(text) - NUM_NEW + len(answer) for text, answer in zip(texts, expected)]
        for num in (5, 1):
            proposer = Scripted(texts[:num], 4, oracle(4), ends=lengths[:num]) if proposer_kind == "oracle" else None
            settings = {"proposer": proposer, "penalty": penalty, "stop": stop, "strings": strings}
            decoder = decoder_of(middling, proposer_kind, **settings)
            generation = decoder.generate(prompts_of(middling)[:num], NUM_NEW)
            assert generation.tokens == expected[:num]
            check_counters(generation)
            assert proposer is None or stop or strings or max(generation.accepted[0]) == 4
    assert len(ends) > 3 and min(ends) == 1 and max(ends) == NUM_NEW


def spell(tokens: list[int]) -> StopStrings:
    """The text of the tokens ends an answer; each one is spelled as its number."""
    spelled = TextDecoder(lambda tokens: " ".join(map(str, tokens)))
    return StopStrings((spelled.decode(tokens),), spelled)


def cut(answer: list[int], stop, strings: StopStrings | None) -> list[int]:
    """The shortest prefix of the answer that ends with a stop token or contains a text."""
    for num in range(1, len(answer) + 1):
        text = strings.decoder.decode(answer[:num]) if strings else ""
        if answer[num - 1] in stop or any(string in text for string in (strings.strings if strings else ())):
            return answer[:num]
    return answer


def test_a_penalty_changes_the_answers(answers):
    assert sum(plain != penalised for plain, penalised in zip(answers[1.0], answers[1.3])) > 2


# Texts that end an answer


# Trees of fixed shape


def expected_drafts(paths) -> float:
    """Expected accepted drafts, if children are accepted with the probabilities that `static_parents` assumes."""
    probabilities = (FIRST_CHILD ** len(path) * NEXT_CHILD ** sum(path) for path in paths)
    return sum(probabilities)


def paths_of(parents: list[int]) -> list[tuple[int, ...]]:
    """For every node but the root: the ranks among siblings of the nodes on its path."""
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(parents[1:], start=1):
        paths.append((*paths[parent], parents[:node].count(parent)))
    return paths[1:]


SHAPES = [(1, 3, 2), (2, 2, 4), (2, 2, 6), (2, 3, 5), (3, 2, 5), (3, 2, 30), (4, 1, 4), (2, 5, 3)]


def is_tree(paths: set[tuple[int, ...]]) -> bool:
    """Whether each path's parent and earlier siblings are among the paths."""
    earlier = [(*path[:-1], path[-1] - 1) for path in paths if path[-1]]
    return {path[:-1] for path in paths} | set(earlier) <= paths | {()}


@pytest.mark.parametrize("shape", itertools.starmap(TreeShape, SHAPES), ids=str)
def test_static_trees_are_the_best_of_all_trees(shape):
    parents = find_static_parents(shape)
    all_paths = []
    for depth in range(1, shape.depth + 1):
        all_paths += itertools.product(range(shape.width), repeat=depth)
    num = min(shape.nodes, len(all_paths))
    assert parents[0] == -1 and len(parents) == 1 + num
    assert all(0 <= parent < node for node, parent in enumerate(parents[1:], start=1))
    paths = paths_of(parents)
    assert sorted(map(len, paths)) == [len(path) for path in paths]  # level by level
    assert set(paths) <= set(all_paths)  # no deeper and no wider than the shape permits
    trees = filter(is_tree, map(set, itertools.combinations(all_paths, num)))
    assert expected_drafts(paths) == pytest.approx(max(map(expected_drafts, trees)))


@pytest.mark.parametrize("shape", [TreeShape(4, 3, 20), TreeShape(6, 4, 40)], ids=str)
def test_earlier_siblings_have_more_nodes_below_them(shape):
    """An earlier sibling has at least as many nodes below it as a later one."""
    paths = paths_of(find_static_parents(shape))
    prefixes = collections.Counter(path[:length] for path in paths for length in range(1, 1 + len(path)))
    below = {path: prefixes[path] for path in paths}
    assert all(path[-1] == 0 or below[path] <= below[(*path[:-1], path[-1] - 1)] for path in paths)
    assert max(map(len, paths)) == shape.depth


# Settings


def drafting_of(name: str) -> dict:
    settings = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    settings.pop("defaults", None)
    return {name: value for name, value in settings.items() if value != "auto"}  # which a run decides


@pytest.mark.parametrize("name", [path.stem for path in sorted(CONF.glob("*.yaml")) if path.stem != "base"])
def test_shipped_settings_can_decode(name, small_target):
    drafting = Drafting(**{**drafting_of("base"), **drafting_of(name)})
    assert drafting.shape.depth == drafting.depth
    proposer = drafting.proposer(make_drafter(small_target, "eagle"))
    assert drafting.decoder(small_target, proposer, sampling=Sampling(), stop=set()).generate([[1]], 3)


def test_options_of_scripts_become_settings():
    assert read_group(DecodeOptions, "decode").make_drafting() == Drafting(
        **{**drafting_of("base"), **drafting_of("chain"), "nodes": None}
    )
    chosen = read_group(DecodeOptions, "decode", depth=3, width=2, children="distinct", rule="block", compile=True)
    assert chosen.make_drafting() == Drafting(3, 2, None, "distinct", "block", True)
    assert chosen.make_drafting().shape == TreeShape(3, 2, 6)
    options = read_group(DecodeOptions, "decode", temperature="0,0.5", top_k=3, top_p=0.5, repetition_penalty=2.0)
    assert options.make_samplings() == [Sampling(0.0, 3, 0.5, 2.0), Sampling(0.5, 3, 0.5, 2.0)]

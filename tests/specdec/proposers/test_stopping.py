"""Where answers end, row by row, and where drafting does; what the settings that say so may be."""

import itertools
import math

import pytest
import torch
from omegaconf import OmegaConf

from helpers.decoding import DecodeOptions
from specdec.decode import Decoder, Generation, StopStrings
from specdec.drafting import Drafting
from specdec.proposers.growth import FIRST_CHILD, NEXT_CHILD, static_parents
from specdec.proposers.heads import HeadProposer
from specdec.proposers.stopping import Stopping
from specdec.sampling import Sampling
from specdec.target import Target
from specdec.tree import TreeShape
from tests.loops import transformers_answer
from tests.support import (
    NUM_NEW,
    ROOT,
    Scripted,
    chain_of,
    check_counters,
    make_drafter,
    make_target,
    oracle,
    prompts_of,
    random_tokens,
)

pytestmark = pytest.mark.slow

CHAIN, TREE = chain_of(4), TreeShape(depth=3, width=3, nodes=8)
STOPPING = Stopping(threshold=0.3)
WAYS = {"plain": None, "oracle": None, "chain": (CHAIN, None), "tree": (TREE, None), "stopping": (CHAIN, STOPPING)}
PENALTIES = (1.0, 1.3)
CONF = ROOT / "conf" / "decode"


def decoder_of(target, way: str, *, proposer=None, penalty: float = 1.0, stop=frozenset(), strings=None) -> Decoder:
    if WAYS[way] is not None:
        shape, stopping = WAYS[way]
        proposer = HeadProposer(make_drafter(target, "eagle"), shape, stopping=stopping)
    sampling = Sampling(repetition_penalty=penalty)
    return Decoder(target, proposer, sampling=sampling, stop=set(stop), stop_strings=strings)


# Rows of a batch


@pytest.fixture(scope="module")
def middling() -> Target:
    """Few tokens, but more than the prompts hold, so that a penalty has its say."""
    return make_target(12)


@pytest.fixture(scope="module")
def answers(middling) -> dict[float, list[list[int]]]:
    """What transformers answers under each penalty."""
    return {
        penalty: [transformers_answer(middling, prompt, NUM_NEW, penalty) for prompt in prompts_of(middling)]
        for penalty in PENALTIES
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_rows_are_as_if_alone(middling, answers, way, penalty):
    """Prompts of different lengths that end by a stop token, a text or the budget: as transformers, cut."""
    prompts, whole = prompts_of(middling), answers[penalty]
    letters = StopStrings((" ".join(map(str, whole[1][5:9])),), lambda tokens: " ".join(map(str, tokens)))
    ends = set()
    for stop, strings in ((set(), None), ({whole[0][6]}, None), (set(), letters), ({whole[0][6]}, letters)):
        wanted = [cut(answer, stop, strings) for answer in whole]
        ends |= set(map(len, wanted))
        for rows in (range(5), range(1)):
            texts = [prompts[row] + whole[row] for row in rows]
            proposer = Scripted(texts, 4, oracle(4)) if way == "oracle" else None
            decoder = decoder_of(middling, way, proposer=proposer, penalty=penalty, stop=stop, strings=strings)
            found = decoder.generate([prompts[row] for row in rows], NUM_NEW)
            assert found.tokens == [wanted[row] for row in rows]
            check_counters(found)
            if way == "oracle" and not stop and not strings:
                assert max(found.accepted[0]) == 4
    assert len(ends) > 3 and max(ends) == NUM_NEW


def cut(answer: list[int], stop, strings: StopStrings | None) -> list[int]:
    """The shortest beginning that ends with a stop token or contains a text."""
    for num in range(1, len(answer) + 1):
        text = strings.decode(answer[:num]) if strings else ""
        if answer[num - 1] in stop or any(string in text for string in (strings.strings if strings else ())):
            return answer[:num]
    return answer


def test_a_penalty_changes_the_answers(answers):
    assert sum(one != other for one, other in zip(answers[1.0], answers[1.3])) > 2


# Texts that end an answer


def pieces(texts: dict[int, bytes]):
    """Decodes tokens that are bytes; the others are full stops."""
    return lambda tokens: b"".join(texts.get(token, b".") for token in tokens).decode("utf-8", errors="replace")


@pytest.fixture(scope="module")
def story(target):
    """A prompt, and an answer with stretches of tokens that come once."""
    prompt = prompts_of(target)[0]
    return prompt, Decoder(target, None, sampling=Sampling(), stop=set()).generate([prompt], NUM_NEW).tokens[0]


@pytest.mark.parametrize("text", ["stop", "\N{GRINNING FACE}", "a\u00e9b", "st"])
def test_texts_that_span_tokens_and_rounds(target, story, text):
    """At every place of a round of five tokens; a byte or more a token, so that a character may be spread over four."""
    prompt, answer = story
    ends = set()
    for start in range(8):
        tokens = answer[start : start + min(4, len(text.encode()))]
        if len(set(tokens)) < len(tokens):
            continue
        spelt = [text.encode()[i : i + 1] for i in range(len(tokens))]
        spelt[-1] = text.encode()[len(tokens) - 1 :] + b"more"
        decode = pieces(dict(zip(tokens, spelt)))
        strings = StopStrings((text, "never"), decode)
        wanted = cut(answer, set(), strings)
        assert text in decode(wanted) and text not in decode(wanted[:-1])
        ends.add(len(wanted))
        for proposer in (None, Scripted([prompt + answer], 4, oracle(4))):
            decoder = Decoder(target, proposer, sampling=Sampling(), stop=set(), stop_strings=strings)
            assert decoder.generate([prompt], NUM_NEW).tokens == [wanted]
    assert len(ends) > 3


def test_a_text_that_the_first_token_completes(target, story):
    prompt, answer = story
    strings = StopStrings(("x",), pieces({answer[0]: b"-x-"}))
    for way in ("plain", "chain"):
        generation = decoder_of(target, way, strings=strings).generate([prompt], NUM_NEW)
        assert generation.tokens == [answer[:1]] and generation.accepted == [[]]


@pytest.mark.parametrize("seed", range(20))
def test_ends_against_the_whole_text(seed):
    """Random bytes that come in runs: what is looked at, a tail, says what the whole text says."""
    symbols = [b"a", b"b", b"ab", "\u00e9".encode(), *(bytes([byte]) for byte in "\N{GRINNING FACE}".encode())]
    decode = pieces(dict(enumerate(symbols)))
    generator = torch.Generator().manual_seed(seed)
    tokens = random_tokens(seed, 400, len(symbols))
    for at in range(50, 400, 50):
        tokens[at : at + 4] = [4, 5, 6, 7]
    found = []
    for strings in (("\N{GRINNING FACE}",), ("abab\u00e9",), ("ba\u00e9ab", "bbbbb")):
        rule, written, new = StopStrings(strings, decode), 0, 0
        while written < len(tokens):
            new = 1 + int(torch.randint(6, (), generator=generator))
            end = rule.end(tokens[:written], tokens[written : written + new])
            if end is not None:
                break
            written += new
        ours = tokens if end is None else tokens[: written + end]
        assert ours == cut(tokens, set(), rule)
        found.append(end)
    assert found[0] is not None


# Stopping


def test_what_stopping_knows(any_drafter, target):
    """Evidence of every depth: the log-odds of the likeliest draft, and what a confidence head says."""
    prompts = prompts_of(target)[:2]
    for shape in (chain_of(3), TREE):
        proposer = HeadProposer(any_drafter, shape, stopping=Stopping())
        decoder = Decoder(target, proposer, sampling=Sampling(1.0), stop=set())
        generator = torch.Generator().manual_seed(0)
        rounds = decoder.stream(prompts, 6, generator=generator)
        next(rounds)
        with torch.inference_mode():
            tree = proposer.propose(Sampling(1.0), generator)
        assert len(proposer.evidence) == 3 and all(found.shape == (2, 2) for found in proposer.evidence)
        for d, found in enumerate(proposer.evidence, start=1):
            assert (found[:, 1] != 0).all() == ("confidence_head" in dict(any_drafter.named_children()))
            if shape.chain:
                best = tree.probs[:, d].max(-1).values.clamp(max=1 - 1e-6)
                torch.testing.assert_close(found[:, 0].double(), torch.logit(best), rtol=1e-3, atol=1e-3)
        rounds.close()


def test_chances_are_logistic():
    stopping = Stopping(weight=0.5, bias=-0.2, confidence_weight=2.0)
    evidence = torch.tensor([[1.0, 0.3], [-2.0, 1.0]])
    for (x, c), found in zip(evidence.tolist(), stopping.log_chance(evidence).tolist()):
        assert math.exp(found) == pytest.approx(1 / (1 + math.exp(0.2 - 0.5 * x - 2 * c)))


def test_never_now_and_then_and_always(any_drafter, target):
    """Whatever stops the drafting, the answer stays."""
    prompts = prompts_of(target)[:2]

    def answer(proposer):
        return Decoder(target, proposer, sampling=Sampling(), stop=set()).generate(prompts, 6)

    plain, chances = answer(None), []
    for shape, fraction in ((chain_of(3), 0.0), (chain_of(3), 0.5), (chain_of(3), 1.0), (TREE, 0.5)):
        threshold = sorted(chances)[len(chances) // 2] if fraction == 0.5 else fraction
        proposer = HeadProposer(any_drafter, shape, stopping=Stopping(threshold=threshold))
        decoder = Decoder(target, proposer, sampling=Sampling(), stop=set())
        found = Generation([[], []], [[], []])
        for emitted in decoder.stream(prompts, 6, result=found):
            found.tokens = [before + tokens for before, tokens in zip(found.tokens, emitted.tokens)]
            if fraction == 0 and proposer.evidence:
                chances.append(float(sum(map(Stopping().log_chance, proposer.evidence)).max().exp()))
        assert found.tokens == plain.tokens
        check_counters(found)
        if fraction == 0:
            assert set(found.drafted) == {3} and found.accepted == answer(HeadProposer(any_drafter, shape)).accepted
        if fraction == 1:
            assert found.drafted == [0] * 5 and found.accepted == [[0] * 5] * 2  # tau = 1


def test_some_rounds_draft_less(small_target):
    for way in (CHAIN, TREE):
        proposer = HeadProposer(make_drafter(small_target, "eagle"), way, stopping=STOPPING)
        generation = Decoder(small_target, proposer, sampling=Sampling(), stop=set()).generate(
            prompts_of(small_target)[:1], 48
        )
        check_counters(generation)
        assert max(generation.accepted[0]) > 0 and len(set(generation.drafted)) > 1


# Trees of fixed shape


def value(paths) -> float:
    """Expected accepted drafts, were children accepted with the chances that `static_parents` assumes."""
    return sum(math.prod(FIRST_CHILD * NEXT_CHILD**rank for rank in path) for path in paths)


def paths_of(parents: list[int]) -> list[tuple[int, ...]]:
    """The ranks along the way to each node but the root."""
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(parents[1:], start=1):
        paths.append((*paths[parent], parents[:node].count(parent)))
    return paths[1:]


SHAPES = [(1, 3, 2), (2, 2, 4), (2, 2, 6), (2, 3, 5), (3, 2, 5), (3, 2, 30), (4, 1, 4), (2, 5, 3)]


@pytest.mark.parametrize("shape", itertools.starmap(TreeShape, SHAPES), ids=str)
def test_static_trees_against_all_trees(shape):
    parents = static_parents(shape)
    whole = [
        path for depth in range(1, shape.depth + 1) for path in itertools.product(range(shape.width), repeat=depth)
    ]
    num = min(shape.nodes, len(whole))
    assert parents[0] == -1 and len(parents) == 1 + num
    assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
    paths = paths_of(parents)
    assert [len(path) for path in paths] == sorted(len(path) for path in paths)  # level by level
    assert set(paths) <= set(whole)  # no deeper and no wider than it may be
    best = 0.0
    for some in itertools.combinations(whole, num):
        chosen = {(), *some}
        if all(path[:-1] in chosen and (not path[-1] or (*path[:-1], path[-1] - 1) in chosen) for path in some):
            best = max(best, value(some))
    assert value(paths) == pytest.approx(best)


@pytest.mark.parametrize("shape", [TreeShape(4, 3, 20), TreeShape(6, 4, 40)], ids=str)
def test_first_children_come_first(shape):
    """What is drawn first has the most below it."""
    paths = paths_of(static_parents(shape))
    below = {path: sum(other[: len(path)] == path for other in paths) for path in paths}
    assert all(path[-1] == 0 or below[path] <= below[(*path[:-1], path[-1] - 1)] for path in paths)
    assert max(map(len, paths)) == shape.depth


# Settings


def drafting_of(name: str) -> dict:
    found = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    found.pop("defaults", None)
    return found


@pytest.mark.parametrize("name", [path.stem for path in sorted(CONF.glob("*.yaml")) if path.stem != "base"])
def test_shipped_settings(name, small_target):
    drafting = Drafting(**{**drafting_of("base"), **drafting_of(name)})
    assert drafting.shape.depth == drafting.depth
    proposer = drafting.proposer(make_drafter(small_target, "eagle"))
    assert drafting.decoder(small_target, proposer, sampling=Sampling(), stop=set()).generate([[1]], 3)


def test_settings_of_scripts(tmp_path):
    assert DecodeOptions().drafting() == Drafting(**{**drafting_of("base"), **drafting_of("chain"), "nodes": None})
    chosen = DecodeOptions(depth=3, width=2, children="distinct", rule="typical", lossy=True, compile=True)
    assert chosen.drafting() == Drafting(3, 2, None, "distinct", None, "typical", True, True)
    assert chosen.drafting().shape == TreeShape(3, 2, 6)
    options = DecodeOptions(temperature="0,0.5", top_k=3, top_p=0.5, repetition_penalty=2.0)
    assert options.samplings() == [Sampling(0.0, 3, 0.5, 2.0), Sampling(0.5, 3, 0.5, 2.0)]
    found = Drafting(4, stopping={"weight": 0.5, "bias": 0.1, "confidence_weight": 0.0, "threshold": 0.3}, compile=True)
    path = tmp_path / "decode.yaml"
    OmegaConf.save(OmegaConf.create(vars(found)), path)
    assert DecodeOptions(file=str(path), depth=9).drafting() == found  # the file replaces what it says


DAMAGES = {
    "empty": "",
    "a list": "- 1\n- 2\n",
    "a word": "chain\n",
    "no YAML": "depth: [1\n",
    "an unknown key": "depth: 2\nwidth: 1\ncompile: false\nheight: 3\n",
    "too little": "compile: false\n",
    "stopping of another kind": "depth: 2\ncompile: false\nstopping: 3\n",
    "an unknown coefficient": "depth: 2\ncompile: false\nstopping: {slope: 1}\n",
    "words for numbers": "depth: two\ncompile: false\n",
    "other children": "depth: 2\ncompile: false\nchildren: many\n",
    "too few nodes": "depth: 4\nwidth: 2\nnodes: 2\ncompile: false\n",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file(tmp_path, small_target, damage):
    path = tmp_path / "decode.yaml"
    path.write_text(DAMAGES[damage])
    with pytest.raises(ValueError) as caught:
        DecodeOptions(file=str(path)).drafting()
    assert "decode." in str(caught.value) and str(caught.value).endswith(".")


def test_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(
            ValueError, match=r"^decode\.file=.* cannot be used .* a file that scripts/tune\.py wrote\.$"
        ):
            DecodeOptions(file=str(path)).drafting()


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ({"children": "many"}, r"^decode\.children=many must be chosen, distinct or independent\.$"),
        ({"depth": 0}, r"^decode\.depth=0, decode\.width=1 and decode\.nodes=0 must be at least 1\.$"),
        ({"depth": 4, "width": 2, "nodes": 3}, r"^decode\.nodes=3 cannot hold a path of decode\.depth=4"),
        ({"rule": "best"}, r"^rule=best must be one of token, block, typical\.$"),
        ({"rule": "typical"}, r"^rule=typical changes what the target says"),
        ({"rule": "typical", "lossy": True}, r"^rule=typical needs temperature= above 0"),
        ({"temperature": "hot"}, r"^decode\.temperature=hot: give numbers"),
        ({"top_p": 2.0}, r"^decode\.top_p=2\.0 must be above 0 and at most 1"),
    ],
    ids=str,
)
def test_wrong_settings(small_target, wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        options = DecodeOptions(**wrong)
        drafting, samplings = options.drafting(), options.samplings()
        proposer = drafting.proposer(make_drafter(small_target, "eagle"))
        drafting.decoder(small_target, proposer, sampling=samplings[0], stop=set())

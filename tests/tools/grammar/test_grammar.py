"""Tests of answers under a grammar: the constrained distribution, greedy identity, masks, ends, bad grammars."""

import collections
import json
import math
import re

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.core.constraint import Constraint, constrain_tree, unpack_masks
from specdec.core.generation import Ends
from specdec.core.sampling import Sampling
from specdec.core.tree import Tree, TreeShape, make_chain
from specdec.decoding.decoder import Decoder
from specdec.hf import Speculative
from specdec.proposers import auto
from specdec.proposers.auto import AutoProposer
from specdec.proposers.costs import make_costs
from specdec.proposers.heads import HeadProposer
from specdec.proposers.text import Forced, Ngram
from specdec.target.model import load_tokenizer
from specdec.tools.grammar.grammar import Grammar, GrammarCompiler, GrammarConstraint
from tests.support.decoding import chain_of, random_tokens
from tests.support.drafters import make_drafter, save_eagle
from tests.support.enumeration import PROMPT, SAMPLINGS, THREE_TOKENS, V, decoder_outcomes, sampled_target
from tests.support.targets import REAL_TARGET, save_target, small_tokenizer
from tests.tools.grammar.grammars import Language, random_constraint, some_of

CHAIN, TREE = chain_of(2), TreeShape(depth=2, width=2, nodes=4)
FREE = dict.fromkeys(range(1, 10), 1.0)


# The distribution at temperature > 0


class Constrained:
    """A decoder whose answers follow the random grammar of a seed."""

    def __init__(self, decoder: Decoder, seed: int):
        self.decoder, self.seed = decoder, seed

    def stream(self, prompts, num):
        constraints = [random_constraint(V, self.seed) for _ in prompts]
        return self.decoder.stream(prompts, num, constraints=constraints)


def next_distribution(sampling: Sampling, text: tuple[int, ...], seed: int) -> torch.Tensor:
    """The distribution [V] of the constrained target after `text`, with transformers' processors."""
    tokens = torch.tensor([text])
    with torch.no_grad():
        logits = sampled_target().model(tokens).logits[:, -1]
    logits = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(tokens, logits)
    allowed = torch.zeros(V, dtype=torch.bool)
    allowed[list(some_of(text[len(PROMPT) :], V, seed))] = True
    logits = logits.masked_fill(~allowed, -torch.inf)
    steps = [TemperatureLogitsWarper(sampling.temperature)]
    steps += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p else []
    return LogitsProcessorList(steps)(tokens, logits).softmax(-1)[0]


def error(decoder: Decoder, number: int, monkeypatch, *, seed: int = 3, alone: bool = False) -> float:
    """The largest difference of the distribution of texts behind this round's tokens to the constrained target's."""

    def probability(before, text):
        distributions = (next_distribution(decoder.sampling, before + text[:n], seed) for n in range(len(text)))
        return math.prod(float(distribution[token]) for distribution, token in zip(distributions, text))

    constrained = Constrained(decoder, seed)
    outcomes = list(decoder_outcomes(constrained, number, seed=1, alone=alone, monkeypatch=monkeypatch))
    emitted_probability, before = collections.Counter(), outcomes[0][0]
    for _, weight, emitted in outcomes:
        emitted_probability[emitted] += weight
    distribution = {}
    for text in THREE_TOKENS:
        beginnings = [(text[:n], probability(before + text[:n], text[n:])) for n in range(1, 4)]
        distribution[text] = sum(emitted_probability[emitted] * chance for emitted, chance in beginnings)
    return max(abs(distribution[text] - probability(before, text)) for text in THREE_TOKENS)


def auto_with(target, *members) -> AutoProposer:
    return AutoProposer(target, members=[*members], costs=make_costs(FREE, plain=1.0, absorb=0, step=0))


def decoder_of(setting: str, sampling: str, rule: str) -> Decoder:
    target, shape = sampled_target(), TREE if "tree" in setting else CHAIN
    head = HeadProposer(make_drafter(target, "eagle"), shape, children=CHILDREN.get(setting, "chosen"))
    proposers = {
        "plain": None,
        "forced": Forced(target, num=3),
        "auto": auto_with(target, Forced(target, num=2), Ngram(target, min=1, max=2, num=2), head),
    }
    proposer = proposers.get(setting, head)
    return Decoder(target, proposer, sampling=SAMPLINGS[sampling], stop=set(), rule=rule)


CHILDREN = {"distinct tree": "distinct"}
CASES = ["plain", "forced", "chain", "chosen tree", "distinct tree"]


@pytest.mark.full
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "setting, sampling", [(setting, "all" if index % 2 else "warm") for index, setting in enumerate(CASES)]
)
def test_answers_have_the_law_of_the_constrained_target(setting, sampling, rule, monkeypatch):
    """Every draw of a round is enumerated, in the first round and in the third."""
    decoder = decoder_of(setting, sampling, rule)
    for number in (1, 3):
        assert error(decoder, number, monkeypatch) < 1e-12


@pytest.mark.full
def test_a_grammar_that_drops_sampled_drafts_is_detected(monkeypatch):
    """Negative control: to leave out a sampled draft because of what it is changes the distribution."""
    wrong = constrain_tree

    def dropping(tree: Tree, constraints, vocab_size, *, prune):
        if tree.probs is None:
            return wrong(tree, constraints, vocab_size, prune=prune)
        (only,) = constraints
        allowed = only.allowed(tree.tokens[0].tolist(), tree.parents[0].tolist())
        kept = [node for node, mask in enumerate(allowed) if mask is not None]
        return wrong(tree.select_nodes([kept]), constraints, vocab_size, prune=False)

    monkeypatch.setattr("specdec.core.constraint.constrain_tree", dropping)
    assert (
        max(error(decoder_of("chain", "warm", "token"), 1, monkeypatch, seed=seed, alone=True) for seed in (1, 2, 3))
        > 1e-3
    )


@pytest.mark.full
def test_auto_keeps_the_law_of_the_constrained_target(monkeypatch):
    monkeypatch.setattr(auto, "MAX_HEAD_STEPS", 2)  # the enumeration knows rounds of up to three tokens
    decoder = decoder_of("auto", "warm", "token")
    begin = decoder.proposer.begin

    def forget_and_begin(tokens, num):
        decoder.proposer.reset_history()
        begin(tokens, num)

    decoder.proposer.begin = forget_and_begin
    assert error(decoder, 1, monkeypatch, alone=True) < 1e-12
    assert error(decoder, 2, monkeypatch, alone=True) < 1e-12


# Temperature 0


def constraints_of(num: int, vocab_size: int, free: int | None = None) -> list[Constraint | None]:
    """Of each row another language of few tokens; `free` has none."""

    def language(seed):
        return Language(
            lambda text: {(7 * sum(text) + 3 * k + seed) % vocab_size for k in range(1 + len(text) % 4)}, vocab_size
        )

    return [None if row == free else GrammarConstraint(language(row), frozenset()) for row in range(num)]


@pytest.mark.parametrize("setting", ["forced", "chain", "chosen tree", "auto", "ngram"])
def test_greedy_answers_are_those_of_plain_constrained_decoding(small_target, setting):
    """Ragged rows, one of them free; drafts are refused and rolled back all the time."""
    target, prompts = small_target, [random_tokens(length, length, small_target.vocab_size) for length in (5, 9, 2)]
    ngram = Ngram(target, min=1, max=3, num=4)
    head = HeadProposer(make_drafter(target, "eagle", False), TREE if "tree" in setting else CHAIN)
    proposers = {
        "forced": Forced(target, num=4),
        "ngram": ngram,
        "auto": auto_with(target, Forced(target, num=4), ngram, head),
    }
    proposer = proposers.get(setting, head)
    answers = []
    for drafting in (None, proposer):
        decoder = Decoder(target, drafting, sampling=Sampling(), stop=set())
        answers.append(decoder.generate(prompts, 40, constraints=constraints_of(3, target.vocab_size, free=1)))
    assert answers[0].tokens == answers[1].tokens
    free = Decoder(target, None, sampling=Sampling(), stop=set()).generate(prompts, 40)
    assert free.tokens[1] == answers[0].tokens[1] and free.tokens[0] != answers[0].tokens[0]
    for answer, state in zip(answers[1].tokens, constraints_of(3, target.vocab_size, free=1)):
        assert state is None or state.fits(answer)
    if setting in ("forced", "auto"):
        assert sum(map(sum, answers[1].accepted)) > 0


def test_requests_with_and_without_grammars_join_and_leave(small_target):
    prompts = [random_tokens(row, 3 + row, small_target.vocab_size) for row in range(6)]

    def constraint(number):
        return constraints_of(6, small_target.vocab_size, free=2)[number]

    proposer = auto_with(small_target, Forced(small_target, num=4), Ngram(small_target, min=1, max=3, num=4))
    decoder = Decoder(small_target, proposer, sampling=Sampling(), stop=set())
    found = dict(decoder.answers(prompts, 20, batch_size=2, constraint=constraint))
    for number, prompt in enumerate(prompts):
        alone = Decoder(small_target, None, sampling=Sampling(), stop=set())
        assert found[number].tokens == alone.generate([prompt], 20, constraints=[constraint(number)]).tokens


# Masks and pruning


def test_forced_drafts_are_never_refused(small_target):
    """A grammar that alternates between one token and a choice of two."""

    def language(text):
        return {len(text) % 6} if len(text) % 5 else {1, 2}

    decoder = Decoder(small_target, Forced(small_target, num=8), sampling=Sampling(), stop=set())
    constraint = GrammarConstraint(Language(language, small_target.vocab_size), frozenset())
    answer = decoder.generate([[1, 2, 3]], 31, constraints=[constraint])
    assert answer.drafted == [4, 4, 4, 4, 4, 4]
    assert answer.accepted == [[4] * 6]


def test_nodes_that_are_not_allowed_are_left_out():
    """Row 0 keeps two nodes of five, row 1 one; it is filled up with its first other node."""
    may = {(): {1}, (1,): {2}, (1, 2): {0, 1, 2}}
    constraints = [GrammarConstraint(Language(lambda text: may.get(text, {3}), 4), frozenset()) for _ in range(2)]
    tokens = torch.tensor([[0, 2, 1, 2, 3], [0, 1, 3, 3, 3]])
    parents = torch.tensor([[-1, 0, 0, 2, 2], [-1, 0, 0, 1, 2]])
    tree, allowed = constrain_tree(Tree(tokens, parents, None), constraints, 4, prune=True)
    assert tree.tokens.tolist() == [[0, 1, 2], [0, 1, 3]] and tree.parents.tolist() == [[-1, 0, 1], [-1, 0, 0]]
    assert allowed[0].nonzero().tolist() == [[0, 1], [1, 2], [2, 0], [2, 1], [2, 2]]
    assert allowed[1, :2].nonzero().tolist() == [[0, 1], [1, 2]] and allowed[1, 2].all()
    whole, masks = constrain_tree(Tree(tokens, parents, None), constraints, 4, prune=False)
    assert whole.tokens.shape == (2, 5) and torch.equal(masks[0, 2], allowed[0, 1])


def test_a_sampled_draft_that_is_not_allowed_stays_and_what_is_below_it_goes():
    constraint = GrammarConstraint(Language(lambda text: {1}, 4), frozenset())
    tree = make_chain(torch.tensor([[0, 1, 2, 1, 1]]), torch.rand(1, 5, 4))
    kept, _ = constrain_tree(tree, [constraint], 4, prune=True)
    assert kept.tokens.tolist() == [[0, 1, 2]] and kept.linear and torch.equal(kept.probs, tree.probs[:, :3])


def test_each_token_has_a_bit_of_its_own():
    constraint = GrammarConstraint(Language(lambda text: {9}, 16), frozenset())
    following, at_nine, at_thirteen = constraint.allowed([0, 9, 13], [-1, 0, 0])
    assert following == at_nine and following[:2] == bytes([0, 2]) and at_thirteen is None


def test_behind_the_end_of_an_answer_everything_is_allowed():
    constraint = GrammarConstraint(Language(lambda text: {1, 3}, 4), frozenset({3}))
    assert constraint.allowed([0, 3, 2, 2], [-1, 0, 1, 0])[1:] == [b"", b"", None]
    constraint.take([1, 3, 2])
    assert constraint.ended and constraint.allowed([0, 2], [-1, 0]) == [b"", b""] and constraint.forced() == []
    assert constraint.fits([2, 2])


# llguidance, on the real target


@pytest.fixture(scope="module")
def real_grammars():
    pytest.importorskip("llguidance")
    return load_tokenizer(str(REAL_TARGET)), GrammarCompiler(load_tokenizer(str(REAL_TARGET)), 49152, {2})


NAME, AGE = {"type": "string", "maxLength": 12}, {"type": "integer", "minimum": 0, "maximum": 120}
SCHEMA = {"type": "object", "properties": {"name": NAME, "age": AGE}, "required": ["name", "age"]}
SCHEMA |= {"additionalProperties": False}


def test_a_schema_forces_its_names_and_ends_with_a_stop_token(real_grammars):
    tokenizer, grammars = real_grammars
    constraint = grammars.make_constraint(Grammar.from_row({"json_schema": SCHEMA}))
    assert tokenizer.decode(constraint.forced()).startswith('{"name')
    text = '{"name": "Ada", "age": 36}'
    tokens = tokenizer(text)["input_ids"]
    assert constraint.fits(tokens) and constraint.fits([*tokens, 2]) and not constraint.fits([*tokens, 5])
    assert not constraint.fits(tokenizer('{"name": "a name that is too long"')["input_ids"])
    assert not constraint.fits([2])
    constraint.take([*tokens, 2])
    assert constraint.ended and constraint.complete
    again = grammars.make_constraint(Grammar.from_row({"json_schema": SCHEMA}))
    assert not again.ended and again.fits(tokens)


@pytest.mark.parametrize(
    "document, why",
    [
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
        ({"json_schema": {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}}, "nsatisfiable"),
        ({"json_schema": {"not": {"type": "string"}}}, "not"),
        ({"regex": "(ab"}, "regex"),
        ({"lark": "begin: 'a'"}, "lark cannot be used"),
        ({"regex": r"[^\s\S]"}, "no text satisfies it"),
    ],
)
def test_a_grammar_that_cannot_be_met_is_refused_in_a_sentence(real_grammars, document, why):
    with pytest.raises(ValueError, match=why) as raised:
        real_grammars[1].make_constraint(Grammar.from_row(document))
    assert "Change it, or leave it out." in str(raised.value) and "\n" not in str(raised.value)


def test_a_dead_end_of_the_grammar_spoils_nothing_beside_it(real_grammars):
    """After "q" the drafts "a" and "c" are allowed; behind "a" nothing is, though each of its tokens was."""
    tokenizer, grammars = real_grammars
    constraint = grammars.make_constraint(Grammar.from_row({"lark": 'start: "q" ("a" X | "c" "d")\nX: /b/ & /c/'}))
    q, a, c, d = (tokenizer(letter)["input_ids"][0] for letter in "qacd")
    constraint.take([q])
    masks = constraint.allowed([q, a, c, a], [-1, 0, 0, 0])
    may = [unpack_masks([[mask]], 49152, "cpu")[0, 0].nonzero()[:, 0].tolist() for mask in masks]
    assert {a, c} <= set(may[0]) and may[1:] == [[2], [d], [2]]
    dead = grammars.make_constraint(Grammar.from_row({"lark": 'start: "q" ("a" X | "c" "d")\nX: /b/ & /c/'}))
    dead.take([q, a, 2])
    assert dead.ended and not dead.complete
    constraint.take([c, d, 2])
    assert constraint.complete


def test_options_name_a_grammar_or_a_file(tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    written = Grammar.parse(f"json:{json.dumps(SCHEMA)}")
    assert written == Grammar.parse(f"json:{tmp_path / 'schema.json'}") == Grammar.from_row({"json_schema": SCHEMA})
    assert written.to_row() == {"json_schema": SCHEMA}
    assert Grammar.parse("regex:[0-9]+") == Grammar.from_row({"regex": "[0-9]+"})
    for wrong in ("json", "xml:<a/>", "json:{no", f"json:{tmp_path / 'other.json'}"):
        with pytest.raises(ValueError, match="grammar="):
            Grammar.parse(wrong)
    for wrong in (None, [], {}, {"xml": "a"}, {"regex": 3}, {"regex": "a", "lark": "b"}):
        with pytest.raises(ValueError, match="must be"):
            Grammar.from_row(wrong)


def test_without_stop_tokens_or_the_package_a_sentence_says_what_to_do(monkeypatch):
    with pytest.raises(ValueError, match="end an answer"):
        pytest.importorskip("llguidance")
        GrammarCompiler(None, 10, set())
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"specdec-drafters\[grammar\]"):
        GrammarCompiler(None, 10, {2})


def test_an_answer_ends_with_its_stop_token_under_a_grammar(small_target):
    """The grammar allows an end only after six tokens; the target must then choose it."""

    def language(text):
        return {1, 2} if len(text) < 6 else {3}

    for proposer in (None, Forced(small_target, num=4), Ngram(small_target, min=1, max=2, num=6)):
        decoder = Decoder(small_target, proposer, sampling=Sampling(), stop={3})
        constraint = GrammarConstraint(Language(language, small_target.vocab_size), frozenset({3}))
        (answer,) = decoder.generate([[1, 2, 1, 2]], 30, constraints=[constraint]).tokens
        assert len(answer) == 7 and answer[-1] == 3 and Ends(frozenset({3})).cut_tokens([], answer) == (answer, True)


def test_generate_follows_a_grammar(tmp_path):
    """`custom_generate`, with rows of different lengths; without a tokenizer it says what to give."""
    pytest.importorskip("llguidance")
    target, tokenizer = save_target(tmp_path / "target"), small_tokenizer()
    save_eagle(tmp_path / "head", target)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float64)
    grammar = Grammar.parse("regex:(sky|blue) is [0-9]{2}")
    speculative = Speculative(tmp_path / "head", tokenizer=tokenizer, grammar=grammar)
    tokenizer.padding_side = "left"
    inputs = tokenizer(["What is the sky?", "a"], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    settings = {"custom_generate": speculative, "max_new_tokens": 30, "do_sample": False, "pad_token_id": 2}
    answers = model.generate(**inputs, **settings)
    texts = tokenizer.batch_decode(answers[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert all(re.fullmatch("(sky|blue) is [0-9]{2}", text) for text in texts)
    with pytest.raises(ValueError, match="tokenizer=tokenizer"):
        Speculative(tmp_path / "head", grammar=grammar)

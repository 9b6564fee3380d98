"""An existing small causal LM as the drafter: its parameters, its cache after every round, and refusals."""

import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.core.sampling import Sampling
from specdec.core.tree import Tree
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.heads.draft import Draft
from specdec.options import proposers
from specdec.proposers.heads import HeadProposer
from specdec.target.model import Target
from tests.support.decoding import greedy, random_tokens
from tests.support.enumeration import SAMPLINGS, decoder_error, sampled_target
from tests.support.targets import save_word_model, word_tokenizer

pytestmark = pytest.mark.full

V, DEPTH, NUM_NEW = 61, 3, 21
CHAIN = Drafting(DEPTH)
LENGTHS = (5, 12, 2)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    return save_word_model(tmp_path_factory.mktemp("target") / "target", rows=V)


@pytest.fixture(scope="module")
def target(target_folder) -> Target:
    return Target.load(str(target_folder), dtype="float64")


@pytest.fixture(scope="module", params=["itself", "another"])
def model(request, target_folder, tmp_path_factory) -> Path:
    """A draft model that is always right, and one that is nearly always wrong."""
    if request.param == "itself":
        return target_folder
    return save_word_model(tmp_path_factory.mktemp("draft") / "another", rows=V, width=24, seed=1)


def propose_with(target: Target, model: Path, drafting: Drafting = CHAIN) -> HeadProposer:
    config = proposers.configure("draft", settings={"model": str(model)}, drafting=drafting, checkpoint=None)
    return proposers.make_proposer(config, target)


def prompts() -> list[list[int]]:
    return [random_tokens(seed, num, 57) for seed, num in enumerate(LENGTHS)]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_model_is_loaded_once_in_the_targets_dtype(target_folder, tmp_path, dtype, tied):
    target = Target.load(str(target_folder), dtype=dtype)
    model = save_word_model(tmp_path / "small", width=24, tied=tied)
    drafter = propose_with(target, model).drafter
    parameters = list(drafter.parameters())
    assert {parameter.dtype for parameter in parameters} == {target.dtype} and drafter.dtype == target.dtype
    assert not any(parameter.requires_grad for parameter in parameters) and not drafter.training
    saved = AutoModelForCausalLM.from_pretrained(model, dtype=target.dtype)
    assert sum(p.numel() for p in parameters) == sum(p.numel() for p in saved.parameters())
    pointers = {p.data_ptr() for p in parameters}
    assert len(pointers) == len(parameters) and not pointers & {p.data_ptr() for p in target.model.parameters()}
    assert all(name.endswith("inv_freq") and buffer.dtype == torch.float32 for name, buffer in drafter.named_buffers())


@torch.no_grad()
def continued(lm, text: list[int], num: int) -> list[int]:
    """The greedy continuation, for which the whole text is read again for every token."""
    tokens = [*text]
    for _ in range(num):
        tokens.append(int(lm(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(text) :]


def script(tree: Tree, texts: list[list[int]], answers: list[list[int]], num_round: int) -> Tree:
    """The tree with scripted drafts: in row r the first (num_round + r) % (DEPTH + 1) are right and the next is wrong.

    texts: prompt and committed tokens of each row; answers: prompt and whole answer of each row
    """
    rows = []
    for row, (text, answer) in enumerate(zip(texts, answers)):
        right_drafts = answer[len(text) : len(text) + DEPTH]
        num_right = (num_round + row) % (DEPTH + 1)
        rows.append([text[-1], *(token if n < num_right else (token + 1) % V for n, token in enumerate(right_drafts))])
        rows[-1] += [0] * (DEPTH + 1 - len(rows[-1]))  # at the end of the answer
    return Tree(torch.tensor(rows), tree.parents, None)


@pytest.mark.parametrize("scripted", [False, True], ids=["own drafts", "scripted drafts"])
def test_the_cache_holds_the_whole_text_after_every_round(target, model, target_folder, scripted):
    """After a round of any length the cache holds the whole text, and the next drafts equal the LM's continuation.

    See docs/methods.md, section 1. With scripted drafts, every number of drafts 0 .. DEPTH is accepted in turn.
    """
    proposer = propose_with(target, model)
    proposer.selects = False  # ended rows stay, so that all texts can be looked at
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    texts, trees = prompts(), []
    plain = greedy(target, None).generate(texts, NUM_NEW).tokens
    answers = [text + answer for text, answer in zip(texts, plain)]
    propose = proposer.propose

    def watched(*arguments):
        trees.append(propose(*arguments))
        assert proposer.cache.lengths.tolist() == proposer.cache.host_lengths == [len(text) for text in texts]
        assert proposer.cache.pending == 0
        for text, tree in zip(texts, trees[-1].tokens.tolist()):
            assert tree == [text[-1], *continued(lm, text, DEPTH)]
        return script(trees[-1], texts, answers, len(trees)) if scripted else trees[-1]

    proposer.propose = watched
    rounds = greedy(target, proposer).stream(texts, NUM_NEW)
    num_full = (NUM_NEW - 1) // (DEPTH + 1)  # rounds before any answer can be full
    accepted = []
    for emitted in itertools.islice(rounds, 1 + num_full):
        accepted.append(emitted.accepted)
        for text, tokens in zip(texts, emitted.tokens):
            text += tokens
    assert all(text == answer[: len(text)] for text, answer in zip(texts, answers))
    del accepted[0]  # the first tokens
    if scripted:
        for number, counts in enumerate(accepted, start=1):
            assert counts == [(number + row) % (DEPTH + 1) for row in range(len(LENGTHS))]
        assert set(itertools.chain(*accepted)) == set(range(DEPTH + 1))
    elif model == target_folder:
        assert accepted == [[DEPTH] * len(LENGTHS)] * num_full
    else:
        assert 0 in itertools.chain(*accepted)


@pytest.mark.parametrize("rows", [57, 64])
def test_a_model_with_more_or_fewer_embedding_rows_can_draft(target, tmp_path, rows):
    model = save_word_model(tmp_path / "small", rows=rows, width=24)
    proposer = propose_with(target, model, Drafting(3, width=2, nodes=5))
    plain = greedy(target, None).generate(prompts(), NUM_NEW)
    drafted = greedy(target, proposer).generate(prompts(), NUM_NEW)
    assert drafted.tokens == plain.tokens and proposer.drafter.vocab_size == V
    sampled = Decoder(target, propose_with(target, model), sampling=Sampling(1.0), stop=set())
    assert [len(answer) for answer in sampled.generate(prompts(), 9).tokens] == [9] * len(LENGTHS)


def with_words(path: Path, num: int, changed: dict[str, str] | None = None) -> Path:
    """Gives a saved model a tokenizer of so many words, some of which are written otherwise."""
    for old, new in (changed or {}).items():
        text = (path / "tokenizer.json").read_text()
        (path / "tokenizer.json").write_text(text.replace(f'"{old}":', f'"{new}":'))
    if not changed:
        word_tokenizer(num).save_pretrained(path)
    return path


@pytest.mark.parametrize("num", [55, 58, 61, 70])
def test_tokens_that_one_of_the_two_lacks_are_never_drafted(target, tmp_path, num):
    """More words than the target's 57, below and behind its 61 rows, or fewer."""
    model = with_words(save_word_model(tmp_path / "small", rows=max(num, V), width=24), num)
    drafter = propose_with(target, model).drafter
    assert drafter.draft_to_target.tolist() == list(range(min(num, 57)))
    head = drafter.body.get_input_embeddings() if drafter.lm_head is None else drafter.lm_head
    head.weight.data[min(num, V) - 1] *= 100  # what is masked cannot win
    proposer, trees = HeadProposer(drafter, Drafting(3).shape, children="chosen"), []
    propose = proposer.propose
    proposer.propose = lambda *arguments: trees.append(propose(*arguments)) or trees[-1]
    plain = greedy(target, None).generate(prompts(), NUM_NEW)
    drafted = greedy(target, proposer).generate(prompts(), NUM_NEW)
    assert drafted.tokens == plain.tokens
    Decoder(target, proposer, sampling=Sampling(1.0), stop=set()).generate(prompts(), NUM_NEW)
    seen = {token for tree in trees for token in tree.tokens[:, 1:].flatten().tolist()}
    assert len(seen) > 3 and max(seen) < min(num, 57)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_at_a_temperature_they_leave_the_targets_law_as_it_is(tmp_path, monkeypatch, rule):
    """Three tokens; the target's tokenizer has two of them, the drafter's four: every draw is enumerated."""
    exact = sampled_target()
    exact.model.save_pretrained(tmp_path / "target")
    with_words(tmp_path / "target", 2)
    monkeypatch.setattr(exact, "name", str(tmp_path / "target"))
    model = with_words(save_word_model(tmp_path / "small", rows=4, width=16, seed=2), 4)
    for name in ("warm", "all"):
        drafter = propose_with(exact, model).drafter
        assert drafter.draft_to_target.tolist() == [0, 1]
        proposer = HeadProposer(drafter, Drafting(2).shape, children="chosen")
        decoder = Decoder(exact, proposer, sampling=SAMPLINGS[name], stop=set(), rule=rule)
        assert decoder_error(decoder, 1, monkeypatch=monkeypatch) < 1e-12
        assert decoder_error(decoder, 3, seed=1, monkeypatch=monkeypatch) < 1e-12


def test_ids_with_other_texts_are_named(target, tmp_path):
    model = with_words(save_word_model(tmp_path / "small", width=24), 57, {"w7": "v7", "w31": "v31"})
    with pytest.raises(ValueError) as refused:
        propose_with(target, model)
    assert (
        f"has another tokenizer than {target.name}: 2 of its ids mean other texts, such as 7: 'v7' and not 'w7'."
        in str(refused.value)
    )


def test_messages_name_the_option_that_was_set(target, tmp_path):
    """Messages name proposer.model for the option of a proposer, and model for the argument of the class."""
    other = save_word_model(tmp_path / "other", prefix="v")
    bare = save_word_model(tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    for path, message in ((other, "has another tokenizer than"), (bare, "could not be"), (tmp_path / "no", "does not")):
        with pytest.raises(ValueError, match=f"^proposer.model={path}.*{message}") as error:
            propose_with(target, path)
        assert "head.drafter" not in str(error.value)
        with pytest.raises(ValueError, match=f"^model={path}.*{message}"):
            Draft(target, model=str(path))
    with pytest.raises(ValueError, match=r"^Give proposer\.model=\.\.\."):
        proposers.make_proposer(
            proposers.configure("draft", settings={}, drafting=Drafting(2), checkpoint=None), target
        )

"""Tests of every file of conf/proposer as scripts build it: greedy identity, the sampled distribution, batches, refusals."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specdec import checkpoint
from specdec.core import rules
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.heads import draft as heads_draft
from specdec.options import proposers
from specdec.proposers import datastore
from specdec.proposers import text as retrieval
from specdec.proposers.auto import AutoProposer
from specdec.target.model import Target
from specdec.text import token_text
from tests.support import make_drafter, make_target, random_tokens

pytestmark = pytest.mark.full

V, NUM_NEW = 6, 24
CHAIN = Drafting(3)
TOKENIZER = SimpleNamespace(get_vocab=lambda: {"a": 0})  # the tiny targets have no tokenizer
# Settings that must differ from conf/proposer for a tiny target
SETTINGS = {
    "layerskip": {"layers": "1"},
    "cascade": {"sinks": "1", "window": "2", "num": "3"},
    "retrieval": {"datastore": "DATASTORE", "min": "1"},
    "draft": {"model": "MODEL"},
    "auto": {"costs": "COSTS"},
}
COSTS = {"plain_ms": 1.0, "ratios": {"1": 1.0, "2": 1.1, "4": 1.3}, "absorb_ms": 0.05, "step_ms": 0.05}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """made(name, target, ...) -> the proposer of conf/proposer/<name>.yaml, with files for this target"""

    def make(name: str, target: Target, drafting: Drafting = CHAIN, **settings: str):
        size = target.vocab_size
        folder = folders.setdefault(size, tmp_path_factory.mktemp(f"vocabulary-{size}"))
        if not (folder / "head").exists():
            checkpoint.save(folder / "head", make_drafter(target, "eagle"), {"_target_": "specdec.heads.eagle.Eagle"})
            make_target(size, num_layers=1).model.save_pretrained(folder / "model")
            make_datastore(folder / "datastore", [repetitive(seed, size) for seed in range(6)], tokenizer=TOKENIZER)
            (folder / "costs.json").write_text(json.dumps(COSTS))  # on a tiny target measured ones may say: no drafts
        values = {"DATASTORE": f"{folder}/datastore", "MODEL": f"{folder}/model", "COSTS": f"{folder}/costs.json"}
        values = {key: values.get(value, value) for key, value in {**SETTINGS.get(name, {}), **settings}.items()}
        return proposers.make_proposer(
            proposers.configure(name, settings=values, drafting=drafting, checkpoint=str(folder / "head")), target
        )

    folders: dict[int, Path] = {}
    with pytest.MonkeyPatch.context() as patch:
        for module in (retrieval, heads_draft):
            patch.setattr(module, "load_tokenizer", lambda name, **_: TOKENIZER)
        yield make


def make_datastore(folder: Path, texts: list[list[int]], *, tokenizer) -> None:
    tokens = datastore.join_texts(texts)
    metadata = {"tokenizer_fingerprint": token_text.digest_vocabulary(tokenizer), "num_texts": len(texts), "length": 16}
    datastore.write_datastore(folder, tokens, datastore.sort_places(tokens, 16), metadata)


@pytest.fixture(params=proposers.list_names())
def name(request):
    return request.param


def repetitive(seed: int, vocab_size: int) -> list[int]:
    """A prompt that repeats a random text two and a half times."""
    text = random_tokens(seed, 7, vocab_size)
    return text + text + text[:3]


def test_greedy_answers_equal_plain_decoding(name, made, small_target):
    prompts = [repetitive(seed, V)[: 17 - 3 * seed] for seed in range(5)]
    plain = Decoder(small_target, None, sampling=Sampling(), stop=set()).generate(prompts, NUM_NEW)
    decoder = Decoder(small_target, made(name, small_target), sampling=Sampling(), stop=set())
    together = decoder.generate(prompts, NUM_NEW)
    assert together.tokens == plain.tokens
    if name != "forced":  # it drafts under a grammar only (tests/specdec/test_grammar.py)
        assert sum(map(sum, together.accepted)) > 0 and max(together.drafted) > 0
    for prompt, answer in zip(prompts[:2], plain.tokens):
        assert decoder.generate([prompt], NUM_NEW).tokens == [answer]


NUM_TOKENS, ROWS, BATCHES = 4, 500, 8


def test_commands_draft_by_the_same_members_as_the_library(made, small_target):
    auto = made("auto", small_target)
    usual = AutoProposer.make_default(small_target, auto.head)
    assert [type(member) for member in auto.members] == [type(member) for member in usual.members]


def distribution_of_texts(target: Target, prompt: list[int], sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The target's own distribution of the first NUM_TOKENS tokens, by one pass over all texts."""
    texts = list(itertools.product(range(target.vocab_size), repeat=NUM_TOKENS))
    tokens = torch.tensor([[*prompt, *text] for text in texts])
    distribution = sampling.distribution(target.logits(target.read(tokens, ()).final))  # [texts, T, V]
    # [texts, NUM_TOKENS]
    probabilities = distribution[:, len(prompt) - 1 : -1].gather(2, tokens[:, len(prompt) :, None])[..., 0]
    return dict(zip(texts, probabilities.prod(1).tolist()))


def chi_square(target: Target, proposer, sampling: Sampling) -> tuple[float, int, int]:
    """-> the p-value of sampled answers under the target's distribution, accepted drafts, rounds without an accepted draft"""
    prompt = [1, 2, 0, 1, 2, 0, 1]
    decoder = Decoder(target, proposer, sampling=sampling, stop=set())
    counts: dict[tuple[int, ...], int] = {}
    accepted = refused = 0
    for seed in range(BATCHES):
        generator = torch.Generator().manual_seed(seed)
        generation = decoder.generate([prompt] * ROWS, NUM_TOKENS, generator=generator)
        for text in map(tuple, generation.tokens):
            counts[text] = counts.get(text, 0) + 1
        accepted += sum(map(sum, generation.accepted))
        refused += sum(count == 0 for row in generation.accepted for count in row)
    distribution = distribution_of_texts(target, prompt, sampling)
    total = ROWS * BATCHES
    expected = {text: total * probability for text, probability in distribution.items()}
    rare = [text for text, number in expected.items() if number < 8]
    pairs = [(counts.get(text, 0), number) for text, number in expected.items() if text not in rare]
    if rare:
        pairs.append((sum(counts.get(text, 0) for text in rare), sum(expected[text] for text in rare) + 1e-9))
    distance = sum((observed - number) ** 2 / number for observed, number in pairs)
    freedom = torch.tensor((len(pairs) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(distance / 2, dtype=torch.float64))), accepted, refused


@pytest.fixture(scope="module")
def tiny_target():
    return make_target(3, num_layers=2)


def test_sampled_answers_follow_the_distribution_of_the_target(name, made, tiny_target):
    probability, accepted, refused = chi_square(tiny_target, made(name, tiny_target), Sampling(temperature=3.0))
    assert probability > 1e-3 and (name == "forced" or (accepted > 100 and refused > 100))


def test_a_rule_that_keeps_the_mass_of_refused_drafts_is_detected(made, tiny_target, monkeypatch):
    monkeypatch.setattr(rules, "refuse_node", lambda mass, tree, node: (mass, mass.sum(-1)))
    assert chi_square(tiny_target, made("ngram", tiny_target), Sampling(temperature=3.0))[0] < 1e-6


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("ngrams", {}, "no proposer 'ngrams'; there are: .*ngram"),
        ("ngram", {"most": "3"}, "proposer.most=3: ngram has the settings"),
        ("auto", {"ngram.num": "3"}, "no proposer 'ngram' inside it"),
        ("ngram", {"checkpoint": "nowhere"}, "proposer.checkpoint=nowhere: ngram holds no trained head"),
        ("auto", {"members": "[head]", "head.checkpoint": "nowhere"}, "nowhere.* does not exist"),
        ("auto", {"suffix.num": "x"}, "proposer.suffix.num=x must be a whole number"),
        ("head", {"checkpoint": "nowhere"}, "nowhere.* does not exist"),
        ("ngram", {"max": "[1"}, r"proposer.max=\[1 must be a whole number"),
        ("ngram", {"max": "many"}, "proposer.max=many must be a whole number"),
        ("suffix", {"least": "no"}, "proposer.least=no must be a number"),
        ("auto", {"members": "[ngram, heads]"}, "no proposer 'heads'"),
        ("draft", {"model": "???"}, "Give proposer.model"),
        ("retrieval", {"datastore": "nowhere"}, "nowhere does not exist"),
        ("layerskip", {"layers": "[0, 8]"}, "has 8 layers"),
        ("cascade", {"inner": "suffix"}, "cannot be rewound"),
    ],
)
def test_wrong_settings_are_refused(made, small_target, name, settings, message):
    with pytest.raises(ValueError, match=message):
        made(name, small_target, **settings)

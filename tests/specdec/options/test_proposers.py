"""Every file of conf/proposer as commands build it: greedy identity, the sampled distribution, batches, refusals."""

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
from tests.support.decoding import random_tokens
from tests.support.drafters import make_drafter
from tests.support.enumeration import SAMPLINGS, answer_statistic, sampled_target
from tests.support.targets import make_target

pytestmark = pytest.mark.full

V, NUM_NEW = 6, 24
TOKENIZER = SimpleNamespace(get_vocab=lambda: {"a": 0})  # the tiny targets have no tokenizer
# Settings that must differ from conf/proposer for a tiny target
SETTINGS = {
    "cascade": {"sinks": "1", "window": "2", "num": "3"},
    "retrieval": {"datastore": "FOLDER/datastore", "min": "1"},
    "draft": {"model": "FOLDER/model"},
    "auto": {"costs": "FOLDER/costs.json"},
}
COSTS = {"plain_ms": 1.0, "ratios": {"1": 1.0, "2": 1.1, "4": 1.3}, "absorb_ms": 0.05, "step_ms": 0.05}


@pytest.fixture(scope="module")
def make_configured(tmp_path_factory):
    """make_configured(name, target, ...) -> the proposer of conf/proposer/<name>.yaml, with files for this target"""
    folders: dict[int, Path] = {}

    def make_files(target: Target, folder: Path) -> Path:
        size = target.vocab_size
        checkpoint.save(folder / "head", make_drafter(target, "eagle"), {"_target_": "specdec.heads.eagle.Eagle"})
        make_target(size, num_layers=1).model.save_pretrained(folder / "model")
        make_datastore(folder / "datastore", [repetitive(seed, size) for seed in range(6)])
        (folder / "costs.json").write_text(json.dumps(COSTS))  # on a tiny target measured ones may say: no drafts
        return folder

    def make(name: str, target: Target, **settings: str):
        size = target.vocab_size
        if size not in folders:
            folders[size] = make_files(target, tmp_path_factory.mktemp(f"vocabulary-{size}"))
        texts = {**SETTINGS.get(name, {}), **settings}
        texts = {key: text.replace("FOLDER", str(folders[size])) for key, text in texts.items()}
        head = str(folders[size] / "head")
        config = proposers.configure(name, settings=texts, drafting=Drafting(3), checkpoint=head)
        return proposers.make_proposer(config, target)

    with pytest.MonkeyPatch.context() as patch:
        for module in (retrieval, heads_draft):
            patch.setattr(module, "load_tokenizer", lambda name, **_: TOKENIZER)
        yield make


def make_datastore(folder: Path, texts: list[list[int]]) -> None:
    tokens = datastore.join_texts(texts)
    metadata = {"tokenizer_fingerprint": token_text.digest_vocabulary(TOKENIZER), "num_texts": len(texts), "length": 16}
    datastore.write_datastore(folder, tokens, datastore.sort_places(tokens, 16), metadata)


@pytest.fixture(params=proposers.list_names())
def name(request):
    return request.param


def repetitive(seed: int, vocab_size: int) -> list[int]:
    """A prompt that repeats a random text two and a half times."""
    text = random_tokens(seed, 7, vocab_size)
    return text + text + text[:3]


def test_greedy_answers_equal_plain_decoding(name, make_configured, small_target):
    prompts = [repetitive(seed, V)[: 17 - 3 * seed] for seed in range(5)]
    plain = Decoder(small_target, None, sampling=Sampling(), stop=set()).generate(prompts, NUM_NEW)
    decoder = Decoder(small_target, make_configured(name, small_target), sampling=Sampling(), stop=set())
    together = decoder.generate(prompts, NUM_NEW)
    assert together.tokens == plain.tokens
    if name != "forced":  # it drafts under a grammar only (tests/specdec/test_grammar.py)
        assert sum(map(sum, together.accepted)) > 0 and max(together.drafted) > 0
    for prompt, answer in zip(prompts[:2], plain.tokens):
        assert decoder.generate([prompt], NUM_NEW).tokens == [answer]


def test_commands_draft_by_the_same_members_as_the_library(make_configured, small_target):
    auto = make_configured("auto", small_target)
    usual = AutoProposer.make_default(small_target, auto.head)
    assert [type(member) for member in auto.members] == [type(member) for member in usual.members]


def sample(proposer) -> tuple[float, list[int]]:
    """By how many deviations sampled answers are off the target's law, and the accepted drafts of all their rounds."""
    decoder = Decoder(sampled_target(), proposer, sampling=SAMPLINGS["warm"], stop=set())
    statistic, freedom = answer_statistic(decoder, 3000)
    answers = decoder.generate([[1, 2, 0, 1, 2, 0, 1]] * 500, 4, generator=torch.Generator().manual_seed(0))
    return (statistic - freedom) / (2 * freedom) ** 0.5, list(itertools.chain(*answers.accepted))


def test_sampled_answers_follow_the_distribution_of_the_target(name, make_configured):
    distance, accepted = sample(make_configured(name, sampled_target()))
    assert distance < 4 and (name == "forced" or (sum(accepted) > 100 and accepted.count(0) > 100))


def test_a_rule_that_keeps_the_mass_of_refused_drafts_is_detected(make_configured, monkeypatch):
    monkeypatch.setattr(rules, "refuse_node", lambda mass, tree, node: (mass, mass.sum(-1)))
    assert sample(make_configured("ngram", sampled_target()))[0] > 4


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("ngrams", {}, "no proposer=ngrams. Did you mean proposer=ngram"),
        ("ngram", {"most": "3"}, "proposer.most=3: ngram has the settings"),
        ("auto", {"ngram.num": "3"}, "no proposer 'ngram' inside it"),
        ("ngram", {"checkpoint": "nowhere"}, "proposer.checkpoint=nowhere: ngram holds no trained head"),
        ("auto", {"members": "[head]", "head.checkpoint": "nowhere"}, "nowhere.* does not exist"),
        ("auto", {"suffix.num": "x"}, "proposer.suffix.num=x must be a whole number"),
        ("head", {"checkpoint": "nowhere"}, "nowhere.* does not exist"),
        ("ngram", {"max": "[1"}, r"proposer.max=\[1 must be a whole number"),
        ("suffix", {"least": "no"}, "proposer.least=no must be a number"),
        ("auto", {"members": "[ngram, heads]"}, "no proposer=heads"),
        ("draft", {"model": "???"}, "Give proposer.model"),
        ("retrieval", {"datastore": "nowhere"}, "nowhere does not exist"),
        ("cascade", {"inner": "suffix"}, "cannot be rewound"),
        ("cascade", {"inner": "lookahead"}, "proposer=lookahead was removed: an earlier version of specdec has it"),
        ("auto", {"members": "[layerskip]"}, "proposer=layerskip was removed: an earlier version of specdec has it"),
    ],
)
def test_wrong_settings_are_refused(make_configured, small_target, name, settings, message):
    with pytest.raises(ValueError, match=message):
        make_configured(name, small_target, **settings)

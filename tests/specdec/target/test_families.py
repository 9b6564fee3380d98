"""Families of tests/support/families.py do what their entries say: decoding, training, replay, compiling, refusals."""

import contextlib
import functools

import pytest
import torch
from hydra.utils import instantiate

from specdec.core.compile import Runner
from specdec.core.sampling import Sampling
from specdec.core.tree import Nodes, TreeShape, make_tree
from specdec.decoding.decoder import Decoder
from specdec.heads.blocks import measure_embedding_scale
from specdec.heads.eagle import Eagle3
from specdec.measuring.model_card import write_export
from specdec.proposers.heads import HeadProposer
from specdec.proposers.text import Ngram
from specdec.text.conversations import Row
from specdec.tools.inspect.support import TESTED
from specdec.unroll import replay
from tests.support import loops
from tests.support.decoding import Scripted, chain_of, greedy, random_tokens
from tests.support.drafters import load_head
from tests.support.exports import bring_in, make_form, make_provenance
from tests.support.families import FAMILIES, Family, find_family, reference
from tests.support.reference_masks import document_mask
from tests.support.targets import NEW_TRANSFORMERS, OLD_TRANSFORMERS
from tests.target_table import (
    PAGE,
    list_cells,
    list_exports,
    make_family_target,
    read_cells,
    show_name,
    write_families,
)
from train.data.batches import collate
from train.features.outputs import ComputedFeatures
from train.objective.objective import Objective

WORKING = [family for family in FAMILIES if not family.refused]
NUM_NEW = 20
READS_ROWS = ("dflash", "dspark", "dflash2")  # drafters whose exports serve targets with a scaled embedding
PROMPTS = [random_tokens(seed, num, 60) for seed, num in ((1, 14), (2, 5), (3, 9))]  # windows have 6 to 8 positions


@pytest.fixture(params=WORKING, ids=str, scope="module")  # all tests of a family run one after the other
def family(request) -> Family:
    return request.param


@functools.cache
def answers_of(family: Family) -> list[list[int]]:
    """What transformers' generate answers with the model's own attention, prompt by prompt."""
    model = reference(family)
    answers = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NUM_NEW, do_sample=False,
                             eos_token_id=None, pad_token_id=0)  # fmt: skip
        answers.append(out[0, len(prompt) :].tolist())
    return answers


class Partly(Scripted):
    """Drafts that are right down to a depth that changes from round to round and from row to row.

    As a tree, a right draft has wrong siblings before and behind it, and children of a wrong sibling.
    count_right(text, position of the newest token): number of right drafts, 0 to 3
    """

    target_layers = ()

    def __init__(self, prompts, answers, *, tree: bool = False, count_right=lambda text, position: position // 2 % 4):
        self.linear, self.count_right = not tree, count_right
        texts = [prompt + answer for prompt, answer in zip(prompts, answers)]
        super().__init__(texts, 3, self.draft_nodes, ends=[len(text) for text in texts])

    def draft_nodes(self, text: list[int], position: int) -> Nodes:
        right, parent, nodes = self.count_right(text, position), 0, []
        for d, token in enumerate([*text[position + 1 :], 1, 1, 1][:3]):
            token = token if d < right else (token + 1) % 60
            if self.linear:
                nodes.append((token, d))
                continue
            nodes += [((token + 5) % 60, parent), (token, parent), ((token + 9) % 60, len(nodes) + 1)]
            parent = len(nodes) - 1
        return nodes

    def propose(self, sampling, generator):
        rows = [(text, min(position, len(text) - 1)) for text, position in zip(self.texts, self.places)]
        return make_tree([text[position] for text, position in rows], [self.draft_nodes(*row) for row in rows], "cpu")


def test_decoding_equals_generate(family):
    """Plain, chains and trees, alone and in a batch of rows that differ in length and in what they accept."""
    target, answers = make_family_target(family), answers_of(family)
    assert target.recurrent == family.recurrent
    for rows in (slice(0, 1), slice(0, 3)):
        assert greedy(target, None).generate(PROMPTS[rows], NUM_NEW).tokens == answers[rows]
        for tree in (False, True):
            proposer = Partly(PROMPTS[rows], answers[rows], tree=tree)
            if tree and family.recurrent:
                with pytest.raises(ValueError, match="cannot verify a tree of drafts: set width=1"):
                    greedy(target, proposer)
                continue
            generation = greedy(target, proposer).generate(PROMPTS[rows], NUM_NEW)
            assert generation.tokens == answers[rows]
            assert all({0, 1, 2, 3} <= set(accepted) for accepted in generation.accepted)


def test_rows_that_have_ended_do_not_outgrow_the_target():
    """GPT-2 has learned positions: one beyond the last would be an error. Row 0 accepts all drafts, row 1 none."""
    target = make_family_target(find_family("gpt2"))
    prompts, num = [random_tokens(seed, 200, 60) for seed in (1, 2)], target.max_positions - 200 - 3
    answers = greedy(target, None).generate(prompts, num).tokens
    proposer = Partly(prompts, answers, count_right=lambda text, position: 3 * (text[:200] == prompts[0]))
    generation = greedy(target, proposer).generate(prompts, num)
    assert generation.tokens == answers and 3 * len(generation.accepted[0]) < len(generation.accepted[1]) == num - 1


BLOCKS = ("dflash2", "lilicorr", "domino")  # in turn, so that each is trained for a third of the families
SMALL = {"num_drafts": 2, "num_layers": 1, "mask_token": 1}
SERVED = {"eagle3": ("EAGLE-3", "vLLM"), "domino": ("DFlash", "SGLang")}  # as in tests/target_table.py; others: below


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("block", marks=pytest.mark.full)])
def test_a_trained_head_drafts_as_it_was_trained_replayed_and_exported(family, kind, tmp_path):
    """Every parameter gets a gradient; the head learns two answers. Its rounds are those that replay computes."""
    if OLD_TRANSFORMERS and str(family) == "doge":
        pytest.skip("transformers 5.17 leaves out Doge's own mask where it is given none")
    name = kind if kind == "eagle3" else BLOCKS[FAMILIES.index(family) % len(BLOCKS)]
    target, answers = make_family_target(family), answers_of(family)[:2]
    torch.manual_seed(0)
    head = Eagle3(target) if kind == "eagle3" else instantiate({**load_head(name)["drafter"], **SMALL}, target)
    train_head(family, head, name, steps=12 if kind == "eagle3" else 40)
    generation = greedy(target, HeadProposer(head, chain_of(2))).generate(PROMPTS[:2], NUM_NEW)
    assert generation.tokens == answers
    assert sum(map(sum, generation.accepted)) > (4 if kind == "eagle3" else 1)  # else the next lines compare zeros
    check_replay(head, answers, generation.accepted)
    if not family.recurrent:
        tree = HeadProposer(head, TreeShape(2, 2, 4))
        assert greedy(target, tree).generate(PROMPTS[:2], NUM_NEW).tokens == answers
    check_export(family, head, name, generation, tmp_path)


def check_export(family, head, name: str, generation, folder) -> None:
    """The export of a head drafts as the head did. name: file of conf/head; generation: what the head drafted"""
    target = make_family_target(family)
    label, engine = SERVED.get(name, ("DFlash", "vLLM"))
    is_plain = target.shape_logits.plain and (measure_embedding_scale(target) == 1 or name in READS_ROWS)
    served = label in list_exports(family)[engine] and (name == "eagle3" or is_plain)
    form = make_form(head, engine.lower() if served else "safetensors")
    write_export(form, folder / "out", dtype=torch.float32, provenance=make_provenance(head))
    if served:
        again = greedy(target, HeadProposer(bring_in(folder / "out", target), chain_of(2)))
        assert again.generate(PROMPTS[:2], NUM_NEW).accepted == generation.accepted


def check_replay(head, answers, accepted_drafts) -> None:
    """Rounds and accepted drafts of a replay are those of decoding."""
    for prompt, answer, accepted in zip(PROMPTS, answers, accepted_drafts):
        num_rounds, at_depth = replay.count_rounds(loops.acceptance(head, prompt, answer, depth=2, temperature=0.0))
        assert num_rounds == len(accepted)
        assert at_depth.tolist() == [len(accepted) - accepted.count(0), accepted.count(2)]


def train_head(family, head, name: str, *, steps: int) -> None:
    """Trains a head on two answers. Every parameter gets a gradient: of EAGLE-3 in every step, of others in some step.

    Parts of block drafters start as the identity, so some of their gradients come later, and may end.
    """
    objective = Objective(head, **{**load_head(name)["objective"], "depth": 2})
    masks_of_rows = [[False] * len(prompt) + [True] * NUM_NEW for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers_of(family))]
    rows = [Row(str(n), "all", texts[n], masks_of_rows[n]) for n in range(2)]
    batch = collate([rows], length=64, pad_token=0)
    output = ComputedFeatures(head.target, head.target_layers)(batch)
    check_documents(family, batch, output, head.target_layers)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    parameters = {name: value for name, value in head.named_parameters() if value.requires_grad}
    missing = set(parameters)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = objective(batch, output)
        (loss.total / loss.num_goals).backward()
        trained = {name for name, value in parameters.items() if value.grad is not None and value.grad.any()}
        assert name != "eagle3" or trained == set(parameters)
        missing -= trained
        optimizer.step()
    assert not missing
    head.eval()


def check_documents(family, batch, output, layers) -> None:
    """Outputs of packed documents are those under a mask over the pack, and those of each document alone."""
    target, real = make_family_target(family), batch.documents >= 0
    if not family.recurrent:
        mask = document_mask(batch.documents)
        packed = target.read(batch.tokens, layers, positions=batch.positions, mask=mask)
        torch.testing.assert_close(output.features[real], packed.features[real], atol=1e-4, rtol=1e-4)
    for document in range(2):
        inside = batch.documents[0] == document
        alone = target.read(batch.tokens[:, inside], layers)
        torch.testing.assert_close(output.final[:, inside], alone.final, atol=1e-4, rtol=1e-4)


def test_compiled_decoding_equals_generate_or_is_refused(family, traced):
    """Layers with states also take back drafts, in rows that accept different numbers of them."""
    target, answers = make_family_target(family), answers_of(family)

    def decode(proposer=None, num_rows: int = 1, num_new: int = 4):
        decoder = Decoder(target, proposer, sampling=Sampling(0.0), stop=set(), runner=Runner(True))
        return decoder.generate(PROMPTS[:num_rows], num_new).tokens

    is_refused = OLD_TRANSFORMERS and family.model_type.startswith("qwen3_5")  # three positions for each token there
    if is_refused or not family.compiled:
        with contextlib.suppress(ValueError) if NEW_TRANSFORMERS else pytest.raises(ValueError, match="compile=false"):
            decode()
        return
    assert decode() == [answers[0][:4]]
    if family.recurrent:
        assert decode(Partly(PROMPTS, answers), len(PROMPTS), NUM_NEW) == answers


@pytest.mark.parametrize("entry", FAMILIES, ids=str)
def test_the_table_of_targets_says_what_works_and_what_is_refused(entry):
    if NEW_TRANSFORMERS and entry.refused:
        with contextlib.suppress(ValueError):
            target = make_family_target(entry)
            assert greedy(target, None).generate(PROMPTS, NUM_NEW).tokens == answers_of(entry)
        return
    cells = read_cells(PAGE.read_text())  # written by `python -m tests.target_table`
    assert list_cells(entry) == cells[show_name(entry)] and cells.keys() >= set(map(show_name, FAMILIES))
    assert len(FAMILIES) == len(set(map(str, FAMILIES)))


def test_inspect_knows_which_families_are_tested():
    assert TESTED.read_text() == write_families()


@pytest.mark.parametrize(  # a third of those without states, for the time that tests take
    "family", [family for number, family in enumerate(WORKING) if family.recurrent or number % 3 == 0], ids=str
)
def test_prompts_join_a_batch(family):
    """Two rows for three prompts: the third takes the place of the row that ends first, which n-grams decide."""
    target = make_family_target(family)
    decoder = greedy(target, Ngram(target, min=1, max=2, num=2))
    answers = dict(decoder.answers(PROMPTS, NUM_NEW, batch_size=2))
    assert [answers[number].tokens[0] for number in range(3)] == answers_of(family)

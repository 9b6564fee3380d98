"""Every head computes the same in training and in decoding."""

import dataclasses
import itertools
import math
import types

import pytest
import torch

from specdec import checkpoint
from specdec.core import cached_keys, masks
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.drafting import Drafting
from specdec.proposers.heads import HeadProposer
from specdec.target import attention
from specdec.unroll import plan as unroll_plan
from specdec.unroll.plan import plan_unroll, unroll
from tests.support.decoding import chain_of, random_tokens
from tests.support.drafters import VARIANTS, load_head, make_drafter, paired
from tests.support.loops import follow

LENGTH = 13


def find_depth(drafter) -> int:
    return min(5, drafter.depth or 5)


@pytest.fixture(scope="module")
def text(any_drafter):
    """Tokens [T], and the features that this drafter reads [T, F*D]."""
    target = any_drafter.target
    tokens = torch.tensor(random_tokens(0, LENGTH, target.vocab_size))
    return tokens, target.read(tokens[None], any_drafter.target_layers).features[0]


@torch.no_grad()
def unroll_row(drafter, tokens, features, *, goals=None, documents=None, positions=None, keep=1.0):
    """The unroll over one row; by default one document in which every token is a goal."""
    num = len(tokens)
    documents = torch.zeros(num, dtype=torch.long) if documents is None else documents
    positions = torch.arange(num) if positions is None else positions
    goals = torch.ones(num, dtype=torch.bool) if goals is None else goals
    arguments = documents[None], positions[None], goals[None]
    plan = plan_unroll(drafter, *arguments, depth=find_depth(drafter), keep_share=keep)
    return unroll(drafter, tokens[None], features[None], plan)


def begin(drafter, shape: TreeShape, tokens, features, num) -> HeadProposer:
    """A proposer that has read prompts of num [B] tokens, and each one's next token."""
    proposer = HeadProposer(drafter, shape)
    proposer.begin(tokens[:, :-1], num)
    proposer.commit(tokens[:, 1:], features, num, num.tolist())
    return proposer


def select_goals(unrolled, values, d: int, goals: list[int]):
    """Values of step d [M, .] and whether they exist [M], for goals of row 0; the first value for missing ones."""
    step, goal_list = unrolled.plan.steps[d - 1], unrolled.plan.goals[:, 1].tolist()
    numbers = [goal_list.index(goal) if goal in goal_list else -1 for goal in goals]
    slots = dict(zip(step.goals.tolist(), step.slot_indices.tolist()))
    indices = [slots.get(number, 0) for number in numbers]
    return values[d - 1].flatten(0, 1)[indices], torch.tensor([number in slots for number in numbers])


SLOTS = [(1, ()), (2, (1,)), (4, ()), (7, (4, 6)), (6, (2, 3))]  # (slot, newest slots of earlier rounds)


def test_another_draft_vocabulary_changes_no_other_logit(any_drafter, text, request):
    """Tokens that stay have the logits of before, with a smaller, another and the whole vocabulary."""
    head, _, arguments = request.node.callspec.params["any_drafter"]
    spec = {**load_head(head)["drafter"], **arguments, **any_drafter.arguments()}
    all_tokens = torch.arange(any_drafter.target.vocab_size)
    before = all_tokens if any_drafter.draft_to_target is None else any_drafter.draft_to_target
    vocab = torch.cat([before[::2], all_tokens[~torch.isin(all_tokens, before)][::3]]).sort().values
    changed = checkpoint.replace_vocab(any_drafter, spec, vocab).eval()
    assert torch.equal(changed.draft_to_target, vocab) and changed.vocab_size == len(vocab)
    rows = torch.isin(vocab, before)
    old_rows = torch.searchsorted(before, vocab[rows])
    states, logits = follow(any_drafter, *text, LENGTH // 2, find_depth(any_drafter))
    new_states, new_logits = follow(changed, *text, LENGTH // 2, find_depth(any_drafter))
    if any_drafter.has_candidates:  # which of them there are depends on the vocabulary, and their logits do not
        width = any_drafter.target.width * any_drafter.depth
        assert all(torch.equal(old[:width], new[:width]) for old, new in zip(states, new_states, strict=True))
        return
    for old, new in zip(states, new_states, strict=True):
        assert torch.equal(old, new)
    for old, new in zip(logits, new_logits, strict=True):
        torch.testing.assert_close(new[rows], old[old_rows], atol=1e-10, rtol=0)
    whole = checkpoint.replace_vocab(changed, spec, None)
    assert whole.draft_to_target is None
    for old, new in zip(new_logits, follow(whole.eval(), *text, LENGTH // 2, find_depth(any_drafter))[1], strict=True):
        torch.testing.assert_close(new[vocab[rows]], old[rows], atol=1e-10, rtol=0)


@pytest.mark.parametrize("slot, earlier_slots", SLOTS)
def test_decoding_and_unroll_against_the_slot_rule(any_drafter, text, slot, earlier_slots):
    """Distributions of sampled drafts, after earlier rounds with other drafts, and the unroll, against `follow`."""
    depth, temperature, generator = find_depth(any_drafter), 0.6, torch.Generator().manual_seed(0)
    tokens, features = text
    proposer, first = HeadProposer(any_drafter, chain_of(depth)), 0
    proposer.begin(tokens[None], torch.tensor([LENGTH]))
    for last in (*earlier_slots, slot):
        num = last - first
        proposer.commit(tokens[None, first + 1 : last + 1], features[None, first:last], torch.tensor([num]), [num])
        tree = proposer.propose(Sampling(temperature), generator)
        first = last
    path = torch.cat([tokens[: slot + 1], tree.tokens[0, 1:]])
    unrolled = unroll_row(any_drafter, path, features[: len(path)])
    states, logits = follow(any_drafter, path, features, slot, depth)
    for d in range(1, depth + 1):
        readout, exists = select_goals(unrolled, unrolled.readouts, d, [slot + d])
        state, _ = select_goals(unrolled, unrolled.states, d, [slot + d])
        assert exists.all()
        if any_drafter.context_kind != "block":
            torch.testing.assert_close(state[0], states[d - 1], atol=1e-10, rtol=0)
        for logits_of_step in (logits[d - 1], any_drafter.logits(d, readout)[0]):
            distribution = torch.zeros(any_drafter.target.vocab_size, dtype=torch.float64)
            law = (logits_of_step / temperature).softmax(-1)
            distribution[any_drafter.to_target(torch.arange(any_drafter.vocab_size))] = law
            torch.testing.assert_close(tree.probs[0, d], distribution, atol=1e-10, rtol=0)


SHAPES = [chain_of(5), *(TreeShape(*sizes) for sizes in ((4, 3, 30), (4, 2, 30), (1, 3, 2), (3, 90, 12)))]


@paired("any_drafter, shape", VARIANTS, SHAPES)
def test_drafts_are_the_best_of_each_step(any_drafter, text, shape):
    """The children of a node are the most likely tokens of the step along its own path, the most likely first.

    No child that is left out has a larger joint probability than a node of the tree.
    """
    slot = 6
    tokens, features = text[0][: slot + 1], text[1][:slot]
    shape = dataclasses.replace(shape, depth=min(shape.depth, find_depth(any_drafter)))
    tree = begin(any_drafter, shape, tokens[None], features[None], torch.tensor([slot])).propose(Sampling(), None)
    assert tree.probs is None and 1 < tree.tokens.shape[1] <= 1 + shape.nodes
    paths, drafts, parents = [tokens], tree.tokens[0].tolist(), tree.parents[0].tolist()
    for node in range(1, len(drafts)):
        paths.append(torch.cat([paths[parents[node]], tree.tokens[0, node : node + 1]]))
    scores, left_out = {0: 0.0}, [-math.inf]
    for node in sorted(set(parents[1:])):
        children = [child for child in range(1, len(drafts)) if parents[child] == node]
        _, logits = follow(any_drafter, paths[node], features, slot, len(paths[node]) - slot)
        best = logits[-1].log_softmax(-1).topk(min(shape.width, any_drafter.vocab_size))
        assert any_drafter.to_target(best.indices[: len(children)]).tolist() == [drafts[child] for child in children]
        values = (scores[node] + best.values).tolist()
        scores |= zip(children, values)
        left_out += values[len(children) :]
    assert min(scores.values()) >= max(left_out) - 1e-9
    deepest = max(map(len, paths)) - slot - 1
    if shape.chain or (any_drafter.context_kind != "block" and shape.nodes != 12):  # whose best paths may be shorter
        assert deepest == shape.depth
    assert deepest <= shape.depth


@paired("any_drafter, sizes", VARIANTS, [(7, 6), (2, 8), (9, 1, 3)])
def test_packed_documents_equal_separate_documents(any_drafter, text, sizes):
    """Documents in one row with padding give the same readouts as each document alone."""
    tokens, _ = text
    texts = tokens.split([*sizes, LENGTH - sum(sizes)])[: len(sizes)]
    features = [any_drafter.target.read(text_[None], any_drafter.target_layers).features[0] for text_ in texts]
    padding = 4
    packed = unroll_row(
        any_drafter,
        torch.cat([*texts, torch.zeros(padding, dtype=torch.long)]),
        torch.cat([*features, torch.randn(padding, features[0].shape[1]).double()]),
        documents=torch.tensor([document for document, num in enumerate(sizes) for _ in range(num)] + [-1] * padding),
        positions=torch.cat([*map(torch.arange, sizes), torch.zeros(padding, dtype=torch.long)]),
        goals=torch.tensor([position > 0 for num in sizes for position in range(num)] + [False] * padding),
    )
    start = 0
    for document, feature in zip(texts, features):
        alone = unroll_row(any_drafter, document, feature) if len(document) > 1 else None
        for d, goal in itertools.product(range(1, find_depth(any_drafter) + 1), range(1, len(document))):
            readout, exists = select_goals(packed, packed.readouts, d, [start + goal])
            assert exists[0] == (goal - d >= any_drafter.first_slot), (
                f"step {d}, token {goal} of the document that starts at {start}"
            )
            if exists[0]:
                expected, _ = select_goals(alone, alone.readouts, d, [goal])
                torch.testing.assert_close(readout, expected, atol=1e-10, rtol=0)
        start += len(document)


@paired("any_drafter, goals", VARIANTS, [[1], [12], [6, 7], [2, 5, 11]])
def test_sparse_goals_give_the_readouts_of_all_goals(any_drafter, text, goals, monkeypatch):
    """Later steps run on few slots, with the same readouts there as if they run on all slots."""
    monkeypatch.setattr(unroll_plan, "SLOT_MULTIPLE", 1)
    sparse = unroll_row(any_drafter, *text, goals=torch.isin(torch.arange(LENGTH), torch.tensor(goals)))
    full = unroll_row(any_drafter, *text)
    for d in range(1, find_depth(any_drafter) + 1):
        skips_slots = {"path": d > 1, "none": d > 1, "block": True, "depth": False, "text": False}[
            any_drafter.context_kind
        ]
        max_slots = len(goals) * find_depth(any_drafter) if skips_slots else LENGTH
        assert sparse.readouts[d - 1].shape[1] <= min(max_slots, LENGTH - any_drafter.first_slot)
        readouts, exists = select_goals(sparse, sparse.readouts, d, goals)
        expected, expected_exists = select_goals(full, full.readouts, d, goals)
        assert torch.equal(exists, expected_exists)
        torch.testing.assert_close(readouts[exists], expected[exists], atol=1e-10, rtol=0)


def test_fewer_slots_from_step_to_step_give_the_readouts_of_all_slots(any_drafter, text, monkeypatch):
    """Each step runs on a part of the slots of the step before, with the same readouts there."""
    monkeypatch.setattr(unroll_plan, "SLOT_MULTIPLE", 1)
    depth, tokens, features = find_depth(any_drafter), *text
    if any_drafter.context_kind not in ("path", "none"):
        return
    full, goals = unroll_row(any_drafter, tokens, features), list(range(LENGTH))
    torch.manual_seed(0)
    thinned = unroll_row(any_drafter, tokens, features, keep=0.6)
    nums = [len(step.goals) for step in thinned.plan.steps]
    assert nums[0] == len(full.plan.steps[0].goals) and nums == sorted(nums, reverse=True) and nums[1] < nums[0]
    most = len(full.plan.steps[1].goals)  # slots that step 2 or a later one needs
    limits = [math.ceil(max(0.6**d, unroll_plan.MIN_SLOT_SHARE) * most) for d in range(1, depth)]
    widths = [readouts.shape[1] for readouts in thinned.readouts[1:]]
    assert widths[:1] == limits[:1] and all(width <= limit for width, limit in zip(widths, limits))
    for d in range(1, depth + 1):
        readouts, exists = select_goals(thinned, thinned.readouts, d, goals)
        expected, _ = select_goals(full, full.readouts, d, goals)
        torch.testing.assert_close(readouts[exists], expected[exists], atol=1e-10, rtol=0)
        step = thinned.plan.steps[d - 1]
        assert step.slot_share == pytest.approx(len(step.goals) / len(full.plan.steps[d - 1].goals))


def readouts_by_slot(drafter, tokens, features) -> dict[tuple[int, int], torch.Tensor]:
    """{(d, slot): readout} for all slots whose step d has a goal."""
    unrolled = unroll_row(drafter, tokens, features)
    pairs = [(d, slot) for d in range(1, find_depth(drafter) + 1) for slot in range(1, LENGTH - d)]
    return {(d, slot): select_goals(unrolled, unrolled.readouts, d, [slot + d])[0] for d, slot in pairs}


def test_a_window_as_long_as_the_text_changes_nothing(any_drafter, text):
    """Bit for bit, in the unroll. A shorter one does, and heads without attention take none."""
    if not any_drafter.windows:
        with pytest.raises(ValueError, match=r"has no attention that takes a window: give null\.$"):
            any_drafter.with_window(8)
        return
    if any_drafter.window is not None:
        return
    readouts = readouts_by_slot(any_drafter, *text)
    for window, same in ((LENGTH, True), (6, False)):
        limited = readouts_by_slot(any_drafter.with_window(window), *text)
        assert all(torch.equal(limited[key], readout) for key, readout in readouts.items()) == same
    assert any_drafter.window is None


def test_prompts_read_in_pieces_have_the_drafts_of_prompts_under_a_mask(any_drafter, text, monkeypatch):
    """Rows of 11 and 3 tokens, in pieces of 4. No mask has as many queries as the prompts have tokens."""
    tokens, features = (torch.stack([values[:12], values[1:13]]) for values in text)
    make_mask, num, probabilities, sizes = masks.pending_mask, torch.tensor([11, 3]), [], list[int]()

    def note_mask(ancestors, *arguments):
        sizes.append(ancestors.shape[-2])
        return make_mask(ancestors, *arguments)

    for piece_tokens, reads_pieces in ((1024, False), (4, type(any_drafter).reads_pieces)):
        sizes.clear()
        monkeypatch.setattr(masks, "pending_mask", note_mask)
        monkeypatch.setattr(cached_keys, "CPU_PIECE_TOKENS", piece_tokens)
        monkeypatch.setattr(any_drafter, "reads_pieces", reads_pieces, raising=False)
        proposer = begin(any_drafter, chain_of(find_depth(any_drafter)), tokens, features[:, :11], num)
        tree = proposer.propose(Sampling(0.6), torch.Generator().manual_seed(0))
        probabilities.append(tree.probs)
    assert max(sizes, default=0) < 10
    torch.testing.assert_close(*probabilities, atol=1e-10, rtol=0)


def test_a_window_no_longer_than_a_round_is_refused_in_training_and_decoding(small_target):
    drafter, documents = make_drafter(small_target, "eagle3").with_window(4), torch.zeros(1, 9, dtype=torch.long)
    arguments = documents, torch.arange(9)[None], documents == 0
    plan_unroll(drafter, *arguments, depth=3)
    with pytest.raises(ValueError, match=r"^window=4 must exceed depth=4: raise one or lower the other\.$"):
        plan_unroll(drafter, *arguments, depth=4)
    with pytest.raises(ValueError, match=r"^decode\.window=4 must exceed decode\.depth=4: "):
        Drafting(depth=4).proposer(drafter)


# The tokens that step d of slot j reads, and the features that it reads
READS = {
    "Eagle": (lambda d, j: range(1, j + d), lambda d, j: range(j)),
    "Eagle3": (lambda d, j: range(1, j + d), lambda d, j: range(j)),
    "PEagle": (lambda d, j: range(1, j + 1), lambda d, j: range(j)),
    "MTP": (lambda d, j: range(1, j + d), lambda d, j: range(j)),
    "MTP without the first": (lambda d, j: range(2, j + d), lambda d, j: range(j)),
    "Medusa": (lambda d, j: (), lambda d, j: (j - 1,)),
    "Hydra": (lambda d, j: range(j, j + d), lambda d, j: (j - 1,)),
    "ParallelMTP": (lambda d, j: (), lambda d, j: range(j)),
    "BlockDrafter": (lambda d, j: (j,), lambda d, j: range(j)),
    "BlockDrafter after one token": (lambda d, j: (j, j + d - 1), lambda d, j: range(j)),
    "BlockDrafter after all tokens": (lambda d, j: range(j, j + d), lambda d, j: range(j)),
    "Draft": (lambda d, j: range(j + d), lambda d, j: ()),
}


def test_a_step_depends_on_the_inputs_of_its_family(any_drafter, text):
    """Each input is perturbed in turn: a step depends on the inputs that READS lists and on no others."""
    name = type(any_drafter).__name__.removeprefix("Native")
    if getattr(any_drafter, "dependence", None) is not None:
        memory = {"dependence.joint.weight", "dependence.reader.weight_ih", "dependence.rank_embedding"}
        recurrent = memory & any_drafter.state_dict().keys()
        name += " after all tokens" if recurrent else " after one token"
    # To LiLiCorr all drafts that are no candidates are the same
    candidates_only = "dependence.rank_embedding" in any_drafter.state_dict()
    if getattr(any_drafter, "zero_first", False):
        name += " without the first"
    reads_token, reads_feature = READS[name]

    def find_first_slot(d: int, j: int) -> int:
        """The first slot within the windows of all layers behind one another."""
        if None in any_drafter.windows or not any_drafter.windows:
            return 0
        text = any_drafter.context_kind == "text"
        layers = {"text": any_drafter.config.num_hidden_layers, "depth": d}.get(any_drafter.context_kind, 1)
        return j + text * (d - 1) - layers * (any_drafter.window - 1)

    tokens, features = text
    base = readouts_by_slot(any_drafter, tokens, features)
    for position in range(LENGTH):
        changed_tokens = tokens.clone()
        changed_tokens[position] = (changed_tokens[position] + 1) % any_drafter.target.vocab_size
        token_readouts = readouts_by_slot(any_drafter, changed_tokens, features)
        changed_features = features.clone()
        changed_features[position] += torch.linspace(-1, 1, changed_features.shape[1], dtype=changed_features.dtype)
        feature_readouts = readouts_by_slot(any_drafter, tokens, changed_features)
        for (d, slot), readout in base.items():
            changed = not torch.equal(token_readouts[d, slot], readout)
            if candidates_only and position > slot and not changed:
                continue
            first = find_first_slot(d, slot)
            expected = position in reads_token(d, slot) and position >= first
            assert changed == expected, f"token {position}, step {d} of slot {slot}"
            changed = not torch.equal(feature_readouts[d, slot], readout)
            expected = position in reads_feature(d, slot) and position >= first - 1
            assert changed == expected, f"feature {position}, step {d} of slot {slot}"


@pytest.mark.parametrize("num_rows, num_tokens", [(2, 3), (5, 1), (5, 3), (5, 20)])
def test_attention_of_the_target_against_softmax(num_rows, num_tokens):
    """Covers the project's kernel, used for many rows, and that of transformers, used otherwise."""
    torch.manual_seed(0)
    heads, kv_heads, num_keys, width = 6, 2, 24, 4
    query = torch.randn(num_rows, heads, num_tokens, width, dtype=torch.float64)
    key, value = torch.randn(2, num_rows, kv_heads, num_keys, width, dtype=torch.float64)
    mask = torch.rand(num_rows, 1, num_tokens, num_keys) < 0.5
    mask[..., 0] = True
    layer = types.SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True, training=False)
    attended, _ = attention.compute_attention(layer, query, key, value, mask, scaling=0.3)
    key, value = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (key, value))
    weights = (query @ key.transpose(2, 3) * 0.3).masked_fill(~mask, float("-inf")).softmax(-1)
    torch.testing.assert_close(attended, (weights @ value).transpose(1, 2), atol=1e-12, rtol=0)


@paired("any_drafter, accepted", VARIANTS, [[0, 0], [2, 2], [4, 4], [0, 4], [3, 1]])
def test_the_cache_after_a_round_holds_the_committed_slots(any_drafter, accepted):
    """The cache's lengths count the committed slots, and refused drafts do not influence the next drafts."""
    target, layers, depth = any_drafter.target, any_drafter.target_layers, min(4, find_depth(any_drafter))
    texts = torch.tensor([random_tokens(row, 16, target.vocab_size) for row in range(2)])  # [B, T]
    features = target.read(texts, layers).features
    prompts = torch.tensor([6, 3])
    proposer = begin(any_drafter, chain_of(depth), texts[:, :7], features[:, :6], prompts)
    proposer.propose(Sampling(), None)
    num_extra = 1 - any_drafter.first_slot  # slot 0 is committed too
    assert torch.equal(proposer.cache.lengths, prompts + num_extra) and proposer.cache.pending == 0
    num = torch.tensor(accepted) + 1
    new = prompts[:, None] + torch.arange(int(num.max()))  # [B, P] positions whose features are new
    proposer.commit(texts.gather(1, new + 1), features[torch.arange(2)[:, None], new], num, num.tolist())
    again = proposer.propose(Sampling(), None)
    assert torch.equal(proposer.cache.lengths, prompts + num + num_extra) and proposer.cache.pending == 0
    for row, length in enumerate((prompts + num).tolist()):
        alone = texts[row : row + 1, : length + 1], features[row : row + 1, :length], torch.tensor([length])
        fresh = begin(any_drafter, chain_of(depth), *alone)
        assert torch.equal(fresh.propose(Sampling(), None).tokens[0], again.tokens[row])


def test_casting_leaves_rotary_frequencies_exact(drafter):
    """In bfloat16 their error would confuse position 200 with another position."""
    cast = drafter.frozen_copy().to(torch.bfloat16)
    frequencies = {name: buffer for name, buffer in cast.named_buffers() if name.endswith("inv_freq")}
    assert all(parameter.dtype == torch.bfloat16 for parameter in cast.parameters())
    for name, buffer in frequencies.items():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, drafter.get_buffer(name))
    assert bool(frequencies) == (drafter.context_kind != "none")

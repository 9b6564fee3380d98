"""Tests of the loss against a loop over goals and depths, and of replayed tau against the decoder's tau."""

import dataclasses
import itertools
import math
from collections import defaultdict
from unittest import mock

import pytest
import torch

from specdec.core import fast
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.proposers.heads import HeadProposer
from specdec.text.conversations import Row
from specdec.unroll import replay
from tests.support import loops
from tests.support.decoding import chain_of, random_tokens
from tests.support.drafters import HEADS, VARIANTS, load_head, make_drafter, name_of, paired
from tests.support.loops import follow
from tests.train.objective.test_losses import FIGURES, FORMULAS, PlainSlot, sum_kl
from train.data.batches import collate
from train.features.outputs import ComputedFeatures
from train.loop.trainer import count_rounds
from train.objective.objective import Objective, list_slots, sum_divergence

WEIGHTS = {"kl": 0.5, "ce": 1.5, "tv": 2.5}


def make_row(seed: int, num_prompt: int, num_answer: int, vocab_size: int) -> Row:
    tokens = random_tokens(seed, num_prompt + num_answer, vocab_size)
    return Row(id=str(seed), category="all", tokens=tokens, mask=[False] * num_prompt + [True] * num_answer)


def make_settings(**arguments) -> dict:
    settings = {"losses": WEIGHTS, "depth": 4, "decay": 0.7, "weighting": "decay", "temperature": 1.5}
    return {**settings, "noise": 0.0, "anchors": None, "chunk": 1000, **arguments}


def make_objective(drafter, **arguments) -> Objective:
    # The objective refuses a confidence output without the loss confidence, and the reverse.
    drafter.has_confidence = "confidence" in arguments.get("losses", WEIGHTS)
    drafter.has_candidates = "candidates" in arguments.get("losses", WEIGHTS)  # likewise
    return Objective(drafter, **make_settings(**{"depth": drafter.depth or 4, **arguments}))


def compute_loss(objective: Objective, packs: list[list[Row]], length: int):
    """The loss of rows that are packed in this way. -> Loss, the batch"""
    batch = collate(packs, length=length, pad_token=0)
    return objective(batch, ComputedFeatures(objective.drafter.target, objective.drafter.target_layers)(batch)), batch


def list_plain_slots(objective: Objective, row: Row) -> dict[tuple[int, int], PlainSlot]:
    """Slots with a supervised goal, by slot and depth. The slot rule is a loop: step d of slot j guesses x_(j+d)."""
    drafter, target, vocab = objective.drafter, objective.drafter.target, objective.drafter.draft_to_target
    vocab = torch.arange(target.vocab_size) if vocab is None else vocab
    tokens, ids = torch.tensor(row.tokens), vocab.tolist()
    output = target.read(tokens[None], drafter.target_layers)
    plain_slots = {}
    for goal, d in itertools.product(range(1, len(tokens)), range(1, objective.depth + 1)):
        slot = goal - d
        if slot < drafter.first_slot or not row.mask[goal]:
            continue
        with mock.patch.object(drafter, "loss_logits", side_effect=drafter.loss_logits) as spy:
            states, logits = follow.__wrapped__(drafter, tokens, output.features[0], slot, d, loss_logits=True)
        goal_state = output.final[0, goal - 1]
        plain_slots[slot, d] = PlainSlot(
            p=(target.logits(goal_state) / objective.temperature).softmax(-1)[vocab],
            q=(logits[d - 1] / objective.temperature).softmax(-1),
            index=ids.index(row.tokens[goal]) if row.tokens[goal] in ids else None,
            state=states[d - 1],
            goal_state=goal_state,
            confidence=drafter.confidence(d, spy.call_args.args[1][0, 0]),
        )
    return plain_slots


def weigh_by_dpace(depths: dict[int, PlainSlot], depth: int) -> dict[int, float]:
    """D-PACE's weights of one slot's depths"""
    survival = [1.0]
    for d in range(1, depth + 1):
        probability = FIGURES["probability"](depths[d]).item() if d in depths else 1.0
        survival.append(survival[-1] * (0.5 * probability + 0.5))
    return {d: sum(survival[d:]) / depth for d in depths}


def weigh_depths(objective: Objective, depths: dict[int, PlainSlot]) -> dict[int, float]:
    """The weights of one slot's depths"""
    decay, depth = objective.settings.decay, objective.depth
    if objective.settings.weighting == "dpace":
        return weigh_by_dpace(depths, depth)
    total = sum(decay**step for step in range(depth))
    return {d: decay ** (d - 1) / total for d in depths}


def sum_losses_by_loop(objective: Objective, rows: list[Row]) -> torch.Tensor:
    """The total of all rows, one slot after the other."""
    total = 0.0
    for row in rows:
        slots = defaultdict(dict)
        for (start, d), slot in list_plain_slots(objective, row).items():
            slots[start][d] = slot
        for depths in slots.values():
            weights = weigh_depths(objective, depths)
            for (d, slot), (name, weight) in itertools.product(depths.items(), objective.losses.items()):
                total += weight * weights[d] * FORMULAS[name](slot) if name in FORMULAS else 0.0
    return total


def compute_gradients(total: torch.Tensor, drafter) -> list[torch.Tensor]:
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    return torch.autograd.grad(total, trained, allow_unused=True, materialize_grads=True)


def check_gradients(total: torch.Tensor, expected: torch.Tensor, drafter) -> None:
    """The values of two totals are equal, and their gradients for all trained parameters."""
    torch.testing.assert_close(total, expected, atol=1e-9, rtol=1e-7)
    pairs = list(zip(compute_gradients(total, drafter), compute_gradients(expected, drafter)))
    assert sum(bool(grad.any()) for grad, _ in pairs) > 2
    for grad, expected_grad in pairs:
        torch.testing.assert_close(grad, expected_grad, atol=1e-11, rtol=1e-9)


# The loss


@torch.no_grad()
@paired("any_drafter, num_prompt", VARIANTS, [6, 2])
def test_total_against_a_loop(any_drafter, num_prompt):
    """Two documents in one row, one in another, padding; prompts longer and shorter than the unroll is deep."""
    rows, objective = [make_row(seed, num_prompt + seed, 5, 61) for seed in range(3)], make_objective(any_drafter)
    loss, batch = compute_loss(objective, [rows[:2], rows[2:]], 26)
    assert loss.num_goals == 15 == batch.loss_mask.sum()
    assert loss.total.item() == pytest.approx(sum_losses_by_loop(objective, rows).item(), rel=1e-5)


@torch.no_grad()
def test_weights_over_all_depths_against_a_loop(any_drafter):
    """Two documents in one row and one in another."""
    rows = [make_row(seed, 4 + seed, 6, 61) for seed in range(3)]
    objective = make_objective(any_drafter, **use_loss("dpace"))
    loss, _ = compute_loss(objective, [rows[:2], rows[2:]], 24)
    assert loss.total.item() == pytest.approx(sum_losses_by_loop(objective, rows).item(), rel=1e-5)


def use_loss(name: str) -> dict:
    """The settings of one loss, or of one weighting"""
    return {"losses": {"kl": 1.0}, "weighting": name} if name == "dpace" else {"losses": {name: 2.0}}


@pytest.mark.parametrize("paths", [(), ("loss",)], ids=["plain", "fused"])
@pytest.mark.parametrize("name", [*FORMULAS, "dpace"])
def test_values_and_gradients_of_every_loss_are_those_of_its_formula(target, name, paths, in_float64):
    """At temperature 1.5. Neither smooth_l1 nor confidence may stand alone."""
    head = {"smooth_l1": "eagle", "confidence": "dspark"}.get(name, "eagle3")
    settings = use_loss(name)
    if name in ("smooth_l1", "confidence"):
        settings["losses"]["ce"] = 0.5
    objective = make_objective(make_drafter(target, head, True), **settings)
    rows = [make_row(seed, 3, 4, 61) for seed in range(2)]
    with fast.force_paths(*paths):
        loss, _ = compute_loss(objective, [rows], 15)
    check_gradients(loss.total, sum_losses_by_loop(objective, rows), objective.drafter)


@pytest.mark.parametrize("paths", [(), ("loss",)], ids=["plain", "fused"])
@pytest.mark.parametrize("table, weighting", [(False, "decay"), (True, "decay"), (False, "dpace")])
def test_the_loss_over_candidates_against_a_loop(target, table, weighting, paths, in_float64):
    """DFlash 2: scores of 6 candidates behind the true token. The target's likeliest token replaces the last one."""
    drafter = make_drafter(
        target, "dflash2", False, {"dependence": {"kind": "selector", "rank": 8, "top": 6, "table": table}}
    )
    row, embedding, selector = make_row(3, 5, 12, 61), target.embed.weight, drafter.dependence
    tokens, missing = torch.tensor(row.tokens), 0
    only_kl = make_objective(drafter, losses={"kl": 1.0}, weighting=weighting)
    expected, plain_slots = sum_losses_by_loop(only_kl, [row]), list_plain_slots(only_kl, row)
    objective = make_objective(drafter, losses={"kl": 1.0, "candidates": 1.0}, weighting=weighting)
    with fast.force_paths(*paths):
        total = compute_loss(objective, [[row]], 20)[0].total
    tables = [selector.predecessor.weight, selector.successor.weight]
    predecessor, successor = tables if table else (embedding @ weight.T for weight in tables)
    for (slot, d), plain in plain_slots.items():
        likeliest_id, state = int(plain.p.argmax()), plain.state[(d - 1) * 32 : d * 32]
        logits = plain.q.log() * objective.temperature  # but for a constant, which a softmax does not see
        ids = logits.topk(6).indices.tolist()
        missing += likeliest_id not in ids
        ids = ids if likeliest_id in ids else [*ids[:-1], likeliest_id]
        query = predecessor[tokens[slot + d - 1]] * (selector.hidden.weight @ state)
        scores = logits[ids] + successor[ids] @ query
        depths = {e: plain_slots[slot, e] for e in range(1, objective.depth + 1) if (slot, e) in plain_slots}
        expected = expected - weigh_depths(objective, depths)[d] * scores.log_softmax(0)[ids.index(likeliest_id)]
    assert missing > 3
    check_gradients(total, expected, drafter)


def test_the_divergence_of_an_adapted_target_from_the_original_one(target, monkeypatch):
    """Value and gradient, over all tokens, some states at a time."""
    monkeypatch.setattr("train.objective.objective.TARGET_LOGITS", 2 * target.vocab_size)
    generator = torch.Generator().manual_seed(0)
    final, original = torch.randn(2, 5, target.width, generator=generator, dtype=torch.float64)
    final.requires_grad_()
    q, p = ((target.logits(states) / 1.5).softmax(-1) for states in (final, original))
    totals = sum_divergence(target, final, original, temperature=1.5), sum_kl(p, q)
    torch.testing.assert_close(*totals)
    torch.testing.assert_close(*(torch.autograd.grad(total, final)[0] for total in totals))


def test_supervised_text_is_rows_without_prompts(any_drafter):
    """supervise=text, over two documents and padding, is the loss of the same rows whose every token has a goal."""
    rows = [make_row(seed, 4 + seed, 5, 61) for seed in range(2)]
    loss, batch = compute_loss(make_objective(any_drafter, supervise="text"), [rows], 25)
    everywhere = [dataclasses.replace(row, mask=[True] * len(row.tokens)) for row in rows]
    expected, _ = compute_loss(make_objective(any_drafter), [everywhere], 25)
    assert loss.num_goals == expected.num_goals == 17 == batch.goal_mask("text").sum()  # all but the first of each
    assert loss.total.item() == pytest.approx(expected.total.item(), rel=1e-6)
    answers, _ = compute_loss(make_objective(any_drafter), [rows], 25)
    assert answers.num_goals == 10 and answers.total.item() != pytest.approx(loss.total.item(), rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "length"),
    [({"chunk": 3}, 24), ({"gradient_checkpointing": True}, 24), ({}, 22)],
    ids=["chunk", "gradient_checkpointing", "padding"],
)
def test_less_memory_changes_nothing(any_drafter, settings, length, in_float64):
    rows = [make_row(seed, 6, 5, 61) for seed in range(2)]
    expected, _ = compute_loss(make_objective(any_drafter), [rows], 24)
    loss, _ = compute_loss(make_objective(any_drafter, **settings), [rows], length)
    check_gradients(loss.total, expected.total, any_drafter)
    assert torch.equal(loss.matches, expected.matches[..., :length])


def test_matches_against_a_loop(small_drafter):
    """matches [K, B, T]: whether the most probable token of step d is the token of the text."""
    row = make_row(0, 3, 20, 6)
    tokens = torch.tensor(row.tokens)
    features = small_drafter.target.read(tokens[None], small_drafter.target_layers).features[0]
    loss, _ = compute_loss(make_objective(small_drafter), [[row]], len(tokens))
    for d, goal in itertools.product(range(1, len(loss.matches) + 1), range(len(tokens))):
        expected = False
        if row.mask[goal] and goal - d >= small_drafter.first_slot:
            _, logits = follow(small_drafter, tokens, features, goal - d, d)
            expected = int(small_drafter.to_target(logits[-1].argmax())) == row.tokens[goal]
        assert loss.matches[d - 1, 0, goal] == expected
    assert 3 < loss.matches.sum() < 60


def test_noise_is_for_training_only(drafter):
    if not drafter.target_layers:
        return
    objective = make_objective(drafter, noise=0.5)
    rows = [[make_row(0, 4, 5, 61)]]
    totals = [compute_loss(objective.train(mode), rows, 9)[0].total.item() for mode in (True, True, False, False)]
    assert len(set(totals)) == 3 and totals[2] == totals[3]
    assert totals[3] == compute_loss(make_objective(drafter), rows, 9)[0].total.item()


def test_wrong_settings_are_refused(drafter, monkeypatch):
    for losses, message in (
        ({"kl": 1.0, "nothing": 1.0}, r"^losses=.*'nothing'.*kl"),
        ({}, r"^losses=\{\}"),
        ({"smooth_l1": 1.0}, "one of them must judge the drafted tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            make_objective(drafter, losses=losses)
    drafter.has_confidence = not drafter.has_confidence
    with pytest.raises(ValueError, match=r"The loss confidence and a head with a confidence output.* go together"):
        Objective(
            drafter, **make_settings(losses={"kl": 1.0, **({} if drafter.has_confidence else {"confidence": 1.0})})
        )
    monkeypatch.setattr(drafter, "depth", 3)
    with pytest.raises(ValueError, match=r"^depth=4 must be this drafter's number of steps, 3.* or change the drafter"):
        make_objective(drafter, depth=4)
    monkeypatch.setattr(drafter, "pretrained", True)
    with pytest.raises(ValueError, match=r"Set depth=3; the head of start= keeps its"):
        make_objective(drafter, depth=4)


@pytest.mark.parametrize("depth", [1, 3])
def test_slots_against_a_loop(target, depth):
    """Slot j: feature f_(j-1), tokens x_j .. x_(j+K-1), and the target's final states after each of these tokens."""
    rows = [make_row(0, 3, 4, 61), make_row(1, 2, 2, 61)]
    batch = collate([rows, rows[1:]], length=12, pad_token=0)
    packed = list_slots(batch, ComputedFeatures(target, (3,))(batch), depth)
    expected = []
    for row in [*rows, rows[1]]:
        alone, tokens = target.read(torch.tensor([row.tokens]), (3,)), torch.tensor(row.tokens)
        features, final = alone.features[0], alone.final[0]
        for j in range(1, len(tokens) - depth + 1):
            expected.append((features[j - 1], final[j - 1], tokens[j : j + depth], final[j : j + depth]))
    for actual, values in zip((packed.features, packed.state, packed.tokens, packed.goals), zip(*expected)):
        torch.testing.assert_close(actual, torch.stack(values), atol=1e-10, rtol=0)


@torch.no_grad()
def compare_mean_with(whole: torch.Tensor, objective: Objective, packs: list[list[Row]], length: int) -> torch.Tensor:
    """The mean over 40 draws of anchors is the loss of all slots. -> the error of the mean"""
    torch.manual_seed(0)
    totals = torch.stack([compute_loss(objective, packs, length)[0].total for _ in range(40)])
    error = totals.std() / 40**0.5
    assert abs(totals.mean() - whole) <= 4 * error + 1e-5
    return error


@pytest.mark.full
def test_sampled_anchors_give_the_mean_loss(any_drafter):
    """The loss of sampled slots is, on average, the loss of all slots."""
    rows = [make_row(0, 4, 30, 61)]
    whole = compute_loss(make_objective(any_drafter, anchors=1000), [rows], 34)[0].total
    assert whole == compute_loss(make_objective(any_drafter), [rows], 34)[0].total
    compare_mean_with(whole, make_objective(any_drafter, anchors=16), [rows], 34)
    if any_drafter.context_kind != "block":  # whose slots run whole
        with pytest.raises(ValueError, match="anchors=null"):
            make_objective(any_drafter, anchors=16, weighting="dpace")


# Losses, weights of depths and sizes of blocks as the heads' authors train them (docs/methods.md, section 3)
GATED, RNN = ({"kind": "markov", "rank": 8, "table": True, "form": form} for form in ("gated", "rnn"))
RECIPES = [
    ("dflash2", 7, {}, {"losses": {"kl": 1.0, "candidates": 1.0}, "decay": 0.78}),
    ("dflash2", 15, {}, {"losses": {"ce": 1.0, "candidates": 1.0}, "weighting": "dpace"}),
    ("domino", 15, {}, {"losses": {"ce": 1.0}, "decay": 0.87}),
    ("dspark", 8, {"dependence": GATED}, {"losses": {"ce": 0.1, "tv": 0.9, "confidence": 1.0}, "decay": 0.78}),
    ("dspark", 8, {"dependence": RNN}, {"losses": {"ce": 1.0, "confidence": 1.0}, "weighting": "dpace"}),
]


@pytest.mark.parametrize("head, num, arguments, settings", RECIPES, ids=[f"{name}-{num}" for name, num, *_ in RECIPES])
def test_published_recipes_of_block_drafters(target, head, num, arguments, settings):
    """Sampled anchors give the mean loss, and every parameter gets a gradient."""
    drafter, rows = make_drafter(target, head, False, {"num_drafts": num, **arguments}), [make_row(0, 4, 40, 61)]
    whole = compute_loss(make_objective(drafter, **settings), [rows], 48)[0].total
    whole.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in drafter.parameters() if parameter.requires_grad)
    error = compare_mean_with(whole, make_objective(drafter, anchors=12, **settings), [rows], 48)
    assert 0 < error < 0.1 * whole


# Replay


def count_rounds_by_loop(accepted: list[list[bool]]) -> tuple[int, list[int]]:
    """One outcome of all acceptances [K][n] -> rounds, and for each d the rounds that emit at least d drafts."""
    depth, num = len(accepted), len(accepted[0])
    exist, num_rounds, counts = 1, 0, [0] * depth
    while exist < num:
        num_rounds += 1
        drafts = 0
        while drafts < depth and accepted[drafts][exist] and exist + drafts + 1 < num:
            counts[drafts] += 1
            drafts += 1
        exist += drafts + 1
    return num_rounds, counts


@pytest.mark.parametrize("depth, num", [(1, 5), (2, 6), (3, 5), (4, 3), (3, 1)])
def test_rounds_against_all_patterns(depth, num):
    generator = torch.Generator().manual_seed(depth)
    accept = torch.rand(depth, num, generator=generator, dtype=torch.float64)
    accept[:, 0] = 9.0  # never read
    places = list(itertools.product(range(depth), range(1, num)))
    num_rounds, counts = 0.0, torch.zeros(depth, dtype=torch.float64)
    for outcome in itertools.product([False, True], repeat=len(places)):
        pattern, weight = [[False] * num for _ in range(depth)], 1.0
        for (d, start), happened in zip(places, outcome):
            pattern[d][start] = happened
            weight *= float(accept[d, start]) if happened else 1 - float(accept[d, start])
        outcome_rounds = count_rounds_by_loop(pattern)
        num_rounds += weight * outcome_rounds[0]
        counts += weight * torch.tensor(outcome_rounds[1], dtype=torch.float64)
    replayed = replay.count_rounds(accept)
    assert replayed[0] == pytest.approx(num_rounds, abs=1e-12)
    torch.testing.assert_close(replayed[1], counts, atol=1e-12, rtol=0)
    if num == 1:
        assert math.isnan(loops.tau(accept))
        return
    for wrong in (accept.roll(1, 0), 1 - accept) if depth > 1 else ():  # other acceptances give other rounds
        assert abs(replay.count_rounds(wrong)[0] - num_rounds) > 1e-3
    # Every round emits its accepted drafts and one more token.
    assert loops.tau(accept) == pytest.approx((num - 1) / num_rounds)
    assert loops.tau(accept) == pytest.approx(1 + float(counts.sum()) / num_rounds)


@pytest.mark.full
def test_replay_equals_decoding(small_drafter, small_target):
    """Temperature 0, several prompts, answers cut by a limit and answers that end with a stop token."""
    depth, accepted_counts = small_drafter.depth or 4, set()
    proposer = HeadProposer(small_drafter, chain_of(depth))
    prompts = [random_tokens(seed, 1 + seed, 6) for seed in range(20)]
    for num_new, stop in ((1, ()), (14, (2, 5)), (17, ())):  # each limit once, with or without stop tokens
        plain, drafted = (
            Decoder(small_target, choice, sampling=Sampling(0.0), stop=set(stop)).generate(prompts, num_new)
            for choice in (None, proposer)
        )
        for row, prompt in enumerate(prompts):
            accept = loops.acceptance(small_drafter, prompt, plain.tokens[row], depth=depth, temperature=0.0)
            num_rounds, counts = replay.count_rounds(accept)
            accepted = torch.tensor(drafted.accepted[row])[:, None]
            assert (num_rounds, counts.tolist()) == (len(accepted), (accepted > torch.arange(depth)).sum(0).tolist())
            accepted_counts |= set(drafted.accepted[row])
    assert {0, 1, 2} <= accepted_counts


# Pairs: each head with one of the two vocabularies
@pytest.mark.full
@pytest.mark.parametrize(
    "small_drafter", [(head, n % 2 == 1, {}) for n, head in enumerate(HEADS)], indirect=True, ids=name_of
)
def test_replay_equals_decoding_when_sampled(small_drafter, small_target):
    """Temperature 0.7: replay and decoding estimate the same expected number of rounds for answers of one length."""
    prompt, num, length, depth = [1, 2, 3], 80, 14, 3
    plain, drafted = (
        Decoder(small_target, proposer, sampling=Sampling(0.7), stop=set()).generate(
            [prompt] * num, length, generator=torch.Generator().manual_seed(0)
        )
        for proposer in (None, HeadProposer(small_drafter, chain_of(depth)))
    )
    accepts = (loops.acceptance(small_drafter, prompt, answer, depth=depth, temperature=0.7) for answer in plain.tokens)
    replayed = torch.tensor([replay.count_rounds(accept)[0] for accept in accepts])
    decoded = torch.tensor([float(len(accepted)) for accepted in drafted.accepted])
    error = (replayed.var() / num + decoded.var() / num).sqrt()
    assert error < 0.04 * decoded.mean() and abs(replayed.mean() - decoded.mean()) < 3 * error


def test_text_tau_equals_replay(small_drafter, small_target):
    """Greedy answers as training text, packed and padded, with several documents in a row."""
    rows, num_rounds, emitted = [], 0.0, 0
    for seed, num_prompt in enumerate((6, 1, 4, 2)):
        prompt = random_tokens(seed, num_prompt, 6)
        answer = Decoder(small_target, None, sampling=Sampling(0.0), stop=set()).generate([prompt], 10 + seed).tokens[0]
        mask = [False] * num_prompt + [True] * len(answer)
        rows.append(Row(id=str(seed), category="all", tokens=prompt + answer, mask=mask))
        accept = loops.acceptance(small_drafter, prompt, answer, depth=small_drafter.depth or 4, temperature=0.0)
        num_rounds += replay.count_rounds(accept)[0]
        emitted += len(answer) - 1
    loss, batch = compute_loss(make_objective(small_drafter), [rows[:3], rows[3:]], 50)
    assert num_rounds < emitted
    tokens, rounds = count_rounds(batch, loss.matches)
    assert tokens / rounds == pytest.approx(emitted / num_rounds, abs=1e-12)


@pytest.mark.full
def test_configured_objectives_train_every_parameter(target):
    """The settings of conf/head are accepted, and every trainable parameter gets a gradient."""
    packs = [[make_row(seed, 4, 160, 61)] for seed in range(8)]  # of a lattice, pairs of candidates must occur
    for head in HEADS:
        drafter = make_drafter(target, head)
        loss, _ = compute_loss(Objective(drafter, **load_head(head)["objective"]), packs, 164)
        loss.total.backward()
        assert all(parameter.grad.abs().max() > 0 for parameter in drafter.parameters() if parameter.requires_grad)

"""Tests of the loss against a loop over goals and depths, and of replayed tau against the decoder's tau."""

import dataclasses
import itertools
import math

import pytest
import torch

from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.proposers.heads import HeadProposer
from specdec.text.conversations import Row
from specdec.unroll import replay
from tests import loops
from tests.loops import follow
from tests.support import HEADS, VARIANTS, chain_of, load_head, make_drafter, name_of, paired, random_tokens
from train.data.batches import collate
from train.features.outputs import ComputedFeatures
from train.loop.trainer import count_rounds
from train.objective.objective import Objective, list_slots

WEIGHTS = {"kl": 0.5, "ce": 1.5, "tv": 2.5}


def make_row(seed: int, num_prompt: int, num_answer: int, vocab_size: int) -> Row:
    tokens = random_tokens(seed, num_prompt + num_answer, vocab_size)
    return Row(id=str(seed), category="all", tokens=tokens, mask=[False] * num_prompt + [True] * num_answer)


def make_settings(**arguments) -> dict:
    settings = {"losses": WEIGHTS, "depth": 4, "decay": 0.7, "weighting": "decay", "temperature": 1.5, "eta": 3.0,
                "noise": 0.0, "anchors": None, "chunk": 1000}  # fmt: skip
    return {**settings, **arguments}


def make_objective(drafter, **arguments) -> Objective:
    # The objective refuses a confidence output without the loss confidence, and the reverse.
    drafter.has_confidence = "confidence" in arguments.get("losses", WEIGHTS)
    drafter.has_candidates = "candidates" in arguments.get("losses", WEIGHTS)  # likewise
    return Objective(drafter, **make_settings(**{"depth": drafter.depth or 4, **arguments}))


def compute_loss(objective: Objective, packs: list[list[Row]], length: int):
    """The loss of rows that are packed in this way. -> Loss, the batch"""
    batch = collate(packs, length=length, pad_token=0)
    return objective(batch, ComputedFeatures(objective.drafter.target, objective.drafter.target_layers)(batch)), batch


def compute_distributions(objective: Objective, row: Row):
    """The distributions of all supervised tokens by the slot rule as a loop: step d of slot j predicts x_(j+d).

    -> {(slot, d): (p, q, index)}: p over the draft vocabulary, not renormalised; q; the index of x_(j+d) in the draft
    vocabulary, or None
    """
    drafter, target, vocab = objective.drafter, objective.drafter.target, objective.drafter.draft_to_target
    tokens = torch.tensor(row.tokens)
    output = target.read(tokens[None], drafter.target_layers)
    features, final = output.features[0], output.final[0]
    distributions_by_slot = {}
    for goal, d in itertools.product(range(1, len(tokens)), range(1, objective.depth + 1)):
        slot = goal - d
        if slot < drafter.first_slot or not row.mask[goal]:
            continue
        _, logits = follow(drafter, tokens, features, slot, d, loss_logits=True)
        p = (target.logits(final[goal - 1]) / objective.temperature).softmax(-1)  # of token `goal`
        q = (logits[d - 1] / objective.temperature).softmax(-1)
        index = int(tokens[goal])
        if vocab is not None:
            p = p[vocab]
            index = vocab.tolist().index(index) if index in vocab.tolist() else None
        distributions_by_slot[slot, d] = p, q, index
    return distributions_by_slot


def kl(p, q) -> float:
    p = p / p.sum()
    return float((p * (p / q).log()).sum())


def sum_losses_by_loop(objective: Objective, row: Row) -> float:
    total = 0.0
    for (_, d), (p, q, index) in compute_distributions(objective, row).items():
        ce = 0.0 if index is None else -float(q[index].log())
        value = 0.5 * kl(p, q) + 1.5 * ce + 2.5 * (1 - float(torch.minimum(p, q).sum()))
        decay = objective.settings.decay
        total += value * decay ** (d - 1) / sum(decay**step for step in range(objective.depth))
    return total


def weigh_by_dpace(distributions_by_slot, slot: int, depth: int) -> dict[int, float]:
    """D-PACE's weights of a slot by depth, from its `distributions`"""
    slot_distributions = {
        d: distributions_by_slot[slot, d] for d in range(1, depth + 1) if (slot, d) in distributions_by_slot
    }
    sure = {
        d: 0.5 * (0.0 if index is None else float(q[index])) + 0.5 for d, (_, q, index) in slot_distributions.items()
    }
    reaching = lambda j: math.prod(sure.get(i, 1.0) for i in range(1, j + 1))
    return {d: sum(reaching(j) for j in range(d, depth + 1)) for d in slot_distributions}


# The loss


@paired("any_drafter, num_prompt", VARIANTS, [6, 2])
def test_total_against_a_loop(any_drafter, num_prompt):
    """Two documents in one row, one in another, padding; prompts longer and shorter than the unroll is deep."""
    rows = [make_row(seed, num_prompt + seed, 5, 61) for seed in range(3)]
    loss, batch = compute_loss(make_objective(any_drafter), [rows[:2], rows[2:]], 26)
    assert loss.num_goals == 15 == batch.loss_mask.sum()
    expected = sum(sum_losses_by_loop(make_objective(any_drafter), row) for row in rows)
    assert loss.total.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("table, weighting", [(False, "decay"), (True, "decay"), (False, "dpace")])
def test_the_loss_over_candidates_against_a_loop(target, table, weighting):
    """DFlash 2: the scores of 6 candidates behind the true token; the target's likeliest token is one of them, if need be as the last."""
    dependence_options = {"kind": "selector", "rank": 8, "top": 6, "table": table}
    drafter = make_drafter(target, "dflash2", False, {"dependence": dependence_options})
    objective = make_objective(drafter, losses={"kl": 1.0, "candidates": 1.0}, weighting=weighting)
    only_kl, row = make_objective(drafter, losses={"kl": 1.0}, weighting=weighting), make_row(3, 5, 12, 61)
    difference = (
        compute_loss(objective, [[row]], 20)[0].total.item() - compute_loss(only_kl, [[row]], 20)[0].total.item()
    )
    tokens, embedding, dependence_options = torch.tensor(row.tokens), target.embed.weight, drafter.dependence
    drafter.requires_grad_(False)
    output, total, missing = target.read(tokens[None], drafter.target_layers), 0.0, 0
    distributions_by_slot = compute_distributions(objective, row)
    of_tokens = (dependence_options.predecessor.weight, dependence_options.successor.weight) if table else (
        embedding @ dependence_options.predecessor.weight.T, embedding @ dependence_options.successor.weight.T)  # fmt: skip
    for goal, d in itertools.product(range(len(tokens)), range(1, objective.depth + 1)):
        if goal - d < 1 or not row.mask[goal]:
            continue
        states, logits = follow(drafter, tokens, output.features[0], goal - d, d, loss_logits=True)
        state, likeliest_id = states[-1][(d - 1) * 32 : d * 32], int(target.logits(output.final[0, goal - 1]).argmax())
        ids = logits[-1].topk(6).indices.tolist()
        missing += likeliest_id not in ids
        ids = ids if likeliest_id in ids else [*ids[:-1], likeliest_id]
        query = of_tokens[0][tokens[goal - 1]] * (dependence_options.hidden.weight @ state)
        scores = torch.stack([logits[-1][each] + query @ of_tokens[1][each] for each in ids])
        weight = objective.shares[d - 1] * (
            weigh_by_dpace(distributions_by_slot, goal - d, objective.depth)[d] if weighting == "dpace" else 1
        )
        total -= weight * float(scores.log_softmax(0)[ids.index(likeliest_id)])
    assert missing > 3 and difference == pytest.approx(total, rel=1e-6)


def test_padding_and_other_prompts_do_not_count(any_drafter):
    objective, row = make_objective(any_drafter), make_row(0, 3, 5, 61)
    alone = compute_loss(objective, [[row]], len(row.tokens))[0]
    for num_other, length in ((0, 20), (4, 12), (9, 17), (9, 31)):
        other = [make_row(1, num_other, 0, 61)] if num_other else []
        for pack in ([*other, row], [row, *other]):
            loss, _ = compute_loss(objective, [pack], length)
            assert loss.total.item() == pytest.approx(alone.total.item(), rel=1e-6)
            assert loss.num_goals == alone.num_goals and loss.matches.sum() == alone.matches.sum()


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
    "settings", [{"chunk": 3}, {"gradient_checkpointing": True}], ids=["chunk", "gradient_checkpointing"]
)
def test_less_memory_changes_nothing(any_drafter, settings):
    rows = [make_row(seed, 6, 5, 61) for seed in range(2)]
    parameters = list(any_drafter.parameters())
    results = []
    for settings_of_run in ({}, settings):
        loss, _ = compute_loss(make_objective(any_drafter, **settings_of_run), [rows], 24)
        results.append((loss, torch.autograd.grad(loss.total, parameters, allow_unused=True)))
    (whole, gradients), (parts, chunked_gradients) = results
    assert parts.total.item() == pytest.approx(whole.total.item(), rel=1e-5)
    assert torch.equal(whole.matches, parts.matches)
    assert sum(gradient is not None for gradient in gradients) > 5
    for expected, actual in zip(gradients, chunked_gradients):
        assert (expected is None) == (actual is None)
        if expected is not None:
            torch.testing.assert_close(expected, actual, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


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
    with pytest.raises(ValueError, match=r"^losses=.*'nothing'.*kl"):
        make_objective(drafter, losses={"kl": 1.0, "nothing": 1.0})
    with pytest.raises(ValueError, match=r"^losses=\{\}"):
        make_objective(drafter, losses={})
    drafter.has_confidence = not drafter.has_confidence
    with pytest.raises(ValueError, match=r"The loss confidence and a head with a confidence output.* go together"):
        Objective(
            drafter, **make_settings(losses={"kl": 1.0, **({} if drafter.has_confidence else {"confidence": 1.0})})
        )
    monkeypatch.setattr(drafter, "depth", 3)
    with pytest.raises(
        ValueError, match=r"^depth=4 must be this drafter's number of steps, 3.* or change the drafter's"
    ):
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
    features, states, tokens, goals = [], [], [], []
    for row in [*rows, rows[1]]:
        alone = target.read(torch.tensor([row.tokens]), (3,))
        for j in range(1, len(row.tokens) - depth + 1):
            features.append(alone.features[0, j - 1])
            states.append(alone.final[0, j - 1])
            tokens.append(torch.tensor(row.tokens[j : j + depth]))
            goals.append(alone.final[0, j : j + depth])
    for actual, expected in zip(
        (packed.features, packed.state, packed.tokens, packed.goals), (features, states, tokens, goals)
    ):
        torch.testing.assert_close(actual, torch.stack(expected), atol=1e-10, rtol=0)


@paired("any_drafter, name", VARIANTS, ["lk", "e2e_tv", "dpace", "vat"])
def test_losses_over_all_depths_against_a_loop(any_drafter, name):
    """Two documents in one row and one in another; the formulas of train/objective/losses.py are computed by hand."""
    if name == "vat" and any_drafter.has_candidates:
        pytest.skip("its guesses are not those of the logits that are judged")
    rows = [make_row(seed, 4 + seed, 6, 61) for seed in range(3)]
    weighted = name in ("dpace", "vat")
    arguments = {"losses": {"kl": 1.0}, "weighting": name} if weighted else {"losses": {name: 2.0}}
    objective = make_objective(any_drafter, **arguments)
    loss, _ = compute_loss(objective, [rows[:2], rows[2:]], 24)
    depth, of_rows = objective.depth, [compute_distributions(objective, row) for row in rows]
    overlap = lambda of_row: {key: float(torch.minimum(p, q).sum()) for key, (p, q, _) in of_row.items()}
    all_overlaps = [overlap(of_row) for of_row in of_rows]
    total = 0.0
    for row, of_row, overlaps in zip(rows, of_rows, all_overlaps):
        for slot in range(len(row.tokens)):
            of_slot = {d: of_row[slot, d] for d in range(1, depth + 1) if (slot, d) in of_row}
            if name == "lk":
                for d, (p, q, _) in of_slot.items():
                    values_of_depth = [
                        value for values in all_overlaps for (_, step), value in values.items() if step == d
                    ]
                    share = math.exp(-3.0 * sum(values_of_depth) / len(values_of_depth))
                    value = share * kl(p, q) + (1 - share) * (1 - overlaps[slot, d])
                    total += 2.0 * value * objective.shares[d - 1]
            elif name == "e2e_tv" and of_slot:
                alive, mean = 1.0, 0.0
                for d in range(1, depth + 1):
                    alive *= overlaps.get((slot, d), 0.0)
                    mean += alive / depth
                total += 2.0 * (1 - mean)
            elif name == "dpace":
                weights = weigh_by_dpace(of_row, slot, depth)
                total += sum(weights[d] / depth * kl(p, q) for d, (p, q, _) in of_slot.items())
            elif name == "vat":
                first = min((d for d, (_, q, x) in of_slot.items() if x is None or int(q.argmax()) != x), default=depth)
                for d, (p, q, _) in of_slot.items():
                    total += 0.7 ** max(0, d - first) / depth * kl(p, q)
    assert loss.total.item() == pytest.approx(total, rel=1e-5)


@pytest.mark.full
def test_sampled_anchors_give_the_mean_loss(any_drafter):
    """The loss of sampled slots is, on average, the loss of all slots."""
    rows = [make_row(0, 4, 30, 61)]
    whole = compute_loss(make_objective(any_drafter, anchors=1000), [rows], 34)[0]
    assert whole.total.item() == compute_loss(make_objective(any_drafter), [rows], 34)[0].total.item()
    torch.manual_seed(0)
    totals = [compute_loss(make_objective(any_drafter, anchors=16), [rows], 34)[0].total.item() for _ in range(30)]
    error = torch.tensor(totals).std() / 30**0.5
    assert abs(sum(totals) / 30 - whole.total.item()) <= 4 * error + 1e-5
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
    torch.manual_seed(0)
    with torch.no_grad():
        totals = [compute_loss(make_objective(drafter, anchors=12, **settings), [rows], 48)[0].total for _ in range(40)]
    error = torch.tensor(totals).std() / 40**0.5
    assert 0 < error < 0.1 * whole and abs(sum(totals) / 40 - whole) <= 4 * error


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
    if num > 1:
        for wrong in (accept.roll(1, 0), 1 - accept) if depth > 1 else ():  # other acceptances give other rounds
            assert abs(replay.count_rounds(wrong)[0] - num_rounds) > 1e-3
        assert loops.tau(accept) == pytest.approx((num - 1) / num_rounds)
        # Every round emits its accepted drafts and one more token.
        assert loops.tau(accept) == pytest.approx(1 + float(counts.sum()) / num_rounds)
    else:
        assert loops.tau(accept) != loops.tau(accept)


def count_decoded_rounds(generation, row: int, depth: int) -> tuple[int, list[int]]:
    accepted = generation.accepted[row]
    return len(accepted), [sum(count >= d for count in accepted) for d in range(1, depth + 1)]


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
            assert (num_rounds, counts.tolist()) == count_decoded_rounds(drafted, row, depth)
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
    replayed = []
    for answer in plain.tokens:
        accept = loops.acceptance(small_drafter, prompt, answer, depth=depth, temperature=0.7)
        replayed.append(replay.count_rounds(accept)[0])
    replayed = torch.tensor(replayed)
    counted = torch.tensor([float(len(accepted)) for accepted in drafted.accepted])
    error = (replayed.var() / num + counted.var() / num).sqrt()
    assert error < 0.04 * counted.mean()
    assert abs(replayed.mean() - counted.mean()) < 3 * error


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

"""LiLiCorr against loops over its published equations."""

import math

import pytest
import torch

from specdec.experiments.lilicorr import part as lilicorr
from specdec.heads.dependence import DraftedBlock, DrafterSizes, make_dependence
from tests.loops import follow
from tests.specdec.heads.test_heads import select_goals, unroll_row
from tests.support import make_drafter, make_target, random_tokens

TOP, HEADS, SLOT, LENGTH = 4, 2, 5, 24
CLOSE = {"atol": 1e-5, "rtol": 0}  # norms are computed in float32


@pytest.fixture(scope="module", params=[(24, False), (24, True), (None, False)], ids=str)
def drafter(request):
    hidden, reduced = request.param
    part = {"kind": "lilicorr", "top": TOP, "hidden": hidden, "factor": 12, "num_heads": HEADS, "logit_scale": 3.0}
    return make_drafter(make_target(61), "lilicorr", reduced, {"dependence": part, "num_drafts": 3})


@pytest.fixture(scope="module")
def text(drafter):
    tokens = torch.tensor(random_tokens(0, LENGTH, 61))
    return tokens, drafter.target.read(tokens[None], drafter.target_layers).features[0]


@torch.no_grad()
def score_by_hand(drafter, states, feature):
    """states [K, D] and the encoded feature [D] of a block -> ids [K, top], start [top], pairs [K-1, top, top]"""
    lilicorr_part, num = drafter.dependence, len(states)
    held = {name: value.detach() for name, value in lilicorr_part.named_parameters()}
    linear = lambda name, x: held[f"{name}.weight"] @ x + held[f"{name}.bias"]
    silu = lambda x: x / (1 + (-x).exp())
    norm = lambda name, x: x / (x.square().mean() + lilicorr_part.sizes.eps).sqrt() * held[f"{name}.weight"]
    unit = lambda x: x / max(float(x.norm()), lilicorr_part.vector_eps)
    mlp = lambda name, x: linear(f"{name}.down_proj", silu(linear(f"{name}.up_proj", x)))

    ids, x = [], []
    for slot, state in enumerate(states):
        log_probs = (drafter.goal_head[0] @ state).log_softmax(0)
        best = log_probs.argsort(descending=True)[:TOP]
        ids.append(best)
        for rank, candidate in enumerate(best):
            lp = float(log_probs[candidate])
            read = [lp, math.exp(lp), lp - float(log_probs.max()), rank / (TOP - 1), float(rank == 0)]
            read = torch.tensor(read, dtype=state.dtype)
            read = (read - read.mean()) / (read.var(unbiased=False) + 1e-5).sqrt()
            read = read * held["feature_norm.weight"] + held["feature_norm.bias"]
            token = drafter.target.embed.weight[drafter.to_target(candidate)]
            token = linear("token_proj", token) if "token_proj.weight" in held else token
            place = held["slot_embedding"][0, 0, slot, 0] + held["rank_embedding"][0, 0, 0, rank]
            x.append(token + linear("pass_hidden_proj", state) + mlp("feature_mlp", read) + place)
    every = range(len(x))
    for layer in range(2):
        name, width = f"layers.{layer}", len(x[0])
        size = width // HEADS
        normed = [norm(f"{name}.attn_norm", each) for each in x]
        projected = torch.stack(
            [held[f"{name}.attn.in_proj_weight"] @ each + held[f"{name}.attn.in_proj_bias"] for each in normed]
        )
        outs = torch.zeros(len(x), width).to(projected)
        for head in range(HEADS):
            query, key, value = (projected[:, n * width + head * size :][:, :size] for n in range(3))
            for i in every:
                scores = torch.stack(
                    [
                        query[i] @ key[j] / size**0.5
                        + held["relative_slot_bias"][head, i // TOP - j // TOP + num]
                        + held["same_slot_bias"][head] * (i // TOP == j // TOP)
                        for j in every
                    ]
                )
                outs[i, head * size : (head + 1) * size] = scores.softmax(0) @ value
        x = [each + linear(f"{name}.attn.out_proj", out) for each, out in zip(x, outs)]
        x = [each + mlp(f"{name}.mlp", norm(f"{name}.mlp_norm", each)) for each in x]
    x = [norm("output_norm", each) for each in x]
    anchor = norm("anchor_norm", linear("context_proj", feature))
    x = [silu(linear("factor_input_proj", torch.cat([each, anchor, each * anchor]))) for each in x]
    out, into = ([unit(linear(name, each)) for each in x] for name in ("out_head", "in_head"))
    first = unit(linear("anchor_out_head", anchor))
    start = torch.stack([first @ into[j] for j in range(TOP)])
    rows = [out[s * TOP + i] @ into[(s + 1) * TOP + j] for s in range(num - 1) for i in range(TOP) for j in range(TOP)]
    pairs = torch.stack(rows).view(num - 1, TOP, TOP)
    return torch.stack(ids), lilicorr_part.logit_scale * start, lilicorr_part.logit_scale * pairs


@torch.no_grad()
def block_by_hand(drafter, tokens, features, slot):
    states, _ = follow(drafter, tokens, features, slot, 1)
    num, width = drafter.num_drafts, drafter.target.width
    feature = drafter.encode(features[slot - 1])
    return score_by_hand(drafter, states[0][: num * width].view(num, width), feature)


@pytest.mark.parametrize("path", [(0, 0), (1, 3), (3, 2), (None, 1), (2, None)])
def test_logits_against_loops(drafter, text, path):
    """Along candidates by number, and along tokens that are none (None), behind which all scores are zero."""
    tokens, features = text[0].clone(), text[1]
    ids, start, pairs = block_by_hand(drafter, *text, SLOT)
    for place, number in enumerate(path):
        others = [token for token in range(61) if token not in drafter.to_target(ids[place]).tolist()]
        tokens[SLOT + 1 + place] = others[0] if number is None else drafter.to_target(ids[place, number])
    _, logits = follow(drafter, tokens, features, SLOT, 3)
    rows = [start] + [pairs[n, number] if number is not None else torch.zeros(TOP) for n, number in enumerate(path)]
    for found, each, row in zip(logits, ids, rows, strict=True):
        expected = torch.full((drafter.vocab_size,), -torch.inf).double()
        expected[each] = row.double()
        torch.testing.assert_close(found, expected, **CLOSE)


def test_loss_against_a_loop(drafter, text):
    """Cross-entropy where the tokens so far, and the one to guess, are candidates; else zero."""
    tokens, features = text[0].clone(), text[1]
    for slot in range(2, LENGTH - 3, 4):  # texts of candidates, some of them longer than others
        for place in range(slot % 3 + 1):
            ids, _, _ = block_by_hand(drafter, tokens, features, slot)
            tokens[slot + 1 + place] = drafter.to_target(ids[place, place])
    unrolled, positions = unroll_row(drafter, tokens, features), []
    for slot in range(1, LENGTH - 3):
        ids, start, pairs = block_by_hand(drafter, tokens, features, slot)
        row, forced = start, True
        for d in range(1, 4):
            goal = int(tokens[slot + d])
            readout, _ = select_goals(unrolled, unrolled.readouts, d, [slot + d])
            draft = goal if drafter.target_to_draft is None else int(drafter.target_to_draft[goal])
            judged = drafter.loss_logits(d, readout)
            found = drafter.candidate_loss(readout, judged, torch.tensor([draft])).item()
            names = drafter.to_target(ids[d - 1]).tolist()
            forced = forced and goal in names
            expected = -float(row.log_softmax(0)[names.index(goal)]) if forced else 0.0
            assert found == pytest.approx(expected, abs=1e-5), (slot, d)
            positions.append((d, forced))
            row = pairs[d - 1, names.index(goal)] if forced and d < 3 else row
    assert {(1, True), (2, True), (3, True), (1, False), (2, False), (3, False)} <= set(positions)


def test_log_probabilities_train_the_states(drafter, monkeypatch):
    """The gradient is that of plain autograd, although logits are made again; without it the states learn less."""
    torch.manual_seed(0)
    states = torch.randn(1, 5, 3, 32).double().requires_grad_()

    embed = lambda ids: drafter.target.embed(drafter.to_target(ids))
    tokens = torch.zeros(1, 5, dtype=torch.long)
    block = DraftedBlock(states.detach()[:, :, 0], states, tokens, drafter.unary, embed, drafter.to_target)

    def gradient():
        scores = drafter.dependence.first_carried(block)[
            ..., 9 * TOP :
        ]  # behind ids, logits and target ids of 3 positions
        return torch.autograd.grad(scores.square().sum(), states)[0]

    direct = gradient()
    monkeypatch.setattr(lilicorr, "checkpoint", lambda function, *given, **_: function(*given))
    torch.testing.assert_close(direct, gradient(), atol=1e-12, rtol=1e-9)
    monkeypatch.setattr(
        lilicorr, "checkpoint", lambda function, *given, **_: [each.detach() for each in function(*given)]
    )
    assert not torch.allclose(direct, gradient(), atol=1e-6)


@pytest.mark.parametrize("arguments", [{"top": 6}, {"top": 32}, {"num_heads": 5}, {"vector_eps": 0.5}, {"logit_scale": 0},
                                  {"factor": 0}, {"mlp_ratio": 0.001}])  # fmt: skip
def test_bad_arguments_are_named(arguments):
    with pytest.raises(ValueError, match=f"dependence.*{next(iter(arguments))}") as error:
        make_dependence(DrafterSizes(32, 61, 61, 3, 1e-6), {"kind": "lilicorr", **arguments})
    assert str(error.value).endswith(".")

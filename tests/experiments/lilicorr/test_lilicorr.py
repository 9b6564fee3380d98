"""LiLiCorr against loops over its published equations."""

import itertools
import math

import pytest
import torch

from specdec.experiments.lilicorr import part as lilicorr
from specdec.heads.dependence import DraftedBlock, DrafterSizes, make_dependence
from tests.specdec.heads.test_heads import select_goals, unroll_row
from tests.support.decoding import random_tokens
from tests.support.drafters import make_drafter
from tests.support.loops import follow
from tests.support.targets import make_target

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


class ByHand:
    """The published equations, one candidate and one attention head at a time."""

    def __init__(self, drafter):
        self.drafter, self.dependence = drafter, drafter.dependence
        self.held = {name: value.detach() for name, value in self.dependence.named_parameters()}

    def linear(self, name, x):
        return self.held[f"{name}.weight"] @ x + self.held[f"{name}.bias"]

    def norm(self, name, x):
        return x / (x.square().mean() + self.dependence.sizes.eps).sqrt() * self.held[f"{name}.weight"]

    def mlp(self, name, x):
        return self.linear(f"{name}.down_proj", silu(self.linear(f"{name}.up_proj", x)))

    def unit(self, name, x):
        x = self.linear(name, x)
        return x / max(float(x.norm()), self.dependence.vector_eps)

    def stack_units(self, name, x):
        return torch.stack([self.unit(name, vector) for vector in x])

    def read_candidate(self, state, log_probs, candidate, slot, rank):
        """The vector of a candidate: its token, the state, its description and its place."""
        lp, held = float(log_probs[candidate]), self.held
        numbers = [lp, math.exp(lp), lp - float(log_probs.max()), rank / (TOP - 1), float(rank == 0)]
        read = torch.tensor(numbers, dtype=state.dtype)
        read = (read - read.mean()) / (read.var(unbiased=False) + 1e-5).sqrt()
        read = read * held["feature_norm.weight"] + held["feature_norm.bias"]
        token = self.drafter.target.embed.weight[self.drafter.to_target(candidate)]
        token = self.linear("token_proj", token) if "token_proj.weight" in held else token
        place = held["slot_embedding"][0, 0, slot, 0] + held["rank_embedding"][0, 0, 0, rank]
        return token + self.linear("pass_hidden_proj", state) + self.mlp("feature_mlp", read) + place

    def attend(self, name, x, num):
        """The outputs of a layer's attention over all candidates, with biases of their distances."""
        held, width, size = self.held, len(x[0]), len(x[0]) // HEADS
        weight, bias = held[f"{name}.attn.in_proj_weight"], held[f"{name}.attn.in_proj_bias"]
        projected = torch.stack([weight @ self.norm(f"{name}.attn_norm", vector) + bias for vector in x])
        outs = torch.zeros(len(x), width).to(projected)
        for head, i in itertools.product(range(HEADS), range(len(x))):
            query, key, value = (projected[:, n * width + head * size :][:, :size] for n in range(3))
            scores = [query[i] @ key[j] / size**0.5 for j in range(len(x))]
            for j in range(len(x)):
                distance = i // TOP - j // TOP
                scores[j] = scores[j] + held["relative_slot_bias"][head, distance + num]
                scores[j] = scores[j] + held["same_slot_bias"][head] * (distance == 0)
            outs[i, head * size : (head + 1) * size] = torch.stack(scores).softmax(0) @ value
        return [self.linear(f"{name}.attn.out_proj", out) for out in outs]

    @torch.no_grad()
    def score(self, states, feature):
        """states [K, D], the encoded feature [D] -> ids [K, top], start [top], pairs [K-1, top, top] of a block"""
        ids, x, num = [], [], len(states)
        for slot, state in enumerate(states):
            log_probs = (self.drafter.goal_head[0] @ state).log_softmax(0)
            ids.append(log_probs.argsort(descending=True)[:TOP])
            x += [self.read_candidate(state, log_probs, best, slot, rank) for rank, best in enumerate(ids[-1])]
        for name in ("layers.0", "layers.1"):
            x = [vector + out for vector, out in zip(x, self.attend(name, x, num))]
            x = [vector + self.mlp(f"{name}.mlp", self.norm(f"{name}.mlp_norm", vector)) for vector in x]
        x = [self.norm("output_norm", vector) for vector in x]
        anchor = self.norm("anchor_norm", self.linear("context_proj", feature))
        joined = [torch.cat([vector, anchor, vector * anchor]) for vector in x]
        x = [silu(self.linear("factor_input_proj", vector)) for vector in joined]
        out, into = (self.stack_units(name, x).view(num, TOP, -1) for name in ("out_head", "in_head"))
        start = into[0] @ self.unit("anchor_out_head", anchor)
        pairs = torch.stack([out[slot] @ into[slot + 1].T for slot in range(num - 1)])
        return torch.stack(ids), self.dependence.logit_scale * start, self.dependence.logit_scale * pairs


def silu(x):
    return x / (1 + (-x).exp())


@torch.no_grad()
def block_by_hand(drafter, tokens, features, slot):
    states, _ = follow(drafter, tokens, features, slot, 1)
    num, width = drafter.num_drafts, drafter.target.width
    feature = drafter.encode(features[slot - 1])
    return ByHand(drafter).score(states[0][: num * width].view(num, width), feature)


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
    for step_logits, candidates, row in zip(logits, ids, rows, strict=True):
        expected = torch.full((drafter.vocab_size,), -torch.inf).double()
        expected[candidates] = row.double()
        torch.testing.assert_close(step_logits, expected, **CLOSE)


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
            loss_logits = drafter.loss_logits(d, readout)
            loss = drafter.candidate_loss(readout, loss_logits, torch.tensor([draft])).item()
            names = drafter.to_target(ids[d - 1]).tolist()
            forced = forced and goal in names
            expected = -float(row.log_softmax(0)[names.index(goal)]) if forced else 0.0
            assert loss == pytest.approx(expected, abs=1e-5), (slot, d)
            positions.append((d, forced))
            row = pairs[d - 1, names.index(goal)] if forced and d < 3 else row
    assert {(1, True), (2, True), (3, True), (1, False), (2, False), (3, False)} <= set(positions)


def test_log_probabilities_train_the_states(drafter, monkeypatch):
    """The gradient is that of plain autograd, although logits are made again; without it the states learn less."""
    torch.manual_seed(0)
    states = torch.randn(1, 5, 3, 32).double().requires_grad_()
    tokens = torch.zeros(1, 5, dtype=torch.long)
    embed, to_target = drafter.target.embed, drafter.to_target
    block = DraftedBlock(
        states.detach()[:, :, 0], states, tokens, drafter.unary, lambda ids: embed(to_target(ids)), to_target
    )

    def gradient(run=lilicorr.checkpoint):
        monkeypatch.setattr(lilicorr, "checkpoint", run)
        carried = drafter.dependence.first_carried(block)
        scores = carried[..., 9 * TOP :]  # behind ids, logits and target ids of 3 positions
        return torch.autograd.grad(scores.square().sum(), states)[0]

    direct = gradient()
    plain = gradient(lambda function, *inputs, **_: function(*inputs))
    torch.testing.assert_close(direct, plain, atol=1e-12, rtol=1e-9)
    detached = gradient(lambda function, *inputs, **_: [value.detach() for value in function(*inputs)])
    assert not torch.allclose(direct, detached, atol=1e-6)


BAD = [("top", 6), ("top", 32), ("num_heads", 5), ("vector_eps", 0.5), ("logit_scale", 0), ("factor", 0)]
BAD += [("mlp_ratio", 0.001)]


@pytest.mark.parametrize("name, value", BAD)
def test_bad_arguments_are_named(name, value):
    with pytest.raises(ValueError, match=rf"dependence.*{name}.*\.$"):
        make_dependence(DrafterSizes(32, 61, 61, 3, 1e-6), {"kind": "lilicorr", name: value})

"""How engines run an exported folder, in plain torch: written from the engines' conventions, not from specdec.heads.

Every reader is called as reader(folder, target, tokens, slot, depth) with tokens [T] and returns `Drafts`: step d reads
the target's states 0 .. slot-1 and tokens 0 .. slot+d-1, and predicts token slot+d. Nothing is cached: each step runs
all rows again. A row pairs the state of position i with the embedding of token i+1 and has position i.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Served:
    """What an engine knows of the target and of a text."""

    config: dict
    embed: Tensor  # [V, H]
    lm_head: Tensor  # [V, H]
    states: Tensor  # [L+1, T, H] after 0 .. L layers, the last after the final norm


@dataclass(frozen=True)
class Drafts:
    logits: Tensor  # [depth, W]
    ids: Tensor  # [W] of the target
    confidence: Tensor | None = None  # [depth]


@torch.no_grad()
def serve(model, tokens: Tensor) -> Served:
    states = model(tokens[None], output_hidden_states=True).hidden_states
    embed, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return Served(model.config.to_dict(), embed, lm_head, torch.stack(states)[:, 0])


def read(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), safetensors.torch.load_file(folder / "model.safetensors")


DEFAULTS = {"rms_norm_eps": 1e-6}  # of Llama and Qwen3, which containers leave out


def load(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """`read`, with weights to compute with exactly."""
    config, tensors = read(folder)
    return config, exact(tensors)


def exact(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}


# Parts


def frequencies(config: dict) -> Tensor:
    """[head_dim / 2]. If the config gives the rotary settings in two forms, both must agree."""
    settings = []
    if "rope_parameters" in config:
        settings.append((config["rope_parameters"], config["rope_parameters"]["rope_theta"]))
    if "rope_theta" in config:
        scaling = config.get("rope_scaling") or {"type": "default", "rope_type": "default"}
        assert scaling["type"] == scaling["rope_type"]
        settings.append((scaling, config["rope_theta"]))
    kinds = {(rope["rope_type"], rope.get("factor"), theta) for rope, theta in settings}
    assert len(kinds) == 1, kinds
    kind, factor, theta = kinds.pop()
    assert kind in ("default", "linear")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 1 / (theta ** (torch.arange(0, head_dim, 2) / head_dim)) / (factor if kind == "linear" else 1)


def rotate(x: Tensor, positions: Tensor, config: dict) -> Tensor:
    """x [heads, S, head_dim], the first half of a head's width paired with the second"""
    angles = positions[:, None].double() * frequencies(config)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def norm(x: Tensor, weight: Tensor, config: dict) -> Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt()


def attention(w: dict, config: dict, x: Tensor, keys: Tensor, start: int, mask: Tensor) -> Tensor:
    """x [S, width] at positions start .. start+S-1; keys [N, width] at positions 0 .. N-1; mask [S, N] -> [S, H]"""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]

    def project(name: str, rows: Tensor, number: int) -> Tensor:
        rows = F.linear(rows, w[f"self_attn.{name}_proj.weight"], w.get(f"self_attn.{name}_proj.bias"))
        rows = rows.view(len(rows), number, -1).transpose(0, 1)
        return norm(rows, w[f"self_attn.{name}_norm.weight"], config) if f"self_attn.{name}_norm.weight" in w else rows

    q = rotate(project("q", x, heads), start + torch.arange(len(x)), config)
    k = rotate(project("k", keys, groups), torch.arange(len(keys)), config)
    k, v = (part.repeat_interleave(heads // groups, 0) for part in (k, project("v", keys, groups)))
    scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    if "self_attn.attention_sink_bias" in w:  # one more key for each head, with a value of zero
        sinks = w["self_attn.attention_sink_bias"].view(-1, 1, 1).expand(*scores.shape[:2], 1)
        scores = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        return F.linear((scores @ v).transpose(0, 1).flatten(1), w["self_attn.o_proj.weight"])
    return F.linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), w["self_attn.o_proj.weight"])


def causal(w: dict, config: dict, x: Tensor, *, layer: int = 0) -> Tensor:
    """Attention of a drafter's layer, which sees the last sliding_window positions if its type is sliding_attention."""
    seen = torch.ones(len(x), len(x)).tril().bool()
    if (config.get("layer_types") or ["full_attention"] * (layer + 1))[layer] == "sliding_attention":
        seen &= torch.ones(len(x), len(x)).triu(1 - config["sliding_window"]).bool()
    return attention(w, config, x, x, 0, seen)


def mlp(w: dict, config: dict, x: Tensor) -> Tensor:
    """The MLP of a decoder block, with the norm before it and the residual."""
    assert config.get("hidden_act", "silu") == "silu"
    y = norm(x, w["post_attention_layernorm.weight"], config)
    y = F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
    return x + y @ w["mlp.down_proj.weight"].T


def under(tensors: dict, *prefixes: str) -> dict:
    """The tensors below these prefixes, without them."""
    below = {}
    for prefix in prefixes:
        below |= {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    return below


def vocabulary(tensors: dict, config: dict, target: Served) -> tuple[Tensor, Tensor]:
    """-> LM head [W, H], target ids [W]; d2t holds offsets"""
    rows = config.get("draft_vocab_size", len(target.lm_head))
    if "d2t" not in tensors:
        assert rows == len(target.lm_head)
    ids = torch.arange(rows) + tensors.get("d2t", 0)
    return tensors.get("lm_head.weight", target.lm_head), ids


# Families


def eagle1(folder: Path, target: Served, tokens: Tensor, slot: int, depth: int, *, engine: str = "vllm") -> Drafts:
    """fc has no bias in vLLM, one in SGLang, and one in SafeAILab unless bias=false. SGLang reads a map of tokens."""
    config, tensors = load(folder)
    accepted = {"vllm": ("LlamaForCausalLM", "EagleLlamaForCausalLM"), "sglang": ("LlamaForCausalLMEagle",)}
    assert engine not in accepted or config["architectures"][0] in accepted[engine]
    assert not tensors.keys() & {"lm_head.weight", "layers.0.input_layernorm.weight", "norm.weight"}
    biased = engine == "sglang" or (engine == "safeailab" and config.get("bias", True))
    bias = tensors["fc.bias"] if biased else None
    embed, w = tensors.get("embed_tokens.weight", target.embed), under(tensors, "layers.0.")
    lm_head, ids = target.lm_head, torch.arange(len(target.lm_head))
    if engine == "sglang" and (folder / "token_map.pt").exists():
        ids = torch.tensor(torch.load(folder / "token_map.pt"))
        lm_head = lm_head[ids]
    h, logits = target.states[-1, :slot], []
    for d in range(1, depth + 1):
        x = F.linear(torch.cat([embed[tokens[1 : slot + d]], h], dim=-1), tensors["fc.weight"], bias)
        out = mlp(w, config, x + causal(w, config, x))
        logits.append(lm_head @ out[-1])
        h = torch.cat([h, out[-1:]])
    return Drafts(torch.stack(logits), ids)


def eagle3(folder: Path, target: Served, tokens: Tensor, slot: int, depth: int, *, engine: str = "vllm") -> Drafts:
    """EAGLE-3 and P-EAGLE, a raw folder or a Speculators container.

    Layer ids: vLLM reads the outer ones, SGLang the inner ones plus one, OpenVINO GenAI those of its own field plus
    one. Later layers: the norm before attention has another name.
    """
    config, tensors = load_eagle3(folder, engine)
    w = under(tensors, "midlayer.", "layers.0.")
    embed = tensors.get("embed_tokens.weight", target.embed)
    lm_head, ids = vocabulary(tensors, config, target)
    masks = config.get("ptd_token_id", config.get("mask_token_id"))
    assert (masks is None) == ("mask_hidden" not in tensors)
    layers = eagle3_layers(config, len(target.states) - 1, engine)
    g = torch.cat(list(target.states[layers, :slot]), dim=-1)
    if masks is not None:
        g = torch.cat([g, tensors["mask_hidden"].view(1, -1).expand(depth, -1)])
    g = normed_states(tensors, config, g, len(layers))
    (h, blank), logits = (g @ tensors["fc.weight"].T).split([slot, len(g) - slot]), []
    for d in range(1, depth + 1):
        seen = tokens[1 : slot + d].clone()
        if masks is not None:
            seen[slot:] = masks
        e = norm(embed[seen], w["input_layernorm.weight"], config)
        n = norm(h, w["hidden_norm.weight"], config)
        y = (n if config.get("norm_before_residual") else h) + causal(w, config, torch.cat([e, n], dim=-1))
        y = later_layers(tensors, config, mlp(w, config, y), engine)
        readout = norm(y[-1:], tensors["norm.weight"], config)
        logits.append(lm_head @ readout[0])
        next_state = readout if config.get("norm_output") else y[-1:]
        h = torch.cat([h, next_state if masks is None else blank[:1]])
    return Drafts(torch.stack(logits), ids)


def load_eagle3(folder: Path, engine: str) -> tuple[dict, dict]:
    """Configuration and tensors of an EAGLE-3 or P-EAGLE folder; a container's layers are part of the configuration."""
    config, tensors = load(folder)
    if "speculators_model_type" not in config:
        assert config["architectures"][0] in ("LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM", "PEagleDraftModel")
        return config, tensors
    assert config["speculators_model_type"] in ("eagle3", "peagle") and engine == "vllm"
    assert (config["speculators_model_type"] == "peagle") == ("mask_token_id" in config)
    kind = config["transformer_layer_config"]["model_type"]
    assert (kind == "qwen3") == ("layers.0.self_attn.q_norm.weight" in tensors) and "norm_before_residual" in config
    return {**DEFAULTS, **config["transformer_layer_config"], **config}, tensors


def eagle3_layers(config: dict, num_layers: int, engine: str) -> list[int]:
    """The hidden states that an engine gives to the head."""
    if engine == "openvino":
        return [k + 1 for k in config["hidden_layers_list"]]
    layers = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    if engine == "vllm":
        layers = config.get("eagle_aux_hidden_state_layer_ids") or layers
    else:
        layers = layers and [k + 1 for k in layers]
    return sorted(layers or [2, num_layers // 2, num_layers - 3])


def normed_states(tensors: dict, config: dict, g: Tensor, num_layers: int) -> Tensor:
    """The target's states [T, F*D] by the norms before fc: of all states together, then of each."""
    if config.get("norm_before_fc", config.get("eagle_config", {}).get("norm_before_fc")):
        g = norm(g, tensors["input_norm.weight"], config)
    if not (config.get("fc_norm") or config.get("use_aux_norm")):  # after the other norm, as in vLLM's source
        return g
    old_names = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
    states = []
    for number, state in enumerate(g.chunk(num_layers, dim=-1)):
        name = f"fc_norm.{number}.weight"
        weight = tensors[name] if name in tensors else tensors[f"{old_names[number]}.weight"]
        states.append(norm(state, weight, config))
    return torch.cat(states, dim=-1)


def later_layers(tensors: dict, config: dict, y: Tensor, engine: str) -> Tensor:
    """The layers behind the first one, y [T, H]."""
    for number in range(1, config["num_hidden_layers"]):
        w = under(tensors, f"layers.{number}.")
        before = w["input_layernorm.weight"]
        if engine == "sglang" and "hidden_norm.weight" in w:  # modelopt's later layers have none
            before = w["hidden_norm.weight"]
        y = mlp(w, config, y + causal(w, config, norm(y, before, config), layer=number))
    return y


def medusa(folder: Path, target: Served, tokens: Tensor, slot: int, depth: int, *, engine: str = "vllm") -> Drafts:
    """vLLM reads its own names and those of the reference; the reference reads its pickle and always has biases."""
    config = json.loads((folder / "config.json").read_text())
    if engine == "reference":
        tensors = exact(torch.load(folder / "medusa_lm_head.pt"))
        num, num_blocks = config["medusa_num_heads"], config["medusa_num_layers"]
    else:
        tensors = load(folder)[1]
        assert config["model_type"] == "medusa" and config["hidden_size"] == target.embed.shape[1]
        num, num_blocks = medusa_sizes(config)
    rows = config.get("truncated_vocab_size", config["vocab_size"])
    logits = []
    for i in range(depth):
        assert i < num
        x = target.states[-1, slot - 1]
        for j in range(num_blocks):
            name = f"blocks.{i}.layers.{j}" if f"blocks.{i}.layers.{j}.weight" in tensors else f"{i}.{j}.linear"
            bias = tensors[f"{name}.bias"] if engine == "reference" or config.get("medusa_fc_bias") else 0
            x = x + F.silu(tensors[f"{name}.weight"] @ x + bias)
        head = medusa_lm_head(tensors, config, i, num_blocks)
        assert len(head) == rows
        logits.append(head @ x)
    ids = tensors["token_map"] if rows < config["vocab_size"] else torch.arange(rows)
    return Drafts(torch.stack(logits), ids)


def medusa_sizes(config: dict) -> tuple[int, int]:
    """-> number of heads, number of blocks of a head, under any of their names"""
    counts = {key: value for key, value in config.items() if "num" in key}
    (num,) = (value for key, value in counts.items() if "heads" in key)
    (num_blocks,) = (value for key, value in counts.items() if "layers" in key)
    return num, num_blocks


def medusa_lm_head(tensors: dict, config: dict, number: int, num_blocks: int) -> Tensor:
    """The LM head [W, D] of a head, under the name of vLLM or of the reference."""
    names = [f"lm_heads.{number}.weight", f"{number}.{num_blocks}.weight"]
    if config.get("original_lm_head"):
        names = ["lm_head.weight"]
    (head,) = (tensors[name] for name in names if name in tensors)
    return head


def mtp(folder: Path, target: Served, tokens: Tensor, slot: int, depth: int, *, blank: bool = True) -> Drafts:
    """MiMo's class, with sizes from the target. blank: a zero embedding at position 0, as in vLLM and SGLang."""
    config, tensors = load(folder)
    assert config["architectures"] == ["MiMoForCausalLM"] and config["num_nextn_predict_layers"] == 1
    config = {**target.config, "head_dim": target.config["hidden_size"] // target.config["num_attention_heads"]}
    w = under(tensors, "model.mtp_layers.0.")
    assert all(f"self_attn.{part}_proj.bias" in w for part in "qkv")
    h, logits = target.states[-1, :slot], []
    for d in range(1, depth + 1):
        e = target.embed[tokens[1 : slot + d]].clone()
        if blank:
            e[0] = 0
        e, n = norm(e, w["token_layernorm.weight"], config), norm(h, w["hidden_layernorm.weight"], config)
        x = torch.cat([n, e], dim=-1) @ w["input_proj.weight"].T
        x = mlp(w, config, x + causal(w, config, norm(x, w["input_layernorm.weight"], config)))
        h = torch.cat([h, norm(x, w["final_layernorm.weight"], config)[-1:]])
        logits.append(target.lm_head @ h[-1])
    return Drafts(torch.stack(logits), torch.arange(len(target.lm_head)))


def convolved(x: Tensor, y: Tensor, w: dict, name: str, config: dict, side: int) -> Tensor:
    """DFlash 2's convolution of x [size, H] at one side (0: the sublayer's input, 1: its output); y [size, H]: the
    input.
    """
    if "conv_kernel_size" not in config:
        return x
    taps, group = config["conv_kernel_size"], config["conv_group_size"]
    delta = (y @ w[f"{name}.kernel_projection.weight"].T).view(len(y), 2, taps, -1)
    base, out = w[f"{name}.base_kernel"], torch.zeros_like(x)
    for row in range(len(x)):
        for tap in range(min(taps, row + 1)):
            kernel = base[side, tap].view(-1, group) + delta[row, side, tap][:, None]
            out[row] += kernel.flatten() * x[row - tap]
    return out


def aliased(name: str) -> str:
    """A tensor of a block drafter under DeepSpec's name: modelopt, old SpecForge and transformers' assistants have
    others.
    """
    name = (
        name.removeprefix("model.")
        .removeprefix("logit_head.")
        .replace("encoder.output_norm_enc", "hidden_norm")
        .replace("encoder.fc", "fc")
    )
    name = name.replace("confidence_proj.", "confidence_head.proj.")
    return f"markov_head.{name}" if name.startswith(("markov_w", "gate_proj", "joint_proj")) else name


def block(folder: Path, target: Served, tokens: Tensor, slot: int, depth: int, *, engine: str = "vllm") -> Drafts:
    """DFlash, DSpark, DFlash 2, LiLiCorr and Domino, raw or in a Speculators container.

    One pass reads the newest token and masks, and is not causal. SGLang has the target's embedding and LM head whatever
    the folder holds, all tokens, and a DSpark block of as many drafts as it says.
    """
    config, tensors, layers = load_block(folder)
    if engine == "sglang":
        lm_head, ids, embed = target.lm_head, torch.arange(len(target.lm_head)), target.embed
    else:
        lm_head, ids = vocabulary(tensors, config, target)
        embed = tensors.get("embed_tokens.weight", target.embed)
    mask = embed[config["mask_token_id"]]
    size = config["block_size"]
    if engine == "sglang" and config.get("markov_rank"):
        size += not config["sample_from_anchor"]
    if (folder / "mask_embedding.pt").exists():
        mask = torch.load(folder / "mask_embedding.pt")["embedding"]

    context = torch.cat(list(target.states[layers, :slot]), dim=-1) @ tensors["fc.weight"].T
    context = norm(context, tensors["hidden_norm.weight"], config)
    x = torch.cat([embed[tokens[slot]][None], mask.expand(size - 1, -1)])
    for number in range(config["num_hidden_layers"]):
        w = under(tensors, f"layers.{number}.")
        normed = norm(x, w["input_layernorm.weight"], config)
        y = convolved(normed, normed, w, "attention_conv", config, 0)
        keys = torch.cat([context, y])
        seen = seen_by_block(config, number, slot, len(y))
        x = x + convolved(attention(w, config, y, keys, slot, seen), normed, w, "attention_conv", config, 1)
        normed = norm(x, w["post_attention_layernorm.weight"], config)
        y = convolved(normed, normed, w, "mlp_conv", config, 0)
        y = (F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
        x = x + convolved(y, normed, w, "mlp_conv", config, 1)
    x = norm(x, tensors["norm.weight"], config)[0 if config.get("sample_from_anchor") else 1 :][:depth]
    logits, confidence = shaped(x @ lm_head.T, config), None
    before = tokens[slot : slot + depth]
    if "selector_rank" in config:
        logits = selected(tensors, config, logits, x, before)
    if config.get("lilicorr_enabled"):
        logits = lilicorr(tensors, config, logits, x, context[-1], before, target.embed)
    if config.get("projector_type") == "domino":
        logits = logits + domino(tensors, config, x, embed[before])
    if config.get("markov_rank"):
        rows = tensors["markov_head.markov_w1.weight"][before]
        read = markov(under(tensors, "markov_head."), config, x, rows)
        logits = logits + read @ tensors["markov_head.markov_w2.weight"].T
        confidence = confidences(tensors, config, x, rows)
    return Drafts(logits, ids, confidence)


def shaped(logits: Tensor, config: dict) -> Tensor:
    """The logits of DFlash 2 with the target's scale and cap, which its configuration names."""
    logits, cap = config.get("output_multiplier", 1) * logits, config.get("final_logit_softcapping")
    return cap * torch.tanh(logits / cap) if cap else logits


def load_block(folder: Path) -> tuple[dict, dict, list[int]]:
    """-> configuration, tensors under DeepSpec's names, hidden states that the drafter reads"""
    config, tensors = load(folder)
    if "speculators_model_type" in config:
        assert config["transformer_layer_config"]["model_type"] == "qwen3"
        config = {**DEFAULTS, **config["transformer_layer_config"], **config}
        return config, tensors, config["aux_hidden_state_layer_ids"]
    config = {**config, **config.get("dflash_config", {})}
    tensors = {aliased(name): value for name, value in tensors.items()}
    config.setdefault("sample_from_anchor", config.get("shift_label", "markov_head.markov_w1.weight" in tensors))
    return config, tensors, [k + 1 for k in config["target_layer_ids"]]


def seen_by_block(config: dict, number: int, slot: int, size: int) -> Tensor:
    """[size, slot + size]: which positions a block's tokens see in a layer.

    Sliding layers are as Speculators trains them: they see the last positions before the newest token, and may be
    causal. vLLM's kernels count a window from each mask, so that later ones lose the oldest of these positions.
    """
    seen = torch.ones(size, slot + size, dtype=torch.bool)
    causal = config.get("is_causal", config.get("causal", False))
    if config.get("use_swa") or config.get("layer_types", ())[number : number + 1] == ["sliding_attention"]:
        seen[:, : max(0, slot - config.get("swa_window_size", config["sliding_window"]))] = False
        causal = not config.get("sliding_window_non_causal", not config.get("is_causal", config.get("causal", True)))
    if causal:
        seen[:, slot:] &= torch.ones(size, size, dtype=torch.bool).tril()
    return seen


def confidences(tensors: dict, config: dict, x: Tensor, rows: Tensor) -> Tensor | None:
    """[K]: logits of the confidence head for states x [K, H] and the Markov head's rows [K, rank]; None without one"""
    if not config.get("enable_confidence_head", config.get("use_confidence_head")):
        return None
    inputs = torch.cat([x, rows], dim=-1) if config.get("confidence_head_with_markov") else x
    return F.linear(inputs, tensors["confidence_head.proj.weight"], tensors["confidence_head.proj.bias"])[:, 0]


def markov(w: dict, config: dict, x: Tensor, before: Tensor) -> Tensor:
    """What a Markov head's second matrix reads, [K, rank], of the states x [K, H] and the rows of the tokens before,
    [K, rank].
    """
    kind = config.get("markov_head_type", "vanilla")
    assert {name.split(".")[0] for name in w} - {"markov_w1", "markov_w2"} == {
        "vanilla": set(),
        "gated": {"gate_proj"},
        "rnn": {"joint_proj"},
    }[kind]
    if kind == "gated":
        return before * torch.sigmoid(torch.cat([x, before], dim=-1) @ w["gate_proj.weight"].T + w["gate_proj.bias"])
    if kind == "vanilla":
        return before
    state, found = torch.zeros_like(before[0]), []
    for e, h in zip(before, x):
        gate, candidate, out = (w["joint_proj.weight"] @ torch.cat([state, e, h]) + w["joint_proj.bias"]).chunk(3)
        state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
        found.append(out.tanh())
    return torch.stack(found)


def selected(tensors: dict, config: dict, logits: Tensor, x: Tensor, before: Tensor) -> Tensor:
    """DFlash 2's scores of the best tokens behind the tokens before [K]; others have none. logits [K, V], x [K, H]"""
    w = under(tensors, "candidate_selector.")
    assert w["successor_codebook"].shape == (logits.shape[-1], config["selector_rank"])
    scores = torch.full_like(logits, -torch.inf)
    for row, best in enumerate(logits.topk(min(config["selector_top_k"], logits.shape[-1])).indices):
        product = w["predecessor_codebook"][before[row]] * (w["hidden_projection.weight"] @ x[row])
        scores[row, best] = logits[row, best] + w["successor_codebook"][best] @ product
    return scores


def domino(tensors: dict, config: dict, x: Tensor, embeddings: Tensor) -> Tensor:
    """Domino's corrections [K, V] of the states x [K, H]; embeddings [K, H] of the tokens before. The first draft has
    none.
    """
    assert config["pure_draft_prefix_len"] == 1 and isinstance(config["shift_label"], bool)
    wide, state, corrections = config["gru_hidden_dim"], torch.zeros(config["gru_hidden_dim"], dtype=x.dtype), []
    for number, (e, h) in enumerate(zip(embeddings, x)):
        of_input, of_state = tensors["prefix_gru.weight_ih_l0"] @ e, tensors["prefix_gru.weight_hh_l0"] @ state
        reset, update = (of_input + of_state)[: 2 * wide].sigmoid().chunk(2)
        new = torch.tanh(of_input[2 * wide :] + reset * of_state[2 * wide :])
        state = (1 - update) * new + update * state
        hidden = F.silu(tensors["embed_proj.0.weight"] @ torch.cat([h, state]))
        corrections.append(tensors["embed_proj.2.weight"] @ hidden * (number > 0))
    return torch.stack(corrections)


def lilicorr(
    tensors: dict, config: dict, logits: Tensor, x: Tensor, context: Tensor, before: Tensor, embed: Tensor
) -> Tensor:
    """LiLiCorr's scores of the best tokens of each position behind the tokens before [K]; others have none, and behind
    a token that is no candidate all are zero. logits [K, V], x [K, H], context [H]: the last row of the fused states"""
    w, top = under(tensors, "lilicorr."), config["lilicorr_candidate_topk"]
    heads, num = config["lilicorr_num_heads"], config["block_size"] - 1
    assert num == len(x), "a block of another length"

    def linear(name: str, value: Tensor) -> Tensor:
        return value @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def unit(value: Tensor) -> Tensor:
        return value / value.norm(dim=-1, keepdim=True).clamp(min=config["lilicorr_vector_eps"])

    log_probs, ids = logits.log_softmax(-1).topk(top)
    rows = []
    for s in range(num):
        for k in range(top):
            lp = log_probs[s, k]
            features = torch.stack(
                [
                    lp,
                    lp.exp(),
                    lp - log_probs[s, 0],
                    torch.tensor(k / (top - 1)).to(lp),
                    torch.tensor(float(k == 0)).to(lp),
                ]
            )
            features = F.layer_norm(features, (5,), w["feature_norm.weight"], w["feature_norm.bias"])
            token = linear("token_proj", embed[ids[s, k]]) if "token_proj.weight" in w else embed[ids[s, k]]
            row = token + linear("pass_hidden_proj", x[s])
            row = row + linear("feature_mlp.down_proj", F.silu(linear("feature_mlp.up_proj", features)))
            rows.append(row + w["slot_embedding"][0, 0, s, 0] + w["rank_embedding"][0, 0, 0, k])
    y = torch.stack(rows)
    slot = torch.arange(num).repeat_interleave(top)
    for number in range(config["lilicorr_num_layers"]):
        name = f"layers.{number}"
        normed = norm(y, w[f"{name}.attn_norm.weight"], config)
        q, k, v = (normed @ w[f"{name}.attn.in_proj_weight"].T + w[f"{name}.attn.in_proj_bias"]).chunk(3, dim=-1)
        heads_out = []
        for head, (a, b, c) in enumerate(zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1))):
            bias = w["relative_slot_bias"][head][slot[:, None] - slot + num] + w["same_slot_bias"][head] * (
                slot[:, None] == slot
            )
            heads_out.append((a @ b.T / a.shape[-1] ** 0.5 + bias).softmax(-1) @ c)
        y = y + linear(f"{name}.attn.out_proj", torch.cat(heads_out, dim=-1))
        y = y + linear(
            f"{name}.mlp.down_proj",
            F.silu(linear(f"{name}.mlp.up_proj", norm(y, w[f"{name}.mlp_norm.weight"], config))),
        )
    y = norm(y, w["output_norm.weight"], config)
    a = norm(linear("context_proj", context), w["anchor_norm.weight"], config).expand_as(y)
    f = F.silu(linear("factor_input_proj", torch.cat([y, a, y * a], dim=-1)))
    out, into = (unit(linear(name, f)).view(num, top, -1) for name in ("out_head", "in_head"))
    scores = torch.full_like(logits, -torch.inf)
    for s in range(num):
        if s == 0:
            row = into[0] @ unit(linear("anchor_out_head", a[0]))
        else:
            positions = (ids[s - 1] == before[s]).nonzero().flatten()
            row = into[s] @ out[s - 1, positions[0]] if len(positions) else torch.zeros_like(log_probs[s])
        scores[s, ids[s]] = config["lilicorr_logit_scale"] * row
    return scores

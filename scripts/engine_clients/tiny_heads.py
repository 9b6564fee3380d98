"""A tiny target, and heads of any family that are right about everything it says, or about half of it."""

from collections.abc import Callable
from pathlib import Path

import hydra
import torch
import transformers
from hydra.utils import instantiate

from specdec.decode import Decoder
from specdec.drafter import Drafter
from specdec.sampling import Sampling
from specdec.target import Target
from train import data
from train.features import Online
from train.objective import Objective

STEPS, EVERY = 1200, 50  # at most so many steps of overfitting, and how often it is decoded
Share = Callable[[Drafter], float]  # of its rounds, how many draft only what the target then says


def make_target(folder: Path) -> Target:
    """Random, with the default target's tokenizer, which llama.cpp's converter asks for."""
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained("targets/smollm2-135m")
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, initializer_range=0.15, eos_token_id=2,
        bos_token_id=1, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 50_000.0}, tie_word_embeddings=False)  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Target.load(str(folder), dtype="float32")


def make_prompts(target: Target, num: int, *, num_tokens: int) -> list[list[int]]:
    """Of random prompts, those whose answers have no near ties, which engines round differently."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(100, 40_000, (8,), generator=generator).tolist() for _ in range(4 * num)]
    answers = Decoder(target, None, sampling=Sampling(), stop=set()).generate(prompts, num_tokens).tokens

    def margin(n: int) -> float:
        tokens = torch.tensor([prompts[n] + answers[n]])
        best = target.logits(target.read(tokens, ()).final[0, len(prompts[n]) - 1 : -1]).topk(2).values
        return float((best[:, 0] - best[:, 1]).min())

    return [prompts[n] for n in sorted(range(len(prompts)), key=margin)[-num:]]


def overfit(
    target: Target,
    head: str,
    arguments: dict,
    reduced: bool,
    prompts: list[list[int]],
    num_tokens: int,
    *,
    depth: int,
    share: Share,
) -> Drafter:
    """A drafter that says beforehand what the target answers to these prompts. Raises ValueError if it does not learn it."""
    torch.manual_seed(1)
    plain = Decoder(target, None, sampling=Sampling(), stop=set()).generate(prompts, num_tokens)
    rows = [
        data.Row(str(n), "all", prompt + answer, [False] * len(prompt) + [True] * len(answer))
        for n, (prompt, answer) in enumerate(zip(prompts, plain.tokens))
    ]
    vocab = None
    if reduced:
        vocab = torch.tensor(sorted({*range(100), *(token for row in rows for token in row.tokens)}))
    with hydra.initialize_config_dir(str(Path("conf").resolve()), version_base="1.3"):
        config = hydra.compose("train", overrides=[f"head={head}"]).head
    drafter = instantiate({**config.drafter, **arguments, "_convert_": "all"}, target, vocab=vocab)
    wanted = {"ce"} | ({"confidence"} if drafter.confident else set())
    weights = {name: float(name in wanted) for name in config.objective.losses}
    depth = 1 if drafter.attends == "text" else depth
    settings = {key: value for key, value in config.objective.items() if key != "_target_"}
    objective = Objective(drafter, **{**settings, "losses": weights, "depth": depth, "anchors": None})
    batch = data.collate([[row] for row in rows], length=max(len(row.tokens) for row in rows), pad_token=0)
    output = Online(target, drafter.target_layers)([0], batch)
    optimizer = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=2e-3)
    for step in range(1, STEPS + 1):
        loss = objective(batch, output)
        (loss.total / loss.num_goals).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            frozen = drafter.decodable()
            if share(frozen) == 1:
                return frozen
    raise ValueError(f"The tiny {head} has not learned its answers in {STEPS} steps.")


def perturbed(drafter: Drafter, *, share: Share) -> Drafter:
    """Noise on every weight, until half of the rounds draft something wrong."""
    for scale in (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.2):
        torch.manual_seed(2)
        noisy = drafter.decodable()
        for parameter in noisy.parameters():
            parameter += scale * parameter.abs().mean() * torch.randn_like(parameter)
        if share(noisy) < 0.5:
            break
    return noisy

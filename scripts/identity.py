"""Compares plain, chain, tree and auto decoding token for token with transformers' generate(do_sample=False).

    python scripts/identity.py checkpoint=checkpoints/shipped/mtp limit=8 batch=4

In float32 the answers may differ only at near-ties: the gap between the target's two largest logits there is printed and
must be as small as rounding. In bfloat16 such ties are frequent.
"""

from helpers import loading
from helpers.options import option, options, run

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from specdec.core import files
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.measuring.measurement import top2_gap
from specdec.proposers.auto import Auto
from specdec.proposers.base import Proposer
from specdec.proposers.heads import HeadProposer
from train import progress

DRAFTINGS = (Drafting(4), Drafting(4, 3, 10))


@dataclass(frozen=True, kw_only=True)
class Identity(loading.PromptOptions):
    checkpoint: str = field(metadata={"help": loading.CHECKPOINT})
    batch: int = option(
        1,
        "prompts decoded at once: here the next one takes the place of an answer that has ended; generate pads on the left",
    )
    out: str | None = option(None, "JSON file for the result")
    target: loading.TargetOptions = field(default_factory=lambda: loading.TargetOptions(dtype="float32"))


def main() -> None:
    chosen = options(Identity, __doc__)
    console = progress.Results()
    loaded = loading.load(chosen.checkpoint, chosen.target)
    prompts = loading.load_prompts(chosen, loaded, [chosen.checkpoint] if chosen.checkpoint else [])
    tokens = sorted((prompt.tokens for prompt in prompts), key=len)
    groups = [tokens[start : start + chosen.batch] for start in range(0, len(tokens), chosen.batch)]

    expected = [
        answer
        for group in progress.track(groups, "generate", unit="prompts", size=len)
        for answer in generate(loaded, group, chosen.max_new_tokens)
    ]
    proposers: dict[str, Proposer] = {str(drafting.shape): drafting.proposer(loaded.drafter) for drafting in DRAFTINGS}
    head = proposers[str(DRAFTINGS[0].shape)]
    if isinstance(head, HeadProposer):
        proposers["auto"] = Auto.usual(loaded.target, head)
    results = {}
    for name, proposer in {"plain": None, **proposers}.items():
        decoder = Decoder(loaded.target, proposer, sampling=Sampling(), stop=loaded.stop)
        running = decoder.answers(tokens, chosen.max_new_tokens, rows=chosen.batch)
        found = dict(progress.track(running, name, unit="prompts", total=len(tokens)))
        answers = [found[number].tokens[0] for number in range(len(tokens))]
        accepted = [count for generation in found.values() for count in generation.accepted[0]]
        cases = [top2_gap(loaded.target, *case, Sampling()) for case in zip(tokens, expected, answers)]
        gaps = [gap for gap in cases if gap is not None]
        tau = 1 + sum(accepted) / len(accepted)
        same = len(tokens) - len(gaps)
        results[name] = {"identical": same, "of": len(tokens), "gaps": gaps, "tau": tau}
        differences = f"; top-2 gaps where they differ: {', '.join(f'{gap:.2g}' for gap in gaps)}" if gaps else ""
        console.print(f"{name}: {same} of {len(tokens)} identical to generate, tau {tau:.3f}{differences}")
    if chosen.out:
        files.write_text(Path(chosen.out), json.dumps(results, indent=2) + "\n")


def generate(loaded: loading.Loaded, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Greedy answers of transformers' own generate, each up to its stop token."""
    width = max(map(len, prompts))
    pad = min(loaded.stop)
    tokens = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=loaded.target.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=tokens.device)
    texts = loaded.target.model.generate(
        tokens,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(loaded.stop),
        pad_token_id=pad,
    )
    answers = texts[:, width:].tolist()
    lengths = [next((i + 1 for i, token in enumerate(row) if token in loaded.stop), len(row)) for row in answers]
    return [row[:length] for row, length in zip(answers, lengths)]


if __name__ == "__main__":
    run(main)

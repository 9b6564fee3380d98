"""Helpers for tests of compiled decoding."""

from specdec.core.compile import Runner
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.decoder import Decoder
from specdec.measuring.measure import decode_side_by_side
from specdec.proposers.heads import HeadProposer
from tests.support.decoding import chain_of, random_tokens

KINDS = {
    "path": ("eagle", {}),
    "depth": ("mtp", {"num_modules": 5}),
    "block": ("dflash", {}),
    "text": ("draft", {}),
    "none": ("medusa", {}),
}
CHAIN, TREE = chain_of(3), TreeShape(depth=3, width=3, nodes=8)


def decoder_of(
    target, drafter=None, shape=CHAIN, *, compiled: bool, temperature=0.0, rule="token", runner=None, **how
) -> Decoder:
    proposer = drafter and HeadProposer(drafter, shape, compile=compiled, **how)
    runner = runner or Runner(compiled)
    return Decoder(target, proposer, sampling=Sampling(temperature), stop=set(), rule=rule, runner=runner)


def prompts_of(target, seed: int, lengths=(5, 9)) -> list[list[int]]:
    return [random_tokens(seed + row, num, target.vocab_size) for row, num in enumerate(lengths)]


def check_same(compiled: Decoder, plain: Decoder, prompts, num: int) -> None:
    """Rows leave the batch of the decoder that compiles nothing; each has random numbers of its own."""
    seeds = list(range(len(prompts)))
    decoders = {"compiled": compiled, "plain": plain}
    found = decode_side_by_side(decoders, prompts, num, batch=len(prompts), seeds=seeds)
    for generation, reference in zip(found["compiled"], found["plain"], strict=True):
        assert generation.tokens == reference.tokens
        assert generation.accepted == reference.accepted
        assert generation.drafted == reference.drafted

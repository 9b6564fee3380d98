"""Streams one answer, with drafted tokens in green, then answers again without drafts and compares the speed.

    specdec generate checkpoint=checkpoints/shipped/mtp prompt="Why is the sky blue?"
    specdec generate proposer=ngram prompt="Say it twice: the sky is blue."

Green tokens were drafted and accepted. The others come from the target's own passes.
"""

from specdec.options.command_line import option, options, run

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import rich.console

from specdec import loading
from specdec.core import progress
from specdec.core.answer_text import TextDecoder, TextStream
from specdec.core.constraint import FORMS, Constraint
from specdec.core.generation import Generation
from specdec.core.ranges import named
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.measuring.measure import first_difference, seeded_generator, top2_gap
from specdec.options import decoding, proposers
from specdec.text import conversations as data


@dataclass(frozen=True)
class RuledDecodeOptions(decoding.DecodeOptions):
    grammar: str | None = option(None, f"grammar of the answer: {FORMS}", prose=True)


@dataclass(frozen=True, kw_only=True)
class Generate(proposers.ProposerOptions):
    prompt: str = field(
        metadata={"help": "text of the user's message, or to continue, without a chat template", "prose": True}
    )
    template: dict[str, str] = field(default_factory=dict, metadata=loading.TRAINED_TEMPLATE)
    max_new_tokens: int = option(128, "longest answer, in tokens")
    seed: int = option(0, "seed of sampling")
    compare: bool = option(True, "answer again without drafts, and compare")
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: RuledDecodeOptions = field(default_factory=RuledDecodeOptions)


def main(arguments: list[str] | None = None) -> None:
    chosen = options(Generate, __doc__, arguments)
    console = progress.Results()
    sampling, drafting = chosen.decode.sampling(), chosen.decode.drafting()
    loaded = loading.load_proposer(chosen, chosen.target, drafting)
    heads = [chosen.checkpoint] if chosen.checkpoint else []
    template = loading.read_template(chosen.template, loaded.tokenizer, heads)
    messages = [{"role": "user", "content": chosen.prompt}]
    row = {"id": "prompt=", "prompt": chosen.prompt, "messages": messages}
    prompt = data.encode_row(loaded.tokenizer, row, template)
    shared: dict[str, Any] = {"sampling": sampling, "stop": loaded.stop, "runner": drafting.runner()}
    decoder = drafting.decoder(loaded.target, loaded.proposer, **shared)
    plain = Decoder(loaded.target, None, **shared)
    decoding.show_measuring(loaded.proposer)
    begin = begin_constraint(chosen.decode.grammar, loaded)
    for each in (decoder, plain) if chosen.compare else (decoder,):
        each.generate([prompt], 4, constraints=begin())  # a warm-up
    loaded.proposer.forget()

    drafted = print_answer(chosen, loaded, decoder, prompt, console, begin())
    if compute_rate(drafted):
        tokens, rounds = len(drafted.tokens[0]), len(drafted.accepted[0])
        console.print(
            f"{tokens} tokens in {rounds} rounds: tau {(tokens - 1) / rounds:.2f}, {compute_rate(drafted):.1f} tokens/s "
            f"({loaded.title}, temperature {sampling.temperature:g})"
        )
    if chosen.compare:
        generator = seeded_generator(loaded.target, chosen.seed)
        again = plain.generate([prompt], chosen.max_new_tokens, generator=generator, constraints=begin())
        gap = None
        if sampling.greedy:
            (constraint,) = begin() or [None]
            gap = top2_gap(loaded.target, prompt, drafted.tokens[0], again.tokens[0], sampling, constraint)
        print_comparison(drafted, again, sampling, gap, console)


def begin_constraint(grammar: str | None, loaded: loading.Opened) -> Callable[[], list[Constraint | None] | None]:
    """-> gives the constraint of an answer, at its beginning; None without a grammar. Raises ValueError for a wrong one."""
    if grammar is None:
        return lambda: None
    from specdec.tools.grammar.grammar import Grammar

    with named("decode"):
        rule = Grammar.parse(grammar)
    begin = rule.compile(loaded.tokenizer, loaded.target.vocab_size, loaded.stop)
    return lambda: [begin()]


def print_answer(
    chosen: Generate,
    loaded: loading.Chosen,
    decoder: Decoder,
    prompt: list[int],
    console: rich.console.Console,
    constraints: list[Constraint | None] | None,
) -> Generation:
    """Decodes the prompt and prints tokens as they come, drafted ones in green. Says if the grammar was left incomplete."""
    before = () if loaded.tokenizer.chat_template else prompt
    result, text = Generation([[]], [[]]), TextStream(TextDecoder.of(loaded.tokenizer, special=True), before)
    generator = seeded_generator(loaded.target, chosen.seed)
    rounds = decoder.stream(
        [prompt], chosen.max_new_tokens, generator=generator, result=result, constraints=constraints
    )
    for emitted in rounds:
        for place, token in enumerate(emitted.tokens[0]):
            result.tokens[0].append(token)
            style = "green" if place < emitted.accepted[0] else ""
            if token not in loaded.stop:
                console.print(text.add(token), end="", style=style, markup=False)
    console.print(text.end(), end="\n\n", markup=False)
    if constraints and constraints[0] and constraints[0].complete:
        console.print(f"The answer is complete under the grammar, with {len(result.tokens[0])} tokens.")
    elif constraints and constraints[0]:
        console.print(
            "The answer ends before the grammar is complete: raise max_new_tokens=, or bound what the grammar allows (maxLength, "
            "maxItems)."
        )
    return result


def compute_rate(generation: Generation) -> float:
    """Tokens/s of the rounds; 0 without a round."""
    return (len(generation.tokens[0]) - 1) / generation.seconds if generation.seconds else 0.0


def print_comparison(
    drafted: Generation, plain: Generation, sampling: Sampling, gap: float | None, console: rich.console.Console
) -> None:
    """gap: between the target's two largest logits where greedy answers differ"""
    fast, slow = compute_rate(drafted), compute_rate(plain)
    if not (fast and slow):
        return
    same = "; the same answer" if sampling.greedy else ""
    first = first_difference(drafted.tokens[0], plain.tokens[0])
    if first is not None and gap is not None:
        same = (
            f"; another answer from token {first + 1} on, where the target's two best logits are {gap:.3g} apart (a pass over several "
            "tokens rounds differently; target.dtype=float32 rounds less)"
        )
    console.print(f"without drafts {slow:.1f} tokens/s: speedup {fast / slow:.2f}{same}")


if __name__ == "__main__":
    run(main)

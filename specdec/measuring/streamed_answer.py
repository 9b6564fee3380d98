"""One answer as it is written, with drafted tokens in green, and its speed beside plain decoding."""

from collections.abc import Sequence

import rich.console

from specdec.core.answer_text import TextDecoder, TextStream
from specdec.core.constraint import Constraint
from specdec.core.generation import Generation
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.loading import OpenTarget
from specdec.measuring.measure import find_first_difference, seeded_generator


def print_answer(
    opened: OpenTarget,
    decoder: Decoder,
    prompt: list[int],
    max_new_tokens: int,
    console: rich.console.Console,
    *,
    seed: int,
    constraints: Sequence[Constraint | None] | None,
) -> Generation:
    """Decodes a prompt and prints tokens as they come, drafted ones in green; then whether the grammar is complete.

    prompt: token ids; constraints: one for the answer, or None
    """
    context = () if opened.tokenizer.chat_template else prompt
    result, text = (
        Generation([[]], [[]]),
        TextStream(TextDecoder.from_tokenizer(opened.tokenizer, special=True), context),
    )
    generator = seeded_generator(opened.target, seed)
    rounds = decoder.stream([prompt], max_new_tokens, generator=generator, result=result, constraints=constraints)
    for emitted in rounds:
        for index, token in enumerate(emitted.tokens[0]):
            result.tokens[0].append(token)
            style = "green" if index < emitted.accepted[0] else ""
            if token not in opened.stop:
                console.print(text.add(token), end="", style=style, markup=False)
    console.print(text.end(), end="\n\n", markup=False)
    if constraints and constraints[0] and constraints[0].complete:
        console.print(f"The answer is complete under the grammar, with {len(result.tokens[0])} tokens.")
    elif constraints and constraints[0]:
        console.print(
            "The answer ends before the grammar is complete: raise max_new_tokens=, or bound what the grammar allows "
            "(maxLength, maxItems)."
        )
    return result


def compute_rate(generation: Generation) -> float:
    """Tokens/s of the rounds; 0 without a round."""
    return (len(generation.tokens[0]) - 1) / generation.seconds if generation.seconds else 0.0


def print_comparison(
    drafted: Generation, plain: Generation, sampling: Sampling, gap: float | None, console: rich.console.Console
) -> None:
    """Prints the plain rate, the speedup, and where the answers differ.

    gap: between the target's two largest logits at the first difference of greedy answers; None: they are equal
    """
    drafted_rate, plain_rate = compute_rate(drafted), compute_rate(plain)
    if not (drafted_rate and plain_rate):
        return
    remark = "; the same answer" if sampling.greedy else ""
    difference = find_first_difference(drafted.tokens[0], plain.tokens[0])
    if difference is not None and gap is not None:
        remark = (
            f"; another answer from token {difference + 1} on, where the target's two best logits are {gap:.3g} apart "
            "(a pass over several tokens rounds differently; target.dtype=float32 rounds less)"
        )
    console.print(f"without drafts {plain_rate:.1f} tokens/s: speedup {drafted_rate / plain_rate:.2f}{remark}")

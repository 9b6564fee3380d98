"""One answer as it is written, with drafted tokens in green, and its speed beside plain decoding."""

from collections.abc import Sequence

from specdec.core import progress
from specdec.core.answer_text import TextDecoder, TextStream
from specdec.core.constraint import Constraint
from specdec.core.generation import Generation
from specdec.core.sampling import Sampling
from specdec.core.wording import format_count
from specdec.decoding.decoder import Decoder
from specdec.loading import OpenTarget
from specdec.measuring.measure import find_first_difference, seeded_generator

CAUTION = "One answer does not show whether the gain is certain: specdec evaluate measures many."


def print_answer(
    opened: OpenTarget,
    decoder: Decoder,
    prompt: list[int],
    max_new_tokens: int,
    console: progress.Results,
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
        console.say(f"The answer is complete under the grammar, with {format_count(len(result.tokens[0]), 'token')}.")
    elif constraints and constraints[0]:
        console.say(
            "The answer ends before the grammar is complete: raise max_new_tokens=, or bound what the grammar allows "
            "(maxLength, maxItems)."
        )
    return result


def print_rate(drafted: Generation, console: progress.Results, *, title: str, temperature: float) -> None:
    """Prints tau and the rate of a drafted answer, if it has rounds. title: name of the proposer"""
    if drafted.tokens_per_second:
        num_tokens, num_rounds = len(drafted.tokens[0]), len(drafted.accepted[0])
        console.say(
            f"{format_count(num_tokens, 'token')} in {format_count(num_rounds, 'round')}: "
            f"tau {drafted.acceptance_length:.2f}, {drafted.tokens_per_second:.1f} tokens/s "
            f"({title}, temperature {temperature:g})"
        )


def print_comparison(
    drafted: Generation, plain: Generation, sampling: Sampling, gap: float | None, console: progress.Results
) -> None:
    """Prints the speedup, how far one answer shows it, and whether the answers are the same.

    gap: between the target's two largest logits at the first difference of greedy answers; None: they are equal
    """
    drafted_rate, plain_rate = drafted.tokens_per_second, plain.tokens_per_second
    if not (drafted_rate and plain_rate):
        return
    speedup = drafted_rate / plain_rate
    console.say(f"without drafts {plain_rate:.1f} tokens/s: speedup {speedup:.2f}. {CAUTION}")
    difference = find_first_difference(drafted.tokens[0], plain.tokens[0])
    if sampling.greedy and difference is None:
        console.say("Both answers are the same.")
    elif difference is not None and gap is not None:
        console.say(
            f"The answers differ from token {difference + 1} on: the target's two best logits are {gap:.3g} apart "
            "there, and rounding chose (target.dtype=float32 rounds less)."
        )

"""Part 1 of the demo: an answer that is written plainly, and again with drafts."""

from typing import Any

from specdec.core import progress
from specdec.core.generation import Generation
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.loading import OpenTarget
from specdec.measuring.measure import compute_top2_gap, find_first_difference
from specdec.measuring.streamed_answer import print_answer
from specdec.tools.demo.budget import DRAFTING
from specdec.tools.demo.comparison import make_auto


def show_head(
    opened: OpenTarget, head: str, prompt: list[int], max_new_tokens: int, console: progress.Results
) -> dict[str, Any]:
    """Streams an answer plainly and with `auto`. head: checkpoint. Returns the sentence on both answers."""
    sampling, runner = Sampling(temperature=0), DRAFTING.runner()
    settings: dict[str, Any] = {"sampling": sampling, "stop": opened.stop, "runner": runner}
    plain = Decoder(opened.target, None, **settings)
    drafted = DRAFTING.decoder(opened.target, make_auto(opened, head), **settings)
    answers: list[Generation] = []
    for name, decoder in (("plain decoding", plain), ("with drafts, accepted ones in green", drafted)):
        decoder.generate([prompt], 4)  # a warm-up
        console.say(f"{name}:")
        answers.append(print_answer(opened, decoder, prompt, max_new_tokens, console, seed=0, constraints=None))
    sentence = describe_answers(opened, prompt, *answers)
    console.say(sentence)
    return {"sentence": sentence}


def describe_answers(opened: OpenTarget, prompt: list[int], plain: Generation, drafted: Generation) -> str:
    """The sentence on the speeds of both answers, and on whether they are the same."""
    tokens = drafted.tokens[0], plain.tokens[0]
    plain_rate, drafted_rate = plain.tokens_per_second or 0.0, drafted.tokens_per_second or 0.0
    difference, same = find_first_difference(*tokens), "The text is the same."
    if difference is not None:
        gap = compute_top2_gap(opened.target, prompt, *tokens, Sampling(temperature=0))
        same = (
            f"From token {difference + 1} on the text is another: the target's two best logits are {gap:.2g} apart "
            "there, and rounding chose."
        )
    return (
        f"Drafts make {drafted_rate:.1f} tokens/s of {plain_rate:.1f}, "
        f"{drafted_rate / max(plain_rate, 1e-9):.2f} times as many: "
        f"{drafted.acceptance_length or 1:.2f} tokens a pass of the target. {same}"
    )

"""python scripts/generate.py checkpoint=DIR prompt="Why is the sky blue?"
python scripts/generate.py proposer=ngram prompt="Say it twice: the sky is blue."

Streams an answer; green tokens were drafted and accepted, the others are the target's own. Then answers again without
drafting, and says how the two compare.
"""

from dataclasses import dataclass, field

import rich.console
import torch

from helpers import loading, proposers
from helpers.options import options, run
from specdec.compile import Runner
from specdec.decode import Decoder, Generation, StopStrings
from train import data


@dataclass(frozen=True, kw_only=True)
class Generate(proposers.ProposerOptions):
    prompt: str = field(metadata={"help": "what the user says"})
    max_new_tokens: int = field(default=128, metadata={"help": "the answer ends here at the latest"})
    stop_strings: str | None = field(default=None, metadata={"help": "comma list of texts that end the answer"})
    seed: int = field(default=0, metadata={"help": "of sampling"})
    compare: bool = field(default=True, metadata={"help": "answer again without drafting, and compare"})
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: loading.DecodeOptions = field(default_factory=loading.DecodeOptions)


def main() -> None:
    chosen = options(Generate, __doc__)
    console = rich.console.Console()
    sampling, drafting = chosen.decode.samplings()[0], chosen.decode.drafting()
    loaded = proposers.load(chosen, chosen.target, drafting)
    prompt = data.encode_prompt(loaded.tokenizer, [{"role": "user", "content": chosen.prompt}])
    strings = tuple(chosen.stop_strings.split(",")) if chosen.stop_strings else ()
    runner = Runner(drafting.compile)
    ways = {
        "sampling": sampling,
        "stop": loaded.stop,
        "stop_strings": StopStrings(strings, loaded.tokenizer.decode) if strings else None,
        "runner": runner,
    }
    decoder = drafting.decoder(loaded.target, loaded.proposer, **ways)
    plain = Decoder(loaded.target, None, **ways)
    for warm in (decoder, plain) if chosen.compare else (decoder,):
        warm.generate([prompt], 4)  # a warm-up
    loaded.proposer.forget()

    result = Generation([[]], [[]])
    shown = ""
    for emitted in decoder.stream(
        [prompt], chosen.max_new_tokens, generator=_generator(loaded, chosen.seed), result=result
    ):
        for place, token in enumerate(emitted.tokens[0]):
            result.tokens[0].append(token)
            text = loaded.tokenizer.decode([t for t in result.tokens[0] if t not in loaded.stop])
            if text.endswith("\ufffd"):  # half a character: wait for the rest of its bytes
                continue
            console.print(
                text[len(shown) :],
                end="",
                style="green" if place < emitted.accepted[0] else "",
                markup=False,
                highlight=False,
            )
            shown = text
    console.print("\n")
    rounds = len(result.accepted[0])
    if rounds:
        console.print(
            f"{len(result.tokens[0])} tokens in {rounds} rounds: tau {(len(result.tokens[0]) - 1) / rounds:.2f}, "
            f"{(len(result.tokens[0]) - 1) / result.seconds:.1f} tokens/s ({loaded.what}, temperature {sampling.temperature:g})"
        )
    if chosen.compare:
        again = plain.generate([prompt], chosen.max_new_tokens, generator=_generator(loaded, chosen.seed))
        if rounds and again.seconds:
            rate = (len(again.tokens[0]) - 1) / again.seconds
            console.print(
                f"without drafting {rate:.1f} tokens/s: speedup {(len(result.tokens[0]) - 1) / result.seconds / rate:.2f}"
                + (f"; the same answer: {again.tokens == result.tokens}" if sampling.greedy else "")
            )


def _generator(loaded: loading.Opened, seed: int) -> torch.Generator:
    return torch.Generator(loaded.target.device).manual_seed(seed)


if __name__ == "__main__":
    run(main)

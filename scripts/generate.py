"""Streams one answer, with drafted tokens in green, then answers again without drafts and compares the speed.

    specdec generate checkpoint=checkpoints/shipped/mtp prompt="Why is the sky blue?"
    specdec generate proposer=ngram prompt="Say it twice: the sky is blue."

Green tokens were drafted and accepted. The others come from the target's own passes.
"""

from specdec.options.command_line import read_command

from collections.abc import Callable
from typing import Annotated, Any

from specdec import loading
from specdec.core import progress
from specdec.core.constraint import Constraint
from specdec.core.option_types import Count, Seed, Text, prefix_option_names
from specdec.decoding.decoder import Decoder
from specdec.measuring.measure import compute_top2_gap, seeded_generator
from specdec.measuring.streamed_answer import print_answer, print_comparison, print_rate
from specdec.options import decoding
from specdec.options.command_types import MEMORY, PROSE, TemplateSettings
from specdec.options.decoding import DecodeOptions
from specdec.options.proposers import ProposerOptions, keep_shape
from specdec.options.run_command import run_command
from specdec.options.target import TargetOptions
from specdec.text import conversations as data


class GenerateDecodeOptions(DecodeOptions):
    grammar: Annotated[Text | None, PROSE]


class GenerateOptions(ProposerOptions):
    prompt: Annotated[str, PROSE]
    template: TemplateSettings
    max_new_tokens: Annotated[Count, MEMORY]
    seed: Seed
    compare: bool
    target: TargetOptions
    decode: GenerateDecodeOptions


def encode_prompt(options: GenerateOptions, loaded: loading.OpenTarget) -> list[int]:
    """The tokens of prompt=, as the user's message where the target has a chat template."""
    heads = [options.checkpoint] if options.checkpoint else []
    template = loading.read_template(options.template, loaded.tokenizer, heads)
    messages = [{"role": "user", "content": options.prompt}]
    row = {"id": "prompt=", "prompt": options.prompt, "messages": messages}
    return data.encode_row(loaded.tokenizer, row, template)


def prepare_constraint(grammar: str | None, loaded: loading.OpenTarget) -> Callable[[], list[Constraint | None] | None]:
    """A maker of the constraints of an answer; it returns None without a grammar. Raises ValueError for a wrong one."""
    if grammar is None:
        return lambda: None
    from specdec.tools.grammar.grammar import Grammar

    with prefix_option_names("decode"):
        rule = Grammar.parse(grammar)
    begin = rule.compile(loaded.tokenizer, loaded.target.vocab_size, loaded.stop)
    return lambda: [begin()]


def main(arguments: list[str] | None = None) -> None:
    options = read_command("generate", GenerateOptions, __doc__, arguments, presets=keep_shape)
    console = progress.Results()
    sampling, drafting = options.decode.make_sampling(), options.decode.make_drafting()
    loaded = loading.load_proposer(options, options.target, drafting)
    prompt = encode_prompt(options, loaded)
    shared: dict[str, Any] = {"sampling": sampling, "stop": loaded.stop, "runner": drafting.runner()}
    decoder = drafting.decoder(loaded.target, loaded.proposer, **shared)
    plain = Decoder(loaded.target, None, **shared)
    decoding.show_measuring(loaded.proposer)
    make_constraint = prepare_constraint(options.decode.grammar, loaded)
    for warm_decoder in (decoder, plain) if options.compare else (decoder,):
        warm_decoder.generate([prompt], 4, constraints=make_constraint())
    loaded.proposer.reset_history()

    length, seed = options.max_new_tokens, options.seed
    drafted = print_answer(loaded, decoder, prompt, length, console, seed=seed, constraints=make_constraint())
    print_rate(drafted, console, title=loaded.title, temperature=sampling.temperature)
    if options.compare:
        generator = seeded_generator(loaded.target, seed)
        undrafted = plain.generate([prompt], length, generator=generator, constraints=make_constraint())
        gap = None
        if sampling.greedy:
            (constraint,) = make_constraint() or [None]
            gap = compute_top2_gap(loaded.target, prompt, drafted.tokens[0], undrafted.tokens[0], sampling, constraint)
        print_comparison(drafted, undrafted, sampling, gap, console)


if __name__ == "__main__":
    run_command(main, GenerateOptions)

"""Replays heads along answers that the target wrote: tau of a chain without decoding (docs/methods.md, section 2).

    specdec replay checkpoint=checkpoints/a,checkpoints/b answers=my_answers.jsonl
    specdec replay checkpoint=checkpoints/a answers=my_answers.jsonl hold_out=null decode.temperature=1 decode.depth=5

Prints tau and acceptance by position of each head's chain, with 95 % intervals over answers, and how the others differ
from the first. The folder OUT gets results.json, results.md and results.html.
"""

from specdec.options.command_line import read_command

from specdec.core import progress
from specdec.measuring.replay import ReplayOptions, replay_heads
from specdec.options.run_command import run_command


def main(arguments: list[str] | None = None) -> None:
    replay_heads(read_command("replay", ReplayOptions, __doc__, arguments), progress.Results())


if __name__ == "__main__":
    run_command(main, ReplayOptions)

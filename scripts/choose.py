"""Says which drafter, and how many drafts, pay at which load, before anything is served.

    specdec choose checkpoint=checkpoints/a,checkpoints/b loads=1,4,16,64
    specdec choose checkpoint=checkpoints/a proposers=suffix trees=4x3x8 contexts=200,2000 out=choice
    specdec choose checkpoint=checkpoints/a engine=http://localhost:8000 baseline=http://localhost:8001 loads=1,4,16

Acceptance is measured once, by replay and by decoding, and seconds of rounds at each load (docs/choosing.md). The
folder OUT gets results.json, results.md and results.html with the speedup of every drafter's best shape, the load from
which plain decoding is faster, and lines that start engines. predicted=OUT of evaluate and judge puts these speedups
beside measured ones.
"""

from specdec.options.command_line import read_command

from specdec.core import progress
from specdec.options.run_command import run_command
from specdec.tools.choose.choose import choose_drafter
from specdec.tools.choose.task import ChooseOptions
from specdec.tools.suites.suites import list_presets


def main(arguments: list[str] | None = None) -> None:
    choose_drafter(read_command("choose", ChooseOptions, __doc__, arguments, presets=list_presets), progress.Results())


if __name__ == "__main__":
    run_command(main, ChooseOptions)

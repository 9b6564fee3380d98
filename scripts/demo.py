"""Shows a shipped head, trains it on recorded answers of a service, and decodes that service's last days with both.

    specdec demo [minutes=8] [fresh=true]

It measures this machine first, and says what it does and how long each part takes: (1) the shipped head beside plain
decoding, with accepted drafts in green; (2) a training by train.py, judged on days of the service that come later;
(3) a table of four ways to decode. After Ctrl-C the same command continues. OUT gets the trained head and demo.json.
"""

from specdec.options.command_line import read_command

from specdec.core import progress
from specdec.options.run_command import run_command
from specdec.tools.demo.demo import DemoOptions, run_demo


def main(arguments: list[str] | None = None) -> None:
    run_demo(read_command("demo", DemoOptions, __doc__, arguments), progress.Results())


if __name__ == "__main__":
    run_command(main, DemoOptions)

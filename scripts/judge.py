"""Judges a running server: tau, acceptance by position and speeds at several loads, with drafts and without, in turn.

    specdec judge engine=http://localhost:8000 checkpoint=checkpoints/a batch=1,4,16,64
    specdec judge engine=http://localhost:8000 baseline=http://localhost:8001 suite=gsm8k

The figures come from the server's own counters and streams (docs/serving.md). With checkpoint=, the head that it
serves, the head is replayed along the same answers, which shows whether the served head is the trained one. The folder
OUT gets results.json, results.md, results.html, record.json to publish (docs/tools/judge.md), and rows.jsonl with each
finished group of requests, so that after Ctrl-C or a kill the same command continues.
"""

from specdec.options.command_line import read_command, split_list

from specdec.core import progress
from specdec.options.run_command import run_command
from specdec.tools.choose.choice import read_predictions
from specdec.tools.judge.judge import judge_server
from specdec.tools.judge.options import JudgeOptions
from specdec.tools.suites.suites import list_presets, read_questions


def main(arguments: list[str] | None = None) -> None:
    options = read_command("judge", JudgeOptions, __doc__, arguments, presets=list_presets)
    question_set = read_questions(options, split_list(options.checkpoint))
    judge_server(options, question_set, read_predictions(options.predicted), progress.Results())


if __name__ == "__main__":
    run_command(main, JudgeOptions)

"""Lets the target answer prompts, to make training data: a drafter is trained on what its own target writes.

    specdec answer prompts=data/prompts_train.jsonl out=answers.jsonl target.name=targets/smollm2-135m
    specdec answer suite=ruler lengths=2048,4096,8192 limit=300 out=long.jsonl target.name=targets/smollm2-135m

Each prompt gets one answer per temperature. Writes conversations to OUT and the settings to OUT.meta.json. After an
interruption the same command continues.

The rows hold the token ids too. engine=URL lets a server of vLLM or llama.cpp answer.
"""

from specdec.options.command_line import read_command

from specdec.core import extensions, progress
from specdec.measuring.answer_prompts import AnswerOptions, answer_prompts
from specdec.options.run_command import run_command


def main(arguments: list[str] | None = None) -> None:
    suites = extensions.find_tool("suites.suites")
    presets = suites.list_presets if suites else lambda texts: {}
    options = read_command("answer", AnswerOptions, __doc__, arguments, presets=presets)
    answer_prompts(options, progress.Results(), suites.generate_rows if suites else None)


if __name__ == "__main__":
    run_command(main, AnswerOptions)

"""Lets the target answer prompts, to make training data: a drafter is trained on what its own target writes.

    specdec answer prompts=data/prompts_train.jsonl out=answers.jsonl target.name=targets/smollm2-135m

Each prompt gets one answer per temperature. Writes conversations to OUT and the settings to OUT.meta.json. After an
interruption the same command continues.

The rows hold the token ids too. engine=URL lets a server of vLLM or llama.cpp answer.
"""

from specdec.options.command_line import read_command

from specdec.core import progress
from specdec.measuring.answer_prompts import AnswerOptions, answer_prompts
from specdec.options.run_command import run_command


def main(arguments: list[str] | None = None) -> None:
    answer_prompts(read_command("answer", AnswerOptions, __doc__, arguments), progress.Results())


if __name__ == "__main__":
    run_command(main, AnswerOptions)

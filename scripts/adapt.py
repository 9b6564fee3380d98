"""Trains a drafter further on your traffic, and uses the new one only if it drafts better and has not forgotten.

    specdec adapt checkpoint=checkpoints/shipped/mtp traffic=traffic out=adapted
    specdec adapt checkpoint=user/name target.name=my-model prompts=prompts.jsonl out=adapted
    specdec adapt checkpoint=my-tuned-model source=user/its-base prompts=prompts.jsonl old= out=rescued
    specdec serve checkpoint=adapted

With prompts= the target answers them first. The newest conversations are held out, and the present head is judged on
them by replay, which also tells whether training is likely to pay. Then the head is trained on the other new rows
beside a share of old ones, and judged again. OUT stands for the head in use. OUT/export has it in the layout of the
checkpoint, OUT/adaptations what was measured and decided. After Ctrl-C the same command continues (docs/adapting.md).

A whole model's own MTP module is diagnosed first and last. A damaged one is repaired in OUT/export/0001, or comes from
source=, the model's base.
"""

from specdec.options.command_line import read_command

from specdec.core import progress
from specdec.options.run_command import run_command
from specdec.tools.adapt.adapt import AdaptOptions, run_adaptations
from train.settings import hydra_text


def main(arguments: list[str] | None = None) -> None:
    options = read_command("adapt", AdaptOptions, __doc__, arguments)
    hydra_text.check_options(options.training, "training.")
    run_adaptations(options, progress.Results())


if __name__ == "__main__":
    run_command(main, AdaptOptions)

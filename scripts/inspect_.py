"""Says what a model can do as a target: layers, heads by engine, chat template, quantisation, MTP module, memory.

    specdec inspect target.name=Qwen/Qwen3-8B
    specdec inspect target.name=my-tuned-model base=Qwen/Qwen3.5-9B out=facts.json
    specdec inspect target.name=model.gguf

It reads configuration, tokenizer and the headers of the weights, takes seconds, and loads nothing unless run=true. The
name is a folder, a name on the Hugging Face Hub, a folder of an adapter, or a GGUF file. The exit status is 0 for a
model that can be a target, 2 for one that cannot (refused, incomplete, damaged, an adapter, GGUF), and 1 for a mistake
in the command. out= writes the same facts as JSON.
"""

from specdec.options.command_line import read_command

import sys

from specdec.core import progress
from specdec.options.run_command import run_command
from specdec.target.model import Target
from specdec.tools.inspect.inspect import InspectOptions, inspect_model
from train.prepare.target_memory import count_training_memory

HEADS = ("eagle3", "mtp")  # of which the memory of training is counted


def main(arguments: list[str] | None = None) -> None:
    options = read_command("inspect", InspectOptions, __doc__, arguments)

    def count_memory(target: Target) -> dict[str, str]:
        return {head: count_training_memory(target, head, options.machine) for head in HEADS}

    sys.exit(inspect_model(options, count_memory, progress.Results()))


if __name__ == "__main__":
    run_command(main, InspectOptions)

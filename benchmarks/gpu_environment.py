"""Makes an environment for `make gpu` out of a Python that has torch with CUDA, without a network.

    python3 benchmarks/gpu_environment.py .venv-gpu gpu-wheels

The environment sees every package of the Python that runs this, also where that is an environment itself, and has the
wheels of the folder besides. torch and what it needs are never among these. Uses the standard library and pip only.
"""

import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

NEVER = ("torch-", "triton-", "nvidia_", "numpy-", "transformers-", "tokenizers-")  # those of the machine are used
NEEDED = (
    "torch transformers accelerate hydra omegaconf rich pytest xdist matplotlib psutil gguf pydantic pydantic_core "
    "xxhash filelock datasets"
).split()


def main() -> None:
    folder, wheels = Path(sys.argv[1]), Path(sys.argv[2])
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise SystemExit(f"error: {wheels} has no wheels. Run `make gpu-wheels` elsewhere, and copy the folder.")
    wrong = [file.name for file in files if file.name.startswith(NEVER)]
    if wrong:
        raise SystemExit(f"error: {', '.join(wrong)} would replace this machine's own. Remove them.")
    venv.EnvBuilder(clear=True, system_site_packages=True, symlinks=True).create(folder)
    inside = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    if subprocess.run([*install, "--target", str(inside), *map(str, files)]).returncode:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SystemExit(f"error: pip refuses these wheels: make gpu-wheels GPU_PYTHON_VERSION={version}")
    # An environment of an environment sees the packages of the Python below both, and not those of the one between
    outer = [path for path in site.getsitepackages() if Path(path).is_dir()]
    (inside / "outer.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in outer))
    code = f"import importlib.util as u; print(*[n for n in {NEEDED} if not u.find_spec(n)])"
    python = folder / "bin" / "python"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    if found:
        raise SystemExit(f"error: {', '.join(found)} are neither here nor in {wheels}. Add their wheels.")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main()

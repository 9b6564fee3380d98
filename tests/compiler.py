"""Whether functions can be compiled for the CPU on this machine: what decode.compile=true needs."""

import sysconfig
from pathlib import Path


def missing() -> str | None:
    """What torch's inductor would not find; None if it finds all."""
    from torch._inductor import cpp_builder, exc  # slow to import

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError, RuntimeError):
        return "a C++ compiler (g++ or clang++)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Python's headers (Python.h, in python3-dev or python3-devel)"
    return None


if __name__ == "__main__":
    if absent := missing():
        print(f"Not found: {absent}. Without it decode.compile=true is refused; everything else works.")

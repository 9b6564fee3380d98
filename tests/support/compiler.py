"""Checks whether this machine can compile functions for the CPU, which decode.compile=true needs."""

import sysconfig
from pathlib import Path


def missing() -> str | None:
    """The first requirement of torch's inductor that is absent here; None if all are present."""
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

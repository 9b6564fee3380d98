"""How a command runs and ends: one sentence for each mistake, and for what the machine refuses."""

import contextlib
import sys
import warnings
from collections.abc import Callable

from specdec.core import devices, files, progress
from specdec.core.closed_pipe import end_at_closed_pipe
from specdec.core.option_types import Options, list_fields
from specdec.options.command_types import MEMORY


def format_warning(message: Warning | str, *_: object, **__: object) -> str:
    """A warning as one line."""
    return f"warning: {message}\n"


def run_command(main: Callable[[], None], model: type[Options]) -> None:
    """Runs a command with the command line. Warnings are printed as lines.

    A user's mistake (ValueError), full memory, and what the system refuses (OSError) end in one sentence; Ctrl-C ends
    without a traceback.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    warnings.formatwarning = format_warning
    try:
        with end_at_closed_pipe(), contextlib.ExitStack() as stack:
            stack.callback(progress.close_display)
            main()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    except (RuntimeError, MemoryError) as error:
        description = devices.describe_out_of_memory(error)
        if description is None:
            raise
        raise SystemExit(f"error: {description}: {advise_less_memory(model)}.") from None
    except OSError as error:
        raise SystemExit(f"error: {files.describe_error(error)}") from None
    except KeyboardInterrupt as error:
        print(str(error) or "Stopped.", file=sys.stderr)
        raise SystemExit(130) from None


def advise_less_memory(model: type[Options]) -> str:
    """The advice which options of a command lower the memory that it needs."""
    fields = list_fields(model)
    sizes = [f"{name}=" for name, field in fields.items() if MEMORY in field.metadata]
    alternatives = ["target.dtype=bfloat16", "target.device=auto with more GPUs"] if "target.device" in fields else []
    smaller_sizes = f"lower {', '.join(sizes)}, or " if sizes else ""
    return smaller_sizes + "use " + ", or ".join([*alternatives, "a smaller or quantised target"])

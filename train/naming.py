"""Arguments of the library as options of a command, in messages."""

import contextlib
import re
from collections.abc import Iterator


@contextlib.contextmanager
def named(prefix: str) -> Iterator[None]:
    """Within, a ValueError that names an argument, `depth=`, names the option of this group instead, `decode.depth=`.

    A name that has a prefix already, and a value behind an equals sign, are left alone.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(r"(?<![\w.=/'\"-])([a-z]\w*)=", rf"{prefix}.\1=", str(error))) from error

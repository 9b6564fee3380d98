"""Arguments of the library as options of a command, in messages."""

import contextlib
import re
from collections.abc import Collection, Iterator


@contextlib.contextmanager
def named(prefix: str, *, only: Collection[str] | None = None) -> Iterator[None]:
    """Within, a ValueError that names an argument, `depth=`, names the option of this group instead, `decode.depth=`.

    A name that has a prefix already, and a value behind an equals sign, are left alone. only: the arguments that belong
    to this group; None: all.
    """

    def add_prefix(match: re.Match) -> str:
        name = match[1]
        return f"{prefix}.{name}=" if only is None or name in only else match[0]

    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(r"(?<![\w.=/'\"-])([a-z]\w*)=", add_prefix, str(error))) from error

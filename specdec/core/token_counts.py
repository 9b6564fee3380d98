"""The tokens that decoding reads and writes, told to a display of progress. Decoding needs no display's packages."""

from collections.abc import Callable

LISTENERS: list[Callable[..., None]] = []  # functions of `read` and `written`; core/progress.py adds its own


def count_tokens(*, read: int = 0, written: int = 0) -> None:
    """Tells all listeners of tokens that decoding has read or written."""
    for listener in LISTENERS:
        listener(read=read, written=written)

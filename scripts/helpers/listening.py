"""Where commands that serve listen."""

import socket

from train import progress


def listen(host: str, port: int) -> socket.socket:
    """Takes a port before anything large is loaded. Raises ValueError if that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ValueError(f"Nothing can listen at {host}:{port} ({error}): choose another port= or host=.") from error


def warn_if_open(host: str, port: int, what: str) -> None:
    if host not in ("127.0.0.1", "localhost", "::1"):
        progress.note(f"warning: anyone who reaches {host}:{port} can use this {what}: it asks for no password.")

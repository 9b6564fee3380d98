"""The share of this machine's CPU that neither this client nor the servers took, by Linux' /proc."""

import contextlib
import os
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.engines.client import is_local

PROC = Path("/proc")
LISTENING = "0A"  # state of a socket in /proc/net/tcp
# Programs that listen for a server elsewhere, such as one in a container: its own processes cannot be told
FORWARDERS = ("docker-proxy", "rootlessport", "ssh", "sshd", "kubectl")


@dataclass(frozen=True)
class CpuTimes:
    """Ticks of the CPU since the machine was started.

    total: ticks of all cores; busy: those of all programs; watched: those of this client and of the servers
    """

    total: int
    busy: int
    watched: int

    def find_others(self, earlier: "CpuTimes") -> float | None:
        """The share of other programs since earlier times; None within one tick."""
        total, busy, watched = (getattr(self, name) - getattr(earlier, name) for name in ("total", "busy", "watched"))
        return min(1.0, max(0, busy - watched) / total) if total > 0 else None


@dataclass(frozen=True)
class CpuMeter:
    """A reader of the times of the CPU. roots: ids of the client's and the servers' processes, which may have others"""

    roots: frozenset[int]

    @classmethod
    def watch(cls, urls: Sequence[str]) -> "CpuMeter | None":
        """A meter for servers; None where a process of theirs is on another machine, or cannot be found."""
        roots = {os.getpid()}
        for url in urls:
            servers = find_servers(url) if is_local(url) else set()
            if not servers:
                return None
            roots |= servers
        return cls(frozenset(roots))

    def read(self) -> CpuTimes:
        """The times now."""
        user, nice, system, idle, wait, *interrupts = map(int, (PROC / "stat").read_text().split("\n")[0].split()[1:9])
        busy = user + nice + system + sum(interrupts)
        return CpuTimes(busy + idle + wait, busy, self._count_watched())

    def _count_watched(self) -> int:
        """Ticks of the watched processes and all that they have started."""
        parents, ticks = {}, {}
        for number, fields in read_processes():
            parents[number], ticks[number] = int(fields[1]), sum(map(int, fields[11:15]))
        total = 0
        for number, own_ticks in ticks.items():
            ancestor = number
            while ancestor not in self.roots and ancestor in parents:
                ancestor = parents[ancestor]
            total += own_ticks * (ancestor in self.roots)
        return total


def read_processes() -> Iterator[tuple[int, list[str]]]:
    """(number, fields of /proc/N/stat behind the name) of each process: state, parent, .."""
    for path in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may have ended
            yield int(path.parent.name), path.read_text().rpartition(")")[2].split()


def find_servers(url: str) -> set[int]:
    """The processes that listen at the port of a URL; none where they cannot be told."""
    address = urllib.parse.urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    sockets = set()
    for path in (PROC / "net" / "tcp", PROC / "net" / "tcp6"):
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    owners = {int(path.name) for path in PROC.glob("[0-9]*") if not sockets.isdisjoint(read_links(path / "fd"))}
    names = {read_name(number) for number in owners}
    return owners if not names & {*FORWARDERS} else set()


def read_links(folder: Path) -> list[str]:
    """The targets of the links in a folder that this user may read; none of a process that has ended."""
    links = list[str]()
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                links.append(os.readlink(path))
    return links


def read_name(number: int) -> str:
    with contextlib.suppress(OSError):
        return (PROC / str(number) / "comm").read_text().strip()
    return ""

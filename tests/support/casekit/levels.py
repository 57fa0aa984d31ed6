"""What this process holds of the system: to see that a round leaves nothing behind.

Only what is this process's own is counted: other programs of the machine come and go meanwhile.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weightsync.fsm.errors import EnginePaused
from weightsync.handlers.gate import Gate

__all__ = ["Levels", "Usage", "eventually", "generates", "levels", "ours", "usage"]

_POOL = 8
"""How many idle threads a WeightSync keeps; they come when they are first needed."""

_LASTING = ("weightsync-rounds", "weightsync-observers", "weightsync-bridge")
_WATCHERS = "weightsync-silence"
"""Of these, the engines of a process keep a few that are idle, for all trainers together."""
_POOLED = ("weightsync", "weightsync-word", _WATCHERS)
"""Threads that are kept and used again, a few of each."""

_LINES = "weightsync-line"
"""One for each actor that is talked to, as long as its link or its lock is open."""


def eventually(ready: Callable[[], object], limit: float = 5.0) -> bool:
    """Whether it becomes true within ``limit`` seconds; for what nobody tells, such as closed descriptors."""
    end = time.monotonic() + limit
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def generates(gate: Gate) -> bool:
    """Whether generation is admitted now."""
    try:
        with gate.admit(limit=0.0):
            return True
    except EnginePaused:
        return False


@dataclass(frozen=True)
class Levels:
    """Counts at one moment.

    Args:
        descriptors: how many, by kind.
        threads: names of this library's threads, without those that live as long as a WeightSync.
        pool: its threads for whatever may block, which are kept and used again.
        lines: its threads that listen to actors.
        native: threads that Python did not start.
        children: process ids.
        segments: names and mappings in /dev/shm.
        sockets: paths of sockets.
    """

    descriptors: Counter[str]
    threads: tuple[str, ...]
    pool: int
    lines: int
    native: int
    children: frozenset[int]
    segments: frozenset[str]
    sockets: frozenset[str]

    def above(self, base: Levels, lines: int) -> list[str]:
        """What is more than it was, a line each; of threads that listen to actors, there may be ``lines``."""
        found = self._more(base)
        return found if self.lines <= lines else [*found, f"{self.lines} threads that listen to actors"]

    def _more(self, base: Levels) -> list[str]:
        more = (self.descriptors - base.descriptors) if _alone() else Counter()
        lines = [f"{count} more {kind}" for kind, count in more.items()]
        lines += [f"thread {name}" for name in self.threads]
        if self.pool > base.pool + _POOL:  # earlier tests may have left theirs, which stay
            lines.append(f"{self.pool} threads in the pool")
        if self.native > base.native and _alone():
            lines.append(f"{self.native - base.native} more native threads")
        lines += [f"child {pid}" for pid in self.children - base.children]
        lines += [f"segment {name}" for name in self.segments - base.segments]
        return lines + [f"socket {name}" for name in self.sockets - base.sockets]


@dataclass(frozen=True)
class Usage:
    """What a process holds in all, whoever in it took it: to be compared over many rounds.

    Args:
        process: its id.
        descriptors: how many, by kind.
        python: threads that Python started, without those of this library that are kept and used again.
        threads: how many, whoever started them, without those that are kept.
        megabytes: of memory that is really there.
    """

    process: int
    descriptors: Counter[str]
    python: int
    threads: int
    megabytes: float


def usage() -> Usage:
    """What this process holds now."""
    # A dummy is somebody else's thread that has been in Python once.
    known = [each for each in threading.enumerate() if not isinstance(each, threading._DummyThread)]
    names = Counter(thread.name for thread in known)
    kept = sum(min(names[name], _POOL) for name in _POOLED)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Usage(
        process=os.getpid(),
        descriptors=Counter(_kind(target) for target in _links(Path("/proc/self/fd"))),
        python=len(known) - kept,
        threads=sum(1 for _ in os.scandir("/proc/self/task")) - kept,
        megabytes=pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
    )


def ours() -> list[str]:
    """The names of this library's threads, without those that a process keeps for all of its engines."""
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("weightsync")]
    return [name for name in names if name != _WATCHERS or names.count(_WATCHERS) > _POOL]


def levels() -> Levels:
    """What this process holds now."""
    names = ours()
    inodes = set()
    kinds: Counter[str] = Counter()
    for target in _links(Path("/proc/self/fd")):
        kinds[_kind(target)] += 1
        if _kind(target) == "socket":
            inodes.add(target.partition(":")[2].strip("[]"))
    return Levels(
        descriptors=kinds,
        threads=tuple(sorted(name for name in names if name not in ("weightsync", _LINES, *_LASTING))),
        pool=names.count("weightsync"),
        lines=names.count(_LINES),
        native=sum(1 for _ in os.scandir("/proc/self/task")) - threading.active_count(),
        children=frozenset(_children()),
        segments=frozenset(_segments()),
        sockets=frozenset(_paths(inodes)),
    )


def _alone() -> bool:
    """Whether nobody else opens descriptors in this process at its own time, as Ray's driver does."""
    ray = sys.modules.get("ray")
    return ray is None or not ray.is_initialized()


def _kind(target: str) -> str:
    kind, _, rest = target.partition(":")
    return kind if rest else "file"


def _links(folder: Path) -> list[str]:
    found = []
    for entry in os.scandir(folder):
        try:
            found.append(str(Path(entry.path).readlink()))
        except OSError:  # the descriptor of the listing itself
            continue
    return found


def _children() -> list[int]:
    found: list[int] = []
    for entry in os.scandir("/proc/self/task"):
        with suppress(OSError):  # a thread that has ended meanwhile
            found += map(int, Path(entry.path, "children").read_text().split())
    return found


def _segments() -> list[str]:
    named = [path.name for path in Path("/dev/shm").iterdir() if f"_{os.getpid()}_" in path.name]
    lines = Path("/proc/self/maps").read_text().splitlines() if _alone() else []
    return named + [line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line]


def _paths(inodes: set[str]) -> list[str]:
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[7] for row in rows if len(row) > 7 and row[6] in inodes and row[7].startswith("/")]

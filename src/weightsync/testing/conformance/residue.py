"""What a process holds: counted before and after rounds, to find what they leave behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..engine_process import gauge
from .peers import Peer
from .rules import eventually

__all__ = ["Census", "census", "growth"]

_SEGMENTS = Path("/dev", "shm")


@dataclass(frozen=True, slots=True)
class Census:
    """Descriptors and threads of this process and of each engine's; processes and shared segments by name."""

    levels: tuple[tuple[int, int], ...]
    children: frozenset[str]
    segments: frozenset[str]
    threads: tuple[str, ...]


def census(peers: Iterable[Peer] = ()) -> Census:
    """Count."""
    gc.collect()
    return Census(
        (gauge(), *(peer.gauge() for peer in peers)),
        frozenset(child.name for child in multiprocessing.active_children()),
        frozenset(entry.name for entry in _SEGMENTS.iterdir()) if _SEGMENTS.is_dir() else frozenset(),
        tuple(sorted(thread.name for thread in threading.enumerate())),
    )


def growth(before: Census, count: Callable[[], Census], patience: float) -> str:
    """What is there now that was not there before, when everything had time to end; empty if nothing is."""
    eventually(lambda: not _more(before, count()), patience)
    return _more(before, count())


def _more(before: Census, now: Census) -> str:
    found = []
    for place, (then, level) in enumerate(zip(before.levels, now.levels, strict=True)):
        where = "" if place == 0 else f" in engine {place}"
        if level[0] > then[0]:
            found.append(f"{level[0] - then[0]} more descriptors{where}")
        if level[1] > then[1]:
            more = [name for name in now.threads if name not in before.threads] if place == 0 else []
            found.append(f"{level[1] - then[1]} more threads{where} {more or ''}".rstrip())
    found += [f"process {name}" for name in sorted(now.children - before.children)]
    found += [f"segment {name}" for name in sorted(now.segments - before.segments) if not _others(name)]
    return ", ".join(found)


def _others(segment: str) -> bool:
    """Whether another process has it mapped: then it is not ours, or not left behind."""
    own = str(os.getpid())
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and process.name != own:
            with suppress(OSError):
                if str(_SEGMENTS / segment) in (process / "maps").read_text(errors="replace"):
                    return True
    return False

"""What a round costs: processor seconds of a whole tree of processes, memory, and the unit of both ratios.

The processors' time of a process is read from its own clock, which counts user and system time of all its
threads, those that have ended included, in nanoseconds. ``/proc/PID/stat`` counts the same in hundredths of a
second, which is more than a whole round of engines that swap.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Cost", "Stopwatch", "Unit", "forget_peak", "memory_of", "own_memory", "tree"]

_PROCESS_CLOCK = 2  # what a process was scheduled for, see CPUCLOCK_SCHED in the kernel


@dataclass(frozen=True, slots=True)
class Cost:
    """What something took, in seconds."""

    cpu: float
    wall: float


def tree(root: int) -> set[int]:
    """``root`` and every process below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # the command, in parentheses, may have spaces and parentheses in it
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, open_ = {root}, [root]
    while open_:
        parent = open_.pop()
        below = {pid for pid, of in parents.items() if of == parent} - found
        found |= below
        open_ += below
    return found


def cpu_of(pid: int) -> float:
    """Seconds that ``pid`` has computed; 0 if it has ended."""
    with suppress(OSError):
        return time.clock_gettime((~pid << 3) | _PROCESS_CLOCK)
    return 0.0


class Stopwatch:
    """Measures a tree of processes that live longer than it runs.

    Args:
        root: the process above all others.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._before = {pid: cpu_of(pid) for pid in tree(root)}
        self._begun = time.perf_counter()

    def stop(self) -> Cost:
        """Since it was made. A process that began meanwhile counts whole."""
        wall = time.perf_counter() - self._begun
        after = {pid: cpu_of(pid) for pid in self._before.keys() | tree(self._root)}
        return Cost(sum(max(0.0, now - self._before.get(pid, 0.0)) for pid, now in after.items()), wall)


class Unit:
    """One copy of the same bytes by torch, tensor by tensor, on one thread, into memory that is warm."""

    def __init__(self, held: Mapping[str, torch.Tensor]) -> None:
        self._pairs = [(torch.empty_like(each), each) for each in held.values()]
        self.copy()

    def copy(self) -> Cost:
        """Copy, and say what it took."""
        cpu, begun = time.process_time(), time.perf_counter()
        for into, each in self._pairs:
            into.copy_(each)
        return Cost(time.process_time() - cpu, time.perf_counter() - begun)


def forget_peak(pids: Collection[int]) -> None:
    """Let the peaks of these processes begin at what they have now."""
    for pid in pids:
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def memory_of(pid: int) -> dict[str, int]:
    """Bytes: ``peak`` and ``now`` with all that is shared; ``share`` is its share of it, files apart."""
    found = _fields(Path(f"/proc/{pid}/status")) | _fields(Path(f"/proc/{pid}/smaps_rollup"))
    share = found.get("Pss_Anon", 0) + found.get("Pss_Shmem", 0)
    return {"peak": found.get("VmHWM", 0), "now": found.get("VmRSS", 0), "share": share}


def _fields(path: Path) -> dict[str, int]:
    fields = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, rest = line.partition(":")
            words = rest.split()
            if len(words) == 2 and words[1] == "kB":
                fields[name] = int(words[0]) * 1024
    return fields


def own_memory() -> dict[str, int]:
    """The same of this process."""
    return memory_of(os.getpid())

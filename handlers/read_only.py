"""Memory of this process that nobody may write: where it lies, by the system's own account.

An engine that aliases has its weights in memory that others share, which is mapped for reading alone. Who
makes something new of such an engine has to see that, whoever has put the weights there: to write ends the
process.
"""

from __future__ import annotations

import bisect
import contextlib
from pathlib import Path
from typing import final

__all__ = ["ReadOnly"]


@final
class ReadOnly:
    """What is shared and read-only now. Without such an account, as on other systems, nothing is."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                where, access = line.split(maxsplit=2)[:2]
                if access == "r--s":
                    start, end = where.split("-")
                    self._starts.append(int(start, 16))
                    self._ends.append(int(end, 16))

    def __contains__(self, address: object) -> bool:
        """Whether this address lies in it."""
        if not isinstance(address, int):
            return False
        place = bisect.bisect_right(self._starts, address) - 1
        return place >= 0 and address < self._ends[place]

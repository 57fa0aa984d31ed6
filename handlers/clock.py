"""The clock of the machine we run on."""

from __future__ import annotations

import time

__all__ = ["SystemClock"]


class SystemClock:
    """``time.monotonic`` for limits, ``time.time`` for log lines."""

    def now(self) -> float:
        """Seconds; only differences mean anything."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since 1970."""
        return time.time()

"""A clock that is turned by hand."""

from __future__ import annotations

__all__ = ["HandClock"]


class HandClock:
    """Time stands still until somebody moves it."""

    def __init__(self, start: float = 0.0, wall: float = 1_700_000_000.0) -> None:
        self._now = start
        self._offset = wall - start

    def now(self) -> float:
        """Seconds since the clock's own beginning."""
        return self._now

    def wall(self) -> float:
        """Seconds since 1970, as the clock has it."""
        return self._now + self._offset

    def advance_to(self, moment: float) -> None:
        """Turn the clock forward to ``moment``; it never goes back."""
        self._now = max(self._now, moment)

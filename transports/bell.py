"""A bell: whoever waits for one of many things sleeps until it rings, and then looks.

A sender waits for engines that let go, for one that fails, for the round to move on and for an abort, all at
once. Each of these rings the same bell. Nobody holds a lock while looking, so that what is looked at may have
locks of its own, and whoever rings may hold any.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import final

__all__ = ["Bell"]


@final
class Bell:
    """Wakes its waiters. The order is: note ``rings``, look, and sleep with ``rung`` if there is nothing.

    What happens after the look rings the bell once more than was noted, so that the sleep does not begin.
    """

    __slots__ = ("_condition", "_rings")

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._rings = 0

    @property
    def rings(self) -> int:
        """How often it has rung so far."""
        return self._rings

    def ring(self) -> None:
        """Wake everybody who sleeps."""
        with self._condition:
            self._rings += 1
            self._condition.notify_all()

    def wait(self, ready: Callable[[], object], seconds: float) -> None:
        """Sleep until it is ``ready``, looking again after each ring, or until ``seconds`` went by."""
        end = time.monotonic() + seconds
        while True:
            noted = self._rings
            if ready() or not self.rung(noted, end - time.monotonic()):
                return

    def rung(self, noted: int, seconds: float) -> bool:
        """Sleep until it has rung more often than ``noted``; False if ``seconds`` went by first."""
        with self._condition:
            # threading refuses to sleep longer than TIMEOUT_MAX, which no round does
            return self._condition.wait_for(
                lambda: self._rings != noted, min(max(seconds, 0.0), threading.TIMEOUT_MAX)
            )

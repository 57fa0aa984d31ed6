"""An interrupt of the main thread at any instant, as Ctrl-C is one: by a signal, from a timer."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Self

__all__ = ["Interrupt", "Interrupter"]


class Interrupt(KeyboardInterrupt):
    """Ours, so that nobody takes it for the user's."""


class Interrupter:
    """Interrupts the main thread once, after a given time, unless the work was done before.

    A context, which has the timer's signal (SIGALRM) for itself.
    """

    def __init__(self) -> None:
        self._armed = False
        self._before: object = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGALRM, self.handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGALRM, self._before)  # type: ignore[arg-type]

    def during(self, work: Callable[[], object], delay: float) -> bool:
        """Do ``work``, interrupted after ``delay`` seconds; whether it was."""
        tracer = sys.gettrace()  # of a debugger, or for coverage: it keeps locks that no interrupt may leave
        sys.settrace(None)
        try:
            self._armed = True
            signal.setitimer(signal.ITIMER_REAL, delay)
            work()
            self._armed = False
        except Interrupt:
            return True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            sys.settrace(tracer)
        return False

    def handle(self, *_: object) -> None:
        """The signal's handler."""
        if self._armed:
            self._armed = False
            raise Interrupt

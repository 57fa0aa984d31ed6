"""An engine's own limit: what happens to a session whose trainer says nothing any more.

A trainer can be killed, stopped or cut off while an engine is paused for it. The engine then has to leave the
session by itself. Every word of the trainer starts the count anew, and while the engine works on a word, its
own slowness is not the trainer's silence.

One thread watches all sessions of a process. It sleeps until the next limit as it was when it last looked,
and then looks again: neither a word nor the end of a session wakes it, nor the next session, which comes
every few seconds, while somebody waits. When it finds no session, it ends.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from ..fsm.engine_table import Session
from .workers import Workers

__all__ = ["Silence"]


class Silence:
    """Calls ``late(session)``, on a thread of its own, when nothing was heard of a session for its limit."""

    def __init__(self, late: Callable[[Session], None]) -> None:
        self.late = late
        self._session: Session | None = None
        self._limit = self._due = 0.0
        self._words = 0

    def watch(self, session: Session, limit: float) -> None:
        """From now on, this is the session; ``limit`` is in seconds."""
        with _WATCH.changed:
            self._session, self._limit, self._words = session, limit, 0
            self._count_anew()

    def heard(self, session: Session) -> None:
        """The trainer said something in this session. Of any other session it is no word."""
        with _WATCH.changed:
            if session == self._session:
                self._count_anew()

    @contextmanager
    def word(self, session: Session) -> Iterator[None]:
        """The engine works on a word of the trainer: the count starts when it is done."""
        with _WATCH.changed:
            mine = session == self._session
            self._words += mine
        try:
            yield
        finally:
            with _WATCH.changed:
                if mine and session == self._session:
                    self._words -= 1
                    self._count_anew()

    def stop(self, session: Session) -> None:
        """The session is over."""
        with _WATCH.changed:
            if session == self._session:
                self._session = None

    def look(self, now: float) -> tuple[Session | None, float]:
        """The session that is too late, which ends with that; and when to look again. For who watches."""
        session = self._session
        if session is None:
            return None, _NEVER
        if now < self._due:
            return None, self._due
        if self._words:
            return None, now + max(self._limit, 1.0)  # the end of the word moves the end of the session
        self._session = None
        return session, _NEVER

    def _count_anew(self) -> None:
        self._due = time.monotonic() + self._limit
        _WATCH.until(self, self._due)


_NEVER = float("inf")


@final
class _Watch:
    """The thread that watches, which is there as long as there are sessions."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Held by whoever reads or changes any of this, or of a ``Silence``."""
        self._watched: weakref.WeakSet[Silence] = weakref.WeakSet()
        self._looks: float | None = None
        self._workers = Workers("weightsync-silence", spare=4)

    def until(self, silence: Silence, due: float) -> None:
        """Look at this one at ``due`` at the latest."""
        self._watched.add(silence)
        if self._looks is None:
            self._looks = due
            self._workers.submit(self._run)
        elif due < self._looks:
            self.changed.notify_all()

    def _run(self) -> None:
        with self.changed:
            while self._look() and self._looks is not None:
                self.changed.wait(min(self._looks - time.monotonic(), threading.TIMEOUT_MAX))

    def _look(self) -> bool:
        """Whether there is a session, of which something will have to be seen."""
        now, next_look = time.monotonic(), _NEVER
        for silence in list(self._watched):
            late, again = silence.look(now)
            if late is not None:
                self._workers.submit(silence.late, late)
            if again == _NEVER:
                self._watched.discard(silence)
            next_look = min(next_look, again)
        self._looks = next_look if next_look < _NEVER else None
        return self._looks is not None


_WATCH = _Watch()

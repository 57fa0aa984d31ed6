"""An engine's own limit: what happens to a session whose trainer says nothing any more.

A trainer can be killed, stopped or cut off while an engine is paused for it. The engine then has to leave the
session by itself. Every word of the trainer starts the count anew, and while the engine works on a word, its
own slowness is not the trainer's silence.

One thread watches one session and is free again with its end. It is one of a pool: an engine opens a session
every few seconds, while somebody waits, and to start a thread means to wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..fsm.engine_table import Session
from .workers import Workers

__all__ = ["Silence"]

_WATCHERS = Workers("weightsync-silence", spare=4)


class Silence:
    """Calls ``late(session)``, on its own thread, when nothing was heard of a session for its limit."""

    def __init__(self, name: str, late: Callable[[Session], None]) -> None:
        self._name, self._late = name, late
        self._changed = threading.Condition()
        self._session: Session | None = None
        self._limit = self._due = 0.0
        self._words = 0

    def watch(self, session: Session, limit: float) -> None:
        """From now on, this is the session; ``limit`` is in seconds."""
        with self._changed:
            self._session, self._limit, self._words = session, limit, 0
            self._due = time.monotonic() + limit
            self._changed.notify_all()
        _WATCHERS.submit(self._wait, session)

    def heard(self, session: Session) -> None:
        """The trainer said something in this session. Of any other session it is no word."""
        with self._changed:
            if session == self._session:
                self._due = time.monotonic() + self._limit

    @contextmanager
    def word(self, session: Session) -> Iterator[None]:
        """The engine works on a word of the trainer: the count starts when it is done."""
        with self._changed:
            mine = session == self._session
            self._words += mine
        try:
            yield
        finally:
            with self._changed:
                if mine and session == self._session:
                    self._words -= 1
                    now, due = time.monotonic(), self._due
                    self._due = now + self._limit
                    if now >= due:  # who watches has noticed, and waits for the word to end
                        self._changed.notify_all()

    def stop(self, session: Session) -> None:
        """The session is over."""
        with self._changed:
            if session == self._session:
                self._session = None
                self._changed.notify_all()

    def _wait(self, session: Session) -> None:
        with self._changed:
            while session == self._session:
                left = self._due - time.monotonic()
                if left <= 0 and not self._words:
                    self._session = None
                    break
                self._changed.wait(left if left > 0 else None)  # of a due that moves it hears soon enough
            else:
                return
        self._late(session)

"""An engine's own limit: what happens to a session whose trainer says nothing any more.

A trainer can be killed, stopped or cut off while an engine is paused for it. The engine then has to leave the
session by itself. Every word of the trainer starts the count anew, and while the engine works on a word, its
own slowness is not the trainer's silence.

One thread watches all sessions of a process. It sleeps until the next limit as it was when it last looked,
and then looks again: neither a word nor the end of a session wakes it, nor the next session, which comes
every few seconds, while somebody waits. When it finds no session, it ends.
"""

from __future__ import annotations

import os
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
        """From now on, this is the session; ``limit`` is in seconds.

        Raises:
            RuntimeError: there is no thread to watch it, so it is not watched.
        """
        with _WATCH.changed:
            self._session, self._limit, self._words = session, limit, 0
            try:
                self._count_anew()
            except RuntimeError:
                self._session = None
                raise

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

    def look(self, now: float, tell: Callable[[Silence, Session], bool]) -> float:
        """When to look again. A session that is too late ends, if it can be told. For who watches."""
        session = self._session
        if session is None:
            return _NEVER
        if now < self._due:
            return self._due
        if self._words:
            return now + max(self._limit, 1.0)  # the end of the word moves the end of the session
        if not tell(self, session):
            return now + _AGAIN
        self._session = None
        return _NEVER

    def _count_anew(self) -> None:
        self._due = time.monotonic() + self._limit
        _WATCH.until(self, self._due)


_NEVER = float("inf")
_AGAIN = 0.5
"""Seconds after which to try again, if there was no thread for a session that is over."""


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
        """Look at this one at ``due`` at the latest.

        Raises:
            RuntimeError: nobody is watching, and no thread can be started.
        """
        self._watched.add(silence)
        if self._looks is None:
            self._workers.submit(self._run)
            self._looks = due
        elif due < self._looks:
            self.changed.notify_all()

    def forked(self) -> None:
        """In a forked child nobody watches yet, and sessions of the parent are the parent's."""
        self.changed, self._looks = threading.Condition(), None
        self._watched = weakref.WeakSet()

    def _run(self) -> None:
        with self.changed:
            try:
                while (looks := self._look()) is not None:
                    self.changed.wait(min(looks - time.monotonic(), threading.TIMEOUT_MAX))
            finally:
                self._looks = None  # whatever ended it, the next session finds that nobody watches

    def _look(self) -> float | None:
        """When to look again; None if there is no session."""
        now, next_look = time.monotonic(), _NEVER
        for silence in list(self._watched):
            again = silence.look(now, self._told)
            if again == _NEVER:
                self._watched.discard(silence)
            next_look = min(next_look, again)
        self._looks = next_look if next_look < _NEVER else None
        return self._looks

    def _told(self, silence: Silence, session: Session) -> bool:
        try:
            self._workers.submit(silence.late, session)
        except RuntimeError:  # no thread can be started
            return False
        return True


_WATCH = _Watch()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_WATCH.forked)

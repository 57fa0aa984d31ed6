"""A lock keeper that counts what is asked of it, and fails when it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from weightsync.fsm.errors import LockError
from weightsync.fsm.lock import Closed, Granted, LockKeeper, LockStatus, Renewed, Ticket, Waiting
from weightsync.handlers.lock import LocalLock

__all__ = ["CountingLock", "taken_by"]


def taken_by(lock: LockKeeper, limit: float) -> bool:
    """Whether somebody gets the lock within ``limit`` seconds; it is given back at once.

    A keeper that cannot be reached is asked again: it may be about to start anew.
    """
    end = time.monotonic() + limit
    try:
        while True:
            try:
                ticket = lock.request("somebody else", "probe")
                answer = lock.wait(ticket, max(0.0, end - time.monotonic()))
                lock.release(ticket, answer.epoch if isinstance(answer, Granted) else None)
            except LockError:
                if time.monotonic() > end:
                    raise
            else:
                return isinstance(answer, Granted)
    finally:
        close = getattr(lock, "close", None)
        if close is not None:
            close()


class CountingLock:
    """A ``LockKeeper`` around a ``LocalLock``, which stays reachable as ``inner``.

    Args:
        lease: of the lock.
    """

    def __init__(self, lease: float = 2.0) -> None:
        self.inner = LocalLock(lease=lease)
        self.words: list[str] = []
        self.granted: list[int] = []
        self.released: list[int | None] = []
        self.held_until = 0.0
        self.waited: list[Waiting] = []
        self.waiting = threading.Event()
        self.dead = False
        self.before: dict[str, Callable[[], None]] = {}
        self.after: dict[str, Callable[[], None]] = {}

    @property
    def lease(self) -> float:
        """Seconds for which a grant is good."""
        return self.inner.lease

    def request(self, owner: str, round: str, *, ticket_id: str | None = None) -> Ticket:
        """Join the queue."""
        self._asked("request")
        return self.inner.request(owner, round, ticket_id=ticket_id)

    def enter(self, ticket: Ticket, limit: float) -> Granted | Waiting:
        """Join the queue, and wait."""
        self._asked("enter")
        self.inner.request(ticket.owner, ticket.round, ticket_id=ticket.id)
        return self._wait(ticket, limit)

    def wait(self, ticket: Ticket, limit: float) -> Granted | Waiting:
        """Block until granted."""
        self._asked("wait")
        return self._wait(ticket, limit)

    def _wait(self, ticket: Ticket, limit: float) -> Granted | Waiting:
        asked = time.monotonic()
        if limit:
            self.waiting.set()
        answer = self.inner.wait(ticket, limit)
        if isinstance(answer, Granted):
            self.granted.append(answer.epoch)
            self.held_until = answer.end(asked)
        else:
            self.waited.append(answer)
        self._answered("wait")
        return answer

    def renew(self, ticket: Ticket, epoch: int) -> Renewed:
        """Count the lease anew."""
        self._asked("renew")
        asked = time.monotonic()
        answer = self.inner.renew(ticket, epoch)
        self.held_until = answer.end(asked)
        return answer

    def release(self, ticket: Ticket, epoch: int | None) -> Closed:
        """Give the lock back."""
        self._asked("release")
        closed = self.inner.release(ticket, epoch)
        self.released.append(epoch)
        self._answered("release")
        return closed

    def cancel(self, ticket: Ticket) -> Closed:
        """Give up a request."""
        self._asked("cancel")
        return self.inner.cancel(ticket)

    def status(self) -> LockStatus:
        """Who holds the lock and who waits."""
        self._asked("status")
        return self.inner.status()

    @property
    def holder(self) -> str | None:
        """Who holds it, by the books of the keeper; asked beside it, so that a dead keeper answers too."""
        holder = self.inner.status().holder
        return holder.owner if holder is not None else None

    def taken_by_another(self, limit: float = 1.0) -> bool:
        """Whether somebody else gets it within ``limit`` seconds; it is given back at once."""
        return taken_by(self.inner, limit)

    def _asked(self, word: str) -> None:
        self.words.append(word)
        if self.dead:
            raise LockError(f"the keeper is dead: nobody answers {word!r}")
        if word in self.before:
            self.before[word]()

    def _answered(self, word: str) -> None:
        if word in self.after:
            self.after[word]()

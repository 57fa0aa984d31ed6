"""The lock's service in the simulated world: a real ``LockBook``, and the questions that stand before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..fsm.lock import LockBook
from ..fsm.tickets import Granted, Notice

if TYPE_CHECKING:
    from .world import World

__all__ = ["Keeper"]

_TICK = 1e-6


class Keeper:
    """One process. It tells whoever asked that the lock was granted, as soon as it is."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.standing: dict[str, tuple[float, Callable[[Granted], None]]] = {}
        self.alive = True
        self._alarm = 0.0

    def move(self, moved: tuple[LockBook, tuple[Notice, ...]]) -> tuple[Notice, ...]:
        """Take a move of the book over."""
        self._world.book, notices = moved
        self._tell()
        self._watch()
        return notices

    def stand(self, ticket_id: str, answer: Callable[[Granted], None]) -> None:
        """A question that stands until the lock is granted to its ticket."""
        self.standing[ticket_id] = (self._now, answer)

    def forget(self, ticket_id: str) -> None:
        """Nobody waits for that answer any more."""
        self.standing.pop(ticket_id, None)

    def restart(self) -> None:
        """Its host died; another one goes on above the epoch, and not before every lease has ended."""
        lease, epoch = self._world.book.lease, self._world.book.epoch
        self._world.book = LockBook.restore(epoch, lease=lease, not_before=self._now + lease)
        self.standing.clear()
        self._watch()

    def die(self) -> None:
        """Its host died, and nobody goes on: whoever asks hears nothing any more."""
        self.alive = False
        self.standing.clear()
        self._world.dead.add("lock")

    def _tell(self) -> None:
        holder = self._world.book.holder
        if holder is not None and holder.ticket.id in self.standing:
            since, answer = self.standing.pop(holder.ticket.id)
            remaining, waited = holder.until - self._now, self._now - since
            answer(Granted(holder.epoch, remaining, holder.ticket, waited=waited))

    def _watch(self) -> None:
        """Set an alarm for the next thing that time brings to somebody who waits."""
        book = self._world.book
        due = book.next_expiry() if book.queue else None
        if due is None or self._now <= self._alarm <= due:
            return
        self._alarm = due
        self._world.at(max(0.0, due - self._now) + _TICK, self._look, to="lock", label="lease", alarm=True)

    def _look(self) -> None:
        self._alarm = 0.0
        self.move(self._world.book.expire(self._now))

    @property
    def _now(self) -> float:
        return self._world.clock.now()

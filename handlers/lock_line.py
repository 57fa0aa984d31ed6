"""A lock keeper's words over a line: to ask it takes one short question instead of a call by Ray.

[word, ticket id, owner, round, argument ...]  ->  [kind of answer, values ...]
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from ..fsm.lock import Closed, Granted, LockError, Notice, Renewed, Ticket, Waiting
from ..fsm.tickets import Ending, Holder
from .futures import begun
from .line import Line

__all__ = ["WORDS", "Keeper", "answered", "asked", "carrier"]

WORDS = frozenset({"enter", "wait", "renew", "release", "cancel"})
"""What can be said over the line."""


class Keeper(Protocol):
    """What the keeper does at once, on any thread, and what it does on its event loop."""

    def granted(self, ticket: Ticket, *, join: bool) -> Granted | None:
        """The grant, if nothing has to be waited for."""

    def renewed(self, ticket: Ticket, epoch: int) -> Notice:
        """Count the lease anew."""

    def released(self, ticket: Ticket, epoch: int) -> Notice:
        """Give the lock back."""

    def cancelled(self, ticket: Ticket) -> Notice:
        """Give up a request."""

    async def wait(self, ticket: Ticket, limit: float) -> Granted | Waiting:
        """Answer when the lock is this ticket's, or after ``limit`` seconds."""


def carrier(keeper: Keeper, loop: asyncio.AbstractEventLoop) -> Callable[[list[Any]], object]:
    """What carries words out, on a thread of the line's. What has to wait does so on the keeper's event loop.

    Nothing here waits: for an answer that takes time, a future is handed back.
    """

    async def in_time(ticket: Ticket, limit: float) -> list[Any]:
        return _told(await keeper.wait(ticket, limit))

    def carry_out(said: list[Any]) -> object:
        word, name, owner, round, *rest = said
        ticket = Ticket(name, owner, round)
        match word:
            case "enter" | "wait":
                granted = keeper.granted(ticket, join=word == "enter")
                if granted is None:
                    return asyncio.run_coroutine_threadsafe(in_time(ticket, *rest), loop)
                return _told(granted)
            case "renew":
                return _told(keeper.renewed(ticket, *rest))
            case "release":
                return _told(keeper.released(ticket, *rest))
            case "cancel":
                return _told(keeper.cancelled(ticket))
        raise LockError(f"the keeper of a lock knows no word {word!r}; update its weightsync")

    return carry_out


def asked(line: Line, word: str, ticket: Ticket, *args: float) -> Future[Any] | None:
    """Say a word over the line; None if it has to go by Ray. Fails with ``Kept`` or ``Broken``."""
    answer = begun()

    def done(told: Any, error: Exception | None) -> None:
        if error is None:
            answer.set_result(told)
        else:
            answer.set_exception(error)

    said = line.ask([word, ticket.id, ticket.owner, ticket.round, *args], done)
    return answer if said else None


def _told(notice: Notice) -> list[Any]:
    match notice:
        case Granted():
            return ["granted", notice.epoch, notice.remaining, notice.waited]
        case Renewed():
            return ["renewed", notice.epoch, notice.remaining]
        case Waiting():
            holder = notice.holder
            known = holder and [holder.owner, holder.round, holder.epoch, holder.since, holder.seconds]
            return ["waiting", known, notice.place]
        case Closed():
            return ["closed", notice.how.name, notice.epoch, notice.again]


def answered(told: Any, ticket: Ticket) -> Notice:
    """What an answer means, about this ticket.

    Raises:
        LockError: nothing.
    """
    match told:
        case ["granted", int(epoch), float(remaining), float(waited)]:
            return Granted(epoch, remaining, ticket, waited)
        case ["renewed", int(epoch), float(remaining)]:
            return Renewed(epoch, remaining, ticket)
        case ["waiting", None, int(place)]:
            return Waiting(None, place, ticket)
        case ["waiting", [str(owner), str(round), int(epoch), float(since), float(seconds)], int(place)]:
            return Waiting(Holder(owner, round, epoch, since, seconds), place, ticket)
        case ["closed", str(how), int() | None as epoch, bool(again)]:
            return Closed(Ending[how], epoch, ticket, again)
    raise LockError(f"{ticket}: the keeper's answer {told!r} means nothing")

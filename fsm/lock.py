"""The lock as a value: who holds it, who waits, and what each of them is told.

One round at a time may move weights into a set of engines. Whoever wants to asks the lock's keeper, gets a
*ticket*, and waits. Tickets are served in the order in which they came. A grant carries an *epoch*, one more
than the last, and the epoch travels on everything the holder sends, so that whoever comes late with an
older one is recognised and refused.

**Every request ends once.** A ticket waits, may be granted, and is closed: released, cancelled, handed back
(the grant and a cancel crossed), expired or abandoned. The closing answer is kept as a tombstone. Asking
again repeats it, marked ``again``, because it is still true; a grant never follows it, even if the request
arrives after its own cancel. Only the latest ``TOMBSTONES`` are kept: an older ticket is unknown, and its id,
being random, does not come back.

**Nobody can keep the lock by dying.** A grant is a lease: it ends unless it is renewed, and the next waiter
is granted at that moment. A waiter that has not asked for one lease is taken for dead and closed, so that
the lock is not handed to nobody.

**The holder's end comes first.** The keeper counts a lease from the moment at which it granted or renewed.
Clocks of two machines cannot be compared, so an answer does not say until when but how many seconds *remain*
as of the answer. The holder counts from before it asked::

    asked = clock()                         # the holder's own clock
    answer = keeper.wait(ticket, limit)
    end = answer.end(asked)                 # never later than the keeper's end

The question cannot have arrived before it was asked, so ``asked`` plus the time for which the keeper let the
question stand (``waited``) plus ``remaining`` is never later than the keeper's own end, however slow the way
there or back. Renew each third of a lease: two renewals may then get lost without losing the lock.

**A keeper may restart.** It writes the epoch down before it grants it, and ``restore`` goes on above it. The
holder of before is unknown to the new keeper, and is told so. A keeper whose holders outlive it also passes
``not_before``, one lease ahead, so that the forgotten holder's lease has ended before the next one begins.

Nothing in here reads a clock, waits or knows a thread. Every method takes the time and returns the next book
with the notices that follow from it; a method that refuses raises, and then nothing has changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .tickets import (
    DEFAULT_LEASE,
    Closed,
    Ending,
    Granted,
    Holder,
    LockError,
    LockKeeper,
    LockStatus,
    NotHolder,
    Notice,
    Renewed,
    StaleEpoch,
    Ticket,
    TicketClosed,
    UnknownTicket,
    Waiting,
    answer_to,
)

__all__ = [
    "DEFAULT_LEASE",
    "TOMBSTONES",
    "Closed",
    "Ending",
    "Grant",
    "Granted",
    "Holder",
    "LockBook",
    "LockError",
    "LockKeeper",
    "LockStatus",
    "NotHolder",
    "Notice",
    "Renewed",
    "StaleEpoch",
    "Ticket",
    "TicketClosed",
    "UnknownTicket",
    "Waiter",
    "Waiting",
    "answer_to",
]

TOMBSTONES = 256
"""How many closed tickets a book remembers."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The lock is this ticket's until then, on the keeper's clock."""

    ticket: Ticket
    epoch: int
    until: float
    since: float


@dataclass(frozen=True, slots=True)
class Waiter:
    """A ticket in the queue, which is taken for dead at ``until`` unless it asks before."""

    ticket: Ticket
    until: float


@dataclass(frozen=True, slots=True)
class LockBook:
    """The state of one lock."""

    lease: float = DEFAULT_LEASE
    epoch: int = 0
    holder: Grant | None = None
    queue: tuple[Waiter, ...] = ()
    closed: tuple[Closed, ...] = ()
    not_before: float = -math.inf  # no grant earlier than this
    ceiling: int | None = None  # no grant with a higher epoch: the keeper has not written it down yet

    def __post_init__(self) -> None:
        if not 0 < self.lease < math.inf:
            raise LockError(f"a lease is a positive number of seconds, not {self.lease}")

    @classmethod
    def restore(cls, epoch: int, *, lease: float = DEFAULT_LEASE, not_before: float = -math.inf) -> LockBook:
        """A book after a restart: nobody holds, nobody waits, and the next grant is above ``epoch``."""
        return cls(lease=lease, epoch=epoch, not_before=not_before)

    # -- what tickets ask ------------------------------------------------------------------------------

    def request(self, ticket: Ticket, now: float) -> tuple[LockBook, tuple[Notice, ...]]:
        """Join the queue; the lock is granted at once if it is free. The same request again is a poll."""
        book, notices = self.expire(now)
        if book.find(ticket.id) is None:
            queue = (*book.queue, Waiter(ticket, now + book.lease))
            book, _ = replace(book, queue=queue)._grant(now)
        book.recognise(ticket)
        return book, book._with_answer(ticket.id, notices, now)

    def poll(self, ticket_id: str, now: float) -> tuple[LockBook, tuple[Notice, ...]]:
        """Ask how it stands. Shows the keeper that the waiter is alive; does not extend a grant."""
        book, notices = self.expire(now)
        book._known(ticket_id)
        queue = tuple(
            replace(waiter, until=now + book.lease) if waiter.ticket.id == ticket_id else waiter
            for waiter in book.queue
        )
        return replace(book, queue=queue), book._with_answer(ticket_id, notices, now)

    def renew(self, ticket_id: str, epoch: int, now: float) -> tuple[LockBook, tuple[Notice, ...]]:
        """Count the holder's lease anew. Too late is too late, even if nobody else wants the lock."""
        book, notices = self.expire(now)
        ticket = book._known(ticket_id)
        grant = book.holder
        if grant is None or grant.ticket.id != ticket_id:
            raise NotHolder(f"{ticket} cannot renew: {book._standing(ticket_id)}; stop, and request anew")
        if grant.epoch != epoch:
            raise StaleEpoch(f"{ticket} cannot renew epoch {epoch}: {book._standing(ticket_id)}")
        book = replace(book, holder=replace(grant, until=now + book.lease))
        return book, (*notices, Renewed(epoch, book.lease, ticket))

    def release(self, ticket_id: str, epoch: int | None, now: float) -> tuple[LockBook, tuple[Notice, ...]]:
        """Close a ticket: give the lock back, or, without an epoch, cancel whatever the ticket has become."""
        book, notices = self.expire(now)
        ticket = book._known(ticket_id)
        standing = book._standing(ticket_id)
        tombstone = book._tombstone(ticket_id)
        holds = book.holder is not None and book.holder.ticket.id == ticket_id
        granted = book.epoch if holds else tombstone.epoch if tombstone is not None else None
        if epoch is not None and not holds and tombstone is None:
            raise NotHolder(f"{ticket} cannot release: {standing}; cancel it instead")
        if epoch not in (None, granted):
            raise StaleEpoch(f"{ticket} cannot release epoch {epoch}: {standing}")
        if tombstone is not None:
            return book, book._with_answer(ticket_id, notices, now)
        given = Ending.HANDED_BACK if epoch is None else Ending.RELEASED
        how = given if holds else Ending.CANCELLED
        book, more = book._close((Closed(how, granted, ticket),), now)
        return book, (*notices, *more)

    def cancel(self, ticket: Ticket, now: float) -> tuple[LockBook, tuple[Notice, ...]]:
        """Close a ticket whatever has become of it, also one that never arrived, in case it still does."""
        if self.find(ticket.id) is not None:
            self.recognise(ticket)
            return self.release(ticket.id, None, now)
        book, notices = self.expire(now)
        book, more = book._close((Closed(Ending.CANCELLED, None, ticket),), now)
        return book, (*notices, *more)

    # -- what time brings ------------------------------------------------------------------------------

    def expire(self, now: float) -> tuple[LockBook, tuple[Notice, ...]]:
        """Close what is over by now, and grant the lock to the next if that made it free."""
        ended = tuple(
            Closed(Ending.ABANDONED, None, waiter.ticket) for waiter in self.queue if waiter.until <= now
        )
        if self.holder is not None and self.holder.until <= now:
            ended = (Closed(Ending.EXPIRED, self.holder.epoch, self.holder.ticket), *ended)
        return self._close(ended, now)

    def next_expiry(self) -> float | None:
        """When to call ``expire`` next, if nobody asks before."""
        times = [waiter.until for waiter in self.queue]
        if self.holder is not None:
            times.append(self.holder.until)
        elif self.queue and not self.exhausted():
            times.append(self.not_before)
        return min(times, default=None)

    def exhausted(self) -> bool:
        """Nothing can be granted before the keeper has written a higher epoch and raised the ceiling."""
        return self.ceiling is not None and self.epoch >= self.ceiling

    # -- what anybody may see --------------------------------------------------------------------------

    def find(self, ticket_id: str) -> Ticket | None:
        """The ticket of this id, whether it holds, waits or is closed."""
        live = [waiter.ticket for waiter in self.queue]
        if self.holder is not None:
            live.append(self.holder.ticket)
        over = [closed.ticket for closed in self.closed]
        return next((ticket for ticket in (*live, *over) if ticket.id == ticket_id), None)

    def recognise(self, ticket: Ticket) -> None:
        """Refuse a ticket that carries a known id under another name."""
        known = self._known(ticket.id)
        if known != ticket:
            raise NotHolder(f"{ticket} was not issued: this id is {known}; use the ticket you were given")

    def status(self, now: float) -> LockStatus:
        """Who holds the lock and who waits."""
        waiting = tuple(waiter.ticket for waiter in self.queue)
        return LockStatus(self.epoch, self.lease, self._held_by(now), waiting)

    # -- inside ----------------------------------------------------------------------------------------

    def _grant(self, now: float) -> tuple[LockBook, tuple[Notice, ...]]:
        if self.holder is not None or not self.queue or now < self.not_before or self.exhausted():
            return self, ()
        ticket, epoch = self.queue[0].ticket, self.epoch + 1
        grant = Grant(ticket, epoch, until=now + self.lease, since=now)
        return replace(self, epoch=epoch, holder=grant, queue=self.queue[1:]), (
            Granted(epoch, self.lease, ticket),
        )

    def _close(self, ended: tuple[Closed, ...], now: float) -> tuple[LockBook, tuple[Notice, ...]]:
        """Bury these tickets and grant the lock to whoever is first then."""
        gone = {closed.ticket.id for closed in ended}
        book = self
        if gone:
            book = replace(
                self,
                holder=None if self.holder is not None and self.holder.ticket.id in gone else self.holder,
                queue=tuple(waiter for waiter in self.queue if waiter.ticket.id not in gone),
                closed=(*self.closed, *ended)[-TOMBSTONES:],
            )
        book, granted = book._grant(now)
        return book, (*ended, *granted)

    def _with_answer(self, ticket_id: str, notices: tuple[Notice, ...], now: float) -> tuple[Notice, ...]:
        """Add how this ticket stands, unless that is among the news already."""
        if any(notice.ticket.id == ticket_id for notice in notices):
            return notices
        grant, tombstone = self.holder, self._tombstone(ticket_id)
        if tombstone is not None:
            return (*notices, replace(tombstone, again=True))
        if grant is not None and grant.ticket.id == ticket_id:
            return (*notices, Granted(grant.epoch, grant.until - now, grant.ticket))
        place = [waiter.ticket.id for waiter in self.queue].index(ticket_id)
        return (*notices, Waiting(self._held_by(now), place + 1, self.queue[place].ticket))

    def _known(self, ticket_id: str) -> Ticket:
        ticket = self.find(ticket_id)
        if ticket is None:
            raise UnknownTicket(
                f"no ticket {ticket_id} here: the keeper restarted, or it was closed long ago; request anew"
            )
        return ticket

    def _tombstone(self, ticket_id: str) -> Closed | None:
        return next((closed for closed in self.closed if closed.ticket.id == ticket_id), None)

    def _held_by(self, now: float) -> Holder | None:
        grant = self.holder
        if grant is None:
            return None
        ticket = grant.ticket
        return Holder(ticket.owner, ticket.round, grant.epoch, grant.since, now - grant.since)

    def _standing(self, ticket_id: str) -> str:
        """How a known ticket stands, in words, for a refusal."""
        tombstone = self._tombstone(ticket_id)
        if tombstone is not None:
            epoch = "" if tombstone.epoch is None else f", epoch {tombstone.epoch}"
            return f"it is {tombstone.how.value}{epoch}"
        if self.holder is None:
            return "it waits"
        if self.holder.ticket.id == ticket_id:
            return f"it holds epoch {self.holder.epoch}"
        return f"it waits for {self.holder.ticket.owner}"

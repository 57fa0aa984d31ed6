"""What passes between whoever wants the lock and the lock's keeper: tickets, answers, refusals.

    Ticket                 one request, in the queue from the moment it is made until it is closed
     |- Waiting            not yet: who holds the lock, and how many come first
     |- Granted, Renewed   it is yours for so many more seconds
     `- Closed             it is not yours and never will be: released, cancelled, handed back, expired, ...

    LockError              the keeper refuses, and nothing has changed
     |- NotHolder          the ticket does not hold the lock, or is somebody else's
     |- StaleEpoch         the right ticket with an epoch that it was not granted
     |- UnknownTicket      a ticket that the keeper never saw, or forgot: it holds nothing
     `- TicketClosed       a ticket that is over, by somebody who waits for it

A ticket's id is random, and knowing it entitles to use it. ``lock.py`` says what the answers mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from .errors import LockError

__all__ = [
    "DEFAULT_LEASE",
    "Closed",
    "Ending",
    "Granted",
    "Holder",
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
    "Waiting",
    "answer_to",
]

DEFAULT_LEASE = 30.0
"""Seconds. Long enough for a stalled host, short enough to wait out after a crash. Renew every 10 s."""


class NotHolder(LockError):
    """The ticket does not hold the lock, or is somebody else's."""


class StaleEpoch(LockError):
    """The ticket is right but the epoch is not the one it was granted."""


class UnknownTicket(LockError):
    """The keeper has never seen this ticket, or has forgotten it: in any case the ticket holds nothing."""


class TicketClosed(LockError):
    """The ticket is over and will not be granted."""


class Ending(Enum):
    """How a ticket was closed."""

    RELEASED = "released"
    CANCELLED = "cancelled"  # while it waited
    HANDED_BACK = "handed back"  # cancelled, but the grant was under way
    EXPIRED = "expired"  # the holder did not renew
    ABANDONED = "abandoned"  # the waiter did not ask for one lease


@dataclass(frozen=True, slots=True)
class Ticket:
    """One request. The id is random, so holding it is what entitles to use it."""

    id: str
    owner: str
    round: str

    def __str__(self) -> str:
        return f"ticket {self.id} of {self.owner} (round {self.round})"


@dataclass(frozen=True, slots=True)
class Holder:
    """Whom a waiter waits for. ``since`` is on the keeper's clock; ``seconds`` is how long that is ago."""

    owner: str
    round: str
    epoch: int
    since: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.owner} (round {self.round}, epoch {self.epoch}, for {self.seconds:.1f} s)"


@dataclass(frozen=True, slots=True)
class Granted:
    """The ticket holds the lock for ``remaining`` more seconds, as of this answer."""

    epoch: int
    remaining: float
    ticket: Ticket
    waited: float = 0.0  # how long the question stood with the keeper before this answer

    def end(self, asked_at: float) -> float:
        """When the lease is over on the clock of someone who asked at ``asked_at``."""
        return asked_at + self.waited + self.remaining


@dataclass(frozen=True, slots=True)
class Renewed:
    """The lease counts anew: ``remaining`` seconds as of this answer."""

    epoch: int
    remaining: float
    ticket: Ticket

    def end(self, asked_at: float) -> float:
        """When the lease is over on the clock of someone who asked at ``asked_at``."""
        return asked_at + self.remaining


@dataclass(frozen=True, slots=True)
class Waiting:
    """Not yet. ``place`` 1 is next; no ``holder`` means that the keeper is not yet ready to grant."""

    holder: Holder | None
    place: int
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Closed:
    """The ticket does not hold the lock and never will again. ``epoch`` is the one it had, if it had one."""

    how: Ending
    epoch: int | None
    ticket: Ticket
    again: bool = False  # the same answer repeated


@dataclass(frozen=True, slots=True)
class LockStatus:
    """What anybody may know about the lock. ``refused``: how often its keeper has refused something."""

    epoch: int
    lease: float
    holder: Holder | None
    waiting: tuple[Ticket, ...]
    refused: int = 0


Notice = Granted | Renewed | Waiting | Closed
"""What one ticket is told: an answer for the one that asked, news for each other one affected."""


def answer_to(ticket_id: str, notices: tuple[Notice, ...]) -> Notice:
    """The last word on this ticket."""
    return next(notice for notice in reversed(notices) if notice.ticket.id == ticket_id)


class LockKeeper(Protocol):
    """The service around a book, in this process or in another. Every call refuses with a ``LockError``."""

    @property
    def lease(self) -> float:
        """Seconds for which a grant is good without a renewal."""
        ...

    def request(self, owner: str, round: str, *, ticket_id: str | None = None) -> Ticket:
        """Join the queue. Whoever picks the id can still cancel when the answer got lost."""
        ...

    def enter(self, ticket: Ticket, limit: float) -> Granted | Waiting:
        """``request`` for a ticket that the caller has made, and the first ``wait``, in one."""

    def wait(self, ticket: Ticket, limit: float) -> Granted | Waiting:
        """Block until granted, for ``limit`` seconds at most. Raises ``TicketClosed`` if it is over."""
        ...

    def renew(self, ticket: Ticket, epoch: int) -> Renewed:
        """Count the lease anew."""
        ...

    def release(self, ticket: Ticket, epoch: int | None) -> Closed:
        """Give the lock back. The answer is evidence that this ticket does not hold it."""
        ...

    def cancel(self, ticket: Ticket) -> Closed:
        """Give up a request: a waiting ticket leaves the queue, a grant that crossed is handed back.

        A ticket that never arrived is closed in advance. The same as ``release`` without an epoch.
        """
        ...

    def status(self) -> LockStatus:
        """Who holds the lock and who waits."""
        ...

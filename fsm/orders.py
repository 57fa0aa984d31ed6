"""What a round asks for: orders, in the imperative. The driver carries them out and answers with events.

The table names orders; the reducer fills in whom they are for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .receipt import Participant

__all__ = ["Order", "Verb"]


class Verb(Enum):
    """The orders a round can give."""

    AcquireLock = "ask the lock service for a ticket"
    Prepare = "pause the participants, open sessions and transport, check, agree on the plan"
    Broadcast = "send every bucket to the remaining participants"
    Collect = "wait for the receipts"
    Commit = "have the remaining participants take the new version over"
    Publish = "tell the ledger"
    PutBack = "drop caches, give memory back, barrier, resume, close the transport"
    Abort = "stop the transport, ask every open engine what it is, put back"
    Fence = "stop waiting for an engine; close its session, calls and epoch"
    FenceAll = "the same for every engine without a proof, and for the ledger"
    ReleaseLock = "give the lock back, or cancel the ticket"
    RetryRelease = "try again to give the lock back"
    Deliver = "hand the result to the caller"

    __hash__ = object.__hash__  # members are singletons, and are looked up for every order


@dataclass(frozen=True, slots=True)
class Order:
    """One order. ``engines`` is whom it is for, sorted; empty where it is for nobody in particular."""

    verb: Verb
    engines: tuple[Participant, ...] = ()

    def __str__(self) -> str:
        names = ", ".join(engine.id for engine in self.engines)
        return f"{self.verb.name}({names})" if names else self.verb.name

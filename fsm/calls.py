"""What the driver asks of the world, one call at a time.

A call is a plain value. Whoever carries it out answers with its number, exactly once, and may be late: the
driver has its own limits, and an answer to a call it no longer waits for changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .receipt import Participant

__all__ = ["Act", "Call"]


class Act(Enum):
    """What can be asked, and what a good answer carries."""

    acquire = "lock: take a ticket and wait; (epoch, lease end by the holder's clock)"
    renew = "lock: extend the lease; its new end by the holder's clock"
    release = "lock: give it back, or cancel the ticket; nothing"
    plan = "weights: read them, make the plan, digest it; an Expectation"
    prepare = "executor number index: get ready; whether it owes an undo"
    clean = "executor number index: the good end; nothing"
    undo = "executor number index: the bad end; nothing"
    open = "engine: pause, open a session, check the plan; nothing"
    commit = "engine: make the new version its own; nothing"
    abort = "engine: end the session, say what you are; an Answer"
    resume = "engine: generate again; nothing"
    fence = "engine and transport: it is out; nobody waits for the answer"
    transport_open = "transport: groups, endpoints, receiving halves; nothing"
    broadcast = "transport: send, telling the port; nothing"
    collect = "transport: wait for receipts, telling the port; nothing"
    transport_clean = "transport: the good end; nothing"
    transport_abort = "transport: the bad end; nothing"
    bind = "ledger: tie the number to the bytes; nothing"
    publish = "ledger: publish; nothing"
    ask = "ledger: shut the epoch, and say whether the version is published; a bool"

    __hash__ = object.__hash__  # members are singletons, and are looked up a few hundred times a round


ENGINE_ACTS = frozenset({Act.open, Act.commit, Act.abort, Act.resume, Act.fence})
TRANSPORT_ACTS = frozenset(
    {Act.transport_open, Act.broadcast, Act.collect, Act.transport_clean, Act.transport_abort}
)
LOCK_ACTS = frozenset({Act.acquire, Act.renew, Act.release})


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Args:
        number: to answer with.
        act: what is asked.
        engine: of whom, for the acts of an engine.
        index: of which executor, for prepare, clean and undo.
        limit: seconds the driver will wait.
    """

    number: int
    act: Act
    engine: Participant | None = None
    index: int | None = None
    limit: float = 0.0

    def __str__(self) -> str:
        who = self.engine.id if self.engine else "" if self.index is None else str(self.index)
        return f"{self.act.name}({who})"

"""The states, of a round and of one engine rank. Nothing else may call itself a state."""

from __future__ import annotations

from enum import Enum

__all__ = ["Disposition", "EngineState", "Lock", "Outcome", "Publication", "State"]


class State(Enum):
    """Where a round is.

    Declared in the order of their rank: a round only ever moves down this list, and a good one skips Failed.
    """

    Idle = "asked for the lock"
    Locked = "lock held; engines being paused, sessions opened, plan agreed"
    Broadcasting = "bytes under way"
    Awaiting = "all sent, receipts missing"
    Cleaning = "every remaining participant proved that it holds the bytes; commit, publish, put back"
    Failed = "stop, settle or fence what is in flight, decide dispositions, put back"
    Released = "over, and the lock is proven not held"

    __hash__ = object.__hash__  # members are singletons, and are looked up for every event

    @property
    def rank(self) -> int:
        """Position in the order in which states can follow each other."""
        return _RANKS[self]


_RANKS = {state: rank for rank, state in enumerate(State)}


class EngineState(Enum):
    """Where one engine rank is."""

    Serving = "generating with whole weights of one version"
    Paused = "gate closed, session open, no byte of it seen"
    Receiving = "frames arriving"
    Releasing = "all applied, the view of the transfer buffer still open"
    Acked = "view closed, receipt made; waiting for the word to commit"
    Committed = "holds the new version, still paused"
    Quarantined = "holds a mix, or was never proven whole; only a full resend that commits clears it"


class Lock(Enum):
    """What a round knows of its lock."""

    asked = "a ticket is in the queue, or the answer has not come yet"
    held = "granted, and not given back"
    gone = "proven not held: refused, given back, or its lease ended"


class Publication(Enum):
    """What a round knows of its publication; ``unknown`` must be treated as ``yes``."""

    no = "never asked, or refused"
    unknown = "asked, not answered"
    yes = "confirmed by the ledger"


class Disposition(Enum):
    """What an engine is when the round is over."""

    serving_new = "confirmed its commit"
    serving_old = "holds only the old weights, by its own answer"
    quarantined = "not proven whole; unrouted until a full resend commits"


class Outcome(Enum):
    """The sum of a round, computed from the dispositions and the publication."""

    complete = "published, and every engine that was asked for serves the new version"
    partial = "published, and at least the quorum serves the new version"
    failed = "not known to be published, or served by fewer engines than the quorum"
    passed_over = "there was no round: newer weights took their place, or the policy skipped these"

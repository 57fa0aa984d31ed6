"""The facts that can happen to a round: a closed union of frozen values, named in the past tense.

There are two kinds. *Protagonists* are answers to orders; they are strict: where the table has no row for
one, it is refused and nothing changes. *Watchdogs* may come at any moment from somebody who cannot know
where the round is; they are total: too late means recorded, never an error.

An event carries what was seen and nothing that the round already knows. Errors ride along as the objects
that were raised, but do not take part in comparison, so that two ways to lose an engine are one fact.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .receipt import Expectation, Participant, Receipt
from .states import State

__all__ = [
    "EVENTS", "PROTAGONISTS", "WATCHDOGS",
    "AllSent", "BucketSent", "Cancelled", "Cleaned", "CleanupFailed", "CommitFailed", "EngineAcked",
    "EngineCommitted", "EngineLost", "EngineReverted", "Event", "LeaseLost", "LockGranted", "LockRefused",
    "PrepareFailed", "Prepared", "PublishFailed", "Published", "TimedOut", "TransportFailed", "UnlockFailed",
    "Unlocked",
]  # fmt: skip


def _error() -> BaseException | None:
    return field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class LockGranted:
    """The lock service granted the ticket. ``epoch`` is the fencing token of this grant."""

    epoch: int


@dataclass(frozen=True, slots=True)
class LockRefused:
    """The lock service closed the request without a grant."""

    error: BaseException | None = _error()


@dataclass(frozen=True, slots=True)
class Prepared:
    """Participants paused, sessions and transport open, preflight passed, plan agreed."""

    plan: Expectation


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    """The plan, or something the trainer owes before a round, failed: no byte has moved."""

    error: BaseException | None = _error()


@dataclass(frozen=True, slots=True)
class BucketSent:
    """Bucket ``index`` was handed over; buckets go in order, from 0."""

    index: int


@dataclass(frozen=True, slots=True)
class AllSent:
    """Every bucket was handed over."""


@dataclass(frozen=True, slots=True)
class EngineAcked:
    """Every rank of an engine answered with its receipt; ``error`` says why that proves nothing, if so."""

    engine: Participant
    receipts: tuple[Receipt, ...]
    error: BaseException | None = _error()


@dataclass(frozen=True, slots=True)
class EngineLost:
    """An engine cannot take part any further: dead, silent beyond its limit, or failed by its own word."""

    engine: Participant
    error: BaseException | None = _error()


@dataclass(frozen=True, slots=True)
class EngineCommitted:
    """An engine confirmed that it holds the new version; in Failed also its answer to Abort."""

    engine: Participant


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """An engine refused its commit, is torn by its own word, or the driver gave up on it and fenced it."""

    engine: Participant
    error: BaseException | None = _error()


@dataclass(frozen=True, slots=True)
class EngineReverted:
    """An engine's answer to Abort: it holds only the old weights and refuses this round from now on."""

    engine: Participant


@dataclass(frozen=True, slots=True)
class Published:
    """The ledger has the version."""


@dataclass(frozen=True, slots=True)
class PublishFailed:
    """The ledger refused the version, and will not take it later."""

    error: BaseException | None = _error()


@dataclass(frozen=True, slots=True)
class Cleaned:
    """Everything is put back."""


@dataclass(frozen=True, slots=True)
class CleanupFailed:
    """Putting back did not succeed."""

    error: BaseException | None = _error()


@dataclass(frozen=True, slots=True)
class Unlocked:
    """Proof that this round's ticket does not hold the lock (any more)."""


@dataclass(frozen=True, slots=True)
class UnlockFailed:
    """The release was not confirmed; the lock may still be held."""

    error: BaseException | None = _error()


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The lease ended, counted from before it was last asked for: proof that the lock is not held."""

    error: BaseException | None = _error()


@dataclass(frozen=True, slots=True)
class TransportFailed:
    """The transport cannot go on, whatever the engines do."""

    error: BaseException | None = _error()


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The deadline that was armed for ``phase`` passed."""

    phase: State
    error: BaseException | None = _error()


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Somebody outside wants the round to stop."""

    error: BaseException | None = _error()


Event = (
    LockGranted | LockRefused | Prepared | PrepareFailed | BucketSent | AllSent | EngineAcked | EngineLost
    | EngineCommitted | CommitFailed | EngineReverted | Published | PublishFailed | Cleaned | CleanupFailed
    | Unlocked | UnlockFailed | LeaseLost | TransportFailed | TimedOut | Cancelled
)  # fmt: skip
"""Any fact a round can be told."""

EVENTS: tuple[type[Event], ...] = Event.__args__
WATCHDOGS: frozenset[type[Event]] = frozenset({EngineLost, LeaseLost, TimedOut, Cancelled})
PROTAGONISTS: frozenset[type[Event]] = frozenset(EVENTS) - WATCHDOGS

"""Who may rightly speak: whoever was asked, and whoever cannot know that it is too late.

This is what an honest partner may say in a position, told without the table. The table must take all of it
in, and refuse the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import events as e
from .facts import Facts
from .invariants import SENDING, proven
from .states import Lock, Publication, State

__all__ = ["welcome"]

Idle, Locked, Broadcasting, Awaiting = State.Idle, State.Locked, State.Broadcasting, State.Awaiting
Cleaning, Failed, Released = State.Cleaning, State.Failed, State.Released
_SETTLING = frozenset({Cleaning, Failed})


def _gave_up(f: Facts) -> bool:
    return f.settled and f.unclean


def _lock_answer(s: State, f: Facts, x: Any) -> bool:
    return s is Idle or (s is Failed and f.lock is not Lock.gone)


def _release_answer(s: State, f: Facts, x: Any) -> bool:
    return s in _SETTLING and f.settled


def _receipt(s: State, f: Facts, x: e.EngineAcked) -> bool:
    return s is Awaiting or (s is Failed and f.plan is not None and f.sent == f.plan.buckets)


def _committed(s: State, f: Facts, x: e.EngineCommitted) -> bool:
    if s is Released:
        return _gave_up(f) and x.engine in f.members
    told = f.members - f.evicted
    return (s is Cleaning and x.engine in told) or (
        s is Failed and f.decided and x.engine in told - f.reverted
    )


def _refused(s: State, f: Facts, x: e.CommitFailed) -> bool:
    if s is Released:
        return _gave_up(f) and x.engine in f.members
    if s is Cleaning:
        return x.engine in f.missing | f.quarantined
    return s is Failed and x.engine in f.members


def _reverted(s: State, f: Facts, x: e.EngineReverted) -> bool:
    if s is Released:
        return _gave_up(f) and x.engine in f.members
    return s is Failed and x.engine in f.members - f.committed


def _ledger_answer(s: State, f: Facts, x: Any) -> bool:
    return s.rank >= Cleaning.rank and f.publication is Publication.unknown


def _cleaned(s: State, f: Facts, x: e.Cleaned) -> bool:
    if s is Cleaning:
        return f.publication is Publication.yes and not f.settled
    return _gave_up(f) or (s is Failed and not f.settled and proven(f))


def _not_cleaned(s: State, f: Facts, x: e.CleanupFailed) -> bool:
    return _gave_up(f) or (s in _SETTLING and not f.settled)


_WELCOME: dict[type[Any], Callable[[State, Facts, Any], bool]] = {
    e.LockGranted: _lock_answer,
    e.LockRefused: _lock_answer,
    e.Prepared: lambda s, f, x: s is Locked and x.plan.buckets > 0,
    e.PrepareFailed: lambda s, f, x: s is Locked,
    e.BucketSent: lambda s, f, x: s is Broadcasting and x.index == f.sent and f.sent < f.buckets,
    e.AllSent: lambda s, f, x: s is Broadcasting and f.sent == f.buckets,
    e.TransportFailed: lambda s, f, x: s in SENDING or s is Failed,
    e.EngineAcked: _receipt,
    e.EngineCommitted: _committed,
    e.CommitFailed: _refused,
    e.EngineReverted: _reverted,
    e.Published: _ledger_answer,
    e.PublishFailed: _ledger_answer,
    e.Cleaned: _cleaned,
    e.CleanupFailed: _not_cleaned,
    e.Unlocked: _release_answer,
    e.UnlockFailed: _release_answer,
}


def welcome(state: State, facts: Facts, event: e.Event) -> bool:
    """Whether somebody may rightly say ``event`` now. Watchdogs always may."""
    asked = _WELCOME.get(type(event))
    return asked is None or asked(state, facts, event)

"""What breaks a promise, for more than one suite of twins: each changes the product, never a check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tablechanges import guarded
from weightsync.fsm import engine_table as t
from weightsync.fsm import events as e
from weightsync.fsm import learn as k
from weightsync.fsm.calls import Act
from weightsync.fsm.driver import Driver
from weightsync.fsm.orders import Verb
from weightsync.fsm.rows import Row
from weightsync.fsm.states import EngineState, State

Patch = pytest.MonkeyPatch
Changed = Callable[[Patch], None]


def set_to(owner: object, name: str, value: object) -> Changed:
    """Replace one thing."""
    return lambda patch: patch.setattr(owner, name, value)


def prove_too_early(row: Row[Any]) -> Row[Any] | None:
    """A receipt is made when all is applied, with the buffer still in use."""

    def applied(facts: t.EngineFacts, event: Any) -> t.EngineFacts:
        assert facts.plan is not None
        return replace(facts, applied=(facts.plan.tensors, facts.plan.bytes, facts.plan.digest))

    if row.event is t.AllApplied:
        return replace(row, target=EngineState.Acked, learn=applied)
    return None if row.event is t.ViewClosed else row


def publish_with_the_first(row: Row[Any]) -> Row[Any]:
    """The first commit orders the publication, although another one is missing."""
    if row.event is e.EngineCommitted and guarded(row) == "c_more":
        return replace(row, learn=k.committed_last, orders=(Verb.Publish,))
    if row.event is e.EngineCommitted and guarded(row) == "c_last":
        return replace(row, learn=k.committed, orders=())
    return row


def serve_a_mix(row: Row[Any]) -> Row[Any]:
    """An engine that was torn in the middle serves again."""
    if row.event is t.AbortOrdered and row.source is EngineState.Receiving and guarded(row) == "ends_torn":
        return replace(row, target=EngineState.Serving, learn=t.over)
    return row


def take_whatever_comes(row: Row[Any]) -> Row[Any]:
    """An engine asks an opening neither for its session nor for its epoch."""

    def anything(facts: t.EngineFacts, event: Any, state: EngineState) -> bool:
        return bool(event.session != facts.session)

    return replace(row, guard=anything) if row.event is t.Opened else row


def answer_whoever_calls(patch: Patch) -> None:
    """A call stays open for ever, also when it was given up."""
    real_call, real_answered = Driver.call, Driver.answered
    known: dict[int, Any] = {}

    def call(self: Driver, act: Act, **which: Any) -> None:
        real_call(self, act, **which)
        known[self._numbers] = self._open[self._numbers]

    def answered(self: Driver, number: int, now: float, **said: Any) -> Any:
        self._open.setdefault(number, known[number])
        return real_answered(self, number, now, **said)

    patch.setattr(Driver, "call", call)
    patch.setattr(Driver, "answered", answered)


def begin_again(row: Row[Any]) -> Row[Any]:
    """A round whose transport fails goes back and sends once more."""
    if row.event is e.TransportFailed and row.source is State.Awaiting:
        return replace(row, target=State.Broadcasting)
    return row


def abort_nobody(patch: Patch) -> None:
    """A round that failed leaves whoever it had paused alone."""
    real = Driver._each

    def each(self: Driver, act: Act, engines: Any, limit: float | None = None) -> None:
        if act is not Act.abort:
            real(self, act, engines, limit)

    patch.setattr(Driver, "_each", each)


def undo_oldest_first(patch: Patch) -> None:
    """The list is a queue."""
    real = Driver._undo_next

    def undo_next(self: Driver) -> None:
        self._undo.reverse()
        real(self)
        self._undo.reverse()

    patch.setattr(Driver, "_undo_next", undo_next)

"""The meaning of the round's table, without any library: a pure step.

    step(snapshot, event) -> Step(row, snapshot, orders)

The explorer runs on this; the running round compares it with ``transitions`` on every event.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from .events import Event
from .facts import Cause, Facts
from .orders import Order, Verb
from .receipt import Participant
from .rows import Row, Table
from .states import State
from .table import ROUND

__all__ = ["Position", "Step", "begin", "step"]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a round is and what it knows. Hashable: two equal positions have the same future."""

    state: State
    facts: Facts


@dataclass(frozen=True, slots=True)
class Step:
    """One step: the row taken, the position after it, and the orders it gives."""

    row: Row[State]
    after: Position
    orders: tuple[Order, ...]


def begin(facts: Facts, table: Table[State, Facts] = ROUND) -> tuple[Position, tuple[Order, ...]]:
    """The position a round starts in, and its first order."""
    return Position(table.start, facts), (_order(table.entry[table.start], facts, None),)


def step(before: Position, event: Event, table: Table[State, Facts] = ROUND) -> Step:
    """Take the row that answers ``event``.

    Raises:
        IllegalEvent: no row does; nothing happened.
        GuardFailed: a guard raised; nothing happened.
        TableError: two rows do.
    """
    row = table.row(before.state, before.facts, event)
    facts = row.learn(before.facts, event) if row.learn else before.facts
    if row.target is State.Failed and facts.cause is None:
        facts = replace(facts, cause=_cause(before.state, event))
    return Step(row, Position(row.goal, facts), _orders(row, facts, event, table))


def _orders(row: Row[State], facts: Facts, event: Event, table: Table[State, Facts]) -> tuple[Order, ...]:
    """The row's own orders, then the one for entering its target."""
    verbs = row.orders
    if row.target is not None and Verb.RetryRelease not in verbs:
        verbs = (*verbs, table.entry[row.target])
    return tuple(_order(verb, facts, event) for verb in verbs)


def _order(verb: Enum, facts: Facts, event: Event | None) -> Order:
    """``verb`` addressed to whom it concerns."""
    concerned: frozenset[Participant] | tuple[Participant, ...] = ()
    if verb is Verb.Fence:
        concerned = (event.engine,)  # type: ignore[union-attr]
    elif verb is Verb.Commit:
        concerned = facts.missing
    elif verb in (Verb.Abort, Verb.FenceAll):
        concerned = facts.open
    elif verb in (Verb.Prepare, Verb.Broadcast, Verb.Collect):
        concerned = facts.remaining
    elif verb is Verb.PutBack:
        concerned = facts.committed & facts.remaining
    return Order(Verb(verb), tuple(sorted(concerned)))


def _cause(state: State, event: Event) -> Cause:
    return Cause(
        trigger=type(event).__name__,
        state=state,
        engine=getattr(event, "engine", None),
        error=getattr(event, "error", None),
    )

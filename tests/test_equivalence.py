"""Two readings of each table, ``transitions`` and our own, and nothing on which they differ."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from enum import Enum
from typing import Any

import pytest

from weightsync.fsm._machine import Decider, compiled_transitions
from weightsync.fsm.engine_table import ENGINE
from weightsync.fsm.errors import GuardFailed, IllegalEvent
from weightsync.fsm.explore import alphabet, chaos, small_round
from weightsync.fsm.explore_engine import engine_alphabet, explore_engine
from weightsync.fsm.facts import Facts
from weightsync.fsm.reducer import Position, begin, step
from weightsync.fsm.rows import Row, Table
from weightsync.fsm.states import State
from weightsync.fsm.table import ROUND


def goal(table: Table[Any, Any], state: Enum, facts: object, event: object) -> Enum | None:
    """Where our own reading leads; None if it refuses."""
    try:
        found: Enum = table.row(state, facts, event).goal
    except IllegalEvent:
        return None
    return found


def decision(decider: Decider, state: Enum, facts: object, event: object) -> Enum | None:
    """Where ``transitions`` leads; None if it refuses."""
    try:
        return decider.decide(state, facts, event)
    except IllegalEvent:
        return None


@pytest.mark.parametrize("table", [ROUND, ENGINE], ids=lambda table: table.name)
def test_the_machine_has_the_rows_of_the_table(table: Table[Any, Any]) -> None:
    """No transition is missing, none is added, and each has its guard; also when two rows look the same."""
    wanted = Counter(
        (
            row.event.__name__,
            row.source.name,
            row.target.name if row.target else None,
            row.guard.__name__ if row.guard else None,
        )
        for row in table.rows
    )
    assert Counter(compiled_transitions(Decider(table))) == wanted


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(("engines", "quorum"), [(1, 1), (2, 1), (2, 2)])
def test_machine_and_reducer_agree_on_the_round(engines: int, quorum: int) -> None:
    """In every position that can be reached, every fact leads both to the same state, or both refuse it."""
    facts, decider = small_round(engines, quorum), Decider(ROUND)
    said = alphabet(facts)
    pairs = [(node.position, letter.event) for node in chaos(facts).nodes for letter in said]
    differences = [
        (at, event)
        for at, event in pairs
        if goal(ROUND, at.state, at.facts, event) is not decision(decider, at.state, at.facts, event)
    ]
    assert not differences
    assert len(pairs) > 9_000


@pytest.mark.parametrize("stages", [True, False], ids=["stages", "in place"])
def test_machine_and_table_agree_on_the_engine(stages: bool) -> None:
    """The same for an engine rank, in every position that can be reached."""
    decider, said = Decider(ENGINE), engine_alphabet(2).values()
    nodes = explore_engine(stages=stages, buckets=2).nodes
    differences = [
        (node, event)
        for node in nodes
        for event in said
        if goal(ENGINE, node.state, node.facts, event) is not decision(decider, node.state, node.facts, event)
    ]
    assert not differences


def test_the_comparison_can_fail() -> None:
    """A machine compiled from another table is noticed."""
    other = [replace(row, target=None) if row.number == 1 else row for row in ROUND.rows]
    decider = Decider(Table("other", other, start=State.Idle))
    said = {letter.label: letter.event for letter in alphabet(small_round(1, 1))}
    start, _ = begin(small_round(1, 1))
    granted = said["LockGranted"]
    assert goal(ROUND, start.state, start.facts, granted) is State.Locked
    assert decision(decider, start.state, start.facts, granted) is State.Idle


def broken(facts: Facts, event: object, state: State) -> bool:
    """A guard with a mistake in it."""
    raise ZeroDivisionError("no weights, no ratio")


BROKEN: Table[State, Facts] = Table(
    "broken", [Row(1, int, State.Idle, State.Locked, broken, None, ())], start=State.Idle
)


def test_a_guard_that_raises_refuses_the_event_in_both() -> None:
    """Both say whose guard it was, carry its error, and leave everything as it was."""
    at = Position(State.Idle, small_round(1, 1))
    for refuse in (
        lambda: Decider(BROKEN).decide(at.state, at.facts, 1),
        lambda: BROKEN.row(at.state, at.facts, 1),
        lambda: step(at, 1, BROKEN),  # type: ignore[arg-type]  # an int is no event, in any other table
    ):
        with pytest.raises(GuardFailed, match="ZeroDivisionError") as refused:
            refuse()
        assert isinstance(refused.value.__cause__, ZeroDivisionError)
    assert at == Position(State.Idle, small_round(1, 1))


@pytest.mark.parametrize("event", ["a string", 3, None, object()], ids=lambda event: type(event).__name__)
def test_what_is_no_event_is_illegal_in_both(event: Any) -> None:
    """The union of events is closed: anything else is refused like a fact out of turn."""
    facts = small_round(1, 1)
    assert goal(ROUND, State.Idle, facts, event) is None
    assert decision(Decider(ROUND), State.Idle, facts, event) is None

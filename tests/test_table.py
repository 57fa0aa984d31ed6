"""The tables are complete and lawful, and a table that breaks a law is refused when it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from weightsync.fsm import events as e
from weightsync.fsm import guards as g
from weightsync.fsm import learn as k
from weightsync.fsm.engine_table import ENGINE, ENGINE_EVENTS
from weightsync.fsm.errors import GuardFailed, IllegalEvent, TableError
from weightsync.fsm.orders import Verb
from weightsync.fsm.rows import Row, Table, describe
from weightsync.fsm.states import EngineState, State
from weightsync.fsm.table import _ROWS, ENTRY, LAWS, ROUND, _broken, build

Line = tuple[type[e.Event], State, State | None, Any, Any, tuple[Verb, ...]]
TABLES: list[Table[Any, Any]] = [ROUND, ENGINE]

# -- laws ---------------------------------------------------------------------------------------------------


def with_line(*line: Any) -> Callable[[], list[Line]]:
    """The round's lines and one more."""
    return lambda: [*_ROWS, line]


def without(event: type[e.Event], source: State) -> Callable[[], list[Line]]:
    """The round's lines without all those for one event in one state."""
    return lambda: [line for line in _ROWS if line[:2] != (event, source)]


GIVES_UP = (k.given_up, (Verb.ReleaseLock,))
BROKEN: dict[str, Callable[[], list[Line]]] = {
    "downhill": with_line(e.Cancelled, State.Awaiting, State.Locked, None, None, ()),
    "failed-released": with_line(e.Cancelled, State.Failed, State.Cleaning, None, None, ()),
    "evidence": with_line(e.Cancelled, State.Failed, State.Released, None, None, ()),
    "last-receipt": with_line(e.EngineLost, State.Broadcasting, State.Cleaning, None, None, ()),
    "publish": with_line(e.Published, State.Cleaning, None, None, None, (Verb.Publish,)),
    "fence-first": with_line(e.TimedOut, State.Failed, None, None, *GIVES_UP),
    "release": with_line(e.Cancelled, State.Failed, None, None, None, (Verb.ReleaseLock,)),
    "watchdogs": without(e.LeaseLost, State.Idle),
    "forward": with_line(e.Prepared, State.Locked, State.Awaiting, None, None, ()),
}
ALSO_BROKEN: dict[str, Callable[[], list[Line]]] = {
    "failed-released": with_line(e.Cancelled, State.Released, State.Failed, None, None, ()),
    "evidence": with_line(e.Cleaned, State.Cleaning, State.Released, g.settled, None, ()),
    "last-receipt": with_line(e.TimedOut, State.Awaiting, State.Cleaning, None, None, ()),
    "publish": with_line(e.CommitFailed, State.Cleaning, None, None, k.quarantined_last, ()),
    "fence-first": with_line(
        e.CleanupFailed, State.Failed, None, None, k.given_up, (Verb.ReleaseLock, Verb.FenceAll)
    ),
    "forward": with_line(e.AllSent, State.Broadcasting, None, None, None, ()),
}


def test_every_law_is_broken_here_once() -> None:
    """No law is left out of this file, and none is broken that is not one."""
    assert BROKEN.keys() == LAWS.keys() >= ALSO_BROKEN.keys()


@pytest.mark.parametrize(("law", "lines"), [*BROKEN.items(), *ALSO_BROKEN.items()])
def test_a_table_that_breaks_a_law_is_refused(law: str, lines: Callable[[], list[Line]]) -> None:
    """A doctored list of rows is no table; the error names a broken law and the row."""
    with pytest.raises(TableError, match=r"^law '") as refused:
        build(lines())
    if law == "watchdogs":
        assert "law 'watchdogs'" in str(refused.value)
        assert "LeaseLost in Idle" in str(refused.value)
    else:
        culprit = Row(len(_ROWS) + 1, *lines()[-1])
        assert law in _broken(culprit)
        assert str(culprit) in str(refused.value)


def test_the_table_of_the_round_breaks_no_law() -> None:
    """The laws pass, over and over, and not only because there is nothing to check."""
    assert build(_ROWS).digest == ROUND.digest
    assert not [law for row in ROUND.rows for law in _broken(row)]


# -- shape --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_no_row_is_there_twice(table: Table[Any, Any]) -> None:
    """Fact, state and guard tell a row from every other; the numbers count the rows from 1."""
    keys = {(row.event, row.source, row.guard) for row in table.rows}
    assert len(keys) == len(table.rows)
    assert [row.number for row in table.rows] == list(range(1, len(table.rows) + 1))


@pytest.mark.parametrize(
    ("table", "events"), [(ROUND, e.EVENTS), (ENGINE, ENGINE_EVENTS)], ids=["round", "engine"]
)
def test_every_event_and_every_state_is_used(table: Table[Any, Any], events: tuple[type[Any], ...]) -> None:
    """The table knows all events of the union and no other, and names every state."""
    assert {row.event for row in table.rows} == set(events)
    assert {row.source for row in table.rows} == set(table.states)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_guard_and_lesson_says_what_it_means(table: Table[Any, Any]) -> None:
    """What a diagram shows in brackets can be looked up: each guard and lesson has a sentence."""
    parts = [part for row in table.rows for part in (row.guard, row.learn) if part is not None]
    assert not [part.__name__ for part in parts if not part.__doc__]


def test_every_state_gives_an_order_when_it_is_entered() -> None:
    """Somebody is asked to do something in each state, and by no two states the same."""
    assert ENTRY.keys() == set(State)
    assert len(set(ENTRY.values())) == len(State)


def test_released_is_the_only_end() -> None:
    """A round starts in Idle and ends in Released; an engine rank goes on for ever."""
    assert (ROUND.start, ROUND.final) == (State.Idle, frozenset({State.Released}))
    assert (ENGINE.start, ENGINE.final) == (EngineState.Serving, frozenset())
    assert not [row for row in ROUND.rows if row.source is State.Released and row.target is not None]


# -- text and digest ----------------------------------------------------------------------------------------


def test_the_digest_notices_every_change() -> None:
    """A log of another table is recognised: any change of any row changes the digest."""

    def digest(*rows: Row[State]) -> str:
        return Table[State, Any]("round", rows, start=State.Idle, final=(State.Released,), entry=ENTRY).digest

    first, *others = ROUND.rows
    assert digest(first, *others) == ROUND.digest
    spoilt = [
        replace(first, target=State.Broadcasting), replace(first, guard=None), replace(first, learn=k.held),
        replace(first, orders=(Verb.Fence,)), replace(first, event=e.Cancelled), replace(first, number=0),
    ]  # fmt: skip
    digests = {digest(row, *others) for row in spoilt} | {digest(*others), ROUND.digest}
    assert len(digests) == len(spoilt) + 2


def test_a_row_reads_as_a_line() -> None:
    """The line of a row is what diagrams, logs and errors show."""
    lines = [str(row) for row in ROUND.rows]
    assert lines[0] == "#1 Idle -> Locked: LockGranted [enough]"
    assert "Cleaning stays: CommitFailed [x_last] / Fence, Publish" in " ".join(lines)
    assert "table round: starts in Idle" in ROUND.text()


# -- asking a table -----------------------------------------------------------------------------------------

SWITCH = Row(1, int, State.Idle, State.Locked, None, None, ())


def switch(*guards: Any) -> Table[State, dict[str, int]]:
    """A table with one row for each guard."""
    return Table("switch", [replace(SWITCH, guard=guard) for guard in guards], start=State.Idle)


def yes(facts: Any, event: Any, state: Any) -> bool:
    """Always."""
    return True


def no(facts: Any, event: Any, state: Any) -> bool:
    """Never."""
    return False


def raises(facts: Any, event: Any, state: Any) -> bool:
    """Breaks."""
    raise ZeroDivisionError("no weights, no ratio")


def test_the_one_row_whose_guard_holds_answers() -> None:
    """A row without a guard always answers, one with a guard when it holds."""
    assert switch(None).row(State.Idle, {}, 1) == SWITCH
    assert switch(no, yes).row(State.Idle, {}, 1).guard is yes


@pytest.mark.parametrize("table", [switch(), switch(no)], ids=["no row", "no guard holds"])
def test_a_fact_without_a_row_is_illegal(table: Table[State, dict[str, int]]) -> None:
    """The error says what, where and whose."""
    with pytest.raises(IllegalEvent, match=r"int is not legal in Idle \(round \?, version \?\)"):
        table.row(State.Idle, {}, 1)


def test_two_rows_for_one_fact_are_an_error_of_the_table() -> None:
    """Which row comes first never decides."""
    with pytest.raises(TableError, match="two rows answer 1"):
        switch(yes, yes).row(State.Idle, {}, 1)


def test_a_guard_that_raises_refuses_the_fact() -> None:
    """The error names guard and row and carries the guard's own error; it counts as illegal."""
    with pytest.raises(GuardFailed, match="the guard raises of #1 Idle -> Locked") as refused:
        switch(raises).row(State.Idle, {}, 1)
    assert isinstance(refused.value.__cause__, ZeroDivisionError)
    assert isinstance(refused.value, IllegalEvent)


def test_facts_are_described_by_round_and_version() -> None:
    """Messages say whose facts they are about, as far as the facts know."""
    assert describe(object()) == "round ?, version ?"

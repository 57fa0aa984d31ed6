"""A table with a change in it, and the product following it: what mutants of the tables are made of.

changed(edit("EngineAcked", "Awaiting", "out"))          a copy of the round's table without that row
follow(changed(...))(monkeypatch)                        rounds run by it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from weightsync.fsm import _machine, reducer
from weightsync.fsm import engine as engine_module
from weightsync.fsm import events as e
from weightsync.fsm import round as round_module
from weightsync.fsm.engine_table import ENGINE
from weightsync.fsm.facts import Facts
from weightsync.fsm.orders import Verb
from weightsync.fsm.rows import Row, Table
from weightsync.fsm.states import State
from weightsync.fsm.table import ROUND

__all__ = [
    "Edit", "change_engine", "change_round", "changed", "edit", "follow", "guarded", "row", "without",
]  # fmt: skip

Edit = Callable[[Row[Any]], Iterable[Row[Any]]]
"""What becomes of one row: itself, another one, several, or none."""


def guarded(row: Row[Any]) -> str:
    """The name of a row's guard."""
    return row.guard.__name__ if row.guard else ""


def edit(event: str, source: str | None = None, when: str | None = None, /, **changes: Any) -> Edit:
    """Change every row of this event, source and guard; without changes, take it out."""

    def apply(row: Row[Any]) -> Iterable[Row[Any]]:
        here = source in (None, row.source.name) and when in (None, guarded(row))
        if row.event.__name__ != event or not here:
            return [row]
        return [replace(row, **changes)] if changes else []

    return apply


def without(order: Verb, event: str, source: str, when: str) -> Edit:
    """Take one order out of a row."""

    def apply(row: Row[Any]) -> Iterable[Row[Any]]:
        if (row.event.__name__, row.source.name, guarded(row)) != (event, source, when):
            return [row]
        return [replace(row, orders=tuple(each for each in row.orders if each is not order))]

    return apply


def row(event: type[e.Event], source: State, guard: Any, learn: Any, *orders: Verb) -> Row[State]:
    """A row that stays, to be added."""
    return Row(0, event, source, None, guard, learn, orders)


def changed(*edits: Edit, added: Iterable[Row[State]] = ()) -> Table[State, Facts]:
    """A copy of the round's table with edits; the laws are left aside, and checked where a test wants to.

    It has the name of the real one, so that rounds can follow it.
    """
    rows = _numbered([*_edited(ROUND, edits), *added])
    return Table("round", rows, start=ROUND.start, final=ROUND.final, entry=ROUND.entry)


def _numbered(rows: Iterable[Row[Any]]) -> list[Row[Any]]:
    return [replace(row, number=number) for number, row in enumerate(rows, start=1)]


def _edited(table: Table[Any, Any], edits: Iterable[Edit]) -> list[Row[Any]]:
    rows = list(table.rows)
    for change in edits:
        before, rows = rows, [new for row in rows for new in change(row)]
        assert rows != before, "an edit that changes nothing proves nothing"
    return rows


def follow(table: Table[State, Facts]) -> Callable[[pytest.MonkeyPatch], None]:
    """Rounds follow another table."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(round_module, "step", lambda before, event: reducer.step(before, event, table))
        patch.setattr(round_module, "_DECIDER", _machine.Decider(table))

    return apply


def change_round(change: Callable[[Row[Any]], Row[Any] | None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Rounds follow a table with another row for each; None takes it out."""
    return follow(changed(_each(change)))


def change_engine(change: Callable[[Row[Any]], Row[Any] | None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Engine ranks follow such a table."""
    rows = _numbered(_edited(ENGINE, [_each(change)]))
    table: Table[Any, Any] = Table("engine", rows, start=ENGINE.start)

    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(engine_module, "ENGINE", table)
        patch.setattr(engine_module, "_DECIDER", _machine.Decider(table))

    return apply


def _each(change: Callable[[Row[Any]], Row[Any] | None]) -> Edit:
    def apply(row: Row[Any]) -> Iterable[Row[Any]]:
        new = change(row)
        return [] if new is None else [new]

    return apply

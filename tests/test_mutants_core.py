"""The checks of the core have teeth: a table that is wrong in one place is refused.

A mutant is the table of a round, or of an engine rank, with one thing changed: a row is gone, leads
somewhere else, lacks its guard, its lesson or one of its orders. It must be killed, by a law at import, by a
promise that the explorer sees broken, or by a row that nobody can take any more. What may live is written
down, with the reason.
"""
# ruff: noqa: T201  who killed whom is what one wants to read of this run

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from weightsync.fsm.engine_table import ENGINE
from weightsync.fsm.errors import TableError
from weightsync.fsm.explore import chaos, small_round
from weightsync.fsm.explore_engine import ENGINE_PROMISES, explore_engine
from weightsync.fsm.invariants import PROMISES
from weightsync.fsm.rows import Row, Table
from weightsync.fsm.search import Exploration
from weightsync.fsm.states import EngineState, State
from weightsync.fsm.table import ROUND, check_laws

pytestmark = pytest.mark.usefixtures("untraced")

SURVIVORS: dict[str, str] = {}
"""Mutants of the round that may live, each with the reason why it is as good as the original."""

ENGINE_SURVIVORS: dict[str, str] = {
    f"unguard {state} stays: {event} [other]": "no session is open there, so that every session is another"
    for state in ("Serving", "Quarantined")
    for event in ("AbortOrdered", "LimitReached")
}
"""The same for the engine rank."""

SAMPLE = 7
"""The ordinary run tries one mutant in so many; `make mutants` tries them all."""


@dataclass(frozen=True)
class Mutant:
    """A changed list of rows, and what was changed."""

    name: str
    rows: tuple[Row[Any], ...]


def mutants(table: Table[Any, Any]) -> Iterator[Mutant]:
    """Every mutant of a table, row by row."""
    for place, row in enumerate(table.rows):
        before, after = table.rows[:place], table.rows[place + 1 :]
        name = str(row).partition(" ")[2]  # without its number, which changes when rows are added
        yield Mutant(f"delete {name}", (*before, *after))
        for what, changed in changes(table, row):
            yield Mutant(f"{what} {name}", (*before, changed, *after))


def changes(table: Table[Any, Any], row: Row[Any]) -> Iterator[tuple[str, Row[Any]]]:
    """Every way to spoil one row, short of deleting it."""
    if row.guard is not None:
        yield "unguard", replace(row, guard=None)
    if row.learn is not None:
        yield "forget", replace(row, learn=None)
    for number, order in enumerate(row.orders):
        yield f"no {order.name}", replace(row, orders=row.orders[:number] + row.orders[number + 1 :])
    for state in table.states:
        if state is not row.goal:
            yield f"to {state.name}", replace(row, target=state)
    if row.target not in (None, row.source):
        yield "stays", replace(row, target=None)


# -- how they are killed ------------------------------------------------------------------------------------


def killer(rows: Iterable[Row[Any]]) -> str | None:
    """What kills a mutant of the round, or None: laws first, then the smallest exploration that does."""
    table: Table[State, Any] = Table("mutant", rows, start=ROUND.start, final=ROUND.final, entry=ROUND.entry)
    try:
        check_laws(table)
    except TableError as error:
        return f"law {str(error).split(chr(39))[1]}"
    return explored(
        table,
        partial(chaos, small_round(1, 1), table=table, until=PROMISES, limit=20_000),
        partial(chaos, small_round(2, 1), table=table, until=PROMISES, limit=20_000),
    )


def engine_killer(rows: Iterable[Row[Any]]) -> str | None:
    """The same for an engine rank, which has no laws of its own."""
    table: Table[EngineState, Any] = Table("mutant", rows, start=ENGINE.start)
    return explored(
        table,
        *(
            partial(
                explore_engine,
                stages=stages,
                buckets=buckets,
                table=table,
                until=ENGINE_PROMISES,
                limit=2_000,
            )
            for stages in (True, False)
            for buckets in (1, 2)
        ),
    )


def explored(table: Table[Any, Any], *runs: Callable[[], Exploration[Any]]) -> str | None:
    """The first broken promise, or else a row that none of the explorations took."""
    taken: set[int] = set()
    for run in runs:
        found = run()
        if found.violations:
            return f"promise {next(iter(found.violations))}"
        taken |= set(found.rows)
    return None if taken == {row.number for row in table.rows} else "dead row"


def survivors(chosen: Iterable[Mutant], kill: Callable[[Iterable[Row[Any]]], str | None]) -> set[str]:
    """The mutants that nothing kills; who killed the others is printed."""
    living: set[str] = set()
    killers: Counter[str] = Counter()
    for mutant in chosen:
        who = kill(mutant.rows)
        killers[who.split()[0] if who else "alive"] += 1
        print(f"{who or 'ALIVE':24} {mutant.name}")
        if who is None:
            living.add(mutant.name)
    print(f"{sum(killers.values())} mutants: {dict(killers)}")
    return living


# -- the tests ----------------------------------------------------------------------------------------------


def test_the_tables_themselves_live() -> None:
    """Nothing kills the tables as they are: otherwise a dead mutant would say nothing."""
    assert killer(ROUND.rows) is None
    assert engine_killer(ENGINE.rows) is None


def test_a_sample_of_the_mutants_of_the_round_dies() -> None:
    """One mutant in seven, always the same ones, and none of them lives unexplained."""
    living = survivors(list(mutants(ROUND))[::SAMPLE], killer)
    assert living <= SURVIVORS.keys()


@pytest.mark.mutation
@pytest.mark.timeout(1800)
def test_every_mutant_of_the_round_dies() -> None:
    """All mutants die, except for those that are written down, and these do live."""
    assert survivors(mutants(ROUND), killer) == SURVIVORS.keys()


def test_every_mutant_of_the_engine_dies() -> None:
    """All mutants of an engine rank die, except for those that are written down, and these do live."""
    assert survivors(mutants(ENGINE), engine_killer) == ENGINE_SURVIVORS.keys()

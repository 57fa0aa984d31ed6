"""Everything that can happen to a round, explored. What that once found is kept in ``test_holes.py``."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest

from tablechanges import changed, edit
from weightsync.fsm import events as e
from weightsync.fsm.errors import IllegalEvent
from weightsync.fsm.explore import SOMETHING, Seen, alphabet, chaos, small_round
from weightsync.fsm.facts import Facts
from weightsync.fsm.invariants import PROMISES
from weightsync.fsm.reducer import Position, begin, step
from weightsync.fsm.search import Exploration
from weightsync.fsm.states import Disposition, Outcome, Publication, State
from weightsync.fsm.table import ROUND

pytestmark = pytest.mark.usefixtures("untraced")

# -- the round as it is -------------------------------------------------------------------------------------

COUNTS: dict[str, tuple[Facts, int, tuple[int, int, int]]] = {
    "one engine": (small_round(1, 1), 1, (237, 4151, 5329)),
    "one engine that stages": (small_round(1, 1, inplace=0), 1, (269, 4751, 6009)),
    "two engines": (small_round(2, 1), 1, (2483, 53412, 60806)),
    "two engines, all needed": (small_round(2, 2), 1, (1187, 25546, 29056)),
    "two engines, two buckets": (small_round(2, 1), 2, (2727, 58105, 70064)),
    "two engines, two buckets, all needed": (small_round(2, 2), 2, (1321, 28231, 33856)),
    "two engines that stage": (small_round(2, 1, inplace=0), 1, (2907, 63002, 70720)),
    "two engines in place": (small_round(2, 1, inplace=2), 1, (2187, 46702, 53900)),
    "catching one up": (small_round(2, 1, tainted=1), 1, (2483, 53412, 60806)),
    "catching one up, all needed": (small_round(2, 2, tainted=1), 1, (1187, 25546, 29056)),
}
"""(facts, buckets, (positions, accepted, refused)): exact, so that a row or a state that gets lost shows."""


@functools.cache
def explored() -> Exploration[Seen]:
    """The chaos of two engines, one of which is enough."""
    return chaos(small_round(2, 1))


@pytest.mark.parametrize("name", COUNTS)
def test_no_promise_is_broken(name: str) -> None:
    """Whatever is said, and whenever, no promise is broken; and the size of what was explored is known."""
    facts, buckets, counts = COUNTS[name]
    found = explored() if name == "two engines" else chaos(facts, buckets=buckets)
    assert not found.violations, "\n".join(found.lines())
    assert (found.positions, found.accepted, found.refused) == counts, "a change of the table? then of these"


@pytest.mark.slow
def test_no_promise_is_broken_with_three_engines() -> None:
    """Three engines of which two are enough: the smallest round that can lose one and still have two."""
    found = chaos(small_round(3, 2))
    assert not found.violations, "\n".join(found.lines())
    assert (found.positions, found.accepted, found.refused) == (17361, 447119, 455653)


def test_every_row_is_taken() -> None:
    """No row is dead: with two engines, one in place and one enough, each row is taken at least once."""
    assert set(explored().rows) == {row.number for row in ROUND.rows}


def test_rows_about_a_quorum_that_holds_are_dead_when_all_are_needed() -> None:
    """The check for dead rows can fail: where everybody is needed, no loss leaves a quorum."""
    taken = chaos(small_round(2, 2)).rows
    dead = {row.guard.__name__ for row in ROUND.rows if row.number not in taken and row.guard}
    wanted = {
        "loss_holds",
        "loss_more",
        "loss_last",
        "bad_more",
        "bad_last",
        "x_more",
        "x_last",
        "l_more",
        "l_last",
    }
    assert dead == wanted | {"out"}


def test_every_outcome_is_reached() -> None:
    """A round can end complete, partial and failed, and what is known of its publication can be anything."""
    ends = [node.position.facts for node in explored().nodes if node.position.state is State.Released]
    assert {facts.outcome for facts in ends} == set(Outcome) - {Outcome.passed_over}  # there was no round
    assert {facts.publication for facts in ends} == set(Publication)
    assert {facts.disposition(engine) for facts in ends for engine in facts.roster} == set(Disposition)


def test_an_old_incarnation_and_a_stranger_change_nothing() -> None:
    """Those who take no part add steps and refusals, but not one position."""
    alone = chaos(small_round(2, 1), strangers=())
    assert alone.positions == explored().positions
    assert alone.accepted < explored().accepted


def test_what_the_explorer_forgets_decides_nothing() -> None:
    """A round with its causes and tries goes the same way as one without, in a thousand random rounds."""
    said = alphabet(small_round(2, 1))
    dice = random.Random(7)
    for _ in range(1000):
        full, _ = begin(small_round(2, 1))
        short = full
        for letter in dice.choices(said, k=25):
            full, short = after(full, letter.event), after(short, letter.event)
            short = Position(short.state, forget(short.facts))
            assert short == Position(full.state, forget(full.facts))


def after(position: Position, event: e.Event) -> Position:
    """The position after an event, which is the same one if it is refused."""
    try:
        return step(position, event).after
    except IllegalEvent:
        return position


def forget(facts: Facts) -> Facts:
    """Facts as the explorer keeps them."""
    return replace(facts, tries=0, cause=facts.cause and SOMETHING)


def test_a_violation_is_told_with_its_shortest_trace() -> None:
    """What is printed says the promise, how often it was hit, and step by step how to get there."""
    found = chaos(small_round(2, 1), table=changed(edit("LockGranted", "Idle", "too_few", guard=None)))
    assert "one-row" in found.violations
    lines = found.violations["one-row"].lines()
    assert lines == ["one-row, after 1 steps:", "  1. LockGranted -> (here)"]
    assert found.lines()[1].endswith(f"x {lines[0]}")
    assert str(found.violations["one-row"]) == "\n".join(lines)


def test_it_can_stop_at_the_first_violation() -> None:
    """Who only wants to know whether there is one need not wait for all."""
    table = changed(edit("LockGranted", "Idle", "too_few", guard=None))
    found = chaos(small_round(2, 1), table=table, until=PROMISES)
    assert list(found.violations) == ["one-row"]
    assert found.positions < explored().positions

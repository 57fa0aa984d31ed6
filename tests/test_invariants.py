"""Every promise can be broken, and is then reported under its own name.

The explorers find nothing in the tables as they are, so that each of their checks is shown here to find what
it is there for: in a position that no round can reach, in a step that no row makes, or in a spoilt table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from weightsync.fsm import events as e
from weightsync.fsm.consequences import Scene, step_breaks
from weightsync.fsm.explore import alphabet, chaos, small_round
from weightsync.fsm.facts import Cause, Facts
from weightsync.fsm.invariants import PROMISES, Truth, proven, standing
from weightsync.fsm.orders import Order, Verb
from weightsync.fsm.receipt import Expectation, Participant
from weightsync.fsm.reducer import Position, begin, step
from weightsync.fsm.rows import Row, Table
from weightsync.fsm.states import Disposition, Lock, Outcome, Publication, State
from weightsync.fsm.table import ENTRY, ROUND
from weightsync.fsm.welcome import welcome

E1, E2 = Participant("e1"), Participant("e2")
BOTH = frozenset({E1, E2})
SAID = {letter.label: letter for letter in alphabet(small_round(2, 1))}
GOOD = [
    "LockGranted", "Prepared", "BucketSent(0)", "AllSent", "EngineAcked(e1)", "EngineAcked(e2)",
    "EngineCommitted(e1)", "EngineCommitted(e2)", "Published", "Cleaned", "Unlocked",
]  # fmt: skip


def reached(*labels: str) -> tuple[Position, Truth]:
    """The position after these facts, and what they prove."""
    (position, _), truth = begin(small_round(2, 1)), Truth()
    for label in labels:
        taken = step(position, SAID[label].event)
        verbs = tuple(order.verb for order in taken.orders)
        position, truth = taken.after, truth.then(position.state, SAID[label].event, verbs)
    return position, truth


# -- positions ----------------------------------------------------------------------------------------------

SENT, ACKED, COMMITTED, RELEASED = GOOD[:4], GOOD[:6], GOOD[:8], GOOD
SPOILT: list[tuple[str, list[str], dict[str, Any], dict[str, Any]]] = [
    ("evidence", SENT, {"lock": Lock.gone}, {}),
    ("evidence", RELEASED, {"settled": False, "lock": Lock.held}, {"lock": Lock.held, "releases": 0}),
    ("release", RELEASED, {}, {"releases": 2}),
    ("release", SENT, {}, {"releases": 1}),
    ("proof", SENT[:3], {"acks": frozenset({E1}), "sent": 0}, {}),
    ("decided", ACKED, {"acks": frozenset({E1})}, {}),
    ("publish", COMMITTED, {}, {"publishes": 2}),
    ("publish", COMMITTED, {}, {"publishes": 0}),
    ("publish", COMMITTED, {"committed": frozenset({E1})}, {}),
    ("publish", COMMITTED, {"committed": frozenset(), "quarantined": BOTH}, {}),
    ("quorum", SENT, {"evicted": BOTH}, {}),
    ("quorum", ACKED, {"quarantined": BOTH}, {}),
    ("awaited", SENT, {"acks": BOTH}, {}),
    ("awaited", ACKED, {"quarantined": frozenset({E1}), "committed": frozenset({E2})}, {}),
    ("clean", RELEASED, {"publication": Publication.unknown}, {}),
    ("clean", RELEASED, {"committed": frozenset({E1})}, {}),
]


@pytest.mark.parametrize(("promise", "labels", "facts", "truth"), SPOILT)
def test_a_position_that_breaks_a_promise_is_noticed(
    promise: str, labels: list[str], facts: dict[str, Any], truth: dict[str, Any]
) -> None:
    """The position as the table reaches it is fine; with the change it breaks this promise."""
    position, known = reached(*labels)
    assert not list(standing(position.state, position.facts, known))
    spoilt = replace(position.facts, **facts)
    assert promise in list(standing(position.state, spoilt, known._replace(**truth)))


@pytest.mark.parametrize(
    ("promise", "labels", "name", "instead"),
    [
        ("taint", [], "disposition", lambda facts, engine: Disposition.serving_old),
        ("disposition", SENT, "disposition", lambda facts, engine: Disposition.serving_old),
        ("disposition", SENT, "disposition", lambda facts, engine: Disposition.serving_new),
        ("disposition", RELEASED, "disposition", lambda facts, engine: Disposition.quarantined),
        ("outcome", SENT, "outcome", property(lambda facts: Outcome.partial)),
        ("outcome", RELEASED, "outcome", property(lambda facts: Outcome.failed)),
    ],
)
def test_a_wrong_sum_is_noticed(
    promise: str, labels: list[str], name: str, instead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dispositions and outcome are worked out a second time, and compared."""
    position, truth = reached(*labels)
    facts = replace(position.facts, tainted=frozenset({E1} if promise == "taint" else ()))
    assert not list(standing(position.state, facts, truth))
    monkeypatch.setattr(Facts, name, instead)
    assert promise in list(standing(position.state, facts, truth))


def test_nobody_owes_an_answer_when_all_and_the_ledger_have_answered() -> None:
    """An open engine, or a publication that is unknown, is an answer still owed."""
    assert not proven(reached(*ACKED)[0].facts)
    assert not proven(reached(*COMMITTED)[0].facts)
    assert proven(reached(*COMMITTED, "Published")[0].facts)


def test_the_truth_is_what_happened() -> None:
    """Kept by the facts alone: a lease lost in Idle proves nothing, since the lock is still asked for."""
    assert Truth().then(State.Idle, e.LeaseLost(), ()).lock is Lock.asked
    assert Truth().then(State.Idle, e.LockGranted(1), ()).lock is Lock.held
    held = Truth(Lock.held)
    for event in (e.LeaseLost(), e.Unlocked(), e.LockRefused()):
        assert held.then(State.Failed, event, ()).lock is Lock.gone
    assert held.then(State.Cleaning, e.Cleaned(), (Verb.ReleaseLock,)) == Truth(Lock.held, releases=1)
    assert (
        Truth(Lock.held, 2, 2).then(State.Cleaning, e.Cleaned(), (Verb.ReleaseLock, Verb.Publish)).releases
        == 2
    )


# -- steps --------------------------------------------------------------------------------------------------


def scene(*labels: str, **changes: Any) -> Scene:
    """The last of these steps, as the table makes it, with changes."""
    before, _ = reached(*labels[:-1])
    letter = SAID[labels[-1]]
    taken = step(before, letter.event)
    found = Scene(
        before.state,
        before.facts,
        letter.event,
        letter.good,
        taken.after.state,
        taken.after.facts,
        taken.orders,
    )
    assert not list(step_breaks(found, ENTRY))
    for name, value in changes.items():
        setattr(found, name, value(getattr(found, name)) if callable(value) else value)
    return found


def knows(**facts: Any) -> Callable[[Facts], Facts]:
    """Facts with other values in some fields."""
    return lambda known: replace(known, **facts)


LATER = Cause("TransportFailed", State.Failed)
STEPS: list[tuple[str, list[str], dict[str, Any]]] = [
    ("unasked", [*SENT[:2], "BucketSent(0)"], {"state": State.Locked}),
    ("downhill", [*SENT, "EngineAcked(e1)"], {"goal": State.Locked}),
    ("downhill", [*SENT, "Cancelled", "TransportFailed"], {"goal": State.Cleaning}),
    ("evidence", [*SENT, "EngineAcked(e1)"], {"goal": State.Released}),
    ("evidence", RELEASED, {"goal": State.Cleaning, "orders": ()}),
    ("evidence", RELEASED, {"after": knows(lock=Lock.held)}),
    ("failing", [*SENT, "EngineLost(e1)"], {"goal": State.Failed}),
    ("failing", [*SENT, "Cancelled"], {"goal": State.Awaiting}),
    ("decided", [*SENT, "EngineAcked(e1)"], {"goal": State.Cleaning}),
    ("decided", ACKED, {"after": knows(decided=False)}),
    ("proof", [*SENT, "EngineAcked(e1)"], {"after": knows(acks=frozenset())}),
    ("proof", [*SENT, "EngineAcked(e1)"], {"good": False}),
    ("told", [*SENT, "EngineLost(e1)"], {"after": knows(evicted=frozenset())}),
    ("told", [*SENT, "EngineLost(e1)"], {"after": knows(evicted=BOTH)}),
    ("told", [*SENT, "Cancelled", "EngineReverted(e2)"], {"after": knows(reverted=frozenset())}),
    ("told", [*SENT, "Cancelled", "EngineReverted(e1)"], {"after": knows(reverted=frozenset({E1}))}),
    ("members", ["LockGranted"], {"after": knows(members=frozenset({E1}))}),
    ("publication", [*COMMITTED, "Published"], {"after": knows(publication=Publication.unknown)}),
    ("publish", COMMITTED, {"orders": ()}),
    ("publish", ACKED, {"orders": lambda orders: (*orders, Order(Verb.Publish))}),
    ("commit", ACKED, {"orders": ()}),
    ("commit", ACKED, {"orders": (Order(Verb.Commit, (E1,)),)}),
    ("commit", [*SENT, "Cancelled"], {"orders": lambda orders: (Order(Verb.Commit, (E1, E2)), *orders)}),
    ("fence", [*SENT, "EngineLost(e1)"], {"orders": ()}),
    ("fence", [*SENT, "EngineLost(e1)"], {"orders": (Order(Verb.Fence, (E2,)),)}),
    ("fence", [*SENT, "Cancelled", "TimedOut(Failed)"], {"orders": (Order(Verb.ReleaseLock),)}),
    ("release", GOOD[:10], {"orders": ()}),
    ("release", GOOD[:10], {"orders": lambda orders: (*orders, *orders)}),
    ("release", [*GOOD[:10], "UnlockFailed"], {"after": knows(tries=0)}),
    ("release", [*GOOD[:10], "UnlockFailed"], {"orders": ()}),
    ("clean", [*SENT, "Cancelled", "TimedOut(Failed)"], {"after": knows(unclean=False)}),
    ("clean", GOOD[:10], {"after": knows(settled=False)}),
    ("taint", ["LockGranted"], {"after": knows(tainted=BOTH)}),
    ("facts", ["LockGranted"], {"after": knows(epoch=7)}),
    ("facts", ["LockGranted"], {"after": knows(quorum=2)}),
    ("facts", GOOD[:2], {"after": knows(plan=Expectation("other", 1, 1, 1))}),
    ("facts", GOOD[:3], {"after": knows(sent=0)}),
    ("cause", [*SENT, "Cancelled"], {"after": knows(cause=None)}),
    ("cause", [*SENT, "Cancelled"], {"after": knows(cause=Cause("TimedOut", State.Awaiting))}),
    ("cause", [*SENT, "Cancelled", "TransportFailed"], {"after": knows(cause=LATER)}),
    ("cause", [*SENT, "EngineLost(e1)"], {"after": knows(cause=Cause("EngineLost", State.Awaiting, E1))}),
    ("orders", ["LockGranted"], {"orders": ()}),
    ("orders", [*COMMITTED, "Published"], {"orders": ()}),
    ("orders", [*SENT, "TimedOut(Locked)"], {"orders": (Order(Verb.Collect, (E1, E2)),)}),
    ("orders", [*SENT, "EngineAcked(e2)", "EngineLost(e1)"], {"orders": lambda orders: orders[::-1]}),
]  # fmt: skip


@pytest.mark.parametrize(("promise", "labels", "changes"), STEPS)
def test_a_step_that_breaks_a_promise_is_noticed(
    promise: str, labels: list[str], changes: dict[str, Any]
) -> None:
    """The step as the table makes it is fine; with the change it breaks this promise."""
    assert promise in list(step_breaks(scene(*labels, **changes), ENTRY))


# -- tables -------------------------------------------------------------------------------------------------


def spoil(number: int, **changes: Any) -> Table[State, Facts]:
    """The round's table with one row changed, or taken out."""
    rows = [replace(row, **changes) if row.number == number else row for row in ROUND.rows]
    kept = rows if changes else [row for row in rows if row.number != number]
    return Table("spoilt", kept, start=State.Idle, final=(State.Released,), entry=ENTRY)


def number(event: type[e.Event], source: State, guard: str | None) -> int:
    """The number of a row."""
    (found,) = (row for row in ROUND.rows if matches(row, event, source, guard))
    return found.number


def matches(row: Row[State], event: type[e.Event], source: State, guard: str | None) -> bool:
    """Whether a row is the one that is meant."""
    return (row.event, row.source) == (event, source) and (row.guard.__name__ if row.guard else None) == guard


UNLOCKED = number(e.Unlocked, State.Failed, "settled")
NEXT = number(e.BucketSent, State.Broadcasting, "next_bucket")
LATE = number(e.TimedOut, State.Broadcasting, "late")
DUE = number(e.TimedOut, State.Broadcasting, "due")
TABLES: list[tuple[str, Table[State, Facts]]] = [
    ("watchdogs", spoil(LATE)),
    ("owed", spoil(UNLOCKED)),
    ("inevitable", spoil(UNLOCKED)),
    ("one-row", spoil(LATE, guard=None)),
    ("one-row", spoil(LATE, guard=lambda facts, event, state: 1 / 0)),
    ("finite", spoil(NEXT, guard=None)),
    ("failing", spoil(DUE, target=None)),
]


@pytest.mark.parametrize(("promise", "table"), TABLES)
def test_a_table_that_breaks_a_promise_is_noticed(promise: str, table: Table[State, Facts]) -> None:
    """The smallest round there is shows it."""
    assert promise in chaos(small_round(1, 1), table=table, limit=400).violations


def test_no_promise_is_left_out() -> None:
    """Each of them is broken in this file, or it could be one that cannot be broken."""
    sums = {"taint", "disposition", "outcome"}
    assert {case[0] for case in (*SPOILT, *STEPS, *TABLES)} | sums == PROMISES.keys()


# -- who may speak ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [e.EngineLost(E1), e.LeaseLost(), e.Cancelled(), e.TimedOut(State.Idle)])
def test_watchdogs_are_always_welcome(event: e.Event) -> None:
    """They cannot know where the round is."""
    for length in range(len(GOOD) + 1):
        position, _ = reached(*GOOD[:length])
        assert welcome(position.state, position.facts, event)


def test_in_a_good_round_only_what_comes_next_is_welcome() -> None:
    """Of the facts of a good round, each is welcome in its turn; receipts and commits also twice."""
    for length in range(len(GOOD)):
        position, _ = reached(*GOOD[:length])
        wanted = [label for label in GOOD if welcome(position.state, position.facts, SAID[label].event)]
        kinds = {label.partition("(")[0] for label in wanted}
        assert GOOD[length] in wanted
        assert kinds <= {GOOD[length].partition("(")[0], "EngineCommitted"}

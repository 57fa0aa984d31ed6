"""A round at run time: changed by facts alone, one at a time, all or nothing."""

import copy
import pickle
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from weightsync.fsm import events as e
from weightsync.fsm import reducer
from weightsync.fsm import round as round_module
from weightsync.fsm._machine import Decider
from weightsync.fsm.errors import GuardFailed, IllegalEvent, Reentrant, TableError
from weightsync.fsm.facts import Facts, opening
from weightsync.fsm.orders import Verb
from weightsync.fsm.receipt import Expectation, Participant
from weightsync.fsm.record import plain
from weightsync.fsm.round import Identity, Round
from weightsync.fsm.rows import Row, Table
from weightsync.fsm.setting import Setting
from weightsync.fsm.states import Lock, State
from weightsync.fsm.table import ROUND

A, B = Participant("a"), Participant("b")
PLAN = Expectation("plan", 2, 128, 2, "digest")

WAYS: dict[State, tuple[e.Event, ...]] = {
    State.Idle: (),
    State.Locked: (e.LockGranted(7),),
    State.Broadcasting: (e.LockGranted(7), e.Prepared(PLAN)),
    State.Awaiting: (e.LockGranted(7), e.Prepared(PLAN), e.BucketSent(0), e.BucketSent(1), e.AllSent()),
    State.Failed: (e.LockGranted(7), e.Cancelled()),
    State.Released: (e.LockRefused(), e.Cleaned()),
}
"""A way to a state that needs no receipt."""

STRANGE = [
    (state, kind)
    for state in WAYS
    for kind in sorted(e.PROTAGONISTS, key=str)
    if not ROUND.rows_for(state, kind)
]
"""The answers for which a state has no row at all."""


def opened() -> Round:
    """A round in Idle that asks for two engines."""
    facts = opening(round="r", version=3, roster=[A, B], quorum=2)
    return Round.open(facts, Identity(step=9, attempt=2, owner="me"), at=1.0, wall=100.0)


def brought_to(state: State) -> Round:
    """A round in ``state``."""
    round = opened()
    for at, event in enumerate(WAYS[state], start=2):
        round.fire(event, at=float(at), wall=100.0 + at)
    assert round.state is state
    return round


def mutated(monkeypatch: pytest.MonkeyPatch, changed: Any) -> Table[State, Facts]:
    """The round's table with ``changed(row)`` for each row, in the reducer's hands."""
    rows: list[Row[State]] = [changed(row) for row in ROUND.rows]
    table: Table[State, Facts] = Table("round", rows, start=ROUND.start, final=ROUND.final, entry=ROUND.entry)
    monkeypatch.setattr(round_module, "step", lambda position, event: reducer.step(position, event, table))
    return table


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads that take turns as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# -- what cannot be done to a round ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["state", "facts", "since"])
def test_a_round_is_changed_by_facts_alone(name: str) -> None:
    """There is no assignment to what a round is, and no room for anything else on it."""
    round = opened()
    with pytest.raises(AttributeError):
        setattr(round, name, getattr(round, name))
    with pytest.raises(AttributeError):
        round.extra = 1  # type: ignore[attr-defined]


def test_a_round_is_made_by_open_alone() -> None:
    """The constructor has no public use."""
    facts = opened().facts
    with pytest.raises(TypeError, match=r"Round\.open"):
        Round(object(), facts, Identity(), setting=Setting(), at=0.0, wall=0.0)


def test_a_round_has_no_subclasses() -> None:
    """Nobody overrides what a fact does."""
    with pytest.raises(TypeError, match="subclassed"):
        type("Mine", (Round,), {})


@pytest.mark.parametrize("move", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_round_stays_in_its_process(move: Any) -> None:
    """A copy would be a second round with one lock; records and events are what travels."""
    round = opened()
    with pytest.raises(TypeError, match="stays in its process"):
        move(round)
    assert pickle.loads(pickle.dumps(round.records())) == round.records()


# -- legal and illegal facts ----------------------------------------------------------------------------


def test_a_fact_moves_the_round_and_gives_its_orders() -> None:
    """The step holds the row, the new position and whom the orders are for."""
    round = opened()
    assert [order.verb for order in round.orders] == [Verb.AcquireLock]
    taken = round.fire(e.LockGranted(7), at=2.5, wall=101.5)
    assert (round.state, round.facts.lock, round.facts.epoch) == (State.Locked, Lock.held, 7)
    assert taken.after.facts is round.facts
    assert [(order.verb, order.engines) for order in taken.orders] == [(Verb.Prepare, (A, B))]


@pytest.mark.parametrize(
    ("state", "kind"), STRANGE, ids=lambda it: it.name if isinstance(it, State) else it.__name__
)
def test_an_illegal_fact_raises_and_changes_nothing(state: State, kind: type[Any]) -> None:
    """Not the state, not a fact, not the journal: the very same snapshot is there."""
    round = brought_to(state)
    before = round._snapshot
    extra: dict[str, Any] = {
        "epoch": 8, "plan": PLAN, "index": 0, "engine": A, "receipts": (),
    }  # fmt: skip
    event = kind(**{name: extra[name] for name in extra if name in kind.__slots__})
    with pytest.raises(IllegalEvent, match=rf"{kind.__name__}.* {state.name} \(round r, version 3\)"):
        round.fire(event, at=50.0, wall=150.0)
    assert round._snapshot is before


def test_a_fact_that_no_guard_lets_in_is_illegal_too() -> None:
    """The second bucket before the first one."""
    round = brought_to(State.Broadcasting)
    before = round._snapshot
    with pytest.raises(IllegalEvent, match="BucketSent"):
        round.fire(e.BucketSent(1), at=9.0, wall=9.0)
    assert round._snapshot is before


def test_since_is_the_time_of_the_last_move() -> None:
    """A fact that stays in its state does not restart the state's clock."""
    round = brought_to(State.Broadcasting)
    entered = round.since
    round.fire(e.BucketSent(0), at=entered + 5.0, wall=0.0)
    assert round.since == entered
    round.fire(e.Cancelled(), at=entered + 6.0, wall=0.0)
    assert round.since == entered + 6.0


@pytest.mark.parametrize("reader", ["reducer", "machine"])
def test_a_guard_that_raises_refuses_the_fact(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the two readings meets it; the error is the cause, the snapshot is the same."""

    def broken(facts: object, event: object, state: object) -> bool:
        raise ZeroDivisionError("in a guard")

    def spoil(row: Row[State]) -> Row[State]:
        return replace(row, guard=broken) if row.event is e.LockGranted else row

    round = opened()
    before = round._snapshot
    with monkeypatch.context() as patched:
        table = mutated(patched, spoil)
        if reader == "machine":
            patched.setattr(round_module, "step", reducer.step)
            patched.setattr(round_module, "_DECIDER", Decider(table))
        with pytest.raises(GuardFailed) as caught:
            round.fire(e.LockGranted(7), at=2.0, wall=2.0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert round._snapshot is before
    round.fire(e.LockGranted(7), at=2.0, wall=2.0)
    assert round.state is State.Locked


def test_two_readings_that_differ_stop_the_round_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table read in two ways is an error of the program: nothing is committed on its word."""
    round = opened()
    before = round._snapshot
    mutated(
        monkeypatch,
        lambda row: replace(row, target=State.Failed) if row.target is State.Locked else row,
    )
    with pytest.raises(TableError, match="disagree"):
        round.fire(e.LockGranted(7), at=2.0, wall=2.0)
    assert round._snapshot is before


def test_a_fact_fired_from_inside_a_commit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard that fires or notes gets Reentrant instead of a deadlock, and its fact is refused."""
    round = opened()
    before = round._snapshot

    def nosy(facts: object, event: object, state: object) -> bool:
        round.fire(e.Cancelled(), at=3.0, wall=3.0)
        return True

    mutated(monkeypatch, lambda row: replace(row, guard=nosy) if row.event is e.LockGranted else row)
    with pytest.raises(GuardFailed) as caught:
        round.fire(e.LockGranted(7), at=2.0, wall=2.0)
    assert isinstance(caught.value.__cause__, Reentrant)
    assert round._snapshot is before
    with round._guard(), pytest.raises(Reentrant):
        round.note("note", wall=3.0)


@pytest.mark.usefixtures("eager_threads")
def test_of_two_facts_that_exclude_each_other_one_wins() -> None:
    """Fired from two threads at the same moment: one is taken, the other finds the round changed."""
    outcomes = set()
    for _ in range(200):
        round, barrier = opened(), threading.Barrier(2, timeout=10)
        refused: list[e.Event] = []

        def fire(
            event: e.Event, round: Round = round, barrier: Any = barrier, refused: Any = refused
        ) -> None:
            barrier.wait()
            try:
                round.fire(event, at=2.0, wall=2.0)
            except IllegalEvent:
                refused.append(event)

        threads = [
            threading.Thread(target=fire, args=(event,)) for event in (e.LockGranted(7), e.LockRefused())
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(refused) == 1
        assert len(round.records()) == 2
        outcomes.add(round.state)
    assert outcomes <= {State.Locked, State.Failed}


# -- the journal ----------------------------------------------------------------------------------------


def test_the_first_record_opens_the_round() -> None:
    """It says what the round starts from, so that the records alone tell the story."""
    (first,) = opened().records()
    told = first.to_json()
    assert told.pop("facts") == {"roster": [plain(A), plain(B)], "quorum": 2, "inplace": [], "tainted": []}
    assert told == {
        "time": 100.0, "event": "opened", "schema": 1, "table": ROUND.digest, "round": "r", "seq": 0,
        "step": 9, "version": 3, "attempt": 2, "target": "Idle", "owner": "me",
    }  # fmt: skip


def test_a_transition_is_told_with_its_guard_its_facts_and_its_time() -> None:
    """Seconds are those spent in the state that was left."""
    round = opened()
    round.fire(e.EngineLost(A, ValueError("gone")), at=1.5, wall=100.5)
    told = round.records()[-1].to_json()
    assert told.pop("facts") == {"lost": [plain(A)]}
    assert told == {
        "time": 100.5, "event": "transition", "schema": 1, "table": ROUND.digest, "round": "r", "seq": 1,
        "step": 9, "version": 3, "attempt": 2, "source": "Idle", "target": "Idle", "trigger": "EngineLost",
        "guard": "asked_for", "engine": "a", "seconds": 0.5, "owner": "me", "culprit": "a",
        "error": "ValueError: gone",
    }  # fmt: skip


def test_records_can_be_read_from_a_number_on() -> None:
    """Whoever hands them on asks for what is new."""
    round = brought_to(State.Awaiting)
    assert [record.seq for record in round.records()] == list(range(6))
    assert round.records(4) == round.records()[4:]
    assert round.records(6) == ()


def test_a_note_is_a_record_and_nothing_else() -> None:
    """State, facts and the state's clock stay; a note with a key that no line has is refused whole."""
    round = brought_to(State.Locked)
    position, since = round._snapshot.position, round.since
    round.note("call", wall=105.0, trigger="plan", seconds=0.25)
    assert round._snapshot.position is position
    assert round.since == since
    record = round.records()[-1]
    assert (record.event, record.seq, record.trigger, record.seconds, record.epoch) == (
        "call",
        2,
        "plan",
        0.25,
        7,
    )
    before = round._snapshot
    with pytest.raises(TypeError):
        round.note("call", wall=105.0, colour="red")
    assert round._snapshot is before

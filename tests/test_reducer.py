"""One step of a round: what it teaches, where it leads, and what it orders, for whom."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.fsm import events as e
from weightsync.fsm.consequences import Scene, step_breaks
from weightsync.fsm.errors import IllegalEvent
from weightsync.fsm.explore import Said, alphabet, small_round
from weightsync.fsm.facts import Cause
from weightsync.fsm.invariants import Truth, standing
from weightsync.fsm.orders import Order, Verb
from weightsync.fsm.receipt import Participant
from weightsync.fsm.reducer import Position, Step, begin, step
from weightsync.fsm.states import Lock, Outcome, Publication, State
from weightsync.fsm.table import ENTRY

E1, E2 = Participant("e1"), Participant("e2")
SAID = {letter.label: letter.event for letter in alphabet(small_round(2, 1))}
PREPARED = ("LockGranted", "Prepared")
SENT = (*PREPARED, "BucketSent(0)", "AllSent")
PROVEN = (*SENT, "EngineAcked(e1)", "EngineAcked(e2)")
COMMITTED = (*PROVEN, "EngineCommitted(e1)", "EngineCommitted(e2)")
PUBLISHED = (*COMMITTED, "Published")
CLEAN = (*PUBLISHED, "Cleaned")


def walk(*labels: str, quorum: int = 1) -> Step:
    """The last of these steps."""
    position, _ = begin(small_round(2, quorum))
    taken: Step | None = None
    for label in labels:
        taken = step(position, SAID[label])
        position = taken.after
    assert taken is not None
    return taken


def told(*labels: str, quorum: int = 1) -> list[str]:
    """The orders of the last of these steps, as a log shows them."""
    return [str(order) for order in walk(*labels, quorum=quorum).orders]


# -- the good round -----------------------------------------------------------------------------------------


def test_a_round_begins_by_asking_for_the_lock() -> None:
    """It starts in Idle, knows nothing yet, and gives its first order at once."""
    position, orders = begin(small_round(2, 1))
    assert position.state is State.Idle
    assert orders == (Order(Verb.AcquireLock),)


def test_a_good_round_gives_each_order_once() -> None:
    """Lock, prepare, broadcast, collect, commit, publish, put back, release, deliver: in this order."""
    orders = [told(*CLEAN[:length]) for length in range(1, len(CLEAN) + 1)] + [told(*CLEAN, "Unlocked")]
    assert [order for step_orders in orders for order in step_orders] == [
        "Prepare(e1, e2)", "Broadcast(e1, e2)", "Collect(e1, e2)", "Commit(e1, e2)", "Publish",
        "PutBack(e1, e2)", "ReleaseLock", "Deliver",
    ]  # fmt: skip


def test_a_good_round_ends_complete() -> None:
    """Released, lock gone, published, everybody on the new version, and no reason to fail."""
    end = walk(*CLEAN, "Unlocked").after
    assert end.state is State.Released
    assert (end.facts.lock, end.facts.publication) == (Lock.gone, Publication.yes)
    assert (end.facts.outcome, end.facts.cause, end.facts.unclean) == (Outcome.complete, None, False)
    assert end.facts.epoch == 1
    assert end.facts.members == end.facts.acks == {E1, E2}


# -- orders when something goes wrong -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "orders"),
    [
        ((*PREPARED, "EngineLost(e1)"), ["Fence(e1)"]),
        ((*PREPARED, "EngineLost(e1)", "EngineLost(e1)"), []),
        ((*PREPARED, "EngineLost(e1)", "EngineLost(e2)"), ["Fence(e2)", "Abort"]),
        ((*SENT, "EngineAcked(e1, wrong)"), ["Fence(e1)"]),
        ((*SENT, "EngineAcked(e2)", "EngineAcked(e1, wrong)"), ["Fence(e1)", "Commit(e2)"]),
        ((*SENT, "EngineAcked(e2)", "EngineLost(e1)"), ["Fence(e1)", "Commit(e2)"]),
        ((*PROVEN, "CommitFailed(e1)"), ["Fence(e1)"]),
        ((*PROVEN, "EngineCommitted(e1)", "CommitFailed(e2)"), ["Fence(e2)", "Publish"]),
        ((*PROVEN, "CommitFailed(e1)", "CommitFailed(e2)"), ["Fence(e2)", "Abort"]),
        ((*PUBLISHED, "EngineLost(e1)"), ["Fence(e1)"]),
        ((*COMMITTED, "EngineLost(e1)", "Published"), ["PutBack(e2)"]),
        ((*SENT, "TimedOut(Awaiting)"), ["Abort(e1, e2)"]),
        ((*SENT, "TimedOut(Locked)"), []),
        ((*SENT, "Cancelled", "EngineReverted(e2)", "CleanupFailed"), ["FenceAll(e1)", "ReleaseLock"]),
        ((*SENT, "LeaseLost", "TimedOut(Failed)"), ["FenceAll(e1, e2)", "Deliver"]),
        ((*CLEAN, "UnlockFailed"), ["RetryRelease"]),
        ((*CLEAN, "TimedOut(Cleaning)"), ["RetryRelease"]),
        ((*CLEAN, "UnlockFailed", "TimedOut(Failed)"), ["RetryRelease"]),
        ((*CLEAN, "UnlockFailed", "Unlocked"), ["Deliver"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_what_is_ordered(labels: tuple[str, ...], orders: list[str]) -> None:
    """The row's own orders first, then the one for entering the state; each for whom it concerns."""
    assert told(*labels) == orders


def test_a_release_that_failed_is_not_aborted() -> None:
    """Everything was put back already: Failed is entered without an Abort, and counts the try."""
    after = walk(*CLEAN, "UnlockFailed").after
    assert (after.state, after.facts.settled, after.facts.tries) == (State.Failed, True, 1)
    assert walk(*CLEAN, "UnlockFailed", "UnlockFailed").after.facts.tries == 2


# -- the cause ----------------------------------------------------------------------------------------------


def test_the_first_reason_to_fail_is_kept() -> None:
    """Who, what, where and the very error; a later reason does not replace it."""
    error = RuntimeError("out of memory")
    at = step(walk(*PREPARED, "EngineLost(e1)").after, e.EngineLost(E2, error)).after
    assert at.facts.cause == Cause("EngineLost", State.Broadcasting, E2)
    assert at.facts.cause.error is error
    assert str(at.facts.cause) == "EngineLost of e2 in Broadcasting: out of memory"
    assert step(at, e.TransportFailed(ValueError("later"))).after.facts.cause is at.facts.cause


def test_a_loss_that_the_round_survives_is_no_cause() -> None:
    """As long as the quorum holds there is nothing to blame."""
    assert walk(*PREPARED, "EngineLost(e1)").after.facts.cause is None


# -- refusals -----------------------------------------------------------------------------------------------


def test_what_is_refused_changes_nothing() -> None:
    """The position is the same value as before, and goes on from there."""
    before = walk(*PREPARED).after
    kept = Position(before.state, before.facts)
    with pytest.raises(IllegalEvent, match=r"AllSent is not legal in Broadcasting \(round r, version 1\)"):
        step(before, e.AllSent())
    assert before == kept
    assert step(before, e.BucketSent(0)).after.facts.sent == 1


def test_a_position_cannot_be_assigned_to() -> None:
    """Only a step makes another position."""
    position, _ = begin(small_round())
    with pytest.raises(FrozenInstanceError):
        position.state = State.Released  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        position.facts.quorum = 0  # type: ignore[misc]


# -- any round at all ---------------------------------------------------------------------------------------

LETTERS = {
    (engines, quorum): alphabet(small_round(engines, quorum), 2, [Participant("stranger")])
    for engines, quorum in [(1, 1), (3, 2), (3, 3), (4, 1)]
}


@st.composite
def rounds(draw: st.DrawFn) -> tuple[tuple[int, int], list[Said]]:
    """The size of a round and a story: mostly what makes a good round, with anything else in between."""
    size = draw(st.sampled_from(sorted(LETTERS)))
    said = LETTERS[size]
    forward = [
        letter for letter in said if letter.label.startswith(("Lock", "Prep", "Buck", "All", "EngineA"))
    ]
    letters = st.one_of(st.sampled_from(forward), st.sampled_from(said))
    return size, draw(st.lists(letters, max_size=60))


@settings(max_examples=300)
@given(rounds())
def test_any_story_keeps_every_promise(story: tuple[tuple[int, int], list[Said]]) -> None:
    """Larger rounds than can be explored: only IllegalEvent is raised, and then nothing has changed."""
    (engines, quorum), said = story
    position, _ = begin(small_round(engines, quorum))
    truth = Truth()
    for letter in said:
        before, kept = position, (position.state, position.facts, hash(position))
        try:
            taken = step(before, letter.event)
        except IllegalEvent:
            assert (before.state, before.facts, hash(before)) == kept
            assert type(letter.event) not in e.WATCHDOGS
            continue
        position = taken.after
        truth = truth.then(before.state, letter.event, tuple(order.verb for order in taken.orders))
        scene = Scene(
            before.state,
            before.facts,
            letter.event,
            letter.good,
            position.state,
            position.facts,
            taken.orders,
        )
        assert not list(step_breaks(scene, ENTRY))
        assert not list(standing(position.state, position.facts, truth))
        assert position.state.rank >= before.state.rank

"""Events: a closed union of frozen facts, each either strict or total."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from weightsync.fsm import events as e
from weightsync.fsm import orders
from weightsync.fsm.orders import Order, Verb
from weightsync.fsm.receipt import Expectation, Participant
from weightsync.fsm.states import EngineState, State

A = Participant("a")


def example(kind: type[Any], error: BaseException | None = None) -> Any:
    """One event of a kind, with an error if it can carry one."""
    values: dict[str, Any] = {
        "epoch": 1, "plan": Expectation("plan", 1, 1, 1), "index": 0, "engine": A, "receipts": (),
        "phase": State.Locked, "error": error,
    }  # fmt: skip
    return kind(**{field.name: values[field.name] for field in dataclasses.fields(kind)})


def carries_error(kind: type[Any]) -> bool:
    """Whether events of a kind carry an error."""
    return any(field.name == "error" for field in dataclasses.fields(kind))


def test_the_union_holds_every_event_of_the_module() -> None:
    """An event class that is forgotten in the union would be a fact that nobody can be told."""
    classes = {
        found for _, found in inspect.getmembers(e, inspect.isclass)
        if found.__module__ == e.__name__ and dataclasses.is_dataclass(found)
    }  # fmt: skip
    assert classes == set(e.EVENTS)
    assert {kind.__name__ for kind in e.EVENTS} <= set(e.__all__)


def test_every_event_is_either_a_protagonist_or_a_watchdog() -> None:
    """Strict or total, never both."""
    assert set(e.EVENTS) == e.PROTAGONISTS | e.WATCHDOGS
    assert not e.PROTAGONISTS & e.WATCHDOGS
    assert {kind.__name__ for kind in e.WATCHDOGS} == {"EngineLost", "LeaseLost", "TimedOut", "Cancelled"}


@pytest.mark.parametrize("kind", e.EVENTS, ids=lambda kind: kind.__name__)
def test_an_event_is_a_frozen_value(kind: type[Any]) -> None:
    """Equal, hashable, and not to be changed."""
    event = example(kind)
    assert event == example(kind)
    assert hash(event) == hash(example(kind))
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(event, field.name, None)


@pytest.mark.parametrize(
    "kind", [kind for kind in e.EVENTS if carries_error(kind)], ids=lambda kind: kind.__name__
)
def test_an_error_rides_along_without_being_compared(kind: type[Any]) -> None:
    """Two ways to fail are one fact; the very object that was raised can be had back."""
    error = RuntimeError("first")
    assert example(kind, error) == example(kind, ValueError("second"))
    assert hash(example(kind, error)) == hash(example(kind))
    assert example(kind, error).error is error


def test_bad_news_can_carry_an_error() -> None:
    """Every event that can be a reason to fail has room for what was raised."""
    good = {
        "LockGranted", "Prepared", "BucketSent", "AllSent", "EngineCommitted", "EngineReverted", "Published",
        "Cleaned", "Unlocked",
    }  # fmt: skip
    assert {kind.__name__ for kind in e.EVENTS if not carries_error(kind)} <= good


def test_an_order_says_what_and_for_whom() -> None:
    """As it is logged: the verb, and the engines if there are any."""
    assert str(Order(Verb.ReleaseLock)) == "ReleaseLock"
    assert str(Order(Verb.Commit, (A, Participant("b")))) == "Commit(a, b)"
    assert all(verb.value for verb in Verb)
    assert set(orders.__all__) == {"Order", "Verb"}


@pytest.mark.parametrize("states", [State, EngineState], ids=lambda states: states.__name__)
def test_every_state_has_a_sentence_of_its_own(states: Any) -> None:
    """The value of a state says what it means; no two are the same, or Python would make them one state."""
    assert len({state.value for state in states}) == len(states.__members__)


def test_states_are_ranked_in_the_order_of_a_round() -> None:
    """Failed comes after everything that can fail, and Released after everything."""
    assert [state.rank for state in State] == list(range(7))
    assert State.Cleaning.rank < State.Failed.rank < State.Released.rank

"""Only facts of the right union can be told, each with what it has to say; and only ranks make receipts."""

from typing import assert_never

from weightsync.fsm import events as e
from weightsync.fsm.engine import EngineMachine
from weightsync.fsm.engine_table import EngineEvent, Opened, Session
from weightsync.fsm.facts import opening
from weightsync.fsm.orders import Order, Verb
from weightsync.fsm.receipt import Expectation, Participant, Receipt
from weightsync.fsm.reducer import Position, step
from weightsync.fsm.round import Round
from weightsync.fsm.states import EngineState, State

PLAN = Expectation("plan", tensors=1, bytes=1, buckets=1)


def receipts_are_not_made() -> None:
    """The sender's side has nothing to call the constructor with."""
    Receipt()  # type: ignore[call-arg]
    Receipt(object())  # type: ignore[arg-type]
    Receipt(round="r", epoch=1)  # type: ignore[call-arg]


def a_round_is_told_its_own_facts(position: Position, round: Round, engine: Participant) -> None:
    """A name, an order, a state, or a fact of an engine rank is no fact of a round."""
    step(position, "LockGranted")  # type: ignore[arg-type]
    step(position, Verb.ReleaseLock)  # type: ignore[arg-type]
    step(position, State.Released)  # type: ignore[arg-type]
    step(position, e.Cancelled)  # type: ignore[arg-type]
    step(position, Opened(Session("r", 1, 1), PLAN))  # type: ignore[arg-type]
    step(position.state, e.Cancelled())  # type: ignore[arg-type]
    round.fire(Order(Verb.Publish), at=0, wall=0)  # type: ignore[arg-type]
    round.fire(engine, at=0, wall=0)  # type: ignore[arg-type]


def a_rank_is_told_its_own_facts(machine: EngineMachine) -> None:
    """A fact of a round is none of an engine rank."""
    machine.fire(e.LockGranted(1))  # type: ignore[arg-type]
    machine.fire(EngineState.Acked)  # type: ignore[arg-type]
    machine.receipt("r")  # type: ignore[arg-type]


def facts_say_what_they_have_to_say(engine: Participant) -> None:
    """An event is complete, and of the right kinds, or it is none."""
    e.LockGranted()  # type: ignore[call-arg]
    e.TimedOut("Locked")  # type: ignore[arg-type]
    e.EngineLost("a")  # type: ignore[arg-type]
    e.EngineLost(engine, "it died")  # type: ignore[arg-type]
    e.EngineAcked(engine)  # type: ignore[call-arg]
    e.EngineAcked(engine, [200])  # type: ignore[arg-type]
    e.Prepared(3)  # type: ignore[arg-type]
    e.Published(True)  # type: ignore[call-arg]


def a_quorum_is_a_number(engine: Participant) -> None:
    """A fraction is for the policy to turn into one."""
    opening(round="r", version=1, roster=[engine], quorum=0.5)  # type: ignore[arg-type]
    opening(round="r", version=1, roster=["a"], quorum=1)  # type: ignore[list-item]


def a_match_that_forgets_a_fact(event: EngineEvent) -> str:
    """The union is closed: the type checker knows which facts are left over."""
    match event:
        case Opened():
            return "one of nine"
    assert_never(event)  # type: ignore[arg-type]

"""Nothing that a round or an engine rank knows can be assigned to, and none of it can be subclassed."""

from weightsync.fsm import events as e
from weightsync.fsm.engine import EngineMachine
from weightsync.fsm.engine_table import Session
from weightsync.fsm.facts import Facts
from weightsync.fsm.orders import Order, Verb
from weightsync.fsm.receipt import Expectation, Participant, Receipt
from weightsync.fsm.reducer import Position, Step
from weightsync.fsm.round import Round
from weightsync.fsm.states import EngineState, State
from weightsync.fsm.table import ROUND


def facts_are_frozen(facts: Facts, engine: Participant) -> None:
    """What a round knows changes by its rows only."""
    facts.quorum = 0  # type: ignore[misc]
    facts.committed = frozenset({engine})  # type: ignore[misc]
    facts.committed.add(engine)  # type: ignore[attr-defined]
    facts.remaining = frozenset()  # type: ignore[misc]
    facts.finished = True  # type: ignore[attr-defined]


def positions_are_frozen(position: Position, taken: Step) -> None:
    """A state is not set, it is stepped to."""
    position.state = State.Released  # type: ignore[misc]
    position.facts.epoch = 2  # type: ignore[misc]
    taken.orders = ()  # type: ignore[misc]
    taken.orders.append(Order(Verb.Publish))  # type: ignore[attr-defined]


def rounds_are_read_only(round: Round) -> None:
    """Whoever holds a round can ask it and tell it facts."""
    round.state = State.Released  # type: ignore[misc]
    round.facts = round.facts  # type: ignore[misc]


def ranks_are_read_only(machine: EngineMachine) -> None:
    """The same for an engine rank."""
    machine.state = EngineState.Acked  # type: ignore[misc]
    machine.facts.version = 3  # type: ignore[misc]


def values_are_frozen(event: e.BucketSent, order: Order, session: Session, plan: Expectation) -> None:
    """Events, orders, sessions, plans and rows travel; nobody changes them on their way."""
    event.index = 1  # type: ignore[misc]
    order.verb = Verb.ReleaseLock  # type: ignore[misc]
    session.epoch = 9  # type: ignore[misc]
    plan.digest = ""  # type: ignore[misc]
    ROUND.rows[0].target = State.Released  # type: ignore[misc]
    ROUND.rows[0] = ROUND.rows[1]  # type: ignore[index]


class Mine(Receipt):  # type: ignore[misc]
    """A receipt with a constructor of its own."""


class Louder(EngineMachine):  # type: ignore[misc]
    """A rank that takes in what the table refuses."""


class Shorter(Round):  # type: ignore[misc]
    """A round without a lock."""

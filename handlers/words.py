"""A trainer's words to a Ray actor, as plain values: lists, strings and numbers.

Ray sends plain values as they are, and pickles everything else; plain ones are faster, and whoever reads them
checks them. A plan is sent as its JSON, which is validated in full where it is read.

    [word, incarnation | None, round, epoch, version, argument ...]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..fsm.contract import EngineStatus, Ticket
from ..fsm.engine import Answer
from ..fsm.engine_table import Session
from ..fsm.errors import EngineError
from ..fsm.plan import Plan
from ..fsm.receipt import Expectation, Receipt, _carried
from ..fsm.states import EngineState
from .receiver import Receiver

__all__ = ["LINE", "read_answer", "say", "word"]

LINE = 8
"""Where in the answer to a hello an actor puts where its line is. What was added later comes behind it."""

_EXPECTED = ("fingerprint", "tensors", "bytes", "buckets", "digest")


def word(name: str, incarnation: str | None, session: Session | None = None, *rest: object) -> list[Any]:
    """A word, ready to be sent."""
    whose = [session.round, session.epoch, session.version] if session else ["", 0, 0]
    return [name, incarnation, *whose, *map(_plain, rest)]


def _plain(value: object) -> object:
    match value:
        case Plan():
            return {"plan": value.to_json()}
        case Expectation():
            return [getattr(value, field) for field in _EXPECTED]
        case Ticket():
            return [value.transport, dict(value.values)]
        case _:
            return value


def say(receiver: Receiver, said: list[Any]) -> object:
    """Carry a word out; the answer as plain values.

    Raises:
        EngineError: there is no such word, or it is not said as it should be.
    """
    try:
        name, incarnation, round, epoch, version, *rest = said
        carry_out = _WORDS[name]
    except (KeyError, TypeError, ValueError) as error:
        what = said[0] if said else said
        raise EngineError(
            f"engine {receiver.engine} knows no word {what!r}; update its weightsync"
        ) from error
    if incarnation is not None:
        receiver.check_incarnation(incarnation)
    return carry_out(receiver, Session(round, epoch, version), *rest)


def _hello(receiver: Receiver, session: Session) -> object:
    told = receiver.hello()
    what = [told.engine, told.incarnation, told.ranks, told.stages, told.state.name, told.version]
    return [*what, told.epoch, told.asleep, None, told.committed]


def _open(receiver: Receiver, session: Session, *told: Any) -> None:
    incarnation, plan, expected, limit = told
    layout = plan if isinstance(plan, str) else Plan.from_json(plan["plan"])
    receiver.open(session, incarnation, layout, Expectation(*expected), limit)


def _receive(receiver: Receiver, session: Session, ticket: list[Any]) -> object:
    transport, values = ticket
    return [receipt.to_json() for receipt in receiver.receive(session, Ticket(transport, values))]


_WORDS: dict[str, Callable[..., object]] = {
    "hello": _hello,
    "open": _open,
    "receive": _receive,
    "commit": lambda receiver, session: receiver.commit(session),
    "abort": lambda receiver, session: receiver.abort(session).name,
    "resume": lambda receiver, session: receiver.resume(session),
}


def read_answer(name: str, told: Any) -> Any:
    """What an answer means on the trainer's side.

    Raises:
        ReceiptRefused: a receipt that is none.
    """
    match name:
        case "hello":
            engine, incarnation, ranks, stages, state, version, epoch, asleep, *more = told
            committed = more[1] if len(more) > 1 else None  # an engine of an older version does not say
            return EngineStatus(
                engine, incarnation, ranks, stages, EngineState[state], version, epoch, asleep, committed
            )
        case "receive":
            receipts: tuple[Receipt, ...] = tuple(_carried(values) for values in told)
            return receipts
        case "abort":
            return Answer[told]
        case _:
            return None

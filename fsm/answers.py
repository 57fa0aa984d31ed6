"""Which fact an answer is: one function for each act, for a good answer and for a bad one.

The other half of :mod:`.driver`. Here is where an exception becomes an event, and the only place that does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Protocol

from . import events as e
from .calls import Act, Call
from .engine import Answer
from .errors import (
    EngineError,
    EngineGone,
    LedgerError,
    PlanError,
    PortClosed,
    ReceiptRefused,
    RoundTimedOut,
    TransportError,
)
from .facts import Facts
from .policy import Limits
from .receipt import Expectation, Participant
from .round import Round
from .states import Publication, State
from .tickets import NotHolder, TicketClosed, UnknownTicket

__all__ = ["Answers", "Told", "examined", "foreign"]


class Told(Protocol):
    """What the driver lets an answer do."""

    round: Round
    limits: Limits
    executors: tuple[str, ...]

    def fire(self, event: e.Event) -> None:
        """Tell the round a fact."""

    def call(
        self,
        act: Act,
        *,
        engine: Participant | None = None,
        index: int | None = None,
        limit: float | None = None,
    ) -> None:
        """Ask for something."""

    def fence(self, engines: Collection[Participant]) -> None:
        """Stop waiting for engines."""

    def leased(self, until: float) -> None:
        """The lease now ends then."""

    def not_renewed(self, error: BaseException) -> None:
        """A renewal came to nothing."""

    def expect(self, plan: Expectation) -> None:
        """The plan is made."""

    def owe_undo(self, index: int) -> None:
        """An executor is prepared."""

    def no_undo(self, index: int) -> None:
        """An executor had its good end."""

    def unfit(self, engine: Participant, error: PlanError) -> None:
        """What is to be sent is not what an engine holds."""

    def back(self, engine: Participant) -> None:
        """An engine serves again."""

    def troubled(self, error: BaseException, where: str, *, held: bool = False) -> None:
        """Putting back met an error; ``held``: the trainer may hold what it was to let go of."""


_SENDING = (State.Locked, State.Broadcasting, State.Awaiting)
# What the lock service says of a ticket that does not hold the lock and never will.
_CLOSED = (NotHolder, TicketClosed, UnknownTicket)


class Answers:
    """Turns answers into facts for the driver's round."""

    def __init__(self, driver: Told) -> None:
        self._driver = driver
        self._unsure: BaseException | None = None

    # -- good answers ---------------------------------------------------------------------------------------

    def good(self, call: Call, value: Any) -> None:
        """``call`` was done."""
        driver, act, index = self._driver, call.act, call.index
        told: dict[Act, Callable[[], None]] = {
            Act.acquire: lambda: self._granted(*value),
            Act.renew: lambda: driver.leased(value),
            Act.release: lambda: driver.fire(e.Unlocked()),
            Act.plan: lambda: driver.expect(value),
            Act.prepare: lambda: driver.owe_undo(index) if value and index is not None else None,
            Act.clean: lambda: driver.no_undo(index) if index is not None else None,
            Act.broadcast: lambda: self._returned(call),
            Act.collect: lambda: self._returned(call),
            Act.publish: lambda: self._ledger_says(published=True),
            Act.ask: lambda: self._ledger_says(published=bool(value)),
        }
        if act in told:
            told[act]()
        elif call.engine is not None and act in (Act.commit, Act.abort, Act.resume):
            self._engine_good(act, call.engine, value)

    def _granted(self, epoch: int, until: float) -> None:
        self._driver.leased(until)
        self._driver.fire(e.LockGranted(epoch))

    def _engine_good(self, act: Act, engine: Participant, value: Any) -> None:
        driver = self._driver
        if act is Act.commit:
            driver.fire(e.EngineCommitted(engine))
        elif act is Act.resume:
            driver.back(engine)
        elif value is Answer.reverted:
            driver.back(engine)
            driver.fire(e.EngineReverted(engine))
        elif value is Answer.committed and driver.round.facts.decided:
            driver.fire(e.EngineCommitted(engine))
        else:
            driver.fire(e.CommitFailed(engine, EngineError(f"engine {engine.id} says it is {value}")))

    def _returned(self, call: Call) -> None:
        """A transport method came back: everything it had to tell must have been told by now."""
        left = {Act.broadcast: State.Broadcasting, Act.collect: State.Awaiting}[call.act]
        if self._driver.round.state is left:
            what = "every bucket" if call.act is Act.broadcast else "every receipt"
            self._driver.fire(e.TransportFailed(TransportError(f"{call.act.name} returned without {what}")))

    def _ledger_says(self, *, published: bool) -> None:
        """The ledger is asked at most twice, by ``publish`` and by ``ask``; the first answer counts."""
        driver = self._driver
        if driver.round.facts.publication is not Publication.unknown:
            return
        if published:
            driver.fire(e.Published())
        else:  # and never will be: asking shuts the epoch first
            why = self._unsure or LedgerError("the ledger says that it is not published")
            driver.fire(e.PublishFailed(why))

    # -- bad answers ----------------------------------------------------------------------------------------

    def bad(self, call: Call, error: BaseException) -> None:
        """``call`` failed with ``error``, or ran out of time."""
        match call.act:
            case Act.acquire | Act.renew | Act.release:
                self._lock_bad(call.act, error)
            case Act.open | Act.commit | Act.abort | Act.resume:
                if call.engine is not None:
                    self._engine_bad(call.act, call.engine, error)
            case Act.plan | Act.prepare:
                self._before_bytes(call, error)
            case Act.transport_open | Act.broadcast | Act.collect:
                self._transport_bad(call, error)
            case Act.publish | Act.ask | Act.bind:
                self._ledger_bad(call.act, error)
            case Act.clean | Act.transport_clean | Act.undo | Act.transport_abort:
                self._put_back_bad(call, error)
            case _:
                pass

    def _lock_bad(self, act: Act, error: BaseException) -> None:
        driver = self._driver
        if act is Act.release:
            driver.fire(e.UnlockFailed(error))
        elif act is Act.renew:
            driver.not_renewed(error)
        elif act is Act.acquire and isinstance(error, _CLOSED):
            driver.fire(e.LockRefused(error))
        elif act is Act.acquire and driver.round.state is State.Idle:
            # Whatever went wrong, the ticket may be in the queue: no evidence, so Failed cancels it.
            driver.fire(e.TimedOut(State.Idle, error))

    def _engine_bad(self, act: Act, engine: Participant, error: BaseException) -> None:
        driver, failed = self._driver, self._driver.round.state is State.Failed
        if act is Act.commit and failed:
            return  # its answer to Abort is the truth
        if act is Act.open and isinstance(error, PlanError):
            driver.unfit(engine, error)
        elif act is Act.open or isinstance(error, EngineGone):
            driver.fire(e.EngineLost(engine, error))
        elif act is Act.resume:
            if failed:
                driver.troubled(error, f"resume of {engine.id}")
            driver.fire(e.EngineLost(engine, error))
        else:
            if failed:
                driver.fence((engine,))
            driver.fire(e.CommitFailed(engine, error))

    def _before_bytes(self, call: Call, error: BaseException) -> None:
        driver = self._driver
        if driver.round.state is State.Locked:
            driver.fire(e.PrepareFailed(error))
        else:
            driver.troubled(error, self._name(call))

    def _transport_bad(self, call: Call, error: BaseException) -> None:
        driver = self._driver
        own = {
            Act.transport_open: State.Locked,
            Act.broadcast: State.Broadcasting,
            Act.collect: State.Awaiting,
        }[call.act]
        early = driver.round.state in _SENDING and not isinstance(error, PortClosed)
        if driver.round.state is own or early:
            driver.fire(e.TransportFailed(error))
        elif driver.round.state is State.Failed and isinstance(error, RoundTimedOut):
            driver.troubled(error, call.act.name)  # not even the abort could end it: it is still under way

    def _ledger_bad(self, act: Act, error: BaseException) -> None:
        driver = self._driver
        if act is Act.publish and driver.round.facts.publication is not Publication.unknown:
            return  # it was asked meanwhile, and has answered
        if act is Act.publish and isinstance(error, LedgerError):
            driver.fire(e.PublishFailed(error))
        elif act is Act.publish:
            self._unsure = error
            driver.call(Act.ask, limit=driver.limits.engine)
        elif driver.round.state is State.Cleaning:
            driver.fire(e.CleanupFailed(error))
        else:
            driver.troubled(error, act.name)

    def _put_back_bad(self, call: Call, error: BaseException) -> None:
        driver = self._driver
        if driver.round.state is State.Cleaning:
            driver.fire(e.CleanupFailed(error))
        else:
            driver.troubled(error, self._name(call), held=call.act is Act.undo)

    def _name(self, call: Call) -> str:
        who = f" of {self._driver.executors[call.index]}" if call.index is not None else ""
        return f"{call.act.name}{who}"


def foreign(event: e.Event, facts: Facts) -> bool:
    """Whether it is a receipt of another round or epoch: no bad proof of this one, but none at all."""
    receipts = event.receipts if isinstance(event, e.EngineAcked) else ()
    return any((receipt.round, receipt.epoch) != (facts.round, facts.epoch) for receipt in receipts)


def examined(event: e.EngineAcked, facts: Facts) -> e.EngineAcked:
    """``event``, with the reason why its receipts prove nothing, if they do not."""
    flaw = _flaw(event, facts)
    return event if flaw is None else replace(event, error=ReceiptRefused(flaw))


def _flaw(event: e.EngineAcked, facts: Facts) -> str | None:
    engine, ranks = event.engine, sorted(receipt.rank for receipt in event.receipts)
    if engine not in facts.members or facts.plan is None:
        return f"engine {engine.id} (incarnation {engine.incarnation}) owes no receipt to round {facts.round}"
    if ranks != list(range(engine.ranks)):
        return f"engine {engine.id} has {engine.ranks} ranks, its receipts are of ranks {ranks}"
    for receipt in event.receipts:
        if receipt.participant != (engine.id, engine.incarnation):
            return f"{receipt} came in the name of {engine.id} (incarnation {engine.incarnation})"
        if (flaw := receipt.mismatch(facts.round, facts.epoch, facts.plan)) is not None:
            return flaw
    return None

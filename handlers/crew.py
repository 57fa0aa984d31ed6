"""The crew: carries out a driver's calls, each on the partner it is for.

Nothing here decides anything. A call goes to the lock keeper, the ledger, the transport, an engine's link or
an executor of the trainer, and what comes back, a value or an exception, goes to ``answer`` with the call's
number. Engines answer by futures; everybody else runs in a thread that may block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from ..fsm import checks
from ..fsm.calls import ENGINE_ACTS, Act, Call
from ..fsm.contract import Clock, EngineLink, Transport, Weights
from ..fsm.driver import Driver
from ..fsm.engine_table import Session
from ..fsm.errors import RoundCancelled, WeightSyncError
from ..fsm.executors import Executor, RoundView, Undo, examined
from ..fsm.ledger import LedgerKeeper
from ..fsm.lock import LockKeeper
from ..fsm.plan import Plan
from ..fsm.receipt import Expectation, Participant
from ..fsm.sampling import Part, parted
from ..fsm.states import State
from ..fsm.tickets import (
    Granted,
    LockError,
    NotHolder,
    StaleEpoch,
    Ticket,
    TicketClosed,
    UnknownTicket,
    Waiting,
)
from .futures import again, begun, copy
from .ports import RoundPort
from .workers import Workers

__all__ = ["Crew", "Parts", "digest_of_weights"]

_PHASES = {
    Act.transport_open: State.Locked,
    Act.broadcast: State.Broadcasting,
    Act.collect: State.Awaiting,
}
_LEDGER_ACTS = frozenset({Act.bind, Act.publish, Act.ask})


def digest_of_weights(weights: Weights, part: Part) -> str:
    """The digest of a part of somebody's weights, which says so.

    Raises:
        SetupError: they give none.
    """
    return parted(f"{type(weights).__name__}.digest", weights.digest, part)


class Answer(Protocol):
    """Takes the answer to a call to the thread that moves the driver."""

    def __call__(self, number: int, value: object, error: BaseException | None, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """Everybody a round talks to."""

    lock: LockKeeper
    ledger: LedgerKeeper
    transport: Transport
    links: Mapping[Participant, EngineLink]
    executors: Sequence[Executor]
    weights: Weights
    owner: str
    step: int
    attempt: int
    bucket_bytes: int
    part: Part | None
    """What the digests are of; None if there are none."""
    copied: bool = False
    """Whether the weights are a private copy, so that the trainer may go on meanwhile."""


@dataclass(slots=True)
class Crew:
    """Carries out the calls of one round."""

    parts: Parts
    driver: Driver
    clock: Clock
    workers: Workers
    answer: Answer
    post: Callable[[Any, State], None]
    waits: Callable[[Waiting], None]
    tell: Callable[[str, Mapping[str, Any]], None] = lambda event, values: None
    plan: Plan | None = None
    expected: Expectation | None = None
    ports: list[RoundPort] = field(default_factory=list)
    _undos: dict[int, Undo] = field(default_factory=dict)
    _planning: Future[Expectation] | None = None
    _bound: tuple[int, ...] | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    def carry_out(self, call: Call) -> None:
        """Start ``call``; its answer comes by ``answer``. What cannot be started has failed."""
        try:
            if call.act in ENGINE_ACTS:
                future = self._ask(call)
            elif call.act in _LEDGER_ACTS and getattr(self.parts.ledger, "prompt", False):
                self.answer(call.number, self._JOBS[call.act](self, call), None)
                return
            elif call.act is Act.plan and self._planning is not None:
                future = self._planning
            else:
                future = self._at_once(call) or self.workers.submit(self._JOBS[call.act], self, call)
                if call.act is Act.acquire and self.parts.weights.ready:
                    # The digest can be worked out while the lock service is asked, which comes first.
                    self._planning = self.workers.submit(self._make_plan, call)
        except BaseException as error:  # noqa: BLE001 - a link or a pool that raises answers like one that fails
            self.answer(call.number, None, error)
        else:
            self._watch(call, future)

    def _watch(self, call: Call, future: Future[Any]) -> None:
        def done(finished: Future[Any]) -> None:
            try:
                value, error = finished.result(), None
            except BaseException as raised:  # noqa: BLE001 - also that somebody cancelled the future
                value, error = None, raised
            self.answer(call.number, value, error)

        future.add_done_callback(done)

    @property
    def session(self) -> Session:
        """The round as engines and transports see it."""
        facts = self.driver.round.facts
        return Session(facts.round, facts.epoch, facts.version)

    # -- the lock --------------------------------------------------------------------------------------------

    def _at_once(self, call: Call) -> Future[Any] | None:
        """Ask a keeper that can be asked without a thread. None if this one cannot, or not that."""
        begin = getattr(self.parts.lock, "begin", None)
        if begin is None:
            return None
        if call.act is Act.acquire:
            asked = self.clock.now()
            return self._entered(begin("enter", self._ticket, 0.0), asked)
        epoch = self.driver.round.facts.epoch
        if call.act is Act.release and epoch:
            self._stop.set()
            released = begin("release", self._ticket, epoch)
            # What a refusal proves takes another question to find out.
            return released and again(
                released, LockError, lambda: self.workers.submit(Crew._release, self, call)
            )
        return None

    def _entered(self, first: Future[Any] | None, asked: float) -> Future[Any] | None:
        if first is None:
            return None
        answer = begun()

        def done(replied: Future[Any]) -> None:
            try:
                told = replied.result()
                if isinstance(told, Granted):
                    answer.set_result((told.epoch, told.end(asked)))
                else:
                    self.workers.submit(self._granted, told, asked).add_done_callback(
                        lambda it: copy(it, answer)
                    )
            except BaseException as error:  # noqa: BLE001 - it is the answer
                answer.set_exception(error)

        first.add_done_callback(done)
        return answer

    @property
    def _ticket(self) -> Ticket:
        """Known before it is asked for, so that a release can overtake the request."""
        facts = self.driver.round.facts
        return Ticket(f"{facts.round}-{self.parts.attempt}", self.parts.owner, facts.round)

    def _acquire(self, call: Call) -> tuple[int, float]:
        lock, ticket = self.parts.lock, self._ticket
        asked = self.clock.now()
        answer = lock.enter(ticket, 0.0)  # the first answer comes at once, and says who holds the lock
        return self._granted(answer, asked)

    def _granted(self, answer: Granted | Waiting, asked: float) -> tuple[int, float]:
        """Wait until it is."""
        lock, ticket = self.parts.lock, self._ticket
        while not isinstance(answer, Granted):
            self.waits(answer)
            if self._stop.is_set():
                break
            asked = self.clock.now()
            answer = lock.wait(ticket, lock.lease / 3)
        else:
            return answer.epoch, answer.end(asked)
        # Nobody waits any more. Whether the ticket is closed only the answer to the release can tell.
        raise RoundCancelled(f"{ticket} is not waited for any more")

    def _renew(self, call: Call) -> float:
        asked = self.clock.now()
        return self.parts.lock.renew(self._ticket, self.driver.round.facts.epoch).end(asked)

    def _release(self, call: Call) -> None:
        self._stop.set()
        lock, ticket = self.parts.lock, self._ticket
        try:
            lock.release(ticket, self.driver.round.facts.epoch or None)
        except (UnknownTicket, TicketClosed):
            return  # each of these proves that this ticket does not hold the lock
        except (NotHolder, StaleEpoch):
            lock.cancel(ticket)  # it may be in the queue, or hold another epoch: this ends either

    # -- the trainer -----------------------------------------------------------------------------------------

    def _make_plan(self, call: Call) -> Expectation:
        parts, weights = self.parts, self.parts.weights
        weights.materialize()
        self._note_export()
        plan = weights.plan(parts.bucket_bytes)
        digest = "" if parts.part is None else digest_of_weights(weights, parts.part)
        parts.ledger.admit(self.driver.round.facts.version, digest or plan.fingerprint)
        self.plan = plan
        self.expected = Expectation(
            plan.fingerprint, len(plan.tensors), plan.nbytes, len(plan.buckets), digest
        )
        return self.expected

    def _note_export(self) -> None:
        """How the weights were gathered, if their source says so."""
        source: Any = getattr(self.parts.weights, "source", None)
        if checks.has(source, ("standing", "told")):
            self.driver.round.note("export", wall=self.clock.wall(), facts=source.told())

    def _prepare(self, call: Call) -> bool:
        if self._bound is None:  # one that does not say fails the round where it is needed, and not here
            with suppress(Exception):
                self._bound = tuple(sorted(self.parts.ledger.current().bound))
        undo = self._executor(call).prepare(self._view(self._bound))
        if undo is not None and self.driver.round.facts.settled:
            undo()  # the round gave up on this long ago, and nobody else will do it
            return False
        if undo is not None:
            self._undos[call.index or 0] = undo
        return undo is not None

    def _clean(self, call: Call) -> None:
        self._executor(call).clean(self._view((self.session.version,)))

    def _undo(self, call: Call) -> None:
        self._undos.pop(call.index or 0)()

    def _executor(self, call: Call) -> Executor:
        return self.parts.executors[call.index or 0]

    def _view(self, bound: tuple[int, ...] | None) -> RoundView:
        parts = self.parts
        return RoundView(
            self.session, parts.step, parts.attempt, self.plan, parts.weights, self._note, bound, parts.copied
        )

    def _note(self, event: str, /, **values: Any) -> None:
        """Examined here, in the executor's own thread: what the round's log cannot take is its error."""
        told = examined(event, **values)
        names = {"undo": told.pop("executor"), "bytes": told.pop("freed", None)}
        self.tell(event, {**told, **names})

    # -- engines ---------------------------------------------------------------------------------------------

    def _ask(self, call: Call) -> Future[Any]:
        engine = call.engine
        if engine is None:
            raise WeightSyncError(f"{call} names no engine")
        link, session = self.parts.links[engine], self.session
        match call.act:
            case Act.open:
                plan, expected = self._agreed()
                return link.open(session, engine.incarnation, plan, expected, self._silence())
            case Act.commit:
                return link.commit(session)
            case Act.resume:
                return link.resume(session)
            case _:
                return link.abort(session)

    def _silence(self) -> float:
        """How long an engine keeps a session without a word: longer than the trainer keeps a state."""
        limits = self.driver.limits
        return limits.forward + limits.failed

    def _agreed(self) -> tuple[Plan, Expectation]:
        if self.plan is None or self.expected is None:
            raise WeightSyncError("an engine was to be opened before there was a plan")
        return self.plan, self.expected

    # -- the transport ---------------------------------------------------------------------------------------

    def _port(self, act: Act) -> RoundPort:
        port = RoundPort(self.driver, _PHASES[act], self.session, self.clock, self.post)
        self.ports.append(port)
        return port

    def _transport_open(self, call: Call) -> None:
        plan, _ = self._agreed()
        links = {engine: self.parts.links[engine] for engine in sorted(self.driver.round.facts.remaining)}
        self.parts.transport.open(plan, self.parts.weights, links, self._port(call.act))

    def _broadcast(self, call: Call) -> None:
        plan, _ = self._agreed()
        self.parts.transport.broadcast(plan, self.parts.weights, self._port(call.act))

    def _collect(self, call: Call) -> None:
        plan, _ = self._agreed()
        self.parts.transport.collect(plan, self._port(call.act))

    def _transport_clean(self, call: Call) -> None:
        self.parts.transport.clean()

    def _transport_abort(self, call: Call) -> None:
        self.parts.transport.abort()

    # -- the ledger ------------------------------------------------------------------------------------------

    def _digest(self) -> str:
        _, expected = self._agreed()
        return expected.digest or expected.fingerprint

    def _bind(self, call: Call) -> None:
        facts = self.driver.round.facts
        self.parts.ledger.bind(facts.version, self._digest(), facts.epoch)

    def _publish(self, call: Call) -> None:
        facts = self.driver.round.facts
        self.parts.ledger.publish(facts.version, self._digest(), facts.epoch)

    def _ask_ledger(self, call: Call) -> bool:
        facts = self.driver.round.facts
        self.parts.ledger.shut(facts.epoch)
        return self.parts.ledger.ask(facts.version, facts.epoch)

    _JOBS: ClassVar[dict[Act, Callable[[Crew, Call], object]]] = {
        Act.acquire: _acquire,
        Act.renew: _renew,
        Act.release: _release,
        Act.plan: _make_plan,
        Act.prepare: _prepare,
        Act.clean: _clean,
        Act.undo: _undo,
        Act.transport_open: _transport_open,
        Act.broadcast: _broadcast,
        Act.collect: _collect,
        Act.transport_clean: _transport_clean,
        Act.transport_abort: _transport_abort,
        Act.bind: _bind,
        Act.publish: _publish,
        Act.ask: _ask_ledger,
    }

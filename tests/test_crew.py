"""The crew: each call reaches the partner it is for, and is answered exactly once, whatever happens there."""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from weightsync.fsm import events as e
from weightsync.fsm.calls import Act, Call
from weightsync.fsm.engine import Answer
from weightsync.fsm.errors import LedgerError, LockError, RoundCancelled, WeightSyncError
from weightsync.fsm.lock import LockBook
from weightsync.fsm.policy import Policy
from weightsync.fsm.receipt import Expectation, Participant
from weightsync.fsm.sampling import WHOLE
from weightsync.fsm.states import State
from weightsync.fsm.tickets import (
    Granted,
    NotHolder,
    StaleEpoch,
    Ticket,
    TicketClosed,
    UnknownTicket,
    Waiting,
)
from weightsync.handlers.clock import SystemClock
from weightsync.handlers.crew import Crew, Parts
from weightsync.handlers.ledger import MemoryLedger
from weightsync.handlers.lock import LocalLock
from weightsync.handlers.workers import Workers
from weightsync.testing.desk import Desk
from weightsync.testing.fakes import FakeEngine, FakeExecutor, FakeTransport, FakeWeights, Gate

PATIENCE = 20.0
Told = tuple[int, object, BaseException | None]


class Bench:
    """A crew with fakes around it, and the answers it gave."""

    def __init__(self, **changed: Any) -> None:
        self.desk = Desk("x")
        self.engines = {member: FakeEngine(member.id) for member in self.desk.members}
        self.transport, self.executor, self.weights = FakeTransport(), FakeExecutor("x"), FakeWeights()
        self.lock, self.ledger, self.workers = LocalLock(lease=2.0, epoch=0), MemoryLedger(), Workers()
        values: dict[str, Any] = {
            "lock": self.lock, "ledger": self.ledger, "transport": self.transport, "links": self.engines,
            "executors": [self.executor], "weights": self.weights, "owner": "me", "step": 3, "attempt": 1,
            "bucket_bytes": 64, "part": WHOLE,
        }  # fmt: skip
        self.answers: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self.posted: list[Any] = []
        self.waiting: list[Waiting] = []
        self.crew = Crew(
            Parts(**{**values, **changed}), self.desk.driver, SystemClock(), self.workers,
            lambda *told: self.answers.put(told), lambda *told: self.posted.append(told), self.waiting.append,
        )  # fmt: skip
        self._number = 0
        MADE.append(self)

    def start(self, act: Act, **which: Any) -> int:
        """Have a call carried out; its number."""
        self._number += 1
        self.crew.carry_out(Call(self._number, act, **which))
        return self._number

    def ask(self, act: Act, **which: Any) -> tuple[object, BaseException | None]:
        """Have a call carried out, and wait for its answer."""
        number = self.start(act, **which)
        told, value, error = self.answers.get(timeout=PATIENCE)
        assert told == number
        return value, error

    def holder(self) -> str | None:
        """Who holds the lock."""
        held = self.lock.status().holder
        return held.round if held else None


MADE: list[Bench] = []


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every thread that a test has begun ends with it."""
    yield
    while MADE:
        MADE.pop().workers.close()


@pytest.fixture
def bench() -> Bench:
    """A crew whose round is in Idle."""
    return Bench()


E0 = Participant("e0")


# -- the lock ---------------------------------------------------------------------------------------------


def test_the_lock_is_asked_for_renewed_and_given_back(bench: Bench) -> None:
    """The epoch comes with the lease's end by the holder's clock, which lies before the keeper's."""
    before = SystemClock().now()
    value, error = bench.ask(Act.acquire)
    assert error is None
    assert isinstance(value, tuple)
    epoch, until = value
    assert epoch == 1
    held = bench.lock._book.holder
    assert held is not None
    assert before + 1.0 < until <= held.until
    bench.desk.locked()
    assert bench.holder() == "r"
    renewed, error = bench.ask(Act.renew)
    assert error is None
    assert isinstance(renewed, float)
    assert renewed >= until
    assert bench.ask(Act.release) == (None, None)
    assert bench.holder() is None
    assert bench.ask(Act.release) == (None, None)


def test_a_release_that_overtakes_its_request_closes_the_ticket_for_ever(bench: Bench) -> None:
    """The round was cancelled at once: the request that comes after it gets nothing."""
    assert bench.ask(Act.release) == (None, None)
    value, error = bench.ask(Act.acquire)
    assert value is None
    assert isinstance(error, (LockError, RoundCancelled))
    status = bench.lock.status()
    assert (status.holder, status.waiting) == (None, ())


def test_whoever_waits_stops_when_the_ticket_is_given_up(bench: Bench) -> None:
    """Somebody else holds the lock; the release answers, and the request ends with an error."""
    other = bench.lock.request("other", "theirs")
    held = bench.lock.wait(other, PATIENCE)
    assert isinstance(held, Granted)
    acquire = bench.start(Act.acquire)
    release = bench.start(Act.release)
    answers = {number: error for number, _, error in (bench.answers.get(timeout=PATIENCE) for _ in range(2))}
    assert answers[release] is None
    assert {waiting.holder.owner for waiting in bench.waiting if waiting.holder} <= {"other"}
    assert isinstance(answers[acquire], (LockError, RoundCancelled))
    assert bench.lock.status().waiting == ()
    bench.lock.release(other, held.epoch)


class Deaf(LocalLock):
    """A lock service whose release does not come through, while its answers to waiters do."""

    def release(self, ticket: Ticket, epoch: int | None) -> Any:
        """Fail."""
        raise OSError("net")

    def wait(self, ticket: Ticket, limit: float) -> Granted | Waiting:
        """Answer at once."""
        return super().wait(ticket, 0.0)


def test_giving_up_waiting_is_no_evidence_that_the_ticket_is_closed() -> None:
    """Only the service's own word is: a request that merely stops must not look like a refusal."""
    lock = Deaf(lease=2.0)
    other = lock.request("other", "theirs")
    lock.wait(other, PATIENCE)
    bench = Bench(lock=lock)
    acquire = bench.start(Act.acquire)
    release = bench.start(Act.release)
    answers = {number: error for number, _, error in (bench.answers.get(timeout=PATIENCE) for _ in range(2))}
    assert isinstance(answers[release], OSError)
    assert not isinstance(answers[acquire], LockError)


@pytest.mark.parametrize(
    "refusal", [StaleEpoch("old"), NotHolder("waits"), UnknownTicket("who"), LockError("disk")]
)
def test_a_refused_release_is_evidence_only_if_it_says_so(refusal: LockError) -> None:
    """An unknown ticket holds nothing; one that is told off is cancelled; a full disk means nothing."""

    class Refusing(LocalLock):
        def release(self, ticket: Ticket, epoch: int | None) -> Any:
            """Refuse."""
            raise refusal

    bench = Bench(lock=Refusing(lease=2.0))
    _, error = bench.ask(Act.release)
    assert error is (refusal if type(refusal) is LockError else None)
    if isinstance(refusal, (StaleEpoch, NotHolder)):
        closed = bench.crew.parts.lock.wait
        with pytest.raises(TicketClosed):
            closed(Ticket("r-1", "me", "r"), 0.0)


# -- the trainer ------------------------------------------------------------------------------------------


def test_the_plan_is_made_from_the_weights_and_admitted_by_the_ledger(bench: Bench) -> None:
    """What a good receipt has to say, with the digest of the content."""
    value, error = bench.ask(Act.plan)
    assert error is None
    plan = bench.weights.plan(64)
    assert value == Expectation(plan.fingerprint, 3, 192, 3, bench.weights.digest())
    bench.ledger.publish(5, "other", 9)
    _, error = bench.ask(Act.plan)
    assert isinstance(error, LedgerError)


def test_without_verification_nothing_is_digested() -> None:
    """The plan's fingerprint stands for the version in the ledger."""
    bench = Bench(part=None)
    bench.weights.bad["digest"] = AssertionError("nobody asked")
    value, error = bench.ask(Act.plan)
    assert error is None
    assert isinstance(value, Expectation)
    assert value.digest == ""
    bench.desk.locked()
    assert bench.ask(Act.bind) == (None, None)
    assert bench.ledger.current().bound == {0: value.fingerprint}


def test_an_executor_prepares_and_is_undone_or_cleaned(bench: Bench) -> None:
    """``prepare`` answers whether it owes an undo; errors are the very ones."""
    error = OSError("no memory")
    assert bench.ask(Act.prepare, index=0) == (True, None)
    assert bench.ask(Act.undo, index=0) == (None, None)
    assert bench.ask(Act.clean, index=0) == (None, None)
    assert bench.executor.story == ["x.prepare", "x.undo", "x.clean"]
    bench.executor.bad["prepare"] = error
    assert bench.ask(Act.prepare, index=0) == (None, error)
    bench.executor.owes = False
    assert bench.ask(Act.prepare, index=0) == (False, None)


def test_weights_that_are_there_are_planned_while_the_lock_is_asked_for() -> None:
    """The plan is made once, and an error of it is told where it is asked for."""
    weights = FakeWeights(ready=True)
    bench = Bench(weights=weights)
    weights.bad["materialize"] = error = ValueError("no tensors")
    assert bench.ask(Act.acquire)[1] is None
    assert bench.ask(Act.plan) == (None, error)


def test_an_executor_that_comes_back_after_the_end_is_undone_on_the_spot(bench: Bench) -> None:
    """The round gave up on it, so nobody will ask for the undo."""
    gate = Gate()
    bench.executor.bad["prepare"] = gate
    number = bench.start(Act.prepare, index=0)
    gate.await_visitor()
    bench.desk.locked()
    bench.desk.told(e.Cancelled())
    bench.desk.wait(1.01)
    assert bench.desk.round.facts.settled
    gate.open()
    assert bench.answers.get(timeout=PATIENCE) == (number, False, None)
    assert bench.executor.story == ["x.prepare", "x.undo"]


def test_the_ledger_is_told_and_asked_under_the_rounds_epoch(bench: Bench) -> None:
    """Asking shuts the epoch first: what comes later is refused."""
    bench.ask(Act.plan)
    bench.desk.locked()
    assert bench.ask(Act.bind) == (None, None)
    assert bench.ask(Act.ask) == (False, None)
    _, error = bench.ask(Act.publish)
    assert isinstance(error, LedgerError)
    assert bench.ledger.version() is None


# -- engines and the transport ------------------------------------------------------------------------------


def test_an_engine_is_told_its_word_with_session_and_plan(bench: Bench) -> None:
    """Open, abort and fence go to its link; a fence is an abort whose answer nobody waits for."""
    bench.ask(Act.plan)
    bench.desk.locked()
    assert bench.ask(Act.open, engine=E0) == (None, None)
    assert bench.engines[E0].machine.facts.session == bench.crew.session
    assert bench.ask(Act.abort, engine=E0) == (Answer.reverted, None)
    assert bench.ask(Act.fence, engine=E0) == (Answer.reverted, None)
    assert bench.engines[E0].words == ["open", "abort", "abort"]
    for act, word in ((Act.commit, "commit"), (Act.resume, "resume")):
        _, error = bench.ask(act, engine=E0)
        assert isinstance(error, WeightSyncError)
        assert bench.engines[E0].words[-1] == word


def raise_at_once(*_: object) -> Any:
    """A link that does not even give a future back."""
    raise CancelledError("no route")


def cancel_the_future(*_: object) -> Future[Any]:
    """A link whose future somebody cancelled."""
    future: Future[Any] = Future()
    future.cancel()
    return future


@pytest.mark.parametrize(
    ("link", "kind"), [(raise_at_once, CancelledError), (cancel_the_future, CancelledError)]
)
def test_a_link_that_breaks_the_rules_is_answered_for(
    link: Callable[..., Any], kind: type[BaseException], bench: Bench
) -> None:
    """Instead of a call that nobody ever answers."""
    bench.engines[E0].commit = link  # type: ignore[method-assign]
    value, error = bench.ask(Act.commit, engine=E0)
    assert value is None
    assert isinstance(error, CancelledError)


def test_calls_that_cannot_be_carried_out_have_failed(bench: Bench) -> None:
    """An engine without a name, an opening without a plan, a pool without threads."""
    calls: list[dict[str, Any]] = [{"act": Act.open}, {"act": Act.open, "engine": E0}, {"act": Act.broadcast}]
    for call in calls:
        _, error = bench.ask(**call)
        assert isinstance(error, WeightSyncError)
    bench.workers.close()
    _, error = bench.ask(Act.plan)
    assert isinstance(error, RuntimeError)


def test_the_transports_methods_get_the_port_of_their_phase(bench: Bench) -> None:
    """One for open, one for broadcast, one for collect; clean and abort get none."""
    bench.ask(Act.plan)
    bench.desk.locked()
    for member in bench.desk.members:
        bench.ask(Act.open, engine=member)
    assert bench.ask(Act.transport_open) == (None, None)
    bench.desk.done("plan()", Desk.plan)
    bench.desk.done("prepare(0)")
    for member in bench.desk.members:
        bench.desk.done(f"open({member})")
    bench.desk.done("transport_open()")
    assert bench.ask(Act.broadcast) == (None, None)
    assert [port.closed for port in bench.crew.ports] == [True, False]
    assert {phase for _, phase in bench.posted} == {State.Broadcasting}
    assert bench.ask(Act.collect) == (None, None)
    assert bench.ask(Act.transport_clean) == (None, None)
    assert bench.ask(Act.transport_abort) == (None, None)
    assert bench.transport.called == ["open", "broadcast", "collect", "clean", "abort"]


def test_what_blocks_does_so_on_a_thread_of_its_own(bench: Bench) -> None:
    """A transport that hangs keeps nobody else from being asked."""
    gate = Gate()
    bench.transport.bad["clean"] = gate
    stuck = bench.start(Act.transport_clean)
    gate.await_visitor()
    assert bench.ask(Act.plan)[1] is None
    gate.open()
    assert bench.answers.get(timeout=PATIENCE)[0] == stuck
    assert threading.current_thread().name not in {
        t.name for t in threading.enumerate() if "weightsync" in t.name
    }


def test_every_act_has_somebody_to_do_it(bench: Bench) -> None:
    """A call that nobody carries out would never be answered."""
    for act in Act:
        which: dict[str, Any] = {"index": 0} if act in (Act.prepare, Act.clean, Act.undo) else {}
        bench.start(act, engine=E0, **which)
    answered = {bench.answers.get(timeout=PATIENCE)[0] for _ in Act}
    assert answered == set(range(1, len(Act) + 1))
    assert isinstance(bench.lock._book, LockBook)


def test_an_engine_keeps_its_session_longer_than_the_trainer_keeps_a_state() -> None:
    """Its own limit must not fire while the round can still speak to it."""
    bench = Bench()
    limits = Policy(deadline=4.0).limits()
    assert bench.crew._silence() >= limits.forward + limits.failed

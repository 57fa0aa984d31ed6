"""The loop: one round in real time. Whatever raises, hangs or comes late around it, the round ends in Released."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from weightsync.fsm.driver import Driver
from weightsync.fsm.errors import EngineSilent, PortClosed, RoundCancelled, RoundTimedOut
from weightsync.fsm.facts import opening
from weightsync.fsm.policy import Policy
from weightsync.fsm.receipt import Participant
from weightsync.fsm.record import Record
from weightsync.fsm.results import RoundResult
from weightsync.fsm.round import Identity, Round
from weightsync.fsm.states import Disposition, EngineState, Outcome, State
from weightsync.fsm.tickets import Granted
from weightsync.handlers.clock import SystemClock
from weightsync.handlers.crew import Parts
from weightsync.handlers.ledger import MemoryLedger
from weightsync.handlers.lock import LocalLock
from weightsync.handlers.loop import RoundLoop
from weightsync.handlers.observers import Observers
from weightsync.handlers.workers import Workers
from weightsync.testing.clock import HandClock
from weightsync.testing.fakes import HANG, LOST, FakeEngine, FakeExecutor, FakeTransport, FakeWeights, Gate

PATIENCE = 20.0
SLACK = 2.0
QUICK = Policy(deadline=3.0, lease=2.0)
GO_ON = Policy(deadline=3.0, lease=2.0, on_engine_failure="quarantine", quorum=1)


class Table:
    """Everything around a round, and the round."""

    def __init__(self, policy: Policy = QUICK, clock: Any = None, observers: tuple[Any, ...] = ()) -> None:
        self.policy = policy
        self.lock, self.ledger = LocalLock(lease=policy.lease), MemoryLedger()
        self.workers = Workers()
        self.engines = [FakeEngine("a"), FakeEngine("b")]
        self.transport, self.weights = FakeTransport(), FakeWeights(1)
        self.story: list[str] = []
        self.executors = [FakeExecutor("x", self.story), FakeExecutor("y", self.story)]
        self.records: list[Record] = []
        self.observers = Observers([*observers, self.records.append])
        self.clock = clock or SystemClock()
        self.version = 0
        self.loop = self.next_round()

    def next_round(self) -> RoundLoop:
        """A round that has not begun."""
        links = {Participant(engine.id, engine.machine.facts.incarnation): engine for engine in self.engines}
        facts = opening(
            round=f"r{self.version}", version=self.version, roster=links,
            quorum=self.policy.quorum_of(len(links)),
        )  # fmt: skip
        round = Round.open(facts, Identity(1, 1, "me"), at=self.clock.now(), wall=self.clock.wall())
        driver = Driver(round, self.policy.limits(), ["x", "y"], self.clock)
        parts = Parts(
            lock=self.lock, ledger=self.ledger, transport=self.transport, links=links,
            executors=self.executors, weights=self.weights, owner="me", step=1, attempt=1,
            bucket_bytes=64, verify=True,
        )  # fmt: skip
        self.version += 1
        return RoundLoop(
            driver, parts, workers=self.workers, observers=self.observers, clock=self.clock, flush=PATIENCE
        )

    def run(self) -> RoundResult:
        """Run the round, within its deadline, and check what must be true after any round."""
        begun = time.monotonic()
        result = self.loop.run()
        assert time.monotonic() - begun < self.policy.deadline + SLACK
        self.check(result)
        return result

    def check(self, result: RoundResult) -> None:
        """Released, told once, the lock free, no engine paused or in a session without an owner."""
        assert result.path[-1] == "Released"
        assert sum(record.event == "result" for record in self.records) == 1
        self.check_lock()
        for row, engine in zip(result.engines, self.engines, strict=True):
            if row.disposition is not Disposition.quarantined:
                assert engine.machine.state is EngineState.Serving
                assert engine.machine.facts.session is None

    def check_lock(self) -> None:
        """Another party gets the lock in less than a second."""
        ticket = self.lock.request("other", "theirs")
        granted = self.lock.wait(ticket, 1.0)
        assert isinstance(granted, Granted)
        self.lock.release(ticket, granted.epoch)


@pytest.fixture
def table() -> Iterator[Table]:
    """A round of two engines that has not begun."""
    table = Table()
    yield table
    table.observers.close()
    table.workers.close()


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Begin ``work`` on a thread; what is returned waits for its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(PATIENCE)
        assert found, "it has not ended"
        return found[0]

    return result


def test_a_good_round_hands_over_every_byte(table: Table) -> None:
    """Each engine holds what the trainer holds; executors had their good end; observers heard it all."""
    result = table.run()
    assert (result.outcome, result.published, result.unclean) == (Outcome.complete, "yes", False)
    assert [engine.content for engine in table.engines] == [table.weights.content] * 2
    assert table.story == ["x.prepare", "y.prepare", "x.clean", "y.clean"]
    assert table.ledger.version() == 0
    assert tuple(table.records) == table.loop.driver.round.records()


# -- raise in each place ------------------------------------------------------------------------------------

BEFORE_BYTES = ("prepare", "plan", "materialize", "digest")
TRANSPORT = ("open", "bucket 0", "bucket 1", "bucket 2", "all sent", "collect")


@pytest.mark.parametrize("who", ["x", "y"])
@pytest.mark.parametrize("what", ["prepare", "clean"])
def test_an_executor_that_raises_fails_the_round(table: Table, who: str, what: str) -> None:
    """Failed, then Released; those before it are undone in reverse; the error is the very one."""
    error = OSError(f"{what} of {who}")
    table.executors["xy".index(who)].bad[what] = error
    result = table.run()
    assert result.error is error
    assert "Failed" in result.path
    undone = [entry for entry in table.story if entry.endswith("undo")]
    if what == "prepare":
        assert undone == (["x.undo"] if who == "y" else [])
        assert table.engines[0].words == ["abort"]
    else:
        assert undone == (["y.undo", "x.undo"] if who == "x" else ["y.undo"])
        assert result.published == "yes"


@pytest.mark.parametrize("what", ["materialize", "plan", "digest"])
def test_weights_that_cannot_be_read_fail_the_round_before_a_byte(table: Table, what: str) -> None:
    """The trainer's own iterator raises: the caller gets that error, and the engines were never paused."""
    error = ValueError(what)
    table.weights.bad[what] = error
    result = table.run()
    assert result.error is error
    assert (result.failed_in, result.published) == ("Locked", "no")
    assert "open" not in table.engines[0].words


@pytest.mark.parametrize("what", TRANSPORT)
def test_a_transport_that_raises_fails_the_round(table: Table, what: str) -> None:
    """In every method, at every bucket: the engines keep the old version, the undos run."""
    error = OSError(what)
    table.transport.bad[what] = error
    result = table.run()
    assert result.error is error
    assert result.serving(Disposition.serving_old) == ("a", "b")
    assert table.story[-2:] == ["y.undo", "x.undo"]
    assert "abort" in table.transport.called


@pytest.mark.parametrize("what", ["clean", "abort"])
def test_an_error_while_putting_back_never_masks_the_first(table: Table, what: str) -> None:
    """It becomes a note, and the result is unclean."""
    first, second = OSError("bucket 1"), OSError(what)
    table.transport.bad[what] = second
    if what == "abort":
        table.transport.bad["bucket 1"] = first
    result = table.run()
    assert result.error is (first if what == "abort" else second)
    assert result.unclean is (what == "abort")
    if what == "abort":
        assert any("OSError: abort" in note for note in first.__notes__)


def test_an_undo_that_raises_is_noted_and_the_others_run(table: Table) -> None:
    """Both errors are told, the first one is the error."""
    first = OSError("bucket 1")
    table.transport.bad["bucket 1"] = first
    table.executors[1].bad["undo"] = OSError("undo of y")
    result = table.run()
    assert result.error is first
    assert result.unclean
    assert table.story[-2:] == ["y.undo", "x.undo"]
    assert any("undo of y" in note for note in result.notes)


@pytest.mark.parametrize("word", ["open", "commit", "abort", "resume", "bucket 1"])
def test_an_engine_that_raises_fails_the_round_or_is_quarantined(word: str) -> None:
    """By name, with its error; with a quorum the other one has the new version."""
    for policy in (QUICK, GO_ON):
        table, error = Table(policy), RuntimeError(word)
        table.engines[0].bad[word] = error
        if word == "abort":
            table.transport.bad["bucket 1"] = OSError("bucket 1")
        result = table.run()
        assert result.engines[0].disposition is Disposition.quarantined
        if policy is QUICK:
            assert (result.error is error) is (word != "abort")
            assert result.outcome is Outcome.failed
        elif word != "abort":
            assert result.outcome is Outcome.partial
            assert table.engines[1].content == table.weights.content


def test_an_observer_that_raises_is_disabled_and_the_round_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """With one line; the next round does not hear of it again."""

    def broken(record: Record) -> None:
        raise ValueError("disk full")

    with caplog.at_level(logging.ERROR, logger="weightsync"):
        table = Table(observers=(broken,))
        assert table.run().ok
    assert [record.message for record in caplog.records] == [
        "observer function is disabled: it raised ValueError: disk full"
    ]


class Waking(FakeTransport):
    """A transport whose waker raises, on the thread that moves the round."""

    def broadcast(self, plan: Any, weights: Any, port: Any) -> None:
        """Register it, then send."""
        port.on_change(self._raise)
        super().broadcast(plan, weights, port)

    def _raise(self) -> None:
        raise OSError("in the waker")


def test_a_waker_that_raises_does_not_end_the_round(table: Table) -> None:
    """It is run by the loop: its error is the transport's at worst."""
    table.transport = Waking()
    table.loop = table.next_round()
    result = table.run()
    assert result.path[-1] == "Released"


def test_a_round_whose_work_finds_no_thread_fails_like_any_other(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system is out of threads for a moment; the lock is given back when it has some again."""
    real, left = Workers.submit, [2]

    def submit(self: Workers, work: Any, *args: Any) -> Any:
        if getattr(work, "__name__", "") == "_transport_open" and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        return real(self, work, *args)

    monkeypatch.setattr(Workers, "submit", submit)
    result = table.run()
    assert str(result.error) == "can't start new thread"
    assert result.failed_in == "Locked"


# -- hang in each place -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["open", "bucket 1", "collect", "clean"])
def test_a_transport_that_never_returns_ends_the_round_in_time(what: str) -> None:
    """Not even its abort wakes it: the round gives up, says so, and the lock is free."""
    table = Table(Policy(deadline=1.0, lease=1.0))
    stuck = Gate()
    table.transport.bad[what] = stuck
    table.transport.abort = lambda: None  # type: ignore[method-assign]
    result = table.run()
    assert result.unclean
    assert isinstance(result.error, RoundTimedOut)
    stuck.open()


def test_a_transport_that_is_woken_by_its_abort_leaves_nothing_unclean() -> None:
    """It was stuck at a bucket, and the state's limit ended that."""
    table = Table(Policy(deadline=1.0, lease=1.0))
    table.transport.bad["bucket 1"] = Gate()
    result = table.run()
    assert (result.unclean, result.bucket) == (False, 1)
    assert "waiting for broadcast()" in str(result.error)


@pytest.mark.parametrize("word", ["open", "commit", "resume", "receipt"])
@pytest.mark.parametrize("silence", [HANG, LOST])
def test_an_engine_that_falls_silent_is_named(word: str, silence: str) -> None:
    """With a quorum the other one goes on; the state it was silent in is bounded."""
    table = Table(Policy(deadline=1.0, lease=1.0, on_engine_failure="quarantine", quorum=1))
    table.engines[0].bad[word] = silence if word != "receipt" else LOST
    result = table.run()
    if word == "receipt":
        assert "no receipt from a" in str(result.error)
        assert result.engines[0].disposition is Disposition.serving_old
    else:
        assert (result.outcome, result.published) == (Outcome.partial, "yes")
        assert isinstance(result.engines[0].error, EngineSilent)
        assert result.engines[0].disposition is Disposition.quarantined


def test_a_late_answer_is_counted_and_changes_nothing() -> None:
    """The engine was given up on; it answers while the round is still under way."""
    table = Table(Policy(deadline=1.5, lease=1.0, on_engine_failure="quarantine", quorum=1))
    late, under_way = Gate(), Gate()
    table.engines[0].bad["open"] = late
    table.transport.bad["bucket 0"] = under_way
    result = in_thread(table.loop.run)
    under_way.await_visitor()
    late.open()
    deadline = time.monotonic() + PATIENCE
    while not table.loop.driver.stale and time.monotonic() < deadline:
        threading.Event().wait(0.005)
    under_way.open()
    assert result().outcome is Outcome.partial
    assert table.loop.driver.stale == 1


def test_a_port_is_worth_nothing_when_its_phase_is_over(table: Table) -> None:
    """Whoever kept it is told so, and the round is not touched."""
    result = table.run()
    facts = table.loop.driver.round.facts
    for port in table.transport.ports:
        for say in (port.progress, port.all_sent, lambda port=port: port.bucket_sent(0)):
            with pytest.raises(PortClosed):
                say()
    assert table.loop.driver.round.facts is facts
    assert result.ok


# -- cancellation and time ----------------------------------------------------------------------------------

PLACES: dict[str, Callable[[Table, Gate], None]] = {
    "Locked": lambda table, gate: table.engines[0].bad.update(open=gate),
    "Broadcasting": lambda table, gate: table.transport.bad.update({"bucket 1": gate}),
    "Awaiting": lambda table, gate: table.transport.bad.update(collect=gate),
    "Cleaning": lambda table, gate: table.engines[0].bad.update(commit=gate),
}


@pytest.mark.parametrize("state", PLACES)
def test_a_round_can_be_cancelled_in_any_state(state: str) -> None:
    """Before the last receipt it fails and everybody keeps the old version; after it, it finishes."""
    table, gate = Table(), Gate()
    PLACES[state](table, gate)
    result = in_thread(table.loop.run)
    gate.await_visitor()
    assert table.loop.driver.round.state is State[state]
    table.loop.cancel()
    gate.open()
    found = result()
    table.check(found)
    if state == "Cleaning":
        assert found.ok
    else:
        assert isinstance(found.error, RoundCancelled)
        assert found.failed_in == state
        assert found.serving(Disposition.serving_old) == ("a", "b")


def test_a_round_that_waits_for_the_lock_can_be_cancelled(table: Table) -> None:
    """Its ticket leaves the queue, and is not granted later."""
    other = table.lock.request("other", "theirs")
    held = table.lock.wait(other, 1.0)
    assert isinstance(held, Granted)
    result = in_thread(table.loop.run)
    deadline = time.monotonic() + PATIENCE
    while not table.lock.status().waiting and time.monotonic() < deadline:
        threading.Event().wait(0.005)
    table.loop.cancel()
    assert result().path == ("Idle", "Failed", "Released")
    assert table.lock.status().waiting == ()
    table.lock.release(other, held.epoch)
    table.check_lock()


def test_a_round_that_is_cancelled_before_it_begins_never_holds_the_lock(table: Table) -> None:
    """However fast the request and its cancellation follow each other: nothing is left in the queue."""
    for _ in range(20):
        loop = table.next_round()
        loop.cancel()
        assert loop.run().path[:2] == ("Idle", "Failed")
        status = table.lock.status()
        assert (status.holder, status.waiting) == (None, ())


def test_an_engine_that_is_known_to_be_gone_is_not_waited_for() -> None:
    """It is told before the round begins; with a quorum the rest is served."""
    table, gone = Table(GO_ON), OSError("host down")
    table.loop.lost(Participant("a"), gone)
    result = table.run()
    assert (result.outcome, result.engines[0].error) == (Outcome.partial, gone)
    assert table.engines[0].words == []


def test_what_arrived_in_time_counts_although_the_loop_comes_late() -> None:
    """The host was busy: an answer lies in the inbox, and the limit it kept has passed meanwhile."""
    clock = HandClock()
    table = Table(Policy(deadline=3.0, lease=100.0), clock=clock)
    table.loop._move(table.loop.driver.start)
    told: list[str] = []
    for name in ("first", "second"):
        table.loop._inbox.put(lambda now, name=name: told.append(name) or [])  # type: ignore[misc]
    clock.advance_to(50.0)
    taken = [table.loop._next() for _ in range(3)]
    assert [move(clock.now()) for move in taken[:2]] == [[], []]
    assert told == ["first", "second"]
    assert taken[2] == table.loop.driver.tick


def test_the_end_of_a_lease_waits_for_no_answer() -> None:
    """What the inbox holds was decided while the lock was ours; now it may be somebody else's."""
    clock = HandClock()
    table = Table(Policy(deadline=3.0, lease=1.0), clock=clock)
    table.loop._move(table.loop.driver.start)
    table.loop.driver.leased(1.0)
    table.loop._inbox.put(lambda now: [])
    clock.advance_to(1.5)
    assert table.loop._next() == table.loop.driver.tick


def test_a_deadline_may_be_longer_than_any_queue_can_wait() -> None:
    """A number of seconds that a lock cannot hold is no reason to drop the lock."""
    table = Table(Policy(deadline=1e15, lease=1e14))
    assert table.run().ok


def test_a_round_that_failed_is_followed_by_one_that_works(table: Table) -> None:
    """The same parts, the same engines: nothing of the failed round is in the way."""
    table.transport.bad["bucket 1"] = OSError("bucket 1")
    assert not table.run().ok
    table.records.clear()
    table.loop = table.next_round()
    assert table.run().outcome is Outcome.complete
    assert [engine.content for engine in table.engines] == [table.weights.content] * 2

"""The loop's patience: hanging partners, late answers, cancellation, and the clock of a busy host."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from weightsync.fsm.calls import Call
from weightsync.fsm.errors import EngineSilent, PortClosed, RoundCancelled, RoundTimedOut
from weightsync.fsm.policy import Policy
from weightsync.fsm.receipt import Participant
from weightsync.fsm.states import Disposition, Outcome, State
from weightsync.fsm.tickets import Granted
from weightsync.testing.clock import HandClock
from weightsync.testing.fakes import HANG, LOST, Gate
from weightsync.testing.scene import PATIENCE, Scene, check_free, close_all

GO_ON = Policy(deadline=3.0, lease=2.0, on_engine_failure="quarantine", quorum=1)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every thread that a test has begun ends with it."""
    yield
    close_all()


@pytest.fixture
def scene() -> Scene:
    """A round of two engines that has not begun."""
    return Scene()


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


# -- hang in each place -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["open", "bucket 1", "collect", "clean"])
def test_a_transport_that_never_returns_ends_the_round_in_time(what: str) -> None:
    """Not even its abort wakes it: the round gives up, says so, and the lock is free."""
    scene = Scene(Policy(deadline=1.0, lease=1.0))
    stuck = Gate()
    scene.transport.bad[what] = stuck
    scene.transport.abort = lambda: None  # type: ignore[method-assign]
    result = scene.run()
    assert result.unclean
    assert isinstance(result.error, EngineSilent if what == "collect" else RoundTimedOut)
    stuck.open()


def test_a_transport_that_is_woken_by_its_abort_leaves_nothing_unclean() -> None:
    """It was stuck at a bucket, and the state's limit ended that."""
    scene = Scene(Policy(deadline=1.0, lease=1.0))
    scene.transport.bad["bucket 1"] = Gate()
    result = scene.run()
    assert (result.unclean, result.bucket) == (False, 1)
    assert "waiting for broadcast()" in str(result.error)


@pytest.mark.parametrize("word", ["open", "commit", "resume", "receipt"])
@pytest.mark.parametrize("silence", [HANG, LOST])
def test_an_engine_that_falls_silent_is_named(word: str, silence: str) -> None:
    """With a quorum the other one goes on; the state it was silent in is bounded."""
    scene = Scene(Policy(deadline=1.0, lease=1.0, on_engine_failure="quarantine", quorum=1))
    scene.engines[0].bad[word] = silence if word != "receipt" else LOST
    result = scene.run()
    assert (result.outcome, result.published) == (Outcome.partial, "yes")
    assert isinstance(result.engines[0].error, EngineSilent)
    assert result.engines[0].disposition is Disposition.quarantined


def test_a_late_answer_is_counted_and_changes_nothing() -> None:
    """The engine was given up on; it answers while the round is still under way."""
    scene = Scene(Policy(deadline=1.5, lease=1.0, on_engine_failure="quarantine", quorum=1))
    late, under_way = Gate(), Gate()
    scene.engines[0].bad["open"] = late
    scene.transport.bad["bucket 0"] = under_way
    result = in_thread(scene.loop.run)
    under_way.await_visitor()
    late.open()
    deadline = time.monotonic() + PATIENCE
    while not scene.loop.driver.stale and time.monotonic() < deadline:
        threading.Event().wait(0.005)
    under_way.open()
    assert result().outcome is Outcome.partial
    assert scene.loop.driver.stale == 1


def test_a_port_is_worth_nothing_when_its_phase_is_over(scene: Scene) -> None:
    """Whoever kept it is told so, and the round is not touched."""
    result = scene.run()
    facts = scene.loop.driver.round.facts
    for port in scene.transport.ports:
        for say in (port.progress, port.all_sent, lambda port=port: port.bucket_sent(0)):
            with pytest.raises(PortClosed):
                say()
    assert scene.loop.driver.round.facts is facts
    assert result.ok


# -- cancellation and time ----------------------------------------------------------------------------------

PLACES: dict[str, Callable[[Scene, Gate], None]] = {
    "Locked": lambda scene, gate: scene.engines[0].bad.update(open=gate),
    "Broadcasting": lambda scene, gate: scene.transport.bad.update({"bucket 1": gate}),
    "Awaiting": lambda scene, gate: scene.transport.bad.update(collect=gate),
    "Cleaning": lambda scene, gate: scene.engines[0].bad.update(commit=gate),
}


@pytest.mark.parametrize("state", PLACES)
def test_a_round_can_be_cancelled_in_any_state(state: str) -> None:
    """Before the last receipt it fails and everybody keeps the old version; after it, it finishes."""
    scene, gate = Scene(), Gate()
    PLACES[state](scene, gate)
    result = in_thread(scene.loop.run)
    gate.await_visitor()
    assert scene.loop.driver.round.state is State[state]
    scene.loop.cancel()
    gate.open()
    found = result()
    scene.check(found)
    if state == "Cleaning":
        assert found.ok
    else:
        assert isinstance(found.error, RoundCancelled)
        assert found.failed_in == state
        assert found.serving(Disposition.serving_old) == ("a", "b")


def test_a_round_that_waits_for_the_lock_can_be_cancelled(scene: Scene) -> None:
    """Its ticket leaves the queue, and is not granted later."""
    other = scene.lock.request("other", "theirs")
    held = scene.lock.wait(other, 1.0)
    assert isinstance(held, Granted)
    result = in_thread(scene.loop.run)
    deadline = time.monotonic() + PATIENCE
    while not scene.lock.status().waiting and time.monotonic() < deadline:
        threading.Event().wait(0.005)
    scene.loop.cancel()
    assert result().path == ("Idle", "Failed", "Released")
    assert scene.lock.status().waiting == ()
    scene.lock.release(other, held.epoch)
    check_free(scene.lock)


def test_a_round_that_is_cancelled_before_it_begins_never_holds_the_lock(scene: Scene) -> None:
    """However fast the request and its cancellation follow each other: nothing is left in the queue."""
    for _ in range(20):
        loop = scene.next_round()
        loop.cancel()
        assert loop.run().path[:2] == ("Idle", "Failed")
        status = scene.lock.status()
        assert (status.holder, status.waiting) == (None, ())


def test_an_engine_that_is_known_to_be_gone_is_not_waited_for() -> None:
    """It is told before the round begins; with a quorum the rest is served."""
    scene, gone = Scene(GO_ON), OSError("host down")
    scene.loop.lost(Participant("a"), gone)
    result = scene.run()
    assert (result.outcome, result.engines[0].error) == (Outcome.partial, gone)
    assert scene.engines[0].words == []


def test_what_arrived_in_time_counts_although_the_loop_comes_late() -> None:
    """The host was busy: an answer lies in the inbox, and the limit it kept has passed meanwhile."""
    clock = HandClock()
    scene = Scene(Policy(deadline=3.0, lease=100.0), clock=clock)
    assert scene.loop._turn.acquire(blocking=False)  # the test moves it, and nobody else
    scene.loop._move(scene.loop.driver.start)
    told: list[str] = []

    def answer(name: str) -> Callable[[float], list[Call]]:
        def move(now: float) -> list[Call]:
            told.append(name)
            return []

        return move

    scene.loop._inbox.append(answer("first"))
    scene.loop._inbox.append(answer("second"))
    clock.advance_to(50.0)
    taken = [move for _ in range(3) if (move := scene.loop._next()) is not None]
    assert [move(clock.now()) for move in taken[:2]] == [[], []]
    assert told == ["first", "second"]
    assert taken[2] == scene.loop.driver.tick


def test_the_end_of_a_lease_waits_for_no_answer() -> None:
    """What the inbox holds was decided while the lock was ours; now it may be somebody else's."""
    clock = HandClock()
    scene = Scene(Policy(deadline=3.0, lease=1.0), clock=clock)
    assert scene.loop._turn.acquire(blocking=False)  # the test moves it, and nobody else
    scene.loop._move(scene.loop.driver.start)

    def leased(now: float) -> list[Call]:
        scene.loop.driver.leased(1.0)
        return []

    scene.loop._move(leased)
    scene.loop._inbox.append(lambda now: [])
    clock.advance_to(1.5)
    assert scene.loop._next() == scene.loop.driver.tick


def test_a_deadline_may_be_longer_than_any_queue_can_wait() -> None:
    """A number of seconds that a lock cannot hold is no reason to drop the lock."""
    scene = Scene(Policy(deadline=1e15, lease=1e14))
    assert scene.run().ok

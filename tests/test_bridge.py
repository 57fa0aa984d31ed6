"""From synchronous code to coroutines: nothing is left of a call, and no call waits for good.

The garbage collector is off wherever descriptors are counted: it would close what a leak has left open.
"""

import asyncio
import contextvars
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from benchmarks.bridge import measure

from weightsync.fsm.errors import (
    BridgeClosed,
    BridgeError,
    BridgeLost,
    BridgeReentered,
    BridgeTimedOut,
    SetupError,
)  # fmt: skip
from weightsync.handlers import bridge as bridge_module
from weightsync.handlers import bridge_call
from weightsync.handlers.bridge import LoopBridge

pytestmark = pytest.mark.timeout(60)

SOON = 10.0
"""Long enough for anything that happens at all."""
BRIEF = 0.01
"""A limit that is meant to be over."""
CALLS = 500


@pytest.fixture
def bridge() -> Iterator[LoopBridge]:
    """A bridge that is closed when the test is over, and has not stuck."""
    with LoopBridge("under test") as made:
        yield made
    assert not alive("under test")


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What is not closed stays open."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def descriptors() -> int:
    """How many this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def alive(name: str) -> list[threading.Thread]:
    """The threads called so."""
    return [thread for thread in threading.enumerate() if thread.name == name]


async def same(value: object) -> object:
    """A coroutine that waits for the loop once."""
    await asyncio.sleep(0)
    return value


async def fails() -> None:
    """Raises."""
    await asyncio.sleep(0)
    raise LookupError("boom")


async def forever() -> None:
    """Ends when it is cancelled."""
    await asyncio.Event().wait()


async def cancels_itself() -> None:
    """As a library does that gives up inside."""
    raise asyncio.CancelledError("inside")


def answer(bridge: LoopBridge, value: object) -> object:
    """What it makes of a value; an error of its own is an answer, too."""
    try:
        return bridge.call(same, value, limit=SOON)
    except BridgeError as error:
        return error


def loop_of(bridge: LoopBridge) -> object:
    """The loop it has now."""
    return bridge.call(current, limit=SOON)


def loops_at_once(bridge: LoopBridge) -> list[object]:
    """The loops that sixteen threads find which ask for one at the same moment."""
    at_once, seen = threading.Barrier(16), list[object]()

    def ask() -> None:
        at_once.wait(SOON)
        seen.append(loop_of(bridge))

    callers = [threading.Thread(target=ask) for _ in range(16)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(SOON)
    return seen


async def current() -> object:
    """The running loop."""
    return asyncio.get_running_loop()


def kill(bridge: LoopBridge) -> None:
    """Raise an exit on the loop, outside of any call, and wait until that was its end."""
    home = bridge._loop
    assert home is not None

    async def exits() -> None:
        asyncio.get_running_loop().call_soon(sys.exit, "on the loop")
        await forever()

    with pytest.raises(BridgeLost, match="has ended: SystemExit: on the loop, and kill"):
        bridge.call(exits, limit=SOON)
    home._thread.join(SOON)
    assert not home._thread.is_alive()


# -- what a call is -----------------------------------------------------------------------------------------


def test_the_value_or_the_very_error_comes_back(bridge: LoopBridge) -> None:
    """From the loop's thread to the caller's."""
    boom = LookupError("this one")

    async def raises() -> None:
        raise boom

    assert bridge.call(same, 7, limit=SOON) == 7
    with pytest.raises(LookupError) as caught:
        bridge.call(raises, limit=SOON)
    assert caught.value is boom


def test_an_exit_in_a_call_is_the_callers_and_not_the_end_of_the_loop(bridge: LoopBridge) -> None:
    """Neither is an interrupt that a coroutine raises."""
    for error in (SystemExit(3), KeyboardInterrupt()):

        async def ends(error: BaseException = error) -> None:
            raise error

        before = loop_of(bridge)
        with pytest.raises(type(error)):
            bridge.call(ends, limit=SOON)
        assert loop_of(bridge) is before


def test_the_callers_context_is_the_coroutines() -> None:
    """Variables of the context are seen, and not changed."""
    mine: contextvars.ContextVar[str] = contextvars.ContextVar("mine", default="nobody's")

    async def reads() -> str:
        seen = mine.get()
        mine.set("the loop's")
        return seen

    mine.set("the caller's")
    with LoopBridge() as bridge:
        assert bridge.call(reads, limit=SOON) == "the caller's"
    assert mine.get() == "the caller's"


def test_a_limit_may_be_as_long_as_somebody_likes(bridge: LoopBridge) -> None:
    """Longer than the system can wait in one go."""
    assert bridge.call(same, 1, limit=1e12) == 1


@pytest.mark.parametrize("limit", [0, -1.0, float("inf"), None, True])
def test_there_is_no_call_without_a_limit(bridge: LoopBridge, limit: object) -> None:
    """A bridge that waits for good is what this one is not."""
    with pytest.raises(SetupError, match="a finite number of seconds"):
        bridge.call(same, 1, limit=limit)  # type: ignore[arg-type]
    assert bridge._loop is None, "a call that is refused needs no loop"


def test_what_is_no_coroutine_function_is_said_so(bridge: LoopBridge) -> None:
    """A plain function would run on the loop and keep it from everything else."""
    with pytest.raises(SetupError, match="len hands back no awaitable"):
        bridge.call(len, "four", limit=SOON)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="work"):
        bridge.call(7, limit=SOON)  # type: ignore[arg-type]


# -- nothing is left ----------------------------------------------------------------------------------------


def cancelled(bridge: LoopBridge) -> object:
    """A call that its caller cancels."""
    call = bridge.begin(forever, limit=SOON)
    call.cancel()
    return call.result()


ENDINGS: dict[str, tuple[Callable[[LoopBridge], object], type[BaseException] | None]] = {
    "returns": (lambda bridge: bridge.call(same, 1, limit=SOON), None),
    "raises": (lambda bridge: bridge.call(fails, limit=SOON), LookupError),
    "takes too long": (lambda bridge: bridge.call(forever, limit=0.0001), BridgeTimedOut),
    "cancels itself": (lambda bridge: bridge.call(cancels_itself, limit=SOON), asyncio.CancelledError),
    "is cancelled": (cancelled, asyncio.CancelledError),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_five_hundred_calls_leave_no_descriptor_and_one_thread(
    bridge: LoopBridge, ending: str, no_collection: None
) -> None:
    """However a call ends. With a loop for each call it would be 1500 descriptors."""
    do, error = ENDINGS[ending]
    threads, before = threading.active_count(), descriptors()
    bridge.call(same, 0, limit=SOON)
    ours = descriptors()
    for _ in range(CALLS):
        if error is None:
            do(bridge)
        else:
            with pytest.raises(error):
                do(bridge)
    assert descriptors() == ours
    assert threading.active_count() - threads <= 1
    assert bridge.close() == ()
    assert descriptors() == before, "the loop's own descriptors were not given back"
    assert threading.active_count() <= threads


def test_five_hundred_bridges_leave_nothing_either(no_collection: None) -> None:
    """Each has a loop of its own, and gives it back."""
    with LoopBridge() as first:
        first.call(same, 0, limit=SOON)
    before = descriptors()
    for number in range(CALLS // 5):
        with LoopBridge() as bridge:
            assert bridge.call(same, number, limit=SOON) == number
    assert descriptors() == before


def test_a_loop_without_a_thread_is_given_back(monkeypatch: pytest.MonkeyPatch, no_collection: None) -> None:
    """The system has no thread left: an error of ours, and no descriptor more."""
    before = descriptors()

    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuses)
        bridge = LoopBridge("no thread")
        for _ in range(3):
            with pytest.raises(BridgeError, match="no thread gets no thread: can't start new thread"):
                bridge.call(same, 0, limit=SOON)
    assert descriptors() == before
    assert bridge.call(same, 4, limit=SOON) == 4, "it works as soon as there is one"
    bridge.close()


def test_a_bridge_that_is_dropped_says_so_and_ends(no_collection: None) -> None:
    """Its thread does not keep it, and its descriptors are given back."""
    before = descriptors()
    bridge = LoopBridge("dropped")
    bridge.call(same, 0, limit=SOON)
    with pytest.warns(ResourceWarning, match="dropped was not closed"):
        del bridge
    assert not alive("dropped")
    assert descriptors() == before


def test_an_error_keeps_nothing_of_a_call_alive(bridge: LoopBridge, no_collection: None) -> None:
    """What a coroutine held is let go of with the last reference, and not by the collector."""
    let_go = threading.Event()

    class Held:
        def __del__(self) -> None:
            let_go.set()

    async def raises(held: Held) -> None:
        raise LookupError("boom")

    def calls() -> None:
        with suppress(LookupError):
            bridge.call(raises, Held(), limit=SOON)

    calls()
    bridge.call(same, 0, limit=SOON)  # the loop has gone on, and its last handle is gone
    assert let_go.wait(SOON)


# -- one of each --------------------------------------------------------------------------------------------


def test_sixteen_first_calls_at_once_make_one_loop_and_one_thread(bridge: LoopBridge) -> None:
    """Whoever comes first makes it, and the others find it."""
    seen = loops_at_once(bridge)
    assert len(seen) == 16
    assert len(set(map(id, seen))) == 1
    assert len(alive("under test")) == 1


def test_calls_of_several_threads_run_beside_each_other(bridge: LoopBridge) -> None:
    """One that waits keeps nobody from the loop."""
    waits = bridge.begin(forever, limit=SOON)
    assert bridge.call(same, 1, limit=SOON) == 1
    assert not waits.done
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        waits.result()


# -- re-entry -----------------------------------------------------------------------------------------------


def test_a_call_from_the_loop_itself_is_refused_at_once(bridge: LoopBridge) -> None:
    """It would wait for its own thread; and so would closing."""

    async def again() -> None:
        bridge.call(same, 1, limit=SOON)

    async def closes() -> None:
        bridge.close()

    with pytest.raises(BridgeError, match="same is called from the event loop of under test itself: await"):
        bridge.call(again, limit=SOON)
    with pytest.raises(BridgeReentered, match="cannot be closed by what runs on it"):
        bridge.call(closes, limit=SOON)
    assert bridge.call(same, 2, limit=SOON) == 2, "the loop is usable"


def test_a_call_from_another_running_loop_is_refused(bridge: LoopBridge) -> None:
    """That loop would stand still meanwhile; its coroutine can await."""

    async def elsewhere() -> None:
        bridge.call(same, 1, limit=SOON)

    with pytest.raises(BridgeReentered, match="this thread's event loop from running: await it there"):
        asyncio.run(elsewhere())


def test_a_thread_that_the_loop_waits_for_may_call(bridge: LoopBridge) -> None:
    """The loop goes on meanwhile, so that is no re-entry."""

    async def by_a_thread() -> object:
        return await asyncio.to_thread(bridge.call, same, 3, limit=SOON)

    assert bridge.call(by_a_thread, limit=SOON) == 3


# -- limits -------------------------------------------------------------------------------------------------


def test_what_takes_too_long_is_cancelled_on_the_loop(bridge: LoopBridge) -> None:
    """It hears of it, puts back what it has to, and only then the caller goes on; the loop is usable."""
    put_back: list[str] = []

    async def slow() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            put_back.append("done")

    with pytest.raises(BridgeTimedOut, match=r"slow took longer than 0.01 s and was cancelled"):
        bridge.call(slow, limit=BRIEF)
    assert put_back == ["done"]
    assert bridge.call(same, 1, limit=SOON) == 1


def test_nobody_has_to_wait_for_a_call_to_be_over_in_time(bridge: LoopBridge) -> None:
    """Its limit is the loop's affair: a caller that went away leaves nothing that runs for good."""
    over = threading.Event()

    async def slow() -> None:
        try:
            await forever()
        finally:
            over.set()

    bridge.begin(slow, limit=BRIEF)
    assert over.wait(SOON)


def test_a_time_out_of_the_coroutines_own_is_its_own(bridge: LoopBridge) -> None:
    """Whose limit it was can be told from the error."""

    async def slow() -> None:
        async with asyncio.timeout(BRIEF):
            await forever()

    with pytest.raises(TimeoutError) as caught:
        bridge.call(slow, limit=SOON)
    assert not isinstance(caught.value, BridgeError)


def test_what_does_not_stop_is_left_behind_and_its_value_is_not_lost(
    bridge: LoopBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coroutine that blocks the loop: the caller goes on, and an undo that comes late finds its way."""
    monkeypatch.setattr(bridge_call, "_GRACE", BRIEF)
    go_on, late, came = threading.Event(), [], threading.Event()

    async def stuck() -> str:
        go_on.wait(SOON)
        return "an undo"

    def unclaimed(value: str) -> None:
        late.append(value)
        came.set()

    call = bridge.begin(stuck, limit=BRIEF, unclaimed=unclaimed)
    with pytest.raises(BridgeTimedOut, match=r"took longer than 0.01 s and does not stop"):
        call.result()
    go_on.set()
    assert came.wait(SOON)
    assert late == ["an undo"]
    assert bridge.call(same, 1, limit=SOON) == 1, "the loop is usable again"


def test_a_value_that_was_there_all_the_same_is_handed_over(bridge: LoopBridge) -> None:
    """The limit was over, and the work was done: the value may be an undo."""

    async def finishes() -> str:
        with suppress(asyncio.CancelledError):
            await forever()
        return "done"

    assert bridge.call(finishes, limit=BRIEF) == "done"


def test_an_interrupt_of_the_caller_cancels_the_call(bridge: LoopBridge) -> None:
    """The very interrupt is raised, and nothing goes on for nobody."""
    over, started = threading.Event(), threading.Event()

    async def slow() -> None:
        started.set()
        try:
            await forever()
        finally:
            over.set()

    class Interrupted(BaseException):
        pass

    boom = Interrupted()

    def interrupt(number: int, frame: object) -> None:
        raise boom

    def sends() -> None:
        assert started.wait(SOON)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        sender = threading.Thread(target=sends)
        sender.start()
        with pytest.raises(Interrupted) as caught:
            bridge.call(slow, limit=6 * SOON)
        sender.join(SOON)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught.value is boom
    assert boom.__cause__ is None
    assert over.wait(SOON)
    assert bridge.call(same, 1, limit=SOON) == 1


# -- a loop that has ended ----------------------------------------------------------------------------------


def test_a_dead_loop_is_made_anew_once_with_a_line(
    bridge: LoopBridge, caplog: pytest.LogCaptureFixture, no_collection: None
) -> None:
    """Its calls are told, whoever comes next finds a new one, and no descriptor is lost on the way."""
    caplog.set_level(logging.WARNING, "weightsync")
    before, ours = loop_of(bridge), descriptors()
    kill(bridge)
    caplog.clear()
    after = loop_of(bridge)
    assert after is not before
    assert descriptors() == ours
    assert len(caplog.messages) == 1
    assert caplog.messages[0] == (
        "the event loop of under test has ended (SystemExit: on the loop); there is a new one, this once"
    )
    assert len(alive("under test")) == 1


def test_sixteen_calls_that_find_it_dead_make_one_new_loop(
    bridge: LoopBridge, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log has one line of it."""
    caplog.set_level(logging.WARNING, "weightsync")
    loop_of(bridge)
    kill(bridge)
    caplog.clear()
    seen = loops_at_once(bridge)
    assert len(seen) == 16
    assert len(set(map(id, seen))) == 1
    assert len(caplog.records) == 1


def test_a_loop_that_ends_again_is_not_made_a_third_time(bridge: LoopBridge) -> None:
    """Whatever ends it would do so for ever: an error with the cause, where to look, and no thread."""
    for _ in range(2):
        loop_of(bridge)
        kill(bridge)
    with pytest.raises(
        BridgeLost, match=r"ended again \(SystemExit: on the loop\), and same was not begun"
    ) as caught:
        bridge.call(same, 1, limit=SOON)
    assert isinstance(caught.value.__cause__, SystemExit)
    assert not alive("under test")


def test_a_strangers_stop_is_told_to_whoever_waits(bridge: LoopBridge) -> None:
    """It is no end of a call that anybody meant."""
    put_back = threading.Event()

    async def stops() -> None:
        asyncio.get_running_loop().stop()
        try:
            await forever()
        finally:
            put_back.set()

    with pytest.raises(BridgeLost, match=r"has ended: somebody stopped it, and .*stops was cut off"):
        bridge.call(stops, limit=SOON)
    assert put_back.is_set()
    assert bridge.call(same, 1, limit=SOON) == 1


# -- the end ------------------------------------------------------------------------------------------------


def test_what_still_runs_at_the_end_is_cancelled_and_named(
    bridge: LoopBridge, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller is told, the log has the names, and a task that a call left behind is among them."""
    caplog.set_level(logging.WARNING, "weightsync")
    put_back: list[str] = []
    kept: list[asyncio.Task[None]] = []

    async def slow() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            put_back.append("done")

    async def leaves() -> None:
        kept.append(asyncio.create_task(slow(), name="left behind"))
        await asyncio.sleep(0)

    bridge.call(leaves, limit=SOON)
    call = bridge.begin(slow, limit=SOON)
    bridge.call(same, 0, limit=SOON)
    cut = bridge.close()
    assert len(cut) == 1
    assert cut[0].endswith("slow")
    assert put_back == ["done", "done"]
    with pytest.raises(BridgeClosed, match=r"under test is closed, and .*slow was cut off"):
        call.result()
    (line,) = caplog.messages
    assert line.startswith("under test ended while this ran, and cancelled it: left behind, ")


def test_closing_is_idempotent_and_final(bridge: LoopBridge) -> None:
    """Also from several threads; also if there never was a call."""
    LoopBridge().close()
    bridge.call(same, 0, limit=SOON)
    closers = [threading.Thread(target=bridge.close) for _ in range(4)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(SOON)
    assert not alive("under test"), "whoever has closed it finds it closed"
    assert bridge.close() == ()
    with pytest.raises(BridgeClosed, match="under test is closed, and same was not begun"):
        bridge.call(same, 1, limit=SOON)


def test_what_blocks_the_loop_keeps_nobody_from_closing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said; the thread is a daemon, and gives the descriptors back when it can."""
    caplog.set_level(logging.ERROR, "weightsync")
    monkeypatch.setattr("weightsync.handlers.bridge_loop._MARGIN", BRIEF)
    go_on, started = threading.Event(), threading.Event()

    async def blocks() -> None:
        started.set()
        go_on.wait(SOON)

    bridge = LoopBridge("blocked")
    bridge.begin(blocks, limit=SOON)
    assert started.wait(SOON)
    (thread,) = alive("blocked")
    bridge.close(BRIEF)
    assert "blocked does not end: something that runs on its event loop blocks it" in caplog.messages
    go_on.set()
    thread.join(SOON)
    assert not thread.is_alive()


# -- other processes ----------------------------------------------------------------------------------------


def in_a_child(bridge: LoopBridge, answers: Connection) -> None:
    """What a child process does with a bridge that it was given."""
    threads = threading.active_count()
    value = bridge.call(same, os.getpid(), limit=SOON)
    answers.send((value, threading.active_count() - threads, bridge.close()))


def test_a_forked_child_has_a_loop_of_its_own_and_takes_none_away(bridge: LoopBridge) -> None:
    """With a call under way and the lock held by another thread; the parent's loop still wakes up."""
    waits = bridge.begin(forever, limit=SOON)
    before = loop_of(bridge)
    read, write = os.pipe()
    with bridge._lock:  # as if another thread held it: in the child nobody gives it back
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of forks beside threads, which this is about
            process = os.fork()
        if process == 0:
            status = 1
            with suppress(BaseException):
                signal.alarm(int(SOON))
                gc.disable()
                ours = descriptors()
                assert bridge._loop is None
                assert bridge.call(same, 8, limit=SOON) == 8
                assert loop_of(bridge) is not before
                bridge.close()
                assert descriptors() == ours
                os.write(write, b"well")
                status = 0
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        assert told.read() == b"well"
    assert os.waitpid(process, 0)[1] == 0
    for _ in range(3):  # by the self-pipe, which both have had
        assert answer(bridge, 9) == 9
    assert loop_of(bridge) is before
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        waits.result()


def test_a_forked_child_keeps_no_descriptor_of_the_parents_loop(bridge: LoopBridge) -> None:
    """Three less than the parent has."""
    bridge.call(same, 0, limit=SOON)
    ours = descriptors()
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        os.write(write, str(descriptors()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        theirs = int(told.read())
    os.waitpid(process, 0)
    assert theirs == ours + 2 - 3, "the pipe of this test came on top"


@pytest.mark.slow
def test_a_spawned_process_has_a_loop_of_its_own(bridge: LoopBridge) -> None:
    """A bridge that is handed over comes as a new one."""
    bridge.call(same, 0, limit=SOON)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    child = context.Process(target=in_a_child, args=(bridge, theirs))
    child.start()
    try:
        assert mine.poll(5 * SOON)
        assert mine.recv() == (child.pid, 1, ())
    finally:
        child.join(SOON)
    assert child.exitcode == 0


def test_a_pickled_bridge_is_a_new_one(bridge: LoopBridge) -> None:
    """With its name, and without a loop."""
    bridge.call(same, 0, limit=SOON)
    with pickle.loads(pickle.dumps(bridge)) as other:
        assert other.name == bridge.name
        assert other._loop is None
        assert loop_of(other) is not loop_of(bridge)


def test_the_library_has_no_bridge_of_its_own() -> None:
    """No module has one: whoever makes one closes it."""
    assert not [name for name, value in vars(bridge_module).items() if isinstance(value, LoopBridge)]


def test_a_call_costs_less_than_a_third_of_one_with_a_loop_of_its_own() -> None:
    """And leaves nothing open, where a loop that is not closed leaves three descriptors a call."""
    bridged, closed, leaky = measure(calls=50, repeats=3)
    assert 3 * bridged.microseconds < closed.microseconds, (bridged, closed)
    assert (bridged.left, closed.left, leaky.left) == (0, 0, 150)

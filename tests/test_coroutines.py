"""Handlers that are coroutines, in real rounds: awaited, bounded, undone, cancelled with a failed round."""

import asyncio
import gc
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from casekit.bench import Bench, quick, threads
from casekit.scripts import Injected, Raise
from casekit.tensors import state
from casekit.wrapped import Tripwire
from weightsync.fsm.errors import BridgeTimedOut, RoundInProgress, SetupError
from weightsync.fsm.executors import RoundView
from weightsync.fsm.record import Record
from weightsync.handlers import bridge_call
from weightsync.handlers.inside import refuse_inside, step_of
from weightsync.joining import transport_for

pytestmark = pytest.mark.timeout(60)

SOON = 10.0


async def forever() -> None:
    """Ends when it is cancelled."""
    await asyncio.Event().wait()


class Steps:
    """An executor of coroutines that says what it did, and where."""

    name = "steps"

    def __init__(self) -> None:
        self.done: list[str] = []
        self.threads: set[str] = set()
        self.instead: dict[str, Callable[[], Awaitable[object]]] = {}

    async def prepare(self, round: RoundView) -> Callable[[], Awaitable[None]]:
        """Get ready; hands back a coroutine function."""
        await self._step("prepare")
        return self._undo

    async def clean(self, round: RoundView) -> None:
        """The good end."""
        await self._step("clean")

    async def _undo(self) -> None:
        await self._step("undo")

    async def _step(self, step: str) -> None:
        await asyncio.sleep(0)
        instead = self.instead.pop(step, None)
        if instead is not None:
            await instead()
        self.threads.add(threading.current_thread().name)
        self.done.append(step)


@pytest.fixture
def steps() -> Steps:
    """An executor that has done nothing yet."""
    return Steps()


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What is not closed stays open."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_the_steps_of_a_good_round_are_awaited_on_one_loop(steps: Steps) -> None:
    """Before, they were taken for done as soon as they were made. The cost of each is in the log."""
    with Bench(threads("e0", "e1"), handlers=[steps]) as bench:
        for _ in range(2):
            bench.works()
        costs = [(each.trigger, each.seconds) for each in bench.log.records if each.undo == "steps"]
    assert steps.done == ["prepare", "clean"] * 2
    assert steps.threads == {"weightsync-bridge"}
    assert [trigger for trigger, _ in costs] == ["prepare", "clean"] * 2
    assert all(seconds for _, seconds in costs)


def test_a_failed_round_awaits_the_undo(steps: Steps) -> None:
    """A coroutine function, as the step was."""
    wire, boom = Tripwire(transport_for("memory")), Injected("boom")
    with Bench(threads("e0"), wire, handlers=[steps]) as bench:
        wire.arm("broadcast", Raise(boom))
        assert not bench.meets(boom).ok
        wire.disarm()
        assert steps.done == ["prepare", "undo"]
        bench.works()
    assert steps.done[2:] == ["prepare", "clean"]


def test_an_error_in_a_step_is_the_rounds_error(steps: Steps) -> None:
    """The very object."""
    boom = Injected("in prepare")

    async def raises() -> None:
        raise boom

    with Bench(threads("e0"), handlers=[steps]) as bench:
        steps.instead["prepare"] = raises
        result = bench.meets(boom)
    assert result.error is boom
    assert steps.done == []


def test_a_step_that_hangs_is_named_before_the_phase_is_given_up(steps: Steps) -> None:
    """Its own limit is a little shorter than that of a state in which nothing moves."""
    policy = replace(quick(), idle=0.5)
    with Bench(threads("e0"), policy=policy, handlers=[steps]) as bench:
        steps.instead["prepare"] = forever
        result = bench.run(state(1.0))
    assert isinstance(result.error, BridgeTimedOut), result.error
    assert "Steps.prepare took longer than 0.45 s and was cancelled" in str(result.error)


def test_what_a_cancelled_round_waited_for_is_cancelled_too(steps: Steps) -> None:
    """It would go on for as long as its limit otherwise, beside the next round."""
    begun, over = threading.Event(), threading.Event()

    async def slow() -> None:
        begun.set()
        try:
            await forever()
        finally:
            over.set()

    patient = replace(quick(), deadline=80.0, idle=6 * SOON)  # a step may take longer than this test waits
    with Bench(threads("e0"), policy=patient, handlers=[steps]) as bench:
        steps.instead["prepare"] = slow
        pending = bench.sync.begin(1, state(1.0))
        assert begun.wait(SOON)
        pending.cancel()
        assert over.wait(SOON)
        assert not pending.wait().ok
        bench.works()
    assert steps.done == ["prepare", "clean"]


def test_an_undo_that_comes_too_late_for_its_round_is_done(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that cannot be stopped, and is ready when nobody waits any more."""
    monkeypatch.setattr(bridge_call, "_GRACE", 0.01)
    go_on, undone = threading.Event(), threading.Event()

    async def stuck() -> None:
        go_on.wait(SOON)

    async def says() -> None:
        undone.set()

    with Bench(threads("e0"), policy=replace(quick(), idle=0.5), handlers=[steps]) as bench:
        steps.instead.update(prepare=stuck, undo=says)
        result = bench.run(state(1.0))
        assert not result.ok
        assert not undone.is_set()
        go_on.set()
        assert undone.wait(SOON)
        bench.works()


class HalfAndHalf:
    """An executor with one coroutine, and an observer with another."""

    name = "half"

    def __init__(self) -> None:
        self.done: list[str] = []
        self.seen: list[str] = []

    def prepare(self, round: RoundView) -> Callable[[], object]:
        """On a thread of the round's, as ever."""
        self.done.append(f"prepare on {threading.current_thread().name}")
        return lambda: self.done.append("undo")

    async def clean(self, round: RoundView) -> None:
        """On the loop."""
        self.done.append(f"clean on {threading.current_thread().name}")

    async def __call__(self, record: Record) -> None:
        """On the loop."""
        await asyncio.sleep(0)
        self.seen.append(record.event)


def test_a_handler_may_mix_coroutines_with_functions() -> None:
    """Each step runs where it belongs, and an executor may be an observer, too."""
    half = HalfAndHalf()
    with Bench(threads("e0"), handlers=[half]) as bench:
        bench.works()
    assert half.done == ["prepare on weightsync", "clean on weightsync-bridge"]
    assert half.seen[0] == "opened"
    assert "result" in half.seen


def test_an_observer_that_awaits_is_told_everything_in_order() -> None:
    """And one that raises is disabled, with its name, as any other."""
    seen: list[int] = []

    async def watch(record: Record) -> None:
        await asyncio.sleep(0)
        seen.append(record.seq)

    with Bench(threads("e0"), handlers=[watch]) as bench:
        bench.works()
        told = len(bench.log.records)
    assert len(seen) == told
    assert seen == sorted(seen)


def test_an_observer_that_raises_on_the_loop_is_disabled(caplog: pytest.LogCaptureFixture) -> None:
    """One line, and the round does not notice."""
    caplog.set_level(logging.ERROR, "weightsync")

    async def watch(record: Record) -> None:
        raise LookupError("boom")

    with Bench(threads("e0"), handlers=[watch]) as bench:
        bench.works()
        bench.works()
    assert caplog.messages == ["observer watch is disabled: it raised LookupError: boom"]


def test_rounds_from_an_event_loop_go_well_with_such_handlers(steps: Steps) -> None:
    """They run on a loop of their own, and the caller's goes on."""

    async def trainer(bench: Bench) -> bool:
        return (await bench.sync.round(1, state(1.0))).ok

    with Bench(threads("e0"), handlers=[steps]) as bench:
        assert asyncio.run(trainer(bench))
    assert steps.done == ["prepare", "clean"]


class Closing:
    """An observer that has something to await at the end."""

    name = "closing"

    def __init__(self) -> None:
        self.told = 0
        self.closed_on = ""

    async def __call__(self, record: Record) -> None:
        """Counts."""
        self.told += 1

    async def close(self) -> None:
        """Says goodbye to somebody."""
        await asyncio.sleep(0)
        self.closed_on = threading.current_thread().name


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_the_end_of_an_observer_is_awaited(in_a_loop: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Also if whoever closes runs an event loop, which may not be the one that is waited for."""
    caplog.set_level(logging.WARNING, "weightsync")
    watch = Closing()

    def trains() -> None:
        with Bench(threads("e0"), handlers=[watch]) as bench:
            bench.works()

    async def trains_in_a_loop() -> None:
        trains()

    if in_a_loop:
        asyncio.run(trains_in_a_loop())
    else:
        trains()
    assert watch.told
    assert watch.closed_on == "weightsync-bridge"
    assert caplog.messages == []


def test_without_such_handlers_there_is_no_loop() -> None:
    """Nobody pays for what nobody uses."""
    with Bench(threads("e0")) as bench:
        bench.works()
        assert bench.sync._bridge._loop is None


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["memory", "collective", "shm"])
def test_fifty_rounds_leave_nothing_behind(transport: str, steps: Steps, no_collection: None) -> None:
    """Descriptors, threads, shared memory and sockets are as many as after the first rounds, on all ways."""
    with Bench(threads("e0", "e1"), transport, handlers=[steps]) as bench:
        for _ in range(3):
            bench.works()
        before = counted()
        for _ in range(50):
            bench.works()
        assert counted() == before
    assert steps.done == ["prepare", "clean"] * 53


def counted() -> dict[str, object]:
    """What a process can leave behind."""
    return {
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "bridges": sum(each.name == "weightsync-bridge" for each in threading.enumerate()),
        "segments": sorted(path.name for path in Path("/dev/shm").iterdir() if "weightsync" in path.name),
    }


def plain(step: Callable[..., Awaitable[object]]) -> Any:
    """As a decorator leaves it: no coroutine function any more."""

    def called(*args: object) -> Awaitable[object]:
        return step(*args)

    return called


class Hidden:
    """An executor of coroutines that are hidden: by a function, a partial, an object's call."""

    name = "hidden"

    def __init__(self, how: str) -> None:
        self.done: list[str] = []
        self._how = how
        self.prepare: Any = self._hide(self._prepare)
        self.clean: Any = self._hide(self._clean)

    def _hide(self, step: Callable[..., Awaitable[object]]) -> Any:
        if self._how == "function":
            return plain(step)
        if self._how == "partial":
            return partial(step)

        class Called:
            async def __call__(self, *args: object) -> object:
                return await step(*args)

        return Called()

    async def _prepare(self, round: RoundView) -> Any:
        await asyncio.sleep(0)
        self.done.append("prepare")
        return self._hide(self._undo)

    async def _clean(self, round: RoundView) -> None:
        await asyncio.sleep(0)
        self.done.append("clean")

    async def _undo(self) -> None:
        await asyncio.sleep(0)
        self.done.append("undo")


@pytest.mark.parametrize("how", ["function", "partial", "object"])
def test_what_a_step_hands_back_to_be_awaited_is_awaited(how: str) -> None:
    """Whatever hides that it is a coroutine: the good way, and the undo."""
    hidden, wire, boom = Hidden(how), Tripwire(transport_for("memory")), Injected("boom")
    with Bench(threads("e0"), wire, handlers=[hidden]) as bench:
        bench.works()
        wire.arm("broadcast", Raise(boom))
        assert not bench.meets(boom).ok
    assert hidden.done == ["prepare", "clean", "prepare", "undo"]


class Owes:
    """An executor that is none of coroutines, with an undo that makes one."""

    name = "owes"

    def __init__(self, undo: Any) -> None:
        self._undo = undo

    def prepare(self, round: RoundView) -> Any:
        """Hand it back."""
        return self._undo

    def clean(self, round: RoundView) -> None:
        """Nothing to do."""


def test_the_undo_of_a_plain_executor_is_awaited() -> None:
    """A lambda that makes a coroutine; what that raises makes the round unclean."""
    done: list[str] = []

    async def undo() -> None:
        await asyncio.sleep(0)
        done.append("undo")
        raise OSError("stuck")

    wire, boom = Tripwire(transport_for("memory")), Injected("boom")
    with Bench(threads("e0"), wire, handlers=[Owes(plain(undo))]) as bench:
        wire.arm("broadcast", Raise(boom))
        result = bench.meets(boom)
    assert done == ["undo"]
    assert result.unclean
    assert any("OSError: stuck" in note for note in result.notes)


def test_what_is_no_undo_is_refused() -> None:
    """In one line, before an engine is told."""
    with Bench(threads("e0"), handlers=[Owes(5)]) as bench:
        result = bench.run(state(1.0))
    assert isinstance(result.error, SetupError)
    assert str(result.error) == "owes.prepare handed 5 back: what undoes it is needed, or None"
    assert result.failed_in == "Locked"


def test_an_observer_that_hides_a_coroutine_is_disabled_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was told nothing so far, and nobody would have noticed."""

    async def told(record: Record) -> None:
        raise AssertionError

    with Bench(threads("e0"), handlers=[plain(told)]) as bench:
        bench.works()
    (line,) = [each.message for each in caplog.records if "is disabled" in each.message]
    assert "write it as an async def" in line


class Reenters:
    """An executor, of coroutines or not, that asks for what would wait for its own round."""

    name = "reenters"

    def __init__(self, *, awaits: bool) -> None:
        self.sync: Any = None
        self.errors: list[str] = []
        self.left: list[Any] = []
        self.prepare: Any = self._awaits if awaits else self._asks

    def _asks(self, round: RoundView) -> None:
        model = state(1.0)
        asked: tuple[Any, ...] = (
            lambda: self.sync.on_step_end(99, model), lambda: self.sync.on_train_begin(model),
            lambda: self.sync.catch_up(99, model), self.sync.close,
        )  # fmt: skip
        for ask in asked:
            try:
                ask()
            except RoundInProgress as error:
                self.errors.append(str(error))

    async def _awaits(self, round: RoundView) -> None:
        self._asks(round)
        try:
            await self.sync.round(99, state(1.0))
        except RoundInProgress as error:
            self.errors.append(str(error))

    def clean(self, round: RoundView) -> None:
        """Nothing to do."""


@pytest.mark.parametrize("awaits", [False, True])
def test_a_handler_that_would_wait_for_its_own_round_is_refused(*, awaits: bool) -> None:
    """At once, from its thread and from the loop; the round goes on, and so does the next one."""
    handler = Reenters(awaits=awaits)
    with Bench(threads("e0"), handlers=[handler]) as bench:
        handler.sync = bench.sync
        bench.works()
        assert len(handler.errors) == 4 + awaits
        assert all("by a handler of the round that runs" in each for each in handler.errors)
        bench.works()


def test_what_a_handler_has_left_behind_may_ask() -> None:
    """Its step is over: a task that it began is none of the round's."""
    owner = object()

    async def course() -> None:
        go = asyncio.Event()

        async def later() -> None:
            with pytest.raises(RoundInProgress):
                refuse_inside(owner, "this")
            refuse_inside(object(), "another one's")
            await go.wait()
            refuse_inside(owner, "this")

        with step_of(owner):
            task = asyncio.create_task(later())
            await asyncio.sleep(0)
        go.set()
        await task

    asyncio.run(course())

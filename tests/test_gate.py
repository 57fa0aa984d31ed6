"""The gate admits generation or lets weights change, never both."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from weightsync.fsm.errors import EnginePaused, EngineSilent
from weightsync.handlers.gate import Gate, GateOpened
from weightsync.handlers.threads import spawn

SOON = 10.0
"""Seconds after which something that should have happened never will."""


@pytest.fixture
def gate() -> Gate:
    """An open gate."""
    return Gate("engine a")


@contextmanager
def somebody_inside(gate: Gate) -> Iterator[threading.Event]:
    """Somebody generates, until the event is set or the context is left."""
    leave, inside = threading.Event(), threading.Event()

    def generate() -> None:
        with gate.admit():
            inside.set()
            assert leave.wait(SOON)

    generating = spawn("generate", generate)
    assert inside.wait(SOON)
    try:
        yield leave
    finally:
        leave.set()
        generating.result(SOON)


def closing(gate: Gate) -> None:
    """Wait until somebody has begun to close the gate."""
    end = time.monotonic() + SOON
    while gate._open:
        assert time.monotonic() < end
        time.sleep(0)


class TestThreads:
    def test_an_open_gate_admits_many_at_once(self, gate: Gate) -> None:
        """Generation does not wait for other generation."""
        with gate.admit(), gate.admit():
            assert gate.inside == 2
        assert gate.inside == 0
        assert not gate.paused

    def test_closing_waits_until_nobody_is_inside(self, gate: Gate) -> None:
        """A closed gate with somebody inside is no pause yet."""
        with somebody_inside(gate) as leave:
            pausing = spawn("close", gate.close, SOON)
            closing(gate)
            assert not pausing.done()
            assert not gate.paused
            leave.set()
            pausing.result(SOON)
            assert gate.paused

    def test_nobody_is_admitted_while_the_gate_is_emptied(self, gate: Gate) -> None:
        """Whoever comes while the last ones leave waits for the gate to open again."""
        with somebody_inside(gate) as leave:
            pausing = spawn("close", gate.close, SOON)
            closing(gate)
            with pytest.raises(EnginePaused, match="engine a stayed paused"), gate.admit(limit=0.01):
                pass
            leave.set()
            pausing.result(SOON)

    def test_a_gate_that_does_not_empty_opens_again(self, gate: Gate) -> None:
        """The error names the engine and how many are still inside, and generation goes on."""
        with somebody_inside(gate):
            with pytest.raises(
                EngineSilent, match=r"engine a did not pause: 1 generations still ran after 0\.01"
            ):
                gate.close(0.01)
            with gate.admit(limit=SOON):
                assert gate.inside == 2

    def test_a_pause_that_fails_does_not_end_another_one(self, gate: Gate) -> None:
        """Whoever found the gate closed leaves it closed."""
        with somebody_inside(gate) as leave:
            first = spawn("close", gate.close, SOON)
            closing(gate)
            with pytest.raises(EngineSilent):
                gate.close(0.01)
            leave.set()
            first.result(SOON)
            assert gate.paused

    def test_opening_lets_everybody_in_who_waits(self, gate: Gate) -> None:
        """Waiting admissions go on as soon as the gate opens."""
        gate.close(SOON)
        together = threading.Barrier(3)

        def generate() -> None:
            with gate.admit(SOON):
                together.wait(SOON)

        waiting = [spawn("generate", generate) for _ in range(3)]
        assert gate.inside == 0
        gate.open()
        for each in waiting:
            each.result(SOON)

    def test_a_pause_that_somebody_ends_is_told_so(self, gate: Gate) -> None:
        """Opening a gate that is being closed is an answer to whoever closes it, not a pause."""
        with somebody_inside(gate):
            pausing = spawn("close", gate.close, SOON)
            closing(gate)
            gate.open()
            with pytest.raises(GateOpened, match="pause anew"):
                pausing.result(SOON)

    def test_generation_that_raises_leaves_the_gate(self, gate: Gate) -> None:
        """An error inside does not keep the engine from pausing."""
        with pytest.raises(ZeroDivisionError), gate.admit():
            raise ZeroDivisionError
        gate.close(0.0)
        assert gate.paused

    def test_many_threads_and_many_pauses(self, gate: Gate) -> None:
        """Nobody is ever inside while the gate is paused, whatever the timing."""
        stop, inside_while_paused = threading.Event(), []

        def generate() -> None:
            while not stop.is_set():
                with gate.admit(SOON):
                    if gate.paused:
                        inside_while_paused.append(1)

        generating = [spawn("generate", generate) for _ in range(4)]
        for _ in range(200):
            gate.close(SOON)
            assert gate.paused
            gate.open()
        stop.set()
        for each in generating:
            each.result(SOON)
        assert not inside_while_paused


class TestLoops:
    def test_one_gate_serves_one_loop_after_the_other(self, gate: Gate) -> None:
        """Two calls of asyncio.run, both of which had to wait, leave nothing of their loops behind."""

        async def generate() -> int:
            entering = asyncio.create_task(enter())
            await asyncio.sleep(0)
            assert not entering.done()
            gate.open()
            return await entering

        async def enter() -> int:
            async with gate.admitted(SOON):
                return gate.inside

        for _ in range(2):
            gate.close(SOON)
            assert asyncio.run(generate()) == 1
        assert gate.inside == 0
        assert gate._wakers == []

    def test_waiting_does_not_block_the_loop(self, gate: Gate) -> None:
        """While one task waits at the gate, the others of its loop go on."""
        gate.close(SOON)

        async def enter() -> None:
            async with gate.admitted(SOON):
                pass

        async def story() -> None:
            entering = asyncio.create_task(enter())
            for _ in range(100):
                await asyncio.sleep(0)
            assert not entering.done()
            # Another thread opens it: the task is woken across threads.
            spawn("open", gate.open)
            await asyncio.wait_for(entering, SOON)

        asyncio.run(story())

    def test_a_limit_is_kept(self, gate: Gate) -> None:
        """A coroutine that may not wait longer is told that the engine is paused."""
        gate.close(SOON)

        async def enter() -> None:
            async with gate.admitted(limit=0.01):
                pass

        with pytest.raises(EnginePaused):
            asyncio.run(enter())
        assert gate._wakers == []

    def test_a_cancelled_admission_is_forgotten(self, gate: Gate) -> None:
        """Cancelling while waiting raises CancelledError, and the gate can be paused and opened as ever."""
        gate.close(SOON)

        async def enter() -> None:
            async with gate.admitted():
                pass

        async def story() -> None:
            entering = asyncio.create_task(enter())
            await asyncio.sleep(0)
            entering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await entering

        asyncio.run(story())
        assert gate._wakers == []
        assert gate.paused
        gate.open()

    def test_a_loop_that_ended_does_not_disturb_the_opening(self, gate: Gate) -> None:
        """Who waited on a loop that is closed is nobody any more."""
        gate.close(SOON)
        loop = asyncio.new_event_loop()
        loop.close()
        gate._wakers.append(lambda: loop.call_soon_threadsafe(gate.open).cancel())
        gate.open()
        assert not gate.paused

    def test_coroutines_and_threads_share_one_pause(self, gate: Gate) -> None:
        """A coroutine inside keeps a thread from pausing the engine."""

        async def story() -> None:
            async with gate.admitted():
                pausing = spawn("close", gate.close, SOON)
                await asyncio.to_thread(closing, gate)
                assert not pausing.done()
            await asyncio.wait_for(asyncio.wrap_future(pausing), SOON)

        asyncio.run(story())
        assert gate.paused


class TestHolds:
    def test_a_held_gate_admits_nobody_whoever_opens_it(self, gate: Gate) -> None:
        """A round may open it: what generation needs is not there all the same. The error says what."""
        gate.hold("cache", SOON)
        gate.hold("weights", SOON)
        gate.close(SOON)
        gate.open()
        gate.let_go("weights")
        with pytest.raises(EnginePaused, match="it has no memory for its cache"), gate.admit(limit=0.01):
            pass
        assert gate.holds == {"cache"}
        gate.let_go("cache")
        with gate.admit(limit=SOON):
            assert gate.inside == 1

    def test_a_hold_waits_until_nobody_is_inside(self, gate: Gate) -> None:
        """Memory is not taken away from under a generation."""
        with somebody_inside(gate) as leave:
            holding = spawn("hold", gate.hold, "cache", SOON)
            while not gate.holds:
                time.sleep(0)
            assert not holding.done()
            leave.set()
            holding.result(SOON)
        assert gate.inside == 0

    def test_a_hold_that_does_not_come_about_is_none(self, gate: Gate) -> None:
        """Somebody does not come out: generation goes on, unless it was held before."""
        with somebody_inside(gate):
            with pytest.raises(EngineSilent, match="held for its cache: 1 generations still ran"):
                gate.hold("cache", 0.01)
            assert not gate.holds
            with gate.admit(limit=SOON):
                pass

    def test_a_second_hold_that_gives_up_leaves_the_first(self, gate: Gate) -> None:
        """For the same memory, while the first one still waits for somebody inside."""
        with somebody_inside(gate) as leave:
            holding = spawn("hold", gate.hold, "cache", SOON)
            while not gate.holds:
                time.sleep(0)
            with pytest.raises(EngineSilent):
                gate.hold("cache", 0.01)
            assert gate.holds == {"cache"}
            leave.set()
            holding.result(SOON)

    def test_whoever_waits_is_let_in_when_the_last_hold_ends(self, gate: Gate) -> None:
        """Threads and coroutines; and no earlier."""
        gate.hold("cache", SOON)
        gate.hold("weights", SOON)

        def generate() -> int:
            with gate.admit(SOON):
                return gate.inside

        async def generate_on_a_loop() -> int:
            async with gate.admitted(SOON):
                return gate.inside

        thread = spawn("generate", generate)
        loop = spawn("loop", lambda: asyncio.run(generate_on_a_loop()))
        while not gate._wakers:
            time.sleep(0)
        gate.let_go("weights")
        gate.open()
        assert not thread.done()
        assert not loop.done()
        gate.let_go("cache")
        assert thread.result(SOON) >= 1
        assert loop.result(SOON) >= 1

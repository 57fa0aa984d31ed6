"""The loop's turn: who has it, what is done with it and what without, and what comes of an error in it.

Most of these rounds are moved by the test, which takes the turns of the loop's thread; so every answer is
brought when, and on the thread on which, the test brings it.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from weightsync.fsm.calls import Act, Call
from weightsync.fsm.driver import Driver
from weightsync.fsm.policy import Policy
from weightsync.fsm.states import State
from weightsync.handlers.futures import begun
from weightsync.handlers.threads import spawn
from weightsync.handlers.workers import Workers
from weightsync.testing.fakes import FakeEngine, FakeTransport, Gate
from weightsync.testing.scene import PATIENCE, Scene, close_all

PATIENT = Policy(deadline=600.0, lease=300.0)
"""Nothing happens in such a round because time has passed."""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every thread that a test has begun ends with it."""
    yield
    close_all()


class Answering(FakeEngine):
    """An engine that says it is open when the test says so."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.opened = begun()

    def open(self, *said: Any) -> Future[None]:
        """Open; who asked hears of it later."""
        super().open(*said)
        return self.opened


class Waking(FakeTransport):
    """A transport that wants to know when its round has moved on from Locked."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__()
        self._wake = wake

    def open(self, plan: Any, weights: Any, engines: Any, port: Any) -> None:
        """Ask to be told, then open."""
        port.on_change(self._wake)
        super().open(plan, weights, engines, port)


class Moved:
    """A round that waits for nothing but the answer of engine b to ``open``. Its threads are at rest."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self.scene = scene = Scene(PATIENT)
        self.engine, scene.transport = Answering("b"), Waking(wake)
        self.name = f"moved-{id(self)}"
        scene.workers, scene.engines[1] = Workers(self.name), self.engine
        self.loop = scene.loop = scene.next_round()
        self.loop._inbox.append(self.loop.driver.start)
        self.until(lambda: self._open() == [(Act.open, "b")])

    def _open(self) -> list[tuple[Act, str | None]]:
        calls = [item.call for item in list(self.loop.driver._open.values())]
        return [(call.act, call.engine.id if call.engine else None) for call in calls]

    def until(self, holds: Callable[[], bool]) -> None:
        """Take the turns of the loop's thread until this holds and nobody does anything any more."""
        end = time.monotonic() + PATIENCE
        while not (holds() and self._at_rest()):
            assert time.monotonic() < end
            self.loop._go_on()
            with contextlib.suppress(queue.Empty):
                self.loop._alarm.get(timeout=0.001)
        while self.rung():
            pass
        self.loop._go_on()  # so that the loop's thread would sleep until the driver is due

    def _at_rest(self) -> bool:
        threads = sum(thread.name == self.name for thread in threading.enumerate())
        return len(self.scene.workers._idle) == threads

    def rung(self) -> bool:
        """Whether somebody called the loop's thread."""
        try:
            self.loop._alarm.get_nowait()
        except queue.Empty:
            return False
        return True

    def bring(self, move: Callable[[float], list[Call]]) -> None:
        """Take something to the round as the thread does that reads a line."""
        spawn("reading", self.loop._bring, move).result(PATIENCE)

    def answer(self) -> None:
        """Let that thread read that the engine is open."""
        spawn("reading", self.engine.opened.set_result, None).result(PATIENCE)


def test_a_transport_is_woken_on_the_loops_own_thread_after_its_turn() -> None:
    """An answer ends a phase on the thread that reads it, which has other answers to read.

    While the transport's code takes its time, others have the turn and go on with the round.
    """
    woken: list[tuple[threading.Thread, bool]] = []

    def wake() -> None:
        free = moved.loop._turn.acquire(timeout=2.0)
        if free:
            moved.loop._turn.release()
        woken.append((threading.current_thread(), free))

    moved = Moved(wake)
    moved.scene.transport.bad["bucket 0"] = gate = Gate()
    moved.answer()
    assert moved.loop.driver.round.state is State.Broadcasting
    assert woken == []
    assert moved.rung()
    moved.loop._go_on()
    assert woken == [(threading.current_thread(), True)]
    gate.open()
    moved.until(lambda: moved.loop.driver.over)
    moved.scene.observers.flush(PATIENCE)
    moved.scene.check(moved.loop.driver.result())


class Owned:
    """A lock that knows who has it."""

    def __init__(self) -> None:
        self.lock, self.owner = threading.Lock(), 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As a lock does."""
        mine = self.lock.acquire(blocking, timeout)
        if mine:
            self.owner = threading.get_ident()
        return mine

    def release(self) -> None:
        """As a lock does."""
        self.owner = 0
        self.lock.release()

    def locked(self) -> bool:
        """As a lock does."""
        return self.lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_the_driver_is_read_with_the_turn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To know when it is due is to look through what is open, which whoever has the turn changes."""
    moved, turn = Moved(), Owned()
    moved.loop._turn = turn  # type: ignore[assignment]
    due, readers = vars(Driver)["due"], list[tuple[str, bool]]()

    def read(driver: Driver) -> Any:
        readers.append((threading.current_thread().name, turn.owner == threading.get_ident()))
        return due.fget(driver)

    monkeypatch.setattr(Driver, "due", property(read))
    moved.bring(lambda now: [])
    assert {name for name, _ in readers} == {"reading"}
    moved.answer()
    moved.until(lambda: moved.loop.driver.over)
    assert all(own for _, own in readers), readers


class Broken(Exception):
    """An error of the library itself."""


def fail(now: float) -> list[Call]:
    """A move that does not succeed."""
    raise Broken


def test_nobody_goes_on_with_a_round_whose_loop_is_broken() -> None:
    """Nobody would keep its limits: what partners answer from then on is not acted upon."""
    scene, gate = Scene(PATIENT), Gate()
    scene.workers = Workers("left")
    loop = scene.loop = scene.next_round()
    scene.executors[0].bad["prepare"] = gate
    running = spawn("run", loop.run)
    gate.await_visitor()
    loop._post(fail)
    with pytest.raises(Broken):
        running.result(PATIENCE)
    path, story = loop.driver.round.records(), list(scene.story)
    threads = [thread for thread in threading.enumerate() if thread.name == "left"]
    scene.workers.close()
    gate.open()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert (loop.driver.round.records(), scene.story) == (path, story)
    assert loop.driver.round.state is State.Locked


def test_an_error_in_a_turn_of_another_thread_ends_the_loop_at_once() -> None:
    """Not at the round's next limit."""
    moved = Moved()
    moved.bring(fail)
    assert moved.rung()
    with pytest.raises(Broken):
        moved.loop._go_on()
    moved.answer()
    assert moved.loop.driver.round.state is State.Locked

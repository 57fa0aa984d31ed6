"""The commit's guard: one thread at a time, never twice, and never left locked by an interrupt."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType, TracebackType

import pytest

from weightsync.fsm.commit import CommitGuard
from weightsync.fsm.errors import Reentrant


def test_it_keeps_threads_apart() -> None:
    """Eight threads that read, wait and write lose nothing."""
    guard, count = CommitGuard(), [0]

    def work() -> None:
        for _ in range(200):
            with guard():
                seen = count[0]
                threading.Event().wait(0)
                count[0] = seen + 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count == [1600]


def test_firing_from_inside_is_refused_at_once() -> None:
    """It would wait for itself for ever; instead it is an error, and the outer commit goes on."""
    guard = CommitGuard()
    with guard():
        with pytest.raises(Reentrant, match="from inside the commit of another event"):
            guard()
        with pytest.raises(Reentrant):
            guard()
    with guard():
        pass


def test_it_is_given_back_after_an_error() -> None:
    """What goes wrong inside does not keep the next event out, whichever thread it comes from."""
    guard = CommitGuard()
    with pytest.raises(ZeroDivisionError), guard():
        raise ZeroDivisionError
    assert free(guard)


def test_another_thread_waits_and_is_no_reentry() -> None:
    """Only the same thread is refused; another one gets its turn."""
    guard, order = CommitGuard(), []

    def other() -> None:
        with guard():
            order.append("second")

    with guard():
        thread = threading.Thread(target=other)
        thread.start()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


# -- interrupts ---------------------------------------------------------------------------------------------


class Interrupt(KeyboardInterrupt):
    """Ours, so that a real Ctrl-C still ends the test."""


@pytest.fixture
def interrupts() -> Iterator[Callable[[], None]]:
    """Arms one interrupt, as by Ctrl-C, at some instant of the next few milliseconds of computing."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupt

    def arm() -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005)

    # Not SIGALRM, which pytest-timeout needs for itself.
    before = signal.signal(signal.SIGVTALRM, interrupt)
    yield arm
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


def free(guard: Callable[[], AbstractContextManager[object]]) -> bool:
    """Whether another thread can enter."""
    entered = threading.Event()

    def enter() -> None:
        with guard():
            entered.set()

    threading.Thread(target=enter, daemon=True).start()
    return entered.wait(2)


def interrupt_while_entering(guard: Callable[[], AbstractContextManager[object]]) -> None:
    """Enter and leave, over and over, until the interrupt comes."""
    while True:
        with guard():
            pass


def test_an_interrupt_never_leaves_it_locked(interrupts: Callable[[], None]) -> None:
    """Ctrl-C at any instant, also while the lock is taken or given back, leaves it to the next event."""
    guard = CommitGuard()
    for _ in range(60):
        interrupts()
        with pytest.raises(Interrupt):
            interrupt_while_entering(guard)
        assert free(guard)


class GuardInPython:
    """The obvious guard, with both methods written in Python."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lock.release()


def test_a_guard_written_in_python_is_left_locked(interrupts: Callable[[], None]) -> None:
    """The test above can fail: a guard of the obvious kind is soon found locked with nobody inside."""
    for _ in range(200):
        guard = GuardInPython()
        interrupts()
        with pytest.raises(Interrupt):
            interrupt_while_entering(lambda guard=guard: guard)  # type: ignore[misc]
        if guard.lock.locked():
            return
    pytest.fail("200 interrupts, and the obvious guard was free after each")

"""Observers: told everything in order, on their own thread, and never in anybody's way."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from weightsync.fsm.record import Record
from weightsync.handlers.observers import Observers
from weightsync.testing.fakes import Gate

PATIENCE = 20.0


def record(number: int) -> Record:
    """A record with that number."""
    return Record(0.0, "note", "digest", "r", number)


class Listener:
    """Writes down what it hears; raises at a number, waits at a gate."""

    name = "listener"

    def __init__(self, raises: dict[int, BaseException] | None = None, gate: Gate | None = None) -> None:
        self.heard: list[int] = []
        self.closed = 0
        self._raises = raises or {}
        self._gate = gate

    def __call__(self, record: Record) -> None:
        """Take a record."""
        if self._gate:
            self._gate.pass_through()
        if record.seq in self._raises:
            raise self._raises[record.seq]
        self.heard.append(record.seq)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Listener)

    __hash__ = None  # type: ignore[assignment]

    def close(self) -> None:
        """Called at the end."""
        self.closed += 1


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The error lines of the library's logger."""
    with caplog.at_level(logging.ERROR, logger="weightsync"):
        yield caplog


def test_everybody_hears_every_record_in_order() -> None:
    """Whatever is told is handed over by the time ``flush`` says so."""
    listeners = [Listener(), Listener()]
    observers = Observers(listeners)
    for number in range(100):
        observers.tell([record(2 * number), record(2 * number + 1)])
    assert observers.flush(PATIENCE)
    assert [listener.heard for listener in listeners] == [list(range(200))] * 2
    observers.close()


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(1), asyncio.CancelledError(), KeyboardInterrupt()]
)
def test_an_observer_that_raises_is_disabled_with_one_line(
    error: BaseException, told: pytest.LogCaptureFixture
) -> None:
    """The others, equal or not, hear the rest; so does everybody in the rounds after."""
    bad, good = Listener({1: error}), Listener()
    observers = Observers([bad, good])
    observers.tell(map(record, range(4)))
    assert observers.flush(PATIENCE)
    assert (bad.heard, good.heard) == ([0], [0, 1, 2, 3])
    assert len(observers.active) == 1
    assert observers.active[0] is good
    (line,) = told.messages
    assert line == f"observer listener is disabled: it raised {type(error).__name__}: {error}"
    observers.close()
    assert (bad.closed, good.closed) == (0, 1)


def test_telling_never_waits() -> None:
    """An observer that hangs delays its own lines; ``flush`` gives up at its limit."""
    gate = Gate()
    slow = Listener(gate=gate)
    observers = Observers([slow])
    observers.tell(map(record, range(50)))
    gate.await_visitor()
    assert not observers.flush(0.01)
    assert slow.heard == []
    begun = time.monotonic()
    assert not observers.flush(PATIENCE)  # it was behind already, and is not waited for again
    assert time.monotonic() - begun < PATIENCE / 2
    gate.open()
    observers.close(PATIENCE)
    assert slow.heard == list(range(50))


def test_observers_have_a_thread_of_their_own_if_there_are_any() -> None:
    """It is a daemon, and ends with ``close``, which may be called twice."""
    before = threading.active_count()
    nobody = Observers()
    nobody.tell([record(0)])
    assert nobody.flush(0.0)
    assert threading.active_count() <= before
    threads: list[threading.Thread] = []
    observers = Observers([lambda _: threads.append(threading.current_thread())])
    observers.tell([record(0)])
    observers.close(PATIENCE)
    observers.close(PATIENCE)
    assert threads[0] is not threading.current_thread()
    assert threads[0].daemon
    assert not threads[0].is_alive()


def test_an_observer_that_cannot_be_closed_stops_nobody(
    told: pytest.LogCaptureFixture,
) -> None:
    """Closing the others goes on."""
    good = Listener()

    class Stubborn(Listener):
        name = "stubborn"

        def close(self) -> None:
            """Refuse."""
            raise OSError("busy")

    Observers([Stubborn(), good]).close()
    assert told.messages == ["observer stubborn is disabled: it raised OSError: busy"]
    assert good.closed == 1


def test_no_thread_to_be_had_is_no_reason_to_fail(
    told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was told meanwhile is handed over with the next record."""

    def refuse(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    listener = Listener()
    observers = Observers([listener])
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        observers.tell([record(0)])
    assert told.messages == ["no observer is told anything for now: can't start new thread"]
    observers.tell([record(1)])
    assert observers.flush(PATIENCE)
    assert listener.heard == [0, 1]
    observers.close()

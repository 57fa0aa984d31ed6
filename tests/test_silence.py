"""The limit of a session is kept although the system has no threads for a moment.

What a limit means to an engine is told in ``test_receiver.py``; here is who keeps it. Every test has a watch
of its own, whose threads are those that the test has seen begin.
"""

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from weightsync.fsm.engine_table import Session
from weightsync.handlers import silence
from weightsync.handlers.futures import begun
from weightsync.handlers.silence import Silence

SOON = 20.0
NO_THREAD = RuntimeError("can't start new thread")


class Threads:
    """The system, as far as it gives threads to who watches. ``refused`` are those that it did not give."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: BaseException | None = None
        self.refused: list[str] = []
        self._changed = threading.Condition()
        start = threading.Thread.start

        def starting(thread: threading.Thread) -> None:
            if self.error is None or thread.name != "weightsync-silence":
                start(thread)
                return
            with self._changed:
                self.refused.append(thread.name)
                self._changed.notify_all()
            raise self.error

        monkeypatch.setattr(threading.Thread, "start", starting)

    def await_refusals(self, count: int) -> None:
        """Wait until so many were asked for in vain."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.refused) >= count, SOON)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    """The system, which gives as many as are asked for at first; and a watch that has none yet."""
    monkeypatch.setattr(silence, "_WATCH", silence._Watch())
    return Threads(monkeypatch)


class Rank:
    """Hears of sessions that are too late."""

    def __init__(self) -> None:
        self.told: Future[Session] = begun()
        self.silence = Silence(self.told.set_result)

    def late(self) -> Session:
        """The session that it heard of."""
        return self.told.result(SOON)


def session(number: int) -> Session:
    """One of many."""
    return Session(f"round-{number}", number, number)


def reach_the_limit(of: Rank) -> None:
    """Nothing but the last word lies between now and the limit."""
    watch: Any = silence._WATCH
    with watch.changed:
        of.silence._due = time.monotonic()
        watch.changed.notify_all()


def test_a_session_that_nobody_can_watch_is_not_watched(threads: Threads) -> None:
    """Whoever opens it is told so; the limits of later sessions are kept all the same."""
    threads.error = NO_THREAD
    first = Rank()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        first.silence.watch(session(1), 0.0)
    threads.error = None
    for number in (2, 3):
        later = Rank()
        later.silence.watch(session(number), 0.01)
        assert later.late() == session(number)
    assert not first.told.done()


def test_a_limit_that_nobody_can_be_told_of_is_told_later(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was no thread to tell it on: who watches tries again, and forgets nobody else meanwhile."""
    monkeypatch.setattr(silence, "_AGAIN", 0.01)
    ranks = [Rank(), Rank()]
    for number, rank in enumerate(ranks):
        rank.silence.watch(session(number), 3600.0)
    threads.error = NO_THREAD
    reach_the_limit(ranks[0])
    threads.await_refusals(2)
    assert not ranks[0].told.done()
    threads.error = None
    assert ranks[0].late() == session(0)
    reach_the_limit(ranks[1])
    assert ranks[1].late() == session(1)


def test_whatever_ends_the_watch_the_next_session_begins_it_anew(threads: Threads) -> None:
    """No error of the thread that watches makes a process watch nobody for good."""
    # Who watches holds the watch until it is over, so nobody is watched by one that ends.
    broken = Rank()
    broken.silence.watch(session(1), 3600.0)
    threads.error = MemoryError("no memory for a thread")
    reach_the_limit(broken)
    threads.await_refusals(1)
    threads.error = None
    later = Rank()
    later.silence.watch(session(2), 0.01)
    assert later.late() == session(2)

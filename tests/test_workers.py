"""Threads that may get stuck: one that does keeps nobody waiting, and nothing alive it is done with."""

import threading
import weakref
from concurrent.futures import Future
from typing import Any

import pytest

from weightsync.handlers import workers as workers_module
from weightsync.handlers.workers import Workers
from weightsync.testing.fakes import Gate

PATIENCE = 20.0


class Tensor:
    """Something that can be watched by a weak reference."""


def ours(name: str) -> list[threading.Thread]:
    """The threads of a pool."""
    return [thread for thread in threading.enumerate() if thread.name == name]


def end(threads: list[threading.Thread]) -> None:
    """Wait until they have ended."""
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_work_is_done_and_handed_back() -> None:
    """With its arguments; an error goes to whoever asked, also one that would end a thread."""
    workers = Workers()
    assert workers.submit(divmod, 7, 2).result(PATIENCE) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        workers.submit(divmod, 7, 0).result(PATIENCE)

    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        workers.submit(leave).result(PATIENCE)
    assert workers.submit(int, "5").result(PATIENCE) == 5
    workers.close()


def test_a_thread_that_is_stuck_keeps_nobody_waiting() -> None:
    """The pool grows instead, and a stuck thread is a daemon."""
    workers, gate = Workers("stuck-pool"), Gate()
    stuck = [workers.submit(gate.pass_through) for _ in range(5)]
    gate.await_visitor()
    for number in range(20):
        assert workers.submit(int, number).result(PATIENCE) == number
    assert all(thread.daemon for thread in ours("stuck-pool"))
    assert not any(future.done() for future in stuck)
    gate.open()
    for future in stuck:
        future.result(PATIENCE)
    workers.close()


def test_idle_threads_are_used_again() -> None:
    """Two hundred pieces of work, one after the other, need a handful of threads."""
    workers = Workers("reused-pool")
    for number in range(200):
        workers.submit(int, number).result(PATIENCE)
        assert len(ours("reused-pool")) <= 4
    workers.close()


def test_only_so_many_idle_threads_are_kept() -> None:
    """Those beyond the spare ones end when their work is done."""
    workers, gate = Workers("spare-pool", spare=2), Gate()
    futures = [workers.submit(gate.pass_through) for _ in range(10)]
    threads = ours("spare-pool")
    assert len(threads) == 10
    gate.open()
    for future in futures:
        future.result(PATIENCE)
    workers.close()
    end(threads)


def test_idle_threads_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who forgets to close leaves none; the pool goes on with others."""
    monkeypatch.setattr(workers_module, "_IDLE", 0.01)
    workers = Workers("idle-pool")
    assert workers.submit(int, 1).result(PATIENCE) == 1
    end(ours("idle-pool"))
    assert workers.submit(int, 2).result(PATIENCE) == 2
    workers.close()


def test_no_job_is_lost_to_a_thread_that_is_about_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be taken at the very moment at which it stops waiting."""
    monkeypatch.setattr(workers_module, "_IDLE", 0.0002)
    workers = Workers("ending-pool", spare=2)
    for number in range(3000):
        jobs = [workers.submit(int, number + each) for each in range(number % 3 + 1)]
        assert [job.result(PATIENCE) for job in jobs] == [number + each for each in range(number % 3 + 1)]
    workers.close()
    end(ours("ending-pool"))


def test_an_idle_thread_keeps_nothing_alive() -> None:
    """Neither what it was given nor what it gave back."""
    workers = Workers()
    given = Tensor()
    watched = [weakref.ref(given)]
    made = workers.submit(lambda tensor: (tensor, Tensor())[1], given).result(PATIENCE)
    watched.append(weakref.ref(made))
    del given, made
    # The thread is idle for certain when it takes its next work.
    workers.submit(int).result(PATIENCE)
    workers.submit(int).result(PATIENCE)
    assert [reference() for reference in watched] == [None, None]
    workers.close()


def test_an_error_keeps_nothing_alive_but_what_raised_it() -> None:
    """It may be kept for long; the pool's own frame must not add what the work was given."""
    workers, given = Workers(), Tensor()
    watched = weakref.ref(given)

    def fail(tensor: Tensor) -> None:
        del tensor
        raise ValueError("no")

    future = workers.submit(fail, given)
    del given
    error = future.exception(PATIENCE)
    assert isinstance(error, ValueError)
    workers.submit(int).result(PATIENCE)
    workers.submit(int).result(PATIENCE)
    assert watched() is None
    workers.close()


def test_a_closed_pool_ends_its_threads_and_takes_nothing_more() -> None:
    """A busy one ends with what it does; closing twice is closing once."""
    workers, gate = Workers("closed-pool"), Gate()
    busy = workers.submit(gate.pass_through)
    workers.submit(int).result(PATIENCE)
    threads = ours("closed-pool")
    workers.close()
    workers.close()
    with pytest.raises(RuntimeError, match="threads of closed-pool are closed"):
        workers.submit(int)
    assert not busy.done()
    gate.open()
    busy.result(PATIENCE)
    end(threads)


def test_work_that_was_called_off_before_it_began_is_not_done() -> None:
    """Whoever cancelled it does not expect it to happen."""
    done: list[Any] = []
    future: Future[Any] = Future()
    assert future.cancel()
    Workers()._run(future, done.append, (1,))
    assert done == []

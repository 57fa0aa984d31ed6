"""Futures that follow from other futures hand on what those say, and wait for nothing."""

import threading
from concurrent.futures import Future

import pytest

from weightsync.handlers.futures import again, then
from weightsync.handlers.threads import spawn

SOON = 10.0


def done(value: int) -> Future[int]:
    """An answer that has come."""
    future: Future[int] = Future()
    future.set_result(value)
    return future


def failed(error: Exception) -> Future[int]:
    """An answer that is an error."""
    future: Future[int] = Future()
    future.set_exception(error)
    return future


def refuse(value: int) -> int:
    """Cannot use any answer."""
    raise ZeroDivisionError


class TestThen:
    def test_it_uses_the_answer(self) -> None:
        """What is made of the answer is the new answer, also when it comes later."""
        asked: Future[int] = Future()
        later = then(asked, str)
        assert not later.done()
        asked.set_result(3)
        assert later.result(SOON) == "3"

    def test_errors_go_on(self) -> None:
        """The very error that was the answer, or that came of using it."""
        error = KeyError("x")
        assert then(failed(error), str).exception(SOON) is error
        with pytest.raises(ZeroDivisionError):
            then(done(1), refuse).result(SOON)


class TestAgain:
    def test_a_good_answer_is_enough(self) -> None:
        """Nobody is asked twice without need, and other errors are answers."""
        assert again(done(1), KeyError, lambda: done(2)).result(SOON) == 1
        with pytest.raises(ValueError, match="x"):
            again(failed(ValueError("x")), KeyError, lambda: done(2)).result(SOON)

    def test_the_second_answer_counts(self) -> None:
        """Good or bad; and so does an error in asking."""
        assert again(failed(KeyError()), KeyError, lambda: done(2)).result(SOON) == 2
        with pytest.raises(ValueError, match="second"):
            again(failed(KeyError()), KeyError, lambda: failed(ValueError("second"))).result(SOON)
        with pytest.raises(ZeroDivisionError):
            again(failed(KeyError()), KeyError, lambda: done(refuse(0))).result(SOON)

    def test_the_second_question_is_asked_on_another_thread(self) -> None:
        """The first answer may come on a thread that must not ask anything."""
        asked_on: list[int] = []

        def ask() -> Future[int]:
            asked_on.append(threading.get_ident())
            return done(2)

        assert again(failed(KeyError()), KeyError, ask).result(SOON) == 2
        assert asked_on != [threading.get_ident()]


class TestSpawn:
    def test_it_runs_at_once_on_a_daemon_thread(self) -> None:
        """The future has the value or the very error, and cannot be cancelled."""
        go_on = threading.Event()
        future = spawn(
            "name",
            lambda: (go_on.wait(SOON), threading.current_thread().name, threading.current_thread().daemon),
        )
        assert not future.cancel()
        go_on.set()
        assert future.result(SOON) == (True, "name", True)
        boom = SystemExit("boom")

        def fail() -> None:
            raise boom

        assert spawn("name", fail).exception(SOON) is boom

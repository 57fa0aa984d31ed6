"""Futures that follow from other futures. Nothing here waits, and no callback does more than hand on.

The futures of Ray are completed on a thread of Ray's own, where nobody may wait and nothing may be asked.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from .threads import spawn

__all__ = ["again", "begun", "copy", "then"]

T = TypeVar("T")
S = TypeVar("S")


def begun() -> Future[Any]:
    """A future that nobody can cancel: the question has been asked."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def then(asked: Future[S], use: Callable[[S], T]) -> Future[T]:
    """What ``use`` makes of the answer, or what it raises. An answer that is an error stays it."""
    answer = begun()

    def done(replied: Future[S]) -> None:
        try:
            answer.set_result(use(replied.result()))
        except BaseException as error:  # noqa: BLE001 - it goes to whoever asked
            answer.set_exception(error)

    asked.add_done_callback(done)
    return answer


def again(asked: Future[T], when: type[Exception], ask: Callable[[], Future[T]]) -> Future[T]:
    """The same answer, or that to a second question if the first one failed with ``when``."""
    answer = begun()

    def second() -> None:
        try:
            ask().add_done_callback(lambda replied: copy(replied, answer))
        except BaseException as error:  # noqa: BLE001 - it goes to whoever asked
            answer.set_exception(error)

    def done(replied: Future[T]) -> None:
        if isinstance(replied.exception(), when):
            spawn("weightsync-ask-again", second)  # not on this thread, which may not ask
        else:
            copy(replied, answer)

    asked.add_done_callback(done)
    return answer


def copy(replied: Future[T], answer: Future[T]) -> None:
    """Hand an answer on, good or bad."""
    error = replied.exception()
    if error is None:
        answer.set_result(replied.result())
    else:
        answer.set_exception(error)

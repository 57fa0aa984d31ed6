"""Threads for work that may block: each is a daemon, and each hands back a future.

A daemon, because a call that hangs for good must not keep the process from ending. One thread a call, because
a pool of workers that hang is a pool without workers; starting a thread costs less than asking a socket.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["OwnThread", "on_own_thread", "settle", "spawn"]

T = TypeVar("T")


class OwnThread(threading.Thread):
    """A thread of this library, a daemon. Who brings an answer on one may go on from there with the round.

    That is nothing to do on anybody else's: an interrupt can hit the main thread at any instant, and Ray's
    completes the futures of a whole process.
    """

    def __init__(self, work: Callable[..., Any], args: tuple[Any, ...] = (), *, name: str) -> None:
        super().__init__(target=work, args=args, name=name, daemon=True)


def on_own_thread() -> bool:
    """Whether the present thread is the library's own."""
    return isinstance(threading.current_thread(), OwnThread)


def spawn(name: str, work: Callable[..., T], *args: Any) -> Future[T]:
    """Start ``work(*args)`` on a daemon thread called ``name``; the future gets what it returns or raises."""
    future: Future[T] = Future()
    # From here on it cannot be cancelled: whoever gave up on it must not take it for not started.
    future.set_running_or_notify_cancel()
    OwnThread(settle, (future, work, args), name=name).start()
    return future


def settle(
    future: Future[T],
    work: Callable[..., T],
    args: tuple[Any, ...],
    over: Callable[[], None] = lambda: None,
) -> None:
    """Do ``work(*args)`` on this thread; the future, which is running, gets what it returns or raises.

    ``over`` is called in between: the work is over, and nobody has heard of it yet.
    """
    try:
        value = work(*args)
    except BaseException as error:  # noqa: BLE001 - whoever waits for the future decides what it means
        over()
        future.set_exception(error)
        del future, work, args  # the error's traceback keeps this frame, which would keep what they hold
    else:
        over()
        future.set_result(value)

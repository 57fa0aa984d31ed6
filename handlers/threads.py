"""Threads for work that may block: each is a daemon, and each hands back a future.

A daemon, because a call that hangs for good must not keep the process from ending. One thread a call, because
a pool of workers that hang is a pool without workers; starting a thread costs less than asking a socket.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["settle", "spawn"]

T = TypeVar("T")


def spawn(name: str, work: Callable[..., T], *args: Any) -> Future[T]:
    """Start ``work(*args)`` on a daemon thread called ``name``; the future gets what it returns or raises."""
    future: Future[T] = Future()
    # From here on it cannot be cancelled: whoever gave up on it must not take it for not started.
    future.set_running_or_notify_cancel()
    threading.Thread(target=settle, args=(future, work, args), name=name, daemon=True).start()
    return future


def settle(future: Future[T], work: Callable[..., T], args: tuple[Any, ...]) -> None:
    """Do ``work(*args)`` on this thread; the future, which is running, gets what it returns or raises."""
    try:
        value = work(*args)
    except BaseException as error:  # noqa: BLE001 - whoever waits for the future decides what it means
        future.set_exception(error)
        del future, work, args  # the error's traceback keeps this frame, which would keep what they hold
    else:
        future.set_result(value)

"""Threads that are allowed to get stuck.

What a round asks for may block longer than the round waits: a collective that hangs, a user's hook, a file
system that went away. Such a call keeps its thread, and the round goes on without it. The threads are
daemons, so a stuck one never keeps the process from ending, and idle ones are used again, because a round
asks for a dozen small things.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .threads import settle

__all__ = ["Workers"]

_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Workers:
    """A pool of daemon threads that grows when all of its threads are busy.

    Args:
        name: the threads' name, for stack dumps.
        spare: how many idle threads are kept.
    """

    def __init__(self, name: str = "weightsync", spare: int = 8) -> None:
        self._name = name
        self._spare = spare
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[_Job | None]] = []
        self._closed = False

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run ``work(*args)`` in a thread of the pool, at once.

        Raises:
            RuntimeError: the pool is closed.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads of {self._name} are closed")
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name=self._name, daemon=True).start()
        inbox.put((future, work, args))
        return future

    def close(self) -> None:
        """End the idle threads; busy ones end with what they do. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _serve(self, inbox: queue.SimpleQueue[_Job | None]) -> None:
        while (job := inbox.get()) is not None:
            future, work, args = job
            _run(future, work, args)
            del job, future, work, args  # an idle thread must not keep anybody's tensors alive
            with self._lock:
                if self._closed or len(self._idle) >= self._spare:
                    return
                self._idle.append(inbox)


def _run(future: Future[Any], work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Do a job, unless whoever asked for it has cancelled it."""
    if future.set_running_or_notify_cancel():
        settle(future, work, args)
    del future, work, args  # an error keeps the frames it came through, and with them what they hold

"""Threads that are allowed to get stuck.

What a round asks for may block longer than the round waits: a collective that hangs, a user's hook, a file
system that went away. Such a call keeps its thread, and the round goes on without it. The threads are
daemons, so a stuck one never keeps the process from ending. Idle ones are used again, because a round asks
for a dozen small things; between rounds they end by themselves, so that who forgets to close leaves nothing.

Most of these follow from one another: what a thread has done is heard of, and the next thing is asked for, on
that very thread. Then it does that as well, since to wake another one takes longer than most of them do.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .threads import OwnThread, settle

__all__ = ["Workers"]

_LOGGER = logging.getLogger("weightsync")

_IDLE = 2.0
"""Seconds for which an idle thread waits for more. To start another one costs less than any word."""

_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class _Here(threading.local):
    """What a thread of the pool knows of itself."""

    ending = False
    """Whether its work is over, and only being heard of. Whatever is submitted meanwhile it can do next."""

    following: _Job | None = None


class Workers:
    """A pool of daemon threads that grows when all of its threads are busy.

    Args:
        name: the threads' name, for stack dumps.
        spare: how many idle threads are kept, for two seconds each.
    """

    def __init__(self, name: str = "weightsync", spare: int = 8) -> None:
        self._name = name
        self._spare = spare
        self._lock = threading.Lock()
        self._here = _Here()
        self._idle: list[queue.SimpleQueue[_Job | None]] = []
        self._closed = False
        _POOLS.add(self)

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run ``work(*args)`` in a thread of the pool: at once, or when this one's callbacks have returned.

        Raises:
            RuntimeError: the pool is closed.
        """
        future: Future[Any] = Future()
        here, job = self._here, (future, work, args)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads of {self._name} are closed")
            if here.ending and here.following is None:
                here.following = job
                return future
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            OwnThread(self._serve, (inbox,), name=self._name).start()
        inbox.put(job)
        return future

    def close(self) -> None:
        """End the idle threads; busy ones end with what they do. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def forked(self) -> None:
        """In a forked child there is none of the threads, and a lock may be held by one of them."""
        self._lock, self._idle, self._here = threading.Lock(), [], _Here()

    def _serve(self, inbox: queue.SimpleQueue[_Job | None]) -> None:
        while (job := self._next(inbox)) is not None:
            while job is not None:
                job = self._run(*job)  # an idle thread must not keep anybody's tensors alive
            with self._lock:
                if self._closed or len(self._idle) >= self._spare:
                    return
                self._idle.append(inbox)

    def _next(self, inbox: queue.SimpleQueue[_Job | None]) -> _Job | None:
        """What to do next; None if the pool is closed, or nobody has asked for long."""
        while True:
            try:
                return inbox.get(timeout=_IDLE)
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return None
                # It was taken at this very moment: a job is on its way.

    def _run(self, future: Future[Any], work: Callable[..., Any], args: tuple[Any, ...]) -> _Job | None:
        """Do a job, unless whoever asked for it has cancelled it; hands back the one that follows from it."""
        here = self._here
        try:
            if future.set_running_or_notify_cancel():
                settle(future, work, args, self._over)
        except BaseException:
            _LOGGER.exception("a callback raised in a thread of %s", self._name)
        here.ending = False
        del future, work, args  # an error keeps the frames it came through, and with them what they hold
        job, here.following = here.following, None
        return job

    def _over(self) -> None:
        self._here.ending = True


_POOLS: weakref.WeakSet[Workers] = weakref.WeakSet()


def _forked() -> None:
    for pool in list(_POOLS):
        pool.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

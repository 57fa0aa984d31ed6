"""Observers get every record, after the commit, in order, on a thread of their own.

They can therefore neither fire an event nor slow a round down: a log on a disk that hangs delays its own
lines and nothing else. One that raises is disabled, with one line to the ``weightsync`` logger.
"""

from __future__ import annotations

import inspect
import logging
import queue
import threading
from collections.abc import Iterable

from ..fsm.executors import Observer
from ..fsm.record import Record

__all__ = ["Observers"]

_LOGGER = logging.getLogger("weightsync")


class Observers:
    """Hands records to observers."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._active = list(observers)
        self._inbox: queue.SimpleQueue[Record | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._flushed = threading.Event()
        self._flushed.set()

    @property
    def active(self) -> tuple[Observer, ...]:
        """The observers that have not been disabled."""
        return tuple(self._active)

    def tell(self, records: Iterable[Record]) -> None:
        """Queue ``records`` for everybody; never blocks, never raises."""
        if not self._active:
            return
        for record in records:
            self._inbox.put(record)
        self._start()

    def flush(self, limit: float) -> bool:
        """Wait until everything told so far was handed over, at most ``limit`` seconds; whether it was.

        Observers that are behind since the last time are not waited for again.
        """
        if self._thread is None:
            return True
        behind = not self._flushed.is_set()
        self._flushed = done = threading.Event()
        self._inbox.put(done)
        return done.wait(0.0 if behind else limit)

    def close(self, limit: float = 5.0) -> None:
        """Hand over what is left, within ``limit`` seconds, and end the thread. Idempotent."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(None)
            thread.join(limit)
        for observer in self._active:
            close = getattr(observer, "close", None)
            if callable(close):
                self._safely(observer, close)

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._serve, name="weightsync-observers", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no thread to be had: what is queued waits for the next record
                _LOGGER.error("no observer is told anything for now: %s", error)  # noqa: TRY400 - one line
            else:
                self._thread = thread

    def _serve(self) -> None:
        while (item := self._inbox.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            for observer in tuple(self._active):
                self._safely(observer, observer, item)

    def _safely(self, observer: Observer, call: object, *args: object) -> None:
        try:
            if inspect.isawaitable(made := call(*args)):  # type: ignore[operator]
                _refuse(made)
        except BaseException as error:  # noqa: BLE001 - an observer may raise what it likes
            name = getattr(observer, "name", type(observer).__name__)
            what = f"{type(error).__name__}: {error}"
            _LOGGER.error("observer %s is disabled: it raised %s", name, what)  # noqa: TRY400 - one line
            self._active = [other for other in self._active if other is not observer]


def _refuse(made: object) -> None:
    """It looked like a function. Nothing of it was done, which is better said than missed."""
    if inspect.iscoroutine(made):
        made.close()
    raise TypeError("what it hands back would have to be awaited: write it as an async def, which is")

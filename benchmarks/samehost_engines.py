"""Engines' processes, for every side alike: spawned, with a pipe on which they are asked.

A side has a class of engine, made in the engine's process from plain arguments; each of its methods is a
question. Questions that block have threads, as many as there are at a time.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["EngineProcess"]

_START = 300.0  # seconds until it has imported everything, on a busy machine
_END = 20.0


class EngineProcess:
    """An engine in a process of its own.

    Args:
        make: the class of the engine, or a function of a module.
        args: for ``make``.
    """

    def __init__(self, make: Callable[..., Any], *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self._process.start()
        theirs.close()
        self._numbers = itertools.count()
        self._open: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._ready = self._expect(-1)
        threading.Thread(target=self._hear, daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process.pid is not None
        return self._process.pid

    def ready(self) -> None:
        """Wait until it is made, or raise what it raised."""
        self._ready.result(_START)

    def ask(self, question: str, *args: object) -> Future[Any]:
        """Call a method of the engine."""
        number = next(self._numbers)
        with self._lock:
            future = self._expect(number)
            self._pipe.send((number, question, args))
        return future

    def close(self) -> None:
        """End the process."""
        with suppress(OSError), self._lock:
            self._pipe.send(None)  # to close the pipe would not be noticed while a thread here reads it
        self._process.join(_END)
        self._process.kill()
        self._process.join()

    def _expect(self, number: int) -> Future[Any]:
        future = self._open[number] = Future()
        future.set_running_or_notify_cancel()
        return future

    def _hear(self) -> None:
        try:
            while True:
                number, value, error = self._pipe.recv()
                future = self._open.pop(number)
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)
        except (EOFError, OSError):
            for number in list(self._open):
                self._open.pop(number).set_exception(RuntimeError("the engine's process has ended"))


def _serve(pipe: Connection, make: Callable[..., Any], args: tuple[object, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    lock = threading.Lock()

    def carry_out(number: int, work: Callable[[], object]) -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as raised:  # noqa: BLE001 - it is the answer
            error = raised
        with lock:
            pipe.send((number, value, error))

    made: list[Any] = []
    carry_out(-1, lambda: made.append(make(*args)))
    with ThreadPoolExecutor(8) as pool:
        while made:
            try:
                asked = pipe.recv()
            except (EOFError, OSError):
                asked = None
            if asked is None:
                os._exit(0)  # whoever still waits inside a library is not waited for
            number, question, told = asked
            pool.submit(carry_out, number, _bound(made[0], question, told))


def _bound(engine: Any, question: str, told: tuple[Any, ...]) -> Callable[[], object]:
    return lambda: getattr(engine, question)(*told)

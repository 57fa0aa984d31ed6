"""The bridge from synchronous code to coroutines: one event loop on one thread, owned, begun and ended.

A round is run by threads, and what it calls may be a coroutine: an ``async def`` handler, a client of a
service. A loop for each call would cost three descriptors, a thread and most of the time, so there is one for
all of them, made at the first call. Nothing else in the library makes a loop or waits for one
(``tests/test_one_bridge.py``).

What a call can rely on:

* it is over within its limit and a little grace: what takes longer is cancelled on the loop;
* if whoever waits for it is interrupted, it is cancelled;
* from the loop itself it is refused at once, since it would wait for its own thread for good; and so it is
  from any other running loop, which would stand still meanwhile;
* if the loop has ended, which takes an exit raised on it or a stranger's ``stop``, it is made anew, once, and
  the log has a line of it. The calls that ran are told, and none is run a second time;
* a forked child and a spawned one have a loop of their own;
* ``close`` ends it: what still runs is cancelled, waited for and named.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal, Self, TypeVar

from ..fsm import checks
from ..fsm.errors import BridgeClosed, BridgeLost, BridgeReentered
from .bridge_call import BridgeCall
from .bridge_loop import BridgeLoop, told

__all__ = ["BridgeCall", "LoopBridge"]

T = TypeVar("T")

_LOGGER = logging.getLogger("weightsync")

_LIMIT = 5.0
"""Seconds that closing gives to what still runs."""
_REBUILDS = 1
"""How often a loop that ended unasked is made anew. Whatever ends it a second time would do so again."""


class LoopBridge:
    """Calls coroutine functions from synchronous code. Safe to use from several threads.

    Args:
        name: of its thread, and in errors.

    Raises:
        SetupError: the name is none.
    """

    def __init__(self, name: str = "weightsync-bridge") -> None:
        checks.text("LoopBridge", "name", name)
        self.name = name
        self._lock = threading.Lock()
        self._loop: BridgeLoop | None = None
        self._rebuilt = 0
        self._closed = False
        self._left_behind: list[BridgeLoop] = []
        _BRIDGES.add(self)

    def call(self, work: Callable[..., Awaitable[T]], *args: object, limit: float) -> T:
        """Run ``work(*args)`` on the loop, and wait for it.

        Args:
            work: a coroutine function, or what else hands back an awaitable. Called on the loop's thread.
            args: its arguments.
            limit: seconds after which it is cancelled.

        Raises:
            BridgeTimedOut: it took longer.
            BridgeReentered: this thread runs an event loop.
            BridgeClosed: the bridge is closed, or was while it ran.
            BridgeLost: the loop ended while it ran, or has ended for the second time.
            BaseException: whatever ``work`` raised, the very object.
        """
        call = self._made(work, args, limit, None)
        try:
            self._send(call)
            return call.result()
        except BaseException as error:
            call.give_up(error)  # an interrupt may come before there is anybody who waits
            raise
        finally:
            del call  # the error's traceback keeps this frame, and the call keeps the error

    def begin(
        self,
        work: Callable[..., Awaitable[T]],
        *args: object,
        limit: float,
        unclaimed: Callable[[T], object] | None = None,
    ) -> BridgeCall[T]:
        """Begin to run ``work(*args)``, and go on. Raises what ``call`` raises of a call that has not begun.

        Args:
            work: as for ``call``.
            args: its arguments.
            limit: seconds, from now.
            unclaimed: gets, on the loop's thread, a value that came too late for whoever waited.
        """
        call = self._made(work, args, limit, unclaimed)
        self._send(call)
        return call

    def close(self, limit: float = _LIMIT) -> tuple[str, ...]:
        """End the loop and its thread. What still runs is cancelled and waited for. Idempotent.

        Args:
            limit: how many seconds that may take.

        Returns:
            The names of the calls that were cut off.

        Raises:
            BridgeReentered: it is called by what runs on the loop.
        """
        checks.seconds("LoopBridge.close", "limit", limit)
        with self._lock:
            loop = self._loop
            self._closed = self._closed or loop is None or not loop.here
        return () if loop is None else loop.stop(limit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        self.close()
        return False

    def __reduce__(self) -> tuple[type[LoopBridge], tuple[str]]:
        return type(self), (self.name,)  # another process has a loop of its own

    def __del__(self) -> None:
        if getattr(self, "_loop", None) is not None and not self._closed:
            warnings.warn(f"{self.name} was not closed", ResourceWarning, source=self, stacklevel=2)

    def _made(
        self,
        work: Callable[..., Awaitable[T]],
        args: tuple[object, ...],
        limit: float,
        unclaimed: Callable[[T], object] | None,
    ) -> BridgeCall[T]:
        """A call that has not begun."""
        checks.called("LoopBridge.call", "work", work)
        checks.seconds("LoopBridge.call", "limit", limit)
        name = getattr(work, "__qualname__", None) or repr(work)
        self._refuse_on_a_loop(name)
        return BridgeCall(name, partial(work, *args), limit, unclaimed)

    def _send(self, call: BridgeCall[Any]) -> None:
        while not self._home(call.name).take(call):
            pass  # the loop ended just now; the next one is made, or refused

    def _home(self, name: str) -> BridgeLoop:
        """The loop; made, or made anew, by the first one to find that it is not there."""
        with self._lock:
            if self._closed:
                raise BridgeClosed(f"{self.name} is closed, and {name} was not begun")
            loop = self._loop
            if loop is not None and not loop.alive:
                self._mourn(loop, name)
                loop = None
            if loop is None:
                loop = self._loop = BridgeLoop(self.name)
                weakref.finalize(self, _let_go, loop, os.getpid())
            return loop

    def _mourn(self, loop: BridgeLoop, name: str) -> None:
        why = told(loop.cause) if loop.cause else "its thread is gone"
        if self._rebuilt >= _REBUILDS:
            raise BridgeLost(
                f"the event loop of {self.name} has ended again ({why}), and {name} was not begun: look for "
                "what exits, or stops the loop, in a coroutine or a callback"
            ) from loop.cause
        self._rebuilt += 1
        _LOGGER.warning("the event loop of %s has ended (%s); there is a new one, this once", self.name, why)

    def _refuse_on_a_loop(self, name: str) -> None:
        loop = self._loop
        if loop is not None and loop.here:
            raise BridgeReentered(
                f"{name} is called from the event loop of {self.name} itself: await it there"
            )
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise BridgeReentered(f"{name} would keep this thread's event loop from running: await it there")

    def forked(self) -> None:
        """In a forked child there is no such thread, and a lock may be held by somebody who is not there."""
        self._lock = threading.Lock()
        loop, self._loop, self._rebuilt = self._loop, None, 0
        if loop is not None:
            loop.forsake()
            self._left_behind.append(loop)  # with its tasks, which would complain that they were dropped


def _let_go(loop: BridgeLoop, process: int) -> None:
    """Nobody has the bridge any more, or Python ends, and it may not have been closed."""
    if os.getpid() != process:
        return
    if loop.here:
        loop.stop_soon(_LIMIT)
    else:
        loop.stop(_LIMIT)


_BRIDGES: weakref.WeakSet[LoopBridge] = weakref.WeakSet()


def _forked() -> None:
    for bridge in list(_BRIDGES):
        bridge.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

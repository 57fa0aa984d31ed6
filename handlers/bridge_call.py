"""One call over the bridge: asked for on one thread, run on the loop's, and over soon after its limit.

A call is over once, with a value or with an error. The loop itself ends it at its limit. Whoever waits for it
waits on a bare lock, since an interrupt may hit any instant, and nothing that is written in Python survives
that in every one; he gives up a little later, in case that the loop is stuck.

Who cancels a call says why, and that is what is raised. A value that was there all the same is handed over:
it may be an undo, which nobody may lose. One that comes when nobody waits any more goes to ``unclaimed``.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

from ..fsm.errors import BridgeError, BridgeTimedOut, SetupError

__all__ = ["BridgeCall"]

T = TypeVar("T")

_GRACE = 1.0
"""Seconds for which a cancelled call is waited for: it may have something to put back."""


class BridgeCall(Generic[T]):
    """A call that was begun. ``result`` waits for it, ``cancel`` asks it to stop.

    Args:
        name: what is called, for errors and logs.
        work: makes the awaitable; called on the loop's thread.
        limit: seconds from now after which it is cancelled.
        unclaimed: gets a value that came after ``result`` had given up; called on the loop's thread.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], Awaitable[T]],
        limit: float,
        unclaimed: Callable[[T], object] | None = None,
    ) -> None:
        self.name, self.limit = name, limit
        self._work = work
        self._unclaimed = unclaimed
        self._end = time.monotonic() + limit
        self._context = contextvars.copy_context()
        self._under_way = threading.Lock()  # held for as long as it is not over
        self._under_way.acquire()
        self._claim = threading.Lock()
        self._over = self._given_up = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._why: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._forget: Callable[[BridgeCall[Any]], object] = lambda call: None

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self._over

    def cancel(self, why: BaseException | None = None) -> None:
        """Ask it to stop, from any thread. ``result`` raises ``why``; the first one to cancel says it."""
        self.doom(why or asyncio.CancelledError(f"{self.name} was cancelled"))
        if self._loop is not None:
            with suppress(RuntimeError):  # a loop that is closed has ended its calls
                self._loop.call_soon_threadsafe(self._stop)

    def result(self) -> T:
        """Wait for it, no longer than its limit and a little grace.

        Raises:
            BridgeTimedOut: it took too long.
            BaseException: whatever it raised, the very object.
        """
        try:
            left = self._end + _GRACE - time.monotonic()
            if not self._wait(left) and self._give_up():
                raise BridgeTimedOut(
                    f"{self.name} took longer than {self.limit:g} s and does not stop: it goes on beside "
                    "whatever comes next"
                )
            return self._told()
        except BaseException as error:
            self.give_up(error)  # whoever waits was interrupted, and wants nothing of it any more
            raise
        finally:
            del self  # the error's traceback keeps this frame, and the call keeps the error

    def give_up(self, why: BaseException) -> None:
        """Nobody waits any more, nor will: cancel it, if it is not over."""
        if self._give_up():
            self.cancel(why)

    def _wait(self, seconds: float) -> bool:
        if not self._under_way.acquire(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX)):
            return False
        self._under_way.release()
        return True

    def _told(self) -> T:
        error, value = self._error, self._value
        del self
        if error is None:
            return cast("T", value)
        try:
            raise error
        finally:
            del error

    def _give_up(self) -> bool:
        """Nobody waits any more; False if it is over already."""
        with self._claim:
            self._given_up = not self._over
            return self._given_up

    # -- for the loop ----------------------------------------------------------------------------------------

    def bound(self, loop: asyncio.AbstractEventLoop, forget: Callable[[BridgeCall[Any]], object]) -> None:
        """Where it will run, and who is to hear that it is over. Said before it is sent there."""
        self._loop, self._forget = loop, forget

    def doom(self, why: BaseException) -> None:
        """Say why it will be cancelled, unless somebody has."""
        if self._why is None:
            self._why = why

    def begin(self) -> None:
        """Make a task of it, and see to its end."""
        assert self._loop is not None
        self._task = self._loop.create_task(self._run(), name=self.name, context=self._context)
        # A task that is cancelled before its first step runs none of its own code.
        self._task.add_done_callback(lambda task: self.fail(self._reason(asyncio.CancelledError())))
        left = self._end - time.monotonic()
        self._timer = self._loop.call_later(max(0.0, left), self._expire)

    def fail(self, error: BaseException) -> None:
        """It is over by this error, if it is not over."""
        self._finish(None, error)

    async def _run(self) -> None:
        try:
            asked = self._work()
            if not inspect.isawaitable(asked):
                raise SetupError(
                    f"{self.name} hands back no awaitable: over the bridge go coroutine functions alone"
                )
            value = await asked
        except BaseException as error:  # noqa: BLE001 - it is the caller's, an exit too: the loop goes on
            self._finish(None, self._reason(error))
        else:
            self._finish(value, None)
        finally:
            del self  # as above

    def _expire(self) -> None:
        self.doom(BridgeTimedOut(f"{self.name} took longer than {self.limit:g} s and was cancelled"))
        self._stop()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _reason(self, error: BaseException) -> BaseException:
        """What the caller is told: why it was cancelled, if it was."""
        if self._why is None or not isinstance(error, asyncio.CancelledError):
            return error
        if isinstance(self._why, BridgeError):
            self._why.__cause__ = error
        return self._why

    def _finish(self, value: T | None, error: BaseException | None) -> None:
        with self._claim:
            if self._over:
                return
            self._value, self._error = value, error
            self._over = True
            unclaimed = self._given_up and error is None
            self._under_way.release()
        if self._timer is not None:
            self._timer.cancel()
        self._forget(self)
        if unclaimed and self._unclaimed is not None:
            self._unclaimed(cast("T", value))

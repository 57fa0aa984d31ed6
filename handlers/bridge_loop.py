"""The loop of a bridge, and its thread: they begin and end together, and so do their descriptors.

An event loop costs three descriptors, and nothing gives them back but ``close``: a loop that is dropped keeps
them until the garbage collector comes by. So this one is closed by its own thread, as the last thing that the
thread does, however it came to its end: it was told to stop, somebody else stopped it, or an exit was raised
on it. Then no call is left in a wait: each one that has not ended is told why.

In a forked child there is no such thread. The loop's descriptors are copies there, and are closed without a
word to the loop: to close it as usual would take the parent's wake-up away, since both have one epoll.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import threading
from contextlib import suppress
from typing import Any

from ..fsm.errors import BridgeClosed, BridgeError, BridgeLost, BridgeReentered
from .bridge_call import BridgeCall

__all__ = ["BridgeLoop"]

_LOGGER = logging.getLogger("weightsync")

_LAST = 1.0
"""Seconds for what runs on a loop that ends unasked to put back what it has to."""
_MARGIN = 1.0
"""Seconds that a thread may take to end when all that ran on its loop has."""
_TRIES = 5
"""How often a loop that ends unasked may be stopped anew while it ends."""
_NAMED = 5
"""How many of the calls that were cut off a line in the log names."""


class BridgeLoop:
    """A running event loop.

    Args:
        name: of its thread.

    Raises:
        BridgeError: the system gives no descriptors or no thread for it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.cause: BaseException | None = None
        """What ended it unasked."""
        self._lock = threading.Lock()
        self._calls: set[BridgeCall[Any]] = set()
        self._cut: tuple[str, ...] = ()
        self._ending = self._wound_up = False
        self._last: asyncio.Task[None] | None = None
        try:
            self._loop = _Loop()
        except OSError as error:
            raise BridgeError(f"{name} gets no event loop: {error}") from error
        # No OwnThread: what goes on from here with a round would keep the loop from running.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException as error:
            self._loop.close()
            if isinstance(error, RuntimeError):
                raise BridgeError(f"{name} gets no thread: {error}") from error
            raise

    @property
    def alive(self) -> bool:
        """Whether it runs, or was told to stop; False once it has ended unasked."""
        return self.cause is None and self._thread.is_alive() and not self._loop.is_closed()

    @property
    def here(self) -> bool:
        """Whether this is its thread."""
        return threading.current_thread() is self._thread

    def take(self, call: BridgeCall[Any]) -> bool:
        """Send a call to it. False if it has ended unasked, and the call has not begun.

        Raises:
            BridgeClosed: it was told to stop.
        """
        with self._lock:
            if self._ending:
                if self.cause is None:
                    raise BridgeClosed(f"{self.name} is closed, and {call.name} was not begun")
                return False
            call.bound(self._loop, self._calls.discard)
            self._calls.add(call)
            self._loop.call_soon_threadsafe(call.begin)
            return True

    def stop(self, limit: float) -> tuple[str, ...]:
        """Cancel what runs, wait for it and end; names the calls that were cut off. Idempotent.

        Raises:
            BridgeReentered: this is its own thread, which cannot wait for itself.
        """
        if self.here:
            raise BridgeReentered(f"{self.name} cannot be closed by what runs on it")
        self.stop_soon(limit)
        self._thread.join(limit + _MARGIN)
        if self._thread.is_alive():
            _LOGGER.error("%s does not end: something that runs on its event loop blocks it", self.name)
        return self._cut

    def stop_soon(self, limit: float) -> None:
        """The same without waiting for it."""
        with self._lock:
            if self._ending:
                return
            self._ending = True
            why = BridgeClosed(f"{self.name} is closed")
            self._loop.call_soon_threadsafe(self._begin_to_end, limit, why)

    def forsake(self) -> None:
        """In a forked child: give its descriptors back, and leave the parent's alone."""
        self._loop.forsake()

    # -- on its thread ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
        except BaseException as error:  # noqa: BLE001 - told to whoever calls next
            self.cause = error
        try:
            if not self._wound_up:
                self._end_unasked()
        finally:
            self._loop.close()
            for call in list(self._calls):
                call.fail(BridgeClosed(f"{self.name} has ended, and {call.name} did not stop"))

    def _end_unasked(self) -> None:
        """Let what runs on it put back what it has to, for a moment."""
        with self._lock:
            self._ending = True
            self.cause = self.cause or BridgeError("somebody stopped it")
        self._begin_to_end(_LAST, BridgeLost(f"the event loop of {self.name} has ended: {told(self.cause)}"))
        for _ in range(_TRIES):
            if not self._wound_up:
                with suppress(BaseException):
                    self._loop.run_forever()

    def _begin_to_end(self, limit: float, why: BridgeError) -> None:
        self._last = self._loop.create_task(self._end(limit, why), name=f"the end of {self.name}")

    async def _end(self, limit: float, why: BridgeError) -> None:
        try:
            calls = list(self._calls)
            self._cut = tuple(sorted(call.name for call in calls))
            for call in calls:
                call.doom(type(why)(f"{why}, and {call.name} was cut off"))
            running = asyncio.all_tasks() - {self._last}
            for task in running:
                task.cancel()
            if running:
                _, stuck = await asyncio.wait(running, timeout=limit)
                self._tell(running, stuck)
            await self._loop.shutdown_asyncgens()
        finally:
            self._wound_up = True
            self._loop.stop()

    def _tell(self, running: set[asyncio.Task[Any]], stuck: set[asyncio.Task[Any]]) -> None:
        """Nothing is dropped in silence."""
        names = sorted(task.get_name() for task in running)
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        left = f"; {len(stuck)} of them did not stop" if stuck else ""
        _LOGGER.warning(
            "%s ended while this ran, and cancelled it: %s%s%s",
            self.name,
            ", ".join(names[:_NAMED]),
            more,
            left,
        )


class _Loop(asyncio.SelectorEventLoop):
    """One that can be left behind."""

    def __init__(self) -> None:
        self._own_selector = selectors.DefaultSelector()
        self._forsaken = False
        try:
            super().__init__(self._own_selector)
        except BaseException:
            self._own_selector.close()
            raise

    def forsake(self) -> None:
        """Close the descriptors alone. Nothing is unregistered: what they stand for is the parent's, too."""
        self._forsaken = True
        self._own_selector.close()
        for end in (getattr(self, "_ssock", None), getattr(self, "_csock", None)):
            if end is not None:
                end.close()

    def is_closed(self) -> bool:
        """Also if it was left behind: then nobody is to close it any more."""
        return self._forsaken or super().is_closed()


def told(error: BaseException) -> str:
    """What ended a loop, in words."""
    return str(error) if isinstance(error, BridgeError) else f"{type(error).__name__}: {error}"

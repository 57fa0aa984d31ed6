"""A round that was begun: waited for, awaited or cancelled, and over before whoever waits goes on.

``step``, ``version``, ``done``, ``superseded_by``, ``cancel`` and ``wait`` are for whoever began it; the rest
is for the ``WeightSync`` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any

from .fsm.contract import Weights
from .fsm.errors import RoundError
from .fsm.results import RoundResult
from .handlers.loop import RoundLoop

__all__ = ["Pending"]

_GLANCE = 0.5
"""Seconds. Nobody waits longer for it; only an interrupt may be noticed so late."""


class Pending:
    """A round that was begun. ``wait`` gives its result; ``cancel`` asks it to stop."""

    def __init__(
        self, step: int, version: int | None, *, raises: bool, number: int = 0, catches_up: bool = False
    ) -> None:
        self.step = step
        self.version = version
        self.number = number
        self.catches_up = catches_up
        self.weights: Weights | None = None
        self.copied = False
        """Whether the weights are a private copy."""
        self.begun = False
        self.superseded_by: Pending | None = None
        """The hand-over whose weights took the place of these; None if these are sent."""
        self.replaced: list[Pending] = []
        self._raises = raises
        self._outcome: RoundResult | BaseException | None = None
        # Held for as long as the round is not over. A bare lock, because waiting for anything that is written
        # in Python, such as an event or a future, does not survive an interrupt at every instant.
        self._under_way = threading.Lock()
        self._under_way.acquire()
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], object]] = []
        self.queued = False
        self._loop: RoundLoop | None = None
        self.cancelled: BaseException | None = None

    @property
    def kind(self) -> str:
        """What was called, in words."""
        return "catch up" if self.catches_up else "hand over"

    def where(self) -> tuple[str, str] | None:
        """The round that runs, and its state; None before it and after it."""
        loop = self._loop
        return None if loop is None else (loop.driver.round.facts.round, loop.driver.round.state.name)

    @property
    def done(self) -> bool:
        """Whether the round is over."""
        return self._outcome is not None

    def cancel(self, error: BaseException | None = None) -> None:
        """Ask the round to stop. It still ends in Released; ``wait`` gives its result."""
        with self._lock:
            if self.cancelled is None:
                self.cancelled = error or asyncio.CancelledError("the round was cancelled")
            if self._loop is not None:
                self._loop.cancel(self.cancelled)

    def wait(self) -> RoundResult:
        """Wait until the round is over.

        Raises:
            SyncFailed: the round failed and the policy raises on failure.
            KeyboardInterrupt: raised again, after the round is Released.
        """
        try:
            self.hold()
        except BaseException as error:
            self.stop_and_wait(error)
            raise
        return self._told()

    async def over(self) -> None:
        """Wait until the round is over, without a word to it: a cancellation is the caller's own."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        self._when_over(lambda: loop.call_soon_threadsafe(_wake, over))
        await over

    def __await__(self) -> Generator[Any, None, RoundResult]:
        return self._awaited().__await__()

    async def _awaited(self) -> RoundResult:
        """The asynchronous ``wait``: a cancellation is passed on when the round is Released."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        self._when_over(lambda: loop.call_soon_threadsafe(_wake, over))
        interrupted: asyncio.CancelledError | None = None
        while not over.done():
            try:
                await asyncio.shield(over)
            except asyncio.CancelledError as error:
                interrupted = interrupted or error
                if not over.done():
                    self.cancel(error)
        if interrupted is not None:
            raise interrupted
        return self._told()

    def _told(self) -> RoundResult:
        """The result, or what came instead of it."""
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        if self._outcome is None:
            raise RoundError(f"the round of step {self.step} is not over")
        return self._outcome.require() if self._raises else self._outcome

    def stop_and_wait(self, error: BaseException) -> None:
        """Cancel, and hold on through further interrupts until the round is over."""
        while not self.done:
            try:
                self.cancel(error)
                self.hold()
            except BaseException:  # noqa: BLE001, S112 - the first interrupt is raised by the caller
                continue

    def hold(self) -> None:
        """Until the round is over; with glances, because a signal just before a wait does not end it."""
        while not self.done:
            if self._under_way.acquire(timeout=_GLANCE):
                self._under_way.release()

    def _when_over(self, wake: Callable[[], object]) -> None:
        with self._lock:
            if not self.done:
                self._wakers.append(wake)
                return
        wake()

    def started(self, loop: RoundLoop) -> None:
        """The round, or a retry of it, begins."""
        with self._lock:
            self._loop = loop
            if self.cancelled is not None:
                loop.cancel(self.cancelled)

    def finished(self, outcome: RoundResult | BaseException) -> None:
        """It is over; said once."""
        with self._lock:
            self._loop, self._outcome = None, outcome
            wakers, self._wakers = self._wakers, []
        self._under_way.release()
        for wake in wakers:
            with contextlib.suppress(RuntimeError):  # an event loop that was closed wants to hear nothing
                wake()


def _wake(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)

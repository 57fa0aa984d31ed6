"""The gate: generation may pass, or weights may change, never both.

Whoever generates does it inside ``admit`` (threads) or ``admitted`` (asyncio). Whoever changes the weights
closes the gate first: nobody new is admitted, and ``close`` returns when the last one has left. An engine is
*paused* only then: a closed gate with somebody still inside is no pause. A gate that does not drain within
the limit opens again, because generation that goes on with whole weights is better than none.

The waiting of asyncio callers holds no thread and touches no event loop but the caller's own, at the moment
at which it waits. One gate therefore serves threads and any number of loops, one after the other or at
once.

Admission does not nest: somebody inside who asks again while the gate is being closed waits for himself.

A gate can be *held* as well, by whoever has let go of memory that generation needs. It then admits nobody,
open or not, until every hold has been let go of: a round opens the gate of an engine that serves the old
version, and may not know that its cache is not there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from ..fsm.errors import EngineError, EnginePaused, EngineSilent

__all__ = ["Gate", "GateOpened"]


class GateOpened(EngineError):
    """A pause did not come about, because the gate was opened while it emptied."""


class Gate:
    """Admission of generation. ``name`` is the engine's, for messages."""

    def __init__(self, name: str = "engine") -> None:
        self._name = name
        self._changed = threading.Condition()
        self._open = True
        self._inside = 0
        self._holds: set[str] = set()
        self._wakers: list[Callable[[], None]] = []

    @property
    def paused(self) -> bool:
        """Closed, and nothing is being admitted."""
        with self._changed:
            return not self._open and self._inside == 0

    @property
    def inside(self) -> int:
        """How many are admitted right now."""
        return self._inside

    @contextmanager
    def admit(self, limit: float | None = None) -> Iterator[None]:
        """Generate inside this context. Waits while the gate is closed, for ``limit`` seconds at most.

        Raises:
            EnginePaused: the gate stayed closed for that long.
        """
        with self._changed:
            if not self._changed.wait_for(self._admits, limit):
                raise self._still_closed(limit)
            self._inside += 1
        try:
            yield
        finally:
            self._leave()

    @asynccontextmanager
    async def admitted(self, limit: float | None = None) -> AsyncIterator[None]:
        """The same for coroutines: waiting blocks no event loop."""
        end = None if limit is None else time.monotonic() + limit
        while not self._entered():
            try:
                async with asyncio.timeout(None if end is None else max(0.0, end - time.monotonic())):
                    await self._opened()
            except TimeoutError:
                raise self._still_closed(limit) from None
        try:
            yield
        finally:
            self._leave()

    def close(self, limit: float) -> None:
        """Stop admitting, and wait until nobody is inside.

        Raises:
            EngineSilent: somebody was still inside after ``limit`` seconds; the gate is open again if it was
                open before.
            GateOpened: somebody else opened the gate meanwhile, so this pause did not come about.
        """
        with self._changed:
            was_open, self._open = self._open, False
            drained = self._changed.wait_for(lambda: self._open or not self._inside, limit)
            if not drained and was_open:
                self._set_open()
            if not drained:
                raise EngineSilent(
                    f"{self._name} did not pause: {self._inside} generations still ran after {limit:g} s; "
                    f"allow more time, or make each generation shorter"
                )
            if self._open:
                raise GateOpened(
                    f"{self._name} did not pause: its gate was opened while it emptied; pause anew"
                )

    def shut(self) -> None:
        """Stop admitting, and wait for nobody: whoever is inside goes on."""
        with self._changed:
            self._open = False

    def open(self) -> None:
        """Admit again. Harmless when the gate is open."""
        with self._changed:
            self._set_open()

    def hold(self, why: str, limit: float) -> None:
        """Admit nobody until ``let_go(why)``, and wait until nobody is inside. Harmless if it is held so.

        Raises:
            EngineSilent: somebody was still inside after ``limit`` seconds; this hold is not there then.
        """
        with self._changed:
            held = why in self._holds
            self._holds.add(why)
            if not self._changed.wait_for(lambda: not self._inside, limit):
                if not held:
                    self._holds.discard(why)
                    self._wake()
                raise EngineSilent(
                    f"{self._name} could not be held for its {why}: {self._inside} generations still ran "
                    f"after {limit:g} s; allow more time, or make each generation shorter"
                )

    def let_go(self, why: str) -> None:
        """End that hold. Harmless if there is none."""
        with self._changed:
            self._holds.discard(why)
            self._wake()

    @property
    def holds(self) -> frozenset[str]:
        """What it is held for."""
        with self._changed:
            return frozenset(self._holds)

    # -- inside ----------------------------------------------------------------------------------------

    def _admits(self) -> bool:
        return self._open and not self._holds

    def _set_open(self) -> None:
        self._open = True
        self._wake()

    def _wake(self) -> None:
        """Whoever waits looks again, if there may be something to see."""
        self._changed.notify_all()
        if not self._admits():
            return
        wakers, self._wakers = self._wakers, []
        for wake in wakers:
            with suppress(RuntimeError):  # the loop of this one is closed: nobody waits there any more
                wake()

    def _entered(self) -> bool:
        """Go in if the gate is open. The condition is held for a moment only, by anybody."""
        with self._changed:
            self._inside += (admits := self._admits())
            return admits

    def _leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    async def _opened(self) -> None:
        """Wait, on the running loop, until the gate opens."""
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()

        def release() -> None:
            if not opened.done():
                opened.set_result(None)

        def wake() -> None:
            loop.call_soon_threadsafe(release)

        with self._changed:
            if self._admits():
                return
            self._wakers.append(wake)
        try:
            await opened
        finally:
            with self._changed, suppress(ValueError):
                self._wakers.remove(wake)

    def _still_closed(self, limit: float | None) -> EnginePaused:
        why = "its weights are being updated"
        if holds := ", ".join(sorted(self._holds)):
            why = f"it has no memory for its {holds}"
        return EnginePaused(f"{self._name} stayed paused for {limit or 0:g} s; {why}")

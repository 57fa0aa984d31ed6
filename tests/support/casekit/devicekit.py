"""A device whose memory two processes share: a trainer with a caching allocator, and an engine that maps."""

from __future__ import annotations

from collections.abc import Callable

from weightsync.handlers.memories import Held

__all__ = ["FakeDevice"]


class FakeDevice:
    """The memory of a device, as the trainer's allocator sees it; the engine's side is ``map``.

    Args:
        capacity: of the device, in bytes.
        pending: freed by the host, still in use by a stream until the device is waited for.
        shown: exports that others have let go of, and that nobody has collected.
    """

    name = "fake:0"

    def __init__(
        self, capacity: int, *, live: int = 0, cached: int = 0, pending: int = 0, shown: int = 0
    ) -> None:
        self.capacity, self.mapped = capacity, 0
        self.live, self.cached, self.pending, self.shown = live, cached, pending, shown
        self.done: list[str] = []
        self.slow: Callable[[str], None] = lambda action: None

    @property
    def _reserved(self) -> int:
        return self.live + self.cached + self.pending + self.shown

    def held(self) -> Held:
        """What the trainer holds."""
        return Held(self._reserved, self.live)

    def synchronize(self) -> None:
        """What a stream used is unused now."""
        self._did("synchronize")
        self.cached, self.pending = self.cached + self.pending, 0

    def collect_exports(self) -> None:
        """What nobody has open is unused now."""
        self._did("collect_exports")
        self.cached, self.shown = self.cached + self.shown, 0

    def cache_release(self) -> None:
        """What is unused goes back."""
        self._did("cache_release")
        self.cached = 0

    def map(self, amount: int) -> int:
        """The engine wants this much; how much it lacks. 0 if it was mapped."""
        lacking = max(0, self._reserved + self.mapped + amount - self.capacity)
        if not lacking:
            self.mapped += amount
        return lacking

    def _did(self, action: str) -> None:
        self.done.append(action)
        self.slow(action)

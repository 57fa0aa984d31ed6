"""The memory of a shared-memory transport, and which processes may still read it.

A buffer that engines use as their weights is written again only when no process holds it any more. A process
*says* what it holds each time it joins a round, and that is a fact about its references (``segment.py``).
From when a buffer is shown to it until it has said so again, it holds that one, too. Whoever never says
anything again, because it is silent, stopped or was removed, holds what it held, until the system tells that
it is dead: then nothing of it can ever read again.

So a buffer that somebody sits on is left to him, and another one is taken; how many there may be is bounded.
Engines that came to different versions, because they were added or fell ill one after the other, each hold
one until they swap to the next; so there may be as many as there are such engines, and two more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, final

from ..fsm.errors import TransportError
from .life import Life
from .segment import Offer, refuse_without_room

__all__ = ["Memory", "Pool"]


@dataclass(slots=True, eq=False)
class _Holder:
    """A process: how to know that it is dead, how it is called, and what it may read."""

    life: Life
    names: set[str] = field(default_factory=set)
    holds: set[str] = field(default_factory=set)

    def dead(self) -> bool:
        return self.life.over


class Memory(Protocol):
    """A piece of memory that the trainer writes, and hands to other processes."""

    @property
    def id(self) -> str:
        """Its name, which no other one has."""

    @property
    def size(self) -> int:
        """In bytes."""

    def offer(self, process: str, pid: int) -> Offer:
        """What a process needs to reach it. Each process is made an offer of its own."""

    def close(self) -> None:
        """Give it back, as far as this process is concerned. Whoever reads it goes on doing so."""


M = TypeVar("M", bound=Memory)


@final
class Pool(Generic[M]):
    """Not thread-safe: a round at a time uses it.

    Args:
        most: how many buffers of a whole version there may be.
        make: makes memory of so many bytes.
    """

    def __init__(self, most: int, make: Callable[[int], M]) -> None:
        self._most, self._make = most, make
        self._versions: list[M] = []
        self._ring: M | None = None
        self._spares: list[M] = []
        self._holders: dict[str, _Holder] = {}

    @property
    def segments(self) -> list[M]:
        """All that there are."""
        return [*self._versions, *([self._ring] if self._ring is not None else []), *self._spares]

    # -- who holds what -------------------------------------------------------------------------------------

    def met(self, process: str, pid: int, name: str, holds: Iterable[str]) -> None:
        """A process has joined, as ``name``, and says what it holds."""
        holder = self._holders.get(process)
        if holder is None:
            holder = self._holders[process] = _Holder(Life(pid))
        holder.names.add(name)
        holder.holds = set(holds)

    def shown(self, process: str, segment: M) -> None:
        """From now on it may read this one."""
        if process in self._holders:
            self._holders[process].holds.add(segment.id)

    def holding(self, segment: M) -> list[str]:
        """The engines whose processes may read it."""
        self._forget_the_dead()
        return sorted(
            name for each in self._holders.values() if segment.id in each.holds for name in each.names
        )

    def dead(self, process: str) -> bool:
        """Whether it certainly reads nothing any more."""
        return process in self._holders and self._holders[process].dead()

    def _forget_the_dead(self) -> None:
        self._forget([process for process, holder in self._holders.items() if holder.dead()])

    def _forget(self, processes: Iterable[str]) -> None:
        for process in processes:
            self._holders.pop(process).life.close()

    # -- buffers ------------------------------------------------------------------------------------------

    def version(self, size: int, *, pair: bool = False) -> M:
        """A buffer for a whole version that nobody holds.

        Args:
            size: in bytes.
            pair: whether the next version needs another one: then both are made now, or it is said now that
                there is not enough memory for both.

        Raises:
            TransportError: there are as many as there may be, each of them held; or no memory for one more.
        """
        held = {segment.id: self.holding(segment) for segment in self._versions}
        for segment in list(self._versions):
            if not held[segment.id]:
                if segment.size == size:
                    self._versions.remove(segment)
                    self._versions.append(segment)  # the one that was written last is the last to be tried
                    return segment
                self._versions.remove(segment)  # of a model that is not sent any more
                segment.close()
        who = sorted({name for names in held.values() for name in names})
        # Each engine may have a version of its own, and lets go of it when it swaps to the next.
        if len(self._versions) >= max(self._most, len(who) + 2):
            raise TransportError(
                f"a version of {size} bytes cannot be written: all {len(self._versions)} buffers that there "
                f"may be are in use by {', '.join(who)}. An engine that is silent or was removed holds one "
                "until its process ends; one that keeps tensors of earlier rounds holds one for each"
            )
        fresh = pair and not self._versions and self._most > 1
        if fresh:
            refuse_without_room(2 * size, "two buffers of a version")
            self._versions.append(self._make(size))
        self._versions.append(self._make(size))
        return self._versions[-1]

    def ring(self, size: int) -> M:
        """A ring of ``size`` bytes that nobody reads."""
        ring = self._ring
        if ring is not None and (ring.size != size or self.holding(ring)):
            self._ring = None
            ring.close()
        if self._ring is None:
            self._ring = self._make(size)
        return self._ring

    def spare(self, size: int) -> M:
        """Memory in the place of a slot that somebody still reads, for this round."""
        self._spares.append(self._make(size))
        return self._spares[-1]

    def begin(self) -> None:
        """A round begins: what was only for the one before is given back, and nobody is known by habit."""
        for spare in self._spares:
            spare.close()
        self._spares.clear()
        known = {segment.id for segment in self.segments}
        self._forget([process for process, holder in self._holders.items() if not holder.holds & known])

    def released(self, process: str, segment: M) -> None:
        """It does not read this one any more."""
        if process in self._holders:
            self._holders[process].holds.discard(segment.id)

    def close(self) -> None:
        """Give everything back."""
        for segment in self.segments:
            segment.close()
        self._versions, self._ring, self._spares = [], None, []
        for holder in self._holders.values():
            holder.life.close()
        self._holders.clear()

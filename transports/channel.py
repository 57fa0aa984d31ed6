"""A channel from one sender to several readers in the same process, without a copy for each.

Every reader sees the same memory, in turn: it *holds* a frame from when it gets it until it asks for the next
one, or leaves. The sender writes into that memory again when every reader that still counts has let go. A
reader that was *cut* (fenced, closed) does not count, and gets no further frame; but what it holds, it keeps,
so that the sender has to take other memory. At most one buffer for each cut reader is given up that way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import torch

from ..fsm.engine_table import Session
from ..fsm.errors import TransportError

__all__ = ["Channel", "Frame", "Reader"]


@dataclass(frozen=True, slots=True)
class Frame:
    """One bucket on its way: whose it is, which, and its bytes."""

    session: Session
    index: int
    data: torch.Tensor


@dataclass(slots=True, eq=False)
class Reader:
    """One receiving rank, as the channel sees it."""

    name: str
    done: int = 0
    holds: Frame | None = field(default=None, repr=False)
    taken: bool = False
    cut: str | None = None


@final
class Channel:
    """The frames of one round. Thread-safe.

    Args:
        ring: called whenever a reader let go of something or left.
        checked: overwrite a frame as soon as nobody counts on it, so that a view kept too long is noticed.
    """

    def __init__(self, ring: Callable[[], None], *, checked: bool = False) -> None:
        self._ring = ring
        self._checked = checked
        self._changed = threading.Condition()
        self._readers: list[Reader] = []
        self._frames: dict[int, Frame] = {}
        self._stopped: str | None = None

    # -- the sender --------------------------------------------------------------------------------------

    def add(self, name: str) -> Reader:
        """One more reader, from the first frame on."""
        reader = Reader(name)
        with self._changed:
            self._readers.append(reader)
        return reader

    def publish(self, frame: Frame) -> None:
        """Show ``frame`` to every reader. Its memory is theirs until all of them let go."""
        with self._changed:
            self._frames.pop(frame.index - 2, None)
            self._frames[frame.index] = frame
            self._changed.notify_all()

    def readers_of(self, index: int) -> list[Reader]:
        """The readers that count and have not let go of frame ``index``, or not even seen it."""
        with self._changed:
            return self._in_use(index)

    def kept(self, index: int) -> bool:
        """Whether a reader that was cut still holds frame ``index``."""
        with self._changed:
            return self._kept(index)

    @property
    def read(self) -> bool:
        """Whether there is a reader that counts."""
        with self._changed:
            return any(reader.cut is None for reader in self._readers)

    @property
    def idle(self) -> bool:
        """Whether nobody holds anything."""
        with self._changed:
            return all(reader.holds is None for reader in self._readers)

    @property
    def released(self) -> int:
        """How many frames were let go of, by all readers together."""
        return sum(reader.done for reader in self._readers)

    def cut(self, reader: Reader, why: str) -> None:
        """Give ``reader`` no further frame, and stop counting on it."""
        with self._changed:
            reader.cut = reader.cut or why
            self._changed.notify_all()
        self._ring()

    def stop(self, why: str) -> None:
        """No further frame for anybody."""
        with self._changed:
            self._stopped = self._stopped or why
            self._changed.notify_all()

    # -- the readers -------------------------------------------------------------------------------------

    def enter(self, reader: Reader) -> None:
        """Begin to read, which is done once."""
        with self._changed:
            if reader.taken:
                raise TransportError(f"{reader.name} receives already; its ticket is good for one reception")
            reader.taken = True

    def take(self, reader: Reader, index: int, limit: float) -> Frame:
        """Let go of the frame before, and wait for this one.

        Raises:
            TransportError: the reader was cut, the sender stopped, or nothing came for ``limit`` seconds.
        """
        self.let_go(reader)
        with self._changed:
            self._changed.wait_for(
                lambda: reader.cut or self._stopped or index in self._frames,
                min(limit, threading.TIMEOUT_MAX),
            )
            why = reader.cut or self._stopped
            if why:
                raise TransportError(f"{reader.name} gets no bucket {index}: {why}")
            if index not in self._frames:
                raise TransportError(f"{reader.name} waited {limit:g} s for bucket {index}, and nothing came")
            reader.holds = self._frames[index]
            return reader.holds

    def let_go(self, reader: Reader) -> None:
        """The reader has no view of the frame that it got last."""
        with self._changed:
            frame, reader.holds = reader.holds, None
            if frame is None:
                return
            reader.done = frame.index + 1
            if self._checked and not self._in_use(frame.index) and not self._kept(frame.index):
                frame.data.fill_(0xFF)
        self._ring()

    def _in_use(self, index: int) -> list[Reader]:
        return [each for each in self._readers if each.cut is None and each.done <= index]

    def _kept(self, index: int) -> bool:
        return any(
            each.cut is not None and each.holds is not None and each.holds.index == index
            for each in self._readers
        )

"""What goes wrong in an engine, and when: scripts for the fault points of a receiver.

A script can be sent to another process. It goes off once at each point at which it is armed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["ANY", "Block", "Exit", "Injected", "Kill", "Raise", "Script", "Sleep"]

ANY = -2
"""Any bucket, or none: a bucket's number is at least 0, and -1 says that there is none."""

_PATIENCE = 20.0


class Injected(RuntimeError):
    """The error of a script, so that a test can tell it from every other."""


@dataclass(frozen=True)
class Raise:
    """Raises the very error."""

    error: BaseException

    def __call__(self) -> None:
        """Go off."""
        raise self.error


@dataclass(frozen=True)
class Sleep:
    """Takes so many seconds."""

    seconds: float

    def __call__(self) -> None:
        """Go off."""
        time.sleep(self.seconds)


@dataclass(frozen=True)
class Exit:
    """Ends the process on the spot, as a crash does."""

    def __call__(self) -> None:
        """Go off."""
        os._exit(1)


@dataclass(frozen=True)
class Kill:
    """Ends the process by SIGKILL, as the kernel does when memory is short."""

    def __call__(self) -> None:
        """Go off."""
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Block:
    """Stops until it is let go on; says when it has been reached. In this process only."""

    reached: threading.Event = field(default_factory=threading.Event)
    going: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> None:
        """Go off."""
        self.reached.set()
        self.going.wait(_PATIENCE)


class Script:
    """The ``fault`` of a receiver. Called from any thread."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self._armed: dict[tuple[str, int], Callable[[], None]] = {}
        self._always: dict[str, Callable[[], None]] = {}
        self._blocks: list[Block] = []
        self._inside = 0
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether something it was armed with is still going on."""
        return self._inside > 0

    def armed(self, point: str, bucket: int = ANY) -> bool:
        """Whether what it was armed with there has not gone off."""
        return (point, bucket) in self._armed

    def arm(self, point: str, action: Callable[[], None], bucket: int = ANY) -> None:
        """Go off at ``point``, once: at this bucket, or at whichever comes first."""
        self._armed[point, bucket] = action
        self._blocks += [action] if isinstance(action, Block) else []

    def always(self, point: str, action: Callable[[], None]) -> None:
        """Go off at ``point`` each time."""
        self._always[point] = action

    def disarm(self) -> None:
        """Forget what has not gone off, and what was seen; whoever is stopped goes on."""
        self._armed.clear()
        self._always.clear()
        self.seen.clear()
        for block in self._blocks:
            block.going.set()
        self._blocks.clear()

    def count(self, point: str) -> int:
        """How often the engine came to ``point``."""
        return sum(seen == point for seen, _ in self.seen)

    def __call__(self, point: str, bucket: int) -> None:
        """Called by the receiver at each of its points."""
        with self._lock:
            self.seen.append((point, bucket))
            action = self._armed.pop((point, bucket), None) or self._armed.pop((point, ANY), None)
            action = action or self._always.get(point)
            self._inside += action is not None
        if action is None:
            return
        try:
            action()
        finally:
            with self._lock:
                self._inside -= 1

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

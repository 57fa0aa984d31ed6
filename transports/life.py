"""Whether another process still lives: a fact that the system tells, and no reused number deceives."""

from __future__ import annotations

import contextlib
import os
import select
from typing import final

__all__ = ["Life"]


@final
class Life:
    """That of the process ``pid``, which lives now.

    Args:
        pid: its number; 0 if it is not known, and then it never counts as dead.
    """

    __slots__ = ("_fd",)

    def __init__(self, pid: int) -> None:
        self._fd = _pidfd(pid)

    @property
    def over(self) -> bool:
        """Whether it certainly does nothing any more."""
        if self._fd is None:
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Ask no more. Idempotent."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


def _pidfd(pid: int) -> int | None:
    """What becomes readable when the process ends; None if nothing can tell."""
    if pid <= 0:
        return None
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return None

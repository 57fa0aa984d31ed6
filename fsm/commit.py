"""The commit: one lock per machine, held for one assignment, and never twice by one thread.

Both machines (a round, an engine rank) keep everything they know in one immutable snapshot and change it by
one assignment inside this guard. An interrupt at any instant therefore finds the snapshot before or the
snapshot after, and nothing in between.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from .errors import Reentrant

__all__ = ["CommitGuard"]


class CommitGuard:
    """A lock that refuses re-entry instead of deadlocking on it: ``with guard(): ...``."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __call__(self) -> AbstractContextManager[object]:
        """The lock, to be entered at once.

        The ``with`` statement has to get the bare lock: an ``__enter__`` or ``__exit__`` written in Python
        can be interrupted after taking the lock, or before giving it back, and the next event would then wait
        for ever.

        Raises:
            Reentrant: this thread is inside the guard already.
        """
        # The question every Condition asks of its lock; there is no public way to ask it.
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise Reentrant("an event was fired from inside the commit of another event of the same machine")
        return self._lock

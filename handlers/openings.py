"""The opens of an engine rank: which are under way, how the last ones ended, and who waits to hear that.

The word to receive may overtake the open of its session. It waits for one that is still to come with
patience, and for one under way for as long as that takes: its engine may have to end long generations first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..fsm.engine_table import Session

__all__ = ["Openings"]

_FAILED = 4  # opens that failed and are remembered


class Openings:
    """Thread-safe. ``answered(session)``: whether its open is done, or can no longer succeed."""

    def __init__(self, answered: Callable[[Session], bool]) -> None:
        self._done = answered
        self._changed = threading.Condition()
        self._failed: dict[Session, BaseException] = {}
        self._under_way: set[Session] = set()

    @contextmanager
    def under_way(self, session: Session) -> Iterator[None]:
        """Meanwhile this session is being opened."""
        with self._changed:
            self._under_way.add(session)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._under_way.discard(session)
                self._changed.notify_all()

    def wait(self, session: Session, patience: float) -> None:
        """Until its open is answered; raises what that raised. Gives up if none begins for ``patience`` s."""

        def answered() -> bool:
            return session in self._failed or self._done(session)

        def begun() -> bool:
            return session in self._under_way

        with self._changed:
            while not answered() and self._changed.wait_for(lambda: begun() or answered(), patience):
                self._changed.wait_for(lambda: answered() or not begun())
            error = self._failed.get(session)
        if error is not None:
            raise error

    def tell(self) -> None:
        """Something has ended, and ``answered`` says so already: wake whoever waits."""
        with self._changed:
            self._changed.notify_all()

    def failed(self, session: Session, error: BaseException) -> None:
        """Its open has raised this."""
        with self._changed:
            self._failed[session] = error
            while len(self._failed) > _FAILED:
                self._failed.pop(next(iter(self._failed)))
            self._changed.notify_all()

"""The health monitor of the engines: told "updating" when a round begins, "watch again" when it is over.

An engine that loads weights answers late, and a monitor that is not told takes it for dead and restarts it in
the middle of the round. So the monitor pauses before the engines do, and is told to watch again once for each
time it was paused, however the round ends: by its clean-up, by its undo, or, where a round gave up before it
came to either, by its result. For that last case this handler is an observer as well; :class:`WeightSync`
notices by itself that it is both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from ..fsm import checks
from ..fsm.contract import RoundView, Undo
from ..fsm.record import Record

__all__ = ["HealthWatch"]


class HealthWatch:
    """An executor, and an observer, around a health monitor.

    Args:
        pause: tells the monitor that the engines are being updated.
        resume: tells it to watch again. Called exactly once for each call of ``pause``, also if that raised,
            since a monitor may have stopped before it complained.

    Raises:
        SetupError: one of them is no function.
    """

    name = "health watch"

    def __init__(self, pause: Callable[[], object], resume: Callable[[], object]) -> None:
        checks.called("HealthWatch", "pause", pause)
        checks.called("HealthWatch", "resume", resume)
        self._pause = pause
        self._resume = resume
        self._lock = threading.Lock()
        self._owed: set[str] = set()
        self._pausing: set[str] = set()
        self._over: set[str] = set()

    def prepare(self, round: RoundView) -> Undo:
        """Tell it that the engines are being updated; the undo tells it to watch again."""
        which = round.session.round
        with self._lock:
            self._owed.add(which)
            self._pausing.add(which)
        try:
            self._pause()
        except BaseException as error:
            self._paused(which)
            try:
                self._watch_again(which)
            except Exception as later:  # noqa: BLE001 - the first error wins
                error.add_note(f"later, watching again: {type(later).__name__}: {later}")
            raise
        if self._paused(which):
            self._watch_again(which)
        return partial(self._watch_again, which)

    def clean(self, round: RoundView) -> None:
        """The engines hold the version and are about to serve it: watch again."""
        self._watch_again(round.session.round)

    def __call__(self, record: Record) -> None:
        """A round that is over, and told nobody: watch again."""
        if record.event != "result":
            return
        with self._lock:
            if record.round in self._pausing:
                # It pauses for longer than the round waited. To resume it first would leave it paused.
                self._over.add(record.round)
                return
        self._watch_again(record.round)

    def close(self) -> None:
        """There are no more rounds: watch again, if that is still owed."""
        with self._lock:
            owed = self._owed - self._pausing
        for which in owed:
            self._watch_again(which)

    def _paused(self, which: str) -> bool:
        """The monitor has answered; whether its round is over already."""
        with self._lock:
            self._pausing.discard(which)
            over = which in self._over
            self._over.discard(which)
        return over

    def _watch_again(self, which: str) -> None:
        with self._lock:
            if which not in self._owed:
                return
            self._owed.discard(which)
        self._resume()

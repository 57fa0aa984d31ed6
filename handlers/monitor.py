"""The health monitor of the engines: told "updating" when a round begins, "watch again" when it is over.

An engine that loads weights answers late, and one that is paused generates nothing; a monitor that is not
told takes it for dead and restarts it in the middle of the round. So the monitor pauses in Locked, before the
engines do, and is told to watch again when the round is over, the engines resumed and the lock given back:
once for each time it was paused, however the round ends. Neither the clean-up nor the undo of a round is its
end, only its result is. That makes this handler an observer as well as an executor; :class:`WeightSync`
notices by itself that it is both.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable

from ..fsm import checks
from ..fsm.executors import RoundView
from ..fsm.record import Record

__all__ = ["HealthWatch"]

_LOGGER = logging.getLogger("weightsync")


class HealthWatch:
    """An executor, and an observer, around a health monitor.

    Args:
        pause: tells the monitor that the engines are being updated. If it raises, the round fails.
        resume: tells it to watch again. Called exactly once for each call of ``pause``, also if that raised,
            since a monitor may have stopped before it complained. If it raises, that is logged in one line:
            the round is over, and the next one pauses the monitor anew.

    Raises:
        SetupError: one of them is no function.
    """

    name = "health watch"

    def __init__(self, pause: Callable[[], object], resume: Callable[[], object]) -> None:
        checks.called("HealthWatch", "pause", pause)
        checks.called("HealthWatch", "resume", resume)
        for name, told in (("pause", pause), ("resume", resume)):
            if inspect.iscoroutinefunction(told):
                needed = "a plain function is needed; for a coroutine, write a handler with async def prepare"
                raise checks.refusal("HealthWatch", name, told, needed)
        self._pause = pause
        self._resume = resume
        self._lock = threading.Lock()
        self._owed: set[str] = set()
        self._pausing: set[str] = set()
        self._over: set[str] = set()

    def prepare(self, round: RoundView) -> None:
        """Tell it that the engines are being updated. The result of the round undoes it, whatever that is."""
        which = round.session.round
        with self._lock:
            self._owed.add(which)
            self._pausing.add(which)
        try:
            self._pause()
        finally:
            with self._lock:
                self._pausing.discard(which)
                over = which in self._over
                self._over.discard(which)
            if over:
                self._watch_again(which)

    def clean(self, round: RoundView) -> None:
        """The engines hold the version, and are paused still: it is not over."""

    def __call__(self, record: Record) -> None:
        """A round is over: watch again, if it was paused for it."""
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

    def _watch_again(self, which: str) -> None:
        with self._lock:
            if which not in self._owed:
                return
            self._owed.discard(which)
        try:
            self._resume()
        except Exception as error:  # noqa: BLE001 - of the user's monitor; as an observer it must not be lost
            what = f"{type(error).__name__}: {error}"
            _LOGGER.error("the health monitor does not watch again: it raised %s", what)  # noqa: TRY400 - one line

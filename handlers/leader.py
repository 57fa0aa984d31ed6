"""Rank 0 of a trainer of several ranks: meets the others, leads the round, and tells them how it ended.

The order is what matters. All reports are there, and agree, before the verdict; the verdict comes before the
lock is asked for. From then on rank 0 beats, and listens: a rank that fails or falls silent cancels the
round, which ends as every round does, and the others are told that. Whatever is raised on rank 0 instead of a
result is told as well. No retry is a rank's own: rank 0 retries, and the others go on waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Protocol

from ..fsm.errors import PlanMismatch, RankError, RankFailed, RankLost
from ..fsm.plan import Plan
from ..fsm.ranks import (
    Pulses,
    Report,
    difference,
    disagreement,
    error_told,
    lost,
    result_told,
)
from ..fsm.results import RoundResult
from .ranks import TrainerRanks
from .threads import OwnThread

__all__ = ["Leader"]

_LOOK = 0.05  # seconds between two looks at the round


class Led(Protocol):
    """A hand-over, as far as its leader needs to know it."""

    def cancel(self, error: BaseException | None = None) -> None:
        """Ask its round to stop."""

    def where(self) -> tuple[str, str] | None:
        """Its round and the state of that; None between rounds."""


class Leader:
    """Leads hand-overs, one at a time."""

    def __init__(self, ranks: TrainerRanks) -> None:
        self._ranks = ranks

    def lead(
        self, step: int, kind: str, part: Callable[[], Plan], led: Led, conduct: Callable[[], RoundResult]
    ) -> RoundResult:
        """Meet, conduct, and tell the others.

        Raises:
            RankError: a rank failed or was lost before the lock was asked for; all that live are told.
            RanksDisagree: the ranks are not at one hand-over, or do not bring the same tensors; the same.
        """
        number = self._meet(step, kind, part)
        try:
            with self._watched(number, led) as seen:
                result = conduct()
        except BaseException as error:
            with suppress(RankLost):  # they find out by themselves
                self._ranks.post(number, "outcome", {"error": error_told(error)})
            raise
        if seen and result.error is None:
            # It came too late to stop the round, and is no less true for that.
            late, phase = seen[0]
            result = replace(result, error=late, failed_in=phase)
        return self._told(number, result)

    def refuse(self, step: int, kind: str, error: BaseException) -> None:
        """Rank 0 could not even begin: the others need not wait for it."""
        with suppress(RankLost):
            number = self._ranks.refuse(step, kind, error)
            failed = RankFailed(f"rank 0 failed in its part of step {step}: {type(error).__name__}: {error}")
            self._ranks.post(number, "verdict", {"error": error_told(failed)})

    def close(self) -> None:
        """There are no more hand-overs: whoever waits for one is told."""
        with suppress(RankLost):
            self._ranks.end()
        self._ranks.close()

    # -- before the lock -------------------------------------------------------------------------------------

    def _meet(self, step: int, kind: str, part: Callable[[], Plan]) -> int:
        ranks = self._ranks
        try:
            number = ranks.arrive(step, kind, part)
        except BaseException as error:
            failed = RankFailed(f"rank 0 failed in its part of step {step}: {type(error).__name__}: {error}")
            with suppress(RankLost):
                ranks.post(ranks.number, "verdict", {"error": error_told(failed)})
            raise
        try:
            self._agree(number, step)
        except BaseException as error:
            with suppress(RankLost):
                ranks.post(number, "verdict", {"error": error_told(error)})
            raise
        ranks.post(number, "verdict", {"error": None})
        return number

    def _agree(self, number: int, step: int) -> None:
        """Every report is there, and they say the same."""
        reports: dict[int, Report] = {}
        end = time.monotonic() + self._ranks.limit
        missing = set(range(self._ranks.world_size))
        while missing:
            for rank in sorted(missing):
                told = self._ranks.look(number, "report", rank)
                if told is not None:
                    reports[rank] = Report.from_json(told)
                    missing.discard(rank)
            self._refuse(reports)
            if missing and time.monotonic() >= end:
                raise lost(missing, f"not at the hand-over of step {step} after {self._ranks.limit:g} s")
            if missing:
                self._ranks.pause()

    def _refuse(self, reports: dict[int, Report]) -> None:
        error = disagreement(reports)
        if isinstance(error, PlanMismatch):
            layouts = {rank: self._ranks.layout_of(report.fingerprint) for rank, report in reports.items()}
            raise difference(reports, layouts)
        if error is not None:
            raise error

    # -- while the round runs --------------------------------------------------------------------------------

    @contextmanager
    def _watched(self, number: int, led: Led) -> Iterator[list[tuple[RankError, str | None]]]:
        """Beat and listen beside the round; what was heard is in the list, with the state it came in."""
        seen: list[tuple[RankError, str | None]] = []
        over = threading.Event()
        watcher = OwnThread(self._watch, (number, led, seen, over), name="weightsync-ranks-watch")
        watcher.start()
        try:
            yield seen
        finally:
            over.set()
            watcher.join(self._ranks.silent)  # it may be stuck in the store, which has its own bound

    def _watch(
        self, number: int, led: Led, seen: list[tuple[RankError, str | None]], over: threading.Event
    ) -> None:
        ranks, where, next_beat = self._ranks, None, float("-inf")
        pulses = Pulses(ranks.others, time.monotonic())
        while not over.is_set():
            before, where = where, led.where()
            due = time.monotonic() >= next_beat
            if due or where != before:  # the others are to know where it was if this is the last of it
                next_beat = time.monotonic() + ranks.interval
                try:
                    ranks.beat(number, where)
                    error = self._heard(number, pulses) if due else None
                except RankLost as failed:
                    error = failed
                if error is not None and not seen:
                    at = f" ({where[1]} of round {where[0]})" if where else ""
                    seen.append((type(error)(f"{error}{at}"), where[1] if where else None))
                    led.cancel(seen[0][0])
            over.wait(min(_LOOK, ranks.interval))

    def _heard(self, number: int, pulses: Pulses) -> RankError | None:
        ranks = self._ranks
        for rank in ranks.others:
            failed = ranks.look(number, "fail", rank)
            if failed is not None:
                return RankFailed(f"rank {rank} failed while it waited for the round: {failed}")
            pulses.heard(rank, ranks.look(number, "beat", rank), time.monotonic())
        silent = pulses.silent(time.monotonic(), ranks.silent)
        return lost(silent, f"no sign of life for {ranks.silent:g} s in the hand-over") if silent else None

    # -- afterwards ------------------------------------------------------------------------------------------

    def _told(self, number: int, result: RoundResult) -> RoundResult:
        try:
            self._ranks.post(number, "outcome", {"error": None, "result": result_told(result)})
            self._ranks.forget(number)
        except RankLost as error:
            return replace(result, notes=(*result.notes, f"the other ranks were not told: {error}"))
        return result

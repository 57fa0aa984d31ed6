"""Rank 0 of a trainer of several ranks: meets the others, leads the round, and tells them how it ended.

The order is what matters. All reports are there, and agree, and none was taken back, before the verdict; the
verdict comes before the lock is asked for. From then on rank 0 beats, and listens: a rank that fails, gives
up or falls silent cancels the round, which ends as every round does, and the others are told that. Rank 0
looks once more before it tells a result: what is published for a rank that has given up is not ok for
anybody. Whatever is raised on rank 0 instead of a result is told as well. No retry is a rank's own: rank 0
retries, and the others go on waiting.

A report is answered once. That of a rank which is ahead, at a later step, is kept for then.

An export that gathers from all ranks is agreed on in a meeting of its own, before any rank begins to gather:
a rank that plans and one that does not would wait for each other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Protocol

from ..fsm.errors import PlanMismatch, RankError, RankFailed, RankLost, RoundCancelled, SetupError
from ..fsm.exports import Decision, Planned, Standing, decide
from ..fsm.ranks import (
    Pulses,
    Report,
    Verdict,
    difference,
    disagreement,
    error_told,
    lost,
    result_told,
)
from ..fsm.results import RoundResult
from .ranks import Part, TrainerRanks
from .threads import OwnThread

__all__ = ["Leader"]

_LOOK = 0.05  # seconds between two looks at the round
_KEPT = 8  # refusals that are remembered


class Led(Protocol):
    """A hand-over, as far as its leader needs to know it."""

    @property
    def cancelled(self) -> BaseException | None:
        """Why it is to stop; None if it is not."""

    def cancel(self, error: BaseException | None = None) -> None:
        """Ask its round to stop."""

    def where(self) -> tuple[str, str] | None:
        """Its round and the state of that; None between rounds."""


class Leader:
    """Leads hand-overs, one at a time."""

    def __init__(self, ranks: TrainerRanks) -> None:
        self._ranks = ranks
        self._answered: dict[int, str] = {}
        self._refused: deque[tuple[int, Verdict]] = deque(maxlen=_KEPT)

    def lead(
        self,
        step: int,
        kind: str,
        part: Part,
        led: Led,
        conduct: Callable[[], RoundResult],
        *,
        export: Planned | None = None,
    ) -> RoundResult:
        """Meet, conduct, and tell the others; before it, agree on the export, if the tensors come by one.

        Raises:
            RankError: a rank failed or was lost before the lock was asked for; all that live are told.
            RanksDisagree: the ranks are not at one hand-over, or do not bring the same tensors; the same.
            RoundCancelled: it was cancelled while the ranks met; the same.
        """
        if export is not None:
            with self._numbered() as number:
                _, decision = self._meet(number, step, kind, export.standing, led, decided=_decided)
                if decision is not None:
                    export.settle(decision)
        with self._numbered() as number:
            met, _ = self._meet(number, step, kind, part, led)
            return self._lead(number, met, led, conduct)

    @contextmanager
    def _numbered(self) -> Iterator[int]:
        """A meeting, and what follows from it."""
        number = self._ranks.open()
        try:
            yield number
        finally:
            with suppress(RankLost):
                self._ranks.forget(number)

    def refuse(self, step: int | None, kind: str, error: BaseException) -> None:
        """Rank 0 could not even begin: the others need not wait for it."""
        with suppress(RankLost, SetupError):
            number = self._ranks.open()
            self._judge(number, step, kind, {}, _failed(step, error))
            self._ranks.forget(number)

    def close(self) -> None:
        """There are no more hand-overs: whoever waits for one is told."""
        with suppress(RankLost, SetupError):
            self._ranks.end()
        self._ranks.close()

    def _lead(
        self,
        number: int,
        met: dict[int, Report],
        led: Led,
        conduct: Callable[[], RoundResult],
    ) -> RoundResult:
        try:
            with self._watched(number, met, led) as seen:
                result = conduct()
                if result.error is None and (gone := self._absent(number, met, seen)) is not None:
                    seen.append((gone, None))
        except BaseException as error:
            with suppress(RankLost):  # they find out by themselves
                self._ranks.post(number, "outcome", {"error": error_told(error)})
            raise
        if not seen and (gone := self._gave_up(met)) is not None:
            seen.append((gone, None))
        if seen and result.error is None:
            # It came too late to stop the round, and is no less true for that.
            late, phase = seen[0]
            result = replace(result, error=late, failed_in=phase)
        return self._told(number, met, result)

    # -- before the lock -------------------------------------------------------------------------------------

    def _meet(
        self,
        number: int,
        step: int,
        kind: str,
        part: Part,
        led: Led,
        *,
        decided: Callable[[dict[int, Report]], Decision | None] = lambda met: None,
    ) -> tuple[dict[int, Report], Decision | None]:
        """Every rank's report, and what follows from all of them; they agree, and every rank is told."""
        ranks, met = self._ranks, dict[int, Report]()
        try:
            met[0] = ranks.work(step, kind, part, lambda: led.cancelled is not None)
        except BaseException as error:
            told = error if isinstance(error, RoundCancelled) else _failed(step, error)
            with suppress(RankLost):
                self._judge(number, step, kind, met, told)
            raise
        try:
            self._agree(met, led)
            decision = decided(met)
            self._judge(number, step, kind, met, None, decision=decision)
        except BaseException as error:
            with suppress(RankLost):
                self._judge(number, step, kind, met, error)
            raise
        return met, decision

    def _judge(
        self,
        number: int,
        step: int | None,
        kind: str,
        met: dict[int, Report],
        error: BaseException | None,
        *,
        decision: Decision | None = None,
    ) -> None:
        """Answer whoever is there; who is ahead is not yet."""
        every = error is None or step is None
        here = [each for each in met.values() if every or each.step is None or each.step <= (step or 0)]
        self._answered.update({each.rank: each.call for each in here})
        told = None if error is None else error_told(error)
        what = None if decision is None else decision.to_json()
        verdict = Verdict(step, kind, tuple(each.call for each in here), told, what)
        if error is not None:
            self._refused.append((number, verdict))
        self._ranks.judge(number, verdict)

    def _agree(self, met: dict[int, Report], led: Led) -> None:
        """Every report is there, none was taken back, and they say the same."""
        ranks, mine = self._ranks, met[0]
        end = time.monotonic() + ranks.limit
        while True:
            for rank in [each for each in ranks.others if each not in met]:
                self._look_for(rank, met)
            if len(met) == ranks.world_size or disagreement(met) is not None:
                for report in [each for each in met.values() if each.rank and ranks.gave_up(each)]:
                    if (report.step, report.kind) == (mine.step, mine.kind):
                        raise _given_up(report, ranks.gave_up(report))
                    del met[report.rank]  # it is of another hand-over, which is over on that rank
            self._refuse(met)
            if len(met) == ranks.world_size:
                return
            if led.cancelled is not None:
                raise RoundCancelled(f"the hand-over of step {mine.step} was cancelled while the ranks met")
            missing = set(ranks.others) - set(met)
            if time.monotonic() >= end:
                ranks.check_run()
                raise lost(missing, f"not at the hand-over of step {mine.step} after {ranks.limit:g} s")
            ranks.pause()

    def _look_for(self, rank: int, met: dict[int, Report]) -> None:
        report, mine = self._ranks.reported(rank), met[0]
        if report is not None and not self._has_answered(report):
            # Who failed in its part does not wait: if that was another hand-over, it is over.
            where = (mine.step if report.step is None else report.step, report.kind)
            if not report.error or where == (mine.step, mine.kind):
                met[rank] = report
        elif self._ranks.left(rank):
            raise lost([rank], f"it has closed its FollowerSync before the hand-over of step {mine.step}")

    def _has_answered(self, report: Report) -> bool:
        """Whether that rank has its answer, or finds it in what was refused since it reported."""
        if report.call == self._answered.get(report.rank):
            return True
        return any(report.after < number and verdict.answers(report) for number, verdict in self._refused)

    def _refuse(self, met: dict[int, Report]) -> None:
        error = disagreement(met)
        if isinstance(error, PlanMismatch):
            layouts = {rank: self._ranks.layout_of(report) for rank, report in met.items()}
            raise difference(met, layouts)
        if error is not None:
            raise error

    def _gave_up(self, met: dict[int, Report]) -> RankError | None:
        """Who has taken its report back; whether the store does not say so any more."""
        try:
            for rank in self._ranks.others:
                why = self._ranks.gave_up(met[rank])
                if why:
                    return _given_up(met[rank], why)
        except RankLost as error:
            return error
        return None

    def _absent(self, number: int, met: dict[int, Report], seen: Collection[object]) -> RankError | None:
        """Who does not wait for the outcome, though nothing else says so: it died right after its report.

        Whoever lives says so in its first look at the verdict. To be silent takes longer than a short round.
        """
        ranks, end = self._ranks, time.monotonic() + self._ranks.silent
        waiting = list(ranks.others)
        try:
            while not seen:
                waiting = [rank for rank in waiting if not ranks.attends(met[rank], number)]
                if not waiting:
                    return self._replaced(met)
                if (gone := self._gave_up(met)) is not None:
                    return gone
                if time.monotonic() >= end:
                    return lost(waiting, f"not heard of within {ranks.silent:g} s after its report")
                ranks.pause()
        except RankLost as error:
            return error
        return None

    def _replaced(self, met: dict[int, Report]) -> RankError | None:
        """Who has another process in its place, which was not met and will not get this outcome."""
        for rank in self._ranks.others:
            now = self._ranks.reported(rank)
            if now is None or now.call != met[rank].call:
                return RankFailed(
                    f"somebody else reports as rank {rank} in the hand-over of step {met[0].step}: give each "
                    "rank a number of its own, and each trainer a TrainerRanks(name=...) of its own"
                )
        return None

    # -- while the round runs --------------------------------------------------------------------------------

    @contextmanager
    def _watched(
        self, number: int, met: dict[int, Report], led: Led
    ) -> Iterator[list[tuple[RankError, str | None]]]:
        """Beat and listen beside the round; what was heard is in the list, with the state it came in."""
        seen: list[tuple[RankError, str | None]] = []
        over = threading.Event()
        watcher = OwnThread(self._watch, (number, met, led, seen, over), name="weightsync-ranks-watch")
        watcher.start()
        try:
            yield seen
        finally:
            over.set()
            watcher.join(self._ranks.silent)  # it may be stuck in the store, which has its own bound

    def _watch(
        self,
        number: int,
        met: dict[int, Report],
        led: Led,
        seen: list[tuple[RankError, str | None]],
        over: threading.Event,
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
                    error = self._heard(met, pulses) if due else None
                except RankLost as failed:
                    error = failed
                if error is not None and not seen:
                    at = f" ({where[1]} of round {where[0]})" if where else ""
                    seen.append((type(error)(f"{error}{at}"), where[1] if where else None))
                    led.cancel(seen[0][0])
            over.wait(min(_LOOK, ranks.interval))

    def _heard(self, met: dict[int, Report], pulses: Pulses) -> RankError | None:
        ranks = self._ranks
        for rank in ranks.others:
            pulses.heard(rank, ranks.said("beat", rank), time.monotonic())
        failed = self._gave_up(met)
        if failed is not None:
            return failed
        silent = pulses.silent(time.monotonic(), ranks.silent)
        return lost(silent, f"no sign of life for {ranks.silent:g} s in the hand-over") if silent else None

    # -- afterwards ------------------------------------------------------------------------------------------

    def _told(self, number: int, met: dict[int, Report], result: RoundResult) -> RoundResult:
        try:
            self._ranks.post(number, "outcome", {"error": None, "result": result_told(result)})
        except RankLost as error:
            return replace(result, notes=(*result.notes, f"the other ranks were not told: {error}"))
        if result.error is None and (late := self._gave_up(met)) is not None:
            # At the very moment when it was told: that rank looked once more, and may have seen it, or not.
            return replace(result, notes=(*result.notes, f"not every rank may know this result: {late}"))
        return result


def _decided(met: dict[int, Report]) -> Decision:
    """What all ranks do with their export's plan."""
    return decide({rank: Standing.from_json(report.standing or {}) for rank, report in met.items()})


def _given_up(report: Report, why: str) -> RankError:
    kind = RankLost if why.startswith(RankLost.__name__) else RankFailed
    return kind(f"rank {report.rank} has given up the hand-over of step {report.step}: {why}")


def _failed(step: int | None, error: BaseException) -> RankFailed:
    what = "its part" if step is None else f"its part of step {step}"
    return RankFailed(f"rank 0 failed in {what}: {type(error).__name__}: {error}")

"""What a log says of one round, in one row: where it went, how it ended, whom it cost what.

A round that came to its end said all of this itself, in its ``result``. One that did not (its process was
killed, or it is still going on) is summed up from what it did write, and is called unfinished.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .fsm.record import Record
from .fsm.states import Outcome, State
from .logfile import RoundLog

__all__ = ["UNFINISHED", "RoundRow", "Totals", "row_of", "totals"]

UNFINISHED = "unfinished"

_GOOD = frozenset({Outcome.complete.name, Outcome.partial.name})


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One round.

    Args:
        path: the states it went through, in order.
        outcome: ``complete``, ``partial``, ``failed``, or ``unfinished``.
        ok: whether it did what was asked: the same question as ``RoundResult.ok``.
        failed_in: the state in which the first error came.
        seconds: from its first record to its end, or to its last record.
        pause: the longest pause of an engine, in seconds; None where nobody said.
        engines: what each engine was when it was over.
        culprit: whose error ``error`` is, if it is an engine's.
        error: the first error; in a round that went on without an engine, that engine's.
        oddities: why this may not be the whole truth.
    """

    round: str
    step: int | None
    version: int | None
    epoch: int | None
    attempt: int | None
    owner: str | None
    started: float
    path: tuple[str, ...]
    outcome: str
    published: str | None
    unclean: bool
    ok: bool
    failed_in: str | None
    seconds: float
    pause: float | None
    pauses: dict[str, float]
    engines: dict[str, str]
    bytes: int | None
    culprit: str | None
    bucket: int | None
    error: str | None
    line: int
    oddities: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The row as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Totals:
    """Many rounds in one line."""

    rounds: int
    outcomes: dict[str, int]
    unclean: int
    seconds: float
    longest_pause: float | None
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """The totals as plain values."""
        return asdict(self)


def row_of(round: RoundLog) -> RoundRow:
    """Sum one round up."""
    records = round.records
    first, result = records[0], round.result
    told = (result.facts or {}) if result else {}
    outcome = _text(told.get("outcome")) or UNFINISHED
    blamed = _blamed(records, result)
    pauses = _numbers(told.get("pause"))
    return RoundRow(
        round=round.id,
        step=first.step,
        version=first.version,
        epoch=next((record.epoch for record in reversed(records) if record.epoch is not None), None),
        attempt=first.attempt,
        owner=first.owner,
        started=first.time,
        path=_path(records),
        outcome=outcome,
        published=_text(told.get("published")),
        unclean=told.get("unclean") is True,
        ok=result is not None and outcome in _GOOD and result.error is None,
        failed_in=_failed_in(records, result),
        seconds=_seconds(records, result),
        pause=max(pauses.values(), default=None),
        pauses=pauses,
        engines=_texts(told.get("engines")) or _roster(first),
        bytes=result.bytes if result else None,
        culprit=blamed.culprit if blamed else None,
        bucket=result.bucket if result else None,
        error=blamed.error if blamed else None,
        line=round.line,
        oddities=round.oddities,
    )


def totals(rows: Iterable[RoundRow]) -> Totals:
    """Sum many rounds up."""
    found = list(rows)
    counts = Counter(row.outcome for row in found)
    order = [*(outcome.name for outcome in Outcome), UNFINISHED]
    order += sorted(set(counts) - set(order))
    return Totals(
        rounds=len(found),
        outcomes={outcome: counts[outcome] for outcome in order if counts[outcome]},
        unclean=sum(row.unclean for row in found),
        seconds=round(sum(row.seconds for row in found), 6),
        longest_pause=max((row.pause for row in found if row.pause is not None), default=None),
        bytes=sum(row.bytes or 0 for row in found),
    )


def _path(records: tuple[Record, ...]) -> tuple[str, ...]:
    """The states in order. A log may begin in the middle of a round."""
    moves = [record for record in records if record.event == "transition" and record.source != record.target]
    start = moves[0].source if moves else records[0].target or records[0].source
    return tuple(state for state in (start, *(record.target for record in moves)) if state)


def _failed_in(records: tuple[Record, ...], result: Record | None) -> str | None:
    """From where it went to Failed; or where it lost an engine, after a publication left no way to Failed."""
    failed, told = State.Failed.name, [record for record in records if record.event == "transition"]
    found = [record.source for record in told if record.target == failed and record.source != failed]
    if not found and result is not None and result.culprit is not None:
        found = [each.source for each in told if each.engine == result.culprit and each.error is not None]
    return found[0] if found else None


def _blamed(records: tuple[Record, ...], result: Record | None) -> Record | None:
    """Where to find the error that counts: the result's own, or the first of a round that is not complete."""
    if result is not None and (result.error is not None or result.culprit is not None):
        return result
    if result is not None and (result.facts or {}).get("outcome") == Outcome.complete.name:
        return None
    facts = (record for record in records if record.event == "transition" and record.error is not None)
    return next(facts, None)


def _seconds(records: tuple[Record, ...], result: Record | None) -> float:
    if result is not None and result.seconds is not None:
        return result.seconds
    return round(max(0.0, records[-1].time - records[0].time), 6)


def _roster(opened: Record) -> dict[str, str]:
    """The engines a round asked for, where nobody said what became of them."""
    asked = (opened.facts or {}).get("roster")
    found = asked if isinstance(asked, list) else []
    return {str(each["id"]): "unknown" for each in found if isinstance(each, dict) and "id" in each}


# -- what stands in `facts` may be anything -----------------------------------------------------------------


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: object) -> dict[str, str]:
    found = value if isinstance(value, dict) else {}
    return {name: what for name, what in found.items() if isinstance(what, str)}


def _numbers(value: object) -> dict[str, float]:
    found = value if isinstance(value, dict) else {}
    return {
        name: number for name, number in found.items() if type(number) in (int, float) and 0 <= number < 1e12
    }

"""One round as a time line: a lane for each state, then everything that happened, in its order.

    Idle          ####......................................................    0.0084 s
    Locked        ....###########...........................................    0.0255 s

Times are seconds from the round's first record. What an engine, an executor or the transport was asked for
stands where the answer came, with how long it took; a row with an error begins with "!".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap

from .columns import PLAIN, Column, Paint, clean, grid, natural, shorten
from .fsm.record import NOTES, Record
from .fsm.states import Disposition, State
from .logfile import RoundLog
from .logrows import RoundRow, row_of
from .logview import seconds, size, when

__all__ = ["timeline_lines"]

_NAMES = max(len(state.name) for state in State)
_WIDEST = 100
"""Lanes are not made wider than a person can follow."""


def timeline_lines(round: RoundLog, width: int | None = None, paint: Paint = PLAIN) -> list[str]:
    """The time line of ``round``."""
    row = row_of(round)
    head = [*_head(round, row), *_engine_lines(row)]
    lines = [line for whole in head for line in _wrapped(whole, width)]
    lines[0] = paint("bold", lines[0])
    lanes = _lanes(round, width, paint)
    return [*lines, *([""] if lanes else []), *lanes, "", *_story(round, row, width, paint)]


# -- what it was --------------------------------------------------------------------------------------------


def _head(round: RoundLog, row: RoundRow) -> Iterator[str]:
    named = (("step", row.step), ("version", row.version), ("epoch", row.epoch), ("attempt", row.attempt))
    told = [f"{name} {value}" for name, value in named if value is not None]
    yield f"round {clean(round.id)}: {', '.join(told)}"
    by = f", by {clean(row.owner)}" if row.owner else ""
    yield f"{when(row.started)}{by}, line {round.line} of the log"
    size_of = _plan(round.records)
    if size_of:
        yield size_of
    yield _ending(row)
    for oddity in row.oddities:
        yield f"note: {clean(oddity)}"


def _plan(records: Sequence[Record]) -> str:
    plans = ((record.facts or {}).get("plan") for record in records)
    plan = next((plan for plan in plans if isinstance(plan, dict)), {})
    numbers = {name: plan.get(name) for name in ("buckets", "tensors", "bytes")}
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers.values()):
        return ""
    buckets = "1 bucket" if numbers["buckets"] == 1 else f"{numbers['buckets']} buckets"
    return f"{numbers['tensors']} tensors, {size(int(plan['bytes']))}, in {buckets}"


def _ending(row: RoundRow) -> str:
    parts = [clean(row.outcome)]
    if row.failed_in:
        parts.append(f"in {clean(row.failed_in)}")
    parts.append(f"after {seconds(row.seconds)} s")
    if row.published is not None:
        parts.append(f"(published: {clean(row.published)}{', unclean' if row.unclean else ''})")
    who = [] if row.culprit is None else [f"engine {clean(row.culprit)}"]
    who += [] if row.bucket is None else [f"bucket {row.bucket}"]
    why = [] if row.error is None else [clean(row.error)]
    return ": ".join([" ".join(parts), *([", ".join(who)] if who else []), *why])


def _engine_lines(row: RoundRow) -> Iterator[str]:
    for engine, what in sorted(row.engines.items()):
        pause = row.pauses.get(engine)
        paused = "" if pause is None else f", paused for {seconds(pause)} s"
        yield f"  {clean(engine)}: {_WORDS.get(what, clean(what))}{paused}"


_WORDS = {
    Disposition.serving_new.name: "serves the new version",
    Disposition.serving_old.name: "serves the old version",
    Disposition.quarantined.name: "quarantined",
    "unknown": "nobody said what became of it",
}


def _wrapped(line: str, width: int | None) -> list[str]:
    """``line`` in as many lines as it takes: here is where an error is told in full."""
    if width is None:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    return wrap(line.strip(), max(width, 20), initial_indent=indent, subsequent_indent=f"{indent}  ")


# -- lanes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stay:
    """One state, from when to when."""

    state: str
    begin: float
    end: float


def _stays(records: Sequence[Record]) -> list[_Stay]:
    """The states the round was in; the one it never left, until its last record."""
    stays: list[_Stay] = []
    now, entered, state = 0.0, records[0].time, records[0].target
    for record in records:
        if record.event == "transition" and record.source and record.source != record.target:
            spent = max(0.0, record.seconds or 0.0)
            stays.append(_Stay(record.source, now, now + spent))
            now, entered, state = now + spent, record.time, record.target
    if state and state != State.Released.name:
        stays.append(_Stay(state, now, now + max(0.0, records[-1].time - entered)))
    return stays


def _lanes(round: RoundLog, width: int | None, paint: Paint) -> list[str]:
    stays = _stays(round.records)
    total = stays[-1].end if stays else 0.0
    room = min(_WIDEST, width or _WIDEST) - _NAMES - 2 - 12
    if total <= 0.0 or room < 10:
        return []
    lines = []
    for stay in stays:
        begin = min(room - 1, int(stay.begin / total * room))
        end = max(begin + 1, min(room, int(stay.end / total * room + 0.5)))
        lane = "." * begin + "#" * (end - begin) + "." * (room - end)
        colour = "alarm" if stay.state == State.Failed.name else "cyan"
        name = shorten(clean(stay.state), _NAMES).ljust(_NAMES)
        lines.append(f"{name}  {paint(colour, lane)}{_exact(stay.end - stay.begin):>10} s")
    return lines


def _exact(value: float | None) -> str:
    """Seconds, to a tenth of a millisecond: here one wants to know."""
    return "" if value is None else f"{value:.4f}"


# -- the story ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Happened:
    """One row."""

    mark: str
    at: str
    state: str
    what: str
    engine: str
    bucket: str
    took: str
    error: str


def _story(round: RoundLog, row: RoundRow, width: int | None, paint: Paint) -> list[str]:
    rows = [_happened(records, round.records[0].time) for records in _bundled(round.records)]

    def who(engine: str) -> str:
        return "alarm" if engine and engine == clean(row.culprit or "") else ""

    columns = [
        Column("", [each.mark for each in rows], colour=lambda _: "alarm"),
        Column("time", [each.at for each in rows], right=True),
        Column("state", [each.state for each in rows], colour=_state_colour),
        Column("what", [each.what for each in rows], least=16),
        Column("engine", [each.engine for each in rows], colour=who, leaves=1),
        Column("bucket", [each.bucket for each in rows], right=True, leaves=2),
        Column("took", [each.took for each in rows], right=True, leaves=3),
    ]
    errors = Column("error", [each.error for each in rows], colour=lambda _: "red")
    if width is None or natural([*columns, errors]) <= width:
        return grid([*columns, errors], width, paint)
    return _interleaved(grid(columns, width, paint), errors.cells, width, paint)


def _interleaved(lines: Sequence[str], errors: Sequence[str], width: int, paint: Paint) -> list[str]:
    """Where there is no room for errors beside the rows: each in full, once, below the row it came in."""
    found = [lines[0]]
    told = {""}
    for line, error in zip(lines[1:], errors, strict=True):
        found.append(line)
        if error not in told:
            found += [paint("red", part) for part in _wrapped(f"     {error}", width)]
            told.add(error)
    return found


def _bundled(records: Sequence[Record]) -> Iterator[tuple[Record, ...]]:
    """The records, buckets that went out one after the other as one: there may be thousands of them."""
    bundle: list[Record] = []
    for record in records:
        if bundle and not (_bucket_out(record) and _bucket_out(bundle[-1])):
            yield tuple(bundle)
            bundle = []
        bundle.append(record)
    if bundle:
        yield tuple(bundle)


def _bucket_out(record: Record) -> bool:
    return record.event == "transition" and record.source == record.target and record.bucket is not None


def _happened(records: tuple[Record, ...], start: float) -> _Happened:
    first, last = records[0], records[-1]
    moved = first.event == "opened" or (first.event == "transition" and first.source != first.target)
    bucket = "" if last.bucket is None else str(last.bucket)
    if len(records) > 1:
        bucket = f"{first.bucket}-{last.bucket}"
    return _Happened(
        mark="!" if first.error is not None or first.culprit is not None else "",
        at=f"{last.time - start:+.4f}",
        state=clean(first.target or "") if moved else "",
        what=clean(_what(first)) if moved else f"  {clean(_what(first))}",
        engine=clean(first.engine or first.culprit or ""),
        bucket=bucket,
        took=_exact(first.seconds) if moved or first.event in _TIMED else "",
        error=clean(first.error or ""),
    )


def _what(record: Record) -> str:
    facts = record.facts or {}
    if record.event == "transition":
        return f"{record.trigger}{f' [{record.guard}]' if record.guard else ''}"
    if record.event == "result":
        return f"result: {facts.get('outcome')}, published: {facts.get('published')}"
    if record.event == "opened":
        roster = facts.get("roster")
        asked = f": {len(roster)} engines, quorum {facts.get('quorum')}" if isinstance(roster, list) else ""
        return f"opened{asked}"
    rank = None if record.rank is None else f"on rank {record.rank}"
    moved = None if record.event not in NOTES else record.bytes
    freed = None if moved is None else f"({abs(moved)} bytes {'freed' if moved >= 0 else 'taken'})"
    words = (record.event, record.trigger, record.undo, rank, freed)
    return " ".join(word for word in words if word)


_TIMED = NOTES | {"call", "result"}
"""What took the time that it tells, beside the states."""


def _state_colour(state: str) -> str:
    return "alarm" if state == State.Failed.name else "bold"

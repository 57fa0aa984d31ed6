"""How a state log looks: its rounds as a table, and one of them as a time line.

Everything here builds lines from values and prints nothing. Widths are in characters, None is as wide as it
takes. Where there is room the path of a round is written out, and in initials where there is not:

    Idle>Locked>...>Released                      I>L>B>A>C>R
    Idle>Locked>Broadcasting>Failed!>Released     I>L>B>F!>R
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from .columns import PLAIN, Column, Paint, clean, grid, shorten
from .fsm.states import Disposition, Outcome, State
from .logfile import BadLine, LogFile
from .loglint import LintedFile
from .logrows import UNFINISHED, RoundRow, Totals

__all__ = ["bad_line_lines", "path_words", "summary_line", "table_lines", "when"]

_COLOURS = {
    Outcome.complete.name: "green",
    Outcome.partial.name: "yellow",
    Outcome.failed.name: "alarm",
    UNFINISHED: "yellow",
}
_SHORT = {
    Disposition.serving_new.name: "new",
    Disposition.serving_old.name: "old",
    Disposition.quarantined.name: "quarantined",
}


def table_lines(rows: Sequence[RoundRow], width: int | None = None, paint: Paint = PLAIN) -> list[str]:
    """The rounds, one in a line."""
    lines = grid(_columns(rows, initials=False), width, paint)
    if width is not None and _crowded(rows, width):
        lines = grid(_columns(rows, initials=True), width, paint)
    return lines


def summary_line(found: Totals) -> str:
    """All rounds in one line."""
    outcomes = ", ".join(f"{count} {clean(outcome)}" for outcome, count in found.outcomes.items())
    parts = [f"{found.rounds} round{'' if found.rounds == 1 else 's'}: {outcomes or 'none'}"]
    if found.unclean:
        parts.append(f"{found.unclean} unclean")
    parts.append(f"{seconds(found.seconds)} s in rounds")
    if found.longest_pause is not None:
        parts.append(f"longest pause {seconds(found.longest_pause)} s")
    if found.bytes:
        parts.append(f"{size(found.bytes)} proven")
    return "; ".join(parts)


def bad_line_lines(log: LogFile | LintedFile, width: int | None = None, most: int = 20) -> list[str]:
    """The lines that could not be read; empty if there are none."""
    if not log.bad:
        return []
    lines = [f"{log.bad} of {log.lines} lines could not be read:"]
    lines += [_indented(bad, width) for bad in log.bad_lines[:most]]
    if log.bad > most:
        lines.append(f"  and {log.bad - most} more")
    return lines


def oddity_lines(rows: Sequence[RoundRow], width: int | None = None, most: int = 20) -> list[str]:
    """What may not be the whole truth, round by round."""
    found = [f"round {clean(row.round)}: {clean(oddity)}" for row in rows for oddity in row.oddities]
    lines = [line if width is None else shorten(line, width) for line in found[:most]]
    return [*lines, f"and {len(found) - most} more rounds with oddities"] if len(found) > most else lines


# -- cells --------------------------------------------------------------------------------------------------


def _columns(rows: Sequence[RoundRow], *, initials: bool) -> list[Column]:
    return [
        Column("round", [clean(row.round) for row in rows], least=4),
        Column("step", [_number(row.step) for row in rows], right=True, leaves=6),
        Column("version", [_number(row.version) for row in rows], right=True),
        Column("epoch", [_number(row.epoch) for row in rows], right=True, leaves=9),
        Column("path", [path_words(row.path, initials=initials) for row in rows], colour=_path_colour),
        Column("outcome", [_outcome(row) for row in rows], colour=_outcome_colour),
        Column("seconds", [seconds(row.seconds) for row in rows], right=True, leaves=7),
        Column("pause", [seconds(row.pause) for row in rows], right=True, leaves=8),
        Column("engines", [_engines(row) for row in rows], leaves=5),
        Column("culprit", [clean(row.culprit or "") for row in rows], colour=lambda _: "alarm", leaves=3),
        Column("error", [clean(row.error or "") for row in rows], least=28, tight=12, leaves=4),
    ]


def _crowded(rows: Sequence[RoundRow], width: int) -> bool:
    """Whether paths in words would push out a column, or leave errors no room to be understood."""
    columns = [column for column in _columns(rows, initials=False) if any(column.cells)]
    room = sum(min(column.width, 40) for column in columns) + 2 * (len(columns) - 1)
    return room > width


def path_words(path: Sequence[str], *, initials: bool = False) -> str:
    """A path in a few words: where it began, how far a failed round came, and where it ended, if it did."""
    end = [] if path and path[-1] == State.Released.name else ["?"]
    if initials:
        return ">".join([*(_state(name[:1], name) for name in path), *end])
    kept = [0, 1, len(path) - 1]
    if State.Failed.name in path:
        failed = path.index(State.Failed.name)
        kept += [failed - 1, failed]
    shown: list[str] = []
    last = -1
    for place in sorted({place for place in kept if 0 <= place < len(path)}):
        shown += [] if place == last + 1 else ["..."]
        shown.append(_state(path[place], path[place]))
        last = place
    return ">".join([*shown, *end])


def _state(word: str, name: str) -> str:
    return clean(word) + ("!" if name == State.Failed.name else "")


def _path_colour(path: str) -> str:
    return "red" if "!" in path else ""


def _outcome(row: RoundRow) -> str:
    marks = [clean(row.outcome)]
    if row.unclean:
        marks.append("unclean")
    if row.published == "unknown":
        marks.append("published?")
    return " ".join(marks)


def _outcome_colour(outcome: str) -> str:
    return _COLOURS.get(outcome.split(" ", maxsplit=1)[0], "")


def _engines(row: RoundRow) -> str:
    counts = Counter(_SHORT.get(what, what) for what in row.engines.values())
    order = [*_SHORT.values(), *sorted(set(counts) - set(_SHORT.values()))]
    return ", ".join(f"{counts[what]} {clean(what)}" for what in order if counts[what])


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _indented(bad: BadLine, width: int | None) -> str:
    line = f"  {clean(str(bad))}"
    return line if width is None else shorten(line, width)


# -- numbers and times --------------------------------------------------------------------------------------


def seconds(value: float | None) -> str:
    """A duration in seconds, with as many places as can matter."""
    if value is None:
        return ""
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"


def size(count: int) -> str:
    """A number of bytes, as a person says it."""
    amount = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def when(time: float) -> str:
    """A moment, in UTC; the bare number if the calendar does not go so far."""
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{time:g}"

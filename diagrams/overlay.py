"""The path of one round, to be laid over the picture of its table.

The path is read from the records of a state log. Each record must fit the table that is drawn: a picture of a
path that the table does not have would be a lie, so such a log is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..fsm.errors import ReplayMismatch
from ..fsm.rows import Table
from .model import Line, Model, extract

__all__ = ["Step", "Trace", "duration", "read_trace"]

_ARROW = " \N{RIGHTWARDS ARROW} "
_SHOWN = 8
"""How many states a line names; of a longer path it names the first and the last few."""


@dataclass(frozen=True, slots=True)
class Step:
    """One move. ``number`` counts from 1, ``seconds`` is the time that was spent in ``source`` before it."""

    number: int
    row: int
    source: str
    target: str
    trigger: str
    guard: str | None
    seconds: float | None
    at: float | None
    """Seconds from the first record to this move, as far as all of them are known."""

    @property
    def caption(self) -> str:
        """When it happened, in words; empty if that is not known."""
        return "" if self.at is None else f"at {duration(self.at)}"


@dataclass(frozen=True, slots=True)
class Trace:
    """The path of one round: its moves in order, and how often each row was taken, staying or not."""

    round: str
    visited: tuple[str, ...]
    steps: tuple[Step, ...]
    taken: tuple[tuple[int, int], ...]
    """(number of the row, how often), by number."""

    def times(self, row: int) -> int:
        """How often a row was taken."""
        return dict(self.taken).get(row, 0)

    def on(self, ends: tuple[str, str]) -> tuple[Step, ...]:
        """The steps along an edge, in order."""
        return tuple(step for step in self.steps if (step.source, step.target) == ends)

    def seconds_in(self, state: str) -> float | None:
        """The time spent in a state that was left, if each stay there is known."""
        spent = [step.seconds for step in self.steps if step.source == state]
        known = [seconds for seconds in spent if seconds is not None]
        return sum(known) if spent and len(known) == len(spent) else None

    def time_in(self, state: str) -> str:
        """The same in words; empty if it is not known."""
        seconds = self.seconds_in(state)
        return "" if seconds is None else duration(seconds)

    @property
    def summary(self) -> str:
        """The path in one line."""
        total = f" in {duration(self.steps[-1].at)}" if self.steps and self.steps[-1].at is not None else ""
        names = self.visited
        if len(names) > _SHOWN:
            names = (*names[: _SHOWN // 2], "\N{HORIZONTAL ELLIPSIS}", *names[-_SHOWN // 2 :])
        return f"{self.round}: {_ARROW.join(names)}{total}"


def read_trace(
    table: Table[Any, Any],
    records: Iterable[Mapping[str, Any]],
    round: str | None = None,
) -> Trace:
    """The path of one round in a log; of the last one, unless ``round`` says which.

    Args:
        table: the table that the path is to be drawn on.
        records: plain dicts as in the log. Those of other kinds and of other tables are passed over.
        round: the id of the round.

    Raises:
        ReplayMismatch: no record of that round and table, or one that the table does not allow.
    """
    model = extract(table)
    ours = [record for record in records if _is_ours(model, record)]
    chosen = round if round is not None else (ours[-1]["round"] if ours else None)
    path = [record for record in ours if record["round"] == chosen]
    if not path:
        wanted = "" if round is None else f" of round {round}"
        raise ReplayMismatch(f"the log has no transition{wanted} by the table {model.name} {model.digest}")
    lines = [_line(model, record) for record in path]
    _check_continuous(lines, str(chosen))
    steps = _steps(lines, path)
    counts = [line.label.number for line in lines]
    return Trace(
        round=str(chosen),
        visited=(lines[0].source, *(step.target for step in steps)),
        steps=steps,
        taken=tuple((number, counts.count(number)) for number in sorted(set(counts))),
    )


def _is_ours(model: Model, record: Mapping[str, Any]) -> bool:
    return (
        record.get("event", "transition") == "transition"
        and record.get("table", model.digest) == model.digest
        and "round" in record
    )


def _line(model: Model, record: Mapping[str, Any]) -> Line:
    """The row that a record says was taken."""
    said = record.get("source"), record.get("trigger"), record.get("guard") or None
    for line in model.lines:
        fits = (line.source, line.label.event, line.label.guard) == said
        if fits and record.get("target") in {line.target or line.source, line.target}:
            return line
    source, trigger, guard = said
    raise ReplayMismatch(
        f"the table {model.name} has no row {source} -> {record.get('target')}: {trigger} [{guard}]"
    )


def _check_continuous(lines: list[Line], which: str) -> None:
    """A log may begin in the middle of a round, but not skip a state within it."""
    here = lines[0].source
    for line in lines:
        if line.source != here:
            raise ReplayMismatch(f"round {which} is in {here}, and the log goes on in {line.source}")
        here = line.target or here


def _steps(lines: list[Line], path: list[Mapping[str, Any]]) -> tuple[Step, ...]:
    steps: list[Step] = []
    at: float | None = 0.0
    for line, record in zip(lines, path, strict=True):
        if line.target is None:
            continue
        spent = record.get("seconds")
        seconds = None if spent is None else float(spent)
        at = None if at is None or seconds is None else at + seconds
        label = line.label
        steps.append(
            Step(
                len(steps) + 1, label.number, line.source, line.target, label.event, label.guard, seconds, at
            )
        )
    return tuple(steps)


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"

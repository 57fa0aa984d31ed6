"""What a table is made of: rows of data, and the questions that can be asked of them.

A row says: this fact, in this state, if this guard holds, leads to that state (or stays), teaches that, and
gives those orders. Guards and lessons are pure functions; a row has no callbacks. Exactly one row answers a
fact that is legal, none answers one that is not, and two would be an error of the table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from .errors import GuardFailed, IllegalEvent, TableError

__all__ = ["Guard", "Learn", "Row", "Table"]

S = TypeVar("S", bound=Enum)
F = TypeVar("F")


class Guard(Protocol):
    """A predicate over facts, event and state. It may not read anything else."""

    @property
    def __name__(self) -> str:
        """As it is drawn and logged."""

    def __call__(self, facts: Any, event: Any, state: Any, /) -> bool:
        """Whether it holds."""


class Learn(Protocol):
    """What a row teaches: new facts from old facts and the event."""

    @property
    def __name__(self) -> str:
        """As it is listed."""

    def __call__(self, facts: Any, event: Any, /) -> Any:
        """The facts afterwards."""


@dataclass(frozen=True, slots=True)
class Row(Generic[S]):
    """One row. ``target`` is None where the fact is taken note of without leaving the state."""

    number: int
    event: type[Any]
    source: S
    target: S | None
    guard: Guard | None
    learn: Learn | None
    orders: tuple[Enum, ...]

    @property
    def goal(self) -> S:
        """The state after the row."""
        return self.source if self.target is None else self.target

    @property
    def label(self) -> str:
        """The row in one line, as it is drawn and logged."""
        guard = f" [{self.guard.__name__}]" if self.guard else ""
        orders = f" / {', '.join(order.name for order in self.orders)}" if self.orders else ""
        return f"{self.event.__name__}{guard}{orders}"

    def __str__(self) -> str:
        arrow = f"-> {self.target.name}" if self.target else "stays"
        return f"#{self.number} {self.source.name} {arrow}: {self.label}"


class Table(Generic[S, F]):
    """A table: rows, the order given on entering each state, the states it starts and ends in."""

    def __init__(
        self,
        name: str,
        rows: Iterable[Row[S]],
        *,
        start: S,
        final: Iterable[S] = (),
        entry: Mapping[S, Enum] | None = None,
    ) -> None:
        self.name = name
        self.rows: tuple[Row[S], ...] = tuple(rows)
        self.start = start
        self.states: tuple[S, ...] = tuple(type(start))
        self.final = frozenset(final)
        self.entry: dict[S, Enum] = dict(entry or {})
        self._by_source: dict[tuple[S, type[Any]], tuple[Row[S], ...]] = {}
        for row in self.rows:
            key = row.source, row.event
            self._by_source[key] = (*self._by_source.get(key, ()), row)
        self.digest = hashlib.sha256(self.text().encode()).hexdigest()[:16]

    def text(self) -> str:
        """The table as text, one row a line, in the order of the rows: what the digest is taken over."""
        lines = [f"table {self.name}: starts in {self.start.name}"]
        lines += [f"enter {state.name}: {order.name}" for state, order in self.entry.items()]
        lines += [f"{row}{f' / learn {row.learn.__name__}' if row.learn else ''}" for row in self.rows]
        return "\n".join(lines)

    def rows_for(self, state: S, event: type[Any]) -> tuple[Row[S], ...]:
        """The rows that could answer ``event`` in ``state``, guards left aside."""
        return self._by_source.get((state, event), ())

    def enabled(self, state: S, facts: F, event: object) -> tuple[Row[S], ...]:
        """The rows whose guard holds. More than one is an error of the table.

        Raises:
            GuardFailed: a guard raised.
        """
        return tuple(row for row in self.rows_for(state, type(event)) if _holds(row, facts, event, state))

    def row(self, state: S, facts: F, event: object) -> Row[S]:
        """The one row that answers ``event``.

        Raises:
            IllegalEvent: no row does.
            TableError: two rows do.
        """
        enabled = self.enabled(state, facts, event)
        if not enabled:
            raise IllegalEvent(f"{type(event).__name__} is not legal in {state.name} ({describe(facts)})")
        if len(enabled) > 1:
            raise TableError(f"{self.name}: two rows answer {event}: {enabled[0]} and {enabled[1]}")
        return enabled[0]


def _holds(row: Row[S], facts: object, event: object, state: S) -> bool:
    if row.guard is None:
        return True
    try:
        return row.guard(facts, event, state)
    except Exception as error:
        raise GuardFailed(f"the guard {row.guard.__name__} of {row} raised {error!r}") from error


def describe(facts: object) -> str:
    """Whose facts these are, for messages."""
    return f"round {getattr(facts, 'round', '?')}, version {getattr(facts, 'version', '?')}"

"""What there is to draw: a table, reduced to words, in an order that depends on nothing but the table.

Every emitter reads this model and no other thing, so a row cannot be in one picture and missing in another.
Moves are grouped: all rows from one state to another are one edge with a list of labels. Rows that stay in
their state belong to the state itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from ..fsm.rows import Row, Table

__all__ = ["TROUBLE", "Edge", "Label", "Line", "Model", "Node", "Word", "extract"]

S = TypeVar("S", bound=Enum)

TROUBLE = frozenset({"Failed", "Quarantined"})
"""The states that one enters only when something went wrong: the moves to them are drawn in red."""


@dataclass(frozen=True, slots=True)
class Label:
    """A row without its states: what happened, under which condition, what it teaches, what it orders."""

    number: int
    event: str
    guard: str | None
    learn: str | None
    orders: tuple[str, ...]

    def __str__(self) -> str:
        return "".join(self.parts)

    @property
    def parts(self) -> tuple[str, str, str]:
        """The event, the guard and the orders as they follow one another; the last two may be empty."""
        guard = f" [{self.guard}]" if self.guard else ""
        orders = f" / {', '.join(self.orders)}" if self.orders else ""
        return self.event, guard, orders


@dataclass(frozen=True, slots=True)
class Node:
    """A state, the order given on entering it, and the rows that do not leave it."""

    name: str
    sentence: str
    entry: str | None
    start: bool
    final: bool
    stays: tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """All rows that lead from one state to another (or out of a state and back into it)."""

    source: str
    target: str
    labels: tuple[Label, ...]

    @property
    def ends(self) -> tuple[str, str]:
        """Source and target, which name the edge."""
        return self.source, self.target

    @property
    def trouble(self) -> bool:
        """Whether it leads to where things went wrong."""
        return self.target in TROUBLE


@dataclass(frozen=True, slots=True)
class Line:
    """One row, whole. ``target`` is None where it stays."""

    source: str
    target: str | None
    label: Label


@dataclass(frozen=True, slots=True)
class Word:
    """A name that the labels use, and its sentence."""

    name: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Model:
    """A table in words. States in their declared order, edges in that of their ends, rows by number."""

    name: str
    digest: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    lines: tuple[Line, ...]
    events: tuple[Word, ...]
    guards: tuple[Word, ...]
    orders: tuple[Word, ...]

    def node(self, name: str) -> Node:
        """The node of that name."""
        return next(node for node in self.nodes if node.name == name)

    @property
    def summary(self) -> str:
        """How many rows, and where in the picture they are."""
        stays = sum(len(node.stays) for node in self.nodes)
        rows, moves, edges = len(self.lines), len(self.lines) - stays, len(self.edges)
        return f"{rows} rows: {moves} move, on {edges} arrows; {stays} stay, listed in their state"


def extract(table: Table[S, Any]) -> Model:
    """Reduce a table to what there is to draw."""
    place = {state: position for position, state in enumerate(table.states)}
    rows = sorted(table.rows, key=lambda row: row.number)
    moves: dict[tuple[S, S], list[Label]] = {}
    for row in rows:
        if row.target is not None:
            moves.setdefault((row.source, row.target), []).append(_label(row))
    ends = sorted(moves, key=lambda pair: (place[pair[0]], place[pair[1]]))
    orders = {order for row in rows for order in row.orders} | set(table.entry.values())
    return Model(
        name=_clean(table.name),
        digest=table.digest,
        nodes=tuple(_node(table, state, rows) for state in table.states),
        edges=tuple(Edge(_clean(a.name), _clean(b.name), tuple(moves[a, b])) for a, b in ends),
        lines=tuple(_line(row) for row in rows),
        events=_words((row.event.__name__, row.event) for row in rows),
        guards=_words((row.guard.__name__, row.guard) for row in rows if row.guard),
        orders=tuple(
            Word(_clean(order.name), _clean(order.value))
            for order in sorted(orders, key=lambda order: order.name)
        ),
    )


def _node(table: Table[S, Any], state: S, rows: Iterable[Row[S]]) -> Node:
    entry = table.entry.get(state)
    return Node(
        name=_clean(state.name),
        sentence=_clean(state.value),
        entry=_clean(entry.name) if entry else None,
        start=state is table.start,
        final=state in table.final,
        stays=tuple(_label(row) for row in rows if row.source is state and row.target is None),
    )


def _line(row: Row[Any]) -> Line:
    return Line(_clean(row.source.name), _clean(row.target.name) if row.target else None, _label(row))


def _label(row: Row[Any]) -> Label:
    return Label(
        number=row.number,
        event=_clean(row.event.__name__),
        guard=_clean(row.guard.__name__) if row.guard else None,
        learn=_clean(row.learn.__name__) if row.learn else None,
        orders=tuple(_clean(order.name) for order in row.orders),
    )


def _words(named: Iterable[tuple[str, object]]) -> tuple[Word, ...]:
    """Each name once, with the first line of its documentation."""
    found = {_clean(name): _clean((inspect.getdoc(thing) or "").partition("\n")[0]) for name, thing in named}
    return tuple(Word(name, found[name]) for name in sorted(found))


def _clean(text: object) -> str:
    """One line of characters that every format may hold: an XML file with a control character is none."""
    words = " ".join(str(text).split())
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in words)

"""Cards and chips: how the words of the model become lines of text in a box that is large enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .measure import Font, width, wrap
from .model import TROUBLE, Edge, Label, Node
from .overlay import Step, Trace
from .shapes import Badge, Box, Ink, Look, Panel, Run, Text, Tone

__all__ = ["Column", "card", "chip", "lane"]

LINE = 16.0
"""From one base line of code to the next."""

PAD = 12.0
INDENT = 14.0
SET_APART = 3.0
BADGES = 3
"""How many numbers of steps are shown on a move; a path that passes more often says how often."""


@dataclass(frozen=True, slots=True)
class Column:
    """Where text goes, and how far down it has come."""

    x: float
    y: float
    room: float
    texts: tuple[Text, ...] = ()

    def skip(self, pixels: float) -> Column:
        """The same, further down."""
        return replace(self, y=self.y + pixels)

    def write(self, font: Font, step: float, *runs: Run, indent: float = 0) -> Column:
        """One more line; ``step`` leads to its base line."""
        text = Text(self.x + indent, self.y + step, font, runs)
        return replace(self, y=self.y + step, texts=(*self.texts, text))

    def prose(self, text: str, font: Font, ink: Ink, step: float) -> Column:
        """Some lines more, wrapped."""
        column = self
        for line in wrap(text, font, self.room):
            column = column.write(font, step, Run(line, ink))
        return column

    def flow(self, runs: Iterable[Run]) -> Column:
        """One line of code, or more where it is too long: broken between runs first, then within them."""
        column = self
        for indent, line in _broken(runs, self.room):
            column = column.write(Font.code, LINE, *line, indent=indent)
        return column

    def labels(self, labels: Iterable[Label], trace: Trace | None, gap: float = 0) -> Column:
        """The labels one below the other; ``gap`` sets events apart."""
        column, before = self, None
        for label in labels:
            column = column.skip(gap if before not in (None, label.event) else 0)
            column = column.flow(_runs(label, trace.times(label.number) if trace else 0))
            before = label.event
        return column


def _runs(label: Label, times: int) -> Iterable[Run]:
    event, guard, orders = label.parts
    yield Run(event, Ink.trace if times else Ink.event)
    yield Run(guard, Ink.guard)
    yield Run(orders, Ink.order)
    if times > 1:
        yield Run(f" \N{MULTIPLICATION SIGN}{times}", Ink.trace)


def _broken(runs: Iterable[Run], room: float) -> Sequence[tuple[float, tuple[Run, ...]]]:
    """Runs in lines, each with its indent."""
    lines: list[tuple[float, tuple[Run, ...]]] = [(0.0, ())]
    used = 0.0
    for run in runs:
        wide = width(run.text, Font.code)
        if used + wide <= room:
            lines[-1] = (lines[-1][0], (*lines[-1][1], run))
            used += wide
            continue
        parts = wrap(run.text, Font.code, room - INDENT)
        lines += [(INDENT, (Run(part, run.ink),)) for part in parts]
        used = INDENT + width(parts[-1], Font.code)
    return [line for line in lines if line[1]]


def card(node: Node, at: tuple[float, float], wide: tuple[float, float], trace: Trace | None) -> Panel:
    """The card of a state with two compartments side by side: who it is, and what does not leave it."""
    (x, y), (left, right) = at, wide
    who = _identity(node, Column(x + PAD, y, left - 2 * PAD), trace)
    stays = _stays(node, Column(x + left + PAD, y + 6, right - 2 * PAD), trace, SET_APART)
    box = Box(x, y, left + right, max(who.y, stays.y) + PAD - y)
    rule = ((x + left, y), (x + left, box.bottom))
    return _state(node, box, (*who.texts, *stays.texts), rule, trace)


def lane(
    node: Node, at: tuple[float, float], size: tuple[float, float], trace: Trace | None, gap: float = 0
) -> Panel:
    """The card of a state with its compartments one above the other; ``size`` is the least it gets."""
    (x, y), (wide, high) = at, size
    who = _identity(node, Column(x + PAD, y, wide - 2 * PAD), trace)
    line = who.y + PAD
    stays = _stays(node, replace(who, y=line + 4), trace, gap)
    box = Box(x, y, wide, max(high, stays.y + PAD - y))
    return _state(node, box, stays.texts, ((x, line), (x + wide, line)), trace)


def _state(
    node: Node,
    box: Box,
    texts: tuple[Text, ...],
    rule: tuple[tuple[float, float], tuple[float, float]],
    trace: Trace | None,
) -> Panel:
    look = _look(trace, taken=bool(trace and node.name in trace.visited))
    tone = Tone.bad if node.name in TROUBLE else Tone.plain
    return Panel("state", (node.name,), box, texts, (rule,), tone, look, node.final)


def _identity(node: Node, column: Column, trace: Trace | None) -> Column:
    column = column.skip(6)
    for line in wrap(node.name, Font.headline, column.room):
        column = column.write(Font.headline, 25, Run(line, Ink.heading))
    time = trace.time_in(node.name) if trace else ""
    if time:
        column = column.write(Font.code, 19, Run(time, Ink.trace))
    if node.entry:
        column = column.skip(4).flow((Run("enter", Ink.quiet), Run(f" / {node.entry}", Ink.order)))
    return column.skip(4).prose(node.sentence, Font.body, Ink.prose, 16)


def _stays(node: Node, column: Column, trace: Trace | None, gap: float) -> Column:
    if not node.stays:
        return column
    times = sum(trace.times(label.number) for label in node.stays) if trace else 0
    said = [Run("stays:", Ink.quiet)]
    if times:
        said.append(Run(" once" if times == 1 else f" {times} times", Ink.trace))
    return column.write(Font.small, 17, *said).skip(1).labels(node.stays, trace, gap)


def chip(edge: Edge, at: tuple[float, float], wide: float, tone: Tone, trace: Trace | None) -> Panel:
    """The labels of a move in a box whose upper left corner is ``at``."""
    x, y = at
    steps = trace.on(edge.ends) if trace else ()
    column, badges = _passes(steps, Column(x + 10, y + 4, wide - 20))
    column = column.labels(edge.labels, trace)
    look = _look(trace, taken=bool(steps))
    box = Box(x, y, wide, column.y + 10 - y)
    return Panel("move", edge.ends, box, column.texts, (), tone, look, badges=badges)


def _passes(steps: tuple[Step, ...], column: Column) -> tuple[Column, tuple[Badge, ...]]:
    """A line that says when a path came along: its first numbers here, then the time or the count."""
    if not steps:
        return column, ()
    badges: list[Badge] = []
    x, y = column.x, column.y + LINE + 4
    for number in (str(step.number) for step in steps[:BADGES]):
        wide = max(17.0, width(number, Font.small) + 8)
        badges.append(Badge(Box(x, y - 12.5, wide, 17), number))
        x += wide + 4
    said = steps[0].caption if len(steps) == 1 else f"{len(steps)} times"
    return column.write(Font.code, LINE + 4, Run(said, Ink.trace), indent=x - column.x + 2), tuple(badges)


def _look(trace: Trace | None, *, taken: bool) -> Look:
    if trace is None:
        return Look.usual
    return Look.taken if taken else Look.faded

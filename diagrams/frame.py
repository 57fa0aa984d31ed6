"""The painter of a sheet: keeps what was painted, writes title and legend, and misses nothing."""

from __future__ import annotations

from .errors import NoPlace
from .measure import Font
from .model import Edge, Model
from .overlay import Trace
from .panels import Column, chip
from .shapes import Arrow, Ink, Look, Panel, Point, Run, Sheet, Text, Tone

__all__ = ["WIDTH", "Painter"]

WIDTH = 1200.0
MARGIN = 28.0
FOOT = 30.0
LEGEND = 900.0
"""Where the legend begins, to the right of the title."""

PATH = "the path of this round"
"""What the legend says of the colour of a path."""


class Painter:
    """Collects the parts of a sheet, and refuses to finish one on which a state or a move is missing."""

    def __init__(self, model: Model, trace: Trace | None) -> None:
        self.model = model
        self.trace = trace
        self._edges = {edge.ends: edge for edge in model.edges}
        self._panels: list[Panel] = []
        self._arrows: list[Arrow] = []
        self._dots: list[Point] = []

    def panel(self, panel: Panel) -> Panel:
        """Put a panel on the sheet."""
        self._panels.append(panel)
        return panel

    def chip(
        self, ends: tuple[str, str], x: float, y: float, wide: float, tone: Tone, *, level: float = 0.0
    ) -> Panel:
        """Put the labels of a move on the sheet; ``level`` is the part of it that is above ``y``."""
        edge = self._edges.get(ends, Edge(*ends, ()))
        made = chip(edge, (x, y), wide, tone, self.trace)
        if level:
            made = chip(edge, (x, y - level * made.box.h), wide, tone, self.trace)
        return self.panel(made)

    def arrow(self, labels: Panel, *points: Point) -> None:
        """Put the line of a move on the sheet; it runs behind its labels."""
        self._arrows.append(Arrow(labels.ends, points, labels.tone, labels.look))

    def start(self, dot: Point, end: Point) -> None:
        """Put the mark of the beginning on the sheet."""
        look = Look.usual
        if self.trace:
            began = self.model.node(self.trace.visited[0]).start
            look = Look.taken if began else Look.faded
        self._dots.append(dot)
        self._arrows.append(Arrow((), (dot, end), Tone.plain, look))

    def finish(self, bottom: float) -> Sheet:
        """The sheet, if everything is on it.

        Raises:
            NoPlace: a state or a move is missing, or there is one that the table does not have.
        """
        self._check("state", {(node.name,) for node in self.model.nodes})
        self._check("move", set(self._edges))
        legend, samples = _legend(LEGEND, 50.0, self.trace)
        return Sheet(
            title=f"{self.model.name}: {self.model.summary}",
            width=WIDTH,
            height=bottom + FOOT,
            texts=(*self._title(), *legend),
            arrows=tuple(self._arrows),
            panels=tuple(self._panels),
            dots=tuple(self._dots),
            samples=samples,
        )

    def _check(self, kind: str, wanted: set[tuple[str, ...]]) -> None:
        drawn = {panel.ends for panel in self._panels if panel.kind == kind}
        odd = sorted(" -> ".join(ends) for ends in wanted ^ drawn)
        if odd:
            raise NoPlace(f"the sheet of {self.model.name} does not fit its table: {kind} {', '.join(odd)}")

    def _title(self) -> tuple[Text, ...]:
        title = f"{self.model.name[:1].upper()}{self.model.name[1:]}"
        column = Column(MARGIN, 20, LEGEND - MARGIN - 20).write(Font.title, 34, Run(title, Ink.heading))
        said = f"{self.model.summary}. Table {self.model.digest}."
        column = column.skip(8).prose(said, Font.body, Ink.prose, 17)
        if self.trace:
            column = column.skip(2).prose(self.trace.summary, Font.body, Ink.trace, 17)
        return column.texts


def _legend(x: float, y: float, trace: Trace | None) -> tuple[tuple[Text, ...], tuple[Arrow, ...]]:
    """How to read a label, and the kinds of arrows: of three tones, and of a path if there is one."""
    reading = (Run("Fact", Ink.event), Run(" [guard]", Ink.guard), Run(" / orders", Ink.order))
    texts = [Text(x, y, Font.code, reading)]
    arrows: list[Arrow] = []
    kinds = [(tone, Look.usual, Run(tone.value, Ink.prose)) for tone in Tone]
    if trace is not None:
        kinds.append((Tone.plain, Look.taken, Run(PATH, Ink.trace)))
    for tone, look, said in kinds:
        y += 19
        arrows.append(Arrow((), ((x, y - 4), (x + 34, y - 4)), tone, look))
        texts.append(Text(x + 46, y, Font.body, (said,)))
    return tuple(texts), tuple(arrows)

"""What a sheet is made of: panels with text in them, arrows between panels. No state, no table, no XML."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .measure import Font, width

__all__ = ["Arrow", "Badge", "Box", "Ink", "Look", "Panel", "Point", "Run", "Sheet", "Text", "Tone"]

Point = tuple[float, float]


class Tone(Enum):
    """What a move means for who looks at the picture."""

    good = "the way of a good round"
    bad = "to where things went wrong"
    plain = "any other move"


class Look(Enum):
    """How a path changes what it is laid over."""

    usual = "no path is shown"
    taken = "the path leads through here"
    faded = "the path leads elsewhere"


class Ink(Enum):
    """The roles that a text can have; a style sheet gives them their colours."""

    heading = "a title or the name of a state"
    prose = "a sentence"
    event = "what happened"
    guard = "under which condition"
    order = "what is ordered"
    quiet = "said in passing"
    trace = "said about a path"


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle; y grows downwards."""

    x: float
    y: float
    w: float
    h: float

    @property
    def right(self) -> float:
        """The x of the right side."""
        return self.x + self.w

    @property
    def bottom(self) -> float:
        """The y of the lower side."""
        return self.y + self.h

    @property
    def middle(self) -> Point:
        """The point in the middle."""
        return self.x + self.w / 2, self.y + self.h / 2

    def overlaps(self, other: Box) -> bool:
        """Whether the two share any area."""
        return (
            self.x < other.right and other.x < self.right and self.y < other.bottom and other.y < self.bottom
        )

    def holds(self, other: Box) -> bool:
        """Whether ``other`` lies wholly inside."""
        return (
            self.x <= other.x
            and other.right <= self.right
            and self.y <= other.y
            and other.bottom <= self.bottom
        )


@dataclass(frozen=True, slots=True)
class Run:
    """Some characters in one ink."""

    text: str
    ink: Ink


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text, from its left end on the base line."""

    x: float
    y: float
    font: Font
    runs: tuple[Run, ...]

    @property
    def box(self) -> Box:
        """The room it takes at most."""
        wide = sum(width(run.text, self.font) for run in self.runs)
        return Box(self.x, self.y - 0.8 * self.font.size, wide, self.font.size)


@dataclass(frozen=True, slots=True)
class Badge:
    """A number on a coloured ground: the place of a move in a path."""

    box: Box
    number: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A box with text: the card of a state, or the chip with the labels of a move."""

    kind: str
    ends: tuple[str, ...]
    """The name of the state, or source and target of the move."""

    box: Box
    texts: tuple[Text, ...]
    rules: tuple[tuple[Point, Point], ...] = ()
    tone: Tone = Tone.plain
    look: Look = Look.usual
    final: bool = False
    badges: tuple[Badge, ...] = ()


@dataclass(frozen=True, slots=True)
class Arrow:
    """A line with a head at its end. ``ends`` names the move, and is empty for the one into the start."""

    ends: tuple[str, ...]
    points: tuple[Point, ...]
    tone: Tone
    look: Look = Look.usual

    @property
    def bends(self) -> bool:
        """Whether it has corners. Such an arrow passes over the straight ones."""
        return len(self.points) > 2


@dataclass(frozen=True, slots=True)
class Sheet:
    """A picture: what is on it, in the order in which it is painted."""

    title: str
    width: float
    height: float
    texts: tuple[Text, ...]
    arrows: tuple[Arrow, ...]
    panels: tuple[Panel, ...]
    dots: tuple[Point, ...]
    """Where a table starts."""

    samples: tuple[Arrow, ...] = ()
    """The arrows of the legend, which lead nowhere."""

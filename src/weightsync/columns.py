"""Text in columns, for terminals and files: widths, room, colours, and nothing that could harm a terminal.

What is printed here comes from logs, and those hold error messages of anybody. So control characters are
never printed as they are, and a text is always one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

__all__ = ["PLAIN", "Column", "Paint", "clean", "grid", "natural", "shorten"]

GAP = 2
"""Blanks between two columns."""


@dataclass(frozen=True, slots=True)
class Paint:
    """Colours, or none of them."""

    on: bool

    def __call__(self, colour: str, text: str) -> str:
        """``text`` in ``colour``; unchanged where there are no colours, or the text is empty."""
        if not self.on or not text.strip() or colour not in _CODES:
            return text
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m"


_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36", "alarm": "1;31"}
PLAIN = Paint(on=False)


def _no_colour(text: str) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Args:
        title: its heading; empty for none.
        cells: one for each row.
        right: whether its cells stand to the right.
        least: how narrow it may become if room is short; 0 means as wide as it is.
        tight: how narrow it may become instead of leaving; it is the last to leave then.
        leaves: the column that leaves first, if it does not all fit, has the highest number; 0 stays.
        colour: the name of the colour of a cell, by what stands in it.
    """

    title: str
    cells: Sequence[str]
    right: bool = False
    least: int = 0
    tight: int = 0
    leaves: int = 0
    colour: Callable[[str], str] = field(default=_no_colour)

    @property
    def width(self) -> int:
        """How wide it would like to be."""
        return max(len(self.title), *map(len, self.cells), 0)

    @property
    def need(self) -> int:
        """How narrow it can be."""
        return min(self.width, max(self.least, len(self.title))) if self.least else self.width


def grid(columns: Sequence[Column], width: int | None, paint: Paint = PLAIN) -> list[str]:
    """The rows as lines of at most ``width`` characters, under a heading; None is as wide as it takes.

    Columns without any content are left out. Where room is short, those that may leave do, and those that may
    shrink do, the last ones first.
    """
    shown = [column for column in columns if any(column.cells)]
    while width is not None and _room(shown, [column.need for column in shown]) > width:
        leaving = max((column for column in shown), key=lambda column: column.leaves, default=None)
        if leaving is None or not leaving.leaves:
            break
        place = shown.index(leaving)
        shown[place : place + 1] = (
            [replace(leaving, least=leaving.tight, tight=0, leaves=1)] if leaving.tight else []
        )
    widths = _widths(shown, width)
    lines = []
    if any(column.title for column in shown):
        heads = zip(shown, widths, strict=True)
        lines.append(_line(_fit(column.title, column, room, paint, "bold") for column, room in heads))
    for cells in zip(*(column.cells for column in shown), strict=True):
        row = zip(cells, shown, widths, strict=True)
        lines.append(_line(_fit(cell, col, room, paint, col.colour(cell)) for cell, col, room in row))
    return lines


def natural(columns: Sequence[Column]) -> int:
    """How wide the lines of a grid are where there is room for all of it."""
    shown = [column for column in columns if any(column.cells)]
    return _room(shown, [column.width for column in shown])


def _room(columns: Sequence[Column], widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(columns) - 1)


def _widths(columns: Sequence[Column], width: int | None) -> list[int]:
    widths = [column.width for column in columns]
    for place in reversed(range(len(columns))):
        over = 0 if width is None else _room(columns, widths) - width
        if over > 0:
            widths[place] = max(columns[place].need, widths[place] - over)
    return widths


def _fit(text: str, column: Column, width: int, paint: Paint, colour: str) -> str:
    text = shorten(text, width)
    pad = " " * (width - len(text))
    return pad + paint(colour, text) if column.right else paint(colour, text) + pad


def _line(parts: Iterable[str]) -> str:
    return (" " * GAP).join(parts).rstrip()


def shorten(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters, with a mark where something is missing."""
    if len(text) <= width:
        return text
    return f"{text[: width - 3]}..." if width > 3 else text[: max(0, width)]


def clean(text: str) -> str:
    """``text`` in one line that a terminal shows as it is: no control characters, no line ends."""
    line = " ".join(text.split())
    if line.isprintable():
        return line
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)

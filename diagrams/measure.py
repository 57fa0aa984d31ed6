"""How wide a text will be, without a font at hand.

A picture is looked at with whatever fonts the reader has. The widths here are those of DejaVu, the widest of
the usual ones: what fits in it fits in Helvetica, Arial and Menlo.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

__all__ = ["Font", "width", "wrap"]


class Font(Enum):
    """The few fonts of a picture: (size in pixels, monospaced, bold)."""

    title = (30.0, False, True)
    headline = (20.0, False, True)
    body = (12.5, False, False)
    small = (11.0, False, False)
    code = (11.5, True, False)

    @property
    def size(self) -> float:
        """Height in pixels."""
        return self.value[0]


_CODE = 0.602
_BOLD = 1.13
_WIDTHS = {
    **dict.fromkeys("ijl'|", 0.29),
    **dict.fromkeys("frtI .,;:!()[]/-`", 0.42),
    **dict.fromkeys("csz", 0.56),
    **dict.fromkeys("w+=<>~", 0.84),
    **dict.fromkeys("mMWOQ@%&", 1.0),
    **dict.fromkeys("ABCDEFGHJKLNPRSTUVXYZ", 0.78),
}


def width(text: str, font: Font) -> float:
    """Pixels that ``text`` needs at most."""
    size, code, bold = font.value
    if code:
        return sum(_CODE if char < "\u0300" else 1.0 for char in text) * size
    ems = sum(_WIDTHS.get(char, 0.64 if char < "\u0300" else 1.0) for char in text)
    return ems * size * (_BOLD if bold else 1.0)


def wrap(text: str, font: Font, room: float) -> tuple[str, ...]:
    """Break ``text`` into lines of at most ``room`` pixels, between words."""
    lines: list[str] = []
    for word in _pieces(text.split(), font, room):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and width(longer, font) <= room:
            lines[-1] = longer
        else:
            lines.append(word)
    return tuple(lines)


def _pieces(words: Iterable[str], font: Font, room: float) -> Iterable[str]:
    """The words; one that is wider than a line comes in parts."""
    for word in words:
        rest = word
        while width(rest, font) > room and len(rest) > 1:
            end = next(n for n in range(len(rest) - 1, 0, -1) if n == 1 or width(rest[:n], font) <= room)
            yield rest[:end]
            rest = rest[end:]
        yield rest

"""From SVG to PNG, by a wheel that brings all it needs (resvg) and is loaded only when a PNG is asked for."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from .errors import DrawingToolMissing

__all__ = ["png"]

ZOOM = 2
"""Dots to a pixel: sharp on today's screens, and on paper."""

_PROBE = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="40">{}</svg>'
_LETTER = '<text x="8" y="30" font-size="24" font-family="{}">M</text>'


def png(svg: str) -> bytes:
    """The picture as PNG.

    Raises:
        DrawingToolMissing: resvg is not installed, or finds no font to write with.
    """
    resvg = _resvg()
    if not _writes(resvg):
        raise DrawingToolMissing("a PNG needs a font, and none is installed (on Debian: fonts-dejavu-core)")
    return bytes(resvg.svg_to_bytes(svg_string=svg, zoom=ZOOM))


def _resvg() -> Any:
    try:
        return importlib.import_module("resvg_py")
    except (ImportError, OSError) as error:  # a native library that cannot be loaded may be either
        if isinstance(error, ModuleNotFoundError) and error.name == "resvg_py":
            why = "a PNG needs resvg-py, the extra png: pip install resvg-py"
        else:
            why = f"a PNG needs resvg-py, which is broken: its import raised {type(error).__name__}: {error}"
        raise DrawingToolMissing(why) from error


@cache
def _writes(resvg: Any) -> bool:
    """Whether text leaves a trace. Without fonts it is left out in silence: a picture that says nothing."""
    blank = bytes(resvg.svg_to_bytes(svg_string=_PROBE.format("")))
    families = ("Helvetica, Arial, DejaVu Sans, sans-serif", "Menlo, Consolas, DejaVu Sans Mono, monospace")
    letters = (_PROBE.format(_LETTER.format(family)) for family in families)
    return all(bytes(resvg.svg_to_bytes(svg_string=letter)) != blank for letter in letters)

"""A sheet as SVG: the same bytes for the same table, no script, no font, nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from xml.sax.saxutils import escape, quoteattr

from .errors import NoPlace
from .model import Model
from .overlay import Trace
from .shapes import Arrow, Badge, Box, Look, Panel, Point, Sheet, Text
from .sheet_engine import draw_engine
from .sheet_round import draw_round

__all__ = ["draw", "svg"]

_SHEETS: dict[str, Callable[[Model, Trace | None], Sheet]] = {"engine": draw_engine, "round": draw_round}

_STYLE = """
text { font-family: Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #1d2733; }
.title { font-size: 30px; font-weight: bold; letter-spacing: -0.4px; }
.headline { font-size: 20px; font-weight: bold; }
.body { font-size: 12.5px; }
.small { font-size: 11px; }
.code { font-size: 11.5px; font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.prose { fill: #566373; }
.guard { fill: #6b7785; }
.order { fill: #7a4b00; }
.quiet { fill: #6f7b88; }
.trace { fill: #1546c0; font-weight: bold; }
.paper { fill: #ffffff; stroke: #d8dee5; }
.state .box, .state .ring { fill: #f6f8fa; stroke: #8996a5; stroke-width: 1.25; }
.state.bad .box { fill: #fff5f3; stroke: #cf6a5c; }
.state line { stroke: #d5dce3; }
.state.bad line { stroke: #f0cdc7; }
.move .box { fill: #ffffff; stroke: #b9c2cc; }
.move.good .box { fill: #f0faf6; stroke: #7fc4aa; }
.move.bad .box { fill: #fff8f7; stroke: #e9b3aa; }
.arrow path { fill: none; stroke: #75828f; stroke-width: 1.5; }
.arrow polygon { fill: #75828f; }
.arrow.good path { stroke: #0d8a63; stroke-width: 2.5; }
.arrow.good polygon { fill: #0d8a63; }
.arrow.bad path { stroke: #c8402e; }
.arrow.bad polygon { fill: #c8402e; }
.halo { fill: none; stroke: #ffffff; stroke-width: 7; }
.arrow.taken path { stroke: #1546c0; stroke-width: 3; }
.arrow.taken polygon { fill: #1546c0; }
.state.taken .box, .state.taken .ring, .move.taken .box { stroke: #1546c0; stroke-width: 2.5; }
.arrow.faded path { stroke: #dde2e7; }
.arrow.faded polygon { fill: #dde2e7; }
.state.faded .box, .state.faded .ring, .move.faded .box { fill: #fcfdfd; stroke: #dde2e7; }
.state.faded line { stroke: #e9edf0; }
.faded .heading, .faded tspan { fill: #b3bcc5; }
.state .ring, .state.taken .ring, .state.faded .ring { fill: none; }
.dot { fill: #1d2733; }
.badge .pill { fill: #1546c0; stroke: none; }
.badge text { fill: #ffffff; font-size: 10.5px; font-weight: bold; text-anchor: middle; }
"""


def svg(model: Model, trace: Trace | None = None) -> str:
    """The picture of a table for which there is a sheet.

    Raises:
        NoPlace: there is none, or it does not fit.
    """
    return _svg(draw(model, trace))


def draw(model: Model, trace: Trace | None = None) -> Sheet:
    """The sheet of a table, laid out.

    Raises:
        NoPlace: there is none, or it does not fit.
    """
    if model.name not in _SHEETS:
        raise NoPlace(f"there is no sheet for a table called {model.name!r}; dot and mermaid need none")
    return _SHEETS[model.name](model, trace)


def _svg(sheet: Sheet) -> str:
    size = f'width="{_n(sheet.width)}" height="{_n(sheet.height)}"'
    view = f'viewBox="0 0 {_n(sheet.width)} {_n(sheet.height)}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} role="img">',
        f"<title>{escape(sheet.title)}</title>",
        f"<style>{_STYLE}</style>",
        _rect("paper", Box(0.5, 0.5, sheet.width - 1, sheet.height - 1), 12),
        *map(_text, sheet.texts),
        *_lines([arrow for arrow in sheet.arrows if arrow.look is not Look.taken]),
        *_lines([arrow for arrow in sheet.arrows if arrow.look is Look.taken]),
        *map(_arrow, sheet.samples),
        *(f'<circle class="dot" cx="{_n(x)}" cy="{_n(y)}" r="6"/>' for x, y in sheet.dots),
        *(line for panel in sheet.panels for line in _panel(panel)),
        "</svg>",
        "",
    ]
    return "\n".join(lines)


def _n(number: float) -> str:
    """A coordinate: at most one digit after the point, so that no platform rounds it differently."""
    return f"{number:.1f}".removesuffix(".0")


def _classes(kind: str, item: Arrow | Panel) -> str:
    look = "" if item.look is Look.usual else f" {item.look.name}"
    return f'class="{kind} {item.tone.name}{look}"'


def _ends(ends: tuple[str, ...]) -> str:
    names = ("data-source", "data-target") if len(ends) == 2 else ("data-state",)
    return "".join(f" {name}={quoteattr(end)}" for name, end in zip(names, ends, strict=False))


def _text(text: Text) -> str:
    runs = "".join(f'<tspan class="{run.ink.name}">{escape(run.text)}</tspan>' for run in text.runs)
    return f'<text class="{text.font.name}" x="{_n(text.x)}" y="{_n(text.y)}">{runs}</text>'


def _panel(panel: Panel) -> Iterable[str]:
    box = panel.box
    yield f"<g {_classes(panel.kind, panel)}{_ends(panel.ends)}>"
    yield _rect("box", box, 8)
    if panel.final:
        yield _rect("ring", Box(box.x - 4, box.y - 4, box.w + 8, box.h + 8), 11)
    for (x1, y1), (x2, y2) in panel.rules:
        yield f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"/>'
    yield from map(_text, panel.texts)
    yield from map(_badge, panel.badges)
    yield "</g>"


def _badge(badge: Badge) -> str:
    x, y = badge.box.middle
    number = f'<text x="{_n(x)}" y="{_n(y + 3.8)}">{escape(badge.number)}</text>'
    return f'<g class="badge">{_rect("pill", badge.box, 8.5)}{number}</g>'


def _rect(role: str, box: Box, radius: float) -> str:
    size = f'width="{_n(box.w)}" height="{_n(box.h)}" rx="{_n(radius)}"'
    return f'<rect class="{role}" x="{_n(box.x)}" y="{_n(box.y)}" {size}/>'


def _lines(arrows: list[Arrow]) -> Iterable[str]:
    """Arrows with corners pass over the others, and leave no gap in one another: they may run together."""
    bent = [arrow for arrow in arrows if arrow.bends]
    yield from (_arrow(arrow) for arrow in arrows if not arrow.bends)
    yield from map(_halo, bent)
    yield from map(_arrow, bent)


def _arrow(arrow: Arrow) -> str:
    back, head = _head(arrow.points)
    line = f'<path d="{_path((*arrow.points[:-1], back))}"/><polygon points="{head}"/>'
    return f"<g {_classes('arrow', arrow)}{_ends(arrow.ends)}>{line}</g>"


def _halo(arrow: Arrow) -> str:
    """The gap that a line leaves in the lines it crosses."""
    return f'<path class="halo" d="{_path(arrow.points)}"/>'


def _head(points: tuple[Point, ...]) -> tuple[Point, str]:
    """Where the line ends, and the three corners of the head beyond it."""
    (x0, y0), (x, y) = points[-2:]
    long = math.hypot(x - x0, y - y0)
    dx, dy = (x - x0) / long, (y - y0) / long
    back = x - 10 * dx, y - 10 * dy
    corners = ((x, y), (back[0] - 5 * dy, back[1] + 5 * dx), (back[0] + 5 * dy, back[1] - 5 * dx))
    return back, " ".join(f"{_n(cx)},{_n(cy)}" for cx, cy in corners)


def _path(points: tuple[Point, ...], radius: float = 10) -> str:
    """A line through all points, with round corners."""
    parts = [f"M{_n(points[0][0])} {_n(points[0][1])}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        (x1, y1), (x2, y2) = _toward(corner, before, radius), _toward(corner, after, radius)
        parts.append(f"L{_n(x1)} {_n(y1)}Q{_n(corner[0])} {_n(corner[1])} {_n(x2)} {_n(y2)}")
    parts.append(f"L{_n(points[-1][0])} {_n(points[-1][1])}")
    return "".join(parts)


def _toward(start: Point, end: Point, pixels: float) -> Point:
    long = math.dist(start, end)
    part = min(pixels, long / 2) / long
    return start[0] + (end[0] - start[0]) * part, start[1] + (end[1] - start[1]) * part

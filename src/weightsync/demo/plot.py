"""Draw reward curves as SVG, with an emitter of our own: equal input gives equal bytes, on any machine.

The picture has a white ground of its own, so that it can be read on a dark page too. Each curve is drawn
twice, as it was measured (thin) and as a moving average (bold); steps whose round failed are crossed out at
the foot.
"""

import html
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

COLOURS = ("#1f6feb", "#8b949e", "#2da44e", "#bf8700")
RED = "#cf222e"
INK = "#24292f"
FAINT = "#57606a"
GRID = "#e4e8ec"
FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\""

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 736, 84, 344
"""The frame of the plot, in pixels."""

Point = tuple[float, float]
"""Pixels to the right of, and below, the upper left corner."""

NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no XML document may hold, not even escaped."""


@dataclass(frozen=True)
class Curve:
    """One line of the plot.

    Attributes:
        label: What the legend calls it.
        rewards: One mean reward in [0, 1] per step, from step 0; nan where nothing was measured.
    """

    label: str
    rewards: Sequence[float]


@dataclass(frozen=True)
class Level:
    """A dashed horizontal line, such as the most that can be had without learning anything."""

    label: str
    reward: float


def reward_svg(
    curves: Sequence[Curve],
    *,
    title: str,
    failed: Collection[int] = (),
    level: Level | None = None,
    x_label: str = "training step",
    y_label: str = "mean reward",
    failed_label: str = "failed round",
) -> str:
    """Draw curves over one axis of steps.

    Args:
        curves: At least one, and at most as many as there are colours.
        title: Stands above the plot, and is what a screen reader says.
        failed: Steps to mark; those outside the axis are left out.
        level: A line to compare with.
        x_label: Names the axis of steps.
        y_label: Names the axis of rewards.
        failed_label: What the legend calls the marks.

    Returns:
        A whole SVG document that ends in a newline.
    """
    if not 1 <= len(curves) <= len(COLOURS):
        raise ValueError(f"can draw 1 to {len(COLOURS)} curves, not {len(curves)}")
    last = max(1, *(len(curve.rewards) - 1 for curve in curves))
    marks = sorted(step for step in set(failed) if 0 <= step <= last)
    painted = list(zip(curves, COLOURS, strict=False))
    legend = [(curve.label, colour, False) for curve, colour in painted]
    legend += [(failed_label, RED, True)] if marks else []
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {HEIGHT}" role="img" {FONT}>',
        f"<title>{escaped(title)}</title>",
        f'<rect {size} fill="#ffffff"/>',
        text(LEFT, 34, title, size=18, weight=600),
        *_legend(legend),
        *_axes(last, x_label, y_label),
        *_marks(marks, last),
        *(part for curve, colour in painted for part in _curve(curve, colour, last)),
        *(_level(level) if level else ()),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def escaped(label: str) -> str:
    """A text as it may stand in XML, in an element or an attribute."""
    return html.escape(NOT_XML.sub("\N{REPLACEMENT CHARACTER}", label))


def text(
    x: float,
    y: float,
    label: str,
    *,
    size: int = 12,
    colour: str = INK,
    anchor: str = "start",
    weight: int = 400,
    more: str = "",
) -> str:
    """A line of text; `more` is put among its attributes as it is."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
        f'text-anchor="{anchor}"{more}>{escaped(label)}</text>'
    )


def smoothed(rewards: Sequence[float]) -> list[float]:
    """A centred moving average over about a twelfth of the curve; nan where all of its window is."""
    reach = len(rewards) // 24
    averages = []
    for step in range(len(rewards)):
        window = [r for r in rewards[max(0, step - reach) : step + reach + 1] if math.isfinite(r)]
        averages.append(math.fsum(window) / len(window) if window else math.nan)
    return averages


def ticks(last: int) -> range:
    """Round step numbers from 0 to at most `last`, about six of them."""
    power = 10 ** max(0, len(str(last)) - 2)
    stride = next(stride for base in (1, 2, 5, 10, 20) if (stride := base * power) * 7 > last)
    return range(0, last + 1, stride)


def _x(step: int, last: int) -> float:
    return LEFT + (RIGHT - LEFT) * step / last


def _y(reward: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * min(1.0, max(0.0, reward))


def _line(start: Point, end: Point, stroke: str, more: str = "") -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{more}/>'


def _legend(entries: Sequence[tuple[str, str, bool]]) -> Iterator[str]:
    """A row of label, colour, and whether it stands for the marks."""
    x = float(LEFT)
    for label, colour, marks in entries:
        yield _cross(x + 11, 54, 4) if marks else _line((x, 54), (x + 22, 54), colour, ' stroke-width="3"')
        yield text(x + 29, 58, label, colour=FAINT)
        # How wide the text will be is up to the reader's font; this is on the safe side.
        x += 29 + 7 * len(label) + 22


def _axes(last: int, x_label: str, y_label: str) -> Iterator[str]:
    for fifth in range(6):
        y = _y(fifth / 5)
        yield _line((LEFT, y), (RIGHT, y), FAINT if fifth == 0 else GRID)
        yield text(LEFT - 9, y + 4, f"{fifth / 5:.1f}", colour=FAINT, anchor="end")
    for step in ticks(last):
        x = _x(step, last)
        yield _line((x, BOTTOM), (x, BOTTOM + 5), FAINT)
        yield text(x, BOTTOM + 19, str(step), colour=FAINT, anchor="middle")
    yield text((LEFT + RIGHT) / 2, HEIGHT - 14, x_label, size=13, anchor="middle")
    middle = (TOP + BOTTOM) / 2
    yield text(
        20, middle, y_label, size=13, anchor="middle", more=f' transform="rotate(-90 20 {middle:.1f})"'
    )


def _marks(steps: Sequence[int], last: int) -> Iterator[str]:
    for step in steps:
        x = _x(step, last)
        yield _line((x, TOP), (x, BOTTOM - 8), RED, ' stroke-opacity="0.25"')
        yield _cross(x, BOTTOM, 4)


def _cross(x: float, y: float, reach: float) -> str:
    strokes = " ".join(
        f"M{x - reach:.1f} {y - reach * sign:.1f}L{x + reach:.1f} {y + reach * sign:.1f}" for sign in (1, -1)
    )
    return f'<path d="{strokes}" stroke="{RED}" stroke-width="2" stroke-linecap="round"/>'


def _level(level: Level) -> Iterator[str]:
    y = _y(level.reward)
    yield _line((LEFT, y), (RIGHT, y), FAINT, ' stroke-dasharray="5 4"')
    # A white rim keeps the label readable where a curve runs behind it.
    rim = ' stroke="#ffffff" stroke-width="4" stroke-linejoin="round" paint-order="stroke"'
    yield text(RIGHT, y - 9, level.label, size=11, colour=FAINT, anchor="end", more=rim)


def _curve(curve: Curve, colour: str, last: int) -> Iterator[str]:
    for rewards, style in (
        (curve.rewards, 'stroke-width="1" stroke-opacity="0.45"'),
        (smoothed(curve.rewards), 'stroke-width="2.5"'),
    ):
        yield (
            f'<path d="{_path(rewards, last)}" fill="none" stroke="{colour}" {style} '
            'stroke-linejoin="round" stroke-linecap="round"/>'
        )


def _path(rewards: Sequence[float], last: int) -> str:
    """The commands of a line that breaks off where nothing was measured."""
    commands, pen = [], "M"
    for step, reward in enumerate(rewards):
        if not math.isfinite(reward):
            pen = "M"
            continue
        commands.append(f"{pen}{_x(step, last):.1f} {_y(reward):.1f}")
        pen = "L"
    return "".join(commands)

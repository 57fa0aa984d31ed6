"""Where everything of the engine's table is drawn.

A session runs down the middle. Serving stands on its left, before and after every session; Quarantined stands
on its right, and the way there without a session runs below it. A newer session may take over from every
state: those arrows run up beside the middle.
"""

from __future__ import annotations

from itertools import pairwise

from .frame import WIDTH, Painter
from .model import Model
from .overlay import Trace
from .panels import lane
from .shapes import Panel, Sheet, Tone

__all__ = ["draw_engine"]

SPINE = ("Paused", "Receiving", "Releasing", "Acked", "Committed")
MARGIN = 26.0
TOP = 156.0
SIDE = 182.0
"""The width of the lanes."""

CARD = (462.0, 276.0)
CHIP = 166.0
LEFT = 252.0
"""The left side of the labels left of the middle."""

RIGHT = 768.0
"""The left side of the labels right of the middle."""

BUS = RIGHT + CHIP + 18
"""Where the arrows back to Paused run up."""

GAP = 20.0
BELOW = 56.0
"""How far the lanes go on below the last card."""

HIGH, HIGHER = 158.0, 178.0
"""The height of a card, without and with a path over it."""

ENDS, AGAIN, BACK = 70.0, 28.0, 18.0
"""Levels: a session ends so far below a card's top, the next begins so far above the card's bottom, and it
enters Paused so far below that one's top."""


def draw_engine(model: Model, trace: Trace | None) -> Sheet:
    """The sheet of one engine rank."""
    paint = Painter(model, trace)
    cards = _session(paint)
    bottom = cards["Committed"].box.bottom + BELOW
    serving = paint.panel(lane(model.node("Serving"), (MARGIN, TOP), (SIDE, bottom - TOP), trace))
    away = (WIDTH - MARGIN - SIDE, TOP)
    torn = paint.panel(lane(model.node("Quarantined"), away, (SIDE, bottom - TOP), trace))
    _opens(paint, serving, torn, cards["Paused"])
    for here in cards.values():
        _ends(paint, here, serving, torn)
        _reopens(paint, here, cards["Paused"])
    _loses(paint, serving, torn, bottom - BELOW / 2)
    middle = serving.box.middle[0]
    paint.start((middle, TOP - 26), (middle, TOP))
    return paint.finish(bottom)


def _session(paint: Painter) -> dict[str, Panel]:
    """The states of a session, one below the other, and the moves between them."""
    cards: dict[str, Panel] = {}
    x, wide = CARD
    y, middle = TOP + 62, x + wide / 2
    high = HIGHER if paint.trace else HIGH
    for name, following in pairwise((*SPINE, "")):
        cards[name] = here = paint.panel(lane(paint.model.node(name), (x, y), (wide, high), paint.trace))
        if following:
            top = here.box.bottom
            chip = paint.chip((name, following), middle - 110, top + GAP, 220, Tone.good)
            y = chip.box.bottom + GAP
            paint.arrow(chip, (middle, top), (middle, y))
    return cards


def _opens(paint: Painter, serving: Panel, torn: Panel, paused: Panel) -> None:
    """A session opens: from both lanes, over the top, into Paused."""
    y, x = TOP + 20, paused.box.middle[0]
    chip = paint.chip(("Serving", "Paused"), LEFT, y, CHIP, Tone.good, level=0.5)
    paint.arrow(chip, (serving.box.right, y), (x - 60, y), (x - 60, paused.box.y))
    chip = paint.chip(("Quarantined", "Paused"), RIGHT, y, CHIP, Tone.plain, level=0.5)
    paint.arrow(chip, (torn.box.x, y), (x + 60, y), (x + 60, paused.box.y))


def _ends(paint: Painter, here: Panel, serving: Panel, torn: Panel) -> None:
    """A session ends: with the old version or the new one to the left, with a mix to the right."""
    name, y = here.ends[0], here.box.y + ENDS
    tone = Tone.good if name == "Committed" else Tone.plain
    chip = paint.chip((name, "Serving"), LEFT, y, CHIP, tone, level=0.5)
    paint.arrow(chip, (here.box.x, y), (serving.box.right, y))
    chip = paint.chip((name, "Quarantined"), RIGHT, y, CHIP, Tone.bad, level=0.5)
    paint.arrow(chip, (here.box.right, y), (torn.box.x, y))


def _loses(paint: Painter, serving: Panel, torn: Panel, y: float) -> None:
    """The weights are lost while no session is open."""
    chip = paint.chip(
        ("Serving", "Quarantined"), CARD[0] + CARD[1] / 2 - CHIP / 2, y, CHIP, Tone.bad, level=0.5
    )
    paint.arrow(chip, (serving.box.right, y), (torn.box.x, y))


def _reopens(paint: Painter, here: Panel, paused: Panel) -> None:
    """A newer session takes over: out at the lower right, up, and into Paused."""
    y, top = here.box.bottom - AGAIN, paused.box.y + BACK
    chip = paint.chip((here.ends[0], "Paused"), RIGHT, y, CHIP, Tone.plain, level=0.5)
    paint.arrow(chip, (here.box.right, y), (BUS, y), (BUS, top), (paused.box.right, top))

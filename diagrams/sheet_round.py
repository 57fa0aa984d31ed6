"""Where everything of the round's table is drawn.

The good round runs down the left side. To its right, level with each state, is what can go wrong there; all
of it leads into one lane, Failed, which stands beside the whole way and ends where the way ends: in Released.
"""

from __future__ import annotations

from itertools import pairwise

from .frame import WIDTH, Painter
from .model import Model
from .overlay import Trace
from .panels import card, lane
from .shapes import Panel, Sheet, Tone

__all__ = ["draw_round"]

SPINE = ("Idle", "Locked", "Broadcasting", "Awaiting", "Cleaning", "Released")

LEFT = 26.0
TOP = 156.0
CARD = (228.0, 322.0)
FORWARD = 228.0
"""The width of the labels between two states of the way."""

FAULTS = (598.0, 276.0)
"""Left side and width of what goes wrong."""

LANE = (900.0, WIDTH - LEFT - 900.0)
SET_APART = 14.0
GAP = 22.0
"""The part of an arrow that shows, before and after its labels."""


def draw_round(model: Model, trace: Trace | None) -> Sheet:
    """The sheet of the round."""
    paint = Painter(model, trace)
    cards = _way(paint)
    first, last, over = cards["Idle"].box, cards["Cleaning"].box, cards["Released"].box
    failed = lane(model.node("Failed"), (LANE[0], TOP), (LANE[1], last.bottom - TOP), trace, SET_APART)
    paint.panel(failed)
    for name in SPINE[:-1]:
        _fault(paint, cards[name], failed)
    x, y = failed.box.middle[0], over.middle[1]
    chip = paint.chip(("Failed", "Released"), FAULTS[0], y, FAULTS[1], Tone.plain, level=0.5)
    paint.arrow(chip, (x, failed.box.bottom), (x, y), (over.right, y))
    middle = LEFT + FORWARD / 2
    paint.start((middle, first.y - 26), (middle, first.y))
    return paint.finish(over.bottom)


def _way(paint: Painter) -> dict[str, Panel]:
    """The cards of a good round, one below the other, and the moves between them."""
    cards: dict[str, Panel] = {}
    y, x = TOP, LEFT + FORWARD / 2
    for name, following in pairwise((*SPINE, "")):
        cards[name] = here = paint.panel(card(paint.model.node(name), (LEFT, y), CARD, paint.trace))
        if following:
            top = here.box.bottom
            chip = paint.chip((name, following), LEFT, top + GAP, FORWARD, Tone.good)
            y = chip.box.bottom + GAP
            paint.arrow(chip, (x, top), (x, y))
    return cards


def _fault(paint: Painter, here: Panel, failed: Panel) -> None:
    y = here.box.middle[1]
    chip = paint.chip((here.ends[0], "Failed"), FAULTS[0], y, FAULTS[1], Tone.bad, level=0.5)
    paint.arrow(chip, (here.box.right, y), (failed.box.x, y))

"""What is done at a boundary of a round so that another process can have the memory: named, in order.

A trainer and an engine on one device take turns with its memory. What an allocator keeps of memory that
nothing uses any more, it has to hand back before the other one maps its own. That is one action, and cheap.
A full garbage collection is none of them: it finds next to nothing, and costs as much as the rest of a round
when there are many objects. A test holds every level to that.

Which level is right, the other side decides by what it lacks: ``light`` first, and once more ``aggressive``
if that was not enough. Nobody repeats it in the hope that it helps.
"""

from __future__ import annotations

from enum import Enum

from .errors import TableError
from .states import State

__all__ = ["ACTIONS", "BUDGETS", "Action", "Boundary", "Level"]


class Action(Enum):
    """One thing that is done."""

    synchronize = "wait until the device has done what it was told: what is in use is not known before"
    collect_exports = "take back what was shown to other processes, and let go of by them"
    cache_release = "hand back what the allocator keeps and nothing uses"


class Level(Enum):
    """How much is done."""

    none = "nothing"
    light = "hand back what is known to be unused"
    sync = "wait for the device first"
    aggressive = "the same, and what other processes have let go of"


class Boundary(Enum):
    """Where in a round."""

    prepare = (State.Idle, State.Locked)
    clean = (State.Awaiting, State.Cleaning)

    def __str__(self) -> str:
        return "->".join(state.name for state in self.value)


# fmt: off
ACTIONS: dict[Level, tuple[Action, ...]] = {
    Level.none:       (),
    Level.light:      (Action.cache_release,),
    Level.sync:       (Action.synchronize, Action.cache_release),
    Level.aggressive: (Action.synchronize, Action.collect_exports, Action.cache_release),
}
"""What a level is, in order."""

BUDGETS: dict[Action, float] = {
    Action.synchronize:     1.0,
    Action.collect_exports: 0.1,
    Action.cache_release:   0.25,
}
"""Seconds that an action may take before the log warns. None of them is ended by that."""
# fmt: on

for _level, _actions in ACTIONS.items():
    if _actions and _actions[-1] is not Action.cache_release:  # pragma: no cover - a slip of this file alone
        raise TableError(f"{_level.name} hands nothing back, or does something after that")

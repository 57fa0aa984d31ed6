"""A table compiled for the ``transitions`` library: the only module that imports it.

``transitions`` decides and never owns anything. The compiled machine has no models, no callbacks but the
guards, and no automatic triggers; it runs on a throw-away cell and hands back the state. It is the second
reading of a table, beside :mod:`.reducer`, and the two are compared on every event of every round.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import Any

from transitions import Machine, MachineError, Transition

from .errors import GuardFailed, IllegalEvent
from .rows import Table, describe

__all__ = ["Decider", "compiled_transitions"]

# The library logs eight lines an event at DEBUG and INFO; the round's journal is the log.
logging.getLogger("transitions").setLevel(logging.ERROR)


class _Cell:
    """What the machine moves: it lives for one decision."""

    __slots__ = ("state",)

    def __init__(self, state: Enum) -> None:
        self.state = state


class Decider:
    """Answers which state an event leads to, by asking ``transitions``."""

    def __init__(self, table: Table[Any, Any]) -> None:
        self._machine = Machine(
            model=None,
            states=type(table.start),
            initial=table.start,
            auto_transitions=False,
            send_event=False,
        )
        for row in table.rows:
            self._machine.add_transition(
                row.event.__name__, row.source, row.target, conditions=[row.guard] if row.guard else None
            )

    def decide(self, state: Enum, facts: object, event: object) -> Enum:
        """The state after ``event``.

        Raises:
            IllegalEvent: no transition is enabled.
            GuardFailed: a guard raised.
        """
        cell = _Cell(state)
        name = type(event).__name__
        try:
            taken = name in self._machine.events and self._machine.events[name].trigger(
                cell, facts, event, state
            )
        except MachineError:
            taken = False
        except Exception as error:
            raise GuardFailed(f"a guard of {name} in {state.name} raised {error!r}") from error
        if not taken:
            raise IllegalEvent(f"{name} is not legal in {state.name} ({describe(facts)})")
        return cell.state

    @property
    def machine(self) -> Machine:
        """The compiled machine, for comparing it with its table."""
        return self._machine


def compiled_transitions(decider: Decider) -> list[tuple[str, str, str | None, str | None]]:
    """(event, source, target, guard) of every transition the library holds; no target means that it stays."""
    return [
        (name, transition.source, transition.dest, _guard(transition))
        for name, event in decider.machine.events.items()
        for transitions in event.transitions.values()
        for transition in transitions
    ]


def _guard(transition: Transition) -> str | None:
    return next((getattr(condition.func, "__name__", "?") for condition in transition.conditions), None)

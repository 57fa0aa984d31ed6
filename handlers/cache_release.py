"""Cache release: what the trainer's allocator keeps and does not use goes back before the engines need it.

    CacheRelease()                                   # before engines are paused, and before they resume
    CacheRelease(before="none", after="sync", lacking=engine_lacks)

An executor. What is done is a list of named actions (``fsm/releases.py``), by default the lightest one. Each
has its line in the round's log, with seconds and with bytes before and after; one that takes longer than its
budget has a second line, which warns. If the other side reports that it lacks memory, the aggressive level
follows, once, and the log says so. If it lacks memory even then, something here still uses it: that is an
error, with the bytes, since nothing that could be done about it is the allocator's.

Memory is behind a small protocol. Actions for CUDA are torch's own, and **were not run on a GPU**; the host's
work everywhere with glibc, and a device of the tests counts and orders them.
"""

from __future__ import annotations

import inspect
import operator
import time
from collections.abc import Callable, Mapping

from ..fsm import checks
from ..fsm.errors import MemoryShort, SetupError
from ..fsm.executors import RoundView
from ..fsm.releases import ACTIONS, BUDGETS, Action, Boundary, Level
from .memories import Memory, usual_memory

__all__ = ["CacheRelease"]

_WHERE = "CacheRelease"


class CacheRelease:
    """An executor that hands back what the allocator keeps.

    Args:
        memory: whose; by default the GPU's if there is one, else the host's.
        before: how much is done before engines are paused: ``"none"``, ``"light"``, ``"sync"`` or
            ``"aggressive"``.
        after: how much before they resume.
        budgets: seconds by the names of actions, for those that differ from the default.
        lacking: asks the other side how many bytes it lacks after that; 0 if it has enough.

    Raises:
        SetupError: something of the wrong kind.
    """

    name = "cache_release"

    def __init__(
        self,
        memory: Memory | None = None,
        *,
        before: str = "light",
        after: str = "light",
        budgets: Mapping[str, float] | None = None,
        lacking: Callable[[], int] | None = None,
    ) -> None:
        self._levels = {
            Boundary.prepare: _level("before", before),
            Boundary.clean: _level("after", after),
        }
        if memory is not None and not checks.has(memory, ("held", *Action.__members__)):
            raise checks.refusal(_WHERE, "memory", memory, "a memory is needed, such as HostCache()")
        if lacking is not None and not callable(lacking):
            raise checks.refusal(
                _WHERE, "lacking", lacking, "a function that returns a number of bytes is needed"
            )
        if budgets is not None:
            checks.kind(_WHERE, "budgets", budgets, Mapping, "a mapping of seconds by action is needed")
        self._memory = memory if memory is not None else usual_memory()
        self._lacking = lacking
        self._budgets = dict(BUDGETS)
        for name, seconds in (budgets or {}).items():
            if name not in Action.__members__:
                known = ", ".join(Action.__members__)
                raise checks.refusal(_WHERE, "budgets", name, f"actions are called {known}")
            checks.seconds(_WHERE, f"budgets[{name!r}]", seconds)
            self._budgets[Action[name]] = seconds

    def actions(self, boundary: Boundary) -> tuple[Action, ...]:
        """What is done there if nobody lacks anything, in order."""
        return ACTIONS[self._levels[boundary]]

    def prepare(self, round: RoundView) -> None:
        """Before engines map their weights. Nothing is changed, so nothing has to be undone."""
        self._release(Boundary.prepare, round)

    def clean(self, round: RoundView) -> None:
        """Before they map what they generate with."""
        self._release(Boundary.clean, round)

    def _release(self, boundary: Boundary, view: RoundView) -> None:
        level = self._levels[boundary]
        self._do(level, boundary, view)
        if self._lacking is None or (short := _bytes(self._lacking())) <= 0:
            return
        if level is not Level.aggressive:
            told = {"boundary": str(boundary), "lacking": short, "level": level.name}
            view.note("escalated", trigger=Level.aggressive.name, executor=self.name, facts=told)
            self._do(Level.aggressive, boundary, view)
            short = _bytes(self._lacking())
        if short > 0:
            held = self._memory.held()
            raise MemoryShort(
                f"{boundary}: {short} bytes are lacking on the other side after everything was handed back, "
                f"and this process still uses {held.live} bytes of {self._memory.name} (of {held.reserved} "
                "reserved): offload them, or let go of them, before the round"
            )

    def _do(self, level: Level, boundary: Boundary, view: RoundView) -> None:
        for action in ACTIONS[level]:
            self._one(action, level, boundary, view)

    def _one(self, action: Action, level: Level, boundary: Boundary, view: RoundView) -> None:
        before, began = self._memory.held().reserved, time.monotonic()
        getattr(self._memory, action.name)()
        seconds, after = time.monotonic() - began, self._memory.held().reserved
        told = {"boundary": str(boundary), "level": level.name, "memory": self._memory.name}
        view.note(
            "action", trigger=action.name, executor=self.name, seconds=_short(seconds),
            freed=before - after, facts={**told, "bytes_before": before, "bytes_after": after},
        )  # fmt: skip
        budget = self._budgets[action]
        if seconds > budget:
            view.note(
                "over_budget", trigger=action.name, executor=self.name, seconds=_short(seconds),
                facts={**told, "budget": budget},
            )  # fmt: skip


def _short(seconds: float) -> float:
    return round(seconds, 6)


def _bytes(told: object) -> int:
    """What the other side lacks, in bytes; a number of numpy's or torch's is one as well."""
    try:
        return operator.index(told)  # type: ignore[arg-type]
    except TypeError:
        if inspect.iscoroutine(told):
            told.close()
        needed = "a function that returns a whole number of bytes is needed, 0 if none are lacking"
        raise SetupError(f"{_WHERE}(lacking=...) said {checks.shown(told)}: {needed}") from None


def _level(name: str, value: object) -> Level:
    if not isinstance(value, str) or value not in Level.__members__:
        needed = f"choose from {', '.join(map(repr, Level.__members__))}"
        raise checks.refusal(_WHERE, name, value, needed)
    return Level[value]

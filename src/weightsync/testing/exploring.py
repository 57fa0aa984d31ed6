"""Every misfortune at every step of the composed system, and what it breaks.

    explore_composed(Setup(...)) -> Explored            every single one
    explore_composed(Setup(...), depth=2) -> Explored   every pair

A moment is reached by a list of choices: so many steps of the canonical schedule, a deviation, so many steps,
the next deviation. It is reached again by doing the same once more from the beginning: a round on a
hand-turned clock takes milliseconds, and the driver is the real one, which cannot be copied. After the last
deviation the run follows the canonical schedule to its end, without a limit; it is cut where it comes to a
moment from which as much was explored already.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from .composed import LONGEST, Composed, Setup
from .deviations import Deviation, possible
from .snapshot import key
from .watch import Watch

__all__ = ["Broken", "Choice", "Explored", "Part", "explore_composed", "rerun"]

Choice = tuple[int, Deviation]
"""After how many steps of the system, and what goes wrong then."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A broken promise: what is wrong, and the choices that lead to it."""

    promise: str
    what: str
    choices: tuple[Choice, ...]
    steps: int

    def lines(self) -> list[str]:
        """It, ready to be printed."""
        found = [f"{self.what}, in step {self.steps}"]
        return [*found, *(f"  after step {step}: {deviation}" for step, deviation in self.choices)]


@dataclass(slots=True)
class Explored:
    """What an exploration found."""

    setup: Setup
    states: int = 0
    transitions: int = 0
    runs: int = 0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    violations: dict[str, Broken] = field(default_factory=dict)

    def blame(self, broken: Broken) -> None:
        """Count it; the one with the fewest misfortunes and steps is kept."""
        self.hits[broken.promise] += 1
        kept = self.violations.get(broken.promise)
        if kept is None or (len(broken.choices), broken.steps) < (len(kept.choices), kept.steps):
            self.violations[broken.promise] = broken

    def lines(self) -> list[str]:
        """The counts, and every broken promise with how often it was hit and its shortest trace."""
        counts = f"{self.states} states, {self.transitions} transitions, {self.runs} misfortunes"
        found = [f"{counts}, {len(self.violations)} promises broken"]
        for promise, broken in self.violations.items():
            first, *steps = broken.lines()
            found += [f"{self.hits[promise]} x {first}", *steps]
        return found


Part = tuple[int, int]
"""Which of how many equal parts of the first misfortunes."""


class _Explorer:
    def __init__(self, setup: Setup, until: Collection[str], kinds: Collection[str], part: Part) -> None:
        self.found = Explored(setup)
        self._until, self._kinds, self._part = frozenset(until), frozenset(kinds), part
        self._seen: dict[int, int] = {}
        self._last: set[int] = set()
        self._round_in_circles = False

    def explore(self, depth: int) -> Explored:
        """Every list of up to so many misfortunes."""
        begun = time.process_time()
        first = self._follow((), depth)
        which, parts = self._part
        first = first[len(first) * which // parts : len(first) * (which + 1) // parts]
        for one in first:
            waiting = [one]
            while waiting and self._going():
                choices = waiting.pop()
                more = self._follow(choices, depth - len(choices))
                waiting += reversed(more)
            if depth > 1:
                self._last.clear()  # what follows from another misfortune hardly ever comes to the same
        self.found.seconds = time.process_time() - begun
        return self.found

    def _going(self) -> bool:
        return self.found.violations.keys().isdisjoint(self._until)

    def _follow(self, choices: tuple[Choice, ...], left: int) -> list[tuple[Choice, ...]]:
        """Bend, run to the end or to a known moment, and say what else could go wrong on the way."""
        system, watch = Composed(self.found.setup), None
        more: list[tuple[Choice, ...]] = []
        for step, deviation in choices[:-1]:
            _advance(system, step)
            deviation.bend(system)
        if choices:
            _advance(system, choices[-1][0])
        watch = Watch(system)
        self._look(system, watch, choices)
        if choices:
            self.found.kinds[choices[-1][1].kind] += 1
            self.found.runs += 1
            self._take(system, watch, choices, lambda: choices[-1][1].bend(system), choices[-1][1])
        here: set[int] = set()
        while self._new(system, left, here) and self._going():
            if left:
                more += [(*choices, (system.steps, each)) for each in possible(system) if self._wanted(each)]
            if not self._take(system, watch, choices, system.step):
                for what in watch.end():
                    self._blame(what, choices, system)
                break
        if self._round_in_circles:
            self._blame("deadlock: it goes round in circles", choices, system)
            return []
        return more

    def _wanted(self, deviation: Deviation) -> bool:
        return not self._kinds or deviation.kind in self._kinds

    def _new(self, system: Composed, left: int, here: set[int]) -> bool:
        """Whether less was explored from this moment so far than is about to be.

        ``here`` are the moments of this run: one that comes again would come again for ever. Where only the
        clock creeps on, none does; such a run is known by its length.
        """
        moment = key(system)
        self._round_in_circles = moment in here or system.steps > LONGEST
        here.add(moment)
        if self._round_in_circles or self._seen.get(moment, -1) >= left or moment in self._last:
            return False
        self.found.states += moment not in self._seen
        if left:
            self._seen[moment] = left
        else:
            self._last.add(moment)
        return True

    def _take(
        self,
        system: Composed,
        watch: Watch,
        choices: tuple[Choice, ...],
        move: Callable[[], bool | None],
        deviation: Deviation | None = None,
    ) -> bool:
        watch.before(deviation)
        self.found.transitions += 1
        moved = move() is not False
        self._look(system, watch, choices)
        return moved

    def _look(self, system: Composed, watch: Watch, choices: tuple[Choice, ...]) -> None:
        for what in watch.look():
            self._blame(what, choices, system)

    def _blame(self, what: str, choices: tuple[Choice, ...], system: Composed) -> None:
        promise = what.partition(":")[0]
        self.found.blame(Broken(promise, what, choices, system.steps))


def _advance(system: Composed, step: int) -> None:
    while system.steps < step:
        system.step()


def explore_composed(
    setup: Setup,
    *,
    depth: int = 1,
    until: Collection[str] = (),
    kinds: Collection[str] = (),
    part: Part = (0, 1),
) -> Explored:
    """Explore one composed system.

    Args:
        setup: what it consists of.
        depth: how many misfortunes befall one run at most.
        until: stop as soon as one of these promises is broken.
        kinds: which kinds of misfortunes; by default all.
        part: only this one of so many parts, to be explored side by side.
    """
    return _Explorer(setup, until, kinds, part).explore(depth)


def rerun(setup: Setup, broken: Broken) -> Composed:
    """The system at the moment at which a promise was broken."""
    system = Composed(setup)
    for step, deviation in broken.choices:
        _advance(system, step)
        deviation.bend(system)
    while system.steps < broken.steps and system.step():
        pass
    return system

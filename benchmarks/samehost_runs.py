"""Runs the contestants of one cell of the table, a layout and a number of engines, side by side.

All of them are started and warmed up first. Then they take turns, in an order that moves on by one each
time, and right before each turn the unit is measured: whatever the machine does meanwhile, slower clocks or
other people's work, meets both. Where the memory is not enough for all of them at once, they take turns in
groups.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from .samehost_field import Contestant, waves
from .samehost_layouts import Layout, tensors
from .samehost_meter import Cost, Unit
from .samehost_side import Absent, Spec

__all__ = ["Cell", "Course", "Run", "Sample", "run_cell"]

_ROOT = Path(__file__).resolve().parent.parent
_VERL = Path(__file__).resolve().parent / ".verl-venv"
_LIMIT = 300.0
"""Seconds for one answer of a contestant; then its processes are ended."""

_FRACTION = 0.6
"""Of the memory that is free, how much the contestants may take together."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn: what the unit took, and right after it the round."""

    unit: Cost
    round: Cost


@dataclass(frozen=True, slots=True)
class Run:
    """What one contestant did in one cell. Bytes are beyond those of the bare interpreters."""

    name: str
    samples: Sequence[Sample]
    memory: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Cell:
    """One layout, with so many engines."""

    layout: Layout
    engines: int
    runs: Sequence[Run]


@dataclass(slots=True)
class Course:
    """What holds for every cell, and what was learned in those before.

    Args:
        contestants: who takes part.
        rounds: how many turns count.
        warm_up: how many turns before them do not.
        tell: where lines for whoever waits go.
        absent: who cannot take part here, and why.
        failed: who failed where, and how.
        small: who was left out where, because the memory is too small.
    """

    contestants: Sequence[Contestant]
    rounds: int
    warm_up: int
    tell: Callable[[str], None]
    absent: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    small: list[str] = field(default_factory=list)


class Stopped(Exception):
    """A contestant cannot go on."""

    def __init__(self, why: str, *, absent: bool = False) -> None:
        super().__init__(why)
        self.absent = absent


class Entrant:
    """A contestant's trainer, in a process of its own."""

    def __init__(self, contestant: Contestant, layout: str, engines: int) -> None:
        self.name = contestant.name
        fields = {name: value for name, value in asdict(contestant).items() if name not in ("models", "each")}
        spec = Spec(**fields, layout=layout, engines=engines)
        _check_present(spec)
        self._process = subprocess.Popen(
            [
                str(_VERL / "bin" / "python") if contestant.side == "verl" else sys.executable,
                "-m", "benchmarks.samehost_trainer", json.dumps(asdict(spec)),
            ],
            cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ready(self) -> None:
        """Wait until its engines are there."""
        self._answer()

    def turn(self, step: int) -> Cost:
        """One round."""
        told = self.ask("round", step)
        if not told["good"]:
            raise Stopped("an engine does not have the bytes that were handed over")
        return Cost(told["cpu"], told["wall"])

    def memory(self) -> dict[str, int]:
        """What its processes have, see ``Trainer.memory``."""
        return self.ask("memory")

    def ask(self, *order: object) -> dict[str, Any]:
        """Tell it something."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise Stopped(f"its process has ended: {error}") from error
        return self._answer()

    def end(self) -> None:
        """End its processes."""
        try:
            self.ask("close")
            self._process.wait(_LIMIT)
        except (Stopped, subprocess.TimeoutExpired):
            self._process.kill()
        finally:
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with suppress(OSError):  # what it was told last, and did not live to hear
                        stream.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = threading.Timer(_LIMIT, self._process.kill)
        late.start()
        line = self._process.stdout.readline()
        late.cancel()
        if not line:
            raise Stopped(f"its process has ended, or was silent for {_LIMIT:g} s")
        told: dict[str, Any] = json.loads(line)
        if "absent" in told or "failed" in told:
            raise Stopped(told.get("absent") or told["failed"], absent="absent" in told)
        return told


def run_cell(course: Course, layout: Layout, engines: int) -> Cell:
    """Measure everybody who can take part."""
    here = [each for each in course.contestants if each.name not in course.absent]
    unit = Unit(tensors(layout, seed=0))
    budget = _FRACTION * _available()
    groups, left = waves({each: each.need(layout.nbytes, engines) for each in here}, budget)
    for each in left:
        course.small.append(
            f"{layout.name}, N = {engines}, {each.name}: more memory than {budget / (1 << 30):.1f} GiB"
        )
        course.tell(f"left out: {course.small[-1]}")
    runs: list[Run] = []
    for group in groups:
        runs += _Group(course, unit, f"{layout.name}, N = {engines}").run(group, layout.name, engines)
    return Cell(layout, engines, runs)


def _check_present(spec: Spec) -> None:
    """Raise Stopped for what can be known to be absent before a process is started for it."""
    if spec.side == "verl" and not (_VERL / ".installed").exists():
        raise Stopped("verl's environment is not there: `make bench-samehost` makes it", absent=True)
    if spec.side == "ours":
        from .samehost_ours import policy_of

        try:
            policy_of(spec)
        except Absent as absent:
            raise Stopped(str(absent), absent=True) from absent


class _Group:
    """Contestants that are there at the same time. Whoever stops is out of the cell; the others go on."""

    def __init__(self, course: Course, unit: Unit, where: str) -> None:
        self._course, self._unit, self._where = course, unit, where
        self._entrants: dict[str, Entrant] = {}
        self._samples: dict[str, list[Sample]] = {}

    def run(self, group: Sequence[Contestant], layout: str, engines: int) -> list[Run]:
        """Start them, let them take turns, and end them."""
        try:
            for contestant in group:
                with self._guarded(contestant.name):
                    self._entrants[contestant.name] = Entrant(contestant, layout, engines)
            self._each(lambda entrant: entrant.ready())
            self._samples = {name: [] for name in self._entrants}
            for step in range(self._course.warm_up + self._course.rounds):
                self._each(partial(self._turn, step), first=step)
            found: list[Run] = []
            self._each(lambda each: found.append(Run(each.name, self._samples[each.name], each.memory())))
            return found
        finally:
            for entrant in self._entrants.values():
                entrant.end()

    def _turn(self, step: int, entrant: Entrant) -> None:
        before = self._unit.copy()
        sample = Sample(before, entrant.turn(step))
        if step >= self._course.warm_up:
            self._samples[entrant.name].append(sample)
        elif step == self._course.warm_up - 1:
            entrant.ask("forget")

    def _each(self, work: Callable[[Entrant], None], first: int = 0) -> None:
        entrants = list(self._entrants.values())
        begin = first % max(1, len(entrants))
        for entrant in entrants[begin:] + entrants[:begin]:
            with self._guarded(entrant.name):
                work(entrant)

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        course = self._course
        try:
            yield
        except Stopped as stopped:
            entrant = self._entrants.pop(name, None)
            if entrant is not None:
                entrant.end()
            if stopped.absent:
                course.absent[name] = str(stopped)
                course.tell(f"skipped: {name}: {stopped}")
            else:
                course.failed.append(f"{self._where}, {name}: {stopped}")
                course.tell(f"FAILED: {course.failed[-1]}")


def _available() -> int:
    """Bytes of memory that may be taken."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

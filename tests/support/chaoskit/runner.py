"""A run: many rounds of one trainer over real engines, each with faults that are drawn from a seed.

After each round with faults, everything that holds after any round is looked at (``casekit.bench``), by the
trainer itself, or by the next one if it was killed, and its error is compared with the faults (``causes``);
then comes a good round, after which no process may have grown (``growth``). At the end, no two owners of the
lock may ever have held it at once.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from casekit.keeper import taken_by
from casekit.levels import eventually
from casekit.rayside import InActor
from weightsync import RayLock

from .faults import KINDS, Fault, draw
from .growth import Growth
from .trainer import LEASE, SHORT, trainer
from .witness import Witness, grants, paths

__all__ = ["ENGINES", "ChaosFound", "Report", "run"]

ENGINES = 3
"""Two that stage, and one that loads in place."""

_PATIENCE = 60.0
_SLACK = 1.5
_DEATH = (ray.exceptions.RayActorError,)


class ChaosFound(AssertionError):
    """Something that must hold does not. Says how to run the same again."""


@dataclass
class Report:
    """What a run has come to."""

    seed: int
    rounds: int = 0
    failed: int = 0
    fired: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    growth: Growth = field(default_factory=Growth)

    def lines(self) -> list[str]:
        """For people."""
        table = [f"  {kind:<14} {self.fired[kind]}" for kind in KINDS]
        told = f"{self.rounds} rounds with faults in {self.seconds:.0f} s, {self.failed} failed"
        head = f"seed {self.seed}: {told}, and each was followed by a good one"
        return [head, *table, "what each process holds more in the end:", *self.growth.lines()]


def run(
    seed: int,
    rounds: int,
    *,
    seconds: float | None = None,
    say: Callable[[str], None],
    folder: Path | None = None,
) -> Report:
    """Run it on the Ray cluster that is there.

    Args:
        seed: of everything that is drawn.
        rounds: with faults.
        seconds: after which no further round is begun.
        say: takes a line about each round.
        folder: for logs; a new one by default, which stays when something is found.

    Raises:
        ChaosFound: something does not hold.
    """
    place = _Run(seed, folder or Path(tempfile.mkdtemp(prefix="weightsync-chaos-")), say)
    report, began, last = Report(seed), time.monotonic(), "the start"
    try:
        place.start(report)
        for number, faults in enumerate(draw(seed, rounds, ENGINES), start=1):
            last = f"round {number} ({', '.join(map(str, faults))})"
            place.round(number, faults, report)
            report.seconds = time.monotonic() - began
            if seconds is not None and report.seconds > seconds:
                break
        last = "the end"
        place.end()
    except Exception as error:
        raise ChaosFound(
            f"seed {seed}, {last}: {_reason(error)}\nlogs: {place.folder}\n"
            f"again: make chaos ARGS='--seed {seed} --rounds {rounds}'"
        ) from error
    finally:
        place.kill()
    return report


class _Run:
    def __init__(self, seed: int, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self._say = folder, say
        self._lock = (f"chaos-{seed}-{uuid.uuid4().hex[:6]}", LEASE, folder / "grants")
        self._engines = [InActor(f"c{each}", seed=each + 1, stages=each < 2) for each in range(ENGINES)]
        self._spare = trainer()
        self._trainer: Any = None
        self._log = folder
        self._number = self._trainers = 0

    def start(self, report: Report) -> None:
        """The first trainer, and a first good round."""
        self._next_trainer()
        self._good(report)

    def round(self, number: int, faults: list[Fault], report: Report) -> None:
        """One round with faults, and a good one."""
        began = time.monotonic()
        self._number += 1
        try:
            told, fired = self._ask(self._trainer.bad.remote(self._number, faults))
        except _DEATH:
            deaths = [fault for fault in faults if fault.kind == "trainer-kill"]
            if not deaths:
                raise
            told, fired = self._mourn(faults), deaths
        report.rounds += 1
        report.failed += "worked" not in told
        report.fired.update(fault.kind for fault in fired)
        self._good(report)
        what = ", ".join(map(str, faults))
        self._say(f"{number:>4} {time.monotonic() - began:>5.1f} s  {what}: {told}")

    def end(self) -> None:
        """Whether anything is left, and whether the lock ever had two owners."""
        self._ask(self._trainer.end.remote())
        grants(self.folder / "grants")

    def kill(self) -> None:
        """Give the processes back."""
        for actor in [self._trainer, self._spare, *(engine.actor for engine in self._engines)]:
            if actor is not None:
                ray.kill(actor)
        RayLock(self._lock[0], LEASE).retire(force=True)

    # -- inside ----------------------------------------------------------------------------------------

    def _good(self, report: Report) -> None:
        self._number += 1
        held = self._ask(self._trainer.good.remote(self._number))
        report.growth.note(held, self._trainers)

    def _next_trainer(self) -> None:
        self._trainers += 1
        self._trainer, self._spare = self._spare, trainer()
        self._log = self.folder / f"trainer-{self._trainers}.jsonl"
        self._ask(self._trainer.become.remote(self._engines, self._lock, self.folder, self._log))

    def _mourn(self, faults: list[Fault]) -> str:
        """The trainer was killed: the lock is free within a lease, and the engines leave the pause."""
        died = time.monotonic()
        keeper = any(fault.kind.startswith("keeper") for fault in faults)
        limit = LEASE + _SLACK + (4 * LEASE if keeper else 0.0)
        assert taken_by(Witness(*self._lock), limit), f"a dead trainer kept the lock for {limit:.1f} s"
        freed = time.monotonic() - died

        def left() -> bool:
            return not any(engine.look().in_session for engine in self._engines)

        assert eventually(left, SHORT.deadline + _SLACK), "an engine stays in the session of a dead trainer"
        path = paths(self._log)[-1]  # replayed: a step that the table does not have would have been refused
        self._next_trainer()
        return f"{'>'.join(name[:2] for name in path)} died, lock free after {freed:.1f} s"

    def _ask(self, reference: Any) -> Any:
        return ray.get(reference, timeout=_PATIENCE)


def _reason(error: BaseException) -> str:
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    return f"{type(cause).__name__}: {cause}"

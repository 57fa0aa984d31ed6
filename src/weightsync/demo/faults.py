"""What can be made to go wrong in a demo, written as ``KIND@STEP``, and how an engine is made to do it.

    engine-kill@5   SIGKILL of an engine's process while it applies a bucket of step 5's round
    bucket-fail@5   an engine raises while it applies a bucket
    hang@5          an engine hangs while it applies a bucket, for longer than the trainer waits
    rank-fail@5     a rank of the trainer raises while it prepares its part; with --trainer fsdp1 or fsdp2
    rank-kill@5     SIGKILL of a rank of the trainer there; the run ends, since a part of the weights is gone
    no-sync         rounds are withheld after the first one: the engines never learn
    random:7        faults of the first three kinds on any engine, all over the run, drawn from the seed 7

A drawn fault waits until every engine holds whole weights, so that there is always one to sample with, and
none comes so late that it could not be made up for.

In threads there is no process to kill: there ``engine-kill`` makes an engine raise as if it were gone.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..fsm.errors import SetupError

__all__ = ["Arming", "Inject", "Kind", "RankKind", "Schedule", "parse", "withheld"]

Kind = Literal["engine-kill", "bucket-fail", "hang"]
KINDS: tuple[Kind, ...] = ("engine-kill", "bucket-fail", "hang")
RankKind = Literal["rank-fail", "rank-kill"]
RANK_KINDS: tuple[RankKind, ...] = ("rank-fail", "rank-kill")
"""What befalls a rank of the trainer, and no engine."""
NO_SYNC = "no-sync"
_WRITTEN = re.compile(r"(?P<kind>[a-z-]+)@(?P<step>\d+)")
_RANDOM = re.compile(r"random:(?P<seed>\d+)")
_APART = 4
"""Steps from one drawn fault to the next: an engine that was killed needs some to come back."""


@dataclass(frozen=True, slots=True)
class Inject:
    """One fault, in the round of one step, on one engine: the last one, unless it was drawn.

    Args:
        drawn: whether it waits until all engines are whole, and may come some steps later therefore.
    """

    kind: Kind | RankKind
    step: int
    engine: int = -1
    drawn: bool = False

    def __str__(self) -> str:
        where = f" on engine-{self.engine}" if self.engine >= 0 else ""
        return f"{self.kind}@{self.step}{where}"


def parse(written: Sequence[str], steps: int, engines: int = 2, *, ranks: int = 2) -> tuple[Inject, ...]:
    """The faults that were asked for; ``no-sync`` is not among them, see :func:`withheld`.

    Args:
        written: what was asked for.
        steps: of the run.
        engines: how many there are.
        ranks: of the trainer.

    Raises:
        SetupError: something that is no fault, or that the run is too small for.
    """
    found: list[Inject] = []
    for text in written:
        if text == NO_SYNC:
            continue
        if drawn := _RANDOM.fullmatch(text):
            found += _draw(text, int(drawn["seed"]), steps, engines)
            continue
        match = _WRITTEN.fullmatch(text)
        kind = next((kind for kind in (*KINDS, *RANK_KINDS) if match and match["kind"] == kind), None)
        if match is None or kind is None:
            known = ", ".join(f"{kind}@STEP" for kind in (*KINDS, *RANK_KINDS))
            raise SetupError(f"--inject {text}: there are {known}, random:SEED and {NO_SYNC}")
        step = int(match["step"])
        if not 1 <= step <= steps:
            raise SetupError(f"--inject {text}: the run has the steps 1 to {steps}")
        if kind in RANK_KINDS and ranks < 2:
            raise SetupError(f"--inject {text}: the trainer has one rank; add --trainer fsdp2 or fsdp1")
        found.append(Inject(kind, step))
    return tuple(found)


def _draw(text: str, seed: int, steps: int, engines: int) -> list[Inject]:
    """Each kind at least once, in the first three quarters of the run."""
    first, last = 2, steps * 3 // 4
    count = (last - first) // _APART
    if count < len(KINDS):
        least = 4 * (len(KINDS) * _APART + first) // 3 + 1
        raise SetupError(f"--inject {text}: {steps} steps are too few to recover in; at least {least}")
    if engines < 2:
        raise SetupError(f"--inject {text}: with one engine nobody samples while it recovers; --engines 2")
    chance = random.Random(seed)
    count = min(count, max(len(KINDS), steps // 10))
    kinds = [*KINDS, *(chance.choice(KINDS) for _ in range(count - len(KINDS)))]
    chance.shuffle(kinds)
    places = sorted(chance.sample(range((last - first) // _APART), count))
    return [
        Inject(kind, first + place * _APART, chance.randrange(engines), drawn=True)
        for kind, place in zip(kinds, places, strict=True)
    ]


class Schedule:
    """The faults of a run, each of which comes once."""

    def __init__(self, faults: Sequence[Inject], steps: int) -> None:
        self._open, self._last = list(faults), steps - steps // 10 - 2

    def due(self, step: int, *, whole: bool) -> list[Inject]:
        """What is to go off in the round of this step. ``whole``: every engine holds whole weights."""
        found = [fault for fault in self._open if not fault.drawn and fault.step == step]
        drawn = [fault for fault in self._open if fault.drawn and fault.step <= step <= self._last]
        found += drawn[:1] if whole else []  # one at a time
        self._open = [fault for fault in self._open if fault not in found]
        return found

    def missed(self) -> list[Inject]:
        """What did not come, because the engines did not recover in time."""
        return list(self._open)


def withheld(written: Sequence[str]) -> bool:
    """Whether rounds are to be withheld after the first one."""
    return NO_SYNC in written


class Arming:
    """The fault hook of an engine's receiver: armed once, it goes off at the next bucket that is applied.

    Args:
        hang: seconds that a hang lasts.
        own_process: whether the engine has a process of its own that may be killed.
    """

    def __init__(self, hang: float, *, own_process: bool) -> None:
        self._hang = hang
        self._own_process = own_process
        self._kind: Kind | None = None

    def arm(self, kind: Kind) -> None:
        """Go off at the next bucket."""
        self._kind = kind

    def __call__(self, point: str, bucket: int) -> None:
        """Called by the receiver at each of its points."""
        if point != "apply" or self._kind is None:
            return
        kind, self._kind = self._kind, None
        actions: dict[Kind, Callable[[int], None]] = {
            "engine-kill": self._kill,
            "bucket-fail": _fail,
            "hang": self._wait,
        }
        actions[kind](bucket)

    def _kill(self, bucket: int) -> None:
        if not self._own_process:
            raise ConnectionResetError(f"injected: the engine is gone at bucket {bucket}")
        os.kill(os.getpid(), signal.SIGKILL)

    def _wait(self, bucket: int) -> None:
        threading.Event().wait(self._hang)
        raise TimeoutError(f"injected: bucket {bucket} hung for {self._hang:g} s")


def _fail(bucket: int) -> None:
    raise RuntimeError(f"injected: bucket {bucket} could not be applied")

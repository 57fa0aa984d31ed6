"""What goes wrong in a run, drawn from a seed: who is hit in which round, at which point of it, and how."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["IN_BUCKETS", "KINDS", "LEAST", "Fault", "draw"]

KINDS = (
    "engine-kill",  # SIGKILL of an engine's process; Ray starts another one
    "engine-stop",  # SIGSTOP, for longer than the trainer waits
    "engine-slow",  # it takes its time, but less than the trainer waits
    "engine-raise",
    "trainer-kill",
    "trainer-stop",  # for a moment, or for longer than its lease
    "trainer-raise",
    "cancel",
    "line-cut",  # the socket to an engine, or to the keeper of the lock, breaks
    "keeper-kill",
    "keeper-stop",
)
CHEAP = ("engine-slow", "engine-raise", "trainer-raise", "cancel", "line-cut")
"""Those that take no time of their own."""

LEAST = 2
"""How often each kind has to happen."""

_ENGINE = ("open", "opened", "receive", "frame", "apply", "applied", "release", "acked", "commit", "copied",
           "committed", "resume", "resumed")  # fmt: skip
IN_BUCKETS = ("frame", "apply", "applied")
"""Points of an engine that it comes to once for each bucket."""

_TRAINER = ("prepare", "open", "broadcast", "bucket_sent", "collect", "transport clean", "clean")
_BUCKETS = 3


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        kind: one of ``KINDS``.
        point: of an engine (``FAULT_POINTS``), or of the trainer's parts.
        engine: which engine is hit; of a line, -1 is the keeper's.
        bucket: at which bucket, where the point has one.
        seconds: for which it is slow, or stopped.
    """

    kind: str
    point: str
    engine: int = -1
    bucket: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        who = f" of engine {self.engine}" if self.engine >= 0 else ""
        how_long = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind}{who}{how_long} at {self.point} {self.bucket}"


def draw(seed: int, rounds: int, engines: int) -> list[list[Fault]]:
    """The faults of each round. Each kind comes at least ``LEAST`` times by itself, if the rounds suffice."""
    chance = random.Random(seed)
    alone = [[_fault(chance, kind, engines)] for kind in KINDS * LEAST]
    more = []
    for number in range(max(0, rounds - len(alone))):
        # A short run spends its free rounds on what takes no time; a long one, on everything.
        kinds = CHEAP if number < 10 else KINDS
        more.append([_fault(chance, chance.choice(kinds), engines) for _ in range(chance.choice((1, 1, 2)))])
    plan = [*alone, *more]
    first = plan[:rounds]
    chance.shuffle(first)
    return first


def _fault(chance: random.Random, kind: str, engines: int) -> Fault:
    bucket = chance.randrange(_BUCKETS)
    if kind.startswith("engine"):
        seconds = {"engine-stop": 3.0, "engine-slow": chance.uniform(0.1, 0.6)}.get(kind, 0.0)
        point = chance.choice(_ENGINE)
        return Fault(kind, point, chance.randrange(engines), bucket * (point in IN_BUCKETS), seconds)
    seconds = chance.choice((0.4, 3.0)) if kind.endswith("-stop") else 0.0
    point = chance.choice(_TRAINER)
    engine = chance.randrange(-1, engines) if kind == "line-cut" else -1
    return Fault(kind, point, engine, bucket * (point == "bucket_sent"), seconds)

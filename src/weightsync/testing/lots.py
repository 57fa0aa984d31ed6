"""Schedules and misfortunes drawn by lot, for the same driver in the same composed system.

    played(seed) -> Lot

A seed draws the system, how long every message takes, what goes wrong and when, several things at once if it
comes to that. The same seed gives the same log, to the last byte, in every process.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from ..fsm.record import Record
from .composed import LONGEST, Composed, Setup
from .deviations import possible
from .promises import broken_at_end
from .watch import Watch

__all__ = ["Lot", "log_lines", "played"]


@dataclass(frozen=True, slots=True)
class Lot:
    """What became of one seed."""

    seed: int
    setup: Setup
    steps: int
    story: tuple[str, ...]
    broken: tuple[str, ...]
    log: tuple[str, ...]


def played(seed: int) -> Lot:
    """Play the game of this seed to its end."""
    chance = random.Random(seed)  # noqa: S311 - keeps no secret
    inplace = chance.choice(((), ("e0",), ("e1",), ("e0", "e1")))
    setup = Setup(
        f"seed {seed}",
        chance.choice((1, 2)),
        inplace,
        chance.random() < 0.5,
        buckets=chance.choice((1, 2, 3)),
    )
    system = Composed(setup, seed=seed, jitter=chance.choice((0.0, 0.0, 0.3, 1.5)))
    system.unsure()  # a message to the lock may take as long as any other
    watch, broken = Watch(system), list[str]()
    often = chance.choice((0.01, 0.03, 0.1))
    left = chance.choice((0, 1, 1, 2, 2, 3, 4))
    while system.steps < LONGEST:
        if left and chance.random() < often:
            left -= 1
            for deviation in chance.choices(possible(system)) if possible(system) else ():
                watch.before(deviation)
                deviation.bend(system)
                broken += watch.look()
        watch.before()
        if not system.step():
            break
        broken += watch.look()
    else:
        broken.append("deadlock: it goes on for ever")
    broken += _replayed(system)
    broken += watch.end()
    story = tuple(f"in step {step}: {what}" for step, what in system.story)
    return Lot(seed, setup, system.steps, story, tuple(broken), tuple(log_lines(system)))


def _replayed(system: Composed) -> Iterator[str]:
    for owner in system.owners:
        if owner.result is not None:
            for what in broken_at_end(owner.simulation, owner.result, slack=1000.0):
                if "replay" in what or "told exactly once" in what:
                    yield f"honest: {owner.name}: {what}"


def log_lines(system: Composed) -> Iterator[str]:
    """The state log of the system: what every trainer's round has recorded, as one file of lines."""
    records: list[Record] = []
    for owner in system.owners:
        records += owner.simulation.round.records()
    for record in sorted(records, key=lambda record: record.time):
        yield json.dumps(record.to_json())

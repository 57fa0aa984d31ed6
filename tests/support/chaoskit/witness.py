"""Who believed to hold a lock, and for how long: written down by the holders themselves, in one file.

A process that is killed or frozen cannot be asked later. So each holder writes a line as soon as it is
granted the lock, whenever its lease is renewed, and before it gives the lock back. All processes of a host
have one monotonic clock, which makes the lines comparable.
"""

from __future__ import annotations

import itertools
import json
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from weightsync.fsm.journal import replay
from weightsync.fsm.lock import Closed, Granted, Renewed, Ticket, Waiting
from weightsync.fsm.states import State
from weightsync.handlers.ray_lock import RayLock

__all__ = ["Grant", "Witness", "grants", "paths"]

Told = TypeVar("Told")

SLACK = 0.002
"""Seconds by which two floats of the same moment may differ."""


class Witness(RayLock):
    """A ``RayLock`` whose grants are written down in ``file``, as its holder counts them."""

    def __init__(self, name: str, lease: float, file: Path, path: Path | None = None) -> None:
        super().__init__(name, lease, path)
        self.file = file

    def enter(self, ticket: Ticket, limit: float) -> Granted | Waiting:
        """Join the queue, and wait."""
        asked = time.monotonic()
        return self._noted(super().enter(ticket, limit), asked)

    def wait(self, ticket: Ticket, limit: float) -> Granted | Waiting:
        """Block until granted."""
        asked = time.monotonic()
        return self._noted(super().wait(ticket, limit), asked)

    def renew(self, ticket: Ticket, epoch: int) -> Renewed:
        """Count the lease anew."""
        asked = time.monotonic()
        return self._noted(super().renew(ticket, epoch), asked)

    def release(self, ticket: Ticket, epoch: int | None) -> Closed:
        """Give the lock back."""
        self._gives_back(ticket, epoch)
        return super().release(ticket, epoch)

    def begin(self, word: str, ticket: Ticket, *args: float) -> Future[Any] | None:
        """The same words, asked without waiting."""
        asked = time.monotonic()
        if word == "release":
            self._gives_back(ticket, int(args[0]))
        answer = super().begin(word, ticket, *args)
        if answer is not None:
            answer.add_done_callback(lambda told: told.exception() or self._noted(told.result(), asked))
        return answer

    def _noted(self, answer: Told, asked: float) -> Told:
        if isinstance(answer, Granted | Renewed):
            self._write(answer.epoch, answer.ticket, time.monotonic(), answer.end(asked))
        return answer

    def _gives_back(self, ticket: Ticket, epoch: int | None) -> None:
        if epoch is not None:
            self._write(epoch, ticket, time.monotonic(), None)

    def _write(self, epoch: int, ticket: Ticket, now: float, end: float | None) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps([epoch, ticket.id, ticket.owner, now, end]) + "\n")


@dataclass
class Grant:
    """One grant, as its holder saw it: from ``start``, and no longer than to ``end``, or ``given`` back."""

    epoch: int
    owner: str
    start: float
    end: float
    given: float | None = None


def grants(file: Path) -> list[Grant]:
    """All grants that their holders could make use of, in their order.

    No two holders may have held the lock at once, and each has a higher epoch than the one before. A holder
    that was frozen may hear of its grant when that is over, by its own clock; then it has held nothing.
    """
    found: dict[tuple[int, str], Grant] = {}
    for text in file.read_text(encoding="utf-8").splitlines():
        epoch, ticket, owner, now, end = json.loads(text)
        grant = found.get((epoch, ticket))
        if end is None:
            if grant is not None and grant.given is None:
                grant.given = now
        elif grant is None:
            found[epoch, ticket] = Grant(epoch, owner, now, end)
        else:
            grant.end = max(grant.end, end)
    assert len({grant.epoch for grant in found.values()}) == len(found), f"an epoch for two: {found}"
    ordered = sorted((each for each in found.values() if each.start < each.end), key=lambda each: each.start)
    for one, other in itertools.pairwise(ordered):
        until = one.end if one.given is None else min(one.end, one.given)
        assert until <= other.start + SLACK, f"two owners at once: {one} and {other}"
        assert one.epoch < other.epoch, f"an epoch that does not grow: {one} and {other}"
    return ordered


def paths(log: Path) -> list[list[str]]:
    """The path of each round in a state log, replayed; its writer may have been killed at any moment."""
    rounds: dict[str, list[dict[str, Any]]] = {}
    for text in log.read_text(encoding="utf-8").splitlines(keepends=True):
        if text.endswith("\n"):
            record = json.loads(text)
            rounds.setdefault(record["round"], []).append(record)
    found = []
    for records in rounds.values():
        steps = replay(records)
        moves = [step.after.state.name for step in steps if step.row.target is not None]
        found.append([State.Idle.name, *moves])
    return found

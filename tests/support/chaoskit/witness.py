"""Who believed to hold a lock, and for how long: written down by the holders themselves, in one file.

A process that is killed or frozen cannot be asked later. So each holder writes a line as soon as it is
granted the lock, whenever its lease is renewed, and before it gives the lock back. All processes of a host
have one monotonic clock, which makes the lines comparable.
"""

from __future__ import annotations

import itertools
import json
import os
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
        self._gives_back(epoch)
        return super().release(ticket, epoch)

    def begin(self, word: str, ticket: Ticket, *args: float) -> Future[Any] | None:
        """The same words, asked without waiting."""
        asked = time.monotonic()
        if word == "release":
            self._gives_back(int(args[0]))
        answer = super().begin(word, ticket, *args)
        if answer is not None:
            answer.add_done_callback(lambda told: told.exception() or self._noted(told.result(), asked))
        return answer

    def _noted(self, answer: Told, asked: float) -> Told:
        if isinstance(answer, Granted | Renewed):
            self._write(answer.epoch, answer.ticket.owner, time.monotonic(), answer.end(asked))
        return answer

    def _gives_back(self, epoch: int | None) -> None:
        if epoch is not None:
            self._write(epoch, "", time.monotonic(), None)

    def _write(self, *line: object) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps([os.getpid(), *line]) + "\n")


@dataclass
class Grant:
    """One grant, as its holder saw it: it held the lock from ``start``, and no longer than to ``end``."""

    epoch: int
    owner: str
    start: float
    end: float


def grants(file: Path) -> list[Grant]:
    """All grants in the order of their epochs. No two holders may have held the lock at once."""
    found: dict[int, Grant] = {}
    given: dict[int, float] = {}
    for text in file.read_text(encoding="utf-8").splitlines():
        _, epoch, owner, now, end = json.loads(text)
        if end is None:
            given.setdefault(epoch, now)
        elif epoch in found:
            found[epoch].end = max(found[epoch].end, end)
        else:
            found[epoch] = Grant(epoch, owner, now, end)
    for epoch, now in given.items():
        if epoch in found:
            found[epoch].end = min(found[epoch].end, now)
    ordered = [found[epoch] for epoch in sorted(found)]
    for one, other in itertools.pairwise(ordered):
        assert one.end <= other.start + SLACK, f"two owners at once: {one} and {other}"
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

"""Faults to bring back into the ring in device memory, in a test run of its own: ``pytest -p devicemutants``.

Which one is said by the environment variable ``DEVICE_MUTANT``. Each changes the product, never a check.
"""

from __future__ import annotations

import os
from typing import Any

from weightsync.transports.device_ring import DeviceRing
from weightsync.transports.device_segment import Claims, DeviceReach, DeviceSegment
from weightsync.transports.packing import pack_by
from weightsync.transports.shm_round import ShmRound

__all__ = ["MUTANTS"]

Changed: Any = setattr
"""A method is replaced by a function of another shape, which is the point."""


def shown_before_it_is_written() -> None:
    """The device is told what to do, and the engines are told that it is done."""

    def hasty(self: Any, plan: Any, bucket: Any, tensors: Any, *place: Any) -> None:
        segment, at = place
        pack_by(self._device.copy, plan, bucket, tensors, segment.part(at, bucket.nbytes))

    Changed(DeviceRing, "_write", hasty)


def let_go_of_before_it_is_read() -> None:
    """The engine's device is told what to do, and the trainer is told that it is done."""
    Changed(DeviceReach, "finish", lambda self: None)


def training_is_not_waited_for() -> None:
    """What it has queued may write the tensors while they are read."""
    Changed(DeviceRing, "_begin", lambda self: None)


def the_dead_keep_what_they_opened() -> None:
    """Nobody asks after them."""
    Changed(Claims, "withdraw_the_dead", lambda self: None)


def the_living_lose_what_they_opened() -> None:
    """The trainer is done with it, so it is free."""
    close = DeviceSegment.close

    def rude(self: DeviceSegment) -> None:
        for _, handle in self._claims._claims:
            self._memory.withdraw(handle)
        close(self)

    Changed(DeviceSegment, "close", rude)


def what_is_declined_stays_claimed() -> None:
    """An offer that is not needed is dropped."""
    Changed(DeviceReach, "decline", lambda self, offer: None)


def a_cut_reader_loses_its_slot() -> None:
    """Whoever is cut off is not taken for a reader."""
    reading = ShmRound._reading
    Changed(
        ShmRound, "_reading", lambda self, bucket, *, cut: set() if cut else reading(self, bucket, cut=cut)
    )


MUTANTS: dict[str, tuple[Any, str]] = {
    "shown_before_it_is_written": (shown_before_it_is_written, "TestOrder"),
    "let_go_of_before_it_is_read": (let_go_of_before_it_is_read, "TestOrder"),
    "training_is_not_waited_for": (training_is_not_waited_for, "TestOrder"),
    "the_dead_keep_what_they_opened": (the_dead_keep_what_they_opened, "TestClaims -k was_killed"),
    "the_living_lose_what_they_opened": (the_living_lose_what_they_opened, "TestClaims -k that_lives"),
    "what_is_declined_stays_claimed": (what_is_declined_stays_claimed, "TestClaims -k offered_twice"),
    "a_cut_reader_loses_its_slot": (a_cut_reader_loses_its_slot, "TestRounds -k keeps_its_slot"),
}
"""By name: the change, and which tests of ``test_device_ring`` must notice it."""

if "DEVICE_MUTANT" in os.environ:
    MUTANTS[os.environ["DEVICE_MUTANT"]][0]()

"""The transport that engine adapters are tested with: its ticket says what arrives, and what goes wrong.

Nothing is sent. The receiving half makes up the bytes of every bucket by itself, wherever the engine is, and
the check knows the same bytes; so an adapter is tested by itself, in its own process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from ...fsm.contract import Bucketful, Inlet, Ticket
from ...fsm.engine_table import Session
from ...fsm.plan import Plan
from ...transports.packing import pack

__all__ = ["GIVEN", "MODES", "GivenError", "given_inlet", "numbers", "ticket"]

GIVEN = "conformance"
"""The transport's name: give the engine ``extra_inlets={GIVEN: given_inlet}``."""

MODES = {
    "good": "every bucket",
    "hang": "nothing more from this bucket on, until the inlet is closed",
    "raise": "an error in place of this bucket",
    "short": "an end in place of this bucket",
    "twice": "this bucket once more",
    "late": "this bucket after the next one",
    "small": "this bucket with a byte too few",
    "leave": "every bucket, and an error when the buffer is let go of",
}
"""What a ticket can ask for."""


class GivenError(RuntimeError):
    """What the receiving half raises when it is asked to."""


def numbers(plan: Plan, fill: int) -> Mapping[str, torch.Tensor]:
    """The tensors of ``fill``, by the names of the plan: each of its own bytes, none of which makes a NaN."""
    return {
        spec.name: torch.full((spec.nbytes,), (fill + place) % 100, dtype=torch.uint8)
        .view(getattr(torch, spec.dtype))
        .view(spec.shape)
        for place, spec in enumerate(plan.tensors)
    }


def ticket(fill: int, mode: str = "good", bucket: int = 0) -> Ticket:
    """A ticket for these numbers; ``mode`` is one of ``MODES``, and ``bucket`` where it applies."""
    return Ticket(GIVEN, {"fill": fill, "mode": mode, "bucket": bucket, "rank": 0})


def given_inlet(ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> Inlet:
    """The receiving half."""
    values = ticket.values
    return _Given(plan, int(values["fill"]), str(values["mode"]), int(values["bucket"]))


class _Given:
    def __init__(self, plan: Plan, fill: int, mode: str, bucket: int) -> None:
        self._plan, self._mode, self._bucket = plan, mode, bucket
        self._tensors = numbers(plan, fill)
        self._closed = threading.Event()

    @contextmanager
    def buckets(self) -> Iterator[Iterator[Bucketful]]:
        """As the ticket says."""
        yield self._frames()
        if self._mode == "leave":
            raise GivenError("injected on leaving")

    def close(self) -> None:
        """Wake whoever waits."""
        self._closed.set()

    def _frames(self) -> Iterator[Bucketful]:
        order = list(range(len(self._plan.buckets)))
        if self._mode == "late":
            order[self._bucket : self._bucket + 2] = [self._bucket + 1, self._bucket]
        for index in order:
            if index == self._bucket and self._mode != "good":
                if self._mode == "hang":
                    self._closed.wait()
                    raise ConnectionError("the inlet was closed")
                if self._mode == "raise":
                    raise GivenError(f"injected at bucket {index}")
                if self._mode == "short":
                    return
                if self._mode == "twice":
                    yield self._frame(index)
            frame = self._frame(index)
            short = self._mode == "small" and index == self._bucket
            yield Bucketful(index, frame.data[:-1]) if short else frame

    def _frame(self, index: int) -> Bucketful:
        bucket = self._plan.buckets[index]
        octets = np.zeros(bucket.nbytes, dtype=np.uint8)
        pack(self._plan, bucket, self._tensors, octets)
        return Bucketful(index, octets)

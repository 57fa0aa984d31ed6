"""What the tests of the object store transport need in other processes, and what they read of the store."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch

from weightsync import RayReceiver
from weightsync.fsm.contract import Bucketful, Inlet, Ticket
from weightsync.fsm.engine_table import Session
from weightsync.fsm.plan import Plan
from weightsync.transports.objects import objects_inlet

from .levels import eventually

__all__ = ["JOIN", "OnALoop", "Scribbler", "joined_inlet", "settles_at", "store_bytes", "store_level"]

JOIN = "CASEKIT_RAY_ADDRESS"
"""Where a process that Ray did not start finds the cluster."""


def store_bytes() -> int:
    """How many bytes are in the object stores of the cluster, as Ray's own accounts say."""
    free: dict[str, Any] = ray.available_resources()
    return int(ray.cluster_resources()["object_store_memory"] - free.get("object_store_memory", 0))


def store_level(limit: float = 15.0) -> int:
    """What the stores hold when nothing changes any more: the same for half a second."""
    end, level, since = time.monotonic() + limit, store_bytes(), time.monotonic()

    def steady() -> bool:
        nonlocal level, since
        now = store_bytes()
        if now != level:
            level, since = now, time.monotonic()
        return time.monotonic() - since > 0.5

    assert eventually(steady, end - time.monotonic()), "the object store does not come to rest"
    return level


def settles_at(expected: int, limit: float = 15.0) -> bool:
    """Whether the stores come to hold so many bytes at most. Ray's accounts come late."""
    return eventually(lambda: store_bytes() <= expected, limit)


def joined_inlet(ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> Inlet:
    """The receiving half, for an engine in a process that joins the cluster when it first receives."""
    if not ray.is_initialized():
        ray.init(address=os.environ[JOIN], log_to_driver=False, logging_level=logging.ERROR)
    return objects_inlet(ticket, session, plan, limit)


class _Scribbling:
    """Hands on every bucket, after it has written into it by way of torch."""

    def __init__(self, inner: Inlet) -> None:
        self._inner = inner

    @contextmanager
    def buckets(self) -> Iterator[Iterator[Bucketful]]:
        """The buckets in order."""
        with self._inner.buckets() as frames:
            yield map(_scribbled, frames)

    def close(self) -> None:
        """Stop."""
        self._inner.close()


def _scribbled(frame: Bucketful) -> Bucketful:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(frame.data).fill_(0xEE)
    return frame


def _scribbling_inlet(ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> Inlet:
    return _Scribbling(objects_inlet(ticket, session, plan, limit))


class Scribbler(RayReceiver):
    """An engine that takes what it reads for its own."""

    def __init__(self, name: str, held: dict[str, torch.Tensor]) -> None:
        self.weightsync_serve(held, id=name, extra_inlets={"objects": _scribbling_inlet})


class OnALoop(RayReceiver):
    """An engine that generates on an event loop, where nothing may block."""

    def __init__(self, name: str, held: dict[str, torch.Tensor]) -> None:
        self.held = held
        self.weightsync_serve(held, id=name)

    async def tensors(self) -> dict[str, torch.Tensor]:
        """What it samples with."""
        async with self.weightsync_gate.admitted():
            return {name: tensor.clone() for name, tensor in self.held.items()}

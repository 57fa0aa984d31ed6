"""The engine of :mod:`.samehost_ours` as a Ray actor, for transports that need Ray."""

from __future__ import annotations

import os

import torch

from weightsync.ray_receiver import RayReceiver

from .samehost_layouts import LAYOUTS, checksum, tensors
from .samehost_meter import own_memory
from .samehost_ours import options
from .samehost_side import Spec

__all__ = ["Actor"]


class Actor(RayReceiver):
    """An engine."""

    def __init__(self, spec: Spec, number: int) -> None:
        torch.set_num_threads(1)
        self._own = own_memory()
        self._held = tensors(LAYOUTS[spec.layout], seed=100 + number)
        self.weightsync_serve(self._held, id=f"engine-{number}", **options(spec))

    def pid(self) -> int:
        return os.getpid()

    def own(self) -> dict[str, int]:
        return self._own

    def checksum(self) -> int:
        return checksum(self._held)

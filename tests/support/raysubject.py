"""An engine that is a Ray actor, as the conformance kit wants to see one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray
import torch

import weightsync
from weightsync.fsm.contract import EngineLink
from weightsync.fsm.errors import EnginePaused
from weightsync.handlers.ray_engine import RayEngine
from weightsync.testing.conformance import GIVEN, given_inlet

__all__ = ["RaySubject", "new_actor"]

SOON = 60.0
"""Seconds after which something that should have happened never will, on a machine that is busy."""


class _Engine(weightsync.RayReceiver):
    """Words of the test go to a thread of their own, so that they get through while it generates."""

    def __init__(self, *, stages: bool) -> None:
        self.model = torch.nn.Linear(6, 4)
        self.generating, self.freed = threading.Event(), threading.Event()
        self.weightsync_serve(self.model, stages=stages, extra_inlets={GIVEN: given_inlet})

    def generate(self) -> None:
        """Take the actor's only thread, admitted, until it is freed."""
        with self.weightsync_gate.admit(SOON):
            self.generating.set()
            self.freed.wait(SOON)

    @ray.method(concurrency_group="test")
    def generates(self) -> bool:
        """Whether a generation is under way."""
        return self.generating.is_set()

    @ray.method(concurrency_group="test")
    def free(self) -> None:
        """End it."""
        self.freed.set()

    @ray.method(concurrency_group="test")
    def prepare(self) -> None:
        """Before the next one."""
        self.generating.clear()
        self.freed.clear()

    @ray.method(concurrency_group="test")
    def admits(self) -> bool:
        """Whether the gate lets somebody in."""
        try:
            with self.weightsync_gate.admit(0):
                return True
        except EnginePaused:
            return False

    @ray.method(concurrency_group="test")
    def tensors(self) -> dict[str, torch.Tensor]:
        """What it samples with."""
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    @ray.method(concurrency_group="test")
    def pid(self) -> int:
        """Its process."""
        return os.getpid()


def new_actor(*, stages: bool = True, restarts: int = 0) -> Any:
    """An actor of a kind that every check can use."""
    make = weightsync.ray_engine(num_cpus=0, concurrency_groups={"test": 1}, max_restarts=restarts)
    return make(_Engine).remote(stages=stages)


class RaySubject:
    """A ``RayEngine`` to an actor.

    Args:
        actor: the engine.
        line: whether words go past Ray.
        ours: whether the actor is this check's own, and ends with it.
    """

    def __init__(self, actor: Any, *, line: bool, ours: bool = False) -> None:
        self._actor, self._line, self._ours = actor, line, ours
        self.link: RayEngine = RayEngine(actor, line=line)

    def another_link(self) -> EngineLink:
        """To the same actor."""
        return RayEngine(self._actor, line=self._line)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Copies."""
        tensors: Mapping[str, torch.Tensor] = self._told("tensors")
        return tensors

    def admits(self) -> bool:
        """Whether the gate lets somebody in."""
        return bool(self._told("admits"))

    @contextmanager
    def generating(self) -> Iterator[None]:
        """The actor's only thread is busy."""
        self._told("prepare")
        generation, until = self._actor.generate.remote(), time.monotonic() + SOON
        try:
            while not self._told("generates"):
                assert time.monotonic() < until
            yield
        finally:
            self._told("free")
            ray.get(generation, timeout=SOON)

    def kill(self) -> None:
        """SIGKILL: no word is said."""
        os.kill(self._told("pid"), signal.SIGKILL)

    def restart(self) -> None:
        """The same, and Ray starts it again."""
        self.kill()

    def close(self) -> None:
        """End the link, and the actor if it is ours."""
        self.link.close()
        if self._ours:
            with suppress(Exception):
                ray.kill(self._actor)

    def _told(self, method: str) -> Any:
        return ray.get(getattr(self._actor, method).remote(), timeout=SOON)

"""An engine in this process, as the conformance kit wants to see one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from weightsync.engine import receiver_for
from weightsync.fsm.contract import EngineLink
from weightsync.fsm.errors import EnginePaused
from weightsync.handlers.local_engine import LocalEngine
from weightsync.handlers.receiver import Receiver
from weightsync.testing.conformance import GIVEN, given_inlet

__all__ = ["LocalSubject"]


class LocalSubject:
    """A ``LocalEngine`` around a few tensors.

    Args:
        stages: as for ``receiver_for``.
        link: makes the trainer's end.
    """

    def __init__(self, *, stages: bool = True, link: type[LocalEngine] = LocalEngine) -> None:
        self.held = {"weight": torch.zeros(4, 6), "bias": torch.zeros(6), "steps": torch.tensor(0)}
        self.stages, self._kind = stages, link
        self.receiver = self.made()
        self.link: LocalEngine = link(self.receiver)

    def made(self) -> Receiver:
        """A receiver; each is another life of the engine."""
        return receiver_for(self.held, "local", stages=self.stages, extra_inlets={GIVEN: given_inlet})

    def another_link(self) -> EngineLink:
        """To the same receiver."""
        return self._kind(self.receiver)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Copies."""
        return {name: tensor.clone() for name, tensor in self.held.items()}

    def admits(self) -> bool:
        """Whether the gate lets somebody in."""
        try:
            with self.receiver.gate.admit(0):
                return True
        except EnginePaused:
            return False

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Somebody is inside."""
        begun, over = threading.Event(), threading.Event()

        def generate() -> None:
            with self.receiver.gate.admit():
                begun.set()
                over.wait()

        threading.Thread(target=generate, daemon=True).start()
        try:
            assert begun.wait(10.0)
            yield
        finally:
            over.set()

    def kill(self) -> None:
        """A thread cannot be killed."""
        raise NotImplementedError

    def restart(self) -> None:
        """Another receiver answers."""
        for tensor in self.held.values():
            tensor.zero_()
        self.receiver = self.made()
        self.link.receiver = self.receiver

    def close(self) -> None:
        """Nothing is held."""

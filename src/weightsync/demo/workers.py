"""The demo's engines: in Ray actors of their own, or in threads of this process.

Each engine starts from random weights of its own, so whatever it samples with after the first round came by a
round. Its samples carry the version that the receiving side, not the trainer, says it holds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..engine import receiver_for
from ..fsm.contract import EngineLink
from ..fsm.errors import EngineError, SetupError
from ..fsm.lock import LockKeeper
from ..handlers.local_engine import LocalEngine
from ..handlers.receiver import Receiver
from ..handlers.threads import spawn
from .faults import Arming, Kind
from .grpo import Batch, Settings, derive_seed, rollout
from .policy import Policy

__all__ = ["Crew", "Worker", "first_line", "local_crew", "ray_crew"]


class Worker(Protocol):
    """One engine, as the demo uses it."""

    name: str
    link: EngineLink

    def sample(self, prompts: Tensor, settings: Settings, seed: int) -> Future[Batch]:
        """Answer prompts, int64 (groups, prompt length), with the weights the engine has."""

    def digest(self) -> str:
        """The digest of the weights it samples with, computed where it samples; EngineError if it is down."""

    def arm(self, kind: Kind) -> None:
        """Let a fault go off in the next round; EngineError if it is down."""


@dataclass(frozen=True, slots=True)
class Crew:
    """All engines, and what they need of the trainer."""

    workers: Sequence[Worker]
    transport: str
    lock: LockKeeper | str | None
    close: Callable[[], None]


class Sampler:
    """The generating half of an engine, wherever it runs."""

    def __init__(self, name: str, settings: Settings, hang: float, *, own_process: bool) -> None:
        self.name = name
        self.model = Policy(settings.shape, derive_seed(settings.seed, "untrained", name))
        self.arming = Arming(hang, own_process=own_process)

    def sample(self, receiver: Receiver, prompts: Tensor, settings: Settings, seed: int) -> Batch:
        """Sample while the gate is open, and say with which version."""
        with receiver.segment(limit=30.0) as segment:
            version = segment.began
            if version is None:
                raise SetupError(f"{self.name} was asked to sample without whole weights")
            batch = rollout(
                self.model, prompts, settings.group_size, seed, version=version, engine=self.name,
                temperature=settings.temperature,
            )  # fmt: skip
        return replace(batch, versions=batch.versions.plus(segment.done))


def first_line(error: Exception) -> str:
    """An error in one line: Ray's have many."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


# -- in threads -------------------------------------------------------------------------------------------


class _LocalWorker:
    def __init__(self, name: str, settings: Settings, hang: float) -> None:
        self.name = name
        self._sampler = Sampler(name, settings, hang, own_process=False)
        self._receiver = receiver_for(self._sampler.model, name, fault=self._sampler.arming)
        self.link: EngineLink = LocalEngine(self._receiver)

    def sample(self, prompts: Tensor, settings: Settings, seed: int) -> Future[Batch]:
        return spawn(f"{self.name}-sample", self._sampler.sample, self._receiver, prompts, settings, seed)

    def digest(self) -> str:
        return self._receiver.digest()

    def arm(self, kind: Kind) -> None:
        self._sampler.arming.arm(kind)


def local_crew(names: Sequence[str], settings: Settings, hang: float) -> Crew:
    """Engines in threads of this process."""
    workers = [_LocalWorker(name, settings, hang) for name in names]
    return Crew(workers, "memory", None, lambda: None)


# -- in Ray actors ------------------------------------------------------------------------------------------


class _RayWorker:
    def __init__(self, name: str, actor: Any) -> None:
        from ..handlers.ray_engine import RayEngine

        self.name = name
        self._actor = actor
        self.link: EngineLink = RayEngine(actor, id=name)

    def sample(self, prompts: Tensor, settings: Settings, seed: int) -> Future[Batch]:
        future: Future[Batch] = self._actor.sample.remote(prompts, settings, seed).future()
        return future

    def digest(self) -> str:
        return str(self._answer(self._actor.digest.remote()))

    def arm(self, kind: Kind) -> None:
        self._answer(self._actor.arm.remote(kind))

    def _answer(self, asked: Any) -> Any:
        import ray

        try:
            return ray.get(asked, timeout=30)
        except ray.exceptions.RayError as error:
            raise EngineError(f"{self.name} does not answer ({type(error).__name__})") from error


def _actor_class() -> Any:
    from ..ray_receiver import RayReceiver, ray_engine

    class RolloutEngine(RayReceiver):
        """An engine of the demo: a policy that samples, and a receiver for its weights."""

        def __init__(self, name: str, settings: Settings, hang: float) -> None:
            torch.set_num_threads(1)
            self._sampler = Sampler(name, settings, hang, own_process=True)
            # It only samples: nobody but a hand-over writes to its weights, so it needs no copy of its own.
            self.weightsync_serve(self._sampler.model, id=name, aliases=True, fault=self._sampler.arming)

        def sample(self, prompts: Tensor, settings: Settings, seed: int) -> Batch:
            return self._sampler.sample(self._receiver(), prompts, settings, seed)

        def digest(self) -> str:
            return self._receiver().digest()

        def arm(self, kind: Kind) -> None:
            self._sampler.arming.arm(kind)

        def _receiver(self) -> Receiver:
            if self.weightsync_receiver is None:
                raise SetupError("the engine serves no weights")
            return self.weightsync_receiver

    # A killed engine is started again by Ray, with untrained weights and as another incarnation.
    return ray_engine(num_cpus=0, max_restarts=-1, max_task_retries=0)(RolloutEngine)


def ray_crew(names: Sequence[str], settings: Settings, hang: float) -> Crew:
    """Engines in actors of a local Ray cluster, or of the one ``RAY_ADDRESS`` names.

    Raises:
        SetupError: Ray does not start.
    """
    import ray

    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise SetupError(f"Ray does not start here: {error}; --threads runs without it") from error
    engine = _actor_class()
    actors = [engine.remote(name, settings, hang) for name in names]
    ray.get([actor.__ray_ready__.remote() for actor in actors])
    workers = [_RayWorker(name, actor) for name, actor in zip(names, actors, strict=True)]

    def close() -> None:
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        if ours:
            ray.shutdown()

    return Crew(workers, "shm", f"weightsync-demo-{uuid.uuid4().hex[:8]}", close)

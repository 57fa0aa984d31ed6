"""Engines of cases in Ray actors: real processes, which can crash and are started again."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from weightsync import RayEngine, RayReceiver, RoundResult, WeightSync, ray_engine

from .bench import quick
from .engines import Look, look_at, tensors_in
from .levels import Usage, ours, usage
from .scripts import ANY, Script
from .tensors import state

__all__ = ["AsyncTrainer", "InActor", "TrainerProcess", "environment"]

_PATIENCE = 60.0


def environment(**variables: str) -> dict[str, Any]:
    """The environment of an actor's process, in which these modules can be imported."""
    here = str(Path(__file__).parent.parent)
    paths = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    return {"env_vars": {"PYTHONPATH": paths, **variables}}


class _Actor(RayReceiver):
    """What runs in the process. After a restart it holds ``state(-1)`` again, as another incarnation."""

    def __init__(self, name: str, how: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self.name = name
        self.kept: list[Tensor] = []
        self._serve(state(-1), how)

    def _serve(self, held: torch.nn.Module | Mapping[str, Tensor], how: Mapping[str, Any]) -> None:
        self.held, self.script = held, Script()
        self.weightsync_serve(held, id=self.name, fault=self.script, **how)

    @ray.method(concurrency_group="test")
    def serve(self, held: torch.nn.Module | Mapping[str, Tensor], how: Mapping[str, Any]) -> None:
        """Be another engine from now on."""
        self._serve(held, how)

    @ray.method(concurrency_group="test")
    def keep(self) -> None:
        """Keep views of what it samples with now."""
        self.kept = [tensor.detach()[...] for tensor in tensors_in(self.held).values()]

    @ray.method(concurrency_group="test")
    def keeps(self) -> list[Tensor]:
        """What it has kept, as it is now."""
        return [tensor.clone() for tensor in self.kept]

    @ray.method(concurrency_group="test")
    def write(self) -> None:
        """Write to what it samples with."""
        for tensor in tensors_in(self.held).values():
            tensor.add_(1.0)

    @ray.method(concurrency_group="test")
    def arm(self, point: str, action: Callable[[], None], bucket: int) -> None:
        """Let something go wrong, once."""
        self.script.arm(point, action, bucket)

    @ray.method(concurrency_group="test")
    def always(self, point: str, action: Callable[[], None]) -> None:
        """Let something go wrong each time."""
        self.script.always(point, action)

    @ray.method(concurrency_group="test")
    def disarm(self) -> None:
        """Nothing more goes wrong."""
        self.script.disarm()

    @ray.method(concurrency_group="test")
    def count(self, point: str) -> int:
        """How often it came to a point."""
        return self.script.count(point)

    @ray.method(concurrency_group="test")
    def look(self) -> Look:
        """What it is now."""
        assert self.weightsync_receiver is not None
        return look_at(self.weightsync_receiver, self.held)

    @ray.method(concurrency_group="test")
    def process(self) -> tuple[int, int]:
        """Its process id, and a number that differs between processes with other hash seeds."""
        return os.getpid(), hash("weightsync")

    @ray.method(concurrency_group="test")
    def armed(self, point: str, bucket: int) -> bool:
        """Whether what it was armed with there has not gone off."""
        return self.script.armed(point, bucket)

    @ray.method(concurrency_group="test")
    def usage(self) -> Usage:
        """What its process holds."""
        return usage()

    @ray.method(concurrency_group="test")
    def refused(self) -> int:
        """How many words and frames it has refused."""
        assert self.weightsync_receiver is not None
        return self.weightsync_receiver.refused

    @ray.method(concurrency_group="test")
    def threads(self) -> list[str]:
        """The library's threads in its process."""
        return ours()

    @ray.method(concurrency_group="test")
    def crash(self) -> None:
        """End, as a crash does."""
        os._exit(1)


class InActor:
    """An engine in a Ray actor, which Ray starts again when it dies.

    Args:
        name: its id.
        seed: the hash seed of its process.
        restarts: how often it is started again; -1: always.
        how: as for ``receiver_for``, also when it was started anew: ``stages``, ``swaps``, ``aliases``.
    """

    def __init__(self, name: str, seed: int = 0, *, restarts: int = -1, **how: Any) -> None:
        make = ray_engine(
            num_cpus=0, max_restarts=restarts, max_task_retries=0, concurrency_groups={"test": 2},
            runtime_env=environment(PYTHONHASHSEED=str(seed)),
        )  # fmt: skip
        self.name, self.how = name, how
        self.actor: Any = make(_Actor).remote(name, how)
        self.link = RayEngine(self.actor, id=name)

    def fresh(self, held: torch.nn.Module | Mapping[str, Tensor] | None = None, **how: Any) -> InActor:
        """The same process as a new engine, with these weights."""
        self.how = how
        self.ask("serve", state(-1) if held is None else held, how)
        self.link = RayEngine(self.actor, id=self.name)
        return self

    @property
    def stages(self) -> bool:
        """Whether the live weights stay until the commit."""
        return bool(self.how.get("stages", True))

    def arm(self, point: str, action: Callable[[], None], bucket: int = ANY) -> None:
        """Let something go wrong, once."""
        self.ask("arm", point, action, bucket)

    def always(self, point: str, action: Callable[[], None]) -> None:
        """Let something go wrong each time."""
        self.ask("always", point, action)

    def disarm(self) -> None:
        """Nothing more goes wrong."""
        self.ask("disarm")

    def count(self, point: str) -> int:
        """How often it came to a point since it was disarmed."""
        return int(self.ask("count", point))

    def look(self) -> Look:
        """What it is now."""
        found: Look = self.ask("look")
        return found

    def process(self) -> tuple[int, int]:
        """Its process id, and a number that differs with the hash seed."""
        found: tuple[int, int] = self.ask("process")
        return found

    def usage(self) -> Usage:
        """What its process holds."""
        found: Usage = self.ask("usage")
        return found

    def crash(self) -> None:
        """End its process, as a crash does; Ray starts another one."""
        try:
            ray.get(self.actor.crash.remote(), timeout=_PATIENCE)
        except ray.exceptions.RayActorError:
            return
        raise AssertionError("it survived")

    def settle(self) -> None:
        """A word that was given up ends in the actor; nothing of it is here."""

    def ask(self, what: str, *args: Any) -> Any:
        """Ask the actor; while it is started anew, wait for it.

        To ask again does no harm here, so Ray may do it, which knows when the actor is there. What it gives
        up all the same, because the actor was on its way down, is asked once more.
        """
        end = time.monotonic() + _PATIENCE
        asking = getattr(self.actor, what).options(max_task_retries=-1)
        while True:
            try:
                return ray.get(asking.remote(*args), timeout=_PATIENCE)
            except ray.exceptions.ActorUnavailableError:
                if time.monotonic() > end:
                    raise


class AsyncTrainer:
    """An async actor that hands weights over."""

    def __init__(self, names: list[str], actors: list[Any], lock: str) -> None:
        self.said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ray").addHandler(handler)
        links = [RayEngine(actor, id=name) for name, actor in zip(names, actors, strict=True)]
        self.sync = WeightSync(links, "collective", policy=quick(deadline=20.0), lock=lock)

    async def step(self, number: int) -> str:
        """One round, in words."""
        result: RoundResult = await self.sync.round(number, state(number))
        return f"version {result.version}" if result.ok else result.summary()

    async def status(self) -> int | None:
        """What is asked meanwhile."""
        return self.sync.version()

    async def blocks(self) -> None:
        """What must not happen."""
        ray.get(ray.put(1))

    async def warnings(self) -> list[str]:
        """What Ray said of blocking the loop."""
        return [line for line in self.said if "blocking ray.get" in line]

    async def end(self) -> None:
        """Give everything back."""
        await asyncio.to_thread(self.sync.close)


class TrainerProcess:
    """A trainer in a process of its own, with a lock and a ledger that outlive it."""

    def __init__(
        self,
        names: list[str],
        actors: list[Any],
        lock: str,
        ledger: str,
        transport: str = "collective",
        *,
        deadline: float = 8.0,
    ) -> None:
        torch.set_num_threads(1)
        links = [RayEngine(actor, id=name) for name, actor in zip(names, actors, strict=True)]
        self.sync = WeightSync(
            links, transport, policy=quick(deadline=deadline), lock=lock, ledger=ledger, owner="trainer"
        )

    def process(self) -> int:
        """Its process id."""
        return os.getpid()

    def step(self, number: int, value: float) -> tuple[bool, int, int, str]:
        """One round: whether it worked, its version and epoch, and what is to be said of it."""
        result = self.sync.on_step_end(number, state(value))
        assert result is not None
        return result.ok, result.version, result.epoch, result.summary()

    def end(self) -> None:
        """Give everything back."""
        self.sync.close()

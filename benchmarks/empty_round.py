"""An empty round over Ray, two engines, beside the frame of the field; see :mod:`.core`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weightsync import Policy, RayEngine, StateLog, WeightSync
from weightsync.ray_receiver import RayReceiver, ray_engine

from .report import Figure, median

BENCH = "core"
TENSORS = 290
ENGINES = 2
WARM_UP = 10


class FieldLock:
    """A lock as the field has it, in its faster form: an event, not a poll."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def acquire(self) -> bool:
        await self._lock.acquire()
        return True

    async def release(self) -> None:
        self._lock.release()


class FieldEngine:
    """An engine of the field, without anything behind its calls."""

    def pause(self) -> bool:
        return True

    def begin(self) -> bool:
        return True

    def update(
        self, names: list[str], dtypes: list[str], shapes: list[tuple[int, ...]], version: int
    ) -> bool:
        return len(names) == len(dtypes) == len(shapes)

    def end(self) -> bool:
        return True

    def resume(self) -> bool:
        return True


class OurEngine(RayReceiver):
    """An engine of ours, with the tensors of the round."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(1)
        self.weightsync_serve(tensors(), id=name)


def tensors() -> dict[str, torch.Tensor]:
    """As many tensors as a small language model has, without elements: metadata and no bytes."""
    return {f"model.layers.{index}.weight": torch.zeros(0, 896) for index in range(TENSORS)}


def field_round(ray: Any, lock: Any, engines: list[Any], held: dict[str, torch.Tensor], version: int) -> None:
    """The frame of the field: 7 waits, 12 calls."""
    names, dtypes = list(held), ["float32"] * len(held)
    shapes = [tuple(tensor.shape) for tensor in held.values()]
    ray.get(lock.acquire.remote())
    ray.get([engine.pause.remote() for engine in engines])
    ray.get([engine.begin.remote() for engine in engines])
    ray.get([engine.update.remote(names, dtypes, shapes, version) for engine in engines])
    ray.get([engine.end.remote() for engine in engines])
    ray.get([engine.resume.remote() for engine in engines])
    ray.get(lock.release.remote())


def measure(rounds: int) -> list[Figure]:
    """Ours and the field's in turn, on one cluster; medians."""
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    import ray

    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        return _measured(ray, rounds)
    finally:
        ray.shutdown()


def _measured(ray: Any, rounds: int) -> list[Figure]:
    lock = ray.remote(FieldLock).options(num_cpus=0).remote()
    field = [ray.remote(FieldEngine).options(num_cpus=0).remote() for _ in range(ENGINES)]
    actors = [ray_engine(num_cpus=0)(OurEngine).remote(f"engine-{index}") for index in range(2 * ENGINES)]
    ray.get([actor.__ray_ready__.remote() for actor in (lock, *field, *actors)])
    model = tensors()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bare, logged = (
            stack.enter_context(
                WeightSync(
                    engines=[RayEngine(actor, id=f"engine-{first + index}")
                             for index, actor in enumerate(actors[first : first + ENGINES])],
                    transport="collective",
                    policy=Policy(deadline=60),
                    handlers=handlers,
                    lock=f"bench-{uuid.uuid4().hex[:8]}",
                    ledger=ledger,
                )
            )
            for first, handlers, ledger in (
                (0, [], None),
                (ENGINES, [StateLog(folder / "state.jsonl")], folder / "ledger.json"),
            )
        )  # fmt: skip
        sides: dict[str, Callable[[int], object]] = {
            "field": lambda step: field_round(ray, lock, field, model, step),
            "ours": lambda step: bare.begin(step, model, snapshot=False).wait().require(),
            "logged": lambda step: logged.begin(step, model, snapshot=False).wait().require(),
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for step in range(WARM_UP + rounds):
            for name, side in sides.items():
                begun = time.perf_counter()
                side(step)
                if step >= WARM_UP:
                    times[name].append((time.perf_counter() - begun) * 1e3)
    print(f"calls: the field's frame makes {2 + 5 * ENGINES} calls in 7 waits, the metadata in each update;")
    print(f"       ours makes {2 + 4 * ENGINES} calls in 5 waits, the metadata only once")
    middle = {name: median(values) for name, values in times.items()}
    return [
        Figure(BENCH, "empty round over Ray, the field's frame", middle["field"], "ms", "", rounds),
        Figure(BENCH, "empty round over Ray, ours", middle["ours"], "ms", "field's frame", rounds),
        Figure(BENCH, "empty round over Ray", middle["ours"] / middle["field"], "ratio", "field's frame",
               rounds),
        Figure(
            BENCH, "empty round over Ray, with a state log and a durable ledger",
            middle["logged"] / middle["field"], "ratio", "field's frame", rounds,
        ),
    ]  # fmt: skip

"""Gloo as a trainer would use it: a process group for good, and a broadcast a tensor, all of them under way.

The broadcasts are begun one after the other and waited for at the end, which is the cheapest form that plain
``torch.distributed`` has on CPUs. Engines receive right into their weights.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from .samehost_engines import EngineProcess
from .samehost_layouts import LAYOUTS, checksum, tensors
from .samehost_meter import own_memory
from .samehost_side import Spec

__all__ = ["Gloo"]

_LIMIT = timedelta(seconds=120)


def _join(port: int, rank: int, world: int) -> None:
    store = TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=_LIMIT, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_LIMIT)


def _broadcast(held: dict[str, torch.Tensor]) -> None:
    for work in [dist.broadcast(tensor, src=0, async_op=True) for tensor in held.values()]:
        work.wait()


class GlooEngine:
    """An engine's process."""

    def __init__(self, layout: str, number: int) -> None:
        self._own = own_memory()
        self._number = number
        self._held = tensors(LAYOUTS[layout], seed=100 + number)

    def join(self, port: int, world: int) -> None:
        _join(port, self._number, world)

    def own(self) -> dict[str, int]:
        return self._own

    def receive(self) -> None:
        _broadcast(self._held)

    def checksum(self) -> int:
        return checksum(self._held)


class Gloo:
    """The trainer's side."""

    def __init__(self, spec: Spec, model: dict[str, torch.Tensor]) -> None:
        self._model = model
        world = spec.engines + 1
        self._engines = [EngineProcess(GlooEngine, spec.layout, number) for number in range(1, world)]
        for engine in self._engines:
            engine.ready()
        port = _free_port()
        joining = [engine.ask("join", port, world) for engine in self._engines]
        _join(port, 0, world)
        for each in joining:
            each.result()

    def hand_over(self, step: int) -> None:
        received = [engine.ask("receive") for engine in self._engines]
        _broadcast(self._model)
        for each in received:
            each.result()

    def engines(self) -> list[tuple[int, dict[str, int]]]:
        return [(engine.pid, engine.ask("own").result()) for engine in self._engines]

    def checksums(self) -> list[int]:
        return [each.result() for each in [engine.ask("checksum") for engine in self._engines]]

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port

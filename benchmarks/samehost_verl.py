"""verl's own sender and receivers, as published: in verl's environment, on CPUs, by shared memory.

verl has a pair of sender and receiver for each engine. The senders of one trainer run at the same time, a
thread each, as those of its ranks do; engines receive as verl's do, and load each bucket into their weights
before they let it go.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor

import torch

from .samehost_engines import EngineProcess
from .samehost_layouts import LAYOUTS, checksum, tensors
from .samehost_meter import own_memory
from .samehost_shims import transfer_module
from .samehost_side import Absent, Spec

__all__ = ["Verl"]


class VerlEngine:
    """An engine's process."""

    def __init__(self, layout: str, number: int, handle: str) -> None:
        self._transfer = transfer_module()
        self._own = own_memory()
        self._handle = handle
        self._held = tensors(LAYOUTS[layout], seed=100 + number)

    def own(self) -> dict[str, int]:
        return self._own

    def receive(self) -> None:
        receiver = self._transfer.BucketedWeightReceiver(self._handle, torch.device("cpu"), use_shm=True)
        receiver.receive_weights(self._load)

    def _load(self, weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:  # noqa: FBT001 - verl's
        for name, weight in weights:
            self._held[name].copy_(weight)

    def checksum(self) -> int:
        return checksum(self._held)


class Verl:
    """The trainer's side."""

    def __init__(self, spec: Spec, model: dict[str, torch.Tensor]) -> None:
        largest = max(tensor.nbytes for tensor in model.values())
        if largest > spec.bucket << 20:
            raise Absent(f"a tensor of {largest >> 20} MiB does not fit into a bucket of {spec.bucket} MiB")
        self._transfer = transfer_module()
        self._model, self._bucket = model, spec.bucket
        self._folder = tempfile.mkdtemp(prefix="bench-verl-")
        self._handles = [f"ipc://{self._folder}/{number}.sock" for number in range(spec.engines)]
        self._engines = [
            EngineProcess(VerlEngine, spec.layout, number, handle)
            for number, handle in enumerate(self._handles)
        ]
        for engine in self._engines:
            engine.ready()
        self._senders = ThreadPoolExecutor(spec.engines)

    def hand_over(self, step: int) -> None:
        received = [engine.ask("receive") for engine in self._engines]
        for sent in [self._senders.submit(self._send, handle) for handle in self._handles]:
            sent.result()
        for each in received:
            each.result()

    def _send(self, handle: str) -> None:
        sender = self._transfer.BucketedWeightSender(handle, self._bucket, use_shm=True)
        asyncio.run(sender.async_send_weights(iter(self._model.items())))

    def engines(self) -> list[tuple[int, dict[str, int]]]:
        return [(engine.pid, engine.ask("own").result()) for engine in self._engines]

    def checksums(self) -> list[int]:
        return [each.result() for each in [engine.ask("checksum") for engine in self._engines]]

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._senders.shutdown(wait=False)

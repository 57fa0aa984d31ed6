"""An exporter whose ranks plan together, in threads of this process, and tensors for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from casekit.rankteam import DictStore
from weightsync import FollowerSync, LocalEngine, LocalLock, Policy, TrainerRanks, WeightSync, receiver_for
from weightsync.fsm.exports import ExportPlan, Outline, Slot

__all__ = ["Collective", "GatheredExporter", "RealTeam", "tensors"]

_PATIENCE = 10.0
"""Seconds after which a rank that waits for the others in a collective gives up, and a test has failed."""


class Collective:
    """What ranks can only do together. ``calls`` counts those of each rank; ``alone`` those nobody joined."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world)
        self.world, self.calls, self.alone = world, [0] * world, 0
        self.real = dist.all_gather_object

    def __call__(self, objects: list[object], mine: object, rank: int) -> None:
        """Has the signature of torch's as far as it is used here."""
        self.calls[rank] += 1
        try:
            self._barrier.wait(_PATIENCE)
        except threading.BrokenBarrierError:
            self.alone += 1
            raise


class GatheredExporter:
    """Tensors of a mapping, planned by a collective for each of them.

    Args:
        held: this rank's tensors; looked up anew in each reading.
        rank: of the trainer.
        collective: what all ranks share.
        own: lines that only this rank has, as a rank of a pipeline does.
    """

    lasting = True

    def __init__(self, held: dict[str, torch.Tensor], rank: int, collective: Collective) -> None:
        self.held, self.rank, self.collective = held, rank, collective
        self.own: tuple[str, ...] = ()
        self.forgotten = 0

    def outline(self) -> Outline:
        """Names, dtypes and shapes."""
        lines = [f"{name} {each.dtype} {tuple(each.shape)}" for name, each in self.held.items()]
        return Outline(self.collective.world, tuple(lines), self.own)

    def plan(self) -> Sequence[Slot]:
        """One collective of objects for each tensor."""
        slots = []
        for name, each in self.held.items():
            gathered: list[object] = [None] * self.collective.world
            dist.all_gather_object(gathered, name, self.rank)
            slots.append(Slot(name, str(each.dtype), tuple(each.shape), (self.rank,)))
        return slots

    def tensors(self, plan: ExportPlan) -> Iterator[tuple[str, torch.Tensor]]:
        """By the plan's names, as they are now."""
        for slot in plan.slots:
            yield slot.name, self.held[slot.name]

    def forget(self) -> None:
        """Nothing is kept beside the plan."""
        self.forgotten += 1


class RealTeam:
    """Three ranks in threads over a store of this process; the first leads an engine of real tensors."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        policy, store = Policy(deadline=10.0, lease=2.0), DictStore()
        self.held, self.lock = held, LocalLock(lease=2.0, epoch=0)
        self.ranks = [TrainerRanks(store, rank, 3, limit=_PATIENCE, silent=2.0) for rank in range(3)]
        self.engine = receiver_for(held, "e")
        lead = WeightSync(
            [LocalEngine(self.engine)], "memory", policy=policy, ranks=self.ranks[0], lock=self.lock
        )
        self.syncs: list[Any] = [lead, *(FollowerSync(each, policy=policy) for each in self.ranks[1:])]
        self._pool = ThreadPoolExecutor(3)

    def step(self, number: int, *models: object) -> list[Any]:
        """What each rank gets: a result or an error."""
        futures = [
            self._pool.submit(sync.on_step_end, number, model)
            for sync, model in zip(self.syncs, models, strict=True)
        ]
        return [each.exception(3 * _PATIENCE) or each.result() for each in futures]

    def close(self) -> None:
        """Give every thread back."""
        for sync in reversed(self.syncs):
            sync.close()
        self._pool.shutdown()


def tensors(fill: float, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Three of them, or of these shapes."""
    shapes = shapes or {"emb": (4, 3), "w": (3, 3), "b": (3,)}
    return {name: torch.full(shape, fill) for name, shape in shapes.items()}

"""Two trainer ranks in processes, each a stage of a pipeline, with a stand-in for Megatron-Bridge."""

from __future__ import annotations

import gc
import time
import weakref
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from fakebridge import AutoBridge, Stage, Wrapped
from weightsync import CachedExport, FollowerSync, LocalEngine, Policy, TrainerRanks, WeightSync, receiver_for
from weightsync.handlers.megatron_export import MegatronExporter

__all__ = ["LAYERS", "OBJECT_SECONDS", "serve"]

LAYERS = 2
OBJECT_SECONDS = 0.05
"""What a collective of objects costs on many hosts; here it is only waited for."""


class Side:
    """One rank."""

    def __init__(self, rank: int, store: Any) -> None:
        self.rank, self.step, self.objects, self.gone = rank, 0, 0, False
        self.stages = self.made(seed=rank)
        self.bridge: Any = AutoBridge("pretrained")
        self.export = CachedExport(MegatronExporter(self.bridge, lambda: self.stages, cpu=True))
        policy = Policy(deadline=40.0, lease=2.0)
        ranks = TrainerRanks(store, rank, 2, limit=60.0, silent=5.0)
        self.held = {name: torch.zeros_like(each) for name, each in self.truth().items()}
        self.sync: Any = (
            FollowerSync(ranks, policy=policy)
            if rank
            else WeightSync([LocalEngine(receiver_for(self.held, "e"))], "memory", policy=policy, ranks=ranks)
        )
        real = dist.all_gather_object

        def slow(*args: Any, **kwargs: Any) -> None:
            self.objects += 1
            time.sleep(OBJECT_SECONDS)
            real(*args, **kwargs)

        dist.all_gather_object = slow

    def made(self, seed: int) -> list[Any]:
        """The stage of this rank."""
        return [Wrapped(Stage(self.rank * LAYERS, LAYERS, seed))]

    def truth(self) -> dict[str, torch.Tensor]:
        """Everything, gathered in another way: rank by rank, as one object each."""
        stage = self.stages[0].module
        mine = {f"model.scale.{stage.first}": stage.scale}
        for number, layer in enumerate(stage.layers):
            for name, each in layer.named_parameters():
                mine[f"model.layers.{number + stage.first}.{name}"] = each.detach().clone()
        found: dict[str, torch.Tensor] = {}
        for rank in range(2):
            dist.broadcast_object_list(told := [dict(mine)], src=rank)
            found |= told[0]
        return found

    def hand_over(self, export: Any = None) -> dict[str, Any]:
        """How it ended, what it cost, and what the engine has that is not the truth."""
        self.step += 1
        before, began = self.objects, time.monotonic()
        try:
            result = self.sync.on_step_end(self.step, export or self.export)
            told = "ok" if result.ok else f"{type(result.error).__name__}: {result.error}"
        except Exception as error:  # noqa: BLE001 - it is told
            told = f"{type(error).__name__}: {error}"
        seconds, objects = time.monotonic() - began, self.objects - before
        truth = self.truth()
        wrong = [name for name, each in truth.items() if not torch.equal(each, self.held.get(name, each[:0]))]
        counts = self.export.counts
        return {
            "told": told, "seconds": seconds, "objects": objects, "wrong": wrong if self.rank == 0 else [],
            "builds": counts.builds, "hits": counts.hits, "counted": counts.objects,
        }  # fmt: skip

    def change(self, how: str) -> None:
        """Of this rank's stage."""
        if how == "again":
            old = weakref.ref(self.stages[0].module.layers[0])
            self.stages = self.made(seed=7 + self.rank)
            gc.collect()
            self.gone = old() is None
        layers = self.stages[0].module.layers
        with torch.no_grad():
            for each in self.stages[0].parameters():
                if how == "add":
                    each.add_(1.0)
                elif how == "data":
                    each.data = each.data * 3.0
            if how == "parameter":
                layers[0].weight = torch.nn.Parameter(torch.full((4, 4), float(self.rank)))
            elif how == "module":
                layers[1] = torch.nn.Linear(4, 4)

    def tour(self) -> dict[str, Any]:
        """Everything that may happen."""
        found: dict[str, Any] = {"first": self.hand_over()}
        plan = self.export.plan
        assert plan is not None
        found["plan"] = plan.hash, {slot.name: slot.owners for slot in plan.slots}
        for how in ("add", "data", "parameter", "module", "again"):
            self.change(how)
            found[how] = self.hand_over()
        found["gone"] = self.gone
        found["uncached"] = self.hand_over(
            CachedExport(Anew(MegatronExporter(self.bridge, self.stages, cpu=True)))
        )
        self.bridge.export_weight_dtype = "fp8"
        found["fp8"] = [self.hand_over() for _ in range(2)]
        del self.bridge.export_weight_dtype
        found["not fp8"] = [self.hand_over() for _ in range(2)]
        if self.rank == 1:
            self.stages[0].module.layers[0] = torch.nn.Linear(4, 4, bias=False)
        found["alone"] = self.hand_over()
        return found


class Anew:
    """An exporter whose plan never lasts: what a trainer without a cache pays."""

    lasting = False

    def __init__(self, exporter: MegatronExporter) -> None:
        self.outline, self.plan = exporter.outline, exporter.plan
        self.tensors, self.forget = exporter.tensors, exporter.forget


def serve(rank: int, port: int, forms: tuple[str, ...], pipe: Connection) -> None:
    """One rank."""
    import exportmutants  # noqa: F401 - brings a fault back, if one is asked for

    stores: Any = dist
    store = stores.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=stores.PrefixStore("group", store), rank=rank, world_size=2)
    side = Side(rank, store)
    try:
        pipe.send((forms[0], side.tour()))
    finally:
        side.sync.close()
    dist.barrier()
    dist.destroy_process_group()

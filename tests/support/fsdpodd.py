"""Two trainer ranks with models that FSDP wrapped in unusual ways, and what an export of each brings."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdpside import reference
from weightsync import CachedExport
from weightsync.fsm.exports import Standing, decide
from weightsync.handlers.fsdp_export import FsdpExporter

__all__ = ["SCENES", "serve"]


class Twice(nn.Module):
    """One unit at two places, and something beside it."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.c = unit, unit, nn.Linear(3, 3)


def flat(model: nn.Module, **options: Any) -> Any:
    """A unit of FSDP1."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def brought(export: CachedExport) -> dict[str, torch.Tensor]:
    """What it brings when both ranks have agreed on it."""
    _, mine = export.standing()
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine.to_json())
    export.settle(decide({rank: Standing.from_json(each) for rank, each in enumerate(told)}))
    return {name: each.clone() for name, each in export()}


def wrong(export: CachedExport, model: nn.Module) -> list[str]:
    """Of what it brings, what is not as torch itself gathers it."""
    got, truth = brought(export), reference(model)
    return sorted(
        name
        for name in got.keys() | truth.keys()
        if name not in got
        or name not in truth
        or got[name].dtype != truth[name].dtype
        or not torch.equal(got[name], truth[name])
    )


def refused(work: Callable[[], object]) -> str:
    """How it is refused."""
    try:
        return f"not at all: {work()}"
    except Exception as error:  # noqa: BLE001 - it is told
        return f"{type(error).__name__}: {error}"


def at_two_places(orig: bool) -> dict[str, Any]:
    """A unit that has two names, before and after its values change."""
    model = flat(Twice(flat(nn.Linear(4, 3), use_orig_params=orig)), use_orig_params=orig)
    export = CachedExport(FsdpExporter(model))
    found = [wrong(export, model)]
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.5)
    found.append(wrong(export, model))
    plan = export.plan
    assert plan is not None
    return {"wrong": found, "of": {slot.name: slot.of for slot in plan.slots if slot.of}}


def inside_of_a_unit(orig: bool) -> dict[str, Any]:
    """Only a part of what FSDP wrapped."""
    model = flat(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)), use_orig_params=orig)
    parts = [model.module[0], model.module[1], model.module]
    return {
        "refused": [refused(FsdpExporter(part).outline) for part in parts],
        "whole": wrong(CachedExport(FsdpExporter(model)), model),
    }


SCENES: dict[str, Callable[[], dict[str, Any]]] = {
    "two-places": lambda: at_two_places(False),
    "two-places-orig": lambda: at_two_places(True),
    "inside": lambda: inside_of_a_unit(False),
    "inside-orig": lambda: inside_of_a_unit(True),
}


def serve(rank: int, port: int, scenes: tuple[str, ...], pipe: Connection) -> None:
    """One rank: every scene, one after the other."""
    import exportmutants  # noqa: F401 - brings a fault back, if one is asked for

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for scene in scenes:
        torch.manual_seed(0)
        try:
            pipe.send((scene, SCENES[scene]()))
        except BaseException:
            pipe.send((scene, traceback.format_exc()))
            raise
    dist.barrier()
    dist.destroy_process_group()

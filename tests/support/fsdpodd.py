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


class Buffered(nn.Module):
    """Buffers of two dtypes, in a unit within a unit and beside it; of one only the outer unit casts."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        inner.register_buffer("fine", torch.full((3,), 0.5, dtype=torch.float64))
        inner.register_buffer("apart", torch.zeros(2), persistent=False)
        self.inner = flat(inner, **options)
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through all of it."""
        found: torch.Tensor = self.out(self.inner(self.norm(x)))
        return found


def low_buffers(orig: bool) -> dict[str, Any]:
    """Buffers that a forward pass casts: how they come before it, after it, and after training."""
    from torch.distributed.fsdp import MixedPrecision

    low = torch.bfloat16
    options: Any = {"use_orig_params": orig, "mixed_precision": MixedPrecision(low, buffer_dtype=low)}
    model = flat(Buffered(**options), **options)
    export = CachedExport(FsdpExporter(model))
    found, dtypes = list[list[str]](), set[str]()
    for step in range(3):
        found.append(wrong(export, model))
        dtypes |= {
            f"{name} {each.dtype}"
            for name, each in brought(export).items()
            if "_var" in name or "fine" in name
        }
        with torch.set_grad_enabled(step > 0):
            model(torch.randn(5, 4))
    cast = {str(each.dtype) for name, each in model.named_buffers() if "_var" in name}
    return {"wrong": found, "dtypes": sorted(dtypes), "cast": sorted(cast), "builds": export.counts.builds}


def both_kinds() -> dict[str, Any]:
    """FSDP1 and FSDP2 side by side; what FSDP2 has gathered stays so after a pass."""
    from torch.distributed.fsdp import fully_shard

    second: Any = nn.Linear(4, 4)
    like: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    second.load_state_dict(like[0].state_dict())
    fully_shard(second, reshard_after_forward=False)
    first = nn.Linear(4, 3)
    first.load_state_dict(like[1].state_dict())
    model = nn.Sequential(second, flat(first))
    export = CachedExport(FsdpExporter(model))
    found = [differing(brought(export), like)]
    model(torch.randn(2, 4))
    with torch.no_grad():
        like[0].weight.add_(1.0)
        second.reshard()
        second.weight.to_local().add_(1.0)
    found.append(differing(brought(export), like))
    return {"wrong": found, "builds": export.counts.builds}


def differing(got: dict[str, torch.Tensor], like: nn.Module) -> list[str]:
    """What is not as a module without FSDP has it."""
    truth = like.state_dict()
    return sorted(
        name
        for name in got.keys() | truth.keys()
        if name not in got or not torch.equal(got[name], truth[name])
    )


def in_a_pass() -> dict[str, Any]:
    """A hand-over from a hook inside of forward, and one from inside of backward."""
    from torch.distributed.fsdp import fully_shard

    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    fully_shard(model[1])
    fully_shard(model)
    export, told = CachedExport(FsdpExporter(model)), list[str]()

    def ask(*_: object) -> None:
        told.append(refused(lambda: brought(export)))

    model[0].register_forward_hook(ask)
    got = model(torch.randn(2, 4))
    got.register_hook(ask)
    got.sum().backward()
    grads = all(each.grad is not None for each in model.parameters())
    return {"refused": told, "grads": grads, "after": wrong(export, model)}


SCENES: dict[str, Callable[[], dict[str, Any]]] = {
    "two-places": lambda: at_two_places(False),
    "two-places-orig": lambda: at_two_places(True),
    "inside": lambda: inside_of_a_unit(False),
    "inside-orig": lambda: inside_of_a_unit(True),
    "both-kinds": both_kinds,
    "in-a-pass": in_a_pass,
    "buffers": lambda: low_buffers(False),
    "buffers-orig": lambda: low_buffers(True),
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

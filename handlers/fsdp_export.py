"""Weights of a trainer that shards its model with FSDP, of either kind, whole again for a hand-over.

    export = CachedExport(FsdpExporter(model))
    sync.on_step_end(step, export)  # on every rank

``fully_shard`` (FSDP2) makes each parameter a tensor that is spread over a mesh; ``FullyShardedDataParallel``
(FSDP1) makes flat ones (``fsdp_flat.py``). A module that neither has touched is read as it is. All ranks get
whole tensors, of which an engine sees those of rank 0.

To make the plan needs no collective: each rank knows how everything is spread. So all of an outline is
shared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..fsm.errors import PlanError, WeightsInUse
from ..fsm.exports import Cut, ExportPlan, Outline, Slot
from .export_entries import Entry, Held, ModelAt, read, world
from .form_dtensor import reshard
from .fsdp_flat import flat_entries, is_flat, refuse_pieces
from .wrapped import dtype_of

if TYPE_CHECKING:
    import torch

__all__ = ["FsdpExporter"]


class FsdpExporter:
    """Gathers the parameters and persistent buffers of a module.

    Args:
        model: the module, which is not kept alive, or a function that gives the present one.

    Raises:
        SetupError: it is neither.
    """

    lasting = True

    def __init__(self, model: torch.nn.Module | Callable[[], torch.nn.Module]) -> None:
        self._model = ModelAt("FsdpExporter", model)

    def outline(self) -> Outline:
        """Names, dtypes, shapes, and how each is spread."""
        return Outline(world(), tuple(entry.line for entry in self._entries()))

    def plan(self) -> Sequence[Slot]:
        """The same with who holds what."""
        return [entry.slot for entry in self._entries()]

    def tensors(self, plan: ExportPlan) -> Iterator[tuple[str, torch.Tensor]]:
        """By name, gathered one after the other; of FSDP1 unit by unit."""
        return read(self._entries(), plan)

    def forget(self) -> None:
        """Nothing is kept."""

    def _entries(self) -> Iterator[Entry]:
        model = self._model()
        refuse_pieces(model)
        _let_go(model)
        return flat_entries(model, _entry) if is_flat(model) else _entries(model)


def _let_go(model: torch.nn.Module) -> None:
    """Of what FSDP2 has gathered, which may be older than what the ranks hold; but of nothing that is in use.

    Raises:
        PlanError: a pass goes on.
    """
    try:
        reshard(model, ended=False)
    except WeightsInUse as error:
        raise PlanError(
            f"FSDP2: {error}, and hand the weights over outside of forward and backward"
        ) from error


def _entries(model: torch.nn.Module) -> Iterator[Entry]:
    """Of the state dict."""
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not hasattr(tensor, "untyped_storage"):
            kind = type(tensor).__name__
            raise PlanError(f"{name!r} of the model's state dict is a {kind}, which cannot be sent")
        of = first.setdefault(id(tensor), name)
        yield _entry(name, tensor, "" if of == name else of)


def _entry(name: str, tensor: torch.Tensor, of: str) -> Entry:
    def whole() -> torch.Tensor:
        return tensor.detach()

    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
    described = name, dtype_of(tensor), tuple(tensor.shape)
    if mesh is None or placements is None:
        return Entry(*described, "whole on each rank", lambda: ((), ()), whole, of)
    where = f"{placements} over {mesh.mesh.tolist()}"
    return Entry(
        *described, where, lambda: _held(described[2], mesh, placements), lambda: _gathered(tensor), of
    )


def _gathered(tensor: Any) -> torch.Tensor:
    import torch

    with torch.no_grad():
        tensor = tensor.detach()
        if tensor.device.type != tensor.device_mesh.device_type:  # offloaded; collectives are the mesh's
            tensor = tensor.to(tensor.device_mesh.device_type)
        found: torch.Tensor = tensor.full_tensor()
        return found


def _held(shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]) -> Held:
    """Which box of a tensor each rank of a mesh has. Of placements other than the plain ones: only who."""
    ranks = mesh.mesh
    owners = tuple(sorted(ranks.flatten().tolist()))
    if not all(each.is_replicate() or type(each).__name__ == "Shard" for each in placements):
        return owners, ()
    cuts = []
    for place in itertools.product(*map(range, ranks.shape)):
        offset, size = [0] * len(shape), list(shape)
        for index, count, placement in zip(place, ranks.shape, placements, strict=True):
            if not placement.is_replicate():
                _narrow(offset, size, placement.dim, index, count)
        if math.prod(size):
            cuts.append(Cut(int(ranks[place]), tuple(offset), tuple(size)))
    return tuple(sorted(cut.rank for cut in cuts)), tuple(cuts)


def _narrow(offset: list[int], size: list[int], dim: int, index: int, count: int) -> None:
    """The part of a box with this index, when it is split along a dimension as torch splits it."""
    step = -(-size[dim] // count)
    start = min(index * step, size[dim])
    offset[dim] += start
    size[dim] = min(step, size[dim] - start)

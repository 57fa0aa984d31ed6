"""DTensors, as FSDP2 (``fully_shard``) and tensor parallelism make them: a rank keeps its local tensor.

On a CPU the local tensor is the live memory itself, and to ask for it "on the CPU" copies nothing; so what is
kept is always copied by whoever keeps it. A unit of FSDP2 shows plain, whole parameters while it is gathered:
then there are no DTensors to be seen, and resharding brings them back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..fsm.errors import WeightsInUse
from ..fsm.shards import Form, Shard
from .holding import Holding, bytes_of
from .wrapped import dtype_of

if TYPE_CHECKING:
    import torch

__all__ = ["holding", "is_one", "reshard"]


def is_one(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def reshard(model: torch.nn.Module, *, ended: bool) -> None:
    """Bring every unit of FSDP2 back to its shards, also one that is being gathered ahead.

    Raises:
        WeightsInUse: a unit is in the middle of a pass.
    """
    from torch.distributed.fsdp import FSDPModule

    units = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    for name, unit in units:  # all of them are looked at before one is touched
        for group in _groups(unit):
            if group._training_state.name not in ("IDLE", "POST_BACKWARD") and not ended:  # noqa: SLF001 - torch names it no other way
                raise WeightsInUse(f"{name or 'the root'} is in the middle of a pass: let it end first")
    for _, unit in units:
        for group in _groups(unit):
            group._training_state = type(group._training_state).IDLE  # noqa: SLF001 - an error may have left it
            if group._all_gather_result is not None:  # noqa: SLF001
                group.wait_for_unshard()  # or the next pass would take what was gathered before
        unit.reshard()


def holding(name: str, tensor: Any) -> Holding:
    """This rank's part of a DTensor."""
    local = tensor.detach().to_local()
    mesh = tensor.device_mesh
    where = mesh.get_coordinate()
    place = f"{tuple(tensor.placements)} at {where} of mesh {mesh.mesh.tolist()} {mesh.mesh_dim_names}"
    shard = Shard(
        name, Form.dtensor, dtype_of(local), tuple(local.shape), bytes_of(local),
        place, (f"{name}{list(tensor.shape)}",), mesh.size(),
    )  # fmt: skip
    return Holding(shard, local)


def _groups(unit: Any) -> list[Any]:
    state = unit._get_fsdp_state()  # noqa: SLF001
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    one = state._fsdp_param_group  # noqa: SLF001 - before torch 2.12
    return [] if one is None else [one]

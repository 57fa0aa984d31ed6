"""The forms of a trainer's parameters: where this rank's bytes of each are, ready to be read and written.

Two libraries spread a model over ranks, and both keep a second, whole copy of a unit for a while: the root of
FSDP1 keeps it after each forward pass, and takes it as it is in the next one, without looking at the shard
again. Whoever writes to a shard then is not heard. So before anything is read or written, every unit is
brought back to its shards, and what is gathered is freed; that is what ``shards_of`` does first.

Plain tensors need none of that. What a module is, is asked of its parameters and not of its settings, so one
model may have all forms at once. Whatever FSDP keeps under names of its own is read in two modules only,
``form_flat.py`` and ``form_dtensor.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..fsm.errors import SetupError, SnapshotError
from ..fsm.shards import Form, Layout, Shard
from .holding import Holding, bytes_of
from .wrapped import cleaned, dtype_of

if TYPE_CHECKING:
    import torch

__all__ = ["layout_of", "shards_of"]


def shards_of(model: torch.nn.Module, *, buffers: bool = False, ended: bool = False) -> list[Holding]:
    """What this rank holds of ``model``, resharded. Moves no data between ranks.

    Args:
        model: the module.
        buffers: whether they are wanted, too.
        ended: that a pass which seems to go on has ended, by an error.

    Raises:
        WeightsInUse: the model is in the middle of a pass, or inside ``summon_full_params``.
        SnapshotError: there is a tensor without bytes of its own.
        SetupError: this is a part of a model whose FSDP unit is around it.
    """
    from . import form_dtensor, form_flat

    taken: set[int] = set()
    found: list[Holding] = []
    if "torch.distributed.fsdp" in sys.modules:  # otherwise nobody can have made such a model
        units = form_flat.units(model)
        form_flat.reshard(units, ended=ended)
        form_dtensor.reshard(model, ended=ended)
        found.extend(form_flat.holdings(units))
        taken = form_flat.parameters(units)
    dtensors = "torch.distributed.tensor" in sys.modules
    for name, tensor in _named(model, buffers=buffers):
        if id(tensor) in taken:
            continue
        if dtensors and form_dtensor.is_one(tensor):
            found.append(form_dtensor.holding(name, tensor))
        else:
            found.append(_plain(name, tensor))
    for holding in found:
        _check(holding)
    return found


def layout_of(holdings: list[Holding]) -> Layout:
    """What they are."""
    return Layout(tuple(each.shard for each in holdings))


def _named(model: torch.nn.Module, *, buffers: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield cleaned(name), parameter
    if buffers:
        for name, buffer in model.named_buffers():
            yield cleaned(name), buffer


def _plain(name: str, tensor: torch.Tensor) -> Holding:
    if getattr(tensor, "_fsdp_flattened", False):
        raise SetupError(
            f"Snapshots: {name!r} is part of an FSDP unit that is around this module: give the model as FSDP "
            f"wrapped it"
        )
    own = tensor.detach()
    return Holding(Shard(name, Form.plain, dtype_of(own), tuple(own.shape), bytes_of(own)), own)


def _check(holding: Holding) -> None:
    why = _unkeepable(holding.tensor)
    if why:
        raise SnapshotError(f"{holding.shard.name!r} cannot be kept: it {why}")


def _unkeepable(tensor: Any) -> str:
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        return "is not initialised yet; run the model once before"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"is a {type(tensor).__name__}, which wraps other tensors"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return "has its values in no plain memory (sparse, quantised or nested)"
    if tensor.is_meta:
        return "has no values (device meta); materialise it first"
    if tensor.is_conj() or tensor.is_neg():
        return "is a note on the bytes of another tensor (conjugate or negated)"
    if any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded, with one memory for several of its numbers; make it contiguous first"
    if bytes_of(tensor) and not tensor.untyped_storage().size():
        return "has no memory, its storage was freed; bring it back first"
    return ""

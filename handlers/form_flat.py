"""FSDP1: each unit's parameters are one flat parameter, of which a rank keeps one part.

With ``use_orig_params`` or without, the bytes are in the unit's local shard: what the module shows as its
parameters are views of it, perhaps empty ones. So the shard is what is kept, whole, and both ways are one.

FSDP1 writes back a parameter that was given other memory when it next gathers; that is done here first, or
its values would be lost. A unit that was never run has not set up anything yet, and its flat parameter is the
shard. The names that torch gives its insides are those of 2.6 and later; FSDP1 is not developed any further.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..fsm.errors import SnapshotError, WeightsInUse
from ..fsm.shards import Form, Shard
from .holding import Holding, bytes_of
from .wrapped import dtype_of, flat_units

if TYPE_CHECKING:
    import torch

__all__ = ["holdings", "parameters", "reshard", "units"]

_GATHERED = ("_full_param_padded", "_full_prec_full_param_padded")
"""Where a unit may have its whole copy: the second one in evaluation, if it trains in low precision."""

Units = list[tuple[str, Any]]


def units(model: torch.nn.Module) -> Units:
    """The units that have parameters, each with its name."""
    return list(flat_units(model))


def parameters(found: Units) -> set[int]:
    """The ids of what a module shows of them."""
    flats = [unit._handle.flat_param for _, unit in found]  # noqa: SLF001
    originals = (each for flat in flats for each in getattr(flat, "_params", None) or ())
    return {id(each) for each in (*flats, *originals)}


def reshard(found: Units, *, ended: bool) -> None:
    """Bring every unit back to its shard, and free what is gathered: the next pass gathers anew.

    Raises:
        WeightsInUse: a unit is in the middle of something.
    """
    for name, unit in found:  # all of them are looked at before one is touched
        _refuse_busy(name, unit, ended=ended)
    for name, unit in found:
        _set_idle(unit)
        _reshard(name, unit._handle)  # noqa: SLF001


def _refuse_busy(name: str, unit: Any, *, ended: bool) -> None:
    state = unit.training_state.name
    if state == "SUMMON_FULL_PARAMS":
        raise WeightsInUse(
            f"{name or 'the root'!s} is inside summon_full_params: its parameters are whole, and nothing of "
            f"them is kept under these names; leave it first"
        )
    if state != "IDLE" and not ended:
        raise WeightsInUse(f"{name or 'the root'!s} is in the middle of a pass ({state}): let it end first")


def _set_idle(unit: Any) -> None:
    """An error in a forward pass leaves its units in the middle of it; the next pass does not mind, we do."""
    unit.training_state = type(unit.training_state).IDLE
    unit._handle._training_state = type(unit._handle._training_state).IDLE  # noqa: SLF001


def _reshard(name: str, handle: Any) -> None:
    flat = handle.flat_param
    if not hasattr(flat, "_local_shard"):
        return  # never run
    try:
        if handle._use_orig_params:  # noqa: SLF001
            handle._writeback_orig_params()  # noqa: SLF001
    except RuntimeError as error:
        where = name or "the root"
        raise SnapshotError(f"{where}: a parameter was replaced and does not fit: {error}") from error
    handle.reshard(handle.uses_sharded_strategy)
    handle.post_reshard()
    handle._prefetched = False  # noqa: SLF001
    for where in _GATHERED:
        whole = getattr(flat, where, None)
        if whole is not None and whole.untyped_storage().size():
            whole.untyped_storage().resize_(0)


def holdings(found: Units) -> Iterable[Holding]:
    """This rank's shard of each unit."""
    for name, unit in found:
        handle = unit._handle  # noqa: SLF001
        flat = handle.flat_param
        own = getattr(flat, "_local_shard", flat).detach()
        ranks = handle.world_size if handle.uses_sharded_strategy else 1
        strategy = handle._sharding_strategy.name  # noqa: SLF001
        yield Holding(
            Shard(
                f"{name}._flat_param".lstrip("."), Form.flat, dtype_of(own),
                tuple(own.shape), bytes_of(own), f"{strategy}, rank {handle.rank} of {handle.world_size}",
                _parts(flat), ranks,
            ),
            own,
        )  # fmt: skip


def _parts(flat: Any) -> tuple[str, ...]:
    shapes = zip(flat._fqns, flat._shapes, strict=True)  # noqa: SLF001
    return tuple(f"{name}{list(shape)}" for name, shape in shapes)

# ruff: noqa: SLF001 - of where tensors lie in a flat parameter, torch tells nothing in public
"""The tensors of modules that FSDP1 has wrapped, out of the flat parameter of each unit.

A unit's tensors lie one after the other in a flat parameter, of which each rank holds one piece. What lies
where is known to every rank without asking. A unit is gathered in one collective, as it is first needed, and
its tensors are views of what was gathered.

A unit that stands at several places of a model is gathered once, and has a name for each place.

It is the pieces that are gathered, and not what a forward pass has left gathered: that may be older. A
parameter that was given other memory (``param.data = ...``) is written back to its piece first, as FSDP does
it before its own next use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ..fsm.errors import PlanError
from ..fsm.exports import Cut
from .export_entries import Entry, Held, persistent_buffers
from .wrapped import all_units, cleaned, dtype_name, dtype_of, flat_units

if TYPE_CHECKING:
    import torch

__all__ = ["flat_entries", "is_flat", "refuse_pieces"]

_FLAT = "_flat_param"


def is_flat(module: torch.nn.Module) -> bool:
    """Whether FSDP1 has a part of it."""
    return any(True for _ in flat_units(module))


def refuse_pieces(module: torch.nn.Module) -> None:
    """Look whether there is something of a unit that is not here itself: of that, only a piece could be read.

    Raises:
        PlanError: there is.
    """
    known = set[int]()
    for _, unit in flat_units(module):
        flat = unit._handle.flat_param
        known |= {id(each) for each in (flat, *(flat._params or ()), *(flat._shared_params or ()))}
    for prefix, part in module.named_modules():
        # A unit without parameters of their own leaves views of its flat one in the place of them.
        for name, each in itertools.chain(part._parameters.items(), vars(part).items()):
            whole = each if getattr(each, "_fsdp_flattened", False) else getattr(each, "_base", None)
            if getattr(whole, "_fsdp_flattened", False) and not {id(each), id(whole)} & known:
                full = cleaned(f"{prefix}.{name}" if prefix else name)
                raise PlanError(
                    f"{full!r} is part of an FSDP unit that is around this module: give the exporter the "
                    "model as FSDP wrapped it"
                )


def flat_entries(
    module: torch.nn.Module, other: Callable[[str, torch.Tensor, str], Entry]
) -> Iterator[Entry]:
    """Unit by unit, under each of its names; then what belongs to none, which ``other`` describes."""
    names, first = set[str](), dict[int, str]()
    for name, unit in flat_units(module, again=True):
        prefix = f"{name}." if name else ""
        before = first.setdefault(id(unit), prefix)
        for entry in _unit(before, unit._handle):
            named = entry if before == prefix else _again(entry, prefix + entry.name[len(before) :])
            names.add(named.name)
            yield named
    dtypes = _dtypes_of_buffers(module)
    for name, tensor in itertools.chain(
        module.named_parameters(remove_duplicate=False), persistent_buffers(module)
    ):
        clean = cleaned(name)
        if clean not in names and clean.rpartition(".")[2] != _FLAT:
            names.add(clean)
            yield _cast(other(clean, tensor, ""), dtypes.get(clean, tensor.dtype))


def _dtypes_of_buffers(module: torch.nn.Module) -> dict[str, torch.dtype]:
    """Which dtype a buffer has for a state dict; the first pass casts it to that of its mixed precision.

    As torch has it, it is the outermost unit around the buffer that says so.
    """
    found = dict[str, Any]()
    for prefix, unit in all_units(module, again=True):
        if unit.mixed_precision.buffer_dtype is not None:
            for name, dtype in unit._buffer_name_to_orig_dtype.items():
                clean = cleaned(name)
                if clean not in unit._ignored_buffer_names:
                    found.setdefault(f"{prefix}.{clean}" if prefix else clean, dtype)
    return found


def _unit(prefix: str, handle: Any) -> Iterator[Entry]:
    import torch.distributed as dist

    flat = handle.flat_param
    ranks = tuple(dist.get_process_group_ranks(handle.process_group))
    spread = handle.uses_sharded_strategy
    where = f"in {prefix or 'the root'} {handle._sharding_strategy.name} of {len(ranks)}"
    whole = cache(lambda: _gathered(prefix, handle))
    own = list[str]()
    for name, shape, start in _places(flat):
        numel = shape.numel()

        def held(start: int = start, numel: int = numel) -> Held:
            return _cut(start, numel, ranks, flat._sharded_size.numel()) if spread else (ranks, ())

        def read(start: int = start, numel: int = numel, shape: Any = shape) -> torch.Tensor:
            found: torch.Tensor = whole()[start : start + numel].view(shape)
            return found

        own.append(cleaned(name))
        yield Entry(f"{prefix}{own[-1]}", dtype_of(flat), tuple(shape), where, held, read)
    for info in flat._shared_param_infos:
        first = _joined(info.prim_module_name, info.prim_param_name)
        name, shape, start = next(each for each in _places(flat) if cleaned(each[0]) == first)
        other = _joined(info.module_name, info.param_name)
        yield Entry(
            f"{prefix}{other}", dtype_of(flat), tuple(shape), where, _nobody, whole, of=f"{prefix}{first}"
        )


def _again(entry: Entry, name: str) -> Entry:
    """The same under another name."""
    return replace(entry, name=name, held=_nobody, of=entry.of or entry.name)


def _places(flat: Any) -> Iterator[tuple[str, Any, int]]:
    """Name, shape and first element of each tensor; there is padding between some."""
    named = zip(flat._fqns, flat._shapes, strict=True)
    start = 0
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            name, shape = next(named)
            yield name, shape, start
        start += numel


def _cut(start: int, numel: int, ranks: tuple[int, ...], piece: int) -> Held:
    """Who has which elements of a tensor that lies from ``start`` on, when each rank has one piece."""
    cuts = []
    for index, rank in enumerate(ranks):
        first, last = max(start, index * piece), min(start + numel, (index + 1) * piece)
        if first < last:
            cuts.append(Cut(rank, (first - start,), (last - first,)))
    return tuple(cut.rank for cut in cuts), tuple(cuts)


def _gathered(prefix: str, handle: Any) -> torch.Tensor:
    import torch
    import torch.distributed as dist

    flat = handle.flat_param
    if handle._training_state.name != "IDLE":
        raise PlanError(
            f"unit {prefix or 'the root'} of the model is in use ({handle._training_state.name}): hand the "
            "weights over outside of summon_full_params, of forward and of backward"
        )
    with torch.no_grad():
        if handle._use_orig_params:
            handle._writeback_orig_params()
        if not handle.uses_sharded_strategy:
            whole: torch.Tensor = flat.data
            return whole.to(handle.device)
        piece = (flat.data if handle.is_sharded(flat) else flat._local_shard).to(handle.device)
        whole = torch.empty(piece.numel() * handle.world_size, dtype=piece.dtype, device=piece.device)
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the newer name of it
        gather(whole, piece, group=handle.process_group)
        return whole


def _cast(entry: Entry, dtype: torch.dtype) -> Entry:
    return replace(entry, dtype=dtype_name(dtype), read=lambda: entry.read().to(dtype))


def _nobody() -> Held:
    return (), ()


def _joined(module: str, name: str) -> str:
    return cleaned(f"{module}.{name}" if module else name)

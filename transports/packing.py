"""From tensors into a bucket, and from a bucket into tensors.

Both go by the pieces of the plan alone: which bytes of which tensor lie where in the bucket. A piece may be a
part of a tensor, and the tensors on either side may have any strides, independently of each other; what is
kept is the logical order of the elements. Padding between pieces is neither written nor read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ..fsm.contract import Bucketful
from ..fsm.errors import PlanError, TransportError
from ..fsm.plan import Bucket, Plan
from ..fsm.tensors import TensorSpec, has_memory
from .copies import copy_memory
from .octets import CHUNK, Cast, Octets, Source, address, boxes_beside, dtype_name, read, write

__all__ = ["pack", "pack_by", "unpack"]

_Copy = Callable[[torch.Tensor, torch.Tensor], None]


def pack(plan: Plan, bucket: Bucket, tensors: Mapping[str, Source], buffer: Octets) -> None:
    """Copy every piece of ``bucket`` from ``tensors`` into ``buffer``, which may be larger than needed.

    What is to be cast is cast on the way: there is no copy of it but the one in the bucket.

    Raises:
        PlanError: a tensor is missing, or is no longer what the plan says.
    """
    if buffer.size < bucket.nbytes:
        raise TransportError(f"bucket {bucket.index} has {bucket.nbytes} bytes, and the buffer {buffer.size}")
    base = buffer.ctypes.data
    for piece in bucket.pieces:
        if piece.start == piece.stop:
            continue  # a tensor without elements, which the digest vouches for
        tensor = _fitting(plan.tensors[piece.tensor], tensors, Source)
        place = address(tensor)
        if place is not None:
            copy_memory(base + piece.offset, place + piece.start, piece.nbytes)
        else:
            read(tensor, piece.start, piece.stop, buffer[piece.offset : piece.offset + piece.nbytes])


def unpack(plan: Plan, bucket: Bucketful, into: Mapping[str, Any], /) -> None:
    """Write every piece of ``bucket`` into the tensors ``into``, by the names of ``plan.tensors``.

    The tensors may have any strides that give each element memory of its own. Nothing of ``bucket.data``, a
    tensor or anything else that is a buffer of bytes, is kept.

    Raises:
        PlanError: a tensor is missing, is not what the plan says, or is an expanded view.
        TransportError: the buffer is not as large as the plan says.
    """
    if not 0 <= bucket.index < len(plan.buckets):
        raise TransportError(f"bucket {bucket.index} arrived, but the plan has only {len(plan.buckets)}")
    if bucket.copy is not None:
        _unpack_by(bucket.copy, plan, plan.buckets[bucket.index], bucket.data, into)
        return
    planned, octets = plan.buckets[bucket.index], _octets(bucket.data)
    if octets.size != planned.nbytes:
        raise TransportError(f"bucket {bucket.index} arrived with {octets.size} bytes, not {planned.nbytes}")
    base = octets.ctypes.data
    for piece in planned.pieces:
        if piece.start == piece.stop:
            continue
        spec = plan.tensors[piece.tensor]
        tensor = _fitting(spec, into, torch.Tensor)
        place = address(tensor)
        if place is not None:
            copy_memory(place + piece.start, base + piece.offset, piece.nbytes)
            continue
        _check_writable(spec.name, tensor)
        write(tensor, piece.start, piece.stop, octets[piece.offset : piece.offset + piece.nbytes])


# -- by a device ---------------------------------------------------------------------------------------------


def pack_by(
    copy: _Copy, plan: Plan, bucket: Bucket, tensors: Mapping[str, Source], buffer: torch.Tensor
) -> None:
    """Write ``bucket`` into flat bytes on a device, by copies that may be done later than this is back.

    What is to be cast is cast in this process's memory: a device makes other bits of a NaN, and it is this
    memory's bytes that are digested.

    Raises:
        PlanError: a tensor is missing, is no longer what the plan says, or has no memory.
    """
    for piece in bucket.pieces:
        if piece.start == piece.stop:
            continue
        spec = plan.tensors[piece.tensor]
        tensor, part = _fitting(spec, tensors, Source), buffer[piece.offset : piece.offset + piece.nbytes]
        if isinstance(tensor, Cast):
            for start, numbers in _cast(tensor, piece.start, piece.stop):
                copy(part[start - piece.start :][: numbers.numel()], numbers)
            continue
        _check_memory(spec.name, tensor)
        for box, place in boxes_beside(tensor, piece.start, piece.stop, part):
            copy(place, box)


def _cast(cast: Cast, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The bytes of a range, in memory of their own, chunk by chunk, with where each begins."""
    while start < stop:
        end = min((start // CHUNK + 1) * CHUNK, stop)
        octets = np.empty(end - start, dtype=np.uint8)
        read(cast, start, end, octets)
        yield start, torch.from_numpy(octets)
        start = end


def _unpack_by(copy: _Copy, plan: Plan, bucket: Bucket, data: Any, into: Mapping[str, Any]) -> None:
    """Write every piece of flat bytes on a device to where it belongs. The copies may be done later."""
    if data.numel() != bucket.nbytes:
        raise TransportError(f"bucket {bucket.index} arrived with {data.numel()} bytes, not {bucket.nbytes}")
    for piece in bucket.pieces:
        if piece.start == piece.stop:
            continue
        spec = plan.tensors[piece.tensor]
        tensor = _fitting(spec, into, torch.Tensor)
        _check_writable(spec.name, tensor)
        _check_memory(spec.name, tensor)
        part = data[piece.offset : piece.offset + piece.nbytes]
        for box, place in boxes_beside(tensor, piece.start, piece.stop, part):
            copy(box, place)


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    if not has_memory(tensor):
        raise PlanError(f"tensor {name!r}: its memory was given away, its storage was resized")


# -- checks --------------------------------------------------------------------------------------------------


def _octets(data: Any) -> Octets:
    """The received bytes, without a copy."""
    if isinstance(data, torch.Tensor):
        octets: Octets = data.view(torch.uint8).numpy()
        return octets
    return np.frombuffer(data, dtype=np.uint8)


def _fitting(spec: TensorSpec, tensors: Mapping[str, Any], kind: Any) -> Any:
    """The tensor that ``spec`` describes, checked: it may have changed since the plan was made."""
    tensor = tensors.get(spec.name)
    if not isinstance(tensor, kind):
        raise PlanError(f"tensor {spec.name!r} ({spec}) is in the plan, but there is none of that name")
    dtype = dtype_name(tensor.dtype)
    if dtype != spec.dtype or tensor.shape != spec.shape:
        raise PlanError(f"tensor {spec.name!r} is {dtype} {tuple(tensor.shape)}, but the plan says {spec}")
    return tensor


def _check_writable(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous() and any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise PlanError(f"tensor {name!r} is an expanded view, whose elements share memory: nothing fits in")

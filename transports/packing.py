"""From tensors into a bucket, and from a bucket into tensors.

Both go by the pieces of the plan alone: which bytes of which tensor lie where in the bucket. A piece may be a
part of a tensor, and the tensors on either side may have any strides, independently of each other; what is
kept is the logical order of the elements. Padding between pieces is neither written nor read.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import memmove  # which lets other threads go on
from typing import Any

import numpy as np
import torch

from ..fsm.contract import Bucketful
from ..fsm.errors import PlanError, TransportError
from ..fsm.plan import Bucket, Plan
from ..fsm.tensors import TensorSpec
from .octets import Octets, Source, address, dtype_name, read, write

__all__ = ["pack", "unpack"]


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
            memmove(base + piece.offset, place + piece.start, piece.nbytes)
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
            memmove(place + piece.start, base + piece.offset, piece.nbytes)
            continue
        _check_writable(spec.name, tensor)
        write(tensor, piece.start, piece.stop, octets[piece.offset : piece.offset + piece.nbytes])


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

"""The digest of content: one function for both sides, so that the receiver digests what it will sample with.

Each tensor's bytes are hashed in logical order, so strides and devices make no difference. The hash of the
whole is taken over one line a tensor (name, dtype, shape, hash of the bytes), in the plan's order: two
tensors that swapped their bytes, or a name that stands for another shape, change it. Further names of a
tensor are not in it: a receiver that holds a tied name by itself compares that by name.

Of a part (:mod:`..fsm.sampling`), each line has the hash of those bytes alone, and the digest says which they
are.

The hash (XXH3, 128 bits) finds accidents, not forgeries; it runs at about the speed of memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import xxhash

from ..fsm.errors import PlanError
from ..fsm.plan import Plan
from ..fsm.sampling import WHOLE, Part
from ..fsm.tensors import TensorSpec
from .octets import CHUNK, Cast, Octets, Source, dtype_name, read, span

__all__ = ["digest", "digest_of"]

_KINDS = (torch.Tensor, Cast)  # a union is slower to ask


def digest(plan: Plan, tensors: Mapping[str, Any], part: Part = WHOLE, /) -> str:
    """The digest of ``part`` of ``tensors``, by the names and in the order of ``plan.tensors``.

    Raises:
        PlanError: a tensor of the plan is missing.
    """
    return digest_of(plan.tensors, tensors, part)


def digest_of(specs: Iterable[TensorSpec], tensors: Mapping[str, Any], part: Part = WHOLE) -> str:
    """The same, by descriptions alone: content has no buckets."""
    lines: list[bytes] = []
    scratch = np.empty(0, dtype=np.uint8)
    for spec in specs:
        tensor = tensors.get(spec.name)
        if not isinstance(tensor, _KINDS):
            raise PlanError(f"tensor {spec.name!r} is in the plan, but there is none to digest")
        shape = tensor.shape
        lines.append(_head(spec.name, tensor.dtype, shape))
        low, high = _range(part, tensor.numel() * tensor.element_size())
        try:
            octets = span(tensor, low, high) if low < high else b""
        except PlanError as error:
            raise PlanError(f"tensor {spec.name!r}: {error}") from None
        if octets is None:
            scratch = scratch if scratch.size else np.empty(CHUNK, dtype=np.uint8)
            lines.append(_read(tensor, low, high, scratch))
        else:
            lines.append(xxhash.xxh3_128_hexdigest(octets).encode("ascii"))
        lines.append(b'"]\n')
    return part.mark(xxhash.xxh3_128_hexdigest(b"".join(lines)))


@lru_cache(maxsize=1 << 16)
def _range(part: Part, nbytes: int) -> tuple[int, int]:
    """Asked for every tensor on both sides, and the same in every round of that turn."""
    return part.range(nbytes)


@lru_cache(maxsize=1 << 16)
def _head(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """A tensor's line up to its hash. The same every round, and dearer than the hash of a small tensor."""
    line = [name, dtype_name(dtype), list(shape), ""]
    return json.dumps(line, separators=(",", ":")).encode("ascii").removesuffix(b'"]')


def _read(tensor: Source, low: int, high: int, scratch: Octets) -> bytes:
    """Of what has to be copied to be read in order."""
    content = xxhash.xxh3_128()
    while low < high:
        stop = min((low // CHUNK + 1) * CHUNK, high)  # so that chunks end where blocks do
        read(tensor, low, stop, scratch[: stop - low])
        content.update(scratch[: stop - low].data)
        low = stop
    return content.hexdigest().encode("ascii")

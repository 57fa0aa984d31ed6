"""The digest of content: one function for both sides, so that the receiver digests what it will sample with.

Each tensor's bytes are hashed in logical order, so strides and devices make no difference. The hash of the
whole is taken over one line a tensor (name, dtype, shape, hash of the bytes), in the plan's order: two
tensors that swapped their bytes, or a name that stands for another shape, change it. Further names of a
tensor are not in it: a receiver that holds a tied name by itself compares that by name.

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
from ..fsm.tensors import TensorSpec
from .octets import dtype_name, flat, read

__all__ = ["digest", "digest_of"]

_NOTHING = xxhash.xxh3_128_hexdigest(b"").encode("ascii")
_CHUNK = 4 << 20
"""Bytes of scratch memory for tensors that have to be copied to be read in order."""


def digest(plan: Plan, tensors: Mapping[str, Any], /) -> str:
    """The digest of ``tensors``, by the names and in the order of ``plan.tensors``.

    Raises:
        PlanError: a tensor of the plan is missing.
    """
    return digest_of(plan.tensors, tensors)


def digest_of(specs: Iterable[TensorSpec], tensors: Mapping[str, Any]) -> str:
    """The same, by descriptions alone: content has no buckets."""
    lines: list[bytes] = []
    for spec in specs:
        tensor = tensors.get(spec.name)
        if not isinstance(tensor, torch.Tensor):
            raise PlanError(f"tensor {spec.name!r} is in the plan, but there is none to digest")
        shape = tensor.shape
        lines.append(_head(spec.name, tensor.dtype, shape))
        lines.append(_NOTHING if 0 in shape else _content(tensor))
        lines.append(b'"]\n')
    return xxhash.xxh3_128_hexdigest(b"".join(lines))


@lru_cache(maxsize=1 << 16)
def _head(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """A tensor's line up to its hash. The same every round, and dearer than the hash of a small tensor."""
    line = [name, dtype_name(dtype), list(shape), ""]
    return json.dumps(line, separators=(",", ":")).encode("ascii").removesuffix(b'"]')


def _content(tensor: torch.Tensor) -> bytes:
    octets = flat(tensor)
    if octets is not None:
        return xxhash.xxh3_128_hexdigest(octets.data).encode("ascii")
    total = tensor.numel() * tensor.element_size()
    scratch = np.empty(min(total, _CHUNK), dtype=np.uint8)
    content = xxhash.xxh3_128()
    for start in range(0, total, _CHUNK):
        part = scratch[: min(total - start, _CHUNK)]
        read(tensor, start, start + part.size, part)
        content.update(part.data)
    return content.hexdigest().encode("ascii")

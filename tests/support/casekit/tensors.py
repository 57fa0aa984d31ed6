"""Small weights, and what it means that two of them are the same: bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["BUCKET", "NAMES", "bits", "given_away", "same", "state"]

BUCKET = 256
"""Bytes of one bucket, in which exactly one of the tensors of ``state`` fits."""

NAMES = ("layer.weight", "layer.bias", "head.weight")


def state(value: float) -> dict[str, Tensor]:
    """Weights of three buckets, full of numbers that follow from ``value`` and differ by name."""
    size = BUCKET // 4
    return {name: torch.full((size,), value + number / 8) for number, name in enumerate(NAMES)}


def bits(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Everything that has to arrive: dtype, shape, and the bytes of the elements in their order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return str(tensor.dtype), tuple(tensor.shape), raw


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether both have the same names with the same bits."""
    return one.keys() == other.keys() and all(bits(one[name]) == bits(other[name]) for name in one)


@contextmanager
def given_away(tensor: Tensor, left: int) -> Iterator[None]:
    """So many bytes are left of its memory. It is back when a failure is told, which shows every tensor."""
    storage = tensor.untyped_storage()
    room = storage.nbytes()
    storage.resize_(left)
    try:
        yield
    finally:
        storage.resize_(room)

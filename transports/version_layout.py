"""Where the tensors of a plan lie in a buffer that holds a whole version, for engines that use them there.

The buckets lie one after the other, as they would travel. One that goes on with a tensor begins where the one
before ends, so that every tensor is whole, also one that is split over several; any other begins at a
boundary that suits every dtype. Both sides work it out from the plan, and nothing of it travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, final

import torch

from ..fsm.plan import DTYPE_SIZES, Bucket, Plan
from ..fsm.tensors import TensorSpec

__all__ = ["VersionLayout", "layout_of"]

_BOUNDARY = 64


class Place(NamedTuple):
    """A tensor in the buffer: what ``as_strided`` is told of it, on a view of the whole as its dtype."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    start: int


@final
@dataclass(frozen=True, slots=True)
class VersionLayout:
    """The places.

    Args:
        starts: where each bucket begins, in bytes.
        size: of the whole buffer, at least 1.
        places: by bucket, the tensors of which it holds the last piece.
        viewable: whether every tensor can be viewed where it lies. Only buckets of odd sizes prevent that.
    """

    starts: tuple[int, ...]
    size: int
    places: tuple[tuple[Place, ...], ...]
    viewable: bool

    def views(self, bucket: int, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors that ``bucket`` completes, by name, as views of the flat buffer ``whole``."""
        lines = dict[torch.dtype, torch.Tensor]()
        found = {}
        for name, dtype, shape, steps, start in self.places[bucket]:
            line = lines.get(dtype)
            if line is None:
                line = lines[dtype] = whole[: whole.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            # One call for each tensor: a slice and two views would cost three.
            found[name] = line.as_strided(shape, steps, start)
        return found


def layout_of(plan: Plan) -> VersionLayout:
    """The places for ``plan``; the same object for the same plan."""
    return _laid_out(_Key(plan))


class _Key:
    """A plan, known by its fingerprint."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.plan.fingerprint == self.plan.fingerprint

    def __hash__(self) -> int:
        return hash(self.plan.fingerprint)


@lru_cache(maxsize=8)
def _laid_out(key: _Key) -> VersionLayout:
    plan, starts, end = key.plan, [], 0
    found = [0] * len(plan.tensors)
    for bucket in plan.buckets:
        start = end if _goes_on(bucket) else -(-end // _BOUNDARY) * _BOUNDARY
        starts.append(start)
        end = start + bucket.nbytes
        for piece in bucket.pieces:
            if piece.start == 0:
                found[piece.tensor] = start + piece.offset
    viewable = all(
        found[piece.tensor] + piece.start == starts[bucket.index] + piece.offset
        for bucket in plan.buckets
        for piece in bucket.pieces
        if piece.nbytes
    ) and all(
        place % DTYPE_SIZES[spec.dtype] == 0
        for spec, place in zip(plan.tensors, found, strict=True)
        if spec.nbytes
    )
    places = tuple(
        tuple(
            _place(plan.tensors[piece.tensor], found[piece.tensor])
            for piece in bucket.pieces
            if piece.stop == plan.tensors[piece.tensor].nbytes
        )
        for bucket in plan.buckets
    )
    return VersionLayout(tuple(starts), max(end, 1), places, viewable)


def _place(spec: TensorSpec, at: int) -> Place:
    """Of a contiguous tensor, ``at`` bytes into the buffer; one without elements is nowhere."""
    steps = [1]
    for size in spec.shape[:0:-1]:
        steps.append(steps[-1] * max(size, 1))
    steps_of = tuple(reversed(steps)) if spec.shape else ()
    start = at // DTYPE_SIZES[spec.dtype] if spec.nbytes else 0
    return Place(spec.name, getattr(torch, spec.dtype), spec.shape, steps_of, start)


def _goes_on(bucket: Bucket) -> bool:
    return bool(bucket.pieces) and bucket.pieces[0].start > 0

"""Where the tensors of a plan lie in a buffer that holds a whole version, for engines that use them there.

The buckets lie one after the other, as they would travel. One that goes on with a tensor begins where the one
before ends, so that every tensor is whole, also one that is split over several; any other begins at a
boundary that suits every dtype. Both sides work it out from the plan, and nothing of it travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch

from ..fsm.plan import DTYPE_SIZES, Bucket, Plan

__all__ = ["VersionLayout", "layout_of"]

_BOUNDARY = 64


@final
@dataclass(frozen=True, slots=True)
class VersionLayout:
    """The places.

    Args:
        starts: where each bucket begins, in bytes.
        size: of the whole buffer, at least 1.
        places: where each tensor begins, by its number in the plan; of one without elements anywhere.
        completed: by bucket, the numbers of the tensors of which it holds the last piece.
        viewable: whether every tensor can be viewed where it lies. Only buckets of odd sizes prevent that.
    """

    starts: tuple[int, ...]
    size: int
    places: tuple[int, ...]
    completed: tuple[tuple[int, ...], ...]
    viewable: bool

    def views(self, plan: Plan, bucket: int, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors that ``bucket`` completes, by name, as views of the flat buffer ``whole``."""
        found, lines = {}, dict[str, torch.Tensor]()
        for number in self.completed[bucket]:
            spec = plan.tensors[number]
            line = lines.get(spec.dtype)
            if line is None:
                dtype: torch.dtype = getattr(torch, spec.dtype)
                line = lines[spec.dtype] = whole[: whole.numel() // dtype.itemsize * dtype.itemsize].view(
                    dtype
                )
            if spec.nbytes:
                # One call for each tensor: a slice and two views would cost three.
                start = self.places[number] // line.element_size()
                found[spec.name] = line.as_strided(spec.shape, _steps(spec.shape), start)
            else:
                found[spec.name] = torch.empty(spec.shape, dtype=line.dtype)
        return found


@lru_cache(maxsize=4096)
def _steps(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    steps = [1]
    for size in shape[:0:-1]:
        steps.append(steps[-1] * max(size, 1))
    return tuple(reversed(steps)) if shape else ()


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
    plan, starts, completed, end = key.plan, [], [], 0
    places = [0] * len(plan.tensors)
    for bucket in plan.buckets:
        start = end if _goes_on(bucket) else -(-end // _BOUNDARY) * _BOUNDARY
        starts.append(start)
        end = start + bucket.nbytes
        for piece in bucket.pieces:
            if piece.start == 0:
                places[piece.tensor] = start + piece.offset
        completed.append(tuple(p.tensor for p in bucket.pieces if p.stop == plan.tensors[p.tensor].nbytes))
    viewable = all(
        place + piece.start == starts[bucket.index] + piece.offset
        for bucket in plan.buckets
        for piece in bucket.pieces
        for place in (places[piece.tensor],)
        if piece.nbytes
    ) and all(
        place % DTYPE_SIZES[spec.dtype] == 0
        for spec, place in zip(plan.tensors, places, strict=True)
        if spec.nbytes
    )
    return VersionLayout(tuple(starts), max(end, 1), tuple(places), tuple(completed), viewable)


def _goes_on(bucket: Bucket) -> bool:
    return bool(bucket.pieces) and bucket.pieces[0].start > 0

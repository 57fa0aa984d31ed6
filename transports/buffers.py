"""The pair of transfer buffers of a round: one is filled while the other is on its way.

Fresh memory costs several times the copy into it, so that a pair is kept for the next round when a round
ended well. After any other end somebody may still read or write it, and it is left to the garbage collector.
"""

from __future__ import annotations

from typing import final

import torch

from .octets import Octets

__all__ = ["Pair"]


@final
class Pair:
    """Two buffers, taken in turn: bucket after bucket."""

    __slots__ = ("_size", "_tensors")

    def __init__(self, size: int) -> None:
        self._size = size
        self._tensors: list[torch.Tensor | None] = [None, None]  # one of them may never be needed

    def serves(self, size: int) -> bool:
        """Whether both are large enough, and not twice as large as needed."""
        return size <= self._size <= 2 * size

    def tensor(self, bucket: int, size: int) -> torch.Tensor:
        """The first ``size`` bytes of the buffer whose turn it is, as a flat tensor."""
        turn = bucket % 2
        whole = self._tensors[turn]
        if whole is None:
            whole = self._tensors[turn] = torch.empty(self._size, dtype=torch.uint8)
        return whole[:size]

    def octets(self, bucket: int, size: int) -> Octets:
        """The same memory, for packing."""
        octets: Octets = self.tensor(bucket, size).numpy()
        return octets

    def abandon(self, bucket: int) -> None:
        """Leave the buffer whose turn it is to whoever still has a view of it; the next one is fresh."""
        self._tensors[bucket % 2] = None

"""A sink for engines that use the trainer's buffer as their weights: a commit swaps, and copies nothing.

What arrives as whole tensors, from a transport that can do so, is kept as it is beside the live weights, and
becomes them at the commit: each live tensor stays the object that it is, and its memory is exchanged. The
memory of the version before is let go of in the same moment. Whatever cannot be exchanged is copied: tensors
on a device, tensors that are not contiguous, and tensors that are a part of something larger, such as a fused
weight, whose other parts would be left behind. So is all that comes by any other transport.

**Nobody may write to the weights of such an engine**: the memory is shared with the trainer and every other
engine, it is mapped for reading alone, and whoever writes there ends his process (SIGSEGV) without a word
from Python. An engine that trains, quantises in place, merges adapters or keeps running statistics does not
alias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ..fsm.plan import Plan
from .sink import Held, StagingSink, refuse_lost

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AliasSink"]


class AliasSink(StagingSink):
    """Swaps. The live weights stay as they are, bit for bit, until the commit."""

    aliases = True

    def __init__(self, held: Held) -> None:
        super().__init__(held)
        self._into: dict[str, Tensor] = {}
        self._adopted: dict[str, Tensor] = {}
        self._swappable: frozenset[str] = frozenset()
        self._swapped: dict[str, int] = {}

    def open(self, plan: Plan) -> Mapping[str, Tensor]:
        """Memory for what is to be copied. What an earlier session left unused is let go of."""
        self._adopted = {}
        self._into.clear()
        self._into = dict(super().open(plan))
        self._swappable = frozenset(
            name for name, live in self._copies(plan).items() if all(map(self._can_swap, live))
        )
        return self._into

    def adopt(self, views: Mapping[str, Tensor]) -> None:
        """Keep these beside the live weights, or copy what cannot be exchanged."""
        for name, view in views.items():
            if name in self._swappable:
                self._into[name] = self._adopted[name] = view
            elif name in self._into:
                self._into[name].copy_(view)

    def commit(self, plan: Plan) -> None:
        """Make what was kept the live weights."""
        tensors = self._tensors()
        with torch.no_grad():
            for name, of in self._names(plan).items():
                live = tensors.get(name)
                if live is None or 0 in live.shape:
                    continue  # it goes by another name, or there is nothing to take over
                refuse_lost(name, live)
                if of in self._adopted:
                    live.data = self._adopted[of]
                    self._swapped[name] = live.data_ptr()
                elif self._is_swapped(name, live):
                    # Not written: it is everybody's memory.
                    live.data = self._into[of].to(live.device, copy=True)
                    del self._swapped[name]
                else:
                    live.copy_(self._into[of])

    def _mark(self, name: str, tensor: Tensor) -> tuple[object, ...]:
        if self._is_swapped(name, tensor):  # where it lies changes with every version
            return (tensor.dtype, tensor.shape)
        return super()._mark(name, tensor)

    def _is_swapped(self, name: str, tensor: Tensor) -> bool:
        return tensor.data_ptr() == self._swapped.get(name, -1)

    def _can_swap(self, tensor: Tensor) -> bool:
        """Whether it is alone in its memory, or in ours by an earlier swap."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_inference():
            return False
        alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return alone or tensor.data_ptr() in self._swapped.values()

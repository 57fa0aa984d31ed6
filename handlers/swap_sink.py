"""A sink for engines whose memory may be exchanged: the commit is a swap, and copies nothing.

What arrives is written beside the live weights, as by ``StagingSink``; but at the commit each live tensor
stays the object that it is and gets the other memory, and its own one is written next time. So weights are
copied once, not twice, and an engine is paused for the swap alone. It must not have kept addresses of its
weights, as a captured CUDA graph does, nor views of them.

One that **aliases** goes without memory of its own. From a transport that can do so it gets whole tensors in
the trainer's buffer, and swaps to those. **Nobody may write to the weights of such an engine**: the memory is
shared with the trainer and every other engine, it is mapped for reading alone, and whoever writes there ends
his process (SIGSEGV) without a word from Python. An engine that trains, quantises in place, merges adapters
or keeps running statistics does not alias.

Whatever cannot be exchanged is copied: tensors on a device, tensors that are not contiguous, and tensors that
are a part of something larger, such as a fused weight, whose other parts would be left behind. What is the
very same memory under another name goes along, whether that name is sent or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ..fsm.errors import EngineError
from ..fsm.plan import Plan
from .read_only import ReadOnly
from .sink import Held, StagingSink, copy_bits, place_of, refuse_lost

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SwapSink"]


class SwapSink(StagingSink):
    """Swaps. The live weights stay as they are, bit for bit, until the commit.

    Args:
        held: what the engine samples with.
        aliases: whether nobody writes to it, so that it may lie in memory that others share.
    """

    def __init__(self, held: Held, *, aliases: bool) -> None:
        super().__init__(held)
        self.aliases = aliases
        self._into: dict[str, Tensor] = {}
        self._adopted: dict[str, Tensor] = {}
        self._known: tuple[object, ...] = ()
        self._swappable: frozenset[str] = frozenset()
        self._twins: dict[str, tuple[str, ...]] = {}
        self._swapped: dict[str, int] = {}
        self._shared: set[str] = set()

    def open(self, plan: Plan) -> Mapping[str, Tensor]:
        """Memory to write to. What an earlier session left unused is let go of."""
        self._adopted = {}
        self._into.clear()
        self._into = dict(super().open(plan))
        checked = self._checked if self._checked[:1] == (plan.fingerprint,) else ()
        if not checked or self._known is not checked:
            self._known = checked
            self._look(plan)
        return self._into

    def _look(self, plan: Plan) -> None:
        """Which tensors can be exchanged, and which go with them."""
        tensors, shared = self._tensors(), ReadOnly()
        for name, tensor in tensors.items():
            if tensor.device.type == "cpu" and tensor.data_ptr() in shared:  # put there by another one of us
                self._swapped[name] = tensor.data_ptr()
                self._shared.add(name)
        overlapping = _overlapping({name: self._extent(name, each) for name, each in tensors.items()})
        self._twins = {
            name: tuple(each for each in names if place_of(tensors[each]) == place_of(tensors[name]))
            for name, names in overlapping.items()
        }
        whole = {name for name, names in overlapping.items() if len(self._twins[name]) == len(names)}
        for name in sorted(overlapping.keys() - whole):
            if name in self._shared and self._is_swapped(name, tensors[name]):
                raise EngineError(
                    f"tensor {name!r}: another one is a part of it, in memory that nobody may write: give "
                    "both memory of their own (clone)"
                )
        apart = {name for name in tensors if name in whole or name not in overlapping}
        self._swappable = frozenset(
            of
            for of in {*self._names(plan).values()}
            if all(
                name in apart and _can_swap(tensors[name])
                for name, other in self._names(plan).items()
                if other == of and name in tensors
            )
        )

    def adopt(self, views: Mapping[str, Tensor]) -> None:
        """Keep these beside the live weights, or copy what cannot be exchanged."""
        for name, view in views.items():
            if name in self._swappable:
                self._into[name] = self._adopted[name] = view
            elif name in self._into:
                copy_bits(self._into[name], view)

    def commit(self, plan: Plan) -> None:
        """Exchange the memory of the live weights for that of the new ones."""
        tensors = self._tensors()
        self._torn |= self._names(plan).keys()
        with torch.no_grad():
            for name, of in self._names(plan).items():
                live = tensors.get(name)
                if live is None or 0 in live.shape:
                    continue  # it goes by another name, or there is nothing to take over
                fresh = self._adopted.get(of)
                if fresh is not None:
                    self._swap(name, live, fresh, shared=True)
                elif of in self._swappable:
                    self._exchange(name, of, live)
                elif name in self._shared and self._is_swapped(name, live):
                    # Not written: it is everybody's memory.
                    self._swap(name, live, self._into[of].clone(), shared=False)
                else:
                    refuse_lost(name, live)
                    copy_bits(live, self._into[of])
                    continue
                if name in self._twins:
                    self._follow(name, live, tensors)
        self._torn -= self._names(plan).keys()

    def _follow(self, name: str, live: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Whatever was the same memory is so again, whether the plan names it or not."""
        for other in self._twins[name]:
            if tensors[other] is not live:
                self._swap(other, tensors[other], live.detach(), shared=name in self._shared)

    def _exchange(self, name: str, of: str, live: Tensor) -> None:
        """Give it what was written, and write to its own memory next time, unless that is everybody's."""
        before, fresh = live.detach(), self._into[of]
        private = not (name in self._shared and self._is_swapped(name, live))
        self._swap(name, live, fresh, shared=False)
        if self._staged.get(of) is fresh:
            if private and before.data_ptr() != fresh.data_ptr():
                self._staged[of] = before
            else:
                del self._staged[of]
                self._fits = ()

    def _swap(self, name: str, live: Tensor, memory: Tensor, *, shared: bool) -> None:
        live.data = memory
        self._swapped[name] = memory.data_ptr()
        (self._shared.add if shared else self._shared.discard)(name)

    def _forbidden(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """None: nothing is written there, it is exchanged."""
        return []

    def _mark(self, name: str, tensor: Tensor) -> tuple[object, ...]:
        if tensor.data_ptr() == self._swapped.get(name):  # where it lies changes with every version
            return (tensor.dtype, tensor.shape, tensor.stride())
        return super()._mark(name, tensor)

    def _is_swapped(self, name: str, tensor: Tensor) -> bool:
        return tensor.data_ptr() == self._swapped.get(name)

    def _extent(self, name: str, tensor: Tensor) -> tuple[int, int]:
        """From where to where its memory is: all of its storage, unless that is more than it was given."""
        if tensor.device.type != "cpu" or not tensor.numel():
            return (0, 0)
        if self._is_swapped(name, tensor):
            return (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
        storage = tensor.untyped_storage()
        return (storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def _can_swap(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_inference()


def _overlapping(extents: Mapping[str, tuple[int, int]]) -> dict[str, tuple[str, ...]]:
    """By name, all names in whose memory it lies, its own included; of one alone nothing is told."""
    found: dict[str, tuple[str, ...]] = {}
    group: list[str] = []
    reached = 0
    for name, (start, end) in sorted(extents.items(), key=lambda each: each[1]):
        if start == end:
            continue
        if start >= reached:
            group = []
        group.append(name)
        reached = max(reached, end) if len(group) > 1 else end
        if len(group) > 1:
            found |= dict.fromkeys(group, tuple(group))
    return found

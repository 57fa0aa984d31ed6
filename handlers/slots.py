"""Memory of the host for one whole copy of a rank's shards, made once and used again.

A *slot* is such a copy, as plain bytes, a tensor for each shard. Its memory is its own: nothing of the model
is in it. What is given back waits for the next copy of the same sizes, so that a trainer which keeps and
drops a version in each step allocates nothing after the first ones. Where the shards are on a GPU the memory
is pinned, and copies go at the speed of the bus; torch makes pinned memory in powers of two.

Each shard has a checksum, taken from the copy when it is complete. It finds who wrote to a copy by accident.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..fsm.errors import SnapshotSpoiled
from .holding import Holding

if TYPE_CHECKING:
    import torch

__all__ = ["Slot", "Slots", "write"]

_SPARE = 1
"""Copies that wait to be used again: one, of what is there while the model is another version."""


class Slot:
    """One copy."""

    __slots__ = ("_sums", "kind", "octets")

    def __init__(self, kind: tuple[tuple[int, bool], ...]) -> None:
        import torch

        self.kind = kind
        self.octets: tuple[torch.Tensor, ...] = tuple(
            torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned) for nbytes, pinned in kind
        )
        self._sums: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """How much it takes."""
        return sum(nbytes for nbytes, _ in self.kind)

    @property
    def checksum(self) -> str:
        """Of all of it; empty if it was read without."""
        import xxhash

        return xxhash.xxh3_128_hexdigest(" ".join(self._sums).encode()) if self._sums else ""

    def read(self, holdings: Sequence[Holding], *, checksum: bool) -> None:
        """Make it the copy of these shards."""
        self._sums = ()
        _settle(holdings)  # what a unit gathers ahead, on a stream of its own
        for holding, octets in zip(holdings, self.octets, strict=True):
            words = _words(holding.tensor)
            octets.view(words.dtype).view(words.shape).copy_(words, non_blocking=True)
        _settle(holdings)
        if checksum:
            self._sums = tuple(_sum(octets) for octets in self.octets)

    def verify(self, names: Iterable[str]) -> None:
        """Refuse if somebody has written to it; a slot that was read without checksums is believed.

        Raises:
            SnapshotSpoiled: with the name of the shard.
        """
        for name, octets, known in zip(names, self.octets, self._sums, strict=False):
            if _sum(octets) != known:
                raise SnapshotSpoiled(f"what is kept of {name!r} is not what was saved: somebody wrote to it")


def write(pairs: Iterable[tuple[Holding, torch.Tensor]]) -> None:
    """Write kept bytes into the live shards. What was done by half may be done again."""
    import torch

    done = list(pairs)
    _settle([holding for holding, _ in done])
    for holding, octets in done:
        words = _words(holding.tensor)
        words.copy_(octets.view(words.dtype).view(words.shape), non_blocking=True)
    _settle([holding for holding, _ in done])
    torch.clear_autocast_cache()  # inside autocast, the next pass would use what was cast of the old ones


class Slots:
    """The slots of one model on this rank."""

    def __init__(self) -> None:
        self._free: list[Slot] = []
        self._all: list[Slot] = []
        self.made = 0
        """How many were ever allocated."""

    @property
    def nbytes(self) -> int:
        """What all of them take, also those that wait to be used again."""
        return sum(slot.nbytes for slot in self._all)

    def take(self, holdings: Sequence[Holding], own: Slot | None) -> Slot:
        """One for these shards: ``own`` if it fits, one that waits, or a new one."""
        kind = tuple((each.shard.nbytes, each.tensor.is_cuda) for each in holdings)
        if own is not None and own.kind == kind:
            return own
        slot = next((each for each in self._free if each.kind == kind), None)
        if slot is not None:
            self._free.remove(slot)
            return slot
        self._all = [each for each in self._all if each not in self._free]  # they fit no more
        self._free.clear()
        slot = Slot(kind)
        self._all.append(slot)
        self.made += 1
        return slot

    def keep_only(self, needed: Sequence[Slot]) -> None:
        """Whatever else there is may be used again; what would be too much of it is let go of."""
        self._free = [slot for slot in self._all if slot not in needed][-_SPARE:]
        self._all = [slot for slot in self._all if slot in needed or slot in self._free]

    def close(self) -> None:
        """Let go of all of them."""
        self._free.clear()
        self._all.clear()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as numbers that torch copies bit by bit, also where it would make a 1 of any truth.

    It is detached, so no gradient has to be switched off, which an interrupt could leave switched off.
    """
    import torch

    whole = {torch.bool: torch.uint8, torch.complex32: torch.int32}.get(tensor.dtype)
    own = tensor.detach()
    return own if whole is None else own.view(whole)


def _settle(holdings: Iterable[Holding]) -> None:
    """Wait until every copy is done: host memory is looked at next, or used again."""
    import torch

    for device in {each.tensor.device for each in holdings if each.tensor.is_cuda}:
        torch.cuda.synchronize(device)


def _sum(octets: torch.Tensor) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(octets.numpy().data)

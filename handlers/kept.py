"""What there is of a model's versions on this rank, and the values that ``Snapshots`` hands out."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..fsm import checks
from ..fsm.errors import SnapshotError, VersionNotKept
from ..fsm.shards import Form, Layout
from .loan import Loan
from .slots import Slot, Slots
from .votes import Alone, Votes

if TYPE_CHECKING:
    import torch

__all__ = ["Keeping", "Loaded", "Snapshot"]

_WHERE = "Snapshots"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A version that is kept, as this rank has it.

    Args:
        version: its number.
        layout: what its shards are, and where they belong.
        fingerprint: of the layout.
        checksum: of the bytes; empty without ``verify``.
        nbytes: what the copy takes on this rank.
    """

    version: int
    layout: Layout
    fingerprint: str
    checksum: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was put back.

    Args:
        version: its number.
        names: of the shards that were written.
        skipped: of what is kept, but not in the model; only without ``strict``.
        untouched: of what is in the model, but not kept; only without ``strict``.
    """

    version: int
    names: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()


class Keeping:
    """What is kept, what is lent, and what is owed. What changes it are the words of ``Snapshots``."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        votes: Votes | None = None,
        buffers: bool = False,
        form: str | None = None,
        strict: bool = True,
        verify: bool = True,
    ) -> None:
        if not checks.has(model, ("named_parameters", "named_buffers", "named_modules")):
            raise checks.refusal(_WHERE, "model", model, "a torch.nn.Module is needed")
        if votes is not None and not checks.has(votes, ("vote", "close")):
            raise checks.refusal(_WHERE, "votes", votes, "RankVotes(store, rank, world_size) is needed")
        if form is not None and form not in Form.__members__:
            raise checks.refusal(
                _WHERE, "form", form, f"choose from {', '.join(map(repr, Form.__members__))}"
            )
        for name, value in (("buffers", buffers), ("strict", strict), ("verify", verify)):
            checks.flag(_WHERE, name, value)
        self.model = model
        self._votes: Votes = Alone() if votes is None else votes
        self._buffers, self._strict, self._verify = buffers, strict, verify
        self._form = None if form is None else Form[form]
        self._slots = Slots()
        self._kept: dict[int, tuple[Snapshot, Slot]] = {}
        self._turn = threading.RLock()
        self._loans: list[Loan] = []  # the model is another version for a while; the innermost last
        self._torn = ""  # why the weights are of no version
        self._owed: Loan | None = None  # what could not be put back

    @property
    def versions(self) -> tuple[int, ...]:
        """What is kept, oldest number first."""
        return tuple(sorted(self._kept))

    def __contains__(self, version: object) -> bool:
        return version in self._kept

    def __getitem__(self, version: int) -> Snapshot:
        """What is kept under that number.

        Raises:
            VersionNotKept: nothing is.
        """
        return self._of(version)[0]

    def shares(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether all of these lie in the model's own memory."""
        own = {*self.model.parameters(), *self.model.buffers()}
        places = {each.untyped_storage().data_ptr() for each in own}
        return all(each.untyped_storage().data_ptr() in places for each in tensors if each.numel())

    @property
    def world_size(self) -> int:
        """How many ranks keep these weights together."""
        return self._votes.world_size

    @property
    def nbytes(self) -> int:
        """The host memory of all copies on this rank, also of one that waits to be used again."""
        return self._slots.nbytes

    @property
    def allocations(self) -> int:
        """How often memory for a copy was made; copies that are given back are used again."""
        return self._slots.made

    def _of(self, version: int) -> tuple[Snapshot, Slot]:
        found = self._kept.get(version)
        if found is None:
            kept = ", ".join(map(str, self.versions)) or "none"
            raise VersionNotKept(f"version {version} is not kept; kept are: {kept}")
        return found

    def _not_lent(self, what: str) -> None:
        if self._loans:
            now = self._loans[-1].version
            raise SnapshotError(
                f"{what} inside version({now}): until that is left, the weights are those of version {now}; "
                "leave it first"
            )

    def _sweep(self) -> None:
        """What nobody needs waits to be used again."""
        needed = [slot for _, slot in self._kept.values()]
        loans = (*self._loans, *([] if self._owed is None else [self._owed]))
        self._slots.keep_only([*needed, *(loan.slot for loan in loans if loan.slot is not None)])

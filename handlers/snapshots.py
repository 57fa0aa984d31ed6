"""Snapshots: versions of the trainer's own weights, kept in host memory, and put back.

A trainer that samples with older weights than it trains with needs the older ones again, to work out what
they would have said, and then its own, bit for bit. And what an engine lost in a failed round can be sent
again only by who still has it. Both ask for the same: keep a version; be it for a while; be the newest again.

Every word here is one of all ranks, in two votes. Before anything changes, each rank looks whether it can: is
the version kept, is the copy what was saved, do names, shapes and places fit, is nobody in the middle of a
pass. If one cannot, nobody does, and each raises. After it, each says whether it is done; a rank that failed
then leaves weights of no version, which is remembered: they cannot be saved until a version was loaded.

A write that has begun is finished, whatever interrupts it; the interrupt is raised afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from ..fsm import checks
from ..fsm.errors import SetupError, SnapshotError, VersionNotKept
from ..fsm.shards import Form, Layout
from .forms import layout_of, shards_of
from .holding import Holding
from .loan import Loan, finished, noted_in
from .slots import Slot, Slots, write
from .votes import Alone, Votes

if TYPE_CHECKING:
    import torch

__all__ = ["Loaded", "Snapshot", "Snapshots"]

_WHERE = "Snapshots"

T = TypeVar("T")
Pairs = list[tuple[Holding, "torch.Tensor"]]


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


class Snapshots:
    """Versions of one model's weights on this rank of its trainer.

    Args:
        model: the module, as FSDP wrapped it if it did.
        votes: how the ranks come to one mind, :class:`.votes.RankVotes`; without, this is the only one.
        buffers: whether buffers are kept with the parameters.
        form: what the parameters are to be: ``"flat"`` (FSDP1), ``"dtensor"`` (FSDP2) or ``"plain"``. By
            default each is what it is; what is said and does not hold is refused when a version is saved.
        strict: whether each name has to be both kept and in the model. Without, what is in both is loaded.
        verify: whether each copy is compared with its checksum before it is loaded.

    Raises:
        SetupError: something of the wrong kind.
    """

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

    # -- looking ---------------------------------------------------------------------------------------------

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

    # -- words of all ranks ----------------------------------------------------------------------------------

    def save(self, version: int) -> Snapshot:
        """Keep the weights as they are under a number. If it stands for others, those are given up first.

        Raises:
            WeightsInUse: the model is gathered, or in the middle of a pass.
            SnapshotError: it cannot be kept; or inside ``version(...)``, where the weights are another's.
            SetupError: the parameters are not of the form that was said, or of several ranks without votes.
            RankError: a rank failed in it, is dead or late.
        """
        number = checks.step_of("Snapshots.save", "version", version)
        what, room = f"the save of version {number}", Loan(number)
        with self._turn:
            try:
                self._agree(what, lambda: self._make_room(room))
                self._kept.pop(number, None)
                interrupt = self._do(what, lambda: self._copy(room))
                self._kept[number] = self._complete(room)
            finally:
                self._sweep()
            snapshot = self._kept[number][0]
        if interrupt is not None:
            raise interrupt
        return snapshot

    def load(self, version: int) -> Loaded:
        """Make the model that version, for good.

        Raises:
            VersionNotKept: nothing is kept under that number, here or on another rank.
            LayoutChanged: it does not fit what the model is now. Nothing was written on any rank.
            SnapshotSpoiled: the copy was written to. Nothing was written on any rank.
            WeightsInUse: the model is gathered, or in the middle of a pass.
            SnapshotError: inside ``version(...)``, which would undo it.
            RankError: a rank failed in it, is dead or late.
        """
        what = f"the load of version {version}"
        with self._turn:
            pairs, loaded = self._agree(what, lambda: self._fit(version))
            interrupt = self._do(what, lambda: self._overwrite(what, pairs))
            self._torn = ""
        if interrupt is not None:
            raise interrupt
        return loaded

    @contextmanager
    def version(self, version: int) -> Iterator[Loaded]:
        """The model is that version for a while; afterwards it is what it was, however the block ends.

        What the block does to the weights is gone afterwards. Blocks may be inside one another.

        Raises:
            SnapshotError: as ``load``; then the block is not entered, and the model is what it was. Or the
                weights could not be put back: if the block itself raised, a note of its error says so.
            RankError: a rank failed in it, is dead or late.
        """
        loan = Loan(version)
        try:
            try:
                loaded = self._lend(loan)
                yield loaded
            except BaseException as error:
                with noted_in(error):
                    self._put_back(loan)
                raise
            self._put_back(loan)
        finally:
            self._put_back(loan)  # if an interrupt came in the lines above; it does so once

    # -- words of this rank ----------------------------------------------------------------------------------

    def clear(self, version: int) -> None:
        """Give a version up; does nothing if it is not kept. A vote finds out where only some ranks did."""
        with self._turn:
            self._kept.pop(version, None)
            self._sweep()

    def close(self) -> None:
        """Give up all versions and their memory. Idempotent."""
        with self._turn:
            self._kept.clear()
            self._slots.close()
            self._votes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        self.close()
        return False

    # -- looking first ---------------------------------------------------------------------------------------

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

    def _make_room(self, room: Loan) -> None:
        """What is to be kept, and where."""
        self._not_lent(f"version {room.version} was to be saved")
        if self._torn:
            raise SnapshotError(f"the weights are of no version, {self._torn}: load one first")
        holdings = shards_of(self.model, buffers=self._buffers)
        layout = layout_of(holdings)
        layout.expect(self._form)
        if layout.ranks > 1 and self.world_size == 1:
            raise SetupError(
                f"Snapshots: the weights are spread over {layout.ranks} ranks, which have to save and load "
                f"together: give votes=RankVotes(store, rank, {layout.ranks}) on each"
            )
        older = self._kept.get(room.version)
        room.holdings = holdings
        room.slot = self._slots.take(holdings, older[1] if older else None)

    def _fit(self, version: int) -> tuple[Pairs, Loaded]:
        """What is to be written where, for good."""
        self._not_lent(f"version {version} was to be loaded")
        return self._pairs(version, shards_of(self.model, buffers=self._buffers))

    def _pairs(self, version: int, holdings: list[Holding]) -> tuple[Pairs, Loaded]:
        snapshot, slot = self._of(version)
        if self._verify:
            slot.verify(shard.name for shard in snapshot.layout.shards)
        here = {each.shard.name: each for each in holdings}
        kept = dict(zip((each.name for each in snapshot.layout.shards), slot.octets, strict=True))
        names = snapshot.layout.fitting(layout_of(holdings), strict=self._strict)
        skipped = tuple(name for name in kept if name not in here)
        untouched = tuple(name for name in here if name not in kept)
        loaded = Loaded(version, names, skipped, untouched)
        return [(here[name], kept[name]) for name in names], loaded

    def _overwrite(self, what: str, pairs: Pairs) -> None:
        self._torn = f"since {what} was not completed"
        write(pairs)

    def _copy(self, room: Loan) -> None:
        if room.slot is not None:
            room.slot.read(room.holdings, checksum=self._verify)

    def _complete(self, room: Loan) -> tuple[Snapshot, Slot]:
        slot, layout = room.slot, layout_of(list(room.holdings))
        if slot is None:
            raise SnapshotError(f"version {room.version} has no copy")
        return Snapshot(room.version, layout, layout.fingerprint, slot.checksum, slot.nbytes), slot

    def _sweep(self) -> None:
        """What nobody needs waits to be used again."""
        needed = [slot for _, slot in self._kept.values()]
        self._slots.keep_only([*needed, *(loan.slot for loan in self._loans if loan.slot is not None)])

    # -- for a while -----------------------------------------------------------------------------------------

    def _lend(self, loan: Loan) -> Loaded:
        what = f"version({loan.version})"
        with self._turn:
            self._loans = [*self._loans, loan]
            pairs, loaded = self._agree(what, lambda: self._borrow(loan))
            loan.begun = True
            interrupt = self._do(what, lambda: write(pairs))
        if interrupt is not None:
            raise interrupt
        return loaded

    def _borrow(self, loan: Loan) -> tuple[Pairs, Loaded]:
        """What is to be written for a while; what is there is copied before."""
        holdings = shards_of(self.model, buffers=self._buffers)
        found = self._pairs(loan.version, holdings)
        loan.holdings, loan.slot = holdings, self._slots.take(holdings, None)
        self._copy(loan)
        return found

    def _put_back(self, loan: Loan) -> None:
        """This rank's own first, whatever the others say; then all of them hear whether it worked."""
        with self._turn:
            interrupt = finished(lambda: self._return(loan))
        if interrupt is not None:
            raise interrupt

    def _return(self, loan: Loan) -> None:
        if loan.over:
            return
        error: Exception | None = None
        if loan.begun and not loan.told:
            try:
                self._write_back(loan)
            except Exception as failed:  # noqa: BLE001 - the others have to hear of it first
                self._torn, error = f"since version({loan.version}) could not be left", failed
        self._loans = [each for each in self._loans if each is not loan]
        asked, loan.told = loan.begun and not loan.told, True
        loan.slot = None
        self._sweep()
        loan.over = True
        if asked:
            self._votes.vote(f"the end of version({loan.version})", error)

    def _write_back(self, loan: Loan) -> None:
        # A pass that the block was in the middle of is over, since the block is.
        here = shards_of(self.model, buffers=self._buffers, ended=True)
        names = layout_of(list(loan.holdings)).fitting(layout_of(here), strict=True)
        live = {each.shard.name: each for each in here}
        octets = loan.slot.octets if loan.slot is not None else ()
        write(zip((live[name] for name in names), octets, strict=True))

    # -- in two votes ----------------------------------------------------------------------------------------

    def _agree(self, what: str, look: Callable[[], T]) -> T:
        """The first vote: every rank can, or none does."""
        try:
            found = look()
        except Exception as error:
            self._votes.vote(what, error)
            raise
        self._votes.vote(what, None)
        return found

    def _do(self, what: str, work: Callable[[], object]) -> BaseException | None:
        """The second vote: every rank has. Hands back an interrupt that came meanwhile."""
        error: Exception | None = None
        interrupt: BaseException | None = None
        try:
            interrupt = finished(work)
        except Exception as failed:  # noqa: BLE001 - the vote raises it
            error = failed
        self._votes.vote(f"the end of {what}", error)
        return interrupt

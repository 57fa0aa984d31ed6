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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from ..fsm import checks
from ..fsm.errors import SetupError, SnapshotError
from .forms import layout_of, shards_of
from .holding import Holding
from .kept import Keeping, Loaded, Snapshot
from .loan import Loan, finished, noted_in
from .slots import Slot, write

if TYPE_CHECKING:
    import torch

__all__ = ["Loaded", "Snapshot", "Snapshots"]

T = TypeVar("T")
Pairs = list[tuple[Holding, "torch.Tensor"]]


class Snapshots(Keeping):
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

    # -- words of all ranks ----------------------------------------------------------------------------------

    def save(self, version: int) -> Snapshot:
        """Keep the weights as they are under a number. If it stands for others, those are overwritten.

        An interrupt leaves the number with the one or the other, whole. With several ranks it is given up if
        not all of them have saved.

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
                interrupt = self._save(what, room)
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
            self._torn, self._owed = "", None
            self._sweep()
        if interrupt is not None:
            raise interrupt
        return loaded

    @contextmanager
    def version(self, version: int) -> Iterator[Loaded]:
        """The model is that version for a while; afterwards it is what it was, however the block ends.

        What the block does to the weights is gone afterwards. Blocks may be inside one another, in one
        thread. If the outer one is left first, the inner one puts back at its end what the outer one would.

        Raises:
            SnapshotError: as ``load``, or another thread is in a block; then the block is not entered, and
                the model is what it was. Or the weights could not be put back: if the block itself raised, a
                note of its error says so. They are kept for :meth:`put_back`.
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

    def put_back(self) -> None:
        """Try again what a block could not do at its end: make the weights what they were before it.

        Until then those are kept, and nothing else is saved. Does nothing on a rank that has its own. A
        version that is loaded for good takes their place, and they are given up.

        Raises:
            LayoutChanged: they still do not fit. Nothing was written on any rank.
            SnapshotError: inside ``version(...)``.
            RankError: a rank failed in it, is dead or late.
        """
        what = "the weights' way back"
        with self._turn:
            pairs = self._agree(what, self._owing)
            interrupt = self._do(what, lambda: write(pairs))
            if self._owed is not None:
                self._torn, self._owed = self._owed.torn, None
            self._sweep()
        if interrupt is not None:
            raise interrupt

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
            self._owed = None
            self._slots.close()
            self._votes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        self.close()
        return False

    # -- looking first ---------------------------------------------------------------------------------------

    def _make_room(self, room: Loan) -> None:
        """What is to be kept, and where."""
        self._not_lent(f"version {room.version} was to be saved")
        if self._torn:
            back = " or put_back() those that were there" if self._owed is not None else ""
            raise SnapshotError(f"the weights are of no version, {self._torn}: load one{back} first")
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

    def _save(self, what: str, room: Loan) -> BaseException | None:
        try:
            return self._do(what, lambda: self._keep(room))
        except BaseException:
            if self.world_size > 1:  # another rank may have given it up
                self._kept.pop(room.version, None)
            raise

    def _keep(self, room: Loan) -> None:
        """All of it may be begun again, so an interrupt in it loses nothing."""
        self._kept.pop(room.version, None)  # its memory may be what is written to
        self._copy(room)
        self._kept[room.version] = self._complete(room)

    def _copy(self, room: Loan) -> None:
        if room.slot is not None:
            room.slot.read(room.holdings, checksum=self._verify)

    def _complete(self, room: Loan) -> tuple[Snapshot, Slot]:
        slot, layout = room.slot, layout_of(list(room.holdings))
        if slot is None:
            raise SnapshotError(f"version {room.version} has no copy")
        return Snapshot(room.version, layout, layout.fingerprint, slot.checksum, slot.nbytes), slot

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
        self._not_in_another_thread(loan)
        holdings = shards_of(self.model, buffers=self._buffers)
        found = self._pairs(loan.version, holdings)
        loan.torn, loan.holdings, loan.slot = self._torn, holdings, self._slots.take(holdings, None)
        self._copy(loan)
        return found

    def _not_in_another_thread(self, loan: Loan) -> None:
        others = [each for each in self._loans if each.thread != loan.thread]
        if others:
            raise SnapshotError(
                f"version({loan.version}) inside version({others[-1].version}) of another thread: each would "
                "use the other's weights; leave that first"
            )

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
                self._end(loan)
            except Exception as failed:  # noqa: BLE001 - the others have to hear of it first
                self._owe(loan, failed)
                error = failed
        asked, loan.told = loan.begun and not loan.told, True
        self._loans = [each for each in self._loans if each is not loan]
        if self._owed is not loan:
            loan.slot = None
        self._sweep()
        loan.over = True
        if asked:
            self._votes.vote(f"the end of version({loan.version})", error)

    def _end(self, loan: Loan) -> None:
        """The weights are what they were; or the block inside this one, which is not left yet, will do it."""
        for inner in self._loans[self._loans.index(loan) + 1 :]:
            inner.holdings, inner.slot, inner.torn = loan.holdings, loan.slot, loan.torn
            return
        # A pass that the block was in the middle of is over, since the block is.
        write(self._before(loan, ended=True))
        self._torn = loan.torn
        if not self._torn:
            self._owed = None  # of a block inside this one, and older than what is there now

    def _owe(self, loan: Loan, failed: Exception) -> None:
        """The only copy of the newest weights is kept until it is written back."""
        if self._owed is None or not loan.torn:
            self._owed = loan
        self._torn = f"since version({loan.version}) could not be left"
        failed.add_note(
            f"the weights from before version({loan.version}) are still kept: mend the model, then call "
            "Snapshots.put_back() on every rank"
        )

    def _owing(self) -> Pairs:
        self._not_lent("the weights were to be put back")
        return [] if self._owed is None else self._before(self._owed, ended=False)

    def _before(self, loan: Loan, *, ended: bool) -> Pairs:
        """What was there, and where it belongs now."""
        here = shards_of(self.model, buffers=self._buffers, ended=ended)
        names = layout_of(list(loan.holdings)).fitting(layout_of(here), strict=True)
        live = {each.shard.name: each for each in here}
        octets = loan.slot.octets if loan.slot is not None else ()
        return list(zip((live[name] for name in names), octets, strict=True))

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

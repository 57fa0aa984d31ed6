"""What a failed round can be rolled back to: the weights of the published version, while the trainer goes on.

An engine that a round left dirty is brought back by a full resend of the published version, if the trainer
still has those bytes; else it waits for the next version. As a handler of the rounds this keeps them: each
round's weights under the round's version, before any engine is told anything. When that is published, the one
before is given up. If the round fails, the one before stays, and its own until the next round: a round that
failed late may have been published::

    if not result.ok:
        with snapshots.version(sync.version()):
            sync.catch_up(step, model)

Engines that are not at the published version get it, bit for bit, and the trainer has its own weights again.

A trainer of several ranks saves together: each of them has this handler, and rank 0 calls the others to
prepare while its own does. So a rank that cannot save fails the round before an engine is told anything.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..fsm import checks
from ..fsm.errors import SnapshotError
from ..fsm.executors import RoundView, Undo
from .snapshots import Snapshots

__all__ = ["Rollback"]


class Rollback:
    """An executor that keeps the weights of the published version, and of the round that runs.

    Args:
        snapshots: where they are kept, of the model that is handed over. Versions under numbers of other
            rounds are left alone.

    Raises:
        SetupError: these are none.
    """

    name = "rollback"

    def __init__(self, snapshots: Snapshots) -> None:
        checks.kind("Rollback", "snapshots", snapshots, Snapshots, "Snapshots(model) is needed")
        self._snapshots = snapshots
        self._published: int | None = None
        self._failed: set[int] = set()

    def prepare(self, round: RoundView) -> Undo | None:
        """Keep what the round sends. The undo leaves that to the next round, and what is published alone.

        Raises:
            SnapshotError: the round sends a private copy, so the model may be something else by now.
        """
        version = round.session.version
        if version == self._published:
            return None  # a catch-up with the published version, which is kept
        self._refuse_copies(round)
        self._give_up(self._failed)
        self._snapshots.save(version)
        return lambda: self._failed.add(version)

    def clean(self, round: RoundView) -> None:
        """It is published: what was published before is given up, and what failed since."""
        before, self._published = self._published, round.session.version
        self._give_up({*self._failed, *([] if before is None else [before])} - {self._published})

    def _give_up(self, versions: Iterable[int]) -> None:
        for version in tuple(versions):
            self._snapshots.clear(version)
        self._failed.clear()

    def _refuse_copies(self, round: RoundView) -> None:
        if self._snapshots.world_size > 1:
            return  # what is sent was gathered; and to train on, a rank needs those that wait for the round
        if not self._snapshots.shares(getattr(round.weights, "tensors", {}).values()):
            raise SnapshotError(
                "Rollback keeps the model as it is, and this round sends a private copy of it: hand over by "
                "on_step_end, or begin(..., snapshot=False)"
            )

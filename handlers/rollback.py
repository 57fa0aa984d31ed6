"""What a failed round can be rolled back to: the weights of the published version, while the trainer goes on.

An engine that a round left dirty is brought back by a full resend of the published version, if the trainer
still has those bytes; else it waits for the next version. As a handler of the rounds this keeps them: each
round's weights under the round's version, before any engine is told anything. When that is published, those
before are given up. If the round fails, the one before stays, and its own until the next round: a round that
failed late may have been published::

    if not result.ok:
        with snapshots.version(sync.version()):
            sync.catch_up(step, model)

Engines that are not at the published version get it, bit for bit, and the trainer has its own weights again.

What is published is asked of nobody but the ledger: a clean-up that did not come here, because another
handler failed before, changes nothing. Rank 0 tells the others what the ledger said.

A trainer of several ranks saves together: each of them has this handler, and rank 0 calls the others to
prepare while its own does. So a rank that cannot save fails the round before an engine is told anything.
"""

from __future__ import annotations

from collections.abc import Collection

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
        self._saved: set[int] = set()

    def prepare(self, round: RoundView) -> Undo | None:
        """Keep what the round sends. The undo leaves that to the next round, and what is published alone.

        Raises:
            SnapshotError: the round sends a private copy, so the model may be something else by now.
        """
        version, bound = round.session.version, round.bound
        if version in (bound or ()) and version in self._snapshots:
            return None  # a catch-up: its number stands for the very bytes that are kept
        self._refuse_copies(round)
        if bound is not None:
            self._give_up_all_but({*bound, version})
        self._saved.add(version)
        self._snapshots.save(version)
        return _nothing

    def clean(self, round: RoundView) -> None:
        """It is published: what was kept before is given up."""
        self._give_up_all_but({round.session.version})

    def _give_up_all_but(self, needed: Collection[int]) -> None:
        for version in self._saved.difference(needed):
            self._snapshots.clear(version)
        self._saved.intersection_update(needed)

    def _refuse_copies(self, round: RoundView) -> None:
        if round.copied:
            raise SnapshotError(
                "Rollback keeps the model as it is, and this round sends a private copy of it: hand over by "
                "on_step_end, or begin(..., snapshot=False)"
            )
        if self._snapshots.world_size > 1:
            return  # what is sent was gathered
        if not self._snapshots.shares(getattr(round.weights, "tensors", {}).values()):
            raise SnapshotError(
                "Rollback keeps the model of its Snapshots, and this round sends other tensors than that "
                "model's own: hand that model over, or give Snapshots the model that is handed over"
            )


def _nothing() -> None:
    """Whether the round was published after all, only the next one knows for certain."""

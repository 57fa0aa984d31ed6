"""The tree of errors.

WeightSyncError            everything this library raises on purpose
 |- RoundError             something was asked of a round that it does not do
 |   |- IllegalEvent       a fact that the table does not allow here; nothing changed
 |   |   `- GuardFailed    a guard raised; the event is refused, nothing changed
 |   |- PortClosed         the round moved on; whoever holds the port is cancelled
 |   `- Reentrant          fired from inside a commit
 |- TableError             a table breaks a law; raised at import, never at run time
 |- ReplayMismatch         a log does not fold to what it says, or is another table's
 |- LogUnreadable          a line of a log cannot be read
 |- PlanError              the plan cannot be made, or does not fit what an engine holds
 |   `- PlanUnknown        only a plan's fingerprint was sent, and the engine does not know it (any more)
 |- LockError              the lock service refused
 |- LedgerError            the version ledger refused
 |   |- VersionAhead       a sample's version is newer than everything in the ledger
 |   `- VersionUnknown     a sample was generated with weights of no version
 |- EngineError            an engine refused or failed
 |   |- StaleSession       a frame, commit or open of a session that is not the open one
 |   |- EngineGone         the engine is dead, or another incarnation answers in its place
 |   |- EngineSilent       no answer within its limit
 |   |- WeightsGone        it does not hold any more what its commits have left
 |   |- EngineResting      left out of a round, because it has failed to catch up
 |   |- EnginePaused       generation waited longer than it wanted to for the engine to resume
 |   `- ReceiptRefused     a receipt that proves something else than this round
 |- TransportError         bytes could not be moved
 |- BridgeError            a coroutine could not be run from synchronous code
 |   |- BridgeReentered    asked for from an event loop, which would wait for itself
 |   |- BridgeTimedOut     it took longer than its limit
 |   |- BridgeClosed       the bridge is closed, or was while it ran
 |   `- BridgeLost         the event loop ended under it
 |- RankError              a trainer of several ranks cannot go on
 |   |- RankFailed         a rank raised in its part
 |   |   `- BarrierAborted  a rank voted that it cannot go on, or gave the barrier up
 |   `- RankLost           a rank is dead, frozen or cut off
 |       `- BarrierTimeout  ranks did not come to a barrier within its bound
 |- MemoryShort            the other side of a device lacks memory that this process uses
 |- ResidencyError         a part cannot be brought into memory, or not be let go of
 |   `- NotRebuilt         parameters are not, or would not be, what their masters make of them
 |- RaisedElsewhere        another rank raised it; this one is told
 |- SnapshotError          the trainer's weights cannot be kept, or not be put back
 |   |- VersionNotKept     nothing is kept under that number
 |   |- LayoutChanged      what is kept does not fit what the model is now
 |   |- WeightsInUse       they are gathered, or in the middle of a pass
 |   `- SnapshotSpoiled    what is kept is not what was saved
 |- RoundTimedOut          a state, or the round, ran past its deadline
 |- RoundInProgress        a second round was asked for while one runs, and the policy refuses
 |- RoundCancelled         somebody cancelled the round
 |- LeaseEnded              the lock's lease ran out, or was given to someone else
 |- SetupError             the parts do not fit together; refused before anything moved
 |   |- BackendUnavailable  an optional back end that is not there, or is broken
 |   |- EngineRefused      an engine that no round can be run with; an EngineError, too
 |   |   |- EngineUnknown  never reached, or another one answers under its name
 |   |   |- EngineAsleep   its weights are not in memory
 |   |   |- EngineTaken    in the hands of a trainer with another lock
 |   |   `- WorldMismatch  it has another number of ranks than was declared
 |   `- RanksDisagree      the trainer's ranks are not at the same hand-over
 |       `- PlanMismatch   they do not bring the same tensors
 `- SyncFailed             raised by ``RoundResult.require`` only
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "BackendUnavailable",
    "BarrierAborted",
    "BarrierTimeout",
    "BridgeClosed",
    "BridgeError",
    "BridgeLost",
    "BridgeReentered",
    "BridgeTimedOut",
    "EngineAsleep",
    "EngineError",
    "EngineGone",
    "EnginePaused",
    "EngineRefused",
    "EngineResting",
    "EngineSilent",
    "EngineTaken",
    "EngineUnknown",
    "GuardFailed",
    "IllegalEvent",
    "LayoutChanged",
    "LeaseEnded",
    "LedgerError",
    "LockError",
    "LogUnreadable",
    "MemoryShort",
    "NotRebuilt",
    "PlanError",
    "PlanMismatch",
    "PlanUnknown",
    "PortClosed",
    "RaisedElsewhere",
    "RankError",
    "RankFailed",
    "RankLost",
    "RanksDisagree",
    "ReceiptRefused",
    "Reentrant",
    "ReplayMismatch",
    "ResidencyError",
    "RoundCancelled",
    "RoundError",
    "RoundInProgress",
    "RoundTimedOut",
    "SetupError",
    "SnapshotError",
    "SnapshotSpoiled",
    "StaleSession",
    "SyncFailed",
    "TableError",
    "TransportError",
    "VersionAhead",
    "VersionNotKept",
    "VersionUnknown",
    "WeightSyncError",
    "WeightsGone",
    "WeightsInUse",
    "WorldMismatch",
]


class WeightSyncError(Exception):
    """Everything this library raises on purpose."""


class RoundError(WeightSyncError):
    """Something was asked of a round that it does not do."""


class IllegalEvent(RoundError):
    """A fact that the table does not allow in this state. Nothing changed."""


class GuardFailed(IllegalEvent):
    """A guard raised, so the event is refused. Nothing changed; ``__cause__`` is the guard's error."""


class PortClosed(RoundError):
    """The round moved on: whoever still holds this port is cancelled and should stop."""


class Reentrant(RoundError):
    """An event was fired from inside the commit of another event of the same round."""


class TableError(WeightSyncError):
    """A table breaks one of its laws. Raised when the module is imported."""


class ReplayMismatch(WeightSyncError):
    """A log does not fold to the states it names, or belongs to another table."""


class LogUnreadable(WeightSyncError):
    """A line of a state log cannot be read."""


class PlanError(WeightSyncError):
    """A plan cannot be made, or does not fit what an engine holds."""


class PlanUnknown(PlanError):
    """Only the fingerprint of a plan was sent, and the engine does not know it: send the whole plan."""


class LockError(WeightSyncError):
    """The lock service refused."""


class LedgerError(WeightSyncError):
    """The version ledger refused."""


class VersionAhead(LedgerError):
    """A sample was generated with a version that the ledger has never heard of."""


class VersionUnknown(LedgerError):
    """A sample was generated, in part at least, with weights that have no version."""


class EngineError(WeightSyncError):
    """An engine refused or failed."""


class StaleSession(EngineError):
    """A frame, commit or open that belongs to another (round, epoch) than the engine's session."""


class WeightsGone(EngineError):
    """The engine does not hold any more what its commits have left."""


class EngineGone(EngineError):
    """The engine is dead, or another incarnation answers in its place."""


class EngineSilent(EngineError):
    """The engine gave no answer within its limit."""


class EngineResting(EngineError):
    """The engine has failed to catch up, and is left out of rounds for a while."""


class EnginePaused(EngineError):
    """Generation waited for the engine to resume, for longer than it wanted to wait."""


class ReceiptRefused(EngineError):
    """A receipt proves something else than this round, or names an engine that takes no part in it."""


class TransportError(WeightSyncError):
    """Bytes could not be moved."""


class BridgeError(WeightSyncError):
    """A coroutine could not be run from synchronous code."""


class BridgeReentered(BridgeError):
    """Asked for from a thread that runs an event loop, which would wait for itself. Await it there."""


class BridgeTimedOut(BridgeError):
    """It took longer than its limit."""


class BridgeClosed(BridgeError):
    """The bridge is closed, or was while it ran."""


class BridgeLost(BridgeError):
    """The event loop ended under it, or has ended once too often."""


class RankError(WeightSyncError):
    """A trainer of several ranks cannot go on. Every rank is told, with the round and where it was."""


class RankFailed(RankError):
    """A rank raised in its part of a hand-over; the message has the rank and its error."""


class RankLost(RankError):
    """A rank is dead, frozen or cut off, or the store that the ranks share does not answer."""


class BarrierAborted(RankFailed):
    """A barrier is passed by nobody: a rank voted against it, gave it up, or came when it was over.

    Args:
        ranks: whose fault it is, as far as that is known.
    """

    def __init__(self, text: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class BarrierTimeout(RankLost):
    """A barrier is passed by nobody: ranks did not come to it in time.

    Args:
        ranks: those that are missing.
    """

    def __init__(self, text: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class MemoryShort(WeightSyncError):
    """The other side of a device lacks memory after everything unused was handed back: the rest is in use."""


class RaisedElsewhere(WeightSyncError):
    """The error was raised on another rank, which has the object; here are its kind and its text."""


class ResidencyError(WeightSyncError):
    """A part of the trainer or of an engine cannot be brought into memory, or not be let go of."""


class NotRebuilt(ResidencyError):
    """Parameters of low precision are not what their masters make of them, bit for bit."""


class SnapshotError(WeightSyncError):
    """The trainer's weights cannot be kept, or not be put back."""


class VersionNotKept(SnapshotError):
    """Nothing is kept under that number."""


class LayoutChanged(SnapshotError):
    """What is kept does not fit what the model is now: names, shapes, dtypes, or who has which part."""


class WeightsInUse(SnapshotError):
    """The weights are gathered (``summon_full_params``), or the model is in the middle of a pass."""


class SnapshotSpoiled(SnapshotError):
    """What is kept is not what was saved: somebody wrote to it."""


class RoundTimedOut(WeightSyncError):
    """A state, or the whole round, ran past its deadline."""


class RoundInProgress(WeightSyncError):
    """A second round was asked for while one runs, and the policy refuses that."""


class RoundCancelled(WeightSyncError):
    """The round was cancelled from outside."""


class LeaseEnded(WeightSyncError):
    """The lease on the lock ran out or could not be renewed in time."""


class SetupError(WeightSyncError):
    """The parts handed to ``WeightSync`` do not fit together. Refused before anything moved."""


class BackendUnavailable(SetupError):
    """An optional back end is not there, or is broken; ``__cause__`` is what its import raised, if it did."""


class EngineRefused(EngineError, SetupError):
    """No round can be run with this engine. Said before the lock is asked for, where that can be known."""


class EngineUnknown(EngineRefused):
    """An engine that was never reached, or a link that leads to another one."""


class EngineAsleep(EngineRefused):
    """The engine's weights are not in memory: there is nothing to write to."""


class EngineTaken(EngineRefused):
    """A trainer with another lock has the engine, or had it, under a newer epoch than this lock can grant."""


class WorldMismatch(EngineRefused):
    """The engine has another number of ranks than was declared."""


class RanksDisagree(SetupError):
    """The ranks of the trainer are not at the same hand-over."""


class PlanMismatch(RanksDisagree):
    """The ranks of the trainer do not bring the same tensors."""


class SyncFailed(WeightSyncError):
    """A round did not do what was asked. ``__cause__`` is the first error, the very object."""

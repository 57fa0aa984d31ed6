"""Weight synchronisation for reinforcement learning, as an explicit state machine.

The public names. Each is imported when it is first used: on a bare node, ``import weightsync`` loads neither
torch nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .engine import receiver_for as receiver_for
    from .follower import FollowerSync as FollowerSync
    from .fsm.errors import BackendUnavailable as BackendUnavailable
    from .fsm.errors import BarrierAborted as BarrierAborted
    from .fsm.errors import BarrierTimeout as BarrierTimeout
    from .fsm.errors import BridgeClosed as BridgeClosed
    from .fsm.errors import BridgeError as BridgeError
    from .fsm.errors import BridgeLost as BridgeLost
    from .fsm.errors import BridgeReentered as BridgeReentered
    from .fsm.errors import BridgeTimedOut as BridgeTimedOut
    from .fsm.errors import EngineAsleep as EngineAsleep
    from .fsm.errors import EngineError as EngineError
    from .fsm.errors import EngineGone as EngineGone
    from .fsm.errors import EngineResting as EngineResting
    from .fsm.errors import EngineSilent as EngineSilent
    from .fsm.errors import EngineTaken as EngineTaken
    from .fsm.errors import EngineUnknown as EngineUnknown
    from .fsm.errors import LayoutChanged as LayoutChanged
    from .fsm.errors import LeaseEnded as LeaseEnded
    from .fsm.errors import MemoryShort as MemoryShort
    from .fsm.errors import NotRebuilt as NotRebuilt
    from .fsm.errors import PlanError as PlanError
    from .fsm.errors import PlanMismatch as PlanMismatch
    from .fsm.errors import RankError as RankError
    from .fsm.errors import RankFailed as RankFailed
    from .fsm.errors import RankLost as RankLost
    from .fsm.errors import RanksDisagree as RanksDisagree
    from .fsm.errors import ReceiptRefused as ReceiptRefused
    from .fsm.errors import ResidencyError as ResidencyError
    from .fsm.errors import RoundCancelled as RoundCancelled
    from .fsm.errors import RoundInProgress as RoundInProgress
    from .fsm.errors import RoundTimedOut as RoundTimedOut
    from .fsm.errors import SetupError as SetupError
    from .fsm.errors import SnapshotError as SnapshotError
    from .fsm.errors import SnapshotSpoiled as SnapshotSpoiled
    from .fsm.errors import SyncFailed as SyncFailed
    from .fsm.errors import TransportError as TransportError
    from .fsm.errors import VersionAhead as VersionAhead
    from .fsm.errors import VersionNotKept as VersionNotKept
    from .fsm.errors import VersionUnknown as VersionUnknown
    from .fsm.errors import WeightsGone as WeightsGone
    from .fsm.errors import WeightsInUse as WeightsInUse
    from .fsm.errors import WeightSyncError as WeightSyncError
    from .fsm.errors import WorldMismatch as WorldMismatch
    from .fsm.ledger import StaleVersion as StaleVersion
    from .fsm.lock import LockError as LockError
    from .fsm.policy import LORA as LORA
    from .fsm.policy import Policy as Policy
    from .fsm.residency import offload as offload
    from .fsm.residency import onload as onload
    from .fsm.results import EngineRow as EngineRow
    from .fsm.results import PassedOver as PassedOver
    from .fsm.results import RoundResult as RoundResult
    from .fsm.spans import SampleVersions as SampleVersions
    from .fsm.spans import Segment as Segment
    from .fsm.states import Disposition as Disposition
    from .fsm.states import EngineState as EngineState
    from .fsm.states import Outcome as Outcome
    from .fsm.states import State as State
    from .handlers.cache_release import CacheRelease as CacheRelease
    from .handlers.exports import CachedExport as CachedExport
    from .handlers.fp8_export import Fp8Exporter as Fp8Exporter
    from .handlers.fsdp_export import FsdpExporter as FsdpExporter
    from .handlers.ledger import FileLedger as FileLedger
    from .handlers.local_engine import LocalEngine as LocalEngine
    from .handlers.lock import LocalLock as LocalLock
    from .handlers.log import StateLog as StateLog
    from .handlers.megatron_export import MegatronExporter as MegatronExporter
    from .handlers.monitor import HealthWatch as HealthWatch
    from .handlers.progress import Progress as Progress
    from .handlers.ranks import TrainerRanks as TrainerRanks
    from .handlers.ray_engine import RayEngine as RayEngine
    from .handlers.ray_lock import RayLock as RayLock
    from .handlers.ray_store import RayStore as RayStore
    from .handlers.rebuilt import Rebuilt as Rebuilt
    from .handlers.residency import Residency as Residency
    from .handlers.residency import shift as shift
    from .handlers.resident_parts import CalledPart as CalledPart
    from .handlers.resident_parts import Gated as Gated
    from .handlers.resident_parts import HostCopy as HostCopy
    from .handlers.resident_parts import Scratch as Scratch
    from .handlers.retention import Retention as Retention
    from .handlers.rollback import Rollback as Rollback
    from .handlers.snapshots import Snapshots as Snapshots
    from .handlers.toggle import Toggle as Toggle
    from .handlers.toggle import expandable_segments as expandable_segments
    from .handlers.votes import RankVotes as RankVotes
    from .ray_receiver import RayReceiver as RayReceiver
    from .ray_receiver import ray_engine as ray_engine
    from .sync import Pending as Pending
    from .sync import WeightSync as WeightSync
    from .transports.collective import CollectiveTransport as CollectiveTransport
    from .transports.cuda_ipc import CudaIpcTransport as CudaIpcTransport
    from .transports.memory import MemoryTransport as MemoryTransport
    from .transports.objects import ObjectStoreTransport as ObjectStoreTransport
    from .transports.shm import SharedMemoryTransport as SharedMemoryTransport
    from .transports.weights import TorchWeights as TorchWeights

_HOME = {
    "BackendUnavailable": ".fsm.errors",
    "BarrierAborted": ".fsm.errors",
    "BarrierTimeout": ".fsm.errors",
    "BridgeClosed": ".fsm.errors",
    "BridgeError": ".fsm.errors",
    "BridgeLost": ".fsm.errors",
    "BridgeReentered": ".fsm.errors",
    "BridgeTimedOut": ".fsm.errors",
    "CacheRelease": ".handlers.cache_release",
    "CachedExport": ".handlers.exports",
    "CalledPart": ".handlers.resident_parts",
    "CollectiveTransport": ".transports.collective",
    "CudaIpcTransport": ".transports.cuda_ipc",
    "Disposition": ".fsm.states",
    "EngineAsleep": ".fsm.errors",
    "EngineError": ".fsm.errors",
    "EngineGone": ".fsm.errors",
    "EngineResting": ".fsm.errors",
    "EngineRow": ".fsm.results",
    "EngineSilent": ".fsm.errors",
    "EngineState": ".fsm.states",
    "EngineTaken": ".fsm.errors",
    "EngineUnknown": ".fsm.errors",
    "FileLedger": ".handlers.ledger",
    "FollowerSync": ".follower",
    "Fp8Exporter": ".handlers.fp8_export",
    "FsdpExporter": ".handlers.fsdp_export",
    "Gated": ".handlers.resident_parts",
    "HealthWatch": ".handlers.monitor",
    "HostCopy": ".handlers.resident_parts",
    "LORA": ".fsm.policy",
    "LayoutChanged": ".fsm.errors",
    "LeaseEnded": ".fsm.errors",
    "LocalEngine": ".handlers.local_engine",
    "LocalLock": ".handlers.lock",
    "LockError": ".fsm.lock",
    "MegatronExporter": ".handlers.megatron_export",
    "MemoryShort": ".fsm.errors",
    "MemoryTransport": ".transports.memory",
    "NotRebuilt": ".fsm.errors",
    "ObjectStoreTransport": ".transports.objects",
    "Outcome": ".fsm.states",
    "PassedOver": ".fsm.results",
    "Pending": ".sync",
    "PlanError": ".fsm.errors",
    "PlanMismatch": ".fsm.errors",
    "Policy": ".fsm.policy",
    "Progress": ".handlers.progress",
    "RankError": ".fsm.errors",
    "RankFailed": ".fsm.errors",
    "RankLost": ".fsm.errors",
    "RankVotes": ".handlers.votes",
    "RanksDisagree": ".fsm.errors",
    "RayEngine": ".handlers.ray_engine",
    "RayLock": ".handlers.ray_lock",
    "RayReceiver": ".ray_receiver",
    "RayStore": ".handlers.ray_store",
    "Rebuilt": ".handlers.rebuilt",
    "ReceiptRefused": ".fsm.errors",
    "Residency": ".handlers.residency",
    "ResidencyError": ".fsm.errors",
    "Retention": ".handlers.retention",
    "Rollback": ".handlers.rollback",
    "RoundCancelled": ".fsm.errors",
    "RoundInProgress": ".fsm.errors",
    "RoundResult": ".fsm.results",
    "RoundTimedOut": ".fsm.errors",
    "SampleVersions": ".fsm.spans",
    "Scratch": ".handlers.resident_parts",
    "Segment": ".fsm.spans",
    "SetupError": ".fsm.errors",
    "SharedMemoryTransport": ".transports.shm",
    "SnapshotError": ".fsm.errors",
    "SnapshotSpoiled": ".fsm.errors",
    "Snapshots": ".handlers.snapshots",
    "StaleVersion": ".fsm.ledger",
    "State": ".fsm.states",
    "StateLog": ".handlers.log",
    "SyncFailed": ".fsm.errors",
    "Toggle": ".handlers.toggle",
    "TorchWeights": ".transports.weights",
    "TrainerRanks": ".handlers.ranks",
    "TransportError": ".fsm.errors",
    "VersionAhead": ".fsm.errors",
    "VersionNotKept": ".fsm.errors",
    "VersionUnknown": ".fsm.errors",
    "WeightSync": ".sync",
    "WeightSyncError": ".fsm.errors",
    "WeightsGone": ".fsm.errors",
    "WeightsInUse": ".fsm.errors",
    "WorldMismatch": ".fsm.errors",
    "expandable_segments": ".handlers.toggle",
    "offload": ".fsm.residency",
    "onload": ".fsm.residency",
    "ray_engine": ".ray_receiver",
    "receiver_for": ".engine",
    "shift": ".handlers.residency",
}

__all__ = ["__version__", *sorted(_HOME)]  # noqa: PLE0604 - the table above is the list


def __getattr__(name: str) -> Any:
    """Import a public name from the module it lives in."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))

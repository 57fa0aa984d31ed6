"""One rank of a trainer that shards its policy: what each of them does, and all of them do at the same time.

Rank 0 is in the demo's own process, where the rounds are led and the log is written; the other one is in a
process or an actor of its own (``peers.py``). Each has its shards, its optimizer, and the handlers of its
part in a round. Whatever is asked of a rank here is asked of all of them: most of it gathers weights.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ..follower import FollowerSync
from ..fsm.errors import SetupError, SnapshotError
from ..fsm.executors import RoundView
from ..fsm.policy import Policy as RoundPolicy
from ..fsm.residency import offload, onload
from ..fsm.results import RoundResult
from ..handlers.cache_release import CacheRelease
from ..handlers.exports import CachedExport, ExportCounts
from ..handlers.fsdp_export import FsdpExporter
from ..handlers.ranks import TrainerRanks
from ..handlers.residency import Residency
from ..handlers.resident_parts import HostCopy
from ..handlers.rollback import Rollback
from ..handlers.snapshots import Snapshots
from ..handlers.toggle import Toggle
from ..handlers.votes import RankVotes
from ..sync import WeightSync
from ..transports.weights import TorchWeights
from .bulletin import Bulletin
from .faults import RankKind
from .grpo import Batch, Learner, Settings, Share, StepStats
from .wrapping import WORLD, whole, wrapped

__all__ = ["HOST", "ROUNDS", "Account", "Place", "ShardedRank", "hand_over"]

ROUNDS = RoundPolicy(deadline=8.0, lease=4.0, bucket_bytes=1 << 20)
"""What all ranks have their rounds by."""

HOST = "127.0.0.1"
SILENT = 5.0
"""Seconds without a sign of life after which a rank is lost, in the middle of a hand-over."""

_COLLECTIVES = timedelta(seconds=30)
"""What a collective may take. One that a rank has left ends at once; this is for one that is stopped."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank finds the others, and what it is.

    Args:
        rank: which of them.
        form: how the policy is sharded.
        store: the port of the ranks' store.
        board: the port of the bulletin board.
    """

    rank: int
    form: str
    store: int
    board: int


@dataclass(frozen=True, slots=True)
class LookBack:
    """What a rank found when it was an older version for a while.

    Args:
        older: the number of the older version.
        newest: the number of the weights that are trained.
        then: how often the older one's likeliest token is right, on prompts of now.
        now: the same of the newest.
        same: whether the older one was what it had been, bit for bit.
        restored: whether the newest was, afterwards.
    """

    older: int
    newest: int
    then: float
    now: float
    same: bool
    restored: bool


@dataclass(frozen=True, slots=True)
class Account:
    """What a rank has counted in a run.

    Args:
        rank: whose it is.
        counts: of its export.
        plan: the hash of its plan.
        told: the published version after each of its rounds, as it was told.
        awaited: how often its coroutine handler was awaited to the end.
        loops: threads whose loop that was on.
        kept: bytes of its snapshots at most, on this rank.
        made: how often memory for one was made.
    """

    rank: int
    counts: ExportCounts
    plan: str
    told: tuple[tuple[int, bool], ...]
    awaited: int
    loops: tuple[str, ...]
    kept: int
    made: int


class Collector:
    """Python's automatic garbage collection, as a setting that a round has off."""

    name = "automatic_gc"

    def read(self) -> bool:
        """Whether it is on."""
        return gc.isenabled()

    def write(self, value: bool, /) -> None:  # noqa: FBT001 - it is the value of the setting
        """Turn it on or off."""
        (gc.enable if value else gc.disable)()


class RankFault:
    """An executor that lets its rank fail once it is armed, before any engine is told anything."""

    name = "fault"

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._kind: RankKind | None = None

    def arm(self, kind: RankKind) -> None:
        """Go off in the next round."""
        self._kind = kind

    def prepare(self, round: RoundView) -> None:
        """Fail, if armed."""
        kind, self._kind = self._kind, None
        if kind == "rank-kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "rank-fail":
            raise RuntimeError(f"injected: rank {self._rank} cannot prepare")

    def clean(self, round: RoundView) -> None:
        """Nothing is held."""


class ShardedRank:
    """A rank: its shards, and its part in the rounds."""

    OLDEST = 0

    def __init__(self, place: Place, settings: Settings) -> None:
        self._place, self._settings = place, settings
        self._fault = RankFault(place.rank)
        self._bulletin = Bulletin(place.rank, place.board)
        self._told: list[tuple[int, bool]] = []
        self._kept_bytes = 0
        self._handed = 0
        self._order: dict[str, str] = {}
        self.follower: FollowerSync | None = None

    def join(self) -> None:
        """Meet the other ranks, and shard the policy with them."""
        place = self._place
        with loopback():
            dist.init_process_group(
                "gloo", store=self._store("collectives"), rank=place.rank, world_size=WORLD,
                timeout=_COLLECTIVES,
            )  # fmt: skip
        self.learner = Learner(
            self._settings, partial(wrapped, place.form), Share(place.rank, WORLD)
        )  # of the same seed on every rank
        model = self.learner.model
        self._export = CachedExport(FsdpExporter(model))
        self._published, self._kept = (
            Snapshots(model, votes=RankVotes(self._store(), place.rank, WORLD, name=name))
            for name in ("published", "kept")
        )
        self.ranks = TrainerRanks(self._store(), place.rank, WORLD, silent=SILENT)
        optimizer = HostCopy("optimizer", lambda: self.learner.optimizer)
        self.handlers: tuple[Any, ...] = (
            Residency(before=[offload(optimizer)], after=[onload(optimizer)]),
            Toggle(Collector(), during=False), CacheRelease(), Rollback(self._published), self._bulletin,
        )  # fmt: skip
        if place.rank:
            self.follower = FollowerSync(self.ranks, policy=ROUNDS, handlers=(*self.handlers, self._fault))

    def _store(self, name: str = "") -> Any:
        """A connection of its own for each that uses it: a wait in one is nobody else's."""
        store = TCPStore(HOST, self._place.store, is_master=False, timeout=_COLLECTIVES)
        return PrefixStore(name, store) if name else store

    # -- what all of them do ---------------------------------------------------------------------------------

    def learn(self, batches: Sequence[Batch]) -> StepStats:
        """This rank's share of a step."""
        return self.learner.learn(batches)

    def follow(self, step: int) -> None:
        """Take part in the round of a step; for all but rank 0, which has the results."""
        if self.follower is None:
            raise SetupError("rank 0 leads")
        self.note(hand_over(self.follower, step, self._export))

    def lead(self, sync: WeightSync, step: int) -> RoundResult | None:
        """Lead it; for rank 0."""
        return self.note(hand_over(sync, step, self._export))

    def note(self, result: RoundResult | None) -> RoundResult | None:
        """Keep what this rank was told of a round."""
        if result is not None:
            self._told.append((result.version, result.ok))
            self._handed = self.learner.version
        return result

    def digest(self) -> str:
        """Of the whole weights, gathered by torch itself, in the order in which an engine has them.

        Torch gathers a tensor of two names twice, and an engine is sent it once.
        """
        if self._export.plan is not None:
            self._order = {slot.name: slot.of for slot in self._export.plan.slots}
        found, weights = whole(self.learner.model), {}
        if found.keys() != self._order.keys():
            raise SnapshotError("torch gathers other names than the export has")
        for name, of in self._order.items():
            weights[name] = found[of or name]
            if not torch.equal(weights[name], found[name]):
                raise SnapshotError(f"{name} and {of} are one tensor in the export, and two with torch")
        return TorchWeights.of(weights).digest()

    def keep(self) -> None:
        """Keep the weights that the run begins with."""
        self._first = self.digest()
        self._kept.save(self.OLDEST)

    def look_back(self, step: int) -> LookBack:
        """Save the newest weights, be the oldest for a while and evaluate, and be the newest again."""
        newest, before = self._number(), self.digest()
        self._kept.save(newest)
        now = self.learner.rightness(step)
        with self._kept.version(self.OLDEST):
            same, then = self.digest() == self._first, self.learner.rightness(step)
        restored = self.digest() == before
        self._kept_bytes = max(self._kept_bytes, self._kept.nbytes + self._published.nbytes)
        self._kept.clear(newest)
        return LookBack(self.OLDEST, newest, then, now, same, restored)

    def _number(self) -> int:
        """Of the weights of now: that of their round, or the next one if they had none."""
        version, _ = self._told[-1]
        return version if self._handed == self.learner.version else version + 1

    def arm(self, kind: RankKind) -> None:
        """Let this rank fail in the next round."""
        self._fault.arm(kind)

    def account(self) -> Account:
        """What was counted."""
        plan = self._export.plan
        return Account(
            self._place.rank, self._export.counts, "" if plan is None else plan.hash, tuple(self._told),
            self._bulletin.calls, tuple(sorted(self._bulletin.threads)),
            self._kept_bytes, self._kept.allocations + self._published.allocations,
        )  # fmt: skip

    def leave(self) -> None:
        """Give everything back. A collective that another rank is in ends with an error there."""
        if self.follower is not None:
            self.follower.close()
        for name in ("_kept", "_published"):
            if (snapshots := getattr(self, name, None)) is not None:
                snapshots.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def hand_over(sync: WeightSync | FollowerSync, step: int, export: CachedExport) -> RoundResult | None:
    """The hook of a step; the first one is that of step 0."""
    return sync.on_step_end(step, export) if step else sync.on_train_begin(export)


@contextmanager
def loopback() -> Iterator[None]:
    """While it lasts, gloo listens on this host alone, unless the user has named an interface."""
    name = "GLOO_SOCKET_IFNAME"
    ours = next((each for _, each in socket.if_nameindex() if each.startswith("lo")), None)
    if name in os.environ or ours is None:
        yield
        return
    os.environ[name] = ours
    try:
        yield
    finally:
        del os.environ[name]

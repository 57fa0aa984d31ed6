"""Three ranks of a trainer in threads, over a store of this process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from weightsync.follower import FollowerSync
from weightsync.fsm.contract import Weights
from weightsync.fsm.executors import Executor
from weightsync.fsm.policy import Policy
from weightsync.fsm.results import RoundResult
from weightsync.handlers.ranks import TrainerRanks
from weightsync.testing.fakes import FakeWeights, Gate
from weightsync.testing.scene import PATIENCE, Trainer, close_all

__all__ = ["POLICY", "DictStore", "Team", "close_teams", "three"]


class DictStore:
    """A store of this process, whose words can hang or fail."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.gate: Gate | None = None
        self.error: Exception | None = None

    def _word(self) -> None:
        if self.gate is not None:
            self.gate.pass_through()
        if self.error is not None:
            raise self.error

    def set(self, key: str, value: str, /) -> None:
        """Write."""
        self._word()
        self.values[key] = value.encode()

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write, if that is there."""
        self._word()
        assert expected == ""
        return self.values.setdefault(key, desired.encode())

    def get(self, key: str, /) -> bytes:
        """Read."""
        self._word()
        return self.values[key]

    def check(self, keys: list[str], /) -> bool:
        """Look."""
        self._word()
        return all(key in self.values for key in keys)

    def delete_key(self, key: str, /) -> bool:
        """Forget."""
        self._word()
        return self.values.pop(key, None) is not None


POLICY = Policy(deadline=10.0, lease=2.0)
_TEAMS: list[Team] = []


def close_teams() -> None:
    """End every thread of theirs, also of ranks that were lost, and of trainers."""
    close_all()
    while _TEAMS:
        _TEAMS.pop().close()


class Team:
    """Three ranks, of which the first one leads two fake engines; ``handlers`` are those of each."""

    def __init__(
        self,
        policy: Policy = POLICY,
        limit: float = 20.0,
        silent: float = 1.0,
        store: DictStore | None = None,
        handlers: Sequence[Sequence[Executor]] = ((), (), ()),
    ) -> None:
        self.store = store or DictStore()
        self.ranks = [
            TrainerRanks(self.store, rank, 3, limit=limit, silent=silent, name="t") for rank in range(3)
        ]
        self.trainer = Trainer(policy, handlers[0], ranks=self.ranks[0])
        self.followers = [
            FollowerSync(ranks, policy=policy, handlers=theirs)
            for ranks, theirs in zip(self.ranks[1:], handlers[1:], strict=True)
        ]
        self.pool = ThreadPoolExecutor(3)
        _TEAMS.append(self)

    def close(self) -> None:
        """Give every thread back."""
        for follower in self.followers:  # its end is not told: the store may hang
            follower._rounds.close()
            follower._bridge.close()
        for ranks in self.ranks:
            ranks.close()
        self.pool.shutdown(wait=False)

    def step(self, number: int, *weights: Weights) -> list[Future[RoundResult | None]]:
        """Every rank's hook, each on a thread of its own; with fewer weights the last ranks stay away."""
        syncs: list[Any] = [self.trainer.sync, *self.followers]
        return [
            self.pool.submit(sync.on_step_end, number, each)
            for sync, each in zip(syncs, weights, strict=False)
        ]

    def alone(self, rank: int, step: int) -> Future[RoundResult | None]:
        """The hook of one rank."""
        sync: Any = [self.trainer.sync, *self.followers][rank]
        return self.pool.submit(sync.on_step_end, step, FakeWeights(step))

    def results(self, futures: list[Future[RoundResult | None]], patience: float = PATIENCE) -> list[Any]:
        """What each got, results and errors."""
        return [future.exception(patience) or future.result() for future in futures]


def three(fill: int) -> list[FakeWeights]:
    """The same weights for everybody."""
    return [FakeWeights(fill) for _ in range(3)]

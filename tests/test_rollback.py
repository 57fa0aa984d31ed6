"""A failed round is rolled back to by the very snapshot of the published version."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import weightsync
from casekit.rankteam import DictStore
from weightsync.fsm.contract import Weights
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import SetupError, SnapshotError
from weightsync.fsm.executors import RoundView
from weightsync.handlers.rollback import Rollback
from weightsync.handlers.snapshots import Snapshots

POLICY = weightsync.Policy(on_engine_failure="quarantine", quorum=1, bucket_bytes=16)


class Fails:
    """A handler that fails in the rounds that it is told."""

    name = "fails"

    def __init__(self, **rounds: int) -> None:
        self.rounds, self.now = rounds, 0

    def prepare(self, round: RoundView) -> None:
        """Before anything is told to an engine."""
        self.now += 1
        self._go("prepare")

    def clean(self, round: RoundView) -> None:
        """When it is published."""
        self._go("clean")

    def _go(self, word: str) -> None:
        if self.rounds.get(word) == self.now:
            raise OSError(f"{word} of round {self.now}")


class Two:
    """A trainer with two engines of this process, of which one fails when it is told to."""

    def __init__(self, *before: Any, policy: weightsync.Policy = POLICY) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.held = [
            {name: torch.zeros_like(each) for name, each in self.model.state_dict().items()} for _ in "ab"
        ]
        self.failing: set[str] = set()
        links = [
            weightsync.LocalEngine(weightsync.receiver_for(held, name, stages=False, fault=self._fault(name)))
            for held, name in zip(self.held, ("e0", "e1"), strict=True)
        ]
        self.kept = Snapshots(self.model)
        self.records: list[Any] = []
        handlers: list[Any] = [*before, Rollback(self.kept), self.records.append]
        self.sync = weightsync.WeightSync(links, "memory", policy=policy, handlers=handlers)

    def _fault(self, name: str) -> Callable[[str, int], None]:
        def fault(point: str, bucket: int) -> None:
            if (point, bucket) == ("apply", 1) and name in self.failing:
                raise OSError("the device is gone")

        return fault

    def train(self) -> None:
        """Other weights."""
        with torch.no_grad():
            for each in self.model.parameters():
                each.add_(1.0)

    def weights(self) -> dict[str, list[Any]]:
        """What the trainer has."""
        return {name: each.tolist() for name, each in self.model.state_dict().items()}

    def engine(self, number: int) -> dict[str, list[Any]]:
        """What an engine has."""
        return {name: each.tolist() for name, each in self.held[number].items()}


def require(result: weightsync.RoundResult | None) -> weightsync.RoundResult:
    """The policy skips no step."""
    assert result is not None
    return result


def test_a_dirty_engine_gets_the_published_version_while_the_trainer_goes_on() -> None:
    """Bit for bit, and apart from the engine that has it; the trainer's weights are its newest again."""
    two = Two()
    with two.sync as sync:
        assert sync.on_train_begin(two.model).ok
        published = two.weights()
        two.train()
        newest = two.weights()
        two.failing = {"e0", "e1"}
        assert not require(sync.on_step_end(1, two.model)).ok
        assert two.engine(0) != published != newest
        two.failing = set()
        version = sync.version()
        assert version == 0
        assert version in two.kept, "there is nothing to roll back to"
        with two.kept.version(version):
            result = sync.catch_up(1, two.model)
        assert (result.ok, result.version) == (True, 0)
        assert two.engine(0) == two.engine(1) == published
        assert two.weights() == newest
        assert sync.servable() == {"e0": 0, "e1": 0}
        result = require(sync.on_step_end(2, two.model))
        assert result.ok
        assert two.engine(0) == two.engine(1) == newest
        assert two.kept.versions == (result.version,)


def test_what_it_costs_is_in_the_log() -> None:
    """Its calls, with their seconds, and what the undo did."""
    two = Two()
    with two.sync as sync:
        assert sync.on_train_begin(two.model).ok
        two.failing = {"e0", "e1"}
        two.train()
        assert not require(sync.on_step_end(1, two.model)).ok
    lines = [str(each.to_json()) for each in two.records]
    for word in ("prepare", "clean", "undo"):
        assert any(word in line and "rollback" in line and "seconds" in line for line in lines), (word, lines)


def test_only_two_copies_are_ever_there() -> None:
    """The published one, and that of the round; also when rounds fail."""
    two = Two()
    with two.sync as sync:
        sync.on_train_begin(two.model)
        for step in range(1, 9):
            two.train()
            two.failing = {"e0", "e1"} if step % 2 else set()
            sync.on_step_end(step, two.model)
            assert len(two.kept.versions) <= 2
        assert two.kept.allocations == 2


def test_a_private_copy_is_not_taken_for_the_model() -> None:
    """The round fails in one line that says what to do; without a copy it is good."""
    two = Two()
    with two.sync as sync:
        result = sync.begin(1, two.model).wait()
        assert isinstance(result.error, SnapshotError)
        assert "on_step_end" in str(result.error)
        assert two.kept.versions == ()
        assert sync.begin(2, two.model, snapshot=False).wait().ok


def test_another_model_than_the_one_that_is_kept_is_refused_as_that() -> None:
    """Whoever hands it over by the right hook is not told to do so."""
    two = Two()
    with two.sync:
        result = two.sync.on_step_end(1, torch.nn.Linear(3, 2))
    assert result is not None
    assert "hand that model over, or give Snapshots the model that is handed over" in str(result.error)


def test_the_published_version_is_not_saved_again() -> None:
    """A catch-up inside its block sends what is kept already."""
    model = torch.nn.Linear(2, 2)
    kept = Snapshots(model)
    rollback = Rollback(kept)
    weights = cast("Weights", SimpleNamespace(tensors=dict(model.state_dict())))
    view = RoundView(Session("r", 1, 4), step=1, attempt=1, plan=None, weights=weights, bound=())
    assert rollback.prepare(view) is not None
    rollback.clean(view)
    with kept.version(4):
        assert rollback.prepare(replace(view, bound=(4,))) is None
    assert kept.versions == (4,)


def test_it_needs_snapshots() -> None:
    """And says so."""
    with pytest.raises(SetupError, match=r"Snapshots\(model\) is needed"):
        Rollback(cast("Any", None))


# -- rounds that fail late --------------------------------------------------------------------------------


def test_what_a_round_that_failed_late_has_published_is_kept() -> None:
    """Although another handler's clean-up failed before this one's: an engine that missed it gets it."""
    two = Two(Fails(clean=2))
    with two.sync as sync:
        assert sync.on_train_begin(two.model).ok
        two.train()
        published, two.failing = two.weights(), {"e1"}
        result = require(sync.on_step_end(1, two.model))
        assert (result.ok, sync.version()) == (False, 1)
        assert two.engine(1) != published == two.engine(0)
        two.failing = set()
        two.train()
        assert 1 in two.kept.versions
        with two.kept.version(1):
            assert sync.catch_up(1, two.model).ok
        assert two.engine(1) == published
        assert two.kept.versions == (1,)


def test_rounds_that_fail_early_leave_what_failed_late_alone() -> None:
    """One after the other; and the next good one gives all of it up."""
    two = Two(Fails(clean=2))
    with two.sync as sync:
        assert sync.on_train_begin(two.model).ok
        two.train()
        published = two.weights()
        assert not require(sync.on_step_end(1, two.model)).ok
        two.failing = {"e0", "e1"}
        for step in (2, 3):
            two.train()
            assert not require(sync.on_step_end(step, two.model)).ok
            assert sync.version() == 1
            assert 1 in two.kept.versions
        with two.kept.version(1):
            assert two.weights() == published
        two.failing = set()
        assert require(sync.on_step_end(4, two.model)).ok
        assert two.kept.versions == (sync.version(),)


def test_where_the_ledger_does_not_say_nothing_is_given_up() -> None:
    """Before the round, that is: when it is published, all older ones are."""
    model = torch.nn.Linear(2, 2)
    kept = Snapshots(model)
    rollback = Rollback(kept)
    weights = cast("Weights", SimpleNamespace(tensors=dict(model.state_dict())))
    views = [
        RoundView(Session("r", 1, version), step=1, attempt=1, plan=None, weights=weights)
        for version in (4, 5, 6)
    ]
    for view in views:
        rollback.prepare(view)
    assert list(kept.versions) == [4, 5, 6]
    rollback.clean(views[-1])
    assert list(kept.versions) == [6]


def test_without_digests_nobody_can_tell_that_a_block_has_the_published_bytes() -> None:
    """So the catch-up is a round of all with a new number, which the block refuses, and nothing is lost."""
    two = Two(policy=replace(POLICY, verify="off"))
    with two.sync as sync:
        assert sync.on_train_begin(two.model).ok
        two.train()
        two.failing = {"e1"}
        require(sync.on_step_end(1, two.model))
        two.failing = set()
        with two.kept.version(sync.version() or 0):
            result = sync.catch_up(1, two.model)
        assert isinstance(result.error, SnapshotError)
        assert two.kept.versions == (1,)


# -- several ranks ----------------------------------------------------------------------------------------


class Ranks:
    """Two ranks in threads, each with a handler of its own before its rollback, and an engine."""

    def __init__(self, *before: Any) -> None:
        store, policy = DictStore(), weightsync.Policy(deadline=20.0, idle=15.0)
        self.models = [torch.nn.Linear(2, 1) for _ in "ab"]
        self.held = {name: torch.zeros_like(each) for name, each in self.models[0].state_dict().items()}
        self.kept = [
            Snapshots(model, votes=weightsync.RankVotes(store, rank, 2, limit=5.0))
            for rank, model in enumerate(self.models)
        ]
        ranks = [weightsync.TrainerRanks(store, rank, 2, name="t") for rank in range(2)]
        first, second = ([own, Rollback(kept)] for own, kept in zip(before, self.kept, strict=True))
        self.failing = False
        links = [
            weightsync.LocalEngine(weightsync.receiver_for(self.held, "e0", stages=False, fault=self._fault))
        ]
        self.leads = weightsync.WeightSync(links, "memory", policy=policy, handlers=first, ranks=ranks[0])
        self.follows = weightsync.FollowerSync(ranks[1], policy=policy, handlers=second)
        self.pool = ThreadPoolExecutor(2)

    def _fault(self, point: str, bucket: int) -> None:
        if self.failing and point == "apply":
            raise OSError("the device is gone")

    def both(self, *work: Callable[[], Any]) -> list[Any]:
        """Each rank does its own."""
        return [each.result(60) for each in [self.pool.submit(each) for each in work]]

    def step(self, number: int) -> list[weightsync.RoundResult]:
        """Both hand over other weights."""
        for model in self.models:
            with torch.no_grad():
                model.weight.fill_(number)
        return self.both(
            lambda: self.leads.on_step_end(number, self.models[0]),
            lambda: self.follows.on_step_end(number, self.models[1]),
        )

    def close(self) -> None:
        """Give the threads back."""
        self.both(self.leads.close, self.follows.close)
        self.pool.shutdown()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Of which the second one fails in the clean-up of its second round."""
    team = Ranks(Fails(), Fails(clean=2))
    yield team
    team.close()


def test_ranks_keep_the_same_although_one_of_them_failed_late(ranks: Ranks) -> None:
    """What is published says rank 0 to all of them; so both can be it, and the next rounds are good."""
    assert [each.ok for each in ranks.step(1)] == [True, True]
    assert [each.ok for each in ranks.step(2)] == [False, False]
    assert ranks.leads.version() == 1
    assert all(1 in kept.versions for kept in ranks.kept)

    ranks.failing = True
    assert [each.ok for each in ranks.step(3)] == [False, False]
    assert all(1 in kept.versions for kept in ranks.kept)
    ranks.failing = False

    def catch_up(rank: int, sync: Any) -> Any:
        with ranks.kept[rank].version(1):
            return sync.catch_up(3, ranks.models[rank]).version

    both = [partial(catch_up, 0, ranks.leads), partial(catch_up, 1, ranks.follows)]
    assert ranks.both(*both) == [1, 1]
    assert ranks.held["weight"].tolist() == [[2.0, 2.0]]
    for step in (4, 5):
        assert [each.ok for each in ranks.step(step)] == [True, True]
        assert [kept.versions for kept in ranks.kept] == [(step - 2,)] * 2


def test_no_rank_takes_a_private_copy_for_the_model(ranks: Ranks) -> None:
    """Rank 0 may train on meanwhile, so what would be kept is not what is sent."""
    results = ranks.both(
        lambda: ranks.leads.begin(1, ranks.models[0]).wait(),
        lambda: ranks.follows.on_step_end(1, ranks.models[1]),
    )
    assert [type(each.error) for each in results] == [SnapshotError] * 2
    assert [kept.versions for kept in ranks.kept] == [(), ()]
    results = ranks.both(
        lambda: ranks.leads.begin(2, ranks.models[0], snapshot=False).wait(),
        lambda: ranks.follows.on_step_end(2, ranks.models[1]),
    )
    assert [each.ok for each in results] == [True] * 2

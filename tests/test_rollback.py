"""A failed round is rolled back to by the very snapshot of the published version."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import weightsync
from weightsync.fsm.contract import Weights
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import SetupError, SnapshotError
from weightsync.fsm.executors import RoundView
from weightsync.handlers.rollback import Rollback
from weightsync.handlers.snapshots import Snapshots


class Two:
    """A trainer with two engines of this process, of which one fails when it is told to."""

    def __init__(self) -> None:
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
        policy = weightsync.Policy(on_engine_failure="quarantine", quorum=1, bucket_bytes=16)
        handlers: list[Any] = [Rollback(self.kept), self.records.append]
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


def test_the_published_version_is_not_saved_again() -> None:
    """A catch-up inside its block sends what is kept already."""
    model = torch.nn.Linear(2, 2)
    kept = Snapshots(model)
    rollback = Rollback(kept)
    weights = cast("Weights", SimpleNamespace(tensors=dict(model.state_dict())))
    view = RoundView(Session("r", 1, 4), step=1, attempt=1, plan=None, weights=weights)
    assert rollback.prepare(view) is not None
    rollback.clean(view)
    with kept.version(4):
        assert rollback.prepare(view) is None
    assert kept.versions == (4,)


def test_it_needs_snapshots() -> None:
    """And says so."""
    with pytest.raises(SetupError, match=r"Snapshots\(model\) is needed"):
        Rollback(cast("Any", None))

"""``WeightSync`` with fakes outside: step hooks, retries, one round at a time, beginnings and ends."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from weightsync.fsm.errors import (
    LedgerError,
    RoundCancelled,
    RoundTimedOut,
    SyncFailed,
)
from weightsync.fsm.ledger import StaleVersion, VersionBound
from weightsync.fsm.policy import Policy
from weightsync.fsm.results import RoundResult
from weightsync.fsm.states import Disposition, Outcome
from weightsync.handlers.ledger import FileLedger, MemoryLedger
from weightsync.sync import Pending, WeightSync
from weightsync.testing.fakes import HANG, FakeExecutor, FakeTransport, FakeWeights, Gate
from weightsync.testing.scene import PATIENCE, Trainer, check_free, close_all


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every thread that a test has begun ends with it."""
    yield
    close_all()


@pytest.fixture
def trainer() -> Trainer:
    """A trainer that has done nothing yet."""
    return Trainer()


# -- step hooks -------------------------------------------------------------------------------------------


def test_the_first_weights_are_version_0(trainer: Trainer) -> None:
    """Each further round is the next version, and the engines are servable with it."""
    result = trainer.sync.on_train_begin(FakeWeights(0))
    assert (result.version, result.outcome, result.attempts) == (0, Outcome.complete, 1)
    for step in (1, 2):
        weights = FakeWeights(step)
        found = trainer.hand_over(step, weights)
        assert (found.step, found.version) == (step, step)
        trainer.check_equal(weights)
    assert trainer.sync.version() == 2
    assert trainer.sync.servable() == {"a": 2, "b": 2}
    assert {entry.version for entry in trainer.sync.engines().values()} == {2}


def test_steps_between_are_passed_over() -> None:
    """The policy says at which steps weights are handed over."""
    trainer = Trainer(Policy(every=3, deadline=3.0))
    done = [trainer.sync.on_step_end(step, FakeWeights(step)) is not None for step in range(1, 8)]
    assert done == [False, False, True, False, False, True, False]


def test_a_version_goes_on_over_a_restart(tmp_path: Path) -> None:
    """The ledger's file remembers what engines may hold."""
    path = tmp_path / "ledger.json"
    for version in range(3):
        trainer = Trainer(ledger=FileLedger(path))
        assert trainer.sync.on_train_begin(FakeWeights(version)).version == version
        trainer.sync.close()


def test_a_failure_is_a_result_or_an_error_as_the_policy_says(trainer: Trainer) -> None:
    """``raise_on_failure`` raises with the very error as the cause."""
    error = OSError("bucket 1")
    trainer.transport.bad["bucket 1"] = error
    result = trainer.hand_over(1, FakeWeights())
    assert result.error is error
    loud = Trainer(Policy(deadline=3.0, raise_on_failure=True))
    loud.transport.bad["bucket 1"] = error
    with pytest.raises(SyncFailed) as caught:
        loud.sync.on_step_end(1, FakeWeights())
    assert caught.value.__cause__ is error
    check_free(loud.lock)


def test_four_failed_rounds_are_followed_by_a_good_one(trainer: Trainer) -> None:
    """The tensors, a bucket, an engine, a hook: after each the lock is free and the error is told."""
    executor = FakeExecutor("hook")
    trainer = Trainer(handlers=[executor])
    weights = FakeWeights(9)
    places: list[tuple[dict[str, Any], str]] = [
        (weights.bad, "materialize"), (trainer.transport.bad, "bucket 2"),
        (trainer.engines[1].bad, "bucket 2"), (executor.bad, "clean"),
    ]  # fmt: skip
    for bad, where in places:
        error = RuntimeError(where)
        bad[where] = error
        result = trainer.hand_over(1, weights)
        assert result.error is error
        assert result.path[-2:] == ("Failed", "Released")
        check_free(trainer.lock)
    result = trainer.hand_over(1, weights)
    assert result.require().outcome is Outcome.complete
    trainer.check_equal(weights)


# -- retries ----------------------------------------------------------------------------------------------


def test_a_retry_is_a_new_round_under_the_same_number() -> None:
    """Two attempts fail before anybody commits; the third hands the same version over, whole."""
    executor = FakeExecutor("x")
    trainer = Trainer(Policy(deadline=3.0, attempts=3), handlers=[executor])
    trainer.sync.on_train_begin(FakeWeights(0))
    for bucket in ("bucket 1", "bucket 2"):
        trainer.transport.bad[bucket] = OSError(bucket)
    weights = FakeWeights(7)
    result = trainer.hand_over(1, weights)
    assert (result.outcome, result.version, result.attempts) == (Outcome.complete, 1, 3)
    assert executor.story == ["x.prepare", "x.clean"] + ["x.prepare", "x.undo"] * 2 + ["x.prepare", "x.clean"]
    trainer.check_equal(weights)


def test_a_retry_asks_for_the_engines_as_they_are_now() -> None:
    """An engine was started anew: the first attempt notices, the second one takes the new life in."""
    trainer = Trainer(Policy(deadline=3.0, attempts=2))
    trainer.sync.on_train_begin(FakeWeights(0))
    trainer.engines[1].restart()
    result = trainer.hand_over(1, FakeWeights(1))
    assert (result.outcome, result.attempts) == (Outcome.complete, 2)
    assert [row.incarnation for row in result.engines] == ["0", "1"]


def test_bytes_that_are_published_are_not_sent_again() -> None:
    """Putting back failed, and that is told; there is nothing to gain from another round."""
    executor = FakeExecutor("x", bad={"clean": OSError("clean")})
    trainer = Trainer(Policy(deadline=3.0, attempts=3), handlers=[executor])
    result = trainer.hand_over(1, FakeWeights(1))
    assert (result.attempts, result.ok, result.outcome) == (1, False, Outcome.complete)


def test_a_round_that_was_cancelled_is_not_tried_again() -> None:
    """Whoever cancelled it does not want it."""
    trainer, gate = Trainer(Policy(deadline=3.0, attempts=5)), Gate()
    trainer.transport.bad["bucket 1"] = gate
    pending = trainer.sync.begin(1, FakeWeights(1))
    gate.await_visitor()
    pending.cancel(RoundCancelled("enough"))
    pending.cancel(RoundCancelled("again"))
    result = pending.wait()
    assert (str(result.error), result.attempts) == ("enough", 1)


class Copied(FakeWeights):
    """Weights that say when they were copied."""

    def snapshot(self) -> "Copied":
        """The same, with another mark."""
        copy = Copied(5)
        copy.content = dict(self.content)
        return copy


def test_an_overlapped_round_sends_what_the_weights_were_when_it_began(trainer: Trainer) -> None:
    """Training may change them meanwhile; a round that is waited for needs no copy."""
    weights, gate = Copied(1), Gate()
    before = dict(weights.content)
    trainer.transport.bad["bucket 0"] = gate
    pending = trainer.sync.begin(1, weights)
    gate.await_visitor()
    weights.content["w2"] = b"!" * 64
    gate.open()
    assert pending.wait().ok
    assert trainer.engines[0].content == before


# -- versions ---------------------------------------------------------------------------------------------


def test_a_number_that_falls_or_stands_for_other_bytes_is_refused_before_the_lock(trainer: Trainer) -> None:
    """The same number with the same bytes is welcome."""
    begin = trainer.sync.begin
    assert begin(1, FakeWeights(1), version=5, snapshot=False).wait().version == 5
    epoch = trainer.lock.status().epoch
    for number, weights in ((4, FakeWeights(1)), (5, FakeWeights(2))):
        with pytest.raises(LedgerError):
            begin(2, weights, version=number, snapshot=False).wait()
    assert trainer.lock.status().epoch == epoch
    assert begin(3, FakeWeights(1), version=5, snapshot=False).wait().ok
    assert begin(4, FakeWeights(3), snapshot=False).wait().version == 6


def two_trainers(path: Path, policy: Policy | None = None) -> tuple[Trainer, Trainer]:
    """Who share a lock and the file of a ledger."""
    first = Trainer(policy, ledger=FileLedger(path))
    return first, Trainer(policy, ledger=FileLedger(path), lock=first.lock)


def overtaken(first: Trainer, second: Trainer, number: int | None) -> tuple[Pending, Pending]:
    """The second one has chosen its number, and waits for the lock, when the first one publishes its own."""
    gate = first.held_in("Broadcasting")
    ahead = first.sync.begin(1, FakeWeights(1), snapshot=False)
    gate.await_visitor()
    behind = second.sync.begin(1, FakeWeights(2), version=number, snapshot=False)
    end = time.monotonic() + PATIENCE
    while not first.lock.status().waiting:
        assert time.monotonic() < end
        time.sleep(0.001)
    gate.open()
    return ahead, behind


def test_a_number_that_another_trainer_took_meanwhile_is_replaced(tmp_path: Path) -> None:
    """It was free when this one began to wait for the lock; both rounds are complete, and none is lost."""
    first, second = two_trainers(tmp_path / "ledger.json")
    ahead, behind = (pending.wait() for pending in overtaken(first, second, None))
    for result, trainer, weights in ((ahead, first, FakeWeights(1)), (behind, second, FakeWeights(2))):
        assert (result.outcome, result.attempts) == (Outcome.complete, 1)
        trainer.check_equal(weights)
    assert (ahead.version, first.sync.version()) == (0, behind.version)
    assert behind.version > ahead.version
    assert ahead.notes == ()
    assert behind.notes == (
        "another trainer took version 0 meanwhile; the log has the rounds that failed over it",
    )
    check_free(first.lock)


def test_a_number_of_ones_own_is_never_replaced(tmp_path: Path) -> None:
    """Who chose it wants these weights to be called that; others are called that now."""
    first, second = two_trainers(tmp_path / "ledger.json")
    ahead, behind = (pending.wait() for pending in overtaken(first, second, 0))
    assert ahead.outcome is Outcome.complete
    assert (behind.outcome, behind.version) == (Outcome.failed, 0)
    assert isinstance(behind.error, VersionBound)


def test_trainers_that_keep_overtaking_each_other_are_all_done(tmp_path: Path) -> None:
    """Four of them, as fast as they can, with no attempts to spare: each of their rounds is complete."""
    path, rounds = tmp_path / "ledger.json", 5
    policy = Policy(deadline=PATIENCE, lease=5.0)
    first, second = two_trainers(path, policy)
    others = [Trainer(policy, ledger=FileLedger(path), lock=first.lock) for _ in range(2)]
    trainers = [first, second, *others]

    def train(trainer: Trainer, fill: int) -> list[RoundResult]:
        return [trainer.hand_over(step, FakeWeights(fill + step)) for step in range(1, rounds + 1)]

    with ThreadPoolExecutor(len(trainers)) as pool:
        training = [pool.submit(train, each, 50 * number) for number, each in enumerate(trainers)]
        results = [result for each in training for result in each.result(3 * PATIENCE)]
    assert {result.outcome for result in results} == {Outcome.complete}
    assert len({result.version for result in results}) == len(trainers) * rounds


class Refusing(MemoryLedger):
    """A ledger to which every number is too low; what it was asked for is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def bind(self, version: int, digest: str, epoch: int) -> None:
        """Never; in the end for another reason, so that nobody asks for ever."""
        self.asked.append(version)
        if len(self.asked) > 100:
            raise RuntimeError("there is no end to it")
        raise StaleVersion(f"version {version} is too low")


def test_a_number_is_looked_for_only_so_far_ahead() -> None:
    """A ledger that takes none is not asked for ever; the round fails with what it said."""
    ledger = Refusing()
    trainer = Trainer(Policy(deadline=3.0, attempts=2), ledger=ledger)
    result = trainer.hand_over(1, FakeWeights(1))
    assert isinstance(result.error, StaleVersion)
    assert (result.outcome, result.attempts) == (Outcome.failed, 2)
    assert ledger.asked == [0, 1, 3, 7, 15, 31, 63, 63]
    check_free(trainer.lock)


def test_weights_that_cannot_be_read_in_time_are_given_up_on_before_the_lock() -> None:
    """With a number of one's own they are read first; a generator that hangs keeps nobody."""
    trainer, gate = Trainer(Policy(deadline=1.0)), Gate()
    weights = FakeWeights(1)
    weights.bad["materialize"] = gate
    begun = time.monotonic()
    with pytest.raises(RoundTimedOut, match="could not be read"):
        trainer.sync.begin(1, weights, version=5, snapshot=False).wait()
    assert time.monotonic() - begun < 3.0
    assert trainer.lock.status().epoch == 0
    gate.open()
    assert trainer.sync.begin(1, FakeWeights(1), version=5, snapshot=False).wait().ok


# -- engines ----------------------------------------------------------------------------------------------


def test_an_engine_that_does_not_answer_costs_its_share_of_the_deadline_and_no_more() -> None:
    """Saying hello counts, too: the whole call ends by the deadline."""
    policy = Policy(deadline=1.5, first_contact=0.1, lease=1.0, on_engine_failure="quarantine", quorum=1)
    trainer = Trainer(policy)
    trainer.engines[0].bad.update(hello=HANG, abort=HANG)
    begun = time.monotonic()
    result = trainer.sync.on_step_end(1, FakeWeights(1))
    assert time.monotonic() - begun < 3.0
    assert result is not None
    assert (result.outcome, result.engines[0].disposition) == (Outcome.partial, Disposition.quarantined)
    assert "did not say hello" in str(result.engines[0].error)


def test_a_first_contact_is_beside_the_deadline() -> None:
    """An engine loads a model for longer than a round may take; then the round has all of its time."""
    trainer, gate = Trainer(Policy(deadline=2.0)), Gate()
    trainer.engines[0].bad["hello"] = gate
    pending = trainer.sync.begin(1, FakeWeights(1))
    gate.await_visitor()
    threading.Timer(2.0, gate.open).start()
    assert pending.wait().require().outcome is Outcome.complete


def test_a_cancellation_ends_a_first_contact() -> None:
    """Nobody waits minutes for an engine when nobody wants the round."""
    trainer, gate = Trainer(Policy(first_contact=600.0)), Gate()
    trainer.engines[0].bad["hello"] = gate
    pending = trainer.sync.begin(1, FakeWeights(1))
    gate.await_visitor()
    begun = time.monotonic()
    pending.cancel(RoundCancelled("enough"))
    result = pending.wait()
    assert time.monotonic() - begun < 10.0
    assert str(result.error) == "enough"
    assert result.path == ("Idle", "Failed", "Released")
    gate.open()


def test_an_engine_that_was_started_anew_is_not_servable_before_a_round() -> None:
    """Its start-up weights are not the version that its name had."""
    trainer = Trainer(Policy(deadline=3.0, on_engine_failure="quarantine", quorum=1))
    for version in range(3):
        trainer.sync.on_step_end(version + 1, FakeWeights(version))
    trainer.engines[1].restart()
    assert trainer.sync.servable() == {"a": 2}
    assert trainer.sync.engines()["b"].version is None
    result = trainer.hand_over(4, FakeWeights(4))
    assert result.outcome is Outcome.complete
    assert trainer.sync.servable() == {"a": 3, "b": 3}


def test_an_engine_that_restarts_within_a_round_has_no_part_in_it() -> None:
    """Between its receipt and its commit it became another one: no full success."""
    trainer, gate = Trainer(Policy(deadline=3.0, on_engine_failure="quarantine", quorum=1)), Gate()
    trainer.transport.bad["collect"] = gate
    pending = trainer.sync.begin(1, FakeWeights(1), snapshot=False)
    gate.await_visitor()
    trainer.engines[1].restart()
    gate.open()
    result = pending.wait()
    assert result.outcome is Outcome.partial
    assert trainer.sync.servable() == {"a": 0}


def test_others_bytes_under_the_same_number_are_not_vouched_for() -> None:
    """Two trainers share a lock and the engines, and each has a ledger of its own."""
    first = Trainer()
    assert first.hand_over(1, FakeWeights(1)).version == 0
    with WeightSync(first.engines, FakeTransport(), lock=first.lock) as second:
        assert second.begin(1, FakeWeights(9), version=0, snapshot=False).wait().ok
        assert first.sync.servable() == {}
        assert second.servable() == {"a": 0, "b": 0}
        assert first.hand_over(2, FakeWeights(2)).ok
        assert first.sync.servable() == {"a": 1, "b": 1}


def test_a_failed_round_leaves_the_engines_servable() -> None:
    """They have seen its epoch, and nothing else of it is left."""
    trainer = Trainer()
    assert trainer.hand_over(1, FakeWeights(1)).ok
    for step in (2, 3):
        trainer.transport.bad["bucket 1"] = OSError("lost")
        assert not trainer.hand_over(step, FakeWeights(step)).ok
        assert trainer.sync.servable() == {"a": 0, "b": 0}

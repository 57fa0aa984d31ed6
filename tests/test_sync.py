"""``WeightSync`` with fakes outside: step hooks, retries, one round at a time, beginnings and ends."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from weightsync.fsm.errors import (
    EngineGone,
    LedgerError,
    RoundCancelled,
    RoundInProgress,
    RoundTimedOut,
    SetupError,
    SyncFailed,
)
from weightsync.fsm.policy import Policy
from weightsync.fsm.states import Disposition, Outcome
from weightsync.fsm.tickets import Granted
from weightsync.handlers.ledger import FileLedger, MemoryLedger
from weightsync.handlers.lock import LocalLock
from weightsync.sync import Pending, WeightSync
from weightsync.testing.fakes import HANG, FakeEngine, FakeExecutor, FakeTransport, FakeWeights, Gate

PATIENCE = 20.0
QUICK = Policy(deadline=3.0, lease=2.0)


class Trainer:
    """A WeightSync of two engines, and what stands around it."""

    def __init__(self, policy: Policy = QUICK, **options: Any) -> None:
        self.engines = [FakeEngine("a"), FakeEngine("b")]
        self.transport = FakeTransport()
        self.lock, self.ledger = LocalLock(lease=policy.lease), MemoryLedger()
        values: dict[str, Any] = {"lock": self.lock, "ledger": self.ledger, "owner": "me", **options}
        self.sync = WeightSync(self.engines, self.transport, policy=policy, **values)

    def check_lock(self) -> None:
        """Another party gets the lock in less than a second."""
        ticket = self.lock.request("other", "theirs")
        granted = self.lock.wait(ticket, 1.0)
        assert isinstance(granted, Granted)
        self.lock.release(ticket, granted.epoch)

    def check_equal(self, weights: FakeWeights) -> None:
        """Every engine holds exactly what the trainer holds."""
        assert [engine.content for engine in self.engines] == [weights.content] * len(self.engines)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    """A trainer that has done nothing yet."""
    trainer = Trainer()
    yield trainer
    trainer.sync.close()


# -- step hooks -------------------------------------------------------------------------------------------


def test_the_first_weights_are_version_0(trainer: Trainer) -> None:
    """Each further round is the next version, and the engines are servable with it."""
    result = trainer.sync.on_train_begin(FakeWeights(0))
    assert (result.version, result.outcome, result.attempts) == (0, Outcome.complete, 1)
    for step in (1, 2):
        weights = FakeWeights(step)
        found = trainer.sync.on_step_end(step, weights)
        assert found is not None
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
    trainer.sync.close()


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
    result = trainer.sync.on_step_end(1, FakeWeights())
    assert result is not None
    assert result.error is error
    loud = Trainer(Policy(deadline=3.0, raise_on_failure=True))
    loud.transport.bad["bucket 1"] = error
    with pytest.raises(SyncFailed) as caught:
        loud.sync.on_step_end(1, FakeWeights())
    assert caught.value.__cause__ is error
    loud.check_lock()
    loud.sync.close()


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
        result = trainer.sync.on_step_end(1, weights)
        assert result is not None
        assert result.error is error
        assert result.path[-2:] == ("Failed", "Released")
        trainer.check_lock()
    result = trainer.sync.on_step_end(1, weights)
    assert result is not None
    assert result.require().outcome is Outcome.complete
    trainer.check_equal(weights)
    trainer.sync.close()


# -- retries ----------------------------------------------------------------------------------------------


def test_a_retry_is_a_new_round_under_the_same_number() -> None:
    """Two attempts fail before anybody commits; the third hands the same version over, whole."""
    executor = FakeExecutor("x")
    trainer = Trainer(Policy(deadline=3.0, attempts=3), handlers=[executor])
    trainer.sync.on_train_begin(FakeWeights(0))
    for bucket in ("bucket 1", "bucket 2"):
        trainer.transport.bad[bucket] = OSError(bucket)
    weights = FakeWeights(7)
    result = trainer.sync.on_step_end(1, weights)
    assert result is not None
    assert (result.outcome, result.version, result.attempts) == (Outcome.complete, 1, 3)
    assert executor.story == ["x.prepare", "x.clean"] + ["x.prepare", "x.undo"] * 2 + ["x.prepare", "x.clean"]
    trainer.check_equal(weights)
    trainer.sync.close()


def test_a_retry_asks_for_the_engines_as_they_are_now() -> None:
    """An engine was started anew: the first attempt notices, the second one takes the new life in."""
    trainer = Trainer(Policy(deadline=3.0, attempts=2))
    trainer.sync.on_train_begin(FakeWeights(0))
    trainer.engines[1].restart()
    result = trainer.sync.on_step_end(1, FakeWeights(1))
    assert result is not None
    assert (result.outcome, result.attempts) == (Outcome.complete, 2)
    assert [row.incarnation for row in result.engines] == ["0", "1"]
    trainer.sync.close()


def test_bytes_that_are_published_are_not_sent_again() -> None:
    """Putting back failed, and that is told; there is nothing to gain from another round."""
    executor = FakeExecutor("x", bad={"clean": OSError("clean")})
    trainer = Trainer(Policy(deadline=3.0, attempts=3), handlers=[executor])
    result = trainer.sync.on_step_end(1, FakeWeights(1))
    assert result is not None
    assert (result.attempts, result.ok, result.outcome) == (1, False, Outcome.complete)
    trainer.sync.close()


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
    trainer.sync.close()


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
    trainer.sync.close()


# -- engines ----------------------------------------------------------------------------------------------


def test_an_engine_that_does_not_answer_costs_its_share_of_the_deadline_and_no_more() -> None:
    """Saying hello counts, too: the whole call ends by the deadline."""
    trainer = Trainer(Policy(deadline=1.5, lease=1.0, on_engine_failure="quarantine", quorum=1))
    trainer.engines[0].bad.update(hello=HANG, abort=HANG)
    begun = time.monotonic()
    result = trainer.sync.on_step_end(1, FakeWeights(1))
    assert time.monotonic() - begun < 3.0
    assert result is not None
    assert (result.outcome, result.engines[0].disposition) == (Outcome.partial, Disposition.quarantined)
    assert "did not say hello" in str(result.engines[0].error)
    trainer.sync.close()


def test_an_engine_that_was_started_anew_is_not_servable_before_a_round() -> None:
    """Its start-up weights are not the version that its name had."""
    trainer = Trainer(Policy(deadline=3.0, on_engine_failure="quarantine", quorum=1))
    for version in range(3):
        trainer.sync.on_step_end(version + 1, FakeWeights(version))
    trainer.engines[1].restart()
    assert trainer.sync.servable() == {"a": 2}
    assert trainer.sync.engines()["b"].version is None
    result = trainer.sync.on_step_end(4, FakeWeights(4))
    assert result is not None
    assert result.outcome is Outcome.complete
    assert trainer.sync.servable() == {"a": 3, "b": 3}
    trainer.sync.close()


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
    trainer.sync.close()


# -- two at a time ----------------------------------------------------------------------------------------


def test_rounds_from_several_threads_take_turns(trainer: Trainer) -> None:
    """Each caller gets its own result; what was applied is buckets times the rounds that ran."""
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(trainer.sync.on_step_end, step, FakeWeights(step)) for step in range(1, 9)]
        results = [future.result(PATIENCE) for future in futures]
    assert [result.step for result in results if result] == list(range(1, 9))
    assert sorted(result.version for result in results if result) == list(range(8))
    assert all(result and result.outcome is Outcome.complete for result in results)
    assert [engine.words.count("commit") for engine in trainer.engines] == [8, 8]


def test_a_second_round_is_refused_at_once_if_the_policy_says_so() -> None:
    """Nothing is queued; when the first is over the next one is welcome."""
    trainer, gate = Trainer(Policy(deadline=3.0, when_busy="refuse")), Gate()
    trainer.transport.bad["bucket 1"] = gate
    first = trainer.sync.begin(1, FakeWeights(1), snapshot=False)
    gate.await_visitor()
    for refused in (
        lambda: trainer.sync.begin(2, FakeWeights(2)),
        lambda: trainer.sync.on_step_end(2, FakeWeights(2)),
    ):
        with pytest.raises(RoundInProgress, match="step 2: a round is in progress"):
            refused()
    assert not first.done
    gate.open()
    assert first.wait().ok
    for step in (2, 3, 4):
        assert trainer.sync.begin(step, FakeWeights(step), snapshot=False).wait().version == step - 1
    trainer.sync.close()


def test_an_overlapped_round_is_waited_for_where_it_is_needed(trainer: Trainer) -> None:
    """Training goes on beside it."""
    gate = Gate()
    trainer.transport.bad["bucket 1"] = gate
    pending = trainer.sync.begin(1, FakeWeights(1), snapshot=False)
    assert isinstance(pending, Pending)
    gate.await_visitor()
    assert not pending.done
    gate.open()
    assert pending.wait().ok
    assert pending.done
    assert pending.wait() is pending.wait()


def test_a_round_that_is_cancelled_while_it_waits_its_turn_never_holds_the_lock(trainer: Trainer) -> None:
    """It ends in Released, as every round does, when its turn has come."""
    gate = Gate()
    trainer.transport.bad["bucket 1"] = gate
    first = trainer.sync.begin(1, FakeWeights(1), snapshot=False)
    second = trainer.sync.begin(2, FakeWeights(2), snapshot=False)
    gate.await_visitor()
    second.cancel()
    gate.open()
    assert first.wait().ok
    assert second.wait().path[:2] == ("Idle", "Failed")
    assert trainer.sync.version() == 0


# -- set-up and the end -----------------------------------------------------------------------------------


def test_a_quorum_that_the_transport_cannot_keep_is_refused_at_once() -> None:
    """A collective cannot go on without a participant."""
    engines = [FakeEngine("a"), FakeEngine("b")]
    policy = Policy(on_engine_failure="quarantine", quorum=1)
    with pytest.raises(SetupError, match="cannot go on without a participant"):
        WeightSync(engines, FakeTransport(survives_loss=False), policy=policy)
    WeightSync(engines, FakeTransport(survives_loss=False)).close()
    with pytest.raises(SetupError, match="more engines than the 2"):
        WeightSync(engines, FakeTransport(), policy=Policy(on_engine_failure="quarantine", quorum=3))
    with pytest.raises(SetupError, match="no handler"):
        WeightSync(engines, FakeTransport(), handlers=[object()])  # type: ignore[list-item]


def test_closing_waits_for_what_was_begun_and_gives_everything_back() -> None:
    """Afterwards nothing begins any more; closing twice is closing once."""
    trainer, gate = Trainer(), Gate()
    trainer.transport.bad["bucket 1"] = gate
    with trainer.sync as sync:
        pending = sync.begin(1, FakeWeights(1), snapshot=False)
        gate.await_visitor()
        closer = threading.Thread(target=sync.close, daemon=True)
        closer.start()
        gate.open()
        closer.join(PATIENCE)
        assert pending.done
    assert trainer.transport.called.count("close") == 1
    assert [engine.words.count("close") for engine in trainer.engines] == [1, 1]
    with pytest.raises(SetupError, match="closed"):
        trainer.sync.on_step_end(2, FakeWeights(2))


def test_a_close_that_was_interrupted_can_be_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stays open because somebody was impatient once."""
    trainer = Trainer()
    trainer.sync.on_step_end(1, FakeWeights(1))
    with monkeypatch.context() as patched:

        def interrupt(self: threading.Thread, timeout: float | None = None) -> None:
            raise KeyboardInterrupt

        patched.setattr(threading.Thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.sync.close()
    assert "close" not in trainer.transport.called
    trainer.sync.close()
    assert "close" in trainer.transport.called


def test_an_error_of_the_library_itself_reaches_whoever_waits(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next round finds the thread alive."""
    with monkeypatch.context() as patched:
        patched.setattr(trainer.ledger, "current", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.sync.on_step_end(1, FakeWeights(1))
    assert trainer.sync.begin(2, FakeWeights(2), snapshot=False).wait().ok


def test_two_hundred_rounds_leave_no_thread_behind(trainer: Trainer) -> None:
    """Every fifth of them fails, each time somewhere else."""
    places = ("bucket 0", "bucket 2", "collect", "open", "clean")
    levels = []
    for step in range(1, 201):
        if step % 5 == 0:
            trainer.transport.bad[places[step // 5 % 5]] = EngineGone("on purpose")
        result = trainer.sync.on_step_end(step, FakeWeights(step))
        assert result is not None
        assert result.ok is (step % 5 != 0)
        if step in (20, 200):
            levels.append(threading.active_count())
    assert levels[1] <= levels[0] + 2

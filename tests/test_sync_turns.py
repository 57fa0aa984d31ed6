"""``WeightSync``, one round at a time: turns, overlapping, set-up, the end, and what is left behind."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from weightsync.fsm.errors import EngineGone, RoundInProgress, SetupError
from weightsync.fsm.policy import Policy
from weightsync.fsm.states import Outcome
from weightsync.sync import Pending, WeightSync
from weightsync.testing.fakes import FakeEngine, FakeTransport, FakeWeights, Gate
from weightsync.testing.scene import PATIENCE, Trainer, close_all


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every thread that a test has begun ends with it."""
    yield
    close_all()


@pytest.fixture
def trainer() -> Trainer:
    """A trainer that has done nothing yet."""
    return Trainer()


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


def test_an_overlapped_round_is_waited_for_where_it_is_needed(trainer: Trainer) -> None:
    """Training goes on beside it."""
    gate = Gate()
    trainer.transport.bad["bucket 1"] = gate
    pending = trainer.sync.begin(1, FakeWeights(1), snapshot=False)
    assert isinstance(pending, Pending)
    gate.await_visitor()
    done = [pending.done]
    gate.open()
    assert pending.wait().ok
    done.append(pending.done)
    assert done == [False, True]
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
        result = trainer.hand_over(step, FakeWeights(step))
        assert result.ok is (step % 5 != 0)
        if step in (20, 200):
            levels.append(threading.active_count())
    assert levels[1] <= levels[0] + 2

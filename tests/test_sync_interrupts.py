"""Cancelled, timed out, interrupted: the caller gets just that, and gets it when the round is Released."""

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from weightsync.fsm.errors import RoundInProgress, SyncFailed
from weightsync.fsm.policy import Policy
from weightsync.fsm.results import RoundResult
from weightsync.fsm.states import Disposition, Outcome
from weightsync.sync import WeightSync
from weightsync.testing.fakes import FakeWeights, Gate
from weightsync.testing.interrupting import Interrupter
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


async def reached(gate: Gate) -> None:
    """Wait, without blocking the event loop, until a thread came to the gate."""
    await asyncio.to_thread(gate.await_visitor)


# -- asyncio ----------------------------------------------------------------------------------------------


def test_a_round_can_be_awaited(trainer: Trainer) -> None:
    """With its result; the policy's error comes the same way."""

    async def main() -> RoundResult:
        return await trainer.sync.round(1, FakeWeights(1))

    assert asyncio.run(main()).outcome is Outcome.complete
    loud, error = Trainer(Policy(deadline=3.0, raise_on_failure=True)), OSError("bucket 1")
    loud.transport.bad["bucket 1"] = error

    async def failing() -> RoundResult:
        return await loud.sync.round(1, FakeWeights(1))

    with pytest.raises(SyncFailed) as caught:
        asyncio.run(failing())
    assert caught.value.__cause__ is error


def test_a_round_does_not_block_the_event_loop(trainer: Trainer) -> None:
    """Other tasks run while it is held up."""
    gate = trainer.held_in("Broadcasting")

    async def main() -> RoundResult:
        task = asyncio.create_task(trainer.sync.round(1, FakeWeights(1)))
        await reached(gate)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        gate.open()
        return await task

    assert asyncio.run(main()).ok


def test_a_time_out_around_a_round_is_raised_when_it_is_released(trainer: Trainer) -> None:
    """The statement after the await is not run; clean-up has."""
    trainer.held_in("Broadcasting")  # until the transport is aborted
    after: list[str] = []

    async def main() -> None:
        await asyncio.wait_for(trainer.sync.round(1, FakeWeights(1)), 0.2)
        after.append("went on")

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    trainer.check_released()
    assert after == []
    assert "abort" in trainer.transport.called


def test_a_timeout_block_is_left_by_its_time_out(trainer: Trainer) -> None:
    """``asyncio.timeout`` sees its own cancellation again, and turns it into TimeoutError."""
    trainer.held_in("Awaiting")
    after: list[str] = []

    async def main() -> None:
        async with asyncio.timeout(0.2):
            await trainer.sync.round(1, FakeWeights(1))
            after.append("went on")

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    trainer.check_released()
    assert after == []


@pytest.mark.parametrize("state", ["Locked", "Broadcasting", "Awaiting", "Cleaning"])
def test_a_task_that_is_cancelled_ends_cancelled_when_the_round_is_released(state: str) -> None:
    """In every state: before the last receipt the round fails, after it it finishes, and the lock is free."""
    trainer = Trainer()
    gate = trainer.held_in(state)
    after: list[str] = []

    async def hand_over() -> None:
        await trainer.sync.round(1, FakeWeights(1))
        after.append("went on")

    async def main() -> bool:
        task = asyncio.create_task(hand_over())
        await reached(gate)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        gate.open()
        await asyncio.wait([task], timeout=PATIENCE)
        return task.cancelled()

    assert asyncio.run(main())
    trainer.check_released()
    assert after == []
    assert trainer.sync.version() == (0 if state == "Cleaning" else None)


def test_a_second_cancellation_does_not_cut_the_cleaning_short(trainer: Trainer) -> None:
    """However often it is cancelled, the task ends when the round does."""
    gate = trainer.held_in("Cleaning")

    async def main() -> bool:
        task = asyncio.create_task(trainer.sync.round(1, FakeWeights(1)))
        await reached(gate)
        for _ in range(5):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        gate.open()
        await asyncio.wait([task], timeout=PATIENCE)
        return task.cancelled()

    assert asyncio.run(main())
    trainer.check_released()
    assert [engine.content for engine in trainer.engines] == [FakeWeights(1).content] * 2


def test_rounds_from_several_tasks_take_turns_or_are_refused(trainer: Trainer) -> None:
    """Each task gets its own result; by the other policy the later ones are told at once."""

    async def together(sync: WeightSync) -> list[RoundResult | BaseException]:
        rounds = (sync.round(step, FakeWeights(step)) for step in range(1, 4))
        return await asyncio.gather(*rounds, return_exceptions=True)

    results = asyncio.run(together(trainer.sync))
    assert [(found.step, found.version) for found in results if isinstance(found, RoundResult)] == [
        (1, 0), (2, 1), (3, 2),
    ]  # fmt: skip
    assert [engine.words.count("commit") for engine in trainer.engines] == [3, 3]
    strict = Trainer(Policy(deadline=3.0, when_busy="refuse"))
    first, *others = asyncio.run(together(strict.sync))
    assert isinstance(first, RoundResult)
    assert all(isinstance(found, RoundInProgress) for found in others)


def test_one_object_serves_many_event_loops_and_none(trainer: Trainer) -> None:
    """Two runs of asyncio, a thread with a loop of its own, and plain calls: nothing belongs to a loop."""

    async def main(step: int) -> RoundResult:
        return await trainer.sync.round(step, FakeWeights(step))

    versions = [asyncio.run(main(1)).version, asyncio.run(main(2)).version]
    found: list[RoundResult] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(main(3))), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    versions += [result.version for result in found]
    plain = trainer.sync.on_step_end(4, FakeWeights(4))
    assert plain is not None
    assert [*versions, plain.version] == [0, 1, 2, 3]


def test_an_event_loop_that_ends_waits_for_its_round(trainer: Trainer) -> None:
    """``asyncio.run`` cancels what is left over: the round is Released before the loop is gone."""
    gate = trainer.held_in("Broadcasting")

    async def main() -> None:
        task = asyncio.create_task(trainer.sync.round(1, FakeWeights(1)))
        await reached(gate)
        assert not task.done()

    asyncio.run(main())
    trainer.check_released()


# -- interrupts -------------------------------------------------------------------------------------------

CHILD = """
import json, os, signal, sys, threading
from weightsync.fsm.policy import Policy
from weightsync.testing.fakes import FakeWeights
from weightsync.testing.scene import Trainer

where, times = sys.argv[1], int(sys.argv[2])
trainer = Trainer(Policy(deadline=5.0))
gate = trainer.held_in(where)

def interrupt():
    gate.await_visitor()
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(0.2)
    gate.open()

threading.Thread(target=interrupt, daemon=True).start()
after = False
try:
    trainer.sync.on_step_end(1, FakeWeights(1))
    after = True
except KeyboardInterrupt as error:
    told = [record.event for record in trainer.records]
    moves = [record.target for record in trainer.records if record.source != record.target and record.target]
    print(json.dumps({
        "after": after, "error": type(error).__name__, "over": told.count("result"), "path": moves,
        "holder": trainer.lock.status().holder, "version": trainer.sync.version(),
        "states": [engine.machine.state.name for engine in trainer.engines],
    }))
"""


@pytest.mark.parametrize(("where", "times"), [("Broadcasting", 1), ("Cleaning", 3)])
def test_an_interrupt_is_raised_when_the_round_is_released(where: str, times: int) -> None:
    """Ctrl-C, once or again and again: the caller gets KeyboardInterrupt, and everything is put back."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD, where, str(times)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    told = json.loads(child.stdout)
    assert (told["after"], told["error"], told["over"]) == (False, "KeyboardInterrupt", 1)
    assert (told["holder"], told["states"]) == (None, ["Serving", "Serving"])
    assert told["path"][-1] == "Released"
    assert told["version"] == (0 if where == "Cleaning" else None)


@pytest.mark.timeout(120, method="thread")  # the timer is needed here
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in the garbage collector
def test_an_interrupt_at_any_instant_leaves_nothing_running(trainer: Trainer) -> None:
    """Hundreds of steps, each interrupted somewhere: the round is over by then, and the lock is free."""
    chance, begun, interrupted = random.Random(0), time.monotonic(), 0
    trainer.hand_over(0, FakeWeights(0))
    with Interrupter() as interrupter:
        for step in range(1, 400):
            weights, longest = FakeWeights(step), chance.choice((0.01, 0.01, 0.001))
            interrupted += interrupter.during(
                lambda step=step, weights=weights: trainer.sync.on_step_end(step, weights),  # type: ignore[misc]
                chance.uniform(1e-6, longest),
            )
            assert trainer.sync._turns._jobs.empty()
            trainer.check_released()
            if time.monotonic() - begun > 4.0:
                break
    assert interrupted >= 10


class Interrupted:
    """A queue whose ``put`` is interrupted, before or after it has done its work."""

    def __init__(self, real: Any, *, done: bool) -> None:
        self._real, self._done = real, done
        self.get = real.get

    def put(self, job: Any) -> None:
        """Interrupt once."""
        real, self.put = self._real, self._real.put  # type: ignore[method-assign]
        if self._done:
            real.put(job)
        raise KeyboardInterrupt


def test_an_interrupt_just_after_the_beginning_leaves_no_round_running(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came between handing the round over and waiting for it."""
    assert trainer.sync.on_train_begin(FakeWeights(0)).ok
    gate = trainer.held_in("Broadcasting")
    turns = trainer.sync._turns
    monkeypatch.setattr(turns, "_jobs", Interrupted(turns._jobs, done=True))
    with pytest.raises(KeyboardInterrupt):
        trainer.sync.on_step_end(1, FakeWeights(1))
    assert gate.reached.is_set() or trainer.sync.version() == 0
    trainer.check_released()
    gate.open()
    result = trainer.sync.on_step_end(2, FakeWeights(2))
    assert result is not None
    assert result.serving(Disposition.serving_new) == ("a", "b")

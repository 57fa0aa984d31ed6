"""What a hand-over does while a round runs: wait, block, be refused, replace an older one, or be skipped."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync import SetupError
from weightsync.fsm.policy import Policy
from weightsync.fsm.results import PassedOver, RoundResult, passed_over
from weightsync.fsm.states import Outcome
from weightsync.fsm.turns import Turn, turn
from weightsync.sync import Pending
from weightsync.testing.fakes import FakeWeights, Gate
from weightsync.testing.scene import PATIENCE, Trainer, close_all

CHOICES = ("wait", "block", "refuse", "coalesce", "skip")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every thread that a test has begun ends with it."""
    yield
    close_all()


# -- the decision -----------------------------------------------------------------------------------------


@given(choice=st.sampled_from(CHOICES), staleness=st.integers(1, 9), behind=st.integers(1, 20))
def test_nobody_is_passed_over_without_a_round_or_beyond_the_limit(
    choice: str, staleness: int, behind: int
) -> None:
    """Where there is no round everybody enters; weights are left out within the limit alone."""
    policy = Policy(when_busy=choice, staleness=staleness)  # type: ignore[arg-type]
    assert turn(policy, busy=False, behind=behind) is Turn.enter
    decided = turn(policy, busy=True, behind=behind)
    if decided in (Turn.skip, Turn.replace):
        assert behind <= staleness
    expected = {"wait": Turn.enter, "block": Turn.block, "refuse": Turn.refuse}
    left_out = {"coalesce": Turn.replace, "skip": Turn.skip}
    assert decided is expected.get(choice, left_out.get(choice) if behind <= staleness else Turn.block)


@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_a_staleness_is_a_whole_number(value: object) -> None:
    """At least one: while a round runs, the engines are behind by that."""
    with pytest.raises(SetupError, match="staleness"):
        Policy(staleness=value)  # type: ignore[arg-type]


# -- rounds that are real ---------------------------------------------------------------------------------


def held(choice: str, staleness: int = 2) -> tuple[Trainer, Gate, Pending]:
    """A trainer whose first round is held up while it sends."""
    trainer = Trainer(Policy(deadline=20.0, when_busy=choice, staleness=staleness))  # type: ignore[arg-type]
    gate = Gate()
    trainer.transport.bad["bucket 1"] = gate
    first = trainer.sync.begin(1, FakeWeights(1), snapshot=False)
    gate.await_visitor()
    return trainer, gate, first


def blocked(trainer: Trainer, step: int, weights: FakeWeights) -> "Blocked":
    """Begin a round on a thread of its own."""
    return Blocked(trainer, step, weights)


class Blocked:
    """A ``begin`` on a thread of its own, and whether it has come back."""

    def __init__(self, trainer: Trainer, step: int, weights: FakeWeights) -> None:
        self.pending: Pending | None = None
        self.asked = threading.Event()
        self._thread = threading.Thread(target=self._begin, args=(trainer, step, weights), daemon=True)
        hold = Pending.hold

        thread, asked = self._thread, self.asked

        def told(self: Pending) -> None:
            if threading.current_thread() is thread:
                asked.set()
            hold(self)

        Pending.hold = told  # type: ignore[method-assign]
        self._thread.start()
        try:
            assert self.asked.wait(PATIENCE), "it did not block"
        finally:
            Pending.hold = hold  # type: ignore[method-assign]

    def result(self) -> RoundResult:
        """Its round's, once it has come back."""
        self._thread.join(PATIENCE)
        assert self.pending is not None
        return self.pending.wait()

    def _begin(self, trainer: Trainer, step: int, weights: FakeWeights) -> None:
        self.pending = trainer.sync.begin(step, weights, snapshot=False)


def test_skipped_weights_say_so_and_are_no_failure() -> None:
    """The result comes at once; ``require`` gives it back, ``ok`` is not said, and nothing was sent."""
    trainer, gate, first = held("skip")
    skipped = trainer.sync.begin(2, FakeWeights(2))
    assert skipped.done
    result = skipped.wait()
    assert result.passed_over == PassedOver("skipped", behind=2)
    assert (result.outcome, result.version, result.published) == (Outcome.passed_over, -1, "no")
    assert result.require() is result
    assert not result.ok
    assert result.summary() == (
        "step 2: not sent, a round is in progress; the engines are 2 hand-overs behind"
    )
    with ThreadPoolExecutor(1) as pool:
        hooked = pool.submit(trainer.sync.on_step_end, 2, FakeWeights(2))
        gate.open()
        told = hooked.result(PATIENCE)
    assert first.wait().version == 0
    assert told is not None
    assert (told.step, told.version) == (2, 1)
    trainer.check_equal(FakeWeights(2))


def test_weights_that_newer_ones_overtook_are_not_a_negative_number_behind() -> None:
    """They were brought first, and their snapshot took longer; the engines have newer ones by then."""
    trainer = Trainer(Policy(deadline=20.0, when_busy="skip", staleness=2))
    turns = trainer.sync._turns
    slow = turns.pending(1)
    assert trainer.sync.begin(2, FakeWeights(2)).wait().ok
    gate = Gate()
    trainer.transport.bad["bucket 1"] = gate
    running = trainer.sync.begin(3, FakeWeights(3), snapshot=False)
    gate.await_visitor()
    turns.enter(slow, FakeWeights(1), snapshot=False)
    assert slow.wait().passed_over == PassedOver("skipped", behind=0)
    gate.open()
    assert running.wait().ok
    trainer.check_equal(FakeWeights(3))


def test_a_skip_that_would_leave_the_engines_too_far_behind_blocks() -> None:
    """One may be skipped; the next one waits for the round, and is sent."""
    trainer, gate, first = held("skip", staleness=2)
    assert trainer.sync.begin(2, FakeWeights(2)).wait().passed_over is not None
    third = blocked(trainer, 3, FakeWeights(3))
    assert third.pending is None
    assert not first.done
    gate.open()
    assert third.result().version == 1
    trainer.check_equal(FakeWeights(3))


def test_a_failed_round_does_not_bring_the_engines_nearer() -> None:
    """What it was to deliver still counts, so the limit comes sooner."""
    trainer, gate, first = held("skip", staleness=3)
    trainer.transport.bad["bucket 2"] = OSError("lost")
    assert trainer.sync.begin(2, FakeWeights(2)).wait().passed_over == PassedOver("skipped", 2)
    gate.open()
    assert not first.wait().ok
    gate = Gate()
    trainer.transport.bad["bucket 1"] = gate
    assert not trainer.sync.begin(3, FakeWeights(3), snapshot=False).done
    gate.await_visitor()
    fourth = blocked(trainer, 4, FakeWeights(4))  # after a good first round this would be the third behind
    gate.open()
    assert fourth.result().ok


def test_the_newest_weights_take_the_place_of_those_that_wait() -> None:
    """Each older one says which step's and which version took its place; the engines get the newest."""
    trainer, gate, first = held("coalesce", staleness=9)
    older = [trainer.sync.begin(step, FakeWeights(step), snapshot=False) for step in (2, 3)]
    newest = trainer.sync.begin(4, FakeWeights(4), snapshot=False)
    assert [each.superseded_by for each in older] == [newest, newest]
    assert newest.superseded_by is None
    assert [each.weights for each in older] == [None, None], "they are kept in memory"
    gate.open()
    assert first.wait().version == 0
    results = [each.wait() for each in older]
    assert [result.passed_over for result in results] == [
        PassedOver("superseded", 1, by_step=4, by_version=1), PassedOver("superseded", 2, 4, 1),
    ]  # fmt: skip
    assert results[0].summary() == ("step 2: not sent, the weights of step 4 took their place (version 1)")
    assert newest.wait().version == 1
    trainer.check_equal(FakeWeights(4))
    assert [engine.words.count("commit") for engine in trainer.engines] == [2, 2]


def test_coalescing_blocks_at_the_limit() -> None:
    """What waits then is begun, not replaced for ever."""
    trainer, gate, _ = held("coalesce", staleness=3)
    second = trainer.sync.begin(2, FakeWeights(2), snapshot=False)
    third = trainer.sync.begin(3, FakeWeights(3), snapshot=False)
    fourth = blocked(trainer, 4, FakeWeights(4))
    assert second.superseded_by is third
    assert third.superseded_by is None
    gate.open()
    assert fourth.result().ok
    trainer.check_equal(FakeWeights(4))
    assert third.wait().outcome in (Outcome.complete, Outcome.passed_over)


def test_who_was_superseded_by_weights_that_cannot_be_read_is_told() -> None:
    """They never got a number."""
    trainer, gate, _ = held("coalesce", staleness=9)
    older = trainer.sync.begin(2, FakeWeights(2), snapshot=False)
    broken = FakeWeights(3)
    broken.bad["materialize"] = OSError("gone")
    newest = trainer.sync.begin(3, broken, version=7, snapshot=False)
    gate.open()
    with pytest.raises(OSError, match="gone"):
        newest.wait()
    assert older.wait().passed_over == PassedOver("superseded", 1, by_step=3, by_version=None)
    assert "without a number" in older.wait().summary()


def test_blocking_takes_its_copy_when_it_goes_on() -> None:
    """The call comes back when the round before is over; the order is kept."""
    trainer, gate, first = held("block")
    second = blocked(trainer, 2, FakeWeights(2))
    assert second.pending is None
    gate.open()
    assert second.result().version == 1
    assert first.done


def test_a_call_that_blocks_can_be_interrupted_and_the_round_before_goes_on() -> None:
    """Closing ends it with an error, and nothing of it was queued."""
    trainer, gate, first = held("block")
    asked = threading.Event()

    async def main() -> None:
        task = asyncio.ensure_future(trainer.sync.round(2, FakeWeights(2)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()
        asked.set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert asked.is_set()
    assert not first.done
    gate.open()
    assert first.wait().ok
    trainer.sync.close()
    assert [engine.words.count("commit") for engine in trainer.engines] == [1, 1]


def published(trainer: Trainer) -> list[int | None]:
    """The steps whose weights were published, in that order."""
    trainer.sync.close()
    return [record.step for record in trainer.records if record.trigger == "Published"]


@pytest.mark.parametrize("choice", ["block", "skip", "coalesce"])
def test_who_blocks_goes_on_in_their_order(choice: str) -> None:
    """Whoever comes before those who wait have noticed that the round is over comes after them."""
    trainer, gate, first = held(choice, staleness=1)

    async def main() -> list[RoundResult]:
        older = [asyncio.ensure_future(trainer.sync.round(step, FakeWeights(step))) for step in (2, 3)]
        for _ in range(20):
            await asyncio.sleep(0)
        gate.open()
        first.wait()
        newest = trainer.sync.begin(4, FakeWeights(4), snapshot=False)
        return [*await asyncio.gather(*older), await newest]

    results = asyncio.run(main())
    assert published(trainer) == [1, 2, 3, 4]
    assert [result.version for result in results] == [1, 2, 3]
    trainer.check_equal(FakeWeights(4))


@pytest.mark.parametrize("choice", ["block", "skip", "coalesce"])
def test_threads_that_block_go_on_in_their_order(choice: str) -> None:
    """Those of one that takes its copy when it goes on, too."""
    trainer, gate, _ = held(choice, staleness=1)
    others = [blocked(trainer, step, FakeWeights(step)) for step in (2, 3, 4)]
    gate.open()
    assert [other.result().version for other in others] == [1, 2, 3]
    assert published(trainer) == [1, 2, 3, 4]


def test_who_blocks_and_gives_up_lets_the_next_one_go_on() -> None:
    """It was first in the row, and is gone."""
    trainer, gate, first = held("block")

    async def main() -> RoundResult:
        second, third = (asyncio.ensure_future(trainer.sync.round(s, FakeWeights(s))) for s in (2, 3))
        for _ in range(20):
            await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        gate.open()
        return await asyncio.wait_for(third, PATIENCE)

    assert asyncio.run(main()).version == 1
    assert first.done
    assert published(trainer) == [1, 3]


def test_who_is_cancelled_just_when_it_is_let_in_has_no_round_left() -> None:
    """The cancellation comes back when that is over."""
    trainer, gate, first = held("block")

    async def main() -> None:
        second = asyncio.ensure_future(trainer.sync.round(2, FakeWeights(2)))
        for _ in range(20):
            await asyncio.sleep(0)
        held_again = Gate()
        trainer.transport.bad["bucket 2"] = held_again
        gate.open()
        await asyncio.to_thread(held_again.await_visitor)
        held_again.open()
        first.wait()  # from here on it is let in, and the task has not been told
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        trainer.check_released()

    asyncio.run(main())


def test_weights_that_come_late_are_passed_over_for_newer_ones() -> None:
    """Their copy took so long that newer ones are on their way: what the engines get last is the newest."""
    trainer, gate, _ = held("coalesce", staleness=9)
    copying = Gate()

    class Slow(FakeWeights):
        def snapshot(self) -> FakeWeights:
            copying.pass_through()
            return self

    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(trainer.sync.begin, 2, Slow(2))
        copying.await_visitor()
        third = trainer.sync.begin(3, FakeWeights(3), snapshot=False)
        copying.open()
        older = second.result(PATIENCE)
    gate.open()
    assert third.wait().version == 1, "newer weights were dropped"
    assert older.wait().passed_over == PassedOver("superseded", 1, by_step=3, by_version=1)
    trainer.check_equal(FakeWeights(3))


@pytest.mark.parametrize("choice", ["block", "skip", "coalesce"])
def test_the_asynchronous_form_never_blocks_the_event_loop(choice: str) -> None:
    """Not at the limit, either: it awaits the round before."""
    trainer, gate, _ = held(choice, staleness=1)
    turned: list[int] = []

    async def main() -> RoundResult:
        task = asyncio.ensure_future(trainer.sync.round(2, FakeWeights(2)))
        for count in range(100):
            turned.append(count)
            await asyncio.sleep(0)
        assert not task.done()
        gate.open()
        return await task

    assert asyncio.run(main()).version == 1
    assert len(turned) == 100


def test_many_threads_that_coalesce_all_get_an_answer() -> None:
    """Real threads, no gate: each is sent or says what took its place, and the newest bytes arrive."""
    trainer = Trainer(Policy(deadline=20.0, when_busy="coalesce", staleness=4))
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(trainer.sync.on_step_end, step, FakeWeights(step)) for step in range(1, 65)]
        results = [result for future in futures if (result := future.result(PATIENCE))]
    assert len(results) == 64
    sent = [result for result in results if result.passed_over is None]
    assert all(result.require() is result for result in results)
    assert [engine.words.count("commit") for engine in trainer.engines] == [len(sent)] * 2
    versions = {result.version for result in sent}
    assert all(result.passed_over.by_version in versions for result in results if result.passed_over)
    trainer.check_released()


def test_a_result_of_weights_that_were_passed_over_is_a_value() -> None:
    """It can be compared, and says no round."""
    why = PassedOver("skipped", 2)
    assert passed_over(3, why) == passed_over(3, why)
    assert passed_over(3, why).engines == ()

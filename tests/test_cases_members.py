"""Cases about who takes part: engines and trainers in processes of their own are killed, or frozen."""

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from casekit.bench import SENDING, Bench, quick
from casekit.levels import eventually
from casekit.rayside import InActor, TrainerProcess, environment
from casekit.scripts import ANY, Kill, Sleep
from casekit.tensors import same, state
from weightsync import RayLock
from weightsync.fsm.errors import EngineGone, EngineSilent
from weightsync.fsm.states import EngineState

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(120)]

PATIENCE = 60.0
POLICY = quick(deadline=8.0)


@pytest.fixture(scope="module")
def survivors(ray_cluster: None) -> Iterator[list[InActor]]:
    """Two engines that outlive every case."""
    engines = [InActor(f"s{number}") for number in range(2)]
    yield engines
    for engine in engines:
        ray.kill(engine.actor)


@pytest.fixture
def mortal(ray_cluster: None) -> Iterator[InActor]:
    """An engine that nobody starts again."""
    engine = InActor("mortal", restarts=0)
    yield engine
    ray.kill(engine.actor)


def fails_without_a_trace(bench: Bench, mortal: InActor, *, phase: Any, frames: int | None) -> None:
    """One round that the death of ``mortal`` ends, seen from outside; the others serve the old bits."""
    others = [engine for name, engine in bench.engines.items() if name != mortal.name]
    for engine in others:
        engine.disarm()
    result = bench.run(state(9))
    assert isinstance(result.error, EngineGone), result.summary()
    assert result.culprit == mortal.name
    assert result.failed_in in (phase if isinstance(phase, tuple) else (phase,))
    assert result.path[-2:] == ("Failed", "Released")
    bench.lock_is_free()
    if frames is not None:
        assert [engine.count("frame") for engine in others] == [frames] * len(others)
    for engine in others:
        look = engine.look()
        assert (look.state, look.paused, look.in_session) == (EngineState.Serving, False, False)
        assert same(look.tensors, state(1))
    assert set(bench.sync.servable()) == {engine.name for engine in others}


def the_survivors_go_on(bench: Bench, survivors: list[InActor]) -> None:
    """Without the dead one, whose name is free again."""
    bench.sync.remove_engine("mortal")
    del bench.engines["mortal"]
    bench._level = None  # one link less is open from now on
    assert {row.engine for row in bench.works().engines} == {engine.name for engine in survivors}
    bench.works()


class TestB08:
    """A receive without a limit: MoonshotAI/checkpoint-engine#38, #43, Tencent-Hunyuan/UniRL#337, #338."""

    def test_b08_c_killed_between_a_bucket_and_its_answer(
        self, survivors: list[InActor], mortal: InActor
    ) -> None:
        """It has bucket 0, and will never say so: that is noticed at once, and who it was."""
        engines = [*(engine.fresh() for engine in survivors), mortal]
        with Bench(engines, "collective", policy=quick()) as bench:
            bench.works()
            mortal.arm("applied", Kill(), 0)
            fails_without_a_trace(bench, mortal, phase=SENDING, frames=None)
            the_survivors_go_on(bench, survivors)

    def test_b08_d_it_comes_back_when_the_next_round_runs(self, survivors: list[InActor]) -> None:
        """It slept over bucket 0 for longer than its limit: what it then has to say is not for that round."""
        engines = [engine.fresh() for engine in survivors]
        with Bench(engines, "collective", policy=quick()) as bench:
            bench.works()
            engines[1].arm("applied", Sleep(3.5), 0)
            began = time.monotonic()
            bench.fails(EngineSilent, engine="s1", phase=SENDING, bucket=ANY)
            assert time.monotonic() - began < 3.5, "it was waited for"
            result = bench.works()
            receipts = [receipt for row in result.engines for receipt in row.receipts]
            assert [receipt.epoch for receipt in receipts] == [result.epoch] * 2


class TestB11:
    """An engine is killed, and a group needs every member: NVIDIA-NeMo/RL#3472, #3591."""

    def test_b11_a_between_two_rounds(self, survivors: list[InActor], mortal: InActor) -> None:
        """Noticed before any bucket, by name. The next round, of the survivors, has a group of its own."""
        engines = [*(engine.fresh() for engine in survivors), mortal]
        with Bench(engines, "collective", policy=POLICY) as bench:
            bench.works()
            os.kill(mortal.process()[0], signal.SIGKILL)
            fails_without_a_trace(bench, mortal, phase="Locked", frames=0)
            the_survivors_go_on(bench, survivors)

    def test_b11_b_in_a_bucket(self, survivors: list[InActor], mortal: InActor) -> None:
        """The round fails within its deadline and names it; the trainer and the others live on."""
        engines = [*(engine.fresh() for engine in survivors), mortal]
        with Bench(engines, "collective", policy=POLICY) as bench:
            bench.works()
            mortal.arm("apply", Kill(), 1)
            fails_without_a_trace(bench, mortal, phase=SENDING, frames=None)
            the_survivors_go_on(bench, survivors)


class Succession:
    """A trainer, and whoever takes its place: processes with one name, one lock and one ledger."""

    def __init__(self, engines: list[InActor], folder: Path) -> None:
        self.engines, self.lock = engines, f"case-{uuid.uuid4().hex[:8]}"
        self._ledger = str(folder / "ledger.json")
        self._trainers: list[Any] = []

    def trainer(self) -> Any:
        """One more of them."""
        remote: Any = ray.remote  # whose types know nothing of the options of actors
        make = remote(num_cpus=0, max_concurrency=2, runtime_env=environment())
        names, actors = [each.name for each in self.engines], [each.actor for each in self.engines]
        trainer = make(TrainerProcess).remote(names, actors, self.lock, self._ledger)
        self._trainers.append(trainer)
        return trainer

    def step(self, trainer: Any, number: int) -> tuple[bool, int, int, str]:
        """A round that has to work, and after which every engine holds its bits."""
        done: tuple[bool, int, int, str] = ray.get(trainer.step.remote(number, number), timeout=PATIENCE)
        assert done[0], done[3]
        for engine in self.engines:
            look = engine.look()
            assert (look.state, look.paused, look.version) == (EngineState.Serving, False, done[1])
            assert same(look.tensors, state(number))
        return done

    def stopped_in_bucket_two(self, trainer: Any, how: signal.Signals) -> Any:
        """A round whose trainer gets this signal while an engine has the second of three buckets."""
        pid = ray.get(trainer.process.remote(), timeout=PATIENCE)
        for engine in self.engines:
            engine.disarm()
            engine.arm("apply", Sleep(1.0), 1)
        running = trainer.step.remote(3, 3.0)
        assert eventually(lambda: self.engines[0].count("apply") >= 2, PATIENCE)
        os.kill(pid, how)
        return running

    def end(self) -> None:
        """Nobody is left."""
        for trainer in self._trainers:
            ray.kill(trainer)
        RayLock(self.lock).retire(force=True)


@pytest.fixture
def succession(survivors: list[InActor], tmp_path: Path) -> Iterator[Callable[[bool], Succession]]:
    """For engines that stage, or not."""
    made: list[Succession] = []

    def make(stages: bool) -> Succession:
        made.append(Succession([engine.fresh(stages=stages) for engine in survivors], tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.end()


class TestB15:
    """A trainer dies, or freezes, and another one starts: huggingface/trl#3408, #6651."""

    @pytest.mark.parametrize("stages", [True, False], ids=["stages", "in-place"])
    def test_b15_killed_in_a_bucket(self, succession: Callable[[bool], Succession], stages: bool) -> None:
        """The engines drop its session for that of the newer one, which brings them its own bits."""
        story = succession(stages)
        first = story.trainer()
        before = [story.step(first, number) for number in (1, 2)][-1]
        doomed = story.stopped_in_bucket_two(first, signal.SIGKILL)
        second = story.trainer()
        after = story.step(second, 4)
        assert after[1] > before[1], "the version fell"
        assert after[2] > before[2] + 1, "the epoch is not above that of the dead one's last round"
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(doomed, timeout=PATIENCE)

    def test_b15_frozen_in_a_bucket_and_woken_too_late(
        self, succession: Callable[[bool], Succession]
    ) -> None:
        """Whatever it still had to say is refused: its round has failed, and the engines are the other's."""
        story = succession(True)
        first = story.trainer()
        before = [story.step(first, number) for number in (1, 2)][-1]
        pid = ray.get(first.process.remote(), timeout=PATIENCE)
        frozen = story.stopped_in_bucket_two(first, signal.SIGSTOP)
        try:
            second = story.trainer()
            after = story.step(second, 4)
        finally:
            os.kill(pid, signal.SIGCONT)
        ok, _, epoch, summary = ray.get(frozen, timeout=PATIENCE)
        assert not ok, summary
        assert epoch < after[2]
        assert after[1] > before[1]
        for engine in story.engines:
            assert (engine.look().version, engine.look().paused) == (after[1], False)
            assert same(engine.look().tensors, state(4))
        assert story.step(second, 5)[1] == after[1] + 1

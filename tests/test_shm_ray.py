"""Shared memory between real processes: actors that are killed and stopped, and a trainer that is killed."""

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from casekit.bench import SENDING, Bench, quick
from casekit.levels import eventually
from casekit.rayside import InActor, TrainerProcess, environment
from casekit.scripts import ANY, Kill, Sleep
from casekit.tensors import same, state
from weightsync import SharedMemoryTransport, WeightSync
from weightsync.fsm.errors import EngineGone
from weightsync.fsm.states import Disposition, EngineState, Outcome
from weightsync.transports.near import _PREFIX

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(150)]

POLICY = quick(deadline=8.0)
GO_ON = quick(deadline=8.0, on_engine_failure="quarantine", quorum=1, rest=0.05, longest_rest=0.05)


@pytest.fixture(scope="module")
def actors(ray_cluster: None) -> Iterator[list[InActor]]:
    """Two engines in processes of their own, which Ray starts again."""
    engines = [InActor(f"r{number}", aliases=True) for number in range(2)]
    for engine in engines:
        engine.process()
    yield engines
    for engine in engines:
        ray.kill(engine.actor)


@pytest.fixture(params=[{"aliases": True}, {"swaps": True}, {}], ids=["aliases", "swaps", "copies"])
def engines(actors: list[InActor], request: pytest.FixtureRequest) -> list[InActor]:
    """Both, as new engines of each kind."""
    return [engine.fresh(**request.param) for engine in actors]


@contextlib.contextmanager
def stopped(engine: InActor) -> Iterator[None]:
    """Its process stands still meanwhile."""
    pid = engine.process()[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_it_reaches_processes(engines: list[InActor]) -> None:
    """Round after round, seen from all sides."""
    with Bench(engines, SharedMemoryTransport(slots=2), policy=POLICY) as bench:
        for value in range(1, 6):
            bench.works(state(float(value)))


def test_engines_that_alias_share_the_trainers_memory(actors: list[InActor]) -> None:
    """Nobody has memory of its own for what is large: a version is there once."""
    size = 32 << 20
    engines = [
        engine.fresh({"w": state(0.0)["layer.weight"].new_zeros(size // 4)}, aliases=True)
        for engine in actors
    ]
    policy = quick(deadline=20.0, bucket_bytes=8 << 20)
    with WeightSync([each.link for each in engines], SharedMemoryTransport(), policy=policy) as sync:
        before = [_private(each) for each in engines]
        for value in (1.0, 2.0, 3.0):
            model = {"w": state(0.0)["layer.weight"].new_full((size // 4,), value)}
            assert sync.on_step_end(int(value), model).require()  # type: ignore[union-attr]
        after = [_private(each) for each in engines]
    assert all(more < less - size // 2 for less, more in zip(before, after, strict=True)), (before, after)


def _private(engine: InActor) -> int:
    """Bytes of memory that nobody shares with its process."""
    rollup = Path(f"/proc/{engine.process()[0]}/smaps_rollup").read_text(encoding="ascii")
    return sum(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Private_"))


ALIASES: dict[str, Any] = {"aliases": True}


@pytest.mark.parametrize(
    ("point", "bucket", "phase", "how"),
    [
        ("open", ANY, ("Locked", "Broadcasting"), ALIASES), ("receive", ANY, ("Locked", "Broadcasting"), {}),
        ("apply", 0, SENDING, ALIASES), ("applied", 2, SENDING, {}), ("release", ANY, SENDING, ALIASES),
        ("acked", ANY, "Awaiting", {}), ("commit", ANY, "Cleaning", ALIASES),
    ],
)  # fmt: skip
def test_an_engine_is_killed(
    point: str, bucket: int, phase: Any, how: dict[str, Any], actors: list[InActor]
) -> None:
    """SIGKILL in each phase: it is named, nobody waits for it, and it comes back by a full resend."""
    engines = [engine.fresh(**how) for engine in actors]
    with Bench(engines, SharedMemoryTransport(slots=1), policy=POLICY) as bench:
        bench.works()
        engines[1].arm(point, Kill(), bucket)
        published = "no"
        result = bench.fails(EngineGone, engine="r1", phase=phase, bucket=ANY, published=published)
        assert result.seconds[result.failed_in or ""] < POLICY.deadline / 2
        engines[1].process()  # it is there again
        assert eventually(lambda: bench.run(state(50.0)).ok, 30.0)
        assert all(same(engine.look().tensors, state(50.0)) for engine in engines)


def test_a_stopped_reader_that_wakes_up_sees_only_what_it_was_shown(actors: list[InActor]) -> None:
    """SIGSTOP with views of a version; the others go on for rounds; SIGCONT: its bytes are the old ones."""
    engines = [engine.fresh(aliases=True) for engine in actors]
    with WeightSync([each.link for each in engines], SharedMemoryTransport(), policy=GO_ON) as sync:
        assert sync.on_train_begin(state(1.0)).ok
        engines[1].ask("keep")
        with stopped(engines[1]):
            for step in range(1, 5):
                result = sync.on_step_end(step, state(1.0 + step))
                assert result is not None
                assert result.outcome is Outcome.partial
                assert result.serving(Disposition.serving_new) == ("r0",)
            assert same(engines[0].look().tensors, state(5.0))
        kept = engines[1].ask("keeps")
        assert [tensor.unique().tolist() for tensor in kept] == [
            tensor.unique().tolist() for tensor in state(1.0).values()
        ], "it was shown other bytes"
        assert eventually(lambda: sync.on_step_end(9, state(9.0)).outcome is Outcome.complete, 20.0)  # type: ignore[union-attr]
        assert same(engines[1].look().tensors, state(9.0))
        assert len(sync._transport._pool.segments) <= 4  # type: ignore[attr-defined]


def test_a_reader_that_is_stopped_in_a_bucket(actors: list[InActor]) -> None:
    """In the middle of a slot of the ring: the round goes on without it, and it brings nothing back."""
    engines = [engine.fresh() for engine in actors]
    transport = SharedMemoryTransport(mode="ring", slots=1)
    with WeightSync([each.link for each in engines], transport, policy=GO_ON) as sync:
        assert sync.on_train_begin(state(1.0)).ok
        engines[1].arm("apply", Sleep(0.5), 1)
        pending = sync.begin(1, state(2.0))
        assert eventually(lambda: not engines[1].ask("armed", "apply", 1))
        with stopped(engines[1]):
            assert pending.wait().outcome is Outcome.partial
            assert sync.on_step_end(2, state(3.0)).outcome is Outcome.partial  # type: ignore[union-attr]
        assert sync.servable() == {"r0": 2}
        assert eventually(lambda: sync.on_step_end(3, state(4.0)).outcome is Outcome.complete, 20.0)  # type: ignore[union-attr]
        assert same(engines[1].look().tensors, state(4.0))


def test_whoever_writes_to_what_he_aliases_ends_alone(actors: list[InActor]) -> None:
    """The engine that lied about it dies; trainer and sibling do not notice, and it comes back."""
    engines = [engine.fresh(aliases=True) for engine in actors]
    with WeightSync([each.link for each in engines], SharedMemoryTransport(), policy=GO_ON) as sync:
        assert sync.on_train_begin(state(1.0)).ok
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(engines[1].actor.write.remote(), timeout=60)
        assert same(engines[0].look().tensors, state(1.0))
        engines[1].process()
        assert eventually(lambda: sync.on_step_end(1, state(2.0)).outcome is Outcome.complete, 30.0)  # type: ignore[union-attr]
        assert same(engines[1].look().tensors, state(2.0))


def test_b35_a_one_reader_ends_and_the_others_read_on(actors: list[InActor]) -> None:
    """It is killed after bucket 1: the segment stays for the others, in this round and in the next."""
    engines = [engine.fresh() for engine in actors]
    with Bench(engines, SharedMemoryTransport(mode="ring", slots=1), policy=GO_ON) as bench:
        bench.works(state(1.0))
        engines[1].arm("applied", Kill(), 1)
        assert bench.run(state(2.0)).outcome is Outcome.partial
        assert same(engines[0].look().tensors, state(2.0))
        assert bench.run(state(3.0)).published == "yes"
        assert same(engines[0].look().tensors, state(3.0))
        engines[1].process()


def test_b35_b_the_trainer_is_killed_in_a_bucket_again_and_again(
    actors: list[InActor], tmp_path: Path
) -> None:
    """Five lives, each ended in the middle of bucket 2: nothing of them is left, and the sixth works."""
    engines = [engine.fresh(aliases=True) for engine in actors]
    names, lock = [each.name for each in engines], f"shm-{uuid.uuid4().hex[:8]}"
    ledger = str(tmp_path / "ledger.json")
    make: Any = ray.remote(num_cpus=0, max_restarts=0, runtime_env=environment())(TrainerProcess)
    before = _shm_names()
    shared = names, [each.actor for each in engines], lock, ledger, "shm"
    lives = [make.remote(*shared, deadline=3.0) for _ in range(5)] + [
        make.remote(*shared)
    ]  # engines wait for as long
    for life, trainer in enumerate(lives[:5]):
        engines[0].arm("apply", Sleep(1.5), 1)
        pid = ray.get(trainer.process.remote(), timeout=60)
        running = trainer.step.remote(1, float(life))
        assert eventually(lambda: not engines[0].ask("armed", "apply", 1), 20.0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(running, timeout=60)
        began = time.monotonic()
        assert eventually(lambda: all(not _paused(each) for each in engines), 20.0), "an engine stays paused"
        assert time.monotonic() - began < 15.0
    trainer = lives[-1]
    ok, *_, told = ray.get(trainer.step.remote(1, 7.0), timeout=90)
    assert ok, told
    assert all(same(each.look().tensors, state(7.0)) for each in engines)
    assert _shm_names() <= before, "segments or folders of dead trainers are left"
    ray.get(trainer.end.remote(), timeout=60)
    ray.kill(trainer)
    assert all(same(each.look().tensors, state(7.0)) for each in engines), "they went with their trainer"


def _paused(engine: InActor) -> bool:
    look = engine.look()
    return look.paused or look.state is not EngineState.Serving


def _shm_names() -> set[str]:
    """What has a name: folders of endpoints that nobody lives in would be the only thing."""
    import tempfile

    from weightsync.transports.private_folder import inhabited

    place = Path(tempfile.gettempdir())
    return {each.name for each in place.glob(f"{_PREFIX}*") if each.is_dir() and not inhabited(each)}

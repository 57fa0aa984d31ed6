"""Cases with engines in processes of their own, which crash, restart, and have another order of sets."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from torch import Tensor

from casekit.bench import SENDING, Bench, quick, threads
from casekit.levels import eventually
from casekit.rayside import AsyncTrainer, InActor, environment
from casekit.scripts import ANY, Exit, Injected, Raise, Sleep
from casekit.tensors import same, state
from weightsync import RayLock
from weightsync.fsm.errors import EngineGone, PlanError
from weightsync.fsm.lock import Granted, LockError, Ticket
from weightsync.fsm.states import Disposition, EngineState

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(120)]

PATIENCE = 60.0
POLICY = quick(deadline=8.0)
OLD, OUT = Disposition.serving_old, Disposition.quarantined


@pytest.fixture(scope="module")
def actors(ray_cluster: None) -> Iterator[list[InActor]]:
    """Three engines, each in a process with a hash seed of its own."""
    engines = [InActor(f"r{number}", seed=number + 1) for number in range(3)]
    assert len({engine.process()[1] for engine in engines}) == 3
    yield engines
    for engine in engines:
        ray.kill(engine.actor)


@pytest.fixture
def engines(actors: list[InActor]) -> list[InActor]:
    """Two of them, as new engines that stage."""
    return [engine.fresh() for engine in actors[:2]]


def collective(engines: list[InActor], **options: Any) -> Bench:
    """A trainer that reaches them by the collective transport."""
    return Bench(engines, "collective", **{"policy": POLICY, **options})


def test_b14_a_another_hash_seed_in_each_process(actors: list[InActor]) -> None:
    """RLinf/RLinf#1355: names mean the same in every process. Mixed dtypes, in a bucket each and in one."""
    kinds = [(16, torch.bfloat16), (8, torch.float32)] * 6
    model = {f"w{number}": torch.arange(size).to(dtype) for number, (size, dtype) in enumerate(kinds)}
    held = [
        {name: torch.zeros_like(model[name]) for name in order}
        for order in (model, reversed(model), sorted(model))
    ]
    for engine, tensors in zip(actors, held, strict=True):
        engine.fresh(tensors)
    with collective(actors) as bench:
        bench.works(model)
        bench.works({name: model[name] + 1 for name in reversed(model)})


@pytest.mark.parametrize(("point", "bucket", "phase"), [("apply", 1, SENDING), ("commit", ANY, "Cleaning")])
def test_b01_an_engine_raises_in_its_process(
    point: str, bucket: int, phase: Any, engines: list[InActor]
) -> None:
    """radixark/miles#1967: the error comes out with type, text and bucket; the next round works."""
    with collective(engines) as bench:
        bench.works()
        engines[1].arm(point, Raise(Injected("no such parameter")), bucket)
        result = bench.fails(Injected, engine="r1", phase=phase, bucket=bucket)
        assert str(result.error) == "no such parameter"
        bench.works()


@pytest.mark.parametrize("point", ["open", "opened", "apply"])
def test_b03_a_pause_or_an_update_that_stops_half_way(point: str, actors: list[InActor]) -> None:
    """NVIDIA-NeMo/RL#3612, NovaSky-AI/SkyRL#1605: none stays paused, and all take the next begin."""
    engines = [engine.fresh() for engine in actors]
    with collective(engines) as bench:
        bench.works()
        for engine in engines:
            engine.disarm()
        engines[1].arm(point, Raise(Injected("refused")))
        result = bench.fails(
            Injected, engine="r1", phase="Broadcasting" if point == "apply" else "Locked", bucket=ANY
        )
        assert [row.disposition for row in result.engines] == [OLD, OUT, OLD]
        for engine in engines:
            assert (engine.look().state, engine.look().paused) == (EngineState.Serving, False)
        bench.works()


def test_b18_half_an_update_in_place(actors: list[InActor]) -> None:
    """vllm-project/vllm#57854: neither old nor new, and no crash; a full resend clears it."""
    engines = [engine.fresh(stages=False) for engine in actors[:2]]
    pids = [engine.process()[0] for engine in engines]
    with collective(engines) as bench:
        bench.works()
        engines[0].arm("applied", Raise(Injected("half")), 0)
        bench.fails(Injected, engine="r0", phase="Broadcasting", bucket=0)
        assert bench.sync.servable() == {}
        assert [engine.look().version for engine in engines] == [None, None]
        bench.works()
    assert [engine.process()[0] for engine in engines] == pids


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({"a": torch.zeros(4)}, ("'a'", "(8,)", "(4,)")),
        ({"a": torch.zeros(16)}, ("'a'", "(8,)", "(16,)")),
        ({"a": torch.zeros(8, dtype=torch.int32)}, ("'a'", "float32", "int32")),
        ({"a": torch.zeros(8), "b": torch.zeros(2)}, ("'b'",)),
    ],
    ids=["a-smaller", "b-larger", "c-dtype", "e-name"],
)
def test_b29_no_process_dies(held: dict[str, Tensor], words: tuple[str, ...], actors: list[InActor]) -> None:
    """pytorch/gloo#456: gloo kills the receiver, or says nothing; here it is told before anything is sent."""
    model = {"a": torch.arange(8.0)}
    engines = [actors[0].fresh({"a": torch.zeros(8)}), actors[1].fresh(held)]
    pids = [engine.process()[0] for engine in engines]
    with collective(engines) as bench:
        result = bench.fails(PlanError, engine="r1", phase="Locked", model=model)
        for word in words:
            assert word in str(result.error)
        assert [engine.count("frame") for engine in engines] == [0, 0]
    engines[1].fresh({"a": torch.zeros(8)})
    with collective(engines) as bench:
        bench.works(model)
    assert [engine.process()[0] for engine in engines] == pids


def test_b27_and_b31_strides_and_ties_across_processes(actors: list[InActor]) -> None:
    """pytorch/pytorch#192920, vllm-project/vllm#56689: transposed, expanded, tied on one side only."""
    weight = torch.arange(12.0).view(3, 4).t()
    model = {"embed": weight, "head": weight, "row": torch.arange(3.0).expand(2, 3), "one": torch.tensor(5.0)}
    held = {
        "embed": torch.zeros(3, 4).t(), "head": torch.zeros(4, 3),
        "row": torch.zeros(3, 2).t(), "one": torch.zeros(()),
    }  # fmt: skip
    engines = [actors[0].fresh(held), actors[1].fresh({**held, "head": held["embed"]})]
    with collective(engines) as bench:
        result = bench.works(model)
        assert [row.bytes for row in result.engines] == [4 * (12 + 6 + 1)] * 2
        other = weight + 1
        bench.works({**model, "embed": other, "head": other})


class TestB20:
    """An engine restarts by itself, with its first weights.

    radixark/miles#1724, radixark/miles#1805, ray-project/ray#44083.
    """

    def test_b20_it_is_not_served_from_before_a_full_round(self, engines: list[InActor]) -> None:
        """The books are by incarnation: the new one has proved nothing, whatever the last one had."""
        with collective(engines) as bench:
            last = [bench.works() for _ in range(5)][-1]
            lives = {name: entry.participant for name, entry in bench.sync.engines().items()}
            assert bench.sync.servable() == {"r0": 4, "r1": 4}
            engines[1].crash()
            assert bench.sync.servable() == {"r0": last.version}, "it is served from while it starts"
            assert engines[1].look().version is None
            assert bench.sync.servable() == {"r0": last.version}, "it inherited a version"
            entry = bench.sync.engines()["r1"]
            assert entry.version is None
            assert entry.participant != lives["r1"]
            assert same(engines[1].look().tensors, state(-1))
            bench.works()
            assert bench.sync.servable() == {"r0": 5, "r1": 5}

    def test_b20_a_round_meets_the_restarted_engine(self, engines: list[InActor]) -> None:
        """Nobody asked before the round: it finds another engine under the name, and the next one works."""
        with collective(engines) as bench:
            bench.works()
            engines[1].crash()
            result = bench.fails(EngineGone, engine="r1", phase="Locked")
            assert result.serving(OLD) == ("r0",)
            bench.works()

    @pytest.mark.parametrize(("point", "published"), [("commit", "no"), ("resume", "yes")])
    def test_b20_it_restarts_after_the_last_receipt(
        self, point: str, published: str, engines: list[InActor]
    ) -> None:
        """That is no full success, and it is not listed with the version that its earlier life had."""
        with collective(engines) as bench:
            bench.works()
            engines[1].arm(point, Exit())
            result = bench.fails(EngineGone, engine="r1", phase="Cleaning", published=published)
            assert [row.disposition for row in result.engines][1] is OUT
            assert "r1" not in bench.sync.servable()
            bench.works()


def test_a6_the_keeper_of_the_lock_dies(ray_cluster: None) -> None:
    """An actor keeps the lock, and is killed in the middle of a round that fails.

    The first error stays the first, the release error is its note. Ray starts the keeper again, and that one
    lets the lost lease run out before anybody gets the lock.
    """
    name, boom = f"case-{uuid.uuid4().hex[:8]}", Injected("engine died during broadcast")
    lock = RayLock(name, lease=1.5)

    tickets: list[Ticket] = []

    def ask_for_it() -> bool:
        with contextlib.suppress(LockError):  # while the next keeper starts
            tickets.append(lock.request("somebody else", "probe"))
        return bool(tickets)

    def die() -> None:
        ray.kill(ray.get_actor(f"lock-{name}", namespace="weightsync"), no_restart=False)
        raise boom

    try:
        with Bench(threads("e0", "e1"), policy=quick(lease=1.5), lock=lock) as bench:
            bench.works()
            bench.engines["e1"].arm("apply", die, 1)
            result = bench.fails(boom, engine="e1", phase=SENDING, bucket=1)
            assert result.path[-2:] == ("Failed", "Released")
            assert eventually(ask_for_it, PATIENCE)
            ticket = tickets[0]
            answer = lock.wait(ticket, 10.0)
            assert isinstance(answer, Granted)
            assert answer.epoch > result.epoch
            lock.release(ticket, answer.epoch)
            bench.works()
    finally:
        lock.retire(force=True)


def test_a2_the_start_of_a_keeper_is_not_at_the_cost_of_the_lease(ray_cluster: None) -> None:
    """The first to ask waits until there is a keeper, and then holds the lock for all of a lease."""
    lock, ticket = RayLock(f"case-{uuid.uuid4().hex[:8]}", lease=1.0), Ticket(uuid.uuid4().hex, "a", "r")
    try:
        asked = time.monotonic()
        answer = lock.enter(ticket, 0.0)
        now = time.monotonic()
        assert isinstance(answer, Granted)
        assert answer.end(asked) - now > 0.5, f"{answer.end(asked) - now:.2f} s of it are left"
    finally:
        lock.retire(force=True)


def test_b42_a_an_async_actor_answers_while_a_round_runs(engines: list[InActor]) -> None:
    """verl-project/verl#6052, ray-project/ray#44454: the loop is not blocked, and Ray has nothing to say."""
    lock = f"case-{uuid.uuid4().hex[:8]}"
    make: Any = ray.remote(num_cpus=0, runtime_env=environment())
    trainer = make(AsyncTrainer).remote(
        [each.name for each in engines], [each.actor for each in engines], lock
    )
    try:
        assert ray.get(trainer.step.remote(0), timeout=PATIENCE) == "version 0"
        for engine in engines:
            engine.always("apply", Sleep(0.5))
        waits: list[float] = []
        running = trainer.step.remote(1)
        while not ray.wait([running], timeout=0.2)[0]:
            began = time.monotonic()
            assert ray.get(trainer.status.remote(), timeout=PATIENCE) in (0, 1)
            waits.append(time.monotonic() - began)
        assert ray.get(running) == "version 1"
        assert len(waits) >= 5, "the round was too quick to see anything"
        assert max(waits) < 0.5, f"it took {max(waits):.2f} s to answer"
        assert ray.get(trainer.warnings.remote(), timeout=PATIENCE) == []
        ray.get(trainer.blocks.remote(), timeout=PATIENCE)
        assert len(ray.get(trainer.warnings.remote(), timeout=PATIENCE)) == 1, "a warning would not be seen"
        ray.get(trainer.end.remote(), timeout=PATIENCE)
    finally:
        ray.kill(trainer)
        RayLock(lock).retire(force=True)


def test_b39_a_a_time_out_with_engines_that_work_on(engines: list[InActor]) -> None:
    """pytransitions/transitions#704: TimeoutError comes when the round is over; the old bits are served."""
    with collective(engines) as bench:
        bench.works()
        engines[1].always("apply", Sleep(1.0))

        async def impatient() -> None:
            await asyncio.wait_for(bench.sync.round(2, state(2)), 0.5)

        with pytest.raises(TimeoutError):
            asyncio.run(impatient())
        bench.lock_is_free()
        for look in bench.looks().values():
            assert (look.state, look.paused, look.in_session) == (EngineState.Serving, False, False)
            assert same(look.tensors, state(1))
        bench.works()

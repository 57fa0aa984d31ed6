"""Weights by Ray's object store: one put for all engines, little of it at a time, and nothing left.

The engines are Ray actors, or threads of this process, which is in the cluster as well. What every transport
must do is checked by the kit (``test_conformance_transports.py``), and the board alone in ``test_board.py``.
"""

import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch import Tensor

from casekit.bench import SENDING, Bench, quick
from casekit.levels import eventually
from casekit.objectside import OnALoop, Scribbler, settles_at, store_bytes, store_level
from casekit.rayside import InActor, TrainerProcess, environment
from casekit.scripts import ANY, Injected, Kill, Raise
from casekit.tensors import same, state
from weightsync import LocalEngine, Policy, RayEngine, WeightSync, ray_engine, receiver_for
from weightsync.fsm.contract import Bucketful, Inlet, Ticket
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import EngineGone, SetupError, TransportError
from weightsync.fsm.plan import Plan
from weightsync.fsm.states import Disposition, EngineState
from weightsync.testing.sending import Sending
from weightsync.testing.small_engine import SmallEngine, SmallLink
from weightsync.transports import object_store
from weightsync.transports.objects import ObjectStoreTransport, objects_inlet
from weightsync.transports.objects_inlet import WINDOW, framed
from weightsync.transports.weights import TorchWeights

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(120)]

PATIENCE = 60.0
MIB = 1 << 20
POLICY = quick(deadline=10.0)
LARGE = quick(deadline=20.0, idle=15.0, engine_limit=10.0, bucket_bytes=MIB)
EPOCHS = iter(range(1, 1_000_000))


def large(value: float, buckets: int = 4) -> dict[str, Tensor]:
    """Weights of so many buckets of 1 MiB."""
    return {f"w{number}": torch.full((MIB // 4,), value + number) for number in range(buckets)}


@pytest.fixture(scope="module")
def actors(ray_cluster: None) -> Iterator[list[InActor]]:
    """Two engines, and a board that stays for all tests."""
    board = ObjectStoreTransport()
    engines = [InActor(f"r{number}") for number in range(2)]
    for engine in engines:
        engine.process()
    yield engines
    for engine in engines:
        ray.kill(engine.actor)
    board.close()


@pytest.fixture
def engines(actors: list[InActor]) -> list[InActor]:
    """As new engines that stage."""
    return [engine.fresh() for engine in actors]


def bench_of(engines: list[InActor], **options: Any) -> Bench:
    """A trainer that reaches them by the object store."""
    return Bench(engines, "objects", **{"policy": POLICY, **options})


# -- in this process ---------------------------------------------------------------------------------------


class Looking:
    """The receiving half, which shows every bucket to a test before the engine gets it."""

    def __init__(self, look: Callable[[Bucketful], None]) -> None:
        self._look = look

    def __call__(self, ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> Inlet:
        """Make it."""
        inner, look = objects_inlet(ticket, session, plan, limit), self._look

        class _Inlet:
            @contextmanager
            def buckets(self) -> Iterator[Iterator[Bucketful]]:
                with inner.buckets() as frames:
                    yield self._shown(frames)

            def _shown(self, frames: Iterator[Bucketful]) -> Iterator[Bucketful]:
                for frame in frames:
                    look(frame)
                    yield frame

            def close(self) -> None:
                inner.close()

        return _Inlet()


def round_with(model: dict[str, Tensor], *looks: Callable[[Bucketful], None]) -> list[SmallEngine]:
    """A good round with an engine in this process for each of these looks."""
    weights, epoch = TorchWeights.of(model), next(EPOCHS)
    plan, session = weights.plan(MIB), Session(f"o{epoch}", epoch, epoch)
    engines = [SmallEngine(f"e{i}", inlets={"objects": Looking(look)}) for i, look in enumerate(looks)]
    for engine in engines:
        engine.open(session, plan, weights.digest())
    transport = ObjectStoreTransport()
    try:
        sending = Sending(transport, weights, plan, [SmallLink(each) for each in engines], session)
        port = sending.run()
        for error in sending.errors.values():
            raise error
        assert len([fact for fact in port.fired if fact[0] == "acked"]) == len(engines)
    finally:
        transport.close()
    for engine in engines:
        engine.commit(session)
        assert same(engine.tensors, model)
    return engines


def test_one_put_for_all_engines_and_no_copy_for_any(
    actors: list[InActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many puts as buckets; each engine looks at the same memory, which is the store's."""
    puts: list[int] = []
    put = ray.put

    def counting(value: Any, **options: Any) -> Any:
        puts.append(value.nbytes)
        return put(value, **options)

    monkeypatch.setattr(ray, "put", counting)
    seen: dict[int, list[int]] = {}

    def look(frame: Bucketful) -> None:
        assert mapped(frame.data.ctypes.data).endswith("plasma"), "it is a copy of what lies in the store"
        seen.setdefault(frame.index, []).append(frame.data.ctypes.data)

    round_with(large(1.0), look, look, look)
    assert puts == [framed(MIB)] * 4
    assert [len(set(addresses)) for addresses in seen.values()] == [1] * 4
    assert {len(addresses) for addresses in seen.values()} == {3}


def mapped(address: int) -> str:
    """What is mapped at an address, with its permissions; ``plasma`` in the object store's files."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= address < high:
            return f"{permissions} plasma" if "plasma" in line or "/dev/shm" in line else line
    return "nothing"


def test_every_page_of_a_bucket_is_shielded(actors: list[InActor]) -> None:
    """The first and the last one, too, in which an object of the store begins or ends somewhere."""
    found: list[str] = []

    def look(frame: Bucketful) -> None:
        first = frame.data.ctypes.data
        found.extend(mapped(place) for place in (first, first + frame.data.nbytes - 1))

    round_with({**large(1.0, 2), "small": torch.ones(3), "odd": torch.ones(70_001)}, look)
    assert set(found) == {"r--s plasma"}, found


def test_nothing_can_be_written_through_what_an_engine_is_given(actors: list[InActor]) -> None:
    """Neither at once nor after asking for it; what other readers see stays as it is."""
    refused: list[str] = []

    def scribble(frame: Bucketful) -> None:
        def attempt(*deeds: Callable[[], object]) -> None:
            for deed in deeds:
                with pytest.raises((ValueError, TypeError)) as error:
                    deed()
                refused.append(str(error.value))

        data = frame.data
        view = memoryview(data)
        assert not data.flags.writeable, "the array that an engine is given is writable"
        attempt(
            lambda: data.__setitem__(0, 1),
            lambda: data.setflags(write=True),
            lambda: np.frombuffer(data, dtype=np.uint8).setflags(write=True),
            lambda: data.view(np.float32).fill(0),
            lambda: view.__setitem__(0, 1),
        )

    round_with(large(2.0, 2), scribble, lambda frame: None)
    assert len(refused) == 2 * 5


def test_a_view_that_is_kept_stays_what_it_was(actors: list[InActor]) -> None:
    """Its memory is given to nobody else while it is there, and is free when it is not."""
    base, kept = store_level(), []
    round_with(large(3.0), lambda frame: kept.append(frame.data) if frame.index == 1 else None)
    for value in (10.0, 20.0, 30.0):
        round_with(large(value), lambda frame: None)
    assert np.array_equal(kept[0].view(np.float32), np.full(MIB // 4, 4.0, np.float32))
    kept.clear()
    assert settles_at(base), f"{store_bytes() - base} bytes are left in the store"


def test_two_buckets_at_a_time(actors: list[InActor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The third is put when the slower engine has let go of the first."""
    puts, counts, going = [0], [], threading.Event()
    put = object_store.put

    def counting(octets: Any) -> Any:
        puts[0] += 1
        if puts[0] == 2:
            going.set()
        return put(octets)

    monkeypatch.setattr(object_store, "put", counting)

    def slow(frame: Bucketful) -> None:
        assert going.wait(PATIENCE)
        counts.append(puts[0] - frame.index)

    round_with(large(4.0, 8), slow, lambda frame: None)
    assert len(counts) == 8
    assert max(counts) <= WINDOW, "more buckets were in the store than may be"


# -- in actors ---------------------------------------------------------------------------------------------


def test_the_store_is_as_full_after_fifty_rounds_as_after_ten(actors: list[InActor]) -> None:
    """And as empty as before the first; by Ray's own accounts, with engines in other processes."""
    base = store_level()
    with bench_of([actor.fresh(large(-1.0)) for actor in actors], policy=LARGE) as bench:
        for number in range(1, 51):
            result = bench.run(large(float(number)))
            assert result.ok, result.summary()
            if number in (10, 50):
                assert settles_at(base), f"{store_bytes() - base} bytes are left after round {number}"
        bench.works(large(100.0))


@pytest.mark.parametrize(("point", "bucket"), [("receive", ANY), ("apply", 1), ("release", ANY)])
def test_an_engine_that_fails_says_why_and_leaves_nothing(
    point: str, bucket: int, actors: list[InActor]
) -> None:
    """The very error reaches the trainer, with its bucket; the memory of every bucket is free."""
    base = store_level()
    with bench_of([actor.fresh(large(-1.0)) for actor in actors], policy=LARGE) as bench:
        bench.works(large(0.0))
        bench.engines["r1"].arm(point, Raise(Injected("boom")), bucket)
        phase = ("Locked", *SENDING)
        result = bench.fails(Injected, engine="r1", phase=phase, bucket=ANY, model=large(1.0))
        assert str(result.error) == "boom"
        assert bucket in (ANY, result.bucket)
        assert settles_at(base), f"{store_bytes() - base} bytes of a round that failed are in the store"
        bench.works(large(2.0))


@pytest.mark.chaos
@pytest.mark.parametrize("point", ["open", "apply", "commit"])
def test_an_engine_is_killed(point: str, engines: list[InActor]) -> None:
    """SIGKILL, in each phase: the round ends within its limits, and the next one works."""
    base = store_level()
    with bench_of(engines) as bench:
        bench.works()
        engines[1].arm(point, Kill())
        bench.fails(EngineGone, engine="r1", phase=("Locked", *SENDING, "Cleaning"), bucket=ANY)
        bench.works()
    assert settles_at(base), f"{store_bytes() - base} bytes of the round that failed are in the store"


@pytest.mark.chaos
def test_the_others_go_on_without_a_killed_engine(engines: list[InActor]) -> None:
    """An engine that dies loses itself: quarantined by name, while the other gets the new weights."""
    policy = quick(deadline=10.0, on_engine_failure="quarantine", quorum=0.5)
    with bench_of(engines, policy=policy) as bench:
        bench.works()
        engines[1].arm("apply", Kill(), 0)  # which it holds when the third is to be sent
        result = bench.run(state(7.0))
        assert result.ok, result.summary()
        assert result.serving(Disposition.serving_new) == ("r0",)
        assert result.serving(Disposition.quarantined) == ("r1",)
        assert same(engines[0].look().tensors, state(7.0))


@pytest.mark.chaos
def test_the_sender_is_killed(actors: list[InActor], tmp_path: Path) -> None:
    """The engines are free by their own limit, with what they had, and nothing is left in the store."""
    base = store_level()
    names, links = [each.name for each in actors], [each.fresh() for each in actors]
    make: Any = ray.remote(num_cpus=0, runtime_env=environment())
    trainer = make(TrainerProcess).remote(
        names, [each.actor for each in links], f"case-{uuid.uuid4().hex[:8]}", str(tmp_path / "ledger"),
        "objects",
    )  # fmt: skip
    pid = ray.get(trainer.process.remote(), timeout=PATIENCE)
    for engine in links:
        engine.always("frame", _KillAndWait(pid))
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(trainer.step.remote(1, 5.0), timeout=PATIENCE)
    for engine in links:
        assert eventually(lambda e=engine: e.look().state is EngineState.Serving, PATIENCE)  # type: ignore[misc]
        assert same(engine.look().tensors, state(-1))
        engine.disarm()
    assert settles_at(base), f"{store_bytes() - base} bytes of a dead trainer are in the store"


class _KillAndWait:
    """In an engine: kill the trainer, in the middle of a bucket."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __call__(self) -> None:
        try:
            os.kill(self._pid, signal.SIGKILL)
        except ProcessLookupError:
            return


@pytest.mark.chaos
def test_an_engine_that_writes_by_way_of_torch_ends_and_spoils_nobody(actors: list[InActor]) -> None:
    """To torch, read-only memory is writable; the write ends that engine, and not the others' weights."""
    make: Any = ray_engine(num_cpus=0, runtime_env=environment())
    scribbler = make(Scribbler).remote("s", large(-1.0))
    good = actors[0].fresh(large(-1.0))
    policy = Policy(
        deadline=20.0, on_engine_failure="quarantine", quorum=0.5, bucket_bytes=MIB, first_contact=PATIENCE
    )
    with WeightSync([good.link, RayEngine(scribbler, id="s")], "objects", policy=policy) as sync:
        result = sync.on_train_begin(large(6.0))
        assert result.ok, result.summary()
        assert result.serving(Disposition.quarantined) == ("s",), (
            "it wrote into the store, and nobody noticed"
        )
        lost = next(row for row in result.engines if row.engine == "s")
        assert "EngineGone" in str(lost), str(lost)
    assert same(good.look().tensors, large(6.0))


@pytest.mark.chaos
def test_the_board_is_killed_and_the_next_round_has_another(engines: list[InActor]) -> None:
    """The round fails in one line, and does not hang."""
    with bench_of(engines) as bench:
        bench.works()
        board = object_store.own_board(bench.sync._transport)
        ray.kill(board._actor)
        result = bench.run(state(1.0))
        assert isinstance(result.error, TransportError), result.summary()
        assert "board" in str(result.error)
        bench.works()


def test_an_actor_on_an_event_loop_receives_as_well(ray_cluster: None) -> None:
    """Beside its coroutines; Ray would not let the loop itself wait for the store."""
    make: Any = ray_engine(num_cpus=0, runtime_env=environment())
    actor = make(OnALoop).remote("loop", large(-1.0))
    with WeightSync([RayEngine(actor, id="loop")], "objects", policy=Policy(bucket_bytes=MIB)) as sync:
        result = sync.on_train_begin(large(8.0))
        assert result.ok, result.summary()
        assert same(ray.get(actor.tensors.remote(), timeout=PATIENCE), large(8.0))
    ray.kill(actor)


# -- refused -----------------------------------------------------------------------------------------------


def test_a_store_that_is_too_small_is_one_line_with_the_size(ray_cluster: None) -> None:
    """Found before anything moves, and not by a put that goes to disk; the size is one that would do."""
    room = int(ray.cluster_resources()["object_store_memory"])
    weights = TorchWeights.of({"w": torch.zeros(1).expand(room // 4 + 1)})  # which takes no memory here
    plan = weights.plan(room + MIB)
    transport = ObjectStoreTransport()
    engine = SmallLink(SmallEngine("e"))
    try:
        with pytest.raises(TransportError, match=f"has {room} bytes") as error:
            Sending(transport, weights, plan, [engine], Session("r", 1, 1)).open()
    finally:
        transport.close()
    assert f"object_store_memory={int(framed(plan.largest) * 1.25)} or more" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_store_that_is_full_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray raises when neither memory nor disk is left."""

    def full(value: object) -> None:
        raise ray.exceptions.ObjectStoreFullError("a long report\nin many lines")

    monkeypatch.setattr(ray, "put", full)
    with pytest.raises(TransportError, match="full: 8 more bytes do not fit") as error:
        object_store.put(np.zeros(8, np.uint8))
    assert "\n" not in str(error.value)


def test_without_ray_it_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was asked for, with what to do."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    receiver = receiver_for({"w": torch.zeros(2)}, "e")
    with pytest.raises(SetupError, match=r"not initialised.*call ray.init\(\)"):
        WeightSync([LocalEngine(receiver)], "objects")
    weights = TorchWeights.of({"w": torch.zeros(2)})
    values = {"board": "b", "key": "k", "rank": 0, "fingerprint": weights.plan(MIB).fingerprint}
    with pytest.raises(SetupError, match="not initialised"):
        objects_inlet(Ticket("objects", values), Session("r", 1, 1), weights.plan(MIB), 1.0)


def test_engines_that_are_no_actors_are_refused_at_set_up(ray_cluster: None) -> None:
    """A link that does not say where its engine is may lead anywhere."""

    class Elsewhere(LocalEngine):
        in_process = False

    receiver = receiver_for({"w": torch.zeros(2)}, "far")
    with pytest.raises(SetupError, match=r"reaches Ray actors, and engine far is a Elsewhere"):
        WeightSync([Elsewhere(receiver)], "objects")
    with WeightSync([LocalEngine(receiver)], "objects") as sync:
        assert sync.on_train_begin({"w": torch.ones(2)}).ok, "an engine of this process is in the cluster"


def test_it_says_what_it_is(ray_cluster: None) -> None:
    """And so in the table of transports."""
    transport = ObjectStoreTransport()
    assert (transport.name, transport.capabilities.survives_loss) == ("objects", True)
    transport.close()
    transport.close()

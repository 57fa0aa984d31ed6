"""Engines that are Ray actors: their words get through whatever they are doing, and what they say comes out.

The actors here receive by a transport of their own, ``given``, whose ticket says what arrives.
"""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

import weightsync
from weightsync.fsm.contract import Bucketful, EngineLink, Inlet, Ticket
from weightsync.fsm.engine import Answer
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import EngineError, EngineGone, PlanError, SetupError, StaleSession
from weightsync.fsm.plan import Plan
from weightsync.fsm.receipt import Expectation
from weightsync.fsm.states import EngineState
from weightsync.handlers.line import Broken
from weightsync.handlers.ray_engine import RayEngine
from weightsync.handlers.threads import spawn
from weightsync.transports.digest import digest
from weightsync.transports.weights import TorchWeights

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

# The actors' processes cannot import the tests.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

SOON = 60.0
"""Seconds after which something that should have happened never will, on a machine that is busy."""

PLAN = TorchWeights.of([("weight", torch.zeros(2, 2)), ("bias", torch.zeros(2))]).plan(16)
NUMBERS = {"weight": torch.full((2, 2), 7.0), "bias": torch.full((2,), 7.0)}
EXPECTED = Expectation(PLAN.fingerprint, 2, 24, 2, digest(PLAN, NUMBERS))


class OutOfTune(Exception):
    """An error of a user's own."""


class Given:
    """Receives what the ticket says: a number for everything, or nothing until it is closed."""

    def __init__(self, value: float | None) -> None:
        self._value, self._closed = value, threading.Event()

    @contextlib.contextmanager
    def buckets(self) -> Iterator[Iterator[Bucketful]]:
        """Buckets that are full of the number."""
        yield self._frames()

    def _frames(self) -> Iterator[Bucketful]:
        if self._value is None:
            self._closed.wait()
            raise ConnectionError("closed")
        for bucket in PLAN.buckets:
            numbers = np.full(bucket.nbytes // 4, self._value, dtype=np.float32)
            yield Bucketful(bucket.index, numbers.view(np.uint8))

    def close(self) -> None:
        """Wake whoever waits."""
        self._closed.set()


def given(ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> Inlet:
    """The receiving half of the transport ``given``."""
    return Given(ticket.values["value"])


class Engine(weightsync.RayReceiver):
    """What all engines here have in common. ``free`` ends a generation that is under way."""

    def __init__(self, *, name: str | None = None, stages: bool = True) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.generating, self.freed = threading.Event(), threading.Event()
        self.failing: str | None = None
        self.weightsync_serve(
            self.model, id=name, stages=stages, extra_inlets={"given": given}, fault=self.fault
        )

    def fault(self, point: str, bucket: int) -> None:
        """Fail where the test says."""
        if point == self.failing:
            raise OutOfTune(f"at {point}")

    @ray.method(concurrency_group="test")
    def free(self) -> bool:
        """Whether somebody generates; ends it."""
        self.freed.set()
        return self.generating.is_set()

    @ray.method(concurrency_group="test")
    def generates(self) -> bool:
        """Whether somebody generates."""
        return self.generating.is_set()

    @ray.method(concurrency_group="test")
    def prepare(self, failing: str | None = None) -> None:
        """Begin another test."""
        self.generating.clear()
        self.freed.clear()
        self.failing = failing

    @ray.method(concurrency_group="test")
    def forget(self) -> None:
        """Know no plan any more."""
        assert self.weightsync_receiver is not None
        self.weightsync_receiver._plans._plans.clear()

    @ray.method(concurrency_group="test")
    def hang_up(self) -> None:
        """Break every line."""
        assert self.weightsync_line is not None
        for peer in list(self.weightsync_line._peers):
            peer.end()

    @ray.method(concurrency_group="test")
    def peers(self) -> int:
        """How many lines there are."""
        return len(self.weightsync_line._peers) if self.weightsync_line is not None else 0

    @ray.method(concurrency_group="test")
    def weights(self) -> list[float]:
        """What it samples with."""
        return [number for tensor in self.model.state_dict().values() for number in tensor.flatten().tolist()]

    def generate(self) -> None:
        """Take as long as the test wants, with the engine's only thread."""
        self.generating.set()
        assert self.freed.wait(SOON)

    def sample(self) -> None:
        """The same, admitted by the gate."""
        with self.weightsync_gate.admit(SOON):
            self.generate()

    def die(self) -> None:
        """End the process without a word."""
        os._exit(1)


class Unloadable(Engine):
    """Its model is not where it should be."""

    def __init__(self) -> None:
        raise OutOfTune("no such model\nanywhere")


class Loading(Engine):
    """Its model takes longer to load than a round may last."""

    def __init__(self, path: str) -> None:
        while not os.path.exists(path):  # noqa: PTH110 - in a process of its own
            time.sleep(0.05)
        super().__init__(name="loading")


class AsyncEngine(Engine):
    """The same, with a coroutine: Ray gives it event loops."""

    async def wait(self) -> None:
        """Take as long as the test wants, without holding the loop."""
        self.generating.set()
        assert await asyncio.to_thread(self.freed.wait, SOON)


class Unserved(weightsync.RayReceiver):
    """An engine whose author forgot something."""


def actor(cls: type, **options: Any) -> Any:
    """An actor class for the tests."""
    return weightsync.ray_engine(num_cpus=0, concurrency_groups={"test": 1}, **options)(cls)


KINDS = {
    "one thread": ("generate", Engine, {}),
    "threads": ("generate", Engine, {"max_concurrency": 2}),
    "coroutines": ("wait", AsyncEngine, {}),
    "a blocked loop": ("generate", AsyncEngine, {}),
}


@pytest.fixture(scope="module")
def engines(ray_cluster: None) -> Iterator[dict[str, Any]]:
    """One engine of each kind, all started at once."""
    made = {name: actor(cls, **options).remote() for name, (_, cls, options) in KINDS.items()}
    ray.get([each.prepare.remote() for each in made.values()], timeout=2 * SOON)
    yield made
    for each in made.values():
        ray.kill(each)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of actor."""
    name: str = request.param
    return name


_epochs = iter(range(1, 1000))


def session() -> Session:
    """A round of the next epoch."""
    epoch = next(_epochs)
    return Session(f"round-{epoch}", epoch, epoch)


def opened(link: EngineLink) -> Session:
    """Open a session at an engine."""
    mine = session()
    status = link.hello().result(SOON)
    link.open(mine, status.incarnation, PLAN, EXPECTED, SOON).result(SOON)
    return mine


@contextlib.contextmanager
def busy(engine: Any, method: str) -> Iterator[Any]:
    """While the engine generates."""
    ray.get(engine.prepare.remote(), timeout=SOON)
    generation = getattr(engine, method).remote()
    until = time.monotonic() + SOON
    try:
        yield generation
    finally:
        while not ray.get(engine.free.remote(), timeout=SOON):
            assert time.monotonic() < until
        ray.get(generation, timeout=SOON)


def sent(value: float | None) -> Ticket:
    """A ticket for this number everywhere."""
    return Ticket("given", {"value": value})


@pytest.fixture(params=["line", "ray"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways that words can go."""
    name: str = request.param
    monkeypatch.setattr(RayEngine.__init__, "__kwdefaults__", {"line": name == "line", "ranks": None})
    return name


@pytest.mark.usefixtures("way")
class TestWords:
    def test_a_round(self, engines: dict[str, Any], kind: str) -> None:
        """Every word arrives, and the weights are there when the engine says so."""
        link: EngineLink = RayEngine(engines[kind])
        mine = opened(link)
        (receipt,) = link.receive(mine, sent(7)).result(SOON)
        assert receipt.mismatch(mine.round, mine.epoch, EXPECTED) is None
        assert receipt.engine == link.id
        link.commit(mine).result(SOON)
        link.resume(mine).result(SOON)
        status = link.hello().result(SOON)
        assert (status.state, status.version) == (EngineState.Serving, mine.version)
        assert ray.get(engines[kind].weights.remote(), timeout=SOON) == [7.0] * 6
        link.close()

    def test_a_busy_engine_listens(self, engines: dict[str, Any], kind: str) -> None:
        """Words get through beside a generation that does not end, and it is alive."""
        engine, link = engines[kind], RayEngine(engines[kind])
        with busy(engine, KINDS[kind][0]) as generation:
            mine = opened(link)
            assert link.abort(mine).result(SOON) is Answer.reverted
            assert link.alive().result(SOON) is True
            assert ray.wait([generation], timeout=0)[0] == []

    def test_words_get_through_beside_one_that_blocks(self, engines: dict[str, Any], kind: str) -> None:
        """A reception that waits for its sender is ended by an abort, in every kind of actor."""
        engine, link = engines[kind], RayEngine(engines[kind])
        with busy(engine, KINDS[kind][0]):
            mine = opened(link)
            receiving = link.receive(mine, sent(None))
            assert link.hello().result(SOON).state is EngineState.Paused
            assert not receiving.done()
            assert link.abort(mine).result(SOON) is Answer.reverted
            with pytest.raises(StaleSession):
                receiving.result(SOON)

    def test_errors_come_out_as_they_were_raised(self, engines: dict[str, Any], kind: str) -> None:
        """Ours and the user's, with Ray's report and its remote traceback as their cause."""
        engine, link = engines[kind], RayEngine(engines[kind])
        with pytest.raises(StaleSession, match="refuses CommitOrdered of round round-") as refused:
            link.commit(session()).result(SOON)
        assert isinstance(refused.value.__cause__, ray.exceptions.RayTaskError)
        ray.get(engine.prepare.remote("commit"), timeout=SOON)
        mine = opened(link)
        failed = link.commit(mine).exception(SOON)
        assert (type(failed).__name__, str(failed)) == ("OutOfTune", "at commit")
        assert failed is not None
        assert isinstance(failed.__cause__, ray.exceptions.RayTaskError)
        ray.get(engine.prepare.remote(), timeout=SOON)
        assert link.abort(mine).result(SOON) is Answer.reverted


class TestPlans:
    def test_a_plan_is_sent_once(self, engines: dict[str, Any]) -> None:
        """From the second round on, its fingerprint crosses; the whole plan again if the engine forgot it."""
        said: list[Any] = []
        link = RayEngine(engines["one thread"])
        ask = link._ask

        def listen(word: str, *args: Any, retries: int = 0) -> Future[Any]:
            said.extend([type(args[3])] if word == "open" else [])
            return ask(word, *args, retries=retries)

        link._ask = listen  # type: ignore[assignment,method-assign]
        opened(link)
        opened(link)
        ray.get(engines["one thread"].forget.remote(), timeout=SOON)
        last = opened(link)
        assert said == [Plan, str, str, Plan]
        assert link.abort(last).result(SOON) is Answer.reverted

    def test_a_plan_that_does_not_fit(self, engines: dict[str, Any]) -> None:
        """The engine's line names the tensor, and it goes on serving."""
        link = RayEngine(engines["coroutines"])
        wrong = TorchWeights.of([("weight", torch.zeros(2, 2)), ("bias", torch.zeros(3))]).plan(16)
        expected = Expectation(wrong.fingerprint, 2, 28, 2)
        status = link.hello().result(SOON)
        opening = link.open(session(), status.incarnation, wrong, expected, SOON)
        with pytest.raises(
            PlanError, match=r"'bias': float32 \(3,\) is sent, but the engine holds float32 \(2"
        ):
            opening.result(SOON)
        assert link.hello().result(SOON).state is EngineState.Serving


@pytest.mark.usefixtures("way")
class TestDeath:
    def test_a_dead_actor_is_gone_at_once(self) -> None:
        """What was under way fails, and so does all that is asked afterwards; the cause says why."""
        engine = actor(Engine).remote(name="mortal")
        link = RayEngine(engine, id="mortal")
        mine = opened(link)
        receiving = link.receive(mine, sent(None))
        assert link.alive().result(SOON) is True
        ray.kill(engine)
        with pytest.raises(EngineGone, match="engine mortal did not answer receive: The actor") as gone:
            receiving.result(SOON)
        assert isinstance(gone.value.__cause__, ray.exceptions.RayActorError | Broken)
        for asked in (link.abort(mine), link.hello()):
            began = time.monotonic()
            with pytest.raises(EngineGone, match="engine mortal did not answer"):
                asked.result(SOON)
            assert time.monotonic() - began < 10
        assert link.alive().result(SOON) is False

    def test_a_restarted_actor_is_another_incarnation(self) -> None:
        """It says hello anew, with its first weights; what was meant for the one before is refused."""
        engine = actor(Engine, max_restarts=1, max_task_retries=-1).remote()
        link = RayEngine(engine)
        mine = opened(link)
        before = link.hello().result(SOON)
        link.receive(mine, sent(7)).result(SOON)
        engine.die.options(max_task_retries=0).remote()
        until = time.monotonic() + SOON
        while not isinstance(link.commit(mine).exception(SOON), EngineGone):
            assert time.monotonic() < until
        after = link.hello().result(SOON)
        assert after.incarnation != before.incarnation
        assert (after.state, after.version) == (EngineState.Serving, None)
        for word in (link.commit(mine), link.abort(mine), link.resume(mine), link.receive(mine, sent(7))):
            with pytest.raises(EngineGone, match="was restarted: incarnation"):
                word.result(SOON)
        with pytest.raises(EngineGone, match="was restarted: incarnation"):
            link.open(session(), before.incarnation, PLAN, EXPECTED, SOON).result(SOON)
        opened(link)
        ray.kill(engine)


def test_an_error_in_init_is_told_in_one_line() -> None:
    """The user's own error, and none of the report that Ray prints for a terminal."""
    link = RayEngine(actor(Unloadable).remote(), id="broken")
    with pytest.raises(EngineGone) as gone:
        link.hello().result(SOON)
    before, _, raised = str(gone.value).partition(" raised ")
    assert before == "engine broken did not answer hello: its __init__"
    assert raised in ("OutOfTune: no such model", f"{__name__}.OutOfTune: no such model")
    assert isinstance(gone.value.__cause__, ray.exceptions.RayActorError)


def test_an_engine_may_take_its_time_to_start_and_to_pause(tmp_path: Path) -> None:
    """It loads a model, and later ends a generation, for longer than it may be silent otherwise."""
    engine = actor(Loading).remote(str(tmp_path / "model"))
    model, policy = torch.nn.Linear(2, 2), weightsync.Policy(deadline=9.0)
    silent = policy.limits().engine
    with weightsync.WeightSync([RayEngine(engine, id="loading")], "collective", policy=policy) as sync:
        pending = sync.begin(1, model)
        threading.Timer(silent + 0.5, (tmp_path / "model").touch).start()
        assert pending.wait().require().pause_seconds < silent
        sampling = engine.sample.remote()
        until = time.monotonic() + SOON
        while not ray.get(engine.generates.remote(), timeout=SOON):
            assert time.monotonic() < until
        pending = sync.begin(2, model)
        threading.Timer(silent + 0.5, engine.free.remote).start()
        assert pending.wait().require().pause_seconds > silent
        ray.get(sampling, timeout=SOON)
    ray.kill(engine)


def connected(link: RayEngine) -> bool:
    """Whether there is a line."""
    return link._connected


class TestTheLine:
    def test_words_take_it_from_the_first_hello_on(self, engines: dict[str, Any], kind: str) -> None:
        """Until the link is closed; what is said afterwards goes by Ray."""
        link = RayEngine(engines[kind])
        mine = opened(link)
        assert connected(link)
        assert link._line is not None
        assert link._line._number == 1
        link.close()
        assert not connected(link)
        assert link.abort(mine).result(SOON) is Answer.reverted
        assert link.hello().result(SOON).state is EngineState.Serving
        assert not connected(link)

    def test_when_it_breaks_words_go_by_ray(self, engines: dict[str, Any], kind: str) -> None:
        """What was under way fails, though nobody takes the engine for dead, and an open makes another."""
        engine, link = engines[kind], RayEngine(engines[kind])
        mine = opened(link)
        receiving = link.receive(mine, sent(None))
        until = time.monotonic() + SOON
        while not ray.get(engine.peers.remote(), timeout=SOON):
            assert time.monotonic() < until
        ray.get(engine.hang_up.remote(), timeout=SOON)
        with pytest.raises(EngineError, match="did not answer receive: the line to it broke") as broken:
            receiving.result(SOON)
        assert not isinstance(broken.value, EngineGone)
        assert link.abort(mine).result(SOON) is Answer.reverted
        status = link.hello().result(SOON)
        assert connected(link)
        again = session()
        ray.get(engine.hang_up.remote(), timeout=SOON)
        while connected(link):
            assert time.monotonic() < until
        link.open(again, status.incarnation, PLAN, EXPECTED, SOON).result(SOON)
        while not connected(link):
            assert time.monotonic() < until
        assert link.abort(again).result(SOON) is Answer.reverted
        link.close()

    def test_a_link_that_is_let_go_of_or_copied(self, engines: dict[str, Any]) -> None:
        """Nobody has to close it; a copy in another process makes a line of its own."""
        engine = engines["one thread"]
        link: RayEngine | None = RayEngine(engine)
        assert link is not None
        link.hello().result(SOON)
        line = link._line
        assert line is not None
        copy = ray.cloudpickle.loads(ray.cloudpickle.dumps(link))
        assert (copy.id, copy._line) == (link.id, None)
        link = None
        until = time.monotonic() + SOON
        while not line.over:
            gc.collect()
            assert time.monotonic() < until

    def test_a_killed_actor_is_noticed_before_ray_does(self) -> None:
        """Its connection closes, and its process is known to be over."""
        engine = actor(Engine).remote(name="quick")
        link = RayEngine(engine, id="quick")
        receiving = link.receive(opened(link), sent(None))
        pid = ray.get(engine.__ray_call__.remote(lambda _: os.getpid()), timeout=SOON)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineGone, match="quick did not answer receive: The actor's process has ended"):
            receiving.result(SOON)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(engine)


class TestATrainerThatDies:
    def test_a_newer_one_takes_over(self, engines: dict[str, Any], kind: str) -> None:
        """Killed in the middle of a reception, it leaves an engine that a new trainer can use at once."""
        trainer: Any = ray.remote(num_cpus=0)(Trainer)
        doomed, engine, mine = trainer.remote(), engines[kind], session()
        driving = doomed.drive.remote(engine, mine.epoch)
        link = RayEngine(engine)
        until = time.monotonic() + SOON
        while link.hello().result(SOON).state is not EngineState.Paused:
            assert time.monotonic() < until
        ray.kill(doomed)
        newer = opened(link)
        (receipt,) = link.receive(newer, sent(7)).result(SOON)
        assert receipt.epoch == newer.epoch
        with pytest.raises(StaleSession):
            link.commit(Session("async", mine.epoch, mine.epoch)).result(SOON)
        link.commit(newer).result(SOON)
        link.resume(newer).result(SOON)
        assert isinstance(driving, ray.ObjectRef)

    def test_without_a_successor_the_engine_serves_again(self, engines: dict[str, Any], kind: str) -> None:
        """After its own limit, with the weights it had; to say hello is no word of a trainer."""
        link, mine = RayEngine(engines[kind]), session()
        before = ray.get(engines[kind].weights.remote(), timeout=SOON)
        status = link.hello().result(SOON)
        link.open(mine, status.incarnation, PLAN, EXPECTED, 0.5).result(SOON)
        receiving = link.receive(mine, sent(None))
        until = time.monotonic() + SOON
        while link.hello().result(SOON).state is not EngineState.Serving:
            assert time.monotonic() < until
        assert isinstance(receiving.exception(SOON), StaleSession)
        assert ray.get(engines[kind].weights.remote(), timeout=SOON) == before


class TestSetup:
    def test_a_class_without_the_group_is_refused_with_advice(self) -> None:
        """Ray would only assert; the error says which decorator to use."""
        plain = ray.remote(num_cpus=0)(Unserved)
        advice = "ActorClass.Unserved. receives weights, but .* use @weightsync.ray_engine"
        with pytest.raises(SetupError, match=advice):
            plain.remote()
        with pytest.raises(SetupError, match=advice):
            plain.options(num_cpus=0).remote()

    def test_the_group_can_be_declared_by_hand(self) -> None:
        """``ray.remote`` does as well as ``ray_engine``; an engine that serves nothing says so."""
        remote: Any = ray.remote
        forgetful = remote(num_cpus=0, concurrency_groups={"weightsync": 4})(Unserved).remote()
        with pytest.raises(
            SetupError, match=r"Unserved has no receiver: call self.weightsync_serve\(model\)"
        ):
            RayEngine(forgetful).hello().result(SOON)
        ray.kill(forgetful)

    def test_something_else_is_refused(self, engines: dict[str, Any]) -> None:
        """An actor that is no engine, and a class that is none, are told what to inherit."""

        class Other:
            pass

        with pytest.raises(SetupError, match="Other does not receive weights: let it inherit"):
            weightsync.ray_engine(Other)
        other: Any = ray.remote(num_cpus=0)(Other)
        handle = other.remote()
        with pytest.raises(SetupError, match="does not receive weights: let its class inherit"):
            RayEngine(handle)
        with pytest.raises(
            SetupError, match=r"no engine: an actor is given as RayEngine\(actor\), and its cl"
        ):
            weightsync.WeightSync([handle], "collective")
        ray.kill(handle)
        with pytest.raises(EngineError, match="knows no word 'sing'"):
            RayEngine(engines["one thread"])._ask("sing", None).result(SOON)

    def test_an_actor_is_given_by_its_link(self, engines: dict[str, Any]) -> None:
        """Its class has no actor yet; its handle is no link; and memory does not reach its process."""
        with pytest.raises(
            SetupError, match=r"RayEngine\(actor=<ActorClass\(Engine\)>\): the handle of an act"
        ):
            RayEngine(actor(Engine))
        handle = engines["one thread"]
        with pytest.raises(SetupError, match=r"no engine: an actor is given as RayEngine\(actor\)$"):
            weightsync.WeightSync([handle], "collective")
        with pytest.raises(
            SetupError, match=r"'memory' reaches engines in this process only, and engine [0-9a-f]+"
        ):
            weightsync.WeightSync([RayEngine(handle)], "memory")

    def test_an_id_must_be_the_engines_own(self, engines: dict[str, Any]) -> None:
        """Receipts carry the engine's name for itself, so a link may not call it otherwise."""
        engine = engines["one thread"]
        assert RayEngine(engine).id == engine._actor_id.hex()
        with pytest.raises(SetupError, match=r"calls itself '[0-9a-f]+', and not 'alias'"):
            RayEngine(engine, id="alias").hello().result(SOON)


class Trainer:
    """A trainer that is an async actor itself."""

    def __init__(self) -> None:
        self.rounds = 0

    async def drive(self, engine: Any, epoch: int) -> int:
        """A round by the link, that waits for an engine which is not done yet."""
        link, mine = weightsync.RayEngine(engine), Session("async", epoch, epoch)
        status = await asyncio.wrap_future(link.hello())
        await asyncio.wrap_future(link.open(mine, status.incarnation, PLAN, EXPECTED, SOON))
        receiving = link.receive(mine, sent(None))
        self.rounds += 1
        with contextlib.suppress(StaleSession):
            await asyncio.wrap_future(receiving)
        return self.rounds

    async def hand_over(self, engine: Any) -> str:
        """A whole round, by the orchestrator."""
        policy = weightsync.Policy(deadline=SOON)
        sync = weightsync.WeightSync([weightsync.RayEngine(engine)], "collective", policy=policy)
        self.rounds += 1
        result = await sync.round(1, torch.nn.Linear(2, 2))
        await asyncio.to_thread(sync.close)
        return str(result.outcome.name)

    async def status(self) -> int:
        """How many rounds were begun."""
        return self.rounds


class TestLoops:
    def test_a_trainer_that_is_an_async_actor_goes_on_answering(self, engines: dict[str, Any]) -> None:
        """While its round waits for an engine, its own event loop is free."""
        trainer: Any = ray.remote(num_cpus=0)(Trainer)
        handle, engine = trainer.remote(), engines["coroutines"]
        mine = session()
        driving = handle.drive.remote(engine, mine.epoch)
        until = time.monotonic() + SOON
        while not ray.get(handle.status.remote(), timeout=SOON):
            assert time.monotonic() < until
        began = time.monotonic()
        for _ in range(20):
            ray.get(handle.status.remote(), timeout=SOON)
        assert time.monotonic() - began < 0.5 * 20
        assert ray.wait([driving], timeout=0)[0] == []
        link = RayEngine(engine)
        assert link.abort(Session("async", mine.epoch, mine.epoch)).result(SOON) is Answer.reverted
        assert ray.get(driving, timeout=SOON) == 1
        ray.kill(handle)

    def test_so_does_one_that_runs_whole_rounds(self) -> None:
        """While an engine finishes its generation first, the trainer's other methods answer."""
        trainer: Any = ray.remote(num_cpus=0)(Trainer)
        handle, engine = trainer.remote(), actor(Engine).remote()
        sampling = engine.sample.remote()
        until = time.monotonic() + SOON
        while RayEngine(engine).hello().result(SOON).state is not EngineState.Serving:
            assert time.monotonic() < until
        handing_over = handle.hand_over.remote(engine)
        while not ray.get(handle.status.remote(), timeout=SOON):
            assert time.monotonic() < until
        took = []
        for _ in range(20):
            began = time.monotonic()
            ray.get(handle.status.remote(), timeout=SOON)
            took.append(time.monotonic() - began)
        assert ray.wait([handing_over, sampling], timeout=0)[0] == []
        assert sorted(took)[15] < 0.5  # the machine may be slow at times, a blocked loop always is
        while not ray.get(engine.free.remote(), timeout=SOON):
            assert time.monotonic() < until
        assert ray.get(handing_over, timeout=SOON) == "complete"
        for each in (handle, engine):
            ray.kill(each)

    def test_one_orchestrator_in_two_loops_in_a_thread_and_without(self) -> None:
        """Nothing of a loop is kept from one round to the next."""
        engine, model = actor(AsyncEngine).remote(), torch.nn.Linear(2, 2)
        policy = weightsync.Policy(deadline=SOON)
        with weightsync.WeightSync([RayEngine(engine)], "collective", policy=policy) as sync:

            async def hand_over(step: int) -> int | None:
                with torch.no_grad():
                    model.weight.add_(1)
                result = (await sync.round(step, model)).require()
                return result.version

            assert asyncio.run(hand_over(1)) == 0
            assert asyncio.run(hand_over(2)) == 1
            assert spawn("loop", lambda: asyncio.run(hand_over(3))).result(SOON) == 2
            result = sync.on_step_end(4, model)
            assert result is not None
            result.require()
        numbers = ray.get(engine.weights.remote(), timeout=SOON)
        assert numbers == [*model.weight.flatten().tolist(), *model.bias.tolist()]
        ray.kill(engine)

    def test_one_link_in_two_loops_and_without_one(self, engines: dict[str, Any]) -> None:
        """A link keeps nothing of an event loop."""
        link = RayEngine(engines["threads"])

        async def hello() -> EngineState:
            return (await asyncio.wrap_future(link.hello())).state

        assert asyncio.run(hello()) is EngineState.Serving
        assert asyncio.run(hello()) is EngineState.Serving
        assert link.hello().result(SOON).state is EngineState.Serving

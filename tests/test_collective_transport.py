"""Engines in other processes receive by broadcasts, and every way in which one of them fails ends soon.

The engines are real processes, started once for all tests. What every transport must do is checked by the kit
(``test_conformance_transports.py``); here is what is particular to this one.
"""

import dataclasses
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist

from weightsync.fsm.contract import Ticket, Transport
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import (
    EngineSilent,
    PlanError,
    SetupError,
    TransportError,
)
from weightsync.fsm.plan import Plan
from weightsync.fsm.receipt import Receipt
from weightsync.testing.engine_process import EngineProcess, gauge, limit_descriptors
from weightsync.testing.sending import Sending
from weightsync.testing.small_engine import SmallEngine, SmallLink, expectation
from weightsync.transports.collective import CollectiveTransport, collective_inlet
from weightsync.transports.gloo import Group
from weightsync.transports.hub import Hub
from weightsync.transports.spoke import Spoke
from weightsync.transports.table import Table
from weightsync.transports.weights import TorchWeights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

PATIENCE = 10.0
"""Seconds until something that should happen at once counts as never."""

SOON = 5.0
"""Seconds for what takes milliseconds on an idle machine; every limit in force is longer by far."""

EPOCHS = iter(range(1, 1_000_000))


def constants(*values: float) -> dict[str, torch.Tensor]:
    """One tensor for each value, filled with it: 64 KiB, a bucket of its own."""
    return {f"w{index}": torch.full((1 << 14,), float(value)) for index, value in enumerate(values)}


BUCKET = 1 << 16


class Engines:
    """The processes, as they are alive."""

    def __init__(self, *names: str) -> None:
        self._running = {name: EngineProcess(name) for name in names}
        for engine in self._running.values():
            engine.wait_ready()

    def __getitem__(self, name: str) -> EngineProcess:
        return self._running[name]

    def close(self) -> None:
        """End all of them."""
        for engine in self._running.values():
            engine.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Engines]:
    """Two engines, each in a process of its own."""
    engines = Engines("a", "b")
    yield engines
    engines.close()


@pytest.fixture
def engines(running: Engines) -> tuple[EngineProcess, EngineProcess]:
    """The two engines, without any fault planned."""
    both = running["a"], running["b"]
    for engine in both:
        engine.ask("plan_fault", None).result(PATIENCE)
    return both


def sending(
    transport: Transport, weights: TorchWeights, *engines: EngineProcess, limit: float = 20.0, **kinds: Any
) -> Sending:
    """A round with these engines, which have opened its session."""
    epoch = next(EPOCHS)
    session, plan = Session(f"r{epoch}", epoch, epoch), kinds.get("plan") or weights.plan(BUCKET)
    content = weights.digest()
    wait_for([each.open(session, "0", plan, expectation(plan, content), limit) for each in engines], PATIENCE)
    return Sending(transport, weights, plan, engines, session, limit)


def held(engine: EngineProcess, session: Session) -> dict[str, Any]:
    """What an engine serves after its commit."""
    engine.commit(session).result(PATIENCE)
    content: dict[str, Any] = engine.ask("content").result(PATIENCE)
    return content


def content(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The same of the trainer's tensors, worked out another way than the library does."""
    return {
        name: (
            str(each.dtype),
            tuple(each.shape),
            each.detach().unsqueeze(-1).view(torch.uint8).contiguous().numpy().tobytes(),
        )
        for name, each in tensors.items()
    }


def good_round(transport: Transport, *engines: EngineProcess, value: float = 1.0) -> None:
    """A round that must succeed, to show that what came before it left nothing behind."""
    state = constants(value, value + 1, value + 2)
    run = sending(transport, TorchWeights.of(state), *engines)
    port = run.run()
    assert run.errors == {}
    assert sorted(port.receipts) == sorted(engine.id for engine in engines)
    for engine in engines:
        assert held(engine, run.session) == content(state)


@contextmanager
def aside() -> Iterator[Callable[..., Future[object]]]:
    """Calls in other threads, which are not waited for if the test has failed already."""
    pool = ThreadPoolExecutor()
    try:
        yield pool.submit
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def eventually(ready: Callable[[], object], patience: float = PATIENCE) -> bool:
    """Whether it becomes true within the patience."""
    end = time.monotonic() + patience
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


class Clock:
    """How long something took."""

    def __enter__(self) -> Self:
        self.start = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self.start


def no_more_than(before: tuple[int, int]) -> bool:
    """Whether nothing is left over; what earlier tests left may have ended meanwhile."""
    return all(now <= then for now, then in zip(gauge(), before, strict=True))


class TestContent:
    def test_facts_come_in_order(self, engines: tuple[EngineProcess, EngineProcess]) -> None:
        """Each bucket, then all of them; and the idle clock is fed."""
        run = sending(CollectiveTransport(), TorchWeights.of(constants(1, 2, 3, 4)), *engines)
        run.run()
        assert run.port("broadcast").fired == [*(("bucket_sent", index) for index in range(4)), ("all_sent",)]
        assert run.port("broadcast").moves >= 4

    def test_torch_does_not_know_of_it(
        self, engines: tuple[EngineProcess, EngineProcess], tmp_path: Path
    ) -> None:
        """The trainer's own groups are neither used nor changed, whether it has any or not."""
        good_round(CollectiveTransport(), *engines)
        assert not dist.is_initialized()
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
        try:
            groups = dict(dist.distributed_c10d._world.pg_map)
            good_round(CollectiveTransport(), *engines)
            assert dict(dist.distributed_c10d._world.pg_map) == groups
        finally:
            dist.destroy_process_group()


class TestLosses:
    def test_the_error_names_engine_and_bucket(self, engines: tuple[EngineProcess, EngineProcess]) -> None:
        """Where the round does not close the port at once, the transport says what it was doing."""
        engines[1].ask("plan_fault", "raise", 1).result(PATIENCE)
        run = sending(CollectiveTransport(), TorchWeights.of(constants(1, 2, 3, 4)), *engines)
        run.quorum = 1
        with pytest.raises(TransportError, match=r"bucket \d: engine b was lost: injected") as caught:
            run.run()
        assert caught.value.__cause__ is run.errors["b"]

    def test_a_phase_that_ends_names_who_is_late(self, engines: tuple[EngineProcess, EngineProcess]) -> None:
        """Shortly before the deadline the slow engine is lost, by name, with the bucket it is late for."""
        first, second = engines
        second.ask("plan_fault", "hang", 1).result(PATIENCE)
        run = sending(CollectiveTransport(), TorchWeights.of(constants(1, 2, 3, 4)), first, second, limit=2)
        with Clock() as clock:
            run.run()
        assert clock.seconds < 2 + SOON
        assert isinstance(run.errors["b"], EngineSilent)
        assert "engine b is late" in str(run.errors["b"])
        assert "bucket 2" in str(run.errors["b"])
        second.ask("release").result(PATIENCE)
        assert ended(second)

    def test_an_engine_that_never_joins_is_lost_in_time(
        self, engines: tuple[EngineProcess, EngineProcess]
    ) -> None:
        """The group is not waited for beyond the phase, the absent engine is named, the other one freed."""
        first, _ = engines

        class Absent(SmallLink):
            def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
                return Future()

        transport = CollectiveTransport()
        run = sending(transport, TorchWeights.of(constants(1)), first, limit=1)
        run.links = [first, Absent(SmallEngine("absent"))]
        with Clock() as clock:
            run.run()
        assert clock.seconds < 1 + SOON
        assert "engine absent is late: waiting for every rank to join" in str(run.errors["absent"])
        assert ended(first)
        good_round(transport, first)

    def test_a_link_that_says_nothing_is_not_needed_to_notice_a_death(
        self, engines: tuple[EngineProcess, EngineProcess]
    ) -> None:
        """An engine whose call stays open is lost a moment after its rank left, with the rank's reason."""
        first, second = engines

        class Mute(SmallLink):
            def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
                super().receive(session, ticket)
                return Future()

        def fail(bucket: int) -> None:
            if bucket == 1:
                raise ValueError("mine")

        mute = SmallEngine("mute", fault=fail)
        run = sending(CollectiveTransport(), TorchWeights.of(constants(1, 2, 3, 4)), first, second)
        mute.open(run.session, run.plan)
        run.links = [first, second, Mute(mute)]
        with Clock() as clock:
            run.run()
        assert clock.seconds < 1 + SOON
        assert "ValueError: mine" in str(run.errors["mute"])

    def test_an_error_of_packing_comes_out(self, engines: tuple[EngineProcess, EngineProcess]) -> None:
        """A tensor that changed since the plan was made is named, and the engines are freed."""
        weights = TorchWeights.of(constants(1, 2, 3))
        transport = CollectiveTransport()
        run = sending(transport, weights, *engines)
        weights.tensors["w2"].resize_(3)
        with pytest.raises(PlanError, match="'w2'"):
            run.run()
        assert all(ended(engine) for engine in engines)
        good_round(transport, *engines)


def ended(engine: EngineProcess) -> bool:
    """Whether an engine is through with its session, by itself, within the patience."""
    return eventually(
        lambda: engine.ask("state").result(PATIENCE) not in {"Paused", "Receiving", "Releasing"}
    )


class TestAgreement:
    @pytest.mark.parametrize(
        "other",
        [
            {"w": torch.zeros(8)},
            {"w": torch.zeros(2)},
            {"w": torch.zeros(4, dtype=torch.int32)},
            {"w": torch.zeros(4), "more": torch.zeros(4)},
            {},
        ],
        ids=["larger", "smaller", "dtype", "more", "fewer"],
    )
    def test_two_plans_never_meet_in_a_broadcast(
        self, engines: tuple[EngineProcess, EngineProcess], other: dict[str, torch.Tensor]
    ) -> None:
        """An engine with another description refuses before it joins; no process dies."""
        first, second = engines
        transport, weights = CollectiveTransport(), TorchWeights.of({"w": torch.ones(4)})
        run = sending(transport, weights, first)
        theirs = TorchWeights.of(other).plan(BUCKET)
        second.open(run.session, "0", theirs, expectation(theirs), 20).result(PATIENCE)
        run.links = [first, second]
        with Clock() as clock:
            run.run()
        assert clock.seconds < SOON
        assert isinstance(run.errors["b"], PlanError)
        assert first.alive
        assert second.alive
        good_round(transport, first, second)

    def test_another_limit_is_another_plan(self, engines: tuple[EngineProcess, EngineProcess]) -> None:
        """Both sides take sizes from one plan: an engine that cut its buckets differently is refused."""
        first, second = engines
        transport, weights = CollectiveTransport(), TorchWeights.of(constants(1, 2, 3))
        run = sending(transport, weights, first)
        theirs = weights.plan(1 << 20)
        second.open(run.session, "0", theirs, expectation(theirs), 20).result(PATIENCE)
        run.links = [first, second]
        run.run()
        assert "is not the one that was opened" in str(run.errors["b"])

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"first": 0}, "rank 0"),
            ({"first": 2}, "rank 2"),
            ({"rank": 1}, "rank 2"),
            ({"size": "2"}, "'size' is '2'"),
            ({"host": None}, "'host' is None"),
            ({"port": True}, "'port' is True"),
            ({"secret": b"x"}, "'secret'"),
        ],
        ids=str,
    )
    def test_a_ticket_is_checked_before_anybody_joins(self, change: dict[str, object], why: str) -> None:
        """Numbers that do not fit each other, and values of the wrong type, are refused by name."""
        plan = TorchWeights.of(constants(1)).plan(BUCKET)
        values = {
            "fingerprint": plan.fingerprint, "first": 1, "rank": 0, "size": 2, "host": "127.0.0.1", "port": 1,
            "secret": "x",
        }  # fmt: skip
        with pytest.raises(TransportError, match=why):
            collective_inlet(Ticket("collective", values | change), Session("r", 1, 1), plan, 1)


class TestAborts:
    def test_an_abort_ends_a_broadcast_that_is_stuck(self) -> None:
        """A rank says that it is ready and then takes no part: gloo waits for it, until the abort."""
        weights = TorchWeights.of(constants(1, 2))
        plan, session, transport = weights.plan(BUCKET), Session("r1", 1, 1), CollectiveTransport()
        deaf = Deaf(plan)
        run = Sending(transport, weights, plan, [deaf], session)
        before = gauge()
        run.open()
        with aside() as call:
            broadcast = call(run.broadcast)
            assert deaf.told.wait(PATIENCE)
            time.sleep(0.2)
            assert not broadcast.done()
            with Clock() as clock:
                transport.abort()
                broadcast.result(PATIENCE)
            assert clock.seconds < 1
        deaf.close()
        assert run.port("broadcast").fired == []
        assert eventually(lambda: gauge()[0] <= before[0])

    def test_an_abort_before_open_leaves_nothing(self, engines: tuple[EngineProcess, EngineProcess]) -> None:
        """The round moved on before the transport's thread began: nobody listens, nobody is asked."""
        run = sending(CollectiveTransport(), TorchWeights.of(constants(1)), *engines)
        before = gauge()
        run.port("open").close()
        run.open()
        assert eventually(lambda: no_more_than(before))

    def test_phases_after_an_abort_return(self, engines: tuple[EngineProcess, EngineProcess]) -> None:
        """What is called too late, with a port that is closed, does nothing; without one it is refused."""
        run = sending(CollectiveTransport(), TorchWeights.of(constants(1)), *engines)
        run.open()
        run.transport.abort()
        with pytest.raises(TransportError, match="no round is open"):
            run.broadcast()
        run.port("broadcast").close()
        run.port("collect").close()
        run.broadcast()
        run.collect()
        assert all(ended(engine) for engine in engines)

    def test_an_engine_that_is_aborted_frees_the_sender(
        self, engines: tuple[EngineProcess, EngineProcess]
    ) -> None:
        """An end of the session on the engine's side closes its half: the sender hears of it at once."""
        first, second = engines
        first.ask("plan_fault", "hang", 1).result(PATIENCE)
        run = sending(CollectiveTransport(), TorchWeights.of(constants(1, 2, 3, 4)), first, second)
        run.open()
        with aside() as call:
            broadcast = call(run.broadcast)
            assert eventually(lambda: first.ask("reached").result(PATIENCE))
            with Clock() as clock:
                second.abort(run.session).result(PATIENCE)
                with suppress(TransportError):
                    broadcast.result(PATIENCE)
            assert clock.seconds < SOON
        assert list(run.errors) == ["b"]
        run.transport.abort()
        first.ask("release").result(PATIENCE)
        assert ended(first)

    @pytest.mark.parametrize("engine_first", [False, True], ids=["trainer", "engine"])
    def test_an_abort_at_any_moment_leaves_nothing(self, engine_first: bool) -> None:
        """Whoever aborts, and whatever is just being made: nobody hangs, and nothing stays behind."""
        weights, transport = TorchWeights.of(constants(1, 2, 3)), CollectiveTransport()
        plan, draw = weights.plan(BUCKET), random.Random(1)
        before: tuple[int, int] | None = None
        for epoch in range(1, 26):
            if epoch == 2:  # torch has made what it keeps for the whole process
                before = gauge()
            session, engines = Session(f"r{epoch}", epoch, epoch), [SmallEngine(name) for name in "abc"]
            for engine in engines:
                engine.open(session, plan)
            run = Sending(transport, weights, plan, [SmallLink(engine) for engine in engines], session)
            ports = [run.port(phase) for phase in ("open", "broadcast", "collect")]
            with aside() as call:
                whole = call(run.run)
                time.sleep(draw.random() * 0.05)
                if engine_first:
                    engines[epoch % 3].abort(session)
                    time.sleep(draw.random() * 0.01)
                with Clock() as clock:
                    for port in ports:
                        port.close()
                    transport.abort()
                    for engine in engines:
                        engine.abort(session)
                    with suppress(TransportError):
                        whole.result(PATIENCE)
                assert clock.seconds < SOON
        assert before is not None
        assert eventually(lambda: no_more_than(before))


def test_where_a_hub_listens_is_known_after_its_end_too() -> None:
    """An abort may come while the tickets are written: that is no error of a socket."""
    hub = Hub("127.0.0.1", 2, "plan", lambda: None)
    host, port = hub.host, hub.port
    hub.close("aborted")
    assert (hub.host, hub.port) == (host, port)
    assert port > 0


class Deaf(SmallLink):
    """Joins, makes its side of the group, says that it is ready, and then does nothing at all."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(SmallEngine("deaf"))
        self._plan = plan
        self.told, self._over = threading.Event(), threading.Event()

    def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
        """Take part, up to the point where it would receive."""
        threading.Thread(target=self._sit, args=(session, dict(ticket.values)), daemon=True).start()
        return Future()

    def close(self) -> None:
        """Go away."""
        self._over.set()

    def _sit(self, session: Session, values: dict[str, Any]) -> None:
        spoke = Spoke(values["first"], PATIENCE, lambda: None)
        spoke.join(values["host"], values["port"], values["secret"], self._plan.fingerprint)
        eventually(lambda: spoke.forming)
        group = Group(
            spoke.table, spoke.publish, name=f"{session.round}/{session.epoch}", rank=spoke.rank,
            size=values["size"], host=spoke.host, limit=PATIENCE, ring=lambda: None,
            connected=spoke.connected,
        )  # fmt: skip
        eventually(lambda: group.formed)
        spoke.ready(0)
        eventually(lambda: spoke.going == 0)
        self.told.set()
        self._over.wait(PATIENCE)
        group.close()
        spoke.close()


class TestLeaks:
    def test_thirty_rounds_leave_nothing(self, engines: tuple[EngineProcess, EngineProcess]) -> None:
        """Ten of them fail; trainer and engines have as many descriptors and threads as before.

        After the fifth round, neither may have more than forty descriptors beyond what it had then.
        """
        transport = CollectiveTransport()
        failing = iter([self._raise, self._abort_open, self._bad_weights, self._bad_plan, self._late] * 2)
        levels: list[list[tuple[int, int]]] = []
        try:
            for number in range(30):
                if number % 3 == 2:
                    next(failing)(transport, *engines)
                else:
                    good_round(transport, *engines, value=float(number))
                if number == 4:
                    levels.append(self._levels(engines))
                    limit_descriptors(40)
                    for engine in engines:
                        engine.ask("limit_descriptors", 40).result(PATIENCE)
            assert eventually(lambda: self._below(self._levels(engines), levels[0]), 5), (
                levels,
                self._levels(engines),
            )
        finally:
            limit_descriptors(None)
            for engine in engines:
                engine.ask("limit_descriptors", None).result(PATIENCE)

    def _levels(self, engines: tuple[EngineProcess, EngineProcess]) -> list[tuple[int, int]]:
        return [gauge(), *(engine.ask("gauge").result(PATIENCE) for engine in engines)]

    def _below(self, now: list[tuple[int, int]], then: list[tuple[int, int]]) -> bool:
        return all(each[0] <= other[0] and each[1] <= other[1] for each, other in zip(now, then, strict=True))

    def _raise(self, transport: Transport, first: EngineProcess, second: EngineProcess) -> None:
        second.ask("plan_fault", "raise", 1).result(PATIENCE)
        run = sending(transport, TorchWeights.of(constants(1, 2, 3)), first, second)
        run.run()
        assert list(run.errors) == ["b"]

    def _abort_open(self, transport: Transport, first: EngineProcess, second: EngineProcess) -> None:
        run = sending(transport, TorchWeights.of(constants(1, 2, 3)), first, second)
        run.open()
        transport.abort()
        assert all(ended(engine) for engine in (first, second))

    def _bad_weights(self, transport: Transport, first: EngineProcess, second: EngineProcess) -> None:
        weights = TorchWeights.of(constants(1, 2, 3))
        run = sending(transport, weights, first, second)
        weights.tensors["w1"].resize_(1)
        with pytest.raises(PlanError):
            run.run()

    def _bad_plan(self, transport: Transport, first: EngineProcess, second: EngineProcess) -> None:
        run = sending(transport, TorchWeights.of(constants(1, 2, 3)), first)
        theirs = TorchWeights.of(constants(1)).plan(BUCKET)
        second.open(run.session, "0", theirs, expectation(theirs), 20).result(PATIENCE)
        run.links = [first, second]
        run.run()
        assert list(run.errors) == ["b"]

    def _late(self, transport: Transport, first: EngineProcess, second: EngineProcess) -> None:
        first.ask("plan_fault", "hang", 0).result(PATIENCE)
        run = sending(transport, TorchWeights.of(constants(1, 2, 3)), first, second, limit=1)
        run.run()
        assert list(run.errors) == ["a"]
        first.ask("release").result(PATIENCE)
        assert ended(first)


class TestConnections:
    def test_it_listens_where_it_is_told(self) -> None:
        """At one address only; one that stands for all of them is refused at set-up."""
        hub = Hub("127.0.0.1", 2, "plan", lambda: None)
        assert hub.host == "127.0.0.1"
        hub.close("enough")
        for address in ("0.0.0.0", "::"):
            with suppress(OSError), pytest.raises(SetupError, match="every interface"):
                Hub(address, 2, "plan", lambda: None)

    def test_a_stranger_does_not_join(self) -> None:
        """Whoever does not know the secret, or speaks nonsense, is turned away; the rank that does, joins."""
        hub = Hub("127.0.0.1", 2, "plan", lambda: None)
        try:
            stranger = Spoke(1, 2, lambda: None)
            with pytest.raises(TransportError, match="refuses this rank"):
                stranger.join(hub.host, hub.port, "guess", "plan")
            stranger.close()
            for nonsense in (
                b"GET / HTTP/1.1\r\n\r\n",
                b"{}\n",
                b"[" * 5000 + b"\n",
                b"x" * 200_000,
                b"\xff\n",
            ):
                with (
                    socket.create_connection((hub.host, hub.port), timeout=PATIENCE) as raw,
                    suppress(OSError),
                ):
                    raw.sendall(nonsense)
                    while raw.recv(4096):
                        pass
            assert hub.absent() == [1]
            rank = Spoke(1, 2, lambda: None)
            rank.join(hub.host, hub.port, hub.secret, "plan")
            assert eventually(lambda: hub.absent() == [])
            assert hub.left == {}
            rank.close()
        finally:
            hub.close("enough")

    def test_a_rank_does_not_believe_a_stranger(self) -> None:
        """Somebody else who listens at the trainer's address cannot send weights."""
        with socket.create_server(("127.0.0.1", 0)) as listener, aside() as call:

            def pretend() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(b'{"kind":"challenge","nonce":"0"}\n')
                    connection.recv(4096)
                    connection.sendall(b'{"kind":"welcome","proof":"0"}\n')
                    connection.recv(4096)

            call(pretend)
            rank = Spoke(1, 2, lambda: None)
            with pytest.raises(TransportError, match="without the round's secret"):
                rank.join("127.0.0.1", listener.getsockname()[1], "secret", "plan")
            rank.close()

    def test_a_rank_joins_once(self) -> None:
        """A second one with the same number, or with a number that there is not, is turned away."""
        hub = Hub("127.0.0.1", 2, "plan", lambda: None)
        first = Spoke(1, 2, lambda: None)
        try:
            first.join(hub.host, hub.port, hub.secret, "plan")
            for number in (1, 2, 0):
                other = Spoke(number, 2, lambda: None)
                with pytest.raises(TransportError):
                    other.join(hub.host, hub.port, hub.secret, "plan")
                other.close()
            assert hub.left == {}
        finally:
            first.close()
            hub.close("enough")

    def test_a_rank_with_another_plan_is_known_by_its_number(self) -> None:
        """It proved who it is, so that the engine can be named."""
        hub = Hub("127.0.0.1", 2, "plan", lambda: None)
        rank = Spoke(1, 2, lambda: None)
        try:
            with pytest.raises(TransportError):
                rank.join(hub.host, hub.port, hub.secret, "another")
            assert eventually(lambda: 1 in hub.left)
            assert isinstance(hub.left[1].error, PlanError)
        finally:
            rank.close()
            hub.close("enough")

    def test_nobody_at_the_address(self) -> None:
        """The error says where nobody was found."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        rank = Spoke(1, 2, lambda: None)
        with pytest.raises(TransportError, match=f"cannot reach the trainer at 127.0.0.1:{port}"):
            rank.join("127.0.0.1", port, "secret", "plan")
        rank.close()

    def test_a_rank_that_was_told_to_stop_does_not_join(self) -> None:
        """An inlet that is closed before it receives gives up as soon as it is connected."""
        hub = Hub("127.0.0.1", 2, "plan", lambda: None)
        rank = Spoke(1, 2, lambda: None)
        rank.stop("enough")
        with pytest.raises(TransportError):
            rank.join(hub.host, hub.port, hub.secret, "plan")
        rank.close()
        hub.close("enough")


class TestGroups:
    def test_closing_ends_the_making_of_a_group(self) -> None:
        """A rank that waits for others which never come stops at once, and leaves nothing."""
        before = gauge()
        table = Table()
        group = Group(
            table, table.put, name="g", rank=0, size=2, host="127.0.0.1", limit=60, ring=lambda: None
        )  # fmt: skip
        time.sleep(0.2)
        assert not group.formed
        group.close()
        assert eventually(lambda: no_more_than(before), 2)
        with pytest.raises(TransportError, match="could not be formed"):
            _ = group.formed

    def test_closing_ends_a_broadcast(self) -> None:
        """An operation that waits for a rank which takes no part fails at once, and nothing stays behind."""
        before = gauge()
        table = Table()
        groups = [
            Group(
                table, table.put, name="g", rank=rank, size=2, host="127.0.0.1", limit=60, ring=lambda: None
            )
            for rank in range(2)
        ]
        assert eventually(lambda: all(group.formed for group in groups))
        operation = groups[0].broadcast(torch.zeros(1 << 20, dtype=torch.uint8))
        assert not operation.settled(0.2)
        with Clock() as clock:
            groups[0].close()
        assert clock.seconds < 1
        assert operation.done
        assert operation.error is not None
        groups[1].close()
        assert eventually(lambda: no_more_than(before), 2)
        with pytest.raises(TransportError, match="the group is closed"):
            groups[0].broadcast(torch.zeros(1, dtype=torch.uint8))

    def test_other_connections_are_left_alone(self) -> None:
        """Closing a stuck group shuts its own sockets, and no other one of the process."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            mine = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
            self.test_closing_ends_a_broadcast()
            mine.sendall(b"still here")
            assert theirs.recv(100) == b"still here"
            mine.close()
            theirs.close()


def test_it_says_what_it_can_do() -> None:
    """The declared capabilities are what the tests above show; an unknown backend is refused."""
    transport: Transport = CollectiveTransport()
    assert transport.name == "collective"
    assert dataclasses.asdict(transport.capabilities) == {
        "stages": True, "aliases": False, "cross_host": True, "survives_loss": False, "dtypes": None,
        "cross_process": True, "in_cluster": False,
    }  # fmt: skip
    with pytest.raises(SetupError, match="'nccl'"):
        CollectiveTransport("nccl")

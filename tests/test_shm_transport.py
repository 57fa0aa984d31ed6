"""Shared memory, with engines in threads: who may write when, what ends whom, and what is left behind."""

import contextlib
import fcntl
import gc
import itertools
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from casekit.bench import Bench, quick
from casekit.engines import InThreads, tensors_in
from casekit.levels import eventually, levels
from casekit.scripts import ANY, Block, Injected, Raise, Sleep
from casekit.tensors import NAMES, same, state
from weightsync import LocalEngine, SharedMemoryTransport, WeightSync
from weightsync.engine import inlets
from weightsync.fsm.contract import Bucketful
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import EngineError, EngineSilent, PlanError, SetupError, TransportError
from weightsync.fsm.plan import Plan
from weightsync.fsm.policy import Policy
from weightsync.fsm.states import Disposition, Outcome
from weightsync.handlers.receiver import Receiver
from weightsync.handlers.sink import StagingSink
from weightsync.transports import shm_inlet, shm_round
from weightsync.transports.collective import CollectiveTransport
from weightsync.transports.digest import digest
from weightsync.transports.memory import MemoryTransport
from weightsync.transports.packets import Packets, packet_socket
from weightsync.transports.packing import pack, unpack
from weightsync.transports.private_folder import PrivateFolder, inhabited
from weightsync.transports.segment import Segment
from weightsync.transports.shm_hub import ShmHub
from weightsync.transports.shm_pool import Pool
from weightsync.transports.switchboard import SEND_LIMIT
from weightsync.transports.wire import proof

pytestmark = pytest.mark.timeout(90)

HOW = pytest.mark.parametrize(
    "how", [{"aliases": True}, {"swaps": True}, {}], ids=["aliases", "swaps", "copies"]
)
GO_ON = {"on_engine_failure": "quarantine", "quorum": 1}


def engines(*names: str, **how: bool) -> list[InThreads]:
    """Engines in this process."""
    return [InThreads(name, state(-1), **how) for name in names]


class Order:
    """What happened, in one order for all threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[Any, ...]] = []
        self._lock = threading.Lock()
        heard, show = ShmHub._heard, shm_round.ShmRound.show
        say, room = shm_inlet._ShmInlet._say, shm_round.ShmRound.room

        def hears(hub: ShmHub, peer: Any, message: Any) -> None:
            heard(hub, peer, message)
            self.note("heard", peer.rank, message["kind"], message.get("bucket"))

        def says(inlet: Any, wire: Packets, kind: str, **body: Any) -> None:
            self.note("said", inlet._seat.rank, kind, body.get("bucket"))
            say(inlet, wire, kind, **body)

        def gives(round: Any, plan: Plan, bucket: Any, port: Any) -> Any:
            found = room(round, plan, bucket, port)
            self.note("written", bucket.index, found[0].id, found[1])
            return found

        def shows(round: Any, *args: Any, last: bool) -> None:
            self.note("shown", args[0])
            show(round, *args, last=last)

        monkeypatch.setattr(ShmHub, "_heard", hears)
        monkeypatch.setattr(shm_inlet._ShmInlet, "_say", says)
        monkeypatch.setattr(shm_round.ShmRound, "room", gives)
        monkeypatch.setattr(shm_round.ShmRound, "show", shows)

    def note(self, *event: Any) -> None:
        """It happened now."""
        with self._lock:
            self.events.append(event)

    def at(self, *event: Any) -> int:
        """When it happened last."""
        assert event in self.events, f"it never happened: {event}"
        return len(self.events) - 1 - self.events[::-1].index(event)


class TestOrder:
    """An acknowledgement is the last thing, and a buffer is written after the last of them."""

    @HOW
    def test_nothing_is_acknowledged_before_it_is_let_go_of(
        self, how: dict[str, bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In each of a hundred rounds: applied, let go of, told so, and only then the receipt."""
        order = Order(monkeypatch)
        own = engines("e0", "e1", **how)
        for engine in own:
            for point in ("applied", "release", "acked"):
                engine.script.always(point, lambda e=engine.name, p=point: order.note(p, e))  # type: ignore[misc]
        transport = SharedMemoryTransport(slots=2)
        with WeightSync([each.link for each in own], transport, policy=quick(bucket_bytes=256)) as sync:
            for number in range(1, 101):
                order.events.clear()
                result = sync.on_step_end(number, state(float(number)))
                assert result is not None
                assert result.ok, result.summary()
                for rank, name in enumerate(("e0", "e1")):
                    last = len(NAMES) - 1
                    story = [order.at("applied", name)]
                    if not how.get("aliases"):  # of a version, what is referred to is asked when they join
                        story.append(order.at("said", rank, "released", last))
                        assert order.at("heard", rank, "released", last) > story[-1]
                    story += [order.at("release", name), order.at("said", rank, "done", None)]
                    story.append(order.at("acked", name))
                    assert story == sorted(story), order.events

    def test_a_slot_is_written_when_the_last_reader_has_let_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The slow one included; the others are not held up by more than the ring has slots."""
        order = Order(monkeypatch)
        own = engines("e0", "e1")
        own[1].script.always("apply", Sleep(0.02))
        with WeightSync(
            [each.link for each in own], SharedMemoryTransport(slots=2), policy=quick(bucket_bytes=64)
        ) as sync:
            assert sync.on_train_begin(state(3.0)).ok
        places: dict[tuple[str, int], int] = {}
        checked = 0
        for when, event in enumerate(order.events):
            if event[0] == "written":
                _, bucket, *place = event
                before = places.get(tuple(place))
                places[tuple(place)] = bucket
                if before is not None:
                    checked += 1
                    for rank in (0, 1):
                        assert order.at("heard", rank, "released", before) < when, order.events
        assert checked >= 8
        assert all(same(tensors_in(each.held), state(3.0)) for each in own)

    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        faults=st.lists(
            st.tuples(
                st.sampled_from(["receive", "frame", "apply", "applied", "release", "acked", "commit"]),
                st.integers(0, 2),
                st.integers(0, len(NAMES) - 1),
            ),
            max_size=3,
        ),
        mode=st.sampled_from(["ring", "publish"]),
    )
    def test_each_bucket_is_acknowledged_once_and_in_turn(
        self,
        faults: list[tuple[str, int, int]],
        mode: Literal["ring", "publish"],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Whoever fails, wherever: no word comes twice, none ahead of its turn, and none after the last."""
        with monkeypatch.context() as patch:
            order = Order(patch)
            own = engines("e0", "e1", "e2")
            for point, engine, bucket in faults:
                own[engine].arm(point, Raise(Injected(point)), bucket if point[:2] in ("fr", "ap") else ANY)
            transport = SharedMemoryTransport(mode=mode, slots=2)
            with WeightSync(
                [each.link for each in own], transport, policy=quick(bucket_bytes=256, **GO_ON)
            ) as sync:
                assert sync.on_train_begin(state(1.0)).path[-1] == "Released"
        for rank in range(3):
            words = [
                each[2:]
                for each in order.events
                if each[:2] == ("said", rank) and each[2] in ("released", "done")
            ]
            let_go = [bucket for kind, bucket in words if kind == "released"]
            assert let_go == list(range(len(let_go))), words
            assert [kind for kind, _ in words].count("done") <= 1
            assert ("done", None) not in words[:-1], words
            if mode == "ring" and words and words[-1] == ("done", None):
                assert len(let_go) == len(NAMES)

    @HOW
    def test_what_is_being_read_is_never_written(self, how: dict[str, bool]) -> None:
        """Fifty rounds in which an engine stops in the middle of one bucket: it has the right bytes."""
        own = engines("e0", "e1", **how)
        with Bench(own, SharedMemoryTransport(slots=2)) as bench:
            for number in range(1, 51):
                own[number % 2].arm("apply", Sleep(0.005), number % len(NAMES))
                bench.works(state(float(number)))


class _Keeper(InThreads):
    """An engine whose own code keeps views of the buckets that it is shown."""

    def __init__(self, name: str, *, fails: bool = False) -> None:
        super().__init__(name, state(-1))
        self.kept: list[Tensor] = []
        self.receiver = Receiver(
            name,
            StagingSink(self.held),
            inlets=inlets(),
            unpack=self._unpack,
            digest=digest,
            fault=self.script,
        )
        self.link.receiver = self.receiver
        self.keeping, self._fails = False, fails

    def _unpack(self, plan: Plan, bucket: Bucketful, into: Mapping[str, Any], /) -> None:
        unpack(plan, bucket, into)
        if self.keeping:
            self.kept.append(bucket.data[:4])
            if self._fails:
                raise Injected("the callback's own error")


class TestViews:
    """What is kept beyond its time: safe, or told at once."""

    def test_b35_c_a_view_that_is_kept_fails_the_round_by_name(self) -> None:
        """The engine is named with the bucket, and the view still reads what it did: nothing was written."""
        keeper = _Keeper("keeps")
        with Bench([*engines("e0"), keeper], SharedMemoryTransport(slots=1)) as bench:
            bench.works(state(1.0))
            keeper.keeping = True
            either = ("Broadcasting", "Awaiting")
            result = bench.fails(EngineError, engine="keeps", phase=either, bucket=ANY, model=state(2.0))
            assert "keeps a view of bucket 0" in str(result.error)
            assert keeper.kept[0].view(torch.float32).tolist() == [2.0]
            keeper.keeping = False
            for value in (3.0, 4.0, 5.0):
                bench.works(state(value))
                assert keeper.kept[0].view(torch.float32).tolist() == [2.0], "it was written under the view"

    def test_the_callbacks_own_error_is_not_masked(self) -> None:
        """Its traceback would keep the view, too; what is told is what it raised."""
        keeper = _Keeper("raises", fails=True)
        with Bench([*engines("e0"), keeper], SharedMemoryTransport()) as bench:
            bench.works()
            keeper.keeping = True
            bench.fails(Injected, engine="raises", phase=("Broadcasting", "Awaiting"), bucket=ANY)
            keeper.keeping = False
            keeper.kept.clear()
            bench.works()

    def test_an_engine_that_aliases_keeps_old_tensors(self) -> None:
        """They stay as they are, bit for bit, for as long as they are kept: other memory is taken."""
        own = engines("e0", "e1", aliases=True)
        with WeightSync([each.link for each in own], SharedMemoryTransport(), policy=quick()) as sync:
            sync.on_train_begin(state(1.0)).require()
            kept = {name: tensor.detach()[...] for name, tensor in tensors_in(own[0].held).items()}
            for step, value in enumerate((2.0, 3.0, 4.0, 5.0), start=1):
                assert sync.on_step_end(step, state(value)).ok  # type: ignore[union-attr]
                assert same(tensors_in(own[1].held), state(value))
                assert same(kept, state(1.0))

    def test_one_that_keeps_every_version_is_told(self) -> None:
        """There are so many buffers, and no more; the error says who has them."""
        own = engines("hoards", aliases=True)
        kept = []
        with WeightSync([own[0].link], SharedMemoryTransport(buffers=3), policy=quick()) as sync:
            for step in (1, 2, 3):
                assert sync.on_step_end(step, state(float(step))).ok  # type: ignore[union-attr]
                kept.append({name: tensor.detach()[...] for name, tensor in tensors_in(own[0].held).items()})
            result = sync.on_step_end(4, state(4.0))
            assert result is not None
            assert isinstance(result.error, TransportError)
            assert "all 3 buffers that there may be are in use by hoards" in str(result.error)
            assert result.serving(Disposition.serving_old) == ("hoards",)
            assert all(same(each, state(value)) for each, value in zip(kept, (1.0, 2.0, 3.0), strict=True))
            kept.clear()
            assert sync.on_step_end(5, state(5.0)).ok  # type: ignore[union-attr]

    def test_an_aborted_version_is_let_go_of(self) -> None:
        """However often: two buffers stay enough, because nothing but live weights holds one."""
        own = engines("e0", "e1", aliases=True)
        with Bench(own, SharedMemoryTransport(buffers=2)) as bench:
            bench.works()
            for number in range(6):
                own[1].arm(("apply", "release", "acked")[number % 3], Raise(Injected("aborted")))
                bench.fails(Injected, engine="e1", phase=("Broadcasting", "Awaiting"), bucket=ANY)
                bench.works()

    def test_rollback_costs_nothing(self) -> None:
        """A version that nobody commits leaves every engine with the old one, in the very same memory."""
        own = engines("e0", "e1", aliases=True)
        with Bench(own, SharedMemoryTransport()) as bench:
            bench.works(state(1.0))
            before = [tensors_in(each.held)[NAMES[0]].data_ptr() for each in own]
            own[0].arm("acked", Raise(Injected("no")))
            result = bench.fails(Injected, engine="e0", phase="Awaiting", bucket=ANY)
            assert result.serving(Disposition.serving_old) == ("e1",)
            assert [tensors_in(each.held)[NAMES[0]].data_ptr() for each in own] == before
            assert all(same(tensors_in(each.held), state(1.0)) for each in own)


class TestLosses:
    """An engine that fails, hangs or is gone takes nobody along."""

    @pytest.mark.parametrize("mode", ["ring", "publish"])
    @pytest.mark.parametrize("point", ["receive", "frame", "apply", "applied", "release", "acked"])
    def test_the_others_go_on(self, point: str, mode: Literal["ring", "publish"]) -> None:
        """With a quorum: the one that raised is out, with its own error; the next round has it back."""
        own = engines("e0", "e1", "e2")
        policy = quick(rest=0.01, longest_rest=0.01, **GO_ON)
        with Bench(own, SharedMemoryTransport(mode=mode, slots=1), policy=policy) as bench:
            bench.works()
            own[1].arm(point, Raise(Injected(point)))
            result = bench.meets(Injected(point), state(9.0))
            assert result.outcome is Outcome.partial
            assert result.serving(Disposition.serving_new) == ("e0", "e2")
            assert str(next(row for row in result.engines if row.engine == "e1").error) == point
            assert eventually(lambda: bench.run(state(10.0)).outcome is Outcome.complete)

    @pytest.mark.parametrize("mode", ["ring", "publish"])
    def test_a_hang_is_lost_by_name_although_it_gives_signs_of_life(
        self, mode: Literal["ring", "publish"]
    ) -> None:
        """Its thread is stuck, its process lives: half of the phase, and no more."""
        own = engines("e0", "e1")
        stuck = Block()
        policy = quick(deadline=6.0, rest=0.01, longest_rest=0.01, **GO_ON)
        with Bench(own, SharedMemoryTransport(mode=mode, slots=1), policy=policy) as bench:
            bench.works()
            own[1].arm("apply", stuck, 0)
            result = bench.run(state(9.0))
            assert result.outcome is Outcome.partial
            error = next(row for row in result.engines if row.engine == "e1").error
            assert isinstance(error, EngineSilent)
            assert same(tensors_in(own[0].held), state(9.0))
            stuck.going.set()
            assert eventually(lambda: bench.run(state(10.0)).outcome is Outcome.complete)
            assert same(tensors_in(own[1].held), state(10.0))

    def test_an_engine_may_be_slower_than_silence_as_long_as_it_says_so(self) -> None:
        """A bucket takes it longer than an engine may be silent: it beats, and nobody gives up on it."""
        own = engines("e0", "slow")
        policy = quick(deadline=12.0, engine_limit=0.6, idle=0.8)
        with Bench(own, SharedMemoryTransport(mode="ring", slots=1), policy=policy) as bench:
            bench.works()
            own[1].arm("apply", Sleep(2.5), 1)
            assert bench.run(state(5.0)).ok

    @pytest.mark.parametrize("quorum", [False, True])
    def test_a_version_of_many_buckets_and_an_engine_that_is_behind(self, *, quorum: bool) -> None:
        """Words that it does not take do not stop the sender: it is waited for, or lost by its name."""
        model = {f"w{number}": torch.full((16,), float(number)) for number in range(150)}
        held = [{name: torch.zeros(16) for name in model} for _ in range(2)]
        own = [InThreads(f"e{number}", each) for number, each in enumerate(held)]
        more: dict[str, Any] = {"rest": 0.01, "longest_rest": 0.01, **GO_ON} if quorum else {}
        policy = quick(bucket_bytes=64, deadline=12.0, engine_limit=1.0, **more)
        stuck = Block()
        with Bench(own, SharedMemoryTransport(mode="publish"), policy=policy) as bench:
            own[1].arm("apply", stuck if quorum else Sleep(2.0), 0)
            result = bench.run(model)
            stuck.going.set()
            assert result.outcome is (Outcome.partial if quorum else Outcome.complete), result.summary()
            assert same(held[0], model)

    def test_a_fenced_reader_keeps_its_slot(self) -> None:
        """It still looks at a bucket when the round has gone on: it sees the bytes that it was shown."""
        own = engines("e0", "e1")
        seen: list[Tensor] = []
        stuck = Block()
        apply = own[1].receiver._unpack

        def looking(plan: Plan, bucket: Bucketful, into: Mapping[str, Any], /) -> None:
            if bucket.index == 0 and own[1].script.armed("applied"):
                stuck()
                seen.append(bucket.data.clone())
            apply(plan, bucket, into)

        own[1].receiver._unpack = looking
        policy = quick(deadline=4.0, rest=0.01, longest_rest=0.01, **GO_ON)
        with Bench(own, SharedMemoryTransport(mode="ring", slots=1), policy=policy) as bench:
            bench.works(state(1.0))
            own[1].arm("applied", Sleep(0.0))
            assert bench.run(state(2.0)).outcome is Outcome.partial
            assert bench.run(state(3.0)).outcome is Outcome.partial
            stuck.going.set()
            assert eventually(lambda: seen)
            assert seen[0].view(torch.float32)[0].item() == 2.0, "it was shown other bytes"

    @pytest.mark.parametrize("where", ["packs", "shows"])
    def test_a_sender_that_fails_tells_the_engines(self, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are out of it within a moment, and serve what they had."""
        own = engines("e0", "e1")

        def broken(*_: Any, **__: Any) -> None:
            raise Injected(where)

        with Bench(own, SharedMemoryTransport()) as bench:
            bench.works()
            with monkeypatch.context() as patch:
                if where == "packs":
                    patch.setattr("weightsync.transports.shm.pack", broken)
                else:
                    patch.setattr(shm_round.ShmRound, "show", broken)
                began = time.monotonic()
                bench.fails(Injected, phase="Broadcasting", bucket=ANY)
                assert time.monotonic() - began < 2.0
            bench.works()


class _Endpoint:
    """A trainer's endpoint in the middle of a round, for peers that are not invited."""

    def __init__(self, folder: Path) -> None:
        self.session = Session("r1", 5, 1)
        self.hub = ShmHub(folder, self.session, 2, fingerprint="plan", alive=["s1"], ring=lambda: None)

    def connect(self) -> tuple[Packets, str]:
        """A connection, and the challenge."""
        connection = packet_socket()
        connection.settimeout(10)
        wire = Packets(connection, self.session)
        try:
            connection.connect(str(self.hub.path))
            message, _ = wire.receive()
        except (OSError, TransportError):
            message = None
        if message is None:
            wire.close()
            raise TransportError("nobody greets here")
        return wire, str(message["nonce"])

    def join(self, wire: Packets, nonce: str, **other: Any) -> dict[str, Any] | None:
        """Try to join as rank 0, with something else where it is given."""
        said = {
            "rank": 0, "nonce": "mine", "fingerprint": "plan", "process": "p", "aliases": False,
            "mapped": [], "holds": [], "proof": proof(self.hub.secret, "join", other.get("rank", 0), nonce),
            **other,
        }  # fmt: skip
        with contextlib.suppress(OSError):
            wire.send("join", **said)
        try:
            return wire.receive()[0]
        except (OSError, TransportError):
            return None


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[_Endpoint]:
    """One that is open."""
    found = _Endpoint(tmp_path)
    yield found
    found.hub.close("over")


class TestStrangers:
    """Whoever does not belong to the round gets nothing, changes nothing and stops nobody."""

    def test_one_that_belongs_is_welcome(self, endpoint: _Endpoint) -> None:
        """Both have proved it; the rank is there once."""
        wire, nonce = endpoint.connect()
        welcome = endpoint.join(wire, nonce)
        assert welcome is not None
        assert welcome["proof"] == proof(endpoint.hub.secret, "welcome", "mine")
        assert welcome["alive"] == ["s1"]
        assert eventually(lambda: list(endpoint.hub.members) == [0])  # it is welcomed a moment before
        again, nonce = endpoint.connect()
        assert endpoint.join(again, nonce) is None, "the rank was taken twice"
        assert list(endpoint.hub.members) == [0]
        wire.close()
        again.close()

    @pytest.mark.parametrize(
        "other",
        [
            {"proof": "0" * 64}, {"proof": ""}, {"rank": 2}, {"rank": -1}, {"rank": True}, {"rank": "0"},
            {"mapped": "x"}, {"mapped": [1]}, {"holds": ["x"] * 65}, {"process": 5},
        ],
        ids=str,
    )  # fmt: skip
    def test_one_that_does_not_is_turned_away(self, other: dict[str, Any], endpoint: _Endpoint) -> None:
        """Before it is counted on."""
        wire, nonce = endpoint.connect()
        assert endpoint.join(wire, nonce, **other) is None
        assert not endpoint.hub.members
        good, nonce = endpoint.connect()
        assert endpoint.join(good, nonce) is not None
        wire.close()
        good.close()

    def test_a_word_of_another_round_keeps_nobody_waiting(self, endpoint: _Endpoint) -> None:
        """Whoever says it has nothing more to say; others are greeted at once, and not when that is sure."""
        wire, _ = endpoint.connect()
        stale = Packets(wire._socket, Session("another", 4, 1))
        stale.send("join")
        connection = packet_socket()
        connection.settimeout(SEND_LIMIT * 0.6)
        connection.connect(str(endpoint.hub.path))
        other = Packets(connection, endpoint.session)
        message, _ = other.receive()
        assert message is not None
        assert message["kind"] == "challenge"
        other.close()
        wire.close()

    def test_without_descriptors_there_is_no_endpoint(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And nothing of one: no path, and no socket that somebody might still knock at."""

        def exhausted() -> Any:
            raise OSError(24, "Too many open files")

        before = levels()
        with monkeypatch.context() as patch:
            patch.setattr("weightsync.transports.switchboard.socket.socketpair", exhausted)
            with pytest.raises(OSError, match="Too many open files"):
                _Endpoint(tmp_path)
        assert list(tmp_path.iterdir()) == []
        assert levels() == before

    def test_another_plan_is_the_loss_of_that_rank(self, endpoint: _Endpoint) -> None:
        """It is told as what it is."""
        wire, nonce = endpoint.connect()
        assert endpoint.join(wire, nonce, fingerprint="other") is None
        assert eventually(lambda: 0 in endpoint.hub.left)
        assert isinstance(endpoint.hub.left[0].error, PlanError)
        wire.close()

    def test_a_crowd_does_not_keep_out_those_who_belong(self, endpoint: _Endpoint) -> None:
        """Connections that say nothing, or rubbish, are bounded."""
        crowd = []
        for _ in range(60):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(10)
            with contextlib.suppress(OSError):
                connection.connect(str(endpoint.hub.path))
                connection.send(b"rubbish")
            crowd.append(connection)
        assert eventually(lambda: _joined(endpoint))
        for connection in crowd:
            connection.close()

    @pytest.mark.parametrize("buckets", [(1,), (0, 0), (0, 2), (-1,)])
    def test_letting_go_out_of_turn_ends_the_conversation(
        self, buckets: tuple[int, ...], endpoint: _Endpoint
    ) -> None:
        """One acknowledgement for each bucket, in their order, and none twice."""
        wire, nonce = endpoint.connect()
        assert endpoint.join(wire, nonce) is not None
        for bucket in buckets:
            with contextlib.suppress(OSError):
                wire.send("released", bucket=bucket)
        assert eventually(lambda: 0 in endpoint.hub.left)
        assert "let go of bucket" in str(endpoint.hub.left[0].error)
        wire.close()

    @pytest.mark.parametrize(
        ("how", "other", "words"),
        [
            ("ring", {"bucket": 1, "last": 1}, "buckets 1 to 1 came where 0 was due"),
            ("ring", {"last": 1}, "each lies by itself"),
            ("ring", {"segment": "another"}, "never handed over"),
            ("ring", {"at": "0"}, "has no int 'at'"),
            ("ring", {"at": 1 << 40}, "1099511627776"),
            ("aliases", {"last": -1}, "buckets 0 to -1 came"),
            ("aliases", {"last": 1 << 40}, "came where 0 was due"),
            ("aliases", {"at": 64}, "bucket 0 lies at 64, not at 0"),
            ("aliases", {"last": None}, "has no int 'last'"),
        ],
    )
    def test_a_word_about_buckets_is_checked_before_anything_is_read(
        self, how: str, other: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever the trainer says of where they lie; the engine keeps what it has, and goes on."""
        own = engines("e0", aliases=how == "aliases")
        tell = ShmHub.tell

        def lies(hub: ShmHub, kind: str, whom: Any, **body: Any) -> None:
            tell(hub, kind, whom, **(body | other if kind == "bucket" else body))

        with Bench(own, SharedMemoryTransport(), policy=quick(bucket_bytes=40)) as bench:
            bench.works()
            with monkeypatch.context() as patch:
                patch.setattr(ShmHub, "tell", lies)
                result = bench.fails(
                    TransportError, engine="e0", phase=("Broadcasting", "Awaiting"), bucket=ANY
                )
            assert re.search(words, str(result.error))
            bench.works()

    def test_who_only_looks_is_told_of_all_buckets_in_one_word(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who copies is told of each. If the trainer takes its time, nobody is without a word for long."""
        own = [*engines("a looks", aliases=True), *engines("b copies")]
        told: list[tuple[int, int, int]] = []
        say = ShmHub._say

        def hears(hub: ShmHub, peer: Any, kind: str, *fds: int, **body: Any) -> None:
            if kind == "bucket":
                told.append((peer.rank, body["bucket"], body["last"]))
            say(hub, peer, kind, *fds, **body)

        monkeypatch.setattr(ShmHub, "_say", hears)
        with Bench(own, SharedMemoryTransport(), policy=quick(bucket_bytes=120)) as bench:
            bench.works()
            count = len({first for rank, first, _ in told if rank == 1})
            assert count > 2
            assert [each for each in told if each[0] == 0] == [(0, 0, count - 1)]
            assert [each for each in told if each[0] == 1] == [(1, each, each) for each in range(count)]
            told.clear()

            def slow(*args: Any) -> None:
                time.sleep(0.25)
                pack(*args)

            monkeypatch.setattr("weightsync.transports.shm.pack", slow)
            bench.works()
            words = [(first, last) for rank, first, last in told if rank == 0]
            assert len(words) > count / 3
            assert [each for first, last in words for each in range(first, last + 1)] == list(range(count))

    def test_an_engine_of_the_round_before_finds_nothing(self) -> None:
        """Its endpoint is gone; a ticket that was kept leads nowhere, and the new round is not disturbed."""
        own = engines("e0", "e1")
        tickets = []
        receive = own[1].link.receive

        def kept(session: Session, ticket: Any) -> Any:
            tickets.append((session, ticket))
            return receive(session, ticket)

        own[1].link.receive = kept  # type: ignore[method-assign]
        with Bench(own, SharedMemoryTransport()) as bench:
            bench.works()
            session, ticket = tickets[0]
            stale = LocalEngine(own[1].receiver).receive(session, ticket)
            bench.works()
            assert isinstance(stale.exception(10), EngineError | TransportError)
            inlet = shm_inlet.shm_inlet(ticket, session, own[1].receiver._job.plan, 1.0)  # type: ignore[union-attr]
            with pytest.raises(TransportError, match="no trainer listens at"), inlet.buckets():
                pass

    def test_the_endpoint_is_private(self) -> None:
        """A folder of this user's alone, which goes with the transport; sockets go with their round."""
        own = engines("e0")
        transport = SharedMemoryTransport()
        with Bench(own, transport) as bench:
            bench.works()
            folder = transport._folder
            assert folder is not None
            assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
            assert [entry.name for entry in folder.path.iterdir()] == ["lock"]
            assert inhabited(folder.path)
        assert not folder.path.exists()


def _joined(endpoint: _Endpoint) -> bool:
    try:
        wire, nonce = endpoint.connect()
    except (OSError, TransportError):
        return False
    joined = endpoint.join(wire, nonce) is not None
    wire.close()
    return joined


class TestLimits:
    """Sizes, numbers and values that do not fit."""

    @pytest.mark.parametrize(
        "given", [{"mode": "both"}, {"slots": 0}, {"slots": 1.5}, {"buffers": 1}, {"buffers": True}], ids=str
    )
    def test_a_value_that_is_none(self, given: dict[str, Any]) -> None:
        """In one line that says what to give instead."""
        with pytest.raises(SetupError, match="SharedMemoryTransport"):
            SharedMemoryTransport(**given)

    def test_too_little_memory_is_found_before_a_byte_moves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the size that is needed; the next round, with memory, works."""
        own = engines("e0", aliases=True)
        with Bench(own, SharedMemoryTransport()) as bench:
            with monkeypatch.context() as patch:
                patch.setattr("weightsync.transports.segment.available_memory", lambda: 1000)
                result = bench.fails(TransportError, phase="Locked")
                assert "two buffers of a version: 0.0 MiB are needed" in str(result.error)
                assert own[0].count("frame") == 0
            bench.works()

    @HOW
    @pytest.mark.parametrize("bucket_bytes", [1, 60, 64, 100, 1 << 20])
    def test_tensors_are_split_as_the_buckets_are(self, bucket_bytes: int, how: dict[str, bool]) -> None:
        """Larger than a bucket, of several dtypes, empty, without dimensions: whole and right at the end."""
        model = {
            "large": torch.arange(50.0), "half": torch.arange(9).to(torch.bfloat16),
            "none": torch.empty(0, 4), "scalar": torch.tensor(3.5, dtype=torch.float64),
            "flag": torch.tensor([True, False]), "complex": torch.randn(5, dtype=torch.complex128),
        }  # fmt: skip
        held = [{name: torch.zeros_like(tensor) for name, tensor in model.items()} for _ in range(2)]
        own = [InThreads(f"e{number}", each, **how) for number, each in enumerate(held)]
        with Bench(own, SharedMemoryTransport(), policy=quick(bucket_bytes=bucket_bytes)) as bench:
            for _ in range(3):
                bench.works(model)
                model["large"] += 1.0

    def test_a_full_collection_is_never_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing on the way depends on it."""
        own = [*engines("e0", aliases=True), *engines("e1")]

        def forbidden(*_: Any) -> int:
            raise AssertionError("a full collection on the path of a round")

        with Bench(own, SharedMemoryTransport()) as bench:
            bench.works()
            monkeypatch.setattr(gc, "collect", forbidden)
            for _ in range(3):
                bench.works()
            own[1].arm("apply", Raise(Injected("x")))
            bench.fails(Injected, engine="e1", phase=("Broadcasting", "Awaiting"), bucket=ANY)
            bench.works()


@pytest.mark.slow
@HOW
def test_nothing_grows(how: dict[str, bool]) -> None:
    """Descriptors, threads, segments and sockets are after round 100 what they are after round 10."""
    own, base, resident = engines("e0", "e1", **how), levels(), 0
    with Bench(own, SharedMemoryTransport(), policy=quick(rest=0.001, longest_rest=0.001, **GO_ON)) as bench:
        for number in range(1, 101):
            if number % 7 == 0:
                own[number % 2].arm("apply", Raise(Injected(str(number))), number % len(NAMES))
            bench.run(state(float(number)))
            if number == 10:
                assert eventually(lambda: not levels().above(levels(), 1))
                base, resident = levels(), _resident()
        assert eventually(lambda: not levels().above(base, 1)), levels().above(base, 1)
        assert _resident() <= resident * 1.02 + (1 << 20)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


class TestFolders:
    """What a killed process leaves is told from what is in use."""

    def test_who_lives_keeps_his(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The next one takes away only what nobody holds."""
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        one = PrivateFolder("weightsync-shm-")
        left = tmp_path / "weightsync-shm-left"
        left.mkdir(0o700)
        (left / "lock").touch(0o600)
        foreign = tmp_path / "weightsync-shm-foreign"
        foreign.mkdir(0o755)
        (foreign / "lock").touch()
        other = PrivateFolder("weightsync-shm-")
        assert one.path.exists()
        assert not left.exists()
        assert foreign.exists(), "it was not this user's alone"
        for folder in (one, other):
            folder.close()
            folder.close()
            assert not folder.path.exists()
            assert not inhabited(folder.path)

    def test_it_is_locked_before_others_can_find_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever looks for what nobody holds, never sees one that is just being made."""
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        seen: list[str] = []
        lock = fcntl.flock

        def looking(fd: int, how: int) -> None:
            seen.extend(each.name for each in tmp_path.iterdir())
            lock(fd, how)

        monkeypatch.setattr(fcntl, "flock", looking)
        folder = PrivateFolder("weightsync-shm-")
        assert seen
        assert all(name.startswith(".") for name in seen)
        assert folder.path.name.startswith("weightsync-shm-")
        folder.close()

    def test_a_folder_that_was_cleaned_away_is_made_again(self) -> None:
        """With other memory: what engines hold of the one before stays theirs."""
        own = engines("e0", aliases=True)
        transport = SharedMemoryTransport()
        with WeightSync([own[0].link], transport, policy=quick()) as sync:
            sync.on_train_begin(state(1.0)).require()
            kept = {name: tensor.detach()[...] for name, tensor in tensors_in(own[0].held).items()}
            assert transport._folder is not None
            shutil.rmtree(transport._folder.path)
            for step in (1, 2, 3, 4):
                assert sync.on_step_end(step, state(1.0 + step)).ok  # type: ignore[union-attr]
            assert same(tensors_in(own[0].held), state(5.0))
            assert same(kept, state(1.0))

    def test_a_temporary_folder_with_a_long_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A socket's path has its limit: it lies elsewhere then."""
        long = tmp_path / ("x" * 120)
        long.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(long))
        with Bench(engines("e0"), SharedMemoryTransport()) as bench:
            bench.works()


FORKED = """
import os, sys, torch
from weightsync import LocalEngine, Policy, SharedMemoryTransport, WeightSync, receiver_for
held = {"w": torch.zeros(4096)}
with WeightSync(
    [LocalEngine(receiver_for(held, "e0", aliases=True))], SharedMemoryTransport(), policy=Policy(deadline=20)
) as sync:
    sync.on_train_begin({"w": torch.ones(4096)}).require()
    child = os.fork()
    if not child:
        sync.close()  # it is its parent's
        print("child reads", float(held["w"][5]), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    for step in range(1, 4):
        sync.on_step_end(step, {"w": torch.ones(4096) + step}).require()
    print("child ended by", os.WTERMSIG(status), "parent has", float(held["w"][5]), flush=True)
"""


def test_a_forked_child_sees_none_of_it() -> None:
    """It would see the bytes change: its views are counted nowhere. So it has none, which ends it at once."""
    run = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=80, check=False
    )
    assert run.stdout == f"child ended by {signal.SIGSEGV.value} parent has 4.0\n", run.stderr


def test_two_trainers_of_one_process_do_not_disturb_each_other() -> None:
    """Each has its memory; engines of both keep them apart."""
    pools: list[Pool[Segment]] = []
    for _ in range(2):
        own = engines("e0", aliases=True)
        transport = SharedMemoryTransport()
        pools.append(transport._pool)
        with WeightSync([own[0].link], transport, policy=Policy(deadline=20)) as sync:
            for number in itertools.count(1):
                assert sync.on_step_end(number, state(float(number))).ok  # type: ignore[union-attr]
                if number == 3:
                    break
        assert same(tensors_in(own[0].held), state(3.0)), "closing the trainer took the weights away"
    assert all(not pool.segments for pool in pools)


@pytest.mark.parametrize("transport", [SharedMemoryTransport, CollectiveTransport, MemoryTransport])
def test_a_forked_child_ends_nothing_of_its_parents(transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It closes what it was left, in the middle of a round: the sockets are both's, the round is not."""
    own, given = engines("e0", "e1"), transport()
    with WeightSync([each.link for each in own], given, policy=quick()) as sync:
        assert sync.on_train_begin(state(1.0)).ok
        stuck = Block()
        own[1].arm("apply", stuck, 0)
        pending = sync.begin(1, state(2.0))
        assert stuck.reached.wait(20)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)  # as it is in a child, which has a copy of all of it
            given.abort()
            given.close()
        stuck.going.set()
        assert pending.wait().ok

"""The ring in device memory, over a device that copies only when it is waited for."""

import gc
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch

from casekit.bench import Bench, quick
from casekit.engines import InThreads, tensors_in
from casekit.levels import eventually, levels
from casekit.scripts import ANY, Block, Injected, Raise, Sleep
from casekit.tensors import same, state
from standin import NAME, StandIn, standin_inlet, standin_ring
from tensorkit import DTYPES, LAYOUTS, laid_out, octets
from weightsync import Policy, WeightSync, joining
from weightsync.cli import doctor
from weightsync.fsm.contract import Bucketful, Ticket
from weightsync.fsm.errors import EngineError, PlanError, SetupError, TransportError
from weightsync.fsm.plan import Plan
from weightsync.fsm.states import Disposition, Outcome
from weightsync.transports import cuda_ipc, cuda_memory, shm_inlet
from weightsync.transports.cuda_ipc import CudaIpcTransport
from weightsync.transports.cuda_memory import CudaMemory
from weightsync.transports.device_segment import Claims, DeviceReach, DeviceSegment
from weightsync.transports.packing import pack_by, unpack
from weightsync.transports.segment import Offer
from weightsync.transports.shm_hub import ShmHub
from weightsync.transports.weights import TorchWeights

pytestmark = pytest.mark.timeout(90)

SUPPORT = Path(__file__).parent / "support"
GO_ON = {"on_engine_failure": "quarantine", "quorum": 1}


def engines(*names: str) -> list[InThreads]:
    """Engines in this process."""
    return [InThreads(name, state(-1), extra_inlets={NAME: standin_inlet}) for name in names]


class TestPacking:
    """Bit for bit, whatever is on either side."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_every_dtype_arrives_in_pieces(self, layout: str) -> None:
        """Split over buckets of an odd size, out of one layout into the next; bools as bytes."""
        tensors = {
            dtype: laid_out(layout, dtype, 3, 5, 4, seed=number) for number, dtype in enumerate(DTYPES)
        }
        others = itertools.cycle(LAYOUTS)
        into = {dtype: laid_out(next(others), dtype, 3, 5, 4, seed=99) for dtype in DTYPES}
        through(TorchWeights.of(tensors).plan(101), tensors, into)
        for dtype, tensor in tensors.items():
            assert octets(into[dtype]) == octets(tensor), dtype

    def test_what_is_cast_has_the_bytes_that_were_digested(self) -> None:
        """Also where a chunk ends within it."""
        tensor = laid_out("transposed", "float32", 65, 129, 40)
        weights = TorchWeights.of({"w": tensor, "scalar": torch.tensor(1.5)}, cast="bfloat16")
        into = {
            "w": torch.empty(65, 129, 40, dtype=torch.bfloat16),
            "scalar": torch.empty((), dtype=torch.bfloat16),
        }
        through(weights.plan(100_001), weights.sources, into)
        assert octets(into["w"]) == octets(weights.snapshot().sources["w"])  # type: ignore[arg-type]
        assert into["scalar"].item() == 1.5

    @pytest.mark.parametrize(
        ("broken", "line"),
        [
            (torch.zeros(1).expand(4), "is an expanded view"),
            (torch.zeros(5), "but the plan says"),
            (None, "there is none of that name"),
        ],
    )
    def test_what_cannot_be_written_is_refused(self, broken: torch.Tensor | None, line: str) -> None:
        """Before anything is queued."""
        tensors = {"w": torch.ones(4)}
        with pytest.raises(PlanError, match=line):
            through(TorchWeights.of(tensors).plan(64), tensors, {"w": broken} if broken is not None else {})

    def test_memory_that_was_given_away_is_refused(self) -> None:
        """On either side."""
        plan = TorchWeights.of({"w": torch.ones(4)}).plan(64)
        gone = torch.ones(4)
        gone.untyped_storage().resize_(0)
        for tensors, into in (({"w": gone}, {"w": torch.ones(4)}), ({"w": torch.ones(4)}, {"w": gone})):
            with pytest.raises(PlanError, match="its memory was given away"):
                through(plan, tensors, into)

    def test_a_bucket_of_another_size_is_refused(self) -> None:
        """It is not what the plan says."""
        plan = TorchWeights.of({"w": torch.ones(4)}).plan(64)
        data = torch.zeros(15, dtype=torch.uint8)
        with pytest.raises(TransportError, match="arrived with 15 bytes, not 16"):
            unpack(plan, Bucketful(0, data, copy=StandIn().copy), {"w": torch.ones(4)})


def through(plan: Plan, tensors: Mapping[str, Any], into: Mapping[str, torch.Tensor]) -> None:
    """Every bucket, packed and unpacked."""
    memory = StandIn()
    for bucket in plan.buckets:
        data = torch.empty(bucket.nbytes, dtype=torch.uint8)
        pack_by(memory.copy, plan, bucket, tensors, data)
        memory.finish()
        unpack(plan, Bucketful(bucket.index, data, copy=memory.copy), into)
        memory.finish()


class TestOrder:
    """Shown when it is written, let go of when it is read."""

    def test_it_is_waited_for_before_it_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """For each bucket, on both sides, in one order of all threads."""
        events: list[tuple[Any, ...]] = []
        lock = threading.Lock()

        def note(*event: Any) -> None:
            with lock:
                events.append(event)

        copy, finish, tell = StandIn.copy, StandIn.finish, ShmHub.tell
        say = shm_inlet._ShmInlet._say

        def copies(self: StandIn, into: torch.Tensor, of: torch.Tensor) -> None:
            note("copied", id(self))
            copy(self, into, of)

        def finishes(self: StandIn) -> None:
            finish(self)
            note("finished", id(self))

        def tells(self: ShmHub, kind: str, whom: Any, **body: Any) -> None:
            note("shown", id(device), body.get("bucket"))
            tell(self, kind, whom, **body)

        def says(self: Any, wire: Any, kind: str, **body: Any) -> None:
            if kind == "released":
                note("released", id(self._reach._memory), body["bucket"])
            say(self, wire, kind, **body)

        monkeypatch.setattr(StandIn, "copy", copies)
        monkeypatch.setattr(StandIn, "finish", finishes)
        monkeypatch.setattr(ShmHub, "tell", tells)
        monkeypatch.setattr(shm_inlet._ShmInlet, "_say", says)
        device, own = StandIn(), engines("e0", "e1")
        with WeightSync(
            [each.link for each in own], standin_ring(2, device), policy=quick(bucket_bytes=64)
        ) as sync:
            assert sync.on_train_begin(state(3.0)).ok
        said = [(when, event) for when, event in enumerate(events) if event[0] in ("shown", "released")]
        assert {event[0] for _, event in said} == {"shown", "released"}
        for when, event in said:
            before = [each[0] for each in events[:when] if each[1] == event[1] and each[0] in _WORK]
            assert before[-1] == "finished", f"{event} is said before it is waited for"
        assert device.settled == 1, "what training has queued was not waited for"
        assert all(same(tensors_in(each.held), state(3.0)) for each in own)


_WORK = ("copied", "finished")


class _Keeper(InThreads):
    """Keeps views of the buckets that it is shown."""

    def __init__(self, name: str) -> None:
        super().__init__(name, state(-1), extra_inlets={NAME: standin_inlet})
        self.kept: list[torch.Tensor] = []
        self.receiver._unpack = self._keeping

    def _keeping(self, plan: Plan, bucket: Bucketful, into: Mapping[str, Any], /) -> None:
        unpack(plan, bucket, into)
        self.kept.append(bucket.data[:4])


class TestRounds:
    """Rounds as they are over memory of the host."""

    def test_rounds_leave_nothing_behind_and_collect_no_garbage(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Twenty rounds of which some fail: descriptors and threads as after the first, then no block."""

        def refused(*_: Any) -> int:
            raise AssertionError("a full collection was asked for")

        device, own = StandIn(), engines("e0", "e1")
        with Bench(own, standin_ring(2, device), policy=quick(bucket_bytes=64)) as bench:
            bench.works(state(1.0))
            base = levels()
            monkeypatch.setattr(gc, "collect", refused)
            for number in range(2, 21):
                if number % 5 == 0:
                    own[1].arm("apply", Raise(Injected("no")), 1)
                    bench.fails(Injected, engine="e1", phase=("Broadcasting", "Awaiting"), bucket=ANY)
                bench.works(state(float(number)))
                assert device.kept <= 2
            monkeypatch.undo()
            assert eventually(lambda: not levels().above(base, 1)), levels().above(base, 1)
        assert device.kept == 0, "a block outlives its transport"

    def test_a_view_that_is_kept_fails_the_round_by_name(self) -> None:
        """As with memory of the host."""
        with Bench([*engines("e0"), _Keeper("keeps")], standin_ring()) as bench:
            result = bench.run(state(1.0))
            assert isinstance(result.error, EngineError)
            assert "keeps a view of bucket 0" in str(result.error)

    def test_a_reader_that_was_cut_keeps_its_slot(self) -> None:
        """It reads on when the round goes on without it: the bytes that it was shown."""
        own, stuck, seen = engines("e0", "e1"), Block(), []

        def looking(plan: Plan, bucket: Bucketful, into: Mapping[str, Any], /) -> None:
            if bucket.index == 0 and own[1].script.armed("applied"):
                before = bucket.data.clone()
                stuck()
                seen.append((before, bucket.data.clone()))
            unpack(plan, bucket, into)

        own[1].receiver._unpack = looking
        policy = quick(deadline=4.0, rest=0.01, longest_rest=0.01, **GO_ON)
        with Bench(own, standin_ring(1), policy=policy) as bench:
            bench.works(state(1.0))
            own[1].arm("applied", Sleep(0.0))
            result = bench.run(state(2.0))
            assert result.outcome is Outcome.partial
            assert result.serving(Disposition.serving_new) == ("e0",)
            stuck.going.set()
            assert eventually(lambda: bool(seen))
            assert torch.equal(*seen[0]), "it was written under the reader"
            own[1].disarm()
            assert eventually(lambda: bench.run(state(3.0)).outcome is Outcome.complete)
            assert same(tensors_in(own[1].held), state(3.0))

    def test_it_goes_on_without_an_engine(self) -> None:
        """Which is what it declares."""
        own = engines("e0", "e1")
        ring = standin_ring()
        told = ring.capabilities
        assert (told.survives_loss, told.aliases, told.cross_host) == (True, False, False)
        policy = quick(rest=0.01, longest_rest=0.01, **GO_ON)
        with Bench(own, ring, policy=policy) as bench:
            own[1].arm("apply", Raise(Injected("no")), 1)
            assert bench.meets(Injected("no"), state(2.0)).outcome is Outcome.partial

    def test_an_engine_that_has_no_inlet_of_the_kind_says_so(self) -> None:
        """By the name of the transport."""
        own = InThreads("e0", state(-1))
        with Bench([own], standin_ring()) as bench:
            assert "no receiving half for transport 'standin'" in str(bench.run(state(1.0)).error)


READER = """
import sys
from standin import StandIn
from weightsync.transports.device_segment import DeviceReach
from weightsync.transports.segment import Offer
size, *handle = map(int, sys.stdin.readline().split())
reached = DeviceReach(StandIn()).map("s", size, Offer(handle=tuple(handle)))
view, _ = reached.lease(0, 4)
print(view.tolist(), flush=True)
sys.stdin.readline()
del view, reached
print("let go", flush=True)
sys.stdin.readline()
"""


class Reader:
    """Another process that opens a block."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    def reads(self, segment: DeviceSegment) -> str:
        """Let it open the block, and say what it sees there."""
        offer = segment.offer("reader", self._process.pid)
        return self.say(" ".join(map(str, (segment.size, *offer.handle))))

    def say(self, line: str) -> str:
        """Say something, and hear the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def reader() -> Iterator[Reader]:
    """One that is gone afterwards."""
    one = Reader()
    yield one
    one.kill()


class TestClaims:
    """A block is kept until every process that was offered it has let go, or is dead."""

    def test_a_reader_that_lives_keeps_it(self, reader: Reader) -> None:
        """Given back by the trainer, kept for the reader; collected when that has let go."""
        device = StandIn()
        claims = Claims(device)
        segment = DeviceSegment(device, claims, 64)
        segment.part(0, 4).copy_(torch.arange(4))
        assert reader.reads(segment) == "[0, 1, 2, 3]"
        segment.close()
        assert device.kept == 1, "it was given back under a reader"
        assert reader.say("") == "let go"
        device.collect()
        assert device.kept == 0
        claims.close()

    @pytest.mark.parametrize("first", ["killed", "closed"])
    def test_a_reader_that_was_killed_does_not(self, reader: Reader, first: str) -> None:
        """Whether it dies before the trainer gives the block back, or after that."""
        device = StandIn()
        claims = Claims(device)
        segment = DeviceSegment(device, claims, 64)
        assert reader.reads(segment) == str([0xA5] * 4)
        if first == "closed":
            segment.close()
            assert device.kept == 1
        reader.kill()
        segment.close()
        claims.close()
        assert device.kept == 0, "the dead keep memory of the device"

    def test_what_is_offered_twice_is_declined_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two ranks of one process: the second offer is a claim, too, and is given up."""
        device = StandIn()
        segment = DeviceSegment(device, Claims(device), 64)
        monkeypatch.setattr(os, "getpid", lambda: -1)  # so that it is another process's
        offers = [segment.offer("p", 0), segment.offer("p", 0)]
        monkeypatch.undo()
        offers = [Offer(handle=(os.getpid(), *each.handle[1:])) for each in offers]
        reach = DeviceReach(StandIn())
        process = shm_inlet._Process()
        for offer in offers:
            process.map("folder", segment.id, 64, offer, reach)
        process.keep("folder", [segment.id], [])
        segment.close()
        assert device.kept == 0, "a claim was left"

    def test_within_a_process_nothing_is_kept(self) -> None:
        """But by its leases."""
        device = StandIn()
        segment = DeviceSegment(device, Claims(device), 64)
        offer = segment.offer("p", os.getpid())
        assert segment.offer("p", os.getpid()) == offer
        reached = DeviceReach(StandIn()).map("s", 64, offer)
        view, _ = reached.lease(8, 8)
        before = (reached.leased, device.kept)
        segment.close()
        closed = (reached.leased, device.kept)
        del view
        device.collect()
        assert (before, closed, (reached.leased, device.kept)) == ((True, 1), (True, 1), (False, 0))
        with pytest.raises(TransportError, match="has given its device memory back"):
            reached.lease(0, 1)

    def test_what_was_announced_has_to_be_there(self) -> None:
        """Sizes, places and kinds are looked at before anything is read."""
        device = StandIn()
        segment, reach = DeviceSegment(device, Claims(device), 64), DeviceReach(StandIn())
        offer = segment.offer("p", os.getpid())
        with pytest.raises(TransportError, match="65 bytes was announced, and there are 64"):
            reach.map("s", 65, offer)
        with pytest.raises(TransportError, match="bytes 60 to 68 are not in a segment of 64"):
            reach.map("s", 64, offer).lease(60, 8)
        with pytest.raises(TransportError, match="is no export"):
            reach.map("s", 64, Offer(handle=("this process", "gone")))
        with pytest.raises(TransportError, match="came with descriptors"):
            reach.map("s", 64, Offer(fds=(os.dup(0),)))
        segment.close()


WITHOUT = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


class TestWithoutDevice:
    """What is said where there is no GPU."""

    @WITHOUT
    def test_the_set_up_is_refused_in_one_line(self) -> None:
        """By the object and by the name."""
        ways: list[Callable[[], object]] = [
            CudaIpcTransport,
            lambda: joining.transport_for("cuda_ipc", Policy()),
        ]
        for make in ways:
            with pytest.raises(
                SetupError, match=r"^transport 'cuda_ipc' needs a GPU: .*; use 'shm' on this host$"
            ):
                make()
        with pytest.raises(SetupError, match="slots"):
            CudaIpcTransport(slots=0)

    @WITHOUT
    def test_an_engine_cannot_open_what_it_is_offered(self) -> None:
        """It says that it has no GPU, and not what torch says of that."""
        export = ("GPU-1", b"", 64, 0, b"", 0, b"", True)
        with pytest.raises(TransportError, match="cannot be reached from this process: torch"):
            CudaMemory().open(export, 64)

    def test_an_export_of_another_kind_is_refused(self) -> None:
        """Before torch sees it."""
        with pytest.raises(TransportError, match=r"\(int, str\) is no export of CUDA memory"):
            CudaMemory().withdraw((1, "x"))

    def test_a_gpu_that_is_not_seen_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With what to do."""
        monkeypatch.setattr(cuda_memory, "lacking", lambda: "")
        monkeypatch.setattr(cuda_memory, "_visible", lambda: {"GPU-2": 0})
        export = ("GPU-1", b"", 64, 0, b"", 0, b"", True)
        with pytest.raises(TransportError, match="on GPU GPU-1, which this process does not see"):
            CudaMemory().open(export, 64)
        with pytest.raises(TransportError, match="63 bytes was announced, and there are 64"):
            CudaMemory().open(export, 63)

    def test_what_torch_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its values in its order; the GPU by its name on the way, by its number at the end of it."""
        asked: list[tuple[Any, ...]] = []

        class Exports:
            @staticmethod
            def _new_shared_cuda(*values: Any) -> None:
                asked.append(values)
                raise RuntimeError("no such device")

            @staticmethod
            def _release_ipc_counter(*values: Any, device: int) -> None:
                asked.append((*values, device))

        shared = (3, b"memory", 64, 128, b"counter", 5, b"event", True)
        block: Any = SimpleNamespace(
            device=SimpleNamespace(index=3),
            untyped_storage=lambda: SimpleNamespace(_share_cuda_=lambda: shared),
        )
        monkeypatch.setattr(cuda_memory, "_IPC", Exports)
        monkeypatch.setattr(cuda_memory, "lacking", lambda: "")
        monkeypatch.setattr(cuda_memory, "_uuid", "GPU-{}".format)
        monkeypatch.setattr(cuda_memory, "_visible", lambda: {"GPU-3": 0})
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        handle = tuple(msgpack.unpackb(msgpack.packb(list(CudaMemory().export(block)))))
        assert handle == ("GPU-3", *shared[1:])
        CudaMemory().withdraw(handle)
        with pytest.raises(TransportError, match="memory on GPU GPU-3 cannot be mapped: no such device"):
            CudaMemory().open(handle, 64)
        assert asked == [(b"counter", 5, 0), (0, *shared[1:])]

    def test_an_engine_knows_the_transport(self) -> None:
        """Every engine of the library has its receiving half; a ticket for it is looked at."""
        plan = TorchWeights.of({"w": torch.ones(4)}).plan(64)
        receiver = InThreads("e0", state(-1)).receiver
        assert receiver._inlets["cuda_ipc"] is cuda_ipc.cuda_ipc_inlet
        with pytest.raises(TransportError, match="fingerprint"):
            cuda_ipc.cuda_ipc_inlet(Ticket("cuda_ipc", {}), None, plan, 1.0)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("torch_version", "devices", "verdict", "note"),
        [
            ("2.13.0+cpu", (), "no", "this torch is built without CUDA"),
            ("2.13.0+cu130", (), "no", "no GPU is to be seen here"),
            ("2.13.0+cu130", ("/dev/nvidiactl",), "ok", "not run on a GPU"),
            ("2.13.0+rocm7", ("/dev/kfd",), "ok", "not run on a GPU"),
        ],
    )
    def test_the_doctor_says_why(
        self,
        torch_version: str,
        devices: tuple[str, ...],
        verdict: str,
        note: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Without importing torch."""
        version = doctor._version
        monkeypatch.setattr(
            doctor, "_version", lambda name: torch_version if name == "torch" else version(name)
        )
        monkeypatch.setattr(doctor, "_device", lambda path: path in devices)
        (line,) = (each for each in doctor.findings() if each.what == "transport cuda_ipc")
        assert line.verdict == verdict
        assert note in line.note

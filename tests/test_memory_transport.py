"""Engines in the trainer's process share one buffer, and see what is theirs, in turn, and nothing else."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.fsm.contract import Bucketful, Ticket, Transport
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import PlanError, StaleSession, TransportError
from weightsync.fsm.plan import DTYPE_SIZES
from weightsync.fsm.receipt import Participant, Receipt
from weightsync.testing.recording import RecordingPort
from weightsync.testing.sending import Sending
from weightsync.testing.small_engine import SmallEngine, SmallLink
from weightsync.transports import memory
from weightsync.transports.channel import Channel, Frame
from weightsync.transports.memory import MemoryTransport, memory_inlet
from weightsync.transports.packing import pack
from weightsync.transports.weights import TorchWeights

pytestmark = pytest.mark.timeout(60)

PATIENCE = 10.0
"""Seconds until something that should happen at once counts as never."""

SESSION = Session("r1", 1, 1)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, list[int]]:
    """Everything that has to arrive."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.detach().unsqueeze(-1).view(torch.uint8).flatten().tolist(),
    )


def constants(*values: float) -> dict[str, torch.Tensor]:
    """One tensor for each value, filled with it: 64 bytes, a bucket of its own."""
    return {f"w{index}": torch.full((16,), float(value)) for index, value in enumerate(values)}


def sending(
    transport: Transport,
    weights: TorchWeights,
    *engines: SmallEngine,
    bucket_bytes: int = 64,
    session: Session = SESSION,
    limit: float = 20.0,
    quorum: int | None = None,
) -> Sending:
    """A round with these engines, which have opened its session."""
    plan = weights.plan(bucket_bytes)
    for engine in engines:
        engine.open(session, plan, weights.digest())
    links = [SmallLink(engine) for engine in engines]
    return Sending(transport, weights, plan, links, session, limit, quorum)


@contextmanager
def aside() -> Iterator[Callable[..., Future[object]]]:
    """Calls in other threads, which are not waited for if the test has failed already."""
    pool = ThreadPoolExecutor()
    try:
        yield pool.submit
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def eventually(ready: Callable[[], object]) -> bool:
    """Whether it becomes true within the patience."""
    end = time.monotonic() + PATIENCE
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


class Pause:
    """Stops an engine at a bucket, until it is let go on."""

    def __init__(self, bucket: int) -> None:
        self.bucket = bucket
        self.reached, self.going = threading.Event(), threading.Event()

    def __call__(self, bucket: int) -> None:
        """Called by the engine with each bucket."""
        if bucket == self.bucket:
            self.reached.set()
            assert self.going.wait(PATIENCE)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After every test the table of endpoints is empty."""
    yield
    assert eventually(lambda: not memory._endpoints)


class TestContent:
    @settings(max_examples=60)
    @given(data=st.data(), limit=st.sampled_from([1, 5, 16, 64, 1000]))
    def test_any_state_arrives_for_any_limit(self, data: st.DataObject, limit: int) -> None:
        """Random dtypes, shapes and strides, in buckets smaller and larger than the tensors."""
        state = {}
        for name in data.draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=6)):
            dtype = getattr(torch, data.draw(st.sampled_from([n for n in DTYPE_SIZES if hasattr(torch, n)])))
            shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
            count = torch.Size(shape).numel()
            tensor = (
                torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)
            )
            state[name] = tensor.permute(data.draw(st.permutations(range(len(shape)))))
        engine = SmallEngine("a")
        sending(MemoryTransport(), TorchWeights.of(state), engine, bucket_bytes=limit).run()
        engine.commit(SESSION)
        assert {name: bits(each) for name, each in engine.tensors.items()} == {
            name: bits(each) for name, each in state.items()
        }

    def test_both_names_of_a_tied_tensor_are_served(self) -> None:
        """An engine that keeps them apart gets the new values under both, in each round anew."""
        embed, transport, engine = torch.zeros(4), MemoryTransport(), SmallEngine("a")
        for epoch in (1, 2):
            embed.fill_(epoch)
            session = Session(f"r{epoch}", epoch, epoch)
            weights = TorchWeights.of({"embed": embed, "head": embed})
            sending(transport, weights, engine, session=session).run()
            engine.commit(session)
            assert engine.tensors["embed"].tolist() == engine.tensors["head"].tolist() == [epoch] * 4

    def test_facts_come_in_order(self) -> None:
        """Each bucket, then all of them; and the idle clock is fed."""
        run = sending(MemoryTransport(), TorchWeights.of(constants(1, 2, 3, 4)), SmallEngine("a"))
        run.run()
        assert run.port("broadcast").fired == [*(("bucket_sent", index) for index in range(4)), ("all_sent",)]
        assert run.port("broadcast").moves > 0


class TestSharing:
    def test_a_buffer_is_not_used_again_before_all_have_let_go(self) -> None:
        """One engine is slow with the first bucket: the third, which needs its memory, waits for it."""
        pause = Pause(0)
        slow, quick = SmallEngine("slow", fault=pause), SmallEngine("quick")
        run = sending(MemoryTransport(checked=True), TorchWeights.of(constants(1, 2, 3)), slow, quick)
        with aside() as call:
            whole = call(run.run)
            assert pause.reached.wait(PATIENCE)
            assert eventually(lambda: quick.machine.facts.frames == 2)
            time.sleep(0.1)
            assert run.port("broadcast").fired == [("bucket_sent", 0), ("bucket_sent", 1)]
            pause.going.set()
            whole.result(PATIENCE)
        for engine in (slow, quick):
            engine.commit(SESSION)
            assert [each.unique().tolist() for each in engine.tensors.values()] == [[1], [2], [3]]

    def test_a_view_that_is_kept_too_long_is_noticed_in_checked_mode(self) -> None:
        """A bucket is valid until the next one is asked for; after that it is overwritten with 0xFF."""
        kept: list[torch.Tensor] = []
        weights, engine = TorchWeights.of(constants(1, 2, 3)), SmallEngine("a")

        class Keeping(SmallLink):
            def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
                def keep() -> None:
                    kept.extend(frame.data for frame in list_frames(ticket, weights, session))

                threading.Thread(target=keep, daemon=True).start()
                return Future()

        run = sending(MemoryTransport(checked=True), weights, engine)
        run.links = [Keeping(SmallEngine("keeper")), SmallLink(engine)]
        run.open()
        run.broadcast()
        assert eventually(lambda: len(kept) == 3)
        assert eventually(lambda: all(view.unique().tolist() == [0xFF] for view in kept))
        run.transport.abort()

    def test_a_fenced_engine_never_sees_new_bytes(self) -> None:
        """It is not waited for, and what it holds stays as it was: the sender takes other memory."""
        seen: list[list[int]] = []
        pause = Pause(0)
        weights = TorchWeights.of(constants(1, 2, 3, 4, 5))

        stuck, good = SmallEngine("stuck", fault=pause), SmallEngine("good")
        run = sending(MemoryTransport(checked=True), weights, stuck, good, quorum=1)
        views: list[torch.Tensor] = []
        publish = Channel.publish

        def spy(channel: Channel, frame: Frame) -> None:
            views.append(frame.data)
            publish(channel, frame)

        with pytest.MonkeyPatch.context() as patch, aside() as call:
            patch.setattr(Channel, "publish", spy)
            broadcast = call(lambda: (run.open(), run.broadcast()))
            assert pause.reached.wait(PATIENCE)
            run.port("broadcast").fence(Participant("stuck"))
            broadcast.result(PATIENCE)
            seen.append(views[0].view(torch.float32).unique().tolist())
            collect = RecordingPort(SESSION, [Participant("good")])
            run.transport.collect(run.plan, collect)
            pause.going.set()
        run.transport.abort()
        assert seen == [[1.0]]
        assert views[0].data_ptr() not in {view.data_ptr() for view in views[1:]}
        assert list(collect.receipts) == ["good"]
        good.commit(SESSION)
        assert good.tensors["w4"].unique().tolist() == [5]

    def test_buffers_serve_the_next_round(self) -> None:
        """Fresh memory is dear: after a good round it is kept, after an aborted one it is not."""
        transport = MemoryTransport()
        weights = TorchWeights.of(constants(1, 2))
        used = []
        for epoch in (1, 2):
            run = sending(transport, weights, SmallEngine("a"), session=Session(f"r{epoch}", epoch, epoch))
            run.run()
            used.append(transport._standing._spare)
        assert used[0] is used[1] is not None
        run = sending(transport, weights, SmallEngine("a"), session=Session("r3", 3, 3))
        run.open()
        transport.abort()
        assert transport._standing._spare is None

    def test_a_buffer_that_somebody_holds_does_not_serve_the_next_round(self) -> None:
        """A fenced engine is still in it when the others are through: the next round takes fresh memory."""
        pause = Pause(0)
        stuck, good, transport = SmallEngine("stuck", fault=pause), SmallEngine("good"), MemoryTransport()
        run = sending(transport, TorchWeights.of(constants(1)), stuck, good, quorum=1)
        run.open()
        run.broadcast()
        assert pause.reached.wait(PATIENCE)
        run.port("collect").fence(Participant("stuck"))
        assert list(run.collect().receipts) == ["good"]
        transport.clean()
        assert transport._standing._spare is None
        pause.going.set()


class TestLosses:
    def test_the_sender_gets_the_very_exception(self) -> None:
        """An engine that fails at a bucket is lost with its own error; the others receive everything."""
        failure = RuntimeError("mine")

        def fail(bucket: int) -> None:
            if bucket == 1:
                raise failure

        bad, good = SmallEngine("bad", fault=fail), SmallEngine("good")
        run = sending(MemoryTransport(), TorchWeights.of(constants(1, 2, 3, 4)), bad, good, quorum=1)
        start = time.monotonic()
        port = run.run()
        assert time.monotonic() - start < 2
        assert run.errors == {"bad": failure}
        assert run.errors["bad"] is failure
        assert list(port.receipts) == ["good"]

    def test_a_link_that_raises_is_the_loss_of_its_engine(self) -> None:
        """The other engines are started all the same."""
        failure = OSError("no route")

        class Broken(SmallLink):
            def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
                raise failure

        weights, good = TorchWeights.of(constants(1)), SmallEngine("good")
        plan = weights.plan(64)
        good.open(SESSION, plan)
        links = [Broken(SmallEngine("bad")), SmallLink(good)]
        run = Sending(MemoryTransport(), weights, plan, links, SESSION, quorum=1)
        port = run.run()
        assert run.port("open").errors["bad"] is failure
        assert list(port.receipts) == ["good"]

    def test_a_cancelled_call_is_a_loss(self) -> None:
        """A future that somebody cancelled proves nothing."""

        class Cancelled(SmallLink):
            def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
                future: Future[tuple[Receipt, ...]] = Future()
                future.cancel()
                return future

        weights = TorchWeights.of(constants(1))
        run = Sending(MemoryTransport(), weights, weights.plan(64), [Cancelled(SmallEngine("a"))], SESSION)
        run.run()
        assert "cancelled" in str(run.errors["a"])

    def test_an_engine_that_stops_is_not_waited_for(self) -> None:
        """Its end of the session closes the inlet: it gets an error, and the others everything."""
        pause = Pause(1)
        leaving, good = SmallEngine("leaving"), SmallEngine("good", fault=pause)
        run = sending(MemoryTransport(), TorchWeights.of(constants(1, 2, 3, 4)), leaving, good, quorum=1)
        with aside() as call:
            whole = call(run.run)
            assert pause.reached.wait(PATIENCE)
            assert eventually(lambda: leaving.machine.facts.frames == 3)
            leaving.abort(SESSION)
            pause.going.set()
            whole.result(PATIENCE)
        assert "stopped receiving" in str(run.errors["leaving"])
        assert list(run.port("collect").receipts) == ["good"]

    def test_a_phase_that_ends_names_who_held_it_up(self) -> None:
        """The error says which engine did not let go of which bucket."""
        pause = Pause(0)
        run = sending(
            MemoryTransport(),
            TorchWeights.of(constants(1, 2, 3)),
            SmallEngine("slow", fault=pause),
            limit=0.3,
        )
        run.open()
        with pytest.raises(TransportError, match=r"bucket 2 .*engine slow rank 0 did not let go of bucket 0"):
            run.broadcast()
        run.transport.abort()
        pause.going.set()

    def test_a_receiver_does_not_wait_for_ever(self) -> None:
        """A sender that sends nothing is given up after the engine's own limit."""
        weights, transport = TorchWeights.of(constants(1)), MemoryTransport()
        ticket = tickets(transport, weights)[0]
        with pytest.raises(TransportError, match=r"waited 0\.1 s for bucket 0"):
            list_frames(ticket, weights, SESSION, limit=0.1)
        transport.abort()

    def test_an_error_of_packing_comes_out(self) -> None:
        """A tensor that changed since the plan was made is named."""
        state = {"a": torch.zeros(4), "b": torch.zeros(4)}
        weights = TorchWeights.of(state)
        run = sending(MemoryTransport(), weights, SmallEngine("a"))
        weights.tensors["b"].resize_(3)
        with pytest.raises(PlanError, match="'b'"):
            run.run()


def tickets(transport: MemoryTransport, weights: TorchWeights, session: Session = SESSION) -> list[Ticket]:
    """Open a round with an engine that only keeps its ticket."""
    kept: list[Ticket] = []

    class Keeping(SmallLink):
        def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
            kept.append(ticket)
            return Future()

    Sending(transport, weights, weights.plan(64), [Keeping(SmallEngine("a"))], session).open()
    return kept


def list_frames(
    ticket: Ticket, weights: TorchWeights, session: Session, limit: float = 1.0
) -> list[Bucketful]:
    """Receive with a ticket, without an engine around it."""
    with memory_inlet(ticket, session, weights.plan(64), limit).buckets() as frames:
        return list(frames)


class TestTickets:
    def test_another_session_is_refused(self) -> None:
        """A ticket is good for one (round, epoch, version)."""
        weights, transport = TorchWeights.of(constants(1)), MemoryTransport()
        (ticket,) = tickets(transport, weights)
        for other in (Session("r1", 2, 1), Session("r2", 1, 1), Session("r1", 1, 2)):
            with pytest.raises(StaleSession, match=rf"round {other.round} .epoch {other.epoch}"):
                list_frames(ticket, weights, other)
        transport.abort()

    def test_a_frame_of_another_session_is_refused(self) -> None:
        """Each frame says whose it is, and the receiver looks."""
        weights, transport = TorchWeights.of(constants(1)), MemoryTransport()
        (ticket,) = tickets(transport, weights)
        endpoint = memory._endpoints[ticket.values["key"]]
        endpoint.channel.publish(Frame(Session("r0", 0, 0), 0, torch.zeros(64, dtype=torch.uint8)))
        with pytest.raises(StaleSession, match="refuses a frame of round r0"):
            list_frames(ticket, weights, SESSION)
        transport.abort()

    def test_another_plan_is_refused(self) -> None:
        """An engine that was opened with other tensors reads nothing."""
        transport = MemoryTransport()
        (ticket,) = tickets(transport, TorchWeights.of(constants(1)))
        with pytest.raises(PlanError, match="another plan"):
            list_frames(ticket, TorchWeights.of(constants(1, 2)), SESSION)
        transport.abort()

    def test_a_ticket_is_good_once(self) -> None:
        """A second reception would share the acknowledgements of the first."""
        weights, transport = TorchWeights.of(constants(1)), MemoryTransport()
        (ticket,) = tickets(transport, weights)
        plan = weights.plan(64)
        with (
            memory_inlet(ticket, SESSION, plan, 1).buckets(),
            pytest.raises(TransportError, match="good for one"),
        ):
            list_frames(ticket, weights, SESSION)
        transport.abort()

    @pytest.mark.parametrize("end", ["clean", "abort", "close"])
    def test_a_ticket_leads_nowhere_after_the_round(self, end: str) -> None:
        """An engine that comes late finds nothing, whichever end the round took."""
        weights, transport = TorchWeights.of(constants(1)), MemoryTransport()
        (ticket,) = tickets(transport, weights)
        getattr(transport, end)()
        with pytest.raises(TransportError, match="leads nowhere"):
            list_frames(ticket, weights, SESSION)

    @pytest.mark.parametrize("rank", [1, -1, "0", None, True])
    def test_a_rank_that_there_is_not_is_refused(self, rank: object) -> None:
        """The values of a ticket come from elsewhere, and are checked."""
        weights, transport = TorchWeights.of(constants(1)), MemoryTransport()
        (ticket,) = tickets(transport, weights)
        with pytest.raises(TransportError, match="none of them is"):
            list_frames(Ticket("memory", {**ticket.values, "rank": rank}), weights, SESSION)
        transport.abort()

    def test_tickets_are_plain_and_do_not_repeat(self) -> None:
        """They hold nothing but numbers and text, and one cannot be guessed from another."""
        weights, transport = TorchWeights.of(constants(1)), MemoryTransport()
        (first,), (second,) = tickets(transport, weights), tickets(transport, weights)
        assert {type(value) for value in first.values.values()} <= {str, int}
        assert first.values["key"] != second.values["key"]
        assert len(first.values["key"]) >= 32
        transport.abort()


class TestOrder:
    def test_an_abort_before_open_leaves_nothing(self) -> None:
        """The round moved on before the transport's thread began: no endpoint stays behind."""
        run = sending(MemoryTransport(), TorchWeights.of(constants(1)), SmallEngine("a"))
        run.port("open").close()
        run.open()
        assert not memory._endpoints

    def test_an_abort_beside_open_leaves_nothing(self) -> None:
        """The round moves on while its endpoints are being made: they go again, though no abort comes."""
        weights, engine = TorchWeights.of(constants(1)), SmallEngine("a")
        run = sending(MemoryTransport(), weights, engine)

        class Closing(SmallLink):
            def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
                run.transport.abort()  # which finds nothing of this round later than this
                run.port("open").close()
                return super().receive(session, ticket)

        run.links = [Closing(engine), SmallLink(SmallEngine("never asked"))]
        run.open()
        assert not memory._endpoints
        assert eventually(lambda: engine.machine.state.name == "Serving")

    def test_phases_without_open_are_refused(self) -> None:
        """A round that is not open cannot be sent."""
        run = sending(MemoryTransport(), TorchWeights.of(constants(1)), SmallEngine("a"))
        with pytest.raises(TransportError, match="no round is open"):
            run.broadcast()

    def test_it_says_what_it_can_do(self) -> None:
        """The declared capabilities are what the tests above show."""
        transport: Transport = MemoryTransport()
        able = dataclasses.asdict(transport.capabilities)
        assert transport.name == "memory"
        assert able == {
            "stages": True, "aliases": False, "cross_host": False, "survives_loss": True, "dtypes": None,
            "cross_process": False, "in_cluster": False,
        }  # fmt: skip


def test_the_sender_packs_while_engines_read() -> None:
    """Two buffers: bucket k + 1 is there before anybody has let go of bucket k."""
    pause = Pause(0)
    run = sending(MemoryTransport(), TorchWeights.of(constants(1, 2, 3)), SmallEngine("a", fault=pause))
    packed: list[int] = []
    with pytest.MonkeyPatch.context() as patch, aside() as call:

        def spy(plan: object, bucket: object, *rest: object) -> None:
            pack(plan, bucket, *rest)  # type: ignore[arg-type]
            packed.append(bucket.index)  # type: ignore[attr-defined]

        patch.setattr(memory, "pack", spy)
        whole = call(run.run)
        assert pause.reached.wait(PATIENCE)
        assert eventually(lambda: packed == [0, 1])
        pause.going.set()
        whole.result(PATIENCE)
    assert packed == [0, 1, 2]

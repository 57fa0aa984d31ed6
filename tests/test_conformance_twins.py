"""Transports that break their contract on purpose: the kit catches each one, by the right check and rule."""

import os
import socket
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from weightsync.fsm.contract import (
    Bucketful,
    Capabilities,
    EngineLink,
    Inlet,
    Port,
    Ticket,
    Transport,
    Weights,
)
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import PortClosed, TransportError
from weightsync.fsm.plan import Plan
from weightsync.fsm.receipt import Participant, Receipt, _carried
from weightsync.testing.conformance import TRANSPORT_CHECKS, TRANSPORT_RULES, TransportConformance, Violation
from weightsync.testing.conformance.peers import Peer, ThreadPeer
from weightsync.transports import memory
from weightsync.transports.buffers import Pair
from weightsync.transports.collective import CollectiveTransport, collective_inlet
from weightsync.transports.memory import MemoryTransport, memory_inlet
from weightsync.transports.receptions import Receptions

pytestmark = [pytest.mark.mutation, pytest.mark.timeout(120)]

CHECKS = {check.name: check for check in TRANSPORT_CHECKS}
Patch = pytest.MonkeyPatch


class Twin:
    """A transport that keeps its contract, for a mutant to spoil."""

    def __init__(self, inner: Transport | None = None) -> None:
        self.inner: Transport = inner or MemoryTransport()

    @property
    def name(self) -> str:
        """As its engines know it."""
        return self.inner.name

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self.inner.capabilities

    def port(self, port: Port) -> Any:
        """The port as the transport inside sees it."""
        return port

    def open(
        self, plan: Plan, weights: Weights, engines: Mapping[Participant, EngineLink], port: Port
    ) -> Any:
        """The first phase."""
        return self.inner.open(plan, weights, engines, self.port(port))

    def broadcast(self, plan: Plan, weights: Weights, port: Port) -> Any:
        """The second."""
        return self.inner.broadcast(plan, weights, self.port(port))

    def collect(self, plan: Plan, port: Port) -> Any:
        """The third."""
        return self.inner.collect(plan, self.port(port))

    def clean(self) -> None:
        """The good end."""
        self.inner.clean()

    def abort(self) -> None:
        """The bad end."""
        self.inner.abort()

    def close(self) -> None:
        """The last."""
        self.inner.close()


class Filter:
    """A port for a mutant to spoil."""

    def __init__(self, port: Any) -> None:
        self.inner = port

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def filtered(kind: Callable[[Any], Filter], *, base: type[Twin] = Twin) -> type[Twin]:
    """A transport whose ports are spoilt so."""

    class Filtered(base):  # type: ignore[valid-type,misc]
        def port(self, port: Port) -> Any:
            """As it should not be."""
            return kind(port)

    return Filtered


# -- what ports are told ----------------------------------------------------------------------------------


class TwiceSent(Filter):
    """Tells of each bucket twice."""

    def bucket_sent(self, index: int) -> None:
        """As it should not be."""
        for _ in range(2):
            self.inner.bucket_sent(index)


class TwiceAcked(Filter):
    """Tells of each receipt twice."""

    def acked(self, engine: Participant, receipts: tuple[Receipt, ...]) -> None:
        """As it should not be."""
        for _ in range(2):
            self.inner.acked(engine, receipts)


class FirstRank(Filter):
    """Knows of one rank for each engine."""

    def acked(self, engine: Participant, receipts: tuple[Receipt, ...]) -> None:
        """One receipt is enough."""
        self.inner.acked(engine, receipts[:1])


class Flattering(Filter):
    """Makes every receipt a good one."""

    def acked(self, engine: Participant, receipts: tuple[Receipt, ...]) -> None:
        """As it should not be."""
        good = self.inner.expected.digest
        self.inner.acked(engine, tuple(_carried({**each.to_json(), "digest": good}) for each in receipts))


class Anonymous(Filter):
    """Says that an engine was lost, and not why."""

    def lost(self, engine: Participant, error: BaseException) -> None:
        """As it should not be."""
        self.inner.lost(engine, TransportError("something went wrong"))


class Confusing(Filter):
    """Blames whoever comes first."""

    def lost(self, engine: Participant, error: BaseException) -> None:
        """As it should not be."""
        self.inner.lost(self.inner.engines[0], error)


class Scapegoat(Filter):
    """Blames whoever comes last, by name."""

    def lost(self, engine: Participant, error: BaseException) -> None:
        """As it should not be."""
        self.inner.lost(max(self.inner.engines, key=lambda each: each.id), error)


class Deaf(Filter):
    """Does not notice that the round moved on, or goes on without an engine."""

    def __init__(self, port: Any) -> None:
        super().__init__(port)
        self.engines, self.closed, self.limit = port.engines, False, 1e6

    def on_change(self, wake: Callable[[], None]) -> None:
        """Nobody is woken."""

    def waiting_for(self, engines: Collection[Participant]) -> None:
        """Nobody is told."""


class Endless(Filter):
    """Has no deadline."""

    limit = 1e6


class Stale(Twin):
    """Remembers the receipts of the first round for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, tuple[Receipt, ...]] = {}

    def port(self, port: Port) -> Any:
        """As it should not be."""
        kept = self.kept

        class Remembering(Filter):
            def acked(self, engine: Participant, receipts: tuple[Receipt, ...]) -> None:
                """As it should not be."""
                self.inner.acked(engine, kept.setdefault(engine.id, receipts))

        return Remembering(port)


class Forging(Twin):
    """Acknowledges before anybody else does."""

    def collect(self, plan: Plan, port: Any) -> None:
        """Ask nobody."""
        for engine in port.engines:
            port.acked(engine, (forged(plan, port, engine),))


class Silent(Forging):
    """Moves nothing at all, and says that all is well."""

    def open(self, *args: Any) -> None:
        """Ask nobody."""

    def broadcast(self, plan: Plan, weights: Weights, port: Port) -> None:
        """Tell without doing."""
        for bucket in plan.buckets:
            port.bucket_sent(bucket.index)
        port.all_sent()


def forged(plan: Plan, port: Any, engine: Participant) -> Receipt:
    """A receipt that says everything right, and that nobody has made."""
    return _carried(
        {
            "round": port.session.round, "epoch": port.session.epoch, "engine": engine.id,
            "incarnation": engine.incarnation, "rank": 0, "fingerprint": plan.fingerprint,
            "tensors": len(plan.tensors), "bytes": plan.nbytes, "digest": port.expected.digest,
        }
    )  # fmt: skip


# -- what methods do --------------------------------------------------------------------------------------


class Renamed(Twin):
    name = "another"


class Boasting(Twin):
    """Says that it survives a loss, and does not."""

    def __init__(self) -> None:
        super().__init__(CollectiveTransport())

    @property
    def capabilities(self) -> Capabilities:
        """Too much."""
        return replace(self.inner.capabilities, survives_loss=True)


class Polite(Twin):
    """Returns its failures."""

    def broadcast(self, plan: Plan, weights: Weights, port: Port) -> bool:
        """Whether it went well."""
        try:
            super().broadcast(plan, weights, port)
        except Exception:  # noqa: BLE001 - that is the mutation
            return False
        return True


class Hasty(Twin):
    """Does not wait for receipts."""

    def collect(self, plan: Plan, port: Port) -> None:
        """Nothing."""


class Quitting(Twin):
    """Swallows what goes wrong in a broadcast."""

    def broadcast(self, plan: Plan, weights: Weights, port: Port) -> None:
        """Whether it went well, nobody knows."""
        with suppress(Exception):
            super().broadcast(plan, weights, port)


class Lazy(Twin):
    """Tells of more buckets than it sends: the last one, or all of them, never leave."""

    def __init__(self, sends: Callable[[int], int]) -> None:
        super().__init__()
        self.sends = sends

    def broadcast(self, plan: Plan, weights: Weights, port: Any) -> None:
        """Move some, and tell of all."""
        real = self.sends(len(plan.buckets))
        held, stop = Filter(port), PortClosed("that was all")

        def bucket_sent(index: int) -> None:
            if index < real:
                port.bucket_sent(index)
            if index + 1 >= real:
                raise stop

        vars(held)["bucket_sent"] = bucket_sent
        if real:
            self.inner.broadcast(plan, weights, held)
        for bucket in plan.buckets[real:]:
            port.bucket_sent(bucket.index)
        port.all_sent()


class RaisingClean(Twin):
    def clean(self) -> None:
        """Not well."""
        super().clean()
        raise OSError("already closed")


class RaisingAgain(Twin):
    """Every end but the first raises."""

    ended = False

    def abort(self) -> None:
        """Once."""
        again, self.ended = self.ended, True
        super().abort()
        if again:
            raise OSError("already closed")

    def close(self) -> None:
        """Once."""
        self.abort()


class NoAbort(Twin):
    def abort(self) -> None:
        """Nothing."""


class Loud(Twin):
    """Takes PortClosed for an error of its own, as it takes a port that is closed."""

    def _loud(self, method: str, port: Port, *args: Any) -> None:
        try:
            if port.closed:
                raise PortClosed("over")
            for _ in range(2):
                port.progress()
            getattr(self.inner, method)(*args, filtered_loud(port))
        except PortClosed as error:
            raise TransportError("the port is closed") from error

    def open(self, *args: Any) -> None:
        """The first phase."""
        self._loud("open", args[-1], *args[:-1])

    def broadcast(self, *args: Any) -> None:
        """The second."""
        self._loud("broadcast", args[-1], *args[:-1])

    def collect(self, *args: Any) -> None:
        """The third."""
        self._loud("collect", args[-1], *args[:-1])


class _Loud(Filter):
    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            try:
                return found(*args)
            except PortClosed as error:
                raise TransportError("the port is closed") from error

        return call


def filtered_loud(port: Port) -> Any:
    """A port that raises another error than it should."""
    return _Loud(port)


class Sulking(Twin):
    """Refuses every round after one that was aborted while it was open."""

    failed = opened = False

    def open(self, *args: Any) -> None:
        """Unless one failed."""
        if self.failed:
            raise TransportError("a round has failed")
        self.opened = True
        super().open(*args)

    def clean(self) -> None:
        """A good round."""
        self.opened = False
        super().clean()

    def abort(self) -> None:
        """A bad one."""
        self.failed = self.failed or self.opened
        super().abort()


class Forgetful(Twin):
    """Does not end what the round before has left open."""

    def open(self, *args: Any) -> None:
        """As if there had been none."""
        self.inner = MemoryTransport()
        super().open(*args)


class Scribbling(Twin):
    """Writes into the trainer's tensors."""

    def broadcast(self, plan: Plan, weights: Any, port: Port) -> None:
        """And changes them."""
        super().broadcast(plan, weights, port)
        next(each for each in weights.tensors.values() if each.numel()).add_(1)


class Keeping(Twin):
    """Keeps the weights of every round, good or bad."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def broadcast(self, plan: Plan, weights: Any, port: Port) -> None:
        """For ever."""
        self.kept.append(weights.tensors)
        super().broadcast(plan, weights, port)


class Littering(Twin):
    """Leaves something behind with each round."""

    litter: ClassVar[list[Any]] = []
    stop: ClassVar[threading.Event] = threading.Event()

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def open(self, *args: Any) -> None:
        """Another piece."""
        if self.kind == "socket":
            self.litter.append(socket.socket())
        elif self.kind == "thread":
            threading.Thread(target=self.stop.wait, daemon=True).start()
        else:
            path = Path("/dev/shm", f"weightsync-twin-{os.getpid()}-{uuid.uuid4().hex}")
            path.write_bytes(b"left")
            self.litter.append(path)
        super().open(*args)

    @classmethod
    def tidy(cls) -> None:
        """Take it away again."""
        cls.stop.set()
        for piece in cls.litter:
            piece.close() if isinstance(piece, socket.socket) else piece.unlink()
        cls.litter.clear()
        cls.stop = threading.Event()


class Waiting(Twin):
    """Asks every engine for a last word, and waits for it."""

    def __init__(self) -> None:
        super().__init__(CollectiveTransport())
        self.links: list[Any] = []

    def open(self, plan: Plan, weights: Weights, engines: Mapping[Participant, Any], port: Port) -> None:
        """Know them."""
        self.links = list(engines.values())
        super().open(plan, weights, engines, port)

    def clean(self) -> None:
        """A last word."""
        self._ask()
        super().clean()

    def abort(self) -> None:
        """A last word."""
        self._ask()
        super().abort()

    def _ask(self) -> None:
        links, self.links = self.links, []
        for link in links:
            link.ask("state").result()


# -- receiving halves -------------------------------------------------------------------------------------


class Half:
    """A receiving half for a mutant to spoil."""

    def __init__(self, ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> None:
        self.plan = plan
        self.inner: Inlet = memory_inlet(ticket, session, plan, limit)

    @contextmanager
    def buckets(self) -> Iterator[Iterator[Bucketful]]:
        """What arrives, after it was spoilt."""
        with self.inner.buckets() as frames:
            yield self.spoilt(frames)

    def spoilt(self, frames: Iterator[Bucketful]) -> Iterator[Bucketful]:
        """Every frame as it is."""
        yield from frames

    def close(self) -> None:
        """Stop."""
        self.inner.close()


class Flipping(Half):
    """Changes the last byte of every bucket."""

    def spoilt(self, frames: Iterator[Bucketful]) -> Iterator[Bucketful]:
        """As it should not be."""
        for frame in frames:
            data = frame.data.clone()
            if data.numel():
                data[-1] ^= 0xFF
            yield Bucketful(frame.index, data)


class Dropping(Half):
    """Leaves out the last bucket."""

    def spoilt(self, frames: Iterator[Bucketful]) -> Iterator[Bucketful]:
        """As it should not be."""
        for frame in frames:
            if frame.index + 1 < len(self.plan.buckets):
                yield frame


class Shortening(Half):
    """Loses the last bytes of a bucket."""

    def spoilt(self, frames: Iterator[Bucketful]) -> Iterator[Bucketful]:
        """As it should not be."""
        for frame in frames:
            yield Bucketful(frame.index, frame.data[:-8])


class Unclosable(Half):
    def close(self) -> None:
        """Nothing."""


class Patient(Half):
    """Waits as long as it takes."""

    def __init__(self, ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> None:
        super().__init__(ticket, session, plan, 1e6)


class Replaying(Half):
    """Finds what once arrived in a place of its own, when the round is over."""

    past: ClassVar[dict[str, list[Bucketful]]] = {}

    def __init__(self, ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> None:
        self.key = str(ticket.values["key"])
        if self.key not in self.past:
            super().__init__(ticket, session, plan, limit)

    @contextmanager
    def buckets(self) -> Iterator[Iterator[Bucketful]]:
        """From the past, if there is one."""
        if self.key in self.past:
            yield iter(self.past[self.key])
            return
        with self.inner.buckets() as frames:
            yield self._noted(frames)

    def _noted(self, frames: Iterator[Bucketful]) -> Iterator[Bucketful]:
        noted = []
        for frame in frames:
            noted.append(Bucketful(frame.index, frame.data.clone()))
            yield frame
        self.past[self.key] = noted


class AnySession(Half):
    """Asks whose the ticket is, and not for whom it was made."""

    def __init__(self, ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> None:
        super().__init__(ticket, memory._endpoints[str(ticket.values["key"])].session, plan, limit)


class Unfetched(Half):
    """Keeps what a round has sent for whoever comes after its end."""

    def __init__(self, ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> None:
        self.over = str(ticket.values["key"]) not in memory._endpoints
        if not self.over:
            super().__init__(ticket, session, plan, limit)
        self.plan = plan

    @contextmanager
    def buckets(self) -> Iterator[Iterator[Bucketful]]:
        """What waits there, and then the end."""
        if not self.over:
            with self.inner.buckets() as frames:
                yield frames
            return
        yield self.rest()

    def rest(self) -> Iterator[Bucketful]:
        """One bucket was still there."""
        yield Bucketful(0, torch.zeros(self.plan.buckets[0].nbytes, dtype=torch.uint8))
        raise TransportError("the round is over")


class Overwriting(Half):
    """Takes what an engine serves for a place to put things."""

    served: ClassVar[list[Peer]] = []

    def spoilt(self, frames: Iterator[Bucketful]) -> Iterator[Bucketful]:
        """As it should not be."""
        for frame in frames:
            for peer in self.served:
                assert isinstance(peer, ThreadPeer)
                for tensor in peer.engine.tensors.values():
                    tensor.zero_()
            yield frame


# -- the kit catches them ---------------------------------------------------------------------------------


def one_buffer(patch: Patch) -> None:
    """Both buckets under way share their memory."""
    octets, tensor = Pair.octets, Pair.tensor
    patch.setattr(Pair, "octets", lambda pair, index, size: octets(pair, 0, size))
    patch.setattr(Pair, "tensor", lambda pair, index, size: tensor(pair, 0, size))


def no_failure(patch: Patch) -> None:
    """Futures that fail are not noticed."""
    patch.setattr(Receptions, "failure", lambda self, engine: None)


POINTS = ("receive", "bucket-0", "bucket-2", "bucket-4", "applied", "released")


@dataclass(frozen=True)
class Mutant:
    """What is wrong, and which checks find that, by which rule."""

    rule: str
    checks: Sequence[str]
    make: Callable[[], Any] = MemoryTransport
    inlet: Any = memory_inlet
    patch: Callable[[Patch], None] = lambda _: None
    processes: bool = False


def at(kind: str, points: Sequence[str] = POINTS) -> list[str]:
    """The checks of a kind, at every point."""
    return [f"{kind}-at-{point}" for point in points]


MUTANTS = {
    "renamed": Mutant("declares", ["declares", "good-round"], Renamed),
    "tells of buckets twice": Mutant("facts-in-order", ["good-round"], filtered(TwiceSent)),
    "changes a byte": Mutant(
        "content",
        ["good-round", "rounds-in-a-row", "shapes-in-small-buckets", "shapes-in-buckets",
         "shapes-in-one-bucket",
         "one-byte-buckets", "dtypes"],
        inlet=Flipping,
    ),
    "changes a byte in a real round": Mutant("next-round", ["under-a-real-round"], inlet=Flipping),
    "leaves out a bucket": Mutant("complete", ["good-round", "no-tensors", "no-bytes"], inlet=Dropping),
    "sends all but the last": Mutant(
        "complete", ["declares", "good-round", "raise-at-bucket-2"], lambda: Lazy(lambda buckets: buckets - 1)
    ),
    "sends nothing": Mutant(
        "complete", ["declares", "good-round", "raise-at-bucket-2"], lambda: Lazy(lambda _: 0)
    ),
    "knows one rank": Mutant("complete", ["engine-of-two-ranks"], filtered(FirstRank)),
    "loses some bytes": Mutant("complete", ["good-round"], inlet=Shortening),
    "moves nothing": Mutant("early-ack", ["good-round"], Silent),
    "acks too early": Mutant(
        "early-ack",
        ["no-ack-before-the-last-bucket", "no-ack-before-the-view-is-closed", "no-ack-before-the-receipt"],
        Forging,
    ),
    "acks twice": Mutant("double-ack", ["good-round"], filtered(TwiceAcked)),
    "acks with an old receipt": Mutant("stale-ack", ["rounds-in-a-row"], Stale),
    "makes receipts good": Mutant("receipt-unchanged", ["bad-receipt-travels"], filtered(Flattering)),
    "returns its failures": Mutant("tells-or-raises", ["weights-that-fail"], Polite),
    "swallows its failures": Mutant("tells-or-raises", ["weights-that-fail"], Quitting),
    "waits for no receipt": Mutant("tells-or-raises", ["good-round"], Hasty),
    "cannot clean": Mutant("ends-well", ["good-round"], RaisingClean),
    "cannot close twice": Mutant("ends-well", ["close-twice"], RaisingAgain),
    "does not say why": Mutant(
        "loss-by-name", [*at("raise"), *at("die"), "every-engine-fails"], filtered(Anonymous)
    ),
    "blames another": Mutant("loss-by-name", ["a-loss-that-ends-the-round"], filtered(Confusing)),
    "blames the first": Mutant(
        "loss-by-name",
        [*at("raise", ("bucket-0", "bucket-4", "released")), *at("die", ("receive", "bucket-2", "applied"))],
        filtered(Confusing),
    ),
    "blames the last": Mutant(
        "loss-by-name",
        [*at("raise", ("receive", "bucket-2", "applied")), *at("die", ("bucket-0", "bucket-4", "released"))],
        filtered(Scapegoat),
    ),
    "does not survive": Mutant("survives-loss", ["raise-at-bucket-2"], Boasting, collective_inlet),
    "does not notice death": Mutant("bounded", ["die-at-bucket-2"], patch=no_failure),
    "hears nothing of the round": Mutant(
        "bounded",
        [*at("hang"), "round-over-at-receive", "round-over-at-bucket-1", "round-over-in-collect"],
        filtered(Deaf),
    ),
    "knows no deadline": Mutant(
        "bounded", ["peers-never-connect", "late-at-bucket-2", "late-at-released"], filtered(Endless)
    ),
    "does not abort": Mutant(
        "abort-wakes",
        ["abort-at-receive", "abort-at-bucket-1", "abort-at-the-last-bucket",
         "abort-before-the-view-is-closed",
         "abort-in-collect", "abort-after-open"],
        NoAbort,
    ),
    "aborts once": Mutant(
        "abort-idempotent",
        ["abort-before-open", "abort-after-open", "abort-after-broadcast", "abort-after-collect",
         "aborts-at-once"],
        RaisingAgain,
    ),
    "takes PortClosed for an error": Mutant(
        "closed-port",
        [*(f"port-closed-in-{place}" for place in
           ("open-after-0", "open-after-1", "broadcast-after-0", "broadcast-after-1", "broadcast-after-4",
            "collect-after-0", "collect-after-1")),
         "port-closed-before-open", "port-closed-before-broadcast", "port-closed-before-collect"],
        Loud,
    ),
    "refuses to go on": Mutant("next-round", ["a-loss-that-ends-the-round", "abort-after-open"], Sulking),
    "forgets a round": Mutant("next-round", ["left-open"], Forgetful),
    "uses a buffer too early": Mutant("bucket-valid", ["engine-slow-with-a-bucket"], patch=one_buffer),
    "writes into what is served": Mutant(
        "old-weights", at("old-weights", ("bucket-0", "bucket-2", "released")), inlet=Overwriting
    ),
    "writes into the source": Mutant("source-untouched", ["source-untouched"], Scribbling),
    "keeps tensors": Mutant(
        "no-tensor-kept", ["no-tensor-kept", "no-tensor-kept-after-a-failure"], Keeping
    ),
    "takes old tickets": Mutant("stale-ticket", ["stale-ticket"], inlet=Replaying),
    "asks for no session": Mutant("stale-ticket", ["ticket-of-another-session"], inlet=AnySession),
    "keeps what nobody read": Mutant(
        "stale-ticket", ["ticket-that-nobody-read", "stale-ticket"], inlet=Unfetched
    ),
    "cannot be closed": Mutant("inlet-closes", ["inlet-closes"], inlet=Unclosable),
    "waits for ever": Mutant("inlet-closes", ["inlet-waits-no-longer-than-its-limit"], inlet=Patient),
    "leaves sockets": Mutant("nothing-left", ["nothing-left"], lambda: Littering("socket")),
    "leaves threads": Mutant("nothing-left", ["nothing-left"], lambda: Littering("thread")),
    "leaves segments": Mutant("nothing-left", ["nothing-left"], lambda: Littering("segment")),
    "waits for the dead": Mutant(
        "ends-well", ["dead-at-clean", "dead-at-abort"], Waiting, collective_inlet, processes=True
    ),
    "waits for the stopped at clean": Mutant(
        "bounded", ["stopped-at-clean"], Waiting, collective_inlet, processes=True
    ),
    "waits for the stopped at abort": Mutant(
        "abort-wakes", ["stopped-at-abort"], Waiting, collective_inlet, processes=True
    ),
}  # fmt: skip


class Tested(TransportConformance):
    """A mutant under test. It is given little time, because what hangs hangs for good."""

    __test__ = False

    def __init__(self, mutant: Mutant) -> None:
        self.mutant, self.processes, self.patience = mutant, mutant.processes, 1.0

    def transport(self) -> Transport:
        """The mutant, or what it mutates."""
        transport: Transport = self.mutant.make()
        return transport

    def inlet(self) -> Any:
        """Its receiving half."""
        return self.mutant.inlet

    def engines(self, names: Sequence[str]) -> Sequence[Peer]:
        """Engines, which receiving halves may spoil."""
        inner = "collective" if self.mutant.inlet is collective_inlet else "memory"
        if self.processes:
            return super().engines(names)
        Overwriting.served[:] = peers = [ThreadPeer(name, {inner: self.mutant.inlet}) for name in names]
        return peers


@pytest.fixture(scope="module", autouse=True)
def no_processes_left() -> Iterator[None]:
    """The engines' processes end with the tests."""
    yield
    Tested.teardown_class()
    Littering.tidy()


@pytest.mark.parametrize(
    ("mutant", "check"), [(name, check) for name, each in MUTANTS.items() for check in each.checks]
)
def test_the_kit_catches(mutant: str, check: str, monkeypatch: Patch) -> None:
    """The check fails, and says which rule is broken, what was seen, and what to do."""
    tested = Tested(MUTANTS[mutant])
    tested.mutant.patch(monkeypatch)
    rule = TRANSPORT_RULES[tested.mutant.rule]
    try:
        with pytest.raises(Violation) as caught:
            CHECKS[check](tested)
    finally:
        if tested.mutant.make is not MemoryTransport:
            Littering.tidy()
    assert caught.value.rule is rule, f"caught as {caught.value}"
    assert rule.says in str(caught.value)
    assert rule.do in str(caught.value)


def test_every_check_and_every_rule_has_a_mutant() -> None:
    """No check is vacuous, and no rule is decoration."""
    assert {check.name for check in TRANSPORT_CHECKS} == {
        check for mutant in MUTANTS.values() for check in mutant.checks
    }
    assert set(TRANSPORT_RULES) == {mutant.rule for mutant in MUTANTS.values()}


def test_the_twin_itself_is_good() -> None:
    """What the mutants are made of passes, so that it is the mutation that is caught."""
    for name in ("good-round", "raise-at-bucket-2", "abort-at-bucket-1", "stale-ticket", "nothing-left"):
        CHECKS[name](Tested(Mutant("", [], Twin, Half)))

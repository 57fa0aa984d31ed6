"""What plugs into a round and moves it on: transports and engines; and the ports they are given.

These are ``Protocol``s without defaults: whoever leaves a method out is told by the type checker, not by an
``AttributeError`` in the middle of a clean-up. Nothing here is implemented; the values that cross the
boundary (plans, sessions, receipts, answers) are defined beside the tables.

Who calls what:

* **Transport** moves bytes. Its methods run in a worker thread and may block; each gets a *port* that is
  good for one phase. An exception that leaves a method becomes ``TransportFailed``; nothing else needs
  catching. ``abort`` is idempotent and may run beside a ``broadcast`` that is stuck.
* **EngineLink** is the trainer's end of one engine. Its methods never block: each gives a future back at
  once, because a round talks to all engines at the same time and waits for none longer than it wants to.
* **Inlet** is the receiving half of a transport, in the engine's process. It yields buckets in order.

What a trainer owes around a round, and who only looks on, is in ``executors.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from .engine import Answer
from .engine_table import Session
from .plan import Plan
from .receipt import Expectation, Participant, Receipt
from .sampling import WHOLE, Part
from .states import EngineState
from .tensors import TensorSpec

__all__ = [
    "Bucketful", "Capabilities", "Clock", "Digest", "EngineLink", "EngineStatus", "Inlet",
    "InletFactory", "Port", "Sink", "Ticket", "Transport", "Unpack", "Weights",
]  # fmt: skip


class Clock(Protocol):
    """Where time comes from. Seconds; only differences mean anything."""

    def now(self) -> float:
        """The time now; never falls."""

    def wall(self) -> float:
        """Seconds since 1970, for log lines."""


class Weights(Protocol):
    """The tensors of one version on the trainer's side. What a tensor is, only transports know."""

    @property
    def ready(self) -> bool:
        """Whether the tensors are there: nothing has to be read, or gathered, under the lock."""

    def materialize(self) -> None:
        """Read the tensors if they come from a generator. Runs once, in Locked; may raise what it likes."""

    def plan(self, bucket_bytes: int) -> Plan:
        """The buckets for these tensors; pure, and the same object for the same metadata."""

    def digest(self, part: Part = WHOLE, /) -> str:
        """The digest of the content: names, dtypes, shapes, and the bytes of ``part``, in the plan's order.

        It says its part, as ``part.mark`` does.
        """


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport declares about itself.

    Args:
        stages: the receiving half can write to a copy beside the live weights.
        aliases: engines may keep views of the transfer buffer as their weights.
        cross_host: trainer and engines may be on different hosts.
        survives_loss: the transport goes on without a participant that was lost. A collective cannot, so a
            quorum below "all" is refused with it at set-up.
        dtypes: the dtype names it can carry, or None for every one that has bytes.
        cross_process: engines may be in other processes than the trainer.
        in_cluster: engines have to be in the trainer's Ray cluster: actors, or this very process.
    """

    stages: bool
    aliases: bool
    cross_host: bool
    survives_loss: bool
    dtypes: frozenset[str] | None
    cross_process: bool = True
    in_cluster: bool = False


class Port(Protocol):
    """One phase of one round, as a transport sees it. It can fire that phase's facts and nothing else.

    Every method that fires raises ``PortClosed`` when the round has moved on.
    """

    @property
    def session(self) -> Session:
        """Round, epoch and version: stamp them on every frame."""

    @property
    def engines(self) -> tuple[Participant, ...]:
        """The participants that remain *now*; shrinks when one is fenced."""

    @property
    def closed(self) -> bool:
        """Whether the round moved on: the transport is cancelled and should return."""

    @property
    def limit(self) -> float:
        """Seconds until this phase's deadline, at least 0. Every progress may move it."""

    @property
    def left(self) -> float:
        """Seconds until the round's own deadline, at least 0. Nothing moves that."""

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever ``engines`` shrinks or the port closes; also at once if it is closed."""

    def progress(self) -> None:
        """Say that something moved: feeds the idle time-out."""

    def waiting_for(self, engines: Collection[Participant]) -> None:
        """Say that nothing can move until one of ``engines`` does. Broadcast only; the next progress ends it.

        An engine that stays silent for its own limit is then lost by name, before the phase runs out of time.
        """

    def bucket_sent(self, index: int) -> None:
        """Bucket ``index`` was handed over. Broadcast only."""

    def all_sent(self) -> None:
        """Every bucket was handed over. Broadcast only, and the last thing it fires."""

    def acked(self, engine: Participant, receipts: tuple[Receipt, ...]) -> None:
        """Every rank of ``engine`` answered. Collect only."""

    def lost(self, engine: Participant, error: BaseException) -> None:
        """``engine`` cannot take part any further. Open, broadcast and collect."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What an engine needs to receive: the transport's name and plain values for its inlet.

    It is rank 0's. An engine of several ranks puts the number of each into ``values`` as ``rank``.
    """

    transport: str
    values: Mapping[str, Any]


class Transport(Protocol):
    """Moves the bytes of a plan to the participants. One instance lives as long as its ``WeightSync``."""

    @property
    def name(self) -> str:
        """Under which engines find the receiving half."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can and cannot do."""

    def open(
        self, plan: Plan, weights: Weights, engines: Mapping[Participant, EngineLink], port: Port
    ) -> None:
        """Make groups and endpoints, and start the receiving halves with ``link.receive``. In Locked."""

    def broadcast(self, plan: Plan, weights: Weights, port: Port) -> None:
        """Send every bucket; fire ``bucket_sent`` for each in order, then ``all_sent``."""

    def collect(self, plan: Plan, port: Port) -> None:
        """Wait for the receipts; fire ``acked`` or ``lost`` for each engine."""

    def clean(self) -> None:
        """The good end: close what ``open`` made."""

    def abort(self) -> None:
        """The bad end: stop, wake whoever is stuck, close. Idempotent; may run beside any other method."""

    def close(self) -> None:
        """Give back what outlives a round. After the last round; idempotent."""


@dataclass(frozen=True, slots=True)
class Bucketful:
    """One bucket as it arrived.

    Args:
        index: which of the plan's.
        data: a flat buffer, valid until the next bucket is asked for.
        views: of an inlet for engines that alias: the tensors that this bucket completes, by name, whole,
            where they lie. They may not be written, and stay as they are as long as anything refers to them.
        copy: of an inlet whose ``data`` lies on a device: ``copy(into, of)`` copies from there, and may be
            back before it is done. The inlet waits for it when the next bucket is asked for.
    """

    index: int
    data: Any
    views: Mapping[str, Any] | None = None
    copy: Callable[[Any, Any], None] | None = None

    def expire(self) -> None:
        """Refer to nothing any more. An inlet does so when the next bucket is asked for."""
        object.__setattr__(self, "data", None)
        object.__setattr__(self, "views", None)


class Inlet(Protocol):
    """The receiving half of a transport, for one session."""

    def buckets(self) -> AbstractContextManager[Iterator[Bucketful]]:
        """The buckets of the plan, in order. Leaving the context lets go of the transfer buffer."""

    def close(self) -> None:
        """Stop: wake whoever waits in ``buckets``. Idempotent, from any thread."""


class InletFactory(Protocol):
    """Makes the receiving half from a ticket."""

    def __call__(self, ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> Inlet:
        """``limit`` is how long a bucket may be waited for, in seconds."""


class Unpack(Protocol):
    """Copies what a bucket holds to where it belongs. On an engine's side, handed to its receiver."""

    def __call__(self, plan: Plan, bucket: Bucketful, into: Mapping[str, Any], /) -> None:
        """Write every piece of ``bucket`` into the tensors ``into``, by the names of ``plan.tensors``.

        The tensors have the plan's dtypes and shapes and may have any strides. Nothing of ``bucket.data`` is
        kept. Raises TransportError when the buffer is not as large as the plan says.
        """


class Digest(Protocol):
    """Digests content: the same function on both sides."""

    def __call__(self, plan: Plan, tensors: Mapping[str, Any], part: Part = WHOLE, /) -> str:
        """The digest of ``part`` of ``tensors`` in the plan's order, as ``Weights.digest`` makes it."""


class Sink(Protocol):
    """Where an engine rank puts what arrives: beside the live weights, or right into them."""

    @property
    def stages(self) -> bool:
        """Whether the live weights stay as they are until ``commit``."""

    @property
    def aliases(self) -> bool:
        """Whether it can make views of a transfer buffer the live weights, without a copy."""

    def manifest(self) -> tuple[TensorSpec, ...]:
        """What the engine holds, under every name; what has no memory it does not hold. Changes nothing."""

    def check(self, plan: Plan) -> None:
        """Raise PlanError unless ``plan`` brings exactly what the engine holds. Changes nothing.

        What no plan is to blame for is another error: weights that are not in memory, for example. A
        PlanError says that the engine goes on with what it has.
        """

    def open(self, plan: Plan) -> Mapping[str, Any]:
        """Where the buckets of ``plan`` are to be written, by the names of ``plan.tensors``."""

    def adopt(self, views: Mapping[str, Any]) -> None:
        """Take these for what would otherwise be written. Only of a sink that ``aliases``."""

    def commit(self, plan: Plan) -> None:
        """Make what was written the live weights."""

    def live(self, plan: Plan) -> Mapping[str, Any]:
        """The tensors that the engine samples with, by the names of ``plan.tensors``."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine says of itself when it is asked.

    Args:
        epoch: the highest that it has seen: of its open session, or of one that is over.
        asleep: its weights are not in memory, so that they cannot be written.
        committed: the epoch of its last commit, 0 before the first one. None if the engine does not say: then
            whoever had a session with it may have changed it.
    """

    engine: str
    incarnation: str
    ranks: int
    stages: bool
    state: EngineState
    version: int | None
    epoch: int = 0
    asleep: bool = False
    committed: int | None = None


class EngineLink(Protocol):
    """The trainer's end of one engine. Every method gives a future back at once.

    One whose engine is known to be on this host says ``nearby = True``.
    One whose engine is certainly in another process says ``in_process = False``, and is then refused with a
    transport that could not reach it. One whose engine is in the Ray cluster says ``in_cluster = True``, and
    one whose engine is certainly in this process ``in_process = True``: a transport of the cluster takes no
    other.
    """

    @property
    def id(self) -> str:
        """The engine's name; unique in its ``WeightSync``."""

    def hello(self) -> Future[EngineStatus]:
        """Ask the engine what it is."""

    def open(
        self, session: Session, incarnation: str, plan: Plan, expected: Expectation, limit: float
    ) -> Future[None]:
        """Pause and open: close the gate, wait until nothing is being admitted, check the plan.

        ``limit`` is how long the engine keeps the session when it hears nothing more, in seconds.
        Fails with EngineGone when another incarnation answers, PlanError when the plan does not fit.
        """

    def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
        """Start receiving; done when every rank holds the bytes and let go of the buffer."""

    def commit(self, session: Session) -> Future[None]:
        """Make the new version the engine's own."""

    def abort(self, session: Session) -> Future[Answer]:
        """End the session, or an older one; say what the engine is. From then on it refuses the session."""

    def resume(self, session: Session) -> Future[None]:
        """Let a committed engine generate again."""

    def close(self) -> None:
        """Give back what this link holds; the engine itself lives on."""

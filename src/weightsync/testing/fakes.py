"""Stand-ins for what a round meets outside: weights, engines, a transport and executors, without torch.

Each keeps to its contract as long as it is let; ``bad`` bends one call of it, by name. A :class:`Gate` stops
whoever comes to it until it is opened, and says that somebody came, so that a test can look at a round in any
state without sleeping.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..fsm.contract import Capabilities, EngineLink, EngineStatus, Port, Ticket, Weights
from ..fsm.engine import Answer, EngineMachine
from ..fsm.engine_table import (
    AbortOrdered,
    AllApplied,
    CommitOrdered,
    FrameSeen,
    Opened,
    ResumeOrdered,
    Session,
    ViewClosed,
)
from ..fsm.errors import EngineAsleep, EngineGone, IllegalEvent, TransportError
from ..fsm.executors import RoundView, Undo
from ..fsm.plan import Plan, make_plan, spec
from ..fsm.receipt import Expectation, Participant, Receipt
from ..fsm.sampling import WHOLE, Part, part_of

__all__ = ["HANG", "LOST", "FakeEngine", "FakeExecutor", "FakeTransport", "FakeWeights", "Gate"]

HANG = "never done nor answered"
LOST = "done, but its answer is lost"
PATIENCE = 30.0
"""Seconds after which a gate that nobody opened lets everybody through, with an error."""


class Gate:
    """Stops a thread until it is opened, and says when one came."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        """Let everybody through, now and later."""
        self._open.set()

    def await_visitor(self) -> None:
        """Wait until somebody came."""
        if not self.reached.wait(PATIENCE):
            raise TimeoutError("nobody came to the gate")

    def pass_through(self) -> None:
        """Come to the gate, and go on when it is open."""
        self.reached.set()
        if not self._open.wait(PATIENCE):
            raise TimeoutError("nobody opened the gate")


Bent = BaseException | Gate | str


def _bend(bad: dict[str, Bent], word: str) -> Bent | None:
    """What is to happen at ``word``: errors are raised once, gates are gone through."""
    bent = bad.get(word)
    if isinstance(bent, Gate):
        bent.pass_through()
        return None
    if isinstance(bent, BaseException):
        del bad[word]
        raise bent
    return bent


def _digest(content: Mapping[str, bytes], part: Part) -> str:
    joined = b"".join(
        name.encode() + b"=" + data for name, data in content.items()
    )  # each is small, so whole
    return part.mark(hashlib.sha256(joined).hexdigest()[:16])


class FakeWeights:
    """A few named byte strings of one size, each a bucket of its own."""

    def __init__(self, fill: int = 0, *, tensors: int = 3, size: int = 64, ready: bool = False) -> None:
        self.ready = ready
        self.content = {f"w{number}": bytes([(fill + number) % 256]) * size for number in range(tensors)}
        self.bad: dict[str, Bent] = {}
        self._size = size

    def materialize(self) -> None:
        """Nothing to read."""
        _bend(self.bad, "materialize")

    def plan(self, bucket_bytes: int) -> Plan:
        """One bucket a name."""
        _bend(self.bad, "plan")
        specs = [spec(name, "uint8", (len(data),)) for name, data in self.content.items()]
        return make_plan(specs, bucket_bytes=self._size)

    def digest(self, part: Part = WHOLE, /) -> str:
        """Of names and bytes."""
        _bend(self.bad, "digest")
        return _digest(self.content, part)


class FakeEngine:
    """An engine of one rank and the link to it, in one. ``words`` is what it was told, in order.

    Answers come at once, except at a gate, where they come from a thread.
    """

    def __init__(self, name: str, *, stages: bool = True) -> None:
        self.id = name
        self.bad: dict[str, Bent] = {}
        self.words: list[str] = []
        self.content: dict[str, bytes] = {}
        self.alive, self.asleep = True, False
        self.ranks: int | None = None  # as the trainer declares it
        self._lives = 0
        self.machine = EngineMachine(name, stages=stages, incarnation="0")
        self._receipts: dict[Session, Future[tuple[Receipt, ...]]] = {}
        self._incoming: dict[str, bytes] = {}

    def restart(self) -> None:
        """Die, and come up again with start-up weights."""
        self._lives += 1
        stages = self.machine.facts.stages
        self.machine = EngineMachine(self.id, stages=stages, incarnation=str(self._lives))
        self.content, self.alive = {}, True

    def hello(self) -> Future[EngineStatus]:
        """What it is."""
        facts = self.machine.facts
        status = EngineStatus(
            self.id, facts.incarnation, 1, facts.stages, self.machine.state, facts.version,
            epoch=facts.seen, asleep=self.asleep, committed=facts.taken_over,
        )  # fmt: skip
        return self._say("hello", lambda: status)

    def open(
        self, session: Session, incarnation: str, plan: Plan, expected: Expectation, limit: float
    ) -> Future[None]:
        """Pause and open."""
        return self._say("open", lambda: self._opened(session, incarnation, expected))

    def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
        """Done when the last bucket is applied; may come before the session is open."""
        return self._receipts.setdefault(session, Future())

    def commit(self, session: Session) -> Future[None]:
        """Take the new weights over."""
        return self._say("commit", lambda: self._committed(session))

    def abort(self, session: Session) -> Future[Answer]:
        """End the session."""
        return self._say("abort", lambda: self._aborted(session))

    def resume(self, session: Session) -> Future[None]:
        """Generate again."""
        return self._say("resume", lambda: self._fire(ResumeOrdered(session)))

    def close(self) -> None:
        """Nothing is held."""
        self.words.append("close")

    def frame(self, session: Session, index: int, plan: Plan, content: Mapping[str, bytes]) -> None:
        """A bucket arrives; called by the transport."""
        _bend(self.bad, f"bucket {index}")
        if not self.alive:
            raise EngineGone(f"engine {self.id} is dead")
        self.machine.fire(FrameSeen(session, index))
        for piece in plan.buckets[index].pieces:
            name = plan.tensors[piece.tensor].name
            self._incoming[name] = content[name]
        if index + 1 == len(plan.buckets):
            self.machine.fire(AllApplied(session))
            planned = self.machine.facts.plan
            part = part_of(planned.digest) if planned else WHOLE
            proof = len(self._incoming), sum(map(len, self._incoming.values())), _digest(self._incoming, part)
            self.machine.fire(ViewClosed(session, *proof))
            if self.bad.get("receipt") != LOST:
                self.receive(session, Ticket("fake", {})).set_result((self.machine.receipt(session),))

    def _opened(self, session: Session, incarnation: str, expected: Expectation) -> None:
        if incarnation != self.machine.facts.incarnation:
            raise EngineGone(f"engine {self.id} was started anew")
        if self.asleep:
            raise EngineAsleep(f"engine {self.id} is asleep")
        self.machine.fire(Opened(session, expected))
        self._incoming = {}

    def _committed(self, session: Session) -> None:
        self.machine.fire(CommitOrdered(session))
        self.content = dict(self._incoming)

    def _aborted(self, session: Session) -> Answer:
        try:
            self.machine.fire(AbortOrdered(session))
        except IllegalEvent:
            self.machine.refused += 1
        return self.machine.answer(session)

    def _fire(self, event: Any) -> None:
        self.machine.fire(event)

    def _say(self, word: str, work: Callable[[], Any]) -> Future[Any]:
        self.words.append(word)
        future: Future[Any] = Future()
        if isinstance(self.bad.get(word), Gate):
            threading.Thread(target=self._answer, args=(future, word, work), daemon=True).start()
        else:
            self._answer(future, word, work)
        return future

    def _answer(self, future: Future[Any], word: str, work: Callable[[], Any]) -> None:
        try:
            if not self.alive:
                raise EngineGone(f"engine {self.id} is dead")
            bent = _bend(self.bad, word)
            if bent != HANG:
                value = work()
                if bent != LOST:
                    future.set_result(value)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the answer
            future.set_exception(error)


class FakeTransport:
    """Hands each bucket to each engine, in this process. ``called`` lists its methods, in order.

    ``bad`` knows ``open``, ``bucket 0`` ..., ``all sent``, ``collect``, ``clean``, ``abort``.
    """

    name = "fake"

    def __init__(self, *, survives_loss: bool = True) -> None:
        self.capabilities = Capabilities(
            stages=True, aliases=False, cross_host=False, survives_loss=survives_loss, dtypes=None
        )
        self.bad: dict[str, Bent] = {}
        self.called: list[str] = []
        self.ports: list[Port] = []
        self._links: dict[Participant, FakeEngine] = {}
        self._receipts: dict[Participant, Future[tuple[Receipt, ...]]] = {}

    def open(
        self, plan: Plan, weights: Weights, engines: Mapping[Participant, EngineLink], port: Port
    ) -> None:
        """Have every engine receive."""
        self._begin("open", port)
        for engine, link in engines.items():
            if not isinstance(link, FakeEngine):
                raise TransportError(f"{link} is no FakeEngine")
            self._links[engine] = link
            self._receipts[engine] = link.receive(port.session, Ticket("fake", {}))

    def broadcast(self, plan: Plan, weights: Weights, port: Port) -> None:
        """Bucket by bucket, engine by engine."""
        self._begin("broadcast", port)
        if not isinstance(weights, FakeWeights):
            raise TransportError(f"{weights} are no FakeWeights")
        for index in range(len(plan.buckets)):
            _bend(self.bad, f"bucket {index}")
            for engine in port.engines:
                port.waiting_for([engine])
                try:
                    self._links[engine].frame(port.session, index, plan, weights.content)
                except Exception as error:  # noqa: BLE001 - the engine's error frame
                    port.lost(engine, error)
                else:
                    port.progress()
            port.bucket_sent(index)
        _bend(self.bad, "all sent")
        port.all_sent()

    def collect(self, plan: Plan, port: Port) -> None:
        """Hand on each receipt when it is there; return when the round has moved on."""
        changed = threading.Event()
        self._begin("collect", port)
        port.on_change(changed.set)
        for engine in port.engines:
            self._receipts[engine].add_done_callback(lambda _: changed.set())
        told: set[Participant] = set()
        while not port.closed:
            changed.clear()
            ready = [e for e in port.engines if self._receipts[e].done() and e not in told]
            for engine in ready:
                told.add(engine)
                port.acked(engine, self._receipts[engine].result())
            if not ready and not port.closed:
                changed.wait(min(port.limit, PATIENCE))

    def clean(self) -> None:
        """The good end."""
        self._begin("clean")

    def abort(self) -> None:
        """The bad end; wakes whoever is stuck at a gate."""
        self._begin("abort")
        for bent in list(self.bad.values()):
            if isinstance(bent, Gate):
                bent.open()

    def close(self) -> None:
        """After the last round."""
        self._begin("close")

    def _begin(self, method: str, port: Port | None = None) -> None:
        self.called.append(method)
        if port is not None:
            self.ports.append(port)
        _bend(self.bad, method)


@dataclass(slots=True)
class FakeExecutor:
    """Writes ``name.prepare``, ``name.clean`` and ``name.undo`` in ``story``; ``bad`` knows the three."""

    name: str
    story: list[str] = field(default_factory=list)
    bad: dict[str, Bent] = field(default_factory=dict)
    owes: bool = True

    def prepare(self, round: RoundView) -> Undo | None:
        """Before the engines are paused; hands an undo back if it owes one."""
        self._note("prepare")
        return (lambda: self._note("undo")) if self.owes else None

    def clean(self, round: RoundView) -> None:
        """After the publication."""
        self._note("clean")

    def _note(self, what: str) -> None:
        self.story.append(f"{self.name}.{what}")
        _bend(self.bad, what)

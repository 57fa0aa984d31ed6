"""The engines that a transport is tested with: told what goes wrong, in threads or in processes of their own.

They receive by the rules (``small_engine.py``); what a transport can do wrong shows in them. In a thread,
death means that the trainer's call fails at once while the engine holds whatever it holds; in a process it is
SIGKILL.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from ...fsm.contract import EngineLink, InletFactory, Ticket
from ...fsm.engine_table import Session
from ...fsm.errors import EngineGone
from ...fsm.plan import Plan
from ...fsm.receipt import Participant, Receipt
from ..engine_process import EngineProcess
from ..small_engine import SmallEngine, SmallLink, expectation

__all__ = ["Content", "Fault", "InjectedError", "Peer", "ProcessPeers", "ThreadPeer"]

Content = Mapping[str, tuple[str, tuple[int, ...], bytes]]
"""Tensors as they can be compared across processes: name to (dtype, shape, bytes)."""

Fault = str
"""``raise``; ``hang``, which raises when it is released; ``die``; ``wait``, which goes on when that happens;
or ``spoil``, which changes a byte of what was received (at ``applied``)."""

_ANSWER = 30.0
"""Seconds in which a process answers to what takes it no time."""


class InjectedError(RuntimeError):
    """What a fault of the kit raises."""


class _Link(EngineLink, Protocol):
    @property
    def participant(self) -> Participant: ...


class Peer(Protocol):
    """One engine. ``point`` is ``receive``, the index of a bucket, ``applied`` or ``released``."""

    @property
    def link(self) -> _Link:
        """The trainer's end."""

    def open(self, session: Session, plan: Plan, content: str) -> None:
        """Begin a session; returns when that is done."""

    def arm(self, fault: Fault, point: int | str) -> None:
        """Let the next reception fail."""

    def reached(self) -> bool:
        """Whether the fault has happened, or begun."""

    def release(self) -> None:
        """End a fault that keeps the engine."""

    def ended(self) -> bool:
        """Whether nothing is being received."""

    def commit(self, session: Session) -> None:
        """Serve what was received."""

    def abort(self, session: Session) -> None:
        """End the session."""

    def content(self) -> Content:
        """What it serves."""

    def made(self) -> tuple[Receipt, ...] | None:
        """The receipts that it made in its session so far; None where that cannot be asked."""

    def freeze(self, stop: bool) -> bool:  # noqa: FBT001 - said by position, as the signals are
        """Stop it where it is, or let it go on; False where that cannot be done."""

    def kill(self) -> bool:
        """End its process; False where it has none of its own."""

    def revive(self) -> None:
        """Alive again, and without faults."""

    def gauge(self) -> tuple[int, int]:
        """Descriptors and threads of its own process; zeros in a thread."""


class _ThreadLink(SmallLink):
    def __init__(self, peer: ThreadPeer) -> None:
        super().__init__(peer.engine)
        self._peer = peer

    def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
        answer: Future[tuple[Receipt, ...]] = Future()
        answer.set_running_or_notify_cancel()
        self._peer.begin(answer)
        super().receive(session, ticket).add_done_callback(lambda done: self._peer.over(done, answer))
        return answer


class ThreadPeer:
    """An engine in this process."""

    def __init__(self, name: str, inlets: Mapping[str, InletFactory]) -> None:
        self.engine = SmallEngine(name, fault=self._come_to, at=self._come_to, inlets=inlets)
        self.link: _Link = _ThreadLink(self)
        self._planned: tuple[Fault, int | str] | None = None
        self._released = threading.Event()
        self._answer: Future[tuple[Receipt, ...]] | None = None
        self._under_way = 0

    def begin(self, answer: Future[tuple[Receipt, ...]]) -> None:
        """A reception begins, which will be answered there."""
        self._answer = answer
        self._under_way += 1

    def over(self, reception: Future[tuple[Receipt, ...]], answer: Future[tuple[Receipt, ...]]) -> None:
        """It is over; the trainer hears of it, unless the engine died meanwhile."""
        self._under_way -= 1
        error = reception.exception()
        if answer.done():
            return
        if error is None:
            answer.set_result(reception.result())
        else:
            answer.set_exception(error)

    def open(self, session: Session, plan: Plan, content: str) -> None:
        """Begin a session."""
        self.engine.open(session, plan, content)

    def arm(self, fault: Fault, point: int | str) -> None:
        """Let the next reception fail."""
        self._released.clear()
        self._planned = fault, point

    def reached(self) -> bool:
        """Whether it happened."""
        return self._planned is None

    def release(self) -> None:
        """Go on."""
        self._released.set()

    def ended(self) -> bool:
        """Whether nothing is being received."""
        return self._under_way == 0

    def commit(self, session: Session) -> None:
        """Serve what was received."""
        self.engine.commit(session)

    def abort(self, session: Session) -> None:
        """End the session."""
        self.engine.abort(session)

    def content(self) -> Content:
        """What it serves."""
        return self.engine.content()

    def made(self) -> tuple[Receipt, ...] | None:
        """The receipt, if it is Acked."""
        session = self.engine.machine.facts.session
        if session is None or self.engine.machine.state.name != "Acked":
            return ()
        return (self.engine.machine.receipt(session),)

    def freeze(self, stop: bool) -> bool:  # noqa: FBT001 - as the protocol says
        """Threads cannot be stopped."""
        return False

    def kill(self) -> bool:
        """Nor killed."""
        return False

    def revive(self) -> None:
        """Nothing more goes wrong."""
        self._planned = None
        self._released.set()

    def gauge(self) -> tuple[int, int]:
        """Its process is this one."""
        return 0, 0

    def _come_to(self, point: int | str) -> None:
        if self._planned is None or self._planned[1] != point:
            return
        fault, self._planned = self._planned[0], None
        error = InjectedError(f"injected at {point}: {fault}")
        if fault == "die" and self._answer is not None:
            self._answer.set_exception(EngineGone(f"injected: engine {self.link.id} is dead"))
        if fault == "spoil":
            self.engine.spoil()
        if fault in ("hang", "die", "wait"):
            self._released.wait()
        if fault in ("raise", "hang", "die"):
            raise error


class _ProcessPeer:
    """An engine in a process of its own, started anew when it was killed."""

    def __init__(self, name: str, inlets: Mapping[str, InletFactory]) -> None:
        self._name, self._inlets = name, inlets
        self.link = EngineProcess(name, inlets)

    def open(self, session: Session, plan: Plan, content: str) -> None:
        self.link.open(session, "0", plan, expectation(plan, content), _ANSWER).result(_ANSWER)

    def arm(self, fault: Fault, point: int | str) -> None:
        self._ask("plan_fault", "kill" if fault == "die" else fault, point)

    def reached(self) -> bool:
        return not self.link.alive or self._told("reached", lost=True)

    def release(self) -> None:
        self._told("release", lost=None)

    def ended(self) -> bool:
        return self.link.reception is None or self.link.reception.done()

    def commit(self, session: Session) -> None:
        self._ask("commit", session)

    def abort(self, session: Session) -> None:
        self._told("abort", session, lost=None)

    def content(self) -> Content:
        content: Content = self._ask("content")
        return content

    def made(self) -> tuple[Receipt, ...] | None:
        return None

    def freeze(self, stop: bool) -> bool:  # noqa: FBT001 - as the protocol says
        self.link.freeze(stop)
        return True

    def kill(self) -> bool:
        self.link.kill()
        return True

    def revive(self) -> None:
        if self.link.alive:
            self.release()
            self._told("plan_fault", None, lost=None)
        if not self.link.alive:
            self.link.kill()
            self.link = EngineProcess(self._name, self._inlets)
            self.link.wait_ready()

    def gauge(self) -> tuple[int, int]:
        levels: tuple[int, int] = self._told("gauge", lost=(0, 0))
        return levels

    def _ask(self, order: str, *args: Any) -> Any:
        return self.link.ask(order, *args).result(_ANSWER)

    def _told(self, order: str, *args: Any, lost: Any) -> Any:
        try:
            return self._ask(order, *args)
        except EngineGone:
            return lost


class ProcessPeers:
    """Engines in processes, started once for many checks: to import torch takes longer than any of them.

    Args:
        inlets: the receiving halves, functions that a process can import, by the transport's name.
    """

    def __init__(self, inlets: Mapping[str, InletFactory]) -> None:
        self._inlets = dict(inlets)
        self._peers: dict[str, _ProcessPeer] = {}

    def of(self, names: Iterable[str]) -> Sequence[Peer]:
        """The engines of these names, alive and without faults."""
        names = list(names)
        for name in names:
            if name not in self._peers:
                self._peers[name] = _ProcessPeer(name, self._inlets)
        for name in names:
            self._peers[name].link.wait_ready()
            self._peers[name].revive()
        return [self._peers[name] for name in names]

    def close(self) -> None:
        """End the processes."""
        for peer in self._peers.values():
            peer.link.close()
        self._peers.clear()

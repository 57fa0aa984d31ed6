"""Small engines in processes of their own: for what crosses a process boundary, and for sudden death.

``EngineProcess`` is the trainer's end: it starts the process, and waits until that has imported torch, so
that no test measures an import. Orders go to it over a pipe, and each is answered by a future; when the
process dies, every future that is open fails with ``EngineGone``.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from ..fsm.contract import EngineStatus, InletFactory, Ticket
from ..fsm.engine import Answer
from ..fsm.engine_table import Session
from ..fsm.errors import EngineGone
from ..fsm.plan import Plan
from ..fsm.receipt import Expectation, Participant, Receipt

__all__ = ["EngineProcess", "gauge", "limit_descriptors"]


def gauge() -> tuple[int, int]:
    """How many descriptors and threads this process has."""
    # Listing the descriptors takes one itself.
    return sum(1 for _ in os.scandir("/proc/self/fd")) - 1, sum(1 for _ in os.scandir("/proc/self/task"))


def limit_descriptors(more: int | None) -> None:
    """Allow this process so many descriptors more than it has; None: as many as the system does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in os.scandir("/proc/self/fd"))
    soft = hard if more is None else min(hard, highest + 1 + more)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class EngineProcess:
    """An engine of one rank in a process of its own. It can be told to receive, as any link can.

    Args:
        name: the engine's.
        inlets: the receiving halves, functions that the process can import; those of the library by default.
    """

    def __init__(self, name: str, inlets: Mapping[str, InletFactory] | None = None) -> None:
        self.id = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(name, theirs, inlets), name=name, daemon=True)
        self._process.start()
        theirs.close()
        self._numbers = itertools.count()
        self._open: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self.reception: Future[tuple[Receipt, ...]] | None = None
        self._ready: Future[Any] = self._expect(-1)
        threading.Thread(target=self._hear, name=f"{name}-answers", daemon=True).start()

    @property
    def participant(self) -> Participant:
        """The engine as a member of rounds."""
        return Participant(self.id, "0", 1)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def wait_ready(self, limit: float = 120.0) -> None:
        """Until it has imported everything."""
        self._ready.result(limit)

    def ask(self, order: str, *args: Any) -> Future[Any]:
        """Give it an order: a method of ``SmallEngine``, or one of those in ``_Orders``."""
        number = next(self._numbers)
        future = self._expect(number)
        try:
            with self._lock:
                self._pipe.send((number, order, args))
        except OSError:
            self._fail_all()
        return future

    def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
        """Let it receive."""
        self.reception = self.ask("receive", session, ticket)
        return self.reception

    def freeze(self, stop: bool) -> None:  # noqa: FBT001 - said by position, as the signals are
        """Stop the process where it is, or let it go on."""
        if self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGSTOP if stop else signal.SIGCONT)

    def kill(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join()

    def hello(self) -> Future[EngineStatus]:
        """Not asked by transports."""
        raise NotImplementedError

    def open(
        self, session: Session, incarnation: str, plan: Plan, expected: Expectation, limit: float
    ) -> Future[None]:
        """Pause, and make room."""
        return self.ask("open", session, plan, expected.digest)

    def commit(self, session: Session) -> Future[None]:
        """Serve what was received."""
        return self.ask("commit", session)

    def abort(self, session: Session) -> Future[Answer]:
        """End the session."""
        return self.ask("abort", session)

    def resume(self, session: Session) -> Future[None]:
        """Not asked by transports."""
        raise NotImplementedError

    def close(self) -> None:
        """End the process."""
        self.kill()

    def _expect(self, number: int) -> Future[Any]:
        future = self._open[number] = Future()
        return future

    def _hear(self) -> None:
        try:
            while True:
                number, value, error = self._pipe.recv()
                future = self._open.pop(number)
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)
        except (EOFError, OSError):
            self._fail_all()

    def _fail_all(self) -> None:
        for number in list(self._open):
            self._open.pop(number).set_exception(EngineGone(f"the process of engine {self.id} is dead"))


def _serve(name: str, pipe: Connection, inlets: Mapping[str, InletFactory] | None) -> None:
    """The process: orders are carried out one after the other; receiving goes on beside them."""
    orders = _Orders(name, inlets)
    lock = threading.Lock()

    def carry_out(number: int, order: str, args: tuple[Any, ...]) -> None:
        value, error = None, None
        try:
            value = orders.find(order)(*args)
        except BaseException as raised:  # noqa: BLE001 - it is the answer
            error = raised
        with lock:
            pipe.send((number, value, error))

    pipe.send((-1, None, None))
    while True:
        try:
            number, order, args = pipe.recv()
        except (EOFError, OSError):
            return
        if order == "receive":
            threading.Thread(target=carry_out, args=(number, order, args), daemon=True).start()
        else:
            carry_out(number, order, args)


class _Orders:
    """What a test can ask of the process besides what an engine does."""

    def __init__(self, name: str, inlets: Mapping[str, InletFactory] | None) -> None:
        from .small_engine import INLETS, SmallEngine

        self._engine = SmallEngine(name, fault=self._fault, at=self._fault, inlets=inlets or INLETS)
        self._planned: tuple[str, int | str] | None = None
        self._released = threading.Event()

    def find(self, order: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self, order, None) or getattr(self._engine, order)
        return found

    def receive(self, session: Session, ticket: Ticket) -> tuple[Receipt, ...]:
        """As an engine of one rank."""
        return (self._engine.receive(session, ticket),)

    def plan_fault(self, kind: str | None, at: int | str = 0) -> None:
        """Let the next reception ``raise``, ``hang``, ``wait``, ``spoil`` or ``kill`` at a bucket or a point.

        After a ``hang`` it raises, after a ``wait`` it goes on.
        """
        self._planned = (kind, at) if kind else None
        self._released.clear()

    def state(self) -> str:
        """The name of the state that its machine is in."""
        return self._engine.machine.state.name

    def reached(self) -> bool:
        """Whether what was planned has happened, or begun."""
        return self._planned is None

    def release(self) -> None:
        """End a ``hang`` or a ``wait``."""
        self._released.set()

    def gauge(self) -> tuple[int, int]:
        """How many descriptors and threads the process has."""
        return gauge()

    def limit_descriptors(self, more: int | None) -> None:
        """Allow the process so many descriptors more than it has."""
        limit_descriptors(more)

    def _fault(self, at: int | str) -> None:
        if self._planned is None or self._planned[1] != at:
            return
        kind, self._planned = self._planned[0], None
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "spoil":
            self._engine.spoil()
        if kind in ("hang", "wait"):
            self._released.wait()
        if kind in ("raise", "hang"):
            raise RuntimeError(f"injected at {at if isinstance(at, str) else f'bucket {at}'}: {kind}")

"""The smallest engine that receives by the rules: an engine machine, an inlet, and copies beside its weights.

It has no gate and no limit of its own, and one rank a ``SmallEngine``. What a test wants to go wrong is a
function that is called with the index of each bucket, when it has arrived and before it is applied; another
one is called at the points between them: ``receive`` before there is an inlet, ``applied`` while the transfer
buffer is still held, ``released`` when it is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from ..fsm.contract import EngineStatus, Inlet, InletFactory, Ticket
from ..fsm.engine import Answer, EngineMachine
from ..fsm.engine_table import AbortOrdered, AllApplied, CommitOrdered, FrameSeen, Opened, Session, ViewClosed
from ..fsm.plan import Plan
from ..fsm.receipt import Expectation, Participant, Receipt
from ..fsm.sampling import part_of
from ..transports.collective import collective_inlet
from ..transports.digest import digest
from ..transports.memory import memory_inlet
from ..transports.octets import flat
from ..transports.packing import unpack

__all__ = ["INLETS", "SmallEngine", "SmallLink", "expectation"]

INLETS: Mapping[str, InletFactory] = {"memory": memory_inlet, "collective": collective_inlet}


def expectation(plan: Plan, content: str = "") -> Expectation:
    """What a good receipt says of ``plan``."""
    return Expectation(plan.fingerprint, len(plan.tensors), plan.nbytes, len(plan.buckets), content)


class SmallEngine:
    """One rank. ``tensors`` holds what it serves: every name of the plan, ties apart, after a commit."""

    def __init__(
        self,
        name: str,
        rank: int = 0,
        fault: Callable[[int], None] = lambda _: None,
        *,
        at: Callable[[str], None] = lambda _: None,
        inlets: Mapping[str, InletFactory] = INLETS,
    ) -> None:
        self.machine = EngineMachine(name, rank=rank, incarnation="0")
        self.tensors: dict[str, torch.Tensor] = {}
        self.fault, self.at = fault, at
        self._inlets = inlets
        self._staged: dict[str, torch.Tensor] = {}
        self._plan: Plan | None = None
        self._inlet: Inlet | None = None

    def open(self, session: Session, plan: Plan, content: str = "") -> None:
        """Pause, and make room beside the weights."""
        self.machine.fire(Opened(session, expectation(plan, content)))
        self._plan = plan
        self._staged = {
            # by way of bytes: torch makes not every dtype that it has
            each.name: torch.zeros(each.nbytes, dtype=torch.uint8)
            .view(getattr(torch, each.dtype))
            .view(each.shape)
            for each in plan.tensors
        }

    def receive(self, session: Session, ticket: Ticket, limit: float = 20.0) -> Receipt:
        """Receive every bucket. Blocks its thread."""
        plan, machine = self._plan, self.machine
        if plan is None:
            raise RuntimeError("nothing was opened")
        try:
            self.at("receive")
            self._inlet = self._inlets[ticket.transport](ticket, session, plan, limit)
            with self._inlet.buckets() as frames:
                for frame in frames:
                    machine.fire(FrameSeen(session, frame.index))
                    self.fault(frame.index)
                    unpack(plan, frame, self._staged)
                machine.fire(AllApplied(session))
                self.at("applied")
            self.at("released")
            size = sum(tensor.numel() * tensor.element_size() for tensor in self._staged.values())
            wanted = machine.facts.plan.digest if machine.facts.plan else ""
            content = digest(plan, self._staged, part_of(wanted)) if wanted else ""
            machine.fire(ViewClosed(session, len(self._staged), size, content))
            return machine.receipt(session)
        except BaseException:
            machine.fire(AbortOrdered(session))
            raise

    def commit(self, session: Session) -> None:
        """Serve what was received, under every name."""
        self.machine.fire(CommitOrdered(session))
        self.tensors = dict(self._staged)
        for tie in self._plan.ties if self._plan else ():
            self.tensors[tie.name] = self._staged[tie.of].clone()

    def spoil(self) -> None:
        """Change a byte of what was received, so that its digest is another one."""
        tensor = next(each for each in self._staged.values() if each.numel())
        tensor.view(-1).view(torch.uint8)[0] ^= 0xFF

    def content(self) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        """What it serves: name to (dtype, shape, bytes)."""
        return {name: _described(tensor) for name, tensor in self.tensors.items()}

    def abort(self, session: Session) -> Answer:
        """End the session, and wake whoever receives."""
        self.machine.fire(AbortOrdered(session))
        if self._inlet is not None:
            self._inlet.close()
        return self.machine.answer(session)


class SmallLink:
    """The trainer's end of an engine in this process, one ``SmallEngine`` a rank. It can only receive."""

    def __init__(self, *ranks: SmallEngine) -> None:
        self.ranks = ranks

    @property
    def id(self) -> str:
        """The engine's name."""
        return self.ranks[0].machine.facts.engine

    @property
    def participant(self) -> Participant:
        """The engine as a member of rounds."""
        return Participant(self.id, "0", len(self.ranks))

    def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
        """Let every rank receive in a thread of its own. The first that fails is the engine's failure."""
        return _joined(
            [
                _spawned(engine.receive, session, Ticket(ticket.transport, {**ticket.values, "rank": rank}))
                for rank, engine in enumerate(self.ranks)
            ]
        )

    def hello(self) -> Future[EngineStatus]:
        """Not asked by transports."""
        raise NotImplementedError

    def open(
        self, session: Session, incarnation: str, plan: Plan, expected: Expectation, limit: float
    ) -> Future[None]:
        """Not asked by transports."""
        raise NotImplementedError

    def commit(self, session: Session) -> Future[None]:
        """Not asked by transports."""
        raise NotImplementedError

    def abort(self, session: Session) -> Future[Answer]:
        """Not asked by transports."""
        raise NotImplementedError

    def resume(self, session: Session) -> Future[None]:
        """Not asked by transports."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to give back."""


def _described(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    octets = flat(tensor.contiguous())
    return str(tensor.dtype), tuple(tensor.shape), b"" if octets is None else octets.tobytes()


def _spawned(work: Callable[..., Receipt], *args: Any) -> Future[Receipt]:
    future: Future[Receipt] = Future()

    def run() -> None:
        try:
            value = work(*args)
        except BaseException as error:  # noqa: BLE001 - it is the answer
            future.set_exception(error)
        else:
            future.set_result(value)

    threading.Thread(target=run, name="small-engine", daemon=True).start()
    return future


def _joined(parts: list[Future[Receipt]]) -> Future[tuple[Receipt, ...]]:
    whole: Future[tuple[Receipt, ...]] = Future()
    lock = threading.Lock()

    def done(part: Future[Receipt]) -> None:
        with lock:
            error = part.exception()
            if whole.done():
                return
            if error is not None:
                whole.set_exception(error)
            elif all(each.done() for each in parts):
                whole.set_result(tuple(each.result() for each in parts))

    for each in parts:
        each.add_done_callback(done)
    return whole

"""The transport of a simulated round: frames travel in order to each engine, and receipts come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..fsm import events as e
from ..fsm.calls import Act, Call
from ..fsm.engine_table import AllApplied, FrameSeen, Session, ViewClosed
from ..fsm.errors import EngineError, EngineGone, PortClosed, StaleSession, TransportError, WeightSyncError
from ..fsm.facts import Facts
from ..fsm.receipt import Participant
from ..fsm.states import EngineState, State
from .world import Fault, Injected, Partner, end_session

if TYPE_CHECKING:
    from .simulation import Simulation

__all__ = ["SimulatedTransport"]

_TALKING = (State.Broadcasting, State.Awaiting)


class SimulatedTransport:
    """Takes one round's calls to a transport, and tells its facts through the phase they belong to."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._sending: Call | None = None
        self._collecting: Call | None = None
        self._arrivals: dict[Participant, float] = {}

    def work(self, call: Call) -> None:
        """Carry out ``call``."""
        match call.act:
            case Act.broadcast:
                self._sending = call
                self._send(0)
            case Act.collect:
                self._collect(call)
            case Act.transport_abort:
                self._abort(call)
            case _:
                self._simulation.answer(call)

    def look(self) -> None:
        """What a transport does when its port wakes it: ``collect`` returns when the round moved on."""
        if self._collecting and self._simulation.round.state is not State.Awaiting:
            call, self._collecting = self._collecting, None
            self._simulation.answer(call)

    # -- sending ---------------------------------------------------------------------------------------------

    def _send(self, index: int) -> None:
        call = self._sending
        if call is None:
            return
        fault = self._simulation.faults.inside(Act.broadcast, None, index)
        if fault and fault.kind != "raise":
            return  # stuck, until the transport is aborted
        if fault:
            self._sent(call, Injected(f"injected into bucket {index}"))
        elif self._simulation.round.state is not State.Broadcasting:
            self._sent(call, PortClosed("no longer Broadcasting"))
        elif index == self._facts.buckets:
            self._simulation.hear(e.AllSent(), State.Broadcasting)
            self._sent(call, None)
        else:
            for participant in sorted(self._facts.remaining):
                self._post(participant, index)
            self._simulation.hear(e.BucketSent(index), State.Broadcasting)
            self._simulation.soon(lambda: self._send(index + 1))

    def _sent(self, call: Call, error: BaseException | None) -> None:
        self._sending = None
        self._simulation.answer(call, error=error)

    def _post(self, participant: Participant, index: int) -> None:
        """A frame leaves; it arrives after the one before."""
        now, session = self._simulation.clock.now(), self._simulation.session
        at = max(self._arrivals.get(participant, 0.0), now + self._simulation.wire())
        self._arrivals[participant] = at
        self._simulation.at(at - now, lambda: self._arrive(participant, index, session))

    def _abort(self, call: Call) -> None:
        """Wake whoever is stuck."""
        stuck = self._sending
        if stuck:
            self._sent(stuck, TransportError("the transport was aborted"))
        self._simulation.answer(call)

    # -- the receiving half ----------------------------------------------------------------------------------

    def _arrive(self, participant: Participant, index: int, session: Session) -> None:
        """A frame arrives at an engine, which answers with an error frame if it cannot take it."""
        partner, fault = self._met(Act.broadcast, participant, index)
        try:
            self._take(partner, index, session, fault)
        except StaleSession:
            return  # a frame that comes after the end of its session, as its sender knows
        except WeightSyncError as error:
            self._simulation.soon(lambda error=error: self._lost(participant, error))  # type: ignore[misc]
        if partner.machine.state is EngineState.Acked and self._collecting:
            self._simulation.soon(lambda: self._receipt(participant))

    def _take(self, partner: Partner, index: int, session: Session, fault: Fault | None) -> None:
        machine, plan = partner.machine, self._simulation.plan
        if not partner.alive:
            raise EngineGone(f"engine {machine.facts.engine} is dead")
        if fault and fault.kind == "raise":
            end_session(machine, session)
            raise EngineError(f"engine {machine.facts.engine} fails at bucket {index}")
        if fault and fault.kind in ("hang", "lost"):
            partner.deaf = session
        if fault and fault.kind == "corrupt":
            partner.spoilt = session
        if partner.deaf == session:
            return
        machine.fire(FrameSeen(session, index))
        if index + 1 == plan.buckets:
            machine.fire(AllApplied(session))
            digest = "other bytes" if partner.spoilt == session else plan.digest
            machine.fire(ViewClosed(session, plan.tensors, plan.bytes, digest))

    # -- receipts --------------------------------------------------------------------------------------------

    def _collect(self, call: Call) -> None:
        self._collecting = call
        for participant in sorted(self._facts.remaining):
            if self._partner(participant).machine.state is EngineState.Acked:
                self._simulation.soon(lambda p=participant: self._receipt(p))  # type: ignore[misc]

    def _receipt(self, participant: Participant) -> None:
        if self._collecting is None:
            return
        partner, fault = self._met(Act.collect, participant)
        if fault and fault.kind in ("hang", "lost"):
            return
        try:
            if not partner.alive:
                raise EngineGone(f"engine {participant.id} is dead")
            if fault:
                raise EngineError(f"no receipt from {participant.id}")
            receipt = partner.machine.receipt(self._simulation.session)
        except WeightSyncError as error:
            self._lost(participant, error)
        else:
            self._simulation.hear(e.EngineAcked(participant, (receipt,)), State.Awaiting)

    def _met(
        self, act: Act, participant: Participant, bucket: int | None = None
    ) -> tuple[Partner, Fault | None]:
        """The engine, and the fault that befalls it here."""
        partner = self._partner(participant)
        fault = self._simulation.faults.inside(act, participant.id, bucket)
        if fault and fault.kind == "die":
            partner.alive = False
        return partner, fault

    def _partner(self, participant: Participant) -> Partner:
        return self._simulation.world.partners[participant.id]

    def _lost(self, participant: Participant, error: BaseException) -> None:
        """Tell a loss, through the port of the phase the transport is in."""
        phase = self._simulation.round.state
        self._simulation.hear(e.EngineLost(participant, error), phase if phase in _TALKING else _TALKING[0])

    @property
    def _facts(self) -> Facts:
        return self._simulation.round.facts

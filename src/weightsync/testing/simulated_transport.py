"""The transport of a simulated round: frames travel in order to each engine, and receipts come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..fsm import events as e
from ..fsm.calls import Act, Call
from ..fsm.engine_table import Session
from ..fsm.errors import EngineError, EngineGone, PortClosed, StaleSession, TransportError, WeightSyncError
from ..fsm.facts import Facts
from ..fsm.receipt import Participant, Receipt
from ..fsm.states import EngineState, State
from .partner import Partner, end_session
from .world import Fault, Injected

if TYPE_CHECKING:
    from .simulation import Simulation

__all__ = ["SimulatedTransport"]

_TALKING = (State.Broadcasting, State.Awaiting)
_LETTING_GO = 0.001
"""Seconds from the last bucket until a rank has let go of the transfer buffer."""


class SimulatedTransport:
    """Takes one round's calls to a transport, and tells its facts through the phase they belong to."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._sending: Call | None = None
        self._collecting: Call | None = None
        self._arrivals: dict[Participant, float] = {}
        self.receipts: dict[Participant, Receipt] = {}

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

    def key(self) -> tuple[object, ...]:
        """What decides how it goes on."""
        calls = [call and call.number for call in (self._sending, self._collecting)]
        return (*calls, frozenset(self.receipts), tuple(sorted(self._arrivals.items())))

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
            self._simulation.told(f"send bucket {index + 1}", lambda: self._send(index + 1), local=True)

    def _sent(self, call: Call, error: BaseException | None) -> None:
        self._sending = None
        self._simulation.answer(call, error=error)

    def _post(self, participant: Participant, index: int) -> None:
        """A frame leaves; it arrives after the one before."""
        now, session = self._simulation.clock.now(), self._simulation.session
        at = max(self._arrivals.get(participant, 0.0), now + self._simulation.wire())
        self._arrivals[participant] = at
        whose = f"{self._simulation.name} frame {index} to {participant}"
        self._simulation.at(
            at - now,
            lambda: self._arrive(participant, index, session),
            to=participant.id,
            label=whose,
            link=f"{self._simulation.name} frames to {participant}",
            refuse=lambda: self._fail(participant, index, session),
            spoil=lambda: self._spoil(participant, index, session),
        )

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
        if fault and fault.kind == "raise" and partner.alive:
            self._fail(participant, index, session)
            return
        try:
            self._take(partner, index, session, fault)
        except StaleSession:
            return  # a frame that comes after the end of its session, as its sender knows
        except WeightSyncError as error:
            self._tell_loss(participant, error)
        if partner.machine.state is EngineState.Acked:
            self._prove(participant, partner, session)
        elif partner.machine.state is EngineState.Releasing:
            self._simulation.at(
                _LETTING_GO, lambda: self._let_go(participant, partner, session),
                to=participant.id, label=f"{self._simulation.name}: {participant} lets go", alarm=True,
            )  # fmt: skip

    def _take(self, partner: Partner, index: int, session: Session, fault: Fault | None) -> None:
        machine = partner.machine
        if not partner.alive:
            raise EngineGone(f"engine {machine.facts.engine} is dead")
        if fault and fault.kind in ("hang", "lost"):
            partner.deaf = session
        if fault and fault.kind == "corrupt":
            partner.spoilt = session
        if partner.deaf != session:
            partner.frame(session, index, self._simulation.plan)

    def _fail(self, participant: Participant, index: int, session: Session) -> None:
        """The receiver cannot take a bucket: it ends the session, and says so in an error frame."""
        partner = self._partner(participant)
        end_session(partner.machine, session)
        self._tell_loss(participant, EngineError(f"engine {participant} fails at bucket {index}"))

    def _spoil(self, participant: Participant, index: int, session: Session) -> None:
        """Other bytes arrive than were sent."""
        self._partner(participant).spoilt = session
        self._arrive(participant, index, session)

    def _let_go(self, participant: Participant, partner: Partner, session: Session) -> None:
        if not partner.alive:
            return
        try:
            partner.close_view(session, self._simulation.plan)
        except WeightSyncError:
            return  # the session was ended meanwhile
        self._prove(participant, partner, session)

    def _prove(self, participant: Participant, partner: Partner, session: Session) -> None:
        """A rank that has come to Acked sends its receipt."""
        try:
            receipt = partner.machine.receipt(session)
        except WeightSyncError:
            return  # of another session
        self._simulation.told(f"receipt of {participant}", lambda: self._keep(participant, receipt))

    def refuse_plan(self, participant: Participant, error: WeightSyncError) -> None:
        """A receiving half that waits for its session fails as the open does."""
        loss = e.EngineLost(participant, error)
        what = f"loss of {participant}: {error}"
        self._simulation.told(what, lambda: self._simulation.hear(loss, State.Locked))

    def _tell_loss(self, participant: Participant, error: WeightSyncError) -> None:
        what = f"loss of {participant}: {error}"
        self._simulation.told(what, lambda: self._lost(participant, error))

    # -- receipts --------------------------------------------------------------------------------------------

    def _collect(self, call: Call) -> None:
        self._collecting = call
        for participant in sorted(self._facts.remaining & self.receipts.keys()):
            self._hear(participant)

    def _keep(self, participant: Participant, receipt: Receipt) -> None:
        """A receipt has arrived; before ``collect`` it waits to be collected."""
        self.receipts[participant] = receipt
        self._hear(participant)

    def _hear(self, participant: Participant) -> None:
        if self._collecting is None:
            return
        partner, fault = self._met(Act.collect, participant)
        if fault and fault.kind in ("hang", "lost"):
            del self.receipts[participant]
        elif fault:
            gone = f"no receipt from {participant.id}"
            self._lost(participant, EngineError(gone) if partner.alive else EngineGone(gone))
        else:
            receipt = self.receipts[participant]
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

"""The trainer's half of a round, reduced to what a transport sees: three phases, each with a port."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ..fsm.contract import EngineLink, Transport, Weights
from ..fsm.engine_table import Session
from ..fsm.plan import Plan
from ..fsm.receipt import Participant
from .recording import RecordingPort

__all__ = ["Sending"]


class _Link(EngineLink, Protocol):
    @property
    def participant(self) -> Participant: ...


@dataclass(slots=True)
class Sending:
    """One round's worth of calls to a transport. Each phase keeps its port, to be looked at.

    Args:
        transport: what is tested.
        weights: what is sent.
        plan: how it is sent.
        links: to the engines, which have opened ``session``.
        session: of the round.
        limit: seconds for each phase.
        quorum: how many engines must remain; all by default.
    """

    transport: Transport
    weights: Weights
    plan: Plan
    links: Iterable[_Link]
    session: Session
    limit: float = 20.0
    quorum: int | None = None
    ports: dict[str, RecordingPort] = field(default_factory=dict)

    @property
    def engines(self) -> Mapping[Participant, EngineLink]:
        """Who takes part."""
        return {link.participant: link for link in self.links}

    def port(self, phase: str) -> RecordingPort:
        """The port of a phase. Engines that an earlier phase lost take no part in it."""
        if phase not in self.ports:
            lost = {fact[1] for port in self.ports.values() for fact in port.fired if fact[0] == "lost"}
            engines = [each for each in self.engines if each not in lost]
            quorum = len(self.engines) if self.quorum is None else self.quorum
            self.ports[phase] = RecordingPort(self.session, engines, self.limit, quorum)
        return self.ports[phase]

    def open(self) -> RecordingPort:
        """The first phase."""
        self.transport.open(self.plan, self.weights, self.engines, self.port("open"))
        return self.port("open")

    def broadcast(self) -> RecordingPort:
        """The second."""
        self.transport.broadcast(self.plan, self.weights, self.port("broadcast"))
        return self.port("broadcast")

    def collect(self) -> RecordingPort:
        """The third."""
        self.transport.collect(self.plan, self.port("collect"))
        return self.port("collect")

    def run(self) -> RecordingPort:
        """All of them, and the good end if nobody was lost; otherwise the bad one."""
        try:
            for phase in (self.open, self.broadcast, self.collect):
                if phase().closed:
                    break
        except BaseException:
            self.transport.abort()
            raise
        if self.ports.get("collect") is None or self.ports["collect"].closed:
            self.transport.abort()
        else:
            self.transport.clean()
        return self.port("collect")

    @property
    def errors(self) -> dict[str, BaseException]:
        """Why engines were lost, in any phase."""
        return {name: error for port in self.ports.values() for name, error in port.errors.items()}

"""Rounds that are watched: each call to the transport runs beside the check, within its time.

``Rounds`` is one transport with its engines for as long as a check takes; ``Watched`` is one round of it,
phase by phase.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from typing import Any, Protocol, Self

import torch

from ...fsm.contract import EngineLink, InletFactory, Ticket, Transport
from ...fsm.engine_table import Session
from ...fsm.errors import PortClosed
from ...fsm.receipt import Participant, Receipt
from ...handlers.threads import spawn
from ...transports.weights import TorchWeights
from ..small_engine import expectation
from .contents import described, plain
from .peers import Peer
from .rules import Rule, Violation, eventually, holding
from .subjects import transport_of
from .transport_rules import (
    ABORT_WAKES,
    BOUNDED,
    COMPLETE,
    CONTENT,
    DECLARES,
    ENDS_WELL,
    NEXT_ROUND,
    TELLS_OR_RAISES,
)
from .watching import WatchingPort

__all__ = ["PHASES", "Rounds", "TransportUnderTest", "Watched"]

PHASES = ("open", "broadcast", "collect")
_STILL = 0.2
"""Seconds without a word from a sender that is taken for stuck; a check is the sharper, the longer."""

_PLAIN = (str, int, float, bool, type(None))
BUCKET = 64
"""Bytes a bucket, unless a check says otherwise."""

_EPOCHS = itertools.count(1)


class TransportUnderTest(Protocol):
    """What is tested, and how much time to give it."""

    @property
    def patience(self) -> float:
        """Seconds until something that should happen at once counts as never."""

    @property
    def processes(self) -> bool:
        """Whether its engines are in processes of their own."""

    def transport(self) -> Transport:
        """A new transport."""

    def inlet(self) -> InletFactory:
        """Its receiving half."""

    def engines(self, names: Sequence[str]) -> Sequence[Peer]:
        """Engines that can receive by it, alive and without faults."""


class _Heard:
    """A link that notes its ticket; a silent one has an engine that never answers, and is not even there."""

    def __init__(self, link: EngineLink, tickets: list[Ticket], silent: bool) -> None:  # noqa: FBT001 - private
        self._link, self._tickets, self._silent = link, tickets, silent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
        """Start receiving, or not."""
        self._tickets.append(ticket)
        return Future() if self._silent else self._link.receive(session, ticket)


class Watched:
    """One round.

    Args:
        rounds: whose it is.
        state: the trainer's tensors.
        names: the engines that take part.
        limit: seconds for each phase.
        bucket_bytes: the most that a bucket may hold.
        needs_all: whether the loss of one engine ends the round, as it does with a quorum of all.
        honest: whether the receipts are to be good.
        moves_on: phases, and after how many facts the round moves on in each.
        silent: the engines get their tickets and do nothing with them.
    """

    def __init__(
        self,
        rounds: Rounds,
        state: Mapping[str, torch.Tensor],
        *,
        limit: float,
        bucket_bytes: int = BUCKET,
        needs_all: bool = True,
        honest: bool = True,
        moves_on: Mapping[str, int] | None = None,
        silent: bool = False,
    ) -> None:
        epoch = next(_EPOCHS)
        self.session = Session(f"kit-{epoch}", epoch, epoch)
        self.weights = TorchWeights.of(state)
        self.plan = self.weights.plan(bucket_bytes)
        self.expected = expectation(self.plan, self.weights.digest())
        self.ports: dict[str, WatchingPort] = {}
        self.tickets: list[Ticket] = []
        self._silent = silent
        self._judged: float | None = None
        self._state, self._rounds = state, rounds
        self._peers = {peer.link.participant: peer for peer in rounds.peers}
        self._limit, self._honest, self._moves_on = limit, honest, moves_on or {}
        self._quorum = len(self._peers) if needs_all else 1
        self._fenced: set[Participant] = set()
        for peer in rounds.peers:
            peer.open(self.session, self.plan, self.expected.digest)

    # -- the phases ----------------------------------------------------------------------------------------

    def port(self, phase: str) -> WatchingPort:
        """The port of a phase; engines that an earlier one lost take no part in it."""
        if phase not in self.ports:
            gone = self._fenced | {fact[1] for fact in self.fired("lost")}
            self.ports[phase] = WatchingPort(
                phase, self.session, tuple(each for each in self._peers if each not in gone), self.expected,
                limit=self._limit, quorum=self._quorum, made=self._made, honest=self._honest,
                moves_on_after=self._moves_on.get(phase),
            )  # fmt: skip
        return self.ports[phase]

    def begin(self, phase: str) -> Future[object]:
        """Start a phase beside the check."""
        port, transport = self.port(phase), self._rounds.transport
        links: dict[Participant, Any] = {
            each: _Heard(peer.link, self.tickets, self._silent) for each, peer in self._peers.items()
        }
        work: dict[str, Callable[[], object]] = {
            "open": lambda: transport.open(self.plan, self.weights, links, port),
            "broadcast": lambda: transport.broadcast(self.plan, self.weights, port),
            "collect": lambda: transport.collect(self.plan, port),
        }
        return spawn(f"kit-{phase}", work[phase])

    def finish(self, phase: str, call: Future[object], patience: float | None = None) -> BaseException | None:
        """Wait for a phase; the error that it raised, if it did. What it broke is raised."""
        value, error = self._rounds.outcome(
            call, f"{phase} of {self._rounds.transport.name}", BOUNDED, patience or self._judged
        )
        self.judge()
        if error is None and value is not None:
            raise TELLS_OR_RAISES.broken(f"{phase} returned {value!r}")
        return None if isinstance(error, PortClosed) else error

    def phase(self, phase: str, patience: float | None = None) -> BaseException | None:
        """Run a phase, whatever becomes of it."""
        return self.finish(phase, self.begin(phase), patience)

    def judge(self) -> None:
        """Raise the first flaw that a port has seen, or a ticket has."""
        for ticket in self.tickets:
            odd = [name for name, value in ticket.values.items() if type(value) not in _PLAIN]
            if ticket.transport != self._rounds.transport.name or odd:
                raise DECLARES.broken(
                    f"a ticket is for {ticket.transport!r}, and {odd} in it are no plain values"
                )
        for port in self.ports.values():
            if port.flaws:
                raise port.flaws[0]

    def told(self, phase: str) -> None:
        """Refuse a phase that returned with an open port, and has not told everything."""
        port = self.port(phase)
        if port.closed or port.limit <= 0:
            return
        if phase == "broadcast" and ("all_sent",) not in port.fired:
            raise TELLS_OR_RAISES.broken("broadcast returned without all_sent, and its port is open")
        silent = [str(each) for each in port.engines if each.id not in port.receipts]
        if phase == "collect" and silent:
            raise TELLS_OR_RAISES.broken(
                f"collect returned with an open port and without a word on {', '.join(silent)}"
            )

    def drive(self) -> BaseException | None:
        """All phases until one fails or the round is over, whatever they tell; the error of one, if any."""
        for phase in PHASES:
            error = self.phase(phase)
            if error is not None or self.port(phase).closed:
                return error
        return None

    def run(self) -> BaseException | None:
        """The same, with everything told, and the end that fits."""
        error = None
        for phase in PHASES:
            error = self.phase(phase)
            if error is not None or self.port(phase).closed:
                break
            self.told(phase)
        if error is None and "collect" in self.ports and not self.ports["collect"].closed:
            self._rounds.end("clean")
        else:
            self._rounds.end("abort")
        return error

    def good(self, rule: Rule | None = None) -> None:
        """Run it: everybody has to hold everything, or ``rule`` is broken, unless another one is.

        Nothing happens to its ports that would have to wake a phase, so each may wait for its deadline. That
        comes before the kit gives up: what did not arrive is what such a round has to answer for.
        """
        self._limit, self._judged = min(self._limit, self._rounds.patience), 2 * self._rounds.patience
        error = self.run()
        if not self.lost:
            self._arrived(rule or COMPLETE, error)
        if self.lost:
            name, why = next(iter(self.lost.items()))
            raise (rule or COMPLETE).broken(
                f"engine {name} was lost, though nothing was wrong: {why!r}"
            ) from why
        if error is not None:
            raise (rule or CONTENT).broken(f"a round failed, though nothing was wrong: {error!r}") from error
        self.hold([each.id for each in self._peers], rule)

    def hold(self, names: Sequence[str], rule: Rule | None = None) -> None:
        """Let these engines commit: they must serve what the trainer holds."""
        wanted = described(self._state)
        for participant, peer in self._peers.items():
            if participant.id in names:
                with holding(rule or CONTENT, f"engine {participant} cannot commit"):
                    peer.commit(self.session)
                differs = sorted(name for name, each in wanted.items() if peer.content().get(name) != each)
                if differs:
                    raise (rule or CONTENT).broken(
                        f"engine {participant} holds other bytes than the trainer for {', '.join(differs)}"
                    )

    def _arrived(self, rule: Rule, error: BaseException | None) -> None:
        """Refuse a phase that has waited for its deadline, though nothing was wrong."""
        phase, port = list(self.ports.items())[-1]
        if port.closed or port.limit > 0:
            return
        silent = [str(each) for each in port.engines if each.id not in port.receipts]
        sent = len(self.fired("bucket_sent"))
        if error is not None or silent:
            raise rule.broken(
                f"nothing was wrong, and {phase} has waited for its deadline, {self._limit:g} s: "
                f"{sent} of {len(self.plan.buckets)} buckets were told of as sent, and no receipt came of "
                f"{', '.join(silent) or 'nobody'}; raised was {error!r}"
            ) from error

    # -- what became of it ----------------------------------------------------------------------------------

    def fired(self, name: str) -> list[tuple[Any, ...]]:
        """The facts of this name, of all phases."""
        return [fact for port in list(self.ports.values()) for fact in list(port.fired) if fact[0] == name]

    @property
    def lost(self) -> dict[str, BaseException]:
        """Why engines were lost."""
        return {fact[1].id: fact[2] for fact in self.fired("lost")}

    @property
    def acked(self) -> list[str]:
        """The engines that proved something."""
        return [fact[1].id for fact in self.fired("acked")]

    def fence(self, name: str) -> None:
        """The round goes on without this engine, in every phase from now on."""
        participant = next(each for each in self._peers if each.id == name)
        self._fenced.add(participant)
        for port in list(self.ports.values()):
            port.fence(participant)

    def close(self) -> None:
        """The round moves on, out of all phases."""
        for phase in PHASES:
            self.port(phase).close()

    def _made(self, engine: Participant) -> tuple[Receipt, ...] | None:
        return self._peers[engine].made()


class Rounds:
    """A transport and its engines, for one check. A context, which ends both."""

    def __init__(self, tested: TransportUnderTest, names: Sequence[str] = ("a", "b")) -> None:
        self.patience = tested.patience
        self.transport = transport_of(tested)
        self.peers = list(tested.engines(names))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for peer in self.peers:
            peer.release()
        with suppress(Violation):
            self.end("abort")
        if kind is None:
            self.end("close")

    def __getitem__(self, name: str) -> Peer:
        return next(peer for peer in self.peers if peer.link.id == name)

    def round(self, state: Mapping[str, torch.Tensor] | None = None, **options: Any) -> Watched:
        """A round, which its engines have opened."""
        return Watched(self, plain() if state is None else state, **{"limit": 2 * self.patience, **options})

    def outcome(
        self, call: Future[Any], what: str, rule: Rule, patience: float | None = None
    ) -> tuple[object, BaseException | None]:
        """What a call returned or raised; within its time, or ``rule`` is broken."""
        limit = self.patience if patience is None else patience
        try:
            error = call.exception(limit)
        except NotYet:
            raise rule.broken(f"{what} did not end within {limit:g} s") from None
        return (None, error) if error is not None else (call.result(), None)

    def end(self, method: str, rule: Rule = ENDS_WELL) -> None:
        """``clean``, ``abort`` or ``close``: in time, and without an error or a value."""
        call: Future[object] = spawn(f"kit-{method}", getattr(self.transport, method))
        late = ABORT_WAKES if method == "abort" else BOUNDED
        value, error = self.outcome(call, f"{method} of {self.transport.name}", late)
        if error is not None:
            raise rule.broken(f"{method} raised {error!r}") from error
        if value is not None:
            raise TELLS_OR_RAISES.broken(f"{method} returned {value!r}")

    def join(self, whole: Future[BaseException | None], rule: Rule) -> BaseException | None:
        """The end of what ran beside: the error of a phase, if any. A violation in it is raised."""
        value, error = self.outcome(whole, "the round", rule, 4 * self.patience)
        if error is not None:
            raise error
        return value if isinstance(value, BaseException) else None

    def stick(self, name: str, run: Watched, whole: Future[BaseException | None]) -> None:
        """Wait until an engine has come to its fault, and the sender cannot go on either.

        Otherwise a transport that does not listen would hear what it is told by the next phase, or fact.
        """
        eventually(lambda: self[name].reached() or whole.done(), self.patience)
        end, since, before = time.monotonic() + self.patience, time.monotonic(), -1
        while not whole.done() and time.monotonic() < end:
            now = sum(1 + port.tried for port in list(run.ports.values()))
            if now != before:
                since, before = time.monotonic(), now
            elif time.monotonic() - since > _STILL:
                return
            time.sleep(0.01)

    def stopped(self, whole: Future[BaseException | None]) -> None:
        """What ran beside has ended, with an error or without, now that it was aborted."""
        _, error = self.outcome(whole, "the phase that was aborted", ABORT_WAKES)
        if isinstance(error, Violation):
            raise ABORT_WAKES.broken(str(error)) if error.rule is BOUNDED else error

    def freed(self, *names: str) -> None:
        """These engines stop receiving by themselves, now that the round is over."""
        for peer in self.peers:
            if peer.link.id in names and not eventually(peer.ended, self.patience):
                raise ABORT_WAKES.broken(
                    f"engine {peer.link.id} still receives {self.patience:g} s after the end"
                )

    def revive(self) -> None:
        """Everybody is alive, and nothing more goes wrong; receptions of earlier rounds have ended."""
        for peer in self.peers:
            peer.revive()
        self.freed(*(peer.link.id for peer in self.peers))

    def go_on(self) -> None:
        """The next round, in which nothing goes wrong, is a good one."""
        self.revive()
        self.round(plain(9)).good(NEXT_ROUND)

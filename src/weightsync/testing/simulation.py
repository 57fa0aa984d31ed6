"""One round on a hand-turned clock: real driver, tables, lock, ledger and engine machines, and no threads.

Only what would be a machine or a wire is simulated. A call is a message that arrives after a delay, is worked
on by the real value (``LockBook``, ``Ledger``, ``EngineMachine``) and is answered after another delay; frames
travel to each engine in order, everything else may overtake everything else. A :class:`Fault` bends one
message. The same seed gives the same round.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from ..fsm import events as e
from ..fsm.calls import ENGINE_ACTS, LOCK_ACTS, TRANSPORT_ACTS, Act, Call
from ..fsm.driver import Driver
from ..fsm.engine import Answer
from ..fsm.engine_table import EngineFacts, Opened, ResumeOrdered, Session
from ..fsm.errors import EngineGone, PlanError, WeightsGone, WeightSyncError
from ..fsm.facts import opening
from ..fsm.policy import Policy
from ..fsm.receipt import Expectation, Participant
from ..fsm.results import RoundResult
from ..fsm.round import Identity, Round
from ..fsm.setting import Setting
from ..fsm.states import State
from ..fsm.tickets import Waiting
from .clock import HandClock
from .partner import Partner, end_session
from .simulated_lock import SimulatedLock
from .simulated_transport import SimulatedTransport
from .world import Fault, Injected, Misfortunes, World

__all__ = ["Fault", "Injected", "Simulation", "run_together"]

_LEDGER_ACTS = frozenset({Act.bind, Act.publish, Act.ask})


class Simulation:
    """A world around one driver.

    Args:
        engines: how many engines, called e0, e1, ...
        buckets: how many buckets the plan has.
        policy: as a user would give it.
        inplace: names of engines that load in place.
        faults: what goes wrong.
        executors: how many executors the trainer has, called x0, x1, ...
        seed: orders messages that cross.
        jitter: one message in ten takes up to so many seconds longer.
        rival: so many seconds another trainer holds the lock from the beginning.
        version: of the weights; by default the next one the ledger has free.
        content: of the weights; two rounds with the same content hand over the same bytes.
        earlier: the simulation of the round before, whose world goes on.
        owner: whose round it is; a trainer remembers what became of its own rounds.
        steady: every message takes the same time, and nothing is drawn by lot.
        world: the world it goes on in, instead of that of ``earlier``.
    """

    def __init__(
        self,
        *,
        engines: int = 2,
        buckets: int = 3,
        policy: Policy | None = None,
        inplace: Sequence[str] = (),
        faults: Sequence[Fault] = (),
        executors: int = 1,
        seed: int = 0,
        jitter: float = 0.0,
        rival: float = 0.0,
        version: int | None = None,
        content: str | None = None,
        earlier: Simulation | None = None,
        owner: str = "trainer",
        steady: bool = False,
        world: World | None = None,
    ) -> None:
        self.policy = policy or Policy(deadline=4.0, lease=2.0)
        if world is None:
            world = earlier.world if earlier else World.of(engines, inplace, self.policy.lease)
        self.world: World = world
        self.world.rounds += 1
        self.name, self.owner = f"r{self.world.rounds}", owner
        self.faults = Misfortunes(faults)
        self.log: list[str] = []
        self.began = self._now
        self.before = self._looked()
        self.at_release: list[tuple[Call, ...]] = []
        self._random = random.Random(seed)  # noqa: S311 - keeps no secret
        self._jitter, self._steady = jitter, steady
        self._asked: dict[int, tuple[Call, float]] = {}
        self._mute: set[int] = set()
        self.unfit = False  # whether its plan fits no engine
        self.misfits: set[Participant] = set()  # who said, to this round, that the plan does not fit
        if version is None:
            newest = self.world.ledger.newest
            version = 0 if newest is None else newest + 1
        content = str(version) if content is None else content
        self.plan = Expectation("plan", 2, 64 * buckets, buckets, f"digest of {content}")
        self.round = self._opened(version)
        names = [f"x{number}" for number in range(executors)]
        self.driver = Driver(self.round, self.policy.limits(), names, self.clock)
        self.lock = SimulatedLock(self, rival)
        self.transport = SimulatedTransport(self)

    def _opened(self, version: int) -> Round:
        roster, world = self.world.roster(self.owner), self.world
        tainted = world.memory(self.owner).tainted
        facts = opening(
            round=self.name,
            version=version,
            roster=roster,
            quorum=self.policy.quorum_of(len(roster)),
            inplace=[member for member in roster if member.id in world.inplace],
            tainted=[member for member in roster if member.id in tainted],
        )
        identity = Identity(step=world.rounds, owner=self.owner)
        setting = Setting(identity.owner, "the lock", "the ledger", self.policy.limits())
        return Round.open(facts, identity, at=self.clock.now(), wall=self.clock.wall(), setting=setting)

    # -- running ---------------------------------------------------------------------------------------------

    def run(self, cancel_at: float | None = None) -> RoundResult:
        """Run until the round is Released, and give its result."""
        if cancel_at is not None:
            self.at(cancel_at, lambda: self.hear(e.Cancelled(Injected("cancelled"))))
        return run_together(self)[0]

    def start(self) -> None:
        """Begin the round; of an engine that did not say who it is the loss is told at once."""
        self.began = self._now
        self._do(self.driver.start(self._now))
        for name in self.world.unreachable(self.owner):
            gone = next(member for member in self.round.facts.roster if member.id == name)
            self.hear(e.EngineLost(gone, EngineGone(f"engine {name} did not say hello")))

    def tick(self) -> None:
        """Do what is due by now."""
        if self.driver.due <= self._now:
            self._do(self.driver.tick(self._now))

    def settle(self) -> None:
        """Let messages that are still under way arrive, leases end, and engines reach their own limits."""
        self.world.settle()

    def at(self, delay: float, action: Callable[[], None], **what: Any) -> None:
        """Have ``action`` happen in ``delay`` seconds; see :class:`~.world.Message` for the rest."""
        self.world.at(delay, action, **what)

    def say(self, to: str, label: str, action: Callable[[], None], **what: Any) -> None:
        """A message leaves the trainer; ``action`` is what happens when it arrives."""
        self.at(self.wire(), action, to=to, label=f"{self.name} {label}", **what)

    def told(self, label: str, action: Callable[[], None], *, local: bool = False) -> None:
        """A message leaves for the trainer, perhaps from the trainer itself."""
        self.say(self.owner, f"hears {label}", action, local=local)

    def alarm(self, delay: float, label: str, action: Callable[[], None]) -> None:
        """The trainer has something happen in ``delay`` seconds."""
        self.at(delay, action, to=self.owner, label=f"{self.name} {label}", alarm=True)

    def wire(self) -> float:
        """How long a message takes."""
        if self._steady:
            return 0.002
        slow = self._jitter * self._random.random() if self._jitter and self._random.random() < 0.1 else 0.0
        return 0.001 + 0.004 * self._random.random() + slow

    def hear(self, event: e.Event, phase: State | None = None) -> None:
        """A watchdog, or with ``phase`` a port, tells ``event`` now."""
        if isinstance(event, e.EngineLost) and isinstance(event.error, PlanError):
            self.misfits.add(event.engine)
        self._do(self.driver.heard(event, self._now, phase=phase))

    def waits(self, answer: Waiting) -> None:
        """The lock service tells who holds the lock."""
        self._do(self.driver.waits(answer, self._now))

    @property
    def clock(self) -> HandClock:
        """The hand-turned clock."""
        return self.world.clock

    @property
    def session(self) -> Session:
        """The round as engines see it."""
        facts = self.round.facts
        return Session(facts.round, facts.epoch, facts.version)

    @property
    def _now(self) -> float:
        return self.clock.now()

    def _looked(self) -> dict[str, EngineFacts]:
        """What the engines are now."""
        return {name: partner.machine.facts for name, partner in self.world.partners.items()}

    # -- calls -----------------------------------------------------------------------------------------------

    def answer(self, call: Call, value: object = None, error: BaseException | None = None) -> None:
        """A partner answers; its answer is a message, too."""
        if call.number not in self._mute:
            said = value if error is None else f"{type(error).__name__}: {error}"
            what = f"{call}#{call.number}: {said}"
            self.told(what, lambda: self._deliver(call, value, error), local=not _addressee(call))

    def _deliver(self, call: Call, value: object, error: BaseException | None) -> None:
        self._asked.pop(call.number, None)
        if call.engine and call.act is Act.open and isinstance(error, PlanError):
            self.misfits.add(call.engine)
        self._do(self.driver.answered(call.number, self._now, value=value, error=error))

    def _do(self, calls: list[Call]) -> None:
        for call in calls:
            self.log.append(str(call))
            if call.act is Act.plan:
                self.before = self._looked()
            if call.act is Act.acquire:
                self.lock.ask()
            if call.act is Act.release:
                self.lock.stop_asking()
                self.at_release.append(tuple(asked for asked, _ in self._asked.values()))
            self._asked[call.number] = (call, self._now)
            self._send(call)
        self.transport.look()

    def _send(self, call: Call) -> None:
        asked, session = self._now, self.session
        self.say(
            _addressee(call) or self.owner,
            f"{call}#{call.number}",
            lambda: self._arrive(call, asked, session),
            refuse=lambda: self.answer(call, error=Injected(f"injected into {call}")),
            unfit=self._misfit(call, asked, session),
            gone=(lambda: self._lose_weights(call, asked, session)) if call.act is Act.open else None,
            local=not _addressee(call),
        )

    def _misfit(self, call: Call, asked: float, session: Session) -> Callable[[], None] | None:
        """What happens instead if the plan fits nobody, or not this engine."""

        def nobody() -> None:
            self.unfit = True
            self._arrive(call, asked, session)

        if call.act is Act.open:
            return lambda: self._refuse_plan(call)
        return nobody if call.act is Act.plan else None

    def _refuse_plan(self, call: Call) -> None:
        """The plan does not fit this engine: its receiving half fails as its open does, and says so first."""
        error = PlanError(f"the plan does not fit {call.engine}")
        if call.engine:
            self.transport.refuse_plan(call.engine, error)
        self.answer(call, error=error)

    def _lose_weights(self, call: Call, asked: float, session: Session) -> None:
        """The plan does not fit this engine, which looks at itself then and sees that it has lost its own.

        Not if the session is closed already: it looked when it was asked to close it.
        """
        assert call.engine is not None
        partner = self.world.partners[call.engine.id]
        if partner.incarnation != call.engine.incarnation or session.epoch <= partner.machine.facts.seen:
            self._arrive(call, asked, session)
            return
        partner.lose_weights(session)
        self.answer(call, error=WeightsGone(f"engine {call.engine} has lost its weights"))

    def _arrive(self, call: Call, asked: float, session: Session) -> None:
        fault = self.faults.of(call)
        kind = fault.kind if fault else ""
        partner = self.world.partners[call.engine.id] if call.engine else None
        if partner and kind == "die":
            partner.alive = False
        if partner and not partner.alive:
            self.answer(call, error=EngineGone(f"engine {call.engine} is dead"))
        elif kind == "raise":
            self.answer(call, error=Injected(f"injected into {call}"))
        elif kind == "gone" and call.act is Act.open:
            self._lose_weights(call, asked, session)
        elif kind == "unfit" and (misfit := self._misfit(call, asked, session)) is not None:
            misfit()
        elif self.unfit and call.act is Act.open and kind not in ("hang", "lost", "die"):
            self._refuse_plan(call)
        elif kind not in ("hang", "die"):
            if kind == "lost":
                self._mute.add(call.number)
            self._work(call, partner, asked, session)

    def _work(self, call: Call, partner: Partner | None, asked: float, session: Session) -> None:
        try:
            if call.act in LOCK_ACTS:
                self.lock.work(call, asked, session.epoch)
            elif call.act in TRANSPORT_ACTS:
                self.transport.work(call)
            elif call.act in ENGINE_ACTS and partner:
                self.answer(call, self._engine(call, partner, session))
            else:
                self.answer(call, self._trainer(call))
        except WeightSyncError as error:
            self.answer(call, error=error)

    def _engine(self, call: Call, partner: Partner, session: Session) -> Answer | None:
        machine = partner.machine
        if call.engine and partner.incarnation != call.engine.incarnation:
            raise EngineGone(f"engine {call.engine} was started anew")
        match call.act:
            case Act.open:
                machine.fire(Opened(session, self.plan))
            case Act.commit:
                partner.commit(session)
            case Act.resume:
                machine.fire(ResumeOrdered(session))
            case _:
                end_session(machine, session)
        return machine.answer(session) if call.act is Act.abort else None

    def _trainer(self, call: Call) -> object:
        """Executors, the plan and the ledger."""
        facts, world = self.round.facts, self.world
        match call.act:
            case Act.plan:
                world.ledger.admit(facts.version, self.plan.digest)
                return self.plan
            case Act.prepare:
                return True
            case Act.bind:
                world.ledger = world.ledger.bind(facts.version, self.plan.digest, facts.epoch)
            case Act.publish:
                world.ledger = world.ledger.publish(facts.version, self.plan.digest, facts.epoch)
            case Act.ask:
                world.ledger = world.ledger.shut(facts.epoch)
                return world.ledger.ask(facts.version, facts.epoch)
        return None


def _addressee(call: Call) -> str:
    """To whom a call goes; empty if it stays in the trainer's process."""
    if call.engine is not None:
        return call.engine.id
    return "lock" if call.act in LOCK_ACTS else "ledger" if call.act in _LEDGER_ACTS else ""


def run_together(*simulations: Simulation) -> list[RoundResult]:
    """Run rounds of one world at the same time, until each is Released."""
    world = simulations[0].world
    for simulation in simulations:
        simulation.start()
    end = world.clock.now() + 1000.0
    while going := [simulation for simulation in simulations if not simulation.driver.over]:
        due = min(simulation.driver.due for simulation in going)
        if world.under_way and world.under_way[0].due <= due:
            world.step()
        elif due < end:
            world.clock.advance_to(due)
            for simulation in going:
                simulation.tick()
        else:
            raise WeightSyncError(f"nothing will ever happen any more: {going[0].log[-5:]}")
    results = [simulation.driver.result() for simulation in simulations]
    for simulation, result in zip(simulations, results, strict=True):
        world.learn(result, simulation.owner)
    return results

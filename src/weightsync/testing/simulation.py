"""One round on a hand-turned clock: real driver, tables, lock, ledger and engine machines, and no threads.

Only what would be a machine or a wire is simulated. A call is a message that arrives after a delay, is worked
on by the real value (``LockBook``, ``Ledger``, ``EngineMachine``) and is answered after another delay; frames
travel to each engine in order, everything else may overtake everything else. A :class:`Fault` bends one
message. The same seed gives the same round.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ..fsm import events as e
from ..fsm.calls import ENGINE_ACTS, LOCK_ACTS, TRANSPORT_ACTS, Act, Call
from ..fsm.driver import Driver
from ..fsm.engine import Answer
from ..fsm.engine_table import CommitOrdered, EngineFacts, Opened, ResumeOrdered, Session
from ..fsm.errors import EngineGone, WeightSyncError
from ..fsm.facts import opening
from ..fsm.policy import Policy
from ..fsm.receipt import Expectation
from ..fsm.results import RoundResult
from ..fsm.round import Identity, Round
from ..fsm.setting import Setting
from ..fsm.states import State
from ..fsm.tickets import Waiting
from .clock import HandClock
from .simulated_lock import SimulatedLock
from .simulated_transport import SimulatedTransport
from .world import Fault, Injected, Misfortunes, Partner, World, end_session

__all__ = ["Fault", "Injected", "Simulation", "run_together"]


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
    ) -> None:
        self.policy = policy or Policy(deadline=4.0, lease=2.0)
        self.world: World = earlier.world if earlier else World.of(engines, inplace, self.policy.lease)
        self.world.rounds += 1
        self.name = f"r{self.world.rounds}"
        self.faults = Misfortunes(faults)
        self.log: list[str] = []
        self.began = self._now
        self.before = self._looked()
        self.at_release: list[tuple[Call, ...]] = []
        self._random = random.Random(seed)  # noqa: S311 - keeps no secret
        self._jitter = jitter
        self._asked: dict[int, tuple[Call, float]] = {}
        self._mute: set[int] = set()
        if version is None:
            newest = self.world.ledger.newest
            version = 0 if newest is None else newest + 1
        content = str(version) if content is None else content
        self.plan = Expectation("plan", 2, 64 * buckets, buckets, f"digest of {content}")
        self.round = self._opened(version)
        names = [f"x{number}" for number in range(executors)]
        self.driver = Driver(self.round, self.policy.limits(), names, self.clock)
        self._lock = SimulatedLock(self, rival)
        self._transport = SimulatedTransport(self)

    def _opened(self, version: int) -> Round:
        roster, world = self.world.roster(), self.world
        facts = opening(
            round=self.name,
            version=version,
            roster=roster,
            quorum=self.policy.quorum_of(len(roster)),
            inplace=[member for member in roster if member.id in world.inplace],
            tainted=[member for member in roster if member.id in world.tainted],
        )
        identity = Identity(step=world.rounds, owner="trainer")
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
        for name in self.world.unreachable():
            gone = next(member for member in self.round.facts.roster if member.id == name)
            self.hear(e.EngineLost(gone, EngineGone(f"engine {name} did not say hello")))

    def tick(self) -> None:
        """Do what is due by now."""
        if self.driver.due <= self._now:
            self._do(self.driver.tick(self._now))

    def settle(self) -> None:
        """Let messages that are still under way arrive, leases end, and engines reach their own limits."""
        self.world.settle()

    def at(self, delay: float, action: Callable[[], None]) -> None:
        """Have ``action`` happen in ``delay`` seconds."""
        self.world.at(delay, action)

    def soon(self, action: Callable[[], None]) -> None:
        """Have ``action`` happen when a message that leaves now arrives."""
        self.at(self.wire(), action)

    def wire(self) -> float:
        """How long a message takes."""
        slow = self._jitter * self._random.random() if self._jitter and self._random.random() < 0.1 else 0.0
        return 0.001 + 0.004 * self._random.random() + slow

    def hear(self, event: e.Event, phase: State | None = None) -> None:
        """A watchdog, or with ``phase`` a port, tells ``event`` now."""
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
            self.soon(lambda: self._deliver(call, value, error))

    def _deliver(self, call: Call, value: object, error: BaseException | None) -> None:
        self._asked.pop(call.number, None)
        self._do(self.driver.answered(call.number, self._now, value=value, error=error))

    def _do(self, calls: list[Call]) -> None:
        for call in calls:
            self.log.append(str(call))
            if call.act is Act.plan:
                self.before = self._looked()
            if call.act is Act.release:
                self._lock.stop_asking()
                self.at_release.append(tuple(asked for asked, _ in self._asked.values()))
            self._asked[call.number] = (call, self._now)
            self.soon(lambda call=call: self._arrive(call))  # type: ignore[misc]
        self._transport.look()

    def _arrive(self, call: Call) -> None:
        fault = self.faults.of(call)
        kind = fault.kind if fault else ""
        partner = self.world.partners[call.engine.id] if call.engine else None
        if partner and kind == "die":
            partner.alive = False
        if partner and not partner.alive:
            self.answer(call, error=EngineGone(f"engine {call.engine} is dead"))
        elif kind == "raise":
            self.answer(call, error=Injected(f"injected into {call}"))
        elif kind not in ("hang", "die"):
            if kind == "lost":
                self._mute.add(call.number)
            self._work(call, partner)

    def _work(self, call: Call, partner: Partner | None) -> None:
        try:
            if call.act in LOCK_ACTS:
                self._lock.work(call, self._asked[call.number][1])
            elif call.act in TRANSPORT_ACTS:
                self._transport.work(call)
            elif call.act in ENGINE_ACTS and partner:
                self.answer(call, self._engine(call, partner))
            else:
                self.answer(call, self._trainer(call))
        except WeightSyncError as error:
            self.answer(call, error=error)

    def _engine(self, call: Call, partner: Partner) -> Answer | None:
        machine, session = partner.machine, self.session
        if call.engine and partner.incarnation != call.engine.incarnation:
            raise EngineGone(f"engine {call.engine} was started anew")
        match call.act:
            case Act.open:
                machine.fire(Opened(session, self.plan))
            case Act.commit:
                machine.fire(CommitOrdered(session))
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


def run_together(*simulations: Simulation) -> list[RoundResult]:
    """Run rounds of one world at the same time, until each is Released."""
    world = simulations[0].world
    for simulation in simulations:
        simulation.start()
    end = world.clock.now() + 1000.0
    while going := [simulation for simulation in simulations if not simulation.driver.over]:
        due = min(simulation.driver.due for simulation in going)
        if world.under_way and world.under_way[0][0] <= due:
            world.step()
        elif due < end:
            world.clock.advance_to(due)
            for simulation in going:
                simulation.tick()
        else:
            raise WeightSyncError(f"nothing will ever happen any more: {going[0].log[-5:]}")
    results = [simulation.driver.result() for simulation in simulations]
    for result in results:
        world.learn(result)
    return results

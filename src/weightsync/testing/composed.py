"""Two trainers, one lock, one ledger, two engines: the whole system, one step at a time.

    system = Composed(Setup("one after the other"))
    while system.step():
        ...

Each trainer runs one round with the real driver; everything between them is the simulated world. Without
misfortunes there is one schedule, the *canonical* one: whatever arrives first arrives, and if nothing does
before a driver, a lease or an engine's own limit is due, the clock turns to that. What bends a step is in
:mod:`.deviations`; what must hold after each of them, in :mod:`.watch`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..fsm.engine_table import Session
from ..fsm.policy import Policy
from ..fsm.results import RoundResult
from .partner import Partner
from .simulation import Simulation
from .world import Message, World

__all__ = ["LEASE", "LONGEST", "WIDER", "WORLDS", "Composed", "Owner", "Setup"]

LEASE = 2.0
DEADLINE = 4.0
NEVER = float("inf")
LONGEST = 1000
"""Steps after which a run is taken for one that never ends."""
_SLACK = 7 / 3 * LEASE
_LIMIT = DEADLINE
"""Seconds without a word after which an engine ends a session by itself."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is explored.

    Args:
        name: in words.
        quorum: how many of the engines must hold the version.
        inplace: which of them load in place.
        competing: whether both trainers ask for the lock at the same time, or the second one when the first
            is over, dead or stopped.
        engines: how many.
        buckets: how many.
    """

    name: str
    quorum: int = 1
    inplace: tuple[str, ...] = ("e0",)
    competing: bool = False
    engines: int = 2
    buckets: int = 2

    def policy(self) -> Policy:
        """As a user would give it."""
        return Policy(
            deadline=DEADLINE,
            lease=LEASE,
            on_engine_failure="fail" if self.quorum == self.engines else "quarantine",
            quorum=self.quorum,
        )


WORLDS: tuple[Setup, ...] = (
    Setup("one after the other, one engine is enough"),
    Setup("one after the other, both engines are needed", quorum=2),
    Setup("at the same time, one engine is enough", competing=True),
    Setup("at the same time, both engines are needed", quorum=2, competing=True),
    Setup("one after the other, both engines stage", inplace=()),
    Setup("at the same time, both engines load in place", inplace=("e0", "e1"), competing=True),
)
"""What ``weightsync check`` explores. If nothing else is said, one engine loads in place, one stages."""

WIDER: tuple[Setup, ...] = (
    Setup("one after the other, a single engine that stages", inplace=(), engines=1),
    Setup("one after the other, a single engine that loads in place", engines=1),
    Setup("one after the other, one of three engines is enough", engines=3, buckets=1),
    Setup("one after the other, all three engines are needed", quorum=3, engines=3, buckets=1),
)
"""What ``weightsync check --wide`` explores as well: fewer engines, and more of them."""


@dataclass(slots=True)
class Owner:
    """One trainer.

    Args:
        name: of its process.
        simulation: its round.
        doubt: seconds that a lock which does not answer as it should may add to the deadline.
        stopped: seconds for which its process was stopped.
        begun: whether the round has begun.
        result: of the round, once it is over.
    """

    name: str
    simulation: Simulation
    doubt: float = 0.0
    stopped: float = 0.0
    begun: bool = False
    result: RoundResult | None = None

    @property
    def slack(self) -> float:
        """What its fate adds to its deadline."""
        return self.doubt + self.stopped


class Composed:
    """The system at one moment.

    Args:
        setup: what it consists of.
        seed: with a number, messages take times that are drawn by lot; without one, all take the same.
        jitter: one message in ten takes up to so many seconds longer.
    """

    def __init__(self, setup: Setup, seed: int | None = None, jitter: float = 0.0) -> None:
        self.setup = setup
        self.world = World.of(setup.engines, setup.inplace, LEASE)
        self.story: list[tuple[int, str]] = []
        self.steps = 0
        self._words: dict[str, tuple[Session | None, float]] = {}
        self.steady = seed is None
        self._seed, self._jitter, self._doubt = seed, jitter, 0.0
        self.owners = [Owner("a", self._round("a", 0))]
        if setup.competing:
            self.owners.append(Owner("b", self._round("b", 1)))
        self.begin()

    def _round(self, owner: str, version: int | None) -> Simulation:
        seed = 0 if self._seed is None else self._seed * 2 + len(owner)
        return Simulation(
            buckets=self.setup.buckets, policy=self.setup.policy(), version=version, owner=owner, seed=seed,
            jitter=self._jitter, steady=self._seed is None, world=self.world,
        )  # fmt: skip

    # -- running ---------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do the next thing of the canonical schedule; whether there was one."""
        message, due = self.next()
        if message is None and due == NEVER:
            return False
        self.steps += 1
        if message is not None:
            self.world.step()
        else:
            self.world.clock.advance_to(due)
            self._due()
        self.begin()
        return True

    def next(self) -> tuple[Message | None, float]:
        """The message that comes next; or None, and until when nothing happens."""
        clocks = [owner.simulation.driver.due for owner in self.running]
        clocks += [self.limit_of(name) for name in self.world.partners]
        due = min(clocks, default=NEVER)
        if self.world.under_way and self.world.under_way[0].due <= due:
            return self.world.under_way[0], due
        return None, due

    def _due(self) -> None:
        for owner in self.running:
            owner.simulation.tick()
        now = self.world.clock.now()
        for name, partner in self.world.partners.items():
            if self.limit_of(name) <= now:
                partner.give_up()

    def limit_of(self, name: str) -> float:
        """When this engine gives up on the session that is open there."""
        partner = self.world.partners[name]
        session = partner.machine.facts.session
        if session is None or not partner.alive:
            self._words.pop(name, None)
            return NEVER
        known, since = self._words.get(name, (None, 0.0))
        if known != session:
            since = self.world.clock.now()
            self._words[name] = (session, since)
        return since + _LIMIT

    def begin(self) -> None:
        """Who may begin begins; whoever is over gets a result; the second trainer follows the first."""
        if len(self.owners) == 1 and (self._out(self.owners[0]) or self.owners[0].simulation.driver.over):
            self.owners.append(Owner("b", self._round("b", None), doubt=self._doubt))
        for owner in self.owners:
            if not owner.begun:
                owner.begun = True
                owner.simulation.start()
            if owner.result is None and owner.simulation.driver.over:
                owner.result = owner.simulation.driver.result()
                self.world.learn(owner.result, owner.name)

    # -- who is where ----------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Owner]:
        """The trainers that can be moved."""
        return [owner for owner in self.owners if not self._out(owner) and not owner.simulation.driver.over]

    @property
    def over(self) -> bool:
        """Whether every trainer is dead, or its round over."""
        return len(self.owners) == 2 and all(
            owner.name in self.world.dead or owner.simulation.driver.over for owner in self.owners
        )

    def dead(self, owner: Owner) -> bool:
        """Whether its process was killed."""
        return owner.name in self.world.dead

    def _out(self, owner: Owner) -> bool:
        return owner.name in self.world.dead or owner.name in self.world.stopped

    def partner(self, name: str) -> Partner:
        """An engine."""
        return self.world.partners[name]

    # -- misfortunes that befall a process -------------------------------------------------------------------

    def kill(self, owner: Owner) -> None:
        """Its driver is never moved again; what it has sent arrives."""
        self.world.dead.add(owner.name)
        self.begin()

    def stop(self, owner: Owner) -> None:
        """Its process is stopped until its lease has ended, and then goes on."""
        now, end = self.world.clock.now(), owner.simulation.driver.lease_end
        seconds = (end - now if end < NEVER else LEASE) + 0.01
        self.world.stopped[owner.name] = []
        owner.stopped += seconds
        self.world.at(seconds, lambda: self._wake(owner), label=f"{owner.name} goes on", alarm=True)
        self.begin()

    def _wake(self, owner: Owner) -> None:
        """A lease waits for nobody; whatever else has arrived meanwhile comes before the clock."""
        waiting = self.world.stopped.pop(owner.name)
        simulation = owner.simulation
        if simulation.driver.lease_end <= self.world.clock.now():
            simulation.tick()
        for message in waiting:
            rest = {name: getattr(message, name) for name in ("to", "label", "link", "local", "alarm")}
            self.world.at(0.0, message.action, **rest)

    def unsure(self) -> None:
        """The lock's service does not answer as it should: a round may have to wait for the lease's end."""
        self._doubt = _SLACK
        for owner in self.owners:
            owner.doubt = _SLACK

    def late(self, moment: float) -> None:
        """Whatever is under way until ``moment`` arrives just after it; the order stays."""
        for message in self.world.under_way:
            if not message.alarm and message.due <= moment:
                message.due = moment + 0.001
        self.world.under_way.sort()

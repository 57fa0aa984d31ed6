"""The whole composed system in one hashable value: two moments with the same value have the same future.

What is only told and decides nothing (records, notes, counters of what was refused) is left out. A message
under way is known by its label. A step of a driver's script is a closure of the driver; it is known by where
its code stands and by what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from ..fsm.round import Round
from ..fsm.scripts import Scripts
from .composed import Composed, Owner
from .partner import Partner
from .simulation import Simulation

__all__ = ["driver_key", "key", "owner_key", "partner_key"]


def key(system: Composed) -> int:
    """A number that stands for the moment; different moments have different ones, as good as certainly."""
    world = system.world
    ledger = world.ledger
    return hash(
        (
            _moment(world.clock.now()),
            tuple((_moment(m.due), m.to, m.label) for m in sorted(world.under_way)),
            tuple(owner_key(owner) for owner in system.owners),
            tuple(partner_key(partner) for partner in world.partners.values()),
            tuple(_moment(system.limit_of(name)) for name in world.partners),
            world.book,
            tuple(world.keeper.standing),
            (ledger.version, ledger.epoch, ledger.digest, tuple(ledger.bound.items()), ledger.fence),
            frozenset(world.dead),
            tuple((name, tuple(m.label for m in waiting)) for name, waiting in world.stopped.items()),
        )
    )


def _moment(seconds: float) -> float:
    return round(seconds, 7)


def partner_key(partner: Partner) -> Hashable:
    """An engine: what it takes itself for, and what it holds."""
    machine = partner.machine
    return (
        machine.state, machine.facts, partner.alive, partner.deaf, partner.spoilt, partner.view,
        tuple(partner.live.items()), tuple(partner.staged.items()), frozenset(partner.commits),
    )  # fmt: skip


def owner_key(owner: Owner) -> Hashable:
    """A trainer: its round, its driver, and what its halves of lock and transport wait for."""
    simulation = owner.simulation
    return (
        owner.begun, owner.doubt, owner.stopped, driver_key(simulation), simulation.lock.asking,
        simulation.transport.key(), frozenset(simulation._asked),
        tuple(sorted(simulation.world.memory(owner.name).tainted)), simulation.unfit,
        frozenset(simulation.misfits),
    )  # fmt: skip


def driver_key(simulation: Simulation) -> Hashable:
    """What decides how a driver goes on."""
    driver = simulation.driver
    if driver.over:
        return _position(driver.round)
    clocks = driver._moved, driver._entered, driver._lease_end, driver._renew_at, driver._release_at
    return (
        _position(driver.round), *map(_moment, clocks),
        tuple((number, _moment(item.due)) for number, item in driver._open.items()),
        _script(driver), tuple(driver._undo), frozenset(driver._resumed), frozenset(driver._fenced),
        frozenset(driver._unfit), driver._awaited, driver._trouble is None, driver._expected, driver._numbers,
    )  # fmt: skip


def _position(round: Round) -> Hashable:
    return round.state, round.facts


def _script(driver: Scripts) -> tuple[Hashable, ...]:
    return tuple(_step(step.run) for step in driver._script)


def _step(run: Callable[..., Any]) -> Hashable:
    code = getattr(run, "__code__", None) or run.__func__.__code__  # type: ignore[attr-defined]
    held = tuple(cell.cell_contents for cell in getattr(run, "__closure__", None) or ())
    return code.co_firstlineno, tuple(value for value in held if not isinstance(value, Scripts))

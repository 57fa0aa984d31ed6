"""What must be true of every simulated round, whatever went wrong in it."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ..fsm.calls import LOCK_ACTS, Act, Call
from ..fsm.engine_table import EngineFacts
from ..fsm.errors import PlanError, ReplayMismatch
from ..fsm.facts import Facts
from ..fsm.journal import replay
from ..fsm.results import EngineRow, RoundResult
from ..fsm.states import Disposition, EngineState, Publication, State
from .partner import Partner
from .simulation import Simulation

__all__ = ["broken", "broken_at_end"]

_WIRE = 0.02


def broken(simulation: Simulation, result: RoundResult, *, slack: float = 0.0) -> list[str]:
    """The promises that a round which is over has broken; empty if it kept them all.

    Args:
        simulation: of the round; everything that is under way is let arrive.
        result: what its ``run`` returned.
        slack: seconds that a lock service which does not answer may add.
    """
    found = broken_at_end(simulation, result, slack=slack)
    simulation.settle()
    return [*found, *_afterwards(simulation, result)]


def broken_at_end(
    simulation: Simulation, result: RoundResult, *, slack: float = 0.0, replaying: bool = True
) -> list[str]:
    """The same, but what the engines hold: a later round may have changed that since.

    With ``replaying`` switched off, without a replay of the log: it takes longer than all the rest.
    """
    told = _records(simulation) if replaying else ()
    of_engines = (*_misfits(simulation, result), *_left_paused(simulation, result))
    return [*_end(simulation, result, slack), *told, *of_engines, *_release(simulation, slack)]


def _end(simulation: Simulation, result: RoundResult, slack: float) -> Iterator[str]:
    """It ended by its deadline, in one way, for one reason."""
    if simulation.round.state is not State.Released or result.path[-1] != State.Released.name:
        yield f"the round ended in {simulation.round.state.name}"
    took = simulation.clock.now() - simulation.began
    if took > simulation.policy.deadline + slack + _WIRE:
        yield f"the round took {took:.3f} s, its deadline is {simulation.policy.deadline} s"
    if simulation.driver.refused:
        refused = [record for record in simulation.round.records() if record.event == "refused"]
        yield f"honest partners were refused: {[record.error for record in refused]}"
    cause = simulation.round.facts.cause
    if (State.Failed.name in result.path) is not (cause is not None):
        yield f"the path is {result.path}, the cause {cause}"
    if cause is not None and cause.error is not None and result.error is not cause.error:
        yield f"the first error was {cause.error!r}, the result says {result.error!r}"
    if result.error is None and not result.ok:
        yield "the round failed without an error"


def _misfits(simulation: Simulation, result: RoundResult) -> Iterator[str]:
    """Weights that fit too few engines are their trainer's mistake, and put no engine out."""
    facts = simulation.round.facts
    if len(facts.members - simulation.misfits) >= facts.quorum:
        return
    for row in result.engines:
        if row.disposition is Disposition.quarantined and isinstance(row.error, PlanError):
            yield f"too few engines fit, and it is {row.engine} that is quarantined for it"


def _left_paused(simulation: Simulation, result: RoundResult) -> Iterator[str]:
    """Who was asked and serves, is in no session when the result is told; but for that of a later trainer."""
    facts = simulation.round.facts
    asked = {member.id for member in facts.members}
    for row in result.engines:
        partner = simulation.world.partners[row.engine]
        here = partner.alive and partner.incarnation == row.incarnation and row.engine in asked
        session = partner.machine.facts.session
        serving = row.disposition is not Disposition.quarantined
        if here and serving and session is not None and session.epoch <= facts.epoch:
            what = f"{row.engine} is {row.disposition.name}, but {partner.machine.state.name}"
            yield f"left in a pause: {what} in epoch {session.epoch}"


def _records(simulation: Simulation) -> Iterator[str]:
    """Its log alone tells the same story, and tells the result once."""
    records = simulation.round.records()
    try:
        steps = replay(json.loads(json.dumps(record.to_json())) for record in records)
    except ReplayMismatch as error:
        yield f"the log does not replay: {error}"
        return
    path = [step.after.state.name for step in steps if step.row.target is not None]
    if [State.Idle.name, *path] != list(simulation.driver.result().path):
        yield f"the log replays to {path}"
    if steps[-1].after.facts != simulation.round.facts:
        yield "the log replays to other facts"
    if [record.event for record in records].count("result") != 1:
        yield "the result is not told exactly once"


def _release(simulation: Simulation, slack: float) -> Iterator[str]:
    """The lock is not given back before what is in flight is settled or fenced; then it is free."""
    facts = simulation.round.facts
    for calls in simulation.at_release:
        loose = [str(call) for call in calls if not _settled(call, facts)]
        if loose:
            yield f"the lock was given back with {', '.join(loose)} in flight"
    book, _ = simulation.world.book.expire(simulation.clock.now() + _WIRE + slack)
    if book.holder is not None and book.holder.ticket.round == simulation.name:
        yield f"Released, and the lock is held until {book.holder.until}"


def _settled(call: Call, facts: Facts) -> bool:
    """Whether a call may be open when the lock is given back."""
    if call.act in LOCK_ACTS | {Act.fence} or facts.unclean:
        return True
    if call.act in (Act.publish, Act.ask):  # the ledger answered a later question, and takes no more
        return facts.publication is not Publication.unknown
    return call.engine is not None and call.engine not in facts.open


def _afterwards(simulation: Simulation, result: RoundResult) -> Iterator[str]:
    """When all is quiet: the lock free, each engine what the result says, the ledger too."""
    if simulation.world.book.holder is not None or simulation.world.book.queue:
        yield f"the lock is not free: {simulation.world.book}"
    for row in result.engines:
        partner = simulation.world.partners[row.engine]
        if partner.alive and partner.incarnation == row.incarnation:
            yield from _engine(row, partner, simulation.before[row.engine], result.version)
    ledger = simulation.world.ledger
    told = {"yes": (True,), "no": (False,), "unknown": (True, False)}[result.published]
    if (ledger.epoch == result.epoch and ledger.version == result.version) not in told:
        yield f"published is {result.published}, the ledger says {ledger.version} of epoch {ledger.epoch}"


def _engine(row: EngineRow, partner: Partner, before: EngineFacts, version: int) -> Iterator[str]:
    state, facts = partner.machine.state, partner.machine.facts
    if facts.session is not None or state not in (EngineState.Serving, EngineState.Quarantined):
        yield f"{row.engine} is left {state.name}, session {facts.session}"
    wanted = {Disposition.serving_new: version, Disposition.serving_old: before.version}
    if row.disposition in wanted and (state, facts.version) != (EngineState.Serving, wanted[row.disposition]):
        yield f"{row.engine} is {row.disposition.name}, but {state.name} with version {facts.version}"
    if facts.version is not None and before.version is not None and facts.version < before.version:
        yield f"{row.engine} fell from version {before.version} to {facts.version}"

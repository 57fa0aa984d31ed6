"""One engine as the books have it, and what its own answer makes of that.

A version stays proven for as long as the same life of the engine says that it holds it, by the very commit
that proved it: a number alone does not say whose bytes they are, and what others may have put there stays
there, whatever rounds of ours come after. A session of another trainer that came to nothing has changed
nothing; while it is open, nobody knows what comes of it, and the engine is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .asking import Said, check
from .fsm.contract import EngineStatus
from .fsm.errors import EngineAsleep, EngineGone, EngineResting, EngineUnknown, WorldMismatch
from .fsm.receipt import Participant
from .fsm.recovery import Care
from .fsm.states import EngineState

__all__ = ["Entry", "learnt", "rests"]

_OPEN = frozenset(EngineState) - {EngineState.Serving, EngineState.Quarantined}


@dataclass(frozen=True, slots=True)
class Entry:
    """One engine as the books have it.

    Args:
        participant: its id, incarnation and ranks; None until it was reached.
        version: the version its last confirmed commit made it hold; None if it is unproven.
        told: the version it says it holds, proven to this trainer or not.
        quarantined: it was lost or torn, and no commit of it was confirmed since.
        asked: whether its incarnation is known to be the present one as of the last round.
        waited: whether it was once given the time that a first contact may take.
        seen: the highest epoch it had seen when it was asked.
        epoch: the one of its last confirmed commit.
        elsewhere: whether a session of another trainer was open on it when it was asked.
        former: the life of it that was removed while it was quarantined, if it has not been reached since.
        care: its recovery, while it is quarantined.
    """

    id: str
    participant: Participant | None = None
    stages: bool = True
    version: int | None = None
    told: int | None = None
    quarantined: bool = False
    asked: bool = False
    waited: bool = False
    seen: int = 0
    epoch: int = 0
    elsewhere: bool = False
    error: BaseException | None = None
    former: Participant | None = None
    care: Care = Care()


def learnt(entry: Entry, said: Said, ranks: int | None, ours: Callable[[int], bool]) -> Entry:
    """What is known of an engine when it has been asked.

    Args:
        entry: what was known before.
        said: what came of asking it.
        ranks: how many it is declared to have.
        ours: whether an epoch is one of this trainer's rounds.
    """
    if said.error is not None or said.status is None:
        error = said.error or EngineUnknown(f"engine {entry.id} did not say what it is")
        return _unreached(entry, error, waited=said.waited)
    try:
        check(entry.id, said.status, ranks)
    except (EngineAsleep, WorldMismatch) as error:
        # No round can be run with it; what it holds is said all the same, and is not what another life held.
        known = _heard(entry, said.status, ours)
        return replace(
            entry,
            version=known.version,
            quarantined=known.quarantined,
            told=known.told,
            elsewhere=known.elsewhere,
            asked=False,
            error=error,
        )
    except Exception as error:  # noqa: BLE001 - whatever an adapter hands over, it was not reached
        return _unreached(entry, error)
    return _heard(entry, said.status, ours)


def _heard(entry: Entry, status: EngineStatus, ours: Callable[[int], bool]) -> Entry:
    now = Participant(status.engine, status.incarnation, status.ranks)
    others = status.epoch > entry.epoch and not ours(status.epoch)
    known = replace(
        entry, participant=now, stages=status.stages, told=status.version, asked=True, seen=status.epoch,
        error=None, former=None, quarantined=entry.quarantined or entry.former == now,
        elsewhere=others and status.state in _OPEN,
    )  # fmt: skip
    restarted = entry.participant is not None and entry.participant != now
    if restarted or status.version != entry.version or _overwritten(entry, status, ours, others=others):
        known = replace(known, version=None)
    if status.state is EngineState.Quarantined:
        known = replace(known, version=None, quarantined=True)
    return known


def _overwritten(entry: Entry, status: EngineStatus, ours: Callable[[int], bool], *, others: bool) -> bool:
    """Whether another trainer may have put other bytes there, also under the same number.

    An engine that does not say which commit was its last may have had one in any session.
    """
    last = status.committed
    if last is None:
        return others
    return last < entry.epoch or (last > entry.epoch and not ours(last))


def _unreached(entry: Entry, error: BaseException, *, waited: bool = False) -> Entry:
    gone = isinstance(error, EngineGone)
    version = None if gone else entry.version
    return replace(entry, asked=False, error=error, version=version, waited=entry.waited or waited)


def rests(entry: Entry, now: float) -> EngineResting:
    """Why it has no part in a round."""
    if not entry.care.left(now):
        return EngineResting(f"engine {entry.id} is left out: it comes back by a round of its own")
    return EngineResting(
        f"engine {entry.id} is left out: {entry.care.tries} rounds did not bring it back, the next one is to "
        f"try in {entry.care.left(now):.3g} s"
    )

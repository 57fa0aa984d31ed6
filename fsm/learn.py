"""What the rows of the round's table teach: pure functions from facts and event to facts.

They are the only code that changes :class:`~.facts.Facts`, and they change nothing else.
"""

from __future__ import annotations

from dataclasses import replace

from .events import (
    BucketSent,
    CommitFailed,
    EngineAcked,
    EngineCommitted,
    EngineLost,
    EngineReverted,
    LockGranted,
    Prepared,
)
from .facts import Facts
from .states import Lock, Publication


def membership(facts: Facts, event: LockGranted) -> Facts:
    """The lock is ours, and who takes part is fixed from now on."""
    return replace(facts, lock=Lock.held, epoch=event.epoch, members=facts.roster - facts.lost)


def held(facts: Facts, event: LockGranted) -> Facts:
    """The lock is ours, in a round that failed; nobody takes part."""
    return replace(facts, lock=Lock.held, epoch=event.epoch)


def gone(facts: Facts, event: object) -> Facts:
    """The lock is proven not held."""
    return replace(facts, lock=Lock.gone)


def missed(facts: Facts, event: EngineLost) -> Facts:
    """An engine was lost before the membership was fixed."""
    return replace(facts, lost=facts.lost | {event.engine})


def agreed(facts: Facts, event: Prepared) -> Facts:
    """The plan is agreed."""
    return replace(facts, plan=event.plan)


def sent(facts: Facts, event: BucketSent) -> Facts:
    """One more bucket is out."""
    return replace(facts, sent=facts.sent + 1)


def acked(facts: Facts, event: EngineAcked) -> Facts:
    """One more engine proved that it holds the bytes."""
    return replace(facts, acks=facts.acks | {event.engine})


def decided(facts: Facts, event: EngineAcked) -> Facts:
    """The last one proved it: engines may commit from now on."""
    return replace(acked(facts, event), decided=True)


def evicted(facts: Facts, event: EngineLost | EngineAcked) -> Facts:
    """A member is out before the last receipt."""
    return replace(facts, evicted=facts.evicted | {event.engine})


def evicted_decided(facts: Facts, event: EngineLost | EngineAcked) -> Facts:
    """A member is out, and all others proved it: engines may commit from now on."""
    return replace(evicted(facts, event), decided=True)


def committed(facts: Facts, event: EngineCommitted) -> Facts:
    """An engine holds the new version."""
    return replace(facts, committed=facts.committed | {event.engine})


def committed_last(facts: Facts, event: EngineCommitted) -> Facts:
    """The last one missing holds it: the publication is asked for."""
    return replace(committed(facts, event), publication=Publication.unknown)


def quarantined(facts: Facts, event: EngineLost | CommitFailed | EngineReverted) -> Facts:
    """A member is out after the last receipt, or cannot be believed."""
    return replace(facts, quarantined=facts.quarantined | {event.engine})


def quarantined_last(facts: Facts, event: EngineLost | CommitFailed) -> Facts:
    """The last one missing is out: the publication is asked for."""
    return replace(quarantined(facts, event), publication=Publication.unknown)


def reverted(facts: Facts, event: EngineReverted) -> Facts:
    """An engine holds only the old weights."""
    return replace(facts, reverted=facts.reverted | {event.engine})


def published(facts: Facts, event: object) -> Facts:
    """The ledger has the version."""
    return replace(facts, publication=Publication.yes)


def unpublished(facts: Facts, event: object) -> Facts:
    """The ledger refused the version."""
    return replace(facts, publication=Publication.no)


def put_back(facts: Facts, event: object) -> Facts:
    """Everything is put back."""
    return replace(facts, settled=True)


def given_up(facts: Facts, event: object) -> Facts:
    """Putting back did not succeed; what is left over is fenced."""
    return replace(facts, settled=True, unclean=True)


def retried(facts: Facts, event: object) -> Facts:
    """The release has to be tried again."""
    return replace(facts, tries=facts.tries + 1)

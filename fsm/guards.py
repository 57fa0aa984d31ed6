"""Guards: pure predicates over (facts, event, state), named as the diagrams show them.

Every guard that asks about the quorum does so on *sets*: "the remaining participants without this one are
still at least the quorum". A loss that is told twice, a stranger, or an earlier incarnation of a member can
therefore never count twice.

Names share a first letter with their subject: ``loss_`` an engine lost before the last receipt, ``bad_`` a
receipt that does not prove what it should, ``c_`` a confirmed commit, ``x_`` a refused commit, ``l_`` an
engine lost after the last receipt, ``f_`` an answer to Abort.
"""

from __future__ import annotations

from .events import (
    AllSent,
    BucketSent,
    CommitFailed,
    EngineAcked,
    EngineCommitted,
    EngineLost,
    EngineReverted,
    LockGranted,
    Prepared,
    TimedOut,
)
from .facts import Facts
from .receipt import Participant
from .states import Lock, Publication, State

# -- pieces ---------------------------------------------------------------------------------------------


def _holds(facts: Facts, engine: Participant) -> bool:
    return len(facts.remaining - {engine}) >= facts.quorum


def _others_owe_receipt(facts: Facts, engine: Participant) -> bool:
    return bool(facts.remaining - facts.acks - {engine})


def _others_owe_commit(facts: Facts, engine: Participant) -> bool:
    return bool(facts.missing - {engine})


def proves(facts: Facts, event: EngineAcked) -> bool:
    """Whether the receipts of ``event`` are one good receipt for each rank of that very engine."""
    engine, receipts = event.engine, event.receipts
    if facts.plan is None or sorted(r.rank for r in receipts) != list(range(engine.ranks)):
        return False
    return all(
        receipt.participant == (engine.id, engine.incarnation)
        and receipt.mismatch(facts.round, facts.epoch, facts.plan) is None
        for receipt in receipts
    )


# -- the lock -------------------------------------------------------------------------------------------


def enough(facts: Facts, event: LockGranted, state: State) -> bool:
    """The engines asked for, without those lost meanwhile, are at least the quorum."""
    return len(facts.roster - facts.lost) >= facts.quorum


def too_few(facts: Facts, event: LockGranted, state: State) -> bool:
    """The opposite of ``enough``."""
    return not enough(facts, event, state)


def asked_for(facts: Facts, event: EngineLost, state: State) -> bool:
    """The lost engine is one of those asked for."""
    return event.engine in facts.roster


def not_asked_for(facts: Facts, event: EngineLost, state: State) -> bool:
    """The lost engine is a stranger."""
    return event.engine not in facts.roster


# -- sending --------------------------------------------------------------------------------------------


def positive(facts: Facts, event: Prepared, state: State) -> bool:
    """The plan has at least one bucket; an empty model is one empty bucket."""
    return event.plan.buckets >= 1


def next_bucket(facts: Facts, event: BucketSent, state: State) -> bool:
    """It is the bucket whose turn it is."""
    return event.index == facts.sent < facts.buckets


def all_out(facts: Facts, event: AllSent, state: State) -> bool:
    """Every bucket of the plan was reported as sent."""
    return facts.sent == facts.buckets


# -- receipts -------------------------------------------------------------------------------------------


def more(facts: Facts, event: EngineAcked, state: State) -> bool:
    """A remaining participant proves it, and others still owe their receipt."""
    return (
        event.engine in facts.remaining - facts.acks
        and proves(facts, event)
        and _others_owe_receipt(facts, event.engine)
    )


def last(facts: Facts, event: EngineAcked, state: State) -> bool:
    """A remaining participant proves it, and it was the last."""
    return (
        event.engine in facts.remaining
        and proves(facts, event)
        and not _others_owe_receipt(facts, event.engine)
    )


def again(facts: Facts, event: EngineAcked, state: State) -> bool:
    """A good receipt that was told before."""
    return (
        event.engine in facts.remaining & facts.acks
        and proves(facts, event)
        and _others_owe_receipt(facts, event.engine)
    )


def out(facts: Facts, event: EngineAcked, state: State) -> bool:
    """A member that is out already; good or bad, its receipt changes nothing."""
    return event.engine in facts.members - facts.remaining


def stranger(facts: Facts, event: EngineAcked, state: State) -> bool:
    """Somebody who is not a member, or another incarnation of one."""
    return event.engine not in facts.members


def _bad(facts: Facts, event: EngineAcked) -> bool:
    return event.engine in facts.remaining and not proves(facts, event)


def bad_more(facts: Facts, event: EngineAcked, state: State) -> bool:
    """A bad receipt; the quorum holds without it and others still owe theirs."""
    return _bad(facts, event) and _holds(facts, event.engine) and _others_owe_receipt(facts, event.engine)


def bad_last(facts: Facts, event: EngineAcked, state: State) -> bool:
    """A bad receipt; the quorum holds without it and nobody else owes one."""
    return _bad(facts, event) and _holds(facts, event.engine) and not _others_owe_receipt(facts, event.engine)


def bad_breaks(facts: Facts, event: EngineAcked, state: State) -> bool:
    """A bad receipt, without which there is no quorum."""
    return _bad(facts, event) and not _holds(facts, event.engine)


# -- losses before the last receipt ----------------------------------------------------------------------


def loss_holds(facts: Facts, event: EngineLost, state: State) -> bool:
    """A remaining participant; the quorum holds without it."""
    return event.engine in facts.remaining and _holds(facts, event.engine)


def loss_more(facts: Facts, event: EngineLost, state: State) -> bool:
    """The quorum holds without it, and others still owe their receipt."""
    return loss_holds(facts, event, state) and _others_owe_receipt(facts, event.engine)


def loss_last(facts: Facts, event: EngineLost, state: State) -> bool:
    """The quorum holds without it, and nobody else owes a receipt."""
    return loss_holds(facts, event, state) and not _others_owe_receipt(facts, event.engine)


def loss_breaks(facts: Facts, event: EngineLost, state: State) -> bool:
    """A remaining participant, without which there is no quorum."""
    return event.engine in facts.remaining and not _holds(facts, event.engine)


def loss_void(facts: Facts, event: EngineLost, state: State) -> bool:
    """A stranger, an earlier incarnation, or one that is out already."""
    return event.engine not in facts.remaining


def loss_remaining(facts: Facts, event: EngineLost, state: State) -> bool:
    """A remaining participant."""
    return event.engine in facts.remaining


# -- commits --------------------------------------------------------------------------------------------


def c_more(facts: Facts, event: EngineCommitted, state: State) -> bool:
    """Its commit was missing, and others are missing too."""
    return event.engine in facts.missing and _others_owe_commit(facts, event.engine)


def c_last(facts: Facts, event: EngineCommitted, state: State) -> bool:
    """Its commit was the last one missing."""
    return event.engine in facts.missing and not _others_owe_commit(facts, event.engine)


def c_again(facts: Facts, event: EngineCommitted, state: State) -> bool:
    """Told before, or quarantined meanwhile: it stays quarantined."""
    return event.engine in facts.committed | facts.quarantined and event.engine not in facts.missing


def x_more(facts: Facts, event: CommitFailed, state: State) -> bool:
    """Refused; the quorum holds without it and others are missing."""
    return (
        event.engine in facts.missing
        and _holds(facts, event.engine)
        and _others_owe_commit(facts, event.engine)
    )


def x_last(facts: Facts, event: CommitFailed, state: State) -> bool:
    """Refused; the quorum holds without it and it was the last one missing."""
    return (
        event.engine in facts.missing
        and _holds(facts, event.engine)
        and not _others_owe_commit(facts, event.engine)
    )


def x_breaks(facts: Facts, event: CommitFailed, state: State) -> bool:
    """Refused, and without it there is no quorum."""
    return event.engine in facts.missing and not _holds(facts, event.engine)


def x_void(facts: Facts, event: CommitFailed, state: State) -> bool:
    """Refused by one that is quarantined already."""
    return event.engine in facts.quarantined


def _unpublished(facts: Facts) -> bool:
    return facts.publication is Publication.no


def l_more(facts: Facts, event: EngineLost, state: State) -> bool:
    """Lost before publication; the quorum holds without it and others are missing."""
    return loss_holds(facts, event, state) and _unpublished(facts) and _others_owe_commit(facts, event.engine)


def l_last(facts: Facts, event: EngineLost, state: State) -> bool:
    """Lost before publication; the quorum holds without it and it was the last one missing."""
    return (
        loss_holds(facts, event, state)
        and _unpublished(facts)
        and not _others_owe_commit(facts, event.engine)
    )


def l_breaks(facts: Facts, event: EngineLost, state: State) -> bool:
    """Lost before publication, and without it there is no quorum."""
    return loss_breaks(facts, event, state) and _unpublished(facts)


def l_after(facts: Facts, event: EngineLost, state: State) -> bool:
    """Lost after the publication was asked for: the round goes on."""
    return event.engine in facts.remaining and not _unpublished(facts)


# -- publication and putting back -------------------------------------------------------------------------


def asked(facts: Facts, event: object, state: State) -> bool:
    """The publication was asked for and is not answered."""
    return facts.publication is Publication.unknown


def published_unsettled(facts: Facts, event: object, state: State) -> bool:
    """Published, and not everything was put back so far."""
    return facts.publication is Publication.yes and not facts.settled


def settled(facts: Facts, event: object, state: State) -> bool:
    """Everything is put back, or given up and fenced; the release was ordered."""
    return facts.settled


def unsettled(facts: Facts, event: object, state: State) -> bool:
    """The opposite of ``settled``."""
    return not facts.settled


def settled_ours(facts: Facts, event: object, state: State) -> bool:
    """Settled, and the lock not known to be gone."""
    return facts.settled and facts.lock is not Lock.gone


def unsettled_ours(facts: Facts, event: object, state: State) -> bool:
    """Not settled, and the lock not known to be gone."""
    return not facts.settled and facts.lock is not Lock.gone


def unsettled_gone(facts: Facts, event: object, state: State) -> bool:
    """Not settled, and the lock is gone already."""
    return not facts.settled and facts.lock is Lock.gone


def not_gone(facts: Facts, event: object, state: State) -> bool:
    """The lock is not known to be gone."""
    return facts.lock is not Lock.gone


def _proven(facts: Facts) -> bool:
    return not facts.open and facts.publication is not Publication.unknown


def proven_ours(facts: Facts, event: object, state: State) -> bool:
    """Not settled; every engine and the ledger have answered; the lock is not gone."""
    return _proven(facts) and unsettled_ours(facts, event, state)


def proven_gone(facts: Facts, event: object, state: State) -> bool:
    """Not settled; every engine and the ledger have answered; the lock is gone."""
    return _proven(facts) and unsettled_gone(facts, event, state)


# -- clocks ---------------------------------------------------------------------------------------------


def due(facts: Facts, event: TimedOut, state: State) -> bool:
    """The deadline of this very state."""
    return event.phase is state


def late(facts: Facts, event: TimedOut, state: State) -> bool:
    """The deadline of a state the round has left."""
    return event.phase is not state


def due_settled(facts: Facts, event: TimedOut, state: State) -> bool:
    """Due, while the release is under way."""
    return due(facts, event, state) and facts.settled


def due_unsettled(facts: Facts, event: TimedOut, state: State) -> bool:
    """Due, before everything was put back."""
    return due(facts, event, state) and not facts.settled


def due_unsettled_ours(facts: Facts, event: TimedOut, state: State) -> bool:
    """Due, before everything was put back, with the lock not known to be gone."""
    return due(facts, event, state) and unsettled_ours(facts, event, state)


def due_unsettled_gone(facts: Facts, event: TimedOut, state: State) -> bool:
    """Due, before everything was put back, with the lock gone."""
    return due(facts, event, state) and unsettled_gone(facts, event, state)


# -- answers to Abort -------------------------------------------------------------------------------------


def f_commit(facts: Facts, event: EngineCommitted, state: State) -> bool:
    """An open engine says it committed; possible only after Cleaning was entered."""
    return facts.decided and not facts.settled and event.engine in facts.open


def f_commit_late(facts: Facts, event: EngineCommitted, state: State) -> bool:
    """The same, when it can no longer count."""
    return (
        facts.decided
        and event.engine in facts.members - facts.evicted - facts.reverted
        and (facts.settled or event.engine not in facts.open)
    )


def _incredible(facts: Facts, engine: Participant) -> bool:
    return engine in facts.inplace and facts.sent > 0


def f_revert(facts: Facts, event: EngineReverted, state: State) -> bool:
    """An open engine says it holds only the old weights, and can be believed."""
    return not facts.settled and event.engine in facts.open and not _incredible(facts, event.engine)


def f_revert_incredible(facts: Facts, event: EngineReverted, state: State) -> bool:
    """An engine that loads in place says so after a bucket was sent."""
    return not facts.settled and event.engine in facts.open and _incredible(facts, event.engine)


def f_revert_late(facts: Facts, event: EngineReverted, state: State) -> bool:
    """The same answer, when it can no longer count."""
    return event.engine in facts.members - facts.committed and (
        facts.settled or event.engine not in facts.open
    )


def f_torn(facts: Facts, event: CommitFailed, state: State) -> bool:
    """A member holds a mix, or was given up and fenced."""
    return event.engine in facts.members


def began_all_out(facts: Facts, event: EngineAcked, state: State) -> bool:
    """All had been sent before the round failed, so honest receipts may still arrive."""
    return facts.began_all_out


# -- after the end ----------------------------------------------------------------------------------------


def gave_up(facts: Facts, event: object, state: State) -> bool:
    """The round settled unclean: somebody was given up on and may still answer."""
    return facts.settled and facts.unclean


def late_answer(facts: Facts, event: EngineCommitted | EngineReverted | CommitFailed, state: State) -> bool:
    """A member answers after the round gave up on it."""
    return facts.unclean and event.engine in facts.members


def late_publication(facts: Facts, event: object, state: State) -> bool:
    """The ledger answers after the round gave up on it; the result said ``unknown``."""
    return facts.unclean and facts.publication is Publication.unknown

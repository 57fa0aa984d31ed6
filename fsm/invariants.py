"""What must be true of a round in every position it can reach, whatever its table says.

``PROMISES`` names everything that the explorer checks; a promise that is broken is reported under its name,
with the shortest trace. ``Truth`` is what the facts that happened prove, kept apart from what the round makes
of them. ``standing`` checks one position; what a single step must lead to is in :mod:`.consequences`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from . import events as e
from .facts import Facts
from .orders import Verb
from .states import Disposition, Lock, Outcome, Publication, State

__all__ = ["PROMISES", "SENDING", "Truth", "proven", "standing"]

PROMISES: dict[str, str] = {
    "one-row": "at most one row answers a fact, and no guard raises",
    "finite": "there is an end to what can be reached",
    "watchdogs": "a watchdog is never refused",
    "owed": "an answer that somebody owes, or may still give, is never refused",
    "unasked": "an answer that nobody can owe is refused",
    "downhill": "every move goes down; Failed is left only to Released, Released never",
    "evidence": "Released is entered if, and only if, all is settled and the lock is proven not held (P1)",
    "release": "the lock is given back once, when all is settled; after that only the retry comes again (P1)",
    "proof": "no receipt counts before all is sent, nor one that proves something else (P2)",
    "decided": "Cleaning is entered when every remaining participant proved it, and only then (P2)",
    "publish": "the publication is ordered once, when all remaining and at least the quorum committed (P3)",
    "publication": "what is known of the publication is what the ledger said (P3)",
    "failing": "a round fails for a reason, and never survives one; a quorum that holds is no reason",
    "quorum": "no work is done for fewer than the quorum",
    "awaited": "whoever is waited for can still answer",
    "commit": "commits are ordered on entering Cleaning, and nowhere else",
    "told": "what is known of an engine is what was said of it, all of it and nothing more (P4)",
    "disposition": "new means committed, old means by its word or never asked, the rest is quarantined (P4)",
    "taint": "what was quarantined before the round is never called old (P4)",
    "outcome": "the outcome is the sum of the dispositions and the publication",
    "members": "who takes part is fixed at Locked, from the roster without the lost (P8)",
    "fence": "whoever is out by another's word, or given up on, is fenced before the lock is given back",
    "clean": "an end is called clean if everybody and the ledger answered, and only then",
    "cause": "the first reason to fail is kept, and no later one",
    "orders": "entering a state gives its order; what changes nothing orders nothing",
    "facts": "what the round knows of itself changes only by the fact that says so",
    "inevitable": "with the clock and the lock's answer alone, every round is over in the end (P6)",
}
"""Every promise the explorer checks, by name."""

SENDING = frozenset({State.Locked, State.Broadcasting, State.Awaiting})
"""Where the lock is held and the last receipt is still missing."""


class Truth(NamedTuple):
    """What the facts that happened prove of the lock, and how often two orders were given."""

    lock: Lock = Lock.asked
    releases: int = 0
    publishes: int = 0

    def then(self, state: State, event: e.Event, verbs: tuple[Verb, ...]) -> Truth:
        """The truth after ``event`` happened in ``state`` and ``verbs`` were ordered."""
        lock = self.lock
        if isinstance(event, e.LockGranted):
            lock = Lock.held
        elif isinstance(event, e.LockRefused | e.Unlocked):
            lock = Lock.gone
        elif isinstance(event, e.LeaseLost) and state is not State.Idle:
            lock = Lock.gone  # in Idle it is still being asked for, so a grant may follow
        return Truth(
            lock,
            min(2, self.releases + verbs.count(Verb.ReleaseLock)),  # more than once is wrong, how much is not
            min(2, self.publishes + verbs.count(Verb.Publish)),
        )


def proven(facts: Facts) -> bool:
    """Whether nobody owes an answer any more: neither an engine nor the ledger."""
    return not facts.open and facts.publication is not Publication.unknown


def standing(state: State, facts: Facts, truth: Truth) -> Iterator[str]:
    """The promises that a position breaks."""
    yield from _lock_stands(state, facts, truth)
    yield from _publication_stands(facts, truth)
    if facts.decided and state is State.Cleaning and not facts.remaining <= facts.acks:
        yield "decided"
    if facts.acks and facts.sent != facts.buckets:
        yield "proof"
    working = state in SENDING or (state is State.Cleaning and facts.publication is Publication.no)
    if working and len(facts.remaining) < facts.quorum:
        yield "quorum"
    if not _somebody_answers(state, facts):
        yield "awaited"
    if state is State.Released and not facts.unclean and not proven(facts):
        yield "clean"
    yield from _dispositions_stand(facts)


def _lock_stands(state: State, facts: Facts, truth: Truth) -> Iterator[str]:
    over = state is State.Released
    if facts.lock is not truth.lock or over != (facts.settled and truth.lock is Lock.gone):
        yield "evidence"
    if truth.releases > 1 or (truth.releases and not facts.settled):
        yield "release"


def _publication_stands(facts: Facts, truth: Truth) -> Iterator[str]:
    known = facts.publication is not Publication.no
    if truth.publishes > 1 or (known and not truth.publishes):
        yield "publish"
    if known and (facts.missing or len(facts.committed) < facts.quorum):
        yield "publish"


def _somebody_answers(state: State, facts: Facts) -> bool:
    """Whether an engine is missing where engines are waited for; elsewhere the driver or the lock answers."""
    if state is State.Awaiting:
        return bool(facts.remaining - facts.acks)
    if state is State.Cleaning and facts.publication is Publication.no:
        return bool(facts.missing)
    return True


def _dispositions_stand(facts: Facts) -> Iterator[str]:
    out = facts.lost | facts.evicted | facts.quarantined
    old = (facts.reverted | (facts.roster - facts.members)) - out - facts.committed
    new_ones = 0
    for engine in facts.roster:
        found = facts.disposition(engine)
        new_ones += found is Disposition.serving_new
        if found is Disposition.serving_old and engine in facts.tainted:
            yield "taint"
        elif (found is Disposition.serving_old) != (engine in old - facts.tainted):
            yield "disposition"
        if (found is Disposition.serving_new) != (engine in facts.committed - out):
            yield "disposition"
    enough = facts.publication is Publication.yes and new_ones >= facts.quorum
    best = Outcome.complete if new_ones == len(facts.roster) else Outcome.partial
    if facts.outcome is not (best if enough else Outcome.failed):
        yield "outcome"

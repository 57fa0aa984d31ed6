"""What a round knows, what its engines are when it is over, and what cannot be asked for."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from weightsync.fsm.facts import Cause, Facts, opening
from weightsync.fsm.receipt import Expectation, Participant
from weightsync.fsm.states import Disposition, Outcome, Publication, State

A, B, C = Participant("a"), Participant("b"), Participant("c")
ALL = frozenset({A, B, C})


def facts(**known: object) -> Facts:
    """A round of three engines of which two are enough, all of them members, and what else is known."""
    return replace(Facts("r", 3, ALL, 2, members=ALL), **known)  # type: ignore[arg-type]


# -- opening ------------------------------------------------------------------------------------------------


def test_opening_takes_only_who_was_asked_for() -> None:
    """Who loads in place, or was quarantined before, matters only if he is in the roster."""
    known = opening(round="r", version=0, roster=[B, A], quorum=1, inplace=[A, C], tainted=[C])
    assert known.roster == {A, B}
    assert known.inplace == {A}
    assert not known.tainted
    assert (known.version, known.members, known.buckets) == (0, frozenset(), 0)


def test_a_round_needs_an_engine() -> None:
    """Nobody is no roster."""
    with pytest.raises(ValueError, match="at least one engine"):
        opening(round="r", version=1, roster=[], quorum=1)


def test_a_name_is_used_once() -> None:
    """Two lives of one engine cannot take part in the same round."""
    with pytest.raises(ValueError, match=r"names must differ: \['a', 'a'\]"):
        opening(round="r", version=1, roster=[A, replace(A, incarnation="1")], quorum=1)


@pytest.mark.parametrize("quorum", [1, 2, 3])
def test_any_number_from_one_to_all_is_a_quorum(quorum: int) -> None:
    """The quorum is kept as it was asked for."""
    assert opening(round="r", version=1, roster=ALL, quorum=quorum).quorum == quorum


@pytest.mark.parametrize("quorum", [0, 4, 1.5])
def test_anything_else_is_none(quorum: Any) -> None:
    """Fewer than one, more than all, or one and a half."""
    with pytest.raises(ValueError, match=f"quorum is {quorum}: a number from 1 to 3"):
        opening(round="r", version=1, roster=ALL, quorum=quorum)


def test_facts_cannot_be_changed() -> None:
    """No field can be set or deleted, and none can be added."""
    known = facts()
    for field in fields(known):
        with pytest.raises(FrozenInstanceError):
            setattr(known, field.name, None)
        with pytest.raises(FrozenInstanceError):
            delattr(known, field.name)
    with pytest.raises((FrozenInstanceError, TypeError)):
        known.colour = "blue"  # type: ignore[attr-defined]


# -- what follows -------------------------------------------------------------------------------------------


def groups(known: Facts) -> list[set[Participant]]:
    """Who remains, who is missing, who is open."""
    return [set(group) for group in (known.remaining, known.missing, known.open)]


def test_who_remains_who_is_missing_and_who_is_open() -> None:
    """Each group is the one before it, without those who are out of it."""
    known = facts(evicted=frozenset({A}))
    assert groups(known) == [{B, C}, {B, C}, {B, C}]
    known = facts(committed=frozenset({A}), reverted=frozenset({B}))
    assert groups(known) == [{A, B, C}, {B, C}, {C}]
    known = facts(quarantined=frozenset({A}), committed=frozenset({A, B}))
    assert groups(known) == [{B, C}, {C}, {C}]


def test_all_is_out_when_the_last_bucket_was_sent() -> None:
    """Without a plan nothing was all sent, not even nothing."""
    plan = Expectation("plan", 2, 2, 2)
    assert not facts().began_all_out
    assert not facts(plan=plan, sent=1).began_all_out
    assert facts(plan=plan, sent=2).began_all_out
    assert facts(plan=plan).buckets == 2


# -- dispositions -------------------------------------------------------------------------------------------

ME = frozenset({A})


@pytest.mark.parametrize(
    ("known", "disposition"),
    [
        ({}, Disposition.quarantined),
        ({"committed": ME}, Disposition.serving_new),
        ({"committed": ME, "tainted": ME}, Disposition.serving_new),
        ({"committed": ME, "quarantined": ME}, Disposition.quarantined),
        ({"reverted": ME}, Disposition.serving_old),
        ({"reverted": ME, "tainted": ME}, Disposition.quarantined),
        ({"reverted": ME, "quarantined": ME}, Disposition.quarantined),
        ({"reverted": ME, "evicted": ME}, Disposition.quarantined),
        ({"evicted": ME}, Disposition.quarantined),
        ({"members": frozenset({B})}, Disposition.serving_old),
        ({"members": frozenset({B}), "lost": ME}, Disposition.quarantined),
        ({"members": frozenset({B}), "tainted": ME}, Disposition.quarantined),
    ],
    ids=str,
)
def test_what_an_engine_is_in_the_end(known: dict[str, object], disposition: Disposition) -> None:
    """New by its commit, old by its own word or because it was never asked, quarantined otherwise."""
    assert facts(**known).disposition(A) is disposition


@pytest.mark.parametrize(
    ("committed", "publication", "outcome"),
    [
        (3, Publication.yes, Outcome.complete),
        (2, Publication.yes, Outcome.partial),
        (1, Publication.yes, Outcome.failed),
        (3, Publication.unknown, Outcome.failed),
        (3, Publication.no, Outcome.failed),
        (0, Publication.no, Outcome.failed),
    ],
)
def test_the_outcome_is_the_sum(committed: int, publication: Publication, outcome: Outcome) -> None:
    """Complete is everybody, partial at least the quorum, and both only if the ledger has it."""
    known = facts(committed=frozenset(sorted(ALL)[:committed]), publication=publication)
    assert known.outcome is outcome


# -- the cause ----------------------------------------------------------------------------------------------


def test_a_cause_says_who_what_and_where() -> None:
    """As far as it is known; the error does not take part in comparison."""
    assert str(Cause("Cancelled", State.Idle)) == "Cancelled in Idle"
    assert str(Cause("TimedOut", State.Locked, error=TimeoutError())) == "TimedOut in Locked"
    full = Cause("EngineLost", State.Awaiting, A, OSError("gone"))
    assert str(full) == "EngineLost of a in Awaiting: gone"
    assert full == Cause("EngineLost", State.Awaiting, A)

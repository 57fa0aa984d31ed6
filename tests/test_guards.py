"""Guards: which receipts prove something, and what a quorum is counted over."""

from __future__ import annotations

import dis
import time
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from inspect import isfunction
from types import CodeType
from typing import Any

import pytest

from weightsync.fsm import events as e
from weightsync.fsm import guards as g
from weightsync.fsm.engine_table import Session
from weightsync.fsm.explore import receipts, small_round
from weightsync.fsm.facts import Facts
from weightsync.fsm.receipt import Expectation, Participant, Receipt
from weightsync.fsm.states import State
from weightsync.fsm.table import ROUND

A = Participant("a", "1", ranks=2)
B = Participant("b", "1", ranks=2)
PLAN = Expectation("plan", tensors=3, bytes=3, buckets=3)
SESSION = Session("r", 7, 1)


def facts(plan: Expectation | None = PLAN) -> Facts:
    """A round of two engines with two ranks each, all sent."""
    everyone = frozenset({A, B})
    return Facts("r", 1, everyone, 1, members=everyone, epoch=7, plan=plan, sent=3)


def made(
    engine: Participant = A, session: Session = SESSION, plan: Expectation = PLAN, size: int = 3
) -> tuple[Receipt, ...]:
    """The receipts of all ranks of an engine for a session, a plan and a number of bytes."""
    return receipts(engine, session, plan, size)


# -- receipts -----------------------------------------------------------------------------------------------


def test_one_good_receipt_of_each_rank_is_proof() -> None:
    """In whatever order the ranks answer."""
    assert g.proves(facts(), e.EngineAcked(A, made()))
    assert g.proves(facts(), e.EngineAcked(A, made()[::-1]))


@pytest.mark.parametrize(
    "wrong",
    [
        (),
        made()[:1],
        (*made(), made()[0]),
        (made()[0], made()[0]),
        made(B),
        (made()[0], made(B)[1]),
        made(replace(A, incarnation="0")),
        made(session=Session("other", 7, 1)),
        made(session=Session("r", 6, 1)),
        made(session=Session("r", 8, 1)),
        made(plan=replace(PLAN, fingerprint="other")),
        made(plan=replace(PLAN, tensors=2)),
        made(size=2),
        made(replace(A, ranks=3)),
        made(replace(A, ranks=1)),
    ],
    ids=[
        "none", "a rank missing", "one too many", "one rank twice", "somebody else's", "one of somebody else",
        "of an earlier life", "of another round", "of an earlier epoch", "of a later epoch",
        "of another plan", "fewer tensors", "fewer bytes", "of more ranks", "of fewer ranks",
    ],
)  # fmt: skip
def test_what_is_not_quite_right_is_no_proof(wrong: tuple[Receipt, ...]) -> None:
    """Every part of a receipt counts, and so does every rank."""
    assert not g.proves(facts(), e.EngineAcked(A, wrong))


def test_nothing_proves_anything_without_a_plan() -> None:
    """Before the plan is agreed there is nothing to compare with."""
    assert not g.proves(facts(plan=None), e.EngineAcked(A, made()))


def test_the_digest_counts_where_the_sender_has_one() -> None:
    """Content is compared if the round verifies content, and not otherwise."""
    assert g.proves(facts(), e.EngineAcked(A, made()))
    verified = facts(replace(PLAN, digest="abc"))
    assert not g.proves(verified, e.EngineAcked(A, made()))


# -- quorum -------------------------------------------------------------------------------------------------


def test_the_quorum_is_counted_over_sets() -> None:
    """A loss that was told before, a stranger, or an earlier life of a member makes no difference."""
    known = small_round(3, 2)
    e1, e2, e3 = sorted(known.roster)
    known = replace(known, members=known.roster, evicted=frozenset({e1}))
    for engine in (e1, Participant("stranger"), replace(e2, incarnation="earlier")):
        assert g.loss_void(known, e.EngineLost(engine), State.Locked)
        assert not g.loss_holds(known, e.EngineLost(engine), State.Locked)
        assert not g.loss_breaks(known, e.EngineLost(engine), State.Locked)
    for engine in (e2, e3):
        assert g.loss_breaks(known, e.EngineLost(engine), State.Locked)


def test_an_engine_may_be_lost_while_enough_are_left() -> None:
    """Exactly as many as the quorum leaves room for."""
    known = small_round(3, 2)
    members = replace(known, members=known.roster)
    for engine in members.members:
        assert g.loss_holds(members, e.EngineLost(engine), State.Locked)


@pytest.mark.parametrize(("lost", "enough"), [(0, True), (1, True), (2, False), (3, False)])
def test_the_grant_is_used_if_enough_are_left(lost: int, enough: bool) -> None:
    """Engines lost while waiting for the lock count against the quorum of those asked for."""
    known = small_round(3, 2)
    known = replace(known, lost=frozenset(sorted(known.roster)[:lost]))
    granted = e.LockGranted(1)
    assert g.enough(known, granted, State.Idle) is enough
    assert g.too_few(known, granted, State.Idle) is not enough


# -- purity -------------------------------------------------------------------------------------------------


BUILTINS = {"all", "bool", "len", "list", "range", "sorted"}  # all of them pure


def loaded(code: CodeType) -> Iterator[str]:
    """The globals and builtins that a piece of code loads, those of its inner pieces included."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from loaded(inner)


def reads(function: Any, seen: set[str]) -> Iterator[str]:
    """What a function, and every function of ours that it calls, gets from outside; enums are constants."""
    seen.add(function.__qualname__)
    yield from function.__code__.co_freevars
    for name in loaded(function.__code__):
        value = function.__globals__.get(name)
        if isfunction(value) and value.__module__ == g.__name__:
            if value.__qualname__ not in seen:
                yield from reads(value, seen)
        elif not (isinstance(value, type) and issubclass(value, Enum)):
            yield name


@pytest.mark.parametrize(
    "guard", {row.guard for row in ROUND.rows} - {None}, ids=lambda guard: guard.__name__
)
def test_a_guard_reads_nothing_but_its_arguments(guard: Any) -> None:
    """No clock, no file, no variable: only other guards, the words of our enums, and pure builtins."""
    assert set(reads(guard, set())) <= BUILTINS
    assert guard.__defaults__ is None


def test_a_guard_that_reads_a_clock_would_be_noticed() -> None:
    """The check above can fail."""

    def impatient(facts: Facts, event: object, state: State) -> bool:
        return time.monotonic() > 0

    assert "time" in set(reads(impatient, set()))

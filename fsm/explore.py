"""Everything that can happen to a round, or to an engine rank, told by partners who lie as they please.

    chaos(small_round(engines=2, quorum=1)) -> Exploration
    explore_engine(stages=True) -> Exploration

Any fact of a finite alphabet is offered in every position that can be reached: out of turn, twice, from a
stranger, from an earlier life of a member. Whatever the table accepts must break no promise of
:mod:`.invariants`, and whatever it refuses must be nothing that an honest partner may say. The search itself
is :func:`.search.explore` and is there for other worlds too.

Receipts are not invented here: an engine rank makes each of them, run to Acked by the real machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from . import events as e
from .consequences import Scene, step_breaks
from .engine import EngineMachine
from .engine_table import AllApplied, FrameSeen, Opened, Session, ViewClosed
from .errors import GuardFailed, IllegalEvent, TableError
from .facts import Cause, Facts, opening
from .invariants import Truth, standing
from .orders import Verb
from .receipt import Expectation, Participant, Receipt
from .reducer import Position, Step, begin, step
from .rows import Table
from .search import Edge, Exploration, explore
from .states import State
from .table import ROUND
from .welcome import welcome

__all__ = [
    "SOMETHING", "Alphabet", "Said", "Seen", "alphabet", "chaos", "explore", "receipts", "small_plan",
    "small_round",
]  # fmt: skip

EPOCH = 1
SOMETHING = Cause("something", State.Idle)
"""Stands for every cause: a round's future depends on there being one, not on which."""


class Seen(NamedTuple):
    """A node of the chaos: a position of the round, and what the facts so far prove."""

    position: Position
    truth: Truth

    def __str__(self) -> str:
        return self.position.state.name


@dataclass(frozen=True, slots=True)
class Said:
    """One letter of the alphabet: a fact, how a trace calls it, and whether it proves what it says."""

    label: str
    event: e.Event
    good: bool = True


Alphabet = tuple[Said, ...]


# -- small rounds and what can be said in them ------------------------------------------------------------


def small_round(engines: int = 2, quorum: int = 1, *, inplace: int = 1, tainted: int = 0) -> Facts:
    """The facts of a round of engines ``e1``, ``e2``, ...: the first few load in place, or are tainted."""
    roster = [Participant(f"e{number}") for number in range(1, engines + 1)]
    return opening(
        round="r", version=1, roster=roster, quorum=quorum, inplace=roster[:inplace], tainted=roster[:tainted]
    )


def small_plan(buckets: int) -> Expectation:
    """A plan of buckets with one byte each."""
    return Expectation("plan", tensors=buckets, bytes=buckets, buckets=buckets)


def receipts(engine: Participant, session: Session, plan: Expectation, size: int) -> tuple[Receipt, ...]:
    """The receipts of all ranks of ``engine`` for ``size`` bytes: each rank is run to Acked."""
    found = []
    for rank in range(engine.ranks):
        machine = EngineMachine(engine.id, rank=rank, incarnation=engine.incarnation)
        machine.fire(Opened(session, plan))
        for index in range(plan.buckets):
            machine.fire(FrameSeen(session, index))
        machine.fire(AllApplied(session))
        machine.fire(ViewClosed(session, plan.tensors, size))
        found.append(machine.receipt(session))
    return tuple(found)


def alphabet(facts: Facts, buckets: int = 1, strangers: Iterable[Participant] | None = None) -> Alphabet:
    """Everything that can be said to a round with these facts.

    Args:
        facts: of a round that has not begun.
        buckets: how many buckets its plan has.
        strangers: who else speaks; by default somebody unknown and an earlier life of a member.
    """
    roster = sorted(facts.roster)
    if strangers is None:
        strangers = (Participant("stranger"), replace(roster[0], incarnation="earlier"))
    plan, session = small_plan(buckets), Session(facts.round, EPOCH, facts.version)
    names = {engine: engine.id for engine in roster}
    names |= {
        who: f"{who.id} ({who.incarnation})" if who.id in names.values() else who.id for who in strangers
    }
    said = [
        Said("LockGranted", e.LockGranted(EPOCH)),
        Said("Prepared", e.Prepared(plan)),
        Said("Prepared(empty)", e.Prepared(small_plan(0))),
        *(Said(f"BucketSent({index})", e.BucketSent(index)) for index in range(buckets + 1)),
        *(Said(kind.__name__, kind()) for kind in _ALONE),
        *(Said(f"TimedOut({phase.name})", e.TimedOut(phase)) for phase in State),
    ]
    for engine, name in names.items():
        said += [Said(f"{kind.__name__}({name})", kind(engine)) for kind in _OF_AN_ENGINE]
        said.append(
            Said(f"EngineAcked({name})", e.EngineAcked(engine, receipts(engine, session, plan, buckets)))
        )
    for engine in roster:
        wrong = e.EngineAcked(engine, receipts(engine, session, plan, buckets + 1))
        said.append(Said(f"EngineAcked({engine.id}, wrong)", wrong, good=False))
    return tuple(said)


_ALONE: tuple[Callable[[], e.Event], ...] = (
    e.LockRefused, e.PrepareFailed, e.AllSent, e.TransportFailed, e.Published, e.PublishFailed, e.Cleaned,
    e.CleanupFailed, e.Unlocked, e.UnlockFailed, e.LeaseLost, e.Cancelled,
)  # fmt: skip
_OF_AN_ENGINE: tuple[Callable[[Participant], e.Event], ...] = (
    e.EngineLost, e.EngineCommitted, e.CommitFailed, e.EngineReverted,
)  # fmt: skip


# -- the chaos --------------------------------------------------------------------------------------------


def chaos(
    facts: Facts,
    *,
    buckets: int = 1,
    strangers: Iterable[Participant] | None = None,
    table: Table[State, Facts] = ROUND,
    until: Collection[str] = (),
    limit: int = 1_000_000,
) -> Exploration[Seen]:
    """Offer every fact in every position of a round's table that can be reached.

    Args:
        facts: of a round that has not begun, from :func:`~.facts.opening` or :func:`small_round`.
        buckets: how many buckets its plan has.
        strangers: see :func:`alphabet`.
        table: another table than the round's, to see what would become of it.
        until: stop as soon as one of these promises is broken.
        limit: how many positions are too many.
    """
    said = alphabet(facts, buckets, strangers)
    position, _ = begin(facts, table)
    return explore(
        Seen(position, Truth()),
        lambda node: _steps(node, said, table),
        lambda node: standing(node.position.state, node.position.facts, node.truth),
        goal=lambda node: node.position.state is State.Released,
        until=until,
        limit=limit,
    )


def _steps(node: Seen, said: Alphabet, table: Table[State, Facts]) -> Iterator[Edge[Seen]]:
    before = node.position
    for letter in said:
        try:
            taken = step(before, letter.event, table)
        except (GuardFailed, TableError):
            yield Edge(letter.label, None, broken=("one-row",))
        except IllegalEvent:
            yield Edge(letter.label, None, broken=_refusal(before, letter.event))
        else:
            yield _edge(node, letter, taken, table)


def _refusal(before: Position, event: e.Event) -> tuple[str, ...]:
    if type(event) in e.WATCHDOGS:
        return ("watchdogs",)
    return ("owed",) if welcome(before.state, before.facts, event) else ()


def _edge(node: Seen, letter: Said, taken: Step, table: Table[State, Facts]) -> Edge[Seen]:
    before, after = node.position, taken.after
    scene = Scene(
        before.state, before.facts, letter.event, letter.good, after.state, after.facts, taken.orders
    )
    broken = tuple(step_breaks(scene, table.entry))
    verbs: tuple[Verb, ...] = tuple(order.verb for order in taken.orders)
    truth = node.truth.then(before.state, letter.event, verbs)
    reached = _essence(before, after)
    here = reached is before and truth == node.truth
    return Edge(
        letter.label, node if here else Seen(reached, truth), taken.row.number, _certain(scene), broken
    )


def _certain(scene: Scene) -> bool:
    """The clock of the state, and the lock's good answer, come sooner or later."""
    return scene.due or isinstance(scene.event, e.Unlocked)


def _essence(before: Position, after: Position) -> Position:
    """``after`` without what decides nothing later: how often it was tried, and what the cause was."""
    facts = after.facts
    if facts is before.facts:
        return before if after.state is before.state else after
    if facts.tries or (facts.cause is not None and facts.cause is not SOMETHING):
        facts = replace(facts, tries=0, cause=facts.cause and SOMETHING)
    if facts == before.facts:
        return before if after.state is before.state else Position(after.state, before.facts)
    return after if facts is after.facts else Position(after.state, facts)

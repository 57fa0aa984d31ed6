"""What must follow from a fact: the table once more, from the other side.

The table answers by state, one row at a time. Here the same protocol is told by question: who may rightly
speak (:mod:`.welcome`), what becomes known (``learnt``), where it leads (``destination``) and what is ordered
(``ordered``). Nothing here reads the table, its guards or its lessons. The explorer asks all four about every
step there is, so that a mistake goes unseen only if it was made twice, in two different shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import events as e
from .facts import Facts
from .invariants import SENDING
from .orders import Order, Verb
from .receipt import Participant
from .states import Lock, Publication, State
from .welcome import welcome

__all__ = ["Scene", "destination", "learnt", "ordered", "step_breaks"]

Idle, Locked, Broadcasting, Awaiting = State.Idle, State.Locked, State.Broadcasting, State.Awaiting
Cleaning, Failed, Released = State.Cleaning, State.Failed, State.Released
_SETTLING = frozenset({Cleaning, Failed})


@dataclass(slots=True)
class Scene:
    """One step under scrutiny: what was, what happened, what came of it.

    ``good`` says whether the fact proves what it says; whoever staged the scene knows, nobody in it does.
    """

    state: State
    facts: Facts
    event: Any
    good: bool
    goal: State
    after: Facts
    orders: tuple[Order, ...]

    @property
    def engine(self) -> Participant | None:
        """Whom the fact is about."""
        return getattr(self.event, "engine", None)

    @property
    def due(self) -> bool:
        """Whether the fact is the deadline of this very state; Released has none."""
        return isinstance(self.event, e.TimedOut) and self.event.phase is self.state is not Released

    @property
    def lost(self) -> frozenset[Participant]:
        """Whom the round goes on without from now on."""
        return self.facts.remaining - self.after.remaining


# -- what becomes known -----------------------------------------------------------------------------------


def _belongs(s: Scene) -> str | None:
    """The set of engines to which the engine of the fact belongs from now on."""
    facts, event, engine = s.facts, s.event, s.engine
    if isinstance(event, e.EngineLost) and s.state is Idle:
        return "lost" if engine in facts.roster else None
    if isinstance(event, e.EngineLost) and s.state is not Released:
        return ("evicted" if s.state in SENDING else "quarantined") if engine in facts.remaining else None
    if isinstance(event, e.EngineAcked) and s.state is Awaiting and engine in facts.remaining:
        return "acks" if s.good else "evicted"
    if isinstance(event, e.CommitFailed) and s.state in _SETTLING:
        return "quarantined" if engine in (facts.missing if s.state is Cleaning else facts.members) else None
    return _answers(s)


def _answers(s: Scene) -> str | None:
    """The same for an engine's good answers, which count until all is settled."""
    if s.engine not in s.facts.open or s.facts.settled or s.state not in _SETTLING:
        return None
    if isinstance(s.event, e.EngineCommitted):
        return "committed"
    if isinstance(s.event, e.EngineReverted):  # not believed of one that loads in place, once bytes are out
        return "quarantined" if s.engine in s.facts.inplace and s.facts.sent else "reverted"
    return None


def _gives_up(s: Scene) -> bool:
    return s.state is Failed and not s.facts.settled and (isinstance(s.event, e.CleanupFailed) or s.due)


def learnt(s: Scene) -> dict[str, Any]:
    """The fields of the facts that must change, and to what; ``cause`` and ``tries`` are checked apart."""
    facts, event = s.facts, s.event
    changes: dict[str, Any] = {}
    group = _belongs(s)
    if group is not None:
        changes[group] = getattr(facts, group) | {s.engine}
    if isinstance(event, e.LockGranted):
        changes |= {"lock": Lock.held, "epoch": event.epoch}
    elif isinstance(event, e.LockRefused | e.Unlocked) or (
        isinstance(event, e.LeaseLost) and s.state is not Idle
    ):
        changes["lock"] = Lock.gone
    elif isinstance(event, e.Prepared):
        changes["plan"] = event.plan
    elif isinstance(event, e.BucketSent):
        changes["sent"] = facts.sent + 1
    elif isinstance(event, e.Published | e.PublishFailed) and s.state is not Released:
        changes["publication"] = Publication.yes if isinstance(event, e.Published) else Publication.no
    elif not facts.settled and (isinstance(event, e.Cleaned) or _gives_up(s)):
        changes |= {"settled": True, "unclean": not isinstance(event, e.Cleaned)}
    return changes | _follows(s)


def _follows(s: Scene) -> dict[str, Any]:
    """What becomes known by the move itself, or by the last missing answer."""
    if s.goal is Locked and s.state is Idle:
        return {"members": s.facts.roster - s.facts.lost}
    if s.goal is Cleaning and s.state is Awaiting:
        return {"decided": True}
    if s.state is s.goal is Cleaning and s.facts.publication is Publication.no and not s.after.missing:
        return {"publication": Publication.unknown}
    return {}


# -- where it leads ---------------------------------------------------------------------------------------

_REASONS = (
    e.PrepareFailed,
    e.TransportFailed,
    e.PublishFailed,
    e.CleanupFailed,
    e.LockRefused,
    e.UnlockFailed,
)
_ONWARD: dict[type[Any], State] = {e.LockGranted: Locked, e.Prepared: Broadcasting, e.AllSent: Awaiting}


def _fails(s: Scene) -> bool:
    """Whether the fact is a reason to fail, for a round that has not failed so far."""
    facts, event = s.facts, s.event
    if s.due or isinstance(event, _REASONS):
        return True
    if isinstance(event, e.LockGranted):
        return len(facts.roster - facts.lost) < facts.quorum
    if isinstance(event, e.Cancelled):
        return s.state is not Cleaning
    if isinstance(event, e.LeaseLost):
        return s.state is not Idle and not facts.settled
    if isinstance(event, e.EngineAcked) and s.engine not in facts.members:
        return True
    return bool(s.lost) and facts.publication is Publication.no and len(s.after.remaining) < facts.quorum


def destination(s: Scene) -> State:
    """The state in which the round must be after the step."""
    if s.state.rank < Failed.rank and _fails(s):
        return Failed
    if s.state.rank < Awaiting.rank:
        return _ONWARD.get(type(s.event), s.state)
    if s.state is Awaiting:
        return Awaiting if s.after.remaining - s.after.acks else Cleaning
    return Released if s.after.settled and s.after.lock is Lock.gone else s.state


# -- what is ordered --------------------------------------------------------------------------------------


def ordered(s: Scene, entry: dict[State, Any]) -> Iterator[tuple[str, Verb]]:
    """The orders that must be given, in their order, each with the promise that wants it."""
    by_its_own_word = s.state is Failed and not isinstance(s.event, e.EngineLost)
    if s.lost and not by_its_own_word:
        yield "fence", Verb.Fence
    if _gives_up(s):
        yield "fence", Verb.FenceAll
    if s.after.publication is Publication.unknown and s.facts.publication is Publication.no:
        yield "publish", Verb.Publish
    if s.state is Cleaning and isinstance(s.event, e.Published):
        yield "orders", Verb.PutBack
    if s.after.settled and not s.facts.settled and s.after.lock is not Lock.gone:
        yield "release", Verb.ReleaseLock
    if s.facts.settled and (isinstance(s.event, e.UnlockFailed) or s.due):
        yield "release", Verb.RetryRelease
    elif s.goal is not s.state:
        yield ("commit" if s.goal is Cleaning else "orders"), entry[s.goal]


def _addressed(s: Scene, verb: Verb) -> frozenset[Participant]:
    """Whom an order must be for; nobody in particular is nobody."""
    if verb is Verb.Fence:
        return s.lost
    if verb in (Verb.Abort, Verb.FenceAll):
        return s.after.open
    if verb is Verb.PutBack:
        return s.after.committed & s.after.remaining
    everybody = verb in (Verb.Prepare, Verb.Broadcast, Verb.Collect, Verb.Commit)
    return s.after.remaining if everybody else frozenset()


# -- the step as a whole ----------------------------------------------------------------------------------

_PROMISE_OF_FIELD: dict[str, str] = {
    "lost": "told", "evicted": "told", "committed": "told", "reverted": "told", "quarantined": "told",
    "acks": "proof", "members": "members", "decided": "decided", "publication": "publication",
    "settled": "clean", "unclean": "clean", "lock": "evidence", "tainted": "taint",
}  # fmt: skip
_PROMISE_OF_STATE: dict[State, str] = {Released: "evidence", Failed: "failing", Cleaning: "decided"}
_PROMISE_OF_VERB: dict[Verb, str] = {
    Verb.Commit: "commit", Verb.Publish: "publish", Verb.Fence: "fence", Verb.FenceAll: "fence",
    Verb.ReleaseLock: "release", Verb.RetryRelease: "release",
}  # fmt: skip
_FIELDS = tuple(name for name in Facts.__dataclass_fields__ if name not in ("cause", "tries"))


def step_breaks(s: Scene, entry: dict[State, Any]) -> Iterator[str]:
    """The promises that an accepted step breaks."""
    if not welcome(s.state, s.facts, s.event):
        yield "unasked"
    yield from _mislearnt(s)
    yield from _misplaced(s)
    yield from _misordered(s, entry)
    if _misattributed(s):
        yield "cause"


def _mislearnt(s: Scene) -> Iterator[str]:
    changes = learnt(s)
    if changes or s.after is not s.facts:
        for name in _FIELDS:
            before, after = getattr(s.facts, name), getattr(s.after, name)
            if after != changes.get(name, before):
                yield _PROMISE_OF_FIELD.get(name, "facts")
    if s.after.tries - s.facts.tries != sum(order.verb is Verb.RetryRelease for order in s.orders):
        yield "release"


def _misplaced(s: Scene) -> Iterator[str]:
    expected = destination(s)
    moved = s.goal is not s.state
    if s.goal is not expected:
        names = _PROMISE_OF_STATE.get(s.goal if moved else expected), _PROMISE_OF_STATE.get(expected)
        yield names[0] or names[1] or "downhill"
    if moved and (s.goal.rank < s.state.rank or (s.state is Failed and s.goal is not Released)):
        yield "downhill"


def _misordered(s: Scene, entry: dict[State, Any]) -> Iterator[str]:
    wanted = list(ordered(s, entry))
    verbs = [verb for _, verb in wanted]
    given = [order.verb for order in s.orders]
    if given != verbs:
        lacking, too_many = Counter(verbs) - Counter(given), Counter(given) - Counter(verbs)
        yield from (
            [promise for promise, verb in wanted if verb in lacking]
            or [_PROMISE_OF_VERB.get(verb, "orders") for verb in too_many]
            or ["orders"]  # all of them, in the wrong order
        )
    for order in s.orders:
        if frozenset(order.engines) != _addressed(s, order.verb):
            yield _PROMISE_OF_VERB.get(order.verb, "orders")


def _misattributed(s: Scene) -> bool:
    """Whether the cause is anything but the first reason to fail."""
    cause = s.after.cause
    if s.facts.cause is not None or s.goal is not Failed:
        return cause is not s.facts.cause
    return cause is None or (cause.trigger, cause.state, cause.engine) != (
        type(s.event).__name__, s.state, s.engine,
    )  # fmt: skip

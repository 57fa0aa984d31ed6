"""The linter's rules about what holds between rounds: epochs, versions, taints, retries, ends.

Rounds are held against each other only where they share something (:mod:`.setting`): the trainer that runs
one after the other, the lock, or the ledger. What is remembered of them is bounded: the newest of each, and
the last few that had the same lock.

Two trainers write at their own pace, and a trainer that was stopped for a while writes late. So a rule that
holds two of them against each other compares the times at which the records were made, waits until the older
round is over, and lets the one off that lost its lease: its late facts were told to nobody.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from .lint_story import Place, Story
from .states import Lock, State

__all__ = ["BETWEEN_RULES", "Books", "Broken", "Recent", "Theme"]

_K = TypeVar("_K")
_V = TypeVar("_V")
Broken = tuple[Place, str, str]
"""Where, in which round, and what is wrong."""

_RUNS = 4096
_ROUNDS = 100_000
_HOLDERS = 16
_QUARANTINED, _FAILED = "quarantined", "failed"


class Recent(OrderedDict[_K, _V]):
    """The newest entries of a mapping, ``most`` of them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def put(self, key: _K, value: _V) -> None:
        """Add one; the oldest goes."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)


@dataclass(slots=True)
class _Run:
    """One trainer, round after round."""

    last: Story
    quarantined: dict[str, str] = field(default_factory=dict)  # engine: its incarnation


@dataclass(slots=True)
class _Lock:
    """One lock, grant after grant."""

    newest: Story
    holders: deque[Story] = field(default_factory=lambda: deque(maxlen=_HOLDERS))


@dataclass(slots=True)
class Books:
    """What is remembered of rounds. ``known`` holds every round that was opened, and where."""

    runs: Recent[str, _Run] = field(default_factory=lambda: Recent(_RUNS))
    locks: Recent[str, _Lock] = field(default_factory=lambda: Recent(_RUNS))
    bound: Recent[str, Story] = field(default_factory=lambda: Recent(_RUNS))
    published: Recent[str, Story] = field(default_factory=lambda: Recent(_RUNS))
    known: Recent[str, Place] = field(default_factory=lambda: Recent(_ROUNDS))

    def learn(self, moment: str, story: Story) -> None:
        """Write down what came of ``story`` at this moment, after the rules were asked."""
        if moment == "opened":
            self._opened(story)
        elif moment == "granted":
            self._granted(story)
        elif moment == "bound" and _newer(story, self.bound.get(story.ledger_name)):
            self.bound.put(story.ledger_name, story)
        elif moment == "published" and _newer(story, self.published.get(story.ledger_name)):
            self.published.put(story.ledger_name, story)
        elif moment == "over":
            self._settled(story)

    def _opened(self, story: Story) -> None:
        self.known.put(story.round, story.opened)
        run = self.runs.get(story.run)
        if story.run and run is None:
            self.runs.put(story.run, _Run(story))
        elif run is not None:
            run.last.before, run.last = None, story
            self.runs.move_to_end(story.run)

    def begin(self, story: Story) -> None:
        """Find the round before it of the same trainer."""
        run = self.runs.get(story.run) if story.run else None
        story.before = None if run is None else run.last

    def _granted(self, story: Story) -> None:
        lock = self.locks.get(story.lock_name)
        if lock is None:
            self.locks.put(story.lock_name, lock := _Lock(story))
        self.locks.move_to_end(story.lock_name)
        if _newer(story, lock.newest):
            lock.newest = story
        elif story.granted_at > lock.newest.granted_at + _slack(story, lock.newest):
            story.ahead = lock.newest
        lock.holders.append(story)

    def _settled(self, story: Story) -> None:
        run = self.runs.get(story.run)
        if run is None:
            return
        for engine, value in story.roster.items():
            what = story.disposition(engine)
            if what == _QUARANTINED:
                run.quarantined[engine] = value["incarnation"]
            elif what == "serving_new":
                run.quarantined.pop(engine, None)


def _newer(story: Story, other: Story | None) -> bool:
    return other is None or (story.epoch or 0) >= (other.epoch or 0)


def _slack(one: Story, other: Story) -> float:
    """Times of one file are of one clock; those of several may be of several hosts."""
    return 0.001 if one.opened[0] == other.opened[0] else 0.05


def _name(story: Story) -> str:
    return f"round {story.round} ({story.opened[0]}:{story.opened[1]})"


# -- rules ------------------------------------------------------------------------------------------------

_Look = Callable[[Books, Story], Iterator[Broken]]


@dataclass(frozen=True, slots=True)
class Theme:
    """One rule between rounds, asked at the moments of a round that it names.

    Moments are ``opened``, ``planned``, ``granted``, ``bound``, ``published``, ``over``, ``result``, and
    ``end`` where the log ends before the round does.
    """

    promise: str
    name: str
    moments: tuple[str, ...]
    look: _Look


BETWEEN_RULES: list[Theme] = []
"""The rules of this module."""


def _rule(promise: str, *moments: str) -> Callable[[_Look], _Look]:
    def add(look: _Look) -> _Look:
        BETWEEN_RULES.append(Theme(promise, getattr(look, "__name__", "?").replace("_", " "), moments, look))
        return look

    return add


@_rule("P1", "granted")
def an_epoch_is_granted_once(books: Books, story: Story) -> Iterator[Broken]:
    """Two grants of one lock never carry the same number."""
    lock = books.locks.get(story.lock_name)
    for other in lock.holders if lock else ():
        if other is not story and other.epoch == story.epoch:
            yield story.place, story.round, f"epoch {story.epoch} was granted to {_name(other)} before"


@_rule("P1", "opened")
def a_grant_has_an_end(books: Books, story: Story) -> Iterator[Broken]:
    """A trainer that goes on to its next round has given back, or lost, the lock of the one before."""
    last = story.before
    if last is not None and last.granted is not None and last.lock != Lock.gone.name:
        what = f"epoch {last.epoch} was granted, and nothing shows its end; {_name(story)} began after it"
        yield last.granted, last.round, what


@_rule("P1", "over", "end")
def one_at_a_time_holds_the_lock(books: Books, story: Story) -> Iterator[Broken]:
    """From its grant until a round has put everything back, nobody else is granted the lock."""
    lock = books.locks.get(story.lock_name)
    for other in lock.holders if lock else ():
        if (
            other is story
            or not other.ended
            or not (story.holds and other.holds)
            or story.epoch == other.epoch
        ):
            continue
        first, second = sorted((story, other), key=lambda each: each.epoch or 0)
        slack = _slack(first, second)
        within = second.granted_at + slack < first.free_at and first.granted_at + slack < second.free_at
        if within and first.evidence != "LeaseLost" and second.granted:
            held = f"{_name(first)} held it as epoch {first.epoch}"
            yield second.granted, second.round, f"the lock was granted as epoch {second.epoch} while {held}"


@_rule("P4", "opened")
def a_quarantine_is_remembered(books: Books, story: Story) -> Iterator[Broken]:
    """Until a commit of that engine is confirmed: what was touched is no old version."""
    run = books.runs.get(story.run)
    for engine, incarnation in run.quarantined.items() if run else ():
        asked = story.roster.get(engine)
        if asked is not None and asked["incarnation"] == incarnation and engine not in story.tainted:
            yield story.opened, story.round, f"{engine} was left quarantined, and counts as whole here"


@_rule("P5", "over", "end")
def a_late_publication_is_refused(books: Books, story: Story) -> Iterator[Broken]:
    """What an older epoch publishes after a newer one changes nothing."""
    if story.late is not None and story.evidence != "LeaseLost":
        what = f"version {story.version} of epoch {story.epoch} was published after that of a higher epoch"
        yield story.late, story.round, what


@_rule("P6", "opened")
def a_round_ends_before_the_next(books: Books, story: Story) -> Iterator[Broken]:
    """Of one trainer. Another one, or the same one after a crash, cannot wait for its end."""
    last = story.before
    if last is not None and not last.over:
        yield last.place, last.round, f"it never ends: it is in {last.state} when {_name(story)} begins"


@_rule("P6", "opened")
def a_round_tells_its_result_before_the_next(books: Books, story: Story) -> Iterator[Broken]:
    """Of one trainer: it is over when it has told what came of it."""
    last = story.before
    if last is not None and last.over and not last.result:
        yield last.place, last.round, f"it is over, and has told no result when {_name(story)} begins"


@_rule("P7", "granted")
def epochs_grow_from_round_to_round(books: Books, story: Story) -> Iterator[Broken]:
    """Of one trainer."""
    lock = books.locks.get(story.lock_name)
    others = [each for each in lock.holders if each.run == story.run] if lock and story.run else []
    newest = max((each.epoch or 0 for each in others if each is not story), default=0)
    if (story.epoch or 0) < newest:
        yield story.place, story.round, f"epoch {story.epoch} is granted after epoch {newest}"


@_rule("P7", "over", "end")
def epochs_grow_over_all_trainers(books: Books, story: Story) -> Iterator[Broken]:
    """Of all who share the lock; told of when the round is over, because it may have heard of it too late."""
    ahead = story.ahead
    if ahead is None or not story.holds or story.evidence == "LeaseLost" or story.granted is None:
        return
    if not story.run or ahead.run != story.run:
        what = f"epoch {story.epoch} is granted after {_name(ahead)} was granted epoch {ahead.epoch}"
        yield story.granted, story.round, what


@_rule("P7", "bound")
def a_version_never_falls(books: Books, story: Story) -> Iterator[Broken]:
    """In the order of epochs; and its number stands for one set of bytes."""
    newest = books.bound.get(story.ledger_name)
    if newest is None or newest is story or story.version is None or newest.version is None:
        return
    older, newer = (newest, story) if _newer(story, newest) else (story, newest)
    if (newer.version or 0) < (older.version or 0):
        before = f"version {older.version} of {_name(older)}"
        yield story.place, story.round, f"version {newer.version} of epoch {newer.epoch} comes after {before}"
    elif newer.version == older.version and newer.digest != older.digest:
        yield story.place, story.round, f"version {story.version} stands for other bytes in {_name(newest)}"


@_rule("P9", "opened")
def a_round_has_an_id_of_its_own(books: Books, story: Story) -> Iterator[Broken]:
    """A retry is a new round."""
    place = books.known.get(story.round)
    if place is not None:
        yield story.opened, story.round, f"a round of this name was opened before, in {place[0]}:{place[1]}"


@_rule("P9", "opened")
def a_retry_follows_a_failure(books: Books, story: Story) -> Iterator[Broken]:
    """Of the same step, one try after the other.

    The same try goes on with a higher number if another trainer took the one before.
    """
    last = story.before
    if last is None or story.attempt == 1 or not last.result:
        return
    goes_on = last.taken and last.attempt == story.attempt and (story.version or 0) > (last.version or 0)
    if last.step != story.step or (last.attempt + 1 != story.attempt and not goes_on):
        what = (
            f"attempt {story.attempt} of step {story.step} follows attempt {last.attempt} of step {last.step}"
        )
        yield story.opened, story.round, what
    elif last.outcome != _FAILED:
        yield story.opened, story.round, f"attempt {story.attempt} follows one that was {last.outcome}"


@_rule("P9", "planned")
def a_retry_sends_everything_again(books: Books, story: Story) -> Iterator[Broken]:
    """The plan of the attempt before, if that had come to one."""
    last = story.before
    if last is None or story.attempt == 1 or last.step != story.step or not last.plan or not story.plan:
        return
    names = ("fingerprint", "tensors", "bytes", "buckets")
    wrong = [f"{name} {story.plan.get(name)!r}, before {last.plan.get(name)!r}" for name in names
             if story.plan.get(name) != last.plan.get(name)]  # fmt: skip
    if wrong:
        yield story.place, story.round, f"attempt {story.attempt} sends another plan: {'; '.join(wrong)}"


def moments_of(story: Story, key: str, *, error: bool, was_over: bool) -> Iterator[str]:
    """Which moments of a round a record of this kind was."""
    if key == "LockGranted":
        yield "granted"
    elif key == "Prepared":
        yield "planned"
    elif (
        key in ("call bind", "EngineCommitted", "Published")
        and not error
        and story.decided
        and not story.bound
    ):
        story.bound = True
        yield "bound"
    if key == "Published":
        yield "published"
    elif key == "result":
        yield "result"
    if story.state == State.Released.name and not was_over:
        yield "over"

"""The acceptance tests have teeth: each fault of the past is brought back, and their own check notices.

A mutant changes the product, never a check. It dies by an AssertionError of the check that it is listed with;
anything else, an error of the mutant itself for instance, kills nothing.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tqdm import tqdm

from casekit import miles
from casekit.wrapped import Bar
from weightsync import turns as turns_module
from weightsync.fsm import driver as driver_module
from weightsync.fsm import events as e
from weightsync.fsm.answers import Answers
from weightsync.fsm.calls import Act, Call
from weightsync.fsm.driver import Driver
from weightsync.fsm.facts import Facts
from weightsync.fsm.lock import Granted
from weightsync.fsm.states import Disposition, State
from weightsync.fsm.tally import Tally
from weightsync.handlers.crew import Crew
from weightsync.handlers.progress import Progress
from weightsync.handlers.retention import Retention
from weightsync.joining import weights_for

pytestmark = [pytest.mark.mutation, pytest.mark.timeout(60)]

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]


# -- the lock -----------------------------------------------------------------------------------------------


RIGHT: dict[Act, Callable[[Crew, Call], Any]] = {
    Act.acquire: Crew._acquire,
    Act.plan: Crew._make_plan,
    Act.release: Crew._release,
}


def job(patch: Patch, act: Act, changed: Callable[[Crew, Call, Callable[[Crew, Call], Any]], Any]) -> None:
    """Have a call carried out by ``changed``, which is handed the right way to do it, too."""
    carry_out = Crew.carry_out

    def instead(self: Crew, call: Call) -> None:
        if call.act is act:
            self._watch(call, self.workers.submit(changed, self, call, RIGHT[act]))
        else:
            carry_out(self, call)

    patch.setattr(Crew, "carry_out", instead)


def released_on_success_only(patch: Patch) -> None:
    """The release stands on the good path alone: radixark/miles before #1967."""

    def only_if_good(self: Crew, call: Call, release: Any) -> None:
        if self.driver.round.state is not State.Failed:
            release(self, call)

    job(patch, Act.release, only_if_good)


def released_twice(patch: Patch) -> None:
    """Once more, to be sure."""
    job(patch, Act.release, lambda self, call, release: (release(self, call), release(self, call)))


def released_before_settling(patch: Patch) -> None:
    """The lock goes while engines are still in the middle of something."""
    abort = Driver._abort

    def at_once(self: Driver, engines: Any) -> None:
        abort(self, engines)
        self.call(Act.release)

    patch.setattr(Driver, "_abort", at_once)


def polled(patch: Patch) -> None:
    """Ask for the lock every 20 ms."""

    def acquire(self: Crew, call: Call, right: Any) -> tuple[int, float]:
        lock, ticket = self.parts.lock, self._ticket
        asked = self.clock.now()
        answer = lock.enter(ticket, 0.0)
        while not isinstance(answer, Granted):
            self.waits(answer)
            asked = self.clock.now()
            answer = lock.wait(ticket, 0.02)
        return answer.epoch, answer.end(asked)

    job(patch, Act.acquire, acquire)


def holder_not_told(patch: Patch) -> None:
    """Waits for it without a word."""
    patch.setattr(Driver, "waits", lambda self, answer, now: [])


def not_cancelled(patch: Patch) -> None:
    """Who gives up waiting just goes away."""

    def forget(self: Crew, call: Call, release: Any) -> None:
        if self.driver.round.facts.epoch:
            release(self, call)

    job(patch, Act.release, forget)


def released_without_evidence(patch: Patch) -> None:
    """A release that failed counts as one that worked."""
    bad = Answers._lock_bad

    def optimistic(self: Answers, act: Act, error: BaseException) -> None:
        if act is Act.release:
            self._driver.fire(e.Unlocked())
        else:
            bad(self, act, error)

    patch.setattr(Answers, "_lock_bad", optimistic)


def release_not_retried(patch: Patch) -> None:
    """A release that failed counts as one that worked, after a note."""
    bad = Answers._lock_bad

    def once(self: Answers, act: Act, error: BaseException) -> None:
        bad(self, act, error)
        if act is Act.release:
            self._driver.fire(e.Unlocked())

    patch.setattr(Answers, "_lock_bad", once)


# -- the trainer's things -----------------------------------------------------------------------------------


def false_bar_left_out(patch: Patch) -> None:
    """Asks ``if bar`` in place of ``is not None``."""
    call = Progress.__call__

    def asked_for_truth(self: Progress, record: Any) -> None:
        if self._bar:
            call(self, record)

    patch.setattr(Progress, "__call__", asked_for_truth)


def bar_moves_for_every_round(patch: Patch) -> None:
    """Counts rounds, not successes."""

    def every(self: Progress, record: Any) -> None:
        if record.event == "result" and self._bar is not None:
            self._bar.update(1)

    patch.setattr(Progress, "__call__", every)


def cleared_on_failure(patch: Patch) -> None:
    """Lets go of the tensors however the round ends."""

    def prepare(self: Retention, round: Any) -> Callable[[], None]:
        return lambda: self.clean(round)

    patch.setattr(Retention, "prepare", prepare)


def another_list(patch: Patch) -> None:
    """Empties a list of its own."""
    patch.setattr(Retention, "clean", lambda self, round: list(round.weights.source).clear())


def copies_sent(patch: Patch) -> None:
    """Sends copies in place of the tensors."""
    patch.setattr(
        turns_module, "weights_for", lambda model, policy, snapshot: weights_for(model, policy, snapshot=True)
    )


# -- errors and versions ------------------------------------------------------------------------------------


def first_error_swallowed(patch: Patch) -> None:
    """Says that it failed, and not why."""
    patch.setattr(Tally, "_first", lambda self, facts: (None, None))


def last_error_wins(patch: Patch) -> None:
    """An error of the release replaces the first one, as an exception in a ``finally`` does."""
    later, first = Tally.later, Tally._first
    last: list[BaseException] = []

    def replaced(self: Tally, cause: Any, error: BaseException, where: str) -> None:
        last.append(error)
        later(self, cause, error, where)

    def newest(self: Tally, facts: Any) -> Any:
        return (None, last[-1]) if last else first(self, facts)

    patch.setattr(Tally, "later", replaced)
    patch.setattr(Tally, "_first", newest)


def notes_dropped(patch: Patch) -> None:
    """The first error, and nothing of what came after it."""
    patch.setattr(Tally, "later", lambda self, cause, error, where: None)


def version_first(patch: Patch) -> None:
    """The number moves before anything can fail."""

    def eager(self: Crew, call: Call, make: Any) -> Any:
        expected = make(self, call)
        self._bind(call)
        self._publish(call)
        return expected

    job(patch, Act.plan, eager)


def results_not_looked_at(patch: Patch) -> None:
    """A receipt is a receipt, whatever it proves."""
    patch.setattr(driver_module, "examined", lambda event, facts: event)


def commit_not_looked_at(patch: Patch) -> None:
    """Whatever an engine answers to its commit, it has committed."""
    bad = Answers._engine_bad

    def fine(self: Answers, act: Act, engine: Any, error: BaseException) -> None:
        if act is Act.commit and self._driver.round.state is State.Cleaning:
            self._driver.fire(e.EngineCommitted(engine))
        else:
            bad(self, act, engine, error)

    patch.setattr(Answers, "_engine_bad", fine)


def lost_engines_routed(patch: Patch) -> None:
    """Whoever is not known to be broken serves."""
    disposition = Facts.disposition

    def hopeful(self: Facts, engine: Any) -> Disposition:
        what = disposition(self, engine)
        return Disposition.serving_old if what is Disposition.quarantined else what

    patch.setattr(Facts, "disposition", hopeful)


# -- who must notice what -----------------------------------------------------------------------------------


def a1() -> None:
    """A good round, with a bar that tells what it was told."""
    bar = Bar()
    miles.good_round("memory", bar)
    assert bar.moves == [1]


def a1_tqdm() -> None:
    """A good round, with a bar that counts as false."""
    with tqdm(total=0, file=io.StringIO()) as bar:
        miles.good_round("memory", bar)
        assert bar.n == 1


a3 = partial(miles.transport_failure, "memory", "broadcast")
a4, a4_commit = (partial(miles.engine_failure, "memory", point) for point in ("apply", "commit"))
a5 = partial(miles.retry, "memory", "apply")

NOTICED: list[tuple[Mutant, Callable[[], None]]] = [
    (false_bar_left_out, a1_tqdm),
    (another_list, a1),
    (copies_sent, a1),
    (released_twice, a1),
    (polled, miles.contention),
    (holder_not_told, miles.contention),
    (holder_not_told, miles.contention_without_end),
    (not_cancelled, miles.contention_without_end),
    (not_cancelled, miles.crossing_grant),
    (released_on_success_only, a3),
    (cleared_on_failure, a3),
    (bar_moves_for_every_round, a3),
    (first_error_swallowed, a3),
    (version_first, a3),
    (released_on_success_only, a4),
    (released_before_settling, a4),
    (commit_not_looked_at, a4_commit),
    (results_not_looked_at, miles.wrong_bytes),
    (lost_engines_routed, miles.hanging_sibling),
    (released_on_success_only, a5),
    (cleared_on_failure, a5),
    (released_twice, a5),
    (released_without_evidence, miles.dead_keeper),
    (last_error_wins, miles.dead_keeper),
    (notes_dropped, miles.dead_keeper),
    (released_without_evidence, miles.refusing_keeper),
    (release_not_retried, miles.refusing_keeper),
    (last_error_wins, miles.refusing_keeper),
    (notes_dropped, miles.lost_answer),
    (last_error_wins, miles.lost_answer),
    (released_without_evidence, miles.release_fails_after_success),
]
"""Each fault, and the check that must notice it."""


def _name(value: Any) -> str:
    parts = [value.func.__name__, *value.args] if isinstance(value, partial) else [value.__name__]
    return "-".join(map(str, parts))


@pytest.mark.parametrize(("mutant", "check"), NOTICED, ids=_name)
def test_the_mutant_dies(mutant: Mutant, check: Callable[[], None], monkeypatch: Patch) -> None:
    """Its own check fails, by an assertion; without the mutant, ``test_miles.py`` runs the same check."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        check()
    print(f"{mutant.__name__}: {(str(caught.value) or repr(caught.value)).splitlines()[0]}")  # noqa: T201 - how it was noticed

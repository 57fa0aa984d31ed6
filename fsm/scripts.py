"""The scripts: how an order of several steps is spelled out, and the undo list.

The second third of :mod:`.driver`. A script is a queue of steps; the next one starts when nothing is open
that it has to wait for. A round has one script at a time, and a move to another state ends it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from . import events as e
from .calls import ENGINE_ACTS, LOCK_ACTS, Act
from .contract import Clock
from .errors import EngineError, EngineSilent, PlanError, RoundTimedOut
from .open_calls import OpenCalls, line
from .policy import Limits
from .receipt import Expectation, Participant
from .round import Round
from .states import Publication, State

__all__ = ["Scripts"]


class _Step(NamedTuple):
    """A step of a script, and the kinds of calls that may be open when it starts."""

    run: Callable[[], None]
    beside: frozenset[Act]


# A receipt may be late in coming back to `collect` although the round has heard of it.
_CLEANING = frozenset({Act.collect})
# Whom Abort asks is settled by its answer, also if an earlier call of it is still on its way.
_FAILED = frozenset({Act.commit, Act.abort})
_ALWAYS = LOCK_ACTS | {Act.fence}


class Scripts(OpenCalls):
    """What a round does in each state, step by step."""

    def __init__(self, round: Round, limits: Limits, executors: Collection[str], clock: Clock) -> None:
        super().__init__(round, limits, executors, clock)
        self._script: deque[_Step] = deque()
        self._undo: list[int] = []
        self._resumed: set[Participant] = set()
        self._unfit: dict[Participant, PlanError] = {}
        self._expected: Expectation | None = None
        self._trouble: BaseException | None = None
        self._held: BaseException | None = None

    def _then(self, run: Callable[[], None], beside: frozenset[Act] = frozenset()) -> None:
        self._script.append(_Step(run, beside))

    def _commit(self) -> None:
        self._then(lambda: self.call(Act.bind), _CLEANING)
        self._then(lambda: self._each(Act.commit, self.round.facts.missing), _CLEANING)

    def _prepare(self) -> None:
        self._then(lambda: self.call(Act.plan, limit=self.limits.forward))
        for index in range(len(self.executors)):
            self._then(self._step(Act.prepare, index))
        self._then(self._open_all)
        self._then(self._prepared)

    def _open_all(self) -> None:
        """Engines and transport at once: a receiving half that is started early waits for its session."""
        self._each(Act.open, self.round.facts.remaining, limit=self.limits.drain)
        self.call(Act.transport_open)

    def _without_unfit(self) -> None:
        """Go on without those whom the plan does not fit, if it fits enough of the others.

        As soon as every other engine has answered: a transport that is being opened may wait for one of them.
        """
        asked = {item.call.engine for item in self._open.values() if item.call.act is Act.open}
        if self.round.state is not State.Locked or not self._unfit or asked - self._unfit.keys():
            return
        if not self._plan_refused():
            unfit, self._unfit = sorted(self._unfit.items()), {}
            for engine, error in unfit:
                self.fire(e.EngineLost(engine, error))

    def _plan_refused(self) -> bool:
        """Whether the plan fits too few: then it is at fault and no engine is, and each stays what it was."""
        facts = self.round.facts
        if len(facts.remaining - self._unfit.keys()) >= facts.quorum:
            return False
        self.fire(e.PrepareFailed(next(iter(self._unfit.values()))))
        return True

    def _prepared(self) -> None:
        if self._expected is not None:
            self.fire(e.Prepared(self._expected))

    def _put_back(self) -> None:
        for index in range(len(self.executors)):
            self._then(self._step(Act.clean, index), _CLEANING)
        self._then(self._resume_committed, _CLEANING)
        self._then(lambda: self.call(Act.transport_clean, limit=self.limits.engine), _CLEANING)
        self._then(lambda: self.fire(e.Cleaned()))

    def _step(self, act: Act, index: int) -> Callable[[], None]:
        return lambda: self.call(act, index=index, limit=self.limits.idle)

    def _resume_committed(self) -> None:
        facts = self.round.facts
        self._each(Act.resume, (facts.committed & facts.remaining) - self._resumed)

    def _abort(self, engines: Collection[Participant]) -> None:
        """Stop, ask every open engine, wait for what is in flight; then put back what can be."""
        facts = self.round.facts
        self.fence(facts.evicted | facts.quarantined)
        self._drop(lambda call: call.act in ENGINE_ACTS - {Act.commit, Act.fence})
        for item in self._open.values():
            if item.call.act not in LOCK_ACTS:
                item.due = self._now + self.limits.failed / 2
        self.call(Act.transport_abort, limit=self.limits.failed / 2)
        self._each(Act.abort, engines, limit=min(self.limits.engine, self.limits.failed / 2))
        if facts.publication is Publication.unknown:
            self.call(Act.ask, limit=self.limits.failed / 2)
        self._then(self._undo_next, _FAILED)

    def _undo_next(self) -> None:
        """The undo list, newest first, one at a time; then the engines, then the verdict."""
        if self._undo:
            self.call(Act.undo, index=self._undo.pop(), limit=self.limits.failed / 4)
            self._then(self._undo_next, _FAILED)
            return
        self._then(self._lose_the_held, _FAILED)
        self._then(self._resume_committed, _FAILED)
        self._then(self._settled, _FAILED)

    def _lose_the_held(self) -> None:
        """An engine that has committed may not map what the trainer may not have let go of: it is lost."""
        if self._held is None:
            return
        facts = self.round.facts
        for engine in sorted((facts.committed & facts.remaining) - self._resumed):
            why = f"engine {engine.id} is not resumed, the trainer may still hold its memory: {self._held}"
            self.fire(e.EngineLost(engine, EngineError(why)))

    def _lose_the_paused(self) -> None:
        """Failed is given up: an engine that has committed, and did not say that it resumed, is lost."""
        facts = self.round.facts
        if self.round.state is not State.Failed or facts.settled:
            return
        for engine in sorted((facts.committed & facts.remaining) - self._resumed):
            late = EngineSilent(f"engine {engine.id} did not resume before Failed was given up")
            self.fire(e.EngineLost(engine, late))

    def _settled(self) -> None:
        facts = self.round.facts
        unproven = bool(facts.open) or facts.publication is Publication.unknown
        if self._trouble is None and not unproven:
            self.fire(e.Cleaned())
        else:
            self.fire(e.CleanupFailed(self._trouble or RoundTimedOut("nobody knows what is published")))

    def _fence_all(self, engines: Collection[Participant]) -> None:
        """Give up. What is owed to the trainer's executors is still begun, though nobody waits for it."""
        self.fence(engines)
        self._script.clear()
        self._drop(lambda call: call.act not in _ALWAYS)
        while self._undo:
            self.call(Act.undo, index=self._undo.pop(), limit=self.limits.failed / 4)

    def _run_script(self) -> None:
        """Start the next step of the script, as long as nothing it has to wait for is open."""
        self._without_unfit()
        while self._script and not self._busy(self._script[0].beside):
            self._script.popleft().run()

    def _busy(self, beside: frozenset[Act]) -> bool:
        """Whether a call is open that the next step waits for: one of those named does not count."""
        asking = self.round.state is State.Failed and self.round.facts.open
        if asking and any(item.call.act is Act.abort for item in self._open.values()):
            return True
        return any(item.call.act not in _ALWAYS | beside for item in self._open.values())

    # -- what answers tell ----------------------------------------------------------------------------------

    def expect(self, plan: Expectation) -> None:
        """The plan is made."""
        self._expected = plan

    def owe_undo(self, index: int) -> None:
        """Executor ``index`` is prepared and owes an undo."""
        self._undo.append(index)

    def no_undo(self, index: int) -> None:
        """Executor ``index`` had its good end."""
        if index in self._undo:
            self._undo.remove(index)

    def unfit(self, engine: Participant, error: PlanError) -> None:
        """The plan does not fit ``engine``, which says so without having been touched; once is enough."""
        if engine in self.round.facts.remaining and engine not in self._unfit:
            self._moved = self._now
            self._unfit[engine] = error
            self.tally.refused_plan(engine, error)
            self._plan_refused()

    def back(self, engine: Participant) -> None:
        """``engine`` serves again."""
        self._resumed.add(engine)
        self.tally.resumed(engine, self._now)

    def troubled(self, error: BaseException, where: str, *, held: bool = False) -> None:
        """Putting back met an error: the round ends unclean, and the first error stays the first."""
        if held and self._held is None:
            self._held = error
        if self._trouble is None:
            self._trouble = error
        cause = self.round.facts.cause
        self.tally.later(cause.error if cause else None, error, where)
        self._note("undo" if where.startswith("undo") else "cleanup", undo=where, error=line(error))

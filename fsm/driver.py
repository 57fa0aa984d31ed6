"""The driver: carries out a round's orders, joins the answers, keeps the limits. No threads, no I/O.

    driver.start(now)            -> calls to carry out
    driver.answered(number, ...) -> more calls      (somebody carried one out)
    driver.heard(event, ...)     -> more calls      (a transport or a watchdog tells a fact)
    driver.tick(now)             -> more calls      (the time ``driver.due`` has come)

until ``driver.over``. It is a plain object that is moved by one thread at a time; who moves it, with which
clock, and how calls become threads, futures or simulated messages is somebody else's business. That is what
lets the same driver run a cluster, a test on a hand-turned clock, and an exhaustive search.

The round's table decides; the driver only knows how an order is spelled out as calls, and which fact an
answer is. Orders of several steps (Prepare, Commit, PutBack, Abort) are *scripts*: a queue of steps, each
started when nothing the step before has asked for is open any more.

Three rules hold everywhere. The first error wins; later ones become its notes. A call that is given up on
is fenced if it is an engine's, and waited for in Failed if it is anybody else's. Nothing is released before
everything in flight is settled or fenced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from . import events as e
from .answers import Answers, examined
from .calls import ENGINE_ACTS, LOCK_ACTS, Act, Call
from .contract import Clock
from .errors import EngineSilent, IllegalEvent, LeaseEnded, LockError, RoundTimedOut, WeightSyncError
from .orders import Order, Verb
from .policy import Limits
from .receipt import Expectation, Participant
from .results import RoundResult
from .round import Round
from .states import Lock, Publication, State
from .tally import Tally
from .tickets import Holder, Waiting

__all__ = ["Driver"]

_NEVER = float("inf")


@dataclass(slots=True)
class _Open:
    """A call that is not answered, and until when it may take."""

    call: Call
    asked: float
    due: float


class _Step(NamedTuple):
    """A step of a script, and the kinds of calls that may be open when it starts."""

    run: Callable[[], None]
    beside: frozenset[Act]


# A receipt may be late in coming back to `collect` although the round has heard of it.
_CLEANING = frozenset({Act.collect})
# Whom Abort asks is settled by its answer, also if an earlier call of it is still on its way.
_FAILED = frozenset({Act.commit, Act.abort})
_ALWAYS = LOCK_ACTS | {Act.fence}
# Somebody's code in our process, with a limit of its own.
_OURS = frozenset({Act.plan, Act.prepare, Act.clean, Act.transport_clean})


class Driver:
    """Drives one round to Released.

    Args:
        round: a round in Idle.
        limits: in seconds.
        executors: names of the trainer's executors, in the order in which they prepare.
        clock: for the time of records; the driver's own time is what it is told.
    """

    def __init__(self, round: Round, limits: Limits, executors: Sequence[str], clock: Clock) -> None:
        self.round = round
        self.limits = limits
        self.executors = tuple(executors)
        self.tally = Tally()
        self.stale = 0
        self.refused = 0
        self._clock = clock
        self._answers = Answers(self)
        self._open: dict[int, _Open] = {}
        self._script: deque[_Step] = deque()
        self._out: list[Call] = []
        self._numbers = 0
        self._now = self._started = self._moved = self._entered = 0.0
        self._undo: list[int] = []
        self._resumed: set[Participant] = set()
        self._fenced: set[Participant] = set()
        self._expected: Expectation | None = None
        self._lease_end = self._renew_at = self._release_at = _NEVER
        self._trouble: BaseException | None = None
        self._holder: Holder | None = None

    # -- what the outside calls ---------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the round is Released."""
        return self.round.state is State.Released

    @property
    def due(self) -> float:
        """When ``tick`` is next needed; infinity once the round is over."""
        if self.over:
            return _NEVER
        calls = min((item.due for item in self._open.values()), default=_NEVER)
        return min(calls, self._phase_end(), self._lease_end, self._renew_at, self._release_at)

    @property
    def phase_end(self) -> float:
        """Until when the present state may last."""
        return self._phase_end()

    @property
    def lease_end(self) -> float:
        """Until when the lock is certainly held; infinity when nothing is known of that."""
        return self._lease_end

    def start(self, now: float) -> list[Call]:
        """Give the round's first order."""
        self._now = self._started = self._moved = self._entered = now
        for order in self.round.orders:
            self._carry_out(order)
        return self._flush()

    def answered(
        self, number: int, now: float, value: object = None, error: BaseException | None = None
    ) -> list[Call]:
        """Call ``number`` is done, with ``value`` or with ``error``."""
        self._now = now
        item = self._open.pop(number, None)
        if item is None:
            self._count_stale(f"answer to call {number}", error)
            return self._flush()
        self._note_call(item, error)
        if item.call.act not in LOCK_ACTS:
            self._moved = now
        if error is None:
            self._answers.good(item.call, value)
        else:
            self._answers.bad(item.call, error)
        return self._flush()

    def heard(self, event: e.Event, now: float, *, phase: State | None = None) -> list[Call]:
        """A port of ``phase`` or, with None, a watchdog tells a fact. A port of another phase is stale."""
        self._now = now
        if phase is not None and phase is not self.round.state:
            self._count_stale(type(event).__name__, getattr(event, "error", None))
        else:
            self.fire(event)
        return self._flush()

    def waits(self, answer: Waiting, now: float) -> list[Call]:
        """The lock is somebody else's so far. Logged when that changes, and told if the time runs out."""
        self._now, holder = now, answer.holder
        before = self._holder
        if self.round.state is State.Idle and holder is not None:
            self._holder = holder
            if before is None or (holder.owner, holder.epoch) != (before.owner, before.epoch):
                told = {"holder": holder.owner, "of": holder.round, "epoch": holder.epoch, "place": answer.place}
                self._note("waiting", trigger=Act.acquire.name, facts=told)
        return self._flush()

    def progress(self, now: float) -> None:
        """Something moved: the idle time-out starts again."""
        self._now = self._moved = now

    def tick(self, now: float) -> list[Call]:
        """Do what is due."""
        self._now = now
        if not self.over:
            self._expire_calls()
            self._keep_lease()
        if not self.over and now >= self._phase_end():
            self.fire(e.TimedOut(self.round.state, self._too_late()))
        if not self.over and now >= self._release_at:
            self._release_at = _NEVER
            self.call(Act.release, limit=self.limits.release)
        return self._flush()

    def result(self) -> RoundResult:
        """The sum of the round, once it is over."""
        return self.tally.result(self.round, self._now)

    # -- facts and orders -----------------------------------------------------------------------------------

    def fire(self, event: e.Event) -> None:
        """Tell the round a fact and carry out what it orders. An illegal one is counted and logged."""
        before = self.round.state
        if isinstance(event, e.EngineAcked):
            event = examined(event, self.round.facts)
        error = getattr(event, "error", None)
        try:
            taken = self.round.fire(event, at=self._now, wall=self._clock.wall())
        except IllegalEvent as refusal:
            self.refused += 1
            self._note("refused", trigger=type(event).__name__, error=str(refusal))
            return
        self._moved = self._now
        self._learn(event, error, before)
        if taken.after.state is not before:
            self._entered = self._now
            self._script.clear()
        for order in taken.orders:
            self._carry_out(order)

    def _learn(self, event: e.Event, error: BaseException | None, before: State) -> None:
        if isinstance(event, e.EngineAcked) and error is None:
            self.tally.proved(event.engine, event.receipts)
        if isinstance(event, e.EngineLost | e.CommitFailed | e.EngineAcked):
            self.tally.blamed(event.engine, error, before)
        if isinstance(event, e.LockGranted):
            self._renew_at = self._now + self.limits.lease / 3
        cause = self.round.facts.cause
        if error is not None and cause is not None and cause.error is not error:
            self.tally.later(cause.error, error, f"{type(event).__name__} in {self.round.state.name}")

    def _carry_out(self, order: Order) -> None:
        engines = order.engines
        match order.verb:
            case Verb.AcquireLock:
                self.call(Act.acquire)
            case Verb.Prepare:
                self._prepare()
            case Verb.Broadcast:
                self.call(Act.broadcast)
            case Verb.Collect:
                self.call(Act.collect)
            case Verb.Commit:
                self._then(lambda: self.call(Act.bind), _CLEANING)
                self._then(lambda: self._each(Act.commit, self.round.facts.missing), _CLEANING)
            case Verb.Publish:
                self.call(Act.publish)
            case Verb.PutBack:
                self._put_back()
            case Verb.Abort:
                self._abort(engines)
            case Verb.Fence:
                self.fence(engines)
            case Verb.FenceAll:
                self._fence_all(engines)
            case Verb.ReleaseLock:
                self._release()
            case Verb.RetryRelease:
                self._retry_release()
            case Verb.Deliver:
                self._deliver()

    # -- scripts --------------------------------------------------------------------------------------------

    def _then(self, run: Callable[[], None], beside: frozenset[Act] = frozenset()) -> None:
        self._script.append(_Step(run, beside))

    def _prepare(self) -> None:
        self._then(lambda: self.call(Act.plan, limit=self.limits.forward))
        for index in range(len(self.executors)):
            self._then(self._step(Act.prepare, index))
        self._then(self._open_all)
        self._then(self._prepared)

    def _open_all(self) -> None:
        """Engines and transport at once: a receiving half that is started early waits for its session."""
        self._each(Act.open, self.round.facts.remaining)
        self.call(Act.transport_open)

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

    def _abort(self, engines: Sequence[Participant]) -> None:
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
        self._then(self._resume_committed, _FAILED)
        self._then(self._settled, _FAILED)

    def _settled(self) -> None:
        facts = self.round.facts
        unproven = bool(facts.open) or facts.publication is Publication.unknown
        if self._trouble is None and not unproven:
            self.fire(e.Cleaned())
        else:
            self.fire(e.CleanupFailed(self._trouble or RoundTimedOut("nobody knows what is published")))

    def _run_script(self) -> None:
        """Start the next step of the script, as long as nothing it has to wait for is open."""
        while self._script and not self._busy(self._script[0].beside):
            self._script.popleft().run()

    def _busy(self, beside: frozenset[Act]) -> bool:
        """Whether a call is open that the next step waits for: one of those named does not count."""
        asking = self.round.state is State.Failed and self.round.facts.open
        if asking and any(item.call.act is Act.abort for item in self._open.values()):
            return True
        return any(item.call.act not in _ALWAYS | beside for item in self._open.values())

    # -- calls ----------------------------------------------------------------------------------------------

    def call(
        self,
        act: Act,
        *,
        engine: Participant | None = None,
        index: int | None = None,
        limit: float | None = None,
    ) -> None:
        """Ask for something. Without ``limit`` only the state's own deadline bounds it."""
        self._numbers += 1
        due = _NEVER if limit is None else self._now + limit
        call = Call(
            self._numbers, act, engine, index, self._phase_end() - self._now if limit is None else limit
        )
        self._open[call.number] = _Open(call, self._now, due)
        self._out.append(call)
        if act is Act.open and engine is not None:
            self.tally.paused(engine, self._now)

    def _each(self, act: Act, engines: frozenset[Participant] | Sequence[Participant] | set[Participant],
              limit: float | None = None) -> None:  # fmt: skip
        for engine in sorted(engines):
            self.call(act, engine=engine, limit=self.limits.engine if limit is None else limit)

    def fence(self, engines: frozenset[Participant] | Sequence[Participant]) -> None:
        """Stop waiting for engines: their calls are dropped, their sessions closed. Once for each."""
        for engine in sorted(set(engines) - self._fenced):
            self._fenced.add(engine)
            self._drop(lambda call, engine=engine: call.engine == engine)  # type: ignore[misc]
            self.call(Act.fence, engine=engine, limit=self.limits.engine)

    def _fence_all(self, engines: Sequence[Participant]) -> None:
        self.fence(engines)
        self._script.clear()
        self._drop(lambda call: call.act not in LOCK_ACTS | {Act.fence})

    def _drop(self, which: Callable[[Call], bool]) -> None:
        for number in [number for number, item in self._open.items() if which(item.call)]:
            del self._open[number]

    def _expire_calls(self) -> None:
        for number in sorted(number for number, item in self._open.items() if item.due <= self._now):
            item = self._open.pop(number, None)
            if item is None:
                continue
            call = item.call
            self._note_call(item, EngineSilent("no answer in time"))
            if call.act in _OURS and self.round.state is not State.Failed:
                # The round fails, but the end of what runs in our process is waited for there.
                self._open[number] = _Open(call, item.asked, _NEVER)
            self._answers.bad(call, self._silent(call))
            self._run_script()

    def _silent(self, call: Call) -> WeightSyncError:
        if call.engine is not None:
            return EngineSilent(
                f"engine {call.engine.id} did not answer {call.act.name} within {call.limit:.3g} s; "
                "it is fenced and counts as lost"
            )
        if call.act in LOCK_ACTS:
            return LockError(f"the lock service did not answer {call.act.name} within {call.limit:.3g} s")
        what = self.executors[call.index] if call.index is not None else call.act.name
        return RoundTimedOut(f"{what} took longer than its limit of {call.limit:.3g} s")

    # -- the lock -------------------------------------------------------------------------------------------

    def leased(self, until: float) -> None:
        """The lease now ends at ``until``, by the holder's clock."""
        self._lease_end = until
        if self.round.facts.settled:
            self._renew_at = _NEVER
        else:
            self._renew_at = self._now + self.limits.lease / 3

    def _keep_lease(self) -> None:
        if self._now >= self._lease_end:
            self._lease_end = self._renew_at = _NEVER
            self.fire(e.LeaseLost(LeaseEnded("the lease on the lock ended before it was renewed")))
        elif self._now >= self._renew_at:
            self._renew_at = self._now + self.limits.lease / 3
            if self.round.facts.lock is Lock.held and not self.round.facts.settled:
                self.call(Act.renew, limit=self.limits.release)

    def _release(self) -> None:
        self._renew_at = _NEVER
        if self.round.facts.lock is Lock.asked:
            # The last question may stand for a third of a lease, a ticket nobody asks about lives for one
            # lease, and if it was granted meanwhile, the grant for one more: after that the lock is proven
            # not held, whatever the service answers.
            self._lease_end = self._now + 7 / 3 * self.limits.lease
        self.call(Act.release, limit=self.limits.release)

    def _retry_release(self) -> None:
        """Try again, a little later each time; from the third try on it is an operator's business."""
        tries = self.round.facts.tries
        self._drop(lambda call: call.act is Act.release)
        self._release_at = self._now + min(1.0, 0.05 * 2**tries)
        self._note("escalation" if tries >= 3 else "retry", trigger="RetryRelease", facts={"tries": tries})

    # -- clocks ---------------------------------------------------------------------------------------------

    def _phase_end(self) -> float:
        state = self.round.state
        if state is State.Released:
            return _NEVER
        if state is State.Failed:
            length = self.limits.release * 2 if self.round.facts.settled else self.limits.failed
            return (self._moved if self.round.facts.settled else self._entered) + length
        total = self._started + self.limits.forward
        return total if state is State.Idle else min(total, self._moved + self.limits.idle)

    def _too_late(self) -> RoundTimedOut:
        state, facts = self.round.state, self.round.facts
        waiting = sorted({str(item.call) for item in self._open.values() if item.call.act is not Act.renew})
        owed = sorted(member.id for member in facts.remaining - facts.acks) if state is State.Awaiting else []
        whom = f"; no receipt from {', '.join(owed)}" if owed else ""
        if state is State.Idle and self._holder is not None:
            whom = f"; the lock is held by {self._holder}"
        idle = self._now - self._moved
        return RoundTimedOut(
            f"{state.name} of round {facts.round} ran out of time: {self._now - self._entered:.3g} s in it, "
            f"{idle:.3g} s without progress, waiting for {', '.join(waiting) or 'nothing'}{whom}"
        )

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

    def back(self, engine: Participant) -> None:
        """``engine`` serves again."""
        self._resumed.add(engine)
        self.tally.resumed(engine, self._now)

    def troubled(self, error: BaseException, where: str) -> None:
        """Putting back met an error: the round ends unclean, and the first error stays the first."""
        if self._trouble is None:
            self._trouble = error
        cause = self.round.facts.cause
        self.tally.later(cause.error if cause else None, error, where)
        self._note("undo" if where.startswith("undo") else "cleanup", undo=where, error=_line(error))

    # -- records --------------------------------------------------------------------------------------------

    def _note(self, event: str, **values: object) -> None:
        self.round.note(event, wall=self._clock.wall(), **values)

    def _note_call(self, item: _Open, error: BaseException | None) -> None:
        call = item.call
        if call.act in LOCK_ACTS and error is None:
            return
        self._note(
            "call", trigger=call.act.name, engine=call.engine.id if call.engine else None,
            undo=self.executors[call.index] if call.index is not None else None,
            seconds=round(self._now - item.asked, 6), error=_line(error) if error else None,
        )  # fmt: skip

    def _count_stale(self, what: str, error: BaseException | None) -> None:
        self.stale += 1
        self._note("stale", trigger=what, error=_line(error) if error else None)

    def _deliver(self) -> None:
        self._open.clear()
        self._script.clear()
        result = self.result()
        self._note(
            "result",
            facts={
                "outcome": result.outcome.name,
                "published": result.published,
                "unclean": result.unclean,
                "engines": {row.engine: row.disposition.name for row in result.engines},
                "pause": {row.engine: round(row.pause_seconds, 6) for row in result.engines},
            },
            seconds=round(self._now - self._started, 6),
            bytes=sum(row.bytes for row in result.engines),
            culprit=result.culprit,
            bucket=result.bucket,
            error=_line(result.error) if result.error else None,
        )

    def _flush(self) -> list[Call]:
        self._run_script()
        calls, self._out = self._out, []
        return calls


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

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

from collections.abc import Callable, Collection

from . import events as e
from .answers import Answers, examined, foreign
from .calls import LOCK_ACTS, Act, Call
from .contract import Clock
from .errors import IllegalEvent, LeaseEnded, PlanError
from .open_calls import NEVER, line
from .orders import Order, Verb
from .policy import Limits
from .receipt import Participant
from .results import RoundResult
from .round import Round
from .scripts import Scripts
from .states import Lock, State
from .tickets import Waiting

__all__ = ["Driver"]


class Driver(Scripts):
    """Drives one round to Released.

    Args:
        round: a round in Idle.
        limits: in seconds.
        executors: names of the trainer's executors, in the order in which they prepare.
        clock: for the time of records; the driver's own time is what it is told.
    """

    def __init__(self, round: Round, limits: Limits, executors: Collection[str], clock: Clock) -> None:
        super().__init__(round, limits, executors, clock)
        self._answers = Answers(self)
        self._lease_end = self._renew_at = self._release_at = NEVER
        self._lapsed = False  # the lease is over by our clock, and the keeper was not told to take the lock
        self._unrenewed: BaseException | None = None

    # -- what the outside calls ---------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the round is Released."""
        return self.round.state is State.Released

    @property
    def due(self) -> float:
        """When ``tick`` is next needed; infinity once the round is over."""
        if self.over:
            return NEVER
        calls = min((item.due for item in self._open.values()), default=NEVER)
        clocks = self._phase_end(), self._silence_end(), self._lease_end, self._renew_at, self._release_at
        return min(calls, *clocks)

    @property
    def phase_end(self) -> float:
        """Until when the present state may last."""
        return self._phase_end()

    @property
    def round_end(self) -> float:
        """Until when the round may be on its good way."""
        return self._started + self.limits.forward

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
        self._note_call(item, error, value)
        if item.call.act not in LOCK_ACTS:
            self._moved = now
        if error is None:
            self._answers.good(item.call, value)
        else:
            self._answers.bad(item.call, error)
        return self._flush()

    def heard(self, event: e.Event, now: float, *, phase: State | None = None) -> list[Call]:
        """A port of ``phase`` or, with None, a watchdog tells a fact.

        A port of another phase is stale, and so is a receipt of another round.
        """
        self._now = now
        late = phase is not None and phase is not self.round.state
        if late or foreign(event, self.round.facts):
            self._count_stale(type(event).__name__, getattr(event, "error", None))
        elif phase is State.Locked and isinstance(event, e.EngineLost) and isinstance(event.error, PlanError):
            self.unfit(event.engine, event.error)  # who receives fails as its open does, and may say so first
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
                told = {
                    "holder": holder.owner,
                    "of": holder.round,
                    "epoch": holder.epoch,
                    "place": answer.place,
                }
                self._note("waiting", trigger=Act.acquire.name, facts=told)
        return self._flush()

    def progress(self, now: float) -> None:
        """Something moved: the idle time-out starts again."""
        self._now = self._moved = now
        self._awaited = frozenset()

    def waiting_for(self, engines: Collection[Participant], now: float) -> None:
        """The transport can do nothing until one of these engines does something."""
        self._now, self._awaited = now, frozenset(engines)

    def noted(self, event: str, now: float, **values: object) -> list[Call]:
        """An executor tells what it did. It moves nothing, and feeds no time-out."""
        self._now = now
        self._note(event, **values)
        return []

    def tick(self, now: float) -> list[Call]:
        """Do what is due."""
        self._now = now
        if not self.over:
            # First: whoever was frozen for longer than his lease cannot say who else was silent meanwhile.
            self._keep_lease()
        if not self.over:
            self._expire_calls()
        if not self.over and now >= self._silence_end():
            self._lose_the_silent()
        if not self.over and now >= self._phase_end():
            self._lose_the_paused()
            self.fire(e.TimedOut(self.round.state, self._too_late()))
        if not self.over and now >= self._release_at:
            self._release_at = NEVER
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
        self._moved, self._awaited = self._now, frozenset()
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
        """Begin what ``order`` asks for."""
        engines = order.engines
        begin: dict[Verb, Callable[[], None]] = {
            Verb.AcquireLock: lambda: self.call(Act.acquire),
            Verb.Prepare: self._prepare,
            Verb.Broadcast: lambda: self.call(Act.broadcast),
            Verb.Collect: lambda: self.call(Act.collect),
            Verb.Commit: self._commit,
            Verb.Publish: lambda: self.call(Act.publish),
            Verb.PutBack: self._put_back,
            Verb.Abort: lambda: self._abort(engines),
            Verb.Fence: lambda: self.fence(engines),
            Verb.FenceAll: lambda: self._fence_all(engines),
            Verb.ReleaseLock: self._release,
            Verb.RetryRelease: self._retry_release,
            Verb.Deliver: self._deliver,
        }
        begin[order.verb]()

    # -- the lock -------------------------------------------------------------------------------------------

    def leased(self, until: float) -> None:
        """The lease now ends at ``until``, by the holder's clock."""
        self._lease_end, self._unrenewed = until, None
        if self.round.facts.settled:
            self._renew_at = NEVER
        else:
            self._renew_at = self._now + self.limits.lease / 3

    def not_renewed(self, error: BaseException) -> None:
        """A renewal came to nothing. There may be time for another one; if not, this is why."""
        self._unrenewed = error

    def _keep_lease(self) -> None:
        if self._now >= self._lease_end:
            self._lease_end = self._renew_at = NEVER
            self._lapsed = not self.round.facts.settled
            why = "" if self._unrenewed is None else f": {self._unrenewed}"
            ended = LeaseEnded(f"the lease on the lock ended before it was renewed{why}")
            ended.__cause__ = self._unrenewed
            refused = self.refused
            self.fire(e.LeaseLost(ended))
            if self.refused > refused:  # nobody else may ever say that the lock is free
                self._lease_end = self._now + self.limits.lease / 3
        elif self._now >= self._renew_at:
            self._renew_at = self._now + self.limits.lease / 3
            if self.round.facts.lock is Lock.held and not self.round.facts.settled:
                self.call(Act.renew, limit=self.limits.release)

    def _release(self) -> None:
        self._renew_at, self._lapsed = NEVER, False
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

    # -- the end --------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        if self._lapsed:
            # The keeper counts from the grant, which may be much later than the question: it is told, so that
            # nobody else waits for the rest of a lease. Nobody waits for the answer.
            self.call(Act.release, limit=self.limits.release)
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
            error=line(result.error) if result.error else None,
        )

    def _flush(self) -> list[Call]:
        self._run_script()
        calls, self._out = self._out, []
        return calls

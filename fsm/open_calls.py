"""The calls of a round that are not answered: what was asked, until when, and what their silence means.

The first third of :mod:`.driver`. It keeps the time, because every limit is one: of a call, of a state, of a
participant that says nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass

from . import events as e
from .answers import Answers
from .calls import LOCK_ACTS, Act, Call
from .contract import Clock
from .errors import EngineSilent, LockError, RoundTimedOut, WeightSyncError
from .policy import Limits
from .receipt import Participant
from .round import Round
from .states import State
from .tally import Tally
from .tickets import Holder

__all__ = ["NEVER", "OpenCall", "OpenCalls", "line"]

NEVER = float("inf")

# Somebody's code in our process, with a limit of its own.
_OURS = frozenset({Act.plan, Act.prepare, Act.clean, Act.transport_clean})


@dataclass(slots=True)
class OpenCall:
    """A call that is not answered, and until when it may take."""

    call: Call
    asked: float
    due: float


class OpenCalls(ABC):
    """What the round waits for. Times are what the driver was told, in seconds."""

    def __init__(self, round: Round, limits: Limits, executors: Collection[str], clock: Clock) -> None:
        self.round = round
        self.limits = limits
        self.executors = tuple(executors)
        self.tally = Tally()
        self.stale = 0
        self.refused = 0
        self._clock = clock
        self._answers: Answers
        self._open: dict[int, OpenCall] = {}
        self._out: list[Call] = []
        self._numbers = 0
        self._now = self._started = self._moved = self._entered = 0.0
        self._fenced: set[Participant] = set()
        self._awaited: frozenset[Participant] = frozenset()
        self._holder: Holder | None = None

    @abstractmethod
    def fire(self, event: e.Event) -> None:
        """Tell the round a fact and carry out what it orders."""

    @abstractmethod
    def _run_script(self) -> None:
        """Go on, now that something is not open any more."""

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
        due = NEVER if limit is None else self._now + limit
        call = Call(
            self._numbers, act, engine, index, self._phase_end() - self._now if limit is None else limit
        )
        self._open[call.number] = OpenCall(call, self._now, due)
        self._out.append(call)
        if act is Act.open and engine is not None:
            self.tally.paused(engine, self._now)

    def _each(self, act: Act, engines: Collection[Participant], limit: float | None = None) -> None:
        for engine in sorted(engines):
            self.call(act, engine=engine, limit=self.limits.engine if limit is None else limit)

    def fence(self, engines: Collection[Participant]) -> None:
        """Stop waiting for engines: their calls are dropped, their sessions closed. Once for each."""
        for engine in sorted(set(engines) - self._fenced):
            self._fenced.add(engine)
            self._drop(lambda call, engine=engine: call.engine == engine)  # type: ignore[misc]
            self.call(Act.fence, engine=engine, limit=self.limits.engine)

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
                self._open[number] = OpenCall(call, item.asked, NEVER)
            self._answers.bad(call, self._silent(call))
            self._run_script()

    def _silent(self, call: Call) -> WeightSyncError:
        if call.engine is not None and call.act is Act.open:
            return EngineSilent(
                f"engine {call.engine.id} did not answer open within {call.limit:.3g} s: generations still "
                "run in it (raise Policy(drain=...), and the deadline that bounds it), or it is silent; "
                "it is fenced and counts as lost"
            )
        if call.engine is not None:
            return EngineSilent(
                f"engine {call.engine.id} did not answer {call.act.name} within {call.limit:.3g} s; "
                "it is fenced and counts as lost"
            )
        if call.act in LOCK_ACTS:
            return LockError(f"the lock service did not answer {call.act.name} within {call.limit:.3g} s")
        what = self.executors[call.index] if call.index is not None else call.act.name
        return RoundTimedOut(f"{what} took longer than its limit of {call.limit:.3g} s")

    def _silence_end(self) -> float:
        """When those that the round waits for, and for nobody else, have been silent for too long."""
        return self._moved + self.limits.engine if self._silent_ones() else NEVER

    def _silent_ones(self) -> frozenset[Participant]:
        """Those it waits for: who owes a receipt, or whom the transport cannot go on without."""
        facts = self.round.facts
        if self.round.state is State.Awaiting:
            return facts.remaining - facts.acks
        return self._awaited & facts.remaining if self.round.state is State.Broadcasting else frozenset()

    def _lose_the_silent(self) -> None:
        state, silence = self.round.state, self._now - self._moved
        what = "gave no receipt" if state is State.Awaiting else "took no bucket"
        silent = sorted(self._silent_ones())
        for engine in silent:
            if self.round.state is state:
                # One of them may hold up the others, and nobody here can tell which: the line names all.
                others = ", ".join(each.id for each in silent if each != engine)
                why = f"engine {engine.id} {what} for {silence:.3g} s"
                if others:
                    why += f", nor did {others}"
                self.fire(e.EngineLost(engine, EngineSilent(why)))

    # -- clocks ---------------------------------------------------------------------------------------------

    def _phase_end(self) -> float:
        state = self.round.state
        if state is State.Released:
            return NEVER
        if state is State.Failed:
            length = self.limits.release * 2 if self.round.facts.settled else self.limits.failed
            return (self._moved if self.round.facts.settled else self._entered) + length
        total = self._started + self.limits.forward
        pausing = state is State.Locked and self._pausing()
        idle = self.limits.pausing if pausing else self.limits.idle
        return total if state is State.Idle else min(total, self._moved + idle)

    def _pausing(self) -> bool:
        """Whether an engine may still be ending its generations, which moves nothing that could be seen."""
        # A copy in one step: ports ask for the limit of their phase from threads of their own.
        return any(item.call.act is Act.open for item in tuple(self._open.values()))

    def _too_late(self) -> RoundTimedOut:
        state, facts = self.round.state, self.round.facts
        waiting = sorted({str(item.call) for item in self._open.values() if item.call.act is not Act.renew})
        owed = sorted(member.id for member in facts.remaining - facts.acks) if state is State.Awaiting else []
        whom = f"; no receipt from {', '.join(owed)}" if owed else ""
        if state is State.Idle and self._holder is not None:
            whom = f"; the lock is held by {self._holder}"
        idle, inside = self._now - self._moved, self._now - self._entered
        return RoundTimedOut(
            f"{state.name} of round {facts.round} ran out of time{self._which_limit()}: "
            f"{inside:.3g} s in it, {idle:.3g} s without progress, "
            f"waiting for {', '.join(waiting) or 'nothing'}{whom}"
        )

    def _which_limit(self) -> str:
        """Whether it was the round's deadline that ended a state, which may have been short, and moving."""
        forward = self.limits.forward
        if self.round.state is State.Failed or self._phase_end() < self._started + forward:
            return ""
        return (
            f" at the round's deadline, which leaves {forward:.3g} s for all states up to here "
            "(raise Policy(deadline=...) if nothing is stuck)"
        )

    # -- records --------------------------------------------------------------------------------------------

    def _note(self, event: str, **values: object) -> None:
        self.round.note(event, wall=self._clock.wall(), **values)

    def _note_call(self, item: OpenCall, error: BaseException | None, value: object = None) -> None:
        call = item.call
        if call.act in LOCK_ACTS and error is None:
            return
        self._note(
            "call", trigger=call.act.name, engine=call.engine.id if call.engine else None,
            undo=self.executors[call.index] if call.index is not None else None,
            seconds=round(self._now - item.asked, 6), error=line(error) if error else None,
            facts={"owes": True} if call.act is Act.prepare and value else None,  # an undo
        )  # fmt: skip

    def _count_stale(self, what: str, error: BaseException | None) -> None:
        self.stale += 1
        self._note("stale", trigger=what, error=line(error) if error else None)


def line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"

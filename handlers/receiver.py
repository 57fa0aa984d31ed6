"""One engine rank at work: takes its trainer's words, moves the bytes, and tells the table what happened.

The order is what matters. A bucket is applied after the table took *FrameSeen*; the transfer buffer is let
go of before *ViewClosed* makes the receipt; the staged weights become the live ones before *CommitOrdered*
says that the rank holds the new version. Whatever fails in between ends the session through the table,
which knows whether the old weights are still whole.

Who may do what while something else is going on, is decided in ``rank.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..fsm.contract import Bucketful, Digest, EngineStatus, InletFactory, Sink, Ticket, Unpack
from ..fsm.engine import Answer, EngineMachine
from ..fsm.engine_table import AllApplied, CommitBroke, CommitOrdered, FrameSeen, Session, ViewClosed
from ..fsm.errors import (
    EngineAsleep,
    EngineError,
    EngineGone,
    IllegalEvent,
    PlanError,
    PlanUnknown,
    SetupError,
    StaleSession,
    WeightsGone,
)
from ..fsm.plan import Plan, make_plan
from ..fsm.receipt import Expectation, Receipt
from ..fsm.sampling import part_of, parted
from ..fsm.states import EngineState
from .gate import Gate
from .known_plans import KnownPlans
from .openings import Openings
from .rank import Rank
from .reception import Reception
from .segments import Running, Segments

__all__ = ["FAULT_POINTS", "Receiver"]

FAULT_POINTS = (
    "hello", "open", "opened", "receive", "frame", "apply", "applied", "release", "acked", "commit", "copied",
    "committed", "abort", "aborted", "resume", "resumed",
)  # fmt: skip
"""Where ``fault(point, bucket)`` is called, in the order of a good round. A past tense is just before the
answer, when everything is done: to raise there is to lose the answer. ``bucket`` is -1 if there is none."""

_LOGGER = logging.getLogger("weightsync")


@dataclass(frozen=True, slots=True)
class _Job:
    """What belongs to one session, beside what the table knows. Made when the sink is ready."""

    session: Session
    plan: Plan
    expected: Expectation
    limit: float
    into: Mapping[str, Any]


class Receiver:
    """One engine rank. Every method may be called from any thread, and beside any other.

    Args:
        engine: the engine's id, the same that its trainers use.
        sink: where the buckets go.
        inlets: the receiving half of each transport, by the transport's name.
        unpack: copies a bucket's pieces to where they belong.
        digest: digests content, as the trainer does.
        rank: which of the engine's ranks this is.
        incarnation: which life of the engine this is; a new one by default.
        on_commit: called with the version when the live weights are new, before the rank says so; to drop
            what was computed with the old ones, for example. When it raises, the engine is quarantined.
        asleep: whether its weights are not in memory now; a session is refused meanwhile. Never, by default.
        fault: for tests, see ``FAULT_POINTS``.
        patience: seconds to wait for a commit that copies, or for a reception to settle, before saying so.
    """

    def __init__(
        self,
        engine: str,
        sink: Sink,
        *,
        inlets: Mapping[str, InletFactory],
        unpack: Unpack,
        digest: Digest,
        rank: int = 0,
        incarnation: str | None = None,
        on_commit: Callable[[int], None] | None = None,
        asleep: Callable[[], bool] | None = None,
        fault: Callable[[str, int], None] | None = None,
        patience: float = 5.0,
    ) -> None:
        self.gate = Gate(f"engine {engine}")
        self._sink, self._inlets, self._unpack, self._digest = sink, dict(inlets), unpack, digest
        self._on_commit, self._asleep, self._fault_hook = on_commit, asleep or _awake, fault
        self._machine = EngineMachine(
            engine, rank=rank, stages=sink.stages, incarnation=incarnation, told=_log_refusal
        )
        self._rank = Rank(self._machine, self.gate, patience)
        self._job: _Job | None = None
        self._plans = KnownPlans(engine)
        self._opens = Openings(self._answered)
        self._segments = Segments(self.gate, lambda: self._machine.facts)

    # -- what it is ----------------------------------------------------------------------------------------

    @property
    def engine(self) -> str:
        """The engine's id."""
        return self._machine.facts.engine

    @property
    def version(self) -> int | None:
        """The version of the weights; None before the first one, and when they are not whole."""
        return self._machine.facts.version

    @property
    def state(self) -> EngineState:
        """Where it is in the table."""
        return self._machine.state

    @property
    def refused(self) -> int:
        """How many words and frames it has refused."""
        return self._machine.refused

    @property
    def status(self) -> EngineStatus:
        """What it says of itself."""
        facts = self._machine.facts
        return EngineStatus(
            facts.engine, facts.incarnation, 1, facts.stages, self._machine.state, facts.version,
            facts.seen, bool(self._asleep()), facts.taken_over,
        )  # fmt: skip

    def digest(self, plan: Plan | None = None) -> str:
        """The digest of the weights that it samples with, in the order of ``plan`` or of the last one."""
        plan = plan or (self._job.plan if self._job else None)
        plan = plan or make_plan(self._sink.manifest(), bucket_bytes=1 << 62)
        return self._digest(plan, self._sink.live(plan))

    def segment(self, limit: float | None = None) -> AbstractContextManager[Running]:
        """Generate one segment of a sample inside this context; ``.done`` then says with which versions."""
        return self._segments.of_thread(limit)

    def segment_async(self, limit: float | None = None) -> AbstractAsyncContextManager[Running]:
        """The same for coroutines."""
        return self._segments.of_task(limit)

    # -- the trainer's words -------------------------------------------------------------------------------

    def hello(self) -> EngineStatus:
        """Answers whatever else is going on: a busy engine is not a dead one."""
        self._fault("hello")
        return self.status

    def open(
        self, session: Session, incarnation: str, plan: Plan | str, expected: Expectation, limit: float
    ) -> None:
        """Pause, and open a session.

        An open session of an older epoch ends. ``plan`` is whole the first time; from then on its fingerprint
        is enough. ``limit`` is how long this rank keeps the session when it hears nothing more, in seconds;
        it bounds the pausing, too.

        Raises:
            EngineGone: this is another incarnation of the engine.
            EngineAsleep: its weights are not in memory.
            PlanUnknown: send the whole plan.
            PlanError: what the plan brings is not what the engine holds.
            WeightsGone: the engine is no longer what its last commit was written to.
            EngineError: it cannot be written.
            EngineSilent: generation, or the reception of an older session, did not end within the limit.
            StaleSession: a newer session was open already, or this one was aborted meanwhile.
        """
        with self._opens.under_way(session):
            try:
                self._fault("open")
                job = self._open(session, incarnation, plan, expected, limit)
            except PlanUnknown:
                raise  # the trainer asks again, with the whole plan
            except BaseException as error:
                self._opens.failed(session, error)
                raise
            self._job = job
            self._opens.tell()
        self._fault("opened")

    def receive(self, session: Session, ticket: Ticket) -> tuple[Receipt, ...]:
        """Receive and apply every bucket; the receipt is made when the transfer buffer was let go of.

        The word may overtake the open of its session: then it waits for it, and fails as that fails.
        Blocks its thread. Whatever goes wrong ends the session, and is raised.
        """
        self._fault("receive")
        self._opens.wait(session, self._rank.patience)
        job, reception = self._begin(session)
        try:
            self._receive(job, reception, ticket)
            self._fault("acked")
            return (self._machine.receipt(session),)
        except BaseException as error:
            reception.shut()
            if not reception.cancelled:
                self._rank.give_up(session)
                raise
            raise StaleSession(
                f"engine {self.engine} stopped receiving round {session.round} (epoch {session.epoch}): the "
                f"session was ended meanwhile"
            ) from error
        finally:
            reception.settle()

    def commit(self, session: Session) -> None:
        """Make the new version the engine's own; it stays paused. Saying it twice changes nothing.

        Raises:
            StaleSession: the session is over, and the engine did not commit.
        """
        self._fault("commit")
        with self._rank.silence.word(session), self._rank.turn():
            if self._machine.state is EngineState.Acked and self._machine.facts.live(session):
                self._take_over(session)
            self._machine.fire(CommitOrdered(session))
        self._fault("committed")

    def abort(self, session: Session) -> Answer:
        """End the session and say what the engine is. From now on the session is refused, even an open.

        Raises:
            EngineSilent: what the session was doing did not stop in time, so nobody can say what the engine
            is.
        """
        self._fault("abort")
        answer = self._rank.abort(session, self._lost)
        self._opens.tell()
        self._fault("aborted")
        return answer

    def resume(self, session: Session) -> None:
        """Generate again, with the version that was committed. Saying it twice changes nothing."""
        self._fault("resume")
        self._rank.resume(session)
        self._fault("resumed")

    def check_incarnation(self, incarnation: str) -> None:
        """Raise EngineGone unless the trainer means this life of the engine."""
        mine = self._machine.facts.incarnation
        if incarnation != mine:
            gone = EngineGone(
                f"engine {self.engine} was restarted: incarnation {incarnation} was meant, {mine} answers; "
                f"the next round takes it in again"
            )
            raise self._machine.refuse(gone)

    # -- how -----------------------------------------------------------------------------------------------

    def _open(
        self, session: Session, incarnation: str, plan: Plan | str, expected: Expectation, limit: float
    ) -> _Job:
        self.check_incarnation(incarnation)
        if self._asleep():
            raise EngineAsleep(f"engine {self.engine} is asleep: wake it before weights are handed over")
        plan = self._plans.whole(plan)
        try:
            self._plans.check(plan, expected, self._sink)
        except (PlanError, EngineError) as error:
            self._look(session, error)
            raise
        if plan.partial and self._machine.facts.torn:  # a part brings back no more than it is
            self._look(session)
        self._rank.open(session, expected, limit)
        try:
            return self._ready(session, plan, expected, limit)
        except BaseException:
            self._rank.give_up(session)
            raise

    def _look(self, session: Session, cause: Exception | None = None) -> None:
        """Raise WeightsGone if the weights are not what commits have left."""
        why = self._rank.look(session, self._lost)
        if why:
            raise WeightsGone(f"{why}; the next round of all weights that fits brings it back") from cause

    def _lost(self) -> str:
        """Whether the weights are gone, in words, as far as that can be said now."""
        try:
            why = ""
            for _ in range(2):  # it may fall asleep and wake meanwhile
                why = "" if self._asleep() else self._plans.lost(self._sink)
                if not why or self._asleep():
                    return ""
            return why
        except Exception as error:  # noqa: BLE001 - of the engine's own code, which an abort must survive
            what = f"{type(error).__name__}: {error}"
            _LOGGER.warning("engine %s could not be looked at: %s", self.engine, what)
            return ""

    def _answered(self, session: Session) -> bool:
        """Whether the open of ``session`` is done, or can no longer succeed."""
        job = self._job
        opened = job is not None and job.session.epoch >= session.epoch
        return opened or self._machine.facts.fenced >= session.epoch

    def _ready(self, session: Session, plan: Plan, expected: Expectation, limit: float) -> _Job:
        with self._rank.silence.word(session), self._rank.turn():
            if not self._rank.in_session(session):
                raise StaleSession(
                    f"engine {self.engine} does not open round {session.round} (epoch {session.epoch}): it "
                    f"was ended meanwhile"
                )
            return _Job(session, plan, expected, limit, self._sink.open(plan))

    def _begin(self, session: Session) -> tuple[_Job, Reception]:
        with self._rank.turn():
            job, running = self._job, self._rank.running
            if job is None or job.session != session or not self._rank.in_session(session):
                stale = StaleSession(
                    f"engine {self.engine} cannot receive round {session.round} (epoch {session.epoch}): it "
                    f"is {self.state.name}, and that session is not open"
                )
                raise self._machine.refuse(stale)
            if running is not None and running.session == session:
                twice = f"engine {self.engine} receives round {session.round} already, once is enough"
                raise self._machine.refuse(IllegalEvent(twice))
            self._rank.running = reception = Reception(session, job.plan)
            return job, reception

    def _receive(self, job: _Job, reception: Reception, ticket: Ticket) -> None:
        session = job.session
        make = self._inlets.get(ticket.transport)
        if make is None:
            raise SetupError(
                f"engine {self.engine} has no receiving half for transport {ticket.transport!r}, only for "
                f"{', '.join(sorted(self._inlets)) or 'none'}; give it one"
            )
        inlet = make(ticket, session, job.plan, job.limit)
        reception.attach(inlet)

        def apply(frame: Bucketful) -> None:
            self._rank.silence.heard(session)
            self._fault("frame", frame.index)
            self._machine.fire(FrameSeen(session, frame.index))
            self._fault("apply", frame.index)
            if frame.views is not None and self._sink.aliases:
                self._sink.adopt(frame.views)
            else:
                self._unpack(job.plan, frame, job.into)
            self._fault("applied", frame.index)

        def applied() -> None:
            self._machine.fire(AllApplied(session))
            self._fault("release")

        reception.run(inlet, apply, applied)
        reception.settle()
        wanted = job.expected.digest
        mine = f"engine {self.engine}: its digest function"
        digest = parted(mine, self._digest, part_of(wanted), job.plan, job.into) if wanted else ""
        self._machine.fire(ViewClosed(session, reception.tensors, reception.bytes, digest))
        self._rank.silence.heard(session)

    def _take_over(self, session: Session) -> None:
        """Make the live weights new. Half of that is a mix, whatever the sink."""
        assert self._job is not None
        try:
            self._sink.commit(self._job.plan)
            self._fault("copied")
            self._plans.taken(self._job.plan, self._sink)
            if self._on_commit is not None:
                self._on_commit(session.version)
        except BaseException as error:
            self._machine.fire(CommitBroke(session, error))
            self._rank.silence.stop(session)
            raise

    def _fault(self, point: str, bucket: int = -1) -> None:
        if self._fault_hook is not None:
            self._fault_hook(point, bucket)


def _awake() -> bool:
    return False


def _log_refusal(error: Exception) -> None:
    _LOGGER.warning("%s", error)

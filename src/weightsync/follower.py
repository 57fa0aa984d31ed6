"""The other ranks of a trainer: the same step hooks as rank 0, which leads the rounds.

    ranks = TrainerRanks(store, rank, world_size)
    sync = WeightSync(engines, ..., ranks=ranks) if rank == 0 else FollowerSync(ranks, policy=policy)

Every rank calls the same hooks at the same steps, and gets the same result or an error of the same kind. No
rank is left in a wait: whoever fails, dies or freezes is known to all after ``TrainerRanks(silent=...)``
seconds in the middle of a hand-over, and after twice its ``limit`` and once its ``silent`` before one. For as
long as rank 0 beats, its outcome is waited for: how long rounds and retries may take is bounded there.

A rank that stops waiting takes its report back, so that rank 0 publishes nothing that this rank has given up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, Self

from .fsm import checks
from .fsm.errors import RankFailed, RankLost, SetupError
from .fsm.executors import Executor
from .fsm.exports import Decision, Planned
from .fsm.plan import Plan
from .fsm.policy import Policy
from .fsm.ranks import Pulses, Report, Verdict, error_from, lost, result_from
from .fsm.results import RoundResult
from .handlers.bridge import LoopBridge
from .handlers.coroutines import Awaiting
from .handlers.inside import refuse_inside
from .handlers.rank_part import RankPart
from .handlers.ranks import TrainerRanks
from .joining import executors_for, export_of, policy_for, weights_for

__all__ = ["FollowerSync"]


class FollowerSync:
    """A rank above 0. It talks to its fellow ranks alone, never to an engine.

    Whichever form rank 0 uses (``on_step_end``, ``begin`` or ``round``), the other ranks call ``on_step_end``
    at the same step, in the same order.

    Args:
        ranks: this rank.
        policy: the same as rank 0 has.
        handlers: executors (``prepare`` and ``clean``) for what this rank has to do in each round. They are
            called when rank 0's are, and the round waits for them. A rank above 0 has no records, so it has
            no observers.

    Raises:
        SetupError: this is rank 0, or something is of the wrong kind.
    """

    def __init__(
        self,
        ranks: TrainerRanks,
        *,
        policy: Policy | None = None,
        handlers: Sequence[Executor | Awaiting] = (),
    ) -> None:
        checks.kind(
            "FollowerSync", "ranks", ranks, TrainerRanks, "TrainerRanks(store, rank, world_size) is needed"
        )
        if ranks.rank == 0:
            raise SetupError("rank 0 leads the rounds: give it WeightSync(engines, ..., ranks=...)")
        self.policy = policy_for(policy, "FollowerSync")
        self._bridge = LoopBridge()
        executors = executors_for(handlers, self._bridge, self.policy)
        self._ranks = ranks
        self._rounds = RankPart(ranks, executors)
        self._closed = False
        self._turn = threading.Lock()

    # -- step hooks ------------------------------------------------------------------------------------------

    def on_train_begin(self, model: object) -> RoundResult:
        """Take part in the hand-over of the initial weights."""
        return self._follow(0, "hand over", model)

    def on_step_end(self, step: int, model: object) -> RoundResult | None:
        """Take part in the hand-over of this step, if the policy says there is one; None if it does not.

        Args:
            step: the trainer's step, from 1.
            model: tensors of the same names, dtypes and shapes as rank 0 hands over. Their values are rank
                0's alone, and not compared. A generator is run through, since that may be this rank's part in
                gathering them; nothing of it is kept. An export (``CachedExport``) is agreed on first.

        Raises:
            RankError: a rank failed, died or froze.
            RanksDisagree: the ranks are not at one step, or do not bring the same tensors.
            RoundCancelled: rank 0 was told to stop while the ranks met.
            SyncFailed: the round failed and the policy raises on failure.
        """
        step = self._step_of("on_step_end", step, "hand over")
        if step % self.policy.every:
            return None
        return self._follow(step, "hand over", model)

    def catch_up(self, step: int, model: object) -> RoundResult:
        """Take part in ``WeightSync.catch_up``."""
        step = self._step_of("catch_up", step, "catch up")
        return self._follow(step, "catch up", model)

    def close(self) -> None:
        """Tell rank 0 that this rank comes to no more hand-overs, and give the threads back. Idempotent."""
        refuse_inside(self._bridge, "close")
        if self._closed:
            return
        self._closed = True
        with suppress(RankLost):
            self._ranks.end()
        self._rounds.close()
        self._bridge.close()
        self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        self.close()
        return False

    # -- inside ----------------------------------------------------------------------------------------------

    def _step_of(self, where: str, step: object, kind: str) -> int:
        try:
            return checks.step_of(where, "step", step)
        except SetupError as error:
            with self._turn:
                if not self._closed:
                    self._ranks.cannot(kind, error)
            raise

    def _follow(self, step: int, kind: str, model: object) -> RoundResult:
        refuse_inside(self._bridge, kind)
        with self._turn:  # hand-overs of two threads come one after the other, and each of them is bounded
            if self._closed:
                raise SetupError("this FollowerSync is closed")
            told = self._told(step, kind, _Part(model, self.policy))
        if told["error"] is not None:
            raise error_from(told["error"])
        result = result_from(told["result"])
        return result.require() if self.policy.raise_on_failure else result

    def _told(self, step: int, kind: str, part: _Part) -> Any:
        """What rank 0 says in the end: an error, or a result."""
        number = None
        try:
            if part.export is not None and (refusal := self._settle(step, kind, part.export)) is not None:
                return {"error": refusal}
            report = self._ranks.arrive(step, kind, part)
            number, verdict = self._verdict(report)
            return (
                {"error": verdict.error} if verdict.error is not None else self._outcome(number, report, part)
            )
        except BaseException as error:
            told = None
            with suppress(RankLost):
                self._ranks.give_up(error)
                if number is not None and isinstance(error, RankLost):
                    # Rank 0 looks whether anybody gave up after it has told: one of the two sees the other.
                    told = self._ranks.look(number, "outcome")
            if told is None:
                raise
            return told
        finally:
            self._rounds.finish(self._ranks.silent)

    def _settle(self, step: int, kind: str, export: Planned) -> Any:
        """Before anything is gathered: what all ranks do with their export's plan, or why they do nothing."""
        _, verdict = self._verdict(self._ranks.arrive(step, kind, export.standing, "export"))
        if verdict.error is None:
            export.settle(Decision.from_json(verdict.decision or {}))
        return verdict.error

    def _verdict(self, report: Report) -> tuple[int, Verdict]:
        """Rank 0 has all reports. It may be late itself, and then waits for the others."""
        ranks = self._ranks
        limit = 2 * ranks.limit + ranks.silent
        now = time.monotonic()
        end, due = now + limit, now
        while (now := time.monotonic()) < end:
            answer = ranks.answer(report)
            if answer is not None:
                return answer
            if now >= due:
                due = now + (ranks.interval if ranks.known else ranks.interval / 10)
                report = self._look_around(report)
            ranks.pause()
        raise lost([0], f"gave no verdict on the hand-over of step {report.step} within {limit:g} s")

    def _look_around(self, report: Report) -> Report:
        """While there is no verdict: beat; is it the same run, has rank 0 ended, is this rank alone?"""
        ranks = self._ranks
        ranks.beat(0)
        ranks.check_alone()
        if ranks.find_run():
            report = ranks.report_again(report)
        if ranks.ended() and ranks.look(ranks.next_number, "verdict") is None:
            raise RankFailed("rank 0 has closed its WeightSync before it gave its verdict")
        return report

    def _outcome(self, number: int, report: Report, part: _Part) -> Any:
        """Rank 0 leads as many rounds as its policy allows, and beats all the while."""
        ranks, beats = self._ranks, float("-inf")
        pulses, last = Pulses([0], time.monotonic()), "; it had not told of a round yet"
        while (told := ranks.look(number, "outcome")) is None:
            now = time.monotonic()
            if now - beats >= ranks.interval:
                beats = now
                ranks.beat(number, report.call)
                beat = ranks.said("beat", 0)
                pulses.heard(0, beat, time.monotonic())
                if beat is not None and beat[2] == number and beat[1]:
                    last = f"; it was last heard of in {beat[1][1]} of round {beat[1][0]}"
                if pulses.silent(time.monotonic(), ranks.silent):
                    raise lost([0], f"no sign of life for {ranks.silent:g} s at step {report.step}{last}")
            if part.plan is not None:
                self._rounds.look(number, report.step or 0, part.plan, part.source)
            ranks.pause()
        return told


class _Part:
    """A rank's part before the lock: its tensors are read, described, and let go of.

    Args:
        model: what the hook was given. If it is an export, that is settled between the ranks before this.
    """

    def __init__(self, model: object, policy: Policy) -> None:
        self._model, self._policy = model, policy
        self.export = export_of(model)
        self.plan: Plan | None = None
        self.source: object = None

    def __call__(self) -> Plan:
        weights = weights_for(self._model, self._policy, snapshot=False)
        weights.materialize()
        self._model = None
        source = getattr(weights, "source", None)
        self.source = source if isinstance(source, list) else None  # what a handler may empty
        self.plan = weights.plan(self._policy.bucket_bytes)
        return self.plan

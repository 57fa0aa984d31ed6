"""The other ranks of a trainer: the same step hooks as rank 0, which leads the rounds.

    ranks = TrainerRanks(store, rank, world_size)
    sync = WeightSync(engines, ..., ranks=ranks) if rank == 0 else FollowerSync(ranks, policy=policy)

Every rank calls the same hooks at the same steps, and gets the same result or an error of the same kind. No
wait is without a bound, and no rank is left in one: whoever fails, dies or freezes is known to all after
``TrainerRanks(silent=...)`` seconds in the middle of a hand-over, and after twice its ``limit`` before one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, Self

from .fsm import checks
from .fsm.errors import RankFailed, RankLost, SetupError
from .fsm.plan import Plan
from .fsm.policy import Policy
from .fsm.ranks import Pulses, error_from, lost, result_from
from .fsm.results import RoundResult
from .handlers.ranks import TrainerRanks
from .joining import policy_for, weights_for

__all__ = ["FollowerSync"]


class FollowerSync:
    """A rank above 0. It talks to its fellow ranks alone, never to an engine.

    Args:
        ranks: this rank.
        policy: the same as rank 0 has.

    Raises:
        SetupError: this is rank 0, or something is of the wrong kind.
    """

    def __init__(self, ranks: TrainerRanks, *, policy: Policy | None = None) -> None:
        checks.kind(
            "FollowerSync", "ranks", ranks, TrainerRanks, "TrainerRanks(store, rank, world_size) is needed"
        )
        if ranks.rank == 0:
            raise SetupError("rank 0 leads the rounds: give it WeightSync(engines, ..., ranks=...)")
        self.policy = policy_for(policy, "FollowerSync")
        self._ranks = ranks
        self._closed = False

    # -- step hooks ------------------------------------------------------------------------------------------

    def on_train_begin(self, model: object) -> RoundResult:
        """Take part in the hand-over of the initial weights."""
        return self._follow(0, "hand over", model)

    def on_step_end(self, step: int, model: object) -> RoundResult | None:
        """Take part in the hand-over of this step, if the policy says there is one; None if it does not.

        Args:
            step: the trainer's step, from 1.
            model: the tensors that rank 0 hands over: the same names, dtypes and shapes. A generator is run
                through, since that may be this rank's part in gathering them; nothing of it is kept.

        Raises:
            RankError: a rank failed, died or froze.
            RanksDisagree: the ranks are not at one step, or do not bring the same tensors.
            SyncFailed: the round failed and the policy raises on failure.
        """
        step = checks.step_of("on_step_end", "step", step)
        if step % self.policy.every:
            return None
        return self._follow(step, "hand over", model)

    def catch_up(self, step: int, model: object) -> RoundResult:
        """Take part in ``WeightSync.catch_up``."""
        step = checks.step_of("catch_up", "step", step)
        return self._follow(step, "catch up", model)

    def close(self) -> None:
        """Give the threads back. Idempotent."""
        self._closed = True
        self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        self.close()
        return False

    # -- inside ----------------------------------------------------------------------------------------------

    def _follow(self, step: int, kind: str, model: object) -> RoundResult:
        if self._closed:
            raise SetupError("this FollowerSync is closed")
        number = self._ranks.arrive(step, kind, lambda: self._part(model))
        try:
            self._verdict(number, step)
            told = self._outcome(number, step)
        except (RankLost, RankFailed):
            raise
        except BaseException as error:
            with suppress(RankLost):
                self._ranks.post(number, "fail", f"{type(error).__name__}: {error}")
            raise
        if told["error"] is not None:
            raise error_from(told["error"])
        result = result_from(told["result"])
        return result.require() if self.policy.raise_on_failure else result

    def _part(self, model: object) -> Plan:
        weights = weights_for(model, snapshot=False)
        weights.materialize()
        return weights.plan(self.policy.bucket_bytes)

    def _verdict(self, number: int, step: int) -> None:
        """Rank 0 has all reports. It may be late itself, and then waits for the others."""
        limit = 2 * self._ranks.limit + self._ranks.silent
        told = self._await(number, "verdict", limit, lambda: None)
        if told is None:
            raise lost([0], f"gave no verdict on the hand-over of step {step} within {limit:g} s")
        if told["error"] is not None:
            raise error_from(told["error"])

    def _outcome(self, number: int, step: int) -> Any:
        """Rank 0 leads as many rounds as its policy allows, and beats all the while."""
        ranks, policy = self._ranks, self.policy
        pulses, last = Pulses([0], time.monotonic()), ["; it had not opened a round yet"]

        def listen() -> None:
            beat = ranks.look(number, "beat", 0)
            pulses.heard(0, beat, time.monotonic())
            if beat is not None and beat[1]:
                last[0] = f"; it was last heard of in {beat[1][1]} of round {beat[1][0]}"
            if pulses.silent(time.monotonic(), ranks.silent):
                raise lost([0], f"no sign of life for {ranks.silent:g} s at step {step}{last[0]}")

        limit = (policy.attempts + 1) * (policy.deadline + 3 * policy.lease) + ranks.limit
        told = self._await(number, "outcome", limit, listen)
        if told is None:
            raise lost([0], f"no outcome of the hand-over of step {step} within {limit:g} s{last[0]}")
        return told

    def _await(self, number: int, what: str, limit: float, listen: Callable[[], None]) -> Any:
        """Look for a word of rank 0, beating and listening meanwhile; None if it does not come."""
        ranks, beats = self._ranks, float("-inf")
        end = time.monotonic() + limit
        while (now := time.monotonic()) < end:
            told = ranks.look(number, what, 0)
            if told is not None:
                return told
            if now - beats >= ranks.interval:
                beats = now
                ranks.beat(number)
                listen()
                if ranks.ended(0):
                    return self._last_word(number, what)
            ranks.pause()
        return None

    def _last_word(self, number: int, what: str) -> Any:
        """Rank 0 has ended; what it said before that is there by now."""
        told = self._ranks.look(number, what, 0)
        if told is None:
            raise RankFailed(f"rank 0 has closed its WeightSync before it gave its {what}")
        return told

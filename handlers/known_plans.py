"""The plans that an engine rank knows: those it was sent whole, and the one its last commit was written by.

The second says whose mistake it is when a plan does not fit. A trainer that brings something else is refused
with PlanError, and the engine goes on with what it has. But an engine to which its own last commit could not
be written any more has changed since, by a reload or by giving its memory away: what it holds is proven no
longer.
"""

from __future__ import annotations

from ..fsm.contract import Sink
from ..fsm.errors import EngineError, PlanError, PlanUnknown, WeightsGone
from ..fsm.plan import Plan
from ..fsm.receipt import Expectation

__all__ = ["KnownPlans"]

_MOST = 4  # layouts that are remembered


class KnownPlans:
    """The plans of one rank. ``name`` is the engine's, for messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._plans: dict[str, Plan] = {}
        self._taken: Plan | None = None

    def whole(self, plan: Plan | str) -> Plan:
        """The plan itself, remembered from now on, or the one with this fingerprint.

        Raises:
            PlanUnknown: there is none with this fingerprint.
        """
        if isinstance(plan, str):
            known = self._plans.get(plan)
            if known is None:
                raise PlanUnknown(f"engine {self._name} does not know plan {plan[:12]}; send the whole plan")
            return known
        self._plans[plan.fingerprint] = plan
        while len(self._plans) > _MOST:
            self._plans.pop(next(iter(self._plans)))
        return plan

    def taken(self, plan: Plan) -> None:
        """A commit has written what this plan brought. Of a part of the weights it says less than of all."""
        if not plan.partial or self._taken is None or self._taken.partial:
            self._taken = plan

    def check(self, plan: Plan, expected: Expectation, sink: Sink) -> None:
        """Whether the plan is the one that is meant, and fits.

        Raises:
            PlanError: it is not, or it does not fit an engine that is what its last commit left.
            WeightsGone: the engine is something else by now.
            EngineError: it cannot be written at all.
        """
        _check_expectation(plan, expected)
        try:
            sink.check(plan)
        except (PlanError, EngineError):
            self.check_taken(sink)
            raise

    def check_taken(self, sink: Sink) -> None:
        """Whether the engine is what its last commit was written to. Compares names, shapes, dtypes.

        Raises:
            WeightsGone: it is not.
        """
        if self._taken is None:
            return
        try:
            sink.check(self._taken)
        except (PlanError, EngineError) as error:
            changed = f"engine {self._name} is no longer what its last commit was written to: {error}"
            raise WeightsGone(f"{changed}; the next round that fits brings it back") from error


def _check_expectation(plan: Plan, expected: Expectation) -> None:
    """What the receipt is to say must be what the plan says."""
    mine = (plan.fingerprint[:12], len(plan.tensors), plan.nbytes, len(plan.buckets))
    asked = (expected.fingerprint[:12], expected.tensors, expected.bytes, expected.buckets)
    if mine != asked:
        raise PlanError(f"a receipt for {asked} is expected, but the plan is {mine}; send the right plan")

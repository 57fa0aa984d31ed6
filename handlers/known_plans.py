"""What an engine rank knows of plans: those it was sent whole, and what its commits have left of them.

The second says whose mistake it is when a plan does not fit. A trainer that brings something else is refused
with PlanError, and the engine goes on with what it has. But an engine that does not hold any more what its
last commit left has changed since, by a reload or by giving its memory away: what it holds is proven no
longer. A commit of a part leaves the rest as it was.
"""

from __future__ import annotations

from ..fsm.contract import Sink
from ..fsm.errors import PlanError, PlanUnknown
from ..fsm.plan import Plan
from ..fsm.receipt import Expectation
from ..fsm.tensors import TensorSpec, summary

__all__ = ["KnownPlans"]

_MOST = 4  # layouts that are remembered


class KnownPlans:
    """The plans of one rank. ``name`` is the engine's, for messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._plans: dict[str, Plan] = {}
        self._left: dict[str, TensorSpec] = {}
        self._last = ""

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

    def taken(self, plan: Plan, sink: Sink) -> None:
        """A commit has written what this plan brought. What it left is remembered, once for each plan."""
        if plan.fingerprint == self._last:
            return
        names = [each.name for each in plan.tensors] + [tie.name for tie in plan.ties]
        held = {each.name: each for each in sink.manifest()}
        left = {name: held[name] for name in names if name in held}
        self._left = {**self._left, **left} if plan.partial else left
        self._last = plan.fingerprint

    def check(self, plan: Plan, expected: Expectation, sink: Sink) -> None:
        """Whether the plan is the one that is meant, and fits.

        Raises:
            PlanError: it is not, or it does not fit.
            EngineError: the engine cannot be written at all.
        """
        _check_expectation(plan, expected)
        sink.check(plan)

    def lost(self, sink: Sink) -> str:
        """What commits have left and the engine has no more, in words; nothing if it has it all.

        Looks at names, shapes, dtypes and memory, and changes nothing.
        """
        if not self._left:
            return ""
        held = {each.name: each for each in sink.manifest()}
        gone = [each for name, each in self._left.items() if held.get(name) != each]
        if not gone:
            return ""
        what = summary([_now(each, held.get(each.name)) for each in gone])
        return f"engine {self._name} is no longer what its last commit was written to: {what}"


def _now(left: TensorSpec, held: TensorSpec | None) -> str:
    if held is None:
        return f"tensor {left.name!r}: {left} was left, and the engine holds none, or has no memory for it"
    return f"tensor {left.name!r}: {left} was left, and the engine holds {held}"


def _check_expectation(plan: Plan, expected: Expectation) -> None:
    """What the receipt is to say must be what the plan says."""
    mine = (plan.fingerprint[:12], len(plan.tensors), plan.nbytes, len(plan.buckets))
    asked = (expected.fingerprint[:12], expected.tensors, expected.bytes, expected.buckets)
    if mine != asked:
        raise PlanError(f"a receipt for {asked} is expected, but the plan is {mine}; send the right plan")

"""A source of weights that plans once how they are gathered, and uses the plan again as long as it may.

Hand it to a ``WeightSync``, and to the ``FollowerSync`` of each other rank, in the place of the model:

    export = CachedExport(FsdpExporter(model))
    sync.on_step_end(step, export)

In each hand-over every rank says first where it stands, and one decision is told to all (``fsm/exports.py``);
then the source is read. What is kept is the plan, which is plain values: tensors are looked up by name and
read anew each time. If the layout that comes out is not the one that the plan brought the first time, the
plan is dropped, and the hand-over fails before anybody is told a word.

A plan that could not be made, or not be carried out, is dropped as well: the next hand-over has no plan on
this rank, so all ranks make it anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ..fsm import checks
from ..fsm.errors import PlanError, SetupError
from ..fsm.exports import Decision, Exporter, ExportPlan, Outline, Standing, decide
from .object_tap import counted
from .wrapped import dtype_of

__all__ = ["CachedExport", "ExportCounts"]

_EXPORTER = ("outline", "plan", "tensors", "forget")
_Layout = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ExportCounts:
    """What an export has done so far.

    Args:
        builds: how often a plan was made.
        hits: how often one was used again.
        objects: collectives of whole objects that either needed.
        seconds: that planning took.
    """

    builds: int = 0
    hits: int = 0
    objects: int = 0
    seconds: float = 0.0


class CachedExport:
    """Weights by an exporter, with a plan that is made once.

    Args:
        exporter: knows how they are gathered, e.g. ``FsdpExporter(model)``.

    Raises:
        SetupError: it is none.
    """

    def __init__(self, exporter: Exporter) -> None:
        if not checks.has(exporter, _EXPORTER):
            raise checks.refusal(
                "CachedExport", "exporter", exporter, "an exporter is needed, such as FsdpExporter(model)"
            )
        self._exporter = exporter
        self._device = _device()
        self.counts = ExportCounts()
        self._last = ExportCounts()
        self._plan: ExportPlan | None = None
        self._planned: Outline | None = None
        self._now: Outline | None = None
        self._decided: Decision | None = None
        self._layout: list[_Layout] = []
        self._hash = ""
        self._latest: Iterator[tuple[str, Any]] | None = None

    @property
    def plan(self) -> ExportPlan | None:
        """The plan that is kept; None if there is none."""
        return self._plan

    def reset(self) -> None:
        """Forget the plan. All ranks make it anew in the next hand-over, also if only one has forgotten."""
        self._plan = self._planned = None
        self._layout = []
        self._exporter.forget()

    # -- before it is read -----------------------------------------------------------------------------------

    def standing(self) -> tuple[Outline, Standing]:
        """What this rank has now, and where it stands."""
        self._abandon()
        now = self._now = self._exporter.outline()
        if self._plan is None or self._planned is None:
            return now, Standing(now.common, now.mark)
        planned = self._planned
        change = planned.change_to(now)
        return now, Standing(now.common, now.mark, self._plan.key, planned.mark, change)

    def settle(self, decision: Decision) -> None:
        """What all ranks do; the source is read next. An old plan ends here, before a new one begins."""
        self._decided = decision
        if decision.build:
            self.reset()

    def _abandon(self) -> None:
        """What was read half way is dropped, though the error of whoever read it may keep it alive."""
        if self._latest is not None:
            self._latest = None
            self.reset()

    # -- reading ---------------------------------------------------------------------------------------------

    def __call__(self) -> Iterator[tuple[str, Any]]:
        """The tensors as they are now.

        Raises:
            SetupError: the other ranks do not know that it is read.
            PlanError: another layout comes out than the plan brought before.
        """
        decision = self._taken()
        self._last, whole = self.counts, False
        reading = self._latest = self._reading(decision)
        try:
            while (item := self._step(reading)) is not None:
                yield item
            whole = True
        finally:
            # Also if the reader gives up half way; that may be heard when the next reading has begun.
            if self._latest is reading:
                self._latest = None
                if not (whole and self._exporter.lasting):
                    self.reset()

    def told(self) -> dict[str, Any]:
        """For the log: the plan, and what the last reading cost."""
        now, before = self.counts, self._last
        return {
            "plan": self._hash[:12], "builds": now.builds, "hits": now.hits,
            "objects": now.objects - before.objects, "planning": now.seconds - before.seconds,
        }  # fmt: skip

    def _taken(self) -> Decision:
        """What was decided for this reading; a rank that gathers alone decides alone."""
        decision, self._decided = self._decided, None
        if decision is not None:
            return decision
        now, standing = self.standing()
        if now.world > 1:
            raise SetupError(
                f"this export gathers from {now.world} ranks, which have to agree before it is read: hand it "
                "to WeightSync(ranks=...) and FollowerSync, and to begin() with snapshot=False"
            )
        decision = decide({0: standing})
        self.settle(decision)
        self._decided = None
        return decision

    def _reading(self, decision: Decision) -> Iterator[tuple[str, Any]]:
        plan = self._built(decision.key) if decision.build else self._hit()
        self._hash = plan.hash
        yield from self._read(plan, first=decision.build)

    def _step(self, reading: Iterator[tuple[str, Any]]) -> tuple[str, Any] | None:
        """The next tensor, if there is one."""
        with self._on_device(), counted() as objects:
            try:
                return next(reading, None)
            finally:
                self.counts = replace(self.counts, objects=self.counts.objects + objects.calls)

    def _built(self, key: str) -> ExportPlan:
        began, outline = time.monotonic(), self._now
        plan = ExportPlan.sealed(self._exporter.plan(), key)
        self._plan, self._planned = plan, outline
        took = time.monotonic() - began
        self.counts = replace(self.counts, builds=self.counts.builds + 1, seconds=self.counts.seconds + took)
        return plan

    def _hit(self) -> ExportPlan:
        if self._plan is None:
            raise PlanError("the export's plan was forgotten after the ranks had agreed to use it")
        self.counts = replace(self.counts, hits=self.counts.hits + 1)
        return self._plan

    def _read(self, plan: ExportPlan, *, first: bool) -> Iterator[tuple[str, Any]]:
        layout: list[_Layout] = []
        for number, (name, tensor) in enumerate(self._exporter.tensors(plan)):
            found = (name, dtype_of(tensor), tuple(tensor.shape))
            if not first:
                self._check(number, found)
            layout.append(found)
            yield name, tensor
        if not first and len(layout) != len(self._layout):
            raise _other(f"{len(layout)} tensors", f"{len(self._layout)}")
        self._layout = layout

    def _check(self, number: int, found: _Layout) -> None:
        before = self._layout[number] if number < len(self._layout) else None
        if found != before:
            raise _other(f"{found} as tensor {number}", f"{before}")

    def _on_device(self) -> AbstractContextManager[object]:
        """Reading runs on a thread of its own, whose GPU is the first one unless it is told which."""
        if self._device is None:
            return nullcontext()
        import torch

        return torch.cuda.device(self._device)


def _other(found: str, before: str) -> PlanError:
    return PlanError(
        f"the export brought {found}, where its plan brought {before}: the plan is dropped, and the next "
        "hand-over makes a new one"
    )


def _device() -> int | None:
    """The GPU that this rank uses, if it uses one."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_initialized() else None

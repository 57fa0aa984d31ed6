"""A trainer of several ranks: what they tell each other about a hand-over, and what follows from it.

Rank 0 leads: it alone talks to the lock, the ledger and the engines. The others bring the same tensors, say
so in a *report*, wait for the *verdict* before the lock is asked for, and then for the *outcome*. While they
wait they beat, and so does rank 0 while it leads; whoever does not is lost, after a bound, to everybody.

Everything here is a value, or follows from values. What carries them is ``handlers/ranks.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .errors import (
    PlanMismatch,
    RaisedElsewhere,
    RankFailed,
    RankLost,
    RanksDisagree,
    WeightSyncError,
)
from .lines import named, parting
from .plan import Plan
from .results import EngineRow, PassedOver, RoundResult
from .states import Disposition, Outcome

__all__ = [
    "Pulses", "Report", "Verdict", "difference", "disagreement", "error_from", "error_told", "layout", "lost",
    "result_from", "result_told",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says when it has come to a hand-over.

    Args:
        run: of rank 0, by its id, as far as this rank knows it.
        call: of a hook on this rank; no two have the same.
        step: None if what it was called with is none.
        after: the number of the last verdict that this rank has passed by.
        kind: what is called at this step.
        stage: ``"export"`` while the ranks agree on how they gather their tensors, before they do.
        fingerprint: of the plan of its tensors, or of what an export is planned from; empty if there is none.
        error: what it raised in its part, in one line; empty if it did not.
        standing: where it stands with its export's plan; see ``exports.py``.
    """

    rank: int
    world: int
    run: str
    call: str
    step: int | None
    kind: str
    fingerprint: str = ""
    error: str = ""
    after: int = 0
    stage: str = ""
    standing: Mapping[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Report:
        """Read ``to_json`` back."""
        return cls(**told)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What rank 0 says when the ranks have met, or will not.

    Args:
        step: of rank 0; None if what it was called with is none.
        calls: those that this answers, whatever their step.
        error: why there is no hand-over; None if there is one.
        decision: what all ranks do with their export's plan, if that is what they met for.
    """

    step: int | None
    kind: str
    calls: tuple[str, ...] = ()
    error: Mapping[str, str] | None = None
    decision: Mapping[str, Any] | None = None

    def answers(self, report: Report) -> bool:
        """Whether it does; a refusal also answers who comes late to this step, or to one before it."""
        if self.error is None or report.call in self.calls:
            return report.call in self.calls
        if report.step is None:  # which does not wait: it is over with a refusal of the same kind
            return self.step is None and self.kind == report.kind
        late = self.step is None or report.step <= self.step
        return late and (self.kind == report.kind or self.error["kind"] == RanksDisagree.__name__)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Verdict:
        """Read ``to_json`` back."""
        return cls(told["step"], told["kind"], tuple(told["calls"]), told["error"], told["decision"])


# -- do they agree? ---------------------------------------------------------------------------------------


def disagreement(reports: Mapping[int, Report]) -> WeightSyncError | None:
    """Why the hand-over of these reports cannot be; a difference of plans is still to be named."""
    mine = reports[0]
    for report in reports.values():
        if report.error:
            step = mine.step if report.step is None else report.step
            return RankFailed(f"rank {report.rank} failed in its part of step {step}: {report.error}")
    for name in ("world", "kind", "step", "stage"):
        others = [rank for rank, report in reports.items() if getattr(report, name) != getattr(mine, name)]
        if others:
            theirs = getattr(reports[others[0]], name)
            if name == "stage":
                return RanksDisagree(_ONE_EXPORT.format(*_by_stage(reports)))
            return RanksDisagree(
                f"the trainer's ranks are not at one hand-over: {name} is {getattr(mine, name)} on rank 0, "
                f"and {theirs} on {named(others)}"
            )
    others = [rank for rank, report in reports.items() if report.fingerprint != mine.fingerprint]
    if others:
        return PlanMismatch(f"the trainer's ranks do not bring the same tensors: rank 0 and {named(others)}")
    return None


_ONE_EXPORT = (
    "the trainer's ranks do not gather their tensors together: {} brought an export to agree on, and {} did "
    "not: hand the same kind of thing over on every rank, in the same call"
)


def _by_stage(reports: Mapping[int, Report]) -> tuple[str, str]:
    export = sorted(rank for rank, report in reports.items() if report.stage)
    return named(export), named(set(reports) - set(export))


def layout(plan: Plan) -> list[str]:
    """A plan's tensors, a line each, to be compared."""
    return [f"{tensor.name!r} {tensor.dtype} {tuple(tensor.shape)}" for tensor in plan.tensors]


def difference(reports: Mapping[int, Report], layouts: Mapping[int, list[str]]) -> PlanMismatch:
    """The mismatch of plans, with the first tensor that differs between rank 0 and another one."""
    mine = reports[0]
    others = [rank for rank, report in reports.items() if report.fingerprint != mine.fingerprint]
    first = others[0]
    here, there = layouts.get(0, []), layouts.get(first, [])
    what = "line" if mine.stage else "tensor"
    where = "their tensors are the same, so the policies differ in bucket_bytes or in only"
    found = parting(here, there, absent="missing")
    if found is not None:
        where = f"{what} {found.index} is {found.one} on rank 0, and {found.other} on rank {first}"
    return PlanMismatch(
        f"the trainer's ranks do not bring the same tensors at step {mine.step}: rank 0 differs from "
        f"{named(others)}; {where}"
    )


def lost(ranks: Iterable[int], why: str) -> RankLost:
    """These ranks are."""
    return RankLost(f"{named(ranks)} of the trainer: {why}")


# -- are they alive? --------------------------------------------------------------------------------------


class Pulses:
    """Beats that are read now and then: whose stopped?

    Args:
        ranks: to listen for.
        now: when listening begins; a rank that never beats is silent from then on.
    """

    def __init__(self, ranks: Iterable[int], now: float) -> None:
        self._last: dict[int, tuple[object, float]] = dict.fromkeys(ranks, (None, now))

    def heard(self, rank: int, beat: object, now: float) -> None:
        """This was read; the same as before is no beat."""
        if beat is not None and beat != self._last[rank][0]:
            self._last[rank] = (beat, now)

    def silent(self, now: float, limit: float) -> list[int]:
        """Whoever has not beaten for ``limit`` seconds."""
        return [rank for rank, (_, at) in self._last.items() if now - at >= limit]


# -- what is told -----------------------------------------------------------------------------------------


def error_told(error: BaseException) -> dict[str, str]:
    """An error as plain values."""
    return {"kind": type(error).__name__, "text": str(error)}


def error_from(told: Mapping[str, str]) -> WeightSyncError:
    """The error on another rank: of its own kind if that is ours and takes a text, else told."""
    kind, text = told["kind"], told["text"]
    found = _ours(WeightSyncError).get(kind)
    if found is not None:
        return found(text)
    return RaisedElsewhere(f"rank 0 raised {kind}: {text}")


def _ours(kind: type[WeightSyncError]) -> dict[str, type[WeightSyncError]]:
    """The errors of this package, wherever in it they are; a user's are not made by their name."""
    found = {kind.__name__: kind} if kind.__module__.startswith(f"{__package__}.") else {}
    for each in kind.__subclasses__():
        found.update(_ours(each))
    return found


def result_told(result: RoundResult) -> dict[str, Any]:
    """A round's result as plain values; of errors their kind and text."""
    why = result.passed_over
    return {
        "round": result.round, "step": result.step, "version": result.version, "epoch": result.epoch,
        "attempts": result.attempts, "outcome": result.outcome.name, "published": result.published,
        "engines": [_row_told(row) for row in result.engines], "path": list(result.path),
        "seconds": dict(result.seconds), "error": error_told(result.error) if result.error else None,
        "culprit": result.culprit, "bucket": result.bucket, "failed_in": result.failed_in,
        "unclean": result.unclean, "notes": list(result.notes),
        "passed_over": asdict(why) if why is not None else None,
    }  # fmt: skip


def result_from(told: Mapping[str, Any]) -> RoundResult:
    """The same result on another rank. Receipts stay where they were proved."""
    why = told["passed_over"]
    return RoundResult(
        round=told["round"], step=told["step"], version=told["version"], epoch=told["epoch"],
        attempts=told["attempts"], outcome=Outcome[told["outcome"]], published=told["published"],
        engines=tuple(_row_from(row) for row in told["engines"]), path=tuple(told["path"]),
        seconds=told["seconds"], error=error_from(told["error"]) if told["error"] else None,
        culprit=told["culprit"], bucket=told["bucket"], failed_in=told["failed_in"],
        unclean=told["unclean"], notes=tuple(told["notes"]),
        passed_over=PassedOver(**why) if why is not None else None,
    )  # fmt: skip


def _row_told(row: EngineRow) -> list[Any]:
    error = error_told(row.error) if row.error else None
    what = row.disposition.name
    return [row.engine, row.incarnation, what, row.version, row.tensors, row.bytes, row.pause_seconds, error]


def _row_from(told: list[Any]) -> EngineRow:
    engine, incarnation, what, version, tensors, octets, pause, error = told
    return EngineRow(
        engine, incarnation, Disposition[what], version, tensors, octets, (), pause,
        error_from(error) if error else None,
    )  # fmt: skip

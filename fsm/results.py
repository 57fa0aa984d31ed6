"""What a caller gets when a round is over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .errors import SyncFailed
from .receipt import Receipt
from .states import Disposition, Outcome

__all__ = ["EngineRow", "PassedOver", "RoundResult", "passed_over"]


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine's part in a round.

    Args:
        engine: its id.
        incarnation: which life of it took part.
        disposition: what it is now.
        version: the version it serves by what the round knows; None if it is quarantined.
        tensors: how many tensors its receipts prove.
        bytes: how many bytes.
        receipts: one a rank; empty if it never proved anything.
        pause_seconds: from asking it to pause until it served again, or until the round was over.
        error: why it was lost, if it was.
    """

    engine: str
    incarnation: str
    disposition: Disposition
    version: int | None
    tensors: int
    bytes: int
    receipts: tuple[Receipt, ...]
    pause_seconds: float
    error: BaseException | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PassedOver:
    """Why weights had no round of their own.

    Args:
        how: ``"skipped"``, a round was running; ``"superseded"`` by newer weights while they waited; or
            ``"nobody"`` had to catch up.
        behind: by how many hand-overs the engines were behind the trainer at that moment, these included; 0
            for weights that are older than what engines had by then.
        by_step: the step whose weights took their place.
        by_version: the number of those; None if they never got one.
    """

    how: Literal["skipped", "superseded", "nobody"]
    behind: int
    by_step: int | None = None
    by_version: int | None = None


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The sum of a round.

    Args:
        version: the number of the weights; -1 if they were passed over, and so have none.
        published: ``"unknown"`` means asked and never answered; treat it as published.
        path: the states the round went through, in order.
        seconds: seconds spent in each state it left.
        error: the first error, the very object that was raised; None when the round never was in Failed.
        culprit: the engine the first error came from, if it came from one.
        failed_in: the state in which the first error came.
        unclean: put-back work did not succeed; what is left over is fenced.
        notes: later errors, one line each.
        passed_over: why there was no round, if there was none. That is no failure, and not ``ok`` either: the
            engines do not have these weights.
    """

    round: str
    step: int
    version: int
    epoch: int
    attempts: int
    outcome: Outcome
    published: Literal["yes", "no", "unknown"]
    engines: tuple[EngineRow, ...]
    path: tuple[str, ...]
    seconds: Mapping[str, float]
    error: BaseException | None = field(default=None, compare=False)
    culprit: str | None = None
    bucket: int | None = None
    failed_in: str | None = None
    unclean: bool = False
    notes: tuple[str, ...] = ()
    passed_over: PassedOver | None = None

    @property
    def ok(self) -> bool:
        """Published, the quorum serves it, and nothing went wrong on the way that needs a look."""
        return self.outcome in (Outcome.complete, Outcome.partial) and self.error is None

    @property
    def pause_seconds(self) -> float:
        """The longest pause of an engine, in seconds."""
        return max((row.pause_seconds for row in self.engines), default=0.0)

    def serving(self, disposition: Disposition) -> tuple[str, ...]:
        """The engines with that disposition, by id."""
        return tuple(row.engine for row in self.engines if row.disposition is disposition)

    def require(self) -> RoundResult:
        """This result, if the round did what was asked, or if the policy asked for no round.

        Raises:
            SyncFailed: it did not; ``__cause__`` is the first error, and the message names round, state,
                culprit and bucket.
        """
        if self.ok or self.passed_over is not None:
            return self
        failure = SyncFailed(self.summary())
        for note in self.notes:
            failure.add_note(note)
        raise failure from self.error

    def summary(self) -> str:
        """One line: what happened, where, and what it means for the engines."""
        if self.passed_over is not None:
            return f"step {self.step}: {_instead(self.passed_over)}"
        if self.ok:
            serving = f"{self.outcome.name} on {len(self.engines)} engines"
            return f"round {self.round}: version {self.version} {serving}"
        why = f": {type(self.error).__name__}: {self.error}" if self.error is not None else ""
        states = "; ".join(f"{row.engine} {row.disposition.name}" for row in self.engines)
        return (
            f"round {self.round} (step {self.step}, version {self.version}, "
            f"published: {self.published}) failed"
            f"{self._where()}{why} [{states}]"
        )

    def __str__(self) -> str:
        """One short line for a log: number, outcome, path or culprit, seconds."""
        if self.passed_over is not None:
            return f"step {self.step}: {_instead(self.passed_over)}"
        seconds = sum(self.seconds.values())
        told = f"round {self.round} (step {self.step}): version {self.version} {self.outcome.name}"
        if self.ok:
            out = [row.engine for row in self.engines if row.disposition is not Disposition.serving_new]
            without = f" without {', '.join(out)}" if out else ""
            return f"{told}{without} by {' > '.join(self.path)} in {seconds:.3g} s"
        trouble = f"{', trouble' if self.outcome is not Outcome.failed else ''}{self._where()}"
        why = str(self.error).strip().partition("\n")[0]
        because = f": {type(self.error).__name__}: {why}" if self.error is not None else ""
        return f"{told}{trouble} after {seconds:.3g} s{because}"

    def _where(self) -> str:
        """Where it went wrong, as far as that is known."""
        where = f" in {self.failed_in}" if self.failed_in else ""
        who = f", engine {self.culprit}" if self.culprit else ""
        what = f", bucket {self.bucket}" if self.bucket is not None else ""
        return f"{where}{who}{what}"


def _instead(why: PassedOver) -> str:
    if why.how == "nobody":
        return "not sent, no engine has to catch up now"
    if why.how == "skipped":
        return f"not sent, a round is in progress; the engines are {why.behind} hand-overs behind"
    number = "without a number" if why.by_version is None else f"version {why.by_version}"
    return f"not sent, the weights of step {why.by_step} took their place ({number})"


def passed_over(step: int, why: PassedOver) -> RoundResult:
    """What a caller gets for weights that had no round of their own."""
    return RoundResult(
        round="", step=step, version=-1, epoch=0, attempts=0, outcome=Outcome.passed_over, published="no",
        engines=(), path=(), seconds={}, passed_over=why,
    )  # fmt: skip

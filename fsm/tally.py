"""What a round adds up to: the numbers of each engine while it runs, the result when it is over."""

from __future__ import annotations

from typing import Literal

from .errors import RoundError
from .facts import Facts
from .receipt import Participant, Receipt
from .record import Record
from .results import EngineRow, RoundResult
from .round import Round
from .states import Disposition, Outcome, Publication, State

__all__ = ["Tally"]

_PUBLISHED: dict[Publication, Literal["yes", "no", "unknown"]] = {
    Publication.yes: "yes",
    Publication.no: "no",
    Publication.unknown: "unknown",
}


class Tally:
    """Collects pauses, receipts and errors of one round. Times are the driver's clock, in seconds."""

    def __init__(self) -> None:
        self._paused: dict[Participant, float] = {}
        self._resumed: dict[Participant, float] = {}
        self._receipts: dict[Participant, tuple[Receipt, ...]] = {}
        self._errors: dict[Participant, BaseException] = {}
        self._states: dict[Participant, State] = {}
        self._misfits: dict[Participant, BaseException] = {}
        self.notes: list[str] = []

    def paused(self, engine: Participant, at: float) -> None:
        """It was asked to pause."""
        self._paused.setdefault(engine, at)

    def resumed(self, engine: Participant, at: float) -> None:
        """It serves again."""
        self._resumed.setdefault(engine, at)

    def proved(self, engine: Participant, receipts: tuple[Receipt, ...]) -> None:
        """It answered with receipts."""
        self._receipts[engine] = receipts

    def blamed(self, engine: Participant, error: BaseException | None, state: State) -> None:
        """It was lost in ``state``; the first reason counts."""
        if error is not None and engine not in self._errors:
            self._errors[engine] = error
            self._states[engine] = state

    def refused_plan(self, engine: Participant, error: BaseException) -> None:
        """It says that the plan does not fit. That alone puts it out of nothing: what does is ``blamed``."""
        self._misfits[engine] = error

    def later(self, first: BaseException | None, error: BaseException, where: str) -> None:
        """An error after the first one: attached to it as a note, and never in its place."""
        line = f"later, {where}: {type(error).__name__}: {error}"
        if line in self.notes:
            return
        self.notes.append(line)
        if first is not None and first is not error:
            first.add_note(line)

    def result(self, round: Round, at: float) -> RoundResult:
        """The result of a round that is over.

        Raises:
            RoundError: it is not Released.
        """
        if round.state is not State.Released:
            raise RoundError(f"round {round.facts.round} is {round.state.name}: its result is not decided")
        facts, records = round.facts, round.records()
        culprit, error = self._first(facts)
        opened = records[0]
        return RoundResult(
            round=facts.round,
            step=opened.step or 0,
            version=facts.version,
            epoch=facts.epoch,
            attempts=opened.attempt or 1,
            outcome=facts.outcome,
            published=_PUBLISHED[facts.publication],
            engines=tuple(self._row(facts, engine, at) for engine in sorted(facts.roster)),
            path=_path(records),
            seconds=_seconds(records),
            error=error,
            culprit=culprit.id if culprit else None,
            bucket=_bucket(facts),
            failed_in=self._failed_in(facts, culprit),
            unclean=facts.unclean,
            notes=tuple(self.notes),
        )

    def _first(self, facts: Facts) -> tuple[Participant | None, BaseException | None]:
        """Whom and what a failure is blamed on: the way into Failed, else the first engine that was lost."""
        if facts.cause is not None and facts.cause.error is not None:
            return facts.cause.engine or self._whose(facts.cause.error), facts.cause.error
        if facts.cause is not None or facts.outcome is Outcome.failed:
            return next(iter(self._errors.items()), (None, None))
        return None, None

    def _whose(self, error: BaseException) -> Participant | None:
        told = [*self._errors.items(), *self._misfits.items()]
        return next((engine for engine, each in told if each is error), None)

    def _failed_in(self, facts: Facts, culprit: Participant | None) -> str | None:
        """Where the first error came: also one after the publication, which leads to Failed no more."""
        if facts.cause is not None:
            return facts.cause.state.name
        return self._states[culprit].name if culprit is not None else None

    def _row(self, facts: Facts, engine: Participant, at: float) -> EngineRow:
        what = facts.disposition(engine)
        receipts = self._receipts.get(engine, ())
        begun = self._paused.get(engine)
        pause = 0.0 if begun is None else self._resumed.get(engine, at) - begun
        return EngineRow(
            engine=engine.id,
            incarnation=engine.incarnation,
            disposition=what,
            version=facts.version if what is Disposition.serving_new else None,
            tensors=min((receipt.tensors for receipt in receipts), default=0),
            bytes=sum(receipt.bytes for receipt in receipts),
            receipts=receipts,
            pause_seconds=pause,
            error=self._errors.get(engine, self._misfits.get(engine)),
        )


def _path(records: tuple[Record, ...]) -> tuple[str, ...]:
    moves = [r.target for r in records if r.event == "transition" and r.source != r.target]
    return (State.Idle.name, *(target for target in moves if target))


def _seconds(records: tuple[Record, ...]) -> dict[str, float]:
    return {
        r.source: r.seconds
        for r in records
        if r.event == "transition" and r.source != r.target and r.source and r.seconds is not None
    }


def _bucket(facts: Facts) -> int | None:
    """The bucket the first error is about: the engine's own word, else the one that was being sent."""
    if facts.cause is None:
        return None
    told = getattr(facts.cause.error, "bucket", None) if facts.cause.engine is not None else None
    if isinstance(told, int):
        return told
    under_way = facts.cause.state is State.Broadcasting and facts.sent < facts.buckets
    return facts.sent if under_way else None

"""The conductor: from weights whose turn has come to rounds, and from rounds to what the books say.

An ordinary hand-over is a round of everybody, tried again as often as the policy says. An engine that is
quarantined takes part in it, unless it rests or comes back by rounds of its own. To *catch up* is a round of
those engines alone that do not hold the published version, with that version, if these are its bytes; and an
ordinary round with the next version if they are not.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from .books import EngineBooks
from .fsm.contract import Clock, EngineLink, Transport, Weights
from .fsm.driver import Driver
from .fsm.errors import RoundTimedOut, WeightSyncError
from .fsm.executors import Executor
from .fsm.facts import opening
from .fsm.ledger import LedgerKeeper, StaleVersion, VersionBound
from .fsm.lock import LockKeeper
from .fsm.plan import Plan
from .fsm.policy import Policy
from .fsm.receipt import Participant
from .fsm.results import PassedOver, RoundResult, passed_over
from .fsm.round import Identity, Round
from .fsm.setting import Setting
from .fsm.states import Outcome
from .handlers.crew import Parts, digest_of_weights
from .handlers.leader import Leader
from .handlers.loop import RoundLoop
from .handlers.observers import Observers
from .handlers.workers import Workers
from .joining import export_of, name_of
from .pending import Pending

__all__ = ["Conductor", "Stage"]

_TAKEN = (StaleVersion, VersionBound)
_AHEAD = 1 << 6
"""How far ahead of the newest version a number is chosen at most, when others keep taking the next ones."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Everybody who takes part, and stays from round to round."""

    policy: Policy
    owner: str
    books: EngineBooks
    transport: Transport
    executors: tuple[Executor, ...]
    lock: LockKeeper
    ledger: LedgerKeeper
    observers: Observers
    workers: Workers
    clock: Clock
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    """By what the rounds of one trainer's life are told from those of the next, in the log."""


@dataclass(frozen=True, slots=True)
class _Cast:
    """Whom a round asks for, and who is lost to it from the beginning."""

    roster: dict[Participant, EngineLink]
    quorum: int
    lost: dict[Participant, BaseException]
    begun: float


class Conductor:
    """Runs hand-overs, one at a time.

    Args:
        stage: everybody.
        numbered: told the number of a hand-over's weights, when they have one.
        leader: of a trainer of several ranks.
    """

    def __init__(
        self, stage: Stage, numbered: Callable[[Pending, int], None], leader: Leader | None = None
    ) -> None:
        self._stage, self._numbered, self._leader = stage, numbered, leader

    def run(self, pending: Pending, weights: Weights) -> RoundResult:
        """Carry a hand-over out, and write down what came of it; with the other ranks, if there are any."""
        if self._leader is None:
            return self._conduct(pending, weights)
        return self._leader.lead(
            pending.step, pending.kind, lambda: self._plan(weights), pending,
            lambda: self._conduct(pending, weights), export=export_of(weights),
        )  # fmt: skip

    def _conduct(self, pending: Pending, weights: Weights) -> RoundResult:
        if pending.catches_up:
            return self._catch_up(pending, weights)
        result = self._hand_over(pending, weights)
        if self._stage.policy.catch_up == "apart" and result.outcome is Outcome.partial:
            self._bring_back(pending, weights, result.version)
        return result

    # -- everybody -------------------------------------------------------------------------------------------

    def _hand_over(self, pending: Pending, weights: Weights) -> RoundResult:
        """A retry is a new round with a fresh membership and a full resend."""
        attempt = ahead = 1
        taken: list[int] = []
        while True:
            cast = self._everybody(pending)
            version = self._version_of(pending, weights, ahead)
            self._numbered(pending, version)
            result = self._round(pending, weights, version, cast, attempt)
            done = result.outcome is not Outcome.failed  # if not without trouble: the bytes are there
            if done or pending.cancelled is not None:
                return _with_taken(result, taken)
            if pending.version is None and isinstance(result.error, _TAKEN) and ahead < _AHEAD:
                # Another trainer took the number while this one waited for the lock. Those who wait with it
                # take the next ones: to be done once it has to be further ahead than they are.
                ahead *= 2
                taken.append(version)
                continue
            if attempt >= self._stage.policy.attempts:
                return _with_taken(result, taken)
            attempt += 1

    def _everybody(self, pending: Pending) -> _Cast:
        begun = self._take_in()
        books, policy = self._stage.books, self._stage.policy
        quorum = policy.quorum_of(len(books.links))
        resting = books.resting(quorum, apart=policy.catch_up == "apart")
        begun = self._ask(pending, begun, spare=len(books.links) - quorum, without=resting)
        self._compare_epochs()
        cast = self._cast(quorum, begun, books.links, resting)
        refusal = self._refusal(cast)
        if refusal is not None:
            raise refusal
        return cast

    def _refusal(self, cast: _Cast) -> BaseException | None:
        """Why this round cannot work, whatever is done under the lock."""
        if len(cast.roster) - len(cast.lost) >= cast.quorum:
            return None
        return self._stage.books.refusal({member.id for member in cast.roster})

    def _compare_epochs(self) -> None:
        """Who has seen a newer epoch than the lock has granted would refuse every session of ours."""
        stage = self._stage
        if not stage.books.newest_epoch():
            return
        status = stage.workers.submit(stage.lock.status)
        # A keeper that does not answer will not answer the round either, which knows what to do then.
        with suppress(TimeoutError, WeightSyncError):
            stage.books.taken(status.result(timeout=stage.policy.limits().engine).epoch)

    def _ask(
        self,
        pending: Pending,
        begun: float,
        *,
        spare: int | None = None,
        everybody: bool = False,
        without: Collection[str] = (),
    ) -> float:
        """Ask the engines who they are; when the round's time began.

        A first contact has a limit of its own: what it takes beyond an engine's is not the round's time.
        """
        limits = self._stage.policy.limits()
        self._stage.books.refresh(
            limits.engine, first=limits.first_contact, spare=spare, everybody=everybody, without=without,
            stopped=lambda: pending.cancelled is not None, before_a_round=True,
        )  # fmt: skip
        return max(begun, self._stage.clock.now() - limits.engine)

    # -- who has to catch up ---------------------------------------------------------------------------------

    def _catch_up(self, pending: Pending, weights: Weights) -> RoundResult:
        begun, books = self._take_in(), self._stage.books
        resting = books.resting(0)
        begun = self._ask(pending, begun, everybody=True, without=resting)
        self._compare_epochs()
        published = self._stage.ledger.current()
        behind = books.behind(published.version)
        if not behind:
            return passed_over(pending.step, PassedOver("nobody", 0))
        version = published.version
        same = self._stage.policy.verify != "off" and version is not None
        if same and self._in_time(self._digest, weights, version or 0) == published.digest:
            cast = self._apart(behind, begun)
            refusal = self._refusal(cast)
            if refusal is not None:
                raise refusal
            return self._round(pending, weights, version or 0, cast, 1)
        return self._hand_over(pending, weights)

    def _bring_back(self, pending: Pending, weights: Weights, version: int) -> None:
        """Whoever is not there yet gets the very bytes that the others have, beside whatever they do now."""
        begun, books = self._take_in(), self._stage.books
        behind = books.behind(version)
        if behind and pending.cancelled is None:
            resting = books.resting(0)
            begun = self._ask(pending, begun, without=resting)
            self._compare_epochs()
            cast = self._apart(behind, begun)
            if self._refusal(cast) is None:  # else the others have these weights all the same
                self._round(pending, weights, version, cast, 1)

    def _apart(self, behind: list[str], begun: float) -> _Cast:
        """These alone, for one attempt: the rest between two of them is the engine's."""
        some = self._stage.policy.on_engine_failure == "quarantine"
        quorum = 1 if some and self._stage.transport.capabilities.survives_loss else len(behind)
        return self._cast(quorum, begun, behind)

    # -- a round ---------------------------------------------------------------------------------------------

    def _take_in(self) -> float:
        """Begin a round's time, and take in who was added or removed since the last one."""
        begun = self._stage.clock.now()
        for link in self._stage.books.take_in():
            link.close()
        return begun

    def _cast(
        self,
        quorum: int,
        begun: float,
        names: Iterable[str],
        resting: Mapping[str, BaseException] | None = None,
    ) -> _Cast:
        books, chosen = self._stage.books, set(names)
        roster = {member: link for member, link in books.roster().items() if member.id in chosen}
        why = {**{member.id: error for member, error in books.unreachable().items()}, **(resting or {})}
        lost = {member: why[member.id] for member in roster if member.id in why}
        return _Cast(roster, quorum, lost, begun)

    def _round(
        self, pending: Pending, weights: Weights, version: int, cast: _Cast, attempt: int
    ) -> RoundResult:
        stage, clock, policy = self._stage, self._stage.clock, self._stage.policy
        limits = policy.limits()
        limits = replace(limits, forward=limits.forward - (clock.now() - cast.begun))
        facts = opening(
            round=uuid.uuid4().hex[:12],
            version=version,
            roster=cast.roster,
            quorum=cast.quorum,
            inplace=stage.books.inplace(),
            tainted=stage.books.tainted(),
        )
        identity = Identity(pending.step, attempt, stage.owner)
        setting = Setting(stage.run, name_of(stage.lock), name_of(stage.ledger), limits)
        opened = Round.open(facts, identity, at=clock.now(), wall=clock.wall(), setting=setting)
        self._note_recovery(opened, cast)
        driver = Driver(opened, limits, [executor.name for executor in stage.executors], clock)
        parts = Parts(
            lock=stage.lock, ledger=stage.ledger, transport=stage.transport, links=cast.roster,
            executors=stage.executors, weights=weights, owner=stage.owner, step=pending.step,
            attempt=attempt, bucket_bytes=policy.bucket_bytes, part=policy.part(version),
            copied=pending.copied,
        )  # fmt: skip
        loop = RoundLoop(driver, parts, workers=stage.workers, observers=stage.observers, clock=clock)
        for engine, error in cast.lost.items():
            loop.lost(engine, error)
        stage.books.begun(lambda: driver.round.facts.epoch)
        pending.started(loop)
        result = loop.run()
        stage.books.settle(result)
        return result

    def _note_recovery(self, opened: Round, cast: _Cast) -> None:
        """Whom this round is to bring back, at which try; who rests is lost by name, and says until when."""
        lost = {member.id for member in cast.lost}
        tries = {
            name: tried + 1
            for name, tried in self._stage.books.recovering().items()
            if name not in lost and name in {member.id for member in cast.roster}
        }
        if tries:
            opened.note("recovery", wall=self._stage.clock.wall(), facts={"tries": tries})

    # -- the number ------------------------------------------------------------------------------------------

    def _version_of(self, pending: Pending, weights: Weights, ahead: int) -> int:
        """The number for these weights: the caller's, if the ledger admits it, or a free one."""
        stage = self._stage
        if pending.version is None:
            known = (stage.ledger.current().newest, stage.books.newest())
            return max((each for each in known if each is not None), default=-1) + ahead
        stage.ledger.admit(pending.version, self._in_time(self._digest, weights, pending.version))
        return pending.version

    def _in_time(self, work: Callable[[Weights, int], str], weights: Weights, version: int) -> str:
        limit = self._stage.policy.limits().idle
        try:
            return str(self._stage.workers.submit(work, weights, version).result(timeout=limit))
        except TimeoutError as error:
            raise RoundTimedOut(f"the weights could not be read within {limit:.3g} s") from error

    def _digest(self, weights: Weights, version: int) -> str:
        """What a version's number is bound to."""
        plan, part = self._plan(weights), self._stage.policy.part(version)
        return plan.fingerprint if part is None else digest_of_weights(weights, part)

    def _plan(self, weights: Weights) -> Plan:
        weights.materialize()
        return weights.plan(self._stage.policy.bucket_bytes)


def _with_taken(result: RoundResult, taken: list[int]) -> RoundResult:
    """The rounds that were lost over a number are in the log; that there were some is told here, too."""
    if not taken:
        return result
    numbers = ", ".join(map(str, taken))
    note = f"another trainer took version {numbers} meanwhile; the log has the rounds that failed over it"
    return replace(result, notes=(*result.notes, note))

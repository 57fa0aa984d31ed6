"""How sessions end before their time: aborts, stale words, newer trainers, other lives, errors."""

from __future__ import annotations

import torch

from ...fsm.engine import Answer
from ...fsm.engine_table import Session
from ...fsm.errors import EngineGone, PlanError, StaleSession
from ...fsm.states import EngineState
from ...transports.weights import TorchWeights
from .engine_rules import (
    ABORT_ANSWERS,
    ABORT_ENDS_RECEPTION,
    ERRORS_AS_RAISED,
    INCARNATION,
    NEWER_WINS,
    PLAN_IS_CHECKED,
    REVERTS,
    SAID_TWICE,
    SERVES_NEW,
    STALE_IS_REFUSED,
)
from .given import GivenError
from .rules import Check, checked
from .visit import EngineUnderTest, Visit

__all__ = ["ENDINGS"]

ENDINGS: list[Check[EngineUnderTest]] = []


@checked(ENDINGS, "abort-unopened")
def abort_unopened(tested: EngineUnderTest) -> None:
    """An abort that overtakes the open ends the session for ever; nothing else changes."""
    with Visit(tested) as visit:
        before, session = visit.content(), visit.session()
        told = visit.answer(
            ABORT_ANSWERS, visit.ask(visit.link.abort, session), "abort of a session never opened"
        )
        ABORT_ANSWERS.unless(told is Answer.reverted, f"it says {told}")
        visit.error(STALE_IS_REFUSED, visit.opening(session), "open after its abort", StaleSession)
        REVERTS.unless(
            visit.content() == before and visit.admits(), "an abort of what was never open changed something"
        )


@checked(ENDINGS, "abort-paused", "paused")
@checked(ENDINGS, "abort-receiving", "receiving")
@checked(ENDINGS, "abort-acked", "acked")
def abort_restores(tested: EngineUnderTest, where: str) -> None:
    """An abort before the commit: old weights bit for bit, or quarantine; a second one says the same."""
    with Visit(tested) as visit:
        before = visit.content()
        session = visit.acked() if where == "acked" else visit.opened()
        receiving = visit.receiving(session, "hang", 1) if where == "receiving" else None
        if receiving is not None:
            visit.becomes(SERVES_NEW, EngineState.Receiving)
        whole = visit.status().stages or where == "paused"
        for _ in range(2):
            told = visit.answer(
                ABORT_ENDS_RECEPTION, visit.ask(visit.link.abort, session), f"abort of {where}"
            )
            wanted = Answer.reverted if whole else Answer.torn
            ABORT_ANSWERS.unless(
                told is wanted, f"it says {told} of a session that was {where}, and is {wanted}"
            )
        if receiving is not None:
            visit.error(ABORT_ENDS_RECEPTION, receiving, "receive after the abort")
        visit.becomes(REVERTS, EngineState.Serving if whole else EngineState.Quarantined)
        REVERTS.unless(
            not whole or visit.content() == before, "the weights are not what they were before the session"
        )
        if whole:
            REVERTS.unless(visit.admits(), "it is whole, and admits no generation after an abort")
        else:
            REVERTS.unless(not visit.subject.admits(), "it holds a mix, and admits generation")
        visit.error(
            STALE_IS_REFUSED, visit.ask(visit.link.commit, session), "commit after abort", StaleSession
        )
        visit.round()


@checked(ENDINGS, "abort-committed")
def abort_committed(tested: EngineUnderTest) -> None:
    """What was committed stays so, whoever aborts; the word to resume still counts."""
    with Visit(tested) as visit:
        session = visit.committed()
        for _ in range(2):
            told = visit.answer(ABORT_ANSWERS, visit.ask(visit.link.abort, session), "abort after commit")
            ABORT_ANSWERS.unless(told is Answer.committed, f"it says {told} after its commit")
        visit.answer(SAID_TWICE, visit.ask(visit.link.resume, session), "resume after an abort after commit")
        visit.serves(session)


@checked(ENDINGS, "stale-words")
def stale_words(tested: EngineUnderTest) -> None:
    """Words of a session that is over are refused, before and after the next one is opened, which goes on."""
    with Visit(tested) as visit:
        old = visit.opened()
        visit.answer(ABORT_ANSWERS, visit.ask(visit.link.abort, old), "abort")
        _refused(visit, old)
        session = visit.acked()
        _refused(visit, old)
        older = Session("kit-older", 0, 0)
        visit.error(STALE_IS_REFUSED, visit.opening(older), "open of an older epoch", StaleSession)
        visit.answer(STALE_IS_REFUSED, visit.ask(visit.link.commit, session), "commit, after stale words")
        visit.answer(STALE_IS_REFUSED, visit.ask(visit.link.resume, session), "resume, after stale words")
        visit.serves(session)


def _refused(visit: Visit, old: Session) -> None:
    visit.error(STALE_IS_REFUSED, visit.opening(old), "open of what is over", StaleSession)
    for word in (visit.link.commit, visit.link.resume):
        what = f"{word.__name__} of a session that is over"
        visit.error(STALE_IS_REFUSED, visit.ask(word, old), what, StaleSession)
    visit.error(STALE_IS_REFUSED, visit.receiving(old), "receive of a session that is over", StaleSession)


@checked(ENDINGS, "newer-session")
def newer_session(tested: EngineUnderTest) -> None:
    """A newer trainer takes over from one that is stuck."""
    with Visit(tested) as visit:
        old = visit.opened()
        receiving = visit.receiving(old, "hang", 1)
        visit.becomes(SERVES_NEW, EngineState.Receiving)
        session, visit.fill = visit.session(), 44
        visit.answer(NEWER_WINS, visit.opening(session, visit.fill), "open of a newer session")
        visit.error(NEWER_WINS, receiving, "receive of the older session")
        visit.error(
            NEWER_WINS, visit.ask(visit.link.commit, old), "commit of the older session", StaleSession
        )
        visit.answer(NEWER_WINS, visit.receiving(session), "receive of the newer session")
        visit.answer(NEWER_WINS, visit.ask(visit.link.commit, session), "commit of the newer session")
        visit.answer(NEWER_WINS, visit.ask(visit.link.resume, session), "resume of the newer session")
        visit.serves(session)


@checked(ENDINGS, "newer-abort")
def newer_abort(tested: EngineUnderTest) -> None:
    """A newer trainer fails before it opens anything: what it is told of the engine is so."""
    with Visit(tested) as visit:
        before, old = visit.content(), visit.opened()
        told = visit.answer(
            NEWER_WINS, visit.ask(visit.link.abort, visit.session()), "abort of a newer session"
        )
        NEWER_WINS.unless(told is Answer.reverted, f"it says {told}, and an older session had only paused it")
        visit.becomes(NEWER_WINS, EngineState.Serving)
        NEWER_WINS.unless(
            visit.content() == before and visit.admits(), "it says that it reverted, and admits no generation"
        )
        visit.error(
            NEWER_WINS, visit.ask(visit.link.commit, old), "commit of the older session", StaleSession
        )
        visit.round()


@checked(ENDINGS, "another-incarnation")
def another_incarnation(tested: EngineUnderTest) -> None:
    """An open that is meant for another life of the engine is refused before anything happens."""
    with Visit(tested) as visit:
        before = visit.status()
        opening = visit.opening(visit.session(), incarnation="another life")
        visit.error(INCARNATION, opening, "open for another incarnation", EngineGone)
        INCARNATION.unless(
            visit.status() == before and visit.admits(), f"it was {before}, and is {visit.status()}"
        )


@checked(ENDINGS, "plan-that-does-not-fit")
def plan_that_does_not_fit(tested: EngineUnderTest) -> None:
    """A plan with a tensor too many, or another shape, is refused while generation goes on."""
    with Visit(tested) as visit:
        state = dict(visit.weights.tensors)
        name = next(iter(state))
        for other in ({**state, "kit.more": torch.zeros(3)}, {**state, name: torch.zeros(1, 2, 3, 5)}):
            plan = TorchWeights.of(other).plan(1 << 20)
            with visit.subject.generating():
                opening = visit.opening(visit.session(), plan=plan, limit=visit.patience)
                visit.error(PLAN_IS_CHECKED, opening, "open with a plan that does not fit", PlanError)
            status = visit.status()
            PLAN_IS_CHECKED.unless(
                status.state is EngineState.Serving and visit.admits(), f"it is {status} after that"
            )


@checked(ENDINGS, "errors-come-out")
def errors_come_out(tested: EngineUnderTest) -> None:
    """An error in the middle of a reception comes out as it was raised."""
    with Visit(tested) as visit:
        session = visit.opened()
        error = visit.error(ERRORS_AS_RAISED, visit.receiving(session, "raise", 1), "receive", GivenError)
        ERRORS_AS_RAISED.unless(
            str(error) == "injected at bucket 1", f"the words of the error became {str(error)!r}"
        )
        wanted = EngineState.Serving if visit.status().stages else EngineState.Quarantined
        visit.becomes(REVERTS, wanted)
        visit.round()

"""Engines that are busy, stuck, left alone, closed, dead or started again: nobody waits for ever."""

from __future__ import annotations

from ...fsm.engine import Answer
from ...fsm.errors import EngineGone, EngineSilent, StaleSession
from ...fsm.states import EngineState
from ...handlers.threads import spawn
from .engine_rules import (
    ABORT_ANSWERS,
    ABORT_ENDS_RECEPTION,
    ANSWERS_AT_ONCE,
    BUSY_IS_NOT_DEAD,
    CLOSE_IS_THE_LINKS,
    DRAIN_IS_BOUNDED,
    GONE_AT_ONCE,
    HELLO,
    INCARNATION,
    LINK_LEAVES_NOTHING,
    OPEN_PAUSES,
    OWN_LIMIT,
    REVERTS,
    SERVES_NEW,
    STALE_IS_REFUSED,
)
from .residue import census, growth
from .rules import Check, checked, eventually
from .visit import EngineUnderTest, Visit

__all__ = ["LIMITS"]

LIMITS: list[Check[EngineUnderTest]] = []


@checked(LIMITS, "never-blocks")
def never_blocks(tested: EngineUnderTest) -> None:
    """While a generation does not end and an open waits for it, every word gives its future at once."""
    with Visit(tested) as visit:
        stale = visit.said[-1]
        with visit.subject.generating():
            session = visit.session()
            opening = visit.opening(session)
            words = [
                visit.ask(word, stale) for word in (visit.link.commit, visit.link.resume, visit.link.abort)
            ]
            status = visit.answer(
                BUSY_IS_NOT_DEAD, visit.ask(visit.link.hello), "hello of an engine that generates"
            )
            BUSY_IS_NOT_DEAD.unless(status.incarnation == visit.incarnation, "it says that it is another one")
            OPEN_PAUSES.unless(not opening.done(), "open was answered while a generation was under way")
            told = visit.answer(
                ABORT_ANSWERS, visit.ask(visit.link.abort, session), "abort of an open that waits"
            )
            ABORT_ANSWERS.unless(told is Answer.reverted, f"it says {told}")
            visit.error(STALE_IS_REFUSED, opening, "an open that was aborted", StaleSession)
            for word in words:
                gone = isinstance(word.exception(visit.patience), EngineGone)
                BUSY_IS_NOT_DEAD.unless(not gone, "a word to an engine that generates failed with EngineGone")


@checked(LIMITS, "busy-receiving")
def busy_receiving(tested: EngineUnderTest) -> None:
    """An engine whose reception is stuck answers, and says that it receives."""
    with Visit(tested) as visit:
        session = visit.opened()
        receiving = visit.receiving(session, "hang", 1)
        visit.becomes(BUSY_IS_NOT_DEAD, EngineState.Receiving)
        ANSWERS_AT_ONCE.unless(not receiving.done(), "receive was answered before anything arrived")
        visit.answer(
            ABORT_ENDS_RECEPTION, visit.ask(visit.link.abort, session), "abort of a reception that is stuck"
        )
        visit.error(ABORT_ENDS_RECEPTION, receiving, "the reception that was aborted")


@checked(LIMITS, "drain-is-bounded")
def drain_is_bounded(tested: EngineUnderTest) -> None:
    """A generation that does not end fails the open by its limit; the engine serves on."""
    with Visit(tested) as visit:
        with visit.subject.generating():
            opening = visit.opening(visit.session(), limit=0.3)
            visit.error(DRAIN_IS_BOUNDED, opening, "open while a generation does not end", EngineSilent)
            DRAIN_IS_BOUNDED.unless(visit.status().state is EngineState.Serving, f"it is {visit.status()}")
        DRAIN_IS_BOUNDED.unless(
            visit.admits(), "it admits no generation after a pause that did not come about"
        )
        visit.round()


@checked(LIMITS, "own-limit-paused", "paused")
@checked(LIMITS, "own-limit-receiving", "receiving")
@checked(LIMITS, "own-limit-committed", "committed")
def own_limit(tested: EngineUnderTest, where: str) -> None:
    """A trainer that says nothing any more keeps no engine for longer than the limit of the session."""
    with Visit(tested) as visit:
        before = visit.content()
        session = visit.committed(limit=0.5) if where == "committed" else visit.opened(limit=0.5)
        receiving = visit.receiving(session, "hang", 1) if where == "receiving" else None
        whole = visit.status().stages or where != "receiving"
        visit.becomes(OWN_LIMIT, EngineState.Serving if whole else EngineState.Quarantined)
        if receiving is not None:
            visit.error(OWN_LIMIT, receiving, "receive, after the limit")
        if where == "committed":
            visit.serves(session)
            return
        visit.error(OWN_LIMIT, visit.ask(visit.link.commit, session), "commit after the limit", StaleSession)
        OWN_LIMIT.unless(not whole or visit.admits(), "it is whole, and admits no generation after its limit")
        REVERTS.unless(not whole or visit.content() == before, "the weights are not what they were before")


@checked(LIMITS, "close")
def close(tested: EngineUnderTest) -> None:
    """A link that is closed, twice, takes nothing with it: another one finds the engine as it was."""
    with Visit(tested) as visit:
        other = visit.subject.another_link()
        for link in (other, other):
            call = spawn("kit-close", link.close)
            error = call.exception(visit.patience)
            CLOSE_IS_THE_LINKS.unless(error is None, f"close raised {error!r}")
        status = visit.status()
        good = (
            status.state is EngineState.Serving and status.incarnation == visit.incarnation and visit.admits()
        )
        CLOSE_IS_THE_LINKS.unless(good, f"after the close of a link the engine is {status}")
        visit.round()


@checked(LIMITS, "link-leaves-nothing")
def link_leaves_nothing(tested: EngineUnderTest) -> None:
    """Rounds, good and aborted ones, leave nothing in the trainer's process."""
    with Visit(tested) as visit:

        def cycle() -> None:
            visit.round()
            session = visit.opened()
            receiving = visit.receiving(session, "hang", 1)
            visit.ask(visit.link.abort, session).result(visit.patience)
            receiving.exception(visit.patience)
            visit.round()

        cycle()
        before = census()
        for _ in range(4):
            cycle()
        left = growth(before, census, min(visit.patience, 5.0))
        LINK_LEAVES_NOTHING.unless(not left, f"after twelve rounds there are {left}")


@checked(LIMITS, "dead", needs="kill")
def dead(tested: EngineUnderTest) -> None:
    """What was asked of an engine that dies fails at once, and so does what is asked afterwards."""
    with Visit(tested) as visit:
        session = visit.opened()
        receiving = visit.receiving(session, "hang", 1)
        visit.becomes(SERVES_NEW, EngineState.Receiving)
        visit.subject.kill()
        visit.error(GONE_AT_ONCE, receiving, "receive of an engine that died", EngineGone)
        for word in (visit.link.commit, visit.link.abort, visit.link.resume):
            visit.error(
                GONE_AT_ONCE, visit.ask(word, session), f"{word.__name__} to a dead engine", EngineGone
            )
        visit.error(GONE_AT_ONCE, visit.ask(visit.link.hello), "hello to a dead engine", EngineGone)


@checked(LIMITS, "restarted", needs="restart")
def restarted(tested: EngineUnderTest) -> None:
    """An engine that was started again is another one: words for the one before are refused."""
    with Visit(tested) as visit:
        session, before = visit.opened(), visit.status()
        visit.subject.restart()
        eventually(lambda: visit.status().incarnation != before.incarnation, visit.patience)
        after = visit.status()
        HELLO.unless(
            after.incarnation != before.incarnation, "it was started again, and says that it is the same one"
        )
        HELLO.unless(
            after.version is None, f"it was started again, and says that it holds version {after.version}"
        )
        visit.error(
            INCARNATION,
            visit.ask(visit.link.commit, session),
            "commit for the life before",
            EngineGone,
            StaleSession,
        )
        visit.error(INCARNATION, visit.opening(visit.session()), "open for the life before", EngineGone)
        visit.incarnation = after.incarnation
        visit.round()

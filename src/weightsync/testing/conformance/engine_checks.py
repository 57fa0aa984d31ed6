"""The stories of an engine adapter: every word, in and out of turn, and what the engine is afterwards."""

from __future__ import annotations

import torch

from ...fsm.engine import Answer
from ...fsm.engine_table import Session
from ...fsm.errors import EngineGone, EngineSilent, IllegalEvent, PlanError, StaleSession
from ...fsm.states import EngineState
from ...handlers.threads import spawn
from ...transports.weights import TorchWeights
from .engine_rules import (
    ABORT_ANSWERS,
    ABORT_ENDS_RECEPTION,
    ANSWERS_AT_ONCE,
    BUSY_IS_NOT_DEAD,
    CLOSE_IS_THE_LINKS,
    COMMIT_NEEDS_PROOF,
    DRAIN_IS_BOUNDED,
    ERRORS_AS_RAISED,
    GONE_AT_ONCE,
    HELLO,
    INCARNATION,
    LINK_LEAVES_NOTHING,
    NEWER_WINS,
    OPEN_PAUSES,
    OWN_LIMIT,
    PLAN_IS_CHECKED,
    RECEIPT_IS_PROOF,
    REVERTS,
    SAID_TWICE,
    SERVES_NEW,
    STALE_IS_REFUSED,
)
from .given import GivenError, ticket
from .residue import census, growth
from .rules import Check, checked, eventually
from .visit import EngineUnderTest, Visit

__all__ = ["ENGINE_CHECKS"]

_CHECKS: list[Check[EngineUnderTest]] = []


@checked(_CHECKS, "hello")
def hello(tested: EngineUnderTest) -> None:
    """It says what it is, and the same life of it each time; its version is what it committed last."""
    with Visit(tested) as visit:
        status, again = visit.status(), visit.status()
        HELLO.unless(
            status.engine == visit.link.id, f"it calls itself {status.engine!r}, its link {visit.link.id!r}"
        )
        HELLO.unless(
            status.incarnation and status.incarnation == again.incarnation, f"its lives are {status}, {again}"
        )
        HELLO.unless(status.ranks >= 1, f"it has {status.ranks} ranks")
        HELLO.unless(status.state is EngineState.Serving, f"it is {status.state.name} after a good round")
        HELLO.unless(status.version == visit.said[-1].version, f"it says version {status.version}")


@checked(_CHECKS, "rounds")
def rounds(tested: EngineUnderTest) -> None:
    """Round after round it takes the new bytes over, is paused in between, and generates again."""
    with Visit(tested) as visit:
        for _ in range(2):
            before = visit.content()
            session = visit.opened()
            OPEN_PAUSES.unless(visit.status().state is EngineState.Paused, "it is not Paused after open")
            OPEN_PAUSES.unless(not visit.subject.admits(), "it admits generation after open")
            (receipt, *_) = visit.answer(SERVES_NEW, visit.receiving(session), "receive")
            flaw = receipt.mismatch(session.round, session.epoch, visit.expected(visit.fill))
            RECEIPT_IS_PROOF.unless(flaw is None, f"the receipt of a good round is wrong: {flaw}")
            REVERTS.unless(
                not visit.status().stages or visit.content() == before,
                "it stages, and served new bytes before commit",
            )
            OPEN_PAUSES.unless(not visit.subject.admits(), "it admits generation before the commit")
            visit.answer(SERVES_NEW, visit.ask(visit.link.commit, session), "commit")
            OPEN_PAUSES.unless(
                not visit.subject.admits(), "it admits generation after the commit, before resume"
            )
            visit.answer(SERVES_NEW, visit.ask(visit.link.resume, session), "resume")
            visit.serves(session)


@checked(_CHECKS, "receive-overtakes-open")
def receive_overtakes_open(tested: EngineUnderTest) -> None:
    """A receive that comes before the open of its session waits for that."""
    with Visit(tested) as visit:
        session, visit.fill = visit.session(), 33
        receiving = visit.receiving(session)
        visit.answer(OPEN_PAUSES, visit.opening(session, visit.fill), "open after receive")
        visit.answer(SERVES_NEW, receiving, "a receive that came before its open")


@checked(_CHECKS, "said-twice")
def said_twice(tested: EngineUnderTest) -> None:
    """Commit and resume said again change nothing; the weights stay the new ones."""
    with Visit(tested) as visit:
        session = visit.committed()
        visit.answer(SAID_TWICE, visit.ask(visit.link.commit, session), "a second commit")
        for _ in range(2):
            visit.answer(SAID_TWICE, visit.ask(visit.link.resume, session), "resume")
        visit.serves(session)


@checked(_CHECKS, "commit-before-the-receipt")
def commit_before_the_receipt(tested: EngineUnderTest) -> None:
    """Neither commit nor resume does anything before its time, and the session can go on."""
    with Visit(tested) as visit:
        before, session = visit.content(), visit.opened()
        for word in (visit.link.commit, visit.link.resume):
            what = f"{word.__name__} in Paused"
            visit.error(COMMIT_NEEDS_PROOF, visit.ask(word, session), what, IllegalEvent, StaleSession)
        COMMIT_NEEDS_PROOF.unless(
            visit.content() == before, "a commit that came too early has changed the weights"
        )
        visit.answer(
            COMMIT_NEEDS_PROOF, visit.receiving(session), "receive after a commit that came too early"
        )
        visit.error(
            COMMIT_NEEDS_PROOF, visit.ask(visit.link.resume, session), "resume in Acked", IllegalEvent
        )


@checked(_CHECKS, "no-receipt-with-nothing-received", "short", 0)
@checked(_CHECKS, "no-receipt-with-a-bucket-missing", "short", 1)
@checked(_CHECKS, "no-receipt-with-a-bucket-twice", "twice", 0)
@checked(_CHECKS, "no-receipt-out-of-order", "late", 0)
@checked(_CHECKS, "no-receipt-with-a-byte-missing", "small", 0)
@checked(_CHECKS, "no-receipt-before-the-view-is-closed", "leave", 0)
def no_receipt(tested: EngineUnderTest, mode: str, bucket: int) -> None:
    """What did not arrive whole, or was not let go of, gives no receipt, and cannot be committed."""
    with Visit(tested) as visit:
        session = visit.opened()
        visit.error(RECEIPT_IS_PROOF, visit.receiving(session, mode, bucket), f"receive ({mode})")
        visit.error(COMMIT_NEEDS_PROOF, visit.ask(visit.link.commit, session), "commit without a receipt")
        visit.round()


@checked(_CHECKS, "receipt-says-what-is-there")
def receipt_says_what_is_there(tested: EngineUnderTest) -> None:
    """When other bytes arrive than the round expects, the receipt says so, or there is none."""
    with Visit(tested) as visit:
        session = visit.opened()
        future = visit.ask(visit.link.receive, session, ticket(visit.fill + 1))
        eventually(future.done, visit.patience)
        if future.exception(0) is None:
            flaws = [
                each.mismatch(session.round, session.epoch, visit.expected(visit.fill))
                for each in future.result()
            ]
            RECEIPT_IS_PROOF.unless(
                all(flaws), "other bytes arrived, and the receipt says the digest that was expected"
            )
        visit.ask(visit.link.abort, session).result(visit.patience)


@checked(_CHECKS, "abort-unopened")
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


@checked(_CHECKS, "abort-paused", "paused")
@checked(_CHECKS, "abort-receiving", "receiving")
@checked(_CHECKS, "abort-acked", "acked")
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


@checked(_CHECKS, "abort-committed")
def abort_committed(tested: EngineUnderTest) -> None:
    """What was committed stays so, whoever aborts; the word to resume still counts."""
    with Visit(tested) as visit:
        session = visit.committed()
        for _ in range(2):
            told = visit.answer(ABORT_ANSWERS, visit.ask(visit.link.abort, session), "abort after commit")
            ABORT_ANSWERS.unless(told is Answer.committed, f"it says {told} after its commit")
        visit.answer(SAID_TWICE, visit.ask(visit.link.resume, session), "resume after an abort after commit")
        visit.serves(session)


@checked(_CHECKS, "stale-words")
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


@checked(_CHECKS, "newer-session")
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


@checked(_CHECKS, "another-incarnation")
def another_incarnation(tested: EngineUnderTest) -> None:
    """An open that is meant for another life of the engine is refused before anything happens."""
    with Visit(tested) as visit:
        before = visit.status()
        opening = visit.opening(visit.session(), incarnation="another life")
        visit.error(INCARNATION, opening, "open for another incarnation", EngineGone)
        INCARNATION.unless(
            visit.status() == before and visit.admits(), f"it was {before}, and is {visit.status()}"
        )


@checked(_CHECKS, "plan-that-does-not-fit")
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


@checked(_CHECKS, "errors-come-out")
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


@checked(_CHECKS, "never-blocks")
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


@checked(_CHECKS, "busy-receiving")
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


@checked(_CHECKS, "drain-is-bounded")
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


@checked(_CHECKS, "own-limit-paused", "paused")
@checked(_CHECKS, "own-limit-receiving", "receiving")
@checked(_CHECKS, "own-limit-committed", "committed")
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


@checked(_CHECKS, "close")
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


@checked(_CHECKS, "link-leaves-nothing")
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


@checked(_CHECKS, "dead", needs="kill")
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


@checked(_CHECKS, "restarted", needs="restart")
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


ENGINE_CHECKS: tuple[Check[EngineUnderTest], ...] = tuple(_CHECKS)
"""What every engine adapter must pass."""

"""What an engine does when it is told the words of a round in turn, and what it proves."""

from __future__ import annotations

from ...fsm.errors import IllegalEvent, StaleSession
from ...fsm.sampling import Part
from ...fsm.states import EngineState
from .engine_rules import (
    COMMIT_NEEDS_PROOF,
    HELLO,
    OPEN_PAUSES,
    RECEIPT_IS_PROOF,
    REVERTS,
    SAID_TWICE,
    SERVES_NEW,
)
from .given import ticket
from .rules import Check, checked, eventually
from .visit import EngineUnderTest, Visit

__all__ = ["WORDS"]

WORDS: list[Check[EngineUnderTest]] = []


@checked(WORDS, "hello")
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


@checked(WORDS, "rounds")
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


@checked(WORDS, "receive-overtakes-open")
def receive_overtakes_open(tested: EngineUnderTest) -> None:
    """A receive that comes before the open of its session waits for that."""
    with Visit(tested) as visit:
        session, visit.fill = visit.session(), 33
        receiving = visit.receiving(session)
        visit.answer(OPEN_PAUSES, visit.opening(session, visit.fill), "open after receive")
        visit.answer(SERVES_NEW, receiving, "a receive that came before its open")


@checked(WORDS, "said-twice")
def said_twice(tested: EngineUnderTest) -> None:
    """Commit and resume said again change nothing; the weights stay the new ones."""
    with Visit(tested) as visit:
        session = visit.committed()
        visit.answer(SAID_TWICE, visit.ask(visit.link.commit, session), "a second commit")
        for _ in range(2):
            visit.answer(SAID_TWICE, visit.ask(visit.link.resume, session), "resume")
        visit.serves(session)


@checked(WORDS, "commit-before-the-receipt")
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


@checked(WORDS, "no-receipt-with-nothing-received", "short", 0)
@checked(WORDS, "no-receipt-with-a-bucket-missing", "short", 1)
@checked(WORDS, "no-receipt-with-a-bucket-twice", "twice", 0)
@checked(WORDS, "no-receipt-out-of-order", "late", 0)
@checked(WORDS, "no-receipt-with-a-byte-missing", "small", 0)
@checked(WORDS, "no-receipt-before-the-view-is-closed", "leave", 0)
def no_receipt(tested: EngineUnderTest, mode: str, bucket: int) -> None:
    """What did not arrive whole, or was not let go of, gives no receipt, and cannot be committed."""
    with Visit(tested) as visit:
        session = visit.opened()
        visit.error(RECEIPT_IS_PROOF, visit.receiving(session, mode, bucket), f"receive ({mode})")
        visit.error(COMMIT_NEEDS_PROOF, visit.ask(visit.link.commit, session), "commit without a receipt")
        visit.round()


@checked(WORDS, "receipt-of-a-part")
def receipt_of_a_part(tested: EngineUnderTest) -> None:
    """A round may ask for the digest of a part, which the expected one says: that is in the receipt."""
    with Visit(tested) as visit:
        for turn in range(2):
            visit.part = Part(turn, 2)
            session = visit.opened()
            receipts = visit.answer(
                RECEIPT_IS_PROOF, visit.receiving(session), f"receive, asked for the digest of {visit.part}"
            )
            for receipt in receipts:
                flaw = receipt.mismatch(session.round, session.epoch, visit.expected(visit.fill))
                RECEIPT_IS_PROOF.unless(flaw is None, f"asked for the digest of {visit.part}: {flaw}")
            visit.answer(RECEIPT_IS_PROOF, visit.ask(visit.link.abort, session), "abort")


@checked(WORDS, "receipt-says-what-is-there")
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

"""Engine adapters that break their contract on purpose: the kit catches each, by the right check and rule."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from localsubject import LocalSubject
from weightsync.fsm.contract import EngineStatus, Ticket
from weightsync.fsm.engine import Answer
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import EngineError, EngineGone, SetupError, StaleSession
from weightsync.fsm.plan import Plan
from weightsync.fsm.receipt import Expectation, Receipt, _carried
from weightsync.fsm.sampling import WHOLE
from weightsync.handlers import receiver as receiver_module
from weightsync.handlers.futures import begun, then
from weightsync.handlers.gate import Gate
from weightsync.handlers.local_engine import LocalEngine
from weightsync.handlers.rank import Rank
from weightsync.handlers.receiver import Receiver
from weightsync.handlers.reception import Reception
from weightsync.handlers.sink import InPlaceSink, StagingSink, _Live
from weightsync.testing.conformance import (
    ENGINE_CHECKS,
    ENGINE_RULES,
    EngineConformance,
    EngineSubject,
    Violation,
)

pytestmark = [pytest.mark.mutation, pytest.mark.timeout(120)]

CHECKS = {check.name: check for check in ENGINE_CHECKS}
Patch = pytest.MonkeyPatch


def failed(error: BaseException) -> Future[Any]:
    """A future that has failed."""
    future = begun()
    future.set_exception(error)
    return future


def done(value: Any) -> Future[Any]:
    """A future that was answered."""
    future = begun()
    future.set_result(value)
    return future


def instead(future: Future[Any], value: Callable[[BaseException], Any]) -> Future[Any]:
    """The same answer; an error is made good."""
    answer = begun()

    def settle(asked: Future[Any]) -> None:
        error = asked.exception()
        answer.set_result(asked.result() if error is None else value(error))

    future.add_done_callback(settle)
    return answer


# -- links ------------------------------------------------------------------------------------------------


class Blocking(LocalEngine):
    """Waits for the answer, and then gives a future."""

    def _ask(self, word: str, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future = super()._ask(word, work, *args)
        wait_for([future], 10.0)
        return future


class Misnamed(LocalEngine):
    def hello(self) -> Future[EngineStatus]:
        """Another name."""
        return then(super().hello(), lambda status: replace(status, engine="another"))


class Immortal(LocalEngine):
    """Does not say that it was started again."""

    def hello(self) -> Future[EngineStatus]:
        """The same, for ever."""
        return then(super().hello(), lambda status: replace(status, incarnation="same"))

    def open(self, session: Session, incarnation: str, *args: Any) -> Future[None]:
        """For whoever is there."""
        return super().open(session, self.receiver.status.incarnation, *args)


class Unlimited(LocalEngine):
    """Knows no limit."""

    def open(
        self, session: Session, incarnation: str, plan: Plan, expected: Expectation, limit: float
    ) -> Future[None]:
        """As long as it takes."""
        return super().open(session, incarnation, plan, expected, 1e5)


class InOrder(LocalEngine):
    """Receives only what was opened before."""

    def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
        """Or not at all."""
        if self.receiver._machine.facts.session != session:
            return failed(StaleSession("nothing is open"))
        return super().receive(session, ticket)


class Once(LocalEngine):
    """Hears no word twice."""

    def __init__(self, receiver: Receiver) -> None:
        super().__init__(receiver)
        self.said: set[tuple[str, Session]] = set()

    def commit(self, session: Session) -> Future[None]:
        """Once."""
        if ("commit", session) in self.said:
            return failed(EngineError("that was said before"))
        self.said.add(("commit", session))
        return super().commit(session)


class Lenient(LocalEngine):
    """Takes a refusal for a yes."""

    def commit(self, session: Session) -> Future[None]:
        """Always."""
        return instead(super().commit(session), lambda _: None)


class Careless(LocalEngine):
    """Takes words of old sessions for said in time."""

    def _ask(self, word: str, work: Callable[..., Any], *args: Any) -> Future[Any]:
        answer = begun()

        def settle(asked: Future[Any]) -> None:
            error = asked.exception()
            if error is None or isinstance(error, StaleSession):
                answer.set_result(None if error else asked.result())
            else:
                answer.set_exception(error)

        super()._ask(word, work, *args).add_done_callback(settle)
        return answer


class Forging(LocalEngine):
    """Has a receipt for everything, and a good one."""

    def __init__(self, receiver: Receiver) -> None:
        super().__init__(receiver)
        self.expected: dict[Session, Expectation] = {}

    def open(
        self, session: Session, incarnation: str, plan: Plan, expected: Expectation, limit: float
    ) -> Future[None]:
        """Know what is expected."""
        self.expected[session] = expected
        return super().open(session, incarnation, plan, expected, limit)

    def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
        """And say that."""
        good = self.expected[session]
        receipt = _carried(
            {
                "round": session.round, "epoch": session.epoch, "engine": self.id,
                "incarnation": self.receiver.status.incarnation, "rank": 0, "fingerprint": good.fingerprint,
                "tensors": good.tensors, "bytes": good.bytes, "digest": good.digest,
            }
        )  # fmt: skip
        received = super().receive(session, ticket)
        return then(instead(received, lambda _: None), lambda _: (receipt,))


class Reverted(LocalEngine):
    def abort(self, session: Session) -> Future[Answer]:
        """Always."""
        return then(super().abort(session), lambda _: Answer.reverted)


class Torn(LocalEngine):
    def abort(self, session: Session) -> Future[Answer]:
        """Always."""
        return then(super().abort(session), lambda _: Answer.torn)


class Guessing(LocalEngine):
    """Does not tell the engine of what was never opened there."""

    def abort(self, session: Session) -> Future[Answer]:
        """A guess."""
        if self.receiver._machine.facts.session is None:
            return done(Answer.reverted)
        return super().abort(session)


class FirstComes(LocalEngine):
    """Refuses a newer session while an older one is open."""

    def open(self, session: Session, *args: Any) -> Future[None]:
        """Unless it is free."""
        if self.receiver._machine.facts.session is not None:
            return failed(EngineError("it is busy"))
        return super().open(session, *args)


class ItsOwnOnly(LocalEngine):
    """Keeps an older session when a newer one is aborted."""

    def abort(self, session: Session) -> Future[Answer]:
        """Of another session there is nothing to end."""
        if self.receiver._machine.facts.session not in (None, session):
            return done(Answer.reverted)
        return super().abort(session)


class Paraphrasing(LocalEngine):
    """Says in its own words what went wrong."""

    def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
        """More or less."""
        answer = begun()

        def settle(asked: Future[Any]) -> None:
            if asked.exception() is None:
                answer.set_result(asked.result())
            else:
                answer.set_exception(EngineError("something went wrong"))

        super().receive(session, ticket).add_done_callback(settle)
        return answer


class Impatient(LocalEngine):
    """Takes a busy engine for a dead one."""

    def hello(self) -> Future[EngineStatus]:
        """If it has time."""
        if self.receiver.gate.inside:
            return failed(EngineGone("it does not answer"))
        return super().hello()


class ClosesOnce(LocalEngine):
    closed = False

    def close(self) -> None:
        """Once."""
        if self.closed:
            raise OSError("already closed")
        self.closed = True


class Collecting(LocalEngine):
    """Leaves a thread behind with every word."""

    stop: ClassVar[threading.Event] = threading.Event()

    def _ask(self, word: str, work: Callable[..., Any], *args: Any) -> Future[Any]:
        threading.Thread(target=self.stop.wait, daemon=True).start()
        return super()._ask(word, work, *args)


class Grave(LocalEngine):
    """Says nothing of its death, and nothing at all after it."""

    dead = False

    def _ask(self, word: str, work: Callable[..., Any], *args: Any) -> Future[Any]:
        return begun() if self.dead else super()._ask(word, work, *args)


class Mortal(LocalSubject):
    """An engine that can die, in a manner of speaking."""

    def kill(self) -> None:
        """Its link hears nothing more."""
        assert isinstance(self.link, Grave)
        self.link.dead = True


class Opening(LocalSubject):
    """Opens the gate where it is only asked whether it is open."""

    def admits(self) -> bool:
        """As it should not be."""
        self.receiver.gate.open()
        return True


class OpeningWithoutAWord(LocalSubject):
    """The same, and says nothing."""

    def admits(self) -> Any:
        """As it should not be."""
        return self.receiver.gate.open()


# -- engines ----------------------------------------------------------------------------------------------


def open_gate(patch: Patch) -> None:
    """A gate that closes for nobody."""
    patch.setattr(Gate, "close", lambda gate, limit: None)
    patch.setattr(Gate, "paused", property(lambda gate: True))


def of_everything(patch: Patch) -> None:
    """Whatever part is asked for."""
    patch.setattr(receiver_module, "part_of", lambda digest: WHOLE)


def no_commit(patch: Patch) -> None:
    """A commit that copies nothing."""
    patch.setattr(StagingSink, "commit", lambda sink, plan: None)


def deaf_reception(patch: Patch) -> None:
    """An abort that closes no inlet."""
    patch.setattr(Reception, "shut", lambda reception: None)


def in_place(patch: Patch) -> None:
    """An engine that says that it stages, and does not."""
    patch.setattr(StagingSink, "open", InPlaceSink.open)
    patch.setattr(StagingSink, "commit", InPlaceSink.commit)


def eager_gate(patch: Patch) -> None:
    """A gate that opens after every session, however it ended."""
    patch.setattr(Rank, "_settle_gate", lambda rank: None if rank.machine.facts.session else rank.gate.open())


def any_life(patch: Patch) -> None:
    """Nobody asks which life was meant."""
    patch.setattr(Receiver, "check_incarnation", lambda receiver, incarnation: None)


def any_plan(patch: Patch) -> None:
    """Nobody looks at the plan."""
    patch.setattr(_Live, "check", lambda sink, plan: None)


# -- the kit catches them ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """What is wrong, and which checks find that, by which rule."""

    rule: str
    checks: Sequence[str]
    link: type[LocalEngine] = LocalEngine
    patch: Callable[[Patch], None] = lambda _: None
    stages: bool = True
    subject: type[LocalSubject] = LocalSubject


MUTANTS = {
    "waits for answers": Mutant("answers-at-once", ["never-blocks", "busy-receiving"], Blocking),
    "calls itself otherwise": Mutant("hello", ["hello"], Misnamed),
    "hides a restart": Mutant("hello", ["restarted"], Immortal),
    "does not pause": Mutant("open-pauses", ["rounds", "never-blocks"], patch=open_gate),
    "is opened by whoever asks": Mutant("open-pauses", ["rounds"], subject=Opening),
    "waits without a limit": Mutant("drain-bounded", ["drain-is-bounded"], Unlimited),
    "has no limit of its own": Mutant(
        "own-limit", ["own-limit-paused", "own-limit-receiving", "own-limit-committed"], Unlimited
    ),
    "copies nothing": Mutant("serves-new", ["rounds"], patch=no_commit),
    "wants words in order": Mutant("serves-new", ["receive-overtakes-open"], InOrder),
    "hears words once": Mutant("said-twice", ["said-twice"], Once),
    "commits without proof": Mutant("commit-needs-proof", ["commit-before-the-receipt"], Lenient),
    "forges receipts": Mutant(
        "receipt-is-proof",
        [*(name for name in CHECKS if name.startswith("no-receipt")), "receipt-says-what-is-there"],
        Forging,
    ),
    "digests everything": Mutant("receipt-is-proof", ["receipt-of-a-part"], patch=of_everything),
    "always reverted": Mutant("abort-answers", ["abort-committed"], Reverted),
    "always torn": Mutant(
        "abort-answers", ["abort-unopened", "abort-paused", "abort-receiving", "abort-acked"], Torn
    ),
    "cannot be aborted": Mutant(
        "abort-ends-reception", ["abort-receiving", "busy-receiving"], patch=deaf_reception
    ),
    "only says that it stages": Mutant(
        "reverts", ["rounds", "abort-receiving", "abort-acked"], patch=in_place
    ),
    "generates with a mix": Mutant(
        "reverts", ["abort-receiving", "abort-acked"], patch=eager_gate, stages=False
    ),
    "takes words that are late": Mutant("stale-refused", ["stale-words"], Careless),
    "forgets aborts": Mutant("stale-refused", ["abort-unopened"], Guessing),
    "keeps the older session": Mutant("newer-wins", ["newer-session"], FirstComes),
    "keeps it when a newer one is aborted": Mutant("newer-wins", ["newer-abort"], ItsOwnOnly),
    "is every life": Mutant("incarnation", ["another-incarnation"], patch=any_life),
    "takes any plan": Mutant("plan-checked", ["plan-that-does-not-fit"], patch=any_plan),
    "paraphrases": Mutant("errors-as-raised", ["errors-come-out"], Paraphrasing),
    "gives up on the busy": Mutant("busy-is-not-dead", ["never-blocks"], Impatient),
    "does not notice death": Mutant("gone-at-once", ["dead"], Grave, subject=Mortal),
    "closes once": Mutant("close-is-the-links", ["close"], ClosesOnce),
    "leaves threads": Mutant("link-leaves-nothing", ["link-leaves-nothing"], Collecting),
}


class Tested(EngineConformance):
    """A mutant under test."""

    __test__ = False
    patience = 2.0

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def engine(self) -> EngineSubject:
        """A new one."""
        return self.mutant.subject(stages=self.mutant.stages, link=self.mutant.link)


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    """What a mutant leaves behind is taken away."""
    yield
    Collecting.stop.set()
    Collecting.stop = threading.Event()


@pytest.mark.parametrize(
    ("mutant", "check"), [(name, check) for name, each in MUTANTS.items() for check in each.checks]
)
def test_the_kit_catches(mutant: str, check: str, monkeypatch: Patch) -> None:
    """The check fails, and says which rule is broken, what was seen, and what to do."""
    tested = Tested(MUTANTS[mutant])
    tested.mutant.patch(monkeypatch)
    with pytest.raises(Violation) as caught:
        CHECKS[check](tested)
    rule = ENGINE_RULES[tested.mutant.rule]
    assert caught.value.rule is rule, f"caught as {caught.value}"
    assert rule.says in str(caught.value)
    assert rule.do in str(caught.value)


def test_a_question_that_opens_the_gate_is_told() -> None:
    """It gives no answer, and the check says which question that was."""
    with pytest.raises(SetupError, match=r"^OpeningWithoutAWord.admits\(\) returned None: it has to say"):
        CHECKS["rounds"](Tested(Mutant("", [], subject=OpeningWithoutAWord)))


def test_every_check_and_every_rule_has_a_mutant() -> None:
    """No check is vacuous, and no rule is decoration."""
    assert set(CHECKS) == {check for mutant in MUTANTS.values() for check in mutant.checks}
    assert set(ENGINE_RULES) == {mutant.rule for mutant in MUTANTS.values()}

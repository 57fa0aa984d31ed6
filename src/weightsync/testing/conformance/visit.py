"""One engine, visited by a check: words that are said to it, and answered within their time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol, Self, TypeVar

import torch

from ...fsm.contract import EngineLink, EngineStatus
from ...fsm.engine_table import Session
from ...fsm.errors import SetupError
from ...fsm.plan import Plan
from ...fsm.receipt import Expectation, Receipt
from ...fsm.sampling import WHOLE
from ...fsm.states import EngineState
from ...handlers.threads import spawn
from ...transports.digest import digest
from ...transports.weights import TorchWeights
from .contents import described
from .engine_rules import ANSWERS_AT_ONCE, OPEN_PAUSES, SERVES_NEW
from .given import numbers, ticket
from .rules import Rule, eventually, holding
from .subjects import engine_of

__all__ = ["EngineSubject", "EngineUnderTest", "Visit"]

T = TypeVar("T")
BLINK = 1.0
"""Seconds in which a word has to give its future. It takes microseconds, and machines may be busy."""

_EPOCHS = itertools.count(1)
_FILLS = itertools.count(1)


class EngineSubject(Protocol):
    """An engine that is tested, and what its user can do with it besides handing weights over."""

    @property
    def link(self) -> EngineLink:
        """The trainer's end."""

    def another_link(self) -> EngineLink:
        """A second one, to the same engine."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Copies of what it samples with, by name."""

    def admits(self) -> bool:
        """Whether a generation that is asked for now would begin at once."""

    def generating(self) -> AbstractContextManager[object]:
        """While a generation is under way, which was admitted."""

    def kill(self) -> None:
        """Let it die; called only if ``can`` says so, and nothing else after it."""

    def restart(self) -> None:
        """Let it die and start again under the same link; called only if ``can`` says so."""

    def close(self) -> None:
        """The check is over."""


class EngineUnderTest(Protocol):
    """What is tested, and how much time to give it."""

    @property
    def patience(self) -> float:
        """Seconds until something that should happen at once counts as never."""

    def engine(self) -> EngineSubject:
        """An engine that serves: a new one, or the same again."""


class Visit:
    """A context: begins with a good round, so that the engine holds a version and is whole."""

    def __init__(self, tested: EngineUnderTest) -> None:
        self.patience, self.subject = tested.patience, engine_of(tested)
        self.link = self.subject.link
        self.weights = TorchWeights.of({name: each.clone() for name, each in self.subject.tensors().items()})
        largest = max((spec.nbytes for spec in self.weights.plan(1 << 20).tensors), default=1)
        self.plan = self.weights.plan(max(1, largest // 2))  # the largest tensor takes more than one bucket
        self.said: list[Session] = []
        self.fill = 0
        self.part = WHOLE

    def __enter__(self) -> Self:
        self.incarnation = self.status().incarnation
        self.round()
        return self

    def __exit__(self, *_: object) -> None:
        for session in self.said:
            with suppress(Exception):
                self.link.abort(session).result(self.patience)
                self.link.resume(session).result(self.patience)
        self.subject.close()

    # -- words ---------------------------------------------------------------------------------------------

    def ask(self, word: Callable[..., Future[T]], *args: Any) -> Future[T]:
        """Say a word; its future has to be there at once."""
        asking = spawn("kit-word", word, *args)
        name = getattr(word, "__name__", "a word")
        try:
            future = asking.result(BLINK)
        except NotYet:
            raise ANSWERS_AT_ONCE.broken(f"{name} gave no future within {BLINK:g} s") from None
        except Exception as error:
            raise ANSWERS_AT_ONCE.broken(f"{name} raised {error!r}, and gave no future") from error
        ANSWERS_AT_ONCE.unless(isinstance(future, Future), f"{name} gave {future!r}, which is no future")
        return future

    def answer(self, rule: Rule, future: Future[T], what: str) -> T:
        """A good answer, within its time; anything else breaks ``rule``."""
        with holding(rule, f"{what} failed"):
            try:
                return future.result(self.patience)
            except NotYet:
                raise rule.broken(f"{what} was not answered within {self.patience:g} s") from None

    def error(self, rule: Rule, future: Future[Any], what: str, *kinds: type[BaseException]) -> BaseException:
        """The error that it fails with, within its time; anything else breaks ``rule``."""
        try:
            error = future.exception(self.patience)
        except NotYet:
            raise rule.broken(f"{what} was not answered within {self.patience:g} s") from None
        if error is None:
            raise rule.broken(f"{what} was answered with {future.result()!r}, and should have failed")
        if kinds and not isinstance(error, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise rule.broken(f"{what} failed with {error!r}, and not with {names}") from error
        return error

    def status(self) -> EngineStatus:
        """What it says of itself."""
        return self.answer(ANSWERS_AT_ONCE, self.ask(self.link.hello), "hello")

    # -- sessions ------------------------------------------------------------------------------------------

    def session(self) -> Session:
        """One of the next epoch."""
        epoch = next(_EPOCHS)
        self.said.append(Session(f"kit-{epoch}", epoch, epoch))
        return self.said[-1]

    def expected(self, fill: int, plan: Plan | None = None) -> Expectation:
        """What a good receipt says of these numbers."""
        plan = plan or self.plan
        content = digest(plan, numbers(plan, fill), self.part)
        return Expectation(plan.fingerprint, len(plan.tensors), plan.nbytes, len(plan.buckets), content)

    def opening(
        self,
        session: Session,
        fill: int = 0,
        *,
        limit: float = 60.0,
        plan: Plan | None = None,
        incarnation: str | None = None,
    ) -> Future[None]:
        """Say open."""
        plan = plan or self.plan
        life = self.incarnation if incarnation is None else incarnation
        return self.ask(self.link.open, session, life, plan, self.expected(fill, plan), limit)

    def opened(self, fill: int | None = None, *, limit: float = 60.0) -> Session:
        """A session that is open; for new numbers, unless they are given."""
        session = self.session()
        self.fill = next(_FILLS) % 90 if fill is None else fill
        self.answer(OPEN_PAUSES, self.opening(session, self.fill, limit=limit), "open")
        return session

    def receiving(self, session: Session, mode: str = "good", bucket: int = 0) -> Future[tuple[Receipt, ...]]:
        """Say receive."""
        return self.ask(self.link.receive, session, ticket(self.fill, mode, bucket))

    def acked(self, *, limit: float = 60.0) -> Session:
        """A session whose bytes have arrived."""
        session = self.opened(limit=limit)
        self.answer(SERVES_NEW, self.receiving(session), "receive")
        return session

    def committed(self, *, limit: float = 60.0) -> Session:
        """A session that was committed."""
        session = self.acked(limit=limit)
        self.answer(SERVES_NEW, self.ask(self.link.commit, session), "commit")
        return session

    def round(self) -> Session:
        """A whole one, which must go well."""
        session = self.committed()
        self.answer(SERVES_NEW, self.ask(self.link.resume, session), "resume")
        self.serves(session)
        return session

    def serves(self, session: Session) -> None:
        """It samples with the numbers that were given last, and generates."""
        self.becomes(SERVES_NEW, EngineState.Serving)
        status = self.status()
        SERVES_NEW.unless(
            status.version == session.version, f"it says version {status.version}, not {session.version}"
        )
        wanted, found = described(numbers(self.plan, self.fill)), described(self.subject.tensors())
        differs = [name for name, each in wanted.items() if found.get(name) != each]
        SERVES_NEW.unless(not differs, f"it samples with other bytes than were sent for {', '.join(differs)}")
        OPEN_PAUSES.unless(self.admits(), "it serves, and admits no generation")

    def becomes(self, rule: Rule, *states: EngineState) -> EngineState:
        """It gets into one of these states within its time."""
        reached = eventually(lambda: self.status().state in states, self.patience)
        state = self.status().state
        if not reached and state not in states:
            raise rule.broken(
                f"it is {state.name}, and should be {' or '.join(each.name for each in states)}"
            )
        return state

    def admits(self) -> bool:
        """Whether generation is admitted, at the latest within a moment."""
        return eventually(self._asked, BLINK)

    def content(self) -> object:
        """The bytes it samples with."""
        return described(self.subject.tensors())

    def _asked(self) -> bool:
        answer: object = self.subject.admits()
        if not isinstance(answer, bool):
            raise SetupError(
                f"{type(self.subject).__name__}.admits() returned {answer!r}: it has to say True or False, "
                f"and to open or close nothing"
            )
        return answer

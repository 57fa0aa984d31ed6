"""The trainer's link to an engine that is a Ray actor.

The link never blocks: a word gives a future, which Ray completes on a thread of its own. Errors come out as
the actor raised them, with Ray's report as their cause. A dead actor is ``EngineGone``, at once. An actor
that Ray has restarted is another incarnation, and refuses every word that was meant for the one before.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import ray

from ..fsm.contract import EngineStatus, Ticket
from ..fsm.engine import Answer
from ..fsm.engine_table import Session
from ..fsm.errors import EngineError, EngineGone, PlanUnknown, SetupError
from ..fsm.plan import Plan
from ..fsm.receipt import Expectation, Receipt
from .futures import again, then
from .words import read_answer
from .words import word as to_words

__all__ = ["RayEngine"]

_REMEMBERED = 16  # sessions, and layouts that were sent


class RayEngine:
    """An ``EngineLink`` to a Ray actor that mixes in ``RayReceiver``.

    Args:
        actor: the actor's handle.
        id: what the actor calls itself; by default the actor's id, as it does by default.
    """

    def __init__(self, actor: Any, id: str | None = None) -> None:  # noqa: A002 - as it is called everywhere
        if not hasattr(actor, "weightsync_word"):
            raise SetupError(
                f"{actor} does not receive weights: let its class inherit weightsync.RayReceiver"
            )
        self.actor = actor
        self._id = id if id is not None else actor._actor_id.hex()  # noqa: SLF001 - as Ray's documents use it
        self._lives: dict[Session, str] = {}
        self._sent: dict[tuple[str, str], None] = {}
        self._methods: dict[int, Any] = {}

    @property
    def id(self) -> str:
        """The engine's name."""
        return self._id

    def hello(self) -> Future[EngineStatus]:
        """Ask the engine what it is. While Ray restarts it, the question waits."""
        # To ask again is harmless, so Ray may do it, and does until the actor is there or dead for good.
        return then(self._ask("hello", None, retries=-1), self._recognise)

    def alive(self) -> Future[bool]:
        """Whether there is an actor, however busy it is: only its death makes this False."""
        alive: Future[bool] = Future()
        alive.set_running_or_notify_cancel()

        def done(replied: Future[EngineStatus]) -> None:
            alive.set_result(not isinstance(replied.exception(), EngineGone))

        self._ask("hello", None).add_done_callback(done)
        return alive

    def open(
        self, session: Session, incarnation: str, plan: Plan, expected: Expectation, limit: float
    ) -> Future[None]:
        """Pause and open a session. A plan is sent once, then its fingerprint is enough."""
        _remember(self._lives, session, incarnation)
        layout = (incarnation, plan.fingerprint)

        def ask(sent: Plan | str) -> Future[None]:
            return self._ask("open", incarnation, session, incarnation, sent, expected, limit)

        if layout in self._sent:
            return again(ask(plan.fingerprint), PlanUnknown, lambda: ask(plan))
        _remember(self._sent, layout, None)
        return ask(plan)

    def receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
        """Start receiving."""
        return self._ask("receive", self._lives.get(session), session, ticket)

    def commit(self, session: Session) -> Future[None]:
        """Make the new version the engine's own."""
        return self._ask("commit", self._lives.get(session), session)

    def abort(self, session: Session) -> Future[Answer]:
        """End the session and say what the engine is."""
        return self._ask("abort", self._lives.get(session), session)

    def resume(self, session: Session) -> Future[None]:
        """Let a committed engine generate again."""
        return self._ask("resume", self._lives.get(session), session)

    def close(self) -> None:
        """Nothing is held here; the actor lives on."""

    def _ask(self, word: str, incarnation: str | None, *args: Any, retries: int = 0) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()

        def done(replied: Future[Any]) -> None:
            error = replied.exception()
            try:
                if error is not None:
                    raise self._translated(word, error)
                value = read_answer(word, replied.result())
            except BaseException as failed:  # noqa: BLE001 - it goes to whoever asked
                answer.set_exception(failed)
            else:
                answer.set_result(value)

        said = to_words(word, incarnation, *args)
        self._method(retries).remote(said).future().add_done_callback(done)
        return answer

    def _method(self, retries: int) -> Any:
        # Whatever is set for the actor: what Ray repeated on its own would meet another incarnation.
        if retries not in self._methods:
            self._methods[retries] = self.actor.weightsync_word.options(max_task_retries=retries)
        return self._methods[retries]

    def _recognise(self, status: EngineStatus) -> EngineStatus:
        if status.engine != self.id:
            raise SetupError(
                f"the actor calls itself {status.engine!r}, and not {self.id!r}: use RayEngine(actor, "
                f"id={status.engine!r}), or leave the id out on both sides"
            )
        return status

    def _translated(self, word: str, error: BaseException) -> BaseException:
        """What the actor raised, or what became of the actor; Ray's report is the cause."""
        translated: BaseException
        if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, BaseException):
            translated = error.cause
        elif isinstance(error, ray.exceptions.RayActorError):
            translated = EngineGone(f"engine {self.id} did not answer {word}: {_first_line(error)}")
        else:
            translated = EngineError(
                f"engine {self.id}: Ray could not carry out {word}: {_first_line(error)}"
            )
        translated.__cause__ = error
        return translated


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or repr(error)


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    known[key] = value
    while len(known) > _REMEMBERED:
        known.pop(next(iter(known)), None)

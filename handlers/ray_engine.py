"""The trainer's link to an engine that is a Ray actor.

The link never blocks: a word gives a future, which is completed on a thread of Ray's or of the line's. An
actor on the same host gets its words over a *line* (``line.py``), which the first hello makes; everybody
else, and everything that the line cannot carry, goes by Ray. What comes out is the same.

Errors come out as the actor raised them, with Ray's report as their cause. A dead actor is ``EngineGone``, at
once. An actor that Ray has restarted is another incarnation, and refuses every word that was meant for the
one before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ray

from ..fsm import checks
from ..fsm.contract import EngineStatus, Ticket
from ..fsm.engine import Answer
from ..fsm.engine_table import Session
from ..fsm.errors import EngineError, EngineGone, EngineUnknown, PlanUnknown, SetupError
from ..fsm.plan import Plan
from ..fsm.receipt import Expectation, Receipt
from .futures import again, begun
from .line import Broken, Kept, Line, connect
from .ray_reports import report
from .threads import spawn
from .words import LINE, read_answer
from .words import word as to_words

__all__ = ["RayEngine"]

_REMEMBERED = 16  # sessions, and layouts that were sent


class RayEngine:
    """An ``EngineLink`` to a Ray actor that mixes in ``RayReceiver``.

    Args:
        actor: the actor's handle.
        id: what the actor calls itself; by default the actor's id, as it does by default.
        ranks: how many ranks it is to have; an engine that says otherwise is refused. Any by default.
        line: whether words to an actor on this host go past Ray, which is several times as fast.

    Raises:
        SetupError: this is no actor, or not one that receives weights.
    """

    in_process = False
    """It is in a process of its own."""

    in_cluster = True
    """It is an actor."""

    def __init__(
        self,
        actor: Any,
        id: str | None = None,  # noqa: A002 - as it is called everywhere
        *,
        ranks: int | None = None,
        line: bool = True,
    ) -> None:
        if getattr(actor, "_actor_id", None) is None:
            needed = "the handle of an actor is needed, which remote() of its class gives"
            raise checks.refusal("RayEngine", "actor", actor, needed)
        if id is not None:
            checks.text("RayEngine", "id", id)
        if ranks is not None:
            checks.whole("RayEngine", "ranks", ranks)
        checks.flag("RayEngine", "line", line)
        if not hasattr(actor, "weightsync_word"):
            raise SetupError(
                f"{actor} does not receive weights: let its class inherit weightsync.RayReceiver"
            )
        self.actor, self.ranks = actor, ranks
        self._id = id if id is not None else actor._actor_id.hex()  # noqa: SLF001 - as Ray's documents use it
        self._lives: dict[Session, str] = {}
        self._sent: dict[tuple[str, str], None] = {}
        self._methods: dict[int, Any] = {}
        self._wanted, self._closed = line, False
        self._joining = threading.Lock()
        self._line: Line | None = None

    def __reduce__(self) -> Any:
        """A copy in another process has connections of its own."""
        return _engine, (self.actor, self._id, self.ranks, self._wanted)

    @property
    def id(self) -> str:
        """The engine's name."""
        return self._id

    @property
    def nearby(self) -> bool:
        """Whether it is known to be on this host: it has said hello, and words go to it past Ray."""
        return self._connected

    def hello(self) -> Future[EngineStatus]:
        """Ask the engine what it is, by Ray. While Ray restarts it, the question waits."""
        answer = begun()
        asked = ("line",) if self._wanted and not self._closed and not self._connected else ()

        def done(told: Any) -> None:
            status = self._recognise(read_answer("hello", told))
            offer = told[LINE] if len(told) > LINE else None
            if offer is None:
                answer.set_result(status)
            else:  # to connect takes a moment, which this thread does not have
                joining = spawn("weightsync-line", self._join, offer)
                joining.add_done_callback(lambda _: answer.set_result(status))

        # To ask again is harmless, so Ray may do it, and does until the actor is there or dead for good.
        self._by_ray("hello", to_words("hello", None, None, *asked), answer, done, retries=-1)
        return answer

    def alive(self) -> Future[bool]:
        """Whether there is an actor, however busy it is: only its death makes this False."""
        alive: Future[bool] = begun()

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
        if self._line is not None and not self._connected:
            self.hello()  # makes another line, for the words that follow

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
        """Close the line; the actor lives on."""
        with self._joining:
            self._closed = True
            line = self._line
        if line is not None:
            line.close()

    # -- the line --------------------------------------------------------------------------------------------

    @property
    def _connected(self) -> bool:
        return self._line is not None and not self._line.over

    def _join(self, offer: Any) -> None:
        line = connect(offer)
        if line is None:
            return
        with self._joining:
            unwanted = self._closed or self._connected
            if not unwanted:
                self._line = line
                line.end_with(self)
        if unwanted:
            line.close()

    # -- asking ----------------------------------------------------------------------------------------------

    def _ask(self, word: str, incarnation: str | None, *args: Any, retries: int = 0) -> Future[Any]:
        answer = begun()
        said = to_words(word, incarnation, *args)

        def done(told: Any) -> None:
            answer.set_result(read_answer(word, told))

        def heard(told: Any, error: Exception | None) -> None:
            """On the thread that reads the line, which waits for nothing."""
            try:
                if error is None:
                    done(told)
                elif isinstance(error, Kept):  # exceptions travel by Ray, which knows how
                    kept = to_words("outcome", incarnation, None, error.token)
                    self._by_ray(word, kept, answer, done)
                else:
                    self._explain(word, incarnation, error, answer)
            except BaseException as failed:  # noqa: BLE001 - it goes to whoever asked
                answer.set_exception(failed)

        line = self._line
        if line is None or not line.ask(said, heard):
            self._by_ray(word, said, answer, done, retries=retries)
        return answer

    def _by_ray(
        self,
        word: str,
        said: list[Any],
        answer: Future[Any],
        done: Callable[[Any], None],
        *,
        retries: int = 0,
    ) -> None:
        """Say a word by Ray. ``done`` gets what is told, on a thread of Ray's; errors go to ``answer``."""

        def replied(reply: Future[Any]) -> None:
            error = reply.exception()
            try:
                if error is not None:
                    raise self._translated(word, error)
                done(reply.result())
            except BaseException as failed:  # noqa: BLE001 - it goes to whoever asked
                answer.set_exception(failed)

        self._method(retries).remote(said).future().add_done_callback(replied)

    def _explain(self, word: str, incarnation: str | None, error: Exception, answer: Future[Any]) -> None:
        """The line broke before an answer came: fail with what became of the actor."""
        unanswered = f"engine {self.id} did not answer {word}"
        broken: EngineError = EngineError(f"{unanswered}: the line to it broke ({error})")
        broken.__cause__ = error
        if isinstance(error, Broken) and error.gone:
            gone = EngineGone(f"{unanswered}: The actor's process has ended")
            gone.__cause__ = error
            answer.set_exception(gone)
            return
        if self._closed:
            answer.set_exception(broken)
            return

        def done(told: Any) -> None:
            _, lives, *_ = told
            if incarnation is not None and lives != incarnation:
                raise EngineGone(f"{unanswered}: it was restarted, {lives} answers now") from error
            raise broken

        self._by_ray(word, to_words("hello", None), answer, done)

    def _method(self, retries: int) -> Any:
        # Whatever is set for the actor: what Ray repeated on its own would meet another incarnation.
        if retries not in self._methods:
            self._methods[retries] = self.actor.weightsync_word.options(max_task_retries=retries)
        return self._methods[retries]

    def _recognise(self, status: EngineStatus) -> EngineStatus:
        if status.engine != self.id:
            raise EngineUnknown(
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
            translated = EngineGone(f"engine {self.id} did not answer {word}: {report(error)}")
        else:
            translated = EngineError(f"engine {self.id}: Ray could not carry out {word}: {report(error)}")
        translated.__cause__ = error
        return translated


def _engine(actor: Any, name: str, ranks: int | None, line: bool) -> RayEngine:  # noqa: FBT001 - only for pickle
    return RayEngine(actor, name, ranks=ranks, line=line)


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    known[key] = value
    while len(known) > _REMEMBERED:
        known.pop(next(iter(known)), None)

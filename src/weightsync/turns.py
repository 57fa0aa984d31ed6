"""Whose turn it is: hand-overs of one ``WeightSync`` wait here, and one thread runs them, one at a time.

What becomes of weights that are brought while a round runs is decided by ``fsm/turns.py``; here it is done.
Weights that were superseded stay in the queue as an empty shell, which the thread passes by. They are told so
when the weights that took their place have a number, or have ended without one.

Those who block are let in by their numbers: while one of them has not been let in, whoever came later finds
this ``WeightSync`` busy. Whoever needs no copy is let in by the end of the round before, wherever its own
thread or task is then: what waits behind it may be what keeps that from running. Older weights never take the
place of newer ones.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable

from .fsm.contract import Weights
from .fsm.errors import RoundInProgress, SetupError
from .fsm.policy import Policy
from .fsm.results import PassedOver, RoundResult, passed_over
from .fsm.states import Outcome
from .fsm.turns import Turn, turn
from .joining import weights_for
from .pending import Pending

__all__ = ["Turns"]


class Turns:
    """The queue, and the thread that serves it.

    Args:
        policy: the user's.
    """

    run: Callable[[Pending, Weights], RoundResult]
    """Carries one hand-over out, on the thread. To be given before the first of them."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._jobs: queue.SimpleQueue[Pending | Callable[[], None] | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._running = threading.Lock()
        self._unfinished: list[Pending] = []
        self._blocked: list[Pending] = []
        self._numbers = itertools.count(1)
        self._delivered = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def pending(self, step: int, version: int | None = None) -> Pending:
        """A hand-over that has not been queued."""
        raises = self._policy.raise_on_failure
        return Pending(step, version, raises=raises, number=next(self._numbers))

    def catching_up(self, step: int) -> Pending:
        """A hand-over to whoever is behind. It waits its turn, and nothing takes its place."""
        return Pending(step, None, raises=self._policy.raise_on_failure, catches_up=True)

    def enter(self, pending: Pending, model: object, *, snapshot: bool) -> None:
        """Queue it, or pass it over, as the policy says; blocks where the policy says so."""
        try:
            while (before := self.try_to_enter(pending, model, snapshot=snapshot)) is not None:
                before.hold()
        except BaseException as error:
            self.leave(pending, error)
            raise

    def try_to_enter(self, pending: Pending, model: object, *, snapshot: bool) -> Pending | None:
        """The same without blocking: hands back whose end is to be waited for before it is tried again.

        Whoever does not try again has to :meth:`leave`: others wait behind it.

        Raises:
            RoundInProgress: a round is running and the policy refuses a second one.
            SetupError: there are no more turns.
        """
        while True:
            with self._turn:
                if pending.queued:
                    return None  # it was let in meanwhile
                decided = self._decided(pending)
                if self._admitted(pending, decided):
                    return None
                if decided is Turn.block and (snapshot or pending.weights is not None):
                    return self._block(pending)
            if decided is Turn.skip:
                pending.weights = None
                pending.finished(passed_over(pending.step, PassedOver("skipped", self._behind(pending))))
                self.leave(pending)
                return None
            pending.weights = weights_for(model, self._policy, snapshot=snapshot)
            pending.copied = snapshot

    def leave(self, pending: Pending, error: BaseException | None = None) -> None:
        """It blocks no more. If it was not let in it never will be: whoever waits behind it goes on."""
        while True:
            try:
                with self._turn:
                    self._blocked = [other for other in self._blocked if other is not pending]
                    self._let_in()
                if error is not None and not pending.queued and not pending.done:
                    pending.finished(error)
            except BaseException:  # noqa: BLE001, S112 - the first interrupt is raised by the caller
                continue
            return

    def numbered(self, pending: Pending, version: int | None) -> None:
        """The weights have a number now, or never will: tell those whose place they took."""
        self._tell([(old, self._behind(old)) for old in pending.replaced], pending, version)

    def in_turn(self, work: Callable[[], None]) -> None:
        """Have this done when what was begun before is over; waits for it if nothing was. Not once closed.

        Args:
            work: bounded, and raises nothing.
        """
        done = threading.Event()

        def job() -> None:
            try:
                work()
            finally:
                done.set()

        with self._turn:
            if self._closed:
                return
            idle = not self._unfinished
            self._start()
            self._jobs.put(job)
        if idle:
            done.wait()

    def close(self) -> None:
        """Take no more, and wait for those that were begun. May be done again if it was interrupted."""
        with self._turn:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    # -- inside ----------------------------------------------------------------------------------------------

    def _behind(self, pending: Pending) -> int:
        """0 for weights that are older than what engines have: newer ones were brought, and let in, first."""
        return max(0, pending.number - self._delivered)

    def _decided(self, pending: Pending) -> Turn:
        if self._closed:
            raise SetupError("this WeightSync is closed")
        ahead = self._ahead(pending)
        busy = bool(self._unfinished or ahead) and not pending.catches_up
        decided = turn(self._policy, busy=busy, behind=self._behind(pending))
        if decided is Turn.replace and ahead:
            return Turn.block  # it would overtake older weights, which would then be sent after these
        if decided is Turn.refuse:
            raise RoundInProgress(
                f"step {pending.step}: a round is in progress, and Policy(when_busy='refuse') does not queue"
            )
        return decided

    def _ahead(self, pending: Pending) -> list[Pending]:
        """Those who block and have come before, the first of them first."""
        before = [other for other in self._blocked if other.number < pending.number]
        return sorted(before, key=lambda other: other.number)

    def _newer(self, pending: Pending) -> Pending | None:
        """Weights that came later, and were let in sooner: those that are sent last."""
        return next((other for other in reversed(self._unfinished) if other.number > pending.number), None)

    def _block(self, pending: Pending) -> Pending:
        """Whose end this one waits for; whoever comes later waits for this one."""
        if pending not in self._blocked:
            self._blocked.append(pending)
        return [*self._unfinished, *self._ahead(pending)][0]

    def _let_in(self) -> None:
        """Those who block and need no copy, in their order, as far as there is room."""
        while self._blocked and not self._closed:
            first = min(self._blocked, key=lambda other: other.number)
            if first.weights is None or not self._admitted(first, self._decided(first)):
                return

    def _admitted(self, pending: Pending, decided: Turn) -> bool:
        """Whether it waits for nothing but its turn from now on."""
        if decided is Turn.replace and (newer := self._newer(pending)) is not None:
            self._give_way(pending, newer)
            return True
        if decided in (Turn.enter, Turn.replace) and pending.weights is not None:
            self._put(pending, decided)
            return True
        return False

    def _give_way(self, pending: Pending, newer: Pending) -> None:
        """These are not sent: newer ones are on their way, and tell them so."""
        pending.weights = None
        pending.superseded_by, pending.queued = newer, True
        newer.replaced.append(pending)
        self._blocked = [other for other in self._blocked if other is not pending]

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="weightsync-rounds", daemon=True)
            thread.start()
            self._thread = thread

    def _put(self, pending: Pending, decided: Turn) -> None:
        self._start()
        if decided is Turn.replace:
            waiting = [old for old in self._unfinished if not old.begun and not old.catches_up]
            waiting = [old for old in waiting if old.number < pending.number]
            pending.replaced = [*(older for old in waiting for older in old.replaced), *waiting]
        put = self._jobs.put
        # Nothing that an interrupt could come in between stands between these two.
        pending.queued = True
        put(pending)
        self._unfinished.append(pending)
        for old in pending.replaced:
            # Marked one by one: an interrupt leaves the others to be sent, which is no harm.
            old.superseded_by = pending
            old.weights = None
        self._unfinished = [old for old in self._unfinished if old.superseded_by is None]
        self._blocked = [other for other in self._blocked if other is not pending]

    def _begun(self, pending: Pending) -> Weights | None:
        """What is to be sent; None if newer weights took their place."""
        with self._turn:
            pending.begun = True
            weights, pending.weights = pending.weights, None
            return weights if pending.superseded_by is None else None

    def _serve(self) -> None:
        while (pending := self._jobs.get()) is not None:
            if not isinstance(pending, Pending):
                with self._running:
                    pending()
                continue
            weights = self._begun(pending)
            if weights is not None:
                self._one(pending, weights)
            del pending, weights

    def _one(self, pending: Pending, weights: Weights) -> None:
        with self._running:  # also if an interrupted start has left a second thread
            try:
                result = self.run(pending, weights)
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
                self._over(pending, None)
                pending.finished(error)
            else:
                self._over(pending, result)
                pending.finished(result)
                del result  # its error, if it has one, holds frames that hold tensors

    def _over(self, pending: Pending, result: RoundResult | None) -> None:
        self.numbered(pending, self._number_of(result))
        with self._turn:
            late = [(old, self._behind(old)) for old in pending.replaced]
            if result is not None and result.outcome in (Outcome.complete, Outcome.partial):
                self._delivered = max(self._delivered, pending.number)
            with contextlib.suppress(ValueError):
                self._unfinished.remove(pending)
            self._let_in()
        self._tell(late, pending, self._number_of(result))

    @staticmethod
    def _number_of(result: RoundResult | None) -> int | None:
        return None if result is None or result.version < 0 else result.version

    @staticmethod
    def _tell(replaced: list[tuple[Pending, int]], by: Pending, version: int | None) -> None:
        for old, behind in replaced:
            if old.superseded_by is not None and not old.done:
                old.finished(passed_over(old.step, PassedOver("superseded", behind, by.step, version)))

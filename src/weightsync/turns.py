"""Whose turn it is: hand-overs of one ``WeightSync`` wait here, and one thread runs them, one at a time.

What becomes of weights that are brought while a round runs is decided by ``fsm/turns.py``; here it is done.
Weights that were superseded stay in the queue as an empty shell, which the thread passes by. They are told so
when the weights that took their place have a number, or have ended without one.
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
        self._jobs: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._running = threading.Lock()
        self._unfinished: list[Pending] = []
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
        while (before := self.try_to_enter(pending, model, snapshot=snapshot)) is not None:
            before.hold()

    def try_to_enter(self, pending: Pending, model: object, *, snapshot: bool) -> Pending | None:
        """The same without blocking: hands back whose end is to be waited for before it is tried again.

        Raises:
            RoundInProgress: a round is running and the policy refuses a second one.
            SetupError: there are no more turns.
        """
        while True:
            with self._turn:
                decided = self._decided(pending)
                if decided in (Turn.enter, Turn.replace) and pending.weights is not None:
                    self._put(pending, decided)
                    return None
                if decided is Turn.block:
                    return self._unfinished[0]
            if decided is Turn.skip:
                pending.weights = None
                pending.finished(passed_over(pending.step, PassedOver("skipped", self._behind(pending))))
                return None
            pending.weights = weights_for(model, snapshot=snapshot)

    def numbered(self, pending: Pending, version: int | None) -> None:
        """The weights have a number now, or never will: tell those whose place they took."""
        for old in pending.replaced:
            if old.superseded_by is not None and not old.done:
                why = PassedOver("superseded", self._behind(old), pending.step, version)
                old.finished(passed_over(old.step, why))

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
        return pending.number - self._delivered

    def _decided(self, pending: Pending) -> Turn:
        if self._closed:
            raise SetupError("this WeightSync is closed")
        busy = bool(self._unfinished) and not pending.catches_up
        decided = turn(self._policy, busy=busy, behind=self._behind(pending))
        if decided is Turn.refuse:
            raise RoundInProgress(
                f"step {pending.step}: a round is in progress, and Policy(when_busy='refuse') does not queue"
            )
        return decided

    def _put(self, pending: Pending, decided: Turn) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="weightsync-rounds", daemon=True)
            thread.start()
            self._thread = thread
        if decided is Turn.replace:
            waiting = [old for old in self._unfinished if not old.begun and not old.catches_up]
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

    def _begun(self, pending: Pending) -> Weights | None:
        """What is to be sent; None if newer weights took their place."""
        with self._turn:
            pending.begun = True
            weights, pending.weights = pending.weights, None
            return weights if pending.superseded_by is None else None

    def _serve(self) -> None:
        while (pending := self._jobs.get()) is not None:
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
        self.numbered(pending, None)
        with self._turn:
            if result is not None and result.outcome in (Outcome.complete, Outcome.partial):
                self._delivered = max(self._delivered, pending.number)
            with contextlib.suppress(ValueError):
                self._unfinished.remove(pending)

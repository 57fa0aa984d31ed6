"""One ``receive`` under way: the thread that applies buckets, and how others stop it and wait for its end.

Whoever ends a session from outside cancels the reception, which closes its inlet, and then waits until it is
*settled*: until its thread writes nothing any more. Before that nobody may say what the weights are, and
nobody may write the same memory for another session.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress

from ..fsm.contract import Bucketful, Inlet
from ..fsm.engine_table import Session
from ..fsm.plan import Plan

__all__ = ["Reception"]

_MOST_SUMS = 4096  # buckets whose sums are remembered


class Reception:
    """The receiving half of one session, from the ticket to the receipt or the error."""

    def __init__(self, session: Session, plan: Plan) -> None:
        self.session, self.plan = session, plan
        self.tensors = self.bytes = 0
        self._lock = threading.Lock()
        self._inlet: Inlet | None = None
        self._cancelled = False
        self._settled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """Whether somebody else ended the session."""
        return self._cancelled

    def attach(self, inlet: Inlet) -> None:
        """Receive from here; closed at once if the session has ended meanwhile."""
        with self._lock:
            self._inlet = inlet
        if self._cancelled:
            self.shut()

    def run(self, inlet: Inlet, apply: Callable[[Bucketful], None], applied: Callable[[], None]) -> None:
        """Apply every bucket, say that all are applied, and let go of the transfer buffer."""
        with inlet.buckets() as frames:
            try:
                while self._next(frames, apply):
                    pass
            except BaseException as error:
                # The traceback would keep views of the transfer buffer, which is closed now.
                traceback.clear_frames(error.__traceback__)
                del frames
                raise
            applied()

    def cancel(self) -> None:
        """End it from outside: wakes its thread. Idempotent."""
        self._cancelled = True
        self.shut()

    def shut(self) -> None:
        """Close the inlet. That it cannot be closed properly is not worth more than the reason to do so."""
        with self._lock:
            inlet = self._inlet
        if inlet is not None:
            with suppress(Exception):
                inlet.close()

    def settle(self) -> None:
        """Its thread is out of the weights for good."""
        self._settled.set()

    def settled(self, limit: float) -> bool:
        """Wait for that, ``limit`` seconds at most."""
        return self._settled.wait(limit)

    def _next(self, frames: Iterator[Bucketful], apply: Callable[[Bucketful], None]) -> bool:
        """Apply the next bucket, if there is one, and forget it before another is asked for."""
        frame = next(frames, None)
        if frame is None:
            return False
        try:
            apply(frame)
        except BaseException as error:
            _name_bucket(error, frame.index)
            raise
        # What was really applied: the receipt says it, and the plan alone is no evidence.
        tensors, octets = _sums(self.plan, frame.index)
        self.tensors += tensors
        self.bytes += octets
        return True


def _name_bucket(error: BaseException, bucket: int) -> None:
    """The trainer may be at another bucket by now, so the error says at which one it came up."""
    with suppress(Exception):  # an error of somebody else's, which may not take attributes
        error.bucket = bucket  # type: ignore[attr-defined]


_known_sums: dict[tuple[str, int], tuple[int, int]] = {}


def _sums(plan: Plan, bucket: int) -> tuple[int, int]:
    """How many tensors a bucket completes, and its bytes. A plan is used for many rounds."""
    key = (plan.fingerprint, bucket)
    if key not in _known_sums:
        if len(_known_sums) >= _MOST_SUMS:
            _known_sums.clear()
        pieces = plan.buckets[bucket].pieces
        completed = sum(piece.stop == plan.tensors[piece.tensor].nbytes for piece in pieces)
        _known_sums[key] = (completed, sum(piece.nbytes for piece in pieces))
    return _known_sums[key]

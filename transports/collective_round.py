"""One round of the collective transport, on the trainer's side: its ranks, its group, and every wait.

All waits are the same one: until something is ready, or an engine is lost, or the round moves on, or the
phase is about to end, which then is the loss of those who are late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NoReturn

import torch

from ..fsm.contract import Port
from ..fsm.engine_table import Session
from ..fsm.errors import EngineSilent, PortClosed, TransportError
from ..fsm.plan import Plan
from ..fsm.receipt import Participant
from .bell import Bell
from .buffers import Pair
from .gloo import FORMING, Group, Operation, patience
from .hub import Hub
from .receptions import Receptions

__all__ = ["CollectiveRound"]

_GRACE = 1.0
"""Seconds from when a rank left until its engine must have said why. After that, nothing more will come."""

_GLANCE = 1.0
"""Seconds after which a wait asks again how long it may take."""


class CollectiveRound:
    """What lives as long as one round. ``end`` may be called beside everything else."""

    def __init__(self, buffers: Pair) -> None:
        self.bell = Bell()
        self.receptions = Receptions(self.bell)
        self.buffers = buffers
        self.engines: dict[int, Participant] = {}
        self._lock = threading.Lock()
        self._hub: Hub | None = None
        self._group: Group | None = None
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether it was cleaned or aborted."""
        return self._ended

    @property
    def hub(self) -> Hub:
        """The connections to the ranks."""
        if self._hub is None:
            raise PortClosed("the round ended before anybody could join")
        return self._hub

    @property
    def group(self) -> Group:
        """The group of the ranks."""
        if self._group is None:
            raise PortClosed("the round ended before there was a group")
        return self._group

    def listen(self, address: str, fingerprint: str) -> None:
        """Let the ranks join."""
        with self._lock:
            if not self._ended:
                self._hub = Hub(address, len(self.engines) + 1, fingerprint, self.bell.ring)

    def _form(self, session: Session, plan: Plan) -> None:
        """Make the group, in which all ranks take part at the same time."""
        with self._lock:
            if not self._ended:
                hub = self.hub
                hub.tell("form")
                self._group = Group(
                    hub.table, hub.publish, name=f"{session.round}/{session.epoch}", rank=0,
                    size=len(self.engines) + 1, host=hub.host, limit=patience(plan),
                    ring=self.bell.ring, connected=hub.connected,
                )  # fmt: skip

    def end(self, why: str) -> None:
        """Wake everybody, tell the ranks, close everything. Idempotent."""
        with self._lock:
            self._ended = True
        self.bell.ring()
        if self._hub is not None:
            hub = self._hub
            self.bell.wait(lambda: not hub.forming, FORMING)
            hub.close(why)
        if self._group is not None:
            self._group.close()

    def make_group(self, plan: Plan, port: Port) -> None:
        """Wait for the ranks, and connect them with each other."""
        hub = self.hub
        self._wait(port, "waiting for every rank to join", lambda: not hub.absent(), hub.absent)
        self._form(port.session, plan)
        self._wait(port, "making the group", lambda: hub.formed and self.group.formed, hub.unconnected)

    def begin(self, bucket: int, buffer: torch.Tensor, port: Port) -> Operation | None:
        """Start the broadcast of a bucket when every rank is ready for it; None for one without bytes."""
        if not buffer.numel():
            return None
        hub = self.hub
        doing = f"waiting for every rank to be ready for bucket {bucket}"
        self._wait(port, doing, lambda: not hub.late(bucket), lambda: hub.late(bucket))
        hub.tell("go", bucket=bucket)
        return self.group.broadcast(buffer)

    def finish(self, bucket: int, operation: Operation | None, port: Port) -> None:
        """Wait for the end of a broadcast."""
        if operation is not None:
            doing = f"broadcasting bucket {bucket}"
            self._wait(port, doing, lambda: operation.done)
            if operation.error is not None:
                self._explain(port, doing, operation.error)
        port.bucket_sent(bucket)

    # -- waiting ------------------------------------------------------------------------------------------

    def _wait(
        self, port: Port, doing: str, ready: Callable[[], bool], late: Callable[[], list[int]] = list
    ) -> None:
        """Wait until it is ``ready``. At the end of the phase, whoever left or is ``late`` is lost.

        Raises:
            PortClosed: the round moved on.
            TransportError: an engine was lost; its loss has been fired.
        """
        # A little before the end, so that the error says who is late, and not only that it is late.
        margin = min(0.5, port.limit / 10)
        while not (self._ended or port.closed):
            noted = self.bell.rings
            pause = self.look(port)
            self._refuse_losses(port, doing)
            if not pause and ready():
                port.progress()
                return
            left = port.limit - margin
            if left <= 0:
                self._lose_who_left(port)  # what it said on its way out is more than that it is late
                for engine in {self.engines[rank]: None for rank in late()}:
                    self.receptions.lose(engine, EngineSilent(f"engine {engine} is late: {doing}"), port)
                self._refuse_losses(port, doing)
                raise TransportError(f"{doing}: out of time")
            # The limit is asked for again: it is shorter once the last engine has paused.
            self.bell.rung(noted, min(left, pause or _GLANCE, _GLANCE))
        raise PortClosed(f"{doing}: the round moved on")

    def _explain(self, port: Port, doing: str, error: BaseException) -> NoReturn:
        """Raise what became of the group: the loss of an engine, if there soon is one, or ``error``."""
        end = time.monotonic() + _GRACE
        self._wait(port, doing, lambda: self.bell.rung(self.bell.rings, 0.05) or time.monotonic() > end)
        raise TransportError(f"{doing}: {error}") from error

    def look(self, port: Port) -> float:
        """Fire new losses. Hands back for how long ranks that left may still say why, in seconds."""
        self.receptions.look(port)
        return self._lose_who_left(port, _GRACE)

    def _lose_who_left(self, port: Port, grace: float = 0.0) -> float:
        """Fire the loss of those who left ``grace`` seconds ago. Hands back when the next one is due."""
        left = self._hub.left if self._hub is not None else {}
        return self.receptions.lose_who_left(left, self.engines, port, grace)

    def _refuse_losses(self, port: Port, doing: str) -> None:
        for engine, error in self.receptions.lost.items():
            if port.closed:
                raise PortClosed(f"{doing}: the round moved on") from error
            raise TransportError(f"{doing}: engine {engine} was lost: {error}") from error

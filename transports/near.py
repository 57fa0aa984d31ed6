"""A transport to engines on the trainer's host: rounds over memory that outlives them, of whatever kind.

What is said beside the memory, who is waited for and what is written when are the same for every kind
(``shm_round.py``). A kind says how its memory is made, and how a bucket is written to it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Generic

from ..fsm import checks
from ..fsm.contract import EngineLink, Port, Weights
from ..fsm.errors import PortClosed, SetupError, TransportError
from ..fsm.plan import Bucket, Plan
from ..fsm.receipt import Participant
from .octets import Source
from .packets import packet_socket
from .private_folder import PrivateFolder
from .shm_pool import M, Pool
from .shm_round import ShmRound
from .standing import Standing
from .weights import tensors_of

__all__ = ["NearTransport"]

_PREFIX = "weightsync-shm-"
_OVER = "the round is over"


class NearTransport(ABC, Generic[M]):
    """The part that all kinds share.

    Args:
        where: what a refusal calls this.
        name: under which engines find the receiving half.
        pool: of the memory.
        slots: how many buckets a ring holds.
        mode: ``"publish"``, ``"ring"`` or ``"auto"``.

    Raises:
        SetupError: a value that is none, or a system without sockets of the kind.
    """

    def __init__(self, where: str, name: str, pool: Pool[M], slots: int, mode: str) -> None:
        checks.whole(where, "slots", slots)
        try:
            packet_socket().close()
        except (OSError, AttributeError) as error:
            raise SetupError(
                f"this system has no sockets for {name!r} ({error}): use 'collective'"
            ) from error
        self._name, self._mode, self._slots = name, mode, slots
        self._pool = pool
        self._standing = Standing[ShmRound[M]]()
        self._folder: PrivateFolder | None = None
        self._memory = threading.Lock()  # who has it may use the pool

    @property
    def name(self) -> str:
        """Under which engines find the receiving half."""
        return self._name

    @abstractmethod
    def _write(self, plan: Plan, bucket: Bucket, tensors: Mapping[str, Source], segment: M, at: int) -> None:
        """Write ``bucket`` to ``segment`` from ``at`` on. It is there, for everybody, when this returns."""

    def _begin(self) -> None:
        """The trainer's tensors are about to be read."""

    def open(
        self, plan: Plan, weights: Weights, engines: Mapping[Participant, EngineLink], port: Port
    ) -> None:
        """Start the receiving halves, wait until they have joined, and have memory for the plan.

        Raises:
            TransportError: no engine joined, there is not enough memory, or too much of it is still in use.
        """
        round = ShmRound(self._pool, self._slots, self._name)
        self._standing.open(round)
        port.on_change(round.bell.ring)
        with suppress(PortClosed), self._memory:
            round.begin(port)
            round.admit(plan, engines, self._place(), port)
            round.await_joined(port)
            round.take_memory(plan, self._mode)
        if port.closed or round.ended:
            round.end(_OVER)  # the abort may have come before there was anything to abort

    def broadcast(self, plan: Plan, weights: Weights, port: Port) -> None:
        """Write every bucket, and show it to every engine that remains.

        Raises:
            PlanError: a tensor is no longer what the plan says.
            TransportError: no engine remains.
        """
        round = self._standing.at(port)
        if round is None:
            return
        with suppress(PortClosed), self._memory:
            round.begin(port)
            tensors = tensors_of(weights)
            self._begin()
            for bucket in plan.buckets:
                segment, at = round.room(plan, bucket, port)
                self._write(plan, bucket, tensors, segment, at)
                round.show(bucket.index, segment, at, last=bucket is plan.buckets[-1])
                port.bucket_sent(bucket.index)
            port.all_sent()

    def collect(self, plan: Plan, port: Port) -> None:
        """Wait for the receipts."""
        round = self._standing.at(port)
        if round is None:
            return
        with suppress(PortClosed):
            round.begin(port)
            round.receptions.collect(port, lambda: round.ended, round.look)

    def clean(self) -> None:
        """Remove the endpoint; the memory stays for the next round."""
        round = self._standing.round
        if round is not None:
            round.settle()
            self._standing.end(_OVER, round)

    def abort(self) -> None:
        """Wake sender and engines, and remove the endpoint."""
        self._standing.end("the sender aborted the round")

    def close(self) -> None:
        """Give memory and folder back. Engines keep what they use. A forked child gives nothing back."""
        if not self._standing.here:
            return
        self.abort()
        with self._memory:
            self._pool.close()
            if self._folder is not None:
                self._folder.close()
                self._folder = None

    def _place(self) -> Path:
        if self._folder is not None and not self._folder.there:
            # Engines know the memory by the folder: what they hold stays theirs, and other memory is made.
            self._pool.close()
            self._folder.close()
            self._folder = None
        if self._folder is None:
            try:
                self._folder = PrivateFolder(_PREFIX)
            except OSError as error:
                raise TransportError(
                    f"there can be no folder for the round's endpoint: {error}; set TMPDIR to one that can "
                    'be written, or take transport="collective"'
                ) from error
        return self._folder.path

"""The transport for engines on the trainer's host: memory that the trainer writes, and they read.

Two ways to use it, chosen by what the engines are:

* **publish and swap**, if one of them can *alias*: a buffer holds a whole version. The trainer writes
  straight into the one that nobody uses, and at their commit the engines swap to it: the weights are copied
  once, for any number of engines, and no engine has memory of its own for them. The version before stays
  whole beside it, so that an engine that does not commit still has it. Engines that do not alias copy out of
  the same buffer.
* a **ring**, if none of them can: a few slots, one bucket each. While the engines copy bucket k out of its
  slot, the trainer packs bucket k + 1 into the next one; a slot is written again when each engine that
  remains has let go of it.

The memory has no name, is made and touched once, and mapped once by each process (``segment.py``); who may
still read it is known (``shm_pool.py``). What is said beside it goes over a socket that is there for one
round (``shm_hub.py``, ``shm_inlet.py``).

A ticket carries the path of that socket and a secret. Whoever has it, on the same host and as the same user,
can join once for each rank.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, final

from ..fsm import checks
from ..fsm.contract import Capabilities, EngineLink, Port, Weights
from ..fsm.errors import PortClosed, SetupError, TransportError
from ..fsm.plan import Plan
from ..fsm.receipt import Participant
from .packets import packet_socket
from .packing import pack
from .private_folder import PrivateFolder
from .shm_inlet import NAME, aliasing_shm_inlet, shm_inlet
from .shm_pool import Pool
from .shm_round import ShmRound
from .standing import Standing
from .weights import tensors_of

__all__ = ["SharedMemoryTransport", "aliasing_shm_inlet", "shm_inlet"]

_PREFIX = "weightsync-shm-"
_OVER = "the round is over"
_MODES = ("auto", "publish", "ring")


@final
class SharedMemoryTransport:
    """Writes once for all engines of this host.

    Args:
        mode: ``"publish"``, ``"ring"``, or ``"auto"``: publish if an engine aliases, else the ring.
        slots: how many buckets the ring holds; each slot is as large as the largest bucket.
        buffers: how many buffers of a whole version there may be. Two are in turn; each further one is only
            made when an engine that is silent, or was removed, still uses one of them.

    Raises:
        SetupError: a value that is none, or a system without sockets of the kind.
    """

    def __init__(
        self, *, mode: Literal["auto", "publish", "ring"] = "auto", slots: int = 3, buffers: int = 4
    ) -> None:
        where = "SharedMemoryTransport"
        if mode not in _MODES:
            raise checks.refusal(where, "mode", mode, f"choose from {', '.join(map(repr, _MODES))}")
        checks.whole(where, "slots", slots)
        checks.whole(where, "buffers", buffers)
        try:
            packet_socket().close()
        except (OSError, AttributeError) as error:
            raise SetupError(
                f"this system has no sockets for {NAME!r} ({error}): use 'collective'"
            ) from error
        self._mode, self._slots = mode, slots
        self._pool = Pool(buffers)
        self._standing = Standing[ShmRound]()
        self._folder: PrivateFolder | None = None
        self._memory = threading.Lock()  # who has it may use the pool

    @property
    def name(self) -> str:
        """``"shm"``."""
        return NAME

    @property
    def capabilities(self) -> Capabilities:
        """Everything but other hosts."""
        return Capabilities(stages=True, aliases=True, cross_host=False, survives_loss=True, dtypes=None)

    def open(
        self, plan: Plan, weights: Weights, engines: Mapping[Participant, EngineLink], port: Port
    ) -> None:
        """Start the receiving halves, wait until they have joined, and have memory for the plan.

        Raises:
            TransportError: no engine joined, there is not enough memory, or too much of it is still in use.
        """
        round = ShmRound(self._pool, self._slots)
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
            for bucket in plan.buckets:
                segment, at = round.room(plan, bucket, port)
                pack(plan, bucket, tensors, round.octets(segment, at, bucket.nbytes))
                round.show(bucket.index, segment, at)
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
        """Give memory and folder back. Engines keep what they use."""
        self.abort()
        with self._memory:
            self._pool.close()
            if self._folder is not None:
                self._folder.close()
                self._folder = None

    def _place(self) -> Path:
        if self._folder is None:
            try:
                self._folder = PrivateFolder(_PREFIX)
            except OSError as error:
                raise TransportError(f"there can be no folder for the round's endpoint: {error}") from error
        return self._folder.path

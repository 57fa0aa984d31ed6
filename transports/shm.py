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

from collections.abc import Mapping
from typing import Literal, final

from ..fsm import checks
from ..fsm.contract import Capabilities
from ..fsm.plan import Bucket, Plan
from .near import NearTransport
from .octets import Source
from .packing import pack
from .segment import Segment
from .shm_inlet import NAME, aliasing_shm_inlet, shm_inlet
from .shm_pool import Pool

__all__ = ["SharedMemoryTransport", "aliasing_shm_inlet", "shm_inlet"]

_MODES = ("auto", "publish", "ring")


@final
class SharedMemoryTransport(NearTransport[Segment]):
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
        if buffers < 2:
            raise checks.refusal(where, "buffers", buffers, "two are needed at least: one is read meanwhile")
        super().__init__(where, NAME, Pool(buffers, Segment), slots, mode)

    @property
    def capabilities(self) -> Capabilities:
        """Everything but other hosts."""
        return Capabilities(stages=True, aliases=True, cross_host=False, survives_loss=True, dtypes=None)

    def _write(
        self, plan: Plan, bucket: Bucket, tensors: Mapping[str, Source], segment: Segment, at: int
    ) -> None:
        pack(plan, bucket, tensors, segment.octets[at : at + bucket.nbytes])

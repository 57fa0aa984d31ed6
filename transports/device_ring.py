"""A ring of buckets in device memory: the shared-memory transport's protocol over a back end for a device.

The trainer packs bucket k + 1 on the device while the engines copy bucket k out of it, also on the device. A
bucket is shown when the device has written it, and let go of when the device has read it (``finish``); all
else, who is waited for, cut off or lost, is that of memory of the host (``near.py``, ``shm_round.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ..fsm.contract import Capabilities, Inlet, Ticket
from ..fsm.engine_table import Session
from ..fsm.plan import Bucket, Plan
from .device_memory import DeviceMemory
from .device_segment import Claims, DeviceReach, DeviceSegment
from .near import NearTransport
from .octets import Source
from .packing import pack_by
from .shm_inlet import inlet_by
from .shm_pool import Pool

__all__ = ["DeviceRing", "device_inlet"]


class DeviceRing(NearTransport[DeviceSegment]):
    """Writes once for all engines that reach the device.

    Args:
        where: what a refusal calls this.
        name: under which engines find the receiving half.
        memory: of the device.
        slots: how many buckets the ring holds; each slot is as large as the largest bucket.

    Raises:
        SetupError: a value that is none, or a system without sockets of the kind.
    """

    def __init__(self, where: str, name: str, memory: DeviceMemory, slots: int) -> None:
        self._device, self._claims = memory, Claims(memory)
        super().__init__(where, name, Pool(1, partial(DeviceSegment, memory, self._claims)), slots, "ring")

    @property
    def capabilities(self) -> Capabilities:
        """Engines copy, and are on this host."""
        return Capabilities(stages=True, aliases=False, cross_host=False, survives_loss=True, dtypes=None)

    def close(self) -> None:
        """Give memory and folder back. What engines have opened is kept until they let go."""
        super().close()
        self._claims.close()

    def _begin(self) -> None:
        """What training has queued on any stream may still write the tensors."""
        self._device.settle()

    def _write(
        self, plan: Plan, bucket: Bucket, tensors: Mapping[str, Source], segment: DeviceSegment, at: int
    ) -> None:
        try:
            pack_by(self._device.copy, plan, bucket, tensors, segment.part(at, bucket.nbytes))
        finally:
            self._device.finish()  # also of a bucket that breaks off: nothing of a tensor is read any more


def device_inlet(
    memory: DeviceMemory, ticket: Ticket, session: Session, plan: Plan, limit: float, /
) -> Inlet:
    """The receiving half for one rank, over a back end of its own.

    Raises:
        PlanError: the sender has another plan.
        TransportError: the ticket does not say what it has to.
    """
    return inlet_by(DeviceReach(memory), ticket, session, plan, limit)

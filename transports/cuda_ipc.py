"""The transport for engines on GPUs of the trainer's host: a ring of buckets in memory of one GPU.

Trainer and engines each are processes that see that GPU; an engine's tensors may be on it, on another GPU
of its process or on the CPU, and so may the trainer's. Bits are moved, never numbers; a tensor that is to be
cast is cast on the CPU, so that its bytes are those that were digested.

**This has not been run on a GPU.** The ring is tried with a back end of the tests, a device that copies only
when it is waited for (``device_ring.py``); what is left to try is ``cuda_memory.py``.
"""

from __future__ import annotations

from typing import final

import torch

from ..fsm import checks
from ..fsm.contract import Inlet, Ticket
from ..fsm.engine_table import Session
from ..fsm.errors import SetupError
from ..fsm.plan import Plan
from .cuda_memory import CudaMemory, lacking
from .device_ring import DeviceRing, device_inlet

__all__ = ["NAME", "CudaIpcTransport", "cuda_ipc_inlet"]

NAME = "cuda_ipc"
_WHERE = "CudaIpcTransport"


@final
class CudaIpcTransport(DeviceRing):
    """Writes once, on a GPU, for all engines of this host that see it.

    Args:
        slots: how many buckets the ring holds; each slot is as large as the largest bucket.
        device: the GPU whose memory is the ring, such as ``"cuda:1"``; the current one by default.

    Raises:
        SetupError: there is no GPU here, or a value is none.
    """

    def __init__(self, slots: int = 3, device: torch.device | str | int | None = None) -> None:
        checks.whole(_WHERE, "slots", slots)
        missing = lacking()
        if missing:
            raise SetupError(f"transport {NAME!r} needs a GPU: {missing}; use 'shm' on this host")
        super().__init__(_WHERE, NAME, CudaMemory(_gpu(device)), slots)


def cuda_ipc_inlet(ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> Inlet:
    """The receiving half for one rank of an engine whose process sees the trainer's GPU.

    Raises:
        PlanError: the sender has another plan.
        TransportError: the ticket does not say what it has to.
    """
    return device_inlet(CudaMemory(), ticket, session, plan, limit)


def _gpu(given: torch.device | str | int | None) -> torch.device:
    """The GPU by its number: what is current may change from thread to thread."""
    try:
        device = torch.device("cuda" if given is None else given)
    except (RuntimeError, TypeError):
        device = torch.device("cpu")
    index = device.index if ":" in str(device) else torch.cuda.current_device()
    if device.type != "cuda" or not 0 <= index < torch.cuda.device_count():
        raise checks.refusal(_WHERE, "device", given, "a GPU that this process sees is needed, as 'cuda:0'")
    return torch.device("cuda", index)

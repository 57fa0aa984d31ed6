"""CUDA IPC as a back end: a block of the trainer's GPU, mapped by the processes of engines.

It goes through torch's own exports, whose values are plain. Torch counts for each export whether whoever
has opened it has let go, and keeps the block until then, also when it was dropped here; ``ipc_collect`` gives
back what nobody reads any more. A process that is killed lets go of nothing, so its count is taken down for
it.

A GPU has a number in each process, which ``CUDA_VISIBLE_DEVICES`` changes, so it is named by its UUID.

A lease is an object with the CUDA array interface. Everything that torch makes of it keeps it alive, so
whether a reader still has a view is a fact here, too.

**This has not been run on a GPU.** ROCm has the same functions under the same names in torch; it was not
tried either.
"""

from __future__ import annotations

import weakref
from typing import Any, final

import torch

from ..fsm.errors import TransportError
from .device_memory import Handle

__all__ = ["CudaMemory", "lacking"]

_VALUES = (str, bytes, int, int, bytes, int, bytes, bool)
"""UUID, handle of the memory, size, offset, counter's file and place, an event, and whether it counts."""

_C: Any = torch._C
_IPC: Any = torch.UntypedStorage
"""Its functions for exports are private, and the same from torch 2.6 to 2.13."""


def lacking() -> str:
    """Why there is no CUDA IPC here; empty if there is."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if not all(hasattr(_IPC, name) for name in ("_share_cuda_", "_new_shared_cuda", "_release_ipc_counter")):
        return f"torch {torch.__version__} cannot export device memory"
    return ""


@final
class CudaMemory:
    """Blocks of one GPU, or of others that were opened.

    Args:
        device: where blocks are made; the current GPU by default.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = torch.device("cuda") if device is None else device
        self._streams: set[torch.cuda.Stream] = set()

    def allocate(self, size: int) -> torch.Tensor:
        """A block of torch's allocator."""
        try:
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise TransportError(
                f"{size / (1 << 20):.1f} MiB of {self._device} cannot be had: use smaller or fewer slots "
                f"(Policy(bucket_bytes=...), CudaIpcTransport(slots=...))"
            ) from error

    def export(self, block: torch.Tensor) -> Handle:
        """Torch's own values, with the GPU's UUID in the place of its number."""
        try:
            _, *values = block.untyped_storage()._share_cuda_()
        except RuntimeError as error:
            raise TransportError(
                f"memory of {block.device} cannot be shared with other processes: {error}. Allocators with "
                "expandable segments, and some containers, do not allow it"
            ) from error
        return (_uuid(block.device.index), *values)

    def withdraw(self, handle: Handle) -> None:
        """Take the count of this export down, as whoever opened it would have done."""
        uuid, _, _, _, counter, place, _, _ = _checked(handle)
        _IPC._release_ipc_counter(counter, place, device=_visible().get(uuid))

    def open(self, handle: Handle, size: int) -> torch.Tensor:
        """Map it, on the same GPU."""
        missing = lacking()
        if missing:
            raise TransportError(f"the trainer's GPU cannot be reached from this process: {missing}")
        uuid, memory, nbytes, offset, counter, place, event, wait = _checked(handle)
        if nbytes != size:
            raise TransportError(f"a block of {size} bytes was announced, and there are {nbytes}")
        index = _visible().get(uuid)
        if index is None:
            raise TransportError(
                f"the trainer's buffers are on GPU {uuid}, which this process does not see: let "
                "CUDA_VISIBLE_DEVICES name it here, too"
            )
        torch.cuda.init()
        try:
            storage = _IPC._new_shared_cuda(index, memory, nbytes, offset, counter, place, event, wait)
        except RuntimeError as error:
            raise TransportError(f"the trainer's memory on GPU {uuid} cannot be mapped: {error}") from error
        block = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index))
        return block.set_(storage, 0, (nbytes,), (1,))

    def lease(self, block: torch.Tensor, start: int, size: int) -> tuple[torch.Tensor, weakref.ref[Any]]:
        """A tensor that keeps an object of ours."""
        lease = _Lease(block, start, max(1, size))
        view = torch.as_tensor(lease, device=block.device)
        if view.data_ptr() != block.data_ptr() + start:
            raise TransportError("torch copied a view of the trainer's memory instead of making one")
        return view[:size], weakref.ref(lease)

    def settle(self) -> None:
        """Every stream of every GPU that this process uses."""
        for index in _used():
            torch.cuda.synchronize(index)

    def copy(self, into: torch.Tensor, of: torch.Tensor) -> None:
        """Queue it."""
        for tensor in (into, of):
            if tensor.is_cuda:
                self._streams.add(torch.cuda.current_stream(tensor.device))
        with torch.inference_mode():  # in which tensors made in it can be written, too
            into.copy_(of, non_blocking=into.is_cuda)  # into memory of the host, only pinned one would gain

    def finish(self) -> None:
        """Record an event behind what was queued, and wait for it without spinning.

        Also on this thread's own streams: whoever reads a lease without ``copy`` does so there, unless he
        waits for it himself.
        """
        streams, self._streams = self._streams, set()
        streams |= {torch.cuda.current_stream(index) for index in _used()}
        events = []
        for stream in streams:
            event = torch.cuda.Event(blocking=True)
            event.record(stream)
            events.append(event)
        for event in events:
            event.synchronize()

    def collect(self) -> None:
        """Blocks that were dropped here, and that nobody else has open. Nothing else is collected."""
        torch.cuda.ipc_collect()


@final
class _Lease:
    """A part of a block, as the CUDA array interface describes it."""

    def __init__(self, block: torch.Tensor, start: int, size: int) -> None:
        self._block, self._start, self._size = block, start, size

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        place = (self._block.data_ptr() + self._start, False)
        return {"shape": (self._size,), "typestr": "|u1", "data": place, "version": 2}


def _checked(handle: Handle) -> tuple[Any, ...]:
    kinds = tuple(map(type, handle))
    if kinds != _VALUES:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise TransportError(f"({names}) is no export of CUDA memory: trainer and engine differ in torch")
    return handle


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _used() -> list[int]:
    """The GPUs that this process has done something on. To ask one of the others would cost it memory."""
    return [index for index in range(torch.cuda.device_count()) if _C._cuda_hasPrimaryContext(index)]


def _visible() -> dict[str, int]:
    """The GPUs that this process sees, by UUID."""
    return {_uuid(index): index for index in range(torch.cuda.device_count())}

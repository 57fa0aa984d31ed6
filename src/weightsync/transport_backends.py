"""The transports by name: those of the library, and those that other packages bring as entry points.

A package of yours brings one called ``"mine"`` with these lines of its ``pyproject.toml``; what they name is
called without arguments and hands back a transport::

    [project.entry-points."weightsync.transports"]
    mine = "my_package.transport:MyTransport"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from .backends import Backend, Backends, Mode
from .fsm import checks

if TYPE_CHECKING:
    from .fsm.contract import Transport  # which a machine without any packages cannot import

__all__ = ["GROUP", "TABLE", "made", "transports"]

GROUP = "weightsync.transports"
"""The entry points that name transports."""

# fmt: off
TABLE = (
    Backend("memory", ".transports.memory", "MemoryTransport", ("torch", "xxhash"),
            "engines in this process"),
    Backend("collective", ".transports.collective", "CollectiveTransport", ("torch", "numpy", "xxhash"),
            "engines in processes of their own (gloo)"),
    Backend("shm", ".transports.shm", "SharedMemoryTransport", ("torch", "numpy", "xxhash", "msgpack"),
            "engines in processes of this host, by shared memory"),
    Backend("cuda_ipc", ".transports.cuda_ipc", "CudaIpcTransport", ("torch", "numpy", "xxhash", "msgpack"),
            "engines on GPUs of this host, by CUDA IPC; not run on a GPU so far"),
    Backend("objects", ".transports.objects", "ObjectStoreTransport", ("torch", "numpy", "xxhash", "ray"),
            "engines in Ray actors, by Ray's object store"),
)
# fmt: on
"""Those of the library."""

METHODS = ("open", "broadcast", "collect", "clean", "abort", "close")
"""What a transport can be asked."""


def transports(mode: Mode = "warn") -> Backends:
    """The transports that can be named."""
    return Backends("transport", TABLE, group=GROUP, mode=mode, also=("auto",))


def made(backends: Backends, name: str) -> Transport:
    """The transport called so.

    Raises:
        BackendUnavailable: it is absent or broken, or cannot be made here.
        SetupError: there is none, or what was made is no transport.
        Exception: a mistake in its own code, as it was raised.
    """
    transport = backends.made(name)
    if not checks.has(transport, METHODS) or not hasattr(transport, "capabilities"):
        needed = f"what the entry point {name!r} of {GROUP} makes has to be a transport"
        raise checks.refusal("WeightSync", "transport", transport, needed)
    return cast("Transport", transport)

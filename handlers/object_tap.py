"""Counts the collectives of whole objects that a piece of work calls: the slow ones, that a plan spares.

They are counted where ``torch.distributed`` hands them out, for the thread that does the work alone. The
names are put back when nobody counts any more.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["ObjectCount", "counted"]

_NAMES = (
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
)  # fmt: skip
_lock = threading.Lock()
_here = threading.local()
_taps: dict[str, tuple[Any, Any]] = {}  # what was there, and what is there instead
_users = 0


class ObjectCount:
    """How many there were."""

    def __init__(self) -> None:
        self.calls = 0


@contextmanager
def counted() -> Iterator[ObjectCount]:
    """Count those of this thread, until the end of the block."""
    count, outer = ObjectCount(), getattr(_here, "count", None)
    _install()
    _here.count = count
    try:
        yield count
    finally:
        _here.count = outer
        if outer is not None:
            outer.calls += count.calls
        _remove()


def _install() -> None:
    global _users  # noqa: PLW0603 - the names that are tapped are everybody's, too
    import torch.distributed as dist

    with _lock:
        _users += 1
        if _users > 1:
            return
        for name in _NAMES:
            real = getattr(dist, name, None)  # a torch without distributed has none
            if real is not None:
                _taps[name] = (real, _tapped(real))
                setattr(dist, name, _taps[name][1])


def _remove() -> None:
    global _users  # noqa: PLW0603
    import torch.distributed as dist

    with _lock:
        _users -= 1
        if _users:
            return
        for name, (real, tap) in _taps.items():
            if getattr(dist, name) is tap:  # else somebody has put his own there, and calls ours
                setattr(dist, name, real)
        _taps.clear()


def _tapped(real: Any) -> Any:
    @functools.wraps(real)
    def tap(*args: Any, **kwargs: Any) -> Any:
        count = getattr(_here, "count", None)
        if count is not None:
            count.calls += 1
        return real(*args, **kwargs)

    return tap

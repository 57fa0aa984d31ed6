"""Ray's object store, as the transport uses it: the one module of this folder that knows Ray.

A bucket is put as a flat array of bytes. Ray keeps the memory of such an array beside its description and
copies it once, to the store; whoever gets it reads it there. Its view is read-only, and keeps the memory.
References travel by Ray alone, in the arguments and answers of calls to the board, where Ray counts who holds
one. Nothing here is pickled by us; Ray's wire is Ray's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, final

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..fsm.errors import SetupError, TransportError
from .board import Board
from .octets import Octets

__all__ = ["BoardLink", "board_called", "check_ready", "check_room", "fetch", "give_back", "own_board", "put"]

_NAMESPACE = "weightsync"
_CALLS = 10_000
"""How many calls the board has open at once: one a rank, and one of the trainer."""

_SLICE = 0.2
"""Seconds after which a wait for an object looks whether it was told to stop."""

_FIT = 1.25
"""The store needs so many times the bytes of what is put: it does not fill gaps, and frees a little late."""


def check_ready(what: str) -> None:
    """Raise SetupError unless this process is in a Ray cluster."""
    if not ray.is_initialized():
        raise SetupError(
            f"{what} needs Ray, which is not initialised in this process: call ray.init() first, and have "
            "engines in Ray actors"
        )


def check_room(nbytes: int) -> None:
    """Raise TransportError unless so many bytes of buckets can be in this node's store at a time.

    Without that, Ray would go on all the same, by way of the disk.
    """
    need, room = int(nbytes * _FIT), _capacity()
    if nbytes and need > room:
        raise TransportError(
            f"the object store of this node has {room} bytes, and the buckets that are there at a time need "
            f"{need}: start Ray with object_store_memory={need} or more, or set a smaller "
            "Policy(bucket_bytes=...)"
        )


def _capacity() -> int:
    here = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == here:
            return int(node["Resources"].get("object_store_memory", 0))
    return 0


def put(octets: Octets) -> list[Any]:
    """Copy these bytes to the store; the reference, in a list, as the board takes it.

    Raises:
        TransportError: they do not fit.
    """
    try:
        return [ray.put(octets)]
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
        raise TransportError(
            f"the object store is full: {octets.nbytes} more bytes do not fit; let go of other objects, or "
            f"start Ray with at least {octets.nbytes} more object_store_memory"
        ) from error


def fetch(refs: list[Any], limit: float, stopped: Callable[[], str]) -> Octets:
    """The bytes under a reference: a read-only view of the store.

    Args:
        refs: the reference, in a list.
        limit: seconds; they may have to come from another node.
        stopped: why not to wait any longer, if so.

    Raises:
        TransportError: they did not come, or it was stopped.
    """
    end = time.monotonic() + limit
    try:
        while not ray.wait(refs, timeout=min(_SLICE, limit))[0]:
            why = stopped() or ("" if time.monotonic() < end else f"they did not come in {limit:g} s")
            if why:
                raise TransportError(f"the bytes are not there: {why}")
        found = ray.get(refs[0], timeout=max(limit, 1.0))  # it is here; but a node can still go
    except ray.exceptions.RayError as error:
        raise TransportError(f"the bytes are lost, with the trainer or a node: {_line(error)}") from error
    if not isinstance(found, np.ndarray) or found.dtype != np.uint8:
        raise TransportError(f"what lies in the store is no bucket, but {type(found).__name__}")
    found.flags.writeable = False  # which it is already, unless it is no view of the store
    return found


@final
class BoardLink:
    """A process's end of a board. Every call gives a future, which is completed on a thread of Ray's.

    Args:
        name: of a board that there is; by default a new one is made, which ends with this process.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name or f"objects-{secrets.token_urlsafe(12)}"
        self._gone = False
        self._node = ray.get_runtime_context().get_node_id()
        self._process = os.getpid()
        if name is None:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
            make: Any = ray.remote(Board)
            self._actor = make.options(
                name=self.name, namespace=_NAMESPACE, num_cpus=0, max_concurrency=_CALLS, max_restarts=0,
                scheduling_strategy=here,
            ).remote()  # fmt: skip
        else:
            try:
                self._actor = ray.get_actor(name, namespace=_NAMESPACE)
            except (ValueError, ray.exceptions.RayError) as error:
                raise TransportError(
                    f"this ticket leads nowhere: its trainer is gone, or in another Ray cluster ({name})"
                ) from error

    @property
    def serves(self) -> bool:
        """Whether it is there, as far as is known, and of the cluster that this process is in now."""
        there = not self._gone and self._process == os.getpid() and ray.is_initialized()
        return there and ray.get_runtime_context().get_node_id() == self._node

    def call(self, method: str, *values: Any) -> Future[Any]:
        """Call it; what Ray has to report of a board that is gone comes out as TransportError."""
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()

        def replied(reply: Future[Any]) -> None:
            error = reply.exception()
            if error is None:
                answer.set_result(reply.result())
            else:
                self._gone = isinstance(error, ray.exceptions.RayActorError)
                gone = TransportError(f"the trainer's board is gone, or cannot be reached: {_line(error)}")
                gone.__cause__ = error
                answer.set_exception(gone)

        getattr(self._actor, method).remote(*values).future().add_done_callback(replied)
        return answer

    def tell(self, method: str, *values: Any) -> None:
        """Call it, whatever comes of it: for what must not fail, and nobody waits for."""
        try:
            getattr(self._actor, method).remote(*values)
        except Exception:  # noqa: BLE001 - Ray was shut down, and the board with it
            return

    def kill(self) -> None:
        """End the board. Idempotent."""
        if ray.is_initialized() and self._process == os.getpid():
            with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it is gone already
                ray.kill(self._actor)


_links: dict[str, BoardLink] = {}
_joining = threading.Lock()
_own: BoardLink | None = None
_users: weakref.WeakSet[object] = weakref.WeakSet()


def own_board(user: object) -> BoardLink:
    """The board of this process, which all its transports share; made for the first, and if it is gone."""
    global _own  # noqa: PLW0603 - there is one of this process
    with _joining:
        _users.add(user)
        if _own is not None and not _own.serves:
            _own.kill()
            _own = None
        _own = _own or BoardLink()
        return _own


def give_back(user: object) -> None:
    """End the board of this process if nobody else uses it. Idempotent."""
    global _own
    with _joining:
        _users.discard(user)
        board = None
        if not _users:
            board, _own = _own, None
    if board is not None:
        board.kill()


def board_called(name: str) -> BoardLink:
    """The link of this process to a trainer's board; the last few are kept."""
    with _joining:
        link = _links.pop(name, None) or BoardLink(name)
        _links[name] = link
        while len(_links) > 4:
            _links.pop(next(iter(_links)))
        return link


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__

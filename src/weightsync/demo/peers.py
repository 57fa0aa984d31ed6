"""The other rank of a trainer that shards, wherever it runs: in a process of its own, or in a Ray actor.

It is asked by name for what :class:`.sharded.ShardedRank` can do, one thing at a time, and answers. Whoever
asks does his own part meanwhile, and takes the answer then.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from ..fsm.errors import RankFailed, RankLost
from .grpo import Settings
from .sharded import Place, ShardedRank

__all__ = ["Peer", "ProcessPeer", "RayPeer"]

START = 120.0
"""Seconds that a process has to import torch, on a machine that is busy."""


class Peer(Protocol):
    """The other rank."""

    pid: int

    def ask(self, word: str, *given: object) -> None:
        """Have it begin."""

    def answer(self, limit: float) -> Any:
        """What it was asked for last.

        Raises:
            RankFailed: it raised.
            RankLost: it is gone, or says nothing.
        """

    def gone(self) -> bool:
        """Whether it has ended; waits a moment for one that is about to."""

    def end(self) -> None:
        """Have it give everything back when it is done with what it does. Does not wait."""

    def close(self, limit: float) -> None:
        """See that it is gone, after so many seconds at the latest."""


def _failed(rank: int, error: BaseException) -> RankFailed:
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return RankFailed(f"rank {rank} of the trainer: {text}")


# -- in a process -------------------------------------------------------------------------------------------


class ProcessPeer:
    """A spawned process. It does not hear Ctrl-C, which is rank 0's affair, and ends when rank 0 is gone."""

    def __init__(self, place: Place, settings: Settings) -> None:
        self._rank = place.rank
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, place, settings), name=f"demo-rank-{place.rank}", daemon=True
        )
        with _uninterrupted():
            self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0

    def ask(self, word: str, *given: object) -> None:
        """Have it begin."""
        # Pickled here: a tensor that goes as multiprocessing sends it would be shared, and not copied.
        try:
            self._line.send_bytes(pickle.dumps((word, given)))
        except OSError as error:
            raise self._lost("does not listen") from error

    def answer(self, limit: float) -> Any:
        """What it was asked for last; the first answer says that it is there."""
        try:
            if not self._line.poll(limit):
                raise self._lost(f"has not answered for {limit:g} s")
            done, value = pickle.loads(self._line.recv_bytes())  # noqa: S301 - of a process of ours
        except (EOFError, OSError) as error:
            raise self._lost("is gone") from error
        if not done:
            raise RankFailed(str(value))
        return value

    def gone(self) -> bool:
        """Whether it has ended."""
        self._process.join(1.0)
        return self._process.exitcode is not None

    def end(self) -> None:
        """Have it give everything back."""
        with contextlib.suppress(OSError):
            self._line.send_bytes(pickle.dumps(("leave", ())))

    def close(self, limit: float) -> None:
        """See that it is gone, after so many seconds at the latest."""
        self._process.join(limit)
        if self._process.exitcode is None:
            self._process.kill()
        self._process.join()
        self._line.close()
        self._process.close()

    def _lost(self, why: str) -> RankLost:
        self._process.join(1.0)
        code = self._process.exitcode
        how = "" if code is None else f", with exit status {code}"
        return RankLost(f"rank {self._rank} of the trainer {why}{how}")


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """What is started meanwhile never hears Ctrl-C; this process hears it afterwards."""
    resource_tracker.ensure_running()  # of multiprocessing, which would let the signal through when it begins
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(line: Connection, place: Place, settings: Settings) -> None:
    """The life of that process."""
    torch.set_num_threads(1)
    rank = ShardedRank(place, settings)
    with contextlib.suppress(EOFError, OSError):  # rank 0 is gone
        line.send_bytes(pickle.dumps((True, None)))  # ready
        word = ""
        while word != "leave":
            word, given = pickle.loads(line.recv_bytes())  # noqa: S301 - of the process that started this one
            try:
                said = True, getattr(rank, word)(*given)
            except Exception as error:  # noqa: BLE001 - rank 0 raises it
                said = False, str(_failed(place.rank, error))
            line.send_bytes(pickle.dumps(said))


# -- in an actor --------------------------------------------------------------------------------------------


class RayPeer:
    """An actor. A rank that is gone took its shards with it, so it is not started again."""

    def __init__(self, place: Place, settings: Settings) -> None:
        import ray

        self._rank = place.rank
        self._ray = ray
        actor: Any = ray.remote(num_cpus=0, max_restarts=0)(_RankActor)
        self._actor: Any = actor.remote(place, settings)
        self._asked: Any = self._actor.pid.remote()
        self.pid = 0

    def ask(self, word: str, *given: object) -> None:
        """Have it begin."""
        self._asked = self._actor.do.remote(word, *given)

    def answer(self, limit: float) -> Any:
        """What it was asked for last; the first answer says that it is there."""
        try:
            found = self._ray.get(self._asked, timeout=limit)
        except self._ray.exceptions.GetTimeoutError as error:
            raise RankLost(f"rank {self._rank} of the trainer has not answered for {limit:g} s") from error
        except self._ray.exceptions.RayTaskError as error:
            raise _failed(self._rank, error.cause or error) from error
        except self._ray.exceptions.RayError as error:
            raise RankLost(f"rank {self._rank} of the trainer is gone ({type(error).__name__})") from error
        if not self.pid:
            self.pid = int(found)
        return found

    def gone(self) -> bool:
        """Whether it has ended."""
        try:
            self._ray.get(self._actor.__ray_ready__.remote(), timeout=5.0)
        except self._ray.exceptions.GetTimeoutError:
            return False  # it is busy
        except self._ray.exceptions.RayError:
            return True
        return False

    def end(self) -> None:
        """Have it give everything back."""
        self._asked = self._actor.do.remote("leave")

    def close(self, limit: float) -> None:
        """See that it is gone, after so many seconds at the latest."""
        with contextlib.suppress(Exception):
            self._ray.get(self._asked, timeout=limit)
        with contextlib.suppress(Exception):
            self._ray.kill(self._actor)


class _RankActor:
    """A rank in an actor."""

    def __init__(self, place: Place, settings: Settings) -> None:
        torch.set_num_threads(1)
        self._rank = ShardedRank(place, settings)

    def pid(self) -> int:
        """Whose it is; the first answer, which says that it is ready."""
        return os.getpid()

    def do(self, word: str, *given: object) -> Any:
        """What was asked."""
        return getattr(self._rank, word)(*given)

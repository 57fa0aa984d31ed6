"""What is done to processes: ended, stopped for a while, held at a point until the test has seen it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from casekit.levels import eventually

__all__ = ["Die", "Freeze", "Hold", "end", "freeze", "frozen", "keeper_of", "thaw"]

PATIENCE = 60.0


def freeze(process: int, seconds: float | None = None) -> None:
    """Stop a process; after ``seconds``, something that nobody waits for lets it go on.

    That has a process group of its own: Ray ends the whole group of a worker that is gone, and what was
    stopped by a trainer that then dies has to go on all the same.
    """
    if seconds is not None:
        waker = f"(sleep {seconds:.3f}; kill -CONT {process}) >/dev/null 2>&1 </dev/null &"
        subprocess.run(["/bin/sh", "-c", waker], check=True, start_new_session=True)
    if process == os.getpid():  # this very thread, or it would go on for a moment, long enough to answer
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    else:
        with contextlib.suppress(ProcessLookupError):  # another fault of the same round has killed it
            os.kill(process, signal.SIGSTOP)


def end(process: int) -> None:
    """Kill it. It may be dead already, of another fault of the same round."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def thaw(process: int) -> None:
    """Let it go on."""
    os.kill(process, signal.SIGCONT)


def keeper_of(lock: str) -> int:
    """The process of the actor that keeps this lock."""
    keeper: Any = ray.get_actor(f"lock-{lock}", namespace="weightsync")
    return int(ray.get(keeper.__ray_call__.remote(lambda _: os.getpid()), timeout=PATIENCE))


def frozen(process: int) -> bool:
    """Whether it is stopped."""
    return "\nState:\tT" in Path(f"/proc/{process}/status").read_text()


@dataclass(frozen=True)
class Die:
    """Ends the process that it is called in, as the kernel does it."""

    def __call__(self) -> None:
        """Go off."""
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Freeze:
    """Stops the process that it is called in for so many seconds."""

    seconds: float

    def __call__(self) -> None:
        """Go off."""
        freeze(os.getpid(), self.seconds)


@dataclass(frozen=True)
class Hold:
    """Says that a point was reached, and stays there until it is let go. Works across processes.

    Args:
        folder: where the two files are that say so.
    """

    folder: Path

    def __call__(self) -> None:
        """Go off."""
        (self.folder / "reached").touch()
        end = threading.Event()
        eventually(lambda: (self.folder / "go").exists() or end.wait(0.01), PATIENCE)

    def reached(self, over: Callable[[], str] = str) -> None:
        """Wait until somebody is there, or until it is ``over``, which says how."""
        there = self.folder / "reached"
        assert eventually(lambda: there.exists() or bool(over()), PATIENCE), "nobody came to the point"
        assert there.exists(), f"it was over before the point was reached: {over()}"

    def let_go(self) -> None:
        """Whoever is there goes on."""
        (self.folder / "go").touch()

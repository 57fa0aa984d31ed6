"""Two ranks of a trainer in processes of their own, which do as they are told; and the models they shard.

Both start once, join one gloo group, and then play *scenes*: functions of ``shardscenes``, by name. A scene
runs on both ranks at once, and hands back what each of them saw. One that takes too long ends both processes,
and so the test.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["FORMS", "RANKS", "Pair", "pair_of_ranks"]

RANKS = 2
DEADLINE = 60.0
"""Seconds that no scene takes; starting includes loading torch, twice, on a busy machine."""

FORMS = ("flat", "original", "kept", "mixed", "dtensor", "plain")
"""FSDP1 without and with ``use_orig_params``, gathered from then on, in low precision; FSDP2; neither."""


class Pair:
    """The two of them."""

    def __init__(self, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(RANKS)]
        self._pipes = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(target=serve, args=(rank, folder, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        self._answers("start", DEADLINE)

    def play(self, scene: str, **script: Any) -> list[Any]:
        """What each rank saw of a scene."""
        for pipe in self._pipes:
            pipe.send((scene, script))
        return self._answers(scene, DEADLINE)

    def end(self) -> None:
        """They are not needed any more, and to end by themselves takes them longer than a scene."""
        for process in self._processes:
            process.kill()
            process.join(10)
        for pipe in self._pipes:
            pipe.close()

    def _answers(self, scene: str, limit: float) -> list[Any]:
        end, found = time.monotonic() + limit, []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(max(0.0, end - time.monotonic())), f"rank {rank} hangs in {scene}"
            good, what = pipe.recv()
            found.append((good, what))
        for rank, (good, what) in enumerate(found):
            assert good, f"rank {rank} in {scene}: {what}"
        return [what for _, what in found]


@contextmanager
def pair_of_ranks() -> Iterator[Pair]:
    """Two ranks, for as long as the block."""
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(folder)
        try:
            yield pair
        finally:
            pair.end()


def serve(rank: int, folder: str, pipe: Connection) -> None:
    """One rank, in its process."""
    import torch
    import torch.distributed as dist

    if "SNAPSHOT_MUTANT" in os.environ:
        import snapshotmutants

        snapshotmutants.install()
    import shardscenes

    torch.set_num_threads(1)
    stores: Any = dist
    store = stores.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    pipe.send((True, "here"))
    number = 0
    while True:
        try:
            scene, script = pipe.recv()
        except EOFError:
            break
        number += 1
        stage = shardscenes.Stage(rank, store, f"scene-{number}")
        try:
            pipe.send((True, getattr(shardscenes, scene)(stage, **script)))
        except BaseException as error:  # noqa: BLE001 - the test raises it
            import traceback

            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        finally:
            stage.close()
            shardscenes.mended()
    dist.destroy_process_group()

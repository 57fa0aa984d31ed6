"""A contestant's trainer: a process that the benchmark tells what to do, one line of JSON at a time.

    python -m benchmarks.samehost_trainer '{"side": "gloo", ...}'

It knows the three sides by one interface. What is timed is one call of ``hand_over``; weights change before
it, and receivers say their checksums after it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import IO, Any

import torch

from .samehost_layouts import LAYOUTS, checksum, renew, tensors
from .samehost_meter import Stopwatch, forget_peak, memory_of, own_memory, tree
from .samehost_side import Absent, Side, Spec

__all__ = ["serve"]


def side_of(spec: Spec, model: dict[str, torch.Tensor]) -> Side:
    """The side that ``spec`` names.

    Raises:
        Absent: it cannot take part here.
    """
    if spec.side == "ours":
        from .samehost_ours import Ours

        return Ours(spec, model)
    if spec.side == "gloo":
        from .samehost_gloo import Gloo

        return Gloo(spec, model)
    from .samehost_verl import Verl

    return Verl(spec, model)


class Trainer:
    """The process's work."""

    def __init__(self, spec: Spec) -> None:
        self._own = own_memory()
        self._model = tensors(LAYOUTS[spec.layout], seed=1)
        self._side = side_of(spec, self._model)

    def round(self, step: int) -> Mapping[str, Any]:
        """One hand-over: what it cost, and whether every engine has the very bytes."""
        renew(self._model, step)
        watch = Stopwatch(os.getpid())
        self._side.hand_over(step)
        cost = watch.stop()
        wanted = checksum(self._model)
        return {**asdict(cost), "good": all(each == wanted for each in self._side.checksums())}

    def forget(self) -> Mapping[str, Any]:
        """Warm-up is over: peaks count from here."""
        forget_peak(tree(os.getpid()))
        return {}

    def memory(self) -> Mapping[str, Any]:
        """Bytes beyond those of an interpreter with its libraries: trainer, engines, and all of them."""
        trainer, own = own_memory(), self._own
        engines = [(memory_of(pid), before) for pid, before in self._side.engines()]
        shares = [found["share"] - before["share"] for found, before in [(trainer, own), *engines]]
        return {
            "trainer": trainer["peak"] - own["now"],
            "engine": max(found["peak"] - before["now"] for found, before in engines),
            "all": sum(shares),
        }

    def close(self) -> Mapping[str, Any]:
        """End."""
        self._side.close()
        return {}


def serve(spec: Spec, orders: IO[str], answers: IO[str]) -> None:
    """Carry orders out until there are no more; whatever goes wrong is an answer, and the end."""

    def answer(told: Mapping[str, Any]) -> None:
        answers.write(json.dumps(told) + "\n")
        answers.flush()

    trainer = None
    try:
        trainer = Trainer(spec)
        answer({"ready": os.getpid()})
        for line in orders:
            order, *args = json.loads(line)
            answer(getattr(trainer, order)(*args))
            if order == "close":
                return
    except Absent as absent:
        answer({"absent": str(absent)})
    except Exception as error:
        answer({"failed": f"{type(error).__name__}: {error}"})
        raise
    if trainer is not None:
        trainer.close()


def main() -> None:
    """Serve on the standard streams. What libraries print goes where errors go."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(Spec(**json.loads(sys.argv[1])), sys.stdin, answers)
    os._exit(0)  # a process group whose other ranks are gone would wait for them


if __name__ == "__main__":
    main()

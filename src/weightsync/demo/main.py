"""The demo: a small policy learns a verifiable task, and its weights reach the engines only through rounds.

Every step: the servable engines sample answers to the step's prompts, the trainer learns from them, and the
step hook hands the new weights over in one round of the machine. After each round the digest of every
engine's weights, computed where it samples, is compared with the trainer's. At the end there are a reward
plot, the state log, the diagram with the last round's path on it, a table, and the commands to look further.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from ..fsm.errors import EngineError
from ..fsm.results import RoundResult
from ..fsm.states import Disposition
from ..handlers.log import StateLog
from ..sync import WeightSync
from .faults import Inject, Schedule, parse, withheld
from .grpo import Batch, Settings, derive_seed
from .hush import aside
from .live import History, Lines, summary
from .options import Options, checked
from .outcome import look_lines, verdict, write_pictures
from .place import folder_for, mark_latest
from .sharded import ROUNDS
from .systems import systems_of
from .trainers import Plain, Sharded, Trainer, trainer_for
from .workers import Crew, Worker, first_line, local_crew, ray_crew
from .wrapping import PLAIN, WORLD

__all__ = ["Options", "run"]

SAMPLING = 60.0
"""Seconds that an engine has for its samples, which take it a fraction of one."""


def run(options: Options, say: Callable[[str], None] | None = None, *, width: int | None = None) -> int:
    """Run the demo; 0 if it kept its promise as far as it was long enough to be judged, 1 if not.

    Args:
        options: what is asked for.
        say: takes each line; by default it is printed.
        width: characters in a line; by default as many as it takes.

    Raises:
        SetupError: options that do not fit together, or a folder that cannot be made.
        KeyboardInterrupt: raised again when everything is closed.
    """
    settings = checked(options)
    say = say or partial(print, file=sys.stdout, flush=True)  # this very stream, whatever is put in its place
    torch.set_num_threads(1)
    with folder_for(options.out) as out:
        history, seconds = _train(options, settings, out, Lines(options.engines, width), say)
        files = write_pictures(out, history, settings)
        say("")
        told = [*summary(history, files, seconds), "", *history.systems, *([""] if history.systems else [])]
        for line in [*told, *look_lines(out, history), ""]:
            say(line)
    return verdict(history, enough=settings.enough, no_sync=withheld(options.inject), say=say)


def _train(
    options: Options, settings: Settings, out: Path, lines: Lines, say: Callable[[str], None]
) -> tuple[History, float]:
    """What happened, and how long it took. Engines and trainer are gone afterwards, also if it went wrong."""
    ranks = 1 if options.trainer == PLAIN else WORLD
    faults = parse(options.inject, settings.steps, options.engines, ranks=ranks)
    with aside(out / "ray.log"), ExitStack() as open_:
        started = time.monotonic()
        crew = _crew(options, settings, say)
        open_.callback(crew.close)
        trainer = _trainer(options, settings, say)
        open_.callback(trainer.close)
        if isinstance(trainer, Sharded):
            trainer.join()
        if any(fault.drawn for fault in faults):
            say(f"drawn: {', '.join(str(fault) for fault in faults if fault.drawn)}")
        latest = mark_latest(out)
        also = f" (also as {latest})" if latest else ""
        say(f"ready after {time.monotonic() - started:.1f} s; log: {out / 'state.jsonl'}{also}\n")
        with WeightSync(
            engines=[worker.link for worker in crew.workers],
            transport=options.transport or crew.transport,
            policy=ROUNDS,
            handlers=[StateLog(out / "state.jsonl"), *trainer.handlers],
            lock=crew.lock,
            ledger=out / "ledger.json",
            ranks=trainer.ranks,
            owner="demo-trainer",
        ) as sync:
            training = _Training(
                crew, sync, settings, trainer,
                faults=faults, no_sync=withheld(options.inject), lines=lines, say=say,
            )  # fmt: skip
            begun = time.monotonic()
            history = training.run()
            seconds = time.monotonic() - begun
            history.published = sync.version()
        if isinstance(trainer, Sharded):  # the log is whole now
            trainer.tell()
            history.systems = systems_of(trainer, history, out, options.transport or crew.transport)
        return history, seconds


class _Training:
    """The loop of one run."""

    def __init__(
        self,
        crew: Crew,
        sync: WeightSync,
        settings: Settings,
        trainer: Trainer,
        *,
        faults: Sequence[Inject],
        no_sync: bool,
        lines: Lines,
        say: Callable[[str], None],
    ) -> None:
        self._crew, self._sync, self._settings = crew, sync, settings
        self._faults, self._withheld = Schedule(faults, settings.steps), no_sync
        self._lines, self._say = lines, say
        self._trainer = trainer
        self._history = History()

    def run(self) -> History:
        """All steps."""
        first = self._trainer.hand_over(self._sync, 0)
        if first is not None:
            self._note(0, first.require())
        self._say(self._lines.header())
        for step in range(1, self._settings.steps + 1):
            batches = self._sample(step)
            stats = self._trainer.learn(batches)
            self._history.rewards.append(stats.reward)
            result = self._hand_over(step)
            self._say(self._lines.step(step, stats.reward, result))
            self._history.mismatches += self._trainer.look_back(step)
        for fault in self._faults.missed():
            self._say(f"  {fault} did not happen: the engines were not all whole again in time")
        return self._history

    def _sample(self, step: int) -> list[Batch]:
        """Every servable engine answers its part of the prompts, all at once; one that cannot is left out."""
        ready = [worker for worker in self._crew.workers if worker.name in self._versions()]
        if not ready:
            raise EngineError(f"step {step}: no engine holds whole weights; see the state log")
        parts = self._trainer.prompts(step).tensor_split(len(ready))
        asked = [
            worker.sample(
                part, self._settings, derive_seed(self._settings.seed, "rollout", step, worker.name)
            )
            for worker, part in zip(ready, parts, strict=True)
        ]
        batches = []
        for worker, future in zip(ready, asked, strict=True):
            try:
                batches.append(future.result(timeout=SAMPLING))
            except Exception as error:  # noqa: BLE001 - whatever Ray raises for an engine that died meanwhile
                self._say(f"      {worker.name} gave no samples: {first_line(error)}")
        if not batches:
            raise EngineError(f"step {step}: no engine gave any samples")
        ledger = self._sync.ledger()
        self._history.ages += [batch.versions.staleness(ledger) for batch in batches]
        return batches

    def _versions(self) -> dict[str, int]:
        return {
            name: entry.version
            for name, entry in self._sync.engines().items()
            if entry.version is not None and not entry.quarantined
        }

    def _hand_over(self, step: int) -> RoundResult | None:
        if self._withheld:
            return None
        whole = len(self._versions()) == len(self._crew.workers)
        for fault in self._faults.due(step, whole=whole):
            self._arm(fault)
        result = self._trainer.hand_over(self._sync, step)
        if result is not None:
            self._note(step, result)
        return result

    def _arm(self, fault: Inject) -> None:
        try:
            match fault.kind:
                case "rank-fail" | "rank-kill" as kind:
                    self._trainer.arm(kind)
                case kind:
                    self._crew.workers[fault.engine].arm(kind)
        except EngineError as error:  # an earlier fault has it down
            self._say(f"      {fault} is left out: {error}")

    def _note(self, step: int, result: RoundResult) -> None:
        """Keep the result, and compare what the engines really sample with."""
        self._history.results.append((step, result))
        serving = result.serving(Disposition.serving_new)
        wanted = self._trainer.digest()
        for worker in self._crew.workers:
            if worker.name in serving:
                self._history.digests += 1
                found = self._digest(worker)
                if found != wanted:
                    self._history.mismatches.append(
                        f"step {step}: engine {worker.name} samples with {found}, the trainer has {wanted}"
                    )

    @staticmethod
    def _digest(worker: Worker) -> str:
        try:
            return worker.digest()
        except EngineError as error:
            return f"what nobody knows ({error})"


def _trainer(options: Options, settings: Settings, say: Callable[[str], None]) -> Plain | Sharded:
    if options.trainer != PLAIN:
        where = "a process" if options.threads else "an actor"
        say(f"starting a trainer of {WORLD} ranks, {options.trainer}: this process, and {where} of its own")
    return trainer_for(options.trainer, settings, threads=options.threads)


def _crew(options: Options, settings: Settings, say: Callable[[str], None]) -> Crew:
    names = [f"engine-{index}" for index in range(options.engines)]
    hang = ROUNDS.deadline / 2 + 1.0
    if options.threads:
        say(f"starting {len(names)} engines in threads of this process")
        return local_crew(names, settings, hang)
    say(f"starting Ray and {len(names)} engines in actors of their own")
    return ray_crew(names, settings, hang)

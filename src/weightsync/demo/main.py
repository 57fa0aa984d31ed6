"""The demo: a small policy learns a verifiable task, and its weights reach the engines only through rounds.

Every step: the servable engines sample answers to the step's prompts, the trainer learns from them, and the
step hook hands the new weights over in one round of the machine. After each round the digest of every
engine's weights, computed where it samples, is compared with the trainer's. At the end there are a reward
plot, the state log, the diagram with the last round's path on it, and a table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..fsm.errors import SetupError
from ..fsm.policy import Policy
from ..fsm.results import RoundResult
from ..fsm.states import Disposition
from ..handlers.log import StateLog
from ..sync import WeightSync
from .faults import Inject, parse, withheld
from .grpo import Batch, Learner, Settings, derive_seed
from .live import History, header, step_line, summary
from .outcome import verdict, write_pictures
from .workers import Crew, local_crew, ray_crew

__all__ = ["Options", "run"]

DEADLINE = 8.0
LEASE = 4.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for."""

    engines: int = 2
    steps: int = 120
    transport: str | None = None
    out: Path = Path("runs/demo")
    inject: Sequence[str] = ()
    seed: int = 0
    threads: bool = False
    quick: bool = False


def run(options: Options, say: Callable[[str], None] = print) -> int:
    """Run the demo; 0 if the policy learned as promised, 1 if not.

    Raises:
        SetupError: options that do not fit together.
        KeyboardInterrupt: raised again when everything is closed.
    """
    faults = parse(options.inject, options.steps)
    if options.engines < 1:
        raise SetupError(f"--engines {options.engines}: at least one is needed")
    torch.set_num_threads(1)
    out = _fresh(options.out)
    settings = _settings(options)
    started = time.monotonic()
    crew = _crew(options, settings, say)
    try:
        say(f"ready after {time.monotonic() - started:.1f} s; log: {out / 'state.jsonl'}\n")
        with WeightSync(
            engines=[worker.link for worker in crew.workers],
            transport=options.transport or crew.transport,
            policy=Policy(deadline=DEADLINE, lease=LEASE, bucket_bytes=1 << 20),
            handlers=[StateLog(out / "state.jsonl")],
            lock=crew.lock,
            ledger=out / "ledger.json",
            owner="demo-trainer",
        ) as sync:
            training = _Training(options, settings, crew, sync, faults=faults, say=say)
            begun = time.monotonic()
            history = training.run()
        seconds = time.monotonic() - begun
    finally:
        crew.close()
    files = write_pictures(out, history, settings)
    say("")
    for line in summary(history, files, seconds):
        say(line)
    return verdict(history, no_sync=withheld(options.inject), say=say)


class _Training:
    """The loop of one run."""

    def __init__(
        self,
        options: Options,
        settings: Settings,
        crew: Crew,
        sync: WeightSync,
        *,
        faults: Sequence[Inject],
        say: Callable[[str], None],
    ) -> None:
        self._options, self._settings = options, settings
        self._crew, self._sync, self._faults, self._say = crew, sync, faults, say
        self._learner = Learner(settings)
        self._history = History()
        self._withheld = withheld(options.inject)

    def run(self) -> History:
        """All steps."""
        model = self._learner.model
        self._note(0, self._sync.on_train_begin(model).require())
        self._say(header())
        for step in range(1, self._options.steps + 1):
            batches = self._sample(step)
            stats = self._learner.learn(batches)
            self._history.rewards.append(stats.reward)
            result = self._hand_over(step)
            self._say(step_line(step, stats.reward, result))
        return self._history

    def _sample(self, step: int) -> list[Batch]:
        """Every servable engine answers its part of the prompts, all at once."""
        ready = [worker for worker in self._crew.workers if worker.name in self._versions()]
        if not ready:
            raise SetupError(f"step {step}: no engine holds whole weights; see the state log")
        parts = self._learner.prompts(step).chunk(len(ready))
        asked = [
            worker.sample(
                part, self._settings, derive_seed(self._settings.seed, "rollout", step, worker.name)
            )
            for worker, part in zip(ready, parts, strict=False)
        ]
        return [future.result() for future in asked]

    def _versions(self) -> dict[str, int]:
        return {
            name: entry.version
            for name, entry in self._sync.engines().items()
            if entry.version is not None and not entry.quarantined
        }

    def _hand_over(self, step: int) -> RoundResult | None:
        if self._withheld:
            return None
        for fault in self._faults:
            if fault.step == step:
                self._crew.workers[-1].arm(fault.kind)
        result = self._sync.on_step_end(step, self._learner.model)
        if result is not None:
            self._note(step, result)
        return result

    def _note(self, step: int, result: RoundResult) -> None:
        """Keep the result, and compare what the engines really sample with."""
        self._history.results.append((step, result))
        serving = result.serving(Disposition.serving_new)
        wanted = self._crew.digest_of(self._learner.model)
        for worker in self._crew.workers:
            if worker.name in serving:
                self._history.digests += 1
                found = worker.digest()
                if found != wanted:
                    self._history.mismatches.append(
                        f"step {step}: engine {worker.name} samples with {found}, the trainer has {wanted}"
                    )


def _settings(options: Options) -> Settings:
    return Settings.quick(options.seed) if options.quick else Settings(seed=options.seed)


def _crew(options: Options, settings: Settings, say: Callable[[str], None]) -> Crew:
    names = [f"engine-{index}" for index in range(options.engines)]
    hang = DEADLINE / 2 + 1.0
    if options.threads:
        say(f"starting {len(names)} engines in threads of this process")
        return local_crew(names, settings, hang)
    if options.transport == "memory":
        raise SetupError("--transport memory reaches engines of this process only: add --threads")
    say(f"starting Ray and {len(names)} engines in actors of their own")
    return ray_crew(names, settings, hang)


def _fresh(out: Path) -> Path:
    """The folder for this run: ``out``, or the first free ``out-N``; nothing of an earlier run is touched."""
    for number in range(10_000):
        folder = out if number == 0 else out.with_name(f"{out.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise SetupError(f"--out {out}: {error.strerror or error}") from error
        return folder
    raise SetupError(f"--out {out}: ten thousand runs lie there; name another folder")

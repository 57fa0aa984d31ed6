"""What a demo is asked for, and whether that can be had. Looked at before anything is started or made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..fsm.errors import SetupError
from ..joining import transport_for
from ..transport_backends import transports
from .faults import parse
from .grpo import Settings
from .place import DEFAULT
from .wrapping import FORMS, PLAIN, WORLD

__all__ = ["MOST_STEPS", "Options", "checked"]

MOST_STEPS = 10_000
"""The learned policy is done long before, and a state log of so many rounds has about 100 MB."""

_THREADS_ALONE = ("memory",)
"""The transports that do not leave this process."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for; ``steps`` left out is as many as the run is tuned for."""

    engines: int = 2
    steps: int | None = None
    transport: str | None = None
    out: Path = DEFAULT
    inject: Sequence[str] = ()
    seed: int = 0
    threads: bool = False
    quick: bool = False
    trainer: str = PLAIN


def checked(options: Options) -> Settings:
    """The settings of the run.

    Raises:
        SetupError: something that is not there, or that does not go together.
    """
    settings = Settings.quick(options.seed) if options.quick else Settings(seed=options.seed)
    if options.steps is not None:
        if not 1 <= options.steps <= MOST_STEPS:
            raise SetupError(f"--steps {options.steps}: a run has from 1 to {MOST_STEPS} steps")
        settings = replace(settings, steps=options.steps)
    _check_engines(options, settings)
    _check_transport(options)
    _check_trainer(options)
    ranks = 1 if options.trainer == PLAIN else WORLD
    parse(options.inject, settings.steps, options.engines, ranks=ranks)
    return settings


def _check_engines(options: Options, settings: Settings) -> None:
    # One more would have nothing to do. In actors so many start in a minute or so, with 300 MB each.
    if options.engines < 1:
        raise SetupError(f"--engines {options.engines}: at least one is needed")
    if options.engines > settings.groups:
        raise SetupError(
            f"--engines {options.engines}: at most {settings.groups}, as many as a step has prompts to answer"
        )


def _check_transport(options: Options) -> None:
    name = options.transport
    if name is None:
        return
    names = transports().names()
    if name not in names:
        raise SetupError(f"--transport {name}: there are {', '.join(names)}")
    if name in _THREADS_ALONE and not options.threads:
        raise SetupError(f"--transport {name} reaches engines of this process only: add --threads")
    if name == "objects" and options.threads:
        raise SetupError(f"--transport {name} reaches engines in Ray actors only: leave out --threads")
    transport_for(name).close()  # whatever it needs and is not there is said before anything is started


def _check_trainer(options: Options) -> None:
    if options.trainer not in FORMS:
        raise SetupError(f"--trainer {options.trainer}: there are {', '.join(FORMS)}")
    if options.trainer == PLAIN:
        return
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        raise SetupError(f"--trainer {options.trainer}: this torch has no gloo, by which its ranks meet")
    if dist.is_initialized():
        raise SetupError(f"--trainer {options.trainer}: this process has a process group of its own already")

"""``weightsync demo``: a small policy learns, and its weights reach the engines only through rounds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .terminal import whole, width

if TYPE_CHECKING:
    from .terminal import Commands

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Describe it."""
    parser = commands.add_parser(
        "demo",
        help="train a small policy whose weights reach the engines through rounds",
        description="Train a small policy on a verifiable task; its weights reach the engines only through "
        "rounds. Leaves a reward plot, a state log, and a diagram with the last round's path. Exit status 1 "
        "if the reward did not rise, or an engine sampled with other weights than the trainer's.",
        # What is not asked for is left to the demo: its defaults stand beside its code.
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--engines", type=whole(1), metavar="N", help="how many engines (2), at most 24, with --quick 16"
    )
    parser.add_argument(
        "--steps", type=whole(1), metavar="N", help="how many training steps (120, with --quick 60)"
    )
    parser.add_argument(
        "--transport",
        metavar="NAME",
        help="how the bytes travel: auto (by default), shm, collective, objects, cuda_ipc, or memory, which "
        "needs --threads",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where logs and pictures go (runs/demo); if it is there, DIR-1 or the next that is free",
    )
    parser.add_argument(
        "--inject",
        action="append",
        metavar="FAULT",
        help="a fault, such as engine-kill@5, bucket-fail@5, hang@5 (the step), no-sync, or random:SEED for "
        "such faults on any engine all over the run; with a sharded trainer rank-fail@5 and rank-kill@5; may "
        "be repeated",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of everything that is drawn at random (0)")
    parser.add_argument(
        "--trainer",
        metavar="FORM",
        help="plain (by default); fsdp1 or fsdp2: two ranks (gloo, CPU) among which FSDP spreads the policy, "
        "with a table of what the systems around each round did",
    )
    parser.add_argument("--threads", action="store_true", help="engines in this process instead of Ray")
    parser.add_argument(
        "--quick", action="store_true", help="a smaller policy, which learns in half a minute"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it."""
    from ..demo.main import Options
    from ..demo.main import run as train

    asked = {name: value for name, value in vars(arguments).items() if name != "run"}
    return train(Options(**asked), width=width())

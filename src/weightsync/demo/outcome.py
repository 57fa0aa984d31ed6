"""What a demo leaves behind, and whether it kept its promise."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from ..diagrams.overlay import read_trace
from ..diagrams.render import write
from ..fsm.table import ROUND
from .grpo import Settings
from .live import History
from .plot import Curve, Level, reward_svg
from .task import best_blind_reward

__all__ = ["look_lines", "verdict", "write_pictures"]

RISE = 1.5
"""How much better the last tenth of the steps has to be than the first."""


def write_pictures(out: Path, history: History, settings: Settings) -> list[tuple[str, str]]:
    """The reward plot and the traced diagrams; returns (what, where) for the table."""
    plot = out / "reward.svg"
    blind = float(best_blind_reward(settings.digits))
    picture = reward_svg(
        [Curve("reward of the engines' samples", [math.nan, *history.rewards])],
        title=f"reward over {len(history.rewards)} steps, seed {settings.seed}",
        failed=history.failed_steps,
        level=Level("best answer that ignores its prompt", blind),
    )
    plot.write_text(picture, encoding="utf-8")
    files = [("reward plot", str(plot)), ("state log", str(out / "state.jsonl"))]
    for what, chosen in (("last round", _last(history)), ("failed round", _failed(history))):
        if chosen is not None:
            path = out / f"{what.replace(' ', '-')}.svg"
            write(path, ROUND, trace=read_trace(ROUND, _records(out / "state.jsonl"), round=chosen))
            files.append((what, str(path)))
    if (out / "ray.log").is_file():
        files.append(("said by Ray", str(out / "ray.log")))
    return files


def look_lines(out: Path, history: History) -> list[str]:
    """The commands that show more of this run, as they can be given to a shell."""
    program, log = _program(), shlex.quote(str(out / "state.jsonl"))
    shown = _failed(history) or _last(history)
    picture = shlex.quote(str(out / "path.svg"))
    return [
        "look at it with:",
        f"  {program} log {log}",
        f"  {program} log {log} --round {shown}",
        f"  {program} diagram --trace {log} --round {shown} --output {picture}",
    ]


def _program() -> str:
    """How a shell calls the weightsync that runs here."""
    ours, found = Path(sys.executable).with_name("weightsync"), shutil.which("weightsync")
    if not ours.is_file():
        return f"{shlex.quote(sys.executable)} -m weightsync"
    if found is not None and Path(found).resolve() == ours.resolve():
        return "weightsync"
    here = Path.cwd()
    return shlex.quote(str(ours.relative_to(here) if ours.is_relative_to(here) else ours))


def verdict(history: History, *, enough: int, no_sync: bool, say: Callable[[str], None]) -> int:
    """0 if the run kept its promise; says so either way.

    Args:
        history: what happened.
        enough: so many steps are needed to judge whether the reward rose.
        no_sync: rounds were withheld, so that the promise cannot be kept.
        say: takes each line.
    """
    problems, steps = list(history.mismatches), len(history.rewards)
    rise = history.last_tenth / history.first_tenth if history.first_tenth > 0 else float("inf")
    ends = f"from {history.first_tenth:.3f} to {history.last_tenth:.3f}"
    rose = f"the reward went {ends}, {rise:.2f} times as much"
    if no_sync:
        problems.append(f"rounds were withheld, so the engines never learned: {rose}")
    elif steps >= enough and rise < RISE:
        problems.append(f"{rose}; {RISE} times was promised")
    if not no_sync and not history.results[-1][1].ok:
        problems.append("the last round was not clean")
    for problem in problems:
        say(f"  NOT AS PROMISED: {problem}")
    if not problems:
        say(
            f"  learned: the reward rose {rise:.1f} times"
            if steps >= enough
            else f"  too short to judge whether the reward rose: {steps} steps, of {enough} that it takes"
        )
        say("  every engine sampled with the trainer's very weights")
    return 1 if problems else 0


def _last(history: History) -> str | None:
    return history.results[-1][1].round if history.results else None


def _failed(history: History) -> str | None:
    return next((result.round for _, result in history.results if "Failed" in result.path), None)


def _records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

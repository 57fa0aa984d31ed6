"""What is printed while the demo runs: one line a step, and the summary at the end.

Plain text, no cursor tricks, so that it reads the same in a terminal and in a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..fsm.results import RoundResult
from ..fsm.states import Disposition

__all__ = ["History", "header", "step_line", "summary"]

_SHORT = {
    "Idle": "Idle",
    "Locked": "Lock",
    "Broadcasting": "Send",
    "Awaiting": "Wait",
    "Cleaning": "Clean",
    "Failed": "FAILED",
    "Released": "Rel",
}
_BAR = 20


@dataclass(slots=True)
class History:
    """What happened, step by step; index 0 of ``rewards`` is the reward of step 1."""

    rewards: list[float] = field(default_factory=list)
    results: list[tuple[int, RoundResult]] = field(default_factory=list)
    digests: int = 0
    mismatches: list[str] = field(default_factory=list)

    @property
    def failed_steps(self) -> list[int]:
        """Steps whose round went through Failed."""
        return sorted({step for step, result in self.results if "Failed" in result.path})

    @property
    def first_tenth(self) -> float:
        """Mean reward of the first tenth of the steps."""
        return _mean(self.rewards[: self._tenth])

    @property
    def last_tenth(self) -> float:
        """Mean reward of the last tenth of the steps."""
        return _mean(self.rewards[-self._tenth :])

    @property
    def _tenth(self) -> int:
        return max(1, len(self.rewards) // 10)


def header() -> str:
    """The heading over the lines of :func:`step_line`."""
    return (
        f"{'step':>4}  {'reward':<{_BAR + 6}}  {'version':>7}  {'engines':<9} {'pause':>7} {'round':>7}  path"
    )


def step_line(step: int, reward: float | None, result: RoundResult | None) -> str:
    """One step: reward, and the round that handed its weights over."""
    told = f"{step:>4}  {_bar(reward)}"
    if result is None:
        return f"{told}  {'':>7}  {'no round':<9}"
    seconds = sum(result.seconds.values())
    line = (
        f"{told}  {result.version:>7}  {_engines(result):<9} {result.pause_seconds * 1e3:>4.0f} ms"
        f" {seconds * 1e3:>4.0f} ms  {'>'.join(_SHORT[state] for state in result.path)}"
    )
    if result.error is not None:
        who = f"{result.culprit}: " if result.culprit else ""
        line += f"\n      {who}{type(result.error).__name__}: {result.error}"
    return line


def summary(history: History, files: Sequence[tuple[str, str]], seconds: float) -> list[str]:
    """The table at the end."""
    results = [result for _, result in history.results]
    clean = sum("Failed" not in result.path for result in results)
    pauses = sorted(result.pause_seconds for result in results if result.ok)
    rounds = sorted(sum(result.seconds.values()) for result in results if result.ok)
    rows = [
        ("steps", str(len(history.rewards))),
        ("rounds", f"{len(results)}: {clean} clean, {len(results) - clean} through Failed"),
        ("versions", f"{results[0].version} to {max(r.version for r in results)}" if results else "none"),
        ("reward, first tenth", f"{history.first_tenth:.3f}"),
        ("reward, last tenth", f"{history.last_tenth:.3f}"),
        ("pause of an engine", _median_ms(pauses)),
        ("whole round", _median_ms(rounds)),
        ("digests compared", f"{history.digests}, {len(history.mismatches)} differ"),
        ("wall time", f"{seconds:.1f} s"),
        *files,
    ]
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}" for name, value in rows]


def _bar(reward: float | None) -> str:
    if reward is None:
        return f"{'':<{_BAR + 6}}"
    full = round(max(0.0, min(1.0, reward)) * _BAR)
    return f"{reward:.3f} {'█' * full}{'·' * (_BAR - full)}"


def _engines(result: RoundResult) -> str:
    marks = {
        Disposition.serving_new: "new",
        Disposition.serving_old: "old",
        Disposition.quarantined: "OUT",
    }
    return " ".join(marks[row.disposition] for row in result.engines)


def _median_ms(values: Sequence[float]) -> str:
    return f"{values[len(values) // 2] * 1e3:.1f} ms (median)" if values else "none"


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0

"""What is printed while the demo runs: one line a step, and the summary at the end.

Plain text, no cursor tricks, so that it reads the same in a terminal and in a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..fsm.results import RoundResult
from ..fsm.states import Disposition

__all__ = ["History", "Lines", "summary"]

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
_NAMED = 3
"""So many engines are told one by one; of more, how many are what."""


@dataclass(slots=True)
class History:
    """What happened, step by step; index 0 of ``rewards`` is the reward of step 1."""

    rewards: list[float] = field(default_factory=list)
    results: list[tuple[int, RoundResult]] = field(default_factory=list)
    digests: int = 0
    mismatches: list[str] = field(default_factory=list)
    systems: list[str] = field(default_factory=list)
    """What the systems around the rounds did, of a trainer that has them all."""
    published: int | None = None
    ages: list[int] = field(default_factory=list)
    """How many versions each batch was behind when it was learnt from."""

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


class Lines:
    """One line a step, in columns.

    Args:
        engines: how many there are.
        width: characters in a line, None for as many as it takes. Where there is little room the states of a
            path are initials, as in ``weightsync log``, and the bars are short.
    """

    def __init__(self, engines: int, width: int | None = None) -> None:
        self._engines = len("new new new" if engines <= _NAMED else "12 new 12 OUT")
        rest = len(f"{'':>4}  {'':5} {'':>2}{'':>7}  {'':{self._engines}} {'':>7} {'':>7}  ")
        self._words = width is None or width >= rest + _BAR + len(">".join(_SHORT.values()))
        room = _BAR if width is None else width - rest - len("I>L>B>A>F!>R")
        self._bar = _BAR if self._words else max(0, min(_BAR, room))

    def header(self) -> str:
        """The heading over the steps."""
        reward, engines = f"{'reward':<{self._bar + 6}}", f"{'engines':<{self._engines}}"
        return f"{'step':>4}  {reward}  {'version':>7}  {engines} {'pause':>7} {'round':>7}  path"

    def step(self, step: int, reward: float | None, result: RoundResult | None) -> str:
        """One step: reward, and the round that handed its weights over."""
        told = f"{step:>4}  {self._reward(reward)}"
        if result is None:
            return f"{told}  {'':>7}  no round"
        seconds = sum(result.seconds.values())
        line = (
            f"{told}  {result.version:>7}  {_engines(result):<{self._engines}} "
            f"{result.pause_seconds * 1e3:>4.0f} ms {seconds * 1e3:>4.0f} ms  {self._path(result)}"
        )
        if result.error is not None:
            who = f"{result.culprit}: " if result.culprit else ""
            line += f"\n      {who}{type(result.error).__name__}: {result.error}"
        return line

    def _reward(self, reward: float | None) -> str:
        if reward is None:
            return f"{'':<{self._bar + 6}}"
        full = round(max(0.0, min(1.0, reward)) * self._bar)
        return f"{reward:.3f} {'█' * full}{'·' * (self._bar - full)}"

    def _path(self, result: RoundResult) -> str:
        if self._words:
            return ">".join(_SHORT[state] for state in result.path)
        return ">".join(f"{state[0]}{'!' if state == 'Failed' else ''}" for state in result.path)


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


def _engines(result: RoundResult) -> str:
    marks = {
        Disposition.serving_new: "new",
        Disposition.serving_old: "old",
        Disposition.quarantined: "OUT",
    }
    told = [marks[row.disposition] for row in result.engines]
    if len(told) <= _NAMED:
        return " ".join(told)
    return " ".join(f"{told.count(mark)} {mark}" for mark in marks.values() if mark in told)


def _median_ms(values: Sequence[float]) -> str:
    return f"{values[len(values) // 2] * 1e3:.1f} ms (median)" if values else "none"


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0

"""What the processes of a run hold, from round to round: what leaks a little each time shows in the end.

Ray opens descriptors and starts threads in these processes as well, at its own time, so that two moments say
nothing. But it comes to rest: the median of a process's last good rounds is that of its first ones, within a
small slack, unless something is lost in every round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from casekit.levels import Usage

__all__ = ["LEAST_ROUNDS", "Growth"]

_FEW = 3
LEAST_ROUNDS = 1 + 2 * _FEW
"""So many good rounds of a process, the first of which warms it up, before anything is said of it."""

_SLACK = {"descriptors": 3, "Python threads": 3, "threads": 6, "MB": 32}
"""Of threads, Ray starts a few more when somebody was stopped for a while."""


@dataclass(frozen=True)
class _Moment:
    usage: Usage
    trainers: int


class Growth:
    """Takes what each process holds after each good round; fails as soon as one of them has grown."""

    def __init__(self) -> None:
        self._lives: dict[tuple[str, int], list[_Moment]] = defaultdict(list)

    def note(self, held: Mapping[str, Usage], trainers: int) -> None:
        """After a good round: what each process holds, by its name; ``trainers`` have been there so far.

        A process that was started again is another one. Of a trainer that has died, an engine may keep one
        descriptor: Ray's own connection to it.
        """
        for name, usage in held.items():
            life = self._lives[name, usage.process]
            life.append(_Moment(usage, trainers))
            grown = _grown(life)
            assert not grown, f"{name} leaks: after {len(life)} good rounds it holds {' and '.join(grown)}"

    def lines(self) -> list[str]:
        """For people: the growth of each process that lived long enough."""
        return [
            f"  {name} ({len(life)} rounds): {_told(life)}"
            for (name, _), life in self._lives.items()
            if len(life) >= LEAST_ROUNDS
        ]


def _grown(life: list[_Moment]) -> list[str]:
    """What is more than it was, beyond the slack."""
    if len(life) < LEAST_ROUNDS:
        return []
    met = life[-1].trainers - life[1].trainers
    allowed = {**_SLACK, "descriptors": _SLACK["descriptors"] + met}
    more = {what: _more(life, count) for what, count in _COUNTS.items()}
    return [f"{more[what]:.0f} more {what}" for what in more if more[what] > allowed[what]]


def _more(life: list[_Moment], count: Callable[[Usage], float]) -> float:
    counts = [count(moment.usage) for moment in life]
    return median(counts[-_FEW:]) - median(counts[1 : 1 + _FEW])


def _told(life: list[_Moment]) -> str:
    return ", ".join(f"{_more(life, count):+.0f} {what}" for what, count in _COUNTS.items())


_COUNTS: dict[str, Callable[[Usage], float]] = {
    "descriptors": lambda usage: usage.descriptors.total(),
    "Python threads": lambda usage: usage.python,
    "threads": lambda usage: usage.threads,
    "MB": lambda usage: usage.megabytes,
}

"""Breadth first through everything that can happen, with the shortest way to whatever is wrong.

Nothing here knows what a round is. A *node* is any hashable value that says all there is to say about one
moment; *successors* lists what can happen in it, and *check* names the promises that are broken there:

    explore(start, successors, check) -> Exploration

Because the search goes breadth first, the first hit of a promise has the shortest trace there is. With a
``goal`` it is also checked that the goal is inevitable: from every node there is a way to it along edges that
are *certain*, that is, along what happens by itself when nobody else does anything (a clock, a last answer).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Edge", "Exploration", "Violation", "explore"]

N = TypeVar("N", bound=Hashable)


class Edge(NamedTuple, Generic[N]):
    """One thing that can happen in a node.

    Attributes:
        label: what happened, as a trace shows it.
        after: the node it leads to, which may be the same one; None where it was refused.
        row: which row of a table answered, for the count of rows.
        certain: whether it happens by itself sooner or later, if nothing else does.
        broken: names of the promises that this very step breaks.
    """

    label: str
    after: N | None
    row: int = 0
    certain: bool = False
    broken: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise and the shortest trace to it, one line for each thing that happened."""

    promise: str
    trace: tuple[str, ...]

    def lines(self) -> list[str]:
        """The violation, ready to be printed."""
        steps = [f"  {number}. {line}" for number, line in enumerate(self.trace, start=1)]
        return [f"{self.promise}, after {len(steps)} steps:", *steps]

    def __str__(self) -> str:
        return "\n".join(self.lines())


@dataclass(slots=True)
class Exploration(Generic[N]):
    """What an exploration found. ``parents`` holds every node, with the node and the label it came from."""

    parents: dict[N, tuple[N, str] | None]
    show: Callable[[N], str]
    accepted: int = 0
    refused: int = 0
    rows: Counter[int] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    violations: dict[str, Violation] = field(default_factory=dict)

    @property
    def positions(self) -> int:
        """How many different nodes there are."""
        return len(self.parents)

    @property
    def nodes(self) -> Iterable[N]:
        """Every node, nearest first."""
        return self.parents.keys()

    def trace(self, node: N) -> tuple[str, ...]:
        """The shortest way to ``node``: what happened, and where it led."""
        steps: list[str] = []
        here: N = node
        while (origin := self.parents[here]) is not None:
            steps.append(f"{origin[1]} -> {self.show(here)}")
            here = origin[0]
        return tuple(reversed(steps))

    def lines(self) -> list[str]:
        """The counts, and every broken promise with how often it was hit and its trace."""
        counts = f"{self.positions} positions, {self.accepted} steps accepted, {self.refused} refused"
        found = [f"{counts}, {len(self.rows)} rows, {len(self.violations)} promises broken"]
        for promise, violation in self.violations.items():
            first, *steps = violation.lines()
            found += [f"{self.hits[promise]} x {first}", *steps]
        return found

    def blame(self, promises: Iterable[str], node: N, label: str | None = None) -> None:
        """Count broken promises; the first hit of each keeps its trace."""
        for promise in promises:
            self.hits[promise] += 1
            if promise not in self.violations:
                last = () if label is None else (f"{label} -> (here)",)
                self.violations[promise] = Violation(promise, (*self.trace(node), *last))


def _nothing(node: object) -> Iterable[str]:
    return ()


def explore(
    start: N,
    successors: Callable[[N], Iterable[Edge[N]]],
    check: Callable[[N], Iterable[str]] = _nothing,
    *,
    goal: Callable[[N], bool] | None = None,
    until: Collection[str] = (),
    limit: int = 1_000_000,
    show: Callable[[N], str] = str,
) -> Exploration[N]:
    """Visit every node that can be reached from ``start``.

    Args:
        start: where it begins.
        successors: what can happen in a node.
        check: names of the promises that a node breaks.
        goal: if given, every node must have a way to a goal along certain edges ("inevitable").
        until: stop as soon as one of these promises is broken.
        limit: how many nodes are too many: a promise of its own ("finite").
        show: a node in a word, for traces.
    """
    found = Exploration({start: None}, show)
    back: defaultdict[N, list[N]] = defaultdict(list)
    found.blame(check(start), start)
    queue = deque([start])
    while queue and found.violations.keys().isdisjoint(until):
        node = queue.popleft()
        for edge in successors(node):
            if edge.broken:
                found.blame(edge.broken, node, edge.label)
            after = edge.after
            if after is None:
                found.refused += 1
                continue
            found.accepted += 1
            found.rows[edge.row] += 1
            if edge.certain:
                back[after].append(node)
            if after is not node and after not in found.parents:
                found.parents[after] = node, edge.label
                found.blame(check(after), after)
                queue.append(after)
        if found.positions > limit:
            found.blame(["finite"], node)
            break
    if goal is not None and not queue:
        _inevitable(found, back, goal)
    return found


def _inevitable(found: Exploration[N], back: dict[N, list[N]], goal: Callable[[N], bool]) -> None:
    """Walk backwards from the goals; whatever is not met has no certain way to one."""
    met = {node for node in found.nodes if goal(node)}
    queue = deque(met)
    while queue:
        for node in back.get(queue.popleft(), ()):
            if node not in met:
                met.add(node)
                queue.append(node)
    for node in found.nodes:
        if node not in met:
            found.blame(["inevitable"], node)

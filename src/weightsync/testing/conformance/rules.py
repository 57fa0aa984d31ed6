"""What the kit asks for: one rule for each promise of the contract, and the error that names the broken one.

A *check* is a story, and may find any of several rules broken; the message names the rule, says what was
seen, what the contract says, and what to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ...fsm.errors import WeightSyncError

__all__ = ["Check", "Rule", "Violation", "checked", "eventually", "holding"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rule:
    """One sentence of the contract.

    Args:
        name: short, for reports.
        says: what the contract says.
        do: what whoever broke it should do.
    """

    name: str
    says: str
    do: str

    def broken(self, what: str) -> Violation:
        """The error to raise when ``what`` was seen."""
        return Violation(self, what)

    def unless(self, kept: object, what: str) -> None:
        """Raise the error unless it was kept."""
        if not kept:
            raise self.broken(what)


class Violation(WeightSyncError, AssertionError):
    """A rule of the contract is broken. ``rule`` says which."""

    def __init__(self, rule: Rule, what: str) -> None:
        super().__init__(f"{rule.name}: {what}. The contract: {rule.says} What to do: {rule.do}")
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Check(Generic[T]):
    """One story of a suite.

    Args:
        name: short, for reports and to select it by.
        about: what it holds, in a sentence.
        run: tells the story of what is tested; raises ``Violation``.
        needs: what has to be there beyond the least that every suite is given; it is skipped otherwise.
    """

    name: str
    about: str
    run: Callable[[T], None]
    needs: str = ""

    def __str__(self) -> str:
        return self.name

    def __call__(self, tested: T) -> None:
        """Run it."""
        self.run(tested)


def checked(
    suite: list[Check[T]], name: str, *args: Any, needs: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a function to ``suite``; what it is called with besides what is tested, stands in ``args``."""

    def add(story: Callable[..., None]) -> Callable[..., None]:
        about = " ".join((story.__doc__ or name).partition("\n\n")[0].split())
        suite.append(Check(name, about, lambda tested: story(tested, *args), needs))
        return story

    return add


@contextmanager
def holding(rule: Rule, what: str) -> Iterator[None]:
    """Whatever is raised in this context breaks ``rule``; a violation that has a name of its own keeps it."""
    try:
        yield
    except Violation:
        raise
    except Exception as error:
        raise rule.broken(f"{what}: {type(error).__name__}: {error}") from error


def eventually(ready: Callable[[], object], patience: float) -> bool:
    """Whether it becomes true within the patience."""
    end = time.monotonic() + patience
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True

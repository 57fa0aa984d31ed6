"""Handlers of other ranks that are coroutines: awaited on a loop of their own, and ended with their round."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from casekit.rankteam import Team, close_teams, three
from weightsync.fsm.executors import RoundView
from weightsync.fsm.policy import Policy

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every thread that a test has begun ends with it."""
    yield
    close_teams()


class Steps:
    """An executor of coroutines that says what it did, and on which thread."""

    name = "steps"

    def __init__(self) -> None:
        self.done: list[str] = []
        self.threads: set[str] = set()
        self.waits = False
        self.waiting = threading.Event()

    async def prepare(self, round: RoundView) -> Callable[[], Awaitable[None]]:
        """Get ready, or never."""
        if self.waits:
            self.waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.done.append("cut short")
        await self._step("prepare")
        return self._undo

    async def clean(self, round: RoundView) -> None:
        """The good end."""
        await self._step("clean")

    async def _undo(self) -> None:
        await self._step("undo")

    async def _step(self, step: str) -> None:
        await asyncio.sleep(0)
        self.threads.add(threading.current_thread().name)
        self.done.append(step)


class Fails:
    """An executor whose first ``prepare`` fails, when another rank is in the middle of its own."""

    name = "fails"

    def __init__(self, other: Steps) -> None:
        self._other = other

    def prepare(self, round: RoundView) -> None:
        """The first time."""
        if self._other.waits:
            assert self._other.waiting.wait(20)
            raise OSError("no room")

    def clean(self, round: RoundView) -> None:
        """Nothing to do."""


def ended(team: Team) -> None:
    """The other ranks have left."""
    for follower in team.followers:
        follower.close()


def test_they_are_awaited_and_undone() -> None:
    """As on rank 0; each rank has a loop of its own."""
    steps = Steps()
    handlers: list[Any] = [[], [steps], []]
    team = Team(handlers=handlers)
    assert all(each.ok for each in team.results(team.step(1, *three(1))))
    assert steps.done == ["prepare", "clean"]
    team.trainer.transport.bad["bucket 1"] = OSError("cable")
    assert not any(each.ok for each in team.results(team.step(2, *three(2))))
    assert steps.done[2:] == ["prepare", "undo"]
    assert steps.threads == {"weightsync-bridge"}
    ended(team)
    assert "weightsync-bridge" not in {each.name for each in threading.enumerate()}


def test_a_step_that_no_round_waits_for_is_cut_short() -> None:
    """Another rank has failed: the round is undone at once, and not when the step has taken all its time."""
    steps = Steps()
    steps.waits = True
    handlers: list[Any] = [[], [steps], [Fails(steps)]]
    team = Team(policy=Policy(deadline=40.0, lease=2.0), handlers=handlers)
    first = team.results(team.step(1, *three(1)))[0]
    assert "rank 2: OSError: no room" in str(first.error)
    assert steps.done == ["cut short"]
    assert not first.unclean
    steps.waits = False
    assert all(each.ok for each in team.results(team.step(2, *three(2))))
    assert steps.done[1:] == ["prepare", "clean"]
    ended(team)

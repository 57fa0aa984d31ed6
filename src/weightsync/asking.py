"""Asking engines who they are: all at once, each for as long as it may take, and what can be wrong with it.

What is made of the answers is for the books (``books.py``); nothing here remembers anything.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial

from .fsm.contract import EngineLink, EngineStatus
from .fsm.errors import EngineAsleep, EngineSilent, EngineUnknown, WorldMismatch

__all__ = ["Said", "ask", "awake", "check"]

_GLANCE = 0.2
"""Seconds between two looks whether a first contact is still wanted."""
_LOOKS = 25  # of one glance each, after which it is said who is waited for
_LOGGER = logging.getLogger("weightsync")


@dataclass(frozen=True, slots=True)
class Said:
    """What came of asking one engine.

    Args:
        status: its answer; None if there was none.
        error: why there was none.
        waited: whether it was given the time that a first contact may take.
    """

    name: str
    status: EngineStatus | None = None
    error: BaseException | None = None
    waited: bool = False


def ask(
    links: Mapping[str, EngineLink],
    limit: float,
    *,
    first: float | None = None,
    starting: Collection[str] = (),
    spare: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Said]:
    """Ask all of them at once. One that was not waited for to the end is left out: that says nothing of it.

    Args:
        links: to those who are asked.
        limit: seconds that an engine may take.
        first: seconds for those who may still be starting.
        starting: who may be.
        spare: how many may be lost. When more are, ``first`` is not waited for.
        stopped: whether nobody wants to know any more.
    """
    begun = time.monotonic()
    asked = [(name, _hello(link)) for name, link in links.items()]

    def enough() -> bool:
        if stopped() or spare is None or time.monotonic() < begun + limit:
            return stopped()
        return sum(_failed(answer) for _, answer in asked) > spare

    for name, answer in asked:
        new = first is not None and name in starting
        mine = max(limit, first or 0.0) if new else limit
        if _answered(answer, begun + mine, enough, partial(_waits, name, mine)):
            try:
                yield Said(name, answer.result())
            except Exception as error:  # noqa: BLE001 - whatever an adapter raises, it was not reached
                yield Said(name, error=error)
        elif not stopped() and time.monotonic() >= begun + mine:
            yield Said(name, error=_silent(name, mine, first=new), waited=new)


def awake(said: Said) -> Said:
    """The same of an engine that will be woken before it has to be."""
    return said if said.status is None else replace(said, status=replace(said.status, asleep=False))


def check(name: str, status: EngineStatus, ranks: int | None) -> None:
    """Refuse what no round could work with."""
    if status.engine != name:
        raise EngineUnknown(f"the link to engine {name} leads to one that calls itself {status.engine}")
    if ranks not in (None, status.ranks):
        raise WorldMismatch(
            f"engine {name} says it has {status.ranks} ranks, but {ranks} were declared: correct one of them"
        )
    if status.asleep:
        raise EngineAsleep(f"engine {name} is asleep: wake it before weights are handed over")


def _hello(link: EngineLink) -> Future[EngineStatus]:
    try:
        return link.hello()
    except Exception as error:  # noqa: BLE001 - a link that raises answers like one whose future fails
        failed: Future[EngineStatus] = Future()
        failed.set_exception(error)
        return failed


def _failed(answer: Future[EngineStatus]) -> bool:
    """Whether it is known already that there is no status."""
    return answer.done() and (answer.cancelled() or answer.exception() is not None)


def _answered(
    answer: Future[EngineStatus], end: float, enough: Callable[[], bool], told: Callable[[], None]
) -> bool:
    """Wait for the answer until ``end``. A start takes minutes, so it is looked whether to go on."""
    looks = 0
    while not answer.done() and not enough() and (left := end - time.monotonic()) > 0:
        wait([answer], timeout=min(left, _GLANCE))
        looks += 1
        if looks == _LOOKS:
            told()
    return answer.done()


def _waits(name: str, limit: float) -> None:
    _LOGGER.warning("engine %s has not said hello yet; it is waited for, up to %.3g s", name, limit)


def _silent(name: str, limit: float, *, first: bool) -> EngineSilent:
    """What to do about it depends on how long it was given."""
    if first:
        advice = "its actor may still be starting: raise Policy(first_contact=...); or Ray has no room for it"
    else:
        advice = "if it is only slow, raise Policy(engine_limit=...)"
    return EngineSilent(f"engine {name} did not say hello within {limit:.3g} s; {advice}")

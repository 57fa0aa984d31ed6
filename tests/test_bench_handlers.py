"""The benchmark of the handlers tells their cost, and its check finds what has become expensive."""

import gc
import json

import pytest
from benchmarks.handlers import BUDGET, bridge, over, release, snapshot
from benchmarks.report import Figure

from weightsync.handlers.memories import HostCache

OBJECTS = 300_000
LIGHT = "the light release / the same after a full collection"


def budget() -> dict[str, float]:
    """The file beside the benchmark."""
    found: dict[str, float] = json.loads(BUDGET.read_text())
    return found


def test_who_is_over_its_budget_is_named() -> None:
    """And what has one, but was not measured."""
    found = [Figure("handlers", name, value, "ratio", "peer", 3) for name, value in (("a", 2.0), ("b", 0.5))]
    assert over(found, {"a / peer": 1, "b / peer": 1, "c / peer": 1}) == [
        "c / peer: not measured",
        "a / peer: 2, and its budget is 1",
    ]
    assert over(found, {"a / peer": 3}) == []


def test_every_figure_has_a_budget_and_keeps_it() -> None:
    """Those that take no other process; all of them are in `make bench-handlers ARGS=--check`."""
    found = [*snapshot(4, 5), *bridge(20, 5), *release(OBJECTS, 3)]
    names = {f"{each.figure} / {each.peer}" for each in found}
    assert names < budget().keys()
    assert len(budget()) == len(names) + 3
    assert over(found, {LIGHT: budget()[LIGHT]}) == []


def test_a_collection_that_comes_back_is_over_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever on the way it is hidden: nobody has to look for it by name."""
    right = HostCache.cache_release

    def ritual(self: HostCache) -> None:
        gc.collect()
        right(self)

    monkeypatch.setattr(HostCache, "cache_release", ritual)
    (line,) = over(release(OBJECTS, 3), {LIGHT: budget()[LIGHT]})
    assert line.startswith(LIGHT)

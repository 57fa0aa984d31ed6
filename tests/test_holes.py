"""What exploring earlier tables found, kept: each fix is taken out, and what found the hole finds it again.

The table of holes is in ``tests/support/holes.py``. The same exploration and the same scene find nothing on
the product as it is; otherwise what they find without the fix would say nothing.
"""
# ruff: noqa: T201  what was found, and how often, is what one wants to read of this run

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from holes import HOLES, Torn
from scenes import Show
from weightsync.fsm.errors import SetupError, TableError
from weightsync.fsm.explore import Seen, chaos, small_round
from weightsync.fsm.facts import Facts, opening
from weightsync.fsm.invariants import PROMISES
from weightsync.fsm.policy import Policy
from weightsync.fsm.receipt import Participant
from weightsync.fsm.search import Exploration
from weightsync.fsm.table import check_laws
from weightsync.testing.composed import WORLDS
from weightsync.testing.exploring import explore_composed

pytestmark = pytest.mark.usefixtures("untraced")

Patch = pytest.MonkeyPatch
TORN: dict[str, tuple[int, Torn]] = {
    f"{number}: {name}": (number, torn) for number, hole in HOLES.items() for name, torn in hole.torn.items()
}
SHOWN = [name for name, (_, torn) in TORN.items() if torn.show is not None]


@functools.cache
def whole(facts: Facts) -> Exploration[Seen]:
    """What exploring the table as it is finds in this round."""
    return chaos(facts)


@functools.cache
def shown(show: Show) -> list[str]:
    """What a scene has to complain of as things are."""
    return show()


def test_none_is_missing() -> None:
    """Fourteen holes of the table, and the fifteenth below; each has a way to be seen in the real driver."""
    assert list(HOLES) == list(range(1, 15))
    assert {number for number, torn in TORN.values() if torn.show is not None} == set(HOLES)


@pytest.mark.parametrize("name", TORN)
def test_exploring_the_table_finds_the_hole(name: str, monkeypatch: Patch) -> None:
    """Without the fix that very promise is broken; with it, the same exploration finds nothing."""
    _, torn = TORN[name]
    assert torn.promise in PROMISES
    assert not whole(torn.facts).violations
    with monkeypatch.context() as patched:
        if torn.patch is not None:
            torn.patch(patched)
        found = chaos(torn.facts, table=torn.table, until={torn.promise}, limit=20_000)
    assert torn.promise in found.violations, "\n".join(found.lines())
    print(f"hole {name} > {found.violations[torn.promise].lines()[0]}")


@pytest.mark.parametrize("name", SHOWN)
def test_the_driver_falls_into_the_hole(name: str, monkeypatch: Patch) -> None:
    """A round by the torn table does harm, and somebody says so; as it is, nobody has to complain."""
    _, torn = TORN[name]
    assert torn.show is not None
    assert shown(torn.show) == []
    with monkeypatch.context() as patched:
        torn.tear(patched)
        complaints = torn.show()
    assert any(torn.words in complaint for complaint in complaints), f"unseen: {complaints}"
    print(f"hole {name} > {complaints}")


@pytest.mark.parametrize("name", ["13: not at all", "13: after the release"])
def test_hole_13_is_refused_at_import(name: str) -> None:
    """Who gives up in Failed fences first: that is a law, and a table that breaks it cannot be imported."""
    with pytest.raises(TableError, match="fence-first"):
        check_laws(TORN[name][1].table)


def test_hole_14_costs_as_much_as_another_loss() -> None:
    """Where all engines are needed, a bad receipt fails the round in any case."""
    strict = TORN["14: strict"][1]
    assert not chaos(small_round(2, 2), table=strict.table, until={"failing"}).violations


# -- 15: a quorum of nobody, or of a fraction ----------------------------------------------------------------

NO_QUORUM = [0, -1, 3, 0.5, 1.5, True]


@pytest.mark.parametrize("quorum", NO_QUORUM)
def test_hole_15_a_quorum_is_a_number_from_one_to_all(quorum: Any) -> None:
    """Nobody, more than everybody, or half an engine is no quorum."""
    with pytest.raises(ValueError, match="quorum"):
        opening(round="r", version=1, roster=[Participant("a"), Participant("b")], quorum=quorum)


@pytest.mark.parametrize("quorum", [0, 0.0, -1])
def test_hole_15_is_refused_as_a_policy(quorum: Any) -> None:
    """A user is told before there is a round."""
    with pytest.raises(SetupError, match="quorum"):
        Policy(on_engine_failure="quarantine", quorum=quorum)


def test_hole_15_a_round_for_nobody_would_wait_for_nobody() -> None:
    """Without that check Awaiting is entered with nobody missing, and only a clock ends it."""
    nobody = replace(small_round(2, 1), quorum=0)
    found = chaos(nobody)
    assert "awaited" in found.violations, "\n".join(found.lines())
    assert "Awaiting" in found.violations["awaited"].trace[-2]
    assert not whole(small_round(2, 1)).violations
    print(f"hole 15 > {found.hits}")


# -- in the whole system -------------------------------------------------------------------------------------

BY_WORLD = {"1: no row": 0, "3: EngineCommitted in Failed": 1, "4: refusals": 1, "4: deaths": 1,
            "7: unguarded": 1, "8: derived": 0}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("name", BY_WORLD)
def test_every_misfortune_finds_the_hole(name: str, monkeypatch: Patch) -> None:
    """What ``weightsync check`` explores finds it, too: every kind of misfortune, with two buckets."""
    _, torn = TORN[name]
    with monkeypatch.context() as patched:
        torn.tear(patched)
        found = explore_composed(WORLDS[BY_WORLD[name]], until={torn.words})
    assert torn.words in found.violations, "\n".join(found.lines())
    print(f"hole {name} > {found.hits[torn.words]} x", *found.violations[torn.words].lines(), sep="\n  ")


@pytest.mark.mutation
@pytest.mark.parametrize("name", TORN)
def test_how_often_it_is_hit(name: str, monkeypatch: Patch) -> None:
    """The whole chaos without the fix, for the count; it ends, whatever was taken out."""
    _, torn = TORN[name]
    with monkeypatch.context() as patched:
        if torn.patch is not None:
            torn.patch(patched)
        found = chaos(torn.facts, table=torn.table)
    assert found.hits[torn.promise] > 0
    assert "finite" not in found.hits
    print(f"hole {name} > {dict(found.hits)} in {found.positions} positions")

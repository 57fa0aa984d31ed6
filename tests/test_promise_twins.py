"""Each promise has twins: the product with that promise broken, and an ordinary test that notices.

``make twins`` runs them, and so does CI. Printed of each: the promise, what was broken, and who noticed.
"""
# ruff: noqa: T201  who noticed what is what one wants to read of this run

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mutantrun import killed
from promisetwins import DUDS, TWINS

ROOT = Path(__file__).parents[1]


def promises() -> list[str]:
    """The promises that the documentation makes."""
    told = (ROOT / "docs" / "architecture.md").read_text()
    return re.findall(r"^\| (P\d+) ", told, re.MULTILINE)


def test_every_promise_has_two_twins() -> None:
    """A promise without a twin is one that nobody would miss."""
    assert promises() == [f"P{number}" for number in range(1, 13)]
    assert [twin.promise for twin in TWINS.values()] == [promise for promise in promises() for _ in range(2)]


def test_twins_name_tests_that_there_are() -> None:
    """A file that was renamed is found here, and not by a mutant that lives."""
    for twin in [*TWINS.values(), *DUDS.values()]:
        assert (ROOT / "tests" / f"test_{twin.tests.split()[0].partition('::')[0]}").is_file()


@pytest.mark.mutation
@pytest.mark.twins
@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", TWINS)
def test_the_twin_is_caught(name: str) -> None:
    """By an assertion of an ordinary test, in a run of its own."""
    twin = TWINS[name]
    kill = killed("promisetwins", "PROMISE_TWIN", name, twin.tests)
    assert twin.words in kill.output, f"killed for another reason: {kill}"
    print(f"{twin.promise} > {name} > {kill}")


@pytest.mark.mutation
@pytest.mark.twins
@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", DUDS)
def test_a_dud_is_not_caught(name: str) -> None:
    """What changes nothing, fits nowhere or is not looked for has not been noticed by anybody."""
    with pytest.raises(AssertionError, match=DUDS[name].promise):
        killed("promisetwins", "PROMISE_TWIN", name, DUDS[name].tests)

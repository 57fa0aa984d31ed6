"""The tests of turns, membership, refusals and ranks have teeth: a fault that is brought back makes one fail.

Each mutant (``membermutants.py``) is tried in a test run of its own, by the very tests that guard against it.
It dies by a failed assertion; an error of the mutant itself, or of the collection, kills nothing.
"""

import pytest

from membermutants import MUTANTS
from mutantrun import killed

pytestmark = [pytest.mark.mutation, pytest.mark.timeout(150)]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_mutant_dies(mutant: str) -> None:
    """The test notices, and says so by an assertion."""
    kill = killed("membermutants", "MEMBERS_MUTANT", mutant, MUTANTS[mutant][1], seconds=140)
    print(f"members > {mutant} > {kill}")  # noqa: T201 - how it was noticed

"""The tests of barrier, cache release and toggles have teeth.

Each mutant (``barriermutants.py``) is tried in a test run of its own, by the tests that guard against it.
"""

import pytest

from barriermutants import MUTANTS
from mutantrun import killed

pytestmark = [pytest.mark.mutation, pytest.mark.timeout(150)]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_mutant_is_caught(mutant: str) -> None:
    """By an assertion, in the tests that it is listed with."""
    killed("barriermutants", "BARRIER_MUTANT", mutant, MUTANTS[mutant][1])

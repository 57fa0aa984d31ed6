"""Bridge and back ends have teeth: a fault that is brought back makes a test fail, by an assertion."""

import pytest

from bridgemutants import MUTANTS
from mutantrun import killed

pytestmark = [pytest.mark.mutation, pytest.mark.timeout(150)]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_mutant_dies(mutant: str) -> None:
    """The test notices, and says so by an assertion."""
    kill = killed("bridgemutants", "BRIDGE_MUTANT", mutant, MUTANTS[mutant][1], seconds=140)
    print(f"bridge > {mutant} > {kill}")  # noqa: T201 - how it was noticed

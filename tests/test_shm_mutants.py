"""Shared memory has teeth: a fault that is brought back into it makes a test fail, by an assertion."""

import pytest

from mutantrun import killed
from shmmutants import ELSEWHERE, MUTANTS

pytestmark = [pytest.mark.mutation, pytest.mark.timeout(150)]

WHERE = {name: f"shm_{tests}" for name, (_, tests) in MUTANTS.items()} | {
    name: tests for name, (_, tests) in ELSEWHERE.items()
}


@pytest.mark.parametrize("mutant", WHERE)
def test_the_mutant_dies(mutant: str) -> None:
    """The test notices, and says so by an assertion."""
    kill = killed("shmmutants", "SHM_MUTANT", mutant, WHERE[mutant], seconds=140)
    print(f"shm > {mutant} > {kill}")  # noqa: T201 - how it was noticed

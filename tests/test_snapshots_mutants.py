"""The tests of snapshots have teeth: a fault that is brought back makes one fail.

Each mutant (``snapshotmutants.py``) is tried in a test run of its own, by the very tests that guard against
it. It dies by a failed assertion; an error of the mutant itself, or of the collection, kills nothing.
"""

import pytest

from mutantrun import killed
from snapshotmutants import MUTANTS

pytestmark = [pytest.mark.mutation, pytest.mark.timeout(150)]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_mutant_dies(mutant: str) -> None:
    """The test notices, and says so by an assertion."""
    kill = killed("snapshotmutants", "SNAPSHOT_MUTANT", mutant, MUTANTS[mutant][1], seconds=140)
    print(f"snapshots > {mutant} > {kill}")  # noqa: T201 - how it was noticed

"""The tree of errors in its module's docstring is the one that there is."""

import re

from weightsync.fsm import errors
from weightsync.fsm.errors import WeightSyncError


def test_the_tree_is_complete() -> None:
    """Each class is public, and stands below its base."""
    lines = [re.match(r"([ |`-]*)([A-Z]\w+)  +\S", line) for line in (errors.__doc__ or "").splitlines()]
    told: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for found in filter(None, lines):
        depth, name = len(found[1]), found[2]
        above = [each for each in above if each[0] < depth]
        told[name] = above[-1][1] if above else "Exception"
        above.append((depth, name))
    there = {
        name: each for name, each in vars(errors).items()
        if isinstance(each, type) and issubclass(each, WeightSyncError)
    }  # fmt: skip
    assert there.keys() == set(errors.__all__) == told.keys()
    for name, each in there.items():
        assert told[name] in {base.__name__ for base in each.__bases__}, name

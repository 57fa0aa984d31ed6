"""Our engine adapters keep the contract of engines, check by check."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest

from localsubject import LocalSubject
from weightsync.testing.conformance import Check, EngineConformance, EngineSubject, EngineUnderTest

pytestmark = pytest.mark.timeout(120)


class TestLocalEngine(EngineConformance):
    """An engine in this process that stages."""

    can: ClassVar[frozenset[str]] = frozenset({"restart"})

    def engine(self) -> EngineSubject:
        """A new one for each check."""
        return LocalSubject()


class TestLocalEngineInPlace(TestLocalEngine):
    """The same, loading right into the live weights."""

    def engine(self) -> EngineSubject:
        """A new one for each check."""
        return LocalSubject(stages=False)


_SHARED: dict[str, Any] = {}


@pytest.fixture(scope="module")
def actor(ray_cluster: None) -> Iterator[None]:
    """One actor for all checks that leave it alive."""
    import ray

    import raysubject

    # The actors' processes cannot import what only tests have.
    ray.cloudpickle.register_pickle_by_value(sys.modules["raysubject"])
    _SHARED["actor"] = raysubject.new_actor()
    yield
    ray.kill(_SHARED.pop("actor"))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("actor")
class TestRayEngine(EngineConformance):
    """An actor, whose words go over a line."""

    patience = 30.0
    line: ClassVar[bool] = True

    def engine(self) -> EngineSubject:
        """A new link to it."""
        from raysubject import RaySubject

        return RaySubject(_SHARED["actor"], line=self.line)

    def checks(self) -> Sequence[Check[EngineUnderTest]]:
        """Those that leave the actor alive."""
        return [check for check in super().checks() if not check.needs]


class TestRayEngineWithoutLine(TestRayEngine):
    """The same, whose words go by Ray."""

    line: ClassVar[bool] = False


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.usefixtures("ray_cluster")
class TestRayEngineThatDies(EngineConformance):
    """An actor of its own for each check: it is killed, for good or to be started again."""

    patience = 60.0
    can: ClassVar[frozenset[str]] = frozenset({"kill", "restart"})
    restarts: ClassVar[int] = 1

    def engine(self) -> EngineSubject:
        """A new actor."""
        import ray

        import raysubject

        ray.cloudpickle.register_pickle_by_value(sys.modules["raysubject"])
        return raysubject.RaySubject(raysubject.new_actor(restarts=self.restarts), line=True, ours=True)

    def checks(self) -> Sequence[Check[EngineUnderTest]]:
        """Only those."""
        return [check for check in super().checks() if check.needs == "restart"]


class TestRayEngineThatDiesForGood(TestRayEngineThatDies):
    """The same, and nobody starts it again."""

    restarts: ClassVar[int] = 0

    def checks(self) -> Sequence[Check[EngineUnderTest]]:
        """Only those."""
        return [check for check in EngineConformance.checks(self) if check.needs == "kill"]

"""What a user inherits from: pytest collects a subclass called ``Test...``, one test for each check.

Nothing here imports pytest at the top; without it, ``for check in mine.checks(): check(mine)`` does the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from ...fsm.contract import InletFactory, Transport
from ...fsm.errors import SetupError
from .engine_ends import ENDINGS
from .engine_limits import LIMITS
from .engine_words import WORDS
from .peers import Peer, ProcessPeers, ThreadPeer
from .rounds import TransportUnderTest
from .rules import Check
from .subjects import check_can, inlet_of, transport_of
from .transport_ends import ENDS
from .transport_faults import FAULTS
from .transport_good import GOOD
from .transport_tickets import TICKETS
from .visit import EngineSubject, EngineUnderTest

__all__ = ["ENGINE_CHECKS", "TRANSPORT_CHECKS", "EngineConformance", "TransportConformance"]

T = TypeVar("T")

TRANSPORT_CHECKS: tuple[Check[TransportUnderTest], ...] = (*GOOD, *TICKETS, *FAULTS, *ENDS)
"""What every transport must pass."""

ENGINE_CHECKS: tuple[Check[EngineUnderTest], ...] = (*WORDS, *ENDINGS, *LIMITS)
"""What every engine adapter must pass."""


class Suite:
    """One test for each check, in pytest."""

    excused: ClassVar[Mapping[str, str]] = {}
    """Checks that are skipped, by name, each with the reason. It shows in every report."""

    def checks(self) -> Sequence[Check[Any]]:
        """The checks."""
        return ()

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Called by pytest: a test for each check."""
        if "check" in metafunc.fixturenames:
            try:
                checks = self.checks()
            except SetupError as error:
                import pytest

                pytest.fail(str(error), pytrace=False)
            metafunc.parametrize("check", checks, ids=str)

    def test_it_keeps_the_contract(self, check: Check[Any]) -> None:
        """One check of the conformance kit; what it holds is in ``check.about``."""
        if check.name in self.excused:
            import pytest

            pytest.skip(self.excused[check.name])
        check(self)


class TransportConformance(Suite):
    """The suite of a transport. A subclass gives ``transport`` and ``inlet``, and maybe ``processes``."""

    patience: float = 10.0
    """Seconds until something that should happen at once counts as never."""

    processes: bool = False
    """Whether the engines are processes of their own, not threads of this one. Slower, and death is real."""

    _pool: ClassVar[dict[type, ProcessPeers]] = {}

    def transport(self) -> Transport:
        """A new transport."""
        raise NotImplementedError(f"{type(self).__name__} has to say what is tested: give it transport()")

    def inlet(self) -> InletFactory:
        """Its receiving half: a function that a process can import."""
        raise NotImplementedError(f"{type(self).__name__} has to say how engines receive: give it inlet()")

    def engines(self, names: Sequence[str]) -> Sequence[Peer]:
        """Engines that receive by it."""
        inlets = {transport_of(self).name: inlet_of(self)}
        if not self.processes:
            return [ThreadPeer(name, inlets) for name in names]
        kind = type(self)
        if kind not in self._pool:
            self._pool[kind] = ProcessPeers(inlets)
        return self._pool[kind].of(names)

    def checks(self) -> Sequence[Check[TransportUnderTest]]:
        """The checks that fit the engines."""
        return [check for check in TRANSPORT_CHECKS if not check.needs or self.processes]

    @classmethod
    def teardown_class(cls) -> None:
        """End the engines' processes. Called by pytest; without it, call it at the end."""
        if cls in cls._pool:
            cls._pool.pop(cls).close()


class EngineConformance(Suite):
    """The suite of an engine adapter. A subclass gives ``engine``, and says what can be done to it."""

    patience: float = 10.0
    """Seconds until something that should happen at once counts as never."""

    can: ClassVar[frozenset[str]] = frozenset()
    """``kill`` and ``restart``, as far as ``engine()`` has them; any other word is refused."""

    def engine(self) -> EngineSubject:
        """An engine that serves, and receives by ``given_inlet`` under the name ``GIVEN``."""
        raise NotImplementedError(f"{type(self).__name__} has to say what is tested: give it engine()")

    def checks(self) -> Sequence[Check[EngineUnderTest]]:
        """The checks that can be run on it."""
        can = check_can(self, self.can)
        return [check for check in ENGINE_CHECKS if not check.needs or check.needs in can]

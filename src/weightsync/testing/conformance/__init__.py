"""The conformance kit: what every transport and every engine adapter must pass, ours or yours.

``docs/conformance.md`` shows how to run it.
"""

from __future__ import annotations

from .engine_rules import ENGINE_RULES
from .given import GIVEN, given_inlet
from .rounds import TransportUnderTest
from .rules import Check, Rule, Violation
from .suite import ENGINE_CHECKS, TRANSPORT_CHECKS, EngineConformance, TransportConformance
from .transport_rules import TRANSPORT_RULES
from .visit import EngineSubject, EngineUnderTest

__all__ = [
    "ENGINE_CHECKS", "ENGINE_RULES", "GIVEN", "TRANSPORT_CHECKS", "TRANSPORT_RULES", "Check",
    "EngineConformance", "EngineSubject", "EngineUnderTest", "Rule", "TransportConformance",
    "TransportUnderTest", "Violation", "given_inlet",
]  # fmt: skip

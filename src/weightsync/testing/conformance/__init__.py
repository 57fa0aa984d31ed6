"""The conformance kit: what every transport and every engine adapter must pass, ours or yours.

``docs/conformance.md`` shows how to run it.
"""

from __future__ import annotations

from .rounds import TransportUnderTest
from .rules import Check, Rule, Violation
from .suite import TRANSPORT_CHECKS, TransportConformance
from .transport_rules import TRANSPORT_RULES

__all__ = [
    "TRANSPORT_CHECKS",
    "TRANSPORT_RULES",
    "Check",
    "Rule",
    "TransportConformance",
    "TransportUnderTest",
    "Violation",
]

"""A port that watches: each fact that a transport fires is judged at once, and noted if it breaks a rule.

It raises nothing but ``PortClosed``, as the ports of a round do: what it finds is for whoever runs the check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ...fsm.engine_table import Session
from ...fsm.receipt import Expectation, Participant, Receipt
from ..recording import RecordingPort
from .rules import Violation
from .transport_rules import (
    COMPLETE,
    CONTENT,
    DOUBLE_ACK,
    EARLY_ACK,
    FACTS_IN_ORDER,
    LOSS_BY_NAME,
    RECEIPT_UNCHANGED,
    STALE_ACK,
)

__all__ = ["WatchingPort"]

Made = Callable[[Participant], tuple[Receipt, ...] | None]
"""What an engine has proved so far; None where that cannot be asked."""

_BELONGS = {"bucket_sent": "broadcast", "all_sent": "broadcast", "acked": "collect"}


class WatchingPort(RecordingPort):
    """One phase of one round.

    Args:
        phase: its name.
        session: of the round.
        engines: who remains.
        expected: what good receipts say.
        limit: seconds until the phase's deadline.
        quorum: how many engines must remain.
        made: asks an engine for what it proved.
        honest: whether receipts are to be good; a check may have bent an engine.
        moves_on_after: how many calls that fire something go well before the round has moved on.
    """

    def __init__(
        self,
        phase: str,
        session: Session,
        engines: Iterable[Participant],
        expected: Expectation,
        *,
        limit: float,
        quorum: int,
        made: Made,
        honest: bool = True,
        moves_on_after: int | None = None,
    ) -> None:
        super().__init__(session, engines, limit, quorum)
        self.phase, self.expected = phase, expected
        self.flaws: list[Violation] = []
        self.tried = 0
        self._made, self._honest, self._left = made, honest, moves_on_after
        self._asked = self.engines

    def _check(self) -> None:
        self.tried += 1
        if self._left is not None:
            if self._left == 0:
                self.close()
            self._left -= 1
        super()._check()

    def _fire(self, *fact: Any) -> None:
        super()._fire(*fact)
        self.flaws += self._judged(*fact)

    def _judged(self, name: str, *values: Any) -> list[Violation]:
        if _BELONGS.get(name, self.phase) != self.phase:
            return [FACTS_IN_ORDER.broken(f"{name} was fired in {self.phase}")]
        earlier = self.fired[:-1]
        if name == "acked":
            return self._judged_ack(earlier, *values)
        if name == "lost":
            return [] if values[0] in self._asked else [LOSS_BY_NAME.broken(f"{values[0]} takes no part")]
        sent = sum(fact[0] == "bucket_sent" for fact in earlier)
        if ("all_sent",) in earlier:
            return [FACTS_IN_ORDER.broken(f"{name} came after all_sent")]
        if name == "bucket_sent" and values[0] != sent:
            return [FACTS_IN_ORDER.broken(f"bucket_sent({values[0]}) came where bucket {sent} was due")]
        if name == "all_sent" and sent != self.expected.buckets:
            return [FACTS_IN_ORDER.broken(f"all_sent came after {sent} of {self.expected.buckets} buckets")]
        return []

    def _judged_ack(
        self, earlier: list[tuple[Any, ...]], engine: Participant, receipts: tuple[Receipt, ...]
    ) -> list[Violation]:
        if any(fact[:2] == ("acked", engine) for fact in earlier):
            return [DOUBLE_ACK.broken(f"engine {engine} was acked twice in round {self.session.round}")]
        if engine not in self._asked:
            return [STALE_ACK.broken(f"engine {engine} was acked, and takes no part")]
        if [receipt.rank for receipt in receipts] != list(range(engine.ranks)):
            return [
                EARLY_ACK.broken(
                    f"engine {engine} was acked with {len(receipts)} receipts of {engine.ranks} ranks"
                )
            ]
        for receipt in receipts:
            if (receipt.round, receipt.epoch) != (self.session.round, self.session.epoch):
                return [
                    STALE_ACK.broken(f"engine {engine} was acked with a receipt of round {receipt.round}")
                ]
            if receipt.participant != (engine.id, engine.incarnation):
                return [
                    STALE_ACK.broken(f"engine {engine} was acked with a receipt of {receipt.participant}")
                ]
        made = self._made(engine)
        if made is not None and made != receipts:
            if made:
                return [
                    RECEIPT_UNCHANGED.broken(f"engine {engine} was acked with another receipt than it made")
                ]
            return [EARLY_ACK.broken(f"engine {engine} was acked, and has made no receipt yet")]
        return [flaw for receipt in receipts if self._honest for flaw in self._judged_receipt(receipt)]

    def _judged_receipt(self, receipt: Receipt) -> list[Violation]:
        flaw = receipt.mismatch(self.session.round, self.session.epoch, self.expected)
        if flaw is None:
            return []
        whole = (receipt.tensors, receipt.bytes) == (self.expected.tensors, self.expected.bytes)
        return [(CONTENT if whole else COMPLETE).broken(flaw)]

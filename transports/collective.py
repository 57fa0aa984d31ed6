"""The transport for engines in other processes and on other hosts: broadcasts of a group made for the round.

Rank 0 is the trainer; the engines' ranks follow, in the order of the engines. Each bucket is one broadcast
of a flat buffer of bytes, which suits every dtype and has the size that the plan says, on both sides. While
bucket k is on its way, bucket k + 1 is packed.

A broadcast needs every rank and cannot be told to stop, so nobody enters one before all are ready for it:
each rank says so over a connection of its own (``hub.py``), waits for the word, and only then takes part.
That makes every longer wait one that can be ended, and named: which engine did not join, is late with which
bucket, or failed and why. What remains is a rank that stops in the middle of a transfer; ``gloo.py`` tells
how that ends.

The transport does not survive a loss. It fires the loss, with the engine's own error where there is one,
and the round fails; the next round makes a new group of whoever takes part in it.

A ticket carries the address, a secret, the plan's fingerprint and the numbers of the ranks. Whoever has it
can join; the bytes themselves go unencrypted, as everything of torch does: it is for a trusted network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import final

import torch.distributed as dist

from ..fsm import checks
from ..fsm.contract import Capabilities, EngineLink, Port, Ticket, Weights
from ..fsm.errors import PortClosed, SetupError
from ..fsm.plan import Plan
from ..fsm.receipt import Participant
from .collective_inlet import NAME, collective_inlet
from .collective_round import CollectiveRound
from .gloo import Operation
from .packing import pack
from .standing import Standing
from .weights import tensors_of

__all__ = ["CollectiveTransport", "collective_inlet"]


@final
class CollectiveTransport:
    """Broadcasts to all engines at once.

    Args:
        backend: what carries the bytes; there is ``"gloo"``.
        address: the trainer's address as the engines reach it. By default only this host can.
    """

    def __init__(self, backend: str = "gloo", *, address: str = "127.0.0.1") -> None:
        if backend != "gloo":
            raise SetupError(f"there is no collective transport over {backend!r}, only over 'gloo'")
        if not dist.is_available() or not dist.is_gloo_available():
            raise SetupError("this build of torch has no gloo; use a transport other than 'collective'")
        checks.text("CollectiveTransport", "address", address, "the trainer's address is needed")
        self._address = address
        self._standing = Standing[CollectiveRound]()

    @property
    def name(self) -> str:
        """``"collective"``."""
        return NAME

    @property
    def capabilities(self) -> Capabilities:
        """Any host and any dtype; but a collective needs everybody."""
        return Capabilities(stages=True, aliases=False, cross_host=True, survives_loss=False, dtypes=None)

    def open(
        self, plan: Plan, weights: Weights, engines: Mapping[Participant, EngineLink], port: Port
    ) -> None:
        """Start the receiving halves, and make the group with them.

        Raises:
            TransportError: an engine did not join in time, or was lost; its loss has been fired.
        """
        round = CollectiveRound(self._standing.buffers(plan.largest))
        self._standing.open(round)
        port.on_change(round.bell.ring)
        with suppress(PortClosed):
            tickets = self._tickets(round, plan, engines)
            for engine, link in engines.items():
                if not (port.closed or round.ended):
                    round.receptions.start(engine, link, tickets[engine], port)
            if plan.largest:
                round.make_group(plan, port)
        if port.closed or round.ended:
            round.end("the round is over")  # the abort may have come before there was anything to abort

    def broadcast(self, plan: Plan, weights: Weights, port: Port) -> None:
        """Broadcast every bucket.

        Raises:
            PlanError: a tensor is no longer what the plan says.
            TransportError: an engine was lost, which has been fired; or the broadcast failed.
        """
        round = self._standing.at(port)
        if round is None:
            return
        with suppress(PortClosed):
            under_way: Operation | None = None
            for bucket in plan.buckets:
                buffer = round.buffers.tensor(bucket.index, bucket.nbytes)
                pack(
                    plan, bucket, tensors_of(weights), buffer.numpy()
                )  # beside the broadcast of the one before
                if bucket.index:
                    round.finish(bucket.index - 1, under_way, port)
                under_way = round.begin(bucket.index, buffer, port)
            round.finish(len(plan.buckets) - 1, under_way, port)
            port.all_sent()

    def collect(self, plan: Plan, port: Port) -> None:
        """Wait for the receipts."""
        round = self._standing.at(port)
        if round is None:
            return
        with suppress(PortClosed):
            round.receptions.collect(port, lambda: round.ended, round.look)

    def clean(self) -> None:
        """Close the group, and keep the buffers for the next round."""
        round = self._standing.end("the round is over")
        if round is not None:
            self._standing.keep(round.buffers)

    def abort(self) -> None:
        """Break off whatever is under way, tell the engines, close the group."""
        self._standing.end("the sender aborted the round")

    def close(self) -> None:
        """Give the buffers back."""
        self.abort()
        self._standing.keep(None)

    def _tickets(
        self, round: CollectiveRound, plan: Plan, engines: Iterable[Participant]
    ) -> dict[Participant, Ticket]:
        first: dict[Participant, int] = {}
        for engine in engines:
            first[engine] = len(round.engines) + 1
            round.engines |= {first[engine] + rank: engine for rank in range(engine.ranks)}
        values: dict[str, str | int] = {"fingerprint": plan.fingerprint, "size": len(round.engines) + 1}
        if plan.largest:  # otherwise there is nothing to broadcast, and no group
            round.listen(self._address, plan.fingerprint)
            values |= {"host": round.hub.host, "port": round.hub.port, "secret": round.hub.secret}
        return {
            engine: Ticket(NAME, {**values, "first": number, "rank": 0}) for engine, number in first.items()
        }

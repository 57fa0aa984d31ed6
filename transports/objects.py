"""The transport by Ray's object store, for engines in Ray actors, wherever these are, when nothing else fits.

Each bucket is put into the store once, for all engines, and every rank reads it there, without a copy of its
own: N engines cost one copy in and N copies out. An engine on another node reads the copy that Ray brings to
its node. At most two buckets are there at a time: bucket k + 2 is put when every engine that remains has let
go of bucket k. Who did is kept by a small actor (``board.py``), which both sides call, so that nothing has to
reach the trainer but Ray.

An engine that is lost loses only itself. What it still reads, or a view that somebody kept, stays what it is,
since Ray gives memory back when its last reader has let go; it is not waited for.

When a round is over, good or bad, the board forgets its buckets, and their memory is free.

A ticket is a key on the board that nobody can guess, good for one round. Bytes and references go over Ray's
wires, which use pickle, and are trusted as far as the cluster is.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import final

from ..fsm.contract import Capabilities, EngineLink, Port, Weights
from ..fsm.errors import PortClosed, SetupError
from ..fsm.plan import Bucket, Plan
from ..fsm.receipt import Participant
from .objects_inlet import NAME, framed, objects_inlet, window
from .objects_round import ObjectsRound
from .packing import pack
from .shield import MARGIN
from .standing import Standing
from .weights import tensors_of

__all__ = ["ObjectStoreTransport", "objects_inlet"]

_OVER = "its round is over"


@final
class ObjectStoreTransport:
    """Sends by Ray's object store, to engines in Ray actors.

    Ray must be initialised in this process. A small actor beside it, which asks for no CPU, is started with
    the first such transport of a process and ends with the last.

    Raises:
        SetupError: there is no Ray here.
    """

    def __init__(self) -> None:
        try:
            from .object_store import check_ready, own_board
        except ImportError as error:
            raise SetupError(f"transport 'objects' needs Ray: pip install ray ({error})") from error
        check_ready("transport 'objects'")
        self._standing = Standing[ObjectsRound]()
        own_board(self)  # it starts while engines say hello, and not in a pause

    @property
    def name(self) -> str:
        """``"objects"``."""
        return NAME

    @property
    def capabilities(self) -> Capabilities:
        """Any host of the cluster and any dtype; and it goes on without engines that are lost."""
        return Capabilities(
            stages=True, aliases=False, cross_host=True, survives_loss=True, dtypes=None, in_cluster=True
        )

    def open(
        self, plan: Plan, weights: Weights, engines: Mapping[Participant, EngineLink], port: Port
    ) -> None:
        """Begin a round on the board, and start the receiving halves.

        Raises:
            TransportError: the store is too small, or the board does not answer.
        """
        from .object_store import check_room, own_board

        check_room(window(plan))
        round = ObjectsRound(own_board(self), self._standing.buffers(framed(plan.largest)))
        self._standing.open(round)
        port.on_change(round.bell.ring)
        with suppress(PortClosed):
            if round.begin(plan, engines, port):
                round.look(port)
        if port.closed or round.ended:
            round.end(_OVER)  # the abort may have come before there was anything to abort

    def broadcast(self, plan: Plan, weights: Weights, port: Port) -> None:
        """Put every bucket into the store, and show it to every engine that remains.

        Raises:
            PlanError: a tensor is no longer what the plan says.
            TransportError: the store is full, no engine remains, or one holds a bucket for too long.
        """
        round = self._standing.at(port)
        if round is None:
            return
        with suppress(PortClosed):
            for bucket in plan.buckets:
                if not round.room(bucket.index, port):
                    return
                round.show(bucket.index, self._stored(round, plan, bucket, weights))
                port.bucket_sent(bucket.index)
            port.all_sent()

    def collect(self, plan: Plan, port: Port) -> None:
        """Wait for the receipts."""
        round = self._standing.at(port)
        if round is None:
            return
        with suppress(PortClosed):
            round.receptions.collect(port, lambda: round.ended, round.look)

    def clean(self) -> None:
        """Have the board forget the round; keep the buffer that buckets are packed in."""
        round = self._standing.end(_OVER)
        if round is not None:
            self._standing.keep(round.buffers)

    def abort(self) -> None:
        """Wake sender and engines, and have the board forget the round."""
        self._standing.end("the sender aborted the round")

    def close(self) -> None:
        """Give the buffer back, and end the board if no other transport of this process uses it."""
        from .object_store import give_back

        self.abort()
        self._standing.keep(None)
        give_back(self)

    def _stored(self, round: ObjectsRound, plan: Plan, bucket: Bucket, weights: Weights) -> list[object]:
        """The reference to a bucket, in a list; nothing in it for one without bytes."""
        from .object_store import put

        if not bucket.nbytes:
            return []
        # One buffer is enough: what is packed was copied to the store when put returns.
        octets = round.buffers.octets(0, framed(bucket.nbytes))
        octets[:MARGIN] = octets[-MARGIN:] = 0
        pack(plan, bucket, tensors_of(weights), octets[MARGIN:-MARGIN])
        return put(octets)

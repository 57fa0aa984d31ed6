"""The receiving half of the shared-memory transport: one rank of an engine, for one session.

A rank joins the trainer's endpoint, maps the memory that it is handed, which the process does once for each
segment, and hands the buckets out where they lie. Nothing is copied here.

A bucket is valid until the next one is asked for. Whoever keeps a view of a slot beyond that is told so, at
once: what keeps it fails the round by name, before anybody writes there. In a buffer of a whole version
nothing is written as long as anything refers to it. An engine that *aliases* gets whole tensors there, which
are its own until it swaps away from them; what it still has of them it says when it joins again.

While a bucket is being applied, beats tell the trainer that this process lives and which bucket it is at.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from ..fsm.contract import Bucketful, Inlet, Ticket
from ..fsm.engine_table import Session
from ..fsm.errors import EngineError, PlanError, TransportError
from ..fsm.plan import Plan
from .packets import Packets, packet_socket
from .private_folder import inhabited
from .reach import HostReach, Reach, Reached
from .segment import Offer
from .version_layout import layout_of
from .wire import Message, field, names, proof

__all__ = ["NAME", "aliasing_shm_inlet", "inlet_by", "shm_inlet"]

NAME = "shm"
_BEAT = 0.25
"""Seconds between two signs of life. An engine that may be silent for less than that is lost all the same."""

_EVERY = 16
"""Buckets of a version after which a rank says how far it is."""

_OVER = "it was told to stop receiving"


def shm_inlet(ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> Inlet:
    """The receiving half for one rank of an engine that copies what arrives.

    Raises:
        PlanError: the sender has another plan.
        TransportError: the ticket does not say what it has to.
    """
    return inlet_by(HostReach(), ticket, session, plan, limit)


def aliasing_shm_inlet(ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> Inlet:
    """The same, for an engine that uses the trainer's buffer as its weights."""
    return _ShmInlet(_seat(ticket, plan), session, plan, limit, HostReach(), aliases=True)


def inlet_by(reach: Reach, ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> Inlet:
    """The same, for an engine that copies, and for memory of another kind.

    Raises:
        PlanError: the sender has another plan.
        TransportError: the ticket does not say what it has to.
    """
    return _ShmInlet(_seat(ticket, plan), session, plan, limit, reach, aliases=False)


@dataclass(frozen=True, slots=True)
class _Seat:
    """What a ticket says, checked."""

    rank: int
    path: str
    secret: str


def _seat(ticket: Ticket, plan: Plan) -> _Seat:
    def value(name: str, kind: type[int | str]) -> Any:
        found = ticket.values.get(name)
        if type(found) is not kind:
            raise TransportError(f"the ticket's {name!r} is {found!r}, not a {kind.__name__}")
        return found

    fingerprint = value("fingerprint", str)
    if fingerprint != plan.fingerprint:
        raise PlanError(
            f"the sender's plan ({fingerprint[:12]}) is not the one that was opened "
            f"({plan.fingerprint[:12]}); nothing was received"
        )
    number, first, ranks = value("rank", int), value("first", int), value("ranks", int)
    if not 0 <= number < ranks or first < 0:
        raise TransportError(f"this ticket is for {ranks} ranks, and none of them is {number}")
    return _Seat(first + number, value("path", str), value("secret", str))


# -- what a process has mapped ------------------------------------------------------------------------------


@final
class _Process:
    """This process, as trainers know it: a name that no other life has, and what it has mapped of each.

    A trainer is known by the folder of its endpoints, and what is mapped of one that lives there no more is
    forgotten.
    """

    def __init__(self) -> None:
        self.name = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._mapped: dict[str, dict[str, Reached]] = {}

    def mapped(self, folder: str) -> list[str]:
        """The segments of a trainer that it has mapped."""
        with self._lock:
            return sorted(self._mapped.get(folder, ()))

    def held(self, folder: str) -> list[str]:
        """Those of which anything in it still has a view."""
        with self._lock:
            return sorted(name for name, each in self._mapped.get(folder, {}).items() if each.leased)

    def map(self, folder: str, name: str, size: int, offer: Offer, reach: Reach) -> None:
        """Map one more, unless it is mapped."""
        with self._lock:
            mapped = self._mapped.setdefault(folder, {})
            if name in mapped:
                reach.decline(offer)
            else:
                mapped[name] = reach.map(name, size, offer)

    def find(self, folder: str, name: str) -> Reached:
        """One that is mapped."""
        with self._lock:
            found = self._mapped.get(folder, {}).get(name)
        if found is None:
            raise TransportError(f"segment {name} was never handed over")
        return found

    def keep(self, folder: str, known: list[str], alive: list[str]) -> None:
        """Of the ``known`` ones a trainer has only those; and of a trainer that is gone none is needed."""
        with self._lock:
            mapped = self._mapped.get(folder, {})
            for name in set(known) - set(alive):
                if name in mapped and not mapped[name].leased:
                    del mapped[name]
            for other in [each for each in self._mapped if each != folder and not inhabited(Path(each))]:
                # What anything still views is remembered: whether its trainer is gone, nobody knows for sure.
                self._mapped[other] = {n: each for n, each in self._mapped[other].items() if each.leased}
                if not self._mapped[other]:
                    del self._mapped[other]


_process = _Process()


def _forked() -> None:
    global _process  # noqa: PLW0603 - a child is another process, and says so
    _process = _Process()


os.register_at_fork(after_in_child=_forked)


# -- receiving ----------------------------------------------------------------------------------------------


@final
class _ShmInlet:
    def __init__(
        self, seat: _Seat, session: Session, plan: Plan, limit: float, reach: Reach, *, aliases: bool
    ) -> None:
        self._seat, self._session, self._plan, self._limit = seat, session, plan, limit
        self._reach, self._aliases, self._folder = reach, aliases, str(Path(seat.path).parent)
        self._lock = threading.Lock()
        self._wire: Packets | None = None
        self._stopped: str | None = None
        self._bucket = -1
        self._complete = False

    @contextmanager
    def buckets(self) -> Iterator[Iterator[Bucketful]]:
        """The buckets in order; each is valid until the next one is asked for."""
        wire = self._connected()
        over = threading.Event()
        beats = threading.Thread(target=self._beat, args=(wire, over), name="weightsync-beat", daemon=True)
        try:
            self._join(wire)
            beats.start()
            self._reach.begin()
            yield self._frames(wire)
            if self._complete:
                self._say(wire, "done")
            else:
                self._leave(wire, "it stopped before the last bucket", self._held())
        except BaseException as error:
            self._leave(wire, f"{type(error).__name__}: {error}", self._held())
            raise
        finally:
            over.set()
            if beats.ident is not None:
                beats.join()
            wire.close()

    def close(self) -> None:
        """Stop: no further bucket comes, and whoever waits for one is woken."""
        with self._lock:
            self._stopped = self._stopped or _OVER
            wire = self._wire
        if wire is not None:
            self._leave(wire, _OVER, _process.held(self._folder))
            wire.shut()

    # -- joining ----------------------------------------------------------------------------------------

    def _connected(self) -> Packets:
        connection = packet_socket()
        connection.settimeout(self._limit)
        try:
            connection.connect(self._seat.path)
        except OSError as error:
            connection.close()
            raise TransportError(
                f"no trainer listens at {self._seat.path} ({error.strerror}): its round is over, or it is on "
                "another host or in another container, which shared memory does not reach"
            ) from error
        wire = Packets(connection, self._session)
        with self._lock:
            self._wire = wire
            stopped = self._stopped
        if stopped:
            wire.close()
            raise TransportError(f"rank {self._seat.rank} does not receive: {stopped}")
        return wire

    def _join(self, wire: Packets) -> None:
        seat, folder = self._seat, self._folder
        known = _process.mapped(folder)
        nonce = secrets.token_hex(16)
        challenge = self._next(wire, "challenge", "welcome")
        self._say(
            wire, "join", rank=seat.rank, nonce=nonce, fingerprint=self._plan.fingerprint,
            proof=proof(seat.secret, "join", seat.rank, field(challenge, "nonce", str)),
            process=_process.name, aliases=self._aliases,
            mapped=known, holds=_process.held(folder),
        )  # fmt: skip
        welcome = self._next(wire, "welcome", "welcome")
        if not secrets.compare_digest(field(welcome, "proof", str), proof(seat.secret, "welcome", nonce)):
            raise TransportError("somebody without the round's secret answers at the trainer's endpoint")
        _process.keep(folder, known, names(welcome, "alive"))

    # -- buckets ----------------------------------------------------------------------------------------

    def _frames(self, wire: Packets) -> Iterator[Bucketful]:
        layout, told, last, whole = layout_of(self._plan), dict[str, Any](), -1, None
        for bucket in self._plan.buckets:
            lease, views = None, None
            if bucket.index > last:
                told = self._next(wire, "bucket", f"bucket {bucket.index}")
                last = self._checked(told, bucket.index)
            segment = _process.find(self._folder, field(told, "segment", str))
            self._bucket = bucket.index
            if told.get("whole") is True:
                at = layout.starts[bucket.index]
                if whole is None:
                    whole, _ = segment.lease(0, layout.size)
                data = whole[at : at + bucket.nbytes]
                if self._aliases and layout.viewable:
                    views = layout.views(bucket.index, whole)
            else:
                data, lease = segment.lease(field(told, "at", int), bucket.nbytes)
            frame = Bucketful(bucket.index, data, views, self._reach.copy)
            del data, views
            yield frame
            self._reach.finish()  # nothing of it is read any more, and not only nobody looks at it
            frame.expire()  # whoever loops over the buckets still refers to it
            self._bucket = -1
            if lease is not None:
                self._refuse_kept(lease, bucket.index)
                self._say(wire, "released", bucket=bucket.index)
            elif bucket.index % _EVERY == _EVERY - 1 and not self._aliases:
                # A version is not written again as long as anything refers to it: this is only how far it is.
                self._say(wire, "taken", bucket=bucket.index)
        self._complete = True

    def _checked(self, told: Message, due: int) -> int:
        """The last bucket that a word is of; it must begin with the one that is due."""
        first, last, at = field(told, "bucket", int), field(told, "last", int), field(told, "at", int)
        if first != due or not first <= last < len(self._plan.buckets):
            raise TransportError(f"buckets {first} to {last} came where {due} was due")
        if told.get("whole") is not True and last != first:
            raise TransportError(f"buckets {first} to {last} are told in one word, and each lies by itself")
        start = layout_of(self._plan).starts[first]
        if told.get("whole") is True and at != start:
            raise TransportError(f"bucket {first} lies at {at}, not at {start}")
        return last

    def _refuse_kept(self, lease: weakref.ref[Any], bucket: int) -> None:
        """What is still viewed would change under whoever views it: he is told now."""
        if lease() is not None:
            raise EngineError(
                f"something keeps a view of bucket {bucket} beyond its turn, and would soon read other bytes "
                "there: copy what has to last (clone)"
            )

    def _next(self, wire: Packets, kind: str, what: str) -> Message:
        """Wait for a message of this kind; memory that is handed over meanwhile is mapped."""
        rank = self._seat.rank
        while True:
            try:
                message, fds = wire.receive()
            except TimeoutError as error:
                raise TransportError(
                    f"rank {rank} waited {self._limit:g} s for its {what}, and nothing came"
                ) from error
            except OSError as error:
                raise TransportError(f"rank {rank} gets no {what}: {self._stopped or error}") from error
            if message is None:
                why = self._stopped or "the trainer closed its connection, or was killed"
                raise TransportError(f"rank {rank} gets no {what}: {why}")
            if message["kind"] == "segment":
                self._map(message, fds)
                continue
            for fd in fds:
                os.close(fd)
            if message["kind"] == "stop":
                raise TransportError(f"rank {rank} gets no {what}: {field(message, 'why', str)}")
            if message["kind"] != kind:
                raise TransportError(f"the trainer says {message['kind']!r}, where {kind!r} is due")
            return message

    def _map(self, message: Message, fds: list[int]) -> None:
        handle = message.get("handle")
        offer = Offer(tuple(fds), tuple(handle) if isinstance(handle, list) else ())
        try:
            name, size = field(message, "id", str), field(message, "size", int)
        except TransportError:
            self._reach.decline(offer)
            raise
        _process.map(self._folder, name, size, offer, self._reach)

    # -- saying -----------------------------------------------------------------------------------------

    def _say(self, wire: Packets, kind: str, **body: Any) -> None:
        try:
            wire.send(kind, **body)
        except OSError as error:
            why = self._stopped or error
            raise TransportError(f"rank {self._seat.rank} lost the trainer: {why}") from error

    def _held(self) -> list[str]:
        """What this process may still read: also what a device has not read to its end."""
        try:
            self._reach.finish()
        except Exception:  # noqa: BLE001 - it cannot be known, and why it leaves is told already
            return _process.mapped(self._folder)
        return _process.held(self._folder)

    def _leave(self, wire: Packets, why: str, holds: list[str]) -> None:
        with contextlib.suppress(OSError):
            wire.send("left", why=why[:500], bucket=self._bucket, holds=holds)

    def _beat(self, wire: Packets, over: threading.Event) -> None:
        while not over.wait(_BEAT):
            try:
                wire.send("beat", bucket=self._bucket)
            except OSError:
                return

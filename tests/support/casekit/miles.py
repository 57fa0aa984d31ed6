"""The checks of the acceptance tests in ``test_miles.py``: each raises AssertionError if it does not hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from weightsync import Progress, Retention
from weightsync.fsm.errors import LockError, ReceiptRefused, RoundTimedOut
from weightsync.fsm.lock import Granted
from weightsync.fsm.record import Record
from weightsync.fsm.states import Disposition
from weightsync.handlers.progress import Bar as AnyBar
from weightsync.joining import transport_for

from .bench import GOOD_PATH, SENDING, Bench, quick, threads
from .levels import eventually
from .scripts import ANY, Block, Injected, Raise
from .tensors import state
from .wrapped import Bar, Tripwire

Tensors = list[tuple[str, Tensor]]
PATIENCE = 10.0


def handed(value: float) -> Tensors:
    """Weights as a trainer gathers them for one round: a list that it wants emptied."""
    return list(state(value).items())


@contextmanager
def trainer(transport: Any = "memory", bar: AnyBar | None = None, **policy: Any) -> Iterator[Bench]:
    """A trainer that keeps its tensors while they are needed and shows its progress, after one good round."""
    handlers: list[Any] = [Retention(), *([Progress(bar)] if bar is not None else [])]
    with Bench(threads("e0", "e1"), transport, policy=quick(**policy), handlers=handlers) as bench:
        bench.works()
        yield bench


def given_back_once(bench: Bench) -> None:
    """Each grant was given back, and once."""
    assert bench.keeper.released == bench.keeper.granted, (
        f"granted {bench.keeper.granted}, given back {bench.keeper.released}"
    )


# -- A1 ------------------------------------------------------------------------------------------------------


def good_round(transport: str, bar: AnyBar) -> None:
    """The path, the tensors, the bar, the release."""
    with Bench(threads("e0", "e1"), transport, handlers=[Retention(), Progress(bar)]) as bench:
        tensors = handed(1)
        the_list, places = tensors, [tensor.data_ptr() for _, tensor in tensors]
        weights = transport_sees(bench, tensors)
        assert weights == places, "copies were sent"
        assert bench.log.records[-1].event == "result"
        result_path = [
            r.target for r in bench.log.records if r.event == "transition" and r.source != r.target
        ]
        assert ("Idle", *result_path) == GOOD_PATH
        assert tensors is the_list
        assert tensors == [], "the list still holds the tensors"
        given_back_once(bench)


def transport_sees(bench: Bench, tensors: Tensors) -> list[int]:
    """A good round with ``tensors``; where the tensors are that the transport was given."""
    seen: list[int] = []
    inner = bench.sync._transport
    broadcast = inner.broadcast

    def look(plan: Any, weights: Any, port: Any) -> None:
        seen.extend(tensor.data_ptr() for tensor in weights.tensors.values())
        broadcast(plan, weights, port)

    inner.broadcast = look  # type: ignore[method-assign]
    try:
        bench.works(tensors)
    finally:
        del inner.broadcast
    return seen


# -- A2 ------------------------------------------------------------------------------------------------------


def _told(bench: Bench) -> list[Record]:
    """What the log says of those who hold the lock."""
    return [record for record in bench.log.records if record.event == "waiting"]


def contention() -> None:
    """Waits in Idle without asking again, is told who holds it, goes on when it is given back."""
    with trainer(deadline=4.0, lease=9.0) as bench:
        keeper = bench.keeper
        rival = keeper.inner.request("rival", "theirs")
        held = keeper.inner.wait(rival, 0)
        assert isinstance(held, Granted)
        keeper.words.clear()
        keeper.waiting.clear()
        pending = bench.sync.begin(7, state(7))
        assert keeper.waiting.wait(PATIENCE)
        assert eventually(lambda: _told(bench)), "nobody said who holds it"
        assert _told(bench)[-1].facts == {"holder": "rival", "of": "theirs", "epoch": held.epoch, "place": 1}
        threading.Event().wait(0.3)  # long enough to see it poll
        # At first contact the keeper is asked for its epoch, which these engines have seen.
        assert keeper.words == ["status", "enter", "wait"], f"the lock is polled: {keeper.words}"
        assert not pending.done
        moved = [
            r for r in bench.log.records if r.round == _told(bench)[-1].round and r.event == "transition"
        ]
        assert moved == [], "the round left Idle without the lock"
        given = time.monotonic()
        keeper.inner.release(rival, held.epoch)
        result = pending.wait()
        assert time.monotonic() - given < 1.0
        assert result.require().path == GOOD_PATH
        given_back_once(bench)


def contention_without_end() -> None:
    """At the deadline: Failed and Released, no ticket left, the rival undisturbed, the engines not asked."""
    with trainer(deadline=2.0) as bench:
        keeper = bench.keeper
        rival = keeper.inner.request("rival", "theirs")
        held = keeper.inner.wait(rival, 0)
        assert isinstance(held, Granted)
        for engine in bench.engines.values():
            engine.disarm()
        granted = list(keeper.granted)
        result = bench.run(handed(7))
        assert result.path == ("Idle", "Failed", "Released")
        assert isinstance(result.error, RoundTimedOut)
        assert "held by rival" in str(result.error), f"who holds it is not said: {result.error}"
        status = keeper.inner.status()
        assert status.waiting == (), f"tickets are left: {status.waiting}"
        assert status.holder is not None
        assert (status.holder.owner, status.holder.epoch) == ("rival", held.epoch), "the rival lost the lock"
        assert keeper.granted == granted
        assert [engine.count("open") for engine in bench.engines.values()] == [0, 0]
        keeper.inner.release(rival, held.epoch)
        bench.works()


def crossing_grant() -> None:
    """The grant arrives when the round has given up: it is handed back."""
    with trainer(deadline=2.0) as bench:
        keeper, late = bench.keeper, Block()
        keeper.after["wait"] = late
        result = bench.run(handed(7))
        assert late.reached.is_set()
        assert result.path == ("Idle", "Failed", "Released")
        assert keeper.holder is None, f"nobody handed the grant of {keeper.holder} back"
        keeper.after.clear()
        late.going.set()
        bench.lock_is_free()
        bench.works()


# -- A3, A4, A5 ----------------------------------------------------------------------------------------------

PHASES: dict[str, str | tuple[str, ...]] = {
    "open": "Locked", "broadcast": "Broadcasting", "collect": "Awaiting",
    "apply": "Broadcasting", "release": SENDING, "commit": "Cleaning",
}  # fmt: skip


def transport_failure(transport: str, method: str) -> None:
    """The cause, the lock, the tensors, the bar, the version."""
    bar, wire, boom = Bar(), Tripwire(transport_for(transport)), Injected("NCCL broadcast failed")
    with trainer(wire, bar) as bench:
        tensors, moved = handed(7), list(bar.moves)
        wire.arm(method, Raise(boom))
        bucket = 0 if method == "broadcast" else None
        bench.fails(boom, phase=PHASES[method], bucket=bucket, model=tensors)
        kept(tensors, bar, moved)
        given_back_once(bench)
        bench.works(tensors)


def kept(tensors: Tensors, bar: Bar, moved: list[int]) -> None:
    """Nothing of a failed round shows at the trainer."""
    assert len(tensors) == 3, "the tensors were let go of, though they are needed again"
    assert bar.moves == moved, "the bar moved on for a failed round"


def engine_failure(transport: str, point: str) -> None:
    """The same for an engine; its sibling, in the middle of a bucket, has ended by the release."""
    bar, boom = Bar(), Injected("engine died during broadcast")
    with trainer(transport, bar) as bench:
        tensors, moved = handed(7), list(bar.moves)
        one, sibling = (bench.engines[name] for name in ("e0", "e1"))
        at_release: list[tuple[str, bool, bool]] = []

        def look() -> None:
            at_release.extend(
                (name, engine.script.busy, engine.look().in_session)  # type: ignore[attr-defined]
                for name, engine in bench.engines.items()
            )

        bench.keeper.before["release"] = look
        busy = Block()
        if point == "apply":  # the sibling is in its first bucket, and lets go of it a little later
            sibling.arm("applied", busy, 0)
            one.arm("apply", _AfterAnother(busy, boom), 0)
            threading.Timer(0.2, busy.going.set).start()
        else:
            one.arm(point, Raise(boom))
        bench.fails(
            boom, engine="e0", phase=PHASES[point], bucket=0 if point == "apply" else ANY, model=tensors
        )
        bench.keeper.before.clear()
        assert [(name, working) for name, working, _ in at_release] == [("e0", False), ("e1", False)], (
            f"the lock was given back while an engine still worked: {at_release}"
        )
        kept(tensors, bar, moved)
        given_back_once(bench)
        bench.works(tensors)


class _AfterAnother:
    """Raises when somebody else is in the middle of something."""

    def __init__(self, other: Block, error: BaseException) -> None:
        self._other, self._error = other, error

    def __call__(self) -> None:
        assert self._other.reached.wait(PATIENCE)
        raise self._error


def wrong_bytes() -> None:
    """An engine whose memory changed after it was written proves the wrong digest, and is lost by that."""
    with trainer() as bench:
        engine = bench.engines["e1"]
        staged = engine.receiver._sink  # type: ignore[attr-defined]

        def spoil() -> None:
            with torch.no_grad():
                next(iter(staged._staged.values())).add_(1)

        engine.arm("release", spoil)
        bench.fails(ReceiptRefused, engine="e1", phase="Awaiting")
        bench.works()


def hanging_sibling() -> None:
    """An engine that does not stop is quarantined, and the lock goes all the same."""
    boom, stuck = Injected("engine died during broadcast"), Block()
    with trainer(deadline=2.0) as bench:
        bench.engines["e1"].arm("applied", stuck, 0)
        bench.engines["e0"].arm("apply", _AfterAnother(stuck, boom), 0)
        result = bench.run(handed(7))
        assert result.error is boom
        assert result.serving(Disposition.quarantined) == ("e0", "e1"), f"the rows are {result.engines}"
        assert "e1" not in bench.sync.servable()
        bench.lock_is_free()
        given_back_once(bench)
        stuck.going.set()
        bench.works()


def retry(transport: str, point: str) -> None:
    """Free before the retry; the retry works, with the same list; one release a grant."""
    boom = Injected("engine died during broadcast")
    with trainer(transport) as bench:
        tensors = handed(7)
        bench.engines["e1"].arm(point, Raise(boom))
        result = bench.run(tensors)
        assert result.error is boom
        assert bench.keeper.holder is None, "a leak must fail here, and not hang there"
        assert len(tensors) == 3
        second = bench.works(tensors)
        assert tensors == []
        assert second.round != result.round
        assert second.epoch > result.epoch
        given_back_once(bench)


# -- A6 ------------------------------------------------------------------------------------------------------


def dead_keeper() -> None:
    """Failed until the lease is over, never Released while the lock may be held."""
    boom = Injected("engine died during broadcast")
    with trainer(lease=1.0) as bench:
        keeper = bench.keeper

        def die() -> None:
            keeper.dead = True
            raise boom

        bench.engines["e1"].arm("apply", die, 1)
        result = bench.run(handed(7))
        over = time.monotonic()
        assert over >= keeper.held_until - 0.01, (
            f"Released {keeper.held_until - over:.2f} s before the lease's end"
        )
        assert keeper.holder is None, "Released while the keeper holds the lock for it"
        first_error_stays(result, boom, "the keeper is dead")
        keeper.dead = False
        bench.works()


def refusing_keeper() -> None:
    """Three refusals, then an answer: Released comes after that."""
    boom, refused = Injected("engine died during broadcast"), LockError("not now")
    with trainer() as bench:
        keeper, left = bench.keeper, [refused] * 3

        def refuse() -> None:
            if left:
                raise left.pop()

        keeper.before["release"] = refuse
        bench.engines["e1"].arm("apply", Raise(boom), 1)
        result = bench.fails(boom, engine="e1", phase=SENDING, bucket=1)
        assert not left
        first_error_stays(result, boom, "not now")
        given_back_once(bench)
        bench.works()


def lost_answer() -> None:
    """The lock is given back once, however often that is asked."""
    boom, lost = Injected("engine died during broadcast"), [LockError("the answer is lost")]
    with trainer() as bench:

        def lose() -> None:
            if lost:
                raise lost.pop()

        bench.keeper.after["release"] = lose
        bench.engines["e1"].arm("apply", Raise(boom), 1)
        result = bench.fails(boom, engine="e1", phase=SENDING, bucket=1)
        first_error_stays(result, boom, "the answer is lost")
        assert set(bench.keeper.released) == set(bench.keeper.granted)
        bench.works()


def release_fails_after_success() -> None:
    """Published, and served; and yet somebody has to look at the lock service."""
    lost = LockError("the keeper went away")
    with trainer() as bench:
        left, tensors = [lost], handed(7)

        def refuse() -> None:
            if left:
                raise left.pop()

        bench.keeper.before["release"] = refuse
        result = bench.fails(lost, phase="Cleaning", model=tensors, published="yes")
        assert result.serving(Disposition.serving_new) == ("e0", "e1")
        assert result.path == (*GOOD_PATH[:-1], "Failed", "Released")
        assert tensors == [], "what was handed over need not be kept"
        given_back_once(bench)
        bench.works()


def first_error_stays(result: Any, first: BaseException, later: str) -> None:
    """The first error is the cause, the later one its note."""
    assert result.error is first, f"the error is {result.error!r}"
    notes = getattr(first, "__notes__", [])
    assert any(later in note for note in notes), f"the notes are {notes}"
    assert any(later in note for note in result.notes)
    assert result.path[-2:] == ("Failed", "Released")

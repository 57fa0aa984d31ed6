"""One engine rank, told what to do from several threads at once, by senders that do whatever they like."""

import gc
import itertools
import logging
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from casekit.levels import generates
from weightsync.fsm.contract import Bucketful, Inlet, Ticket
from weightsync.fsm.engine import Answer
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import (
    EngineGone,
    EnginePaused,
    EngineSilent,
    IllegalEvent,
    PlanError,
    PlanUnknown,
    SetupError,
    StaleSession,
)
from weightsync.fsm.plan import Plan
from weightsync.fsm.receipt import Expectation, Receipt
from weightsync.fsm.states import EngineState
from weightsync.handlers.openings import Openings
from weightsync.handlers.receiver import FAULT_POINTS, Receiver
from weightsync.handlers.silence import _WATCH, _Watch
from weightsync.handlers.sink import InPlaceSink, StagingSink
from weightsync.handlers.threads import spawn
from weightsync.transports.digest import digest
from weightsync.transports.packing import pack, unpack
from weightsync.transports.weights import TorchWeights

SOON = 10.0
"""Seconds after which something that should have happened never will."""

NAMES = ("a", "b", "c")


class Boom(Exception):
    """What a fault raises."""


def weights(value: float) -> TorchWeights:
    """Three tensors, each of which fills a bucket."""
    return TorchWeights.of(
        [(name, torch.full((4,), float(value + place))) for place, name in enumerate(NAMES)]
    )


PLAN = weights(0).plan(16)
assert len(PLAN.buckets) == 3


class Pipe:
    """The receiving half of a transport, fed by the test."""

    def __init__(self) -> None:
        self.frames: queue.SimpleQueue[Bucketful | None] = queue.SimpleQueue()
        self.entered, self.left, self.closed = threading.Event(), threading.Event(), threading.Event()

    def feed(self, value: float, *, buckets: int = 3, plan: Plan = PLAN) -> None:
        """Send the first so many buckets of these weights."""
        tensors = weights(value).tensors
        for bucket in plan.buckets[:buckets]:
            buffer = np.zeros(bucket.nbytes, dtype=np.uint8)
            pack(plan, bucket, tensors, buffer)
            self.frames.put(Bucketful(bucket.index, buffer))

    @contextmanager
    def buckets(self) -> Iterator[Iterator[Bucketful]]:
        """What was fed, in that order."""
        self.entered.set()
        try:
            yield self._frames()
        finally:
            self.left.set()

    def close(self) -> None:
        """Wake whoever waits."""
        self.closed.set()
        self.frames.put(None)

    def _frames(self) -> Iterator[Bucketful]:
        for _ in PLAN.buckets:
            frame = self.frames.get(timeout=SOON)
            if frame is None:
                raise ConnectionError("the pipe was closed")
            yield frame
            del frame


class Fault:
    """Raises or hangs at one point, and remembers every point that was reached."""

    def __init__(self) -> None:
        self.reached: list[tuple[str, int]] = []
        self.raising: dict[tuple[str, int], BaseException] = {}
        self.hanging: tuple[str, int] | None = None
        self.hung, self.go_on = threading.Event(), threading.Event()
        self.look: Callable[[str], object] = lambda point: None

    def __call__(self, point: str, bucket: int) -> None:
        """As a receiver calls it."""
        self.reached.append((point, bucket))
        self.look(point)
        if (point, bucket) in self.raising:
            raise self.raising[point, bucket]
        if (point, bucket) == self.hanging:
            self.hung.set()
            assert self.go_on.wait(SOON)


class Engine:
    """A receiver with its live weights, and the words of a trainer in short."""

    def __init__(
        self, name: str = "e", *, stages: bool = True, patience: float = SOON, on_commit: Any = None
    ) -> None:
        self.live = {name: torch.full((4,), -1.0) for name in NAMES}
        self.fault = Fault()
        self.pipes = [Pipe()]
        self.receiver = Receiver(
            name, (StagingSink if stages else InPlaceSink)(self.live), inlets={"pipe": self._inlet},
            unpack=unpack, digest=digest, on_commit=on_commit, fault=self.fault, patience=patience,
        )  # fmt: skip

    def _inlet(self, ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> Inlet:
        number: int = ticket.values["pipe"]
        return self.pipes[number]

    def state(self) -> EngineState:
        """Where it is in the table."""
        return self.receiver.state

    def is_in(self, state: EngineState) -> bool:
        """Whether it is there."""
        return self.receiver.state is state

    def version(self) -> int | None:
        """What it says that it holds."""
        return self.receiver.version

    @property
    def incarnation(self) -> str:
        """Which life of it this is."""
        return self.receiver.status.incarnation

    def open(
        self, session: Session, *, limit: float = SOON, plan: Plan | str = PLAN, value: float = 5
    ) -> None:
        """Say open."""
        self.receiver.open(session, self.incarnation, plan, expected(value), limit)

    def receive(self, session: Session, pipe: int = 0) -> Future[tuple[Receipt, ...]]:
        """Say receive; the session's frames come through this pipe."""
        return spawn("receive", self.receiver.receive, session, Ticket("pipe", {"pipe": pipe}))

    def send(self, session: Session, value: float = 5) -> Receipt:
        """Open, send everything, and hand back the receipt."""
        pipe = Pipe()
        self.pipes.append(pipe)
        self.open(session, value=value)
        receiving = self.receive(session, len(self.pipes) - 1)
        pipe.feed(value)
        (receipt,) = receiving.result(SOON)
        return receipt

    def values(self) -> list[float]:
        """The first number of each live tensor; all of them if they differ."""
        return [number for tensor in self.live.values() for number in tensor.unique().tolist()]

    def generates(self) -> bool:
        """Whether generation is admitted."""
        return generates(self.receiver.gate)


def expected(value: float, plan: Plan = PLAN) -> Expectation:
    """What a good receipt for these weights says."""
    return Expectation(
        plan.fingerprint, len(plan.tensors), plan.nbytes, len(plan.buckets), weights(value).digest()
    )


def session(epoch: int = 1, version: int = 1) -> Session:
    """The round of this epoch."""
    return Session(f"round-{epoch}", epoch, version)


def refuse_version_1(version: int) -> None:
    """A user's hook that fails once."""
    if version == 1:
        raise Boom


def until(condition: Callable[[], object]) -> None:
    """Wait for something that happens on another thread."""
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


OLD, NEW = [-1.0, -1.0, -1.0], [5.0, 6.0, 7.0]
ONE = session()


class TestAGoodRound:
    @pytest.mark.parametrize("stages", [True, False])
    def test_the_engine_serves_the_new_version(self, stages: bool) -> None:
        """Paused from open to resume; the version moves at the commit, and so do staged weights."""
        engine = Engine(stages=stages)
        assert engine.version() is None
        receipt = engine.send(ONE)
        assert receipt.mismatch("round-1", 1, expected(5)) is None
        assert engine.is_in(EngineState.Acked)
        assert engine.version() is None
        assert engine.values() == (OLD if stages else NEW)
        engine.receiver.commit(ONE)
        assert (engine.state(), engine.version(), engine.values()) == (EngineState.Committed, 1, NEW)
        assert not engine.generates()
        engine.receiver.resume(ONE)
        assert engine.is_in(EngineState.Serving)
        assert engine.generates()
        assert engine.receiver.digest() == weights(5).digest()

    def test_the_order_of_things(self) -> None:
        """Each bucket is announced, then applied; the buffer is let go of before there is a receipt."""
        engine = Engine()
        engine.receiver.hello()
        pipes_left = {}
        engine.fault.look = lambda point: pipes_left.update({point: engine.pipes[-1].left.is_set()})
        engine.send(ONE)
        engine.receiver.commit(ONE)
        engine.receiver.resume(ONE)
        engine.receiver.abort(session(2))
        points = list(dict.fromkeys(point for point, _ in engine.fault.reached))
        assert points == [*FAULT_POINTS[:12], "resume", "resumed", "abort", "aborted"]
        assert set(points) == set(FAULT_POINTS)
        buckets = [(point, bucket) for point, bucket in engine.fault.reached if bucket >= 0]
        assert buckets == [(point, bucket) for bucket in range(3) for point in ("frame", "apply", "applied")]
        assert (pipes_left["release"], pipes_left["acked"]) == (False, True)

    def test_receipts_say_what_was_applied(self) -> None:
        """Counts come from what arrived, and a digest only if somebody will compare it."""
        engine = Engine()
        pipe = engine.pipes[0]
        engine.receiver.open(ONE, engine.incarnation, PLAN, replace(expected(5), digest=""), SOON)
        pipe.feed(5)
        (receipt,) = engine.receive(ONE).result(SOON)
        assert (receipt.tensors, receipt.bytes, receipt.digest) == (3, 48, "")
        assert receipt.participant == ("e", engine.incarnation)

    def test_words_said_twice_change_nothing(self) -> None:
        """A commit or a resume whose answer got lost can be repeated."""
        commits: list[int] = []
        engine = Engine(on_commit=commits.append)
        engine.send(ONE)
        engine.receiver.commit(ONE)
        engine.receiver.commit(ONE)
        engine.receiver.resume(ONE)
        engine.receiver.resume(ONE)
        assert commits == [1]
        assert engine.generates()

    def test_nothing_is_left_behind(self) -> None:
        """Nobody watches for a session that is over, and an engine that nobody uses is gone."""
        engine = Engine("lonely")
        for epoch in range(1, 4):
            engine.send(session(epoch))
            engine.receiver.commit(session(epoch))
            engine.receiver.resume(session(epoch))
        silence = engine.receiver._rank.silence
        assert silence.look(time.monotonic(), lambda *_: False) == float("inf")
        watched = weakref.ref(engine.receiver._rank)
        del engine, silence
        gc.collect()
        assert watched() is None

    def test_a_digest_before_the_first_round(self) -> None:
        """An engine that never saw a plan can say what it holds."""
        assert Engine().receiver.digest() == digest(PLAN, {name: torch.full((4,), -1.0) for name in NAMES})


class TestOpen:
    def test_another_incarnation_is_refused_before_anything_happens(self) -> None:
        """Words for the engine that was here before do not touch the one that is here now."""
        engine = Engine()
        with pytest.raises(EngineGone, match="engine e was restarted: incarnation before was meant"):
            engine.receiver.open(ONE, "before", PLAN, expected(5), SOON)
        assert engine.is_in(EngineState.Serving)
        assert engine.generates()

    def test_a_plan_is_sent_once(self) -> None:
        """Its fingerprint is enough afterwards; an engine that does not know it asks for the whole plan."""
        engine = Engine()
        with pytest.raises(PlanUnknown, match="send the whole plan"):
            engine.open(ONE, plan=PLAN.fingerprint)
        assert engine.generates()
        engine.open(ONE)
        engine.open(session(2), plan=PLAN.fingerprint)
        assert engine.is_in(EngineState.Paused)

    def test_a_plan_that_does_not_fit_is_refused_while_generation_goes_on(self) -> None:
        """The line names the tensor and both descriptions; the gate is not even touched."""
        engine = Engine()
        other = TorchWeights.of([("a", torch.zeros(8)), ("b", torch.zeros(4)), ("c", torch.zeros(4))]).plan(
            32
        )
        with engine.receiver.gate.admit():
            with pytest.raises(PlanError, match=r"'a': float32 \(8,\) is sent, but the engine holds float32"):
                engine.receiver.open(ONE, engine.incarnation, other, expected(5, other), SOON)
            assert engine.generates()

    def test_a_receipt_that_no_plan_could_give_is_refused(self) -> None:
        """What the trainer waits for has to be what the plan will prove."""
        engine = Engine()
        with pytest.raises(PlanError, match="send the right plan"):
            engine.receiver.open(ONE, engine.incarnation, PLAN, replace(expected(5), buckets=2), SOON)

    def test_it_waits_for_generation(self) -> None:
        """Open is answered when nobody generates any more."""
        engine = Engine()
        with engine.receiver.gate.admit():
            opening = spawn("open", engine.open, ONE)
            until(lambda: not engine.receiver.gate._open)
            assert engine.is_in(EngineState.Serving)
            assert not opening.done()
        opening.result(SOON)
        assert engine.is_in(EngineState.Paused)

    def test_generation_that_does_not_end_fails_it(self) -> None:
        """The engine goes on serving, and says so."""
        engine = Engine()
        with engine.receiver.gate.admit():
            with pytest.raises(EngineSilent, match="did not pause"):
                engine.open(ONE, limit=0.01)
            assert engine.generates()
        assert engine.is_in(EngineState.Serving)

    def test_an_abort_ends_the_waiting(self) -> None:
        """Whoever gave up on an open does not leave the gate closed until generation ends."""
        engine = Engine()
        with engine.receiver.gate.admit():
            opening = spawn("open", engine.open, ONE)
            until(lambda: not engine.receiver.gate._open)
            assert engine.receiver.abort(ONE) is Answer.reverted
            with pytest.raises(StaleSession, match="refuses Opened of round round-1"):
                opening.result(SOON)
            assert engine.generates()

    def test_an_abort_of_another_session_does_not_end_the_waiting(self) -> None:
        """A late word of an old round leaves the new one alone."""
        engine = Engine()
        engine.receiver.gate._inside = 1
        opening = spawn("open", engine.open, session(2))
        until(lambda: not engine.receiver.gate._open)
        engine.receiver.abort(ONE)
        assert not engine.receiver.gate._open
        engine.receiver.gate._leave()
        opening.result(SOON)

    def test_a_receive_waits_for_an_open_that_ends_a_long_generation(self) -> None:
        """Its patience is for an open that never comes, and not for one that has to wait itself."""
        self.receive_beside_a_generation()

    @pytest.mark.mutation
    def test_a_receiver_that_does_not_see_the_open_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody notes that an open is under way."""
        monkeypatch.setattr(Openings, "under_way", lambda self, session: nullcontext())
        with pytest.raises(StaleSession, match="not open"):
            self.receive_beside_a_generation()

    def receive_beside_a_generation(self) -> None:
        """The words of a round to an engine that generates for longer than its patience."""
        engine = Engine(patience=0.05)
        with engine.receiver.gate.admit():
            opening = spawn("open", engine.open, ONE)
            until(lambda: not engine.receiver.gate._open)
            receiving = engine.receive(ONE)
            with pytest.raises(TimeoutError):
                receiving.result(0.5)
        opening.result(SOON)
        engine.pipes[0].feed(5)
        assert len(receiving.result(SOON)) == 1

    def test_a_receive_whose_open_never_comes_is_refused(self) -> None:
        """After its patience, or at once when the open that it waited for was in vain."""
        engine = Engine(patience=0.05)
        with pytest.raises(StaleSession, match="not open"):
            engine.receive(ONE).result(SOON)
        with engine.receiver.gate.admit():
            opening = spawn("open", lambda: engine.open(session(2), limit=0.2))
            until(lambda: not engine.receiver.gate._open)
            with pytest.raises(EngineSilent, match="generations still ran"):
                engine.receive(session(2)).result(SOON)
        assert isinstance(opening.exception(SOON), EngineSilent)

    def test_an_abort_may_come_first(self) -> None:
        """An open that was overtaken by its abort is refused, and generation was never interrupted."""
        engine = Engine()
        assert engine.receiver.abort(ONE) is Answer.reverted
        with pytest.raises(StaleSession):
            engine.open(ONE)
        assert engine.generates()
        assert engine.receiver.refused == 1

    def test_what_is_refused_is_counted_and_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        """Every word of a session that is over, with the epoch it came with: by the table or before it."""
        engine = Engine()
        engine.receiver.abort(ONE)
        ticket = Ticket("memory", {})
        late: list[Callable[[], object]] = [
            lambda: engine.receiver.receive(ONE, ticket),
            lambda: engine.open(ONE),
            lambda: engine.receiver.commit(ONE),
            lambda: engine.receiver.resume(ONE),
        ]
        with caplog.at_level(logging.WARNING, "weightsync"):
            for word in late:
                with pytest.raises(StaleSession):
                    word()
        assert engine.receiver.refused == len(late)
        assert ["epoch 1" in record.getMessage() for record in caplog.records] == [True] * len(late)

    def test_a_sink_that_cannot_be_prepared_reverts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No memory for the staged weights: the engine serves the old ones."""
        engine = Engine()

        def nothing_left(plan: Plan) -> Mapping[str, Any]:
            raise MemoryError("no room for the staged weights")

        monkeypatch.setattr(engine.receiver._sink, "open", nothing_left)
        with pytest.raises(MemoryError):
            engine.open(ONE)
        assert engine.is_in(EngineState.Serving)
        assert engine.generates()

    def test_a_lost_answer_leaves_a_session_that_can_be_aborted(self) -> None:
        """The engine paused and only its answer got lost: the abort resumes it."""
        engine = Engine()
        engine.fault.raising["opened", -1] = Boom()
        with pytest.raises(Boom):
            engine.open(ONE)
        assert engine.is_in(EngineState.Paused)
        assert engine.receiver.abort(ONE) is Answer.reverted
        assert engine.generates()
        engine.fault.raising.clear()
        engine.open(session(2))


def reach(engine: Engine, where: str) -> Future[Any] | None:
    """Bring an engine to a point of a session; hands back what is still receiving there."""
    if where == "paused":
        engine.open(ONE)
        return None
    if where in {"waiting", "received"}:
        engine.open(ONE)
        receiving, waiting = engine.receive(ONE), where == "waiting"
        engine.pipes[0].feed(5, buckets=0 if waiting else 2)
        assert engine.pipes[0].entered.wait(SOON)
        until(lambda: waiting or ("applied", 1) in engine.fault.reached)
        return receiving
    engine.send(ONE)
    if where == "committed":
        engine.receiver.commit(ONE)
    return None


ENDS = [
    ("paused", True, Answer.reverted, EngineState.Serving, OLD),
    ("paused", False, Answer.reverted, EngineState.Serving, OLD),
    ("waiting", True, Answer.reverted, EngineState.Serving, OLD),
    ("waiting", False, Answer.reverted, EngineState.Serving, OLD),
    ("received", True, Answer.reverted, EngineState.Serving, OLD),
    ("received", False, Answer.torn, EngineState.Quarantined, [5.0, 6.0, -1.0]),
    ("acked", True, Answer.reverted, EngineState.Serving, OLD),
    ("acked", False, Answer.torn, EngineState.Quarantined, NEW),
    ("committed", True, Answer.committed, EngineState.Committed, NEW),
    ("committed", False, Answer.committed, EngineState.Committed, NEW),
]
"""Where a session ends, whether the engine stages, and what the engine is then."""


class TestAbort:
    @pytest.mark.parametrize(("where", "stages", "answer", "state", "values"), ENDS)
    def test_at_every_point(
        self, where: str, stages: bool, answer: Answer, state: EngineState, values: list[float]
    ) -> None:
        """The answer is what the weights are; only Serving generates; the session is refused from then on."""
        engine = Engine(stages=stages)
        receiving = reach(engine, where)
        assert engine.receiver.abort(ONE) is answer
        assert (engine.state(), engine.values()) == (state, values)
        assert engine.generates() is (state is EngineState.Serving)
        if receiving is not None:
            with pytest.raises(StaleSession, match="ended meanwhile"):
                receiving.result(SOON)
        assert engine.receiver.abort(ONE) is answer
        if answer is not Answer.committed:
            for word in (engine.receiver.commit, engine.receiver.resume):
                with pytest.raises(StaleSession):
                    word(ONE)
            with pytest.raises(StaleSession):
                engine.receive(ONE).result(SOON)
            with pytest.raises(StaleSession):
                engine.open(ONE)
        assert (engine.state(), engine.values()) == (state, values)

    @pytest.mark.parametrize(("where", "stages", "answer", "state", "values"), ENDS)
    def test_of_a_later_epoch_it_ends_an_earlier_session(
        self, where: str, stages: bool, answer: Answer, state: EngineState, values: list[float]
    ) -> None:
        """A dead trainer's session: whoever aborts a later one hears what the engine is from now on."""
        engine, later = Engine(stages=stages), session(2, version=2)
        receiving = reach(engine, where)
        torn = answer is Answer.torn
        assert engine.receiver.abort(later) is (Answer.torn if torn else Answer.reverted)
        assert engine.state() is (EngineState.Quarantined if torn else EngineState.Serving)
        assert engine.values() == values
        assert engine.generates() is not torn
        assert engine.receiver._rank.silence._session is None, "nobody waits for the end of a session"
        if receiving is not None:
            with pytest.raises(StaleSession, match="ended meanwhile"):
                receiving.result(SOON)
        if where == "committed":
            assert engine.receiver.abort(ONE) is Answer.committed
        with pytest.raises(StaleSession):
            engine.open(later)

    def test_of_an_earlier_epoch_it_leaves_a_later_session_alone(self) -> None:
        """A trainer that was stopped goes on, and aborts its own."""
        engine, later = Engine(), session(2)
        engine.open(later)
        receiving = engine.receive(later)
        assert engine.pipes[0].entered.wait(SOON)
        assert engine.receiver.abort(ONE) is Answer.reverted
        assert engine.is_in(EngineState.Paused)
        engine.pipes[0].feed(5)
        assert len(receiving.result(SOON)) == 1

    def test_a_later_one_waits_until_an_earlier_session_writes_nothing_any_more(self) -> None:
        """Before that nobody can say what the engine is, whoever asks."""
        engine = Engine(stages=False)
        engine.fault.hanging = ("apply", 1)
        engine.open(ONE)
        receiving = engine.receive(ONE)
        engine.pipes[0].feed(5)
        assert engine.fault.hung.wait(SOON)
        aborting = spawn("abort", engine.receiver.abort, session(2))
        assert engine.pipes[0].closed.wait(SOON)
        assert not aborting.done()
        engine.fault.go_on.set()
        assert aborting.result(SOON) is Answer.torn
        with pytest.raises(StaleSession):
            receiving.result(SOON)

    @pytest.mark.parametrize("stages", [True, False])
    def test_what_was_torn_is_cleared_by_a_full_resend_only(self, stages: bool) -> None:
        """Aborting the resend before it begins leaves the engine quarantined; committing it does not."""
        engine = Engine(stages=stages, on_commit=refuse_version_1)
        torn = session(1)
        engine.send(torn)
        with pytest.raises(Boom):
            engine.receiver.commit(torn)
        assert engine.is_in(EngineState.Quarantined)
        assert engine.version() is None
        assert not engine.generates()
        engine.open(session(2))
        assert engine.receiver.abort(session(2)) is Answer.torn
        assert engine.is_in(EngineState.Quarantined)
        engine.send(session(3, version=2), value=8)
        engine.receiver.commit(session(3, version=2))
        engine.receiver.resume(session(3, version=2))
        assert (engine.version(), engine.values()) == (2, [8.0, 9.0, 10.0])
        assert engine.generates()

    def test_it_waits_until_nothing_is_written_any_more(self) -> None:
        """While a bucket is being applied nobody can say what the engine is; then the answer comes."""
        engine = Engine()
        engine.fault.hanging = ("apply", 1)
        engine.open(ONE)
        receiving = engine.receive(ONE)
        engine.pipes[0].feed(5)
        assert engine.fault.hung.wait(SOON)
        aborting = spawn("abort", engine.receiver.abort, ONE)
        assert engine.pipes[0].closed.wait(SOON)
        assert not aborting.done()
        engine.fault.go_on.set()
        assert aborting.result(SOON) is Answer.reverted
        with pytest.raises(StaleSession):
            receiving.result(SOON)

    def test_it_does_not_wait_for_ever(self) -> None:
        """An engine that is stuck in a bucket says so; staged, it serves the old weights meanwhile."""
        engine = Engine(patience=0.01)
        engine.fault.hanging = ("apply", 1)
        engine.open(ONE)
        receiving = engine.receive(ONE)
        engine.pipes[0].feed(5)
        assert engine.fault.hung.wait(SOON)
        with pytest.raises(EngineSilent, match="still applying a bucket of round round-1"):
            engine.receiver.abort(ONE)
        assert engine.generates()
        with pytest.raises(EngineSilent, match="still applying a bucket of round round-1"):
            engine.open(session(2), limit=0.01)
        assert engine.is_in(EngineState.Serving)
        with pytest.raises(EngineSilent):
            engine.open(session(3), limit=0.01)
        engine.fault.go_on.set()
        with pytest.raises(StaleSession):
            receiving.result(SOON)
        engine.fault.hanging = None
        engine.send(session(4))
        assert engine.receiver.abort(ONE) is Answer.reverted

    def test_an_open_that_is_being_prepared_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An abort between the pause and the staging wins."""
        engine = Engine()
        ready = engine.receiver._ready

        def aborted_before(*args: Any) -> Any:
            engine.receiver.abort(ONE)
            return ready(*args)

        monkeypatch.setattr(engine.receiver, "_ready", aborted_before)
        with pytest.raises(StaleSession, match="ended meanwhile"):
            engine.open(ONE)
        assert engine.generates()

    def test_a_commit_that_hangs_is_told(self) -> None:
        """A user's hook that never returns blocks neither abort nor open for ever, nor hello at all."""
        hung, go_on = threading.Event(), threading.Event()

        def hang(version: int) -> None:
            hung.set()
            assert go_on.wait(SOON)

        engine = Engine(patience=0.01, on_commit=hang)
        engine.send(ONE)
        committing = spawn("commit", engine.receiver.commit, ONE)
        assert hung.wait(SOON)
        assert engine.receiver.hello().state is EngineState.Acked
        with pytest.raises(EngineSilent, match="still busy with a commit"):
            engine.receiver.abort(ONE)
        with pytest.raises(EngineSilent, match="still busy with a commit"):
            engine.open(session(2))
        go_on.set()
        committing.result(SOON)
        assert engine.receiver.abort(ONE) is Answer.committed

    def test_commit_and_abort_at_once(self) -> None:
        """Whichever comes first, answer, version and weights agree."""
        seen = set()
        for _ in range(40):
            engine = Engine()
            engine.send(ONE)
            together = threading.Barrier(2)

            def commit(engine: Engine = engine, together: threading.Barrier = together) -> bool:
                together.wait(SOON)
                try:
                    engine.receiver.commit(ONE)
                except StaleSession:
                    return False
                return True

            committing = spawn("commit", commit)
            together.wait(SOON)
            answer = engine.receiver.abort(ONE)
            committed = committing.result(SOON)
            assert answer is (Answer.committed if committed else Answer.reverted)
            assert engine.values() == (NEW if committed else OLD)
            assert engine.version() == (1 if committed else None)
            assert engine.generates() is not committed
            seen.add(answer)
        assert seen


class TestReceive:
    @pytest.mark.parametrize("stages", [True, False])
    @pytest.mark.parametrize(
        "point",
        [
            ("receive", -1),
            ("frame", 0),
            ("apply", 0),
            ("applied", 1),
            ("frame", 2),
            ("release", -1),
            ("acked", -1),
        ],
    )
    def test_what_fails_ends_the_session_and_is_raised(self, point: tuple[str, int], stages: bool) -> None:
        """The very error comes out; the inlet is closed; the engine is what its weights are."""
        engine, boom = Engine(stages=stages), Boom()
        engine.fault.raising[point] = boom
        engine.open(ONE)
        receiving = engine.receive(ONE)
        engine.pipes[0].feed(5)
        assert receiving.exception(SOON) is boom
        if point[0] == "receive":
            assert engine.receiver.abort(ONE) is Answer.reverted
            return
        assert engine.pipes[0].left.is_set()
        assert engine.pipes[0].closed.is_set()
        whole = stages or point == ("frame", 0)
        assert engine.is_in(EngineState.Serving if whole else EngineState.Quarantined)
        assert engine.generates() is whole
        assert engine.receiver.abort(ONE) is (Answer.reverted if whole else Answer.torn)
        with pytest.raises(StaleSession):
            engine.receiver.commit(ONE)

    def test_a_sender_that_breaks_off(self) -> None:
        """The transport's error is the one that is raised."""
        engine = Engine()
        engine.open(ONE)
        receiving = engine.receive(ONE)
        engine.pipes[0].feed(5, buckets=1)
        engine.pipes[0].frames.put(None)
        with pytest.raises(ConnectionError):
            receiving.result(SOON)
        assert engine.generates()

    def test_a_bucket_out_of_turn(self) -> None:
        """The table refuses it, and with it the session."""
        engine = Engine()
        engine.open(ONE)
        receiving = engine.receive(ONE)
        engine.pipes[0].frames.put(Bucketful(1, np.zeros(16, dtype=np.uint8)))
        with pytest.raises(IllegalEvent, match="FrameSeen"):
            receiving.result(SOON)
        assert engine.is_in(EngineState.Serving)

    def test_a_sender_that_ends_early(self) -> None:
        """Two of three buckets are no proof, whatever the transport says."""
        engine = Engine()
        engine.pipes[0]._frames = lambda: iter([])  # type: ignore[method-assign]
        engine.open(ONE)
        with pytest.raises(IllegalEvent, match="AllApplied"):
            engine.receive(ONE).result(SOON)

    def test_once_a_session(self) -> None:
        """A second reception is refused and leaves the first alone."""
        engine = Engine()
        engine.open(ONE)
        receiving = engine.receive(ONE)
        assert engine.pipes[0].entered.wait(SOON)
        with pytest.raises(IllegalEvent, match="already"):
            engine.receive(ONE).result(SOON)
        engine.pipes[0].feed(5)
        assert len(receiving.result(SOON)) == 1

    def test_an_unknown_transport(self) -> None:
        """The error names what there is."""
        engine = Engine()
        engine.open(ONE)
        with pytest.raises(
            SetupError, match="no receiving half for transport 'carrier pigeon', only for pipe"
        ):
            engine.receiver.receive(ONE, Ticket("carrier pigeon", {}))
        assert engine.generates()

    def test_an_error_keeps_no_view_of_the_buffer(self) -> None:
        """The transfer buffer is closed when the error leaves, so nothing may still look at it."""
        engine, boom = Engine(), Boom()
        engine.fault.raising["applied", 0] = boom
        engine.open(ONE)
        receiving = engine.receive(ONE)
        buffer = np.zeros(16, dtype=np.uint8)
        watched = weakref.ref(buffer)
        engine.pipes[0].frames.put(Bucketful(0, buffer))
        del buffer
        assert receiving.exception(SOON) is boom
        assert watched() is None

    def test_a_session_ended_before_the_inlet_was_made(self) -> None:
        """An inlet that comes too late is closed at once."""
        engine = Engine()
        engine.open(ONE)
        pipe, made = engine.pipes[0], threading.Event()

        def late(ticket: Ticket, session: Session, plan: Plan, limit: float, /) -> Inlet:
            made.set()
            assert pipe.closed.wait(0) is False
            until(lambda: engine.is_in(EngineState.Serving))
            return pipe

        engine.receiver._inlets["pipe"] = late
        receiving = engine.receive(ONE)
        assert made.wait(SOON)
        assert engine.receiver.abort(ONE) is Answer.reverted
        with pytest.raises(StaleSession):
            receiving.result(SOON)
        assert pipe.closed.is_set()


class TestLimit:
    @pytest.mark.parametrize(("where", "stages", "answer", "state", "values"), ENDS)
    def test_a_silent_trainer_at_every_point(
        self, where: str, stages: bool, answer: Answer, state: EngineState, values: list[float]
    ) -> None:
        """The engine leaves the session by itself: old weights if whole, new ones if committed."""
        engine = Engine(stages=stages)
        receiving = reach(engine, where)
        # The limit is up now: nothing but the trainer's last word lies between.
        silence = engine.receiver._rank.silence
        with _WATCH.changed:
            silence._due = time.monotonic()
            _WATCH.changed.notify_all()
        over = EngineState.Serving if answer is Answer.committed else state
        until(lambda: engine.is_in(over))
        if over is EngineState.Serving:
            with engine.receiver.gate.admit(limit=SOON):
                pass
        else:
            assert not engine.generates()
        if receiving is not None:
            with pytest.raises(StaleSession):
                receiving.result(SOON)
        assert engine.values() == values
        with pytest.raises(StaleSession):
            engine.receiver.commit(ONE)
        assert engine.receiver.abort(ONE) is answer

    def test_in_real_time(self) -> None:
        """A session that was opened with a short limit ends without anybody's help."""
        engine = Engine()
        engine.open(ONE, limit=0.05)
        receiving = engine.receive(ONE)
        with engine.receiver.gate.admit(limit=SOON):
            assert engine.is_in(EngineState.Serving)
        with pytest.raises(StaleSession):  # in whichever of its steps it was then
            receiving.result(SOON)

    def test_a_session_that_nobody_can_watch_is_not_open(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The system is out of threads: the engine goes on with the old weights, and takes the next one."""
        engine = Engine()

        def start(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr("weightsync.handlers.silence._WATCH", _Watch())
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                engine.open(ONE)
        assert engine.is_in(EngineState.Serving)
        assert engine.generates()
        engine.open(session(2), limit=0.05)
        with engine.receiver.gate.admit(limit=SOON):
            assert engine.is_in(EngineState.Serving)

    def test_every_word_counts(self) -> None:
        """Frames, and commits from when they are done, put the limit off."""
        engine = Engine()
        silence = engine.receiver._rank.silence
        dues: dict[str, float] = {}
        engine.fault.look = lambda point: dues.setdefault(point, silence._due)
        engine.send(ONE)
        acked = silence._due
        engine.receiver.commit(ONE)
        assert dues["opened"] < dues["apply"] < acked < silence._due

    def test_words_of_other_sessions_do_not(self) -> None:
        """A late trainer does not keep its successor's session alive."""
        engine = Engine()
        engine.open(session(2))
        silence = engine.receiver._rank.silence
        due = silence._due
        engine.receiver.abort(ONE)
        with pytest.raises(StaleSession):
            engine.receiver.commit(ONE)
        assert silence._due == due

    def test_the_engines_own_work_is_not_silence(self) -> None:
        """A commit may take longer than the limit."""
        engine = Engine()
        engine.send(ONE)
        silence = engine.receiver._rank.silence
        with silence.word(ONE):
            with _WATCH.changed:
                silence._due = time.monotonic()
                _WATCH.changed.notify_all()
            engine.receiver.hello()
        assert silence._due > time.monotonic()
        engine.receiver.commit(ONE)


class TestANewerTrainer:
    @pytest.mark.parametrize("stages", [True, False])
    def test_it_takes_over_in_the_middle_of_a_bucket(self, stages: bool) -> None:
        """The old session ends, its trainer is refused when it wakes up, and the new one is served."""
        engine = Engine(stages=stages)
        receiving = reach(engine, "received")
        assert receiving is not None
        newer = session(2, version=2)
        receipt = engine.send(newer, value=8)
        assert receipt.epoch == 2
        with pytest.raises(StaleSession, match="ended meanwhile"):
            receiving.result(SOON)
        engine.pipes[0].feed(5)
        with pytest.raises(StaleSession):
            engine.receiver.commit(ONE)
        engine.receiver.abort(ONE)
        engine.receiver.commit(newer)
        engine.receiver.resume(newer)
        assert (engine.version(), engine.values()) == (2, [8.0, 9.0, 10.0])

    def test_it_waits_until_the_old_session_has_let_go(self) -> None:
        """Staged memory is not written by two sessions."""
        engine = Engine()
        engine.fault.hanging = ("apply", 1)
        engine.open(ONE)
        receiving = engine.receive(ONE)
        engine.pipes[0].feed(5)
        assert engine.fault.hung.wait(SOON)
        opening = spawn("open", engine.open, session(2))
        assert engine.pipes[0].closed.wait(SOON)
        assert not opening.done()
        engine.fault.go_on.set()
        opening.result(SOON)
        assert isinstance(receiving.exception(SOON), StaleSession)

    def test_an_older_one_is_refused_without_a_pause(self) -> None:
        """A trainer that woke up too late does not even interrupt generation."""
        engine = Engine()
        engine.send(session(5))
        engine.receiver.commit(session(5))
        engine.receiver.resume(session(5))
        with pytest.raises(StaleSession, match="refuses Opened of round round-4"):
            engine.open(session(4))
        assert engine.generates()

    def test_two_that_wait_for_the_same_generation(self) -> None:
        """The newer one gets the engine, the older one is refused, whichever is first."""
        engine = Engine()
        with engine.receiver.gate.admit():
            opening = [spawn("open", engine.open, session(epoch)) for epoch in (1, 2)]
            until(lambda: len(engine.receiver._rank._opening) == 2)
        opening[1].result(SOON)
        error = opening[0].exception(SOON)
        assert error is None or isinstance(error, StaleSession)
        assert engine.receiver.status.state is EngineState.Paused
        with pytest.raises(StaleSession):
            engine.receiver.commit(ONE)
        engine.receiver.abort(session(2))
        assert engine.generates()


class TestManyAtOnce:
    @pytest.mark.parametrize("stages", [True, False])
    def test_generation_never_sees_a_mix(self, stages: bool) -> None:  # noqa: C901 - one story
        """Two trainers that send, give up and interrupt each other as they like, and three that sample.

        Whoever is admitted finds the weights of one version, and they stay as long as he is inside.
        """
        engine = Engine(stages=stages)
        epochs, stop = itertools.count(1), threading.Event()
        mixes, sampled = [], set()

        def whole() -> bool:
            a, b, c = (float(engine.live[name][0]) for name in NAMES)
            sampled.add(a)
            return a == b == c == -1 or (b, c) == (a + 1, a + 2)

        def sample() -> None:
            while not stop.is_set():
                try:
                    with engine.receiver.gate.admit(limit=0.01):
                        mixes.extend([1] * (not whole()))
                        time.sleep(0)
                        mixes.extend([1] * (not whole()))
                except EnginePaused:
                    pass

        def train(seed: int) -> None:
            luck = random.Random(seed)
            for _ in range(60):
                mine = session(next(epochs))
                try:
                    send(mine, luck)
                except (StaleSession, EngineSilent, IllegalEvent, ConnectionError):
                    engine.receiver.abort(mine)

        def send(mine: Session, luck: random.Random) -> None:
            value = float(mine.epoch * 10)
            pipe = Pipe()
            engine.pipes.append(pipe)
            place = engine.pipes.index(pipe)
            engine.open(mine, value=value)
            receiving = engine.receive(mine, place)
            sent = luck.choice([0, 1, 3, 3, 3, 3])
            pipe.feed(value, buckets=sent)
            if sent < 3:
                pipe.frames.put(None)
            receiving.result(SOON)
            if luck.random() < 0.2:
                raise StaleSession("enough")
            engine.receiver.commit(mine)
            engine.receiver.resume(mine)

        samplers = [spawn("sample", sample) for _ in range(3)]
        trainers = [spawn("train", train, seed) for seed in (1, 2)]
        for each in trainers:
            each.result(60)
        last = session(next(epochs))
        engine.send(last)
        engine.receiver.commit(last)
        engine.receiver.resume(last)
        stop.set()
        for each in samplers:
            each.result(SOON)
        assert not mixes
        assert engine.values() == NEW
        assert len(sampled) > 1

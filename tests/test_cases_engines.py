"""Faults that an engine shows: acknowledgements that come early, and updates that stop half way."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from casekit.bench import SENDING, Bench, quick, threads
from casekit.engines import InThreads
from casekit.levels import eventually
from casekit.scripts import ANY, Injected, Raise, Sleep
from casekit.tensors import NAMES, same, state
from weightsync import WeightSync
from weightsync.engine import inlets
from weightsync.fsm.contract import Bucketful, Ticket, Unpack
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import EngineError, EngineGone, EngineTaken, ReceiptRefused
from weightsync.fsm.plan import Plan
from weightsync.fsm.receipt import Receipt
from weightsync.fsm.states import Disposition, EngineState
from weightsync.handlers.local_engine import LocalEngine
from weightsync.handlers.receiver import Receiver
from weightsync.handlers.sink import StagingSink
from weightsync.transports.digest import digest
from weightsync.transports.memory import MemoryTransport
from weightsync.transports.packing import unpack

pytestmark = pytest.mark.timeout(60)

TRANSPORTS = pytest.mark.parametrize("transport", ["memory", "collective", "shm"])
STAGES = pytest.mark.parametrize("stages", [True, False], ids=["stages", "in-place"])


class TestB05:
    """An acknowledgement before the bytes are in place: modelscope/ms-swift#10204, RLinf/RLinf#1456."""

    @STAGES
    def test_b05_a_the_buffer_waits_for_the_slowest_reader(self, stages: bool) -> None:
        """Both read one buffer, which is overwritten when it is let go of; the slow one has it right."""
        with Bench(threads("e0", "e1", stages=stages), MemoryTransport(checked=True)) as bench:
            bench.works()
            bench.engines["e1"].script.always("apply", Sleep(0.1))  # type: ignore[attr-defined]
            result = bench.run(state(7))
            assert result.ok, result.summary()
            for name, look in bench.looks().items():
                assert look.version == result.version
                assert same(look.tensors, state(7)), f"{name} holds something else"

    @TRANSPORTS
    @STAGES
    def test_b05_b_the_round_is_not_over_before_all_have_applied(self, transport: str, stages: bool) -> None:
        """One engine takes its time with the last bucket and its commit: it holds the new bits by then."""
        slow = threads("e0", "e1", stages=stages)
        at_release: list[bool] = []

        def look() -> None:
            at_release.extend(same(engine.look().tensors, state(7)) for engine in slow)

        with Bench(slow, transport) as bench:
            bench.works()
            slow[1].arm("apply", Sleep(0.2), len(NAMES) - 1)
            slow[1].arm("commit", Sleep(0.2))
            bench.keeper.before["release"] = look
            result = bench.run(state(7))
            assert result.ok, result.summary()
            assert at_release == [True, True]

    @TRANSPORTS
    def test_b05_b_an_engine_that_only_took_the_request(self, transport: str) -> None:
        """It answers at once, and has proved nothing: the round fails, and nobody is given a new version."""
        hasty = _Hasty("e1")
        with Bench([*threads("e0"), hasty], transport) as bench:
            bench.works()
            hasty.hurry = True
            result = bench.fails(ReceiptRefused, engine="e1", phase=SENDING, bucket=ANY)
            assert result.serving(Disposition.serving_new) == ()
            hasty.hurry = False
            bench.works()

    @pytest.mark.parametrize("checked", [True, False])
    def test_b05_b_an_engine_that_applies_after_its_answer(self, checked: bool) -> None:
        """What it has not written when it makes its proof, it cannot prove."""
        later = _Other("e1", _Later())
        with Bench([*threads("e0"), later], MemoryTransport(checked=checked)) as bench:
            result = bench.fails(ReceiptRefused, engine="e1", phase="Awaiting")
            assert result.version == 0

    def test_b05_c_an_engine_is_given_a_private_copy(self) -> None:
        """Nothing that it samples with is memory of the trainer's."""
        engines = threads("e0", "e1")
        model = state(7)
        with Bench(engines) as bench:
            bench.works(model)
            places = {tensor.untyped_storage().data_ptr() for tensor in model.values()}
            held = [tensor for engine in engines for tensor in _held(engine).values()]
            assert places.isdisjoint({tensor.untyped_storage().data_ptr() for tensor in held})
            for tensor in model.values():
                tensor.zero_()
            assert all(tensor.count_nonzero() for tensor in held)

    @pytest.mark.parametrize("checked", [True, False])
    def test_b05_c_an_engine_that_keeps_what_it_was_shown(self, checked: bool) -> None:
        """A bucket is valid until the next one is asked for; who keeps it finds other bytes in it."""
        keeper = _Other("e1", _Keeping())
        with Bench([*threads("e0"), keeper], MemoryTransport(checked=checked)) as bench:
            bench.fails(ReceiptRefused, engine="e1", phase="Awaiting")


class _Hasty(InThreads):
    """Answers before it has received anything, when it is in a hurry."""

    def __init__(self, name: str) -> None:
        super().__init__(name, state(-1))
        self.hurry = False
        self.link.receive = self._receive  # type: ignore[method-assign]

    def _receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
        answer = LocalEngine.receive(self.link, session, ticket)
        if not self.hurry:
            return answer
        early: Future[tuple[Receipt, ...]] = Future()
        early.set_result(())
        return early


class _Other(InThreads):
    """An engine with an ``unpack`` of its own."""

    def __init__(self, name: str, apply: Unpack) -> None:
        super().__init__(name, state(-1))
        self.receiver = Receiver(
            name, StagingSink(self.held), inlets=inlets(), unpack=apply, digest=digest, fault=self.script
        )
        self.link.receiver = self.receiver


class _Later:
    """Copies a bucket when the next one is there, and so the last one never."""

    def __init__(self) -> None:
        self._before: tuple[Plan, Bucketful] | None = None

    def __call__(self, plan: Plan, bucket: Bucketful, into: Mapping[str, Any], /) -> None:
        before, self._before = self._before, (plan, Bucketful(bucket.index, bucket.data.clone()))
        if before is not None:
            unpack(*before, into)


class _Keeping:
    """Takes the views it is shown for its own."""

    def __call__(self, plan: Plan, bucket: Bucketful, into: Any, /) -> None:
        for piece in plan.buckets[bucket.index].pieces:
            name = plan.tensors[piece.tensor].name
            into[name] = bucket.data.view(torch.float32)


def _held(engine: InThreads) -> Mapping[str, Tensor]:
    assert isinstance(engine.held, dict)
    return engine.held


class TestB18:
    """An update that stops half way: vllm-project/vllm#57854, lightseekorg/tokenspeed#672."""

    @TRANSPORTS
    @pytest.mark.parametrize(("point", "bucket"), [("applied", 0), ("release", ANY)])
    def test_b18_loaded_in_place(self, point: str, bucket: int, transport: str) -> None:
        """Neither old nor new: no version, not servable, until a full resend commits; nor is its sibling.

        After bucket 0 of 3, and with all 3 applied and no commit.
        """
        boom = Injected("no such parameter")
        engines = threads("e0", "e1", stages=False)
        with Bench(engines, transport) as bench:
            bench.works()
            if point == "release":
                engines[0].arm(point, _When(engines[1], boom))
            else:
                engines[0].arm(point, Raise(boom), bucket)
            result = bench.fails(boom, engine="e0", phase=SENDING, bucket=bucket)
            assert result.serving(Disposition.quarantined) == ("e0", "e1")
            assert [row.version for row in result.engines] == [None, None]
            for engine in engines:
                look = engine.look()
                assert (look.state, look.version, look.paused) == (EngineState.Quarantined, None, True)
            assert bench.sync.servable() == {}
            self.only_a_full_resend_clears_it(bench, engines)

    @staticmethod
    def only_a_full_resend_clears_it(bench: Bench, engines: list[InThreads]) -> None:
        """Not a look, not a round that ends before its first bucket, not one that ends before its commit."""
        for point in ("opened", "receive", "commit"):
            boom = Injected(f"again, at {point}")
            for engine in engines:
                engine.disarm()
                engine.arm(point, Raise(boom))
            assert not bench.meets(boom).ok
            assert bench.sync.servable() == {}
            assert {engine.look().version for engine in engines} == {None}
        bench.works()

    @TRANSPORTS
    def test_b18_staged(self, transport: str) -> None:
        """The live weights were not touched: the old ones, bit for bit; and the sibling serves on."""
        boom = Injected("no such parameter")
        with Bench(threads("e0", "e1"), transport) as bench:
            first = bench.works()
            bench.engines["e0"].arm("applied", Raise(boom), 0)
            result = bench.fails(boom, engine="e0", phase=SENDING, bucket=0)
            assert [row.disposition.name for row in result.engines] == ["quarantined", "serving_old"]
            assert bench.sync.servable() == {"e1": first.version}
            for look in bench.looks().values():
                assert (look.version, same(look.tensors, state(1))) == (first.version, True)
            bench.works()


class TestB20:
    """An engine restarts by itself, with its first weights: radixark/miles#1724, ray-project/ray#44083."""

    @TRANSPORTS
    def test_b20_it_is_not_served_from_before_a_full_round(self, transport: str) -> None:
        """The books are by incarnation: the new one has proved nothing, whatever the last one had."""
        engines = threads("e0", "e1")
        with Bench(engines, transport) as bench:
            for _ in range(5):
                bench.works()
            assert bench.sync.servable() == {"e0": 4, "e1": 4}
            engines[1].restart()
            assert bench.sync.servable() == {"e0": 4}
            assert bench.sync.engines()["e1"].version is None
            bench.works()
            assert bench.sync.servable() == {"e0": 5, "e1": 5}

    @TRANSPORTS
    def test_b20_a_round_meets_the_restarted_engine(self, transport: str) -> None:
        """Nobody asked before the round: it is refused by the new one, and the next one takes that in."""
        engines = threads("e0", "e1")
        with Bench(engines, transport) as bench:
            bench.works()
            engines[1].restart()
            bench.fails(EngineGone, engine="e1", phase="Locked")
            assert bench.sync.servable() == {"e0": 0}
            bench.works()

    @TRANSPORTS
    @pytest.mark.parametrize("point", ["release", "acked"])
    def test_b20_it_restarts_before_its_commit(self, point: str, transport: str) -> None:
        """A receipt of an earlier life commits nothing: that is no full success."""
        engines = threads("e0", "e1")
        with Bench(engines, transport) as bench:
            bench.works()
            engines[1].arm(point, engines[1].restart)
            bench.fails(EngineError, engine="e1", phase="Cleaning")
            assert "e1" not in bench.sync.servable()
            assert engines[1].look().version is None
            bench.works()


@TRANSPORTS
@STAGES
def test_b15_a_new_trainer_and_engines_that_lived_on(transport: str, stages: bool) -> None:
    """huggingface/trl#3408, #6651: a trainer that starts anew, with nothing but the defaults, is not refused.

    Its epochs are above those of its predecessor, and so are its versions.
    """
    engines = threads("e0", "e1", stages=stages)
    links = [engine.link for engine in engines]
    versions: list[int] = []
    for value in (1, 2, 3):
        with WeightSync(links, transport, policy=quick()) as sync:
            try:
                result = sync.on_train_begin(state(value))
            except EngineTaken as refusal:
                raise AssertionError(f"it is refused: {refusal}") from refusal
            assert result.ok, result.summary()
            versions += [result.version, *sync.servable().values()]
        assert all(same(engine.look().tensors, state(value)) for engine in engines)
    assert versions == [0, 0, 0, 1, 1, 1, 2, 2, 2]


class _When:
    """Raises when another engine holds every bucket."""

    def __init__(self, other: InThreads, error: BaseException) -> None:
        self._other, self._error = other, error

    def __call__(self) -> None:
        assert eventually(lambda: self._other.receiver.state is EngineState.Acked)
        raise self._error

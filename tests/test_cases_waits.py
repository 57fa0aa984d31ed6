"""Faults of silence: an engine that does not answer, or much too late. Somebody else's, in its process, too.

The engines of ``test_cases_members.py`` are killed, and its trainers are stopped; here nobody dies.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from casekit.bench import SENDING, Bench, quick, threads
from casekit.engines import InThreads
from casekit.levels import eventually
from casekit.scripts import ANY, Block, Injected, Raise
from casekit.tensors import same, state
from weightsync import Policy
from weightsync.fsm.contract import Ticket
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import EngineSilent, TransportError
from weightsync.fsm.receipt import Receipt
from weightsync.fsm.states import Disposition, EngineState
from weightsync.handlers.local_engine import LocalEngine

pytestmark = pytest.mark.timeout(60)

TRANSPORTS = pytest.mark.parametrize("transport", ["memory", "collective", "shm"])
CHANNELS = pytest.mark.parametrize(
    ("transport", "stages"), [("memory", True), ("memory", False), ("collective", True)]
)
PATIENCE = 20.0
OLD, NEW, OUT = Disposition.serving_old, Disposition.serving_new, Disposition.quarantined


def brief() -> Policy:
    """Three seconds for a round; nobody generates, and the other limits are those that follow from it."""
    return quick(deadline=3.0, idle=None, engine_limit=None, drain=1.0)


def until_it_is_over(bench: Bench) -> Block:
    """Silence that lasts as long as the round: whoever is silent goes on when the lock was given back."""
    silence = Block()
    bench.keeper.after["release"] = silence.going.set
    return silence


class Withheld(InThreads):
    """An engine whose answers to ``receive`` are kept back when that is asked for."""

    def __init__(self, name: str, *, stages: bool = True) -> None:
        super().__init__(name, state(-1), stages=stages)
        self.withhold = False
        self.kept: list[Callable[[], None]] = []
        self.link.receive = self._receive  # type: ignore[method-assign]

    def _receive(self, session: Session, ticket: Ticket) -> Future[tuple[Receipt, ...]]:
        answer = LocalEngine.receive(self.link, session, ticket)
        if not self.withhold:
            return answer
        later: Future[tuple[Receipt, ...]] = Future()

        def say() -> None:
            error = answer.exception(PATIENCE)
            if error is not None:
                later.set_exception(error)
            else:
                later.set_result(answer.result())

        self.kept.append(say)
        return later


class TestB08:
    """A receive without a limit: MoonshotAI/checkpoint-engine#38, #43, Tencent-Hunyuan/UniRL#337, #338."""

    @staticmethod
    def silent(
        bench: Bench, phase: Any, others: Disposition = OLD, error: type[Exception] = EngineSilent
    ) -> None:
        """The round fails by e1 within its deadline; whoever sends says at which bucket."""
        result = bench.fails(error, engine="e1", phase=phase, bucket=ANY)
        assert [row.disposition for row in result.engines] == [others, OUT]
        assert result.failed_in != "Broadcasting" or result.bucket is not None

    @CHANNELS
    def test_b08_a_it_raises_and_says_nothing(self, transport: str, stages: bool) -> None:
        """After bucket 0 of 3: no receipt and no error ever comes; the next round has a channel of its own.

        A rank of a collective is known to have left, and it is not called late then.
        """
        mute = Withheld("e1", stages=stages)
        with Bench([*threads("e0", stages=stages), mute], transport, policy=brief()) as bench:
            bench.works()
            mute.withhold = True
            mute.arm("applied", Raise(Injected("nobody hears of it")), 0)
            left = TransportError if transport == "collective" else EngineSilent
            self.silent(bench, SENDING, OLD if stages else OUT, left)
            mute.withhold = False
            bench.works()

    @TRANSPORTS
    def test_b08_b_it_never_connects(self, transport: str) -> None:
        """It has opened its session, and does not come to where the buckets are."""
        engines = threads("e0", "e1")
        with Bench(engines, transport, policy=brief()) as bench:
            bench.works()
            engines[1].disarm()
            engines[1].arm("receive", until_it_is_over(bench))
            self.silent(bench, ("Locked", "Broadcasting", "Awaiting"))
            assert engines[1].count("frame") == 0
            bench.works()

    @CHANNELS
    def test_b08_d_it_takes_a_bucket_when_the_next_round_runs(self, transport: str, stages: bool) -> None:
        """It comes back from bucket 0 of one round while the next one asks it to begin: that one is whole."""
        engines, late = threads("e0", "e1", stages=stages), Block()
        with Bench(engines, transport, policy=brief()) as bench:
            bench.works()
            engines[1].arm("applied", late, 0)
            before = bench.run(state(8))
            assert isinstance(before.error, EngineSilent), before.summary()
            assert before.culprit == "e1"
            bench.lock_is_free()
            engines[1].link.words.clear()
            running = bench.sync.begin(9, state(9))
            assert eventually(lambda: engines[1].said("open")), "the next round did not begin"
            late.going.set()
            result = running.wait()
            assert result.ok, result.summary()
            for name, look in bench.looks().items():
                assert look.version == result.version
                assert same(look.tensors, state(9)), f"{name} has something of the round before"
            bench.works()

    @TRANSPORTS
    def test_b08_d_its_receipt_comes_when_the_next_round_runs(self, transport: str) -> None:
        """It is the receipt of another round: nobody takes it for one of this round."""
        late = Withheld("e1")
        stuck = [Block(), Block()]
        engines = [*threads("e0"), late]
        with Bench(engines, transport, policy=brief()) as bench:
            bench.works()
            late.withhold = True
            result = bench.fails(EngineSilent, engine="e1", phase="Awaiting")
            assert result.serving(OLD) == ("e0",)
            late.withhold = False
            for engine, stop in zip(engines, stuck, strict=True):
                engine.arm("apply", stop, 2)
            running = bench.sync.begin(9, state(9))
            assert all(stop.reached.wait(PATIENCE) for stop in stuck), "the next round did not begin"
            assert [say() for say in late.kept] == [None]
            assert late.receiver.state is not EngineState.Acked
            assert not running.done, "an old receipt ended the round"
            for stop in stuck:
                stop.going.set()
            after = running.wait()
            assert after.ok, after.summary()
            assert all(same(look.tensors, state(9)) for look in bench.looks().values())
            assert [receipt.epoch for row in after.engines for receipt in row.receipts] == [after.epoch] * 2
            bench.works()


SILENT: dict[str, tuple[str, int, str | tuple[str, ...], Disposition, str]] = {
    "begin": ("open", ANY, "Locked", OLD, "no"),
    "bucket": ("apply", 1, SENDING, OLD, "no"),
    "finish": ("commit", ANY, "Cleaning", NEW, "no"),
    "resume": ("resume", ANY, "Cleaning", NEW, "yes"),
}
"""Where an engine falls silent, at which bucket; where the round fails; what the others are; published."""


class TestB09:
    """One silent engine stops everybody: PrimeIntellect-ai/prime-rl#2230, #3016."""

    @TRANSPORTS
    @pytest.mark.parametrize("where", SILENT)
    def test_b09_a_silent_in_one_phase(self, where: str, transport: str) -> None:
        """Of three engines it is named, with the phase; the others are done or aborted, and not paused."""
        point, bucket, phase, others, published = SILENT[where]
        engines = threads("e0", "e1", "e2")
        with Bench(engines, transport, policy=brief()) as bench:
            bench.works()
            engines[1].arm(point, until_it_is_over(bench), bucket)
            result = bench.fails(EngineSilent, engine="e1", phase=phase, bucket=ANY, published=published)
            assert [row.disposition for row in result.engines] == [others, OUT, others]
            assert result.seconds[result.failed_in or ""] < bench.policy.deadline / 2
            bench.works()

    @pytest.mark.parametrize("where", ["bucket", "finish"])
    def test_b09_a_and_silent_ever_after(self, where: str) -> None:
        """It does not answer when it is asked what it is, either: the sum of all waits has its limit, too."""
        point, bucket, phase, others, published = SILENT[where]
        engines = threads("e0", "e1", "e2")
        with Bench(engines, policy=brief()) as bench:
            bench.works()
            silence = until_it_is_over(bench)
            engines[1].arm(point, silence, bucket)
            engines[1].arm("abort", silence)
            result = bench.fails(EngineSilent, engine="e1", phase=phase, bucket=ANY, published=published)
            assert [row.disposition for row in result.engines] == [others, OUT, others]
            bench.works()

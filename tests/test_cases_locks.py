"""Faults that kept a lock, a pause or a session: in whatever place a round fails, it puts everything back."""

import logging
from collections.abc import Iterator

import pytest
from torch import Tensor

from casekit.bench import SENDING, Bench, threads
from casekit.engines import InThreads
from casekit.levels import eventually
from casekit.scripts import Injected, Raise
from casekit.tensors import state
from casekit.wrapped import Steps, Tripwire
from weightsync.fsm.record import Record
from weightsync.fsm.states import Disposition, EngineState
from weightsync.handlers.receiver import FAULT_POINTS
from weightsync.joining import transport_for

pytestmark = pytest.mark.timeout(60)

TRANSPORTS = pytest.mark.parametrize("transport", ["memory", "collective", "shm"])
OLD, NEW, OUT = Disposition.serving_old, Disposition.serving_new, Disposition.quarantined


@TRANSPORTS
@pytest.mark.parametrize("stages", [True, False], ids=["stages", "in-place"])
def test_b01_four_places_to_fail_and_a_fifth_round(transport: str, stages: bool) -> None:
    """radixark/miles#1967: after each failure the lock is free and the error is told; then all is well.

    The trainer's iterator raises; sending bucket 1 raises; an engine raises in bucket 1; a clean-up hook
    raises.
    """
    wire, hook, boom = Tripwire(transport_for(transport)), Steps(), Injected("boom")

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "layer.weight", state(1)["layer.weight"]
        raise boom

    with Bench(threads("e0", "e1", stages=stages), wire, handlers=[hook]) as bench:
        bench.works()
        bench.fails(boom, phase="Locked", model=broken())
        wire.arm("bucket_sent", Raise(boom), skip=1)
        bench.fails(boom, phase="Broadcasting", bucket=1)
        bench.engines["e1"].arm("apply", Raise(boom), 1)
        bench.fails(boom, engine="e1", phase=SENDING, bucket=1)
        hook.arm("clean", Raise(boom))
        result = bench.fails(boom, phase="Cleaning", published="yes")
        assert result.serving(NEW) == ("e0", "e1"), "what was committed and published is not undone"
        bench.works()
        assert bench.keeper.granted == bench.keeper.released


class TestB03:
    """A pause that came about on some engines only, or an update that was begun and never finished.

    NVIDIA-NeMo/RL#3612, vllm-project/vllm#39212, NovaSky-AI/SkyRL#1605.
    """

    @staticmethod
    def once_each(bench: Bench, engines: list[InThreads]) -> None:
        """Each engine is told to end the session exactly once, and every later begin is accepted by all."""
        assert [engine.said("abort") for engine in engines] == [1, 1, 1]
        assert [engine.said("resume") for engine in engines] == [0, 0, 0], "an abort resumes already"
        assert [engine.look().paused for engine in engines] == [False, False, False]
        refused = [engine.receiver.refused for engine in engines]
        bench.works()
        assert [engine.count("opened") for engine in engines] == [1, 1, 1]
        assert [engine.receiver.refused for engine in engines] == refused

    @TRANSPORTS
    @pytest.mark.parametrize("point", ["open", "opened"])
    def test_b03_a_and_c_one_does_not_pause(self, transport: str, point: str) -> None:
        """Engine e1 refuses when the others have paused (a), or pauses and its answer is lost (c).

        No bucket is sent, and each of those that paused is resumed: in (c) that is e1, too.
        """
        boom = Injected("begin refused")
        engines = threads("e0", "e1", "e2")
        others = (engines[0], engines[2])

        def refuse() -> None:
            assert eventually(lambda: all(each.receiver.state is EngineState.Paused for each in others))
            raise boom

        with Bench(engines, transport) as bench:
            bench.works()
            for engine in engines:
                engine.disarm()
            engines[1].arm(point, refuse)
            result = bench.fails(boom, engine="e1", phase="Locked")
            assert [row.disposition for row in result.engines] == [OLD, OUT, OLD]
            assert [engine.count("frame") for engine in engines] == [0, 0, 0]
            self.once_each(bench, engines)

    @TRANSPORTS
    @pytest.mark.parametrize("stages", [True, False], ids=["stages", "in-place"])
    def test_b03_b_the_finish_is_never_reached(self, transport: str, stages: bool) -> None:
        """Engine e0 raises in bucket 1: all three are told to abort, and all take the next round."""
        boom = Injected("no such parameter")
        engines = threads("e0", "e1", "e2", stages=stages)
        with Bench(engines, transport) as bench:
            bench.works()
            for engine in engines:
                engine.disarm()
            engines[0].arm("apply", Raise(boom), 1)
            result = bench.fails(boom, engine="e0", phase=SENDING, bucket=1)
            expected = [OUT, OLD, OLD] if stages else [OUT, OUT, OUT]
            assert [row.disposition for row in result.engines] == expected
            assert [engine.said("abort") for engine in engines] == [1, 1, 1]
            if stages:
                self.once_each(bench, engines)
            else:
                assert [engine.look().version for engine in engines] == [None, None, None]
                bench.works()


# -- B38 ----------------------------------------------------------------------------------------------------

GOES_ON = {"hello", "abort", "aborted"}
"""Nobody is told so in a good round with engines that are known."""
TOO_LATE = {"resume", "resumed"}
"""The version is published by then: the engine is lost, and the round goes on without it."""


class TestB38:
    """An error in any place of ours. What callbacks make of it: pytransitions/transitions#202, #616, #626."""

    @TRANSPORTS
    @pytest.mark.parametrize("stages", [True, False], ids=["stages", "in-place"])
    @pytest.mark.parametrize("point", FAULT_POINTS)
    def test_b38_at_every_point_of_an_engine(self, point: str, transport: str, stages: bool) -> None:
        """Failed, Released, the first error, the lock free, and a good round after it."""
        boom = Injected(point)
        with Bench(threads("e0", "e1", stages=stages), transport) as bench:
            bench.works()
            bench.engines["e1"].arm(point, Raise(boom))
            result = bench.meets(boom)
            assert result.ok is (point in GOES_ON)
            assert ("Failed" in result.path) is (point not in GOES_ON and point not in TOO_LATE)
            assert result.culprit == (None if result.ok else "e1")
            bench.works()

    @pytest.mark.parametrize("point", ["abort", "aborted", "hello"])
    def test_b38_an_engine_fails_again_while_it_is_put_back(self, point: str) -> None:
        """What fails in Failed, or afterwards, is not taken for the reason."""
        boom, later = Injected("first"), Injected("later")
        with Bench(threads("e0", "e1")) as bench:
            bench.works()
            bench.engines["e0"].arm("apply", Raise(boom), 1)
            for name in ("e0", "e1"):
                bench.engines[name].arm(point, Raise(later))
            bench.fails(boom, engine="e0", phase=SENDING, bucket=1)
            bench.works()

    @TRANSPORTS
    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("method", ["open", "broadcast", "collect", "clean"])
    def test_b38_in_every_step_of_a_transport(self, method: str, when: str, transport: str) -> None:
        """Failed, Released, the first error; also where the step had done its work already."""
        wire, boom = Tripwire(transport_for(transport)), Injected(f"{when} {method}")
        with Bench(threads("e0", "e1"), wire) as bench:
            bench.works()
            wire.arm(method, Raise(boom), when)
            result = bench.meets(boom)
            # A step that has told everything is not asked what it says on its way out.
            assert "Failed" in result.path or (when == "after" and method in ("broadcast", "collect"))
            bench.works()

    @TRANSPORTS
    def test_b38_in_a_transports_abort(self, transport: str) -> None:
        """The first error stays the first; the round is unclean, and says so."""
        wire, boom, later = Tripwire(transport_for(transport)), Injected("first"), Injected("in abort")
        with Bench(threads("e0", "e1"), wire) as bench:
            bench.works()
            bench.engines["e1"].arm("apply", Raise(boom), 1)
            wire.arm("abort", Raise(later), "after")
            result = bench.fails(boom, engine="e1", phase=SENDING, bucket=1)
            assert result.unclean
            assert any("in abort" in note for note in result.notes)
            bench.works()

    @TRANSPORTS
    @pytest.mark.parametrize(
        "word", ["session", "engines", "closed", "limit", "on_change", "bucket_sent", "all_sent", "acked"]
    )
    def test_b38_in_every_word_to_a_port(self, word: str, transport: str) -> None:
        """What a transport meets at its port ends the round in the same way."""
        wire, boom = Tripwire(transport_for(transport)), Injected(word)
        with Bench(threads("e0", "e1"), wire) as bench:
            bench.works()
            wire.arm(word, Raise(boom))
            result = bench.meets(boom)
            unasked = wire.disarm()  # who need not wait does not ask for the limit
            assert ("Failed" in result.path) is not unasked
            assert not unasked or word == "limit"
            bench.works()

    @pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])
    @pytest.mark.parametrize("step", ["prepare", "clean"])
    def test_b38_in_every_step_of_an_executor(self, step: str, place: int) -> None:
        """What was prepared is undone, newest first, once."""
        done: list[str] = []
        hooks, boom = [Steps("outer", done), Steps("inner", done)], Injected(step)
        with Bench(threads("e0", "e1"), handlers=hooks) as bench:
            bench.works()
            done.clear()
            hooks[place].arm(step, Raise(boom))
            phase = "Locked" if step == "prepare" else "Cleaning"
            bench.fails(boom, phase=phase, published="no" if step == "prepare" else "yes")
            ways = {
                ("prepare", 0): [],
                ("prepare", 1): ["outer.prepare", "outer.undo"],
                ("clean", 0): ["outer.prepare", "inner.prepare", "inner.undo", "outer.undo"],
                ("clean", 1): ["outer.prepare", "inner.prepare", "outer.clean", "inner.undo"],
            }
            assert done == ways[step, place]
            bench.works()

    @pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])
    def test_b38_in_an_undo(self, place: int) -> None:
        """The other undo runs all the same; the first error stays the first, and the round is unclean."""
        done: list[str] = []
        hooks, boom, later = [Steps("outer", done), Steps("inner", done)], Injected("first"), Injected("undo")
        with Bench(threads("e0", "e1"), handlers=hooks) as bench:
            bench.works()
            done.clear()
            bench.engines["e1"].arm("apply", Raise(boom), 1)
            hooks[place].arm("undo", Raise(later))
            result = bench.fails(boom, engine="e1", phase=SENDING, bucket=1)
            assert result.unclean
            assert any("undo" in note for note in result.notes)
            assert done[2:] == [["inner.undo"], ["outer.undo"]][place]
            bench.works()

    @pytest.mark.parametrize("error", [RuntimeError("disk full"), KeyboardInterrupt(), SystemExit(3)])
    def test_b38_in_an_observer(self, error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
        """It is disabled, with one line, and the round goes on; so do the other observers."""
        told: list[Record] = []

        def broken(record: Record) -> None:
            told.append(record)
            raise error

        with caplog.at_level(logging.ERROR, "weightsync"), Bench(threads("e0"), handlers=[broken]) as bench:
            bench.works()
            bench.works()
        assert len(told) == 1
        assert [type(error).__name__ in line.getMessage() for line in caplog.records] == [True]

    def test_b38_the_lock_is_held_as_long_as_anything_is_put_back(self) -> None:
        """While an undo runs, the lock is the trainer's; Released comes after it."""
        hook, boom = Steps(), Injected("first")
        held: list[str | None] = []
        with Bench(threads("e0", "e1"), handlers=[hook]) as bench:
            bench.works()
            bench.engines["e1"].arm("apply", Raise(boom), 1)
            hook.arm("undo", lambda: held.append(bench.keeper.holder))
            bench.fails(boom, engine="e1", phase=SENDING, bucket=1)
            assert held == ["trainer"]
            bench.works()

"""Faults of waiting: two callers at a time, cancellation and Ctrl-C, and more than one event loop."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from casekit.bench import GOOD_PATH, Bench, quick, threads
from casekit.engines import InThreads
from casekit.levels import eventually
from casekit.scripts import ANY, Block, Sleep
from casekit.tensors import same, state
from weightsync import RoundInProgress, RoundResult
from weightsync.fsm.errors import LedgerError

pytestmark = pytest.mark.timeout(60)

TRANSPORTS = pytest.mark.parametrize("transport", ["memory", "collective", "shm"])
PATIENCE = 20.0


def slow_engines(seconds: float = 0.03) -> list[InThreads]:
    """Two engines that need so long for each bucket."""
    engines = threads("e0", "e1")
    for engine in engines:
        engine.script.always("apply", Sleep(seconds))
    return engines


def applied(engines: list[InThreads]) -> list[int]:
    """How many buckets each has applied since it was disarmed."""
    return [engine.count("applied") for engine in engines]


class TestB22:
    """Two rounds at a time: sgl-project/sglang#33698, pytransitions/transitions#640, #465."""

    @TRANSPORTS
    def test_b22_three_threads(self, transport: str) -> None:
        """Each has its own result, of its own weights; every bucket is applied once for each round that ran.

        One of them asks for a number of its own.
        """
        engines = slow_engines()
        with Bench(engines, transport) as bench:

            def hand_over(number: int, version: int | None) -> RoundResult:
                return bench.sync.begin(number, state(number), version=version).wait()

            with ThreadPoolExecutor(3) as callers:
                running = [callers.submit(hand_over, *each) for each in ((1, None), (2, None), (3, 40))]
                results = [each.result(PATIENCE).require() for each in running]
            assert [result.step for result in results] == [1, 2, 3]
            assert results[2].version == 40
            assert len({result.version for result in results}) == 3
            assert len({result.epoch for result in results}) == 3
            assert applied(engines) == [9, 9]
            assert bench.keeper.granted == bench.keeper.released
            newest = max(results, key=lambda result: result.epoch)
            for look in bench.looks().values():
                assert (look.version, same(look.tensors, state(newest.step))) == (newest.version, True)

    def test_b22_a_number_that_would_fall(self) -> None:
        """Who asks for a lower number while others run is refused, and nobody else notices."""
        engines = slow_engines()
        with Bench(engines) as bench:
            first = bench.sync.begin(1, state(1), version=7)
            second = bench.sync.begin(2, state(2), version=3)
            assert first.wait().require().version == 7
            with pytest.raises(LedgerError):
                second.wait()
            assert applied(engines) == [3, 3]
            bench.works()

    @TRANSPORTS
    def test_b22_three_tasks(self, transport: str) -> None:
        """The same for tasks of one event loop."""
        engines = slow_engines()

        async def all_at_once(bench: Bench) -> list[RoundResult]:
            return await asyncio.gather(*(bench.sync.round(number, state(number)) for number in (1, 2, 3)))

        with Bench(engines, transport) as bench:
            results = asyncio.run(all_at_once(bench))
            assert [(result.ok, result.step, result.version) for result in results] == [
                (True, 1, 0), (True, 2, 1), (True, 3, 2),
            ]  # fmt: skip
            assert applied(engines) == [9, 9]

    def test_b22_refused_at_once(self) -> None:
        """By policy, whoever comes while a round runs is told so, and only that round is carried out."""
        engines, stop = threads("e0", "e1"), Block()
        with Bench(engines, policy=quick(when_busy="refuse")) as bench:
            engines[0].arm("apply", stop)
            first = bench.sync.begin(1, state(1))
            assert stop.reached.wait(PATIENCE)
            with pytest.raises(RoundInProgress):
                bench.sync.begin(2, state(2))
            with pytest.raises(RoundInProgress):
                asyncio.run(bench.sync.round(3, state(3)))
            stop.going.set()
            assert first.wait().require().step == 1
            assert applied(engines) == [3, 3]
            bench.works()


# -- B39 ----------------------------------------------------------------------------------------------------

PHASES = {
    "Locked": ("open", ANY),
    "Broadcasting": ("apply", 0),
    "Awaiting": ("release", ANY),
    "Cleaning": ("commit", ANY),
}
"""Where an engine is stopped, so that the round stays in a state."""


def phase_of(bench: Bench) -> str | None:
    """The state that the last record tells of."""
    moves = [record for record in bench.log.records if record.event == "transition"]
    return moves[-1].target if moves else None


def put_back(bench: Bench, path: tuple[str, ...]) -> None:
    """The round is over, everybody serves, and the next one works."""
    records = [record for record in bench.log.records if record.event == "transition"]
    last = [record for record in records if record.round == records[-1].round]
    walked = ("Idle", *(record.target for record in last if record.source != record.target))
    assert walked == path
    bench.lock_is_free()
    for name, engine in bench.engines.items():
        engine.settle()
        look = engine.look()
        assert (look.in_session, look.paused) == (False, False), f"{name} was left {look.state.name}"
    bench.works()


class TestB39:
    """A time-out, a cancellation, Ctrl-C: pytransitions/transitions#704, #713."""

    @TRANSPORTS
    def test_b39_a_a_time_out_around_a_round(self, transport: str) -> None:
        """The caller has TimeoutError, and what follows the await is not run; the old bits are served."""
        engines, went_on = threads("e0", "e1"), []

        async def impatient(bench: Bench) -> None:
            try:
                await asyncio.wait_for(bench.sync.round(2, state(2)), 0.3)
                went_on.append(True)
            finally:
                assert phase_of(bench) == "Released", "the caller went on before the round was over"

        with Bench(engines, transport) as bench:
            bench.works()
            engines[1].script.always("apply", Sleep(0.5))
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                asyncio.run(impatient(bench))
            assert time.monotonic() - began < bench.policy.deadline
            assert went_on == []
            assert all(same(look.tensors, state(1)) for look in bench.looks().values())
            put_back(bench, ("Idle", "Locked", "Broadcasting", "Failed", "Released"))

    @TRANSPORTS
    @pytest.mark.parametrize("phase", PHASES)
    def test_b39_b_a_cancelled_task(self, phase: str, transport: str) -> None:
        """CancelledError comes when the round is over; in Cleaning, what was decided is carried out first."""
        engines, stop, went_on = threads("e0", "e1"), Block(), []
        point, bucket = PHASES[phase]

        async def cancelled(bench: Bench) -> None:
            async def hand_over() -> None:
                await bench.sync.round(2, state(2))
                went_on.append(True)

            task = asyncio.create_task(hand_over())
            await asyncio.to_thread(stop.reached.wait, PATIENCE)
            assert await asyncio.to_thread(eventually, lambda: phase_of(bench) == phase)
            task.cancel()
            threading.Timer(0.1, stop.going.set).start()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert phase_of(bench) == "Released", "the caller went on before the round was over"

        with Bench(engines, transport) as bench:
            bench.works()
            engines[1].arm(point, stop, bucket)
            asyncio.run(cancelled(bench))
            assert went_on == []
            good = phase == "Cleaning"
            known = ("Idle", "Locked", "Broadcasting", "Awaiting", "Cleaning")
            failed = (*known[: known.index(phase) + 1], "Failed", "Released")
            value = 2 if good else 1
            assert all(same(look.tensors, state(value)) for look in bench.looks().values())
            put_back(bench, GOOD_PATH if good else failed)

    def test_b39_b_a_commit_that_never_ends(self) -> None:
        """Cancelled in Cleaning, with an engine that does not answer: the limits still hold."""
        engines, stop = threads("e0", "e1"), Block()

        async def cancelled(bench: Bench) -> None:
            task = asyncio.create_task(bench.sync.round(2, state(2)))
            await asyncio.to_thread(stop.reached.wait, PATIENCE)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        with Bench(engines, policy=quick(deadline=2.0)) as bench:
            bench.works()
            engines[1].arm("commit", stop)
            began = time.monotonic()
            asyncio.run(cancelled(bench))
            assert time.monotonic() - began < bench.policy.deadline + 2.0
            bench.lock_is_free()
            assert "e1" not in bench.sync.servable()
            stop.going.set()
            bench.works()

    def test_b39_d_cancelled_again_while_it_cleans_up(self) -> None:
        """A second and a third cancellation change nothing: what is being put back is put back."""
        engines, stop = threads("e0", "e1"), Block()
        order: list[str] = []

        async def cancelled(bench: Bench) -> None:
            task = asyncio.create_task(bench.sync.round(2, state(2)))
            await asyncio.to_thread(stop.reached.wait, PATIENCE)
            for _ in range(3):
                task.cancel("again")
                await asyncio.sleep(0)
                assert not task.done(), "it was given up before it was over"
            stop.going.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            order.append("caller")

        def released() -> None:
            order.append("release")

        with Bench(engines) as bench:
            bench.works()
            engines[1].arm("commit", stop)
            bench.keeper.after["release"] = released
            asyncio.run(cancelled(bench))
            bench.keeper.after.clear()
            assert order == ["release", "caller"]
            put_back(bench, GOOD_PATH)

    @pytest.mark.parametrize(("form", "transport"), [("sync", "memory"), ("async", "collective")])
    def test_b39_c_ctrl_c(self, form: str, transport: str, tmp_path: Path) -> None:
        """KeyboardInterrupt in the middle of sending: raised when everything is put back."""
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, form, transport, str(tmp_path / "reached")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert eventually((tmp_path / "reached").exists, 40.0)
            child.send_signal(signal.SIGINT)
            told = json.loads(child.communicate(timeout=30)[0])
        finally:
            child.kill()
            child.wait()
        assert told == {
            "caught": "KeyboardInterrupt",
            "went on": False,
            "free": True,
            "serving": [True, True],
            "old bits": [True, True],
            "path": ["Locked", "Broadcasting", "Failed", "Released"],
        }


CHILD = """
import asyncio, json, pathlib, sys, threading
from casekit.bench import Bench, threads
from casekit.scripts import Block
from casekit.tensors import same, state

form, transport, reached = sys.argv[1:]
engines, stop, told = threads("e0", "e1"), Block(), {"went on": False}

def tell():
    stop.reached.wait(30)
    pathlib.Path(reached).touch()

async def hand_over(bench):
    await bench.sync.round(2, state(2))

with Bench(engines, transport) as bench:
    bench.works()
    bench.log.records.clear()
    engines[1].arm("apply", stop, 0)
    threading.Thread(target=tell, daemon=True).start()
    # the engine goes on a moment after the interrupt, as one that was only slow would
    abort = engines[1].receiver.abort
    engines[1].receiver.abort = lambda session: (stop.going.set(), abort(session))[1]
    try:
        if form == "sync":
            bench.sync.on_step_end(2, state(2))
        else:
            asyncio.run(hand_over(bench))
        told["went on"] = True
    except BaseException as error:
        told["caught"] = type(error).__name__
    told["free"] = bench.keeper.taken_by_another()
    looks = bench.looks().values()
    told["serving"] = [not (look.paused or look.in_session) for look in looks]
    told["old bits"] = [same(look.tensors, state(1)) for look in looks]
    moves = [r for r in bench.log.records if r.event == "transition" and r.source != r.target]
    told["path"] = [record.target for record in moves]
print(json.dumps(told))
"""


class TestB42:
    """One object in several event loops, and in none: awslabs/agentcore-rl-toolkit#33."""

    def test_b42_b_two_loops_a_thread_and_no_loop(self) -> None:
        """It belongs to no loop: two runs one after the other, a loop of a thread, and plain calls."""
        done: list[int] = []

        async def hand_over(number: int) -> None:
            done.append((await bench.sync.round(number, state(number))).require().step)

        with Bench(threads("e0", "e1")) as bench:
            asyncio.run(hand_over(1))
            asyncio.run(hand_over(2))
            in_thread = threading.Thread(target=lambda: asyncio.run(hand_over(3)))
            in_thread.start()
            in_thread.join(PATIENCE)
            done.append(bench.sync.begin(4, state(4)).wait().require().step)
            assert done == [1, 2, 3, 4]
            bench.works()

    def test_b42_b_loops_at_the_same_time(self) -> None:
        """A round that one loop waits for keeps no other loop from running, nor from its own round."""
        engines, stop, ticks = threads("e0", "e1"), Block(), []

        async def hand_over(number: int) -> int:
            return (await bench.sync.round(number, state(number))).require().step

        async def ticking() -> int:
            waiting = asyncio.create_task(hand_over(2))
            while not waiting.done():
                began = time.monotonic()
                await asyncio.sleep(0)
                ticks.append(time.monotonic() - began)
                if len(ticks) == 100:
                    stop.going.set()
            return await waiting

        with Bench(engines) as bench, ThreadPoolExecutor(1) as pool:
            bench.works()
            engines[0].arm("apply", stop)
            other = pool.submit(asyncio.run, hand_over(1))
            assert stop.reached.wait(PATIENCE)
            assert asyncio.run(ticking()) == 2
            assert other.result(PATIENCE) == 1
            assert len(ticks) >= 100
            assert max(ticks) < 0.5

    def test_b42_b_begun_here_and_awaited_there(self) -> None:
        """A round that was begun outside every loop can be awaited in one."""

        async def wait_for(pending: Any) -> RoundResult:
            result: RoundResult = await pending
            return result

        with Bench(threads("e0", "e1")) as bench:
            pending = bench.sync.begin(1, state(1))
            assert asyncio.run(wait_for(pending)).require().step == 1
            assert asyncio.run(wait_for(pending)) is pending.wait()
            bench.works()

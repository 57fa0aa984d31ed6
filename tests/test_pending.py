"""A round that was begun: everybody who waits for it gets the same, however and whenever they ask."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from weightsync.fsm.errors import RoundError
from weightsync.fsm.results import RoundResult
from weightsync.fsm.states import Outcome
from weightsync.pending import Pending

PATIENCE = 20.0
RESULT = RoundResult("r", 1, 0, 1, 1, Outcome.complete, "yes", (), (), {})


def test_everybody_who_waits_gets_the_result() -> None:
    """Threads that came before the end, and whoever comes after it."""
    pending = Pending(1, None, raises=False)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(pending.wait) for _ in range(4)]
        pending.finished(RESULT)
        assert [future.result(PATIENCE) for future in waiting] == [RESULT] * 4
    assert pending.wait() is RESULT
    assert pending.done


def test_what_came_instead_of_a_result_is_raised_to_everybody() -> None:
    """The very object."""
    pending, error = Pending(1, None, raises=True), ValueError("no round")
    pending.finished(error)
    for _ in range(2):
        with pytest.raises(ValueError, match="no round") as caught:
            pending.wait()
        assert caught.value is error


def test_it_can_be_awaited_after_its_end_and_in_several_loops() -> None:
    """By tasks of one loop and of another."""
    pending = Pending(1, None, raises=False)

    async def main() -> list[RoundResult]:
        tasks = [asyncio.ensure_future(_await(pending)) for _ in range(3)]
        await asyncio.sleep(0)
        pending.finished(RESULT)
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [RESULT] * 3
    assert asyncio.run(_await(pending)) is RESULT


async def _await(pending: Pending) -> RoundResult:
    return await pending


def test_an_event_loop_that_is_gone_keeps_nobody_from_the_result() -> None:
    """It is told in vain; the thread that ran the round goes on."""
    pending = Pending(1, None, raises=False)
    loop = asyncio.new_event_loop()
    task = loop.create_task(_await(pending))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    told: list[bool] = []
    pending._when_over(lambda: told.append(True))
    runner = threading.Thread(target=pending.finished, args=(RESULT,), daemon=True)
    runner.start()
    runner.join(PATIENCE)
    assert not runner.is_alive()
    assert told == [True]
    assert pending.wait() is RESULT
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_there_is_no_result_before_the_end() -> None:
    """Nothing is made up."""
    with pytest.raises(RoundError, match="step 7 is not over"):
        Pending(7, None, raises=False)._told()

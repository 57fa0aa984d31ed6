"""A coroutine called from synchronous code: over the bridge, and with a loop and a thread for each call.

``python -m benchmarks.bridge`` prints the time of a call both ways, their ratio, and what is left open with
the garbage collector off. The peer is what a program does that knows no better: a new loop on a new thread,
run, stopped, joined, and never closed; and the same with the close.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weightsync.handlers.bridge import LoopBridge

__all__ = ["Row", "measure"]

CALLS = 200
REPEATS = 5


@dataclass(frozen=True)
class Row:
    """One way to call.

    Args:
        way: what it is called.
        microseconds: for a call, in the best of the repeats.
        left: descriptors that are open afterwards, of all calls.
    """

    way: str
    microseconds: float
    left: int


async def answer() -> int:
    """Waits for the loop once."""
    await asyncio.sleep(0)
    return 1


def with_a_loop_of_its_own(*, close: bool) -> int:
    """One call, as in a program without a bridge."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        return asyncio.run_coroutine_threadsafe(answer(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        if close:
            loop.close()
        else:
            _LEFT.append(loop)


_LEFT: list[asyncio.AbstractEventLoop] = []


def measure(calls: int = CALLS, repeats: int = REPEATS) -> list[Row]:
    """All ways, in turn, several times; the best time of each, since whatever else runs only adds to it."""
    with LoopBridge("benchmark") as bridge:
        ways: dict[str, Callable[[], int]] = {
            "over the bridge": lambda: bridge.call(answer, limit=10.0),
            "a loop a call": lambda: with_a_loop_of_its_own(close=True),
            "a loop a call, not closed": lambda: with_a_loop_of_its_own(close=False),
        }
        ways["over the bridge"]()  # which makes its loop
        found: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, call in ways.items():
                found[way].append(_timed(call, calls))
    return [
        Row(way, min(seconds for seconds, _ in times) * 1e6, max(left for _, left in times))
        for way, times in found.items()
    ]


def _timed(call: Callable[[], int], calls: int) -> tuple[float, int]:
    """Seconds a call, and the descriptors that all of them left."""
    gc.collect()
    gc.disable()
    try:
        before, began = _descriptors(), time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - began) / calls, _descriptors() - before
    finally:
        gc.enable()
        for loop in _LEFT:
            loop.close()
        _LEFT.clear()


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def main() -> None:
    """Print them."""
    rows = measure()
    for row in rows:
        print(
            f"{row.way:26} {row.microseconds:8.0f} us a call   {row.left:5} descriptors left of {CALLS} calls"
        )
    print(f"a loop a call costs {rows[1].microseconds / rows[0].microseconds:.1f} times as much")


if __name__ == "__main__":
    main()

"""A service that is told of each round by its ranks, and the handler that tells it: a coroutine.

Whoever watches a run has such a service: a router, a dashboard. Its client awaits, and the rounds are run by
threads, so the handler goes over the loop bridge of its ``WeightSync`` or ``FollowerSync``.
"""

from __future__ import annotations

import asyncio
import json
import socketserver
import threading
from collections import Counter
from collections.abc import Awaitable, Callable

from ..fsm.errors import WeightSyncError
from ..fsm.executors import RoundView

__all__ = ["Board", "Bulletin"]

_HEARD = b"heard\n"


class Board:
    """The service: it counts what it hears, and says that it did. On this host alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: Counter[tuple[int, str]] = Counter()
        board = self

        class Told(socketserver.StreamRequestHandler):
            timeout = 10.0

            def handle(self) -> None:
                if line := self.rfile.readline(1 << 12):
                    board.hear(json.loads(line))
                    self.wfile.write(_HEARD)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Told)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="demo-bulletin", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def hear(self, told: dict[str, object]) -> None:
        """One word of one rank."""
        with self._lock:
            self._heard[int(str(told["rank"])), str(told["what"])] += 1

    def heard(self, rank: int) -> dict[str, int]:
        """What that rank has told, and how often."""
        with self._lock:
            return {what: count for (who, what), count in self._heard.items() if who == rank}

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Bulletin:
    """An executor that awaits: what each round is about to do, has done, or has taken back.

    Args:
        rank: whose word it is.
        port: of the board.
    """

    name = "bulletin"

    def __init__(self, rank: int, port: int) -> None:
        self._rank, self._port = rank, port
        self.calls = 0
        self.threads: set[str] = set()
        """The threads whose loop it was awaited on: one, the bridge's."""

    async def prepare(self, round: RoundView) -> Callable[[], Awaitable[None]]:
        """It is about to be handed over."""
        await self._tell("comes", round)

        async def undo() -> None:
            await self._tell("taken back", round)

        return undo

    async def clean(self, round: RoundView) -> None:
        """It is published."""
        await self._tell("published", round)

    async def _tell(self, what: str, round: RoundView) -> None:
        self.threads.add(threading.current_thread().name)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            told = {"rank": self._rank, "what": what, "version": round.session.version}
            writer.write(json.dumps(told).encode() + b"\n")
            await writer.drain()
            if await reader.readline() != _HEARD:
                raise WeightSyncError(f"the bulletin board did not hear rank {self._rank}")
        finally:
            writer.close()
            await writer.wait_closed()
        self.calls += 1

"""Faults that add up: a round leaves nothing behind, and after thirty rounds it is still nothing."""

import pytest

from casekit.bench import Bench, threads
from casekit.engines import InThreads
from casekit.levels import eventually, levels
from casekit.scripts import Injected, Raise
from casekit.wrapped import Steps, Tripwire
from weightsync.joining import transport_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ENGINE = ("open", "receive", "apply", "release", "commit", "resume")
TRANSPORT = ("open", "broadcast", "collect", "clean")
PLACES = [*(("engine", point) for point in ENGINE), *(("transport", method) for method in TRANSPORT)]
"""Ten places to fail in, in every state of a round."""
FIRST, ROUNDS = 5, 30
"""When it is counted, and how many rounds there are."""


class TestB34:
    """Descriptors and threads of groups that nobody closed.

    pytorch/pytorch#129868, pytorch/pytorch#40400, NVIDIA/Megatron-LM#6897. The run with a limit on the
    descriptors of a process is not here: see ``casekit/table.py``.
    """

    @pytest.mark.parametrize("transport", ["memory", "collective", "shm"])
    def test_b34_thirty_rounds_of_which_ten_fail(self, transport: str) -> None:
        """A group for each round; an engine leaves and comes back in turn. Trainer and engines are counted.

        They share a process here, so that one look counts them all.
        """
        wire, hook = Tripwire(transport_for(transport)), Steps()
        guest, places, base = threads("guest")[0], iter(PLACES), levels()
        with Bench(threads("e0", "e1"), wire, handlers=[hook]) as bench:
            for number in range(1, ROUNDS + 1):
                self.comes_or_goes(bench, guest, number)
                if number % 3 == 0:
                    self.fails(bench, wire, *next(places))
                    continue
                bench.works()
                base = levels() if number == FIRST else base
            assert next(places, None) is None, "not every place was tried"
            assert eventually(lambda: not levels().above(base, 1)), levels().above(base, 1)
            assert levels().descriptors == base.descriptors
            bench.works()

    @staticmethod
    def comes_or_goes(bench: Bench, guest: InThreads, number: int) -> None:
        """It takes part in every other round."""
        if number % 2:
            bench.engines[guest.name] = guest
            bench.sync.add_engine(guest.link)
        elif guest.name in bench.engines:
            bench.sync.remove_engine(guest.name)
            del bench.engines[guest.name]

    @staticmethod
    def fails(bench: Bench, wire: Tripwire, who: str, where: str) -> None:
        """One round in which something raises at this place, seen from all sides."""
        boom = Injected(f"{who}, {where}")
        if who == "engine":
            bench.engines["e1"].arm(where, Raise(boom))
        else:
            wire.arm(where, Raise(boom))
        assert not bench.meets(boom).ok
        wire.disarm()

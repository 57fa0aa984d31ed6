"""B26: a memory that does not hold trainer, engine and cache at once. Whatever fails, it is never passed."""

from collections.abc import Iterator

import pytest

from casekit.bench import Bench
from casekit.engines import InThreads
from casekit.levels import generates
from casekit.scripts import Injected, Raise
from casekit.tensors import state
from casekit.wrapped import Steps, Tripwire
from weightsync import CalledPart, Gated, Residency, offload, onload, shift
from weightsync.fsm.errors import EngineAsleep, MemoryShort
from weightsync.fsm.states import EngineState
from weightsync.handlers.receiver import FAULT_POINTS
from weightsync.joining import transport_for

pytestmark = pytest.mark.timeout(60)

CAPACITY = 100
SIZES = {"trainer": 60, "weights": 60, "cache": 30}
TRAINING = {"trainer": True, "weights": False, "cache": False}
GENERATING = {"trainer": False, "weights": True, "cache": True}
BOOKED = ("offload trainer", "onload weights", "onload cache")
"""What a good round does after training, in its order; the update comes before the last of them."""


class Memory:
    """So much and no more; who takes more than there is gets nothing. ``log`` has what was done."""

    def __init__(self) -> None:
        self.there = dict(TRAINING)
        self.highest = 60
        self.log: list[str] = []
        self._armed: dict[tuple[str, str], BaseException] = {}

    def arm(self, what: str, when: str, error: BaseException) -> None:
        """Let something go wrong, once, ``before`` it is booked or ``after`` that."""
        self._armed[what, when] = error

    def book(self, what: str) -> None:
        """A part comes or goes."""
        word, name = what.split()
        self._go_off(what, "before")
        if word == "onload":
            # A part that raises is not there, so nothing is booked for one that fails after it.
            used = sum(SIZES[each] for each, there in self.there.items() if there or each == name)
            self.highest = max(self.highest, used)
            if used > CAPACITY:
                raise MemoryError(f"{used} of {CAPACITY}")
            self._go_off(what, "after")
        self.there[name] = word == "onload"
        self.log.append(what)
        if word == "offload":
            self._go_off(what, "after")

    def _go_off(self, what: str, when: str) -> None:
        if (what, when) in self._armed:
            raise self._armed.pop((what, when))

    def part(self, name: str) -> CalledPart:
        """Something that is booked here."""
        return CalledPart(
            name, on=lambda: self.book(f"onload {name}"), off=lambda: self.book(f"offload {name}"),
            nbytes=SIZES[name], resident=lambda: self.there[name],
        )  # fmt: skip


class Shared:
    """A trainer and an engine that share the memory."""

    def __init__(self, *, serves: bool = False, counted: bool = False, stages: bool = True) -> None:
        self.memory, self.hook, self.later = Memory(), Steps(), Steps()
        self.wire = Tripwire(transport_for("memory"))
        self.engine = InThreads(
            "e0", state(-1.0), stages=stages, asleep=lambda: not self.memory.there["weights"]
        )
        self.trainer = self.memory.part("trainer")
        self.weights = Gated(self.memory.part("weights"), self.engine.receiver)
        self.cache = Gated(self.memory.part("cache"), self.engine.receiver)
        for each in (self.weights, self.cache):  # as it is when both sleep
            self.engine.receiver.gate.hold(each.name, 1.0)
        self.to_serve = [offload(self.trainer), onload(self.weights), onload(self.cache)]
        self.residency = Residency(
            before=self.to_serve[:2], after=self.to_serve[2:], failed=self.to_serve if serves else None,
            capacity=CAPACITY if counted else None,
        )  # fmt: skip

    def bench(self) -> Bench:
        """For rounds between them."""
        return Bench([self.engine], self.wire, handlers=[self.hook, self.residency, self.later])

    def train(self) -> None:
        """The other half of a step: the engine sleeps, and the trainer is back."""
        self.engine.disarm()
        shift(offload(self.cache), offload(self.weights), onload(self.trainer))
        assert self.memory.there == TRAINING
        assert not self.generates()
        self.memory.log.clear()

    def generates(self) -> bool:
        """Whether the engine admits somebody."""
        return generates(self.engine.receiver.gate)

    def arm(self, point: str, when: str, error: BaseException) -> None:
        """Let something go wrong, wherever that is."""
        place, name = point.split(":")
        match place:
            case "memory":
                self.memory.arm(name, when, error)
            case "engine":
                self.engine.arm(name, Raise(error))
            case "transport":
                self.wire.arm(name, Raise(error), when)
            case _:
                (self.hook if place == "hook" else self.later).arm(name, Raise(error))


def places() -> Iterator[tuple[str, str]]:
    """Every place in which a round can fail, with what was done there, or without."""
    for what in BOOKED:
        yield f"memory:{what}", "before"
        yield f"memory:{what}", "after"
    for point in FAULT_POINTS:
        if point not in ("hello", "abort", "aborted"):  # nobody says these if nothing else fails
            yield f"engine:{point}", "before"
    for method in ("open", "broadcast", "bucket_sent", "collect", "clean"):
        yield f"transport:{method}", "before"
    for hook in ("hook", "later"):
        yield f"{hook}:prepare", "before"
        yield f"{hook}:clean", "before"


def test_b26_a_good_round_never_passes_what_there_is() -> None:
    """Trainer off, weights on, update, cache on last; and so again after the next step of training."""
    shared = Shared(counted=True)
    with shared.bench() as bench:
        seen: list[str] = []
        shared.engine.script.always("commit", lambda: seen.extend(shared.memory.log))
        bench.run(state(0))
        assert seen == list(BOOKED[:2]), "the engine commits before its cache is there, and after all else"
        assert shared.memory.log == list(BOOKED)
        assert shared.memory.there == GENERATING
        assert shared.generates()
        for _ in range(3):
            shared.train()
            bench.works()
            assert shared.memory.log == list(BOOKED)
        assert shared.memory.highest == 90


@pytest.mark.parametrize(
    ("before", "after", "capacity", "line"),
    [
        ((1, 0), (2,), 100, "onload weights would bring residency to 120 bytes of 100"),
        ((1,), (0, 2), 100, "onload weights would bring residency to 120 bytes of 100"),
        ((0, 1), (2,), 89, "onload cache would bring residency to 90 bytes of 89"),
    ],
)
def test_b26_an_order_that_cannot_fit_is_refused_before_anything_moves(
    before: tuple[int, ...], after: tuple[int, ...], capacity: int, line: str
) -> None:
    """The engine woken before the trainer has gone; or a cache for which there is no room at all."""
    shared = Shared()
    moves = shared.to_serve
    wrong = Residency(
        before=[moves[each] for each in before], after=[moves[each] for each in after], capacity=capacity
    )
    with Bench([shared.engine], "memory", handlers=[wrong]) as bench:
        result = bench.fails(MemoryShort, phase="Locked")
        assert line in str(result.error)
        assert shared.memory.log == []


@pytest.mark.parametrize("serves", [False, True], ids=["as-before", "serving"])
@pytest.mark.parametrize(("point", "when"), list(places()))
def test_b26_wherever_it_fails(point: str, when: str, serves: bool) -> None:
    """The memory is never passed; all is as it was, or else the engine serves; the next round is good.

    What was cleaned up before something else failed stays so: the new version is published, and served.
    """
    shared, boom = Shared(serves=serves), Injected("boom")
    with shared.bench() as bench:
        bench.works()
        shared.train()
        shared.arm(point, when, boom)
        result = bench.meets(boom)
        assert shared.memory.highest <= CAPACITY
        if not result.ok:
            cleaned = point in ("engine:resume", "engine:resumed", "transport:clean", "later:clean")
            begun = point != "hook:prepare"  # which comes before anything is moved
            expected = GENERATING if (serves and begun) or cleaned else TRAINING
            assert shared.memory.there == expected, f"{shared.memory.there} after {shared.memory.log}"
            assert not result.unclean or result.published == "yes" or cleaned, result.summary()
        serving = shared.engine.receiver.state is EngineState.Serving
        assert shared.generates() is (serving and shared.memory.there == GENERATING)
        shared.train()
        bench.works()
        assert shared.memory.log == list(BOOKED)
        assert shared.memory.highest <= CAPACITY
        assert shared.generates()


@pytest.mark.parametrize("when", ["before", "after"])
def test_b26_what_cannot_be_put_back_is_not_piled_up(when: str) -> None:
    """The engine does not let go in the undo, so the trainer does not come: that would be one too many."""
    shared, boom = Shared(), Injected("boom")
    with shared.bench() as bench:
        bench.works()
        shared.train()
        shared.memory.arm("offload weights", when, Injected("stuck"))
        shared.later.arm("prepare", Raise(boom))
        result = bench.meets(boom)
        assert result.unclean
        assert shared.memory.highest <= CAPACITY
        left = {**GENERATING, "cache": False} if when == "before" else dict.fromkeys(SIZES, False)
        assert shared.memory.there == left
        notes = " ".join(result.notes)
        assert "offload weights failed: Injected: stuck" in notes
        assert "onload trainer was not tried" in notes
        shared.train()
        bench.works()


def test_b26_an_update_to_a_sleeping_engine_is_refused() -> None:
    """Without somebody who wakes it, before a byte moves; nobody is admitted either."""
    shared = Shared()
    with Bench([shared.engine], "memory") as bench:
        with pytest.raises(EngineAsleep, match="engine e0 is asleep: wake it"):
            bench.run(state(0))
        assert shared.memory.log == []
        assert not shared.generates()

"""The transport that is taken when none is named: by where the engines are."""

import pytest

from casekit.bench import Bench, quick
from casekit.engines import InThreads
from casekit.tensors import state
from weightsync import SharedMemoryTransport, WeightSync
from weightsync.choosing import AutoTransport, choose
from weightsync.fsm.contract import Transport
from weightsync.fsm.errors import SetupError
from weightsync.joining import transport_for
from weightsync.transports.collective import CollectiveTransport
from weightsync.transports.memory import MemoryTransport

pytestmark = pytest.mark.timeout(60)


class Placed:
    """A link that says where its engine is."""

    def __init__(self, name: str, **where: bool) -> None:
        self.id = name
        self.__dict__.update(where)


HERE, NEAR, FAR, SILENT = (
    Placed("here", in_process=True), Placed("near", in_process=False, nearby=True),
    Placed("far", in_process=False, nearby=False), Placed("silent"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("links", "name"),
    [
        ([HERE], "memory"), ([HERE, HERE], "memory"), ([NEAR], "shm"), ([HERE, NEAR], "shm"),
        ([FAR], "collective"), ([NEAR, FAR], "collective"), ([HERE, FAR], "collective"),
        ([SILENT], "collective"),
    ],
)  # fmt: skip
def test_by_where_they_are(links: list[Placed], name: str) -> None:
    """The nearest that reaches all of them; who says nothing may be anywhere."""
    assert choose(links) == name  # type: ignore[arg-type]


@pytest.fixture
def moved() -> dict[str, bool]:
    """What an engine of another process on this host says."""
    return {"in_process": False, "nearby": True}


def placed(engine: InThreads, **where: bool) -> InThreads:
    """The same engine, which says that it is somewhere else."""
    for name, value in where.items():
        setattr(engine.link, name, value)
    return engine


def test_it_goes_with_the_engines(moved: dict[str, bool]) -> None:
    """Each round is handed to the one that suits; all are closed together."""
    own = [InThreads(name, state(-1)) for name in ("e0", "e1")]
    transport = transport_for("auto", quick())
    assert transport.name == "auto"
    with WeightSync([each.link for each in own], transport, policy=quick()) as sync:
        moves = [
            ("memory", {}),
            ("shm", moved),
            ("collective", {"nearby": False}),
            ("memory", {"in_process": True}),
        ]
        for step, (name, where) in enumerate(moves, start=1):
            placed(own[1], **where)
            assert sync.on_step_end(step, state(float(step))).require()  # type: ignore[union-attr]
            assert transport.name == name
            assert list(transport._made) == [name], "what is not used any more is kept"  # type: ignore[attr-defined]


def test_it_is_what_is_taken_when_none_is_named() -> None:
    """Without a word."""
    own = InThreads("e0", state(-1))
    with WeightSync([own.link], policy=quick()) as sync:
        assert isinstance(sync._transport, AutoTransport)
        assert sync.on_train_begin(state(1.0)).ok


def test_a_quorum_and_engines_elsewhere_do_not_go_together() -> None:
    """A collective cannot go on without one; it is said before a byte moves, with what to do."""
    own = [InThreads(name, state(-1)) for name in ("e0", "e1")]
    placed(own[1], in_process=False, nearby=False)
    policy = quick(on_engine_failure="quarantine", quorum=1)
    with Bench(own, "auto", policy=policy) as bench:
        result = bench.fails(SetupError, phase="Locked")
        assert "engine e1" in str(result.error)
        assert "not known to be on this host" in str(result.error)
        placed(own[1], nearby=True)
        bench.works()


def test_a_system_without_shared_memory_has_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be made is not chosen."""
    made: list[str] = []

    def make(name: str) -> Transport:
        made.append(name)
        if name == "shm":
            raise SetupError("there is none here")
        return CollectiveTransport() if name == "collective" else MemoryTransport()

    own = [placed(InThreads("e0", state(-1)), in_process=False, nearby=True)]
    with Bench(own, AutoTransport(make, needs_all=True)) as bench:
        bench.works()
        bench.works()
    assert made[:2] == ["shm", "collective"]


def test_nothing_that_is_not_needed_is_made() -> None:
    """An abort or a close without a round has nothing to do."""
    transport = AutoTransport(transport_for, needs_all=True)
    transport.abort()
    transport.close()
    assert transport.name == "auto"
    assert SharedMemoryTransport().name == "shm"

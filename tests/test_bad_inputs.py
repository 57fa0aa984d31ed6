"""What cannot work is refused in one clear line: before the lock is asked for, and before a byte moves.

No engine is told anything but asked who it is, nothing of the trainer's is prepared, and no round is opened.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from weightsync import LocalEngine, WeightSync, receiver_for
from weightsync.fsm.engine_table import AbortOrdered, Opened, Session
from weightsync.fsm.errors import (
    EngineAsleep,
    EngineError,
    EngineGone,
    EngineRefused,
    EngineTaken,
    EngineUnknown,
    SetupError,
    WeightSyncError,
    WorldMismatch,
)
from weightsync.fsm.ledger import StaleVersion, VersionBound
from weightsync.fsm.policy import Policy
from weightsync.fsm.receipt import Expectation
from weightsync.fsm.sampling import part_of_version
from weightsync.fsm.states import Disposition, EngineState, Outcome
from weightsync.handlers.lock import LocalLock
from weightsync.handlers.words import LINE, read_answer, say, word
from weightsync.testing.fakes import HANG, FakeExecutor, FakeWeights
from weightsync.testing.scene import Trainer, close_all

PLAN = Expectation("plan", 1, 1, 1)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every thread that a test has begun ends with it."""
    yield
    close_all()


class SpiedLock(LocalLock):
    """A lock that writes down what it is asked for."""

    def __init__(self) -> None:
        super().__init__(lease=2.0, epoch=0)
        self.asked: list[str] = []

    def request(self, *args: Any, **values: Any) -> Any:
        """A ticket."""
        self.asked.append("request")
        return super().request(*args, **values)

    def enter(self, *args: Any) -> Any:
        """A ticket, and an answer."""
        self.asked.append("enter")
        return super().enter(*args)


class Refusing:
    """A trainer that is to refuse a hand-over, and all who must not be disturbed by that."""

    def __init__(self, **values: Any) -> None:
        self.spy, self.executor = SpiedLock(), FakeExecutor("x")
        policy = Policy(**{"deadline": 3.0, "first_contact": 0.5, "lease": 2.0, **values})
        self.trainer = Trainer(policy, handlers=[self.executor], lock=self.spy)
        self.sync, (self.a, self.b) = self.trainer.sync, self.trainer.engines

    def refuses(
        self, kind: type[WeightSyncError], text: str, hand_over: Callable[[], object] | None = None
    ) -> WeightSyncError:
        """The error; ``text`` is all of it."""
        before = self._disturbed()
        with pytest.raises(kind) as caught:
            (hand_over or (lambda: self.trainer.hand_over(1, FakeWeights(1))))()
        assert type(caught.value) is kind
        assert str(caught.value) == text
        assert "\n" not in text
        assert self._disturbed() == before
        return caught.value

    def _disturbed(self) -> tuple[object, ...]:
        words = [[said for said in engine.words if said != "hello"] for engine in (self.a, self.b)]
        return (
            list(self.spy.asked), words, list(self.trainer.transport.called), list(self.executor.story),
            [record.event for record in self.trainer.records],
        )  # fmt: skip


@pytest.fixture
def refusing() -> Refusing:
    """With a policy that wants every engine."""
    return Refusing()


def in_session(engine: Any, epoch: int) -> Session:
    """Somebody else has opened a session with this engine."""
    session = Session("theirs", epoch, 3)
    engine.machine.fire(Opened(session, PLAN))
    return session


# -- engines ----------------------------------------------------------------------------------------------


def test_an_engine_that_is_not_there(refusing: Refusing) -> None:
    """Never reached, it is no engine that was lost: whoever set it up is told."""
    refusing.b.alive = False
    error = refusing.refuses(EngineUnknown, "engine b was never reached: EngineGone: engine b is dead")
    assert isinstance(error.__cause__, EngineGone)
    assert isinstance(error, SetupError)
    assert isinstance(error, EngineError)
    refusing.b.alive = True
    assert refusing.trainer.hand_over(2, FakeWeights(2)).ok


def test_an_engine_that_never_answers(refusing: Refusing) -> None:
    """For as long as a first contact may take, and no longer."""
    refusing.b.bad["hello"] = HANG
    refusing.refuses(
        EngineUnknown,
        "engine b was never reached: EngineSilent: engine b did not say hello within 0.5 s; its actor may "
        "still be starting: raise Policy(first_contact=...); or Ray has no room for it",
    )


def test_a_link_that_leads_to_another_engine(refusing: Refusing) -> None:
    """Both names are said."""
    refusing.b.hello = refusing.a.hello  # type: ignore[method-assign]
    refusing.refuses(EngineUnknown, "the link to engine b leads to one that calls itself a")


def test_an_engine_that_is_asleep(refusing: Refusing) -> None:
    """There is nothing to write to; awake, it takes part."""
    refusing.b.asleep = True
    refusing.refuses(EngineAsleep, "engine b is asleep: wake it before weights are handed over")
    assert refusing.sync.servable() == {}
    refusing.b.asleep = False
    assert refusing.trainer.hand_over(2, FakeWeights(2)).ok
    assert refusing.sync.servable() == {"a": 0, "b": 0}


def test_an_engine_that_falls_asleep_between_rounds(refusing: Refusing) -> None:
    """Nobody asks a certain engine before the lock: it refuses its session, and no bucket is sent."""
    refusing.trainer.hand_over(1, FakeWeights(1))
    refusing.b.asleep = True
    sent = refusing.trainer.transport.called.count("broadcast")
    result = refusing.trainer.hand_over(2, FakeWeights(2))
    assert isinstance(result.error, EngineAsleep)
    assert (result.culprit, result.failed_in) == ("b", "Locked")
    assert refusing.trainer.transport.called.count("broadcast") == sent
    assert refusing.a.content == FakeWeights(1).content
    refusing.refuses(EngineAsleep, "engine b is asleep: wake it before weights are handed over")
    refusing.b.asleep = False
    assert refusing.trainer.hand_over(3, FakeWeights(3)).ok


@pytest.mark.parametrize("over", [False, True], ids=["open", "over"])
def test_an_engine_in_the_hands_of_a_trainer_with_another_lock(refusing: Refusing, over: bool) -> None:
    """Its epochs are above ours, so it would refuse whatever is said to it under this lock."""
    session = in_session(refusing.b, 1000)
    if over:
        refusing.b.machine.fire(AbortOrdered(session))
    refusing.refuses(
        EngineTaken,
        "engine b has seen epoch 1000, of a trainer with another lock, whose session may be open; this lock "
        "is at epoch 0: use one lock for all trainers. If that trainer is gone, retire this lock "
        "(RayLock.retire): the next one is above",
    )
    assert refusing.b.machine.facts.session == (None if over else session)


def test_the_open_session_of_a_trainer_that_died_is_no_obstacle() -> None:
    """It had this lock: its epoch is below ours, and ours supersedes it."""
    trainer = Trainer(lock=LocalLock(lease=2.0, epoch=7))
    in_session(trainer.engines[1], 7)
    assert trainer.hand_over(1, FakeWeights(1)).ok


def test_an_engine_with_another_number_of_ranks_than_was_declared(refusing: Refusing) -> None:
    """Receipts of the wrong number of ranks would prove nothing."""
    refusing.b.ranks = 2
    refusing.refuses(WorldMismatch, "engine b says it has 1 ranks, but 2 were declared: correct one of them")
    refusing.b.ranks = 1
    assert refusing.trainer.hand_over(2, FakeWeights(2)).ok


@pytest.mark.parametrize("what", ["dead", "asleep", "taken", "ranks"])
def test_with_a_quorum_the_others_go_on(what: str) -> None:
    """The one that cannot be used is lost from the beginning, by name, and is said no word to."""
    refusing = Refusing(on_engine_failure="quarantine", quorum=1)
    match what:
        case "dead":
            refusing.b.alive = False
        case "asleep":
            refusing.b.asleep = True
        case "taken":
            in_session(refusing.b, 1000)
        case "ranks":
            refusing.b.ranks = 2
    result = refusing.trainer.hand_over(1, FakeWeights(1))
    assert result.outcome is Outcome.partial
    assert result.engines[1].disposition is Disposition.quarantined
    assert isinstance(result.engines[1].error, EngineGone if what == "dead" else EngineRefused)
    assert set(refusing.b.words) <= {"hello"}


def test_every_form_is_refused_alike(refusing: Refusing) -> None:
    """Waited for, overlapped, awaited, and with more attempts than one."""
    text = "engine b is asleep: wake it before weights are handed over"
    weights = FakeWeights(1)
    for each in (refusing, Refusing(attempts=3)):
        each.b.asleep = True
        ways: list[Callable[[], object]] = [
            lambda sync=each.sync: sync.on_train_begin(weights),  # type: ignore[misc]
            lambda sync=each.sync: sync.begin(1, weights, snapshot=False).wait(),  # type: ignore[misc]
            lambda sync=each.sync: asyncio.run(sync.round(1, weights)),  # type: ignore[misc]
        ]
        for hand_over in ways:
            each.refuses(EngineAsleep, text, hand_over)


# -- versions ---------------------------------------------------------------------------------------------


def test_a_version_that_falls(refusing: Refusing) -> None:
    """Engines may hold a higher one."""
    refusing.sync.begin(1, FakeWeights(1), version=5, snapshot=False).wait()
    refusing.refuses(
        StaleVersion, "version 4 is too low: 5 is published; use 5 with its bytes or go higher",
        lambda: refusing.sync.begin(2, FakeWeights(2), version=4, snapshot=False).wait(),
    )  # fmt: skip


def test_a_number_that_stands_for_other_bytes(refusing: Refusing) -> None:
    """Both digests are said."""
    refusing.sync.begin(1, FakeWeights(1), version=5, snapshot=False).wait()
    part = part_of_version(5, 32)
    known, other = FakeWeights(1).digest(part), FakeWeights(2).digest(part)
    refusing.refuses(
        VersionBound,
        f"version 5 stands for the bytes {known}, not {other}; give these a higher number",
        lambda: refusing.sync.begin(2, FakeWeights(2), version=5, snapshot=False).wait(),
    )


# -- the real engine side ---------------------------------------------------------------------------------


def test_a_real_engine_that_sleeps_says_so_and_refuses_a_session() -> None:
    """Whoever asks first: the trainer before its round, or the round."""
    sleeping = [True]
    receiver = receiver_for({"w": torch.zeros(3)}, "e0", asleep=lambda: sleeping[0])
    with WeightSync([LocalEngine(receiver)], policy=Policy(deadline=5.0)) as sync:
        with pytest.raises(EngineAsleep, match="e0 is asleep"):
            sync.on_train_begin({"w": torch.ones(3)})
        sleeping[0] = False
        assert sync.on_train_begin({"w": torch.ones(3)}).ok
        sleeping[0] = True
        result = sync.on_step_end(1, {"w": torch.ones(3)})
        assert result is not None
        assert isinstance(result.error, EngineAsleep)
        assert not receiver.gate.paused
        assert receiver.state is EngineState.Serving


def test_what_a_hello_says_travels_in_words() -> None:
    """Also that it sleeps, which epoch it has seen, and which was that of its last commit."""
    sleeping = [False]
    receiver = receiver_for({"w": torch.zeros(3)}, "e0", asleep=lambda: sleeping[0])
    assert receiver.status.committed == 0
    with WeightSync([LocalEngine(receiver)], policy=Policy(deadline=5.0)) as sync:
        result = sync.on_train_begin({"w": torch.ones(3)})
    sleeping[0] = True
    told: Any = say(receiver, word("hello", None))
    status = receiver.status
    assert read_answer("hello", told) == status
    assert (status.asleep, status.epoch, status.committed) == (True, result.epoch, result.epoch)
    assert told[LINE] is None


def test_a_hello_of_an_engine_of_an_older_version_is_understood() -> None:
    """It says nothing of its last commit, with a line and without; an older trainer finds the line here."""
    receiver = receiver_for({"w": torch.zeros(3)}, "e0")
    told: Any = say(receiver, word("hello", None))
    for older in (told[:LINE], [*told[:LINE], ["a", "line"]]):
        assert read_answer("hello", older) == replace(receiver.status, committed=None)


def test_declared_ranks_are_compared_by_every_link() -> None:
    """A link in this process as well."""
    link = LocalEngine(receiver_for({"w": torch.zeros(3)}, "e0"), ranks=2)
    with (
        WeightSync([link], policy=Policy(deadline=5.0)) as sync,
        pytest.raises(WorldMismatch, match="2 were declared"),
    ):
        sync.on_train_begin({"w": torch.ones(3)})


def test_a_keeper_that_cannot_say_its_epoch_is_left_to_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status is worth no refusal; what the engine refuses, it refuses under the lock."""
    trainer = Trainer()
    in_session(trainer.engines[1], 1000)
    unable: Future[Any] = Future()
    monkeypatch.setattr(trainer.lock, "status", lambda: unable.result(0))
    result = trainer.hand_over(1, FakeWeights(1))
    assert result.failed_in == "Locked"
    assert result.culprit == "b"

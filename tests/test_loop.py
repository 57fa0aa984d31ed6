"""The loop: one round in real time. Whatever raises, hangs or comes late, the round ends in Released."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from weightsync.fsm.policy import Policy
from weightsync.fsm.record import Record
from weightsync.fsm.states import Disposition, Outcome
from weightsync.handlers.workers import Workers
from weightsync.testing.fakes import FakeTransport
from weightsync.testing.scene import Scene, close_all

QUICK = Policy(deadline=3.0, lease=2.0)
GO_ON = Policy(deadline=3.0, lease=2.0, on_engine_failure="quarantine", quorum=1)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every thread that a test has begun ends with it."""
    yield
    close_all()


@pytest.fixture
def scene() -> Scene:
    """A round of two engines that has not begun."""
    return Scene()


def test_a_good_round_hands_over_every_byte(scene: Scene) -> None:
    """Each engine holds what the trainer holds; executors had their good end; observers heard it all."""
    result = scene.run()
    assert (result.outcome, result.published, result.unclean) == (Outcome.complete, "yes", False)
    assert [engine.content for engine in scene.engines] == [scene.weights.content] * 2
    assert scene.story == ["x.prepare", "y.prepare", "x.clean", "y.clean"]
    assert scene.ledger.version() == 0
    assert tuple(scene.records) == scene.loop.driver.round.records()


# -- raise in each place ------------------------------------------------------------------------------------

TRANSPORT = ("open", "bucket 0", "bucket 1", "bucket 2", "all sent", "collect")


@pytest.mark.parametrize("who", ["x", "y"])
@pytest.mark.parametrize("what", ["prepare", "clean"])
def test_an_executor_that_raises_fails_the_round(scene: Scene, who: str, what: str) -> None:
    """Failed, then Released; those before it are undone in reverse; the error is the very one."""
    error = OSError(f"{what} of {who}")
    scene.executors["xy".index(who)].bad[what] = error
    result = scene.run()
    assert result.error is error
    assert "Failed" in result.path
    undone = [entry for entry in scene.story if entry.endswith("undo")]
    if what == "prepare":
        assert undone == (["x.undo"] if who == "y" else [])
        assert scene.engines[0].words == ["abort"]
    else:
        assert undone == (["y.undo", "x.undo"] if who == "x" else ["y.undo"])
        assert result.published == "yes"


@pytest.mark.parametrize("what", ["materialize", "plan", "digest"])
def test_weights_that_cannot_be_read_fail_the_round_before_a_byte(scene: Scene, what: str) -> None:
    """The trainer's own iterator raises: the caller gets that error, and the engines were never paused."""
    error = ValueError(what)
    scene.weights.bad[what] = error
    result = scene.run()
    assert result.error is error
    assert (result.failed_in, result.published) == ("Locked", "no")
    assert "open" not in scene.engines[0].words


@pytest.mark.parametrize("what", TRANSPORT)
def test_a_transport_that_raises_fails_the_round(scene: Scene, what: str) -> None:
    """In every method, at every bucket: the engines keep the old version, the undos run."""
    error = OSError(what)
    scene.transport.bad[what] = error
    result = scene.run()
    assert result.error is error
    assert result.serving(Disposition.serving_old) == ("a", "b")
    assert scene.story[-2:] == ["y.undo", "x.undo"]
    assert "abort" in scene.transport.called


@pytest.mark.parametrize("what", ["clean", "abort"])
def test_an_error_while_putting_back_never_masks_the_first(scene: Scene, what: str) -> None:
    """It becomes a note, and the result is unclean."""
    first, second = OSError("bucket 1"), OSError(what)
    scene.transport.bad[what] = second
    if what == "abort":
        scene.transport.bad["bucket 1"] = first
    result = scene.run()
    assert result.error is (first if what == "abort" else second)
    assert result.unclean is (what == "abort")
    if what == "abort":
        assert any("OSError: abort" in note for note in first.__notes__)


def test_an_undo_that_raises_is_noted_and_the_others_run(scene: Scene) -> None:
    """Both errors are told, the first one is the error."""
    first = OSError("bucket 1")
    scene.transport.bad["bucket 1"] = first
    scene.executors[1].bad["undo"] = OSError("undo of y")
    result = scene.run()
    assert result.error is first
    assert result.unclean
    assert scene.story[-2:] == ["y.undo", "x.undo"]
    assert any("undo of y" in note for note in result.notes)


@pytest.mark.parametrize("word", ["open", "commit", "abort", "resume", "bucket 1"])
def test_an_engine_that_raises_fails_the_round_or_is_quarantined(word: str) -> None:
    """By name, with its error; with a quorum the other one has the new version."""
    for policy in (QUICK, GO_ON):
        scene, error = Scene(policy), RuntimeError(word)
        scene.engines[0].bad[word] = error
        if word == "abort":
            scene.transport.bad["bucket 1"] = OSError("bucket 1")
        result = scene.run()
        assert result.engines[0].disposition is Disposition.quarantined
        if policy is QUICK:
            assert (result.error is error) is (word != "abort")
            assert result.outcome is Outcome.failed
        elif word != "abort":
            assert result.outcome is Outcome.partial
            assert scene.engines[1].content == scene.weights.content


def test_an_observer_that_raises_is_disabled_and_the_round_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """With one line; the next round does not hear of it again."""

    def broken(record: Record) -> None:
        raise ValueError("disk full")

    with caplog.at_level(logging.ERROR, logger="weightsync"):
        scene = Scene(observers=(broken,))
        assert scene.run().ok
    assert [record.message for record in caplog.records] == [
        "observer function is disabled: it raised ValueError: disk full"
    ]


class Waking(FakeTransport):
    """A transport whose waker raises, on the thread that moves the round."""

    def broadcast(self, plan: Any, weights: Any, port: Any) -> None:
        """Register it, then send."""
        port.on_change(self._raise)
        super().broadcast(plan, weights, port)

    def _raise(self) -> None:
        raise OSError("in the waker")


def test_a_waker_that_raises_does_not_end_the_round(scene: Scene) -> None:
    """It is run by the loop: its error is the transport's at worst."""
    scene.transport = Waking()
    scene.loop = scene.next_round()
    result = scene.run()
    assert result.path[-1] == "Released"


def test_a_round_whose_work_finds_no_thread_fails_like_any_other(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system is out of threads for a moment; the lock is given back when it has some again."""
    real, left = Workers.submit, [2]

    def submit(self: Workers, work: Any, *args: Any) -> Any:
        if getattr(work, "__name__", "") == "_transport_open" and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        return real(self, work, *args)

    monkeypatch.setattr(Workers, "submit", submit)
    result = scene.run()
    assert str(result.error) == "can't start new thread"
    assert result.failed_in == "Locked"


def test_a_round_that_failed_is_followed_by_one_that_works(scene: Scene) -> None:
    """The same parts, the same engines: nothing of the failed round is in the way."""
    scene.transport.bad["bucket 1"] = OSError("bucket 1")
    assert not scene.run().ok
    scene.records.clear()
    scene.loop = scene.next_round()
    assert scene.run().outcome is Outcome.complete
    assert [engine.content for engine in scene.engines] == [scene.weights.content] * 2

"""Results: what a caller gets, what it says in one line, and what ``require`` makes of it."""

from dataclasses import replace
from typing import Any

import pytest

from weightsync.fsm import events as e
from weightsync.fsm.calls import Act
from weightsync.fsm.errors import EngineError, RoundError, SyncFailed
from weightsync.fsm.policy import Policy
from weightsync.fsm.results import EngineRow, RoundResult
from weightsync.fsm.states import Disposition, Outcome
from weightsync.fsm.tally import Tally
from weightsync.testing.simulation import Fault, Injected, Simulation

ROW = EngineRow("e0", "0", Disposition.serving_new, 4, 2, 64, (), 0.5)
GOOD = RoundResult(
    "r", 3, 4, 1, 1, Outcome.complete, "yes", (ROW,), ("Idle", "Released"), {"Idle": 0.1},
)  # fmt: skip


def run(*faults: Fault, **options: Any) -> RoundResult:
    """The result of a simulated round."""
    return Simulation(faults=faults, **options).run()


def test_a_good_result_is_what_require_gives_back() -> None:
    """Nothing is raised, and the line is short."""
    assert GOOD.require() is GOOD
    assert GOOD.summary() == "round r: version 4 complete on 1 engines"


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ({}, True),
        ({"outcome": Outcome.partial}, True),
        ({"outcome": Outcome.failed}, False),
        ({"error": ValueError("later")}, False),
        ({"published": "unknown", "outcome": Outcome.failed}, False),
    ],
)
def test_ok_means_published_served_and_without_an_error(change: dict[str, Any], ok: bool) -> None:
    """A partial round under a quorum is what was asked for; a complete one with an error needs a look."""
    assert replace(GOOD, **change).ok is ok


def test_require_raises_with_the_very_error_as_its_cause() -> None:
    """The message names round, state, engine and bucket; later errors are its notes."""
    error = ValueError("broken pipe")
    result = replace(
        GOOD, outcome=Outcome.failed, published="no", error=error, culprit="e0", bucket=2,
        failed_in="Broadcasting", notes=("later, undo of x: OSError: disk",),
    )  # fmt: skip
    with pytest.raises(SyncFailed) as caught:
        result.require()
    assert caught.value.__cause__ is error
    assert str(caught.value) == (
        "round r (step 3, version 4, published: no) failed in Broadcasting, engine e0, bucket 2: "
        "ValueError: broken pipe [e0 serving_new]"
    )
    assert caught.value.__notes__ == ["later, undo of x: OSError: disk"]


def test_a_failure_nobody_is_to_blame_for_still_has_a_line() -> None:
    """No engine, no bucket, no state: what is unknown is left out."""
    result = replace(GOOD, outcome=Outcome.failed, published="unknown")
    assert result.summary() == "round r (step 3, version 4, published: unknown) failed [e0 serving_new]"


def test_a_result_prints_as_one_line_for_a_log() -> None:
    """Number, outcome, path and seconds; a partial one says without whom."""
    assert str(GOOD) == "round r (step 3): version 4 complete by Idle > Released in 0.1 s"
    lost = replace(ROW, engine="e1", disposition=Disposition.quarantined)
    partial = replace(GOOD, outcome=Outcome.partial, engines=(ROW, lost))
    assert str(partial) == "round r (step 3): version 4 partial without e1 by Idle > Released in 0.1 s"


def test_a_failed_result_prints_its_culprit_in_one_line() -> None:
    """Of an error of many lines, the first one; a round that had all served says so."""
    failed = replace(
        GOOD, outcome=Outcome.failed, error=ValueError("broken\npipe"), culprit="e0", bucket=2,
        failed_in="Broadcasting",
    )  # fmt: skip
    assert str(failed) == (
        "round r (step 3): version 4 failed in Broadcasting, engine e0, bucket 2 after 0.1 s: "
        "ValueError: broken"
    )
    late = replace(GOOD, error=OSError("disk"), failed_in="Cleaning")
    assert str(late) == "round r (step 3): version 4 complete, trouble in Cleaning after 0.1 s: OSError: disk"


def test_the_outcomes_read_well() -> None:
    """Their values are for people: each says by itself what it means."""
    assert [outcome.value.partition(",")[0] for outcome in Outcome] == [
        "published", "published", "not known to be published",
        "there was no round: newer weights took their place",
    ]  # fmt: skip


def test_engines_can_be_asked_for_by_what_they_are() -> None:
    """The longest pause is the round's."""
    other = replace(ROW, engine="e1", disposition=Disposition.quarantined, pause_seconds=2.0)
    result = replace(GOOD, engines=(ROW, other))
    assert result.serving(Disposition.serving_new) == ("e0",)
    assert result.serving(Disposition.quarantined) == ("e1",)
    assert result.pause_seconds == 2.0
    assert replace(GOOD, engines=()).pause_seconds == 0.0


# -- the tally ------------------------------------------------------------------------------------------


def test_a_round_that_is_not_over_has_no_result() -> None:
    """There is nothing to read before Released."""
    simulation = Simulation()
    with pytest.raises(RoundError, match="its result is not decided"):
        simulation.driver.result()


def test_a_good_round_tells_what_each_engine_proved() -> None:
    """Tensors, bytes, receipts, the pause, and the time in each state but the last."""
    result = run(buckets=4)
    assert (result.outcome, result.published, result.ok) == (Outcome.complete, "yes", True)
    assert list(result.seconds) == list(result.path[:-1])
    assert all(seconds > 0 for seconds in result.seconds.values())
    for row in result.engines:
        assert (row.disposition, row.version, row.tensors, row.bytes) == (
            Disposition.serving_new, result.version, 2, 256,
        )  # fmt: skip
        assert [receipt.engine for receipt in row.receipts] == [row.engine]
        assert 0 < row.pause_seconds < sum(result.seconds.values())
        assert row.error is None


def test_an_engine_that_never_serves_again_is_paused_to_the_end() -> None:
    """Its pause goes on until the round is over."""
    simulation = Simulation(
        faults=[Fault(Act.resume, "die", "e1")],
        policy=Policy(deadline=4.0, on_engine_failure="quarantine", quorum=1),
    )
    result = simulation.run()
    good, bad = result.engines
    assert (good.disposition, bad.disposition) == (Disposition.serving_new, Disposition.quarantined)
    assert good.pause_seconds < bad.pause_seconds
    assert result.outcome is Outcome.partial


def test_the_first_error_is_the_very_object_and_later_ones_are_its_notes() -> None:
    """Undo and release fail after the transport did: both stand in the notes, neither in its place."""
    result = run(
        Fault(Act.broadcast, "raise", bucket=1), Fault(Act.undo, "raise"), Fault(Act.release, "raise")
    )
    assert isinstance(result.error, Injected)
    assert str(result.error) == "injected into bucket 1"
    assert any("undo" in note for note in result.notes)
    assert any("UnlockFailed" in note for note in result.notes)
    assert set(result.error.__notes__) == set(result.notes)
    assert (result.bucket, result.failed_in, result.unclean) == (1, "Broadcasting", True)


def test_the_bucket_is_the_errors_own_word_if_it_has_one() -> None:
    """An engine that failed at a bucket says so, whatever the sender was at by then."""
    simulation = Simulation(buckets=4)
    error = EngineError("in the third")
    error.bucket = 2  # type: ignore[attr-defined]
    lost = e.EngineLost(min(simulation.round.facts.roster), error)
    simulation.at(0.02, lambda: simulation.hear(lost))
    result = simulation.run()
    assert (result.bucket, result.culprit, result.error) == (2, "e0", error)


def test_else_the_bucket_is_the_one_that_was_being_sent() -> None:
    """After the last one, and in every other state, there is none."""
    assert run(Fault(Act.broadcast, "raise", bucket=0)).bucket == 0
    assert run(Fault(Act.broadcast, "raise", bucket=2)).bucket == 2
    assert run(Fault(Act.broadcast, "raise", bucket=3)).bucket is None
    assert run(Fault(Act.collect, "raise")).bucket is None


def test_a_bad_receipt_is_blamed_with_what_is_wrong_about_it() -> None:
    """Also when a quorum goes on without the engine; what such a receipt claims is not counted as proved."""
    failed = run(Fault(Act.broadcast, "corrupt", "e1"))
    assert (failed.failed_in, failed.culprit) == ("Awaiting", "e1")
    assert "digest is 'other bytes'" in str(failed.error)
    policy = Policy(deadline=4.0, on_engine_failure="quarantine", quorum=1)
    partial = run(Fault(Act.broadcast, "corrupt", "e1"), policy=policy)
    bad = partial.engines[1]
    assert (partial.outcome, partial.error) == (Outcome.partial, None)
    assert (bad.disposition, bad.receipts, bad.bytes) == (Disposition.quarantined, (), 0)
    assert "digest is 'other bytes'" in str(bad.error)


def test_too_few_engines_are_blamed_on_the_first_that_was_lost() -> None:
    """The lock was granted and given back; the error is the engine's, not nothing."""
    before = Simulation(faults=[Fault(Act.commit, "die", "e1")])
    before.run()
    result = Simulation(earlier=before).run()
    assert result.path == ("Idle", "Failed", "Released")
    assert result.culprit == "e1"
    assert "e1 did not say hello" in str(result.error)


def test_a_publication_that_nobody_answers_for_is_unknown() -> None:
    """The ledger is gone, and so is the question: it has to be taken for published."""
    result = run(Fault(Act.publish, "die"))
    assert (result.published, result.unclean, result.outcome) == ("unknown", True, Outcome.failed)


def test_a_later_error_is_noted_once() -> None:
    """The same line again says nothing new; without a first error it is kept in the result alone."""
    tally, first = Tally(), ValueError("first")
    tally.later(first, OSError("disk"), "undo of x")
    tally.later(first, OSError("disk"), "undo of x")
    tally.later(None, OSError("net"), "release")
    assert first.__notes__ == ["later, undo of x: OSError: disk"]
    assert tally.notes == ["later, undo of x: OSError: disk", "later, release: OSError: net"]

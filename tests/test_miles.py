"""The acceptance tests of the lock's life, after the reviewed tests of radixark/miles#1967, in our terms.

There, a lock around each bucket leaked when a sync failed: the next one span for ever, and nobody saw the
first error. Each test here names the upstream test it stands for. ``test_miles_mutants.py`` brings the faults
back into the product, one by one, and expects the very checks of this file to fail: they are in
``casekit/miles.py``.
"""

import io

import pytest
from tqdm import tqdm

from casekit import miles
from casekit.wrapped import Bar

pytestmark = pytest.mark.timeout(60)

TRANSPORTS = pytest.mark.parametrize("transport", ["memory", "collective", "shm"])


@TRANSPORTS
def test_a1_a_good_round(transport: str) -> None:
    """Upstream: test_success_path_releases_lock_and_clears_tensors.

    The path is the good one; the very tensors are sent; the very list is emptied; the bar moves once, by 1;
    the grant is given back once.
    """
    bar = Bar()
    miles.good_round(transport, bar)
    assert bar.moves == [1]


def test_a1_a_bar_that_counts_as_false() -> None:
    """Upstream asks ``if pbar``; a tqdm without a total is false, and stood still in production."""
    with tqdm(total=0, file=io.StringIO()) as bar:
        miles.good_round("memory", bar)
        assert bar.n == 1


def test_a2_the_lock_is_waited_for() -> None:
    """Upstream: test_lock_contention_is_polled_until_acquired.

    The round stays in Idle, is told at once who holds the lock, asks nothing while it waits, and goes on
    when the lock is given back.
    """
    miles.contention()


def test_a2_the_waiting_ends_at_the_deadline() -> None:
    """Beyond upstream, which waits for ever: the ticket is cancelled, nothing held, the holder named."""
    miles.contention_without_end()


def test_a2_a_grant_that_crosses_the_deadline_is_handed_back() -> None:
    """The keeper grants while the round gives up: nobody may keep that grant."""
    miles.crossing_grant()


@TRANSPORTS
@pytest.mark.parametrize("method", ["open", "broadcast", "collect"])
def test_a3_the_transport_fails(transport: str, method: str) -> None:
    """Upstream: test_broadcast_failure_releases_lock_and_propagates.

    The very error is the cause; the lock is free; the tensors are kept; neither bar nor version moves.
    """
    miles.transport_failure(transport, method)


@TRANSPORTS
@pytest.mark.parametrize("point", ["apply", "release", "commit"])
def test_a4_an_engine_fails(transport: str, point: str) -> None:
    """Upstream: test_engine_failure_on_refs_releases_lock_and_propagates.

    As before; and what its sibling was doing has ended before the lock is given back.
    """
    miles.engine_failure(transport, point)


def test_a4_an_engine_proves_something_else() -> None:
    """Upstream looks at no result: here an engine that holds other bytes is lost, and fails the round."""
    miles.wrong_bytes()


def test_a4_a_sibling_that_does_not_stop_is_fenced() -> None:
    """The lock is not kept for an engine that hangs; but then nobody is sent to that engine."""
    miles.hanging_sibling()


@TRANSPORTS
@pytest.mark.parametrize("point", ["apply", "release", "commit"])
def test_a5_a_round_after_a_failed_one(transport: str, point: str) -> None:
    """Upstream: test_weight_sync_succeeds_after_a_failed_one.

    The lock is free before the next round begins; that works, with the kept tensors; each grant is given back
    exactly once.
    """
    miles.retry(transport, point)


def test_a6_the_keeper_dies() -> None:
    """Upstream, the error of the release replaces the first one. Here it is its note.

    The round stays in Failed until the lease, which nobody renews, is over: before that the lock may be held.
    """
    miles.dead_keeper()


def test_a6_the_keeper_refuses_for_a_while() -> None:
    """The release is asked for again, and the round is over when it is answered."""
    miles.refusing_keeper()


def test_a6_the_answer_to_the_release_is_lost() -> None:
    """The lock was given back, but nobody knows: asking again proves it."""
    miles.lost_answer()


def test_a6_the_release_of_a_good_round_fails() -> None:
    """What was handed over counts as such; the error is raised all the same."""
    miles.release_fails_after_success()

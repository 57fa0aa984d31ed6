"""The age of a sample is counted from what the ledger says, and is never negative."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync import SampleVersions, Segment, VersionAhead, VersionUnknown
from weightsync.fsm.errors import LedgerError, SetupError
from weightsync.fsm.ledger import Ledger


def segment(began: int | None, ended: int | None = -1, engine: str = "e0") -> Segment:
    """One segment; it ended with the version it began with, unless another is given."""
    return Segment(engine, "life", began, began if ended == -1 else ended)


def sample(*versions: int | None) -> SampleVersions:
    """A sample of one segment for each version."""
    return SampleVersions(tuple(segment(each) for each in versions))


PUBLISHED = Ledger().publish(5, "bytes", 1)


def test_it_is_counted_from_the_published_version_to_the_oldest_part() -> None:
    """Version 0 is a version like any other."""
    assert sample(5).staleness(PUBLISHED) == 0
    assert sample(3, 4, 5).staleness(PUBLISHED) == 2
    assert sample(0).staleness(PUBLISHED) == 5
    assert sample(0).staleness(Ledger().publish(0, "bytes", 1)) == 0
    assert (sample(3, 4).oldest, sample(3, 4).newest, sample(0).oldest) == (3, 4, 0)


def test_a_version_that_engines_hold_and_nobody_published_is_no_negative_age() -> None:
    """It is bound: the publication failed after engines had committed, or nobody knows."""
    bound = PUBLISHED.bind(7, "others", 2)
    assert sample(7).staleness(bound) == 0
    assert sample(5, 7).staleness(bound) == 2
    assert sample(5).staleness(bound) == 0, "what nobody was seen to have makes nobody older"


@pytest.mark.parametrize("ledger", [PUBLISHED, Ledger()], ids=["another", "lost"])
def test_a_version_that_the_ledger_has_never_heard_of_is_an_error(ledger: Ledger) -> None:
    """A trainer that took over without the ledger would take the oldest samples for the freshest."""
    with pytest.raises(VersionAhead) as caught:
        sample(3, 57).staleness(ledger)
    assert "version 57 of engine e0 is newer than any in the ledger" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, LedgerError)


def test_weights_without_a_version_have_no_age() -> None:
    """Before the first round, or after a loss of weights in the middle of a segment."""
    with pytest.raises(VersionUnknown, match="when a segment began"):
        sample(5, None).staleness(PUBLISHED)
    with pytest.raises(VersionUnknown, match="when a segment ended"):
        SampleVersions((segment(5, None),)).staleness(PUBLISHED)
    with pytest.raises(VersionUnknown, match="no segments"):
        _ = SampleVersions().oldest
    with pytest.raises(VersionUnknown):
        _ = sample(None).newest


def test_whole_and_mixed() -> None:
    """A segment is whole if one version was in force; a sample is mixed if there was more than one."""
    assert segment(4).whole
    assert not segment(4, None).whole
    assert not segment(None).whole
    assert not sample(4, 4).mixed
    assert sample(4, 5).mixed
    assert SampleVersions((segment(4, None),)).mixed
    assert str(segment(4, None)) == "e0: version 4 to none"


def test_what_is_no_segment_is_refused() -> None:
    """Where it is handed over."""
    with pytest.raises(SetupError, match=r"Segment\(began='default'\)"):
        Segment("e0", "life", "default", None)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match=r"SampleVersions\(segments=5\)"):
        SampleVersions((5,))  # type: ignore[arg-type]


def test_it_travels() -> None:
    """To whoever collects samples, and through a restart of whoever made them."""
    made = SampleVersions().plus(segment(3)).plus(segment(4, engine="e1"))
    assert pickle.loads(pickle.dumps(made)) == made
    assert [each.engine for each in made.segments] == ["e0", "e1"]


NUMBERS = st.integers(0, 6)
STEPS = st.lists(st.tuples(st.sampled_from(["bind", "publish", "new trainer"]), NUMBERS), max_size=12)


@given(STEPS, st.lists(NUMBERS, min_size=1, max_size=4))
def test_it_is_never_negative_whatever_the_ledger_has_been_through(
    steps: list[tuple[str, int]], versions: list[int]
) -> None:
    """What engines can have held is in the ledger; anything else is an error and not a number."""
    ledger, epoch, held = Ledger(), 0, set()
    for word, number in steps:
        epoch += 1
        try:
            if word == "bind":
                ledger = ledger.bind(number, f"digest {number}", epoch)
            elif word == "publish":
                ledger = ledger.publish(number, f"digest {number}", epoch)
            else:
                ledger = Ledger.from_json(ledger.to_json())
        except LedgerError:
            continue
        held |= {number} if word != "new trainer" else set()
    try:
        age = sample(*versions).staleness(ledger)
    except VersionAhead:
        assert max(versions) not in held
    else:
        assert age >= 0
        assert age >= max(versions) - min(versions)
        assert age >= (ledger.version or 0) - min(versions)

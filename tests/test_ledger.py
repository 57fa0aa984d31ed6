"""The ledger as a value: versions never fall, numbers keep their bytes, late changes are refused."""

import copy
import json
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.fsm.ledger import Ledger, LedgerCorrupt, LedgerError, StaleVersion, VersionBound

PUBLISHED = Ledger().bind(3, "three", 7).publish(3, "three", 7)


def test_an_empty_ledger_has_published_nothing() -> None:
    """None is not 0: version 0 is a real one, and a first version may be any."""
    ledger = Ledger()
    assert (ledger.version, ledger.digest, ledger.newest, dict(ledger.bound)) == (None, None, None, {})
    assert (ledger.epoch, ledger.fence) == (0, 0)
    ledger.admit(0, "zero")
    ledger.admit(41, "forty-one")
    assert ledger.publish(0, "zero", 1).version == 0


def test_zero_is_published_like_any_other_number() -> None:
    """After version 0 other bytes need a higher number, and 0 may catch up."""
    ledger = Ledger().publish(0, "zero", 1)
    ledger.admit(0, "zero")
    with pytest.raises(VersionBound):
        ledger.admit(0, "other")
    ledger.admit(1, "other")


@pytest.mark.parametrize("version", [-1, True, 1.0, "1", None])
def test_a_version_is_a_whole_number(version: int) -> None:
    """Anything else is refused before the lock is taken."""
    with pytest.raises(LedgerError, match="a version is a whole number from 0 up"):
        Ledger().admit(version, "digest")


def test_a_digest_is_not_empty() -> None:
    """No digest means no promise about the bytes."""
    with pytest.raises(LedgerError, match="version 1 has an empty digest"):
        Ledger().admit(1, "")


def test_a_lower_version_is_refused() -> None:
    """The message says what is published and what to use."""
    with pytest.raises(StaleVersion, match="version 2 is too low: 3 is published; use 3 with its bytes or"):
        PUBLISHED.admit(2, "two")


def test_the_published_version_may_catch_up_with_the_same_bytes() -> None:
    """A round for engines that missed it publishes it again, with its own epoch."""
    PUBLISHED.admit(3, "three")
    again = PUBLISHED.bind(3, "three", 9).publish(3, "three", 9)
    assert (again.version, again.digest, again.epoch) == (3, "three", 9)


def test_the_published_version_is_refused_with_other_bytes() -> None:
    """One number, one set of bytes; both digests are named."""
    with pytest.raises(VersionBound, match="version 3 stands for the bytes three, not other"):
        PUBLISHED.admit(3, "other")


def test_a_bound_version_is_refused_with_other_bytes() -> None:
    """Also if it was never published: an engine may hold it."""
    ledger = PUBLISHED.bind(5, "five", 8)
    assert ledger.version == 3
    assert dict(ledger.bound) == {3: "three", 5: "five"}
    ledger.admit(5, "five")
    with pytest.raises(VersionBound, match="version 5 stands for the bytes five, not other"):
        ledger.admit(5, "other")


def test_below_a_bound_version_everything_is_refused() -> None:
    """An engine that committed 5 would fall back to 4."""
    ledger = PUBLISHED.bind(5, "five", 8)
    for version, digest in ((4, "four"), (3, "three")):
        with pytest.raises(StaleVersion, match=r"5 is bound \(engines may hold it\)"):
            ledger.admit(version, digest)


@pytest.mark.parametrize("change", [Ledger.bind, Ledger.publish])
def test_an_older_epoch_changes_nothing(change: Callable[[Ledger, int, str, int], Ledger]) -> None:
    """A round whose lock has gone to another is refused, even with a higher version."""
    with pytest.raises(StaleVersion, match="version 4 comes from epoch 6, which is over: only 7 or later"):
        change(PUBLISHED, 4, "four", 6)


def test_binding_is_enough_to_fence_an_older_epoch() -> None:
    """As soon as a newer round commits, the older one can publish no more."""
    ledger = PUBLISHED.bind(4, "four", 9)
    with pytest.raises(StaleVersion, match="epoch 8, which is over"):
        ledger.publish(4, "four", 8)


@pytest.mark.parametrize("change", [Ledger.bind, Ledger.publish])
def test_changes_keep_the_rules_of_admission(change: Callable[[Ledger, int, str, int], Ledger]) -> None:
    """A lower version or other bytes are refused at any time, not only before the lock."""
    with pytest.raises(StaleVersion):
        change(PUBLISHED, 2, "two", 8)
    with pytest.raises(VersionBound):
        change(PUBLISHED, 3, "other", 8)


def test_the_same_publication_again_is_confirmed() -> None:
    """An answer that got lost may be asked for again, also after the epoch was fenced."""
    assert PUBLISHED.publish(3, "three", 7) is PUBLISHED
    fenced = PUBLISHED.bind(4, "four", 8).shut(7)
    assert fenced.publish(3, "three", 7) is fenced


def test_shut_refuses_what_was_given_up() -> None:
    """A publication that was never answered cannot arrive later, and the next epoch is not hindered."""
    ledger = PUBLISHED.bind(4, "four", 8).shut(8)
    with pytest.raises(StaleVersion):
        ledger.publish(4, "four", 8)
    assert ledger.shut(5) == ledger
    assert ledger.publish(4, "four", 9).version == 4


def test_ask_answers_for_this_epoch_or_a_later_one() -> None:
    """Not published, published by me, published again by a later round, published by an earlier one."""
    assert not Ledger().ask(0, 0)
    assert PUBLISHED.ask(3, 7)
    assert PUBLISHED.publish(3, "three", 9).ask(3, 7)
    assert not PUBLISHED.ask(3, 8)
    assert not PUBLISHED.ask(4, 7)
    assert not PUBLISHED.ask(4, 8)
    assert not PUBLISHED.ask(2, 7)


def test_ask_does_not_guess_about_a_version_that_was_passed() -> None:
    """A later round has published a higher one: whether this one was published before is not known."""
    with pytest.raises(
        StaleVersion, match=r"whether version 2 \(epoch 6\) was published is not known any more"
    ):
        PUBLISHED.ask(2, 6)


def test_what_is_not_needed_is_forgotten() -> None:
    """Bindings do not pile up, neither by publishing nor by rounds that fail while they commit."""
    ledger = Ledger()
    for version in range(0, 40, 2):
        ledger = ledger.bind(version, f"v{version}", version + 1)
        ledger = ledger.bind(version + 1, f"v{version + 1}", version + 2)
        ledger = ledger.publish(version + 1, f"v{version + 1}", version + 2)
    assert dict(ledger.bound) == {39: "v39"}


def test_a_ledger_is_a_plain_value() -> None:
    """It cannot be changed through a back door, and it copies and travels."""
    with pytest.raises(TypeError):
        PUBLISHED.bound[3] = "other"  # type: ignore[index]
    given = {3: "three", 4: "four", 1: "one"}
    ledger = Ledger(3, 7, "three", given, 7)
    given[5] = "five"
    assert dict(ledger.bound) == {3: "three", 4: "four"}
    assert dict(Ledger(3, 7, "three").bound) == {3: "three"}
    assert pickle.loads(pickle.dumps(ledger)) == copy.deepcopy(ledger) == ledger


# -------------------------------------------------------------------------------------- any order of changes

CHANGE = st.tuples(
    st.sampled_from(["bind", "publish", "shut"]), st.integers(0, 4), st.sampled_from("xy"), st.integers(0, 5)
)
CHANGES = st.lists(CHANGE, max_size=25)


def applied(ledger: Ledger, change: tuple[str, int, str, int]) -> Ledger:
    """The next ledger; a refusal changes nothing."""
    what, version, digest, epoch = change
    try:
        if what == "shut":
            return ledger.shut(epoch)
        return getattr(ledger, what)(version, digest, epoch)  # type: ignore[no-any-return]
    except (StaleVersion, VersionBound):
        return ledger


@given(CHANGES)
def test_no_order_of_changes_lets_a_version_fall(changes: list[tuple[str, int, str, int]]) -> None:
    """Version, epoch and fence only rise, no number gets other bytes, and what is published is admitted."""
    ledger, digests, over = Ledger(), dict[int, str](), 0
    for change in changes:
        after = applied(ledger, change)
        assert (after.version or 0, after.epoch, after.fence) >= (
            ledger.version or 0,
            ledger.epoch,
            ledger.fence,
        )
        assert after.version is not None or ledger.version is None
        assert after.epoch >= ledger.epoch
        assert after.fence >= max(ledger.fence, after.epoch)
        if after != ledger and change[0] != "shut":
            assert change[3] >= over, "an epoch that is over changed the ledger"
            assert digests.setdefault(change[1], change[2]) == change[2], "a number got other bytes"
            assert change[1] == after.newest == max(digests)
        over = max(over, after.fence)
        if after.version is not None and after.digest is not None and after.newest == after.version:
            after.admit(after.version, after.digest)
            assert after.ask(after.version, after.epoch)
        ledger = after


@given(CHANGES)
def test_every_ledger_survives_being_written(changes: list[tuple[str, int, str, int]]) -> None:
    """What was written is read back, and the same ledger gives the same text."""
    ledger = Ledger()
    for change in changes:
        ledger = applied(ledger, change)
    text = ledger.to_json()
    assert text.count("\n") == 1
    assert Ledger.from_json(text) == Ledger.from_json(text.encode()) == ledger
    assert Ledger.from_json(text).to_json() == text


# ------------------------------------------------------------------------------------------ what is no ledger

GOOD = json.loads(PUBLISHED.bind(5, "five", 8).to_json())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("null", "no schema number"),
        ("[]", "no schema number"),
        ("{}", "no schema number"),
        ('{"schema": 2}', "its schema is 2, this version reads 1"),
        ('{"schema": 1}', "its keys are schema"),
        (json.dumps({**GOOD, "more": 1}), "its keys are"),
        (json.dumps({**GOOD, "version": -1}), "version -1"),
        (json.dumps({**GOOD, "version": True}), "version True"),
        (json.dumps({**GOOD, "version": "3"}), "version '3'"),
        (json.dumps({**GOOD, "version": 3.0}), "version 3.0"),
        (json.dumps({**GOOD, "version": None}), "but no version"),
        (json.dumps({**GOOD, "version": None, "digest": None}), "but no version"),
        (json.dumps({**GOOD, "version": 0, "bound": {}}), "other versions are bound"),
        (json.dumps({**GOOD, "digest": None}), "digest None"),
        (json.dumps({**GOOD, "digest": ""}), "digest ''"),
        (json.dumps({**GOOD, "epoch": -1}), "epoch -1"),
        (json.dumps({**GOOD, "epoch": 9}), "epoch 9 and fence 8"),
        (json.dumps({**GOOD, "fence": None}), "fence None"),
        (json.dumps({**GOOD, "bound": None}), "binds no version"),
        (json.dumps({**GOOD, "bound": {"x": "five"}}), "'x': 'five' binds no version"),
        (json.dumps({**GOOD, "bound": {"-5": "five"}}), "'-5': 'five' binds no version"),
        (json.dumps({**GOOD, "bound": {"²": "five"}}), "binds no version"),
        (json.dumps({**GOOD, "bound": {"5": ""}}), "'5': '' binds no version"),
        (json.dumps({**GOOD, "bound": {}}), "other versions are bound"),
        (json.dumps({**GOOD, "bound": {"2": "two"}}), "other versions are bound"),
        (json.dumps({**GOOD, "bound": {"3": "other"}}), "other versions are bound"),
    ],
)
def test_garbage_is_refused_by_name(text: str | bytes, why: str) -> None:
    """One clear error that names the file and says what is wrong, whatever stands in it."""
    with pytest.raises(LedgerCorrupt, match=r"runs/ledger\.json is not a version ledger") as caught:
        Ledger.from_json(text, "runs/ledger.json")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text() | st.binary())
def test_any_text_is_a_ledger_or_refused(text: str | bytes) -> None:
    """No other exception, whatever is found in the file."""
    with pytest.raises(LedgerCorrupt):
        Ledger.from_json(text)


@given(
    st.sampled_from(sorted(GOOD)),
    st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers()) | st.floats(),
)
def test_any_value_of_any_key_is_a_ledger_or_refused(key: str, value: object) -> None:
    """What is accepted is a ledger that writes and reads itself."""
    try:
        ledger = Ledger.from_json(json.dumps({**GOOD, key: value}))
    except LedgerCorrupt:
        return
    assert Ledger.from_json(ledger.to_json()) == ledger

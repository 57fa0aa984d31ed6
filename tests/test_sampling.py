"""A digest of a part: each byte has its turn, and whoever knows of no parts is told so in one line."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorkit import DTYPES, LAYOUTS, laid_out
from tensorkit import octets as bytes_of
from weightsync.engine import inlets
from weightsync.fsm.contract import Bucketful
from weightsync.fsm.errors import SetupError
from weightsync.fsm.ledger import Ledger, VersionBound
from weightsync.fsm.plan import Plan, make_plan, spec
from weightsync.fsm.policy import Policy
from weightsync.fsm.receipt import Expectation, Receipt
from weightsync.fsm.results import RoundResult
from weightsync.fsm.sampling import LEAST, WHOLE, Part, part_of, part_of_version, parted, takes_part
from weightsync.handlers.local_engine import LocalEngine
from weightsync.handlers.receiver import Receiver
from weightsync.handlers.sink import StagingSink
from weightsync.sync import WeightSync
from weightsync.testing.fakes import FakeWeights
from weightsync.transports.digest import digest, digest_of
from weightsync.transports.packing import unpack
from weightsync.transports.weights import TorchWeights

TURNS = st.integers(1, 40)
SIZES = st.one_of(st.integers(0, 3 * LEAST), st.integers(0, 1 << 40))


# -- which bytes ------------------------------------------------------------------------------------------


@given(nbytes=SIZES, turns=TURNS, first=st.integers(0, 1 << 62))
def test_each_byte_has_its_turn_within_so_many_versions(nbytes: int, turns: int, first: int) -> None:
    """Whatever version one begins with, the parts of the next ones are the whole, without a hole."""
    parts = {part_of_version(version, turns).range(nbytes) for version in range(first, first + turns)}
    end = 0
    for start, stop in sorted(parts):
        assert start <= end
        end = max(end, stop)
    assert end == nbytes


@given(nbytes=SIZES, turns=TURNS, version=st.integers(0, 1 << 62))
def test_a_part_is_a_fair_share_that_starts_at_a_word(nbytes: int, turns: int, version: int) -> None:
    """No more than its share, but for what is small; never nothing, but of nothing."""
    start, stop = part_of_version(version, turns).range(nbytes)
    assert 0 <= start <= stop <= nbytes
    assert start % 256 == 0
    assert stop - start <= max(nbytes / turns, 2 * LEAST) + 256
    assert (stop - start > 0) == (nbytes > 0)
    if nbytes <= LEAST:
        assert (start, stop) == (0, nbytes)


@given(turns=st.integers(2, 1 << 20), version=st.integers(0, 1 << 62))
def test_a_digest_says_its_part(turns: int, version: int) -> None:
    """The part is read from it; one of everything is as it always was."""
    part = part_of_version(version, turns)
    assert part_of(part.mark("0123abcd")) == part
    assert WHOLE.mark("0123abcd") == "0123abcd"


@pytest.mark.parametrize(
    "text", ["", "0123abcd", "digest of 3", "3/3:ab", "9/3:ab", "3/0:ab", "a/b:c", "-1/4:a"]
)
def test_any_other_text_is_of_everything(text: str) -> None:
    """Whoever sends rubbish finds that the digests differ, and nothing else."""
    assert part_of(text) == WHOLE


def test_the_policy_says_what_is_compared() -> None:
    """Sampled in 32 turns if nothing else is said."""
    assert Policy().part(35) == Part(3, 32)
    assert Policy(verify_turns=10).part(35) == Part(5, 10)
    assert Policy(verify="full").part(35) == WHOLE
    assert Policy(verify="off").part(35) is None
    with pytest.raises(SetupError, match=r"Policy\(verify_turns=0\)"):
        Policy(verify_turns=0)


# -- the digest -------------------------------------------------------------------------------------------


def versions(tensors: Mapping[str, torch.Tensor], first: int, turns: int) -> Iterator[str]:
    """The digests of so many versions."""
    specs = [spec(name, str(each.dtype).removeprefix("torch."), each.shape) for name, each in tensors.items()]
    for version in range(first, first + turns):
        yield digest_of(specs, tensors, part_of_version(version, turns))


@settings(max_examples=80, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES), layout=st.sampled_from(sorted(LAYOUTS)), rows=st.integers(1, 700),
    flipped=st.tuples(st.integers(0, 1 << 30), st.integers(0, 7)),
    numbers=st.tuples(st.integers(0, 1000), st.integers(1, 9)),
)  # fmt: skip
def test_a_flipped_bit_is_found_in_time(
    dtype: str, layout: str, rows: int, flipped: tuple[int, int], numbers: tuple[int, int]
) -> None:
    """Anywhere, in any dtype and with any strides; and what is equal has equal digests in every version."""
    (place, bit), (first, turns) = flipped, numbers
    good = laid_out(layout, dtype, rows, 3, 5)
    octets = np.frombuffer(bytearray(bytes_of(good)), dtype=np.uint8)
    same = torch.from_numpy(octets.copy()).view(good.dtype).view(good.shape)
    assert list(versions({"w": good}, first, turns)) == list(versions({"w": same}, first, turns))
    octets[place % octets.size] ^= 1 << bit
    bad = torch.from_numpy(octets).view(good.dtype).view(good.shape)
    told = zip(versions({"w": good}, first, turns), versions({"w": bad}, first, turns), strict=True)
    differ = [one != other for one, other in told]
    assert any(differ)
    assert len(differ) == turns


BIG = {"a": torch.arange(60_000.0).view(300, 200), "b": torch.arange(60_000.0).view(300, 200) + 0.5}


@pytest.mark.parametrize(
    "other",
    [
        {"a": BIG["b"], "b": BIG["a"]},
        {"b": BIG["b"], "a": BIG["a"]},
        {"a": BIG["a"], "c": BIG["b"]},
        {"a": BIG["a"]},
        {"a": BIG["a"].view(200, 300), "b": BIG["b"]},
        {"a": BIG["a"].view(torch.int32), "b": BIG["b"]},
    ],
    ids=["swapped", "reordered", "renamed", "fewer", "shape", "dtype"],
)
def test_tensors_that_are_not_the_same_ones_are_noticed_in_every_version(
    other: dict[str, torch.Tensor],
) -> None:
    """That needs no turn."""
    told = zip(versions(BIG, 0, 16), versions(other, 0, 16), strict=True)
    assert all(one != two for one, two in told)


@pytest.mark.parametrize("tensor", [torch.tensor(2.5), torch.zeros(0, 3), torch.ones(100)], ids=str)
def test_what_is_small_is_digested_whole_every_time(tensor: torch.Tensor) -> None:
    """Scalars and tensors without elements, too: versions differ in the mark alone."""
    told = {found.partition(":")[2] for found in versions({"w": tensor}, 0, 16)}
    assert len(told) == 1
    assert (
        told != {found.partition(":")[2] for found in versions({"w": tensor + 1}, 0, 16)} or 0 in tensor.shape
    )


def test_a_part_reads_its_share_and_no_more() -> None:
    """A tensor of which only the part can be read has a digest of that part."""
    whole, part = torch.arange(1 << 18), Part(3, 16)
    start, stop = part.range(whole.numel() * 8)
    torn = torch.zeros_like(whole)
    torn[start // 8 : stop // 8] = whole[start // 8 : stop // 8]
    specs = [spec("w", "int64", whole.shape)]
    assert digest_of(specs, {"w": torn}, part) == digest_of(specs, {"w": whole}, part)
    assert stop - start == whole.numel() * 8 // 16


# -- rounds -----------------------------------------------------------------------------------------------

STATE = {"w": torch.arange(40_000.0), "small": torch.ones(3)}


class Spoiling:
    """An engine that changes one byte of what it was sent, when it is told to."""

    def __init__(self, name: str, digest_function: Any = digest) -> None:
        self.held = {name: torch.zeros_like(each) for name, each in STATE.items()}
        self.place: int | None = None
        self.receiver = Receiver(
            name, StagingSink(self.held), inlets=inlets(), unpack=self._unpack, digest=digest_function
        )
        self.link = LocalEngine(self.receiver)

    def _unpack(self, plan: Plan, bucket: Bucketful, into: Mapping[str, Any], /) -> None:
        unpack(plan, bucket, into)
        if self.place is not None:
            into["w"].view(torch.uint8)[self.place] ^= 1


def handed_over(sync: WeightSync, step: int) -> RoundResult:
    """One round of all."""
    result = sync.on_step_end(step, {name: each + step for name, each in STATE.items()})
    assert result is not None
    return result


@pytest.mark.parametrize("place", [0, 77_777, 159_999])
def test_an_engine_that_spoils_a_byte_is_found_within_the_turns(place: int) -> None:
    """Wherever it is; and never blamed while it does not."""
    engine = Spoiling("a")
    with WeightSync([engine.link], policy=Policy(deadline=20, verify_turns=4)) as sync:
        assert all(handed_over(sync, step).ok for step in range(1, 6))
        engine.place = place
        results = [handed_over(sync, step) for step in range(6, 10)]
        assert not all(each.ok for each in results), (
            "a failed round gives its number, and its turn, to the next"
        )
        failed = next(each for each in results if not each.ok)
        assert "digest is" in str(failed.error)
        assert part_of_version(failed.version, 4).mark("") in str(failed.error)


@pytest.mark.parametrize(("verify", "good"), [("full", False), ("off", True)])
def test_full_finds_it_at_once_and_off_never(verify: Any, good: bool) -> None:
    """What ``verify`` promises."""
    engine = Spoiling("a")
    engine.place = 77_777
    with WeightSync([engine.link], policy=Policy(deadline=20, verify=verify)) as sync:
        assert [handed_over(sync, step).ok for step in range(1, 4)] == [good] * 3


def test_a_retry_and_a_catch_up_have_the_part_of_their_version() -> None:
    """An engine that was lost comes back with the published number and the very bytes."""
    engines = [Spoiling("a"), Spoiling("b")]
    policy = Policy(deadline=20, on_engine_failure="quarantine", quorum=1, verify_turns=5, rest=0.01)
    with WeightSync([each.link for each in engines], policy=policy) as sync:
        for step in range(1, 4):
            handed_over(sync, step)
        engines[1].place = 0  # of version 5, whose turn is the first part
        sync.begin(4, STATE, version=5).wait()
        assert sync.servable() == {"a": 5}
        engines[1].place = None
        result = sync.catch_up(4, STATE)
        assert (result.version, result.ok) == (5, True)
        assert sync.servable() == {"a": 5, "b": 5}
        with pytest.raises(VersionBound, match="version 5 stands for the bytes 0/5:"):
            sync.begin(5, {**STATE, "w": STATE["w"] + 1}, version=5).wait()


def test_a_ledger_refuses_digests_that_cannot_be_compared() -> None:
    """Those of another part of the same number: after a change of the policy, for example."""
    ledger = Ledger().bind(20, "4/16:ab", 1)
    ledger.admit(20, "4/16:ab")
    with pytest.raises(VersionBound, match=r"4/16:ab, and 0/4:cd is of another part of them, so nobody can"):
        ledger.admit(20, "0/4:cd")
    with pytest.raises(VersionBound, match=r"4/16:ab, not 4/16:cd; give these a higher number"):
        ledger.admit(20, "4/16:cd")


# -- who knows of no parts --------------------------------------------------------------------------------


class Older:
    """Somebody's weights, made before there were parts."""

    ready = True

    def __init__(self) -> None:
        self._weights = TorchWeights.of(STATE)

    def materialize(self) -> None:
        """Nothing to do."""

    def plan(self, bucket_bytes: int) -> Plan:
        """Of the tensors."""
        return self._weights.plan(bucket_bytes)

    def digest(self) -> str:
        """Of everything."""
        return self._weights.digest()


class Deaf(Older):
    """It takes a part and digests everything."""

    def digest(self, *_: object) -> str:
        """Of everything."""
        return self._weights.digest()


def test_weights_that_take_no_part_are_refused_where_they_are_handed_over() -> None:
    """In one line, which says what to do; ``verify="full"`` and ``"off"`` need no parts."""
    engine = Spoiling("a")
    with (
        WeightSync([engine.link], policy=Policy(deadline=20)) as sync,
        pytest.raises(SetupError, match=r"Older\.digest takes none: .* or use Policy\(verify='full'\)"),
    ):
        sync.on_step_end(1, Older())
    assert engine.receiver.version is None


def test_weights_that_take_a_part_and_do_not_heed_it_are_noticed() -> None:
    """Their digest does not say the part."""
    with WeightSync([Spoiling("a").link], policy=Policy(deadline=20)) as sync:
        result = sync.on_step_end(1, Deaf())
        assert result is not None
        assert not result.ok
        assert isinstance(result.error, SetupError)
        assert "Deaf.digest gave" in str(result.error)


def _of_everything(plan: Plan, tensors: Mapping[str, Any]) -> str:
    return digest(plan, tensors)


def test_an_engine_whose_digest_takes_no_part_says_so() -> None:
    """It is named, with what to do, and nothing is published."""
    engine = Spoiling("a", _of_everything)
    with WeightSync([engine.link], policy=Policy(deadline=20)) as sync:
        result = handed_over(sync, 1)
        assert not result.ok
        assert "engine a: its digest function takes no part" in str(result.error)
        assert "Policy(verify='full')" in str(result.error)
        assert sync.version() is None


def test_an_engine_of_an_older_weightsync_is_told_from_one_with_other_bytes() -> None:
    """Its receipt has a digest of everything, where a part was asked for."""
    plan = make_plan([spec("w", "uint8", (3,))], bucket_bytes=64)
    receipt = Receipt._sealed(
        round="r", epoch=1, engine="a", incarnation="0", rank=0, fingerprint=plan.fingerprint, tensors=1,
        bytes=3, digest="ab",
    )  # fmt: skip
    told = receipt.mismatch("r", 1, Expectation(plan.fingerprint, 1, 3, 1, "3/16:cd"))
    assert told is not None
    assert told.startswith(
        "a rank 0: digest 'ab' is of everything, expected '3/16:cd', of part 3/16: the engine's"
    )
    other = receipt.mismatch("r", 1, Expectation(plan.fingerprint, 1, 3, 1, "cd"))
    assert other == "a rank 0: digest is 'ab', expected 'cd'"


def test_whether_a_function_takes_a_part_is_asked_of_its_signature() -> None:
    """It is not tried: a TypeError may have any reason."""
    assert takes_part(FakeWeights().digest)
    assert takes_part(digest, 2)
    assert not takes_part(Older().digest)
    assert takes_part(lambda plan, tensors, part: "", 2)
    assert not takes_part(lambda plan, tensors: "", 2)
    assert parted("mine", Older().digest, WHOLE) == TorchWeights.of(STATE).digest()

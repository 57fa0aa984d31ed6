"""Versions of the trainer's weights on one rank: exact, its own memory, and put back whatever happens."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import weightsync
from weightsync.fsm.errors import (
    LayoutChanged,
    SetupError,
    SnapshotError,
    SnapshotSpoiled,
    VersionNotKept,
)
from weightsync.handlers import snapshots as module
from weightsync.handlers.forms import shards_of
from weightsync.handlers.snapshots import Snapshots

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


class Holder(torch.nn.Module):
    """A module of such parameters."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


def holder(value: float = 1.0) -> Holder:
    """With three parameters."""
    value = float(value)
    return Holder(a=torch.full((3,), value), b=torch.full((2, 2), value), c=torch.full((1,), value))


def values(model: torch.nn.Module) -> list[Any]:
    """What it holds."""
    return [each.tolist() for each in model.parameters()]


def fill(model: torch.nn.Module, value: float) -> None:
    """Train it to that."""
    for each in model.parameters():
        each.fill_(value)


def octets(tensor: torch.Tensor) -> bytes:
    """Its bytes in logical order."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


# -- exact ------------------------------------------------------------------------------------------------


@given(
    dtype=st.sampled_from(DTYPES), rows=st.integers(0, 4), columns=st.integers(0, 4),
    turned=st.booleans(), data=st.data(),
)  # fmt: skip
def test_every_bit_comes_back(dtype: torch.dtype, rows: int, columns: int, turned: bool, data: Any) -> None:
    """Of any dtype and strides, also of what is no number, and of a truth that is neither 0 nor 1."""
    size = rows * columns * dtype.itemsize
    bits = data.draw(st.binary(min_size=size, max_size=size))
    tensor = torch.tensor(list(bits), dtype=torch.uint8).view(dtype).reshape(rows, columns)
    tensor = tensor.t() if turned else tensor
    before = octets(tensor)
    model = Holder(w=tensor)
    kept = Snapshots(model)
    kept.save(1)
    model.get_parameter("w").zero_()
    kept.load(1)
    assert octets(model.get_parameter("w")) == before


def test_the_live_memory_stays_where_it_is() -> None:
    """Optimizers and graphs refer to it."""
    model = holder()
    places = [each.data_ptr() for each in model.parameters()]
    kept = Snapshots(model)
    kept.save(1)
    with kept.version(1):
        assert [each.data_ptr() for each in model.parameters()] == places
    kept.load(1)
    assert [each.data_ptr() for each in model.parameters()] == places


def test_tied_names_are_kept_once() -> None:
    """One parameter under two names is one shard."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    kept = Snapshots(model)
    assert [each.name for each in kept.save(3).layout.shards] == ["0.weight"]
    assert kept[3].nbytes == kept.nbytes == 16
    assert 3 in kept
    assert 4 not in kept


def test_what_was_cast_of_older_weights_is_not_used() -> None:
    """Autocast remembers what it has cast of a parameter for as long as its block lasts."""
    model = torch.nn.Linear(2, 2)
    kept, x = Snapshots(model), torch.ones(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        old = model(x).tolist()
        kept.save(1)
        with torch.no_grad():
            model.weight.add_(1.0)
        torch.clear_autocast_cache()
        assert model(x).tolist() != old
        with kept.version(1):
            assert model(x).tolist() == old


def test_a_number_that_is_saved_again_stands_for_the_newer_weights() -> None:
    """In the same memory."""
    model = holder(1)
    kept = Snapshots(model)
    first = kept.save(0)
    fill(model, 2)
    second = kept.save(0)
    assert second.checksum == kept[0].checksum != first.checksum
    assert second.fingerprint == first.fingerprint
    fill(model, 3)
    kept.load(0)
    assert values(model) == values(holder(2))
    assert (kept.versions, kept.allocations) == ((0,), 1)


# -- refused ----------------------------------------------------------------------------------------------


def test_an_unknown_version_is_refused() -> None:
    """With what there is; to clear it does nothing."""
    kept = Snapshots(holder())
    kept.save(2)
    kept.save(5)
    for word in (kept.load, kept.__getitem__, lambda number: kept.version(number).__enter__()):
        with pytest.raises(VersionNotKept, match="version 3 is not kept; kept are: 2, 5"):
            word(3)
    kept.clear(3)
    kept.clear(2)
    kept.clear(2)
    assert kept.versions == (5,)


def test_without_strict_what_is_in_both_is_loaded() -> None:
    """And what is not is told."""
    model = holder(1)
    kept = Snapshots(model, strict=False)
    kept.save(1)
    fill(model, 2)
    del model.a
    model.d = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    loaded = kept.load(1)
    assert (loaded.names, loaded.skipped, loaded.untouched) == (("b", "c"), ("a",), ("d",))
    assert values(model) == [[[1, 1], [1, 1]], [1], [0]]
    model.b = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    with pytest.raises(LayoutChanged, match=r"'b' is not what was kept: its shape was \(2, 2\) and"):
        kept.load(1)


def test_strict_wants_every_name_in_both() -> None:
    """Not a byte is written otherwise."""
    model = holder(1)
    kept = Snapshots(model)
    kept.save(1)
    fill(model, 2)
    del model.a
    with pytest.raises(LayoutChanged, match="'a': kept, but not in the model any more"):
        kept.load(1)
    assert values(model) == [[[2, 2], [2, 2]], [2]]


def test_a_copy_that_was_written_to_is_refused() -> None:
    """Unless it is not looked at."""
    for verify in (True, False):
        model = holder(1)
        kept = Snapshots(model, verify=verify)
        kept.save(1)
        kept._kept[1][1].octets[1][0] ^= 1
        fill(model, 2)
        if verify:
            with pytest.raises(SnapshotSpoiled, match="what is kept of 'b' is not what was saved"):
                kept.load(1)
            assert values(model) == values(holder(2))
        else:
            kept.load(1)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.empty(2, device="meta"), "has no values"),
        (torch.eye(2).to_sparse(), "has its values in no plain memory"),
        (torch.zeros(1, 4).expand(4, 4), "is expanded"),
        (torch.ones(2, dtype=torch.complex64).conj(), "is a note on the bytes of another tensor"),
    ],
)
def test_what_has_no_bytes_of_its_own_is_not_kept(tensor: torch.Tensor, text: str) -> None:
    """By name."""
    model = holder()
    model.register_buffer("odd", tensor)
    with pytest.raises(SnapshotError, match=f"'odd' cannot be kept: it {text}"):
        Snapshots(model, buffers=True).save(1)
    freed = holder()
    freed.get_parameter("a").untyped_storage().resize_(0)
    with pytest.raises(SnapshotError, match="'a' cannot be kept: it has no memory"):
        Snapshots(freed).save(1)


def test_what_is_handed_over_is_examined() -> None:
    """In one line that says what to give."""
    wrong = cast("Any", 3)
    for arguments, text in (
        ({"model": wrong}, r"Snapshots\(model=3\): a torch.nn.Module is needed"),
        ({"votes": wrong}, r"Snapshots\(votes=3\): RankVotes\(store, rank, world_size\) is needed"),
        ({"form": "fsdp"}, r"Snapshots\(form='fsdp'\): choose from 'flat', 'dtensor', 'plain'"),
        ({"strict": wrong}, r"Snapshots\(strict=3\): True or False is needed"),
    ):
        with pytest.raises(SetupError, match=text):
            Snapshots(**{"model": holder(), **arguments})
    with pytest.raises(SetupError, match="a whole number of at least 0 is needed"):
        Snapshots(holder()).save(-1)
    with pytest.raises(SetupError, match="the model has no parameters"):
        Snapshots(torch.nn.Tanh()).save(1)
    with pytest.raises(SetupError, match="'a' is a plain tensor; say form='plain'"):
        Snapshots(holder(), form="flat").save(1)
    assert Snapshots(holder(), form="plain").save(1).version == 1


# -- for a while ------------------------------------------------------------------------------------------


def test_blocks_may_be_inside_one_another() -> None:
    """Each leaves what it found."""
    model = holder(1)
    kept = Snapshots(model)
    kept.save(1)
    fill(model, 2)
    kept.save(2)
    fill(model, 3)
    with kept.version(1) as loaded:
        assert (loaded.version, values(model)) == (1, values(holder(1)))
        with kept.version(2):
            assert values(model) == values(holder(2))
        assert values(model) == values(holder(1))
    assert values(model) == values(holder(3))


def test_inside_a_block_nothing_else_is_saved_or_loaded() -> None:
    """The weights are not the trainer's own there."""
    model = holder(1)
    kept = Snapshots(model)
    kept.save(1)
    with kept.version(1):
        with pytest.raises(SnapshotError, match=r"version 2 was to be saved inside version\(1\)"):
            kept.save(2)
        with pytest.raises(SnapshotError, match=r"version 1 was to be loaded inside version\(1\)"):
            kept.load(1)
        kept.clear(1)
    assert kept.save(2).version == 2


def test_a_version_that_is_cleared_in_its_block_takes_no_memory_of_the_block() -> None:
    """What is to be put back is nobody else's meanwhile."""
    model, other = holder(1), holder(9)
    kept = Snapshots(model)
    kept.save(1)
    fill(model, 2)
    with kept.version(1):
        kept.clear(1)
        kept._slots.take(shards_of(other), None).read(shards_of(other), checksum=False)
    assert values(model) == values(holder(2))


def test_the_order_of_names_does_not_matter() -> None:
    """Each shard gets its own bytes, also if a block has registered a parameter anew."""
    model = Holder(a=torch.zeros(2), b=torch.ones(2))
    kept = Snapshots(model)
    kept.save(1)
    with kept.version(1):
        first = model.a
        del model.a
        model.a = first
    assert dict(model.named_parameters())["a"].tolist() == [0, 0]
    kept.load(1)
    assert {name: each.tolist() for name, each in model.named_parameters()} == {"a": [0, 0], "b": [1, 1]}


def test_the_first_error_of_a_block_wins() -> None:
    """That the weights could not be put back is a note of it; alone, it is the error."""

    def block(model: Holder, kept: Snapshots, error: OSError | None) -> None:
        with kept.version(1):
            del model.a
            if error:
                raise error

    for error in (OSError("in the block"), None):
        kept = Snapshots(model := holder(1))
        kept.save(1)
        with pytest.raises(OSError if error else LayoutChanged) as raised:
            block(model, kept, error)
        if error:
            assert raised.value is error
            assert error.__notes__[0].startswith("and then: LayoutChanged: 'a'")
        assert "Snapshots.put_back() on every rank" in raised.value.__notes__[-1]
        with pytest.raises(SnapshotError, match=r"since version\(1\) could not be left: load one or put"):
            kept.save(2)


def interrupted(at: int, work: Callable[[], object]) -> bool:
    """Do ``work`` with an interrupt at the ``at``-th line that it runs of the product; whether it came."""
    folder, count = str(Path(module.__file__).parent), 0

    def tracing(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(folder):
            return None
        if event == "line":
            count += 1
            if count == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return tracing

    before = sys.gettrace()
    sys.settrace(tracing)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_at_any_line_leaves_the_weights_as_they_were() -> None:
    """From the first line of a block's beginning to the last of its end."""
    moments = 0
    for at in range(1, 2000):
        model = holder(1)
        kept = Snapshots(model)
        kept.save(1)
        fill(model, 2)

        def block(kept: Snapshots = kept) -> None:
            with kept.version(1):
                pass

        came = interrupted(at, block)
        assert values(model) == values(holder(2)), f"at line {at}"
        assert kept._loans == [], f"at line {at}"
        kept.save(3)
        kept.load(1)
        assert values(model) == values(holder(1))
        assert torch.is_grad_enabled(), f"at line {at}"
        if not came:
            break
        moments += 1
    assert moments > 60, "the block was not looked into"


@pytest.mark.parametrize(("word", "number"), [("save", 2), ("save", 1), ("load", 1)])
def test_an_interrupt_at_any_line_leaves_one_version_or_the_other(word: str, number: int) -> None:
    """Never a part of each; and what is kept is whole, and still there if it was."""
    for at in range(1, 2000):
        model = holder(1)
        kept = Snapshots(model)
        kept.save(1)
        fill(model, 2)
        came = interrupted(at, lambda kept=kept: getattr(kept, word)(number))  # type: ignore[misc]
        assert 1 in kept, f"at line {at}"
        assert values(model) in (values(holder(1)), values(holder(2))), f"at line {at}"
        for version in kept.versions:
            kept.load(version)
            newer = 2 if (word, number) == ("save", version) else version
            assert values(model) in (values(holder(version)), values(holder(newer))), f"at line {at}"
        if not came:
            return
    pytest.fail("it never ends")


def test_it_is_a_public_name() -> None:
    """With the votes, and the handler that rolls back."""
    assert weightsync.Snapshots is Snapshots
    assert weightsync.RankVotes.__module__ == "weightsync.handlers.votes"
    assert weightsync.Rollback.__module__ == "weightsync.handlers.rollback"
    with Snapshots(holder()) as kept:
        kept.save(1)
    assert (kept.versions, kept.nbytes) == ((), 0)

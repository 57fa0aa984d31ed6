"""A model that is another version for a while: what is owed meanwhile is paid, or kept until it can be."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

from casekit.rankteam import DictStore
from weightsync.fsm.errors import LayoutChanged, RankFailed, SnapshotError
from weightsync.handlers import snapshots
from weightsync.handlers.slots import Slot, write
from weightsync.handlers.snapshots import Snapshots
from weightsync.handlers.votes import RankVotes


class Holder(torch.nn.Module):
    """A module of two parameters."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.full((3,), float(value)), requires_grad=False)
        self.b = torch.nn.Parameter(torch.full((2, 2), float(value)), requires_grad=False)


def holder(value: float) -> Holder:
    """It, with that in it."""
    return Holder(value)


def values(model: torch.nn.Module) -> list[Any]:
    """What it holds."""
    return [each.tolist() for each in model.parameters()]


def fill(model: torch.nn.Module, value: float) -> None:
    """Train it to that."""
    for each in model.parameters():
        each.fill_(value)


def test_what_could_not_be_put_back_is_kept_until_it_is() -> None:
    """It is the only copy of the newest weights; neither another block nor a save takes its memory."""
    model = holder(1)
    kept = Snapshots(model)
    kept.save(1)
    fill(model, 2)
    first = model.a

    def block() -> None:
        with kept.version(1):
            del model.a

    with pytest.raises(LayoutChanged):
        block()
    with pytest.raises(LayoutChanged, match="'a': kept, but not in the model any more"):
        kept.put_back()
    model.a = first
    with kept.version(1), pytest.raises(SnapshotError, match=r"were to be put back inside version\(1\)"):
        kept.put_back()
    kept.put_back()
    assert sorted(values(model), key=str) == sorted(values(holder(2)), key=str)
    kept.put_back()
    kept.save(2)
    assert (kept.allocations, kept.nbytes) == (3, 2 * kept[1].nbytes)


def test_a_version_that_is_loaded_takes_the_place_of_what_could_not_be_put_back() -> None:
    """And an outer block whose end works puts the newest back itself."""
    for nested in (True, False):
        model = holder(1)
        kept = Snapshots(model)
        kept.save(1)
        fill(model, 2)
        first = model.a

        def block(model: Holder = model, kept: Snapshots = kept) -> None:
            with kept.version(1):
                del model.a

        if nested:
            with kept.version(1):
                with pytest.raises(LayoutChanged):
                    block()
                model.a = first
        else:
            with pytest.raises(LayoutChanged):
                block()
            model.a = first
            kept.load(1)
        assert (kept._owed, kept._torn) == (None, "")
        assert sorted(values(model), key=str) == sorted(values(holder(2 if nested else 1)), key=str)
        kept.put_back()
        kept.save(2)


def test_a_block_of_another_thread_is_not_entered() -> None:
    """Each would compute with the other's weights."""
    model = holder(1)
    kept = Snapshots(model)
    kept.save(1)
    fill(model, 2)
    kept.save(2)
    fill(model, 3)

    def enter() -> None:
        with kept.version(2):
            pass

    with ThreadPoolExecutor(1) as pool:
        with kept.version(1):
            error = pool.submit(enter).exception(30)
            assert isinstance(error, SnapshotError)
            assert "version(2) inside version(1) of another thread" in str(error)
            assert values(model) == values(holder(1))
        assert values(model) == values(holder(3))


def test_blocks_that_are_left_in_the_order_of_their_beginning_leave_the_newest() -> None:
    """The inner one owes what the outer one did."""
    model = holder(1)
    kept = Snapshots(model)
    for number in (1, 2):
        fill(model, number)
        kept.save(number)
    fill(model, 3)
    first, second, third = (kept.version(number) for number in (1, 2, 1))
    for block in (first, second, third):
        block.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert values(model) == values(holder(1))
    third.__exit__(None, None, None)
    assert values(model) == values(holder(3))
    assert kept._loans == []


def test_the_default_device_is_not_where_copies_are() -> None:
    """They are memory of the host."""
    model = holder(1)
    kept = Snapshots(model)
    torch.set_default_device("meta")
    try:
        assert Slot(((4, False),)).octets[0].device.type == "cpu"
        kept.save(1)
        fill(model, 2)
        kept.load(1)
    finally:
        torch.set_default_device(None)
    assert values(model) == values(holder(1))


def test_what_one_rank_could_not_put_back_all_of_them_bring_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that has its own weights already only takes part; afterwards both can save."""
    store, models = DictStore(), [holder(1), holder(1)]
    kept = [
        Snapshots(model, votes=RankVotes(store, rank, 2, limit=10.0)) for rank, model in enumerate(models)
    ]

    def fragile(pairs: Any) -> None:
        pairs = list(pairs)
        if broken and any(holding.tensor.data_ptr() == models[1].b.data_ptr() for holding, _ in pairs):
            raise OSError("the memory is gone")
        write(pairs)

    monkeypatch.setattr(snapshots, "write", fragile)
    broken: list[int] = []
    inside = Barrier(2)

    def work(rank: int) -> Any:
        mine = kept[rank]
        mine.save(1)
        fill(models[rank], 2)
        failed: type[Exception] | None = None
        try:
            with mine.version(1):
                inside.wait(30)
                broken.append(rank)
                inside.wait(30)
        except (OSError, SnapshotError, RankFailed) as error:
            failed = type(error)
        inside.wait(30)
        broken.clear()
        inside.wait(30)
        found = values(models[rank])
        mine.put_back()
        mine.save(2)
        return failed, found, values(models[rank])

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, range(2))
    old, new = values(holder(1)), values(holder(2))
    assert first == (RankFailed, new, new)
    assert second == (OSError, old, new)

"""A store of the ranks that Ray keeps: the same words, decided in one place, for ranks in Ray actors."""

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from weightsync.fsm.errors import SetupError
from weightsync.fsm.votes import Meeting
from weightsync.handlers.barrier import Barrier
from weightsync.handlers.rank_store import RankStore
from weightsync.handlers.ray_store import RayStore

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def store(ray_cluster: None) -> Iterator[RayStore]:
    """One for the test."""
    made = RayStore("test")
    yield made
    made.retire()


def test_it_has_the_words_of_a_store_of_torch(store: RayStore) -> None:
    """The first who decides has decided, for everybody who names the store."""
    other = RayStore("test")
    assert not store.check(["a"])
    store.set("a", "1")
    assert other.get("a") == b"1"
    assert (other.check(["a"]), other.check(["a", "b"])) == (True, False)
    assert store.compare_set("b", "", "mine") == other.compare_set("b", "", "theirs") == b"mine"
    assert store.compare_set("b", "mine", "again") == b"again"
    assert (store.delete_key("b"), store.delete_key("b")) == (True, False)
    assert store.compare_set("c", "there", "new") == b"there"
    with pytest.raises(KeyError, match="nothing is written under b"):
        other.get("b")


def test_what_is_no_name_is_refused() -> None:
    """Before Ray is asked."""
    with pytest.raises(SetupError, match="name"):
        RayStore("")


@ray.remote(num_cpus=0)
class Rank:
    """A rank of a trainer."""

    def __init__(self, rank: int) -> None:
        self.barrier = Barrier(RankStore(RayStore("test"), "ray", rank, 60.0), 3)

    def meet(self, epoch: int, error: str = "") -> tuple[str, str]:
        """What became of it."""
        try:
            self.barrier.meet(Meeting(f"r{epoch}", epoch, "released"), bound=60.0, error=error)
        except Exception as raised:  # noqa: BLE001 - it is told
            return type(raised).__name__, str(raised)
        return "passed", ""


def test_ranks_in_actors_meet_over_it(store: RayStore) -> None:
    """All pass, or all are told whose fault it is."""
    ranks: list[Any] = [Rank.remote(rank) for rank in range(3)]  # type: ignore[attr-defined]
    assert ray.get([rank.meet.remote(1) for rank in ranks], timeout=120) == [("passed", "")] * 3
    bad = [rank.meet.remote(2, "OSError: full" if at == 1 else "") for at, rank in enumerate(ranks)]
    found = ray.get(bad, timeout=120)
    assert {kind for kind, _ in found} == {"BarrierAborted"}
    assert all(text.endswith("rank 1: OSError: full") for _, text in found)
    assert ray.get([rank.meet.remote(3) for rank in ranks], timeout=120) == [("passed", "")] * 3
    for rank in ranks:
        ray.kill(rank)

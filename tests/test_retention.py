"""Tensors are kept as long as they may be needed, and the very list that held them is emptied after that."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import weightsync
from weightsync.fsm.contract import Weights
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import SetupError
from weightsync.fsm.executors import Executor, RoundView
from weightsync.handlers.retention import Retention


def view(source: object = None) -> RoundView:
    """A round as an executor sees it."""
    weights = cast("Weights", SimpleNamespace(source=source))
    return RoundView(Session("r1", 1, 1), step=1, attempt=1, plan=None, weights=weights)


def broken(point: str, bucket: int) -> None:
    """A fault that lets every bucket fail where it is applied."""
    if point == "apply":
        raise RuntimeError(f"bucket {bucket} cannot be applied")


def hand_over(
    given: Any, handlers: list[Executor], fault: Callable[[str, int], None] | None = None
) -> weightsync.RoundResult:
    """One round with one engine of this process."""
    held = {"w": torch.zeros(3)}
    link = weightsync.LocalEngine(weightsync.receiver_for(held, "e0", fault=fault))
    with weightsync.WeightSync([link], "memory", handlers=handlers) as sync:
        result = sync.on_train_begin(given)
    assert (held["w"].tolist() == [1.0] * 3) is result.ok
    return result


def test_the_list_is_emptied_by_a_good_round() -> None:
    """The same object, so that nobody else keeps the tensors alive by it."""
    tensors: list[Any] = [("w", torch.ones(3))]
    assert hand_over(tensors, [Retention(tensors)]).ok
    assert tensors == []


def test_the_list_is_untouched_by_a_failed_round() -> None:
    """The same object with the same tensors in it, to be sent again."""
    tensor = torch.ones(3)
    tensors: list[Any] = [("w", tensor)]
    kept = tensors[0]
    assert not hand_over(tensors, [Retention(tensors)], broken).ok
    assert tensors == [kept]
    assert tensors[0][1] is tensor


@pytest.mark.parametrize("fault", [None, broken], ids=["good", "failed"])
def test_by_default_it_is_the_list_that_the_weights_came_in(fault: Any) -> None:
    """Nothing has to be named twice."""
    tensors = [("w", torch.ones(3))]
    result = hand_over(tensors, [Retention()], fault)
    assert len(tensors) == (0 if result.ok else 1)


def test_weights_that_came_in_no_list_are_left_alone() -> None:
    """A module or a mapping is the trainer's own."""
    tensors = {"w": torch.ones(3)}
    assert hand_over(tensors, [Retention()]).ok
    assert list(tensors) == ["w"]


def test_nothing_happens_before_the_clean_up() -> None:
    """Preparing neither touches the list nor owes an undo."""
    tensors = [1, 2]
    retention = Retention(tensors)
    prepared: Any = cast("Executor", retention).prepare(view())
    assert (prepared, tensors) == (None, [1, 2])
    retention.clean(view())
    assert tensors == []


def test_a_list_that_is_still_empty_is_a_list() -> None:
    """It may be filled for each round; the one of the round is not emptied in its place."""
    tensors: list[int] = []
    source = [3]
    retention = Retention(tensors)
    retention.clean(view(source))
    tensors.append(1)
    retention.clean(view(source))
    assert (tensors, source) == ([], [3])


def test_what_cannot_be_emptied_is_refused_at_set_up() -> None:
    """A tuple would be kept for ever in silence."""
    with pytest.raises(SetupError, match="empties a list, so one is needed"):
        Retention((1, 2))  # type: ignore[arg-type]

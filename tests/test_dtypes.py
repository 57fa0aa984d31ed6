"""Whatever fits in bytes goes from a trainer into a real engine: every dtype, however it lies."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorkit import DTYPES, LAYOUTS, laid_out, octets
from weightsync.engine import receiver_for
from weightsync.fsm.errors import PlanError
from weightsync.fsm.policy import Policy
from weightsync.handlers.local_engine import LocalEngine
from weightsync.sync import WeightSync

pytestmark = pytest.mark.timeout(60)

TRANSPORTS = pytest.mark.parametrize("transport", ["memory", "collective"])
STRIDES = st.sampled_from(sorted(LAYOUTS))
SHAPES = st.sampled_from([(1, 1, 1), (2, 3, 5), (4, 1, 7), (1, 9, 2), (33, 2, 3)])


def odd(dtype: str, seed: int) -> dict[str, torch.Tensor]:
    """What has no three dimensions, or shares its memory."""
    row = laid_out("contiguous", dtype, 1, 1, 6, seed=seed).view(6)
    return {
        "scalar": row[1], "empty": row[:0], "none of many": row[:0].view(0, 3), "row": row[2:3],
        "vector": row, "every other": row[::2], "expanded": row[:1].expand(3),
    }  # fmt: skip


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of the same dtype and shape, made of bytes: torch makes not every dtype."""
    size = tensor.numel() * tensor.element_size()
    return torch.zeros(size, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


@settings(max_examples=25, deadline=None)
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(DTYPES), STRIDES, STRIDES, SHAPES), min_size=1, max_size=8
    ),
    limit=st.sampled_from([7, 64, 1 << 16]), stages=st.booleans(),
)  # fmt: skip
def test_any_mixture_arrives_bit_for_bit(
    kinds: list[tuple[str, str, str, tuple[int, int, int]]], limit: int, *, stages: bool
) -> None:
    """Dtypes side by side, other strides on the other side, in buckets smaller and larger than they are."""
    state = {
        f"w{n}": laid_out(here, dtype, *shape, seed=n) for n, (dtype, here, _, shape) in enumerate(kinds)
    }
    held = {
        f"w{n}": laid_out(there, dtype, *shape, seed=99) for n, (dtype, _, there, shape) in enumerate(kinds)
    }
    before = {name: (each.data_ptr(), each.stride()) for name, each in held.items()}
    policy = Policy(deadline=30, bucket_bytes=limit, verify_turns=2)
    with WeightSync([LocalEngine(receiver_for(held, "a", stages=stages))], policy=policy) as sync:
        for _ in range(2):
            sync.begin(1, state).wait().require()
    assert {name: octets(each) for name, each in held.items()} == {
        n: octets(each) for n, each in state.items()
    }
    assert {name: (each.data_ptr(), each.stride()) for name, each in held.items()} == before


@TRANSPORTS
@pytest.mark.parametrize("stages", [True, False])
def test_every_dtype_in_every_odd_form_arrives(transport: str, *, stages: bool) -> None:
    """Scalars, tensors without elements, views and expanded ones, all dtypes in one hand-over."""
    state = {f"{dtype} {name}": each for dtype in DTYPES for name, each in odd(dtype, 3).items()}
    held = {name: blank(each) for name, each in state.items()}
    with WeightSync(
        [LocalEngine(receiver_for(held, "a", stages=stages))], transport, policy=Policy(deadline=50)
    ) as sync:
        sync.on_train_begin(state).require()
        sync.begin(1, dict(state)).wait().require()
    assert {name: octets(each) for name, each in held.items()} == {
        n: octets(each) for n, each in state.items()
    }


class Buffers(torch.nn.Module):
    """A parameter, a buffer, one that is not saved, and a tied name."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), float(value)))
        self.tied = self.weight
        self.register_buffer("mean", torch.full((2,), value, dtype=torch.float64))
        self.register_buffer("seen", torch.tensor(int(value)))
        self.register_buffer("scratch", torch.full((2,), float(value)), persistent=False)


@TRANSPORTS
def test_buffers_are_sent_as_parameters_are(transport: str) -> None:
    """Those that belong to the state; what a model does not save is its own affair."""
    engine = Buffers(1)
    with WeightSync([LocalEngine(receiver_for(engine, "a"))], transport) as sync:
        sync.on_train_begin(Buffers(2)).require()
    assert (engine.weight.tolist(), engine.get_buffer("mean").tolist()) == ([2.0] * 3, [2.0] * 2)
    assert (engine.get_buffer("seen").item(), engine.get_buffer("scratch").tolist()) == (2, [1.0] * 2)
    assert engine.tied is engine.weight


def test_a_name_comes_once() -> None:
    """Two tensors of one name are refused where they are handed over, by that name."""
    with (
        WeightSync([LocalEngine(receiver_for({"w": torch.zeros(1)}, "a"))]) as sync,
        pytest.raises(PlanError, match="two tensors are named 'w'"),
    ):
        sync.on_train_begin([("w", torch.ones(1)), ("v", torch.ones(1)), ("w", torch.ones(1))])

"""CUDA IPC on a GPU. Skipped where there is none; what needs no GPU is in ``test_device_ring``."""

import gc
import itertools
from collections.abc import Sequence

import pytest
import torch

from casekit.bench import quick
from casekit.tensors import same, state
from tensorkit import DTYPES, LAYOUTS, laid_out, octets
from weightsync import CudaIpcTransport, LocalEngine, Policy, WeightSync
from weightsync.engine import receiver_for
from weightsync.fsm.contract import InletFactory, Transport
from weightsync.fsm.errors import SetupError
from weightsync.testing.conformance import Check, TransportConformance, TransportUnderTest
from weightsync.transports.cuda_ipc import cuda_ipc_inlet
from weightsync.transports.cuda_memory import CudaMemory, _uuid, _visible

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


class TestConformance(TransportConformance):
    """Engines in threads: they reach the trainer's block without an export."""

    def transport(self) -> Transport:
        """The ring on the current GPU."""
        return CudaIpcTransport()

    def inlet(self) -> InletFactory:
        """Its receiving half."""
        return cuda_ipc_inlet


@pytest.mark.slow
@pytest.mark.chaos
class TestConformanceInProcesses(TestConformance):
    """Two engines in processes of their own, through real exports, and every way to die."""

    processes = True

    def checks(self) -> Sequence[Check[TransportUnderTest]]:
        """All but one: torch keeps its file of counts in /dev/shm while an engine has a block open."""
        return [check for check in super().checks() if not check.name.startswith("nothing-left")]


class TestRounds:
    """Rounds with engines on the GPU and on the CPU."""

    @pytest.mark.parametrize("trainer", ["cpu", "cuda"])
    @pytest.mark.parametrize("engine", ["cpu", "cuda"])
    def test_every_dtype_and_layout(self, trainer: str, engine: str) -> None:
        """Bit for bit, from either place to either place, split over buckets."""
        layouts = itertools.cycle(LAYOUTS)
        sent = {
            dtype: laid_out(next(layouts), dtype, 3, 5, 4, seed=number).to(trainer)
            for number, dtype in enumerate(DTYPES)
        }
        held = {dtype: laid_out(next(layouts), dtype, 3, 5, 4, seed=99).to(engine) for dtype in DTYPES}
        receiver = receiver_for(held, "e0")
        policy = quick(bucket_bytes=101, verify="full")
        with WeightSync([LocalEngine(receiver)], CudaIpcTransport(), policy=policy) as sync:
            sync.on_train_begin(sent).require()
        for dtype, tensor in sent.items():
            assert octets(held[dtype].cpu()) == octets(tensor.cpu()), dtype

    def test_memory_is_the_same_after_twenty_rounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The ring is made once, and given back at the end; nobody asks for a full collection."""

        def refused(*_: object) -> int:
            raise AssertionError("a full collection was asked for")

        monkeypatch.setattr(gc, "collect", refused)
        held = {name: tensor.cuda() for name, tensor in state(-1).items()}
        before = torch.cuda.memory_allocated()
        with WeightSync(
            [LocalEngine(receiver_for(held, "e0"))], CudaIpcTransport(), policy=Policy(bucket_bytes=1 << 16)
        ) as sync:
            levels = []
            for step in range(1, 21):
                result = sync.on_step_end(step, state(float(step)))
                assert result is not None
                assert result.ok, result.summary()
                levels.append(torch.cuda.memory_allocated())
            assert same({name: tensor.cpu() for name, tensor in held.items()}, state(20.0))
            assert levels[1:] == levels[:1] * 19
        staged = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
        assert torch.cuda.memory_allocated() <= before + 2 * staged + (1 << 16)


def test_a_device_that_is_no_gpu_is_refused() -> None:
    """With what to give instead."""
    for device in ("cpu", "cuda:99", "gpu", 99):
        with pytest.raises(SetupError, match="a GPU that this process sees is needed"):
            CudaIpcTransport(device=device)


class TestMemory:
    """What the ring asks of torch."""

    def test_a_lease_is_a_view_and_tells_when_it_is_gone(self) -> None:
        """It shares memory; a view of a view keeps it."""
        memory = CudaMemory()
        block = memory.allocate(4096)
        view, lease = memory.lease(block, 64, 128)
        assert view.data_ptr() == block.data_ptr() + 64
        part = view[3:].view(5, 25)
        del view
        assert lease() is not None
        del part
        assert lease() is None

    def test_an_export_is_plain_values(self) -> None:
        """They fit into a message; and an export that nobody opened can be withdrawn."""
        memory = CudaMemory()
        block = memory.allocate(4096)
        free = torch.cuda.memory_allocated() - 4096
        handle = memory.export(block)
        assert all(type(value) in (str, int, bytes, bool) for value in handle)
        assert _visible()[str(handle[0])] == block.device.index
        assert _uuid(block.device.index) == handle[0]
        memory.withdraw(handle)
        del block
        memory.collect()
        assert torch.cuda.memory_allocated() <= free

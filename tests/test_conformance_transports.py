"""Our transports keep the contract of transports, check by check."""

from collections.abc import Iterator, Sequence

import pytest
import ray

from casekit.objectside import JOIN, joined_inlet
from standin import standin_inlet, standin_ring
from weightsync.fsm.contract import InletFactory, Transport
from weightsync.testing.conformance import Check, TransportConformance, TransportUnderTest
from weightsync.transports.collective import CollectiveTransport, collective_inlet
from weightsync.transports.memory import MemoryTransport, memory_inlet
from weightsync.transports.objects import ObjectStoreTransport, objects_inlet
from weightsync.transports.shm import SharedMemoryTransport, aliasing_shm_inlet, shm_inlet

pytestmark = pytest.mark.timeout(60)


class TestMemory(TransportConformance):
    def transport(self) -> Transport:
        """The transport within a process; it spoils what is read too late."""
        return MemoryTransport(checked=True)

    def inlet(self) -> InletFactory:
        """Its receiving half."""
        return memory_inlet


class TestCollective(TransportConformance):
    def transport(self) -> Transport:
        """Broadcasts over gloo, to ranks in threads of this process."""
        return CollectiveTransport()

    def inlet(self) -> InletFactory:
        """Its receiving half."""
        return collective_inlet


class TestSharedMemoryRing(TransportConformance):
    def transport(self) -> Transport:
        """Slots that are written again when every engine has let go."""
        return SharedMemoryTransport(mode="ring")

    def inlet(self) -> InletFactory:
        """Its receiving half."""
        return shm_inlet


class TestSharedMemoryPublish(TransportConformance):
    def transport(self) -> Transport:
        """Buffers of a whole version, out of which these engines copy."""
        return SharedMemoryTransport(mode="publish")

    def inlet(self) -> InletFactory:
        """The receiving half that hands out whole tensors, too."""
        return aliasing_shm_inlet


class TestDeviceRing(TransportConformance):
    def transport(self) -> Transport:
        """The ring in memory of a device, of one that copies only when it is waited for."""
        return standin_ring()

    def inlet(self) -> InletFactory:
        """Its receiving half."""
        return standin_inlet


class _InProcesses(TransportConformance):
    """Only what processes show that threads cannot: death, for real."""

    processes = True

    def checks(self) -> Sequence[Check[TransportUnderTest]]:
        """What crosses a process boundary, what is left behind, and every way to die."""
        wanted = (
            "good",
            "shapes-in-buckets",
            "dtypes",
            "raise-at-bucket-2",
            "nothing-left",
            "die-at-receive",
            "die-at-bucket-2",
            "die-at-released",
            "dead",
            "stopped",
            "bad-receipt",
            "abort-at-bucket",
        )
        return [check for check in super().checks() if check.name.startswith(wanted)]


@pytest.mark.slow
@pytest.mark.chaos
class TestSharedMemoryRingInProcesses(_InProcesses):
    def transport(self) -> Transport:
        """The ring."""
        return SharedMemoryTransport(mode="ring")

    def inlet(self) -> InletFactory:
        """Its receiving half."""
        return shm_inlet


@pytest.mark.slow
@pytest.mark.chaos
class TestSharedMemoryPublishInProcesses(_InProcesses):
    def transport(self) -> Transport:
        """Buffers of a whole version."""
        return SharedMemoryTransport(mode="publish")

    def inlet(self) -> InletFactory:
        """Its receiving half."""
        return aliasing_shm_inlet


@pytest.mark.slow
@pytest.mark.chaos
class TestDeviceRingInProcesses(TransportConformance):
    """Blocks that are exported and opened for real; what the protocol does is tried above."""

    processes = True

    def checks(self) -> Sequence[Check[TransportUnderTest]]:
        """What depends on the memory."""
        wanted = ("good", "dtypes", "nothing-left", "die-at-bucket-2", "die-at-released", "stopped-at-abort")
        return [check for check in super().checks() if check.name.startswith(wanted)]

    def transport(self) -> Transport:
        """The ring."""
        return standin_ring()

    def inlet(self) -> InletFactory:
        """Its receiving half."""
        return standin_inlet


@pytest.mark.slow
@pytest.mark.chaos
class TestCollectiveInProcesses(_InProcesses):
    def transport(self) -> Transport:
        """Broadcasts over gloo, to processes that can be killed."""
        return CollectiveTransport()

    def inlet(self) -> InletFactory:
        """Its receiving half."""
        return collective_inlet


@pytest.fixture(scope="module")
def board(ray_cluster: None) -> Iterator[None]:
    """One board for all checks of that transport: a process takes longer to start than a check."""
    one = ObjectStoreTransport()
    yield
    one.close()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("board")
class TestObjects(TransportConformance):
    def transport(self) -> Transport:
        """Ray's object store, to ranks in threads of this process."""
        return ObjectStoreTransport()

    def inlet(self) -> InletFactory:
        """Its receiving half."""
        return objects_inlet


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.usefixtures("board")
class TestObjectsInProcesses(TransportConformance):
    """Processes that have joined the cluster, and die for real."""

    processes = True

    @pytest.fixture(autouse=True)
    def cluster(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tell the processes where it is."""
        monkeypatch.setenv(JOIN, ray.get_runtime_context().gcs_address)

    def checks(self) -> Sequence[Check[TransportUnderTest]]:
        """What threads cannot show: death, and a process that stands still."""
        wanted = ("die-at-bucket-2", "dead-at-abort", "stopped")
        return [check for check in super().checks() if check.name.startswith(wanted)]

    def transport(self) -> Transport:
        """Ray's object store, to processes that can be killed."""
        return ObjectStoreTransport()

    def inlet(self) -> InletFactory:
        """Its receiving half, which joins the cluster first."""
        return joined_inlet

"""What every test may rely on: one quiet, local environment, and GPU tests only where there is a GPU."""

import logging
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Set before any test imports torch or ray; what the caller has set stays.
for name, value in {
    "GLOO_SOCKET_IFNAME": "lo",  # process groups of the tests live on this machine
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the new default, without Ray's notice about it
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",  # a busy machine needs longer than the 30 seconds it is given
}.items():
    os.environ.setdefault(name, value)

pytest.register_assert_rewrite("casekit")  # its checks explain themselves as those of tests do

# A time limit for each example finds slow machines, not faults; pytest-timeout watches the whole test. In CI
# the examples are always the same ones, so that a red run is red for everybody.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with Ray come last; what needs a CUDA device is skipped where there is none.

    A cluster stays in the process and opens what it likes; before it is there, a test can count descriptors.
    Torch is asked only if such a test was collected.
    """
    items.sort(key=lambda item: item.get_closest_marker("ray") is not None)
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local cluster for all tests that need Ray: starting it takes longer than most of them.

    Actors of the tests ask for no CPU, so that none of them waits for another test's actor to be gone.
    """
    import ray

    # A mutant has to be one in every process; nothing is asked for otherwise.
    hook = {"worker_process_setup_hook": "chaosmutants.install"}
    broken = hook if "CHAOSKIT_MUTANT" in os.environ else None
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
        runtime_env=broken,
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture
def untraced() -> Iterator[None]:
    """Run the test without the trace of a coverage run, which makes an exploration four times slower.

    For tests that take the same few lines a million times; the lines themselves are covered by smaller ones.
    """
    trace = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(trace)

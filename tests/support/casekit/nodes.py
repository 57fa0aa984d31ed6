"""Two Ray nodes on this machine, each with an object store of its own: ``python -m casekit.nodes FILE``.

Beside the session's cluster, and so in a process of its own. It leaves what it found in the file, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from torch import Tensor

from weightsync import Policy, RayEngine, RayReceiver, RoundResult, WeightSync, ray_engine

from .rayside import environment

__all__ = ["main"]

_MIB = 1 << 20
_STORE = 128 * _MIB
_PATIENCE = 60.0


def _weights(step: int) -> dict[str, Tensor]:
    return {f"w{number}": torch.full((_MIB // 4,), float(step + number)) for number in range(6)}


class _Engine(RayReceiver):
    def __init__(self, name: str) -> None:
        torch.set_num_threads(1)
        self._held = _weights(-1)
        self.weightsync_serve(self._held, id=name)

    def values(self) -> list[float]:
        """Of each tensor that it samples with: its first and its last number."""
        return [float(end) for tensor in self._held.values() for end in (tensor[0], tensor[-1])]

    def node(self) -> str:
        """Where it is."""
        return ray.get_runtime_context().get_node_id()


def _told(result: RoundResult | None, engines: dict[str, Any], step: int) -> dict[str, Any]:
    assert result is not None
    wanted = [float(end) for tensor in _weights(step).values() for end in (tensor[0], tensor[-1])]
    held = {
        name: ray.get(actor.values.remote(), timeout=_PATIENCE) == wanted for name, actor in engines.items()
    }
    return {"ok": result.ok, "line": result.summary(), "new": held}


def main() -> None:
    """Two hand-overs to engines on both nodes, then one node goes, then a third."""
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": _STORE, "resources": {"near": 1}},
    )
    far = cluster.add_node(num_cpus=1, object_store_memory=_STORE, resources={"far": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    make: Any = ray_engine(num_cpus=0, runtime_env=environment())(_Engine)
    here = make.options(resources={"near": 0.1}).remote("here")
    there = {name: make.options(resources={"far": 0.1}).remote(name) for name in ("there", "yonder")}
    engines = {"here": here, **there}
    found: dict[str, Any] = {}
    found["nodes"] = len({ray.get(each.node.remote(), timeout=_PATIENCE) for each in engines.values()})
    policy = Policy(bucket_bytes=2 * _MIB, deadline=_PATIENCE, on_engine_failure="quarantine", quorum=0.3)
    links = [RayEngine(actor, id=name) for name, actor in engines.items()]
    with WeightSync(links, "objects", policy=policy) as sync:
        found["first"] = _told(sync.on_step_end(1, _weights(1)), engines, 1)
        found["second"] = _told(sync.on_step_end(2, _weights(2)), engines, 2)
        cluster.remove_node(far, allow_graceful=False)
        found["alone"] = _told(sync.on_step_end(3, _weights(3)), {"here": here}, 3)
        found["servable"] = sorted(sync.servable())
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()

"""A trainer that exports by Megatron-Bridge: by a stand-in, on two real ranks, which is held to the original.

The stand-in is compared with a recording of the published package, and the recording with the package itself,
where that can be had. Both are read, and not imported.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bridgeside
from bridgesource import FAKE, RECORDING, of_sources, of_wheel
from fakebridge import Stage, WeightConversionTask, Wrapped
from fsdpside import Ranks
from weightsync.fsm.errors import PlanError, SetupError
from weightsync.handlers.megatron_export import MegatronExporter

RECORDED = json.loads(RECORDING.read_text(encoding="utf-8"))
HITS = ("add", "data", "parameter", "module", "again")


@pytest.fixture(scope="module")
def said() -> Iterator[list[dict[str, Any]]]:
    """What both ranks of one tour said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = Ranks(port, ("pipeline",), bridgeside.serve)
    yield ranks.said("pipeline")
    ranks.end()


def test_engines_hold_what_the_trainer_has(said: list[dict[str, Any]]) -> None:
    """Whatever was changed, replaced or made again since the plan was."""
    for rank in said:
        for what in ("first", *HITS):
            assert (what, rank[what]["told"], rank[what]["wrong"]) == (what, "ok", [])


def test_a_stage_that_was_made_again_is_gone(said: list[dict[str, Any]]) -> None:
    """No task keeps it alive."""
    assert [rank["gone"] for rank in said] == [True, True]


def test_bridge_plans_once(said: list[dict[str, Any]]) -> None:
    """And no rank calls a collective of objects from the second hand-over on."""
    for rank in said:
        assert (rank["again"]["builds"], rank["again"]["hits"]) == (1, 5)
        assert rank["first"]["objects"] == rank["first"]["counted"] == 12
        assert [rank[what]["objects"] for what in HITS] == [0] * 5


def test_the_plan_says_which_rank_has_what(said: list[dict[str, Any]]) -> None:
    """The same on all ranks, though each has another stage."""
    assert said[0]["plan"] == said[1]["plan"]
    owners = said[0]["plan"][1]
    assert len(owners) == 10
    assert {name: ranks for name, ranks in owners.items() if name.endswith("weight") or "scale" in name} == {
        "layers.0.weight": (0,), "layers.1.weight": (0,), "scale.0": (0,),
        "layers.2.weight": (1,), "layers.3.weight": (1,), "scale.2": (1,),
    }  # fmt: skip


def test_a_plan_is_worth_its_while(said: list[dict[str, Any]]) -> None:
    """With 50 ms for each collective of objects, a hand-over with a plan takes a third or less."""
    for rank in said:
        slowest = max(rank[what]["seconds"] for what in HITS)
        assert rank["uncached"]["objects"] == 12
        assert rank["uncached"]["seconds"] > 3 * slowest


def test_eight_bits_are_planned_by_bridge_itself(said: list[dict[str, Any]]) -> None:
    """In every hand-over, on all ranks; and the ordinary plan is made anew afterwards."""
    for rank in said:
        assert [each["told"] for each in (*rank["fp8"], *rank["not fp8"])] == ["ok"] * 4
        assert [each["builds"] for each in (*rank["fp8"], *rank["not fp8"])] == [2, 3, 4, 4]
        assert [each["objects"] for each in rank["fp8"]] == [11, 11]
        assert [each["wrong"] for each in rank["fp8"]] == [[], []]


def test_a_stage_that_changes_alone_is_refused_on_both(said: list[dict[str, Any]]) -> None:
    """By its first line that is another one, at once, and before anybody asks anybody."""
    for rank in said:
        alone = rank["alone"]
        assert alone["told"].startswith(
            "PlanMismatch: rank 1 of the trainer changed since the export plan was"
        )
        assert "'module.layers.0.bias'" in alone["told"]
        assert alone["seconds"] < 2.0
        assert (alone["objects"], alone["builds"]) == (0, 4)


# -- without ranks ----------------------------------------------------------------------------------------


class Bridge:
    """Hands out the tasks that it is given."""

    def __init__(self, *tasks: Any) -> None:
        self.tasks, self.hf_pretrained = tasks, SimpleNamespace(architectures=["A"])
        self.exported: list[Any] = []

    def get_conversion_tasks(self, megatron_model: Any, hf_path: Any = None) -> list[Any]:
        """These."""
        return list(self.tasks)

    def export_hf_weights(self, model: Any, **how: Any) -> list[Any]:
        """Nothing, and how it was asked for."""
        self.exported.append(how)
        return []


def task(stage: Wrapped, name: str, weight: Any = None) -> WeightConversionTask:
    """Of a layer's parameter."""
    path, _, attribute = name.rpartition(".")
    module = stage.module.get_submodule(path)
    weight = getattr(module, attribute) if weight is None else weight
    return WeightConversionTask(name, name, None, 0, 0, module, weight)  # type: ignore[arg-type]


def test_what_is_kept_of_a_task_refers_to_nothing() -> None:
    """The tasks that are handed back are filled in from the model, and those without a mapping stay none."""
    stage = Wrapped(Stage(0, 1, 0))
    bridge = Bridge(None, task(stage, "layers.0.weight"))
    exporter = MegatronExporter(bridge, [stage])
    (slot,) = exporter.plan()
    assert (slot.name, slot.owners) == ("layers.0.weight", (0,))
    kept = exporter._tasks[1][0]
    assert (kept.megatron_module, kept.param_weight) == (None, None)
    assert list(exporter.tensors(None)) == []  # type: ignore[arg-type]
    (how,) = bridge.exported
    nothing, filled = how["conversion_tasks"]
    assert nothing is None
    assert filled.megatron_module is stage.module.layers[0]
    assert filled.param_weight is stage.module.layers[0].weight
    assert (how["show_progress"], how["merge_adapter_weights"], how["cpu"]) == (False, False, False)
    exporter.forget()
    assert exporter._tasks == []


def test_a_task_of_a_tensor_that_cannot_be_found_again_is_refused() -> None:
    """It would be read as it was for ever."""
    stage = Wrapped(Stage(0, 1, 0))
    bridge = Bridge(task(stage, "layers.0.weight", torch.zeros(4, 4)))
    with pytest.raises(
        PlanError, match=r"'layers.0.weight' has a tensor that is not the 'weight' of a module"
    ):
        MegatronExporter(bridge, [stage]).plan()


def test_adapters_are_merged_or_refused() -> None:
    """They would be left out in silence."""
    stage: Any = Wrapped(Stage(0, 1, 0))
    stage.module.layers[0].adapter = torch.nn.Linear(2, 2)
    with pytest.raises(PlanError, match=r"belongs to an adapter.*merge_adapters=True"):
        MegatronExporter(Bridge(), [stage]).outline()
    merging = MegatronExporter(Bridge(), [stage], merge_adapters=True)
    assert any(".adapter." in line for line in merging.outline().own)


@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "expert_model_parallel_size", "params_dtype"])
def test_another_topology_is_another_outline(name: str) -> None:
    """On all ranks, so it is shared."""
    stage = Wrapped(Stage(0, 1, 0))
    exporter = MegatronExporter(Bridge(), [stage])
    before = exporter.outline()
    setattr(stage.module.config, name, 8)
    after = exporter.outline()
    assert before.common != after.common
    assert before.own == after.own


def test_the_stages_are_not_kept_alive() -> None:
    """Nor read when they are gone."""
    stage = Wrapped(Stage(0, 1, 0))
    exporter = MegatronExporter(Bridge(), [stage])
    exporter.outline()
    del stage
    with pytest.raises(PlanError, match="the module of this MegatronExporter is gone"):
        exporter.outline()


def test_wrong_parts_are_refused_at_set_up() -> None:
    """In one line each."""
    stage = Wrapped(Stage(0, 1, 0))
    wrong: Any = object()
    with pytest.raises(SetupError, match=r"an AutoBridge of megatron\.bridge is needed"):
        MegatronExporter(wrong, [stage])
    models: list[Any] = [[], 3, stage]
    for model in models:
        with pytest.raises(SetupError, match=r"MegatronExporter\(model=.*list of this rank's stages"):
            MegatronExporter(Bridge(), model)
    with pytest.raises(SetupError, match="cpu"):
        MegatronExporter(Bridge(), [stage], cpu=1)  # type: ignore[arg-type]


# -- the original -----------------------------------------------------------------------------------------


def test_the_stand_in_is_like_the_recording() -> None:
    """Names, signatures, and the order of the calls that matter."""
    assert of_sources({"fake": FAKE.read_text(encoding="utf-8")}) == RECORDED["found"]
    assert len(RECORDED["found"]) == 16


def test_what_the_exporter_uses_is_in_the_recording() -> None:
    """Its keywords are arguments there, and what it fills in are fields."""
    found = RECORDED["found"]
    for word in ("cpu", "show_progress", "conversion_tasks", "merge_adapter_weights"):
        assert f"{word}=" in found["AutoBridge.export_hf_weights"]["arguments"]
    fields = {each.partition(" ")[0] for each in found["WeightConversionTask"]["fields"]}
    assert fields == set(WeightConversionTask.__dataclass_fields__)
    assert {"global_param_name", "param_name", "megatron_module", "param_weight"} <= fields


@pytest.mark.slow
def test_the_recording_is_of_the_published_package(tmp_path: Path) -> None:
    """As the package registry serves it, if it does."""
    wanted = f"{RECORDED['package']}=={RECORDED['version']}"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "-qq",
        "--retries",
        "1",
    ]
    fetched = subprocess.run(
        [*pip, "--timeout", "10", "--dest", str(tmp_path), wanted],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    wheels = list(tmp_path.glob("*.whl"))
    if fetched.returncode or not wheels:
        pytest.skip(f"no registry serves {wanted}: {fetched.stderr.strip().splitlines()[-1:]}")
    assert of_wheel(wheels[0]) == RECORDED

"""Weights of a Megatron trainer by Megatron-Bridge, whose conversion tasks are planned once.

    export = CachedExport(MegatronExporter(bridge, model))
    sync.on_step_end(step, export)  # on every rank

Bridge plans by asking all ranks of the pipeline for their parameters, as objects, and hands out tasks that
refer to modules and tensors. What is kept here of a task is everything but those: where its module is, by
stage and name, and the mapping, which keeps for itself what it has learned from other ranks. In each
hand-over the tasks are filled in anew, so that a parameter which was replaced, or a module that was made
again, is read as it is.

A rank sees only its own stages, so an outline has lines of its own beside what all ranks share. Written by
the source of megatron-bridge 0.3.1, and not run with Megatron: ``tests/test_megatron_export.py`` has a
stand-in, and compares its names, signatures and order of calls with that source.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..fsm import checks
from ..fsm.errors import PlanError
from ..fsm.exports import ExportPlan, Outline, Slot
from .export_entries import ModelAt, persistent_buffers, world
from .wrapped import dtype_of

if TYPE_CHECKING:
    import torch

__all__ = ["MegatronExporter"]

_TOPOLOGY = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "num_moe_experts",
    "params_dtype",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a task's module and tensor are: the stage, the module's name, and the tensor's name in it."""

    stage: int
    module: str
    name: str


class MegatronExporter:
    """Exports by ``AutoBridge.export_hf_weights``, with tasks by ``AutoBridge.get_conversion_tasks``.

    Args:
        bridge: an ``AutoBridge`` of ``megatron.bridge``.
        model: the list of this rank's stages, which are not kept alive; or a function that gives the present
            ones.
        cpu: whether tensors come in host memory.
        merge_adapters: whether adapters are merged into what they adapt. Bridge then asks the ranks of the
            pipeline for objects in every hand-over, planned or not.

    Raises:
        SetupError: something of the wrong kind.
    """

    def __init__(
        self,
        bridge: Any,
        model: Sequence[torch.nn.Module] | Callable[[], Sequence[torch.nn.Module]],
        *,
        cpu: bool = False,
        merge_adapters: bool = False,
    ) -> None:
        import torch

        where = "MegatronExporter"
        if not checks.has(bridge, ("get_conversion_tasks", "export_hf_weights")):
            raise checks.refusal(where, "bridge", bridge, "an AutoBridge of megatron.bridge is needed")
        checks.flag(where, "cpu", cpu)
        checks.flag(where, "merge_adapters", merge_adapters)
        self._stages: Callable[[], Sequence[Any]]
        if isinstance(model, torch.nn.Module) or not callable(model):
            if not isinstance(model, (list, tuple)) or not model:
                raise checks.refusal(where, "model", model, "a list of this rank's stages is needed")
            finders = [ModelAt(where, each) for each in model]
            self._stages = lambda: [find() for find in finders]
        else:
            self._stages = ModelAt(where, model)
        self._bridge, self._cpu, self._merge = bridge, cpu, merge_adapters
        self._tasks: list[tuple[Any, _Place | None]] = []

    @property
    def lasting(self) -> bool:
        """Not if Bridge exports eight bits: that plans in its own way, by what the tensors are just then."""
        return getattr(self._bridge, "export_weight_dtype", None) != "fp8"

    def outline(self) -> Outline:
        """The bridge and the topology, and the tensors of this rank's stages.

        Raises:
            PlanError: there are adapters, and nothing was said of them.
        """
        stages = self._models()
        config = _unwrapped(stages[0]).config
        pretrained = getattr(self._bridge, "hf_pretrained", None)
        kind = getattr(getattr(pretrained, "config", pretrained), "architectures", None)
        shared = [f"bridge {type(self._bridge).__name__} of {kind}"]
        shared += [f"{name} {getattr(config, name, None)}" for name in _TOPOLOGY]
        shared.append(f"fp8 {not self.lasting}, cpu {self._cpu}, merge_adapters {self._merge}")
        own = []
        for stage, name, tensor in _named(stages):
            if ".adapter." in name and not self._merge:
                raise PlanError(
                    f"{name!r} belongs to an adapter, which would be left out: MegatronExporter("
                    "merge_adapters=True) merges it into what it adapts"
                )
            own.append(f"stage {stage} {name!r} {dtype_of(tensor)} {tuple(tensor.shape)}")
        return Outline(world(), tuple(shared), tuple(own))

    def plan(self) -> Sequence[Slot]:
        """Bridge's tasks, without what they refer to; a slot for each, with the ranks that have a part."""
        if not self.lasting:
            return []
        stages = self._models()
        tasks = self._bridge.get_conversion_tasks(stages)
        self._tasks = [_stripped(stages, task) for task in tasks]
        there = [task for task in tasks if task is not None]
        owners = _owners([task.global_param_name for task in there if task.param_weight is not None])
        # What a task becomes, and of which dtype, only Bridge knows.
        names = [task.global_param_name for task in there]
        return [Slot(name, "", (), owners.get(name, ())) for name in names]

    def tensors(self, plan: ExportPlan) -> Iterator[tuple[str, torch.Tensor]]:
        """What Bridge makes of the tasks, under the names of Hugging Face."""
        stages = self._models()
        tasks = [_filled(stages, task, place) for task, place in self._tasks] if self.lasting else None
        yield from self._bridge.export_hf_weights(
            stages,
            cpu=self._cpu,
            show_progress=False,
            conversion_tasks=tasks,
            merge_adapter_weights=self._merge,
        )

    def forget(self) -> None:
        """Drop the tasks, and with them what their mappings have learned."""
        self._tasks = []

    def _models(self) -> list[Any]:
        return list(self._stages())


def _named(stages: Sequence[Any]) -> Iterator[tuple[int, str, torch.Tensor]]:
    for number, stage in enumerate(stages):
        for name, tensor in itertools.chain(stage.named_parameters(), persistent_buffers(stage)):
            if "_extra_state" not in name:
                yield number, name, tensor


def _unwrapped(module: Any) -> Any:
    while not hasattr(module, "config") and hasattr(module, "module"):
        module = module.module
    return module


def _stripped(stages: Sequence[Any], task: Any) -> tuple[Any, _Place | None]:
    """A task without its module and its tensor, and where they are found."""
    if task is None or (task.megatron_module is None and task.param_weight is None):
        return task, None
    place = _place(stages, task)
    return replace(task, megatron_module=None, param_weight=None), place


def _place(stages: Sequence[Any], task: Any) -> _Place:
    """By identity, so that nothing hangs on how Bridge makes its names."""
    attribute = task.param_name.rpartition(".")[2]
    for number, stage in enumerate(stages):
        for name, module in stage.named_modules():
            if module is task.megatron_module and getattr(module, attribute, None) is task.param_weight:
                return _Place(number, name, attribute)
    raise PlanError(
        f"the task of {task.global_param_name!r} has a tensor that is not the {attribute!r} of a module of "
        "this rank: it could not be found again, so this model's tasks cannot be kept"
    )


def _filled(stages: Sequence[Any], task: Any, place: _Place | None) -> Any:
    """The task with its module and tensor as they are now."""
    if place is None:
        return task
    module = stages[place.stage].get_submodule(place.module)
    if not hasattr(module, "config"):  # Bridge gives it one when it plans, and this may be a newer module
        module.config = _unwrapped(stages[0]).config
    return replace(task, megatron_module=module, param_weight=getattr(module, place.name))


def _owners(held: list[str]) -> dict[str, tuple[int, ...]]:
    """The ranks that have a part of each tensor: one more collective of objects, in planning alone."""
    ranks = world()
    gathered: list[Any] = [held]
    if ranks > 1:
        import torch.distributed as dist

        gathered = [None] * ranks
        dist.all_gather_object(gathered, held)
    owners: dict[str, tuple[int, ...]] = {}
    for rank, names in enumerate(gathered):
        for name in names:
            owners[name] = (*owners.get(name, ()), rank)
    return owners

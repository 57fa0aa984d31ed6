"""A stand-in for Megatron-Bridge: a pipeline of ranks over gloo, one-to-one mappings, no tensor parallelism.

Its names, signatures and the order of the calls that matter are those of the published package, which
``bridgesource.py`` reads and a test compares. What it does is our own.
"""
# ruff: noqa: PLR0917 - the signatures are not ours

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed

__all__ = ["AutoBridge", "Stage", "Wrapped"]


class Stage(torch.nn.Module):
    """A stage of the pipeline: its layers, and its numbers of them among all."""

    def __init__(self, first: int, layers: int, seed: int, size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = SimpleNamespace(
            pipeline_model_parallel_size=2,
            tensor_model_parallel_size=1,
            share_embeddings_and_output_weights=False,
        )
        self.first = first
        self.layers = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(layers))
        self.register_buffer("scale", torch.ones(1) * (first + 1))


class Wrapped(torch.nn.Module):
    """As a data-parallel wrapper names what is in it."""

    def __init__(self, module: Stage) -> None:
        super().__init__()
        self.module = module


class HFWeightTuple(NamedTuple):
    """What comes out."""

    param_name: str
    weight: torch.Tensor


@dataclass(frozen=True)
class WeightConversionTask:
    """What is to be done with one parameter."""

    param_name: str
    global_param_name: str
    mapping: DirectMapping
    pp_rank: int | None = None
    vp_stage: int | None = None
    megatron_module: torch.nn.Module | None = None
    param_weight: torch.Tensor | None = None


class MegatronParamMapping:
    """Brings a tensor to all ranks of the pipeline, and remembers what kind it is."""

    def __init__(self, megatron_param: str, hf_param: str) -> None:
        self.megatron_param, self.hf_param = megatron_param, hf_param
        self._specs: dict[str, Any] = {}

    def broadcast_from_pp_rank(
        self, tensor: torch.Tensor | None, cache_key: str | None = None
    ) -> torch.Tensor:
        """From the one that has it."""
        size = torch.distributed.get_world_size()
        if cache_key is not None and cache_key in self._specs:
            found = self._specs[cache_key]
        else:
            found = [None] * size
            mine = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
            torch.distributed.all_gather_object(found, mine)
            self._specs[cache_key or ""] = found
        (owner,) = [rank for rank, each in enumerate(found) if each is not None]
        if tensor is None:
            shape, dtype = found[owner]
            tensor = torch.empty(shape, dtype=dtype)
        tensor = tensor.detach()
        torch.distributed.broadcast(tensor, src=owner)
        return tensor


class DirectMapping(MegatronParamMapping):
    """One name becomes one name."""

    def megatron_to_hf(
        self, megatron_weights: torch.Tensor | None, megatron_module: torch.nn.Module | None
    ) -> dict[str, torch.Tensor]:
        """As it is."""
        assert megatron_module is None or hasattr(megatron_module, "config")
        megatron_weights = self.broadcast_from_pp_rank(megatron_weights, cache_key=str(self.hf_param))
        return {self.hf_param: megatron_weights}


class MegatronMappingRegistry:
    """Knows the mapping of every parameter."""

    def megatron_to_hf_lookup(self, megatron_param_name: str) -> DirectMapping:
        """A new one each time."""
        return DirectMapping(megatron_param_name, f"model.{megatron_param_name}")


def persistent_buffers(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """All of them are, here."""
    return model.named_buffers()


def get_module_and_param_from_name(
    models: Any, param_name: str, vp_stage: int | None = None
) -> tuple[torch.nn.Module, torch.Tensor]:
    """By the name without wrappers."""
    path, _, name = param_name.rpartition(".")
    module = models[vp_stage or 0].module.get_submodule(path)
    return module, getattr(module, name)


class MegatronModelBridge:
    """Plans and converts; a new one for each call."""

    def mapping_registry(self) -> MegatronMappingRegistry:
        """Of this architecture."""
        return MegatronMappingRegistry()

    def _unwrap_name(self, name: str) -> str:
        return name.removeprefix("module.")

    def _global(self, stage: Any, name: str) -> str:
        head, _, rest = name.partition(".")
        if head != "layers":
            return f"{name}.{stage.module.first}"
        number, _, rest = rest.partition(".")
        return f"layers.{int(number) + stage.module.first}.{rest}"

    def _megatron_global_param_names_all_pp_ranks(self, megatron_model: Any) -> list[str]:
        names = []
        for model in megatron_model:
            for local_name, _ in itertools.chain(model.named_parameters(), persistent_buffers(model)):
                names.append(self._global(model, self._unwrap_name(local_name)))
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, names)
        return sorted(set(itertools.chain.from_iterable(gathered)))

    def build_conversion_tasks(
        self, hf_pretrained: Any, megatron_model: Any
    ) -> list[WeightConversionTask | None]:
        """For every parameter of the pipeline, with what this rank has of it."""
        registry = self.mapping_registry()
        names = self._megatron_global_param_names_all_pp_ranks(megatron_model)
        tasks: list[WeightConversionTask | None] = [None] * len(names)
        rank = torch.distributed.get_rank()
        for vp_stage, model in enumerate(megatron_model):
            for local_name, _ in itertools.chain(model.named_parameters(), persistent_buffers(model)):
                local_name = self._unwrap_name(local_name)  # noqa: PLW2901 - as the field is called
                global_name = self._global(model, local_name)
                mapping = registry.megatron_to_hf_lookup(global_name)
                module, weight = get_module_and_param_from_name(megatron_model, local_name, vp_stage)
                if not hasattr(module, "config"):
                    module.config = model.module.config
                tasks[names.index(global_name)] = WeightConversionTask(
                    pp_rank=rank, vp_stage=vp_stage, param_name=local_name, global_param_name=global_name,
                    megatron_module=module, param_weight=weight, mapping=mapping,
                )  # fmt: skip
        for index, global_name in enumerate(names):
            if tasks[index] is None:
                mapping = registry.megatron_to_hf_lookup(global_name)
                tasks[index] = WeightConversionTask(
                    pp_rank=rank, vp_stage=None, param_name=global_name, global_param_name=global_name,
                    megatron_module=None, param_weight=None, mapping=mapping,
                )  # fmt: skip
        return tasks

    def build_adapter_conversion_tasks(self, megatron_model: Any) -> dict[str, Any]:
        """There are none, but that has to be asked."""
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, [])
        return {}

    def stream_weights_megatron_to_hf(
        self,
        megatron_model: Any,
        hf_pretrained: Any,
        cpu: bool = True,
        show_progress: bool = True,
        conversion_tasks: Any = None,
        merge_adapter_weights: bool = True,
    ) -> Iterator[HFWeightTuple]:
        """One after the other."""
        if conversion_tasks is None:
            conversion_tasks = self.build_conversion_tasks(hf_pretrained, megatron_model)
        if merge_adapter_weights:
            self.build_adapter_conversion_tasks(megatron_model)
        for task in conversion_tasks:
            found = task.mapping.megatron_to_hf(task.param_weight, task.megatron_module)
            for hf_name, tensor in found.items():
                yield HFWeightTuple(hf_name, tensor.cpu() if cpu else tensor)


def get_model_bridge(hf_architecture: Any) -> MegatronModelBridge:
    """A new one each time."""
    return MegatronModelBridge()


class AutoBridge:
    """What a trainer has of the package."""

    def __init__(self, hf_pretrained: Any) -> None:
        self.hf_pretrained = hf_pretrained

    def export_hf_weights(
        self,
        model: Any,
        cpu: bool = False,
        show_progress: bool = True,
        conversion_tasks: list[Any] | None = None,
        merge_adapter_weights: bool = True,
    ) -> Iterable[HFWeightTuple]:
        """Whole tensors, on all ranks."""
        return self._model_bridge.stream_weights_megatron_to_hf(
            model, self.hf_pretrained, cpu=cpu, show_progress=show_progress,
            conversion_tasks=conversion_tasks, merge_adapter_weights=merge_adapter_weights,
        )  # fmt: skip

    def get_conversion_tasks(self, megatron_model: Any, hf_path: Any = None) -> list[Any]:
        """The plan."""
        return self._model_bridge.build_conversion_tasks(self.hf_pretrained, megatron_model)

    @property
    def _model_bridge(self) -> MegatronModelBridge:
        return get_model_bridge("fake")

"""The trainer's tensors as the weights of a round: names, ties, the plan and the digest.

A tensor that goes by several names (an output head tied to an embedding) is sent once, under the first of
them; the others are ties of the plan, so that an engine that keeps them apart gets each of them. Two names
are tied when they are the same elements of the same memory.

A module, a mapping and a list are read at once, so that what cannot be sent is refused where it was handed
over. A generator, and a function that gives a source, are read by ``materialize`` in the round, whose error
it then is if they raise. Only references are held: a trainer that goes on training while a round is under
way takes a ``snapshot`` first. ``forget`` lets go of the tensors.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, final

import torch

from ..fsm import checks
from ..fsm.contract import Weights
from ..fsm.errors import PlanError, TransportError
from ..fsm.plan import Plan, make_plan
from ..fsm.tensors import TensorSpec, Tie, has_memory, spec
from .digest import digest_of
from .octets import dtype_name
from .sources import deferred, pairs

__all__ = ["TorchWeights", "tensors_of"]

_Groups = tuple[Collection[str], ...]


@final
class TorchWeights:
    """Tensors of one version, by name, in the order of their source. Make it with ``of``."""

    __slots__ = ("_digest", "_error", "_groups", "_lock", "_named", "_source", "_specs", "_ties")

    def __init__(self, source: Any, groups: _Groups = ()) -> None:
        self._source = source
        self._groups = groups
        self._lock = threading.RLock()
        self._named: dict[str, torch.Tensor] | None = None
        self._specs: tuple[TensorSpec, ...] | None = None
        self._ties: tuple[Tie, ...] = ()
        self._error: BaseException | None = None
        self._digest: str | None = None

    @classmethod
    def of(cls, source: object, *, groups: Iterable[Collection[str]] = ()) -> TorchWeights:
        """The weights of ``source``; what is a ``TorchWeights`` already stays itself.

        Args:
            source: a module, a mapping, (name, tensor) pairs, or a function without arguments that gives one.
            groups: names of tensors that must arrive together, in one bucket.

        Raises:
            PlanError: something in it cannot be sent; the message names it.
            SetupError: the groups are none.
        """
        if isinstance(source, TorchWeights):
            return source
        if isinstance(groups, str) or not isinstance(groups, Iterable):
            raise checks.refusal("TorchWeights.of", "groups", groups, "a list of lists of names is needed")
        together = tuple(group if isinstance(group, str) else tuple(sorted(group)) for group in groups)
        weights = cls(source, together)
        if not deferred(source):
            weights.materialize()
        return weights

    @property
    def source(self) -> Any:
        """What the tensors were read from, the very object."""
        return self._source

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors that are sent, by the names of the plan's tensors."""
        self.materialize()
        if self._named is None:
            raise PlanError("these weights were let go of: their tensors are gone")
        return self._named

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Further names of them."""
        self.materialize()
        return self._ties

    @property
    def ready(self) -> bool:
        """Whether the tensors have been read."""
        return self._specs is not None

    def materialize(self) -> None:
        """Read the tensors, once. What a generator or a function raises comes out as it is.

        Raises:
            PlanError: something cannot be sent, or an earlier attempt used up a part of a generator.
        """
        with self._lock:
            if self._specs is not None:
                return
            if self._error is not None:
                raise PlanError(
                    "these weights can be read only once, and reading them failed; give the generator anew, "
                    "or a function that makes it"
                ) from self._error
            try:
                named, ties = _read(self._source)
                specs = tuple(_describe(name, tensor) for name, tensor in named.items())
            except BaseException as error:
                if isinstance(self._source, Iterator):
                    self._error = error
                raise
            self._named, self._ties, self._specs = named, ties, specs

    def plan(self, bucket_bytes: int) -> Plan:
        """The buckets for these tensors; the same object for the same names, dtypes, shapes and ties."""
        self.materialize()
        return _planned(self._specs or (), self._ties, self._groups, bucket_bytes)

    def digest(self) -> str:
        """The digest of the content, in the plan's order. Worked out once: the tensors are not to change."""
        tensors = self.tensors
        with self._lock:
            if self._digest is None:
                self._digest = digest_of(self._specs or (), tensors)
            return self._digest

    def snapshot(self) -> TorchWeights:
        """The same weights with tensors of their own, which later training does not change."""
        copy = TorchWeights(self._source, self._groups)
        copy._named = {
            name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in self.tensors.items()
        }
        copy._specs, copy._ties = self._specs, self._ties
        return copy

    def forget(self) -> None:
        """Let go of the tensors, and of the source. Plan and digest stay."""
        with self._lock:
            if self._specs is None:
                self._error = PlanError("they were let go of before they were read")
            self._named = self._source = None


def tensors_of(weights: Weights) -> Mapping[str, torch.Tensor]:
    """The tensors of ``weights``, for a transport, which is handed any kind of weights."""
    if not isinstance(weights, TorchWeights):
        kind = type(weights).__name__
        raise TransportError(f"this transport sends tensors, so it needs TorchWeights, not {kind}")
    return weights.tensors


def _read(source: Any) -> tuple[dict[str, torch.Tensor], tuple[Tie, ...]]:
    named: dict[str, torch.Tensor] = {}
    starting: dict[int, list[str]] = {}
    ties: list[Tie] = []
    for name, tensor in pairs(source):
        if not has_memory(tensor):
            raise PlanError(
                f"tensor {name!r} has no memory, its storage was resized: gather it first (FSDP: inside "
                "summon_full_params, or send a full state dict)"
            )
        # Where it starts tells nearly all of them apart; one without elements may start nowhere.
        start = tensor.data_ptr()
        there = starting.get(start)
        of = next((other for other in there if _same(named[other], tensor)), None) if there else None
        if of is not None:
            ties.append(Tie(name, of))
            continue
        named[name] = tensor
        if there:
            there.append(name)
        elif start:
            starting[start] = [name]
    return named, tuple(ties)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors that start at the same place are the same elements; without any, they are not."""
    return (
        (one.dtype, one.shape, one.stride(), one.device)
        == (other.dtype, other.shape, other.stride(), other.device)
    ) and one.numel() > 0


def _describe(name: str, tensor: torch.Tensor) -> TensorSpec:
    return spec(name, dtype_name(tensor.dtype), tensor.shape)


@functools.lru_cache(maxsize=16, typed=True)  # 1.0 is no number of bytes, though it equals 1
def _planned(
    specs: tuple[TensorSpec, ...], ties: tuple[Tie, ...], groups: _Groups, bucket_bytes: int
) -> Plan:
    return make_plan(specs, bucket_bytes=bucket_bytes, ties=ties, groups=groups)

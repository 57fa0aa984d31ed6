"""The trainer's tensors as the weights of a round: names, ties, the plan and the digest.

A tensor that goes by several names (an output head tied to an embedding) is sent once, under the first of
them; the others are ties of the plan, so that an engine that keeps them apart gets each of them. Two names
are tied when they are the same elements of the same memory.

With ``cast``, floating-point tensors are sent as numbers of another dtype: they are described as such, and
cast where their bytes are read (:class:`.octets.Cast`). With ``only``, what matches none of the patterns is
left out, as if the source did not have it; the plan then says that it is partial. A tensor with several names
is sent under the first of them that matches, and the others that match are its ties.

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
from ..fsm.errors import PlanError, SetupError, TransportError
from ..fsm.plan import Plan, make_plan
from ..fsm.sampling import WHOLE, Part
from ..fsm.tensors import CASTS, TensorSpec, Tie, has_memory, spec
from .digest import digest_of
from .octets import Cast, Source, dtype_name
from .sources import deferred, pairs

__all__ = ["TorchWeights", "tensors_of"]

_Groups = tuple[Collection[str], ...]
_OF = "TorchWeights.of"
_AS_WORDS = {torch.bool: torch.uint8, torch.complex32: torch.int32}


@final
class TorchWeights:
    """Tensors of one version, by name, in the order of their source. Make it with ``of``."""

    __slots__ = (
        "_cast", "_digests", "_error", "_groups", "_lock", "_named", "_only", "_sent", "_source", "_specs",
        "_ties",
    )  # fmt: skip

    def __init__(
        self, source: Any, groups: _Groups = (), cast: str | None = None, only: tuple[str, ...] = ()
    ) -> None:
        self._source = source
        self._groups = groups
        self._cast, self._only = cast, only
        self._lock = threading.RLock()
        self._named: dict[str, torch.Tensor] | None = None
        self._sent: Mapping[str, Source] = {}
        self._specs: tuple[TensorSpec, ...] | None = None
        self._ties: tuple[Tie, ...] = ()
        self._error: BaseException | None = None
        self._digests: dict[Part, str] = {}

    @classmethod
    def of(
        cls,
        source: object,
        *,
        groups: Iterable[Collection[str]] = (),
        cast: str | None = None,
        only: Iterable[str] | None = None,
    ) -> TorchWeights:
        """The weights of ``source``; what is a ``TorchWeights`` already stays itself.

        Args:
            source: a module, a mapping, (name, tensor) pairs, or a function without arguments that gives one.
            groups: names of tensors that must arrive together, in one bucket.
            cast: the dtype as which floating-point tensors are sent; by default each as it is.
            only: patterns of names; what matches none of them is not sent, and each must match something
                (those of ``LORA`` need not). By default all is.

        Raises:
            PlanError: something in it cannot be sent, or ``only`` matches nothing; the message has names.
            SetupError: the groups, the dtype or the patterns are none; or ``source`` is a ``TorchWeights``
                with others.
        """
        if cast is not None:
            cast = checks.dtype(_OF, "cast", cast, CASTS)
        chosen = checks.patterns(_OF, "only", only)
        if isinstance(source, TorchWeights):
            return source.such(cast, chosen)
        if isinstance(groups, str) or not isinstance(groups, Iterable):
            raise checks.refusal(_OF, "groups", groups, "a list of lists of names is needed")
        together = tuple(group if isinstance(group, str) else tuple(sorted(group)) for group in groups)
        weights = cls(source, together, cast, chosen)
        if not deferred(source):
            weights.materialize()
        return weights

    @property
    def source(self) -> Any:
        """What the tensors were read from, the very object."""
        return self._source

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors that are sent, as they are, by the names of the plan's tensors."""
        self.materialize()
        if self._named is None:
            raise PlanError("these weights were let go of: their tensors are gone")
        return self._named

    @property
    def sources(self) -> Mapping[str, Source]:
        """What the plan's bytes are read of: the tensors, or what they are to be cast to."""
        return self._sent if self.tensors else {}

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
                named, ties = _read(self._source, self._only)
                sent = _as_sent(named, self._cast)
                specs = tuple(_describe(name, tensor) for name, tensor in sent.items())
            except BaseException as error:
                if isinstance(self._source, Iterator):
                    self._error = error
                raise
            self._named, self._sent, self._ties, self._specs = named, sent, ties, specs

    def plan(self, bucket_bytes: int) -> Plan:
        """The buckets for these tensors; the same object for the same names, dtypes, shapes and ties."""
        self.materialize()
        return _planned(self._specs or (), self._ties, self._groups, bucket_bytes, bool(self._only))

    def digest(self, part: Part = WHOLE, /) -> str:
        """The digest of a part of the content, in the plan's order.

        Worked out once: the tensors are not to change.
        """
        with self._lock:
            if part not in self._digests:
                sources = self.sources
                self._digests[part] = digest_of(self._specs or (), sources, part)
            return self._digests[part]

    def snapshot(self) -> TorchWeights:
        """The same weights with tensors of their own, which later training does not change."""
        copy = TorchWeights(self._source, self._groups, self._cast, self._only)
        copy._sent = copy._named = {name: _copied(tensor) for name, tensor in self.sources.items()}
        copy._specs, copy._ties = self._specs, self._ties
        return copy

    def such(self, cast: str | None, only: tuple[str, ...]) -> TorchWeights:
        """These weights with such a dtype and selection.

        Raises:
            SetupError: they were made with others.
        """
        if cast in (None, self._cast) and only in ((), self._only):
            return self
        if (self._cast, self._only) != (None, ()):
            raise SetupError(
                f"these TorchWeights were made with cast={self._cast!r} and only={self._only!r}, and "
                f"cast={cast!r} and only={only!r} is asked for: say it in one place, the policy"
            )
        weights = TorchWeights(self._source, self._groups, cast, only)
        if self.ready:
            names = [*self.tensors.items(), *((tie.name, self.tensors[tie.of]) for tie in self._ties)]
            weights._source = names
            weights.materialize()
            weights._source = self._source
        return weights

    def forget(self) -> None:
        """Let go of the tensors, and of the source. Plan and digest stay."""
        with self._lock:
            if self._specs is None:
                self._error = PlanError("they were let go of before they were read")
            self._named = self._source = None
            self._sent = {}


def tensors_of(weights: Weights) -> Mapping[str, Source]:
    """The tensors of ``weights``, for a transport, which is handed any kind of weights."""
    if not isinstance(weights, TorchWeights):
        kind = type(weights).__name__
        raise TransportError(f"this transport sends tensors, so it needs TorchWeights, not {kind}")
    return weights.sources


def _as_sent(named: Mapping[str, torch.Tensor], cast: str | None) -> Mapping[str, Source]:
    """Tensors, or what they are to be cast to. Packed numbers, of half a byte each, stay as they are."""
    if cast is None:
        return named
    dtype: torch.dtype = getattr(torch, cast)
    return {
        name: Cast(tensor, dtype) if tensor.dtype != dtype and dtype_name(tensor.dtype) in CASTS else tensor
        for name, tensor in named.items()
    }


def _copied(tensor: Source) -> torch.Tensor:
    if isinstance(tensor, Cast):
        return tensor.made()
    # As numbers, torch would make a 1 of any bool that is not 0, and warn of complex ones of two bytes.
    words = tensor.view(_AS_WORDS.get(tensor.dtype, tensor.dtype))
    return words.clone(memory_format=torch.contiguous_format).view(tensor.dtype)


def _read(source: Any, only: tuple[str, ...]) -> tuple[dict[str, torch.Tensor], tuple[Tie, ...]]:
    named: dict[str, torch.Tensor] = {}
    starting: dict[int, list[str]] = {}
    ties: list[Tie] = []
    for name, tensor in pairs(source, only):
        if not has_memory(tensor):
            raise PlanError(
                f"tensor {name!r} has no memory, its storage was resized: gather it first (FSDP: hand over "
                "CachedExport(FsdpExporter(model)) on every rank), or onload the part that it belongs to"
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


def _describe(name: str, tensor: Source) -> TensorSpec:
    return spec(name, dtype_name(tensor.dtype), tensor.shape)


@functools.lru_cache(maxsize=16, typed=True)  # 1.0 is no number of bytes, though it equals 1
def _planned(
    specs: tuple[TensorSpec, ...],
    ties: tuple[Tie, ...],
    groups: _Groups,
    bucket_bytes: int,
    partial: bool,  # noqa: FBT001 - a key of the cache
) -> Plan:
    if partial:  # whoever was left out of what is sent is left out of its group
        sent = {each.name for each in specs} | {tie.name for tie in ties}
        groups = tuple([name for name in group if name in sent] for group in groups)
    return make_plan(specs, bucket_bytes=bucket_bytes, ties=ties, groups=groups, partial=partial)

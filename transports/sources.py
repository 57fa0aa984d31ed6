"""Where a trainer's tensors come from: a module, a mapping, pairs, or a function that gives one of these.

``pairs`` turns a source into (name, tensor) pairs in the source's own order, which is the order they are sent
in. A set of names is refused: its order differs between processes, and so would the tensors' places.

What has no bytes to send is refused by name: sparse, quantised, nested and meta tensors, parameters that are
not initialised, and shards of a tensor that is spread over several ranks. Everything else goes as it is, a
scalar, an empty or an expanded tensor too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, ItemsView, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from fnmatch import translate
from typing import Any

import torch

from ..fsm.errors import PlanError
from ..fsm.policy import LORA

__all__ = ["deferred", "pairs"]

_SHOWN = 3

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PAIRS = (tuple, list)  # made once: `tuple | list` is a new object each time
_STRIDED = torch.strided
_REAL = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
     torch.int8, torch.uint8, torch.bool}
)  # fmt: skip


def deferred(source: Any) -> bool:
    """Whether reading ``source`` runs code of its owner, which may raise and may take its time."""
    if isinstance(source, (torch.nn.Module, Mapping, list, tuple, ItemsView)):
        return False
    _refuse_unordered(source)
    return True


def pairs(source: Any, only: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of ``source`` with their names, detached; several names may stand for one tensor.

    What matches none of the patterns ``only`` is left out, if there are any, whatever it is. Each of them has
    to match something: a mistyped one would leave tensors behind that belong to the others.

    Raises:
        PlanError: the source has no order, holds something that cannot be sent, or names one name twice; or
            a pattern chooses nothing.
    """
    if callable(source) and not isinstance(source, torch.nn.Module):
        source = source()
    _refuse_unordered(source)
    selector, seen = _Selector(only), set[str]()
    for number, item in enumerate(_items(source)):
        name, tensor = _named(number, item)
        if name in seen:
            raise PlanError(f"two tensors are named {name!r}; each name may come once")
        seen.add(name)
        if only and not selector.chooses(name):
            continue
        if not _is_plain(tensor):
            tensor = _sendable(name, tensor)
        # To detach is a third of the cost of reading a small tensor; most have no gradient to leave out.
        yield name, tensor.detach() if tensor.requires_grad else tensor
    selector.check(sorted(seen))


class _Selector:
    """Patterns of names, and which of them have matched nothing so far."""

    def __init__(self, only: Collection[str]) -> None:
        self._only = tuple(only)
        self._patterns = {each: re.compile(translate(each)) for each in only}
        self._idle = set(only)

    def chooses(self, name: str) -> bool:
        """Whether any of them matches this name."""
        matching = [each for each, pattern in self._patterns.items() if pattern.match(name)]
        self._idle.difference_update(matching)
        return bool(matching)

    def check(self, names: list[str]) -> None:
        """Raise PlanError if one has matched none of these names. Of an adapter's, some may be missing."""
        idle = [each for each in self._only if each in self._idle]
        if idle and len(idle) == len(self._patterns):
            raise PlanError(_nothing(f"only={self._only!r}", names))
        if mistyped := [each for each in idle if each not in LORA]:
            which = ", ".join(map(repr, mistyped))
            raise PlanError(_nothing(f"only={self._only!r}: {which}", names))


def _nothing(what: str, names: list[str]) -> str:
    """For what chooses nothing: what there is to choose from."""
    what = f"{what} matches none of the {len(names)} names"
    if not names:
        return f"{what}: there is nothing to send"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what}; there are {', '.join(map(repr, names[:_SHOWN]))}{more}"


def _items(source: Any) -> Iterable[Any]:
    if isinstance(source, torch.nn.Module):
        source = source.state_dict()
    return source.items() if isinstance(source, Mapping) else source


def _refuse_unordered(source: Any) -> None:
    kind = type(source).__name__
    if isinstance(source, AbstractSet) and not isinstance(source, ItemsView):
        raise PlanError(
            f"a {kind} has no order that two processes share: give (name, tensor) pairs in a list"
        )
    if isinstance(source, (str, bytes, torch.Tensor)) or not (
        callable(source) or hasattr(source, "__iter__")
    ):
        raise PlanError(f"tensors come from a module, a mapping or (name, tensor) pairs, not from a {kind}")


def _named(number: int, item: Any) -> tuple[str, Any]:
    if not isinstance(item, _PAIRS) or len(item) != 2 or not isinstance(item[0], str):
        raise PlanError(f"item {number} is a {type(item).__name__}, not a (name, tensor) pair")
    return item[0], item[1]


def _sendable(name: str, tensor: Any) -> torch.Tensor:
    """``tensor`` as one that has bytes in memory, if that can be had."""
    if not isinstance(tensor, torch.Tensor):
        raise PlanError(f"{name!r} is a {type(tensor).__name__}, not a tensor; leave it out of what is sent")
    why = _unsendable(tensor)
    if why is not None:
        raise PlanError(f"tensor {name!r} {why}")
    # A conjugate or negated view is a note on somebody else's bytes; its own have to be worked out.
    return tensor.detach().resolve_conj().resolve_neg()


def _is_plain(tensor: Any) -> bool:
    """Whether it is what nearly every tensor is; the questions below are dear, and asked of every tensor."""
    return (
        type(tensor) in _PLAIN
        and tensor.dtype in _REAL  # so it is neither quantised nor a conjugate
        and tensor.is_cpu
        and tensor.layout is _STRIDED
        and not tensor.is_nested
        and not tensor.is_neg()
    )


def _unsendable(tensor: torch.Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(tensor):
        return "is not initialised yet: run the model once before"
    if type(tensor).__name__ == "DTensor":
        return (
            "is a DTensor, spread over ranks: hand over CachedExport(FsdpExporter(model)) on every rank, or "
            "send what full_tensor() gives"
        )
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"is a {type(tensor).__name__}, which wraps others: send what full_tensor() or the like gives"
    if tensor.is_nested:
        return "is nested, it has no shape: send its values and offsets"
    if tensor.is_quantized:
        return f"is quantised ({tensor.dtype}), its scale is not in its bytes: send int_repr() and the scales"
    if tensor.layout != torch.strided:
        return f"is sparse ({tensor.layout}): send to_dense(), or its indices and values"
    if tensor.is_meta:
        return "has no values (device meta): materialise it first"
    return None

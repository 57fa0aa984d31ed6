"""Where the buckets go: a copy beside the live weights, or the live weights themselves.

    StagingSink    the live weights stay as they are, bit for bit, until the commit copies the staged ones
    InPlaceSink    each bucket goes right into the live weights: no second copy, but a failure leaves a mix
    SwapSink       the commit exchanges memory, and copies nothing (``swap_sink.py``)

Staging costs the memory of the model once more, on the device of each tensor unless another one is named. It
is allocated when the first session opens and used again by every later one; ``release`` gives it back.

Both write *into* the tensors that the engine has: their identity, strides and storage stay, and whatever is
tied stays tied. Names that the engine ties need to be sent once only, under any one of them. What the trainer
ties and the engine does not is written to every name.

A plan that is partial brings some of what the engine holds. That is checked and written; everything else
stays as it is. What a failure has torn has to be in it, so that no engine comes back with a mix.

What the engine holds is read anew whenever a session opens, since models get moved and tensors replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ..fsm import checks
from ..fsm.errors import EngineError, PlanError, SetupError
from ..fsm.plan import Plan
from ..fsm.tensors import TensorSpec, advice, diff, has_memory, spec, summary
from .read_only import ReadOnly

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Held", "InPlaceSink", "StagingSink", "check_held", "copy_bits", "place_of", "refuse_lost"]

Held = torch.nn.Module | Mapping[str, torch.Tensor]
"""What an engine samples with: a module (every name of its ``state_dict``) or tensors by name."""


def check_held(where: str, held: object, device: object) -> None:
    """Refuse what holds no tensors, and a device that torch does not know.

    Raises:
        SetupError: that is so.
    """
    needed = "a module is needed, or a mapping of names to tensors"
    checks.kind(where, "held", held, (torch.nn.Module, Mapping), needed)
    try:
        torch.device("cpu" if device is None else device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        raise checks.refusal(where, "staged_on", device, "a device is needed, such as 'cpu'") from None


class _Live:
    """The tensors that an engine samples with, by name; the half that both sinks share."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._checked: tuple[object, ...] = ()
        self._torn: set[str] = set()
        self._names = _Names()

    def manifest(self) -> tuple[TensorSpec, ...]:
        """What the engine holds, under every name; what has no memory it does not hold."""
        tensors = self._tensors().items()
        return tuple(_describe(name, each) for name, each in tensors if not each.is_meta and has_memory(each))

    def check(self, plan: Plan) -> None:
        """Raise PlanError unless the plan brings exactly what the engine holds. Changes nothing.

        Raises:
            PlanError: it brings something else.
            EngineError: whatever it brings, there is no memory to write it to.
        """
        tensors = self._tensors()
        now = (
            plan.fingerprint,
            *((name, *self._mark(name, tensor)) for name, tensor in tensors.items()),
        )
        if now == self._checked and not self._torn:
            return  # the same plan for the very same tensors
        covered = self._names(plan)
        if plan.partial:
            tensors = {name: tensor for name, tensor in tensors.items() if name in covered}
        # What shares its memory with a name that is sent gets its data with it.
        sent = {place_of(tensors[name]) for name in covered if name in tensors}
        held = [
            _describe(name, tensor)
            for name, tensor in tensors.items()
            if name in covered or place_of(tensor) not in sent
        ]
        if lines := _unwritable(tensors) + self._forbidden(tensors):  # no plan is to blame for that
            raise EngineError(summary(lines))
        differing = diff(plan.tensors, held, ties=plan.ties)
        lines = [str(each) for each in differing]
        lines += _torn_ties(tensors, covered)
        lines += [_still_torn(name) for name in sorted(self._torn - covered.keys()) if plan.partial]
        if lines:
            helps = advice(differing) if len(lines) == len(differing) else ""
            raise PlanError(summary(lines) + helps)
        self._checked = now

    def _forbidden(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Tensors in memory that is everybody's: to write there would end the process."""
        shared = ReadOnly()
        return [
            f"tensor {name!r}: it lies in memory that was handed over with aliases=True, and that nobody may "
            "write; serve it with aliases=True or swaps=True, or give it memory of its own (clone)"
            for name, tensor in tensors.items()
            if tensor.is_cpu and tensor.numel() and tensor.data_ptr() in shared
        ]

    def live(self, plan: Plan) -> dict[str, Tensor]:
        """The tensors that the engine samples with, by the names of ``plan.tensors``."""
        tensors = self._tensors()
        found: dict[str, Tensor] = {}
        for name, of in self._names(plan).items():
            if name in tensors:
                found.setdefault(of, tensors[name])
        return found

    def _mark(self, name: str, tensor: Tensor) -> tuple[object, ...]:
        """What stays the same as long as a tensor is the same one, in the same memory."""
        return (*place_of(tensor), _room(tensor))

    def _tensors(self) -> dict[str, Tensor]:
        held = self._held
        # With the variables themselves: what is written must be what the model computes with.
        items = held.state_dict(keep_vars=True) if isinstance(held, torch.nn.Module) else held
        return {name: tensor for name, tensor in items.items() if isinstance(tensor, torch.Tensor)}

    def _copies(self, plan: Plan) -> dict[str, list[Tensor]]:
        """Every distinct live tensor that gets what is sent under a name."""
        tensors = self._tensors()
        found: dict[str, dict[tuple[object, ...], Tensor]] = {}
        for name, of in self._names(plan).items():
            if name in tensors:
                found.setdefault(of, {}).setdefault(place_of(tensors[name]), tensors[name])
        return {of: list(places.values()) for of, places in found.items()}

    def adopt(self, views: Mapping[str, Tensor]) -> None:
        """Refused: it writes where its own memory is."""
        raise SetupError(f"{type(self).__name__} makes no views its weights, and was handed {len(views)}")


class StagingSink(_Live):
    """Writes beside the live weights. ``device`` is where the staged ones are; theirs by default."""

    stages = True
    aliases = False

    def __init__(self, held: Held, *, device: torch.device | str | None = None) -> None:
        super().__init__(held)
        self._device = device
        self._staged: dict[str, Tensor] = {}
        self._fits: tuple[object, ...] = ()

    def open(self, plan: Plan) -> Mapping[str, Tensor]:
        """The staged tensors. Those of the last session are used again where they fit."""
        checked = self._checked
        if self._staged and self._fits is checked and checked[:1] == (plan.fingerprint,):
            return self._staged  # made for the same plan and the very same tensors
        before, self._staged = self._staged, {}
        for name, live in self.live(plan).items():
            staged = before.pop(name, None)
            device = live.device if self._device is None else torch.device(self._device)
            if staged is None or (staged.shape, staged.dtype) != (live.shape, live.dtype):
                staged = _blank(live, device)
            self._staged[name] = staged
        self._fits = checked if checked[:1] == (plan.fingerprint,) else ()
        return self._staged

    def commit(self, plan: Plan) -> None:
        """Copy the staged tensors over the live ones."""
        tensors = self._tensors()
        self._torn |= self._names(plan).keys()
        with torch.inference_mode():  # the only mode in which tensors made in it can be written, too
            for name, of in self._names(plan).items():
                live = tensors.get(name)
                if live is None or 0 in live.shape:
                    continue  # it goes by another name, or there is nothing to copy
                if name != of and of in tensors and place_of(live) == place_of(tensors[of]):
                    continue  # the engine ties them, too
                refuse_lost(name, live)
                copy_bits(live, self._staged[of])
        self._torn -= self._names(plan).keys()

    def release(self) -> None:
        """Give the memory of the staged tensors back. Only while no session is open."""
        self._staged = {}


class InPlaceSink(_Live):
    """Writes right into the live weights. An abort after the first bucket leaves a mix behind."""

    stages = False
    aliases = False

    def open(self, plan: Plan) -> Mapping[str, Tensor]:
        """The live tensors."""
        self._torn |= self._names(plan).keys()
        return self.live(plan)

    def commit(self, plan: Plan) -> None:
        """Bring names that only the trainer ties up to date; everything else is in place already."""
        with torch.inference_mode():
            for name, (first, *others) in self._copies(plan).items():
                for other in others:
                    refuse_lost(name, first, other)
                    copy_bits(other, first)
        self._torn -= self._names(plan).keys()


# -- what tensors are -------------------------------------------------------------------------------------


class _Names:
    """Every name that a plan speaks of, and the name under which its tensor is sent. Of the last plan."""

    def __init__(self) -> None:
        self._known: tuple[Plan | None, Mapping[str, str]] = (None, {})

    def __call__(self, plan: Plan) -> Mapping[str, str]:
        last, names = self._known
        if last is not plan:
            names = {each.name: each.name for each in plan.tensors} | {tie.name: tie.of for tie in plan.ties}
            self._known = (plan, names)
        return names


def _describe(name: str, tensor: Tensor) -> TensorSpec:
    return spec(name, str(tensor.dtype).removeprefix("torch."), tensor.shape)


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same elements of the same memory."""
    if tensor.numel() == 0 or tensor.is_meta:
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _room(tensor: Tensor) -> int:
    """The bytes of its storage, which can be resized and get less at the same place."""
    return tensor.untyped_storage().nbytes()


def _blank(live: Tensor, device: torch.device) -> Tensor:
    """Memory for one more of these; torch warns of complex numbers of two bytes, which are words here."""
    dtype = torch.int32 if live.dtype is torch.complex32 else live.dtype
    return torch.empty(live.shape, dtype=dtype, device=device).view(live.dtype)


def copy_bits(live: Tensor, given: Tensor) -> None:
    """Bit for bit: of bools, torch would make a 1 of whatever is not 0."""
    if live.dtype is torch.bool:
        live, given = live.view(torch.uint8), given.view(torch.uint8)
    live.copy_(given)


def refuse_lost(name: str, *tensors: Tensor) -> None:
    """To read or write a tensor without memory would end the process."""
    if not all(has_memory(tensor) for tensor in tensors):
        raise EngineError(f"tensor {name!r}: the engine gave its memory away during the session")


def _unwritable(tensors: Mapping[str, Tensor]) -> list[str]:
    """Tensors without memory of their own for every element."""
    lines = []
    for name, tensor in tensors.items():
        if tensor.is_meta:
            why, what = "has no memory for it (device meta)", "materialise it first"
        elif any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
            why, what = "holds an expanded view, whose elements share memory", "make it contiguous first"
        elif not has_memory(tensor):
            why, what = "has no memory for it, its storage was resized", "wake it up or gather it first"
        else:
            continue
        lines.append(f"tensor {name!r}: the engine {why}; {what}")
    return lines


def _torn_ties(tensors: Mapping[str, Tensor], covered: Mapping[str, str]) -> list[str]:
    """Names that are one tensor in the engine and two in the plan: the one sent last would win."""
    first_sent: dict[tuple[object, ...], str] = {}
    lines = []
    for name, of in covered.items():
        first = first_sent.setdefault(place_of(tensors[name]), of) if name in tensors else of
        if first != of:
            lines.append(
                f"tensor {name!r}: the engine ties it to {first!r}, but both are sent; send one of them, or "
                f"tie them in the trainer"
            )
    return lines


def _still_torn(name: str) -> str:
    return (
        f"tensor {name!r}: a hand-over that failed may have left it half written, and nothing is sent for "
        "it; hand everything over once, without a selector"
    )

"""Parts that can be in memory or not: tensors, with a copy on the host or without; what functions move.

    HostCopy("optimizer", optimizer)             goes to host memory, and comes back bit for bit
    Rebuilt("parameters", model, masters)        goes without a copy, and is made again (``rebuilt.py``)
    Scratch("cache", tensors)                    goes without a copy, and comes back as zeros
    CalledPart("weights", on=wake, off=sleep)    something that two functions bring and let go of
    Gated(part, receiver)                        of an engine here: nobody generates while it is gone

Tensors keep who they are: a part resizes the *storage* under them to nothing and back (as engines that can be
put to sleep do), so names, strides, views and ties stay, and whoever holds a tensor has it again afterwards.
Meanwhile it has no memory, and must not be read: torch refuses that or ends the process. On a GPU the
allocator's cache is emptied after a release, since the memory is meant for another process; **this was not
run on a GPU**. Nothing here may happen between a forward pass and its backward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..fsm import checks
from ..fsm.errors import ResidencyError
from ..fsm.residency import PART, Part

if TYPE_CHECKING:
    from .receiver import Receiver

__all__ = ["CalledPart", "Gated", "HostCopy", "Scratch", "Tensors", "octets", "tensors_in"]

Tensors = torch.nn.Module | torch.optim.Optimizer | Mapping[Any, torch.Tensor] | Iterable[torch.Tensor]
"""Where tensors are found: all of a module or of an optimizer's state, or those in a mapping or a list."""

_NEEDED = "a module, an optimizer, a mapping or a list of tensors is needed, or a function that gives one"


def tensors_in(where: str, source: Tensors | Callable[[], Tensors]) -> list[torch.Tensor]:
    """What is there now, of DTensors the local shard.

    Raises:
        SetupError: it is something else.
    """
    found: Any = source() if callable(source) and not isinstance(source, torch.nn.Module) else source
    if isinstance(found, torch.nn.Module):
        found = [*found.parameters(), *found.buffers()]
    elif isinstance(found, torch.optim.Optimizer):
        found = [each for state in found.state.values() for each in state.values()]
        found = [each for each in found if isinstance(each, torch.Tensor)]
    elif isinstance(found, Mapping):
        found = [*found.values()]
    if isinstance(found, str | bytes | torch.Tensor | Iterator) or not isinstance(found, Iterable):
        raise checks.refusal(where, "tensors", found, _NEEDED)
    listed = [*found]
    for each in listed:
        checks.kind(where, "tensors", each, torch.Tensor, _NEEDED)
    return [each.to_local() if hasattr(each, "to_local") else each for each in listed]


def octets(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage as numbers of one byte."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each memory once, however many tensors are views of it."""
    found: dict[int, torch.UntypedStorage] = {}
    for each in tensors:
        if not each.is_meta and (storage := each.untyped_storage()).nbytes():
            found[storage.data_ptr()] = storage
    return list(found.values())


def _refuse_what_stays(name: str, tensors: Iterable[torch.Tensor]) -> None:
    for each in tensors:
        storage = each.untyped_storage()
        if not each.is_meta and storage.nbytes() and (not storage.resizable() or storage.is_shared()):
            raise ResidencyError(
                f"{name}: a tensor of shape {tuple(each.shape)} lies in memory that is shared with another "
                "process, or is not torch's alone (numpy has seen it): give it memory of its own (clone)"
            )


class Scratch:
    """Tensors whose content nobody needs again, such as a cache. They come back as zeros.

    Args:
        name: for the log.
        tensors: a module, an optimizer, a mapping or a list of tensors, or a function that gives one. Read
            each time the part goes.

    Raises:
        SetupError: there are none in it, or no name.
    """

    def __init__(self, name: str, tensors: Tensors | Callable[[], Tensors]) -> None:
        self._where = type(self).__name__
        checks.text(self._where, "name", name)
        self.name, self._source = name, tensors
        if not callable(tensors) or isinstance(tensors, torch.nn.Module):
            tensors_in(self._where, tensors)
        self._gone: list[tuple[torch.UntypedStorage, int]] | None = None

    def tensors(self) -> list[torch.Tensor]:
        """What belongs to it now."""
        return tensors_in(self._where, self._source)

    def nbytes(self) -> int:
        """Each memory counts once."""
        if self._gone is not None:
            return sum(size for _, size in self._gone)
        return sum(each.nbytes() for each in _storages(self.tensors()))

    def resident(self) -> bool:
        """Whether its tensors have memory."""
        return self._gone is None

    def shares(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of ``tensors`` lies in its memory."""
        mine = {each.data_ptr() for each in _storages(self.tensors())}
        return any(each.untyped_storage().data_ptr() in mine for each in tensors)

    def offload(self) -> None:
        """Let the memory go. If that fails, nothing is gone.

        Raises:
            ResidencyError: some of it cannot be.
        """
        if self._gone is not None:
            return
        tensors = self.tensors()
        _refuse_what_stays(self.name, tensors)
        storages = _storages(tensors)
        self._keep(storages)
        self._gone = [(each, each.nbytes()) for each in storages]
        for each in storages:
            each.resize_(0)
        if any(each.device.type == "cuda" for each in storages):  # pragma: no cover - needs a GPU
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Take memory again and fill it. If that fails, nothing is there.

        Raises:
            ResidencyError: there is not enough, or something else owns it by now.
        """
        if self._gone is None:
            return
        try:
            for storage, size in self._gone:
                storage.resize_(size)
            self._fill([storage for storage, _ in self._gone])
        except BaseException as error:
            for storage, _ in self._gone:
                storage.resize_(0)
            if isinstance(error, RuntimeError):  # torch's word for a lack of memory, on any device
                raise ResidencyError(f"{self.name} cannot be brought back: {error}") from error
            raise
        self._gone = None
        self._filled()

    def _keep(self, storages: list[torch.UntypedStorage]) -> None:
        """Before it goes."""

    def _fill(self, storages: list[torch.UntypedStorage]) -> None:
        for each in storages:
            octets(each).zero_()

    def _filled(self) -> None:
        """It is there again, whole."""


class HostCopy(Scratch):
    """Tensors that go to host memory and come back bit for bit.

    The host's memory is kept, and used again the next time. Of tensors on a GPU it is pinned.
    """

    def __init__(self, name: str, tensors: Tensors | Callable[[], Tensors]) -> None:
        super().__init__(name, tensors)
        self._copies: list[torch.Tensor] = []

    def _keep(self, storages: list[torch.UntypedStorage]) -> None:
        for place, each in enumerate(storages):
            if place == len(self._copies) or self._copies[place].numel() != each.nbytes():
                pinned = each.device.type == "cuda"
                self._copies[place : place + 1] = [
                    torch.empty(each.nbytes(), dtype=torch.uint8, pin_memory=pinned)
                ]
            self._copies[place].copy_(octets(each))
        del self._copies[len(storages) :]

    def _fill(self, storages: list[torch.UntypedStorage]) -> None:
        for storage, copy in zip(storages, self._copies, strict=True):
            octets(storage).copy_(copy)


class CalledPart:
    """Something that two functions bring into memory and let go of: an engine's ``wake_up`` and ``sleep``.

    Args:
        name: for the log.
        on: brings it; returns when it is there.
        off: lets it go; returns when the memory is free.
        nbytes: how much it takes, as a number or as a function.
        resident: whether it is there at first; or a function that says whether it is there now, for something
            that others move as well.
        engine: the id of the engine whose weights it is, so that one that is asleep when a round begins is
            not refused: the round wakes it.

    Raises:
        SetupError: one of these is of the wrong kind.
    """

    def __init__(
        self,
        name: str,
        *,
        on: Callable[[], object],
        off: Callable[[], object],
        nbytes: int | Callable[[], int] = 0,
        resident: bool | Callable[[], bool] = True,
        engine: str | None = None,
    ) -> None:
        checks.text("CalledPart", "name", name)
        for word, function in (("on", on), ("off", off)):
            needed = "a function is needed, which returns when it is done"
            checks.called("CalledPart", word, function, needed)
            if inspect.iscoroutinefunction(function):
                raise checks.refusal("CalledPart", word, function, f"{needed}: this one is a coroutine's")
        if not callable(nbytes):
            checks.whole("CalledPart", "nbytes", nbytes, 0)
        if not callable(resident):
            checks.flag("CalledPart", "resident", resident)
        if engine is not None:
            checks.text("CalledPart", "engine", engine)
        self.name, self.engine = name, engine
        self._on, self._off, self._nbytes, self._resident = on, off, nbytes, resident

    def nbytes(self) -> int:
        """As it was told, or as the function says."""
        return self._nbytes() if callable(self._nbytes) else self._nbytes

    def resident(self) -> bool:
        """As the function says, or as it was moved last."""
        return self._resident() if callable(self._resident) else self._resident

    def onload(self) -> None:
        """Call ``on``."""
        self._on()
        if not callable(self._resident):
            self._resident = True

    def offload(self) -> None:
        """Call ``off``."""
        self._off()
        if not callable(self._resident):
            self._resident = False


class Gated:
    """A part of an engine in this process: nobody generates while it is gone.

    Before it goes, admission is held and whoever is inside comes out; after it has come, the hold ends. A
    round that opens the gate meanwhile lets nobody in.

    Args:
        part: the weights, or the cache.
        receiver: the engine's.
        limit: seconds that generations are given to end before the part goes.

    Raises:
        SetupError: one of these is of the wrong kind.
    """

    def __init__(self, part: Part, receiver: Receiver, *, limit: float = 30.0) -> None:
        if not checks.has(part, PART):
            raise checks.refusal(
                "Gated", "part", part, "a part is needed, such as HostCopy('weights', model)"
            )
        if not hasattr(receiver, "gate"):
            needed = "a receiver is needed, as receiver_for(model, 'name') makes it"
            raise checks.refusal("Gated", "receiver", receiver, needed)
        checks.seconds("Gated", "limit", limit)
        self.name, self.engine = part.name, receiver.engine
        self._part, self._gate, self._limit = part, receiver.gate, limit

    def nbytes(self) -> int:
        """Of the part."""
        return self._part.nbytes()

    def resident(self) -> bool:
        """Whether the part is there."""
        return self._part.resident()

    def onload(self) -> None:
        """Bring it, and admit again."""
        self._part.onload()
        self._gate.let_go(self.name)

    def offload(self) -> None:
        """Admit nobody any more, wait until nobody is inside, and let it go.

        Raises:
            EngineSilent: somebody was still inside after the limit; then nothing has changed.
        """
        self._gate.hold(self.name, self._limit)
        try:
            self._part.offload()
        except BaseException:
            self._gate.let_go(self.name)
            raise

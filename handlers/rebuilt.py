"""Parameters of low precision that are made again from their masters, instead of being copied to the host.

A trainer that computes in bfloat16 and keeps the weights in float32 has every parameter twice. While an
engine has the memory, the smaller ones can go without a copy: on waking, each is its master, cast.

That is only right if it is exact. So in the first cycles nothing goes before its master was cast and every
bit of the result was the parameter's; and what comes back must have the digest that went. An optimizer that
rounds stochastically, or a parameter without a master, is found out there, by name, while everything is still
in memory. Afterwards the cast alone is trusted, unless all cycles are to be proven.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

from ..fsm import checks
from ..fsm.errors import NotRebuilt, ResidencyError, SetupError
from ..fsm.tensors import has_memory
from .resident_parts import Scratch

__all__ = ["Rebuilt"]

_WHERE = "Rebuilt"


class Rebuilt(Scratch):
    """Parameters that go without a copy and are made again from their masters.

    Args:
        name: for the log.
        parameters: by name, in low precision.
        masters: by the same names, of the same shapes.
        proofs: in how many of the first cycles every bit is compared; None: in all of them.

    Raises:
        SetupError: names or shapes differ, two of them share memory, or one is its own master.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, torch.Tensor],
        masters: Mapping[str, torch.Tensor],
        *,
        proofs: int | None = 2,
    ) -> None:
        for word, given in (("parameters", parameters), ("masters", masters)):
            checks.kind(_WHERE, word, given, Mapping, "a mapping of names to tensors is needed")
        super().__init__(name, list(parameters.values()))
        checks.kind(_WHERE, "masters", list(masters.values()), list, "tensors are needed")
        if proofs is not None:
            checks.whole(_WHERE, "proofs", proofs, 0)
        self._parameters, self._masters = dict(parameters), dict(masters)
        self._proofs, self._digest, self._of = proofs, "", ""
        self.proven = 0
        """How many cycles were proven, bit for bit."""
        self._check()

    def _check(self) -> None:
        if self._parameters.keys() != self._masters.keys():
            differing = ", ".join(sorted(self._parameters.keys() ^ self._masters.keys())[:3])
            raise SetupError(f"{_WHERE}: {differing} has a parameter or a master, and not both")
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            checks.kind(_WHERE, f"masters[{name!r}]", master, torch.Tensor, "a tensor is needed")
            if master.shape != parameter.shape:
                raise SetupError(
                    f"{_WHERE}: {name} has shape {tuple(parameter.shape)}, and its master "
                    f"{tuple(master.shape)}"
                )
            there = parameter.untyped_storage().data_ptr()
            if there and there == master.untyped_storage().data_ptr():
                raise SetupError(f"{_WHERE}: {name} is its own master, so nothing would be left of it")
            if parameter.numel() * parameter.element_size() != parameter.untyped_storage().nbytes():
                raise SetupError(
                    f"{_WHERE}: {name} shares its memory with something that has no master: leave it out, or "
                    "give it memory of its own (clone)"
                )

    def _due(self) -> bool:
        return self._proofs is None or self.proven < self._proofs

    def _keep(self, storages: list[torch.UntypedStorage]) -> None:
        """Nothing is kept; in the first cycles it is proven first that nothing has to be."""
        self._masters_there()
        self._digest = self._of = ""
        if not self._due():
            return
        for name, parameter in self._parameters.items():
            if not _same(parameter, self._masters[name].detach().to(parameter.dtype)):
                raise NotRebuilt(
                    f"{self.name}: {name} is not its master cast to {parameter.dtype}, so it could not be "
                    "made again: it stays in memory; keep a copy of it (HostCopy)"
                )
        self._digest, self._of = _digest(self._parameters.values()), _digest(self._masters.values())

    def _fill(self, storages: list[torch.UntypedStorage]) -> None:
        self._masters_there()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.detach().copy_(self._masters[name].detach())
        if self._digest and self._of == _digest(self._masters.values()):
            if self._digest != _digest(self._parameters.values()):
                raise NotRebuilt(
                    f"{self.name}: made again from unchanged masters, it has other bits than it had when it "
                    "went: keep a copy of it (HostCopy)"
                )
            self.proven += 1

    def _masters_there(self) -> None:
        for name, master in self._masters.items():
            if not has_memory(master):
                raise ResidencyError(
                    f"{self.name}: the master of {name} has no memory: bring the masters into memory first"
                )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as bytes: a NaN is the same as itself, and -0.0 is another number than 0.0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for each in tensors:
        # Of a copy: what was ever shown to numpy cannot be resized any more.
        found.update(_bits(each).clone().cpu().numpy().tobytes())
    return found.hexdigest()

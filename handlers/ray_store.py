"""A store for the ranks of a trainer that Ray keeps: for trainers whose ranks are Ray actors without a store.

    TrainerRanks(RayStore("trainer"), rank, world_size)

It has the words of a store of ``torch.distributed``, kept by one named actor, which is made by whoever comes
first and lives as long as the cluster, or until ``retire``. Each word is one question to that actor, so that
``compare_set`` is decided there and nowhere else. Whoever asks waits as long as ``patience`` says; those who
use the store have limits of their own.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ray

from ..fsm import checks

__all__ = ["RayStore"]

_NAMESPACE = "weightsync"


class _StoreActor:
    """The keeper: a dictionary."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        """Write."""
        self._values[key] = value

    def get(self, key: str) -> bytes | None:
        """Read."""
        return self._values.get(key)

    def check(self, keys: list[str]) -> bool:
        """Look."""
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Forget."""
        return self._values.pop(key, None) is not None

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write if that is there; nobody else writes meanwhile."""
        there = self._values.get(key, b"")
        if there == expected:
            self._values[key] = desired
        return self._values.get(key, expected)


class RayStore:
    """The store of that name. Every process of the cluster that names it has the same one.

    Args:
        name: of the store.
        patience: seconds to wait for an answer.

    Raises:
        SetupError: one of these is of the wrong kind.
    """

    def __init__(self, name: str, *, patience: float = 60.0) -> None:
        checks.text("RayStore", "name", name)
        checks.seconds("RayStore", "patience", patience)
        self.name, self._patience = name, patience
        self._keeper: Any = None

    def set(self, key: str, value: str, /) -> None:
        """Write."""
        self._ask("set", key, value.encode())

    def get(self, key: str, /) -> bytes:
        """Read what is there.

        Raises:
            KeyError: nothing is.
        """
        found = self._ask("get", key)
        if found is None:
            raise KeyError(f"nothing is written under {key} in the store {self.name}")
        return bytes(found)

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these are there."""
        return bool(self._ask("check", keys))

    def delete_key(self, key: str, /) -> bool:
        """Forget."""
        return bool(self._ask("delete_key", key))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write if what is there is ``expected``, or nothing if that is empty; what is there then."""
        return bytes(self._ask("compare_set", key, expected.encode(), desired.encode()))

    def retire(self) -> None:
        """End the store, for everybody. Idempotent."""
        with suppress(ValueError):
            ray.kill(ray.get_actor(self._actor, namespace=_NAMESPACE))
        self._keeper = None

    @property
    def _actor(self) -> str:
        return f"store-{self.name}"

    def _ask(self, word: str, *given: Any) -> Any:
        if self._keeper is None:
            # Everybody asks for the same name; Ray makes it once.
            made = ray.remote(_StoreActor).options(
                name=self._actor, namespace=_NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0
            )
            self._keeper = made.remote()
        return ray.get(getattr(self._keeper, word).remote(*given), timeout=self._patience)

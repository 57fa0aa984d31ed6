"""What a suite was given to test, looked at before anything is done with it: a slip is told in one line."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol, TypeVar

from ...fsm.contract import InletFactory, Transport
from ...fsm.errors import SetupError

__all__ = ["CAN", "check_can", "engine_of", "inlet_of", "transport_of"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

CAN = frozenset({"kill", "restart"})
"""What a suite may say that can be done to its engines."""

_TRANSPORT = ("name", "capabilities", "open", "broadcast", "collect", "clean", "abort", "close")
_ENGINE = ("link", "another_link", "tensors", "admits", "generating", "close")


class _GivesTransport(Protocol):
    def transport(self) -> Transport: ...

    def inlet(self) -> InletFactory: ...


class _GivesEngine(Protocol[T_co]):
    def engine(self) -> T_co: ...


def transport_of(tested: _GivesTransport) -> Transport:
    """A new transport.

    Raises:
        SetupError: what was returned is none.
    """
    return _made(tested, "transport", tested.transport(), _TRANSPORT)


def inlet_of(tested: _GivesTransport) -> InletFactory:
    """Its receiving half.

    Raises:
        SetupError: it is no function, or was called instead of returned.
    """
    where, do = f"{type(tested).__name__}.inlet()", "return the function itself, and do not call it"
    try:
        inlet = tested.inlet()
    except TypeError as error:
        raise SetupError(f"{where} raised {error!r}: {do}") from error
    if not callable(inlet):
        raise SetupError(f"{where} returned {inlet!r}, which is no receiving half: {do}")
    return inlet


def engine_of(tested: _GivesEngine[T]) -> T:
    """An engine that serves.

    Raises:
        SetupError: what was returned is none, or lacks what ``can`` says that it can.
    """
    able = sorted(check_can(tested, getattr(tested, "can", ())))
    return _made(tested, "engine", tested.engine(), (*_ENGINE, *able))


def check_can(tested: object, can: Iterable[str]) -> Collection[str]:
    """What can be done to the engines of a suite.

    Raises:
        SetupError: there is a word in it that the suite does not know; its checks would never run.
    """
    unknown = sorted(set(can) - CAN)
    if isinstance(can, str) or unknown:
        said = repr(can) if isinstance(can, str) else ", ".join(map(repr, unknown))
        raise SetupError(
            f"{type(tested).__name__}.can says {said}: it has to be a set of "
            f"{' and '.join(map(repr, sorted(CAN)))}, or of one of them, or empty"
        )
    return frozenset(can)


def _made(tested: object, method: str, made: T, words: Iterable[str]) -> T:
    where = f"{type(tested).__name__}.{method}()"
    if isinstance(made, type):
        name = made.__name__
        raise SetupError(f"{where} returned the class {name}: call it, as in `return {name}()`")
    missing = [word for word in words if not hasattr(made, word)]
    if missing:
        raise SetupError(f"{where} returned {made!r}, which has no {', '.join(missing)}: it needs them all")
    return made

"""What a user hands over, examined where it is handed over: one clear line, before anything moves.

A wrong kind of thing would otherwise come up minutes later, under a lock, as an ``AttributeError`` of ours.
Each of these says where it was given, what it is, and what is needed in its place.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Mapping
from pathlib import PurePath

from .errors import SetupError

__all__ = [
    "called", "flag", "has", "kind", "patterns", "refusal", "seconds", "seen_path", "shown", "step_of",
    "text", "whole",
]  # fmt: skip

_PLAIN = (str, bytes, int, float, PurePath)
_LONGEST = 80
_LARGEST = 2**63


def shown(value: object) -> str:
    """``value`` as a message names it: as it is written if that is short, else by its type."""
    if isinstance(value, type):
        return f"<class {value.__name__}>"
    if value is None or (isinstance(value, _PLAIN) and len(repr(value)) <= _LONGEST):
        return repr(value)
    return f"<{type(value).__name__}>"


def refusal(where: str, name: str, value: object, needed: str) -> SetupError:
    """The error for an argument: ``where`` is what it was given to, ``needed`` what to give instead."""
    return SetupError(f"{where}({name}={shown(value)}): {needed}")


def whole(where: str, name: str, value: object, least: int = 1) -> None:
    """Refuse what is no whole number from ``least``. True is none, and 1.0 is a fraction."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refusal(where, name, value, f"a whole number of at least {least} is needed")


def step_of(where: str, name: str, value: object) -> int:
    """A count from 0, also if it is numpy's or torch's, that fits into 63 bits: a log holds no larger one."""
    truth = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
    try:
        number = -1 if truth else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise refusal(where, name, value, "a whole number of at least 0 is needed")
    if number >= _LARGEST:
        raise refusal(where, name, value, "a whole number below 2**63 is needed, which a log can hold")
    return number


def seconds(where: str, name: str, value: object) -> None:
    """Refuse what is no time that a wait can be bounded by."""
    if type(value) not in (int, float) or not 0 < value < math.inf:  # type: ignore[operator]
        raise refusal(where, name, value, "a finite number of seconds above 0 is needed")


def text(where: str, name: str, value: object, needed: str = "a name is needed, as a string") -> None:
    """Refuse what is no string, and the empty one."""
    if not isinstance(value, str) or not value:
        raise refusal(where, name, value, needed)


def seen_path(where: str, name: str, value: object) -> None:
    """Refuse what cannot be the path of a file."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise refusal(where, name, value, "the path of a file is needed")


def kind(where: str, name: str, value: object, kinds: type | tuple[type, ...], needed: str) -> None:
    """Refuse what is of none of these kinds."""
    if not isinstance(value, kinds):
        raise refusal(where, name, value, needed)


def called(where: str, name: str, value: object, needed: str = "a function is needed") -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise refusal(where, name, value, needed)


def patterns(where: str, name: str, value: object) -> tuple[str, ...]:
    """Patterns of names, as a tuple; none for None. One string alone would be taken for its letters."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise refusal(
            where, name, value, "a list of patterns is needed, such as ('*.lora_A.*', '*.lora_B.*')"
        )
    found = tuple(value)
    for each in found:
        text(where, name, each, "each pattern is a string that is not empty")
    if not found:  # a list that came out empty would send everything, over what was to stay
        raise refusal(where, name, value, f"no pattern is in it; leave {name} out to send everything")
    return found


def dtype(where: str, name: str, value: object, known: Iterable[str]) -> str:
    """The name of a dtype, given as such or as torch's own."""
    given = str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value
    if not isinstance(given, str) or given not in known:
        raise refusal(where, name, given, f"choose from {', '.join(map(repr, known))}")
    return given


def flag(where: str, name: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise refusal(where, name, value, "True or False is needed")


def has(value: object, words: Iterable[str]) -> bool:
    """Whether ``value`` is an object, and no class, that can be told every one of these words."""
    return not isinstance(value, type) and all(callable(getattr(value, word, None)) for word in words)

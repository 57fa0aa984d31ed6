"""Which bytes a digest is of: all of them, or the part whose turn it is.

A digest of everything costs a good half of a copy, on each side and in every round. So, as a rule, a round
digests a *part*: of each tensor the bytes whose turn it is. The turn goes round with the version, and after
as many consecutive versions as there are turns each byte of each tensor has had its own. No part of a tensor
is smaller than ``LEAST``, so small ones are digested whole, and tensors that swapped their places, that are
missing or of another shape are noticed in every round.

The version alone says whose turn it is: a retry, or an engine that catches up, has the same part as the round
before it, and the same digest if the bytes are the same. The digest says what it is of, as ``3/16:`` before
its digits; a digest of everything says nothing. So whoever is asked for one reads the part from the digest
that is expected, and two of different parts are never equal.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

from .errors import SetupError

__all__ = ["LEAST", "WHOLE", "Part", "part_of", "part_of_version", "parted", "takes_part"]

LEAST = 4096
"""Bytes; no part of a tensor is smaller."""

_LINE = 256  # parts begin where words of any size do, and where a cast has whole steps (transports/octets.py)
_MARK = re.compile(r"(\d{1,9})/(\d{1,9}):")


@dataclass(frozen=True, slots=True)
class Part:
    """The part whose turn is number ``turn`` of ``of``."""

    turn: int
    of: int

    def __str__(self) -> str:
        return "the whole" if self == WHOLE else f"part {self.turn}/{self.of}"

    def range(self, nbytes: int) -> tuple[int, int]:
        """Of a tensor of so many bytes: from where to where."""
        parts = max(1, min(self.of, nbytes // LEAST))
        turn = self.turn % parts
        start = nbytes * turn // parts // _LINE * _LINE
        stop = nbytes if turn + 1 == parts else nbytes * (turn + 1) // parts // _LINE * _LINE
        return start, stop

    def mark(self, digits: str) -> str:
        """The digest with these digits, which says its part."""
        return digits if self == WHOLE else f"{self.turn}/{self.of}:{digits}"


WHOLE = Part(0, 1)


def part_of_version(version: int, turns: int) -> Part:
    """Whose turn it is with this version."""
    return Part(version % turns, turns)


def part_of(digest: str) -> Part:
    """What a digest is of. One that names no part that there can be is of everything."""
    found = _MARK.match(digest)
    part = Part(int(found[1]), int(found[2])) if found else WHOLE
    return part if part.turn < part.of else WHOLE


def parted(whose: str, digest: Callable[..., str], part: Part, *given: object) -> str:
    """Ask ``digest`` for the digest of ``part``; one that knows of no parts can be asked for the whole alone.

    Raises:
        SetupError: it gives no such digest; ``whose`` says who made it.
    """
    if part == WHOLE:
        return digest(*given)
    if not takes_part(digest, len(given)):
        raise SetupError(f"{whose} takes no part, and {part} is needed: {_ADVICE}")
    found = digest(*given, part)
    if part_of(found) != part:
        raise SetupError(f"{whose} gave {found!r}, which is not of {part}: {_ADVICE}")
    return found


_ADVICE = "let it digest the part it is given (fsm/sampling.py), or use Policy(verify='full')"


def takes_part(digest: Callable[..., str], given: int = 0) -> bool:
    """Whether a digest function takes a part, after so many other values."""
    try:
        inspect.signature(digest).bind(*range(given + 1))
    except TypeError:
        return False
    except ValueError:  # written in another language, it has no signature to read
        return True
    return True

"""What is owed while a model is another version for a while; and to finish in spite of an interrupt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from .holding import Holding
from .rank_store import line_of
from .slots import Slot

__all__ = ["Loan", "finished", "noted_in"]


@dataclass(eq=False, slots=True)
class Loan:
    """The weights that were there before, until they are put back.

    Args:
        version: which the model is meanwhile.
        holdings: what was copied.
        slot: the copy.
        begun: whether the model may be another version already.
        told: whether the others were told that this rank has put its own back, or cannot.
        over: whether nothing is owed any more.
        torn: why the weights were of no version before, if they were not.
        thread: whose block it is.
    """

    version: int
    holdings: Sequence[Holding] = ()
    slot: Slot | None = None
    begun: bool = False
    told: bool = False
    over: bool = False
    torn: str = ""
    thread: int = field(default_factory=threading.get_ident)


def finished(work: Callable[[], object]) -> BaseException | None:
    """Do ``work`` to its end; hands back the first interrupt that came meanwhile.

    ``work`` is begun again after one, so it has to be such that this does no harm.
    """
    first: BaseException | None = None
    while True:
        try:
            work()
            return first
        except Exception:
            raise
        except BaseException as interrupt:  # noqa: BLE001 - it is handed back
            first = first or interrupt


@contextmanager
def noted_in(error: BaseException) -> Iterator[None]:
    """What fails while ``error`` is on its way is a note of it; an interrupt goes before any error."""
    try:
        yield
    except Exception as later:  # noqa: BLE001 - the first error wins
        for line in (f"and then: {line_of(later)}", *getattr(later, "__notes__", ())):
            error.add_note(line)

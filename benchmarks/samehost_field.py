"""Who is measured, and by which targets they are judged.

A *contestant* is one way to hand weights over. Whatever way that is, there is one trainer's process and one
process an engine, all of them alive from before the first round until after the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["CONTESTANTS", "TARGETS", "Contestant", "Target", "chosen", "waves"]

GIB = 1 << 30
_PROCESS = 0.35 * GIB  # an interpreter with torch in it


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to hand weights over.

    Args:
        name: what it is called in the report.
        side: ``"ours"``, ``"gloo"`` or ``"verl"``: which module moves the bytes.
        transport: of ours.
        verify: of ours.
        aliases: of ours: engines sample with views of what was published.
        stages: of ours: engines write beside their live weights, and copy at the commit.
        ray: of ours: engines are Ray actors, which the transport needs.
        bucket: of verl, in MiB.
        models: how many models it has in memory, those of the engines apart.
        each: how many models each engine adds.
    """

    name: str
    side: str
    transport: str = ""
    verify: str = "off"
    aliases: bool = False
    stages: bool = False
    ray: bool = False
    bucket: int = 0
    models: float = 1.3
    each: float = 1.0

    def need(self, nbytes: int, engines: int) -> float:
        """Bytes of memory that it takes at most, about."""
        return (self.models + self.each * engines) * nbytes + (engines + 1 + 2 * self.ray) * _PROCESS


def _ours() -> Iterator[Contestant]:
    for verify in ("off", "sampled", "full"):
        named = "" if verify == "off" else f", {verify}"
        yield Contestant(f"publish and swap{named}", "ours", "shm", verify, aliases=True, models=3.0)
        yield Contestant(f"ring{named}", "ours", "shm", verify)
    yield Contestant("ring, engines that stage", "ours", "shm", stages=True, each=2.0)
    yield Contestant("object store", "ours", "objects", ray=True, models=4.0)
    yield Contestant("collective", "ours", "collective")


CONTESTANTS: Sequence[Contestant] = (
    *_ours(),
    Contestant("gloo, tensor by tensor", "gloo", each=2.0),
    Contestant("verl, buckets of 2048 MiB", "verl", bucket=2048, each=2.0),
    Contestant("verl, buckets of 512 MiB", "verl", bucket=512, each=2.0),
)

VERL = tuple(each.name for each in CONTESTANTS if each.side == "verl")
"""The first is as verl's configuration has it, and the one that targets are about."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a contestant is to reach.

    Args:
        name: the contestant's.
        most: memcpys of CPU at most, plus ``each`` for each engine; None where ``less`` is asked for.
        each: see ``most``.
        less: how many times less CPU than the cheapest of ``peers``; None where ``most`` is asked for.
        peers: other contestants.
        only: the only number of engines for which it is asked; None for all.
    """

    name: str
    most: float | None = None
    each: float = 0.0
    less: float | None = None
    peers: tuple[str, ...] = ()
    only: int | None = None

    def asks(self, engines: int) -> bool:
        """Whether it is asked for with so many engines."""
        return self.only is None or self.only == engines

    def limit(self, engines: int) -> float:
        """Memcpys at most, or how many times less."""
        return self.less if self.most is None else self.most + self.each * engines  # type: ignore[return-value]

    def text(self, engines: int) -> str:
        """In words."""
        if self.most is not None:
            return f"{self.name}: at most {self.limit(engines):.2f} memcpys"
        return f"{self.name}: at least {self.less:g}x less CPU than verl as it is configured"


TARGETS: Sequence[Target] = (
    Target("publish and swap", most=1.25),
    Target("ring", most=1.15, each=1.15),
    Target("publish and swap", less=20.0, peers=VERL[:1], only=4),
    Target("ring", less=6.0, peers=VERL[:1], only=4),
)


def chosen(words: Iterable[str]) -> list[Contestant]:
    """The contestants in whose names one of ``words`` is found; all of them for none."""
    wanted = list(words)
    return [each for each in CONTESTANTS if not wanted or any(word in each.name for word in wanted)]


def waves(need: Mapping[Contestant, float], budget: float) -> tuple[list[list[Contestant]], list[Contestant]]:
    """Groups that fit into memory together, in their order; and who does not fit even alone."""
    groups: list[list[Contestant]] = []
    left: list[Contestant] = []
    taken = budget
    for contestant, size in need.items():
        if size > budget:
            left.append(contestant)
            continue
        if taken + size > budget:
            groups.append([])
            taken = 0.0
        groups[-1].append(contestant)
        taken += size
    return groups, left

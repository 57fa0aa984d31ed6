"""An engine in this process: its weights, joined with the receiving halves of every transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .fsm import checks
from .fsm.contract import InletFactory, Sink
from .fsm.errors import SetupError
from .handlers.receiver import Receiver

if TYPE_CHECKING:
    from .handlers.sink import Held

__all__ = ["inlets", "receiver_for"]

_WHERE = "receiver_for"


def inlets(*, aliases: bool = False) -> dict[str, InletFactory]:
    """The receiving half of each transport, by the transport's name.

    Args:
        aliases: for an engine that can use the trainer's buffer as its weights.
    """
    from .transports.collective import collective_inlet
    from .transports.cuda_ipc import cuda_ipc_inlet
    from .transports.memory import memory_inlet
    from .transports.objects_inlet import objects_inlet
    from .transports.shm import aliasing_shm_inlet, shm_inlet

    return {
        "collective": collective_inlet,
        "cuda_ipc": cuda_ipc_inlet,
        "memory": memory_inlet,
        "objects": objects_inlet,
        "shm": aliasing_shm_inlet if aliases else shm_inlet,
    }


def receiver_for(
    held: Held,
    engine_id: str,
    *,
    stages: bool = True,
    swaps: bool = False,
    aliases: bool = False,
    staged_on: str | None = None,
    rank: int = 0,
    on_commit: Callable[[int], None] | None = None,
    asleep: Callable[[], bool] | None = None,
    extra_inlets: Mapping[str, InletFactory] | None = None,
    fault: Callable[[str, int], None] | None = None,
) -> Receiver:
    """A receiver for what an engine samples with.

    Args:
        held: a module, every name of its ``state_dict``; or a mapping of named tensors.
        engine_id: the engine's name, the same that its trainers use.
        stages: keep arriving weights beside the live ones until the commit. A failure then leaves the old
            ones whole; it costs the memory of the model once more. Without, a failure quarantines the engine.
        swaps: the memory of the weights may be exchanged: at the commit each tensor gets the memory that the
            new weights were written to, and nothing is copied a second time. Nothing may have kept an address
            or a view of the old ones, as a captured CUDA graph does. It always stages.
        aliases: as ``swaps``, and nothing ever writes to these weights but the hand-over, so that they may
            lie in memory that the trainer and other engines share. With ``transport="shm"`` nothing is copied
            then. **Whoever writes there ends his process**; see ``handlers.swap_sink``.
        staged_on: the device of the staged weights, ``"cpu"`` for example; each tensor's own by default.
        rank: which of the engine's ranks this is.
        on_commit: called with the version when the weights are new and generation is still paused.
        asleep: whether the engine sleeps now, so that its weights cannot be written: a round without it, or
            none, is refused before anything moves. Called whenever a trainer asks.
        extra_inlets: receiving halves of transports of your own, by name.
        fault: for tests: called with each point of ``handlers.receiver.FAULT_POINTS`` and a bucket's number.

    Raises:
        SetupError: one of these is of the wrong kind.
    """
    from .handlers.sink import check_held
    from .transports.digest import digest
    from .transports.packing import unpack

    check_held(_WHERE, held, staged_on)
    checks.text(_WHERE, "engine_id", engine_id)
    checks.flag(_WHERE, "stages", stages)
    checks.flag(_WHERE, "swaps", swaps)
    checks.flag(_WHERE, "aliases", aliases)
    checks.step_of(_WHERE, "rank", rank)
    extra = {} if extra_inlets is None else extra_inlets
    checks.kind(_WHERE, "extra_inlets", extra, Mapping, "a mapping of names to functions is needed")
    for name, function in (("on_commit", on_commit), ("asleep", asleep), ("fault", fault), *extra.items()):
        if function is not None:
            checks.called(_WHERE, name, function)
    return Receiver(
        engine_id,
        _sink(held, stages=stages, swaps=swaps, aliases=aliases, staged_on=staged_on),
        inlets={**inlets(aliases=aliases), **extra},
        unpack=unpack,
        digest=digest,
        rank=rank,
        on_commit=on_commit,
        asleep=asleep,
        fault=fault,
    )


def _sink(held: Held, *, stages: bool, swaps: bool, aliases: bool, staged_on: str | None) -> Sink:
    from .handlers.sink import InPlaceSink, StagingSink
    from .handlers.swap_sink import SwapSink

    if not (swaps or aliases):
        return StagingSink(held, device=staged_on) if stages else InPlaceSink(held)
    if not stages or staged_on is not None:
        given = "aliases" if aliases else "swaps"
        raise SetupError(
            f"{_WHERE}({given}=True) exchanges memory at the commit: it always stages, and nowhere else; "
            "leave stages and staged_on out"
        )
    return SwapSink(held, aliases=aliases)

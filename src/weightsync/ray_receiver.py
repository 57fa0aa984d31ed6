"""What a Ray actor mixes in to be an engine.

@weightsync.ray_engine(num_cpus=1)
class Rollout(weightsync.RayReceiver):
    def __init__(self):
        self.model = build()
        self.weightsync_serve(self.model)

    def generate(self, prompts):
        with self.weightsync_gate.admit():
            return sample(self.model, prompts)

engine = weightsync.RayEngine(Rollout.remote())
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import ray

from .engine import receiver_for
from .fsm.contract import InletFactory
from .handlers.ray_receiver import ActorReceiver, ray_engine
from .handlers.receiver import Receiver

if TYPE_CHECKING:
    from .handlers.sink import Held

__all__ = ["RayReceiver", "ray_engine"]


class RayReceiver(ActorReceiver):
    """Mix-in for an actor class that generates. Call ``weightsync_serve`` in ``__init__``."""

    def weightsync_serve(
        self,
        held: Held,
        *,
        id: str | None = None,  # noqa: A002 - as it is called everywhere
        stages: bool = True,
        swaps: bool = False,
        aliases: bool = False,
        staged_on: str | None = None,
        on_commit: Callable[[int], None] | None = None,
        asleep: Callable[[], bool] | None = None,
        extra_inlets: Mapping[str, InletFactory] | None = None,
        fault: Callable[[str, int], None] | None = None,
    ) -> Receiver:
        """From now on, trainers can hand weights to this actor. The arguments are those of ``receiver_for``.

        ``id`` is the engine's name; by default the actor's id, as it is by default for ``RayEngine``.

        Raises:
            SetupError: one of the arguments is of the wrong kind.
        """
        name = id if id is not None else ray.get_runtime_context().get_actor_id()
        self.weightsync_receiver = receiver_for(
            held, name or "engine", stages=stages, swaps=swaps, aliases=aliases,
            staged_on=staged_on, on_commit=on_commit, asleep=asleep, extra_inlets=extra_inlets, fault=fault,
        )  # fmt: skip
        return self.weightsync_receiver

"""The half of a Ray engine that is in the actor: words reach the receiver while the actor is busy.

Ray runs the methods of a *concurrency group* beside all others, so every word of a trainer goes to one
method, ``weightsync_word``, in a group of its own. What Ray does with a group depends on the actor, and so
does that method:

* An actor without coroutines runs a group on its own threads: a word may block one of them, the next word
  gets another. Four are enough: an open that waits, a reception that is stuck, the abort that ends it, and a
  hello.
* An actor with at least one coroutine method runs a group on one event loop, where a word that blocks would
  block all others. There the method is a coroutine, and leaves the blocking to a thread.

That is what a trainer's first word meets, and all words of one on another host. One on the same host gets a
*line* (``line_server.py``) and says the rest over that; where it leads is said by Ray, whose wire is trusted.

A group has to be named where the actor class is made: ``@ray_engine(num_cpus=1)`` does so. A class that is
made without it is refused with that advice, when an actor of it is created.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Mapping
from typing import Any

import ray
from ray.actor import ActorClass

from ..fsm import checks
from ..fsm.errors import SetupError
from .gate import Gate
from .line_server import LineServer
from .receiver import Receiver
from .threads import spawn
from .words import LINE, say

__all__ = ["CONCURRENCY", "GROUP", "ActorReceiver", "ray_engine"]

GROUP = "weightsync"
"""The concurrency group of the words."""

CONCURRENCY = 4
"""How many words an actor can listen to at once."""

_LOGGER = logging.getLogger("weightsync")
_making = threading.Lock()


class ActorReceiver:
    """Mixed into an actor class, it lets trainers talk to the actor's receiver while the actor is busy."""

    weightsync_receiver: Receiver | None = None
    weightsync_line: LineServer | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if issubclass(cls, ActorClass):  # the class that Ray derives, whose instances make actors
            _explain_a_missing_group(cls)
        elif _has_coroutines(cls):
            cls.weightsync_word = _word_for_loops  # type: ignore[method-assign]

    @property
    def weightsync_gate(self) -> Gate:
        """Generate inside ``with self.weightsync_gate.admit()``, or ``async with ...admitted()``."""
        return _known(self).gate

    @ray.method(concurrency_group=GROUP)
    def weightsync_word(self, said: list[Any]) -> object:
        """Carry out one word of a trainer. For ``RayEngine``."""
        return _say(self, said)


# No methods of the actor class: Ray wraps each of those, and it would make them everybody's to call.


def _known(actor: ActorReceiver) -> Receiver:
    if actor.weightsync_receiver is None:
        name = type(actor).__name__
        raise SetupError(f"{name} has no receiver: call self.weightsync_serve(model) in its __init__")
    return actor.weightsync_receiver


def _say(actor: ActorReceiver, said: list[Any]) -> object:
    """Carry a word out. Two are about the line, which is the actor's, and not its receiver's."""
    receiver, line = _known(actor), actor.weightsync_line
    match said:
        case ["hello", *_, "line"]:
            told: Any = say(receiver, said[:-1])
            return [*told[:LINE], _offer(actor), *told[LINE + 1 :]]
        case ["outcome", incarnation, _, _, _, str(token)] if line is not None:
            if incarnation is not None:
                receiver.check_incarnation(incarnation)
            return line.outcome(token)
    return say(receiver, said)


def _offer(actor: ActorReceiver) -> list[Any] | None:
    """Where trainers of this host find the line, which is made for the first of them."""
    with _making:
        if actor.weightsync_line is None:
            try:
                actor.weightsync_line = LineServer(lambda said: _say(actor, said))
            except OSError as error:
                _LOGGER.debug("line: there can be none here, words come by Ray: %s", error)
                return None
        return actor.weightsync_line.offer


@ray.method(concurrency_group=GROUP)
async def _word_for_loops(self: ActorReceiver, said: list[Any]) -> object:
    """Carry out one word of a trainer. For ``RayEngine``."""
    if said[:1] == ["hello"] and said[-1] != "line":  # which never blocks
        return _say(self, said)
    return await asyncio.wrap_future(spawn("weightsync-word", _say, self, said))


def _has_coroutines(cls: type) -> bool:
    """Whether Ray will run actors of this class on event loops, for a reason other than ours."""

    def found(member: Any) -> bool:
        return inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)

    return any(not name.startswith("weightsync_") for name, _ in inspect.getmembers(cls, found))


def _explain_a_missing_group(cls: Any) -> None:
    """Ray asserts, without a word, that the group of a method was declared. Say it before.

    How it makes an actor is Ray's own business: where it is done otherwise, the assertion is what remains.
    """
    create = getattr(cls, "_remote", None)
    if create is None:
        return

    def _remote(self: Any, *args: Any, **options: Any) -> Any:
        known = getattr(self, "__ray_metadata__", None)
        if known is not None and GROUP not in (known.concurrency_groups or {}):
            raise SetupError(
                f"{cls.__name__} receives weights, but was made an actor without the concurrency group "
                f"{GROUP!r}: use @weightsync.ray_engine(...) in place of @ray.remote(...), or add "
                f"concurrency_groups={{{GROUP!r}: {CONCURRENCY}}} to it"
            )
        return create(self, *args, **options)

    cls._remote = _remote


def ray_engine(*classes: type, **options: Any) -> Any:
    """``ray.remote`` for a class that receives weights: with the concurrency group of its words.

    Use it as ``@ray_engine`` or as ``@ray_engine(num_cpus=1, max_restarts=2)``, with the options of Ray.

    Raises:
        SetupError: this is no class, or not one that receives weights.
    """
    groups = options.pop("concurrency_groups", {})
    needed = "a mapping of names to numbers is needed"
    checks.kind("ray_engine", "concurrency_groups", groups, Mapping, needed)
    groups = {GROUP: CONCURRENCY, **groups}

    def decorate(cls: type) -> Any:
        needed = "a class is needed: put @ray_engine(...) above it, in the place of @ray.remote"
        checks.kind("ray_engine", "cls", cls, type, needed)
        if not issubclass(cls, ActorReceiver):
            raise SetupError(
                f"{cls.__name__} does not receive weights: let it inherit weightsync.RayReceiver"
            )
        make: Any = ray.remote
        return make(concurrency_groups=groups, **options)(cls)

    if len(classes) > 1:
        raise checks.refusal("ray_engine", "cls", classes, "one class is needed")
    return decorate(*classes) if classes else decorate

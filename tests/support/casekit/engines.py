"""Engines as cases use them: told what goes wrong, looked at afterwards, wherever they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from weightsync.engine import receiver_for
from weightsync.fsm.contract import EngineLink
from weightsync.fsm.states import EngineState
from weightsync.handlers.local_engine import LocalEngine
from weightsync.handlers.receiver import Receiver

from .scripts import ANY, Script

__all__ = ["Engine", "InThreads", "Look", "look_at", "tensors_in"]


@dataclass(frozen=True)
class Look:
    """What an engine is, seen from inside."""

    state: EngineState
    version: int | None
    incarnation: str
    in_session: bool
    paused: bool
    tensors: Mapping[str, Tensor]


class Engine(Protocol):
    """One engine of a case."""

    @property
    def name(self) -> str:
        """Its id."""

    @property
    def link(self) -> EngineLink:
        """The trainer's end."""

    def arm(self, point: str, action: Callable[[], None], bucket: int = ANY) -> None:
        """Let something go wrong, once."""

    def disarm(self) -> None:
        """Nothing more goes wrong."""

    def count(self, point: str) -> int:
        """How often it came to a point since it was disarmed."""

    def look(self) -> Look:
        """What it is now."""

    def settle(self) -> None:
        """Wait until every word that was said is answered."""


def look_at(receiver: Receiver, held: torch.nn.Module | Mapping[str, Tensor]) -> Look:
    """What the engine of ``receiver`` is now."""
    facts = receiver._machine.facts
    return Look(
        receiver.state,
        receiver.version,
        facts.incarnation,
        facts.session is not None,
        receiver.gate.paused,
        {name: tensor.detach().clone() for name, tensor in tensors_in(held).items()},
    )


def tensors_in(held: torch.nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors by name, the very objects."""
    return held.state_dict() if isinstance(held, torch.nn.Module) else held


class _Link(LocalEngine):
    """Remembers which words were said, of which epoch."""

    def __init__(self, receiver: Receiver) -> None:
        super().__init__(receiver)
        self.words: list[tuple[str, int]] = []
        self.answers: list[Future[Any]] = []

    def _ask(self, word: str, work: Callable[..., Any], *args: Any) -> Future[Any]:
        self.words.append((word, args[0].epoch if args else 0))
        answer = super()._ask(word, work, *args)
        self.answers.append(answer)
        return answer


class InThreads:
    """An engine in this process.

    Args:
        name: its id.
        held: what it samples with.
        how: as for ``receiver_for``: ``stages``, ``swaps``, ``aliases``.
    """

    def __init__(self, name: str, held: torch.nn.Module | Mapping[str, Tensor], **how: Any) -> None:
        self.name, self.held, self.script = name, held, Script()
        self._how, self._first = how, {each: tensor.clone() for each, tensor in tensors_in(held).items()}
        self.receiver = receiver_for(held, name, fault=self.script, **how)
        self.link = _Link(self.receiver)

    def restart(self) -> None:
        """Die and start again by itself: the same name and link, the first weights, another incarnation."""
        with torch.no_grad():
            for name, tensor in tensors_in(self.held).items():
                tensor.copy_(self._first[name])
        self.receiver = receiver_for(self.held, self.name, fault=self.script, **self._how)
        self.link.receiver = self.receiver

    def arm(self, point: str, action: Callable[[], None], bucket: int = ANY) -> None:
        """Let something go wrong, once."""
        self.script.arm(point, action, bucket)

    def disarm(self) -> None:
        """Nothing more goes wrong; what was said so far is forgotten."""
        self.script.disarm()
        self.link.words.clear()

    def count(self, point: str) -> int:
        """How often it came to a point since it was disarmed."""
        return self.script.count(point)

    def said(self, word: str) -> int:
        """How often a word was said to it since it was disarmed."""
        return sum(said == word for said, _ in self.link.words)

    def look(self) -> Look:
        """What it is now."""
        return look_at(self.receiver, self.held)

    def settle(self) -> None:
        """Wait until every word that was said is answered."""
        wait(self.link.answers, 10.0)
        self.link.answers.clear()

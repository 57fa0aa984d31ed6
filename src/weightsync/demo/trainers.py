"""The demo's trainer: one process with the policy as it is, or two ranks among which FSDP spreads it.

Both learn the same way and hand over at the same steps. What a sharded one does, all of its ranks do at once:
each is asked, this rank does its own part, and then the others' answers are taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it where gloo is

from ..fsm.errors import EngineError, RankFailed, RankLost, SetupError, WeightSyncError
from ..fsm.results import RoundResult
from ..handlers.ranks import TrainerRanks
from ..sync import WeightSync
from ..transports.weights import TorchWeights
from .bulletin import Board
from .faults import RankKind
from .grpo import Batch, Learner, Settings, StepStats
from .peers import START, Peer, ProcessPeer, RayPeer
from .sharded import HOST, Account, LookBack, Place, ShardedRank
from .wrapping import PLAIN

__all__ = ["Plain", "Sharded", "Trainer", "trainer_for"]

_LIMIT = 90.0
"""Seconds for what all ranks do together; a round and its attempts are bounded by far less."""
_AFTER = 5.0
"""Seconds for what the other rank has to say when this one has failed."""
_ENDING, _BROKEN_OFF = 10.0, 1.0
"""Seconds that the other rank has to end by itself."""
_GONE = "rank 1 of the trainer is gone, and its part of the weights with it"


class Trainer(Protocol):
    """What learns, as the demo uses it."""

    handlers: Sequence[Any]
    """Of the rounds."""
    ranks: TrainerRanks | None

    def prompts(self, step: int) -> Any:
        """The prompts of a step."""

    def learn(self, batches: Sequence[Batch]) -> StepStats:
        """Improve the policy on a step's samples."""

    def hand_over(self, sync: WeightSync, step: int) -> RoundResult | None:
        """The round of a step, if there is one; that of the weights it begins with is step 0's."""

    def digest(self) -> str:
        """Of the weights there are now."""

    def look_back(self, step: int) -> list[str]:
        """What goes wrong when it is older weights for a while; may do nothing."""

    def arm(self, kind: RankKind) -> None:
        """Let a rank fail in the next round."""

    def close(self) -> None:
        """Give everything back."""


class Plain:
    """The policy as it is, in this process."""

    handlers: Sequence[Any] = ()
    ranks: TrainerRanks | None = None

    def __init__(self, settings: Settings) -> None:
        self._learner = Learner(settings)
        self.prompts = self._learner.prompts
        self.learn = self._learner.learn

    def hand_over(self, sync: WeightSync, step: int) -> RoundResult | None:
        """The module itself."""
        model = self._learner.model
        return sync.on_step_end(step, model) if step else sync.on_train_begin(model)

    def digest(self) -> str:
        """Of the module's weights."""
        return TorchWeights.of(self._learner.model).digest()

    def look_back(self, step: int) -> list[str]:
        """There are no older ones."""
        return []

    def arm(self, kind: RankKind) -> None:
        """There is no other rank; that is refused before anything is started."""
        raise SetupError(f"{kind}: this trainer has one rank")

    def close(self) -> None:
        """Nothing is held."""


class Sharded:
    """Rank 0 of a policy that FSDP spreads, and the other rank by its :class:`.peers.Peer`.

    Args:
        form: ``"fsdp1"`` or ``"fsdp2"``.
        settings: of the run.
        steps: at which it looks back.
        host: makes the other rank.
    """

    def __init__(
        self, form: str, settings: Settings, steps: Sequence[int], host: Callable[[Place, Settings], Peer]
    ) -> None:
        self.form, self._steps = form, steps
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.board = Board()
        self.looks: list[LookBack] = []
        self.accounts: tuple[Account, ...] = ()
        self._ending = _BROKEN_OFF
        self._rank = ShardedRank(Place(0, form, self._store.port, self.board.port), settings)
        self._peer: Peer | None = None
        try:
            self._peer = host(Place(1, form, self._store.port, self.board.port), settings)
        except BaseException:
            self.close()
            raise

    def join(self) -> None:
        """Wait until the other rank is there, and shard the policy with it."""
        self._other.answer(START)
        self._together("join")
        self.handlers: Sequence[Any] = self._rank.handlers
        self.ranks: TrainerRanks | None = self._rank.ranks

    @property
    def pid(self) -> int:
        """The process of the other rank."""
        return self._other.pid

    # -- what is asked of every trainer ----------------------------------------------------------------------

    def prompts(self, step: int) -> Any:
        """The same on every rank."""
        return self._rank.learner.prompts(step)

    def learn(self, batches: Sequence[Batch]) -> StepStats:
        """Each rank goes over its share; FSDP takes the mean of the gradients."""
        stats, _ = self._together("learn", batches)
        return stats  # type: ignore[no-any-return]

    def hand_over(self, sync: WeightSync, step: int) -> RoundResult | None:
        """This rank leads, the other one follows."""
        result, _ = self._asked("follow", (step,), partial(self._rank.lead, sync, step))
        if result is not None and not result.ok and isinstance(result.error, RankLost) and self._gone():
            # What it held is gone with it, and no round can bring that back.
            raise RankLost(f"{_GONE} at step {step}: {result.error}") from result.error
        if step == 0:
            self._together("keep")
        return result  # type: ignore[no-any-return]

    def digest(self) -> str:
        """Of the whole weights, on either rank."""
        mine, other = self._together("digest")
        if mine != other:
            raise EngineError(f"the ranks gathered other weights: {mine} and {other}")
        return str(mine)

    def look_back(self, step: int) -> list[str]:
        """At some steps: be the version that the run began with, evaluate, and be the newest again."""
        if step not in self._steps:
            return []
        found = self._together("look_back", step)
        self.looks.append(found[0])
        problems = []
        for number, look in enumerate(found):
            if not look.same:
                problems.append(f"step {step}: rank {number} was other weights than version {look.older}")
            if not look.restored:
                problems.append(
                    f"step {step}: rank {number} has other weights after it was version {look.older}"
                )
        return problems

    def arm(self, kind: RankKind) -> None:
        """The other rank."""
        self._other.ask("arm", kind)
        self._other.answer(_LIMIT)

    def tell(self) -> None:
        """Take what each rank has counted, at the end of a run."""
        self.accounts = self._together("account")
        self._ending = _ENDING

    def close(self) -> None:
        """The other rank is asked to end. After a run that broke off it may be in a collective for good."""
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.end()
        with contextlib.suppress(Exception):
            self._rank.leave()
        if peer is not None:
            peer.close(self._ending)
        self.board.close()

    # -- inside ----------------------------------------------------------------------------------------------

    @property
    def _other(self) -> Peer:
        if self._peer is None:
            raise SetupError("this trainer is closed")
        return self._peer

    def _together(self, word: str, *given: object) -> Any:
        return self._asked(word, given, lambda: getattr(self._rank, word)(*given))

    def _asked(self, word: str, given: Sequence[object], mine: Callable[[], Any]) -> tuple[Any, Any]:
        """Both ranks' answers."""
        peer = self._other
        peer.ask(word, *given)
        try:
            found = mine()
        except Exception as error:
            if self._gone():
                raise RankLost(
                    f"rank 1 of the trainer is gone, and its part of the weights: {word}"
                ) from error
            try:
                peer.answer(_AFTER)
            except RankFailed as failed:
                if not isinstance(error, WeightSyncError):  # a collective that the other one did not come to
                    raise failed from error
            except RankLost:  # it waits for this rank, which is not to come
                pass
            raise
        return found, self._answer(peer, found)

    def _answer(self, peer: Peer, found: Any) -> Any:
        try:
            return peer.answer(_LIMIT)
        except RankLost:
            if isinstance(found, RoundResult) and not found.ok:
                return None  # the round has found out, and says more
            raise

    def _gone(self) -> bool:
        return self._peer is None or self._peer.gone()


def trainer_for(form: str, settings: Settings, *, threads: bool) -> Plain | Sharded:
    """The trainer of that form; one of several ranks begins to start, and is there when it was joined."""
    if form == PLAIN:
        return Plain(settings)
    at = sorted({max(1, settings.steps // 2), settings.steps})
    return Sharded(form, settings, at, ProcessPeer if threads else RayPeer)

"""From what a user writes to the part it names. Heavy parts are imported here, when they are asked for.

Whatever is not such a part is refused here, before anything moves, with what to give in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from .backends import Backends
from .fsm import checks
from .fsm.contract import EngineLink, Transport, Weights
from .fsm.errors import SetupError
from .fsm.executors import Executor, Observer
from .fsm.exports import Planned
from .fsm.ledger import LedgerKeeper
from .fsm.lock import LockKeeper
from .fsm.policy import Policy
from .fsm.sampling import takes_part
from .handlers.bridge import LoopBridge
from .handlers.coroutines import (
    AsyncExecutor,
    AsyncObserver,
    Awaiting,
    AwaitingObserver,
    executes_on_a_loop,
    observes_on_a_loop,
)  # fmt: skip
from .handlers.ledger import FileLedger, MemoryLedger
from .handlers.lock import LocalLock
from .transport_backends import METHODS, TABLE, made, transports

__all__ = [
    "TRANSPORTS", "around", "engines_for", "executors_for", "export_of", "ledger_for", "lock_for", "name_of",
    "policy_for", "sort_handlers", "transport_for", "weights_for",
]  # fmt: skip

_WHERE = "WeightSync"
_LINK = ("hello", "open", "receive", "commit", "abort", "resume", "close")
_LOCK = ("request", "enter", "wait", "renew", "release", "cancel", "status")
_LEDGER = ("current", "version", "admit", "bind", "publish", "shut", "ask")

TRANSPORTS = ("auto", *(each.name for each in TABLE))
"""The transports that can be named, without those that other packages bring."""


def engines_for(engines: Iterable[EngineLink]) -> list[EngineLink]:
    """The links, each of which is one.

    Raises:
        SetupError: no list, or something in it that is no link; the message says how to make one of it.
    """
    if isinstance(engines, str | bytes | Mapping | type) or not isinstance(engines, Iterable):
        advice = "a list of engines is needed: engines=[...]"
        if not checks.has(engines, _LINK):
            advice = f"{advice}, in which {_as_a_link(engines)}"
        raise checks.refusal(_WHERE, "engines", engines, advice)
    links = list(engines)
    for number, link in enumerate(links):
        if not checks.has(link, _LINK) or not hasattr(link, "id"):
            raise checks.refusal(_WHERE, f"engines[{number}]", link, f"no engine: {_as_a_link(link)}")
        checks.text(_WHERE, f"engines[{number}].id", link.id)
    return links


def _as_a_link(given: object) -> str:
    """What to write in the place of something that only stands for an engine."""
    if isinstance(given, type):
        return "an object is needed, and not its class"
    if hasattr(given, "weightsync_word"):
        return "an actor is given as RayEngine(actor)"
    if getattr(given, "_actor_id", None) is not None:
        return "an actor is given as RayEngine(actor), and its class inherits RayReceiver"
    if checks.has(given, _LINK[:-1]):
        return "a receiver is given as LocalEngine(receiver)"
    if checks.has(given, ("state_dict",)):
        return "a module of this process is given as LocalEngine(receiver_for(module, 'name'))"
    return "each one is a RayEngine(actor) or a LocalEngine(receiver)"


def policy_for(policy: Policy | None, where: str = _WHERE) -> Policy:
    """The policy itself, or the default one.

    Raises:
        SetupError: it is something else.
    """
    if policy is None:
        return Policy()
    checks.kind(where, "policy", policy, Policy, "a Policy is needed, such as Policy(deadline=60)")
    return policy


def transport_for(
    transport: str | Transport, policy: Policy | None = None, backends: Backends | None = None
) -> Transport:
    """The transport called so, or the object itself.

    Args:
        transport: a name, or an object.
        policy: of the rounds, which ``"auto"`` has to know.
        backends: what can be named; by default what the library and other packages bring.

    Raises:
        BackendUnavailable: it needs something that is not installed, or is broken.
        SetupError: no transport is called so, or this is none.
    """
    if not isinstance(transport, str):
        if not checks.has(transport, METHODS) or not hasattr(transport, "capabilities"):
            names = f"{', '.join(map(repr, TRANSPORTS[:-1]))} or {TRANSPORTS[-1]!r}"
            raise checks.refusal(_WHERE, "transport", transport, f"{names} is needed, or a transport object")
        return transport
    backends = transports() if backends is None else backends
    if transport == "auto":
        from .choosing import CANDIDATES, AutoTransport

        strict = backends.mode == "strict"
        for name in CANDIDATES if strict else ():
            backends.get(name)  # before anything moves, whichever of them a round will need
        needs_all = policy is None or policy.on_engine_failure == "fail"
        return AutoTransport(partial(made, backends), needs_all=needs_all, strict=strict)
    return made(backends, transport)


def lock_for(lock: LockKeeper | str | None, lease: float) -> LockKeeper:
    """The keeper itself; the Ray actor of that name; or a lock of this process alone.

    Raises:
        SetupError: it is neither a keeper nor a name, or there can be no keeper.
    """
    if lock is None:
        return LocalLock(lease=lease)
    if isinstance(lock, str):
        from .handlers.ray_lock import RayLock

        lock = RayLock(lock, lease=lease)
    if not checks.has(lock, _LOCK):
        needed = "the name of a lock that Ray keeps is needed, or a keeper such as LocalLock()"
        raise checks.refusal(_WHERE, "lock", lock, needed)
    check = getattr(lock, "check", None)
    if callable(check):
        check()
    return lock


def ledger_for(ledger: LedgerKeeper | str | Path | None) -> LedgerKeeper:
    """The keeper itself; a file; or this process's memory.

    Raises:
        SetupError: it is neither a keeper nor a path, or the file cannot be kept there.
    """
    if ledger is None:
        return MemoryLedger()
    if isinstance(ledger, (str, Path)):
        ledger = FileLedger(ledger)
    if not checks.has(ledger, _LEDGER):
        needed = "the path of a file is needed, or a keeper such as FileLedger(path)"
        raise checks.refusal(_WHERE, "ledger", ledger, needed)
    if isinstance(ledger, FileLedger):
        ledger.check()
    return ledger


def name_of(keeper: LockKeeper | LedgerKeeper) -> str:
    """How a keeper is called in the log: the same for whoever shares it. One without a name is not told."""
    name = getattr(keeper, "name", None)
    return name if isinstance(name, str) else ""


def weights_for(model: object, policy: Policy, *, snapshot: bool) -> Weights:
    """The tensors of ``model`` as transports read them; with ``snapshot`` a private copy, if possible.

    Raises:
        SetupError: a class, which has no tensors yet; or weights that cannot do what the policy says.
        PlanError: something that has none, or none of those that the policy selects.
    """
    if isinstance(model, type):
        raise checks.refusal("weights of", "model", model, "a module is needed, and not its class")
    if all(hasattr(model, name) for name in ("materialize", "plan", "digest")):
        own = _as_policy_says(model, policy)
        copy = getattr(own, "snapshot", None)
        return cast("Weights", copy() if snapshot and callable(copy) else own)
    from .transports.weights import TorchWeights

    weights = TorchWeights.of(cast("Any", model), cast=policy.cast, only=policy.only)
    return weights.snapshot() if snapshot else weights


def export_of(model: object) -> Planned | None:
    """What all ranks have to agree on before these weights are read, if there is something."""
    for each in (model, getattr(model, "source", None)):
        if not isinstance(each, type) and checks.has(each, ("standing", "settle")):
            return cast("Planned", each)
    return None


def _as_policy_says(weights: Any, policy: Policy) -> Any:
    """Weights that are some already. What they know nothing of would be left out in silence."""
    kind = type(weights).__name__
    if policy.cast is not None or policy.only is not None:
        what = f"cast={policy.cast!r}" if policy.cast is not None else f"only={policy.only!r}"
        choose = getattr(weights, "such", None)
        if not callable(choose):
            raise SetupError(
                f"Policy({what}) is for tensors, and a {kind} makes its own plan: hand tensors or "
                f"TorchWeights over, or give {kind} a method such(cast, only)"
            )
        weights = choose(policy.cast, tuple(policy.only or ()))
    if policy.verify == "sampled" and not takes_part(weights.digest):
        raise SetupError(
            f"Policy(verify='sampled') needs the digest of a part, and {kind}.digest takes none: let it "
            "digest the part it is given (fsm/sampling.py), or use Policy(verify='full')"
        )
    return weights


def sort_handlers(
    handlers: Iterable[object], bridge: LoopBridge, policy: Policy, where: str = _WHERE
) -> tuple[tuple[Executor, ...], tuple[Observer, ...]]:
    """Executors and observers, each in the order given; one object may be both.

    Args:
        handlers: the user's.
        bridge: for those that are coroutine functions.
        policy: says how long each step of these may take.
        where: who is given them, for the error.

    Raises:
        SetupError: something that is neither.
    """
    limit = 0.9 * policy.limits().idle  # before the round gives it up without knowing who it was
    if isinstance(handlers, str | bytes | Mapping | type) or not isinstance(handlers, Iterable):
        raise checks.refusal(where, "handlers", handlers, "a list of handlers is needed: handlers=[...]")
    executors: list[Executor] = []
    observers: list[Observer] = []
    for handler in handlers:
        if isinstance(handler, type):
            raise checks.refusal(where, "handlers", handler, "an object is needed, and not its class")
        executes = checks.has(handler, ("prepare", "clean"))
        if executes:  # each of them, since what it hands back may have to be awaited, too
            executor = AsyncExecutor(cast("Awaiting", handler), bridge, limit)
            executors.append(executor)
            if executes_on_a_loop(handler):
                observers.append(executor)
        if observes_on_a_loop(handler):
            observers.append(AsyncObserver(cast("AwaitingObserver", handler), bridge, limit))
        elif callable(handler):
            observers.append(cast("Observer", handler))
        elif not executes:
            raise SetupError(
                f"{handler!r} is no handler: an executor has prepare and clean, an observer is called with "
                "records"
            )
    return tuple(executors), tuple(observers)


def around(executors: Sequence[Executor], call: Executor, barrier: Executor) -> tuple[Executor, ...]:
    """The executors of rank 0: the other ranks are called first, and waited for before what comes after them.

    Raises:
        SetupError: one that moves parts of engines comes before that.
    """
    late = tuple(each for each in executors if getattr(each, "after_ranks", False))
    early = tuple(each for each in executors if each not in late)
    for each in early:
        if engines := getattr(each, "engines", ()):
            raise SetupError(
                f"{each.name} moves parts of engine {min(engines)}, whose devices are those of all ranks: "
                "give these moves a Residency of their own, with after_ranks=True"
            )
    return (call, *early, barrier, *late)


def executors_for(handlers: Iterable[object], bridge: LoopBridge, policy: Policy) -> tuple[Executor, ...]:
    """Those of a rank above 0. It has no records, so nothing there observes.

    Raises:
        SetupError: something that is no executor, or observes as well.
    """
    where = "FollowerSync"
    executors, observers = sort_handlers(handlers, bridge, policy, where)
    # Those of coroutines hear of a round's end from whoever runs them.
    mere = next((each for each in observers if not isinstance(each, AsyncExecutor)), None)
    if mere is not None:
        raise checks.refusal(where, "handlers", mere, "rank 0 has the records, and its observers see them")
    return executors

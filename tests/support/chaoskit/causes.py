"""Whether the error of a round is that of a fault that happened in it: its kind, its text, whom it blames.

What is expected follows from the fault alone, and never from the result that is looked at.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Mapping, Sequence

from casekit.scripts import Injected
from weightsync.fsm.errors import EngineError, EngineGone, EngineSilent, LeaseEnded, LockError, SyncFailed
from weightsync.fsm.results import RoundResult

from .faults import IN_BUCKETS, Fault

__all__ = ["check", "differs"]

_LOCK = (LockError, LeaseEnded)
_KINDS: dict[str, tuple[tuple[type[BaseException], ...], str]] = {
    "engine-kill": ((EngineGone, EngineError), ""),  # EngineError: its line broke before Ray told of its end
    "engine-stop": ((EngineSilent,), ""),
    "engine-slow": ((EngineSilent,), ""),  # on a machine that is very busy
    "trainer-stop": ((LeaseEnded, LockError), "lock"),
    "cancel": ((CancelledError,), "the round was cancelled"),
    "line-cut": ((EngineError,), "line"),
    "keeper-kill": (_LOCK, "lock"),
    "keeper-stop": (_LOCK, "lock"),
}
"""The very kinds of errors that a fault may come to, and a word of their text."""

_SENDING = ("Broadcasting", "Awaiting")
_WHERE = {
    "prepare": ("Locked",), "open": ("Locked",), "opened": ("Locked",), "receive": ("Locked", *_SENDING),
    "broadcast": ("Broadcasting",), "bucket_sent": ("Broadcasting",), "collect": ("Awaiting",),
    "transport clean": ("Cleaning",), "clean": ("Cleaning",),
    "frame": _SENDING, "apply": _SENDING, "applied": _SENDING, "release": _SENDING, "acked": _SENDING,
    "commit": ("Cleaning",), "copied": ("Cleaning",), "committed": ("Cleaning",), "resume": ("Cleaning",),
    "resumed": ("Cleaning",),
}  # fmt: skip
"""In which states an error that is raised at a point may fail the round."""


def check(
    result: RoundResult,
    fired: Sequence[Fault],
    names: Sequence[str],
    raised: Mapping[Fault, BaseException],
) -> None:
    """A round that failed did so by one of the faults that happened, and says so.

    Args:
        result: of the round.
        fired: what happened in it.
        names: of the engines.
        raised: the objects that were raised in this process.

    Raises:
        AssertionError: it failed by something else, or does not say by what.
    """
    if result.ok:
        return
    assert fired, f"nothing happened, and it failed: {result.summary()}"
    wrong = [differs(result, fault, names, raised.get(fault)) for fault in fired]
    assert "" in wrong, f"{'; '.join(wrong)}: {result.summary()}"
    _says_all(result)


def differs(
    result: RoundResult, fault: Fault, names: Sequence[str], raised: BaseException | None = None
) -> str:
    """What is not as it had to be if the round failed by this fault; nothing if all of it is."""
    error, name = result.error, names[fault.engine] if fault.engine >= 0 else None
    told = f"{type(error).__name__}: {error}"
    if fault.kind == "trainer-raise" and error is not raised:
        return f"the error is {told!r}, and not the very object that {fault} raised"
    if fault.kind == "engine-raise" and (type(error) is not Injected or str(error) != str(fault)):
        return f"the error is {told!r}, and {fault} raised another one"
    if not fault.kind.endswith("-raise"):
        kinds, word = _KINDS[fault.kind]
        if name is None and fault.kind == "line-cut":
            kinds, word = _LOCK, "lock"
        if type(error) not in kinds or word not in str(error) or (name or "") not in str(error):
            return f"the error is {told!r}, which is not what {fault} comes to"
    if result.culprit != name:
        return f"{result.culprit} is blamed, and {fault} hit {name}"
    return _misplaced(result, fault) if fault.kind.endswith("-raise") else ""


def _misplaced(result: RoundResult, fault: Fault) -> str:
    if result.failed_in not in _WHERE[fault.point]:
        return f"it failed in {result.failed_in}, and {fault} happened in {_WHERE[fault.point]}"
    if fault.point in (*IN_BUCKETS, "bucket_sent") and result.bucket != fault.bucket:
        return f"it failed at bucket {result.bucket}, and not where {fault} happened"
    return ""


def _says_all(result: RoundResult) -> None:
    """Where it failed is where its path left the good one; the message has all of it, and the very error."""
    path = result.path
    last = path[path.index("Failed") - 1] if "Failed" in path else path[-2]
    assert result.failed_in == last, f"it failed in {result.failed_in}, by its path {path} in {last}"
    try:
        result.require()
    except SyncFailed as failure:
        message, cause = str(failure), failure.__cause__
    else:
        raise AssertionError("require() did not raise")
    assert cause is result.error, f"the cause is {cause!r}, and not the error"
    words = [f"round {result.round}", f"in {last}", f"{type(result.error).__name__}: {result.error}"]
    words += [f"engine {result.culprit}"] * (result.culprit is not None)
    words += [f"bucket {result.bucket}"] * (result.bucket is not None)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} is not in {message!r}"

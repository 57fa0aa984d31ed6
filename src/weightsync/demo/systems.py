"""What the systems around a round did in a run: one line for each, counted, and none of it known before.

The figures are read from the run's state log, and from what each rank of the trainer has counted. A system
that is added gets its line by a function in ``SYSTEMS``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .live import History
from .sharded import Account, LookBack
from .trainers import Sharded

__all__ = ["SYSTEMS", "Run", "systems_of", "table"]


@dataclass(frozen=True, slots=True)
class Run:
    """All that a line may be counted from.

    Args:
        records: of the state log.
        history: of the run.
        accounts: of the ranks, rank 0's first.
        looks: back at older weights.
        heard: what the bulletin board heard of each rank.
        transport: which carried the bytes.
        published: the version in the ledger.
    """

    records: Sequence[dict[str, Any]]
    history: History
    accounts: Sequence[Account]
    looks: Sequence[LookBack]
    heard: Sequence[dict[str, int]]
    transport: str
    published: int | None

    def notes(self, event: str, executor: str) -> list[dict[str, Any]]:
        """What an executor noted, on any rank."""
        return [each for each in self.records if each.get("event") == event and each.get("undo") == executor]


def systems_of(trainer: Sharded, history: History, out: Path, transport: str) -> list[str]:
    """The table of a run that is over."""
    records = [json.loads(line) for line in (out / "state.jsonl").read_text(encoding="utf-8").splitlines()]
    heard = [trainer.board.heard(each.rank) for each in trainer.accounts]
    return table(
        Run(
            records, history, trainer.accounts, trainer.looks, heard, transport,
            history.published,
        )
    )  # fmt: skip


def table(run: Run) -> list[str]:
    """The lines, in columns."""
    rows = [(name, count(run)) for name, count in SYSTEMS]
    width = max(len(name) for name, _ in rows)
    heading = f"what the systems around each round did, on {len(run.accounts)} ranks (rank 0 + rank 1):"
    return [heading, *(f"  {name:<{width}}  {told}" for name, told in rows)]


def _export(run: Run) -> str:
    counts = [each.counts for each in run.accounts]
    built, used = _each(count.builds for count in counts), _each(count.hits for count in counts)
    plans, objects = len({each.plan for each in run.accounts}), sum(count.objects for count in counts)
    same = "the same plan" if plans == 1 else f"{plans} DIFFERENT PLANS"
    return f"built {built}, used again {used}, {objects} object collectives; {same} on {len(counts)} ranks"


def _barrier(run: Run) -> str:
    met = Counter(str(each.get("trigger")) for each in run.notes("barrier", "barrier"))
    told = ", ".join(f"{name} {count} times" for name, count in met.items())
    waits = [each.get("seconds") or 0.0 for each in run.notes("barrier", "barrier")]
    return f"{told}; the longest wait {_ms(max(waits, default=0.0))}"


def _release(run: Run) -> str:
    done = run.notes("action", "cache_release")
    late = len(run.notes("over_budget", "cache_release"))
    counts = Counter(each.get("rank") or 0 for each in done)
    return (
        f"{_each(counts[each.rank] for each in run.accounts)} actions, {_ms(_sum(done, 'seconds'))} and "
        f"{_mb(_sum(done, 'bytes'))} handed back in all, {late} over budget"
    )


def _toggle(run: Run) -> str:
    done = Counter(str(each.get("trigger")) for each in run.notes("action", "automatic_gc"))
    return f"automatic gc off {done['set']} times, restored {done['restored']} times"


def _snapshots(run: Run) -> str:
    if not run.looks:
        return "none was looked at"
    look, exact = run.looks[-1], sum(each.same and each.restored for each in run.looks)
    return (
        f"from v{look.newest} to v{look.older} and back, answers right {look.now:.0%} and {look.then:.0%} of "
        f"the time; {exact} of {len(run.looks)} exact; {_mb(max(each.kept for each in run.accounts))} a rank"
    )


def _rollback(run: Run) -> str:
    rounds = {
        what: sum(each.get("trigger") == what for each in run.notes("call", "rollback"))
        for what in ("prepare", "clean", "undo")
    }
    return f"kept the weights of {rounds['prepare']} rounds, until {rounds['clean']} were published"


def _bridge(run: Run) -> str:
    loops = max(len(each.loops) for each in run.accounts)
    heard = sum(sum(each.values()) for each in run.heard)
    calls = _each(each.awaited for each in run.accounts)
    return f"{calls} coroutine calls, on at most {loops} loop a rank; the service heard {heard}"


def _backends(run: Run) -> str:
    from ..cli.doctor import findings

    found = [each for each in findings() if each.what.startswith("transport ")]
    here = [each.what.split()[1] for each in found if each.verdict == "ok"]
    told = f"{run.transport} carried the rounds; usable: {', '.join(here)}"
    rest = [f"{each.what.split()[1]} ({each.note})" for each in found if each.verdict != "ok"]
    return f"{told}; not: {', '.join(rest)}" if rest else told


def _residency(run: Run) -> str:
    done = run.notes("action", "residency")
    gone, back = ([each for each in done if each.get("trigger") == word] for word in ("offload", "onload"))
    most = max((each.get("bytes") or 0 for each in gone), default=0)
    return f"the optimizer gone {len(gone)} times and back {len(back)} times, {_mb(most)} a rank at most"


def _samples(run: Run) -> str:
    ages = run.history.ages
    fresh = sum(age == 0 for age in ages)
    return f"{len(ages)} segments, {fresh} of the published version, the oldest {max(ages, default=0)} behind"


def _versions(run: Run) -> str:
    told = [each.told for each in run.accounts]
    same = sum(len(set(said)) == 1 for said in zip(*told, strict=False))
    first = next((version for version, ok in told[0] if ok), None)
    rounds = max(len(said) for said in told)
    return f"versions {first} to {run.published}; all ranks were told the same in {same} of {rounds} rounds"


def _each(counts: Iterable[int]) -> str:
    """One count a rank."""
    return "+".join(map(str, counts))


def _sum(records: Iterable[dict[str, Any]], name: str) -> float:
    return sum(each.get(name) or 0 for each in records)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _mb(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


SYSTEMS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("export plan", _export),
    ("rank barrier", _barrier),
    ("cache release", _release),
    ("toggle", _toggle),
    ("snapshots", _snapshots),
    ("rollback", _rollback),
    ("loop bridge", _bridge),
    ("back ends", _backends),
    ("ledger", _versions),
    ("samples", _samples),
    ("residency", _residency),
)
"""Each system's line. One that is added to the library gets its own here."""

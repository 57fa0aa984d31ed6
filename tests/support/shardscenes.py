"""What the two ranks of ``shardkit`` are told to do, each as one function that both of them run."""

from __future__ import annotations

import asyncio
import hashlib
import os
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from weightsync import (
    CachedExport,
    CacheRelease,
    FollowerSync,
    FsdpExporter,
    HostCopy,
    LocalEngine,
    Policy,
    Rollback,
    TrainerRanks,
    WeightSync,
    receiver_for,
)
from weightsync.fsm.executors import RoundView
from weightsync.handlers import forms, slots, snapshots
from weightsync.handlers.holding import Holding
from weightsync.handlers.snapshots import Snapshots
from weightsync.handlers.votes import RankVotes

BATCH = torch.linspace(-1, 1, 12).reshape(3, 4)


class Stage:
    """A rank, for one scene: the votes of its own, and what it makes."""

    def __init__(self, rank: int, store: Any, name: str) -> None:
        self.rank, self.store, self.name = rank, store, name
        self._open: list[Any] = []

    def votes(self, limit: float = 20.0, name: str = "") -> RankVotes:
        """Of both ranks."""
        votes = RankVotes(self.store, self.rank, 2, name=f"{self.name}{name}", limit=limit)
        self._open.append(votes)
        return votes

    def keeper(self, model: torch.nn.Module, limit: float = 20.0, **how: Any) -> Snapshots:
        """Of this model's versions."""
        kept = Snapshots(model, votes=self.votes(limit), **how)
        self._open.append(kept)
        return kept

    def close(self) -> None:
        """The scene is over."""
        for each in self._open:
            each.close()


class Net(torch.nn.Module):
    """A small policy, with a buffer that changes in training; shards of its units are uneven, and empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = torch.nn.Linear(4, 8)
        self.middle = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        self.head = torch.nn.Linear(8, 3)
        self.value = torch.nn.Linear(8, 1)  # of one row: one rank has none of it
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Something of every parameter."""
        if self.training:
            self.seen.add_(1)
        inner = self.middle(self.first(x))
        value: torch.Tensor = self.value(inner).cos()
        return torch.log_softmax(self.head(inner) + value, dim=-1) * value


def made(form: str) -> Any:
    """A model of that form."""
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        MixedPrecision,
        ShardingStrategy,
        fully_shard,
    )

    net: Any = Net()
    if form == "plain":
        return net
    if form == "dtensor":
        fully_shard(net.middle)
        fully_shard(net)
        return net
    how: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": form != "flat"}
    if form == "kept":
        how["sharding_strategy"] = ShardingStrategy.SHARD_GRAD_OP
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = str(int(form == "evaluated"))
    if form in ("mixed", "evaluated"):
        how["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that FSDP1 is an old one
        net.middle = FullyShardedDataParallel(net.middle, **how)
        return FullyShardedDataParallel(net, **how)


class Trainer:
    """A model that learns; what it says is read in evaluation."""

    def __init__(self, form: str) -> None:
        self.model: torch.nn.Module = made(form)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)

    def train(self, step: int) -> float:
        """One step."""
        self.model.train()
        loss = -(self.model(BATCH + step / 10)[:, step % 3]).float().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def says(self) -> list[list[float]]:
        """What it makes of the same inputs each time; the model is not resharded after it."""
        self.model.eval()
        with torch.no_grad():
            return self.model(BATCH).float().tolist()  # type: ignore[no-any-return]


def held(model: torch.nn.Module, *, buffers: bool = False) -> str:
    """The digest of this rank's bytes, of its shards; reading them reshards, so a pass may have to follow."""
    content = hashlib.sha256()
    for each in forms.shards_of(model, buffers=buffers):
        content.update(each.shard.name.encode())
        content.update(each.tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def told(work: Callable[[], object]) -> str:
    """The error of ``work``, in a line."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - it is told
        notes = "".join(f" [{note}]" for note in getattr(error, "__notes__", ()))
        return f"{type(error).__name__}: {error}{notes}"
    return "no error"


# -- good ways ----------------------------------------------------------------------------------------------


def round_trip(stage: Stage, form: str, buffers: bool) -> dict[str, Any]:
    """Save, train on, load: bytes, and what the very next pass says; all that can be is gathered."""
    trainer = Trainer(form)
    model, kept = trainer.model, stage.keeper(trainer.model, buffers=buffers)
    kept.save(0)  # before any pass
    trainer.train(1)
    first = held(model, buffers=buffers), trainer.says()
    snapshot = kept.save(1)
    trainer.train(2)
    second = held(model, buffers=buffers), trainer.says()
    model.train()  # which has a whole copy of its own, in low precision
    loaded = kept.load(1)
    says = trainer.says()
    shards = snapshot.layout.shards
    return {
        "first": first, "second": second, "after": (held(model, buffers=buffers), says),
        "names": loaded.names, "sizes": [each.nbytes for each in shards],
        "forms": sorted({each.form.name for each in shards}),
    }  # fmt: skip


def two_versions(stage: Stage, form: str, block: bool) -> dict[str, Any]:
    """Four steps, with the first version's words in each; and a twin that keeps nothing."""
    trainer, twin = Trainer(form), Trainer(form)
    kept = stage.keeper(trainer.model)
    old, new, losses = [], [], []
    for step in range(1, 5):
        losses.append((trainer.train(step), twin.train(step)))
        trainer.says()  # gathered, and nobody reshards it by hand
        if step == 1:
            kept.save(1)
            old.append(trainer.says())
        elif block:
            with kept.version(1):
                old.append(trainer.says())
        else:
            kept.save(step)
            kept.load(1)
            old.append(trainer.says())
            kept.load(step)
            kept.clear(step)
        new.append((trainer.says(), twin.says()))
    return {
        "old": old, "new": new, "losses": losses, "held": (held(trainer.model), held(twin.model)),
        "versions": kept.versions,
    }  # fmt: skip


def written_to(stage: Stage, form: str) -> dict[str, Any]:
    """What is kept is not the live memory, whatever is done to that in place."""
    trainer = Trainer(form)
    trainer.train(1)
    kept = stage.keeper(trainer.model)
    before = held(trainer.model)
    kept.save(1)
    for each in forms.shards_of(trainer.model):
        each.tensor.fill_(3.0)
    spoiled = held(trainer.model)
    kept.load(1)
    return {"before": before, "spoiled": spoiled, "after": held(trainer.model)}


def cycles(stage: Stage, form: str) -> dict[str, Any]:
    """Twenty times of each way to be an older version: host memory, allocations, and how many versions."""
    trainer = Trainer(form)
    kept = stage.keeper(trainer.model)
    kept.save(0)
    words, blocks = [], []
    for step in range(1, 21):
        kept.save(step)
        kept.load(0)
        kept.load(step)
        kept.clear(step)
        kept.clear(step)
        kept.save(0)
        words.append((kept.nbytes, kept.allocations, len(kept.versions)))
    for _ in range(20):
        with kept.version(0):
            pass
        blocks.append((kept.nbytes, kept.allocations, len(kept.versions)))
    one = kept[0].nbytes
    kept.close()
    return {"words": words, "blocks": blocks, "closed": [(kept.nbytes, 0, len(kept.versions))], "one": one}


def replaced(stage: Stage, form: str) -> dict[str, Any]:
    """Parameters were given other memory by hand: their values are what is kept, and no load is undone."""
    trainer, twin = Trainer(form), Trainer(form)
    kept = stage.keeper(trainer.model)

    def replace_all(of: Trainer, by: float) -> None:
        held(of.model)  # what is set while a unit is gathered is lost to FSDP itself
        for parameter in of.model.parameters():
            parameter.data = parameter.data.clone() + by

    for each in (trainer, twin):
        each.train(1)
        replace_all(each, 1)
    kept.save(1)
    one = trainer.says()
    replace_all(trainer, 2)
    other = trainer.says()
    replace_all(trainer, 3)
    kept.load(1)
    return {"one": one, "twin": twin.says(), "other": other, "after": trainer.says()}


def gathered_ahead(stage: Stage) -> dict[str, Any]:
    """A unit of FSDP2 is being gathered for the next pass when its shards are written."""
    trainer = Trainer("dtensor")
    trainer.train(1)
    kept = stage.keeper(trainer.model)
    kept.save(1)
    one = trainer.says()
    trainer.train(2)
    other = trainer.says()
    kept.save(2)  # which reshards
    model: Any = trainer.model
    model.unshard(async_op=True)
    kept.load(1)
    return {"one": one, "other": other, "after": trainer.says()}


def in_a_pass(stage: Stage, form: str) -> dict[str, Any]:
    """Words in the middle of a forward pass."""
    trainer, errors = Trainer(form), list[str]()
    trainer.train(1)
    kept = stage.keeper(trainer.model)
    kept.save(1)
    inner = next(each for name, each in trainer.model.named_modules() if name.endswith("first"))

    def words(*_: object) -> None:
        errors.extend((told(lambda: kept.save(2)), told(lambda: kept.load(1))))

    hook = inner.register_forward_hook(words)
    trainer.train(2)
    hook.remove()
    return {"errors": errors, "after": told(lambda: kept.load(1))}


# -- what is refused ----------------------------------------------------------------------------------------


def summoned(stage: Stage, form: str) -> dict[str, Any]:
    """Inside summon_full_params."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    trainer = Trainer(form)
    trainer.train(1)
    kept = stage.keeper(trainer.model)
    kept.save(1)
    with FullyShardedDataParallel.summon_full_params(trainer.model):
        errors = [told(lambda: kept.save(2)), told(lambda: kept.load(1)), told(kept.version(1).__enter__)]
    return {"errors": errors, "versions": kept.versions, "after": told(lambda: kept.load(1))}


def one_rank_differs(stage: Stage, form: str, how: str) -> dict[str, Any]:
    """Rank 1 alone has another model than it saved, no such version, or a spoiled copy."""
    trainer = Trainer(form)
    trainer.train(1)
    model, kept = trainer.model, stage.keeper(trainer.model)
    kept.save(1)
    trainer.train(2)
    before = held(model)
    if stage.rank == 1:
        _differ(kept, model, how)
    error = told(lambda: kept.load(1))
    entered = told(kept.version(1).__enter__)
    if stage.rank == 1 and how == "name":
        del model.extra
    return {"error": error, "entered": entered, "same": held(model) == before}


def _differ(kept: Snapshots, model: torch.nn.Module, how: str) -> None:
    if how == "unknown":
        kept.clear(1)
    elif how == "spoiled":
        next(each for each in kept._kept[1][1].octets if len(each))[0] ^= 1
    elif how == "name":
        model.extra = torch.nn.Parameter(torch.zeros(2))
    else:
        _bend(how)


def _bend(how: str) -> None:
    """The first shard of this rank is another one; or there is an error in looking for it."""

    def other(*args: Any, **more: Any) -> Any:
        if how == "raises":
            raise OSError("no memory")
        first, *rest = shards(*args, **more)
        changed: Any = {"shape": (1, 2), "dtype": "float64", "place": "elsewhere", "parts": ("w[3]",)}[how]
        return [Holding(replace(first.shard, **{how: changed}), first.tensor), *rest]

    shards = forms.shards_of
    _patch(snapshots, "shards_of", other)


def one_rank_cannot_write(stage: Stage, form: str, rank: int) -> dict[str, Any]:
    """The write fails on one rank, after the other one's."""
    trainer = Trainer(form)
    trainer.train(1)
    model, kept = trainer.model, stage.keeper(trainer.model)
    kept.save(1)
    one = held(model)
    trainer.train(2)
    two = held(model)
    _fail_once(stage.rank == rank)
    entered = told(kept.version(1).__enter__)
    back = held(model) == two
    _fail_once(stage.rank == rank)
    loaded = told(lambda: kept.load(1))
    saved = told(lambda: kept.save(2))
    again = told(lambda: kept.load(1))
    return {
        "entered": entered, "back": back, "loaded": loaded, "saved": saved, "again": again,
        "whole": held(model) == one, "saved again": told(lambda: kept.save(2)),
    }  # fmt: skip


def _fail_once(here: bool) -> None:
    def fails(pairs: Any) -> None:
        mended()
        slots.write(list(pairs)[:1])  # a part of it
        raise OSError("the device is gone")

    if here:
        _patch(snapshots, "write", fails)


def block_that_ends(stage: Stage, form: str, rank: int, how: str) -> dict[str, Any]:
    """A block of ``version`` that is left by an error or an interrupt, on one rank or on both."""
    trainer, twin = Trainer(form), Trainer(form)
    kept = stage.keeper(trainer.model)
    trainer.train(1), twin.train(1)
    kept.save(1)
    trainer.train(2), twin.train(2)
    errors: dict[str, Any] = {"error": OSError("in the block"), "interrupt": KeyboardInterrupt()}
    ended = errors.get(how)

    def block() -> None:
        with kept.version(1):
            trainer.says()
            if how == "pass":
                trainer.model.eval()
                trainer.model(torch.zeros(3, 5))  # of another width: it raises in the middle of the pass
            if how == "trains":
                trainer.train(3)
            if stage.rank >= rank and ended is not None:
                raise ended

    try:
        block()
        what = "no error"
    except BaseException as error:  # noqa: BLE001 - it is told
        what = f"{type(error).__name__}, {'the very one' if error is ended else 'another'}"
    same = held(trainer.model) == held(twin.model)
    return {"what": what, "same": same, "says": trainer.says() == twin.says(), "loans": len(kept._loans)}


class Awaits:
    """A handler of coroutines, beside the others."""

    name = "awaits"

    def __init__(self) -> None:
        self.done: list[str] = []

    async def prepare(self, round: RoundView) -> Callable[[], Awaitable[None]]:
        """Hands back an undo that is one, too."""
        await asyncio.sleep(0)
        self.done.append("prepare")
        return self._undo

    async def clean(self, round: RoundView) -> None:
        """The good end."""
        await asyncio.sleep(0)
        self.done.append("clean")

    async def _undo(self) -> None:
        await asyncio.sleep(0)
        self.done.append("undo")


def rolled_back(stage: Stage, form: str, handler: bool) -> dict[str, Any]:
    """A round of this trainer fails on one engine; it gets the published version, and the trainer goes on.

    By words of its own with tensors that it has gathered; or by an export and handlers, with others of them.
    """
    trainer, failing = Trainer(form), [False]
    kept = stage.keeper(trainer.model, buffers=True)
    ranks = TrainerRanks(stage.store, stage.rank, 2, name=stage.name)

    def whole() -> dict[str, torch.Tensor]:
        (seen,) = (each for _, each in trainer.model.named_buffers())
        return {**gathered(trainer.model), "seen": seen.detach().clone()}

    engines = [{name: torch.zeros_like(each) for name, each in whole().items()} for _ in "ab"]

    def fault(point: str, bucket: int) -> None:
        if (point, bucket) == ("apply", 1) and failing[0]:
            raise OSError("the device is gone")

    links = [
        LocalEngine(receiver_for(engine, name, stages=False, fault=fault))
        for engine, name in zip(engines, ("e0", "e1"), strict=True)
    ]
    policy = Policy(on_engine_failure="quarantine", quorum=1, bucket_bytes=64)
    awaits = Awaits()
    handlers = [CacheRelease(), Rollback(kept), awaits] if handler else []
    more: Any = {"policy": policy, "handlers": handlers}
    sync: Any = FollowerSync(ranks, **more) if stage.rank else WeightSync(links, ranks=ranks, **more)
    export = CachedExport(FsdpExporter(trainer.model))

    def sent() -> Any:
        return export if handler else whole()

    with sync:
        trainer.train(1)
        if not handler:
            kept.save(1)
        first = sync.on_step_end(1, sent())
        published = {name: each.tolist() for name, each in whole().items()}
        trainer.train(2)
        if not handler:
            kept.save(2)
        newest, failing[0] = held(trainer.model), True
        failed = sync.on_step_end(2, sent())
        failing[0] = False
        dirty = [{name: each.tolist() for name, each in engine.items()} for engine in engines]
        with kept.version(first.version if handler else 1):
            again = sync.catch_up(2, sent())
        back = [{name: each.tolist() for name, each in engine.items()} for engine in engines]
    leads = stage.rank == 0
    return {
        "ok": [first.ok, failed.ok, again.ok], "versions": [first.version, again.version],
        "dirty": not leads or all(each != published for each in dirty),
        "back": not leads or all(each == published for each in back),
        "newest": held(trainer.model) == newest,
        "kept": kept.versions, "awaited": awaits.done,
        "why": [str(each.error) for each in (first, failed, again)],
    }  # fmt: skip


def gathered(model: Any) -> dict[str, torch.Tensor]:
    """Whole tensors, as a round sends them; every rank has to come to this."""
    if not hasattr(model, "summon_full_params"):
        return {name: each.detach().full_tensor() for name, each in model.named_parameters()}
    with model.summon_full_params(model):
        return {name: each.detach().clone() for name, each in model.named_parameters()}


def one_is_missing(stage: Stage, form: str) -> dict[str, Any]:
    """Rank 1 comes too late to a load; and then both come."""
    trainer = Trainer(form)
    kept = stage.keeper(trainer.model, limit=1.0 if stage.rank == 0 else 20.0)
    kept.save(1)
    trainer.train(1)
    before = held(trainer.model)
    if stage.rank == 1:
        dist.barrier()  # so it comes when rank 0 has given up
    error = told(lambda: kept.load(1))
    if stage.rank == 0:
        dist.barrier()
        kept._votes.limit = 20.0  # type: ignore[attr-defined]
    same = held(trainer.model) == before
    return {"error": error, "same": same, "after": told(lambda: kept.load(1))}


def out_of_step(stage: Stage) -> list[str]:
    """One rank loads what the other one saves."""
    kept = stage.keeper(Trainer("plain").model)
    kept.save(1)
    return [told(lambda: kept.load(1) if stage.rank else kept.save(2)), told(lambda: kept.load(1))]


def alone(stage: Stage, form: str, said: str | None) -> str:
    """A sharded model without votes, or of another form than is said."""
    votes = stage.votes() if said else None
    return told(lambda: Snapshots(made(form), votes=votes, form=said).save(1))


def inner(stage: Stage, form: str) -> str:
    """A part of a wrapped model, without its unit."""
    return told(lambda: Snapshots(made(form).module, votes=stage.votes()).save(1))


def moved_to_the_host(stage: Stage, form: str) -> dict[str, Any]:
    """Parameters and optimizer state go to host memory and back between steps; a twin keeps them."""
    mine, twin = Trainer(form), Trainer(form)
    parameters = HostCopy("parameters", mine.model)
    optimizer = HostCopy("optimizer", mine.optimizer)
    losses, gone = [], []
    for step in range(4):
        losses.append((mine.train(step), twin.train(step)))
        for part in (optimizer, parameters):
            part.offload()
        gone.append(sum(each.untyped_storage().nbytes() for each in parameters.tensors()))
        for part in (parameters, optimizer):
            part.onload()
    return {"losses": losses, "gone": gone, "held": (held(mine.model), held(twin.model)),
            "says": (mine.says(), twin.says()), "bytes": parameters.nbytes()}  # fmt: skip


_PATCHED: list[tuple[Any, str, Any]] = []


def _patch(module: Any, name: str, value: Any) -> None:
    _PATCHED.append((module, name, getattr(module, name)))
    setattr(module, name, value)


def mended() -> None:
    """What a scene has changed in its process is as it was."""
    while _PATCHED:
        setattr(*_PATCHED.pop())

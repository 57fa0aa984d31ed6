"""Two trainer ranks in processes, with a model that FSDP shards, and what each hand-over brought."""

from __future__ import annotations

import gc
import multiprocessing
import time
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weightsync import CachedExport, FollowerSync, LocalEngine, Policy, TrainerRanks, WeightSync, receiver_for
from weightsync.fsm.exports import Cut
from weightsync.handlers.fp8_export import Fp8Exporter
from weightsync.handlers.fsdp_export import FsdpExporter

__all__ = ["FORMS", "Model", "Ranks"]

FORMS = ("fsdp2", "fsdp2-columns", "fsdp1", "fsdp1-orig", "fsdp1-whole")
LIMIT = 60.0


class Model(nn.Module):
    """Odd sizes, two names of one tensor, buffers that belong to the state and one that does not."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(7, 4)
        self.a, self.norm = nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.b = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 4, bias=False))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("apart", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of tokens, scores of the next ones."""
        found: torch.Tensor = self.head(self.b(self.norm(self.a(self.emb(tokens)))))
        return found


def wrapped(form: str, model: Any) -> Any:
    """The model as this form shards it."""
    if form.startswith("fsdp2"):
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard

        columns: Any = {}
        if "columns" in form:  # where they can be divided
            columns["shard_placement_fn"] = lambda p: Shard(1 if p.ndim == 2 and p.shape[1] % 2 == 0 else 0)
        fully_shard(model.b, **columns)
        return fully_shard(model, **columns)
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    how: Any = {"device_id": torch.device("cpu"), "use_orig_params": "orig" in form}
    if "whole" in form:
        how["sharding_strategy"] = ShardingStrategy.NO_SHARD
    model.b = FullyShardedDataParallel(model.b, **how)
    return FullyShardedDataParallel(model, **how)


def units(model: Any) -> list[Any]:
    """Those of FSDP1."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return list(FullyShardedDataParallel.fsdp_modules(model))


def reference(model: Any) -> dict[str, torch.Tensor]:
    """The whole state as torch itself gathers it, by another way than the exporter's."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    found: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: each.clone() for name, each in found.items()}


def boxed(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The part of a tensor that a cut says."""
    if len(cut.offset) != tensor.dim():
        tensor = tensor.flatten()
    return tensor[tuple(slice(at, at + size) for at, size in zip(cut.offset, cut.size, strict=True))]


class Side:
    """One rank of a form."""

    def __init__(self, form: str, rank: int, store: Any) -> None:
        self.form, self.rank, self.step = form, rank, 0
        self.truth: dict[str, torch.Tensor] | None = None  # where torch's own is none
        self.model: Any = wrapped(form, Model())
        self.export = CachedExport(FsdpExporter(lambda: self.model))
        policy = Policy(deadline=40.0, lease=2.0)
        ranks = TrainerRanks(store, rank, 2, limit=LIMIT, silent=5.0, name=form)
        self.held = {name: torch.zeros_like(each) for name, each in Model().state_dict().items()}
        self.sync: Any = (
            FollowerSync(ranks, policy=policy)
            if rank
            else WeightSync([LocalEngine(receiver_for(self.held, "e"))], "memory", policy=policy, ranks=ranks)
        )

    def hand_over(self, export: CachedExport | None = None) -> tuple[str, float]:
        """How it ended, after how long."""
        self.step += 1
        began = time.monotonic()
        try:
            result = self.sync.on_step_end(self.step, export or self.export)
            told = "ok" if result.ok else f"{type(result.error).__name__}: {result.error}"
        except Exception as error:  # noqa: BLE001 - it is told
            told = f"{type(error).__name__}: {error}"
        return told, time.monotonic() - began

    def after(self, what: str, change: Callable[[], None]) -> tuple[str, str, Any]:
        """Change something, hand over, and look whether the engine holds what torch gathers."""
        change()
        told, _ = self.hand_over()
        truth, self.truth = self.truth or reference(self.model), None
        wrong = sorted(name for name, each in truth.items() if not torch.equal(each, self.held[name]))
        return what, told, wrong if self.rank == 0 else []

    def train(self) -> None:
        """One real step."""
        torch.manual_seed(self.step)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.model(torch.randint(0, 7, (6,))).sum().backward()
        optimizer.step()

    def look(self) -> None:
        """A forward pass, which may leave something gathered; then what the ranks hold changes under it.

        A snapshot that is restored does this. Torch itself would go on with what was gathered.
        """
        before = reference(self.model)
        pieces = [getattr(each, "_local_shard", each) for each in self.model.parameters()]
        if self.form == "fsdp1-orig":
            pieces = [each._handle.flat_param._local_shard for each in units(self.model)]
        names = {name for name, _ in Model().named_parameters(remove_duplicate=False)}
        with torch.no_grad():
            self.model.eval()
            self.model(torch.zeros(2, dtype=torch.long))
            self.model.train()
            for each in pieces:
                each.add_(0.5)
        self.truth = {name: each + 0.5 if name in names else each for name, each in before.items()}

    def add(self) -> None:
        """In place."""
        with torch.no_grad():
            for each in self.model.parameters():
                each.add_(0.5)

    def replace(self) -> None:
        """Other memory under every parameter."""
        with torch.no_grad():
            for each in self.model.parameters():
                each.data = each.data * 2.0

    def again(self) -> None:
        """Another module in its place."""
        self.old = weakref.ref(self.model)
        self.model = wrapped(self.form, Model(seed=9))
        gc.collect()

    def more(self) -> None:
        """One more buffer, here and in the engine."""
        self.model.register_buffer("more", torch.full((3,), 2.0))
        self.held["more"] = torch.zeros(3)

    def tour(self) -> dict[str, Any]:
        """Everything that may happen to a model, one after the other."""
        names = ("train", "add", "replace", "look", "again", "train")
        found: dict[str, Any] = {"steps": [self.after("first", lambda: None)]}
        found["steps"] += [self.after(name, getattr(self, name)) for name in names]
        found["counts"] = self.export.counts
        found["gone"] = self.old() is None
        plan = self.export.plan
        assert plan is not None
        found["hash"], found["cuts"] = plan.hash, self.wrong_cuts()
        found["steps"].append(self.after("more", self.more))
        found["builds"] = self.export.counts.builds
        if self.rank:
            self.model.register_buffer("alone", torch.zeros(1))
        found["alone"] = self.hand_over()
        found["builds after"] = self.export.counts.builds
        if self.rank:
            del self.model.alone
        found["back"] = self.hand_over()[0], self.export.counts.builds
        if self.form in ("fsdp1", "fsdp1-orig"):
            kind: Any = type(self.model)
            with kind.summon_full_params(self.model):
                found["inside"] = self.hand_over()[0], self.hand_over()[0]
            found["outside"] = self.hand_over()[0], self.export.counts.builds
        return found

    def wrong_cuts(self) -> list[str]:
        """Slots that are not what the model has, and what this rank holds that its cuts do not say."""
        plan = self.export.plan
        assert plan is not None
        whole = reference(self.model)
        wrong = [slot.name for slot in plan.slots if slot.shape != tuple(whole[slot.name].shape)]
        cut = [
            boxed(whole[slot.name], each).double()
            for slot in plan.slots
            for each in slot.cuts
            if each.rank == self.rank and not slot.of
        ]
        held = [
            (each.to_local() if hasattr(each, "to_local") else each).detach().double()
            for each in self.model.parameters()
        ]
        if self.form != "fsdp1-whole":
            sums = [sum(float((each * each).sum()) for each in parts) for parts in (cut, held)]
            if abs(sums[0] - sums[1]) > 1e-9 * sums[0]:
                wrong.append(f"this rank holds squares of {sums[1]}, and cuts say {sums[0]}")
        elif cut:
            wrong.append("there are cuts of what is whole on each rank")
        return wrong

    def scales(self) -> list[tuple[str, float]]:
        """By an exporter with live scales: how far the engine is from the truth after each change."""
        exporter = Fp8Exporter(FsdpExporter(lambda: self.model), only=("*b.*.weight",), block=(2, 2))
        export = CachedExport(exporter)
        self.held.clear()
        for name, each in reference(self.model).items():
            self.held[name] = torch.zeros_like(each)
        for name in ("b.0.weight", "b.1.weight"):
            rows, columns = self.held[name].shape
            self.held[name] = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
            self.held[f"{name}_scale_inv"] = torch.zeros(-(-rows // 2), -(-columns // 2))
        found = []
        for factor in (1.0, 1000.0, 0.001):
            with torch.no_grad():
                for each in self.model.parameters():
                    each.mul_(factor)
            told, _ = self.hand_over(export)
            truth = reference(self.model)["b.0.weight"]
            scale = self.held["b.0.weight_scale_inv"].repeat_interleave(2, 0).repeat_interleave(2, 1)
            near = self.held["b.0.weight"].float() * scale[: truth.shape[0], : truth.shape[1]]
            found.append((told, float((near - truth).abs().max() / truth.abs().max())))
        found.append((f"builds {export.counts.builds} hits {export.counts.hits}", 0.0))
        return found


def serve(rank: int, port: int, forms: tuple[str, ...], pipe: Connection) -> None:
    """One rank: every form, one after the other."""
    import exportmutants  # noqa: F401 - brings a fault back, if one is asked for

    stores: Any = dist
    store = stores.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=stores.PrefixStore("group", store), rank=rank, world_size=2)
    for form in forms:
        side = Side(form, rank, store)
        try:
            pipe.send((form, {**side.tour(), "scales": side.scales()}))
        except BaseException:
            pipe.send((form, traceback.format_exc()))
            raise
        finally:
            side.sync.close()
    dist.barrier()
    dist.destroy_process_group()


class Ranks:
    """Both of them, and what they said of each form."""

    def __init__(self, port: int, forms: tuple[str, ...] = FORMS, side: Any = serve) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(2)]
        self._all = [
            context.Process(target=side, args=(rank, port, forms, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._all:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        self._pipes = [mine for mine, _ in pipes]
        self._said: list[dict[str, Any]] = [{}, {}]

    def said(self, form: str) -> list[Any]:
        """Of each rank."""
        for rank, pipe in enumerate(self._pipes):
            while form not in self._said[rank]:
                assert pipe.poll(2 * LIMIT), f"rank {rank} says nothing of {form}"
                name, found = pipe.recv()
                self._said[rank][name] = found
        return [said[form] for said in self._said]

    def end(self) -> None:
        """Whatever they do."""
        for process in self._all:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)

"""Whatever is of the wrong kind is refused where it is handed over, in one line that says what is needed.

Each public name is given what a newcomer gives it. The message names the argument, what was given and what to
give; an error of Python's own, out of the middle of the library, is a defect.
"""

import inspect
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore as Store  # type: ignore[attr-defined]

import weightsync
from weightsync.fsm import checks
from weightsync.fsm.errors import PlanError, SetupError, WeightSyncError
from weightsync.handlers.log import StateLog
from weightsync.loglint import lint
from weightsync.testing.fakes import FakeEngine, FakeTransport, FakeWeights
from weightsync.testing.scene import Trainer, close_all

MODULE = torch.nn.Linear(2, 2)
RANK = weightsync.TrainerRanks(Store(), 1, 2)
EXPORTER = weightsync.FsdpExporter(MODULE)
PART = weightsync.CalledPart("cache", on=print, off=print)


class Plain:
    """An object that is nothing of ours."""


def receiver() -> Any:
    """An engine of this process."""
    return weightsync.receiver_for(torch.nn.Linear(2, 2), "a")


def sync(**given: Any) -> Any:
    """A ``WeightSync`` of good parts, but for what is given."""
    engines = given.pop("engines", [FakeEngine("a")])
    return weightsync.WeightSync(engines, given.pop("transport", FakeTransport()), **given)


def refusal(make: Callable[[], Any]) -> str:
    """What a newcomer reads: a typed error of one line, and not one of Python's."""
    with pytest.raises(SetupError) as caught:
        make()
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 300
    return line


# -- the parts of a WeightSync ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engines", "line"),
    [
        (MODULE, "WeightSync(engines=<Linear>): a list of engines is needed"),
        (FakeEngine("a"), "WeightSync(engines=<FakeEngine>): a list of engines is needed: engines=[...]"),
        (None, "WeightSync(engines=None): a list of engines"),
        (5, "WeightSync(engines=5): a list of engines"),
        ("a", "WeightSync(engines='a'): a list of engines"),
        ({"a": FakeEngine("a")}, "WeightSync(engines=<dict>): a list of engines"),
        ([MODULE], "engines[0]=<Linear>): no engine: a module of this process is given as LocalEngine(rec"),
        ([FakeEngine("a"), receiver()], "engines[1]=<Receiver>): no engine: a receiver is given as LocalEng"),
        ([FakeEngine], "engines[0]=<class FakeEngine>): no engine: an object is needed, and not its class"),
        (["a"], "engines[0]='a'): no engine: each one is a RayEngine(actor) or a LocalEngine(receiver)"),
        ([None], "engines[0]=None): no engine"),
        ([FakeEngine(5)], "engines[0].id=5): a name is needed"),  # type: ignore[arg-type]
        ([FakeEngine("")], "engines[0].id=''): a name is needed"),
        ([FakeEngine("a"), FakeEngine("a")], "two engines are called 'a': give each an id of its own"),
        ([], "WeightSync needs at least one engine"),
    ],
)
def test_engines(engines: Any, line: str) -> None:
    """What stands for an engine in a newcomer's mind is told how to become one."""
    assert line in refusal(lambda: sync(engines=engines))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"lock": 5}, "WeightSync(lock=5): the name of a lock that Ray keeps is needed, or a keeper"),
        ({"lock": weightsync.LocalLock}, "WeightSync(lock=<class LocalLock>): the name of a lock"),
        ({"lock": ""}, "RayLock(name=''): a name is needed"),
        ({"ledger": 5}, "WeightSync(ledger=5): the path of a file is needed, or a keeper"),
        ({"policy": {"deadline": 5}}, "WeightSync(policy=<dict>): a Policy is needed"),
        ({"policy": 60}, "WeightSync(policy=60): a Policy is needed, such as Policy(deadline=60)"),
        (
            {"transport": 5},
            "WeightSync(transport=5): 'auto', 'memory', 'collective', 'shm', 'cuda_ipc' or 'objects'",
        ),
        (
            {"transport": None},
            "WeightSync(transport=None): 'auto', 'memory', 'collective', 'shm', 'cuda_ipc' or",
        ),
        ({"transport": FakeTransport}, "WeightSync(transport=<class FakeTransport>): 'auto', 'memory"),
        ({"transport": "nccl"}, "no transport is called 'nccl'; there are: auto, memory"),
        ({"handlers": 5}, "WeightSync(handlers=5): a list of handlers is needed: handlers=[...]"),
        ({"handlers": print}, "a list of handlers is needed: handlers=[...]"),
        ({"handlers": [weightsync.Progress]}, "handlers=<class Progress>): an object is needed, and not"),
        ({"handlers": [5]}, "5 is no handler: an executor has prepare and clean"),
        ({"owner": 5}, "WeightSync(owner=5): a name is needed, as a string"),
    ],
)
def test_other_parts(given: dict[str, Any], line: str) -> None:
    """Each is asked what it can do when it is given, not when a round needs it."""
    assert line in refusal(lambda: sync(**given))


def test_a_ledger_must_be_writable(tmp_path: Path) -> None:
    """A folder, a file in a folder's place, and no place at all: told at once, and not in the first round."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "ledger.json", Path("/proc/weightsync/ledger.json"), ""):
        line = refusal(lambda path=path: sync(ledger=path))  # type: ignore[misc]
        assert "cannot be kept there" in line or "the path of a file is needed" in line
        assert str(path) in line
    assert "cannot be kept there" in refusal(lambda: sync(ledger=weightsync.FileLedger(tmp_path)))
    with sync(ledger=tmp_path / "new" / "ledger.json") as good:
        assert good.version() is None


def test_memory_does_not_reach_another_process() -> None:
    """An engine that says where it is, is believed."""
    far = FakeEngine("far")
    far.in_process = False  # type: ignore[attr-defined]
    line = refusal(lambda: sync(engines=[FakeEngine("a"), far], transport="memory"))
    assert line.startswith("transport 'memory' reaches engines in this process only, and engine far is in")
    sync(engines=[far], transport="collective").close()
    assert weightsync.RayEngine.in_process is False


# -- the hooks ----------------------------------------------------------------------------------------------

NO_COUNTS = [True, 1.0, -1, "3", None, MODULE, torch.tensor(True), torch.tensor(1.5)]


@pytest.mark.parametrize("step", NO_COUNTS)
def test_a_step_is_a_whole_number(step: Any) -> None:
    """Also at a step that the policy passes over."""
    trainer = Trainer(weightsync.Policy(every=2, deadline=3.0))
    try:
        line = refusal(lambda: trainer.sync.on_step_end(step, FakeWeights()))
        assert line.startswith("on_step_end(step=")
        assert "a whole number of at least 0 is needed" in line
        assert refusal(lambda: trainer.sync.begin(step, FakeWeights())).startswith("begin(step=")
        if step is not None:
            assert "begin(version=" in refusal(lambda: trainer.sync.begin(1, FakeWeights(), version=step))
        assert trainer.lock.status().epoch == 0, "something moved"
    finally:
        close_all()


def test_a_number_of_torch_is_one() -> None:
    """Trainers count in tensors, too."""
    trainer = Trainer()
    try:
        result = trainer.sync.on_step_end(torch.tensor(3), FakeWeights())  # type: ignore[arg-type]
        assert result is not None
        assert (type(result.step), result.step) == (int, 3)
    finally:
        close_all()


@pytest.mark.parametrize("model", [None, 5, "weights", torch.nn.Linear, FakeEngine("a"), torch.zeros(2)])
def test_a_model_has_tensors(model: Any) -> None:
    """Refused where it is handed over, and no round begins."""
    trainer = Trainer()
    try:
        with pytest.raises((SetupError, PlanError)):
            trainer.sync.on_step_end(1, model)
        assert trainer.lock.status().epoch == 0
    finally:
        close_all()


# -- everything else that is public -------------------------------------------------------------------------

WRONG: list[tuple[Callable[..., Any], str]] = [
    (lambda: weightsync.LocalEngine(MODULE), "LocalEngine(receiver=<Linear>): a receiver is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.LocalEngine(type(receiver())), "LocalEngine(receiver=<class Receiver>): a receiv"),  # type: ignore[arg-type]
    (lambda: weightsync.receiver_for(torch.nn.Linear, "a"), "held=<class Linear>): a module is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.receiver_for(None, "a"), "receiver_for(held=None): a module is needed, or a map"),  # type: ignore[arg-type]
    (lambda: weightsync.receiver_for(MODULE, 5), "receiver_for(engine_id=5): a name is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.receiver_for(MODULE, "a", stages=1), "receiver_for(stages=1): True or False is"),  # type: ignore[arg-type]
    (lambda: weightsync.receiver_for(MODULE, "a", staged_on="gpu"), "staged_on='gpu'): a device is need"),
    (lambda: weightsync.receiver_for(MODULE, "a", rank=-1), "receiver_for(rank=-1): a whole number of at"),
    (lambda: weightsync.receiver_for(MODULE, "a", on_commit=5), "receiver_for(on_commit=5): a function"),  # type: ignore[arg-type]
    (lambda: weightsync.receiver_for(MODULE, "a", fault="x"), "receiver_for(fault='x'): a function is"),  # type: ignore[arg-type]
    (lambda: weightsync.receiver_for(MODULE, "a", extra_inlets=[1]), "extra_inlets=<list>): a mapping of"),  # type: ignore[arg-type]
    (lambda: weightsync.receiver_for(MODULE, "a", extra_inlets={"x": 1}), "receiver_for(x=1): a function"),  # type: ignore[dict-item]
    (lambda: weightsync.RayEngine(Plain()), "RayEngine(actor=<Plain>): the handle of an actor is needed"),
    (lambda: weightsync.RayEngine(weightsync.RayReceiver), "RayEngine(actor=<class RayReceiver>): the ha"),
    (lambda: weightsync.RayEngine(weightsync.RayReceiver()), "RayEngine(actor=<RayReceiver>): the handle"),
    (lambda: weightsync.RayEngine(MODULE), "RayEngine(actor=<Linear>): the handle of an actor is needed"),
    (lambda: weightsync.RayLock(5), "RayLock(name=5): a name is needed, as a string"),  # type: ignore[arg-type]
    (lambda: weightsync.RayLock("x", lease="2"), "RayLock(lease='2'): a finite number of seconds above 0"),  # type: ignore[arg-type]
    (lambda: weightsync.RayLock("x", patience=0), "RayLock(patience=0): a finite number of seconds above"),
    (lambda: weightsync.RayLock("x", path=5), "RayLock(path=5): the path of a file is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.LocalLock("2"), "LocalLock(lease='2'): a finite number of seconds above 0 is ne"),  # type: ignore[arg-type]
    (lambda: weightsync.LocalLock(epoch=-1), "LocalLock(epoch=-1): a whole number of at least 0 is need"),
    (lambda: weightsync.LocalLock(path=5), "LocalLock(path=5): the path of a file is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.LocalLock(now=5), "LocalLock(now=5): a function is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.FileLedger(5), "FileLedger(path=5): the path of a file is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.FileLedger(""), "FileLedger(path=''): the path of a file is needed"),
    (lambda: weightsync.StateLog(5), "StateLog(path=5): the path of a file is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.StateLog("/proc/no/log"), "/proc/no/log"),
    (lambda: weightsync.HealthWatch(5, print), "HealthWatch(pause=5): a function is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.HealthWatch(print, None), "HealthWatch(resume=None): a function is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.Progress(5), "Progress(bar=5): a bar with update(n) is needed, such as a tqdm"),  # type: ignore[arg-type]
    (lambda: weightsync.Retention((1, 2)), "Retention(tensors=<tuple>): Retention empties a list"),  # type: ignore[arg-type]
    (
        lambda: weightsync.SharedMemoryTransport(mode="both"),  # type: ignore[arg-type]
        "SharedMemoryTransport(mode='both'): choose from 'auto', 'publish', 'ring'",
    ),
    (
        lambda: weightsync.CudaIpcTransport(slots=0),
        "CudaIpcTransport(slots=0): a whole number of at least 1 is needed",
    ),
    (
        lambda: weightsync.SharedMemoryTransport(slots=0),
        "SharedMemoryTransport(slots=0): a whole number of at least 1 is needed",
    ),
    (lambda: weightsync.MemoryTransport(checked="x"), "MemoryTransport(checked='x'): True or False is"),  # type: ignore[arg-type]
    (lambda: weightsync.CollectiveTransport("nccl"), "no collective transport over 'nccl'"),
    (lambda: weightsync.CollectiveTransport(address=5), "CollectiveTransport(address=5): the trainer's ad"),  # type: ignore[arg-type]
    (lambda: weightsync.TorchWeights.of(MODULE, groups=5), "TorchWeights.of(groups=5): a list of lists"),  # type: ignore[arg-type]
    (lambda: weightsync.Policy(raise_on_failure="no"), "Policy(raise_on_failure='no'): True or False is"),  # type: ignore[arg-type]
    (lambda: weightsync.Policy(when_busy=[]), "Policy(when_busy=<list>): choose from 'wait', 'block',"),  # type: ignore[arg-type]
    (lambda: weightsync.ray_engine(5), "ray_engine(cls=5): a class is needed: put @ray_engine(...) above"),  # type: ignore[arg-type]
    (lambda: weightsync.ray_engine(int, str), "ray_engine(cls=<tuple>): one class is needed"),
    (lambda: weightsync.ray_engine(concurrency_groups=5), "ray_engine(concurrency_groups=5): a mapping"),
    (lambda: weightsync.LocalEngine(receiver(), ranks=0), "LocalEngine(ranks=0): a whole number of at least"),
    (lambda: weightsync.receiver_for(MODULE, "a", asleep=True), "receiver_for(asleep=True): a function is"),  # type: ignore[arg-type]
    (lambda: weightsync.TrainerRanks(5, 0, 1), "TrainerRanks(store=5): a store of torch.distributed is"),  # type: ignore[arg-type]
    (lambda: weightsync.TrainerRanks(Store(), "0", 1), "TrainerRanks(rank='0'): a whole number of at least"),  # type: ignore[arg-type]
    (lambda: weightsync.TrainerRanks(Store(), 0, 1.5), "TrainerRanks(world_size=1.5): a whole number of at"),  # type: ignore[arg-type]
    (lambda: weightsync.TrainerRanks(Store(), 0, 1, name=""), "TrainerRanks(name=''): a name is needed"),
    (lambda: weightsync.TrainerRanks(Store(), 0, 1, limit=0), "TrainerRanks(limit=0): a finite number of"),
    (lambda: weightsync.TrainerRanks(Store(), 0, 1, silent="1"), "TrainerRanks(silent='1'): a finite number"),  # type: ignore[arg-type]
    (lambda: weightsync.FollowerSync(Store()), "FollowerSync(ranks=<HashStore>): TrainerRanks(store, ra"),  # type: ignore[arg-type]
    (lambda: weightsync.FollowerSync(RANK, policy=5), "FollowerSync(policy=5): a Policy is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.FollowerSync(RANK, handlers=5), "FollowerSync(handlers=5): a list of handlers is"),  # type: ignore[arg-type]
    (lambda: weightsync.FollowerSync(RANK, handlers=[print]), "rank 0 has the records, and its observers"),  # type: ignore[list-item]
    (lambda: weightsync.CacheRelease(5), "CacheRelease(memory=5): a memory is needed, such as"),  # type: ignore[arg-type]
    (lambda: weightsync.CacheRelease(before=[]), "CacheRelease(before=<list>): choose from 'none'"),  # type: ignore[arg-type]
    (lambda: weightsync.CacheRelease(lacking=5), "CacheRelease(lacking=5): a function that returns"),  # type: ignore[arg-type]
    (lambda: weightsync.CacheRelease(budgets=5), "CacheRelease(budgets=5): a mapping of seconds by"),  # type: ignore[arg-type]
    (lambda: weightsync.CacheRelease(budgets={"gc": 1}), "CacheRelease(budgets='gc'): actions are called"),
    (lambda: weightsync.Toggle("a", during=1), "Toggle(switch='a'): something with name, read and"),  # type: ignore[arg-type]
    (lambda: weightsync.RayStore(5), "RayStore(name=5): a name is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.RayStore("a", patience=0), "RayStore(patience=0): a finite number of"),
    (lambda: weightsync.CachedExport(MODULE), "CachedExport(exporter=<Linear>): an exporter is needed, such"),  # type: ignore[arg-type]
    (lambda: weightsync.FsdpExporter(5), "FsdpExporter(model=5): "),  # type: ignore[arg-type]
    (lambda: weightsync.Fp8Exporter(MODULE), "Fp8Exporter(exporter=<Linear>): an exporter is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.Fp8Exporter(EXPORTER, only=5), "Fp8Exporter(only=5): "),  # type: ignore[arg-type]
    (lambda: weightsync.Fp8Exporter(EXPORTER, block=128), "Fp8Exporter(block=128): two whole numbers are"),  # type: ignore[arg-type]
    (lambda: weightsync.Fp8Exporter(EXPORTER, block=(0, 1)), "Fp8Exporter(block=0): "),
    (lambda: weightsync.Fp8Exporter(EXPORTER, suffix=""), "Fp8Exporter(suffix=''): "),
    (lambda: weightsync.MegatronExporter(MODULE, [MODULE]), "MegatronExporter(bridge=<Linear>): an AutoBr"),
    (lambda: weightsync.Snapshots(torch.nn.Linear), "Snapshots(model=<class Linear>): a torch.nn.Module is"),  # type: ignore[arg-type]
    (lambda: weightsync.Snapshots(MODULE, votes=RANK), "Snapshots(votes=<TrainerRanks>): RankVotes(store"),  # type: ignore[arg-type]
    (lambda: weightsync.Snapshots(MODULE, form="fsdp"), "Snapshots(form='fsdp'): choose from 'flat', 'dt"),
    (lambda: weightsync.RankVotes(5, 0, 1), "RankVotes(store=5): a store of torch.distributed is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.RankVotes(Store(), 0, 1, limit=0), "RankVotes(limit=0): a finite number of seconds"),
    (lambda: weightsync.Rollback(MODULE), "Rollback(snapshots=<Linear>): Snapshots(model) is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.Residency(before=PART), "Residency(before=<CalledPart>): a list of moves is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.Residency(before=[PART]), "Residency(before=<CalledPart>): a list of moves is"),  # type: ignore[list-item]
    (lambda: weightsync.Residency(before="ab"), "Residency(before='ab'): a list of moves is needed: onload("),  # type: ignore[arg-type]
    (lambda: weightsync.Residency(failed=5), "Residency(failed=5): a list of moves is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.Residency(capacity=0), "Residency(capacity=0): a whole number of at least 1 is"),
    (lambda: weightsync.Residency(name=""), "Residency(name=''): a name is needed"),
    (lambda: weightsync.shift(PART), "shift(moves=<CalledPart>): a list of moves is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.onload(MODULE), "Move(part=<Linear>): a part is needed, such as HostCopy('optimi"),  # type: ignore[arg-type]
    (lambda: weightsync.offload("cache"), "Move(part='cache'): a part is needed, such as HostCopy('optim"),  # type: ignore[arg-type]
    (lambda: weightsync.HostCopy(MODULE, "a"), "HostCopy(name=<Linear>): a name is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.HostCopy("a", 5), "HostCopy(tensors=5): a module, an optimizer, a mapping or a"),  # type: ignore[arg-type]
    (lambda: weightsync.HostCopy("a", [5]), "HostCopy(tensors=5): a module, an optimizer, a mapping or a"),  # type: ignore[list-item]
    (lambda: weightsync.HostCopy("a", MODULE.parameters()), "HostCopy(tensors=<generator>): a module, an"),
    (lambda: weightsync.Scratch("a", torch.ones(2)), "Scratch(tensors=<Tensor>): a module, an optimizer, a"),
    (lambda: weightsync.Rebuilt("a", MODULE, {}), "Rebuilt(parameters=<Linear>): a mapping of names to te"),  # type: ignore[arg-type]
    (lambda: weightsync.Rebuilt("a", {"w": torch.ones(2)}, {"w": 5}), "Rebuilt(masters['w']=5): a tensor is"),  # type: ignore[dict-item]
    (lambda: weightsync.Rebuilt("a", {}, {}, proofs=-1), "Rebuilt(proofs=-1): a whole number of at least 0"),
    (lambda: weightsync.CalledPart("a", on=5, off=print), "CalledPart(on=5): a function is needed, which"),  # type: ignore[arg-type]
    (lambda: weightsync.CalledPart("a", on=print, off=print, nbytes=-1), "CalledPart(nbytes=-1): a whole n"),
    (lambda: weightsync.CalledPart("a", on=print, off=print, resident=1), "CalledPart(resident=1): True or"),  # type: ignore[arg-type]
    (lambda: weightsync.CalledPart("a", on=print, off=print, engine=5), "CalledPart(engine=5): a name is ne"),  # type: ignore[arg-type]
    (lambda: weightsync.Gated(MODULE, receiver()), "Gated(part=<Linear>): a part is needed, such as Hos"),  # type: ignore[arg-type]
    (lambda: weightsync.Gated(PART, MODULE), "Gated(receiver=<Linear>): a receiver is needed, as receiver"),  # type: ignore[arg-type]
    (lambda: weightsync.Gated(PART, receiver(), limit=0), "Gated(limit=0): a finite number of seconds"),
    (lambda: weightsync.Segment(5, "a", 0, 0), "Segment(engine=5): a name is needed"),  # type: ignore[arg-type]
    (lambda: weightsync.Segment("a", "b", -1, 0), "Segment(began=-1): a whole number of at least 0 is"),
    (lambda: weightsync.SampleVersions(5), "SampleVersions(segments=5): segments are needed, as a receiver"),  # type: ignore[arg-type]
    (lambda: weightsync.SampleVersions().staleness(5), "staleness(ledger=5): a ledger is needed, such as sy"),  # type: ignore[arg-type]
    (lambda: weightsync.ray_engine(num_cpus=1)(Plain), "Plain does not receive weights: let it inherit"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "line"), WRONG, ids=[line[:40] for _, line in WRONG])
def test_what_is_public_refuses_what_it_cannot_use(make: Callable[[], Any], line: str) -> None:
    """Each constructor and function, each argument that a newcomer could take for another."""
    assert line in refusal(make)


NOT_MADE = {
    "EngineRow", "LORA", "ObjectStoreTransport", "PassedOver", "RoundResult", "Pending", "RayReceiver",
    "__version__", "expandable_segments",
}  # fmt: skip
"""Nobody gives them anything: they are public to be read or inherited, or take no arguments."""


def test_no_public_name_is_left_out() -> None:
    """A new one gets its lines above, or a reason here."""
    told = "\n".join(inspect.getsource(make) for make, _ in WRONG)
    for name in set(weightsync.__all__) - NOT_MADE - {"WeightSync"}:
        public = getattr(weightsync, name)
        is_value = isinstance(public, type) and issubclass(public, WeightSyncError | Enum)
        assert is_value or f"weightsync.{name}" in told, f"{name} is given nothing wrong above"


def test_what_is_shown_is_short() -> None:
    """A message quotes what was written, and of everything else the kind."""
    assert checks.shown("a" * 100) == "<str>"
    assert checks.shown(MODULE) == "<Linear>"
    assert checks.shown(int) == "<class int>"
    assert (checks.shown(None), checks.shown(1.5), checks.shown("a")) == ("None", "1.5", "'a'")


def test_a_number_that_no_log_can_hold_is_refused(tmp_path: Path) -> None:
    """The largest that one can hold is logged, and read back."""
    path = tmp_path / "state.jsonl"
    trainer = Trainer(weightsync.Policy(deadline=20.0), [StateLog(path)])
    for number in (2**63, 2**70):
        line = refusal(lambda number=number: trainer.sync.begin(1, FakeWeights(), version=number))  # type: ignore[misc]
        assert line == f"begin(version={number}): a whole number below 2**63 is needed, which a log can hold"
        assert "below 2**63" in refusal(lambda number=number: trainer.sync.on_step_end(number, {}))  # type: ignore[misc]
    assert trainer.sync.begin(2**63 - 1, FakeWeights(), version=2**63 - 1, snapshot=False).wait().ok
    close_all()
    assert lint([path]).good


@pytest.mark.mutation
@pytest.mark.parametrize(
    "blind", ["has", "kind", "text", "step_of", "seconds", "called", "flag", "seen_path"]
)
def test_each_check_is_missed_when_it_looks_away(blind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, one of the cases above is let in, or fails with an error of Python's own."""
    monkeypatch.setattr(checks, blind, lambda *_: True)
    let_in = 0
    given: list[Callable[[], object]] = [make for make, _ in WRONG]
    given += [lambda: sync(engines=[MODULE]), lambda: Trainer().sync.begin(-1, {})]
    for make in given:
        try:
            make()
        except SetupError:
            continue
        except Exception:  # noqa: BLE001 - an error of Python's own is what the check is for
            pass
        let_in += 1
    close_all()
    assert let_in, f"nothing above needs {blind}"

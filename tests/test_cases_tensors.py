"""Faults of names, dtypes, shapes, strides, ties, sizes: refused before a byte moves, or carried as is."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from casekit.bench import Bench, quick, threads
from casekit.engines import InThreads
from casekit.tensors import NAMES, same, state
from weightsync import WeightSync, receiver_for
from weightsync.fsm.engine import Answer
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import PlanError, SetupError, WeightsGone
from weightsync.fsm.plan import Plan
from weightsync.fsm.policy import Policy
from weightsync.fsm.receipt import Expectation
from weightsync.fsm.states import Disposition
from weightsync.handlers.local_engine import LocalEngine
from weightsync.handlers.receiver import Receiver
from weightsync.handlers.threads import spawn
from weightsync.transports.weights import TorchWeights

pytestmark = pytest.mark.timeout(60)

TRANSPORTS = pytest.mark.parametrize("transport", ["memory", "collective", "shm"])
STAGES = pytest.mark.parametrize("stages", [True, False], ids=["stages", "in-place"])
Held = dict[str, Tensor]


class TestB14:
    """Names in an order that two processes do not share: RLinf/RLinf#1355, NovaSky-AI/SkyRL#1816."""

    def test_b14_a_names_without_an_order_are_refused(self) -> None:
        """A set is refused where it is handed over; nothing has moved, and the next round works."""
        with Bench(threads("e0", "e1")) as bench:
            bench.works()
            for unordered in (set(state(2).items()), frozenset(state(2))):
                with pytest.raises(PlanError, match="has no order that two processes share"):
                    bench.sync.begin(2, unordered)
            bench.works()

    def test_b14_a_every_process_makes_the_same_plan(self) -> None:
        """Whatever the order of its sets: groups, which are sets of names, included."""
        script = (
            "import torch; from weightsync.transports.weights import TorchWeights as W;"
            "n = [f'layer{i}.w' for i in range(40)];"
            "w = W.of({k: torch.ones(7) for k in n}, groups=[set(n[5:9]), frozenset(n[20:25])]);"
            "print(w.plan(512).fingerprint, hash('a'))"
        )
        runs = [
            subprocess.Popen(
                [sys.executable, "-c", script],
                env={
                    **os.environ,
                    "PYTHONHASHSEED": seed,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for seed in ("1", "2")
        ]
        (one, hash_one), (other, hash_other) = (run.communicate(timeout=50)[0].split() for run in runs)
        assert one == other
        assert hash_one != hash_other, "the processes did not differ"

    @TRANSPORTS
    @STAGES
    def test_b14_b_equal_sizes_and_mixed_dtypes(self, transport: str, stages: bool) -> None:
        """Every tensor has as many bytes as every other; each arrives under its own name, in one bucket.

        The engines hold them in another order, and say so by nothing but the names.
        """
        kinds = [(torch.bfloat16, 16), (torch.float32, 8), (torch.int64, 4), (torch.uint8, 32)] * 2
        model = {
            f"w{number}": torch.arange(size).add(10 * number).to(dtype)
            for number, (dtype, size) in enumerate(kinds)
        }
        engines = [
            InThreads("e0", {name: torch.zeros_like(model[name]) for name in reversed(model)}, stages=stages),
            InThreads("e1", {name: torch.zeros_like(model[name]) for name in sorted(model)}, stages=stages),
        ]
        with Bench(engines, transport, policy=quick(bucket_bytes=1 << 20)) as bench:
            bench.works(model)
            bench.works({name: model[name] + 1 for name in reversed(model)})


class TestB27:
    """Tensors that are not laid out one element after the other.

    pytorch/pytorch#192920, NVIDIA-NeMo/RL#2418, radixark/miles#1608.
    """

    @TRANSPORTS
    @STAGES
    def test_b27_strides_on_both_sides(self, transport: str, stages: bool) -> None:
        """Values go by name; the engine's tensors keep identity and strides; bytes follow the elements."""
        base = torch.arange(600.0)
        model = {
            "transposed": base[:60].view(6, 10).t(),
            "column": base[:60].view(6, 10)[:, 3],
            "expanded": torch.arange(3.0).expand(5, 3),
            "channels_last": base[:96].view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
            "narrow": base.view(20, 30)[4:7, 11:13],
        }
        around = {name: torch.full((40, 40), -7.0) for name in ("transposed", "column", "narrow")}
        held = {
            "transposed": around["transposed"][3:9, 5:15].t(),
            "column": around["column"][10:16, 7],
            "expanded": torch.zeros(3, 5).t(),
            "channels_last": torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
            "narrow": around["narrow"].t()[20:23, 30:32],
        }
        before = {name: (id(each), each.data_ptr(), each.stride()) for name, each in held.items()}
        with Bench(
            [InThreads("e0", held, stages=stages), *_zeros(model, "e1", stages=stages)], transport
        ) as bench:
            result = bench.works(model)
            bench.works({name: tensor + 1 for name, tensor in model.items()})
        assert {name: (id(each), each.data_ptr(), each.stride()) for name, each in held.items()} == before
        elements = sum(tensor.numel() for tensor in model.values())
        assert [row.bytes for row in result.engines] == [4 * elements] * 2
        for name, whole in around.items():
            assert int((whole != -7).sum()) == model[name].numel(), f"something beside {name} was written"


def _zeros(model: Held, name: str, *, stages: bool = True) -> list[InThreads]:
    return [
        InThreads(
            name, {each: torch.zeros(t.shape, dtype=t.dtype) for each, t in model.items()}, stages=stages
        )
    ]


def _with(change: Callable[[Held], object]) -> Held:
    held = {name: torch.zeros(8) for name in NAMES}
    change(held)
    return held


RIGHT = {name: torch.full((8,), 5.0) for name in NAMES}
WRONG: dict[str, tuple[Held, tuple[str, ...]]] = {
    "a-engine-smaller": (
        _with(lambda held: held.update({"layer.bias": torch.zeros(4)})), ("'layer.bias'", "(8,)", "(4,)"),
    ),
    "b-engine-larger": (
        _with(lambda held: held.update({"layer.bias": torch.zeros(16)})), ("'layer.bias'", "(8,)", "(16,)"),
    ),
    "c-same-bytes-other-dtype": (
        _with(lambda held: held.update({"layer.bias": torch.zeros(8, dtype=torch.int32)})),
        ("'layer.bias'", "float32", "int32"),
    ),
    "e-one-name-more": (_with(lambda held: held.pop("head.weight")), ("'head.weight'",)),
    "e-one-name-less": (
        _with(lambda held: held.update({"extra.weight": torch.zeros(8)})), ("'extra.weight'",),
    ),
}  # fmt: skip


class _AnswersLate(LocalEngine):
    """A link whose answer to an open is on its way until the session is aborted."""

    late = False

    def __init__(self, receiver: Receiver) -> None:
        super().__init__(receiver)
        self._aborted = threading.Event()

    def open(self, *word: Any) -> Future[None]:
        """Hold the answer back."""
        asked = super().open(*word)
        if not self.late:
            return asked

        def late() -> None:
            assert self._aborted.wait(30.0)
            asked.result()

        return spawn("late", late)

    def abort(self, session: Session) -> Future[Answer]:
        """From now on it may arrive."""
        self._aborted.set()
        return super().abort(session)


def _give_memory_away(held: Held) -> None:
    tensor = torch.zeros(8)
    tensor.untyped_storage().resize_(0)
    held["head.weight"] = tensor


GONE: dict[str, tuple[Callable[[Held], object], Held]] = {
    "meta": (lambda held: held.update({"head.weight": torch.zeros(8, device="meta")}), {}),
    "resized": (_give_memory_away, {}),
    "resized-and-the-trainer-is-wrong-too": (_give_memory_away, {"head.weight": torch.zeros(3)}),
    "another-shape": (lambda held: held.update({"head.weight": torch.zeros(4)}), {}),
    "another-shape-and-the-trainer-is-wrong-too": (
        lambda held: held.update({"head.weight": torch.zeros(4)}), {"head.weight": torch.zeros(3)},
    ),
    "a-name-less": (lambda held: held.pop("head.weight"), {}),
}  # fmt: skip
"""What becomes of an engine after its last commit, and what is sent instead then."""


class TestB29:
    """Trainer and engine do not agree on what is sent.

    PrimeIntellect-ai/prime-diloco#68, pytorch/gloo#456, vllm-project/vllm#31943.
    """

    @TRANSPORTS
    @STAGES
    @pytest.mark.parametrize("case", WRONG)
    def test_b29_refused_before_a_byte_moves(self, case: str, transport: str, stages: bool) -> None:
        """The message names the tensor and what both sides say of it; nobody waits; the right one works."""
        wrong, words = WRONG[case]
        held = {name: tensor.clone() for name, tensor in wrong.items()}
        engines = [*_zeros(RIGHT, "e0", stages=stages), InThreads("e1", held, stages=stages)]
        with Bench(engines, transport) as bench:
            result = bench.fails(PlanError, engine="e1", phase="Locked", model=RIGHT)
            for word in words:
                assert word in str(result.error), f"{word} is not in: {result.error}"
            assert [engine.count("frame") for engine in engines] == [0, 0]
            assert result.seconds["Locked"] < 2.0
            assert same(engines[1].look().tensors, wrong)
            held.clear()
            held.update({name: torch.zeros(8) for name in NAMES})
            bench.works(RIGHT)

    @TRANSPORTS
    @STAGES
    def test_b29_a_trainer_that_is_wrong_costs_no_engine(self, transport: str, stages: bool) -> None:
        """Weights that fit nobody are the trainer's mistake: whoever was servable still is."""
        engines = [*_zeros(RIGHT, "e0", stages=stages), *_zeros(RIGHT, "e1", stages=stages)]
        lenient = {"on_engine_failure": "quarantine", "quorum": 1} if transport == "memory" else {}
        with Bench(engines, transport, policy=quick(**lenient)) as bench:
            before = bench.works(RIGHT)
            result = bench.run({**RIGHT, "head.weight": torch.zeros(3)})
            assert isinstance(result.error, PlanError)
            assert (result.culprit in ("e0", "e1"), result.failed_in) == (True, "Locked"), (
                "whoever says so first"
            )
            assert {row.disposition for row in result.engines} == {Disposition.serving_old}
            assert bench.sync.servable() == {"e0": before.version, "e1": before.version}
            assert not any(look.paused for look in bench.looks().values()), "nobody waits for the next round"
            bench.works(RIGHT)

    @pytest.mark.parametrize(("transport", "quorum"), [("collective", None), ("shm", None), ("shm", 1)])
    def test_b29_whose_receiving_half_says_so_first(self, transport: str, quorum: int | None) -> None:
        """The failure of `receive` may overtake the answer to `open`: it decides nothing by itself.

        Of transports that wait at their opening, until each receiving half is there.
        """
        held = [{name: tensor.clone() for name, tensor in RIGHT.items()} for _ in range(3)]
        links = [_AnswersLate(receiver_for(each, f"e{number}")) for number, each in enumerate(held)]
        lenient = {"on_engine_failure": "quarantine", "quorum": quorum} if quorum else {}
        with WeightSync(links, transport=transport, policy=quick(**lenient)) as sync:
            sync.begin(0, RIGHT).wait().require()
            before = sync.servable()
            for link in links:
                link.late = True
            result = sync.begin(1, {**RIGHT, "head.weight": torch.zeros(3)}).wait()
            assert isinstance(result.error, PlanError)
            assert {row.disposition for row in result.engines} == {Disposition.serving_old}
            assert sync.servable() == before
            assert before.keys() == {"e0", "e1", "e2"}

    @TRANSPORTS
    @STAGES
    @pytest.mark.parametrize("case", GONE)
    def test_b29_an_engine_that_lost_its_weights_is_out(
        self, case: str, transport: str, stages: bool
    ) -> None:
        """No plan is to blame, whatever it brings: nobody may ask that engine for a sample."""
        lost, brought = GONE[case]
        held = [{name: tensor.clone() for name, tensor in RIGHT.items()} for _ in range(3)]
        links = [LocalEngine(receiver_for(each, f"e{n}", stages=stages)) for n, each in enumerate(held)]
        with WeightSync(links, transport=transport, policy=quick()) as sync:
            version = sync.begin(0, RIGHT).wait().require().version
            lost(held[0])
            result = sync.begin(1, {**RIGHT, **brought}).wait()
            assert result.failed_in == "Locked"
            if brought and isinstance(result.error, PlanError):
                assert result.culprit in ("e1", "e2"), "these may be faster to say that the trainer is wrong"
            else:
                assert (type(result.error), result.culprit) == (WeightsGone, "e0")
            assert result.serving(Disposition.quarantined) == ("e0",)
            assert sync.servable() == {"e1": version, "e2": version}
            held[0].update({name: torch.zeros(8) for name in NAMES})
            sync.begin(2, RIGHT).wait().require()
            assert sync.servable().keys() == {"e0", "e1", "e2"}

    @TRANSPORTS
    def test_b29_d_another_bucket_limit(self, transport: str) -> None:
        """The limit is the trainer's alone and comes with the plan; an engine that has another is refused."""
        engines = [*_zeros(RIGHT, "e0"), *_zeros(RIGHT, "e1")]
        stubborn = _OwnLimit(engines[1])
        with Bench(engines, transport) as bench:
            bench.works(RIGHT)
            stubborn.limit = 64
            result = bench.fails(PlanError, engine="e1", phase="Locked", model=RIGHT)
            assert "a receipt for" in str(result.error)
            stubborn.limit = None
            bench.works(RIGHT)

    @TRANSPORTS
    def test_b29_d_the_limit_may_change_between_rounds(self, transport: str) -> None:
        """Engines are told by each plan what its buckets are."""
        engines = [*_zeros(RIGHT, "e0"), *_zeros(RIGHT, "e1")]
        with Bench(engines, transport) as bench:
            bench.works(RIGHT)
        for limit in (7, 1 << 20):
            with Bench(engines, transport, policy=quick(bucket_bytes=limit)) as bench:
                bench.works(RIGHT)


class _OwnLimit:
    """An engine that lays out its buckets by a limit of its own."""

    def __init__(self, engine: InThreads) -> None:
        self.limit: int | None = None
        self._link = engine.link
        engine.link.open = self._open  # type: ignore[method-assign]

    def _open(
        self, session: Session, incarnation: str, plan: Plan, expected: Expectation, limit: float
    ) -> Future[None]:
        mine = plan if self.limit is None else TorchWeights.of(RIGHT).plan(self.limit)
        return LocalEngine.open(self._link, session, incarnation, mine, expected, limit)


class Tied(nn.Module):
    """A head that is its embedding, or one of its own."""

    def __init__(self, value: float, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 8)
        self.head = nn.Linear(8, 4, bias=False)
        nn.init.constant_(self.embed.weight, value)
        nn.init.constant_(self.head.weight, value + 100)
        if tied:
            self.head.weight = self.embed.weight


class TestB31:
    """One tensor by two names: vllm-project/vllm#56689, PrimeIntellect-ai/prime-rl#2823."""

    @TRANSPORTS
    @STAGES
    def test_b31_tied_by_the_trainer(self, transport: str, stages: bool) -> None:
        """An engine that ties them keeps one storage; one that does not has both names right. Each round."""
        tied, apart = Tied(0, tied=True), Tied(0, tied=False)
        engines = [InThreads("tied", tied, stages=stages), InThreads("apart", apart, stages=stages)]
        with Bench(engines, transport) as bench:
            for value in (3.0, 4.0):
                result = bench.works(Tied(value, tied=True))
                assert tied.head.weight is tied.embed.weight
                assert apart.head.weight.data_ptr() != apart.embed.weight.data_ptr()
                for engine in (tied, apart):
                    assert engine.head.weight.unique().tolist() == [value]
                    assert engine.embed.weight.unique().tolist() == [value]
                assert [row.tensors for row in result.engines] == [1, 1], "it is sent once"

    @TRANSPORTS
    def test_b31_a_name_without_data_is_told(self, transport: str) -> None:
        """An engine that holds a name which nobody sends refuses, and says which."""
        engines = [InThreads("apart", Tied(0, tied=False))]
        with Bench(engines, transport) as bench:
            model = {"embed.weight": torch.ones(4, 8)}
            result = bench.fails(PlanError, engine="apart", phase="Locked", model=model)
            assert "'head.weight'" in str(result.error)
            bench.works(Tied(1, tied=True))


MIB = 1 << 20


class TestB33:
    """A tensor that is larger than a bucket: verl-project/verl#5963, Azure/azureml-assets#5288."""

    @TRANSPORTS
    @pytest.mark.parametrize("place", ["first", "middle", "last"])
    def test_b33_a_tensor_of_three_buckets(self, place: str, transport: str) -> None:
        """It is split, wherever it stands, and arrives whole."""
        large, small = torch.rand(3 * MIB // 4), torch.rand(100)
        order = {"first": "lss", "middle": "sls", "last": "ssl"}[place]
        model = {
            f"{kind}{number}": (large if kind == "l" else small) + number for number, kind in enumerate(order)
        }
        with Bench(
            _zeros(model, "e0") + _zeros(model, "e1"), transport, policy=quick(bucket_bytes=MIB)
        ) as bench:
            bench.works(model)
            bench.works({name: tensor + 1 for name, tensor in model.items()})

    @TRANSPORTS
    def test_b33_a_limit_below_every_tensor(self, transport: str) -> None:
        """Each tensor is split, if need be into single bytes."""
        model = {"a": torch.rand(5), "b": torch.arange(3)}
        for limit in (1, 3, 8):
            with Bench(_zeros(model, "e0"), transport, policy=quick(bucket_bytes=limit)) as bench:
                bench.works(model)

    @pytest.mark.parametrize("limit", [0, -1, 1.5, True])
    def test_b33_a_limit_that_is_none(self, limit: Any) -> None:
        """Refused where it is set, by its name."""
        with pytest.raises(SetupError, match="bucket_bytes"):
            Policy(bucket_bytes=limit)

    @TRANSPORTS
    @pytest.mark.parametrize("why", ["group", "count"])
    def test_b33_advice_that_works(self, why: str, transport: str) -> None:
        """What cannot be laid out is refused before a byte moves; the option that the message names works.

        An atomic group that is larger than a bucket, and buckets without number.
        """
        size = 1000 if why == "group" else MIB
        model = {"a": torch.rand(100), "b": torch.rand(size), "c": torch.rand(100)}
        engines = _zeros(model, "e0")
        groups = [{"a", "c"}] if why == "group" else []
        limit = 64 if why == "group" else 1
        weights = TorchWeights.of(model, groups=groups)
        with Bench(engines, transport, policy=quick(bucket_bytes=limit)) as bench:
            before = bench.looks()["e0"].tensors
            result = bench.run(weights)
            assert result.path == ("Idle", "Locked", "Failed", "Released")
            assert isinstance(result.error, PlanError)
            assert engines[0].count("open") == 0
            assert same(bench.looks()["e0"].tensors, before)
            bench.lock_is_free()
        if why == "group":
            assert "the atomic group of a, c needs 848 bytes" in str(result.error)
        advice = re.search(r"Policy\((\w+)=(\d+)\)", str(result.error))
        assert advice is not None, f"no advice in: {result.error}"
        option, value = advice[1], int(advice[2])
        with Bench(engines, transport, policy=quick(**{option: value})) as bench:
            bench.run(weights).require()
            assert same(bench.looks()["e0"].tensors, model)

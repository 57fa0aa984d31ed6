"""What a transport does when nothing goes wrong: bytes, facts, receipts, and what is left."""

from __future__ import annotations

import gc
import weakref
from dataclasses import asdict

import torch

from ...engine import receiver_for
from ...fsm.contract import Capabilities
from ...fsm.engine_table import Session
from ...fsm.policy import Policy
from ...handlers.local_engine import LocalEngine
from ...handlers.threads import spawn
from ...sync import WeightSync
from ...transports.weights import TorchWeights
from ..sending import Sending
from ..small_engine import SmallEngine, SmallLink
from .contents import described, dtypes, of_dtype, plain, shapes
from .residue import census, growth
from .rounds import Rounds, TransportUnderTest
from .rules import Check, Violation, checked, eventually
from .subjects import inlet_of, transport_of
from .transport_rules import (
    BUCKET_IS_VALID,
    COMPLETE,
    CONTENT,
    DECLARES,
    EARLY_ACK,
    LOSS_BY_NAME,
    NEXT_ROUND,
    NO_TENSOR_KEPT,
    NOTHING_LEFT,
    RECEIPT_UNCHANGED,
    SOURCE_UNTOUCHED,
    TELLS_OR_RAISES,
)

__all__ = ["GOOD"]

GOOD: list[Check[TransportUnderTest]] = []
_MOMENT = 0.3
"""Seconds in which what must not happen would have happened on an idle machine."""


@checked(GOOD, "declares")
def declares(tested: TransportUnderTest) -> None:
    """It says what it is called and what it can do, and says so again."""
    with Rounds(tested) as rounds:
        transport = rounds.transport
        name, able = transport.name, transport.capabilities
        DECLARES.unless(bool(name) and type(name) is str, f"the name is {name!r}")
        DECLARES.unless(isinstance(able, Capabilities), f"the capabilities are {able!r}")
        flags = {key: value for key, value in asdict(able).items() if key != "dtypes"}
        DECLARES.unless(all(type(each) is bool for each in flags.values()), f"the capabilities are {able}")
        rounds.round().good()
        DECLARES.unless((transport.name, transport.capabilities) == (name, able), "they changed with a round")


@checked(GOOD, "good-round")
def good_round(tested: TransportUnderTest) -> None:
    """Every engine holds the trainer's bytes, and proves it once; every bucket is told in order."""
    with Rounds(tested) as rounds:
        run = rounds.round()
        run.good()
        sent = [fact[1] for fact in run.fired("bucket_sent")]
        TELLS_OR_RAISES.unless(
            sent == list(range(len(run.plan.buckets))),
            f"the buckets {sent} were told of {len(run.plan.buckets)}",
        )
        receipts = [receipt for fact in run.fired("acked") for receipt in fact[2]]
        COMPLETE.unless(len(receipts) == 2, f"{len(receipts)} receipts came of 2 engines")


@checked(GOOD, "rounds-in-a-row")
def rounds_in_a_row(tested: TransportUnderTest) -> None:
    """Three rounds with other numbers and another layout on one transport: each engine holds the newest."""
    with Rounds(tested) as rounds:
        for state in (plain(1), plain(2), plain(5, count=9)):
            rounds.round(state).good(NEXT_ROUND if state["w0"][0] > 1 else None)


@checked(GOOD, "shapes-in-small-buckets", 16)
@checked(GOOD, "shapes-in-buckets", 64)
@checked(GOOD, "shapes-in-one-bucket", 1 << 20)
def odd_shapes(tested: TransportUnderTest, bucket_bytes: int) -> None:
    """Scalars, nothing at all, views of every kind, tied names, and tensors larger than a bucket arrive."""
    with Rounds(tested) as rounds:
        able = rounds.transport.capabilities.dtypes
        state = {name: each for name, each in shapes().items() if able is None or _name(each.dtype) in able}
        rounds.round(state, bucket_bytes=bucket_bytes).good()


@checked(GOOD, "one-byte-buckets")
def one_byte_buckets(tested: TransportUnderTest) -> None:
    """A bucket may be smaller than an element."""
    with Rounds(tested) as rounds:
        rounds.round({"a": torch.rand(2), "empty": torch.zeros(0), "b": torch.rand(3)}, bucket_bytes=1).good()


@checked(GOOD, "no-tensors", ())
@checked(GOOD, "no-bytes", ("first", "second"))
def nothing_to_send(tested: TransportUnderTest, names: tuple[str, ...]) -> None:
    """A model without a byte is sent, received and proven like any other."""
    with Rounds(tested) as rounds:
        rounds.round({name: torch.zeros(0, 3) for name in names}).good()
        rounds.round().good(NEXT_ROUND)


@checked(GOOD, "dtypes")
def every_dtype(tested: TransportUnderTest) -> None:
    """Every dtype that it declares arrives, with every byte that there is."""
    with Rounds(tested) as rounds:
        names = dtypes(rounds.transport.capabilities.dtypes)
        DECLARES.unless(names, "it declares no dtype that there is")
        rounds.round({name: of_dtype(name) for name in names}, bucket_bytes=256).good()


@checked(GOOD, "engine-slow-with-a-bucket")
def slow_with_a_bucket(tested: TransportUnderTest) -> None:
    """An engine keeps the first bucket while the sender goes on as far as it can: it finds it as it was."""
    with Rounds(tested) as rounds:
        rounds["b"].arm("wait", 0)
        run = rounds.round()
        whole = spawn("kit-round", run.run)
        eventually(rounds["b"].reached, rounds.patience)
        eventually(lambda: len(run.fired("bucket_sent")) >= 3, _MOMENT)
        rounds["b"].release()
        try:
            rounds.join(whole, LOSS_BY_NAME)
            LOSS_BY_NAME.unless(not run.lost, f"engines were lost that are only slow: {run.lost}")
            run.hold(["a", "b"], BUCKET_IS_VALID)
        except Violation as found:
            if found.rule is CONTENT:
                raise BUCKET_IS_VALID.broken(str(found)) from found
            raise


@checked(GOOD, "no-ack-before-the-last-bucket", 4)
@checked(GOOD, "no-ack-before-the-view-is-closed", "applied")
@checked(GOOD, "no-ack-before-the-receipt", "released")
def no_early_ack(tested: TransportUnderTest, point: int | str) -> None:
    """While an engine has not made its receipt it is not acked, though another one is through."""
    with Rounds(tested) as rounds:
        rounds["b"].arm("wait", point)
        run = rounds.round()
        whole = spawn("kit-round", run.run)
        eventually(lambda: rounds["b"].reached() or whole.done(), rounds.patience)
        eventually(lambda: "a" in run.acked, _MOMENT)
        early = "b" in run.acked
        rounds["b"].release()
        rounds.join(whole, LOSS_BY_NAME)
        EARLY_ACK.unless(not early, f"engine b was acked while it was at {point}")
        LOSS_BY_NAME.unless(
            sorted(run.acked) == ["a", "b"], f"only {run.acked} were acked, of engines that are well"
        )


@checked(GOOD, "bad-receipt-travels")
def bad_receipt_travels(tested: TransportUnderTest) -> None:
    """An engine that received something else says so, and nobody makes that good on the way."""
    with Rounds(tested) as rounds:
        rounds["b"].arm("spoil", "applied")
        run = rounds.round(honest=False)
        run.run()
        for _, engine, receipts in run.fired("acked"):
            good = [
                each.mismatch(run.session.round, run.session.epoch, run.expected) is None for each in receipts
            ]
            RECEIPT_UNCHANGED.unless(
                engine.id != "b" or not all(good),
                "engine b proved other bytes, and its receipt says the right digest",
            )
        rounds.go_on()


@checked(GOOD, "source-untouched")
def source_untouched(tested: TransportUnderTest) -> None:
    """The trainer's tensors are after a round, good or bad, what they were before it."""
    with Rounds(tested) as rounds:
        for fault in ("none", "raise"):
            state = shapes()
            before = described(state)
            if fault != "none":
                rounds["b"].arm(fault, 2)
            able = rounds.transport.capabilities.dtypes
            rounds.round({n: t for n, t in state.items() if able is None or _name(t.dtype) in able}).run()
            SOURCE_UNTOUCHED.unless(described(state) == before, "a tensor of the trainer has changed")
            rounds.revive()


@checked(GOOD, "no-tensor-kept", "none")
@checked(GOOD, "no-tensor-kept-after-a-failure", "raise")
def no_tensor_kept(tested: TransportUnderTest, fault: str) -> None:
    """When the round is over, the trainer's tensors are nobody's but the trainer's."""
    with Rounds(tested) as rounds:
        if fault != "none":
            rounds["b"].arm(fault, 2)
        state = plain()
        kept = {name: weakref.ref(each) for name, each in state.items()}
        rounds.round(state).run()
        del state
        rounds.revive()

        def alive() -> list[str]:
            gc.collect()
            return [name for name, each in kept.items() if each() is not None]

        eventually(lambda: not alive(), 1.0)
        NO_TENSOR_KEPT.unless(not alive(), f"{', '.join(alive())} are still referred to after the round")


@checked(GOOD, "nothing-left")
def nothing_left(tested: TransportUnderTest) -> None:
    """Good rounds, bad ones and aborted ones leave no descriptor, thread, process or segment behind."""
    peers = list(tested.engines(("a", "b")))

    def cycle() -> None:
        with Rounds(tested) as rounds:
            rounds.round(plain(1)).good()
            rounds["b"].arm("raise", 2)
            rounds.round(plain(2)).run()
            rounds.go_on()
            rounds["b"].arm("hang", 1)
            run = rounds.round(plain(3))
            whole = spawn("kit-round", run.drive)
            eventually(rounds["b"].reached, rounds.patience)
            run.close()
            rounds.end("abort")
            rounds.revive()
            rounds.join(whole, NOTHING_LEFT)

    cycle()  # what a process makes once and keeps
    before = census(peers)
    for _ in range(3):
        cycle()
    left = growth(before, lambda: census(peers), min(tested.patience, 5.0))
    NOTHING_LEFT.unless(not left, f"after twelve rounds there are {left}")


@checked(GOOD, "engine-of-two-ranks")
def engine_of_two_ranks(tested: TransportUnderTest) -> None:
    """Every rank of an engine receives by itself, and the engine is acked with the receipts of all."""
    transport, state = transport_of(tested), plain()
    weights, session = TorchWeights.of(state), Session("kit-ranks", 1, 1)
    plan, inlets = weights.plan(64), {transport.name: inlet_of(tested)}
    links = [SmallLink(*(SmallEngine(name, rank, inlets=inlets) for rank in range(2))) for name in "ab"]
    for engine in (engine for link in links for engine in link.ranks):
        engine.open(session, plan, weights.digest())
    run = Sending(transport, weights, plan, links, session, 2 * tested.patience)
    error = spawn("kit-round", run.run).exception(4 * tested.patience)
    transport.close()
    COMPLETE.unless(
        error is None and not run.errors, f"a round with two ranks failed: {error or run.errors!r}"
    )
    ranks = {
        name: [each.rank for each in receipts] for name, receipts in run.port("collect").receipts.items()
    }
    COMPLETE.unless(ranks == {"a": [0, 1], "b": [0, 1]}, f"the receipts are those of the ranks {ranks}")


@checked(GOOD, "under-a-real-round")
def under_a_real_round(tested: TransportUnderTest) -> None:
    """A trainer hands weights over with it, twice: every engine serves what the trainer has."""
    transport, live = transport_of(tested), [{"w": torch.zeros(40)}, {"w": torch.zeros(40)}]
    links = [
        LocalEngine(receiver_for(held, f"e{number}", extra_inlets={transport.name: inlet_of(tested)}))
        for number, held in enumerate(live)
    ]
    policy = Policy(deadline=4 * tested.patience, bucket_bytes=64)
    with WeightSync(links, transport, policy=policy) as sync:
        for step in (1, 2):
            weights = {"w": torch.arange(40.0) + step}
            result = sync.on_step_end(step, weights)
            if result is None or not result.ok:
                raise NEXT_ROUND.broken(f"round {step} of a real trainer failed: {result and result.error!r}")
            same = all(torch.equal(held["w"], weights["w"]) for held in live)
            CONTENT.unless(same, f"the engines serve other numbers than the trainer has after round {step}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""The link to an engine in this process never blocks whoever asks."""

import threading
from typing import Any

import pytest
import torch

from weightsync.engine import receiver_for
from weightsync.fsm.contract import EngineLink, Ticket
from weightsync.fsm.engine import Answer
from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import StaleSession
from weightsync.fsm.receipt import Expectation
from weightsync.fsm.states import EngineState
from weightsync.handlers.local_engine import LocalEngine
from weightsync.transports.weights import TorchWeights

SOON = 10.0
ONE = Session("round-1", 1, 1)
WEIGHTS = TorchWeights.of([("a", torch.ones(4))])
PLAN = WEIGHTS.plan(1 << 20)
EXPECTED = Expectation(PLAN.fingerprint, 1, 16, 1)


class TestLocalEngine:
    def test_it_is_a_link(self) -> None:
        """Its name is the receiver's, and each word is carried out by it."""
        receiver = receiver_for({"a": torch.zeros(4)}, "e")
        link: EngineLink = LocalEngine(receiver)
        status = link.hello().result(SOON)
        assert (link.id, status.engine, status.state, status.ranks) == ("e", "e", EngineState.Serving, 1)
        link.open(ONE, status.incarnation, PLAN, EXPECTED, SOON).result(SOON)
        assert receiver.state is EngineState.Paused
        assert link.abort(ONE).result(SOON) is Answer.reverted
        for refused in (link.commit(ONE), link.resume(ONE), link.receive(ONE, Ticket("memory", {}))):
            with pytest.raises(StaleSession):
                refused.result(SOON)
        link.close()
        assert link.hello().result(SOON).state is EngineState.Serving

    def test_a_word_that_blocks_blocks_nobody_else(self) -> None:
        """While the engine waits for generation to end, it says hello and takes an abort."""
        receiver = receiver_for({"a": torch.zeros(4)}, "e")
        link = LocalEngine(receiver)
        incarnation = link.hello().result(SOON).incarnation
        with receiver.gate.admit():
            opening = link.open(ONE, incarnation, PLAN, EXPECTED, SOON)
            assert link.hello().result(SOON).state is EngineState.Serving
            assert not opening.cancel(), "a word that was said cannot be taken back"
            assert link.abort(ONE).result(SOON) is Answer.reverted
            assert isinstance(opening.exception(SOON), StaleSession)

    def test_the_very_error_comes_out(self) -> None:
        """Whatever is raised in the engine is what the future raises."""
        boom = KeyboardInterrupt("boom")

        def fault(point: str, bucket: int) -> None:
            if point == "hello":
                raise boom

        link = LocalEngine(receiver_for({"a": torch.zeros(4)}, "e", fault=fault))
        assert link.hello().exception(SOON) is boom

    def test_an_engine_that_hangs_does_not_keep_the_process(self) -> None:
        """Words run on daemon threads."""
        asked: dict[str, Any] = {}
        done = threading.Event()

        def fault(point: str, bucket: int) -> None:
            asked["daemon"] = threading.current_thread().daemon
            asked["name"] = threading.current_thread().name
            done.set()

        LocalEngine(receiver_for({"a": torch.zeros(4)}, "e", fault=fault)).hello()
        assert done.wait(SOON)
        assert asked == {"daemon": True, "name": "weightsync-e-hello"}

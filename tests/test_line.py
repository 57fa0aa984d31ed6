"""The line: a trainer's words to an actor of the same host, over a socket in a private folder.

What Ray does is told in ``test_ray_engine.py``; here are the two ends alone, with real sockets and processes.
"""

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from weightsync.fsm.errors import EngineError
from weightsync.handlers import line_server
from weightsync.handlers.frames import (
    LONGEST,
    NotPlain,
    accept_peer,
    encoded,
    frame_socket,
    prove_to,
    received,
)
from weightsync.handlers.futures import begun
from weightsync.handlers.line import Broken, Kept, Line, connect
from weightsync.handlers.line_server import LineServer

SOON = 30.0


class OutOfTune(Exception):
    """An error of a user's own."""


def nested(depth: int) -> list[Any]:
    """Lists in lists."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


class Actor:
    """Carries out the words of these tests."""

    def __init__(self) -> None:
        self.stuck, self.freed = threading.Semaphore(0), threading.Event()

    def carry_out(self, said: list[Any]) -> object:
        """One word."""
        match said:
            case ["echo", value]:
                return value
            case ["fail"]:
                raise OutOfTune("at fail")
            case ["odd"]:
                return {1, 2}
            case ["deep"]:
                return nested(sys.getrecursionlimit())
            case ["stick"]:
                self.stuck.release()
                assert self.freed.wait(SOON)
                return "freed"
        raise EngineError(f"no word {said[0]!r}")


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sockets of a test are in a folder of its own, whose name is short enough for one."""
    with tempfile.TemporaryDirectory(prefix="line-", dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


@pytest.fixture
def actor() -> Actor:
    """The actor behind the server."""
    return Actor()


@pytest.fixture
def server(actor: Actor) -> Iterator[LineServer]:
    """The actor's end."""
    server = LineServer(actor.carry_out)
    yield server
    actor.freed.set()
    server.close()


@pytest.fixture
def line(server: LineServer) -> Iterator[Line]:
    """The trainer's end."""
    line = connect(server.offer)
    assert line is not None
    yield line
    line.close()


def asking(line: Line, *said: Any) -> Future[Any]:
    """Say a word; the future gets what it came to."""
    answer = begun()

    def done(told: Any, error: Exception | None) -> None:
        if error is None:
            answer.set_result(told)
        else:
            answer.set_exception(error)

    assert line.ask(list(said), done)
    return answer


def until(holds: Callable[[], bool]) -> None:
    """Wait for what must come."""
    end = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < end


def level() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets for frames."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def raw(server: LineServer) -> socket.socket:
    """A connection that has said nothing yet."""
    connection = frame_socket()
    connection.settimeout(SOON)
    connection.connect(server.offer[2])
    return connection


def check_open(server: LineServer) -> None:
    """Whoever knows the secret is welcome."""
    line = connect(server.offer)
    assert line is not None
    assert asking(line, "echo", 1).result(SOON) == 1
    line.close()


def closed(connection: socket.socket) -> bool:
    """Whether the other end hangs up."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


class TestFrames:
    @pytest.mark.parametrize(
        "value",
        [
            None,
            True,
            7,
            0.5,
            "text \ud800 \u00e9",
            [],
            {},
            [1, [2, {"a": b"\x00\xff"}]],
            b"",
            {"values": {"n": 1}},
        ],
    )
    def test_what_is_plain_arrives_as_it_was(self, value: object) -> None:
        """Bytes too, which JSON does not know."""
        here, there = pair()
        with here, there:
            here.sendall(encoded([value]))
            assert received(there) == [value]

    @pytest.mark.parametrize("value", [(1,), {1: 2}, {1}, {"b64": "eA=="}, object(), float, "x" * LONGEST])
    def test_what_is_not_plain_is_refused(self, value: object) -> None:
        """It would arrive as something else, or is too long."""
        with pytest.raises(NotPlain):
            encoded([value])

    @pytest.mark.parametrize(
        "octets",
        [
            b"[" + b" " * LONGEST + b"]",
            b"\xff\xff\xff\xff",
            b"nope",
            b"{}",
            b"[1",
            b"[" * LONGEST,
            b'[{"b64": "\xff?"}]',
            b'[{"b64": 1}]',
        ],
        ids=lambda octets: octets[:12].decode("latin-1"),
    )
    def test_what_is_no_frame_ends_the_conversation(self, octets: bytes) -> None:
        """Also one that is too long, of which no more is read than that."""
        here, there = pair()
        with here, there:
            here.sendall(octets)
            with pytest.raises(ConnectionError):
                received(there)

    def test_the_end(self) -> None:
        """What was said before it is heard."""
        here, there = pair()
        with there:
            here.sendall(encoded(["whole"]))
            here.close()
            assert received(there) == ["whole"]
            assert received(there) is None

    @pytest.mark.parametrize("longest", [8, LONGEST])
    def test_the_longest_frame(self, longest: int) -> None:
        """It is taken; one byte more is not."""
        here, there = pair()
        with here, there:
            here.sendall(b'["' + b"x" * (longest - 4) + b'"]')
            assert received(there, longest) == ["x" * (longest - 4)]
            here.sendall(b'["' + b"x" * (longest - 3) + b'"]')
            with pytest.raises(ConnectionError, match=f"more than {longest} bytes"):
                received(there, longest)


class TestWords:
    def test_answers(self, line: Line) -> None:
        """Each word gets its own."""
        asked = [asking(line, "echo", [number, b"octets"]) for number in range(50)]
        assert [each.result(SOON) for each in asked] == [[number, b"octets"] for number in range(50)]

    def test_an_error_waits_to_be_fetched(self, line: Line, server: LineServer) -> None:
        """The very object, once; so does an answer that is no plain value."""
        with pytest.raises(Kept) as kept:
            asking(line, "fail").result(SOON)
        with pytest.raises(OutOfTune, match="at fail"):
            server.outcome(kept.value.token)
        with pytest.raises(EngineError, match="not known here any more"):
            server.outcome(kept.value.token)
        with pytest.raises(Kept) as kept:
            asking(line, "odd").result(SOON)
        assert server.outcome(kept.value.token) == {1, 2}

    def test_errors_that_nobody_fetches_do_not_pile_up(self, line: Line, server: LineServer) -> None:
        """The oldest goes first."""
        tokens = []
        for _ in range(line_server._KEPT + 1):
            with pytest.raises(Kept) as kept:
                asking(line, "fail").result(SOON)
            tokens.append(kept.value.token)
        with pytest.raises(EngineError, match="not known"):
            server.outcome(tokens[0])
        with pytest.raises(OutOfTune):
            server.outcome(tokens[1])

    def test_words_pass_those_that_are_stuck(self, line: Line, actor: Actor) -> None:
        """However many; they are answered when they are done."""
        stuck = [asking(line, "stick") for _ in range(10)]
        for _ in stuck:
            assert actor.stuck.acquire(timeout=SOON)
        assert asking(line, "echo", 1).result(SOON) == 1
        assert not any(each.done() for each in stuck)
        actor.freed.set()
        assert [each.result(SOON) for each in stuck] == ["freed"] * 10

    def test_only_so_many_words_of_one_trainer_are_under_way(self, server: LineServer, actor: Actor) -> None:
        """The others wait, so that no trainer fills the actor with threads; they are heard when there is one.

        Another trainer does not wait with them.
        """
        before, busy, more = set(threading.enumerate()), line_server._BUSY, 10
        line = connect(server.offer)
        assert line is not None
        stuck = [asking(line, "stick") for _ in range(busy + more)]
        for _ in range(busy):
            assert actor.stuck.acquire(timeout=SOON)
        # One that took a word, and would have another thread wait for the next, has begun it before.
        threads = {each for each in threading.enumerate() if each.name == "weightsync-word"}
        assert len(threads - before) == busy
        check_open(server)
        actor.freed.set()
        assert [each.result(SOON) for each in stuck] == ["freed"] * (busy + more)
        assert asking(line, "echo", 1).result(SOON) == 1
        line.close()

    def test_two_trainers(self, line: Line, server: LineServer, actor: Actor) -> None:
        """Neither waits for the other, nor gets its answers."""
        other = connect(server.offer)
        assert other is not None
        stuck = asking(line, "stick")
        assert actor.stuck.acquire(timeout=SOON)
        assert asking(other, "echo", "mine").result(SOON) == "mine"
        other.close()
        actor.freed.set()
        assert stuck.result(SOON) == "freed"

    def test_what_cannot_be_said_is_not_taken(self, line: Line) -> None:
        """It has to go another way; the line stays good."""
        assert not line.ask(["echo", "x" * LONGEST], lambda *_: None)
        assert not line.ask(["echo", (1, 2)], lambda *_: None)
        assert asking(line, "echo", 1).result(SOON) == 1

    def test_to_say_a_word_never_waits(self) -> None:
        """At an actor that reads nothing, words are refused when its socket is full."""
        here, there = pair()
        with there:
            line = Line(here)
            word, count = ["echo", "x" * 20_000], 0
            while line.ask(word, lambda *_: None):
                count += 1
                assert count < 10_000
            line.close()


class TestStrangers:
    def test_a_wrong_secret(self, server: LineServer) -> None:
        """It is hung up on, by either end; the right one is served."""
        with raw(server) as connection, pytest.raises(ConnectionError):
            prove_to(connection, b"wrong")
        assert connect([*server.offer[:3], b"wrong"]) is None
        line = connect(server.offer)
        assert line is not None
        line.close()

    def test_an_actor_without_the_secret(self, server: LineServer) -> None:
        """Whoever took the place of the socket cannot take the words."""
        here, there = pair()
        with here, there:
            there.sendall(encoded(["nonce"]))
            answering = begun()

            def answer() -> None:
                received(there)
                there.sendall(encoded(["f" * 64]))
                answering.set_result(None)

            threading.Thread(target=answer).start()
            here.settimeout(SOON)
            with pytest.raises(ConnectionError, match="does not know the secret"):
                prove_to(here, server.offer[3])
            answering.result(SOON)

    @pytest.mark.parametrize(
        "octets", [encoded([1, ["echo", 1]]), b"GET / HTTP/1.1\r\n\r\n", encoded("hello")]
    )
    def test_what_is_no_greeting(self, server: LineServer, octets: bytes) -> None:
        """Nothing is carried out before the proof."""
        with raw(server) as connection:
            connection.sendall(octets)
            assert closed(connection)

    def test_what_is_no_word(self, server: LineServer) -> None:
        """Also after it."""
        with raw(server) as connection:
            prove_to(connection, server.offer[3])
            connection.sendall(encoded(["no number", []]))
            assert closed(connection)

    def test_who_says_nothing(self, server: LineServer, monkeypatch: pytest.MonkeyPatch) -> None:
        """Silent peers are hung up on, and too many at once are not even listened to."""
        monkeypatch.setattr(line_server, "_GREETING", 0.2)
        monkeypatch.setattr(line_server, "_STRANGERS", 2)
        peers = [raw(server) for _ in range(5)]
        assert all(closed(peer) for peer in peers)
        for peer in peers:
            peer.close()
        line = connect(server.offer)
        assert line is not None
        line.close()

    @pytest.mark.parametrize(
        "octets", [b'["\\ud800", "nonce"]', b'["proof", "\\ud800"]'], ids=["proof", "nonce"]
    )
    def test_a_greeting_that_has_no_encoding(self, server: LineServer, octets: bytes) -> None:
        """It is no proof, as any other string is none: however many of them come, the line stays open."""
        here, there = pair()
        with here, there:
            there.sendall(octets)
            with pytest.raises(ConnectionError, match="does not know the secret"):
                accept_peer(here, server.offer[3])
        for _ in range(line_server._STRANGERS + 1):
            with raw(server) as connection:
                connection.sendall(octets)
                assert closed(connection)
        check_open(server)

    def test_a_nonce_that_has_no_encoding(self, server: LineServer) -> None:
        """An actor that says one gets a proof that proves nothing to anybody else."""
        here, there = pair()
        with here, there:
            there.sendall(b'["\\ud800"]')
            there.sendall(encoded(["f" * 64]))
            with pytest.raises(ConnectionError, match="does not know the secret"):
                prove_to(here, server.offer[3])

    def test_whatever_a_stranger_brings_about(
        self, server: LineServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its connection ends, and its place is free for others."""

        def accept(connection: socket.socket, secret: bytes) -> None:
            raise OutOfTune

        with monkeypatch.context() as patched:
            patched.setattr(line_server, "accept_peer", accept)
            for _ in range(line_server._STRANGERS + 1):
                with raw(server) as connection:
                    assert closed(connection)
        check_open(server)

    def test_nobody_else_gets_in(self, server: LineServer) -> None:
        """The folder and the socket are the user's alone."""
        path = Path(server.offer[2])
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    @pytest.mark.parametrize(
        "change",
        [
            {0: "another-host"}, {1: "another-boot"}, {2: "/nowhere/socket"}, {3: None},
        ],
        ids=str,
    )  # fmt: skip
    def test_no_line_from_elsewhere(self, server: LineServer, change: dict[int, Any]) -> None:
        """Another host, a path that leads nowhere, no secret: words go by Ray, and nothing is raised."""
        assert connect([change.get(place, each) for place, each in enumerate(server.offer)]) is None
        assert connect("nonsense") is None


class TestEnds:
    def test_the_trainer_closes(self, line: Line, actor: Actor) -> None:
        """Who waits is told at once, and nothing more is taken. Closing twice is closing once."""
        stuck = asking(line, "stick")
        assert actor.stuck.acquire(timeout=SOON)
        line.close()
        line.close()
        with pytest.raises(Broken) as broken:
            stuck.result(SOON)
        assert not broken.value.gone
        assert line.over
        assert not line.ask(["echo", 1], lambda *_: None)

    def test_whatever_an_answer_brings_about(self, line: Line, server: LineServer) -> None:
        """If it cannot even be refused the connection ends, and whoever waits is told so."""
        with pytest.raises(Broken):
            asking(line, "deep").result(SOON)
        until(lambda: line.over)
        check_open(server)

    def test_the_actor_closes(self, line: Line, server: LineServer, actor: Actor) -> None:
        """Its process goes on, so it is not known to be gone."""
        stuck = asking(line, "stick")
        assert actor.stuck.acquire(timeout=SOON)
        server.close()
        server.close()
        with pytest.raises(Broken) as broken:
            stuck.result(SOON)
        assert not broken.value.gone
        until(lambda: line.over)
        assert connect(server.offer) is None

    def test_nothing_is_left_behind(self, folder: Path) -> None:
        """Descriptors, threads and files are what they were, after a hundred connections."""
        before = level()
        server = LineServer(Actor().carry_out)
        for number in range(100):
            line = connect(server.offer)
            assert line is not None
            assert asking(line, "echo", number).result(SOON) == number
            line.close()
        server.close()
        # Not more: threads of earlier tests may have ended meanwhile.
        until(lambda: all(now <= then for now, then in zip(level(), before, strict=True)))
        assert not list(folder.iterdir())

    def test_a_folder_of_a_killed_actor_is_reclaimed(self, folder: Path) -> None:
        """By the next actor; not that of one that lives, nor one that was made a moment ago."""
        left, young, alive = (LineServer(Actor().carry_out) for _ in range(3))
        for server in (left, young):
            server._listener.shutdown(socket.SHUT_RDWR)
        for server in (left, alive):
            os.utime(server._folder, (0, 0))
        LineServer(Actor().carry_out).close()
        assert set(folder.iterdir()) == {young._folder, alive._folder}
        for server in (left, young, alive):
            server.close()

    def test_a_path_that_is_too_long(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """There is no line then, and nothing is left of the attempt."""
        deep = folder / ("x" * 100)
        deep.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(deep))
        with pytest.raises(OSError, match="too long"):
            LineServer(Actor().carry_out)
        assert not list(deep.iterdir())


ACTOR = """
import os, sys, tempfile, threading
tempfile.tempdir = sys.argv[1]
from weightsync.handlers.line_server import LineServer
def carry_out(said):
    threading.Event().wait()
server = LineServer(carry_out)
if sys.argv[2] == "forks" and os.fork() == 0:
    threading.Event().wait()
print(server.offer[2], server.offer[3].hex(), flush=True)
threading.Event().wait()
"""


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["alone", "forks"])
def test_a_killed_actor_is_noticed_at_once(folder: Path, how: str) -> None:
    """Also if a process that it has forked keeps its end of the socket open."""
    process = subprocess.Popen(
        [sys.executable, "-c", ACTOR, str(folder), how],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        path, secret = process.stdout.readline().split()
        line = connect([*line_server.here(), path, bytes.fromhex(secret)])
        assert line is not None
        stuck = asking(line, "stick")
        process.kill()
        began = time.monotonic()
        with pytest.raises(Broken) as broken:
            stuck.result(SOON)
        assert broken.value.gone
        assert time.monotonic() - began < 5
        line.close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(SOON)
        if process.stdout is not None:
            process.stdout.close()

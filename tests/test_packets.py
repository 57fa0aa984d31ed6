"""Messages beside shared memory: checked before they are believed."""

import os
import socket
import struct
import zlib
from collections.abc import Iterator

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.fsm.engine_table import Session
from weightsync.fsm.errors import TransportError
from weightsync.testing.engine_process import gauge
from weightsync.transports.packets import VERSION, Packets

SESSION = Session("r1", 7, 3)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Packets]]:
    """A raw end, and one that reads packets."""
    raw, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    raw.settimeout(10)
    reading = Packets(other, SESSION)
    reading.patience(10)
    yield raw, reading
    raw.close()
    reading.close()


def framed(*header: object) -> bytes:
    """A packet as its sender makes it."""
    content: bytes = msgpack.packb(list(header))
    return content + struct.pack(">I", zlib.crc32(content))


def honest(number: int, kind: str = "beat", round: str = "r1", epoch: int = 7, **body: object) -> bytes:
    """One that is right."""
    return framed(VERSION, kind, round, epoch, number, body)


def test_what_is_sent_arrives() -> None:
    """With its descriptors, which no child inherits."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sending, reading = Packets(one, SESSION), Packets(other, SESSION)
    out, into = os.pipe()
    sending.send("segment", [out], id="a", size=5)
    sending.send("bucket", bucket=0, whole=True)
    message, fds = reading.receive()
    assert message == {"kind": "segment", "id": "a", "size": 5}
    assert len(fds) == 1
    assert not os.get_inheritable(fds[0])
    assert reading.receive() == ({"kind": "bucket", "bucket": 0, "whole": True}, [])
    sending.close()
    assert reading.receive() == (None, [])
    reading.close()
    for fd in (out, into, *fds):
        os.close(fd)


def test_one_of_another_round_changes_nothing(ends: tuple[socket.socket, Packets]) -> None:
    """It is counted, its descriptors are closed, and the next one is read."""
    raw, reading = ends
    out, into = os.pipe()
    socket.send_fds(raw, [honest(0, round="r0")], [out])
    raw.send(honest(5, epoch=6))
    raw.send(honest(0, bucket=4))
    before = gauge()[0]
    assert reading.receive() == ({"kind": "beat", "bucket": 4}, [])
    assert reading.stale == 2
    assert gauge()[0] == before
    os.close(out)
    os.close(into)


@pytest.mark.parametrize("numbers", [(0, 0), (0, 2), (1,), (-1,)], ids=["twice", "a gap", "late", "none"])
def test_each_comes_once_and_in_order(numbers: tuple[int, ...], ends: tuple[socket.socket, Packets]) -> None:
    """Anything else is no conversation."""
    raw, reading = ends
    for number in numbers:
        raw.send(honest(number))
    for _ in numbers[:-1]:
        assert reading.receive()[0] is not None
    with pytest.raises(TransportError, match="where number"):
        reading.receive()


WRONG = {
    "checksum": honest(0)[:-1] + b"\x00",
    "nothing but a checksum": struct.pack(">I", 0),
    "short": b"ab",
    "version": framed(VERSION + 1, "beat", "r1", 7, 0, {}),
    "no list": framed()[:0]
    + msgpack.packb({"a": 1})
    + struct.pack(">I", zlib.crc32(msgpack.packb({"a": 1}))),
    "fields": framed(VERSION, "beat", "r1"),
    "types": framed(VERSION, 5, "r1", 7, 0, {}),
    "body": framed(VERSION, "beat", "r1", 7, 0, []),
    "keys": framed(VERSION, "beat", "r1", 7, 0, {1: 2}),
    "extension": framed(VERSION, "beat", "r1", 7, 0, {"a": msgpack.ExtType(5, b"x" * 9)}),
    "pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_what_is_no_message_is_refused(content: bytes, ends: tuple[socket.socket, Packets]) -> None:
    """In one line, whatever it is."""
    raw, reading = ends
    raw.send(content)
    with pytest.raises(TransportError):
        reading.receive()


def test_too_long_is_refused_at_both_ends(ends: tuple[socket.socket, Packets]) -> None:
    """Nobody can make the other end hold more than one longest message."""
    raw, reading = ends
    raw.send(honest(0, what="x" * (1 << 16)))
    with pytest.raises(TransportError, match="more than 65536 bytes"):
        reading.receive()
    with pytest.raises(OSError, match="too long"):
        reading.send("beat", what="x" * (1 << 16))


def test_too_many_descriptors_are_refused_and_closed(ends: tuple[socket.socket, Packets]) -> None:
    """A peer cannot fill this process's table."""
    raw, reading = ends
    before = gauge()[0]
    socket.send_fds(raw, [honest(0)], [0] * 20)
    with pytest.raises(TransportError, match="descriptors"):
        reading.receive()
    assert gauge()[0] == before


@given(st.binary(min_size=1, max_size=300))
def test_noise_is_refused(content: bytes) -> None:
    """Never anything but the one error."""
    raw, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with raw, other:
        raw.send(content + struct.pack(">I", zlib.crc32(content)))
        with pytest.raises(TransportError):
            Packets(other, SESSION).receive()

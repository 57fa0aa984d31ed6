"""An actor's end of the line: a socket in a private folder, over which trainers of the same host say words.

One thread takes connections. A few of a pool wait at each of them; the one that a word wakes carries it out,
and calls for another only if it was the last that waited. So a word is begun by the very thread that it woke,
and yet never waits for one that is stuck. Where words are *prompt*, which means that none of them ever waits,
one thread is enough; what would have to wait is a future then, and answered when that is done. Answers carry
the word's number.

An answer that is no plain value, above all an error, stays here under a token; who wants it asks for it
through Ray, which knows how to carry an exception.

The folder goes with the process. One that is killed leaves an empty folder with a socket's name in it, which
the next actor of the same user takes away when nobody listens there any more.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import shutil
import socket
import stat
import tempfile
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, final

from ..fsm.errors import EngineError
from .frames import NotPlain, accept_peer, encoded, frame_socket, received
from .workers import Workers

__all__ = ["LineServer", "here"]

_LOGGER = logging.getLogger("weightsync")
_PREFIX = "weightsync-line-"
_NAME = "socket"
_GREETING = 5.0
"""Seconds for a peer to prove that it knows the secret."""

_STRANGERS = 16
"""Peers that may be about to do so at once."""

_WAITING = 3
"""Threads that wait for words of one peer at most: a session has two under way, and an abort may come."""

_BUSY = 32
"""Words of one peer that may be under way at once; what it says beyond them waits."""

_KEPT = 64
"""Answers that wait to be asked for; the oldest goes first."""

_YOUNG = 60.0
"""Seconds for which a folder may belong to an actor that does not listen yet."""


def here() -> list[str]:
    """What two processes have in common if a socket's path leads from one to the other."""
    return [socket.gethostname(), _boot()]


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


@final
class LineServer:
    """Listens to trainers.

    Args:
        carry_out: carries out one word; from any thread, beside others. It may hand back a future.
        prompt: whether it never waits.

    Raises:
        OSError: there can be no socket here.
    """

    def __init__(self, carry_out: Callable[[list[Any]], object], *, prompt: bool = False) -> None:
        self._carry_out, self._prompt = carry_out, prompt
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._peers: set[_Peer] = set()
        self._kept: OrderedDict[str, tuple[bool, Any]] = OrderedDict()
        self._closed = False
        self._process = os.getpid()
        _reclaim(Path(tempfile.gettempdir()))
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # 0700, and nobody can guess it
        try:
            self._listener = _listen(self._folder / _NAME)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._workers = Workers("weightsync-word")
        atexit.register(self.close)
        threading.Thread(target=self._accept, name="weightsync-line", daemon=True).start()

    @property
    def offer(self) -> list[Any]:
        """Where it is, and the secret. For a wire that is trusted."""
        return [*here(), str(self._folder / _NAME), self._secret]

    def outcome(self, token: str) -> Any:
        """Hand back, or raise, what a word came to. Once.

        Raises:
            EngineError: nothing is kept under this token.
        """
        with self._lock:
            kept = self._kept.pop(token, None)
        if kept is None:
            raise EngineError("what became of that word is not known here any more")
        ok, found = kept
        if not ok:
            raise found
        return found

    def close(self) -> None:
        """Close every connection, and take the folder away. Idempotent."""
        if os.getpid() != self._process:  # a forked child ends nothing of its parent's
            return
        with self._lock:
            closed, self._closed = self._closed, True
            peers = list(self._peers)
        if closed:
            return
        atexit.unregister(self.close)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread that accepts
        for peer in peers:
            peer.end()
        self._workers.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- connections ---------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    if not self._closed:
                        _LOGGER.debug("line: no connection could be taken: %s", error)
                        time.sleep(0.05)  # out of descriptors, perhaps; trainers say their words by Ray then
                    continue
                self._greet(_Peer(connection))

    def _greet(self, peer: _Peer) -> None:
        with self._lock:
            welcome = not self._closed and sum(not each.known for each in self._peers) < _STRANGERS
            if welcome:
                self._peers.add(peer)
        if welcome:
            self._hand_on(peer, self._serve, peer)
        else:
            peer.end()

    def _serve(self, peer: _Peer) -> None:
        try:
            with peer.held():
                peer.connection.settimeout(_GREETING)
                accept_peer(peer.connection, self._secret)
                peer.connection.settimeout(None)
        except Exception as error:  # noqa: BLE001 - whatever a stranger brings about, the connection ends
            self._part(peer, error)
        else:
            peer.known = True
            self._listen_to(peer)

    def _listen_to(self, peer: _Peer) -> None:
        """Wait for words and carry them out, unless enough others wait."""
        try:
            with peer.held():
                while peer.waits():
                    number, said = _word(received(peer.connection))
                    if peer.woken() and not self._prompt:
                        self._hand_on(peer, self._listen_to, peer)
                    self._answer(peer, number, said)
        except Exception as error:  # noqa: BLE001 - as above
            self._part(peer, error)

    def _hand_on(self, peer: _Peer, work: Callable[..., None], *args: Any) -> None:
        try:
            self._workers.submit(work, *args)
        except RuntimeError:  # no thread can be started, or the pool is closed
            self._part(peer, "nobody is left to listen")

    def _part(self, peer: _Peer, why: object) -> None:
        _LOGGER.debug("line: a connection ended: %s", why)
        with self._lock:
            self._peers.discard(peer)
        peer.end()

    # -- words -----------------------------------------------------------------------------------------------

    def _answer(self, peer: _Peer, number: int, said: list[Any]) -> None:
        try:
            value = self._carry_out(said)
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever said the word
            reply = self._refusal(number, error)
        else:
            if isinstance(value, Future):  # completed on a thread that has to wait for nobody
                value.add_done_callback(lambda done: self._hand_on(peer, self._late, peer, number, done))
                return
            reply = self._reply(number, value)
        peer.send(reply)

    def _late(self, peer: _Peer, number: int, late: Future[Any]) -> None:
        try:
            reply = self._reply(number, late.result())
        except BaseException as error:  # noqa: BLE001 - as above
            reply = self._refusal(number, error)
        peer.send(reply)

    def _reply(self, number: int, value: object) -> bytes:
        try:
            return encoded([number, True, value])
        except NotPlain:
            return self._kept_reply(number, ok=True, found=value)

    def _refusal(self, number: int, error: BaseException) -> bytes:
        traceback.clear_frames(error.__traceback__)  # which may keep views of what came
        return self._kept_reply(number, ok=False, found=error)

    def _kept_reply(self, number: int, *, ok: bool, found: object) -> bytes:
        token = secrets.token_hex(16)
        with self._lock:
            self._kept[token] = (ok, found)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return encoded([number, False, token])


class _Peer:
    """One connection, and how many threads are at it: the last of them closes it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.known = connection, False
        self._lock = threading.Lock()
        self._holders = self._waiting = 0
        self._over = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Use the connection; as long as somebody does, its number stands for nothing else.

        Raises:
            ConnectionError: it is over.
        """
        with self._lock:
            over = self._over
            self._holders += not over
        if over:
            raise ConnectionError("it is over")
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                last = self._over and not self._holders
            if last:
                self.connection.close()

    def waits(self) -> bool:
        """Become one of those who wait for a word; False if there are enough."""
        with self._lock:
            enough = self._waiting >= _WAITING
            self._waiting += not enough
            return not enough

    def woken(self) -> bool:
        """Have got a word. Whether another should wait now, because nobody does; but not too many at once."""
        with self._lock:
            self._waiting -= 1
            return not self._waiting and self._holders < _BUSY

    def send(self, frame: bytes) -> None:
        """Answer. Who is gone does not hear it; one that is stopped holds up its own answers only."""
        with contextlib.suppress(OSError), self.held():
            self.connection.send(frame)

    def end(self) -> None:
        """No more words, and whoever waits for one is woken. Idempotent."""
        with self._lock:
            self._over, unused = True, not self._holders
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        if unused:
            self.connection.close()


def _word(message: list[Any] | None) -> tuple[int, list[Any]]:
    match message:
        case [int(number), list(said)]:
            return number, said
        case None:
            raise ConnectionError("it was closed")
    raise ConnectionError("what came is no word")


# -- the folder ---------------------------------------------------------------------------------------------


def _listen(path: Path) -> socket.socket:
    listener = frame_socket()
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_STRANGERS)
    except BaseException:
        listener.close()
        raise
    return listener


def _reclaim(among: Path) -> None:
    """Take away what actors of this user left behind when they were killed."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(among):
            if entry.name.startswith(_PREFIX):
                with contextlib.suppress(OSError):
                    _reclaim_one(Path(entry.path))


def _reclaim_one(folder: Path) -> None:
    found = folder.lstat()
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    if not mine or time.time() - found.st_mtime < _YOUNG or _heard(folder / _NAME):
        return
    with contextlib.suppress(FileNotFoundError):
        (folder / _NAME).unlink()
    folder.rmdir()


def _heard(path: Path) -> bool:
    """Whether somebody listens there."""
    with frame_socket() as knocking:
        knocking.settimeout(0)
        try:
            knocking.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # it is too busy to answer the door
    return True

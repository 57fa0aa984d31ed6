"""A process that has forked goes on, and so does the child: neither takes anything away from the other.

A trainer or an engine may fork at any moment, for a data loader, a compiler, a shell. The child has copies of
sockets and of everything that is in memory, locks included, and none of the threads. Each test forks in a
Python of its own, where no thread of another test is about.
"""

import subprocess
import sys
import tempfile
import textwrap

import pytest

SOON = 60.0

BEGINNING = """
import gc, os, signal, sys, tempfile, threading, time
from concurrent.futures import Future

SOON = 10.0
signal.alarm(int(3 * SOON))  # who is stuck is a finding

def forked(child):
    # What a child has that does this, then ends as a child does.
    process = os.fork()
    if process:
        _, status = os.waitpid(process, 0)
        assert status == 0, f"the child ended with {status}"
        return
    signal.alarm(int(SOON))
    try:
        child()
    except BaseException as error:
        print(f"in the child: {error!r}", flush=True)
        os._exit(1)
    os._exit(0)

def forked_while_held(lock, child):
    # The same while another thread holds a lock, which nobody gives back in the child.
    held, forks = threading.Event(), threading.Event()
    def hold():
        with lock:
            held.set()
            assert forks.wait(SOON)
    holding = threading.Thread(target=hold)
    holding.start()
    assert held.wait(SOON)
    try:
        forked(child)
    finally:
        forks.set()
        holding.join(SOON)
"""


def told(script: str, *arguments: str) -> None:
    """Run ``script`` in a Python of its own: all is well if it says nothing and ends well."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BEGINNING + textwrap.dedent(script), *arguments],
        capture_output=True, text=True, timeout=SOON, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


# -- threads ------------------------------------------------------------------------------------------------

WORKERS = """
from weightsync.handlers.workers import Workers

workers = Workers()
begun, go_on = threading.Event(), threading.Event()

def child():
    assert workers.submit(os.getpid).result(SOON) == os.getpid()

def work():
    begun.set()
    assert go_on.wait(SOON)

def beside_an_idle_thread():
    workers.submit(int).result(SOON)
    end = time.monotonic() + SOON
    while not workers._idle:
        assert time.monotonic() < end
        time.sleep(0.001)
    forked(child)

def while_the_lock_is_held():
    forked_while_held(workers._lock, child)

def in_a_callback():
    over, found = threading.Event(), []
    def fork(done):
        try:
            forked(child)
        except BaseException as error:
            found.append(error)
        over.set()
    asked = workers.submit(work)
    assert begun.wait(SOON)
    asked.add_done_callback(fork)
    go_on.set()
    assert over.wait(2 * SOON)
    assert not found, found

globals()[sys.argv[1]]()
assert workers.submit(os.getpid).result(SOON) == os.getpid()
workers.close()
"""


@pytest.mark.parametrize("when", ["beside_an_idle_thread", "while_the_lock_is_held", "in_a_callback"])
def test_threads_for_work_are_there_on_both_sides(when: str) -> None:
    """An idle thread of the parent is none of the child's, and a lock that was held is free."""
    told(WORKERS, when)


SILENCE = """
from weightsync.fsm.engine_table import Session
from weightsync.handlers import silence
from weightsync.handlers.silence import Silence

late = Future()
parents = Silence(late.set_result)
parents.watch(Session("parents", 1, 1), 3600.0)

def child():
    with silence._WATCH.changed:
        parents._due = time.monotonic()
    mine = Future()
    own = Silence(mine.set_result)
    own.watch(Session("childs", 2, 2), 0.01)
    assert mine.result(SOON) == Session("childs", 2, 2)
    assert not late.done()  # who watches has seen all of them when it has seen one

if sys.argv[1] == "held":
    forked_while_held(silence._WATCH.changed, child)
else:
    forked(child)
with silence._WATCH.changed:
    assert parents._due > time.monotonic() + 60
    parents._due = time.monotonic()
    silence._WATCH.changed.notify_all()
assert late.result(SOON) == Session("parents", 1, 1)
"""


@pytest.mark.parametrize("when", ["free", "held"])
def test_limits_are_kept_on_both_sides(when: str) -> None:
    """The child keeps those of its own sessions, the parent goes on with its own."""
    told(SILENCE, when)


# -- lines --------------------------------------------------------------------------------------------------

LINE = """
from weightsync.handlers.line import connect
from weightsync.handlers.line_server import LineServer

class Owner:
    pass

folder = tempfile.tempdir = sys.argv[3]
server = LineServer(lambda said: said)
line = connect(server.offer)
owner = Owner()
line.end_with(owner)

def answered(line):
    answer = Future()
    assert line.ask(["word"], lambda told, error: answer.set_result((told, error)))
    assert answer.result(SOON) == (["word"], None)

def child_that_closes_the_server():
    server.close()

def child_that_closes_the_line():
    line.close()

def child_that_forgets_the_owner():
    global owner
    del owner
    gc.collect()

def child_that_ends_by_itself():
    # As sys.exit() would: with what was to be done at exit, finalizers among it.
    import atexit
    atexit._run_exitfuncs()

answered(line)
child = globals()["child_that_" + sys.argv[1]]
locks = {"the_servers": server._lock, "the_lines": line._turn}
if sys.argv[2] in locks:
    forked_while_held(locks[sys.argv[2]], child)
else:
    forked(child)
answered(line)
other = connect(server.offer)
answered(other)
other.close()
del owner
gc.collect()
while not line.over:
    time.sleep(0.001)  # the alarm ends it if it never is
server.close()
assert not os.listdir(folder)
"""


@pytest.mark.parametrize("held", ["nothing", "the_servers", "the_lines"])
@pytest.mark.parametrize(
    "what", ["closes_the_server", "closes_the_line", "forgets_the_owner", "ends_by_itself"]
)
def test_a_child_ends_no_line_of_its_parents(what: str, held: str) -> None:
    """Nor the server's folder; the parent ends each of them when it is time."""
    with tempfile.TemporaryDirectory(prefix="line-", dir="/tmp") as folder:  # a socket's name is short
        told(LINE, what, held, folder)

"""What Ray reports of an actor becomes one line, without colours, with what counts in it."""

import pytest
import ray

from weightsync.handlers.ray_reports import report

BEGIN = "Traceback (most recent call last):\n"
FRAME = '  File "/home/me/rollout.py", line 12, in __init__\n    raise ValueError()\n    ^^^^^^^^^\n'
CHAINED = "The above exception was the direct cause of the following exception:\n\n"


def task_error(traceback: str) -> ray.exceptions.RayTaskError:
    """As Ray makes it when a method of an actor raises."""
    return ray.exceptions.RayTaskError(
        "__init__", traceback, ValueError("no such model"), "ray::Rollout.__init__", 17, "192.0.2.1"
    )


def died(traceback: str) -> ray.exceptions.ActorDiedError:
    """As Ray makes it when an actor's ``__init__`` raises."""
    return ray.exceptions.ActorDiedError(task_error(traceback))


@pytest.mark.parametrize(
    ("traceback", "line"),
    [
        (f"{BEGIN}{FRAME}ValueError: no such model", "ValueError: no such model"),
        (f"{BEGIN}{FRAME}ValueError: no such model\n  in /models\nat all", "ValueError: no such model"),
        (f"{BEGIN}{FRAME}KeyError: 'a'\n\n{CHAINED}{BEGIN}{FRAME}RuntimeError: off", "RuntimeError: off"),
        ("ValueError: without a frame", "ValueError: without a frame"),
        (f"{BEGIN}{FRAME}OSError", "OSError"),
    ],
)
def test_an_error_of_init_is_the_cause(traceback: str, line: str) -> None:
    """Neither Ray's frame in cyan nor the traceback gets into the message."""
    error = died(traceback)
    assert BEGIN not in traceback or "\x1b[36m" in str(error), "Ray writes its reports otherwise now"
    assert report(error) == f"its __init__ raised {line}"


def test_a_task_that_failed_is_told_by_its_error() -> None:
    """The same without an actor that died."""
    assert report(task_error(f"{BEGIN}{FRAME}OSError: disk")) == "OSError: disk"


def test_a_process_that_ended_is_told_with_the_reason() -> None:
    """Particulars, and advice about the cluster, stay in the cause."""
    text = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: Rollout\n\tpid: 17\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit "
        "detail: Worker unexpectedly exits with a connection error code 2. Some common causes include: ...\n"
        "The actor never ran."
    )
    assert report(ray.exceptions.RayActorError("17", text)) == (
        "The actor died unexpectedly before finishing this task. "
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"
    )


def test_whatever_it_is_it_is_one_short_line() -> None:
    """Nothing to say is told by the error's type; a page is cut."""
    assert report(ray.exceptions.RayError()) == "RayError()"
    assert len(report(ray.exceptions.RayError("word " * 200))) < 310
    assert report(ray.exceptions.RayError("\x1b[31mred\x1b[39m\nand more")) == "red"

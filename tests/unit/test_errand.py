"""Work runs in a forked child. Its result is returned, and its failure becomes a sentence."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import psutil
import pytest

from streamqd.subprocess_task import SubprocessTask, TaskResult


def wait_result(errand: SubprocessTask) -> TaskResult:
    while (found := errand.poll(5.0)) is None:
        pass
    return found


def test_subprocess_task_returns_a_result_of_any_size():
    errand = SubprocessTask(lambda: {"list": list(range(100_000))}, title="errand", timeout=30.0)
    assert wait_result(errand) == TaskResult({"list": list(range(100_000))}, "")


def test_subprocess_task_reports_a_killed_child():
    errand = SubprocessTask(lambda: threading.Event().wait(), title="errand", timeout=30.0)
    assert errand.poll() is None
    os.killpg(errand.pid, 9)
    assert wait_result(errand) == TaskResult(None, "its process terminated with signal SIGKILL")


def test_subprocess_task_is_killed_after_its_timeout():
    errand = SubprocessTask(lambda: threading.Event().wait(), title="errand", timeout=0.2)
    assert wait_result(errand) == TaskResult(None, "it took longer than 0.2 s")


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda: os.kill(os.getpid(), 9), "its process terminated with signal SIGKILL"),
        (lambda: os._exit(3), "its process terminated with exit code 3"),
        (lambda: os._exit(0), "its result cannot be read: Expecting value: line 1 column 15"),
    ],
)
def test_subprocess_task_rejects_a_truncated_result(end: Callable[[], None], error: str):
    def write_half(descriptor: int, mode: str) -> None:
        os.write(descriptor, b'{"declared": [')
        end()

    def work() -> bool:
        os.fdopen = write_half  # type: ignore[assignment]  # in the child, which exits there
        return True

    found = wait_result(SubprocessTask(work, title="errand", timeout=30.0))
    assert found.result is None
    assert found.error.startswith(error)


def test_subprocess_task_does_not_affect_its_parent():
    def work() -> bool:
        os.environ["LEFT_BEHIND"] = "1"
        return True

    assert wait_result(SubprocessTask(work, title="errand", timeout=30.0)) == TaskResult(True, "")
    assert "LEFT_BEHIND" not in os.environ


def test_subprocess_task_leaves_no_open_descriptor():
    before = psutil.Process().num_fds()
    wait_result(SubprocessTask(lambda: 1, title="errand", timeout=30.0))
    assert psutil.Process().num_fds() == before

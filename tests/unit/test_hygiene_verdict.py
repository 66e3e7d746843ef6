"""A daemon's hygiene check finds every planted fault, both in real processes and in figures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.support.hygiene import WAVERS, Sample, find_odd_processes, grown_figures
from tests.support.waiting import wait_until

# This program leads a session that has one process of the given kind, such as a zombie.
LEADER = """
import ctypes, os, signal, sys
sort = sys.argv[1]
if sort == "orphan":
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
child = os.fork()
if child == 0:
    if sort == "zombie":
        os._exit(0)
    if sort == "worker":
        os.execv(sys.executable, ["streamqd: worker", "-c", "import signal; signal.pause()"])
    if os.fork() == 0:
        signal.pause()
    os._exit(0)
if sort in ("orphan", "lost"):
    os.waitpid(child, 0)
signal.pause()
"""


@pytest.fixture
def start_leader() -> Iterator[Callable[[str], int]]:
    """Start the leader of a session that has one process of a kind. Return the leader's pid."""
    leaders: list[subprocess.Popen[bytes]] = []

    def start(sort: str) -> int:
        command = [sys.executable, "-c", LEADER, sort]
        leaders.append(subprocess.Popen(command, start_new_session=True))
        return leaders[-1].pid

    yield start
    for leader in leaders:
        for pid in psutil.pids():
            if pid != leader.pid and session_id(pid) == leader.pid:
                os.kill(pid, signal.SIGKILL)
        leader.kill()
        leader.wait(10)


def session_id(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


@pytest.mark.parametrize("sort", ["zombie", "orphan", "lost"])
def test_unexpected_child_process_is_found(start_leader: Callable[[str], int], sort: str):
    leader = start_leader(sort)

    def found() -> list[str]:
        return [each for each in find_odd_processes(leader) if each.startswith(f"{sort} ")]

    wait_until(found, timeout=20.0, what=f"the {sort} is found")


def test_worker_process_is_expected(start_leader: Callable[[str], int]):
    leader = start_leader("worker")

    def titles() -> list[str]:
        return [each.cmdline()[0] for each in psutil.Process(leader).children()]

    wait_until(lambda: titles() == ["streamqd: worker"], timeout=20.0, what="there is a worker")
    assert find_odd_processes(leader) == set()


def samples(**slopes: int) -> list[Sample]:
    """Return 100 samples whose figures rise by these amounts from the first to the last."""
    base = {"supervisor_fds": 18, "housekeeper_fds": 6}
    return [
        Sample(number, *(base.get(name, 40 << 20) + slopes.get(name, 0) * number // 99
                         for name in Sample._fields[1:]))
        for number in range(100)
    ]  # fmt: skip


def test_fluctuating_figures_are_flat():
    assert grown_figures(samples(**WAVERS)) == []


@pytest.mark.parametrize("name", WAVERS)
def test_rising_figure_is_growth(name: str):
    (sentence,) = grown_figures(samples(**{name: 2 * WAVERS[name]}))
    assert sentence.startswith(name)


@pytest.mark.parametrize("name", WAVERS)
def test_temporary_peak_is_not_growth(name: str):
    peaked = samples()
    peaked[50] = peaked[50]._replace(**{name: 1 << 40})
    assert grown_figures(peaked) == []

"""`streamqd stack` requests the stack of a worker from any host."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from streamqd.cli import cli
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.ledger import Audit
from tests.support.waiting import wait_until

NewDaemon = Callable[..., Daemon]

NAME = f"{TOPIC}/0/{GROUP}"
COROUTINES = """
import asyncio
import ctypes

async def obey(message):
    if message.text() == "hold":
        hold_the_interpreter()
    await asyncio.sleep(600)


def hold_the_interpreter():
    ctypes.PyDLL(None).pause()
"""


def stack(daemon: Daemon, *, code: int = 0) -> dict[str, Any]:
    """Run `streamqd stack` with the daemon's configuration.

    Return the stack that the daemon published.
    """
    words = ["--config", str(daemon.config_path), "stack", NAME, "--json", "--timeout", "60s"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)["stack"]
    return found


def test_stack_of_a_busy_worker_does_not_interrupt_its_run(new_daemon: NewDaemon) -> None:
    daemon = new_daemon(partitions=2)
    with daemon:
        [uid] = daemon.send(["await go"], partition=0)
        daemon.wait_run(uid)
        pids = daemon.pids()

        found = stack(daemon)

        assert 'work.py"' in found["stack"]
        assert "in _await" in found["stack"]
        assert (found["pid"], found["instance"]) == (pids[0], "one")
        assert found["epoch"] == daemon.epochs()[0]
        assert found["lines_left_out"] == 0
        logged = daemon.wait_event("stack.dumped", child=pids[0])
        assert "in _await" in logged["traceback"]
        assert daemon.events("stack.dumped", child=pids[1]) == []  # no other worker was asked

        again = stack(daemon)
        assert again["requested_unix_ms"] > found["requested_unix_ms"]
        assert again["at_unix_ms"] > found["at_unix_ms"]

        (daemon.folder / "go").touch()
        daemon.wait_settled()
        assert daemon.pids() == pids
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.stop() == 0


def test_stack_of_a_worker_hung_in_c_code_is_shown(new_daemon: NewDaemon) -> None:
    """The fault handler writes the stack even if C code holds the interpreter's lock."""
    daemon = new_daemon()
    with daemon:
        [uid] = daemon.send(["hold"], partition=0)
        daemon.wait_run(uid)
        wait_until(lambda: "in _hold" in stack(daemon)["stack"], timeout=30)


@pytest.mark.parametrize(
    ("word", "line"), [("wait", "in select"), ("hold", "in hold_the_interpreter")]
)
def test_stack_of_a_worker_with_coroutines_includes_the_loop(
    new_daemon: NewDaemon, word: str, line: str
) -> None:
    daemon = new_daemon(code=COROUTINES, daemon={"loop_blocked_after": "1s"})
    with daemon:
        daemon.send([word], partition=0)
        wait_until(lambda: line in stack(daemon)["stack"], timeout=30)


def test_stack_of_a_suspended_worker_is_a_problem(new_daemon: NewDaemon) -> None:
    daemon = new_daemon()
    with daemon:
        worker = psutil.Process(daemon.pids()[0])
        worker.send_signal(signal.SIGSTOP)

        found = stack(daemon, code=1)

        assert found["stack"] == ""
        assert found["problem"] == "the process wrote no stack within 8 s"
        worker.send_signal(signal.SIGCONT)
        assert "worker/" in stack(daemon)["stack"]


def test_stack_without_a_worker_shows_the_last_exit(new_daemon: NewDaemon) -> None:
    daemon = new_daemon(daemon={"crash_backoff": {"kind": "fixed", "base": "10m", "max": "10m"}})
    with daemon:
        daemon.write_code("import os\nos._exit(3)\n")
        psutil.Process(daemon.pids()[0]).kill()
        daemon.wait_event("worker.crashed", how="exit code 3")

        found = stack(daemon, code=1)

        assert found["pid"] == 0
        assert found["problem"].startswith("no worker process runs; the last one ended with ")


def test_stack_of_an_assignment_without_an_owner_is_refused(new_daemon: NewDaemon) -> None:
    daemon = new_daemon()
    with daemon:
        assert daemon.stop() == 0
    result = CliRunner().invoke(cli, ["--config", str(daemon.config_path), "stack", NAME])
    assert result.exit_code == 8
    assert f"no instance owns {NAME}" in result.output

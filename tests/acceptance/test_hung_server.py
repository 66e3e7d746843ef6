"""If Redis hangs, every command reports that within seconds, instead of a missing streamqd."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from streamqd import config
from streamqd.cli import cli, session, top
from tests.support.daemon import TOPIC, Daemon
from tests.support.servers import ProcessServer

SECONDS = 60.0  # a command waits for 5 s, or longer on a busy machine
COMMANDS = (
    *("status", "partitions", f"why {TOPIC}/0", "top --once", "topic list", "group list"),
    *("control list", f"pause {TOPIC}", f"tail {TOPIC}", f"dlq list {TOPIC}", "rebalance"),
    *(f"produce {TOPIC} --from -", "doctor", f"trim {TOPIC}"),
)


def assert_reported(path: Path, verb: str, code: int) -> None:
    """Run a command as a process, and check its message and exit code."""
    command = [sys.executable, "-m", "streamqd", "--config", str(path), *verb.split()]
    done = subprocess.run(
        command, cwd=path.parent, input="x\n", capture_output=True, text=True, timeout=SECONDS
    )
    judge(verb, done.stdout + done.stderr)
    assert done.returncode == code


def judge(verb: str, said: str) -> None:
    assert "Redis does not answer" in said, (verb, said)
    assert "no streamqd is running" not in said, (verb, said)
    assert "Traceback" not in said, (verb, said)


def test_hung_server_is_reported_by_every_command(
    fresh_server: ProcessServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every command reports a server that accepts connections but sends nothing."""
    daemon = Daemon(tmp_path, fresh_server.url)
    fresh_server.pause()
    try:
        assert_reported(daemon.config_path, "status", 4)
        # All other commands wait in the same way, but the test gives them a shorter timeout.
        monkeypatch.setattr(session, "TIMEOUT", 0.3)
        monkeypatch.setattr(top, "READ_TIMEOUT", 0.3)
        for verb in COMMANDS:
            given = ["--config", str(daemon.config_path), *verb.split()]
            done = CliRunner().invoke(cli, given, input="x\n")
            judge(verb, done.output)
            assert done.exit_code == 4, verb
    finally:
        fresh_server.resume()
        daemon.close()


def test_hung_embedded_server_is_reported(tmp_path: Path):
    """A command reports a hung embedded server, although its daemon is still running."""
    daemon = Daemon(tmp_path, "embedded:")
    with daemon:
        (server,) = [
            each
            for each in psutil.Process(daemon.pid).children(recursive=True)
            if each.cmdline() and each.cmdline()[0].startswith("streamqd: redis")
        ]
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert_reported(daemon.config_path, "status", 4)
            assert_reported(daemon.config_path, "check", 1)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert daemon.stop() == 0


@pytest.mark.parametrize("killed", [False, True], ids=["never started", "its socket is left"])
def test_missing_daemon_is_reported_by_status(tmp_path: Path, killed: bool):
    """If the daemon is not running, `status` still reports it as missing."""
    daemon = Daemon(tmp_path, "embedded:")
    if killed:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
            left.bind(str(config.claim_socket_path(config.load(daemon.config_path))))
    shown = subprocess.run(
        [sys.executable, "-m", "streamqd", "--config", str(daemon.config_path), "status"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert shown.returncode == 4
    assert "no streamqd is running" in shown.stderr

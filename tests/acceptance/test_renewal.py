"""`streamqd topic renew` while a daemon handles messages, and killed between its steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from streamqd.cli import cli
from streamqd.errors import RedisRefused
from tests.support.daemon import TOPIC, Daemon
from tests.support.servers import Server

LAST = "18446744073709551615-18446744073709551615"
# The command, which kills itself before it takes the step that STEP names.
KILLED = """
import os, signal, sys
from streamqd.store import renewal

def strike(*args, **named):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(renewal, os.environ["STEP"], strike)
from streamqd.cli import cli
cli(sys.argv[1:], prog_name="streamqd")
"""


def verb(daemon: Daemon, *words: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, ["--config", str(daemon.config_path), *words])
    assert result.exit_code == code, result.output
    return result.output


def killed(daemon: Daemon, step: str, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, "--config", str(daemon.config_path), *words],
        env={**os.environ, "STEP": step},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("step", ["", "copy", "group", "swap"])
@pytest.mark.usefixtures("link")
def test_a_partition_without_room(tmp_path: Path, server: Server, step: str) -> None:
    """S3: nothing is lost, what was in hand runs at most once more, later messages are taken."""
    renew = ("topic", "renew", TOPIC, "--partition", "0")
    with Daemon(tmp_path, server.url, partitions=2) as daemon:
        daemon.send(["ok"] * 20)
        daemon.wait_settled()
        stream = daemon.keys.stream(TOPIC, 0)
        daemon.send(["sleep 0.05"] * 100, partition=0)
        daemon.link.execute("XADD", stream, LAST, "payload", "ok")
        with pytest.raises(RedisRefused):
            daemon.link.execute("XADD", stream, "*", "payload", "ok")
        found = verb(daemon, "doctor", "--only", "partitions.no-room", code=1)
        assert f"streamqd topic renew {TOPIC} --partition 0" in found
        group = daemon.groups[0]
        assert f"{TOPIC}/{group}" in verb(daemon, "status")
        assert f"1/{group}" in verb(daemon, "status", TOPIC)
        for line in (("partitions",), ("why", f"{TOPIC}/1")):
            assert f"{TOPIC}/1" in verb(daemon, *line)
        assert "is owned by one" in verb(daemon, *renew, "--yes", code=8)

        if step:
            killed(daemon, step, *renew, "--force", "--yes")
        verb(daemon, *renew, "--force", "--yes")
        later = daemon.send(["ok"] * 10)
        daemon.wait_settled(timeout=90.0)
        audit = daemon.ledger.audit(daemon.groups[0])
        assert audit.lost == []
        # What runs when the partition is taken away runs again, and nothing else.
        assert not audit.repeated.keys() & {*later}
        assert len(audit.repeated) <= 2
        assert [uid.rpartition("/")[0] for uid in audit.unexpected] == [f"{TOPIC}/0"]
        assert daemon.running
        assert "no problems" in verb(daemon, "doctor", "--only", "partitions.no-room")
        assert not daemon.link.execute("EXISTS", daemon.keys.fresh(TOPIC, 0))

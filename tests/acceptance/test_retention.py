"""The daemon trims streams, and an operator needs only one command to see why it does not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.daemon import ROOT, TOPIC, Daemon

pytestmark = pytest.mark.promise

NewDaemon = Callable[..., Daemon]


def run_command(daemon: Daemon, *args: str) -> tuple[int, Any]:
    """Run a command as an operator would. Return its exit code and JSON document."""
    done = subprocess.run(
        [sys.executable, "-m", "streamqd", "--config", daemon.config_path, *args, "--json"],
        cwd=daemon.folder,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=30,
    )
    assert b"Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr.decode()


def configure_retention(new_daemon: NewDaemon, **retention: Any) -> Daemon:
    daemon = new_daemon()
    daemon.write_config(topics={TOPIC: {"partitions": 1, "retention": retention}})
    return daemon


def length(daemon: Daemon) -> int:
    return int(daemon.link.execute("XLEN", daemon.keys.stream(TOPIC, 0)))


def test_entry_is_deleted_after_all_groups_acknowledge_it(
    new_daemon: NewDaemon,
) -> None:
    """An entry is deleted once all groups have acknowledged it.

    Until then, `doctor stream` names the group that holds the entry back. If that group
    acknowledges the entry or is deleted, the entry is released.
    """
    with configure_retention(new_daemon, ack_policy="delete") as daemon:
        stream = daemon.keys.stream(TOPIC, 0)
        daemon.link.execute("XGROUP", "CREATE", stream, "audit", "0")
        daemon.send(["ok"] * 20)
        daemon.wait_settled()
        daemon.wait_for(
            lambda: daemon.link.execute("HGET", daemon.keys.trim(TOPIC, 0), "size") == b"20",
            what="the housekeeper has looked at it since",
        )
        assert length(daemon) == 20

        code, found = run_command(daemon, "doctor", "stream", TOPIC)
        assert code == 1
        (problem,) = found["problems"]
        assert (problem["kind"], problem["holder"]) == ("abandoned", "audit")
        assert found["partitions"][0]["needed"] == 20

        ((_, rows),) = daemon.link.execute(
            *("XREADGROUP", "GROUP", "audit", "hand", "COUNT", 20, "STREAMS", stream, ">")
        )
        daemon.link.execute("XACK", stream, "audit", *(row[0] for row in rows))
        daemon.wait_for(lambda: length(daemon) == 0, what="all is acknowledged and gone")
        assert run_command(daemon, "doctor", "stream", TOPIC)[0] == 0


def test_drop_unacked_above_drops_and_logs_messages(
    new_daemon: NewDaemon,
) -> None:
    with configure_retention(new_daemon, drop_unacked_above=100) as daemon:
        stream = daemon.keys.stream(TOPIC, 0)
        daemon.link.execute("XGROUP", "CREATE", stream, "audit", "0")
        daemon.link.pipeline([("XADD", stream, "*", "payload", "ok") for _ in range(1_000)])
        daemon.wait_for(lambda: length(daemon) <= 200, what="the partition is cut")
        told = daemon.wait_event("retention.dropped", group="audit")
        assert told["state"] == "unread"
        lost = 1_000 - length(daemon)
        daemon.wait_for(
            lambda: (
                sum(e["entries"] for e in daemon.events("retention.dropped", group="audit")) == lost
            ),
            what=f"{lost} lost entries are told",
        )
        _, found = run_command(daemon, "doctor", "stream", TOPIC)
        dropped = {each["group"]: each["dropped"] for each in found["partitions"][0]["groups"]}
        assert dropped["audit"] == lost

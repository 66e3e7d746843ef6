"""The last owners of a partition, as daemons record them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from click.testing import CliRunner

from streamqd.cli import cli
from tests.support.daemon import GROUP, TOPIC, Daemon

NewDaemon = Callable[..., Daemon]

NAME = f"{TOPIC}/0/{GROUP}"


def run_why(daemon: Daemon, *words: str) -> str:
    words = ("--config", str(daemon.config_path), "why", NAME, *words)
    result = CliRunner().invoke(cli, words)
    assert result.exit_code in (0, 1), result.output
    return result.stdout


def owners(daemon: Daemon) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run_why(daemon, "--owners", "--json"))["answers"][0][
        "owners"
    ]
    return found


def owner_ends(daemon: Daemon) -> list[tuple[str, str]]:
    return [(each["owner"], each["end"]) for each in owners(daemon)]


def test_owner_history_distinguishes_lost_and_stopped(new_daemon: NewDaemon) -> None:
    daemon = new_daemon(daemon={"lease_ttl": "2s"})
    with daemon:
        assert owner_ends(daemon) == [("one", "")]
        daemon.kill_all()
        daemon.lose_memory()
        mark = daemon.mark()
        daemon.start()
        daemon.wait_event("daemon.ready", after=mark)
        assert owner_ends(daemon) == [("one", ""), ("one", "lost")]
        assert daemon.stop() == 0
        assert owner_ends(daemon) == [("one", "instance-stopped"), ("one", "lost")]
        epochs = [each["epoch"] for each in owners(daemon)]
        assert epochs == sorted(epochs, reverse=True)
        assert all(each["held_seconds"] > 0 for each in owners(daemon))

        lines = run_why(daemon, "--owners").splitlines()
        assert lines[-3].split() == ["SINCE", "OWNER", "EPOCH", "HELD", "END"]
        assert lines[-2].endswith("its instance stopped")
        assert lines[-1].endswith("lost: not released, taken over")
        assert "OWNER" not in run_why(daemon)


def test_crashed_worker_does_not_change_the_owner(new_daemon: NewDaemon) -> None:
    daemon = new_daemon()
    with daemon:
        epoch = daemon.epochs()[0]
        daemon.send(["exit 9"], 0)
        daemon.wait_for(lambda: daemon.epochs()[0] > epoch, what="a new epoch")
        assert owner_ends(daemon) == [("one", "")]

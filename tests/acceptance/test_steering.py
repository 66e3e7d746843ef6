"""A directive to a fleet is written once, applied by every instance, and kept across restarts."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from streamqd.admin import owners
from streamqd.admin.reading import ViewReader
from streamqd.cli import cli
from streamqd.model import Assignment
from streamqd.scoreboard import WorkerState
from tests.acceptance.test_rebalance import Fleet
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.ledger import Audit
from tests.support.waiting import wait_until

NewDaemon = Callable[..., Daemon]

# Partitions move only by a directive, never automatically.
CALM = {"lease_ttl": "2s", "rebalance_delay": "10m", "rebalance_hold": "10m"}


def run_command(daemon: Daemon, *words: str, code: int = 0) -> str:
    """Run a command with the daemon's configuration. Return its output."""
    result = CliRunner().invoke(cli, ["--config", str(daemon.config_path), *words])
    assert result.exit_code == code, f"{words}: {result.output}"
    return result.output


def document(daemon: Daemon, *words: str, code: int = 0) -> Any:
    return json.loads(run_command(daemon, *words, "--json", code=code))


@pytest.fixture
def fleet(new_daemon: NewDaemon) -> Fleet:
    """Two instances, of which the first owns all four partitions."""
    one, two = (new_daemon(name=name, partitions=4, daemon=CALM) for name in "ab")
    found = Fleet(one)
    found.wait_shares(4)
    found.add(two)
    return found


def test_pause_finishes_runs_and_survives_a_restart(new_daemon: NewDaemon):
    one = new_daemon(name="a", partitions=2, daemon={"lease_ttl": "2s"})
    with one:
        [running] = one.send(["await gate"], partition=0)
        one.wait_run(running)
        epochs = one.epochs()
        waiting = run_command(
            one, "pause", f"{TOPIC}/0/{GROUP}", "-r", "the disk", "-w", "--timeout", "1s", code=1
        )
        assert "not yet: " in waiting
        assert f"{TOPIC}/0/{GROUP}" in waiting
        (one.folder / "gate").touch()
        run_command(one, "pause", f"{TOPIC}/0/{GROUP}", "--reason", "the disk", "--wait")
        held = one.send(["ok"] * 5, partition=0)
        for uid in one.send(["ok"] * 5, partition=1):
            one.wait_run(uid, "end")
        assert one.ledger.records_for(running, "end")
        assert one.epochs() == epochs, "a paused partition stays owned"

        first = run_command(one, "status").splitlines()[0]
        assert first.startswith(f"PAUSED {TOPIC}/0/{GROUP} for ")
        assert first.endswith(": the disk")
        assert one.stop() == 0
        mark = one.mark()
        one.start()
        one.wait_event("daemon.ready", after=mark)
        one.wait_for(
            lambda: one.worker_states() == {WorkerState.READY, WorkerState.PAUSED},
            what="the other partition is served",
        )
        one.signal(signal.SIGTSTP)
        one.signal(signal.SIGCONT)
        one.wait_event("signal.received", after=mark, signal="SIGCONT")
        for uid in one.send(["ok"] * 5, partition=1):
            one.wait_run(uid, "end")
        assert [uid for uid in held if one.ledger.records_for(uid, "start")] == []

        run_command(one, "pause", TOPIC, "--partition", "0")
        run_command(one, "resume", f"{TOPIC}/0/{GROUP}")
        assert "instead" in run_command(one, "resume", f"{TOPIC}/0/{GROUP}", code=8)
        run_command(one, "resume", TOPIC, "--wait")
        one.wait_settled()
        assert "PAUSED" not in run_command(one, "status")
        assert one.ledger.audit(GROUP) == Audit()


def test_move_drain_and_rebalance_directives_are_applied(fleet: Fleet):
    one, two = fleet.members["a"], fleet.members["b"]
    one.send("sleep 0.005" for _ in range(400))

    planned = document(one, "rebalance", "--dry-run")
    assert [(each["owner"], each["to"]) for each in planned["moves"]] == [("a", "b")] * 2
    assert fleet.shares() == [4]
    run_command(one, "rebalance", "--wait")
    fleet.wait_shares(2, 2)

    mine = min(number for number, owner in fleet.owners().items() if owner == "a")
    run_command(one, "move", f"{TOPIC}/{mine}/{GROUP}", "b", "--reason", "hot", "--wait")
    assert fleet.owners()[mine] == "b"
    last = owners.read(ViewReader(one.store), Assignment(TOPIC, mine, GROUP), "b", 0)
    assert [(each.owner, each.end) for each in last] == [("b", ""), ("a", "handed-over")]
    moves = fleet.moves()
    fleet.wait_heartbeats(6)
    assert fleet.moves() == moves, "it was moved back"
    assert f"{TOPIC}/{mine}/{GROUP} is kept on b" in run_command(one, "status")

    said = document(one, "drain", "b", "--reason", "new disk", "--wait")
    assert said["waiting"] == []
    assert set(fleet.owners().values()) == {"a"}
    assert "is drained" in run_command(one, "move", f"{TOPIC}/{mine}/{GROUP}", "b", code=8)
    mark = two.mark()
    assert two.stop() == 0
    two.start()
    two.wait_event("daemon.ready", after=mark)
    fleet.wait_heartbeats(3)
    assert set(fleet.owners().values()) == {"a"}
    assert two.events("lease.acquired", mark) == []
    two.wait_for(
        lambda: (
            {e["instance"]: e["state"] for e in document(one, "status")["instances"]}
            == {"a": "working", "b": "drained"}
        ),
        what="status shows the drain",
    )
    run_command(one, "drain", "b", "--undo")
    assert document(one, "rebalance", "--wait")["forgotten"] == [f"move:{TOPIC}/{mine}/{GROUP}"]
    fleet.wait_shares(2, 2)
    one.wait_settled(30.0)
    assert one.ledger.audit(GROUP) == Audit()
    assert one.traces() == []


def test_stopped_group_is_reset_and_started_again(fleet: Fleet):
    """An operator can reset a stopped group and start it again.

    The group is stopped on all instances, one of them restarts, and the reset needs no --force.
    """
    one, two = fleet.members["a"], fleet.members["b"]
    first = one.send(["ok"] * 20)
    one.wait_settled()
    assert run_command(one, "group", "reset", TOPIC, GROUP, "--to", "earliest", "--dry-run")
    assert "group stop" in run_command(
        one, "group", "reset", TOPIC, GROUP, "--to", "earliest", code=8
    )

    run_command(one, "group", "stop", TOPIC, GROUP, "--reason", "wrong prices", "--wait")
    assert fleet.owners() == {}
    mark = two.mark()
    assert two.stop() == 0
    two.start()
    two.wait_event("daemon.ready", after=mark)
    fleet.wait_heartbeats(6)
    assert fleet.owners() == {}, "a stopped group was taken"
    later = one.send(["ok"] * 5)
    [group] = document(one, "status")["groups"]
    assert (group["condition"], group["reason"], group["owned"]) == ("stopped", "wrong prices", 0)

    run_command(one, "group", "reset", TOPIC, GROUP, "--to", "earliest", "--yes")
    run_command(one, "group", "start", TOPIC, GROUP, "--wait")
    one.wait_settled(30.0)
    assert all(len(one.ledger.records_for(uid, "end")) == 2 for uid in first)
    assert all(len(one.ledger.records_for(uid, "end")) == 1 for uid in later)


def test_instances_reload_in_turn_once_per_directive(fleet: Fleet):
    one, two = fleet.members["a"], fleet.members["b"]
    marks = {daemon: daemon.mark() for daemon in (one, two)}
    orders = one.keys.directives("default")
    later = json.dumps({"version": 2, "at_unix_ms": 5, "by": "x", "why": ""})
    one.link.execute("HSET", orders, "rebalance", later, "sing", "\xff", "drain:a", "[]")
    one.link.execute("PUBLISH", one.keys.wake("default"), "x")
    for name in ("rebalance", "sing", "drain:a"):
        one.wait_event("directive.ignored", directive=name)

    run_command(one, "reload", "--wait")
    first = one.wait_event("reload.finished")
    second = two.wait_event("reload.started")
    assert first["ts"] <= second["ts"]
    assert [len(each.events("directive.ignored")) for each in (one, two)] == [3, 3]

    mark = two.mark()
    assert two.stop() == 0
    two.start()
    two.wait_event("daemon.ready", after=mark)
    fleet.wait_heartbeats(3)
    assert two.events("reload.started", mark) == [], "an order was obeyed again"

    one.write_code("this is no Python")
    marks[one] = one.mark()
    rejected = run_command(one, "reload", "a", "--wait", code=1)
    assert "a rejected the reload" in rejected
    assert "not yet" not in rejected
    one.wait_event("reload.refused", after=marks[one])
    assert two.events("reload.started", mark) == []

    gone = document(one, "control", "list")
    assert set(gone["unreadable_directives"]) == {"rebalance", "sing", "drain:a"}
    run_command(one, "control", "clear", "sing", "drain:a", "--yes")
    assert set(document(one, "status")["unreadable_directives"]) == {"rebalance"}


def test_waiting_reload_shows_its_running_message(new_daemon: NewDaemon):
    one = new_daemon(name="a", partitions=2, daemon={"lease_ttl": "2s"})
    with one:
        [running] = one.send(["await gate"], partition=0)
        one.wait_run(running)
        run_command(one, "reload")
        one.wait_event("standby.ready", partition=0)
        text = f"waits for the message of {TOPIC}/0/{GROUP} that has been running for"

        said = run_command(one, "reload", "--wait", "--timeout", "10s", code=1)
        assert f"not yet: a has not reloaded and {text}" in said
        said = run_command(one, "reload")
        assert "a was already asked to reload" in said
        assert text in said
        one.signal(signal.SIGHUP)  # the reload waits until the others have finished
        assert text in run_command(one, "reload")

        (one.folder / "gate").touch()
        run_command(one, "reload", "--wait")
        wait_until(lambda: "already asked" not in run_command(one, "reload", "--dry-run"))
        wait_until(lambda: one.events("reload.finished"))


def readiness(daemon: Daemon) -> tuple[int, list[str]]:
    """Return the status and reasons of `/readyz`. The status is 0 if there is no answer."""
    connection = http.client.HTTPConnection("streamqd", timeout=5)
    try:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(daemon.folder / "http.sock"))
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())["reasons"]
    except OSError:
        return 0, []
    finally:
        connection.close()


@pytest.mark.parametrize("alone", [True, False], ids=["the only one", "one of two"])
def test_drained_instance_is_ready_but_not_a_stopping_one(new_daemon: NewDaemon, alone: bool):
    """A drained instance is ready, because it is a standby that may return."""
    options = {"partitions": 2, "daemon": {"lease_ttl": "2s", "drain_timeout": "60s"}}
    one = new_daemon(name="a", http="unix:./http.sock", **options)
    with contextlib.ExitStack() as kept:
        if not alone:
            kept.enter_context(new_daemon(name="b", **options))
        kept.enter_context(one)
        one.wait_for(lambda: readiness(one) == (200, []), what="it is ready")

        run_command(one, "drain", "a", "--wait")
        one.wait_for(lambda: not one.pids(), what="it owns nothing")
        one.wait_for(lambda: readiness(one) == (200, []), what="it is ready, and owns nothing")
        one.wait_for(
            lambda: (
                {each["instance"]: each["state"] for each in document(one, "status")["instances"]}[
                    "a"
                ]
                == "drained"
            ),
            what="status says so",
        )
        assert readiness(one) == (200, [])

        run_command(one, "drain", "a", "--undo")
        if not alone:
            return
        [running] = one.send(["await gate"], partition=0)
        one.wait_run(running)
        one.signal(signal.SIGTERM)
        one.wait_for(
            lambda: readiness(one) == (503, ["the daemon is draining"]), what="it is not ready"
        )
        (one.folder / "gate").touch()
        assert one.wait() == 0


def test_forget_accepts_only_a_silent_instance(new_daemon: NewDaemon):
    """Only a silent instance can be forgotten. It would otherwise stay in the list forever."""
    one, two = (new_daemon(name=name, daemon=CALM) for name in "ab")
    with one, two:
        refused = run_command(one, "forget", "b", "--yes", code=8)
        assert "instance b is live" in refused
        assert "instance x is not in the fleet" in run_command(one, "forget", "x", "--yes", code=8)

        two.kill()
        one.wait_for(
            lambda: "streamqd forget b" in run_unchecked(one, "status", "--json"), what="silent"
        )
        assert "streamqd forget b" in run_unchecked(
            one, "doctor", "--only", "fleet.silent", "--json"
        )
        planned = document(one, "forget", "b", "--dry-run")
        assert (planned["instance"], planned["dry_run"]) == ("b", True)
        assert "pass --yes" in run_command(one, "forget", "b", code=8)
        assert {each["instance"] for each in document(one, "status")["instances"]} == {"a", "b"}
        assert "b is forgotten" in run_command(one, "forget", "b", "--yes")
        assert {each["instance"] for each in document(one, "status")["instances"]} == {"a"}
        assert "forget" in run_command(one, "dlq", "audit", TOPIC)
        run_command(one, "forget", "b", "--yes", code=8)

        mark = two.mark()
        two.start()
        two.wait_event("daemon.ready", after=mark)
        two.signal(signal.SIGSTOP)
        one.wait_for(
            lambda: "streamqd forget b" in run_unchecked(one, "status", "--json"), what="silent"
        )
        timer = threading.Timer(0.5, two.signal, [signal.SIGCONT])
        timer.start()
        assert "instance b is live" in run_command(one, "forget", "b", "--yes", code=8)
        timer.join()


def run_unchecked(daemon: Daemon, *words: str) -> str:
    """Return the output of a command, regardless of its exit code."""
    return CliRunner().invoke(cli, ["--config", str(daemon.config_path), *words]).output

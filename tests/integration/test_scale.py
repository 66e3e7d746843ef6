"""`streamqd scale` on a real server prints the figures, and serves them to autoscalers."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from tests.contract.harness import Harness
from tests.support.commands import HarnessAt, Run, document
from tests.support.daemon import toml
from tests.support.servers import Server

Scale = Callable[..., dict[str, Any]]


@pytest.fixture
def scale(run: Run) -> Scale:
    """Return the document of `scale --json`."""
    return lambda *args, **more: document(run("scale", *args, "--json", **more))


def write(harness: Harness, number: int) -> None:
    """Create the harness's group, and then write messages to its partition."""
    harness.groups()
    for _ in range(number):
        harness.do("XADD", harness.stream, "*", "payload", "x")


def add_due(harness: Harness, key: str, seconds: float, number: int = 1) -> None:
    """Add members to a sorted set, which are due in `seconds` (stored as unix ms, Redis time)."""
    for at in range(number):
        harness.do("ZADD", key, int(harness.now_unix_ms() + seconds * 1000), f"0-{at}-{seconds}")


def test_scale_wants_one_worker_per_partition_with_backlog(
    harness_at: HarnessAt, scale: Scale
) -> None:
    for partition, number in enumerate((300, 0, 40)):
        write(harness_at(partition), number)

    assert scale()["groups"] == {
        "access/hits": {
            "backlog": 340,
            "backlog_exact": True,
            "due": 0,
            "busy": 0,
            "partitions": 3,
            "wanted": 2,
        }
    }


def test_scale_target_sets_the_backlog_per_worker(harness_at: HarnessAt, scale: Scale) -> None:
    for partition in range(3):
        write(harness_at(partition), 2)

    wanted = {target: scale("--target", target)["total"]["wanted"] for target in ("1", "3", "100")}

    assert wanted == {"1": 3, "3": 2, "100": 1}, "one message is enough for one worker"


def test_scale_counts_delivered_messages_until_finished(
    harness_at: HarnessAt, scale: Scale
) -> None:
    harness = harness_at(1)
    write(harness, 3)
    [first, *_] = harness.fetch()
    total = scale()["total"]
    assert (total["backlog"], total["busy"], total["wanted"]) == (3, 1, 1)

    harness.do("XACK", harness.stream, harness.assignment.group, first)

    assert scale()["total"]["backlog"] == 2


def test_scale_counts_work_before_its_due_time(
    harness_at: HarnessAt, keys: Keys, scale: Scale
) -> None:
    """`scale` counts retries, delayed sends and schedules ahead of time.

    Instances are then running when they are due.
    """
    harness = harness_at(0)
    write(harness, 0)
    assert scale()["total"]["wanted"] == 0
    place = ("access", 0)
    for key in (
        keys.retry(*harness.assignment),
        keys.delayed_sends(*place),
        keys.schedules_due(*place),
    ):
        add_due(harness, key, 20)
        add_due(harness, key, 3600)

    assert (scale()["total"]["due"], scale()["total"]["wanted"]) == (3, 1)
    assert scale("--within", "10s")["total"]["due"] == 0
    assert scale("--within", "2h")["total"]["backlog"] == 6


def test_scale_counts_a_delayed_send_for_each_group(
    harness_at: HarnessAt, keys: Keys, scale: Scale
) -> None:
    for group in ("hits", "bills"):
        write(harness_at(0, group), 0)
    add_due(harness_at(0), keys.delayed_sends("access", 0), 5)

    found = scale()

    assert {name: each["due"] for name, each in found["groups"].items()} == {
        "access/bills": 1,
        "access/hits": 1,
    }
    assert found["total"]["wanted"] == 2


def test_scale_wants_no_worker_for_a_paused_group(
    harness_at: HarnessAt, scale: Scale, run: Run
) -> None:
    for group in ("hits", "bills"):
        write(harness_at(0, group), 5)
    write(harness_at(1), 5)
    run("pause", "access/0/hits")
    run("group", "stop", "access", "bills")

    found = scale()["groups"]

    assert {name: (each["backlog"], each["wanted"]) for name, each in found.items()} == {
        "access/hits": (15, 1),
        "access/bills": (10, 0),
    }


def test_scale_selects_groups_by_name(harness_at: HarnessAt, scale: Scale, run: Run) -> None:
    for group in ("hits", "bills"):
        write(harness_at(0, group), 1)

    assert list(scale("access/bills")["groups"]) == ["access/bills"]
    assert set(scale("access")["groups"]) == {"access/hits", "access/bills"}
    refused = run("scale", "access/none", code=8)
    assert "no group none reads topic access" in refused.stderr
    assert "is not TOPIC or TOPIC/GROUP" in run("scale", "access/0/hits", code=2).stderr
    assert "topic nowhere does not exist" in run("scale", "nowhere", code=8).stderr


def test_scale_table_has_a_total(harness_at: HarnessAt, run: Run) -> None:
    assert run("scale").stdout == "no groups\n"
    for group in ("hits", "bills"):
        write(harness_at(0, group), 1)

    lines = run("scale").stdout.splitlines()

    assert lines[0].split() == ["GROUP", "BACKLOG", "DUE", "BUSY", "PARTITIONS", "WANTED"]
    assert lines[-1].split() == ["total", "4", "0", "0", "6", "2"]


def test_scale_reports_an_unreadable_key(
    harness_at: HarnessAt, keys: Keys, link: Connection, scale: Scale
) -> None:
    for partition in (0, 1):
        write(harness_at(partition), 1)
    link.execute("SET", keys.delayed_sends("access", 0), "frog")

    found = scale()

    assert found["total"]["backlog"] == 2
    assert [each["key"] for each in found["unreadable"]] == [keys.delayed_sends("access", 0)]


# --- the endpoint ---------------------------------------------------------------------------------


@contextlib.contextmanager
def serve_scale(file: Path, *args: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `scale --bind`, and yield its HOST:PORT."""
    command = [sys.executable, "-m", "streamqd", "--config", str(file), "scale", *args]
    if "--bind" not in args:
        command += ["--bind", "127.0.0.1:0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith("scale: http://"), first
            yield urlsplit(first.split()[1]).netloc, process
        finally:
            process.kill()


def get(place: str, path: str = "/scale", token: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection(place, timeout=10)
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, body


def test_scale_endpoint_equals_the_command(harness_at: HarnessAt, file: Path, scale: Scale) -> None:
    write(harness_at(0), 3)

    with serve_scale(file) as (place, process):
        status, body = get(place)
        assert get(place, "/livez")[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0

    assert status == 200
    served, printed = json.loads(body), scale()
    assert served["groups"] == printed["groups"]
    assert list(served) == list(printed)
    assert served["total"]["wanted"] == 1


def test_scale_endpoint_returns_503_without_redis(tmp_path: Path) -> None:
    """Without Redis, the endpoint returns 503.

    An autoscaler must not take an outage for an empty queue.
    """
    file = tmp_path / "streamq.toml"
    file.write_text(toml({"redis": {"url": f"unix://{tmp_path}/none.sock"}}))

    with serve_scale(file) as (place, process):
        status, body = get(place)
        live = get(place, "/livez")[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0

    assert (status, live) == (503, 200)
    assert "none.sock" in body
    assert body.count("\n") == 1


def test_scale_endpoint_for_other_hosts_needs_a_token(
    harness_at: HarnessAt, file: Path, tmp_path: Path, server: Server
) -> None:
    write(harness_at(0), 1)
    run = [sys.executable, "-m", "streamqd", "-c", str(file), "scale", "--bind", "0.0.0.0:0"]
    refused = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 3
    assert "set http.token_file" in refused.stderr
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("secret")
    file.write_text(file.read_text() + f'\n[http]\ntoken_file = "{token}"\n')

    with serve_scale(file, "--bind", "0.0.0.0:0") as (place, _):
        place = place.replace("0.0.0.0", "127.0.0.1")
        assert get(place)[0] == 401
        assert get(place, token="secret")[0] == 200


def test_scale_refuses_a_used_address_and_a_wrong_name(
    harness_at: HarnessAt, file: Path, run: Run
) -> None:
    write(harness_at(0), 1)
    with serve_scale(file) as (place, _):
        refused = run("scale", "--bind", place, code=8)
    assert "is in use by another process" in refused.stderr
    assert (
        "topic nowhere does not exist"
        in run("scale", "nowhere", "--bind", "127.0.0.1:0", code=8).stderr
    )
    assert "must be HOST:PORT" in run("scale", "--bind", "", code=2).stderr
    assert "is not a valid address" in run("scale", "--bind", "9465", code=3).stderr

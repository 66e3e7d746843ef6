"""sd_notify works with a real datagram socket, and reads the environment that systemd sets."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamqd import notify
from streamqd.notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """The service manager's socket, and the value of $NOTIFY_SOCKET for it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        if request.param == "path":
            name = str(tmp_path / "notify")
            listening.bind(name)
        else:
            name = f"@streamqd-test-{os.getpid()}"
            listening.bind("\0" + name[1:])
        listening.settimeout(5)
        yield listening, name


def test_notify_sends_one_datagram_per_message(manager: tuple[socket.socket, str]) -> None:
    listening, name = manager
    notifier = Notifier({"NOTIFY_SOCKET": name})
    assert notifier.enabled

    sent = [
        notifier.ready("8/8 partitions"),
        notifier.status("lag 12"),
        notifier.watchdog(),
        notifier.extend_timeout(1.5),
        notifier.stopping("draining"),
    ]

    assert sent == [True] * 5
    assert [listening.recv(4096) for _ in sent] == [
        b"READY=1\nSTATUS=8/8 partitions",
        b"STATUS=lag 12",
        b"WATCHDOG=1",
        b"EXTEND_TIMEOUT_USEC=1500000",
        b"STOPPING=1\nSTATUS=draining",
    ]


def test_reloading_includes_the_monotonic_clock(manager: tuple[socket.socket, str]) -> None:
    listening, name = manager
    before = time.monotonic_ns() // 1000
    Notifier({"NOTIFY_SOCKET": name}).reloading()
    first, second = listening.recv(4096).decode().split("\n")
    assert first == "RELOADING=1"
    key, value = second.split("=")
    assert key == "MONOTONIC_USEC"
    assert before <= int(value) <= time.monotonic_ns() // 1000


def test_notify_status_cannot_inject_variables(manager: tuple[socket.socket, str]) -> None:
    listening, name = manager
    Notifier({"NOTIFY_SOCKET": name}).status("fine\nMAINPID=1\r\nREADY=1")
    assert listening.recv(4096) == b"STATUS=fine MAINPID=1 READY=1"


def test_notify_without_a_listener_neither_raises_nor_blocks(tmp_path: Path) -> None:
    assert not Notifier({}).ready()
    assert not Notifier({"NOTIFY_SOCKET": "vsock:2:1234"}).enabled
    assert not Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()
    assert not Notifier({"NOTIFY_SOCKET": "/" + "x" * 300}).ready()


def test_manager_that_does_not_read_never_blocks_notify(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        for _ in range(10_000):
            if not notifier.watchdog():
                break
        else:
            pytest.fail("the queue of a socket never filled")


@pytest.mark.parametrize(
    ("environ", "interval"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": ""}, None),
    ],
)
def test_watchdog_interval_is_read_from_the_environment(
    environ: dict[str, str], interval: float | None
) -> None:
    assert Notifier(environ).watchdog_interval == interval


def test_child_process_does_not_notify_the_manager() -> None:
    environ = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "2", "HOME": "/"}
    notify.forget(environ)
    assert environ == {"HOME": "/"}

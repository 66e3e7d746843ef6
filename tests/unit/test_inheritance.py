"""A child inherits only a part of the supervisor's environment."""

from __future__ import annotations

import gc
import json
import os
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamqd import fork_hygiene, process

URL = "STREAMQ_REDIS__URL"
STORE = "STREAMQ_ARCHIVE__OPTIONS"
NOT_PASSED_ON = {"NOTIFY_SOCKET", "WATCHDOG_USEC", STORE}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fork_hygiene, "_at_freeze", None)
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/notify")
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    monkeypatch.setenv(URL, "redis://:secret@cache:6379/0")
    monkeypatch.setenv(STORE, '{ aws_secret_access_key = "secret" }')
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


def child_environment(target: Path) -> dict[str, str]:
    def run(_control: socket.socket) -> int:
        target.write_text(json.dumps(dict(os.environ)))
        return 0

    child = process.spawn(run, title="test: child")
    process.wait_readable([child.pidfd], 10.0)
    exit_ = child.reap()
    assert exit_ is not None
    assert exit_.code == 0
    return dict(json.loads(target.read_text()))


@pytest.mark.parametrize("frozen", [False, True])
def test_child_does_not_inherit_supervisor_variables(tmp_path: Path, frozen: bool) -> None:
    mine = dict(os.environ)
    if frozen:
        fork_hygiene.freeze()

    seen = child_environment(tmp_path / "environment")

    assert not NOT_PASSED_ON & seen.keys()
    assert seen[URL] == "redis://@cache:6379/0"
    assert dict(os.environ) == mine
    expected = {**mine, URL: seen[URL]}
    assert seen == {k: v for k, v in expected.items() if k not in NOT_PASSED_ON}


def test_freeze_hides_objects_from_the_collector() -> None:
    before = gc.get_freeze_count()
    fork_hygiene.freeze()
    assert gc.get_freeze_count() > before


class Node:
    """An object that refers to itself, so that only the garbage collector can remove it."""

    def __init__(self) -> None:
        self.self = self


def test_freeze_does_not_collect_garbage() -> None:
    gc.disable()  # turns off automatic collection
    try:
        garbage = weakref.ref(Node())
        fork_hygiene.freeze()
    finally:
        gc.enable()
    assert garbage() is not None


def test_freeze_makes_garbage_collection_rarer() -> None:
    fork_hygiene.freeze()
    assert gc.get_threshold()[0] == fork_hygiene.YOUNG_OBJECTS


@pytest.mark.parametrize("said", [(123, 4, 5), (0, 10, 10), (50_000, 5, 5)])
def test_freeze_keeps_collector_thresholds_of_the_user(said: tuple[int, int, int]) -> None:
    gc.set_threshold(*said)
    fork_hygiene.freeze()
    assert gc.get_threshold() == said


def test_child_is_preferred_by_the_oom_killer(tmp_path: Path) -> None:
    target = tmp_path / "adjusted"

    def run(_control: socket.socket) -> int:
        target.write_text(Path("/proc/self/oom_score_adj").read_text())
        return 0

    child = process.spawn(run, title="test: child")
    process.wait_readable([child.pidfd], 10.0)
    assert child.reap() is not None
    assert int(target.read_text()) == 500

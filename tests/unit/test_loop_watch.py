"""A real event loop has a heartbeat, and its stack is reported if it is blocked. No server."""

from __future__ import annotations

import sysconfig
import threading
from collections.abc import Iterator

import pytest

from streamqd.model import Assignment
from streamqd.scoreboard import RUNNING, WAITING, Scoreboard, WorkerSlot
from streamqd.supervisor.loop_watch import Frame, blocking_frame
from streamqd.worker import eventloop
from tests.support.waiting import wait_until

LIBRARY, PACKAGES = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
SHOP = f"{PACKAGES}/shop/c.py"
LOOP = f"""  File "{eventloop.__file__}", line 220 in _turn
  File "{LIBRARY}/threading.py", line 975 in run
"""


def stack(*frames: str) -> str:
    """Return a stack in the format of faulthandler, which starts with the innermost frame."""
    lines = [f'  File "{each.split(":")[0]}", line {each.split(":")[1]} in f' for each in frames]
    return "\n".join(["Stack (most recent call first):", *lines, LOOP])


@pytest.mark.parametrize(
    ("frames", "found"),
    [
        (["/srv/shop.py:3", "/srv/main.py:9"], Frame("/srv/shop.py", 3, "f")),
        ([f"{LIBRARY}/socket.py:7", "/srv/main.py:9"], Frame("/srv/main.py", 9, "f")),
        ([f"{PACKAGES}/requests/api.py:7", "/srv/main.py:9"], Frame("/srv/main.py", 9, "f")),
        ([f"{PACKAGES}/a/b.py:7", f"{SHOP}:9"], Frame(SHOP, 9, "f")),
        ([f"{LIBRARY}/selectors.py:468", f"{LIBRARY}/asyncio/base_events.py:1"], None),
        (["<frozen importlib._bootstrap>:241", f"{LIBRARY}/json/__init__.py:2"], None),
        ([], None),
    ],
)
def test_blocking_frame_is_the_innermost_user_frame(frames: list[str], found: Frame | None) -> None:
    """Frames of the library and of streamqd are skipped, but an installed application is named."""
    assert blocking_frame(stack(*frames)) == found


def test_blocking_frame_ignores_invalid_stacks() -> None:
    for text in ("", "Stack (most recent call first):", "Fatal Python error", '  File "', "\0" * 9):
        assert blocking_frame(text) is None


def test_blocking_frame_uses_the_last_stack() -> None:
    assert blocking_frame(stack("/srv/old.py:1") + stack("/srv/new.py:2")) == Frame(
        "/srv/new.py", 2, "f"
    )


@pytest.fixture
def slot() -> WorkerSlot:
    return Scoreboard(1).allot(Assignment("orders", 0, "bill"))


@pytest.fixture
def loop() -> Iterator[eventloop.EventLoop]:
    made = eventloop.EventLoop()
    yield made
    made.close()


def test_loop_heartbeat_runs_only_during_open_runs(
    slot: WorkerSlot, loop: eventloop.EventLoop
) -> None:
    """The watch costs nothing per message, and an idle loop sets no timer."""
    loop.publish_heartbeat(slot)
    assert slot.loop_thread != threading.get_native_id()
    slot.post_batch([b"m:1-0"])
    slot.states[0] = RUNNING
    loop.call(lambda: None)
    first = slot.loop_heartbeat_ns
    assert first
    wait_until(lambda: slot.loop_heartbeat_ns > first, what="the next beat")
    slot.states[0] = WAITING
    wait_until(lambda: slot.loop_heartbeat_ns == 0, what="the end of the beat")
    loop.call(lambda: None)
    wait_until(lambda: slot.loop_heartbeat_ns == 0, what="the end of the beat without a run")
    slot.states[0] = RUNNING
    loop.call(lambda: None)
    assert slot.loop_heartbeat_ns


def test_loop_without_a_slot_writes_no_heartbeat(
    slot: WorkerSlot, loop: eventloop.EventLoop
) -> None:
    loop.publish_heartbeat(slot)
    slot.post_batch([b"m:1-0"])
    slot.states[0] = RUNNING
    loop.call(lambda: None)
    loop.publish_heartbeat(None)
    assert slot.loop_heartbeat_ns == 0
    turned = threading.Event()
    loop.call(turned.set)
    assert turned.wait(10)
    assert slot.loop_heartbeat_ns == 0


def test_blocking_frame_is_kept_until_the_loop_resumes(slot: WorkerSlot) -> None:
    slot.note_blocker("/srv/main.py:12 in handle")
    assert slot.blocker == "/srv/main.py:12 in handle"
    slot.note_blocker("/srv/" + "é" * 300 + "/main.py:12 in handle")
    assert slot.blocker.endswith("é/main.py:12 in handle")
    slot.note_blocker("")
    assert slot.blocker == ""

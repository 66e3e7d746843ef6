"""Finished messages are acknowledged before the next run if that is cheap compared with the run."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from streamqd.message import Message
from streamqd.scoreboard import now_ns
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.worker.control_channel import ExitCode
from streamqd.worker.runs import ACK_DELAY_NS, ACK_SHARE, QUICK_RUN_NS, must_settle_first
from tests.contract.harness import Harness
from tests.support import life as lives
from tests.support.life import Life

MILLISECOND = 1_000_000
NEAR, FAR = QUICK_RUN_NS // ACK_SHARE, 50 * MILLISECOND


@pytest.mark.parametrize(
    ("ran", "waited", "settling", "due"),
    [
        (QUICK_RUN_NS, 0, 0, False),
        (QUICK_RUN_NS + 1, 0, 0, True),
        (QUICK_RUN_NS + 1, 0, NEAR, True),
        (5 * MILLISECOND, 0, MILLISECOND // 2, False),  # a settlement would take a tenth of the run
        (5 * MILLISECOND, 0, MILLISECOND // 5, True),
        (ACK_DELAY_NS, 0, FAR, False),
        (ACK_DELAY_NS + 1, 0, FAR, True),
        (0, ACK_DELAY_NS, NEAR, False),
        (0, ACK_DELAY_NS + 1, FAR, True),
    ],
)
def test_must_settle_first_depends_on_time_and_cost(
    ran: int, waited: int, settling: int, *, due: bool
):
    assert must_settle_first(ran, waited, settling) is due


def handle_batch(messages: list[Message]) -> None:
    """A batch handler that does the same as a life's `handle`."""
    for message in messages:
        lives.handle(message)


async def handle_coroutine(message: Message) -> None:
    """A coroutine that does the same as a life's `handle`."""
    lives.handle(message)


@pytest.mark.parametrize(
    "settings",
    [{}, {"handler": f"{__name__}:handle_batch", "batch": 1}],
    ids=["one by one", "in batches"],
)
def test_long_run_is_acknowledged_during_the_next_run(
    link: Connection, keys: Keys, life: Life, settings: dict[str, Any]
):
    """A long run is acknowledged early, as the next may take hours and its host may be lost."""
    harness = Harness(link, keys)
    harness.groups()
    harness.own("t1")
    for number in range(1, 5):
        harness.add(f"{number}-0")
    pending: list[set[str]] = []

    def work(message: Message) -> None:
        rows = link.execute("XPENDING", harness.stream, harness.assignment.group, "-", "+", 10)
        pending.append({row[0].decode() for row in rows})
        late = now_ns() + ACK_DELAY_NS
        while now_ns() <= late:
            pass

    worker = life.worker("t1", max_messages=4, **settings)
    assert life.run(worker, work) == ExitCode.RECYCLE
    every = [f"{number}-0" for number in range(1, 5)]
    assert pending == [{*every[at:]} for at in range(4)]


EACH: dict[str, Any] = {"ack": "each"}


@pytest.mark.parametrize(
    ("lanes", "settings"),
    [
        (1, EACH),
        (1, EACH | {"handler": f"{__name__}:handle_batch", "batch": 1}),
        (4, EACH | {"concurrency": 4, "order": "none"}),
        (4, EACH | {"concurrency": 4, "order": "none", "handler": f"{__name__}:handle_coroutine"}),
    ],
    ids=["one by one", "in batches", "in threads", "in coroutines"],
)
def test_lane_acknowledges_each_run_before_its_next(
    link: Connection, keys: Keys, life: Life, lanes: int, settings: dict[str, Any]
):
    """A lane acknowledges even a quick run before its next.

    A lost host therefore repeats only the runs of its lanes.
    """
    harness = Harness(link, keys)
    harness.groups()
    harness.own("t1")
    for number in range(1, 101):
        harness.add(f"{number}-0")
    begun: set[str] = set()
    open_: list[int] = []
    lock = threading.Lock()

    def work(message: Message) -> None:
        with lock:
            begun.add(message.id)
            rows = link.execute(
                "XPENDING", harness.stream, harness.assignment.group, "-", "+", 1000
            )
            open_.append(len(begun & {row[0].decode() for row in rows}))

    worker = life.worker("t1", max_messages=100, prefetch_bytes=1 << 30, **settings)
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert len(open_) == 100
    assert max(open_) <= lanes

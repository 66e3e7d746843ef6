"""A worker that waits for messages hears at once that it is wanted for something else."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from streamqd.scoreboard import WorkerSlot
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.supervisor.bounded_client import PubSubListener
from streamqd.worker import ExitCode, reader
from tests.contract.desk import Desk
from tests.support.life import Life
from tests.support.servers import Server
from tests.support.waiting import wait_until


@pytest.mark.parametrize("kind", [{}, {"concurrency": 4, "order": "none"}])
def test_entries_of_a_foreign_consumer_do_not_wait_for_the_doorbell(
    link: Connection,
    keys: Keys,
    life: Life,
    slot: WorkerSlot,
    kind: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(reader, "BLOCK_SECONDS", 600.0)  # far beyond the life's patience
    desk = Desk(link, keys)
    desk.groups()
    desk.own("t1")
    desk.add("1-0")
    desk.fetch(1, consumer="someone")

    def rung() -> bool:
        return any(b"cmd=xread" in line for line in link.execute("CLIENT", "LIST").splitlines())

    def want() -> None:
        wait_until(rung, what="the worker waits at its doorbell")
        slot.reclaim_requested = slot.reclaim_done + 1
        life.tell(slot.command)

    thread = threading.Thread(target=want)
    thread.start()
    runs: list[str] = []
    waiting = life.worker("t1", max_messages=1, reclaim_idle=0.0, **kind)
    assert life.run(waiting, lambda message: runs.append(message.id)) == ExitCode.RECYCLE
    thread.join()
    assert runs == ["1-0"]


@pytest.mark.parametrize("retried", [False, True])
@pytest.mark.parametrize("kind", [{}, {"concurrency": 4, "order": "none"}])
def test_what_foreign_consumers_have_read_rings_once(
    link: Connection, keys: Keys, life: Life, slot: WorkerSlot, kind: dict[str, Any], retried: bool
):
    """The bell knows what was read here: it must not ring for ever for what was read elsewhere."""
    desk = Desk(link, keys)
    desk.groups()
    desk.own("t1")
    stream = desk.retry if retried else desk.stream
    unread: list[int] = []

    def waits() -> str:
        lines = link.execute("CLIENT", "LIST").decode().splitlines()
        told = [dict(word.partition("=")[::2] for word in line.split()) for line in lines]
        return next((each["id"] for each in told if "b" in each["flags"]), "")

    def read_elsewhere() -> None:
        wait_until(waits, what="the worker waits at its doorbell")
        before = slot.counter("round_trips")
        for number in range(1, 6):
            read = ("XREADGROUP", "GROUP", "hits", "someone", "STREAMS", stream, ">")
            link.pipeline([("MULTI",), ("XADD", stream, f"{number}-0", "payload", "x"), read])
            link.execute("EXEC")
            wait_until(waits, what="it waits again")
        unread.append(slot.counter("round_trips") - before)
        link.execute("CLIENT", "UNBLOCK", waits(), "ERROR")  # as a server that becomes a replica
        wait_until(waits, what="it waits after all")
        desk.add("9-0", "payload", "x", stream=stream)

    thread = threading.Thread(target=read_elsewhere)
    thread.start()
    runs: list[str] = []
    waiting = life.worker("t1", max_messages=1, **kind)
    assert life.run(waiting, lambda message: runs.append(message.id)) == ExitCode.RECYCLE
    thread.join()
    assert runs == ["9-0"]
    assert unread[0] <= 5 + 2


def test_a_supervisor_that_is_woken_listens_on(link: Connection, server: Server) -> None:
    """What was published is no reason to connect again."""
    listener = PubSubListener(Connection(server.settings, timeout=5.0, name="test:wakes"), "wake")
    listener.listen(time.monotonic(), 5.0)
    assert not listener.drain()
    for _ in range(2):
        assert link.execute("PUBLISH", "wake", "look") == 1
        wait_until(listener.drain, what="it is heard")
    assert listener.link.opened == 1
    listener.link.close()

"""A worker that is in a long poll reacts immediately to other requests."""

from __future__ import annotations

import array
import contextlib
import fcntl
import termios
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from streamqd.config import Consumer, Daemon, Settings
from streamqd.scoreboard import Scoreboard, WorkerSlot
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.supervisor.bounded_client import PubSubListener
from streamqd.supervisor.lease_manager import LeaseManager
from streamqd.worker import ExitCode, turns
from tests.contract.harness import Harness
from tests.support.life import Life
from tests.support.servers import ProcessServer, Server
from tests.support.waiting import wait_until


@pytest.mark.parametrize("kind", [{}, {"concurrency": 4, "order": "none"}])
def test_reclaim_request_interrupts_the_long_poll(
    link: Connection,
    keys: Keys,
    life: Life,
    slot: WorkerSlot,
    kind: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(turns, "BLOCK_SECONDS", 600.0)  # longer than the timeout of this life
    harness = Harness(link, keys)
    harness.groups()
    harness.own("t1")
    harness.add("1-0")
    harness.fetch(1, consumer="someone")

    def polls() -> bool:
        return any(b"cmd=xread" in line for line in link.execute("CLIENT", "LIST").splitlines())

    def want() -> None:
        wait_until(polls, what="the worker waits in its long poll")
        slot.reclaim_requested = slot.reclaim_done + 1
        life.send_command(slot.command)

    thread = threading.Thread(target=want)
    thread.start()
    runs: list[str] = []
    waiting = life.worker("t1", max_messages=1, reclaim_idle=0.0, **kind)
    assert life.run(waiting, lambda message: runs.append(message.id)) == ExitCode.RECYCLE
    thread.join()
    assert runs == ["1-0"]


@pytest.mark.parametrize("retried", [False, True])
@pytest.mark.parametrize("kind", [{}, {"concurrency": 4, "order": "none"}])
def test_reads_of_other_clients_interrupt_the_poll_once(
    link: Connection, keys: Keys, life: Life, slot: WorkerSlot, kind: dict[str, Any], retried: bool
):
    """Reads of other clients interrupt the poll only once.

    The poll must not return each time because of entries that other consumers have already read.
    """
    harness = Harness(link, keys)
    harness.groups()
    harness.own("t1")
    stream = harness.retry if retried else harness.stream
    unread: list[int] = []

    def waits() -> str:
        lines = link.execute("CLIENT", "LIST").decode().splitlines()
        told = [dict(word.partition("=")[::2] for word in line.split()) for line in lines]
        return next((each["id"] for each in told if "b" in each["flags"]), "")

    def read_elsewhere() -> None:
        wait_until(waits, what="the worker waits in its long poll")
        before = slot.counter("round_trips")
        for number in range(1, 6):
            read = ("XREADGROUP", "GROUP", "hits", "someone", "STREAMS", stream, ">")
            link.pipeline([("MULTI",), ("XADD", stream, f"{number}-0", "payload", "x"), read])
            link.execute("EXEC")
            wait_until(waits, what="it waits again")
        unread.append(slot.counter("round_trips") - before)
        link.execute("CLIENT", "UNBLOCK", waits(), "ERROR")  # as when a server becomes a replica
        wait_until(waits, what="it waits after all")
        harness.add("9-0", "payload", "x", stream=stream)

    thread = threading.Thread(target=read_elsewhere)
    thread.start()
    runs: list[str] = []
    waiting = life.worker("t1", max_messages=1, **kind)
    assert life.run(waiting, lambda message: runs.append(message.id)) == ExitCode.RECYCLE
    thread.join()
    assert runs == ["9-0"]
    assert unread[0] <= 5 + 2


def test_supervisor_keeps_its_subscription_after_a_wake_up(
    link: Connection, server: Server
) -> None:
    """The supervisor keeps its subscription. A published wake-up is no reason to reconnect."""
    listener = PubSubListener(connect(server.settings, timeout=5.0, name="test:wakes"), "wake")
    listener.listen(time.monotonic(), 5.0)
    assert not listener.drain()
    for _ in range(2):
        assert link.execute("PUBLISH", "wake", "look") == 1
        wait_until(listener.drain, what="it is heard")
    assert listener.link.node.opened == 1
    listener.link.close()


def test_wake_up_with_the_subscription_reply_is_noticed(
    new_server: Callable[..., ProcessServer],
) -> None:
    server = new_server()
    with contextlib.closing(connect(server.settings, timeout=5.0, name="test:other")) as other:
        other.open()
        # If the server reads the other connection first, the wake-up reaches no subscriber.
        tries = (publish_after_subscribing(server, other) for _ in range(20))
        assert next(heard for got, heard in tries if got) is True


def publish_after_subscribing(server: ProcessServer, other: Connection) -> tuple[int, bool]:
    """Publish a wake-up right after a subscription.

    Return its number of receivers, and True if it was heard.
    """
    listener = PubSubListener(connect(server.settings, timeout=5.0, name="test:wakes"), "wake")
    listener.link.open()

    def unread() -> int:
        """Return how many bytes of the listener the server has not read."""
        size = array.array("i", [0])
        fcntl.ioctl(listener.link.node.socket(), termios.TIOCOUTQ, size)
        return size[0]

    heard: list[bool] = []
    subscribing = threading.Thread(
        target=lambda: heard.append(listener.listen(time.monotonic(), 5.0) or listener.drain())
    )
    server.pause()
    subscribing.start()
    wait_until(unread, what="the subscription is sent")
    other.node.post([("PUBLISH", "wake", "look")])
    server.resume()
    subscribing.join()
    [got] = other.node.collect(1)
    listener.link.close()
    return got, heard[0]


def test_instance_checks_the_fleet_after_subscribing(server: Server, link: Connection) -> None:
    """An instance checks the fleet after it subscribes, because it may have missed wake-ups."""
    settings = Settings(
        redis=server.settings,
        daemon=Daemon(instance="west-1", lease_ttl=60.0),
        consumers=(Consumer(topic="access", group="hits", handler="work:go"),),
    )
    leases = LeaseManager(settings, Scoreboard(1), "lock")
    heartbeats: list[float] = []

    def listens() -> bool:
        leases.tick(time.monotonic(), {}, ())
        heartbeats.append(leases.membership.heartbeat_at)
        return leases.wakes.link.connected

    wait_until(listens, what="it listens")
    assert heartbeats[-1] < heartbeats[-2], "it looks before the regular heartbeat"
    leases.close()

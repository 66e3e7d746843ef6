"""One time limit covers a whole exchange: names, sentinels, the map, connecting and the replies.

The supervisor renews all leases in such exchanges, so an exchange that takes longer delays all the
others.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamqd import config
from streamqd.config import Consumer, Daemon, Settings
from streamqd.errors import RedisUnavailableError
from streamqd.model import Assignment
from streamqd.scoreboard import Scoreboard
from streamqd.store import members, transport
from streamqd.store.client import Connection, connect
from streamqd.supervisor import resolver as names_module
from streamqd.supervisor.lease_manager import LeaseManager
from streamqd.supervisor.partition import AssignmentState, Phase
from streamqd.supervisor.resolver import Resolver
from tests.support.cluster import Cluster, Node
from tests.support.sentinels import NAME, Sentinels
from tests.support.servers import ProcessServer
from tests.support.waiting import seconds_unscheduled, wait_until

LIMIT = 0.4
PATIENCE = 5.0  # seconds; the timeout of the connections themselves, without the limit


@contextmanager
def silent_port() -> Iterator[int]:
    """Return a port that accepts connections and never answers them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@contextmanager
def hanging_address() -> Iterator[tuple[str, int]]:
    """Return an address that accepts no connections, because its queue is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()[:2]
        for _ in range(8):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(address)
        yield address


def assert_in_time(link: Connection) -> None:
    """Check that a missing answer is detected within the limit."""
    for _ in range(3):  # the first attempt connects, finds the node, or detects that there is none
        started, kept = time.monotonic(), seconds_unscheduled()
        with link.limit_time(LIMIT), pytest.raises(RedisUnavailableError):
            link.pipeline([("SET", f"k{number}", "1") for number in range(30)])
        took = time.monotonic() - started - (seconds_unscheduled() - kept)
        assert took < LIMIT + 0.3


@contextmanager
def fill_backlog(server: ProcessServer) -> Iterator[None]:
    """Fill the backlog of the Unix socket while the server is stopped.

    The caller must resume the server.
    """
    server.restart(tcp_backlog="2")
    server.pause()
    with ExitStack() as stack:
        stack.callback(server.resume)
        refused = 0
        while not refused:
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            refused = one.connect_ex(str(server.socket_path))
        assert refused == errno.EAGAIN
        yield


def test_full_socket_backlog_raises_within_the_timeout(
    new_server: Callable[..., ProcessServer],
) -> None:
    server = new_server()
    with fill_backlog(server):
        link = connect(server.settings, timeout=PATIENCE, name="test")
        assert_in_time(link)
        with (
            link.limit_time(LIMIT),
            pytest.raises(RedisUnavailableError, match="its backlog is full"),
        ):
            link.execute("PING")
    assert link.execute("PING") == b"PONG"
    link.close()


def test_freed_socket_backlog_accepts_the_connection(
    new_server: Callable[..., ProcessServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = new_server()
    tries: list[float] = []

    def resume(seconds: float, pause: Callable[[float], None] = time.sleep) -> None:
        tries.append(seconds)
        server.resume()
        pause(seconds)

    with fill_backlog(server):
        monkeypatch.setattr(time, "sleep", resume)
        link = connect(server.settings, timeout=PATIENCE, name="test")
        assert link.execute("PING") == b"PONG"
    assert tries
    link.close()


def test_hung_server_raises_within_the_timeout(new_server: Callable[..., ProcessServer]) -> None:
    server = new_server()
    link = connect(server.settings, timeout=PATIENCE, name="test")
    link.execute("PING")
    server.pause()
    assert_in_time(link)
    server.resume()
    with link.limit_time(PATIENCE):
        assert link.execute("PING") == b"PONG"
    with (
        link.limit_time(0.0),
        pytest.raises(RedisUnavailableError, match="no time was left") as caught,
    ):
        link.execute("PING")
    assert not caught.value.sent
    assert link.execute("PING") == b"PONG", "a limit is valid only in its block"
    link.close()


@pytest.mark.fault("F36")
def test_hung_address_leaves_time_for_the_next(
    new_server: Callable[..., ProcessServer],
) -> None:
    """If a name has several addresses, a hung one leaves enough time for the next."""
    port = new_server(tcp=True).port
    with hanging_address() as first, hanging_address() as second:
        found = [(socket.AF_INET, each) for each in (first, second, ("127.0.0.1", port))]
        settings = config.Redis(url="redis://several.test")
        link = connect(settings, timeout=2.0, name="test", lookup=lambda *_: list(found))
        assert link.execute("PING") == b"PONG"
        link.close()
        found.pop()
        link = connect(settings, timeout=PATIENCE, name="test", lookup=lambda *_: list(found))
        assert_in_time(link)


def test_hung_sentinels_and_master_raise_within_the_timeout(binary: Path) -> None:
    """The connection fails within its timeout.

    Two sentinels are silent, and the third names a master that is silent, too.
    """
    with (
        Sentinels(binary, replicas=0, sentinels=1) as made,
        silent_port() as one,
        silent_port() as two,
    ):
        hosts = f"127.0.0.1:{one},127.0.0.1:{two},127.0.0.1:{made.sentinels[0].port}"
        settings = replace(config.Redis(), url=f"redis+sentinel://{hosts}/{NAME}")
        link = connect(settings, timeout=PATIENCE, name="test")
        with link.limit_time(PATIENCE):
            assert link.execute("PING") == b"PONG"
        link.close()
        # A silent sentinel leaves enough time for the next one.
        fresh = connect(replace(settings, connect_timeout=60.0), timeout=60.0, name="test")
        with fresh.limit_time(2.0):
            assert fresh.execute("PING") == b"PONG"
        fresh.close()
        made.master.pause()
        try:
            assert_in_time(link)
            link.close()
            assert_in_time(connect(settings, timeout=PATIENCE, name="test"))
        finally:
            made.master.resume()


@pytest.fixture(scope="module")
def cluster(binary: Path) -> Iterator[Cluster]:
    """A cluster of masters without replicas, enough for two to hang while the others continue."""
    with Cluster(binary, masters=5, replicas=0, cluster_require_full_coverage="no") as made:
        made.wait_ok()
        yield made


def test_hung_cluster_raises_within_the_timeout(cluster: Cluster) -> None:
    settings = replace(config.Redis(), url=cluster.url)
    known, new = (connect(settings, timeout=PATIENCE, name="test") for _ in range(2))
    known.pipeline([("SET", f"k{number}", "1") for number in range(30)])
    for node in cluster.nodes:
        node.pause()
    try:
        assert_in_time(known)
        assert_in_time(new)
    finally:
        for node in cluster.nodes:
            node.resume()
    known.close()
    cluster.wait_ok()


# --- the supervisor -------------------------------------------------------------------------------


def make_settings(url: str) -> Settings:
    """Return the settings of an instance that rarely sends heartbeats."""
    return Settings(
        redis=replace(config.Redis(), url=url),
        daemon=Daemon(instance="west-1", lease_ttl=60.0),
        consumers=(Consumer(topic="access", group="hits", handler="work:go"),),
    )


def test_heartbeat_waits_only_for_its_own_node(cluster: Cluster) -> None:
    """A heartbeat waits only for its own node.

    Another node that fails is no longer needed. After that node's pause, the heartbeat's node still
    gets its own pause between two attempts.
    """
    ours = make_settings(cluster.url)
    board = Scoreboard(2)
    exchange = LeaseManager(ours, board, "lock")
    heartbeat = members.heartbeat(exchange.keys, ours.daemon.fleet, "west-1", "n", {}, 60.0).key
    home = cluster.master_for_key(heartbeat)
    lost, well, *_ = (node for node in cluster.masters if node is not home)

    def holding_at(node: Node) -> AssignmentState:
        assignment = next(
            Assignment("access", number, "hits")
            for number in range(100)
            if cluster.master_for_key(exchange.keys.fence("access", number, "hits")) is node
        )
        made = AssignmentState(assignment, ours.consumers[0], board.allot(assignment))
        made.acquire(0)
        return made

    def tick(*holdings: AssignmentState) -> float:
        assignments = {each.assignment: each for each in holdings}
        exchange.tick(time.monotonic(), assignments, list(assignments))
        return exchange.next_at() - time.monotonic()

    held, far = holding_at(well), holding_at(lost)
    try:
        wait_until(
            lambda: tick(held) > 0 and held.phase is Phase.HELD and held.groups_ready,
            what="no call is left",
        )
        lost.pause()
        held.renew_at = 0.0
        tick(held, far)  # only one of the nodes answers
        assert not exchange.ok
        wait_until(lambda: tick(held) > 0, what="the other units have no call")
        home.pause()
        exchange.membership.heartbeat_at = 0.0
        asked = board.counter("round_trip_errors")
        for _ in range(2):
            held.renew_at = 0.0
            tick(held)
        assert board.counter("round_trip_errors") - asked == 1, "no attempt during the pause"
        assert held.renew_at > time.monotonic(), "the others are served"
        assert exchange.next_at() > time.monotonic()
    finally:
        lost.resume()
        home.resume()
        exchange.close()


@pytest.fixture
def name_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A name server for the children, which answers nothing until the file exists.

    The machine's own name servers may be slow or missing. No child may outlive the test.
    """
    answers = tmp_path / "answers"

    def resolve(host: str, port: int, _seconds: float) -> list[tuple[int, tuple[Any, ...]]]:
        wait_until(answers.exists, timeout=60.0)
        if host.endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return transport.resolve(host, port, 60.0)

    monkeypatch.setattr(names_module, "resolve", resolve)
    yield answers
    answers.touch()


def test_names_are_resolved_in_a_child_process(name_server: Path) -> None:
    names = Resolver()
    assert names.lookup("127.0.0.1", 6379, 1.0) == [(socket.AF_INET, ("127.0.0.1", 6379))]
    assert not names.pids, "an address needs no resolver"
    with pytest.raises(OSError, match="not resolved yet"):
        names.lookup("localhost", 1, 0.0)
    (child,) = names.pids
    name_server.touch()
    found = names.lookup("localhost", 1, 10.0)
    assert (socket.AF_INET, ("127.0.0.1", 1)) in found, "the next try uses the result of the first"
    assert child not in names.pids
    assert (socket.AF_INET, ("127.0.0.1", 6379)) in names.lookup("localhost", 6379, 10.0)
    with pytest.raises(socket.gaierror, match="not known"):
        names.lookup("no-such-host.invalid", 6379, 10.0)
    assert not names.pids
    assert threading.active_count() == 1


def test_unclaimed_name_lookup_is_dropped(
    name_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names_module, "KEPT_SECONDS", 0.0)
    names = Resolver()
    with pytest.raises(OSError, match="not resolved yet"):
        names.lookup("localhost", 1, 0.0)
    (child,) = names.pids
    name_server.touch()
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    names.lookup("127.0.0.1", 6379, 1.0)
    assert not names.pids, "neither a zombie nor an address of long ago"

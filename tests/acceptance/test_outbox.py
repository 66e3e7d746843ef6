"""An outbox sends each committed row once and in order, despite kills and stops."""

from __future__ import annotations

import contextlib
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamqd.config import Redis
from streamqd.store.client import connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support import databases, quick, servers
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.outboxes import NAME, TOPIC, OutboxSite, Writers, exit_after_commit, sender
from tests.support.servers import ProcessServer
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.promise, pytest.mark.timeout(400)]

WRITERS = 8
RELAYS = 3
NewSite = Callable[..., OutboxSite]


@pytest.fixture(params=quick.slow_after(1, ("sqlite", "postgresql", "mysql")))
def database(request: pytest.FixtureRequest) -> Iterator[databases.DatabaseServer]:
    """A database server for this test alone, so that the test may restart it."""
    started = servers.require(databases.start, request.param)
    yield started
    started.close()


@pytest.fixture
def new_site(
    fresh_server: ProcessServer, database: databases.DatabaseServer, tmp_path: Path
) -> Iterator[NewSite]:
    made: list[OutboxSite] = []
    link = connect(fresh_server.settings, timeout=60.0, name="test:outbox")

    def new(**settings: object) -> OutboxSite:
        store = Store(link, Keys())
        made.append(OutboxSite(tmp_path, fresh_server.url, store, database, **settings))
        return made[-1]

    yield new
    for each in made:
        each.close()
    link.close()


@contextlib.contextmanager
def pause_server(server: ProcessServer, seconds: float) -> Iterator[None]:
    """Stop the server for the given time, and run the block in the meantime."""
    server.pause()
    until = time.monotonic() + seconds
    try:
        yield
        time.sleep(max(0.0, until - time.monotonic()))
    finally:
        server.resume()


@pytest.mark.parametrize(
    ("transactions", "seconds", "kill_seconds"),
    [
        pytest.param(100, 1.5, 0.3, id="quick"),
        pytest.param(1250, 30.0, 1.0, id="full", marks=pytest.mark.slow),
    ],
)
def test_random_faults_send_each_committed_row_once(
    new_site: NewSite,
    fresh_server: ProcessServer,
    database: databases.DatabaseServer,
    chance: random.Random,
    transactions: int,
    seconds: float,
    kill_seconds: float,
) -> None:
    site = new_site(batch=50)
    for _ in range(RELAYS):
        site.start()
    site.wait_holder()
    writers = Writers(site, WRITERS, transactions, pause=0.02)
    planned = {0.15: "stop", 0.3: "redis", 0.5: "grow", 0.65: "database", 0.8: "stop"}
    while writers.share < 1.0 or planned:
        victim = chance.choice(site.processes)
        site.kill(victim)
        site.start()
        time.sleep(kill_seconds)
        due = min(planned, default=2.0)
        if writers.share < due:
            continue
        match planned.pop(due):
            case "redis":
                with pause_server(fresh_server, seconds):
                    pass
            case "database":
                _restart(database)
            case "grow":
                subprocess.run(
                    site.command("topic", "grow", TOPIC, "4", "--yes"), check=True, timeout=60
                )
            case "stop":
                _stop_past_its_lease(site)
    writers.join()
    for each in [*site.processes]:
        site.kill(each)
    site.burst()
    assert site.count_rows() == 0
    sent = site.check()
    assert 0.7 < sent / (WRITERS * transactions) < 0.9
    assert "Traceback" not in site.logs()


def _restart(database: databases.DatabaseServer) -> None:
    if isinstance(database, databases.SQLite):
        return  # a file has no server that could be restarted
    database.kill(signal.SIGTERM)  # type: ignore[attr-defined]
    database.start()  # type: ignore[attr-defined]


def _stop_past_its_lease(site: OutboxSite) -> None:
    """Stop the relay until another one holds the outbox and sends rows, and then resume it."""
    first = site.wait_holder()
    first.send_signal(signal.SIGSTOP)
    wait_until(lambda: site.holder() not in (None, first), timeout=20)
    first.send_signal(signal.SIGCONT)


@pytest.mark.fault("F39")
def test_relay_paused_past_its_lease_sends_nothing_twice(new_site: NewSite) -> None:
    site = new_site(batch=10)
    site.start(), site.start()
    site.wait_holder()
    for _ in range(3):
        writers = Writers(site, 2, 60, pause=0.0)
        _stop_past_its_lease(site)
        writers.join()
    site.wait_empty(30)
    for each in [*site.processes]:
        each.send_signal(signal.SIGTERM)
        assert each.wait(20) == 0
        site.processes.remove(each)
    site.burst()
    # The numbers of the second and third round are the same as in the first.
    assert sorted(site.ledger()) == sorted(
        {each[1:] for part in site.entries().values() for each in part}
    )


def test_process_killed_after_its_commit_loses_no_row(new_site: NewSite) -> None:
    site = new_site()
    if site.database.dialect == "sqlite":
        pytest.skip("a fork with threads of the suite; SQLite has no server to outlive it")
    exit_after_commit(site, 5)
    site.burst()
    assert site.check() == 5


def test_burst_with_blocked_rows_names_the_cause(new_site: NewSite) -> None:
    site = new_site(max_backlog=2, poll="100ms", partitions=1)
    with contextlib.closing(site.database.connect(site.url)) as application:
        for number in range(3):
            sender.send(application, TOPIC, b"0:%d" % number, key="k")
        application.commit()
    command = site.command("outbox", "run", "--burst")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "Error: rows of outbox shop wait: orders/0: max_backlog is reached (2 messages wait)"
    )
    assert site.count_rows() == 1


def test_outbox_status_counts_rows_without_redis(
    new_site: NewSite, fresh_server: ProcessServer
) -> None:
    site = new_site()
    with contextlib.closing(site.database.connect(site.url)) as application:
        sender.send(application, TOPIC, b"0:0", key="k")
        application.commit()
    fresh_server.kill()
    command = site.command("outbox", "status")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    fresh_server.restart()
    assert done.returncode == 4
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert (lines["rows"], lines["dead"], lines["relay"]) == ("1", "0", "unknown")
    assert done.stderr.startswith("Error: cannot connect to unix://")


def test_burst_without_a_table_names_the_cause(new_site: NewSite) -> None:
    site = new_site(table="absent")
    command = site.command("outbox", "run", "--burst")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4
    assert "; create it with `streamqd outbox create`" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_relay_sends_each_row_once_to_a_cluster(
    binary: Path,
    new_database_server: Callable[[str], databases.DatabaseServer],
    tmp_path: Path,
    chance: random.Random,
) -> None:
    """A relay sends each row once, although relays are killed and partitions are on all nodes.

    A topic on a cluster cannot grow.
    """
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(binary, replicas=0))
        link = stack.enter_context(
            contextlib.closing(connect(Redis(url=cluster.url), timeout=60.0, name="test:outbox"))
        )
        database = new_database_server("sqlite")
        store = Store(link, Keys())
        site = OutboxSite(tmp_path, cluster.url, store, database, partitions=6, batch=20)
        stack.callback(site.close)
        streams = [store.keys.stream(TOPIC, number) for number in range(6)]
        assert len({cluster.master_for_key(each) for each in streams}) == 3
        for _ in range(2):
            site.start()
        writers = Writers(site, 4, 100, pause=0.02)
        while writers.share < 1.0:
            site.wait_holder()
            site.kill(chance.choice(site.processes))
            site.start()
        writers.join()
        site.wait_empty(60)
        assert 0.7 < site.check() / 400 < 0.9
        assert "Traceback" not in site.logs()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_commit_wakes_the_relay(new_site: NewSite) -> None:
    """A commit wakes the relay, which otherwise polls only every 60 s. The test prints the latency.

    Only PostgreSQL sends notifications.
    """
    site = new_site(poll="60s", lease_ttl="60s")
    site.start()
    site.wait_holder()
    stream, latencies = site.store.keys.stream(TOPIC, 0), []
    with contextlib.closing(site.database.connect(site.url)) as application:
        for number in range(200):
            sender.send(application, TOPIC, b"0:%d" % number, partition=0)
            began = time.monotonic()
            application.commit()
            while site.store.execute("XLEN", stream) <= number:
                assert time.monotonic() < began + 20
            latencies.append(time.monotonic() - began)
    p50, p99 = statistics.median(latencies), statistics.quantiles(latencies, n=100)[98]
    print(f"from COMMIT to the entry: p50 {p50 * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms")


def test_daemon_relays_rows_and_drains(
    new_daemon: Callable[..., Daemon],
    new_database_server: Callable[[str], databases.DatabaseServer],
) -> None:
    """A broken relay harms no partition, a reload replaces it, and a drain releases its outbox."""
    daemon = new_daemon()
    server = new_database_server("sqlite")
    url = server.new()
    daemon.write_config(outboxes=[{"name": NAME, "database": f"{url}.missing", "poll": "100ms"}])
    with daemon:
        daemon.wait_event("outbox.database_lost")
        daemon.send(["ok", "ok", "ok"])
        daemon.wait_settled()
        done = subprocess.run(
            [sys.executable, "-m", "streamqd", "outbox", "create", "--database", url],
            check=False,
        )
        assert done.returncode == 0
        daemon.write_config(outboxes=[{"name": NAME, "database": url, "poll": "100ms"}])
        daemon.signal(signal.SIGHUP)
        daemon.wait_event("outbox.stopped")
        daemon.wait_event("outbox.acquired")
        with contextlib.closing(server.connect(url)) as application:
            sender.send(application, TOPIC, b"1:1")
            application.commit()
        stream = daemon.keys.stream(TOPIC, 0)
        wait_until(lambda: daemon.link.execute("XLEN", stream) >= 4, timeout=20)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
    assert daemon.link.execute("EXISTS", daemon.keys.outbox_lease(NAME)) == 0

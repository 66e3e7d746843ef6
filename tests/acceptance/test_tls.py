"""The daemon works over TLS with client certificates, even if they are renewed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import pytest

from tests.support import tls
from tests.support.daemon import GROUP, TOPIC, Daemon, daemons
from tests.support.ledger import Audit
from tests.support.servers import ProcessServer, require

Make = Callable[..., Daemon]
FILES = {"ca_file": "ca.pem", "cert_file": "server.pem", "key_file": "server.key"}
PARTITIONS = 3
RECYCLED = 5  # messages per worker
STORM = (signal.SIGUSR1, signal.SIGCHLD, signal.SIGCONT)


def issue_certificates(folder: Path) -> Path:
    """Create a certificate authority and its certificates in a new directory."""
    folder.mkdir()
    return tls.certificates(folder)


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """The server's certificates. Skips the test if openssl is missing."""
    return require(issue_certificates, tmp_path / "first")


@pytest.fixture
def tls_server(authority: Path) -> Iterator[ProcessServer]:
    """A server that accepts only TLS. Skips the test if no server supports it."""
    made = require(tls.start, authority)
    yield made
    made.close()


@pytest.fixture
def own_certificates(authority: Path, tmp_path: Path) -> Path:
    """Copies of the certificates for the daemon alone."""
    folder = tmp_path / "own"
    folder.mkdir()
    replace_certificates(authority, folder)
    return folder


def replace_certificates(authority: Path, own: Path) -> None:
    """Replace the daemon's certificates."""
    for name in FILES.values():
        shutil.copy(authority / name, own)


def certificate_settings(authority: Path) -> list[str]:
    """Return the settings that make a running server use other certificates."""
    options = tls.options(authority, 0)
    return [
        word
        for name, value in options.items()
        if name != "tls_port"
        for word in (name.replace("_", "-"), value)
    ]


@pytest.fixture
def make(
    tls_server: ProcessServer, own_certificates: Path, tmp_path: Path
) -> Iterator[Callable[..., Daemon]]:
    """Configure a daemon with its own certificates: `make(max_messages=5)`."""
    folder = tmp_path / "work"
    folder.mkdir()
    with daemons(folder, f"rediss://127.0.0.1:{tls_server.port}") as new_daemon:
        yield lambda **consumer: new_daemon(
            partitions=PARTITIONS,
            redis={option: str(own_certificates / name) for option, name in FILES.items()},
            daemon={"lease_ttl": "3s"},
            consumer=consumer,
        )


def connections(daemon: Daemon, name: str) -> set[str]:
    """Return the server's IDs of all connections whose name starts with `name`."""
    lines = daemon.link.execute("CLIENT", "LIST").decode().splitlines()
    return {line.split()[0] for line in lines if f" name=streamqd:{name}" in line}


@pytest.mark.fault("F33", "F36")
def test_tls_survives_signals_forks_and_a_killed_worker(make: Make) -> None:
    """The daemon works although its workers are replaced continuously.

    Each fork copies the TLS session of the supervisor.
    """
    with make(max_messages=RECYCLED) as daemon:
        session = connections(daemon, "supervisor")
        # The last worker of each partition handles only one message, so it is not replaced.
        daemon.send(["ok"] * (PARTITIONS * (4 * RECYCLED + 1)))
        for number in cycle(STORM):
            daemon.signal(number)
            if not daemon.unsettled():
                break
        os.kill(daemon.wait_for(lambda: daemon.pids().get(0), what="a worker"), signal.SIGKILL)
        daemon.wait_event("worker.crashed")
        daemon.send(["ok"] * 12)
        daemon.wait_settled()

        assert len(session) == 1
        assert connections(daemon, "supervisor") == session
        assert daemon.events("redis.lost") == []
        assert len(daemon.events("worker.crashed")) == 1
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.stop() == 0


@pytest.mark.fault("F36")
def test_reload_connects_workers_with_new_certificates(
    make: Make, own_certificates: Path, tmp_path: Path
) -> None:
    """After a reload, workers connect with the new certificates.

    The server and the files change before the reload, and until then, open sessions keep working.
    """
    with make() as daemon:
        daemon.wait_for(
            lambda: len(connections(daemon, TOPIC)) == PARTITIONS, what="every worker is connected"
        )
        session, workers = connections(daemon, "supervisor"), connections(daemon, TOPIC)
        other = issue_certificates(tmp_path / "second")
        daemon.link.execute("CONFIG", "SET", *certificate_settings(other))
        replace_certificates(other, own_certificates)
        daemon.send(["ok"] * 6)
        daemon.wait_settled()
        assert connections(daemon, TOPIC) == workers
        mark = daemon.mark()
        daemon.signal(signal.SIGHUP)
        daemon.wait_event("reload.finished", after=mark, timeout=30.0)
        daemon.wait_for(
            lambda: connections(daemon, TOPIC).isdisjoint(workers), what="every worker is another"
        )
        daemon.send(["ok"] * 30)
        daemon.wait_settled()

        assert len(workers) == len(connections(daemon, TOPIC)) == PARTITIONS
        assert connections(daemon, "supervisor") == session
        for name in ("redis.lost", "worker.crashed", "lease.lost"):
            assert daemon.events(name, mark) == []
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.stop() == 0

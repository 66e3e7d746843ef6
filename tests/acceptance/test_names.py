"""A daemon that reaches Redis by a host name works even if the name server does not answer."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemon import GROUP, Daemon
from tests.support.servers import ProcessServer

NAME = "redis.streamqd.test"
NAME_SERVER = ("127.0.0.77", 53)
TRY_SECONDS = 5  # the operating system's timeout for an answer of the name server


@pytest.fixture
def name_server() -> Iterator[socket.socket]:
    """A name server that receives queries but never answers them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        try:
            made.bind(NAME_SERVER)
        except OSError as error:
            pytest.skip(f"no name server can be had here: {error}")
        yield made


@pytest.fixture
def hosts(tmp_path: Path, name_server: socket.socket) -> Path:
    """The daemon's own /etc/hosts. Queries for other names go to the silent name server."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("no mount namespaces here")
    (tmp_path / "resolv.conf").write_text(
        f"nameserver {NAME_SERVER[0]}\noptions timeout:{TRY_SECONDS} attempts:1\n"
    )
    path = tmp_path / "hosts"
    path.write_text(f"127.0.0.1 {NAME}\n")
    return path


@pytest.mark.fault("F36")
def test_silent_name_server_delays_nothing_else(
    new_server: Callable[..., ProcessServer], hosts: Path, tmp_path: Path
) -> None:
    server = new_server(tcp=True)
    daemon = Daemon(tmp_path, server.tcp_url)
    daemon.environment = {
        "STREAMQ_REDIS__URL": f"redis://{NAME}:{server.port}",
        "STREAMQ_REDIS__ALLOW_INSECURE": "true",
    }
    mounts = 'mount --bind "$1" /etc/hosts && mount --bind "$2" /etc/resolv.conf && shift 2'
    files = [str(hosts), str(tmp_path / "resolv.conf")]
    daemon.within = ["unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "host", *files]
    try:
        with daemon:
            daemon.send(["ok"] * 3)
            daemon.wait_settled()
            mark = daemon.mark()
            hosts.write_text("")
            for kind in ("NORMAL", "PUBSUB"):  # without wake-ups, the daemon checks the fleet
                daemon.link.execute("CLIENT", "KILL", "TYPE", kind, "SKIPME", "YES")
            # A role that waited for an answer would log this only after the resolver's timeout.
            lost = daemon.wait_event("redis.lost", after=mark, timeout=TRY_SECONDS - 1)
            assert "not resolved" in lost["error"]
            daemon.signal(signal.SIGUSR1)
            daemon.wait_event("signal.received", after=mark, timeout=TRY_SECONDS - 1)
            hosts.write_text(f"127.0.0.1 {NAME}\n")
            daemon.send(["ok"] * 3)
            daemon.wait_settled()
            assert daemon.events("lease.lost") == []
            assert daemon.ledger.audit(GROUP).lost == []
            assert daemon.stop() == 0
    finally:
        daemon.close()

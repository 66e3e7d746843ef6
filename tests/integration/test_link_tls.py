"""A connection over TLS trusts the right certificates, and its session survives a fork."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streamqd import config
from streamqd.errors import RedisUnavailableError
from streamqd.store.client import Connection, connect
from tests.support import tls
from tests.support.servers import ProcessServer, require

Open = Callable[[config.Redis], Connection]
CHAIN = ("server.pem", "ca.pem")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a certificate authority, and its signed certificate for 127.0.0.1."""
    return require(tls.certificates, tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(certificates: Path) -> Iterator[ProcessServer]:
    """A server that uses TLS on a port."""
    made = require(tls.start, certificates)
    yield made
    made.close()


@pytest.fixture
def settings(server: ProcessServer, certificates: Path) -> config.Redis:
    """Valid settings, with the client certificate that the server requires."""
    return config.Redis(
        url=f"rediss://127.0.0.1:{server.port}",
        ca_file=certificates / "ca.pem",
        cert_file=certificates / "server.pem",
        key_file=certificates / "server.key",
    )


@pytest.fixture
def open_link() -> Iterator[Open]:
    """A function that makes connections. They are closed after the test."""
    made: list[Connection] = []

    def make(settings: config.Redis) -> Connection:
        made.append(connect(settings, timeout=5.0, name="test"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_tls_transfers_large_values(settings: config.Redis, open_link: Open) -> None:
    link = open_link(settings)
    large = os.urandom(8 << 20)
    link.execute("SET", "large", large)
    assert link.execute("GET", "large") == large
    assert link.node.opened == 1


def test_unknown_authority_is_refused(
    settings: config.Redis, open_link: Open, certificates: Path
) -> None:
    for ca_file in (certificates / "other.pem", None):
        with pytest.raises(RedisUnavailableError, match="CERTIFICATE_VERIFY_FAILED") as caught:
            open_link(replace(settings, ca_file=ca_file)).execute("PING")
        assert not caught.value.sent


@pytest.mark.fault("F36")
def test_replaced_certificates_are_read_with_the_next_connection(
    settings: config.Redis, open_link: Open, certificates: Path, tmp_path: Path
) -> None:
    """The next connection reads replaced certificates.

    A reload replaces the workers and their connections, so no restart is needed.
    """
    names = {"ca_file": "ca.pem", "cert_file": "server.pem", "key_file": "server.key"}
    for name in names.values():
        shutil.copy(certificates / name, tmp_path)
    own = {option: tmp_path / name for option, name in names.items()}
    link = open_link(replace(settings, **own))
    assert link.execute("PING") == b"PONG"

    shutil.copy(certificates / "other.pem", tmp_path / "ca.pem")
    assert link.execute("PING") == b"PONG"
    link.close()
    with pytest.raises(RedisUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
        link.execute("PING")
    shutil.copy(certificates / "ca.pem", tmp_path / "ca.pem")
    assert link.execute("PING") == b"PONG"

    # A certificate that does not match its key is refused with an error.
    shutil.copy(certificates / "other.key", tmp_path / "server.key")
    link.close()
    with pytest.raises(RedisUnavailableError, match="KEY_VALUES_MISMATCH"):
        link.execute("PING")


@pytest.mark.fault("F36")
def test_tls_refuses_an_expired_certificate_until_replaced(
    settings: config.Redis, open_link: Open, certificates: Path, tmp_path: Path
) -> None:
    """An expired certificate is refused until it is replaced.

    First the client's expires, then the server's. Connections that are open stay open.
    """
    old, own = tls.make_expired(certificates), tmp_path / "own.pem"
    shutil.copy(old, own)
    link, open_one = open_link(replace(settings, cert_file=own)), open_link(settings)
    with pytest.raises(RedisUnavailableError) as caught:
        link.execute("PING")
    assert not caught.value.sent
    shutil.copy(certificates / "server.pem", own)
    assert link.execute("PING") == b"PONG"

    open_one.execute("CONFIG", "SET", "tls-cert-file", str(old))
    try:
        with pytest.raises(RedisUnavailableError, match="certificate has expired"):
            open_link(settings).execute("PING")
        assert link.execute("PING") == b"PONG"
    finally:
        open_one.execute("CONFIG", "SET", "tls-cert-file", str(certificates / "server.pem"))
    assert open_link(settings).execute("PING") == b"PONG"


def test_tls_refuses_a_certificate_for_another_name(
    settings: config.Redis, open_link: Open
) -> None:
    url = settings.url.replace("127.0.0.1", "localhost")
    with pytest.raises(RedisUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
        open_link(replace(settings, url=url)).execute("PING")


def test_missing_client_certificate_is_refused(settings: config.Redis, open_link: Open) -> None:
    link = open_link(replace(settings, cert_file=None, key_file=None))
    with pytest.raises(RedisUnavailableError) as caught:
        link.execute("PING")
    assert not caught.value.sent


def test_tls_replaces_a_closed_idle_session(settings: config.Redis, open_link: Open) -> None:
    idle, other = open_link(settings), open_link(settings)
    other.execute("CLIENT", "KILL", "ID", idle.execute("CLIENT", "ID"))
    assert idle.execute("ECHO", "again") == b"again"
    assert idle.node.opened == 2


def test_paused_server_leaves_the_outcome_unknown(
    settings: config.Redis, server: ProcessServer, open_link: Open
) -> None:
    link = open_link(settings)
    link.open()
    server.pause()
    try:
        with pytest.raises(RedisUnavailableError) as caught, link.limit_time(2.0):
            link.execute("SET", "large", b"x" * (16 << 20))
        assert caught.value.sent
    finally:
        server.resume()
    assert link.execute("ECHO", "right") == b"right"


@pytest.mark.fault("F33")
def test_detached_child_does_not_close_the_tls_session(
    settings: config.Redis, open_link: Open
) -> None:
    link = open_link(settings)
    number = link.execute("CLIENT", "ID")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            link.detach()
            gc.collect()
            code = 0 if link.execute("CLIENT", "ID") != number else 2
            link.close()
            gc.collect()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert link.execute("CLIENT", "ID") == number
    assert link.node.opened == 1

"""A connection finds and checks the master that the sentinels name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streamqd import config, inspection
from streamqd.errors import RedisUnavailableError
from streamqd.store.client import Connection, connect
from tests.support import tls
from tests.support.sentinels import NAME, Sentinels
from tests.support.servers import find_binary, require
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def sentinels(binary: Path) -> Iterator[Sentinels]:
    """A master, a replica, and two sentinels with a separate password."""
    with Sentinels(binary, replicas=1, sentinels=2, password="watch") as made:
        yield made


@pytest.fixture
def settings(sentinels: Sentinels, tmp_path: Path) -> config.Redis:
    secret = tmp_path / "sentinels"
    secret.write_text("watch\n")
    return replace(config.Redis(), url=sentinels.url, sentinel_password_file=secret)


@pytest.fixture
def link(settings: config.Redis) -> Iterator[Connection]:
    made = connect(settings, timeout=5.0, name="test")
    yield made
    made.close()


def test_sentinel_link_finds_the_master(link: Connection, sentinels: Sentinels) -> None:
    assert link.execute("SET", "a", "1") == b"OK"
    assert sentinels.master.call("GET", "a") == b"1"
    assert link.address.endswith(f"({NAME}), 127.0.0.1:{sentinels.master.port}")


def test_sentinel_link_accepts_a_database(settings: config.Redis, sentinels: Sentinels) -> None:
    link = connect(replace(settings, url=f"{settings.url}/3"), timeout=5.0, name="test")
    link.execute("SET", "elsewhere", "1")
    assert b"db3:" in sentinels.master.call("INFO", "keyspace")
    link.close()


def test_sentinel_link_uses_a_separate_login(settings: config.Redis) -> None:
    link = connect(replace(settings, sentinel_password_file=None), timeout=2.0, name="test")
    with pytest.raises(RedisUnavailableError, match=r"NOAUTH|Authentication") as caught:
        link.execute("PING")
    assert not caught.value.sent


def test_sentinel_link_skips_an_unreachable_sentinel(settings: config.Redis) -> None:
    url = settings.url.replace("://", "://127.0.0.1:1,")
    link = connect(replace(settings, url=url), timeout=5.0, name="test")
    assert link.execute("PING") == b"PONG"
    link.close()


def test_sentinel_link_reports_an_unknown_master(settings: config.Redis) -> None:
    url = settings.url.replace(NAME, "nobody")
    link = connect(replace(settings, url=url), timeout=2.0, name="test")
    with pytest.raises(RedisUnavailableError, match=r"\(nobody\): .* has no answer"):
        link.execute("PING")


@pytest.mark.fault("F17")
def test_sentinel_link_does_not_write_to_a_replica(
    link: Connection, settings: config.Redis, sentinels: Sentinels
) -> None:
    """Nothing is written to a replica, even if the sentinels still name it.

    The replica's connection is open and returns READONLY.
    """
    master, replica = sentinels.servers
    link.execute("SET", "a", "1")
    master.call("REPLICAOF", "127.0.0.1", replica.port)
    try:
        for said in ("READONLY", "its role is"):
            with pytest.raises(RedisUnavailableError, match=said) as caught:
                link.execute("SET", "a", "2")
            assert not caught.value.sent
            assert not link.connected
    finally:
        master.call("REPLICAOF", "NO", "ONE")
    wait_until(replica.follows, what="the replica follows again")
    assert link.execute("SET", "a", "3") == b"OK"


@pytest.mark.fault("F19")
def test_start_warns_about_a_master_without_min_replicas(
    link: Connection, sentinels: Sentinels
) -> None:
    """The start warns about a master without min-replicas.

    Such a master would accept writes that a failover loses.
    """
    settings = config.Settings()
    for replica in sentinels.servers[1:]:
        wait_until(replica.follows, what="the replica follows")
    _, warnings = inspection.check_servers(inspection.ask_servers(link, 0.0), settings)
    assert any("min-replicas-to-write" in text for text in warnings)
    sentinels.master.call("CONFIG", "SET", "min-replicas-to-write", 1)
    _, warnings = inspection.check_servers(inspection.ask_servers(link, 0.0), settings)
    sentinels.master.call("CONFIG", "SET", "min-replicas-to-write", 0)
    assert not any("min-replicas-to-write" in text for text in warnings)


def test_plain_url_of_a_sentinel_is_reported(settings: config.Redis, sentinels: Sentinels) -> None:
    url = f"redis://:watch@127.0.0.1:{sentinels.sentinels[0].port}"
    link = connect(replace(settings, url=url), timeout=2.0, name="test")
    problems, _ = inspection.check_servers(
        inspection.ask_servers(link, 0.0),
        replace(config.Settings(), redis=replace(settings, url=url)),
    )
    link.close()
    assert any("the server is a Sentinel" in text for text in problems)


@pytest.mark.fault("F36")
def test_sentinel_link_uses_client_certificates(tmp_path: Path) -> None:
    """The link uses its certificates for sentinels and servers, which both require them."""
    folder, binary = require(tls.certificates, tmp_path), require(find_binary, "redis7")
    with Sentinels(binary, replicas=0, sentinels=1, certificates=folder) as made:
        right = tls.settings(made.url, folder)
        link = connect(right, timeout=5.0, name="test")
        assert link.execute("SET", "a", "1") == b"OK"
        link.close()
        wrong = replace(right, ca_file=folder / "other.pem")
        with pytest.raises(RedisUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            connect(wrong, timeout=5.0, name="test").execute("GET", "a")

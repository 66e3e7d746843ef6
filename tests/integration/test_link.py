"""A connection parses replies and errors, logs in, and learns facts about the server."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from streamqd import config
from streamqd.errors import ConfigError, RedisResponseError, RedisUnavailableError
from streamqd.store.client import Connection, connect, server_facts
from streamqd.store.transport import KEEPALIVE, error_code
from tests.support.servers import ProcessServer, Server
from tests.support.waiting import wait_until
from tests.support.writer import writer

NewLink = Callable[..., Connection]

# The first words of an error that a script raises in Redis 6.2.
FORBIDDEN = "The user executing the script can't run this"
IN_SCRIPT_62 = (
    "ERR Error running script (call to f_d8483ffd07064f12e65345ce7dfdbd3a9387192b): @user_script:1:"
)


# --- answers and refusals -------------------------------------------------------------------------


def test_replies_are_returned_as_bytes(link: Connection) -> None:
    link.execute("HSET", "h", "name", b"\xff\x00")
    assert link.execute("HGETALL", "h") == [b"name", b"\xff\x00"]
    assert link.execute("GET", "nothing") is None


def test_connection_sets_its_name_and_no_library_name(link: Connection) -> None:
    line = link.execute("CLIENT", "LIST").decode()
    mine = next(entry for entry in line.splitlines() if " name=test " in entry)
    assert "lib-name=redis-py" not in mine
    assert "resp=3" not in mine


def test_error_reply_is_refused_and_keeps_the_connection(link: Connection) -> None:
    link.execute("SET", "a", "1")
    with pytest.raises(RedisResponseError) as caught:
        link.execute("HGET", "a", "b")
    assert caught.value.code == "WRONGTYPE"
    assert link.execute("GET", "a") == b"1"
    assert link.node.opened == 1


def test_pipeline_returns_refusals_in_their_places(link: Connection) -> None:
    replies = link.pipeline([("SET", "a", 1), ("HGET", "a", "b"), ("INCR", "a")])
    assert replies[0] == b"OK"
    assert isinstance(replies[1], RedisResponseError)
    assert replies[1].code == "WRONGTYPE"
    assert replies[2] == 2
    assert link.pipeline([]) == []


def test_refusal_inside_a_transaction_is_reported(link: Connection) -> None:
    replies = link.pipeline([("SET", "a", 1), ("MULTI",), ("HGET", "a", "b"), ("EXEC",)])
    assert isinstance(replies[3][0], RedisResponseError)
    assert replies[3][0].code == "WRONGTYPE"


def test_script_out_of_memory_has_code_oom(
    link: Connection,
) -> None:
    link.execute("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(RedisResponseError) as caught:
            link.run(writer("a", "1"))
        reply = link.run_many([writer("a", "1")])[0]
    finally:
        link.execute("CONFIG", "SET", "maxmemory", 0)
    assert caught.value.code == "OOM"
    assert isinstance(reply, RedisResponseError)
    assert reply.code == "OOM"


def test_script_wrong_type_has_code_wrongtype(link: Connection) -> None:
    link.execute("SET", "a", "1")
    with pytest.raises(RedisResponseError) as caught:
        link.execute("EVAL", "return redis.call('HGET', KEYS[1], 'b')", 1, "a")
    assert caught.value.code == "WRONGTYPE"


def test_error_code_is_not_taken_from_user_data(link: Connection) -> None:
    with pytest.raises(RedisResponseError) as caught:
        link.execute("EVAL", "return redis.call('GET', KEYS[1], ARGV[1])", 1, "a", ": -OOM x")
    assert caught.value.code == "ERR"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (
            "OOM command not allowed when used memory > 'maxmemory'. script: on @user_script:1.",
            "OOM",
        ),
        (f"{IN_SCRIPT_62} @user_script: 1: -OOM command not allowed when used memory", "OOM"),
        (f"{IN_SCRIPT_62} @user_script: 1: -NOREPLICAS Not enough good replicas", "NOREPLICAS"),
        (f"{IN_SCRIPT_62} NOGROUP No such key 'zz' or consumer group 'g'", "NOGROUP"),
        (f"{IN_SCRIPT_62} @user_script: 2: Wrong number of args calling Redis command", "ERR"),
        (f"{IN_SCRIPT_62} ERR value is not -OOM an integer", "ERR"),
        (f"{IN_SCRIPT_62} @user_script: 2: {FORBIDDEN} command or subcommand", "NOPERM"),
        (f"ERR {FORBIDDEN} command or subcommand script: f931, on @user_script:192.", "NOPERM"),
        (f"{IN_SCRIPT_62} user_script:1: boom: {FORBIDDEN} command", "ERR"),
        (f"{IN_SCRIPT_62} user_script:1: boom: -OOM x", "ERR"),
        ("ERR unknown command '-OOM', with args beginning with: 'x'", "ERR"),
    ],
)
def test_code_of_reads_server_errors(text: str, code: str) -> None:
    assert error_code(text) == code


def test_readonly_replica_causes_a_reconnect(
    new_server: Callable[..., ProcessServer],
) -> None:
    link = connect(new_server().settings, timeout=5.0, name="test")
    link.execute("REPLICAOF", "127.0.0.1", "1")
    for attempt, send in enumerate((lambda: link.run(writer("a", "1")), lambda: _set(link)), 1):
        with pytest.raises(RedisResponseError) as caught:
            send()
        assert caught.value.code == "READONLY"
        assert not link.connected
        assert link.node.opened == attempt
    link.execute("REPLICAOF", "NO", "ONE")
    _set(link)
    assert link.node.opened == 3
    link.close()


def _set(link: Connection) -> None:
    link.execute("SET", "a", "1")


def test_loading_server_refuses_every_command_of_a_pipeline(fresh_server: ProcessServer) -> None:
    link = connect(fresh_server.settings, timeout=5.0, name="test")
    link.pipeline([("SET", f"key{n}", "x") for n in range(4000)])
    link.close()
    # Redis 6.2 checks its clients only every 1,000 commands, and lacks the second setting.
    slow = {"key_load_delay": "1000"}
    if fresh_server.version >= (7,):
        slow["loading_process_events_interval_bytes"] = "1024"
    fresh_server.terminate()
    fresh_server.restart(wait=False, **slow)
    replies = wait_until(lambda: _loading(link), what="the server loads")
    assert [reply.code for reply in replies] == ["LOADING", "LOADING"]
    assert link.connected
    link.close()


def _loading(link: Connection) -> list[RedisResponseError] | None:
    try:
        replies = link.pipeline([("GET", "key1"), ("GET", "key2")])
    except RedisUnavailableError:
        return None
    assert all(isinstance(reply, RedisResponseError) for reply in replies), "it has loaded already"
    return replies


# --- scripts --------------------------------------------------------------------------------------


@pytest.mark.fault("F20")
def test_unknown_script_is_loaded_once(link: Connection) -> None:
    link.execute("SCRIPT", "FLUSH")
    link.execute("CONFIG", "RESETSTAT")
    assert link.run(writer("a", "1")).word == "OK"
    assert link.run(writer("a", "2")).values == [b"2"]
    stats = link.execute("INFO", "commandstats").decode()
    assert "cmdstat_eval:calls=1," in stats
    assert "cmdstat_evalsha:calls=2," in stats


@pytest.mark.fault("F20")
def test_script_replies_keep_their_order(link: Connection) -> None:
    link.execute("SCRIPT", "FLUSH")
    link.run(writer("a", "0"))
    bad = writer("a", "v", name="broken", command="HGET")
    replies = link.run_many([writer("a", "1"), bad, writer("b", "2")])
    assert [reply.values for reply in replies if not isinstance(reply, RedisResponseError)] == [
        [b"1"],
        [b"2"],
    ]
    assert isinstance(replies[1], RedisResponseError)
    assert replies[1].code == "WRONGTYPE"
    assert link.run_many([]) == []


# --- address and login ----------------------------------------------------------------------------


def test_login_rereads_a_changed_password_file(
    link: Connection, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    link.execute("ACL", "SETUSER", "ann", "reset", "on", ">first-secret", "~*", "+echo")
    secret = tmp_path / "password"
    secret.write_text("wrong-secret\n")
    settings = replace(server.settings, username="ann", password_file=secret)
    other = connect(settings, timeout=5.0, name="test:ann")
    try:
        with pytest.raises(RedisUnavailableError, match="WRONGPASS") as caught:
            other.execute("ECHO", "in")
        assert not caught.value.sent
        assert "secret" not in str(caught.value)
        secret.write_text("first-secret\n")
        # The user works although it may not name its connection.
        assert other.execute("ECHO", "in") == b"in"
        with pytest.raises(RedisResponseError) as refused:
            other.execute("GET", "a")
        assert refused.value.code == "NOPERM"
        other.close()
        secret.unlink()
        with pytest.raises(RedisUnavailableError, match="cannot connect") as caught:
            other.execute("ECHO", "in")
        assert not caught.value.sent
        (tmp_path / "redis-password").write_text("first-secret")
        monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
        systemd = connect(settings, timeout=5.0, name="test:ann")
        assert systemd.execute("ECHO", "in") == b"in"
        systemd.close()
    finally:
        other.close()
        link.execute("ACL", "DELUSER", "ann")


def test_connection_address_has_no_credentials() -> None:
    link = connect(config.Redis(url="redis://ann:secret@127.0.0.1:1/0"), timeout=1.0, name="test")
    assert link.address == "127.0.0.1:1"
    with pytest.raises(RedisUnavailableError) as caught:
        link.execute("PING")
    assert "secret" not in repr((caught.value, link.node.endpoint, link))


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost",
        "redis://localhost?retry_on_timeout=1",
        "redis://localhost?protocol=3",
        "redis://localhost?db=x",
        "embedded:",
    ],
)
def test_url_with_protocol_options_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url"):
        connect(config.Redis(url=url), timeout=1.0, name="test")


def test_connection_name_must_be_valid() -> None:
    with pytest.raises(ValueError, match="connection name"):
        connect(config.Redis(url="redis://localhost"), timeout=1.0, name="two words")


def test_connection_works_over_tcp(new_server: Callable[..., ProcessServer]) -> None:
    server = new_server(tcp=True)
    link = connect(config.Redis(url=f"{server.tcp_url}/3"), timeout=5.0, name="test")
    link.execute("SET", "a", "1")
    assert "db3:keys=1" in link.execute("INFO", "keyspace").decode()
    server.kill()
    with pytest.raises(RedisUnavailableError):
        link.execute("PING")
    link.close()


def test_connection_skips_an_unsupported_address_family(
    new_server: Callable[..., ProcessServer],
) -> None:
    """An address family that the host does not support is skipped.

    A host without IPv6 can get an IPv6 address from `/etc/hosts` or DNS.
    """
    server = new_server(tcp=True)
    unknown = (255, ("::1", 1, 0, 0))
    there = (socket.AF_INET, ("127.0.0.1", server.port))
    for found in ([unknown, there], [there, unknown]):
        link = connect(
            config.Redis(url=server.tcp_url), timeout=5.0, name="test", lookup=lambda *_, f=found: f
        )
        assert link.execute("PING") == b"PONG"
        link.close()


def test_connection_notices_a_vanished_node_while_idle(
    new_server: Callable[..., ProcessServer],
) -> None:
    server = new_server(tcp=True)
    link = connect(config.Redis(url=server.tcp_url), timeout=5.0, name="test")
    sock = link.node.socket()
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    kept = {each: sock.getsockopt(socket.IPPROTO_TCP, each) for each in KEEPALIVE}
    assert kept == KEEPALIVE
    link.close()


# --- facts ----------------------------------------------------------------------------------------


def test_server_facts_name_product_and_version(link: Connection, server: Server) -> None:
    facts = server_facts(link)
    assert facts.product in ("redis", "valkey")
    assert int(facts.version.split(".")[0]) >= 6
    assert (facts.role, facts.mode) == ("master", "standalone")
    assert facts.maxmemory_policy == "noeviction"
    assert (facts.maxmemory, facts.aof, facts.loading) == (0, False, False)
    assert abs(facts.time - time.time()) < 60
    if isinstance(server, ProcessServer):
        assert facts.pid == server.pid

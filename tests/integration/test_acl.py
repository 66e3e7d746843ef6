"""The users of etc/acl: every right is needed by what they do, and nothing else is asked for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from streamqd import config
from streamqd.admin import rights
from streamqd.cli import cli
from streamqd.errors import RedisRefused
from streamqd.housekeeper.teacher import Teacher
from streamqd.model import Unit
from streamqd.producer import Producer
from streamqd.store import messages, topics
from streamqd.store.client import Link
from streamqd.store.keys import Keys
from tests.support import usage, users
from tests.support.daemon import toml
from tests.support.servers import Server

DAEMON = (
    *("startup.py", "registration.py", "inspection.py"),
    *("supervisor", "worker", "housekeeper"),
)
OPERATOR = (*DAEMON, "admin", "cli", "spark")
PUBLISHING = ("message_publish", "message_schedule")
PLAIN = {"client|setname", "exec", "hget", "multi", "watch", "xadd", "asking", "cluster|slots"}
# What is granted without a line of ours that sends it.
BESIDE = {
    "select": "the client library sends it for a URL that ends with a database number",
    "discard": "`streamqd check` tries rights in transactions that it discards",
}


@pytest.fixture
def granted(link: Link) -> Iterator[None]:
    """The users, on the shared server."""
    users.grant(link)
    yield
    users.revoke(link)


@pytest.fixture
def known(link: Link) -> set[str]:
    """Commands that the server knows: an upper-case word of the source need not be one."""
    return {str(each[0].decode()) for each in link.execute("COMMAND")}


def used_by(known: set[str], *parts: str) -> set[str]:
    return {each for each in usage.of(*parts) if each.partition("|")[0] in known}


def as_user(server: Server, name: str) -> config.Redis:
    return dataclasses.replace(server.settings, username=name)


# --- exactness ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "parts"), [("daemon", DAEMON), ("admin", OPERATOR)])
def test_a_user_may_do_what_its_code_does_and_no_more(
    known: set[str], name: str, parts: tuple[str, ...]
) -> None:
    used, allowed = used_by(known, *parts), users.read(name).commands

    assert used - allowed == set(), f"add them to etc/acl/{name}.acl"
    assert allowed - used - BESIDE.keys() == set(), f"nothing needs them: etc/acl/{name}.acl"


def test_a_producer_may_do_what_it_sends_and_no_more(known: set[str]) -> None:
    sent = used_by(known, "producer")
    plain, with_scripts = users.read("producer").commands, users.read("producer-scripts").commands

    assert plain - BESIDE.keys() == PLAIN
    assert sent >= PLAIN
    assert with_scripts - plain == (usage.of_scripts(PUBLISHING) | {"evalsha"}) - plain
    assert sent >= with_scripts - BESIDE.keys()


def test_nobody_may_change_the_server_or_forget_what_others_stored() -> None:
    dangerous = re.compile(r"acl|config\|set|debug|failover|flush|function|keys|module|replicaof")
    for name in users.NAMES:
        assert [each for each in users.read(name).commands if dangerous.match(each)] == []
    for name in ("daemon", "producer", "producer-scripts"):
        forbidden = {"config|get", "scan", "unlink", "xgroup|destroy", "keys"}
        assert not forbidden & users.read(name).commands
    assert not {"eval", "script|load"} & users.read("producer-scripts").commands


@pytest.mark.parametrize("name", users.NAMES)
def test_a_user_without_a_password_cannot_log_in(
    server: Server, link: Link, new_link: Callable[..., Link], name: str
) -> None:
    link.execute("ACL", "SETUSER", *users.line(name).split()[1:])
    try:
        with pytest.raises(RedisRefused, match="WRONGPASS"):
            new_link().execute("AUTH", users.read(name).user, "")
    finally:
        users.revoke(link)


# --- each right by itself -------------------------------------------------------------------------


def test_the_check_of_rights_finds_nothing_missing(
    server: Server, granted: None, keys: Keys
) -> None:
    for name in ("daemon", "admin"):
        link = Link(as_user(server, users.read(name).user), timeout=10.0, name="test:granted")
        assert rights.missing(link, keys, "default") == []
        link.close()


# A user that may not name its connection works all the same; without a cluster nobody asks for it.
UNCHECKED = {"client|setname", "multi", "exec", "asking", "cluster|slots"} | BESIDE.keys()


def test_every_right_that_a_daemon_loses_is_named(
    server: Server, link: Link, granted: None, keys: Keys
) -> None:
    found = users.read("daemon")
    unnamed = []
    for command in sorted(found.commands - UNCHECKED):
        users.grant(link, without=command)
        other = Link(as_user(server, found.user), timeout=10.0, name="test:weaker")
        lacking = {each.command.lower() for each in rights.missing(other, keys, "default")}
        other.close()
        if lacking != {command.replace("|", " ")}:
            unnamed.append((command, lacking))
    assert unnamed == []


@pytest.mark.parametrize("command", ["multi", "exec", "discard"])
def test_no_transactions_no_work(
    server: Server, link: Link, granted: None, keys: Keys, command: str
) -> None:
    users.grant(link, without=command)
    other = Link(as_user(server, users.read("daemon").user), timeout=10.0, name="test:weaker")
    with pytest.raises(RedisRefused, match="NOPERM"):
        rights.missing(other, keys, "default")
    other.close()


# --- producers ------------------------------------------------------------------------------------


@pytest.fixture
def topic(link: Link, keys: Keys) -> str:
    topics.create(link, keys, "access", config.Topic(partitions=2))
    return "access"


@pytest.fixture
def sender(server: Server, granted: None) -> Iterator[Callable[[str], Producer]]:
    """A producer that works as one of the users."""
    made: list[Producer] = []

    def make(name: str) -> Producer:
        redis = as_user(server, users.read(name).user)
        made.append(Producer(settings=config.Settings(redis=redis)))
        return made[-1]

    yield make
    for each in made:
        each.close()


SCRIPTED = ({"dedup_id": "one"}, {"delay": 60.0})


def test_a_producer_without_scripts_sends_and_is_told_what_it_lacks(
    sender: Callable[[str], Producer], topic: str, link: Link, keys: Keys
) -> None:
    producer = sender("producer")
    producer.send_many(topic, [b"a", b"b", b"c"])
    for options in SCRIPTED:
        with pytest.raises(RedisRefused, match="may not run scripts, which") as caught:
            producer.send(topic, b"d", **options)  # type: ignore[arg-type]
        assert caught.value.code == "NOPERM"

    assert sum(link.execute("XLEN", keys.stream(topic, each)) for each in range(2)) == 3


def test_a_producer_may_run_the_scripts_that_a_daemon_has_taught(
    sender: Callable[[str], Producer],
    topic: str,
    link: Link,
    new_link: Callable[..., Link],
    keys: Keys,
) -> None:
    link.execute("SCRIPT", "FLUSH")
    producer = sender("producer-scripts")
    for options in SCRIPTED:
        with pytest.raises(RedisRefused, match="a running daemon teaches it"):
            producer.send(topic, b"d", **options)  # type: ignore[arg-type]

    Teacher(new_link()).run()
    for options in SCRIPTED:
        first = producer.send(topic, b"d", **options)  # type: ignore[arg-type]
        again = producer.send(topic, b"d", **options)  # type: ignore[arg-type]
        assert (first == again) == ("dedup_id" in options)


def test_the_command_sends_as_a_user_that_may_only_send(
    server: Server, granted: None, topic: str, tmp_path: Path
) -> None:
    """U11: looking for a slip in the name of a topic needs no right that a producer lacks."""
    file = tmp_path / "streamq.toml"
    redis = {"url": server.url, "username": users.read("producer").user}
    file.write_text(toml({"redis": redis}))
    sent = CliRunner().invoke(cli, ["--config", str(file), "produce", topic, "x"])
    assert sent.exit_code == 0, sent.output
    slip = CliRunner().invoke(cli, ["--config", str(file), "produce", "acess", "x"])
    assert slip.exit_code == 8
    assert "the topic acess does not exist; not a terminal: pass --create" in slip.stderr


@pytest.mark.parametrize("name", ["producer", "producer-scripts"])
def test_a_producer_reaches_nothing_but_what_it_writes(
    server: Server, link: Link, granted: None, topic: str, keys: Keys, name: str
) -> None:
    unit = Unit(topic, 0, "hits")
    link.run(messages.ensure_group(keys, unit, "0"))
    other = Link(as_user(server, users.read(name).user), timeout=10.0, name="test:producer")
    stream = keys.stream(topic, 0)
    refused = (
        ("EVAL", "return 1", 0),
        ("SCRIPT", "LOAD", "return 1"),
        ("XADD", keys.dlq(topic, 0), "*", "f", "v"),
        ("XADD", keys.retry_stream(*unit), "*", "f", "v"),
        ("HGET", keys.fence(*unit), "token"),
        ("XTRIM", stream, "MAXLEN", 0),
        ("XREADGROUP", "GROUP", "hits", "w", "STREAMS", stream, ">"),
        ("XACK", stream, "hits", "1-1"),
        ("SMEMBERS", keys.registry()),
        ("KEYS", "*"),
        ("PUBLISH", keys.wake("default"), "x"),
        ("CONFIG", "GET", "*"),
    )
    for command in refused:
        with pytest.raises(RedisRefused, match="NOPERM"):
            other.execute(*command)
    other.close()


def test_the_files_name_the_default_prefixes() -> None:
    keys = Keys()
    for name in users.NAMES:
        for pattern in users.read(name).keys:
            assert pattern.startswith((f"{keys.control}:", f"{keys.streams}:"))
    assert {path.stem for path in Path(users.FOLDER).glob("*.acl")} == set(users.NAMES)

"""Each user in etc/acl has exactly the permissions that its code needs."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamqd import config
from streamqd.admin import permissions
from streamqd.cli import cli
from streamqd.errors import BacklogFullError, RedisResponseError, RedisUnavailableError
from streamqd.housekeeper.script_loader import ScriptLoader
from streamqd.model import Assignment
from streamqd.producer import Producer
from streamqd.store import messages, topics
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.contract.harness import Harness
from tests.support import usage, users
from tests.support.daemon import toml
from tests.support.servers import ProcessServer, Server
from tests.support.waiting import wait_until

DAEMON = (
    *("startup.py", "registration.py", "inspection.py"),
    *("supervisor", "worker", "housekeeper", "outbox"),
)
OPERATOR = (*DAEMON, "admin", "cli", "spark")
PUBLISHING = ("message_append", "message_publish", "message_schedule")
PLAIN = {"client|setname", "exec", "hget", "multi", "evalsha", "xadd", "asking", "cluster|slots"}
PLAIN |= {"select"}  # needed for a URL with a database number
# These permissions are granted, although no line of our code needs them.
BESIDE = {
    "discard": "`streamqd check` tries rights in transactions that it discards",
}
# Logging in and reading server information need no permission.
FREE = {"auth", "hello"}
# This permission is used but not granted, because CONFIG GET shows passwords too, and no rule can
# exclude them. Without it, the doctor continues and reports the checks that it skipped.
DENIED = {"config|get"}
CANCELLING = {"zrem", "hdel"}  # cancel a delayed send without a script


@pytest.fixture
def acl_users(link: Connection) -> Iterator[None]:
    """The users, created on the shared server."""
    users.grant(link)
    yield
    users.revoke(link)


@pytest.fixture
def server_commands(link: Connection) -> set[str]:
    """The commands that the server knows. Not every upper-case word in the source is a command."""
    return {str(each[0].decode()) for each in link.execute("COMMAND")}


def used_commands(known: set[str], *parts: str) -> set[str]:
    return {each for each in usage.module_commands(*parts) if each.partition("|")[0] in known}


def settings_of_user(server: Server, name: str) -> config.Redis:
    return dataclasses.replace(server.settings, username=name)


# --- exactness ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "parts"), [("daemon", DAEMON), ("admin", OPERATOR)])
def test_acl_user_has_exactly_the_commands_of_its_code(
    server_commands: set[str], name: str, parts: tuple[str, ...]
) -> None:
    used, allowed = used_commands(server_commands, *parts), users.read(name).commands

    assert used - allowed - DENIED - FREE == set(), f"add them to etc/acl/{name}.acl"
    assert allowed - used - BESIDE.keys() == set(), f"nothing needs them: etc/acl/{name}.acl"


def test_acl_producer_has_exactly_the_commands_it_sends(server_commands: set[str]) -> None:
    sent = used_commands(server_commands, "producer") | usage.script_commands(PUBLISHING)
    plain, with_scripts = users.read("producer").commands, users.read("producer-scripts").commands

    assert plain - BESIDE.keys() == PLAIN
    assert plain >= usage.script_commands(("message_append",))
    assert sent >= PLAIN
    assert with_scripts - plain == (usage.script_commands(PUBLISHING) | CANCELLING) - plain
    assert sent >= with_scripts - BESIDE.keys()


@pytest.mark.parametrize("name", users.NAMES)
def test_acl_files_for_redis_6_2_have_the_same_commands(name: str) -> None:
    assert users.read(name, older=True).commands == users.read(name).commands


def test_acl_users_cannot_change_the_server_or_flush_data() -> None:
    """No user can change the server or flush data.

    CONFIG GET shows `requirepass`, so no user may run it either.
    """
    dangerous = re.compile(r"acl|config|debug|failover|flush|function|keys|module|replicaof")
    for name in users.NAMES:
        assert [each for each in users.read(name).commands if dangerous.match(each)] == []
    for name in ("daemon", "producer", "producer-scripts", "viewer"):
        forbidden = {"scan", "unlink", "xgroup|destroy"}
        assert not forbidden & users.read(name).commands
    for name in ("producer", "producer-scripts"):
        assert not {"eval", "script|load"} & users.read(name).commands


@pytest.mark.parametrize("name", users.NAMES)
def test_acl_user_without_a_password_cannot_log_in(
    server: Server, link: Connection, new_link: Callable[..., Connection], name: str
) -> None:
    older = not users.has_selectors(link)
    link.execute("ACL", "SETUSER", *users.acl_rules(users.read_line(name, older=older)))
    try:
        with pytest.raises(RedisResponseError, match="WRONGPASS"):
            new_link().execute("AUTH", users.read(name).user, "")
    finally:
        users.revoke(link)


WRITES = {
    *("del", "expire", "hdel", "hincrby", "hset", "hsetnx", "ltrim", "pexpire", "publish"),
    *(
        "rpush",
        "sadd",
        "set",
        "srem",
        "unlink",
        "xack",
        "xadd",
        "xautoclaim",
        "xclaim",
        "xdel",
        "xgroup|create",
    ),
    *("xgroup|createconsumer", "xgroup|delconsumer", "xgroup|destroy", "xgroup|setid"),
    *("xreadgroup", "xtrim", "zadd", "zrem"),
}
# These commands are for writing, for loading scripts, and for deleting topics.
NOT_FOR_VIEWING = WRITES | {
    *("discard", "exec", "multi", "scan", "script|exists", "script|load", "slowlog|get"),
    *("subscribe", "wait", "watch"),
}


def test_acl_viewer_has_the_reading_commands_of_the_operator(link: Connection) -> None:
    """The viewer may call the operator's reading commands.

    Scripts run with the permissions of their caller, so their writes are refused.
    """
    viewer = users.read("viewer").commands
    assert viewer == users.read("admin").commands - NOT_FOR_VIEWING
    for each in link.execute("COMMAND"):
        name, flags = each[0].decode(), {flag.decode() for flag in each[2]}
        assert name not in viewer or "write" not in flags, name


# --- single permissions ---------------------------------------------------------------------------


def test_permission_check_passes_for_the_acl_users(
    server: Server, acl_users: None, keys: Keys
) -> None:
    for name in ("daemon", "admin"):
        link = connect(
            settings_of_user(server, users.read(name).user), timeout=10.0, name="test:granted"
        )
        assert permissions.find_missing(Store(link, keys), "default") == []
        link.close()


# A user still works without the permission to name its connection. No code here selects a database
# or uses a cluster.
UNCHECKED = {"client|setname", "select", "multi", "exec", "asking", "cluster|slots"}
UNCHECKED |= BESIDE.keys()


def test_every_missing_permission_of_a_daemon_is_named(
    server: Server, link: Connection, acl_users: None, keys: Keys
) -> None:
    found = users.read("daemon")
    unnamed = []
    for command in sorted(found.commands - UNCHECKED):
        users.grant(link, without=command)
        other = connect(settings_of_user(server, found.user), timeout=10.0, name="test:weaker")
        lacking = {
            each.command.lower() for each in permissions.find_missing(Store(other, keys), "default")
        }
        other.close()
        if lacking != {command.replace("|", " ")}:
            unnamed.append((command, lacking))
    assert unnamed == []


@pytest.mark.parametrize("command", ["multi", "exec", "discard"])
def test_permission_check_fails_without_transactions(
    server: Server, link: Connection, acl_users: None, keys: Keys, command: str
) -> None:
    users.grant(link, without=command)
    other = connect(
        settings_of_user(server, users.read("daemon").user), timeout=10.0, name="test:weaker"
    )
    with pytest.raises(RedisResponseError, match="NOPERM"):
        permissions.find_missing(Store(other, keys), "default")
    other.close()


# --- producers ------------------------------------------------------------------------------------


@pytest.fixture
def topic(store: Store) -> str:
    topics.create(store, "access", config.Topic(partitions=2))
    return "access"


@pytest.fixture
def sender(server: Server, acl_users: None) -> Iterator[Callable[..., Producer]]:
    """Return a function that makes a producer, which logs in as one of the users."""
    made: list[Producer] = []

    def make(name: str, **options: Any) -> Producer:
        redis = settings_of_user(server, users.read(name).user)
        made.append(Producer(settings=config.Settings(redis=redis), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


SCRIPTED = ({"dedup_id": "one"}, {"delay": 60.0})


def test_plain_producer_error_names_the_acl_file_for_scripts(
    sender: Callable[[str], Producer],
    topic: str,
    link: Connection,
    new_link: Callable[..., Connection],
    keys: Keys,
) -> None:
    ScriptLoader(new_link()).run()
    producer = sender("producer")
    producer.send_many(topic, [b"a", b"b", b"c"])
    for options in SCRIPTED:
        with pytest.raises(RedisResponseError, match="producer-scripts") as caught:
            producer.send(topic, b"d", **options)  # type: ignore[arg-type]
        assert caught.value.code == "NOPERM"

    assert sum(link.execute("XLEN", keys.stream(topic, each)) for each in range(2)) == 3


def test_producer_may_run_scripts_that_a_daemon_loaded(
    sender: Callable[..., Producer],
    topic: str,
    link: Connection,
    new_link: Callable[..., Connection],
    keys: Keys,
) -> None:
    link.execute("SCRIPT", "FLUSH")
    producer = sender("producer-scripts", timeout=0.4)
    for options in ({}, *SCRIPTED):
        with pytest.raises(RedisResponseError, match="a running daemon loads it"):
            producer.send(topic, b"d", **options)  # type: ignore[arg-type]

    ScriptLoader(new_link()).run()
    for options in SCRIPTED:
        first = producer.send(topic, b"d", **options)  # type: ignore[arg-type]
        again = producer.send(topic, b"d", **options)  # type: ignore[arg-type]
        assert (first == again) == ("dedup_id" in options)
    assert producer.cancel(producer.send(topic, b"d", delay=60))


def test_producer_waits_until_a_daemon_loads_the_scripts(
    sender: Callable[..., Producer],
    topic: str,
    link: Connection,
    new_link: Callable[..., Connection],
    keys: Keys,
) -> None:
    """A producer waits until a daemon has loaded the scripts.

    Otherwise, each send after a restart of the server would fail for up to 10 s.
    """
    ScriptLoader(new_link()).run()
    producer = sender("producer", timeout=60.0)
    producer.send(topic, b"0")
    link.execute("SCRIPT", "FLUSH")

    def refused() -> int:
        stats = link.execute("INFO", "commandstats").decode()
        found = re.search(r"cmdstat_eval:.*rejected_calls=(\d+)", stats)
        return int(found[1]) if found else 0

    before = refused()
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(producer.send, topic, b"1")
        wait_until(lambda: refused() > before, what="a send is refused")
        many = pool.submit(producer.send_many, topic, [b"2"] * 600)
        ScriptLoader(new_link()).run()
        assert len({one.result(), *many.result()}) == 601

    streams = (keys.stream(topic, number) for number in range(2))
    entries = [each for key in streams for each in link.execute("XRANGE", key, "-", "+")]
    assert sorted(flat[1] for _, flat in entries) == [b"0", b"1"] + [b"2"] * 600


def test_produce_works_with_the_producer_permissions(
    server: Server, acl_users: None, topic: str, tmp_path: Path
) -> None:
    """`produce` needs no permission that a producer lacks, even to check for a mistyped topic."""
    file = tmp_path / "streamq.toml"
    redis = {"url": server.url, "username": users.read("producer").user}
    file.write_text(toml({"redis": redis}))
    sent = CliRunner().invoke(cli, ["--config", str(file), "produce", topic, "x"])
    assert sent.exit_code == 0, sent.output
    slip = CliRunner().invoke(cli, ["--config", str(file), "produce", "acess", "x"])
    assert slip.exit_code == 8
    assert "topic acess does not exist; not a terminal: pass --create" in slip.stderr


def test_max_backlog_needs_no_further_permissions(
    server: Server,
    acl_users: None,
    topic: str,
    link: Connection,
    new_link: Callable[..., Connection],
    keys: Keys,
) -> None:
    """A producer needs no further permissions for `max_backlog`.

    The script of a send also reads the last entry if a group has a lag.
    """
    ScriptLoader(new_link()).run()
    link.run(messages.ensure_group(keys, Assignment(topic, 0, "hits"), "0"))
    settings = config.Settings(redis=settings_of_user(server, users.read("producer-scripts").user))
    with Producer(settings=settings, max_backlog=1) as producer:
        producer.send(topic, b"a", partition=0)
        with pytest.raises(BacklogFullError):
            producer.send(topic, b"b", partition=0)


# --- the worst effects of each user: the lists of docs/SECURITY.md --------------------------------

STREAM = "stream:topic:{access:p:0}"
META = "streaming:mq:topic:{access}:meta"
DEDUP = "streaming:mq:dedup:{access:p:0}:one"
LAST_ID = f"{2**64 - 1}-{2**64 - 1}"
TOPIC_UNIT = Assignment("access", 0, "hits")

# The user may also trim the stream and choose an ID, because no rule can exclude options.
SENDING = (
    ("XADD", STREAM, "MAXLEN", 0, "*", "f", "v"),
    ("XADD", STREAM, "MINID", "9-9", "*", "f", "v"),
    ("XADD", STREAM, "99999999999999-0", "f", "v"),
)
NOT_BY_PRODUCERS = (
    ("EVAL", "return 1", 0),
    ("SCRIPT", "LOAD", "return 1"),
    ("XADD", "streaming:mq:dlq:{access:p:0}", "*", "f", "v"),
    ("XADD", META, "*", "f", "v"),
    ("XADD", DEDUP, "*", "f", "v"),
    ("SET", STREAM, "x"),
    ("SET", META, "x"),
    ("HSET", META, "partitionCount", 1),
    ("DEL", STREAM),
    ("XTRIM", STREAM, "MAXLEN", 0),
    ("XDEL", STREAM, "1-1"),
    ("XREAD", "STREAMS", STREAM, 0),
    ("XREADGROUP", "GROUP", "hits", "w", "STREAMS", STREAM, ">"),
    ("XACK", STREAM, "hits", "1-1"),
    ("HGET", Keys().fence(*TOPIC_UNIT), "token"),
    ("XADD", Keys().retry_stream(*TOPIC_UNIT), "*", "f", "v"),
    ("SMEMBERS", Keys().registry()),
    ("PUBLISH", Keys().wake("default"), "x"),
    ("KEYS", "*"),
)
NOT_BY_ANYBODY = (
    ("CONFIG", "GET", "requirepass"),
    ("CONFIG", "SET", "maxmemory", 1),
    ("FLUSHALL",),
    ("ACL", "LIST"),
    ("SHUTDOWN",),
    ("GET", "session:of:another:program"),
    ("DEL", "session:of:another:program"),
    ("EVALSHA", "0" * 40, 1, "session:of:another:program"),
)
SCRIPTS_OF_ITS_OWN = (("EVAL", "return 1", 1, STREAM), ("SCRIPT", "LOAD", "return 1"))
MAY = {
    "producer": SENDING,
    "producer-scripts": (
        *SENDING,
        ("XRANGE", STREAM, "-", "+"),  # it can read any key that it may write
        ("SET", DEDUP, "x"),
    ),
    "daemon": (
        *SENDING,
        ("DEL", STREAM),
        ("HSET", META, "partitionCount", 1),
        ("EVAL", "return redis.call('DEL', KEYS[1])", 1, STREAM),
    ),
    "viewer": (
        ("XRANGE", STREAM, "-", "+"),
        ("HGET", META, "partitionCount"),
        ("EVAL", "return redis.call('GET', KEYS[1])", 1, DEDUP),
    ),
    "admin": (
        *SENDING,
        ("DEL", STREAM),
        ("HSET", META, "partitionCount", 1),
        ("SLOWLOG", "GET", 1),  # it can see the arguments of all users' slow commands
        ("SCAN", 0),  # it can list the names of all keys on the server
    ),
}
MAY_NOT = {
    "producer": (
        *NOT_BY_ANYBODY,
        *NOT_BY_PRODUCERS,
        ("XRANGE", STREAM, "-", "+"),
        ("SET", DEDUP, "x"),
        *SCRIPTS_OF_ITS_OWN,
        ("SCAN", 0),
    ),
    "producer-scripts": (*NOT_BY_ANYBODY, *NOT_BY_PRODUCERS, *SCRIPTS_OF_ITS_OWN, ("SCAN", 0)),
    "daemon": (*NOT_BY_ANYBODY, ("SCAN", 0), ("SLOWLOG", "GET", 1), ("KEYS", "*")),
    "viewer": (
        *NOT_BY_ANYBODY,
        *SENDING,
        ("SET", STREAM, "x"),
        ("HSET", META, "partitionCount", 1),
        ("DEL", STREAM),
        ("XTRIM", STREAM, "MAXLEN", 0),
        ("XACK", STREAM, "hits", "1-1"),
        ("XREADGROUP", "GROUP", "hits", "w", "STREAMS", STREAM, ">"),
        ("PUBLISH", Keys().wake("default"), "x"),
        ("SCRIPT", "LOAD", "return 1"),
        ("SCAN", 0),
        ("SLOWLOG", "GET", 1),
        ("KEYS", "*"),
    ),
    "admin": (*NOT_BY_ANYBODY, ("KEYS", "*")),
}


@pytest.mark.parametrize("name", users.NAMES)
def test_acl_users_are_limited_as_documented(
    server: Server, link: Connection, acl_users: None, topic: str, name: str
) -> None:
    """Each user is limited as docs/SECURITY.md says.

    The test runs the command of every line in its lists.
    """
    if not users.has_selectors(link) and name.startswith("producer"):
        pytest.skip("Redis 6.2 has no selectors, so its users may do more (see SECURITY.md)")
    other = connect(
        settings_of_user(server, users.read(name).user), timeout=10.0, name="test:worst"
    )
    for command in MAY_NOT[name]:
        with pytest.raises(RedisResponseError) as caught:
            other.execute(*command)
        assert caught.value.code == "NOPERM", command
    for command in MAY[name]:
        link.execute("FLUSHALL")
        other.execute(*command)
    other.close()


# Commands that only read. The number is the exit code of a view that finds no problem.
SEEING = (
    *("status", "status access", "partitions access", "why access", "doctor", "pending access"),
    *("topic list", "topic describe access", "topic settings access", "group list access"),
    *("group describe access hits", "tail access", "scale", "schedule list", "delayed list access"),
    *("dlq list access", "dlq stats access", "dlq audit access", "retry list access hits"),
    *("dlq replay access --all --dry-run", "top --once", "trace access/0/1-1"),
)
CHANGING = (
    *("produce access x", "pause access", "trim access", "group stop access hits", "drain one"),
    *("topic grow access 4", "topic delete access --yes", "group delete access hits --yes --force"),
    *("dlq replay access --all --yes", "dlq purge access --all --yes", "topic create other"),
    "schedule add tick --topic access --every 1m",
)


def test_acl_viewer_reads_everything_and_changes_nothing(
    server: Server, link: Connection, acl_users: None, topic: str, keys: Keys, tmp_path: Path
) -> None:
    """The viewer can read everything, and Redis refuses each command that would change data."""
    harness = Harness(link, keys)
    harness.groups()
    harness.add("1-1", "payload", "x")
    harness.add("1-1", "payload", "x", "group", "hits", stream=harness.dlq)
    file = tmp_path / "streamq.toml"
    redis = {"url": server.url, "username": users.read("viewer").user}
    file.write_text(toml({"redis": redis}))

    def data() -> dict[bytes, bytes]:
        keys = link.execute("KEYS", "*")
        return {key: link.execute("DUMP", key) for key in keys}

    before = data()
    for words in SEEING:
        run = CliRunner().invoke(cli, ["--config", str(file), *words.split()])
        # `doctor` also checks that it has the permissions of a daemon, which a viewer lacks.
        assert words == "doctor" or "NOPERM" not in run.output, (words, run.output)
        assert run.exit_code in {0, 1, 8}, (words, run.exit_code, run.output)
    for words in CHANGING:
        run = CliRunner().invoke(cli, ["--config", str(file), *words.split()])
        assert run.exit_code not in {0, 2}, (words, run.exit_code, run.output)
        assert run.exception is None or isinstance(run.exception, SystemExit), words
    assert data() == before


def test_compose_server_accepts_only_its_password(
    new_server: Callable[..., ProcessServer], tmp_path: Path
) -> None:
    """The example's server can be used only with the password that the script generates."""
    if os.geteuid() != 0:
        pytest.skip("the script gives the password to the user of the image, which takes root")
    shutil.copytree(users.FOLDER, tmp_path / "acl")
    shutil.copytree(users.FOLDER.parent / "docker", tmp_path / "docker")
    subprocess.run([tmp_path / "docker" / "make-password.sh"], check=True, capture_output=True)
    secret, acl = tmp_path / "docker" / "redis-password", tmp_path / "docker" / "users.acl"
    assert (secret.stat().st_uid, stat.S_IMODE(secret.stat().st_mode)) == (10001, 0o400)
    password = secret.read_text().strip()
    assert password not in acl.read_text()
    server = new_server()
    default = connect(server.settings, timeout=10.0, name="test:default")
    for line in reversed(acl.read_text().splitlines()):
        default.execute("ACL", "SETUSER", *users.acl_rules(line))
    default.close()

    redis = dataclasses.replace(
        server.settings, username=users.read("daemon").user, password_file=secret
    )
    link = connect(redis, timeout=10.0, name="test:compose")
    assert link.execute("TIME")
    link.close()
    stranger = connect(server.settings, timeout=10.0, name="test:stranger")
    with pytest.raises(RedisUnavailableError, match="NOAUTH"):
        stranger.execute("TIME")
    stranger.close()


def test_acl_files_contain_the_default_prefixes() -> None:
    keys = Keys()
    for name in users.NAMES:
        for pattern in users.read(name).keys:
            assert pattern.startswith((f"{keys.control}:", f"{keys.streams}:"))
    assert {path.stem for path in users.FOLDER.glob("*.acl")} == set(users.NAMES)

"""A daemon that cannot start names the problems and exits with a code for their kind.

This module also tests a backlog, and a server that is emptied.
"""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from streamqd.store.client import connect
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.ledger import Audit
from tests.support.servers import ProcessServer, free_port

pytestmark = pytest.mark.promise

NewDaemon = Callable[..., Daemon]

CONFIG, REDIS, DUPLICATE = 3, 4, 5


def refusal(daemon: Daemon, expected: int) -> list[str]:
    """Start a daemon that must refuse to start. Return the problems that it names, one per line.

    The daemon writes only JSON, with one event per problem.
    """
    before = len(daemon.events())
    daemon.start()
    assert daemon.wait(15) == expected
    told = [each for each in daemon.events()[before:] if each["level"] != "warning"]
    assert {(each["event"], each.get("code")) for each in told} == {("start.refused", expected)}
    assert daemon.plain == []
    said = [each["error"] for each in told]
    print(*said, sep="\n")
    assert not [each for each in told if "traceback" in each]
    return said


def problem(said: list[str], *words: str) -> str:
    """Return the only line that contains all of these words."""
    (found,) = [line for line in said if all(word in line for word in words)]
    return found


# --- the configuration ----------------------------------------------------------------------------


def test_start_names_all_configuration_problems_together(new_daemon: NewDaemon):
    daemon = new_daemon()
    daemon.write_config(
        daemon=daemon.tables["daemon"] | {"lease_tll": "15s", "drain_timeout": "soon"},
        http={"bind": 9464},
        topics={TOPIC: {"partitions": "four"}},
        consumers=[
            {"topic": TOPIC, "group": GROUP, "handler": "work.obey", "max_attempts": -1},
            {"topic": "a topic", "handler": "work:obey"},
        ],
        htpp={"bind": ""},
    )

    said = refusal(daemon, CONFIG)

    assert "lease_ttl" in problem(said, "daemon.lease_tll")
    assert "30s" in problem(said, "daemon.drain_timeout", "soon")
    problem(said, "http.bind", "9464")
    problem(said, f"topics.{TOPIC}.partitions", "four")
    problem(said, "handler", "work.obey", "module:function")
    problem(said, "max_attempts", "-1")
    problem(said, '"a topic"')
    problem(said, "group")
    assert "http" in problem(said, "htpp")


def test_start_names_problems_of_every_kind_together(new_daemon: NewDaemon):
    daemon = new_daemon()
    daemon.write_config(
        redis={"url": "redis://127.0.0.1:1/0"},
        daemon=daemon.tables["daemon"] | {"lease_tll": "15s", "drain_timeout": "soon"},
        consumers=[
            {"topic": TOPIC, "group": GROUP, "handler": "work:absent", "batch": 5},
            {"topic": TOPIC, "group": "other", "handler": "work:obey", "batch": 5},
        ],
    )

    said = refusal(daemon, CONFIG)

    assert "lease_ttl" in problem(said, "daemon.lease_tll")
    assert "30s" in problem(said, "daemon.drain_timeout", "soon")
    problem(said, "handlers", "work has no function absent")
    problem(said, "consumers[1].batch", "work:obey takes one message")
    problem(said, "redis: cannot connect to 127.0.0.1:1: Connection refused")
    assert "consumers[0]" not in said


def test_invalid_declaration_does_not_hide_a_wrong_handler(
    new_daemon: NewDaemon,
):
    code = """
from streamqd import handler

def obey(message): ...

@handler(topic="orders", group="slow", timeout="10s", hard_timeout="5s", batch=5)
def slow(message): ...
"""
    daemon = new_daemon(code=code, consumer={"batch": 5}, daemon={"handlers": ["work"]})

    said = refusal(daemon, CONFIG)

    problem(said, "hard_timeout", "is not longer than timeout")
    problem(said, "work:obey takes one message")
    problem(said, "work:slow takes one message")


def test_missing_or_invalid_config_file_is_named(new_daemon: NewDaemon):
    daemon = new_daemon()
    daemon.config_path.write_text("[daemon]\ninstance = one\n")
    problem(refusal(daemon, CONFIG), "one.toml:2")
    daemon.config_path.unlink()
    problem(refusal(daemon, CONFIG), "one.toml")


@pytest.mark.parametrize(
    ("code", "handler", "words"),
    [
        ("", "absent:obey", ["no module named absent"]),
        ("", "work:absent", ["work", "no function absent"]),
        ("obey = 3\n", "work:obey", ["work:obey", "not a function"]),
        ("def obey(one, two): ...\n", "work:obey", ["work:obey", "one argument"]),
        ("import absent_library\n", "work:obey", ["No module named 'absent_library'", "work.py:1"]),
        ("\n1 / 0\n", "work:obey", ["ZeroDivisionError", "work.py:2"]),
        ("raise SystemExit('no licence')\n", "work:obey", ["SystemExit: no licence", "work.py:1"]),
        ("import os\nos.kill(os.getpid(), 9)\n", "work:obey", ["signal SIGKILL"]),
    ],
)
def test_unusable_handler_is_named(
    new_daemon: NewDaemon, code: str, handler: str, words: list[str]
):
    daemon = new_daemon(consumer={"handler": handler})
    if code:
        daemon.write_code(code)
    problem(refusal(daemon, CONFIG), *words)


def test_wrong_handler_is_named_before_the_server_starts(new_daemon: NewDaemon):
    daemon = new_daemon(consumer={"handler": "absent:obey"})
    daemon.write_config(redis={"url": "embedded:"})
    problem(refusal(daemon, CONFIG), "no module named absent")


def test_daemon_without_consumers_is_refused(new_daemon: NewDaemon):
    daemon = new_daemon()
    daemon.write_config(consumers=[])
    problem(refusal(daemon, CONFIG), "none are configured", "daemon.handlers", "[[consumers]]")


def test_fewer_partitions_than_registered_are_refused(new_daemon: NewDaemon):
    daemon = new_daemon(partitions=3)
    with daemon:
        assert daemon.stop() == 0
        daemon.write_config(topics={TOPIC: {"partitions": 2}})
        daemon.start()
        assert daemon.wait() == CONFIG
        assert "cannot shrink, so write 3" in daemon.tail(3)


# --- the server -----------------------------------------------------------------------------------


def test_start_with_an_unreachable_redis_exits_4(new_daemon: NewDaemon, tmp_path: Path):
    """The daemon exits with code 4.

    Its message contains the address only once, and how long it tried.
    """
    daemon = new_daemon()
    daemon.write_config(redis={"url": f"unix://{tmp_path}/absent.sock"})
    said = problem(refusal(daemon, REDIS), "redis: cannot connect to")
    assert said.count("absent.sock") == 1
    assert re.search(r": No such file or directory \(tried for \d+ s\)$", said)
    [event] = daemon.events("redis.unavailable")
    assert event["seconds"] == 5.0
    assert f"{tmp_path}/absent.sock" in event["error"]


@pytest.mark.parametrize(
    ("lacking", "code"),
    [("login", "WRONGPASS"), ("password", "NOAUTH"), ("info", "NOPERM"), ("eval", "NOPERM")],
)
def test_start_with_a_refused_login_or_command_exits_4(
    new_daemon: NewDaemon, new_server: Callable[..., ProcessServer], lacking: str, code: str
):
    """The daemon exits with code 4.

    Its message contains the server's error, because the server did answer.
    """
    server, daemon = new_server(), new_daemon()
    (daemon.folder / "secret").write_text("wrong" if lacking == "login" else "right")
    (daemon.folder / "secret").chmod(0o600)
    login = {"username": "limited", "password_file": "secret"}
    commands = {"eval": ("-eval", "-evalsha"), "info": ("-info",)}.get(lacking, ())
    link = connect(server.settings, timeout=5.0, name="test")
    link.execute("ACL", "SETUSER", "limited", "on", ">right", "~*", "&*", "+@all", *commands)
    link.execute("ACL", "SETUSER", "default", "resetpass", ">other")
    link.close()
    login = {} if lacking == "password" else login
    daemon.write_config(redis={"url": server.url} | login)
    daemon.environment["STREAMQ_REDIS__USERNAME"] = login.get("username", "")  # no --acl user

    (said,) = refusal(daemon, REDIS)

    assert said.count(server.url) == 1
    assert code in said
    assert "no answer" not in said
    assert ("refused the connection" in said) == (lacking in ("login", "password"))
    assert ("streamqd check" in said) == (lacking == "eval")


def test_wrong_handler_and_silent_redis_are_named_together(new_daemon: NewDaemon):
    daemon = new_daemon(consumer={"handler": "absent:obey"})
    port = free_port()
    daemon.write_config(redis={"url": f"redis://127.0.0.1:{port}"})
    said = refusal(daemon, CONFIG)
    problem(said, "no module named absent")
    problem(said, f"redis: cannot connect to 127.0.0.1:{port}")


@pytest.mark.fault("F23")
def test_server_with_eviction_is_refused_unless_allowed(
    new_daemon: NewDaemon, new_server: Callable[..., ProcessServer]
):
    server = new_server()
    link = connect(server.settings, timeout=5.0, name="test")
    link.execute("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    link.close()
    daemon = new_daemon(consumer={"handler": "absent:obey"})
    daemon.write_config(redis={"url": server.url})

    said = refusal(daemon, CONFIG)

    problem(said, "maxmemory-policy is allkeys-lru", "noeviction", "allow_eviction")
    problem(said, "no module named absent")

    daemon.write_config(
        redis={"url": server.url, "allow_eviction": True},
        consumers=[daemon.tables["consumers"][0] | {"handler": "work:obey"}],
    )
    daemon.start()
    daemon.wait_event("daemon.ready")
    warned = [each["about"] for each in daemon.events("config.warning")]
    assert any("maxmemory-policy is allkeys-lru" in about for about in warned)
    assert daemon.stop() == 0


# --- a second instance ----------------------------------------------------------------------------


@pytest.mark.fault("F32")
def test_second_instance_with_the_same_id_exits_5(new_daemon: NewDaemon):
    first = new_daemon()
    with first:
        second = new_daemon(name="two", daemon={"instance": "one"})
        said = refusal(second, DUPLICATE)
        problem(said, "one is already running", f"process {first.pid}", "daemon.instance")
        first.send(["ok"] * 10)
        first.wait_settled()
        assert first.ledger.audit(GROUP) == Audit()
        assert first.events("worker.crashed") == []
        assert first.stop() == 0


def test_start_with_an_embedded_server_in_use_exits_5(new_daemon: NewDaemon, tmp_path: Path):
    first = new_daemon()
    first.write_config(redis={"url": "embedded:"})
    with first:
        second = new_daemon(name="two")
        second.write_config(redis={"url": "embedded:"})
        second.start()
        assert second.wait() == DUPLICATE
        assert first.running
        assert first.stop() == 0


# --- backlog --------------------------------------------------------------------------------------


SLOW_BIRTH = """
def on_start(context):
    while not Path("born").exists():
        time.sleep(0.005)
"""


def test_constantly_busy_worker_counts_as_ready(new_daemon: NewDaemon):
    daemon = new_daemon()
    daemon.write_code(daemon.module_path.read_text() + SLOW_BIRTH)
    daemon.start()
    daemon.wait_event("worker.started")
    (uid,) = daemon.send(["await go"])

    daemon.signal(signal.SIGSTOP)  # so that it never sees that the worker is idle
    (daemon.folder / "born").touch()
    daemon.wait_run(uid)
    daemon.signal(signal.SIGCONT)

    assert daemon.wait_event("worker.ready")["child"] == daemon.pids()[0]
    daemon.wait_event("daemon.ready")
    (daemon.folder / "go").touch()
    daemon.wait_settled()
    assert daemon.ledger.audit(GROUP) == Audit()
    assert daemon.stop() == 0


# --- an emptied server ----------------------------------------------------------------------------


@pytest.mark.fault("F15")
@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_daemon_recovers_from_an_emptied_server_under_load(
    new_daemon: NewDaemon, chance: random.Random, start: str
):
    daemon = new_daemon(
        partitions=4,
        groups=["bill", "ship"],
        consumer={"start": start},
        daemon={"lease_ttl": "2s"},
    )
    with daemon:
        before = daemon.epochs()
        daemon.send(f"sleep {chance.uniform(0, 0.01):.4f}" for _ in range(2000))
        daemon.wait_for(lambda: daemon.ledger.count("end") >= 200, what="200 have ended")

        daemon.link.execute("FLUSHALL")
        new = daemon.send(["ok"] * 400)  # before the daemon notices that the data is lost

        for group in daemon.groups:
            daemon.wait_for(
                lambda group=group: set(new) <= daemon.ledger.finished_uids(group),
                what=f"{group} has handled what was sent after the loss",
            )
        daemon.wait_settled()
        runs = daemon.ledger.records("start")
        assert len({(each.uid, each.group) for each in runs if each.uid in set(new)}) == 800
        assert len([each for each in runs if each.uid in set(new)]) == 800
        registry = daemon.link.execute("SMEMBERS", daemon.keys.registry())
        assert registry == [TOPIC.encode()]
        meta = daemon.link.execute("HGET", daemon.keys.meta(TOPIC), "partitionCount")
        assert meta == b"4"
        assert all(epoch > before[number] for number, epoch in daemon.epochs().items())
        assert daemon.events("worker.crashed") == daemon.events("worker.crash_looped") == []
        assert daemon.letters() == []
        assert daemon.stop() == 0

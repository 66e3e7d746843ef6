"""A bad value in Redis affects only the assignment or feature that it belongs to.

The promise is that all other partitions handle their messages within 2 s. The timeouts here are 10
times as long, because the machine may be busy.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from streamqd.store.keys import Keys
from tests.support.daemon import GROUP, TOPIC, Daemon

Make = Callable[..., Daemon]

PROMISED = 2.0
UNDER_LOAD = 10
LAST = "18446744073709551615-18446744073709551615"
ODD = ["abc", "", "1e308", "inf", "-1", "9" * 26, "0x10", b"\xff\xfe", "[" * 5_000]
KEYS = Keys()
ONE = (TOPIC, 0, GROUP)  # the assignment with bad values
FLEET = "default"

Plant = tuple[Any, ...]  # the words of a Redis command


def bad_hash_fields() -> Iterator[tuple[str, str]]:
    """Yield the hash fields of the assignment and its partition that a daemon reads."""
    for field in ("epoch", "owner", "since", "quarantine", "mark", "session"):
        yield KEYS.fence(*ONE), field
    for field in ("c", "f", "due", "last"):
        yield KEYS.attempts(*ONE), f"m:1-0:{field}"
    record = ("first", "removed", "size", "archived", f"floor:{GROUP}", "shrunk", "shrink_from")
    for field in (*record, "shrink_next", f"dropped_unread:{GROUP}", f"dropped_pending:{GROUP}"):
        yield KEYS.trim(TOPIC, 0), field
    yield KEYS.retry_items(*ONE), "m:1-0"
    yield KEYS.delayed_send_items(TOPIC, 0), "send"
    yield KEYS.moving(TOPIC, 0), "1-0"


def info(**told: Any) -> str:
    return json.dumps({"nonce": "n", "offers": [[TOPIC, GROUP]]} | told)


def bad_fleet_values() -> Iterator[tuple[str, list[Plant]]]:
    """Yield bad values of keys that all instances read."""
    for number, raw in enumerate(ODD):
        for field in ("last", "pause:*/*/*", "move:orders/0/bill", "drain:one", "reload:*"):
            yield f"{field} {number}", [("HSET", KEYS.directives(FLEET), field, raw)]
        for name in ("one", "two"):
            yield f"info of {name} {number}", [("HSET", KEYS.info(FLEET), name, raw)]
        yield f"registry {number}", [("SADD", KEYS.registry(), raw)]
    for field in ("weight", "cap", "owned", "reloaded", "ttl", "offers", "broken", "nonce"):
        # JSON has no infinity, but Python writes it.
        for number, value in enumerate((10**400, "x", [[]], {}, -1, float("inf"), None)):
            told = info(**{field: value})
            plant = (
                ("ZADD", KEYS.members(FLEET), 9e12, "two"),
                ("HSET", KEYS.info(FLEET), "two", told),
            )
            yield f"{field} of two {number}", list(plant)
    for score in ("inf", "-inf", "1e300"):
        yield f"score {score}", [("ZADD", KEYS.members(FLEET), score, "two")]
        yield f"own score {score}", [("ZADD", KEYS.members(FLEET), score, "one")]
        for key in (KEYS.retry(*ONE), KEYS.delayed_sends(TOPIC, 0)):
            yield f"{key} {score}", [("ZADD", key, score, "m:1-0")]
    for field in ("created", "settings", f"group:{GROUP}", "growTo", "growToken"):
        for number, raw in enumerate(ODD):
            yield f"{field} {number}", [("HSET", KEYS.meta(TOPIC), field, raw)]
    nested = json.dumps({"retention": {"max_age": {"a": [1]}}, "archive": [[]], "max_backlog": {}})
    yield "nested settings", [("HSET", KEYS.meta(TOPIC), "settings", nested)]


def bad_values() -> list[tuple[str, list[Plant]]]:
    of_hashes = [
        (f"{field} of {key} {number}", [("HSET", key, field, raw)])
        for key, field in bad_hash_fields()
        for number, raw in enumerate(ODD)
    ]
    return of_hashes + list(bad_fleet_values())


def test_running_instance_survives_every_bad_value(new_daemon: Make) -> None:
    """The instance keeps running while one field after another becomes bad, until all are bad."""
    daemon = new_daemon(partitions=2, daemon={"lease_ttl": "2s"})
    with daemon:
        mine = daemon.titles()
        planted = bad_values()
        for at, (name, commands) in enumerate(planted):
            for command in commands:
                daemon.link.execute(*command)
            if at % 8 == 0 or at == len(planted) - 1:
                (uid,) = daemon.send(["ok"], partition=1)
                daemon.wait_run(uid, "end", PROMISED * UNDER_LOAD)
                assert daemon.running, name
        # The next heartbeats, checks, measurements and trims read all bad values.
        mark = daemon.mark()
        for _ in range(4):
            heartbeat = daemon.link.execute("ZSCORE", KEYS.members(FLEET), "one")
            daemon.wait_for(
                lambda heartbeat=heartbeat: (
                    daemon.link.execute("ZSCORE", KEYS.members(FLEET), "one") != heartbeat
                ),
                what="the next beat",
            )
            (uid,) = daemon.send(["ok"], partition=1)
            daemon.wait_run(uid, "end", PROMISED * UNDER_LOAD)
        assert daemon.events("worker.crashed") == []
        assert daemon.events("housekeeper.exited") == []
        assert (
            daemon.titles()[f"streamqd: worker {TOPIC}/1 {GROUP}"]
            == mine[f"streamqd: worker {TOPIC}/1 {GROUP}"]
        )
        assert len(daemon.events("redis.bad_value", mark)) < 20, "once each"
        assert not daemon.plain, "a traceback"
        daemon.stop()


@pytest.mark.parametrize("raw", ODD, ids=lambda raw: str(raw)[:8])
def test_instance_starts_despite_bad_values(new_daemon: Make, raw: Any) -> None:
    """An instance starts although three partition counts, a trim record and a fence are bad."""
    daemon = new_daemon(partitions=2, daemon={"lease_ttl": "2s"})
    bad = ["bad1", "bad2", "bad3"]
    one = daemon.tables["consumers"][0]
    daemon.write_config(consumers=[one, *({**one, "topic": topic} for topic in bad)])
    for topic in bad:
        daemon.link.execute("HSET", KEYS.meta(topic), "partitionCount", raw)
    for key, field in bad_hash_fields():
        daemon.link.execute("HSET", key, field, raw)
    with daemon:
        (uid,) = daemon.send(["ok"], partition=1)
        daemon.wait_run(uid, "end", PROMISED * UNDER_LOAD)
        for topic in bad:
            found = daemon.wait_event("redis.bad_value", key=KEYS.meta(topic))
            assert found["field"] == "partitionCount"
        assert daemon.events("redis.bad_value", topic=None) or daemon.events("redis.bad_value")
        # Repaired topics and assignments are served without a restart.
        daemon.link.execute("HSET", KEYS.meta("bad1"), "partitionCount", 1)
        for key, _ in bad_hash_fields():
            daemon.link.execute("DEL", key)
        daemon.wait_event("worker.ready", topic="bad1", timeout=40.0)
        (uid,) = daemon.send(["ok"], partition=0)
        daemon.wait_run(uid, "end", 40.0)
        assert daemon.events("worker.crashed") == []
        assert not daemon.plain, "a traceback"
        assert daemon.stop() == 0


@pytest.mark.parametrize("name", ["members", "info", "directives"])
@pytest.mark.parametrize(("command", "found"), [("SET", "a string"), ("SADD", "a set")])
def test_start_names_a_fleet_key_of_a_wrong_type(
    new_daemon: Make, name: str, command: str, found: str
) -> None:
    """The event names the key, because the log would otherwise show only the SHA of a script."""
    daemon = new_daemon(partitions=1, daemon={"lease_ttl": "1s"})
    key = getattr(KEYS, name)(FLEET)
    daemon.link.execute(command, key, "x")
    daemon.start()
    started = daemon.wait_event("daemon.started")
    named = daemon.wait_event("redis.bad_value", timeout=PROMISED * UNDER_LOAD, key=key)
    seconds = (datetime.fromisoformat(named["ts"]) - datetime.fromisoformat(started["ts"])).seconds
    print(f"named after {seconds} s and less than another")
    assert named["found"] == found
    assert named["wanted"] == ("a sorted set" if name == "members" else "a hash")
    assert f"redis-cli RENAME '{key}' " in named["fix"]

    looks = count_zcards(daemon)
    daemon.wait_for(lambda: count_zcards(daemon) >= looks + 12, what="four more heartbeats")
    assert len(daemon.events("redis.bad_value")) == 1, "once"
    assert daemon.events("redis.refused") == []
    daemon.link.execute("RENAME", key, f"{key}:other")
    daemon.wait_event("worker.ready")
    assert not daemon.plain, "a traceback"
    assert daemon.stop() == 0


def count_zcards(daemon: Daemon) -> int:
    """Return the number of ZCARD calls that the server has handled. Each heartbeat makes three."""
    lines = daemon.link.execute("INFO", "commandstats").decode().splitlines()
    told = [line for line in lines if line.startswith("cmdstat_zcard:")]
    return int(told[0].partition("calls=")[2].partition(",")[0]) if told else 0


@pytest.mark.parametrize(("command", "found"), [("SET", "a string"), ("RPUSH", "another type")])
def test_other_topics_start_if_a_meta_key_has_a_wrong_type(
    new_daemon: Make, command: str, found: str
) -> None:
    """The event names the key with the wrong type, not the SHA of a script."""
    daemon = new_daemon(partitions=1)
    one = daemon.tables["consumers"][0]
    daemon.write_config(consumers=[one, {**one, "topic": "bad"}])
    daemon.link.execute(command, KEYS.meta("bad"), "x")
    with daemon:
        named = daemon.wait_event("redis.bad_value", topic="bad")
        assert (named["key"], named["found"]) == (KEYS.meta("bad"), found)
        assert "redis-cli RENAME" in named["fix"]
        (uid,) = daemon.send(["ok"], partition=0)
        daemon.wait_run(uid, "end", PROMISED * UNDER_LOAD)
        daemon.link.execute("DEL", KEYS.meta("bad"))
        daemon.wait_event("worker.ready", topic="bad", timeout=40.0)
        assert daemon.stop() == 0


def test_unreadable_fence_stops_only_its_partition(new_daemon: Make) -> None:
    """The next owner serves all other partitions, and also this one once its fence is repaired."""
    daemon = new_daemon(partitions=3, daemon={"lease_ttl": "2s"})
    daemon.start()
    daemon.wait_event("worker.ready", partition=2)
    assert daemon.stop() == 0
    fence = KEYS.fence(*ONE)
    daemon.link.execute("HSET", fence, "epoch", "zzz", "since", "never")
    mark = daemon.mark()
    with daemon:
        for number in (1, 2):
            (uid,) = daemon.send(["ok"], partition=number)
            daemon.wait_run(uid, "end", PROMISED * UNDER_LOAD)
        told = daemon.wait_event("redis.bad_value", after=mark)
        assert (told["key"], told["field"], told["found"]) == (fence, "epoch", "'zzz'")
        (uid,) = daemon.send(["ok"], partition=0)
        daemon.link.execute("HDEL", fence, "epoch", "since")
        daemon.wait_run(uid, "end")
        assert len(daemon.events("redis.bad_value", mark)) == 1
        assert daemon.stop() == 0


def test_50000_junk_directives_cause_few_log_lines(new_daemon: Make) -> None:
    """The daemon limits the number of log lines, and continues to handle messages."""
    daemon = new_daemon(partitions=1, daemon={"lease_ttl": "2s"})
    with daemon:
        for start in range(0, 50_000, 5_000):
            junk = [part for n in range(start, start + 5_000) for part in (f"junk:{n}", "x")]
            daemon.link.execute("HSET", KEYS.directives(FLEET), *junk)
        daemon.wait_for(
            lambda: any(each.get("more") for each in daemon.events("directive.ignored")),
            what="one line for all others",
            timeout=30.0,
        )
        (uid,) = daemon.send(["ok"])
        daemon.wait_run(uid, "end", PROMISED * UNDER_LOAD)
        assert len(daemon.events("directive.ignored")) < 200
        assert daemon.running


def test_partition_at_the_greatest_id_affects_no_other(new_daemon: Make) -> None:
    """After an XADD with the highest ID, the housekeeper and other partitions still work."""
    daemon = new_daemon(partitions=2, daemon={"lease_ttl": "2s"})
    with daemon:
        for stream in (KEYS.stream(TOPIC, 0), KEYS.retry_stream(*ONE)):
            daemon.link.execute("XADD", stream, LAST, "payload", "ok")
        daemon.wait_run(f"{TOPIC}/0/{LAST}", "end")
        daemon.wait_for(
            lambda: (
                (found := daemon.link.execute("GET", KEYS.instance(FLEET, "one"))) is not None
                and len(json.loads(found)["assignments"]) == 2
            ),
            what="both partitions are measured",
        )
        (uid,) = daemon.send(["ok"], partition=1)
        daemon.wait_run(uid, "end", PROMISED * UNDER_LOAD)
        assert daemon.events("housekeeper.failed") == []
        assert daemon.events("worker.crashed") == []
        assert daemon.stop() == 0


def test_topic_with_a_deleted_meta_key_is_registered_again(new_daemon: Make) -> None:
    """The topic returns within seconds with its partition count, so producers can send again."""
    daemon = new_daemon(partitions=3, daemon={"lease_ttl": "2s"})
    with daemon:
        for name in (KEYS.partitions(TOPIC), ""):
            mark = daemon.mark()
            # The configured number of partitions does not matter, because the topic already has 3.
            daemon.write_config(topics={TOPIC: {}})
            daemon.link.execute("DEL", KEYS.meta(TOPIC), *filter(None, [name]))
            daemon.wait_event("topic.restored", after=mark, topic=TOPIC, partitions=3)
            assert daemon.link.execute("HGET", KEYS.meta(TOPIC), "partitionCount") == b"3"
        (uid,) = daemon.send(["ok"], partition=2)
        daemon.wait_run(uid, "end", PROMISED * UNDER_LOAD)
        assert daemon.events("group.restored") == []
        assert daemon.stop() == 0


def _crash_with_bad_epoch(daemon: Daemon) -> None:
    """Kill the worker, and make the token rotation that follows fail."""
    daemon.link.execute("HSET", KEYS.fence(*ONE), "epoch", "zzz")
    os.kill(daemon.pids()[0], signal.SIGKILL)
    daemon.wait_event("redis.bad_value", request="refencing")


def _lease_of_wrong_type(daemon: Daemon) -> None:
    """Make the release fail that follows when the worker stops."""
    daemon.link.execute("DEL", KEYS.lease(*ONE))
    daemon.link.execute("HSET", KEYS.lease(*ONE), "spoiled", 1)


@pytest.mark.parametrize("spoil", [_crash_with_bad_epoch, _lease_of_wrong_type])
def test_drain_does_not_wait_for_a_lasting_bad_value(
    new_daemon: Make, spoil: Callable[[Daemon], None]
) -> None:
    """A drain exits with code 0, because no handler is running that it would have to wait for."""
    daemon = new_daemon(partitions=2, daemon={"lease_ttl": "3s", "drain_timeout": "25s"})
    with daemon:
        daemon.wait_event("worker.ready", partition=0)
        spoil(daemon)
        (uid,) = daemon.send(["ok"], partition=1)
        daemon.wait_run(uid, "end", PROMISED * UNDER_LOAD)
        began = time.monotonic()
        assert daemon.stop(timeout=25.0) == 0
        print(f"stopped after {time.monotonic() - began:.1f} s")
        assert daemon.link.execute("HGET", KEYS.fence(TOPIC, 1, GROUP), "token") is None, "released"

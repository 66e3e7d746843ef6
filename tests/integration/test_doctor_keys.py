"""`streamqd doctor` on broken invariants of topics and partitions, each seeded on a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner

from streamqd import config
from streamqd.admin.diagnosis import chosen, facts, partitions
from streamqd.admin.diagnosis.facts import Delays, DiagnosisFacts
from streamqd.admin.reading import BadValues
from streamqd.cli import cli
from streamqd.model import Unit
from streamqd.registration import ensure_topics
from streamqd.store import groups, messages, topics
from streamqd.store.client import Connection
from streamqd.store.store import Store
from tests.support.servers import Server
from tests.support.surgery import GROUP, TOPIC, Surgery


@pytest.fixture
def surgery(tmp_path: Path, server: Server, link: Connection) -> Surgery:
    made = Surgery(tmp_path, server.url, link)
    made.settle_in()
    return made


def test_doctor_finds_nothing_in_a_healthy_system(surgery: Surgery) -> None:
    """Messages in every healthy state cause no finding."""
    desk = surgery.desk
    desk.add("1-0", "payload", "a")
    desk.add("*", "payload", "b")
    desk.add("*", "payload", "c")
    desk.fetch(2)
    place = [(f"m:{desk.do('XPENDING', desk.stream, GROUP)[1].decode()}".encode(), 60.0, {})]
    desk.link.run(messages.retry(surgery.keys, desk.leased("t0"), place))
    assert desk.do("ZCARD", desk.delayed) == 1
    areas = [
        word
        for name in ("permissions", "topics", "partitions", "fleet", "host")
        for word in ("--only", name)
    ]
    report = surgery.run(*areas, code=0)
    assert (report["findings"], report["unseen"]) == ([], [])
    assert len(report["checks"]) > 35


def test_doctor_accepts_a_consumer_of_dead_letters(surgery: Surgery) -> None:
    with surgery.path.open("a") as file:
        file.write(
            '[[consumers]]\ntopic = "access"\ngroup = "undo"\nsource = "dlq"\n'
            'handler = "work:undo"\n'
        )
    settings = config.load(surgery.path)
    ensure_topics(surgery.link, settings)
    surgery.beat(offers=[[TOPIC, GROUP], [TOPIC, "undo@dlq"]])
    surgery.do("XADD", surgery.desk.dlq, "*", "payload", "x")
    areas = [word for name in ("topics", "partitions", "fleet") for word in ("--only", name)]
    assert surgery.run(*areas, code=0)["findings"] == []
    surgery.do("XGROUP", "DESTROY", surgery.desk.dlq, "undo@dlq")
    assert surgery.finding("partitions.group-missing")["about"] == "access/undo@dlq"


# --- topics ---------------------------------------------------------------------------------------


def test_doctor_finds_a_registered_name_without_topic(surgery: Surgery) -> None:
    surgery.silent("topics.without-meta")
    surgery.do("SADD", surgery.keys.registry(), "ghost")
    found = surgery.finding("topics.without-meta")
    assert found["about"] == "ghost"
    assert "SREM streaming:mq:topics:registry ghost" in found["fix"]


def test_doctor_finds_an_unregistered_topic(surgery: Surgery) -> None:
    surgery.silent("topics.unregistered")
    surgery.do("SREM", surgery.keys.registry(), TOPIC)
    assert (
        "SADD streaming:mq:topics:registry access" in surgery.finding("topics.unregistered")["fix"]
    )


def test_doctor_finds_a_wrong_partition_set(surgery: Surgery) -> None:
    surgery.silent("topics.partition-set")
    name = surgery.keys.partitions(TOPIC)
    surgery.do("SREM", name, surgery.keys.stream(TOPIC, 1))
    surgery.do("SADD", name, surgery.keys.stream(TOPIC, 7))
    evidence = surgery.finding("topics.partition-set")["evidence"]
    assert evidence["lacking"] == [surgery.keys.stream(TOPIC, 1)]
    assert evidence["unexpected"] == [surgery.keys.stream(TOPIC, 7)]


@pytest.mark.parametrize(("count", "severity"), [("4", "warning"), ("1", "problem")])
def test_doctor_finds_another_configured_partition_count(
    surgery: Surgery, count: str, severity: str
) -> None:
    surgery.silent("topics.configured-count")
    surgery.write(partitions=count)
    found = surgery.finding("topics.configured-count")
    assert found["severity"] == severity
    assert ("topic grow access 4" in found["fix"]) == (count == "4")


def test_doctor_finds_an_interrupted_topic_delete(surgery: Surgery) -> None:
    surgery.silent("topics.deletion")
    assert surgery.link.run(topics.retirement(surgery.keys, TOPIC)).word == "OK"
    assert "topic delete access --yes" in surgery.finding("topics.deletion")["fix"]
    surgery.silent("topics.without-meta")


@pytest.mark.parametrize(("field", "value"), [("partitionCount", "two"), ("settings", "[1")])
def test_doctor_finds_unreadable_topic_settings(surgery: Surgery, field: str, value: str) -> None:
    surgery.silent("topics.unreadable")
    surgery.do("HSET", surgery.keys.meta(TOPIC), field, value)
    assert surgery.finding("topics.unreadable")["about"] == TOPIC


def test_doctor_finds_topic_meta_of_another_type(surgery: Surgery) -> None:
    """S1: the fix was `topic create`, which such a key refuses."""
    meta = surgery.keys.meta(TOPIC)
    surgery.do("DEL", meta)
    surgery.do("RPUSH", meta, "x")
    found = surgery.finding("topics.unreadable")
    assert found["about"] == TOPIC
    assert "another type than a hash" in found["text"]
    assert f"redis-cli RENAME {meta}" in found["fix"]
    surgery.silent("topics.without-meta")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (("HDEL", "partitionCount"), "partitionCount of {meta} cannot be read: it is missing"),
        (("HSET", "partitionCount", ""), "partitionCount of {meta} cannot be read: it is ''"),
        (("DEL",), "partitionCount of {meta} cannot be read: it is missing"),
        (("SET", "x"), "{meta} cannot be read: it is of another type"),
    ],
)
def test_status_and_doctor_name_a_topic_without_a_count(
    surgery: Surgery, change: tuple[str, ...], found: str
) -> None:
    """S1: status omitted a topic without a partition count."""
    meta = surgery.keys.meta(TOPIC)
    surgery.do(change[0], meta, *change[1:])
    result = CliRunner().invoke(cli, ["--config", str(surgery.path), "status"])
    assert result.exit_code == 0
    assert found.format(meta=meta) in result.stderr
    named = [
        each
        for each in surgery.run("--only", "topics", "--only", "values", code=1)["findings"]
        if meta in each["text"]
    ]
    assert named


def test_status_names_a_topic_that_could_not_be_created(surgery: Surgery) -> None:
    """S1: status omitted a topic whose meta had another type before its first start."""
    settings = config.load(surgery.path)
    meta = surgery.keys.meta(TOPIC)
    surgery.do("FLUSHALL")
    surgery.do("SET", meta, "x")
    assert ensure_topics(surgery.link, settings) == {}
    result = CliRunner().invoke(cli, ["--config", str(surgery.path), "status"])
    assert f"{meta} cannot be read: it is of another type" in result.stderr
    surgery.do("DEL", meta)
    assert ensure_topics(surgery.link, settings) == {TOPIC: settings.topics[TOPIC].partitions}


def test_doctor_accepts_a_topic_being_deleted(surgery: Surgery) -> None:
    """S1: the deletion removes the count on purpose."""
    assert surgery.link.run(topics.retirement(surgery.keys, TOPIC)).word == "OK"
    result = CliRunner().invoke(cli, ["--config", str(surgery.path), "status"])
    assert "cannot be read" not in result.stderr


# --- partitions -----------------------------------------------------------------------------------


def test_doctor_finds_a_partition_key_of_another_type(surgery: Surgery) -> None:
    surgery.silent("partitions.wrong-type")
    stream, attempts = surgery.desk.stream, surgery.desk.attempts
    surgery.do("DEL", stream)
    surgery.do("SET", stream, "x")
    assert surgery.finding("partitions.wrong-type")["evidence"] == {"key": stream, "type": "string"}
    surgery.run()  # no other check fails

    surgery.do("DEL", stream)
    surgery.desk.groups()
    surgery.do("SADD", attempts, "x")
    assert surgery.finding("partitions.wrong-type")["evidence"] == {"key": attempts, "type": "set"}


def test_doctor_finds_a_missing_group(surgery: Surgery) -> None:
    surgery.silent("partitions.group-missing")
    surgery.do("XGROUP", "DESTROY", surgery.keys.stream(TOPIC, 1), GROUP)
    found = surgery.finding("partitions.group-missing")
    assert found["evidence"] == {"partitions": [1], "of": 2}
    assert "streamqd reload" in found["fix"]


def test_doctor_accepts_a_deleted_group(surgery: Surgery) -> None:
    desk = surgery.desk
    for number in range(2):
        unit = Unit(TOPIC, number, "old")
        desk.link.run(messages.ensure_group(surgery.keys, unit, "0"))
        desk.link.run(groups.delete(surgery.keys, unit, force=True, token="t9"))
    surgery.silent("partitions.group-missing")


@pytest.mark.fault("F29")
def test_doctor_finds_an_abandoned_group(surgery: Surgery) -> None:
    surgery.silent("partitions.group-abandoned")
    surgery.desk.link.run(messages.ensure_group(surgery.keys, Unit(TOPIC, 0, "old"), "0"))
    surgery.silent("partitions.group-abandoned")
    surgery.desk.add("*", "payload", "x")
    found = surgery.finding("partitions.group-abandoned")
    assert found["about"] == "access/old"
    assert "group delete access old" in found["fix"]


def test_doctor_finds_a_held_floor(surgery: Surgery) -> None:
    surgery.desk.add(f"{surgery.ago(7200)}-0", "payload", "x")
    surgery.silent("partitions.floor-held")
    surgery.write(topic='retention = { max_age = "1h" }')
    found = surgery.finding("partitions.floor-held")
    assert "2 hours ago" in found["text"]
    assert "streamqd why access/0/hits" in found["fix"]
    surgery.do("XACK", surgery.desk.stream, GROUP, *surgery.desk.fetch())
    surgery.silent("partitions.floor-held")


def test_doctor_finds_an_archive_that_lags(surgery: Surgery) -> None:
    entry = f"{surgery.ago(7200)}-0"
    surgery.desk.add(entry, "payload", "x")
    surgery.write(topic='archive = "required"\nretention = { max_age = "1h" }')
    assert surgery.finding("partitions.archive-lag")["evidence"] == {"partitions": [0]}
    surgery.do("HSET", surgery.desk.trim, "archived", entry)
    surgery.silent("partitions.archive-lag")


def test_doctor_finds_entries_of_other_clients(surgery: Surgery) -> None:
    surgery.desk.add("*", "payload", "x")
    surgery.desk.add("*", "payload", "y")
    surgery.desk.fetch(1)
    surgery.silent("partitions.other-client")
    surgery.desk.fetch(1, consumer="worker-7f")
    found = surgery.finding("partitions.other-client")
    assert found["evidence"]["consumers"] == ["worker-7f"]
    assert found["evidence"]["pending"] == 1


@pytest.mark.parametrize("keep", [0, 1])
def test_doctor_finds_missing_entries(surgery: Surgery, keep: int) -> None:
    for name in ("1-0", "2-0"):
        surgery.desk.add(name, "payload", "x")
    surgery.desk.fetch()
    surgery.silent("partitions.missing-entries")
    surgery.do("XTRIM", surgery.desk.stream, "MAXLEN", keep)
    assert surgery.finding("partitions.missing-entries")["evidence"]["oldest_pending"] == {
        "0": "1-0"
    }


def test_doctor_finds_a_missing_entry_of_the_retry_stream(surgery: Surgery) -> None:
    surgery.desk.add("1-0", "payload", "x", stream=surgery.desk.retry)
    surgery.desk.fetch(stream=surgery.desk.retry)
    surgery.silent("partitions.missing-entries")
    surgery.do("XTRIM", surgery.desk.retry, "MAXLEN", 0)
    surgery.finding("partitions.missing-entries")


def test_doctor_finds_a_large_message(surgery: Surgery) -> None:
    surgery.write(daemon='max_message_bytes = "10KiB"')
    surgery.desk.add("*", "payload", "x" * 10_240)
    surgery.silent("partitions.oversize")
    surgery.desk.add("*", "payload", "x" * 10_241)
    assert surgery.finding("partitions.oversize")["evidence"]["bytes"] == {"0": 10_241}


# --- delayed messages -----------------------------------------------------------------------------


def test_doctor_finds_a_due_time_without_a_message(surgery: Surgery) -> None:
    surgery.silent("partitions.delayed-lost")
    surgery.do("ZADD", surgery.desk.delayed, surgery.ago(-60), "m:1-0")
    found = surgery.finding("partitions.delayed-lost")
    assert found["evidence"]["members"] == ["m:1-0"]
    assert "m:1-0" in found["fix"]


def test_doctor_finds_a_message_without_a_due_time(surgery: Surgery) -> None:
    surgery.silent("partitions.delayed-stuck")
    surgery.do("HSET", surgery.desk.scheduled_items, "send-1", "x")
    found = surgery.finding("partitions.delayed-stuck")
    assert f"ZADD {surgery.desk.scheduled} 0 send-1" in found["fix"]


def test_doctor_finds_equal_numbers_of_stuck_and_lost_retries(surgery: Surgery) -> None:
    surgery.do("ZADD", surgery.desk.delayed, surgery.ago(-60), "m:1-0")
    surgery.do("HSET", surgery.desk.items, "m:2-0", "x")
    surgery.finding("partitions.delayed-lost")
    surgery.finding("partitions.delayed-stuck")


def test_too_many_to_compare_are_counted(surgery: Surgery) -> None:
    pairs = [part for n in range(1_100) for part in (f"m:{n}-0", "x")]
    surgery.do("HSET", surgery.desk.items, *pairs)
    assert "1,100 messages" in surgery.finding("partitions.delayed-stuck")["text"]


def test_doctor_finds_overdue_retries(surgery: Surgery) -> None:
    for due in (surgery.ago(10), surgery.ago(-10)):
        surgery.do("ZADD", surgery.desk.delayed, due, f"m:{due}-0")
        surgery.do("HSET", surgery.desk.items, f"m:{due}-0", "x")
    surgery.silent("partitions.overdue")
    surgery.do("ZADD", surgery.desk.delayed, surgery.ago(600), "m:1-0")
    surgery.do("HSET", surgery.desk.items, "m:1-0", "x")
    assert "10 minutes ago" in surgery.finding("partitions.overdue")["text"]


# --- dead letters ---------------------------------------------------------------------------------


def test_doctor_finds_many_dead_letters(surgery: Surgery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "MANY", 3)
    for _ in range(3):
        surgery.do("XADD", surgery.desk.dlq, "*", "payload", "x")
    surgery.silent("partitions.dead-letters-many")
    surgery.do("XADD", surgery.keys.dlq(TOPIC, 1), "*", "payload", "x")
    assert surgery.finding("partitions.dead-letters-many")["evidence"] == {"dead_letters": 4}


def test_doctor_finds_old_dead_letters(surgery: Surgery) -> None:
    surgery.do("XADD", surgery.desk.dlq, f"{surgery.ago(86_400)}-0", "payload", "x")
    surgery.silent("partitions.dead-letters-old")
    surgery.write(topic='dlq_retention = "2h"')
    assert "partition 0 of access" in surgery.finding("partitions.dead-letters-old")["text"]


def test_doctor_finds_growing_dead_letters(surgery: Surgery) -> None:
    unit = {"topic": TOPIC, "partition": 0, "group": GROUP, "rates": {"dead_lettered": 0.0}}
    surgery.publish(assignments=[unit])
    surgery.silent("partitions.dead-letters-growing")
    surgery.publish(assignments=[{**unit, "rates": {"dead_lettered": 0.5}}, {"rates": 7}])
    assert "30.0 dead letters" in surgery.finding("partitions.dead-letters-growing")["text"]


# --- bounds ---------------------------------------------------------------------------------------


def test_doctor_reports_unchecked_partitions(
    surgery: Surgery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "PARTITIONS_MAX", 3)
    topics.create(surgery.store, "other", config.Topic(partitions=4))
    report = surgery.run("--only", "partitions.missing-entries", code=0)
    assert report["unseen"] == ["4 of 6 partitions: the last of each topic"]


# --- changes between two checks -------------------------------------------------------------------


class Busy:
    """Runs a change once between two commands of the doctor, right after the command `word`."""

    def __init__(self, link: Connection, word: str, work: Callable[[], object]) -> None:
        self.link, self.word, self.work = link, word, work
        self.run_many = link.run_many

    def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        replies = self.link.pipeline(commands)
        if any(command[0] == self.word for command in commands):
            self.work()
            self.word = ""
        return replies


def busy_store(surgery: Surgery, word: str, work: Callable[[], object]) -> Store:
    return Store(cast(Connection, Busy(surgery.link, word, work)), surgery.keys)


def test_doctor_tolerates_delayed_messages_that_move(surgery: Surgery) -> None:
    pair = surgery.desk.delayed, surgery.desk.items
    surgery.do("ZADD", pair[0], 1, "m:1-0")
    busy = busy_store(surgery, "HKEYS", lambda: surgery.do("HSET", pair[1], "m:1-0", "x"))
    assert facts.gather_delays(busy, BadValues(), [pair]) == [Delays(pair[0], 1, 1, [], [])]


def test_doctor_tolerates_a_new_owner(surgery: Surgery) -> None:
    unit = Unit(TOPIC, 0, GROUP)
    surgery.do("HDEL", surgery.desk.fence, "token")
    busy = busy_store(
        surgery, "PTTL", lambda: surgery.do("HSET", surgery.desk.fence, "token", "t0")
    )
    bad = BadValues()
    topics_found = facts.gather_topics(busy, bad, config.load(surgery.path), [])
    places, _ = facts.places_of(topics_found)
    looked = facts.gather_partitions(surgery.store, bad, places, bodies=False)
    found = facts.gather_units(busy, bad, looked)
    [unit_found] = [each for each in found if each.unit == unit]
    assert [look.lease_matches for look in unit_found.looks] == [False, True]
    seen = DiagnosisFacts(config.load(surgery.path), surgery.ago(0), units=found)
    [check] = chosen(["fleet.lease-without-fence"])
    assert list(check.judge(seen)) == []


# --- ids and entries without a consumer -----------------------------------------------------------


def test_doctor_finds_a_partition_without_free_ids(surgery: Surgery) -> None:
    """S3: no id can follow the largest one. An id far ahead of the clock is a warning."""
    surgery.desk.add("*", "payload", "x")
    surgery.silent("partitions.no-room")
    ahead = surgery.desk.now_unix_ms() + 10 * 86_400_000
    surgery.do("XADD", surgery.desk.stream, f"{ahead}-0", "payload", "x")
    found = surgery.finding("partitions.no-room")
    assert (found["severity"], found["about"]) == ("warning", "access/0")
    surgery.do("XADD", surgery.desk.stream, f"{(1 << 64) - 1}-{(1 << 64) - 1}", "payload", "x")
    found = surgery.finding("partitions.no-room")
    assert found["severity"] == "problem"
    assert "create a topic under another name" in found["fix"]


def test_entries_that_no_consumer_has(surgery: Surgery) -> None:
    """S11: XNACK of Redis 8.8 leaves such entries. Here the consumer '' has the same effect."""
    surgery.desk.add("1-0", "payload", "x")
    surgery.desk.add("2-0", "payload", "x")
    surgery.desk.fetch(2)
    surgery.silent("partitions.unowned")
    surgery.do("XCLAIM", surgery.desk.stream, GROUP, "", 0, "1-0", "JUSTID")
    found = surgery.finding("partitions.unowned")
    assert (found["about"], found["evidence"]["unowned"]) == ("access/hits", 1)
    surgery.silent("partitions.other-client")
    shown = CliRunner().invoke(cli, ["--config", str(surgery.path), "pending", TOPIC])
    assert "(unowned)" in shown.stdout
    told = CliRunner().invoke(
        cli, ["--config", str(surgery.path), "pending", TOPIC, "--sort", "idle", "--json"]
    )
    first = json.loads(told.stdout)["rows"][0]
    assert (first["place"], first["consumer"], first["idle_ms"]) == ("m:1-0", "", None)
    why = CliRunner().invoke(cli, ["--config", str(surgery.path), "why", "access/0"])
    assert "no consumer has 1 message of access/0/hits" in why.stdout


def test_doctor_prints_the_repair_of_a_bad_value(surgery: Surgery) -> None:
    """C1: doctor prints the exact command that repairs it. Other files test the other fields."""
    surgery.silent("values.unreadable")
    surgery.do("HSET", surgery.desk.fence, "epoch", "zzz")
    found = surgery.finding("values.unreadable")
    assert found["about"] == "access/0/hits"
    assert f"`redis-cli HDEL {surgery.desk.fence} epoch`" in found["fix"].replace("'", "")
    command = found["fix"].split("`")[1].split()[1:]
    surgery.do(*(word.strip("'") for word in command))
    surgery.silent("values.unreadable")
    surgery.do("SADD", surgery.keys.registry(), b"\xff")
    found = surgery.finding("values.unreadable")
    assert found["fix"] == f"`redis-cli SREM {surgery.keys.registry()} $'\\xff'`"
    surgery.do("SADD", surgery.keys.registry(), b"\xfe")
    findings = surgery.run("--only", "values")["findings"]
    names = [each["fix"].rpartition(" ")[2] for each in findings]
    assert names == ["$'\\xfe'`", "$'\\xff'`"], "each key is named"


@pytest.mark.parametrize(
    ("kind", "change", "found"),
    [
        ("lease", ("HSET", "a", "b"), "it is a hash and not a string"),
        ("retry_stream", ("SET", "x"), "it is a string and not a stream"),
    ],
)
def test_why_names_the_key_of_the_wrong_type(
    surgery: Surgery, kind: str, change: tuple[str, ...], found: str
) -> None:
    """B3: why named the stream for each key of its partition, and was silent about a lease."""
    key = getattr(surgery.keys, kind)(TOPIC, 0, GROUP)
    surgery.do("DEL", surgery.keys.fence(TOPIC, 0, GROUP))
    surgery.do("DEL", key)
    surgery.do(change[0], key, *change[1:])
    result = CliRunner().invoke(cli, ["--config", str(surgery.path), "why", f"{TOPIC}/0"])
    assert f"! {key} cannot be read: {found}\n" in result.stderr
    assert f"{surgery.keys.stream(TOPIC, 0)} cannot be read" not in result.stderr
    assert "WRONGTYPE" not in result.output

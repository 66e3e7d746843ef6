"""`streamqd doctor` finds topics and partitions with broken invariants, seeded on a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner

from streamqd import config
from streamqd.admin.diagnosis import facts, partitions, select_checks
from streamqd.admin.diagnosis.facts import Delays, DiagnosisFacts
from streamqd.admin.reading import ViewReader
from streamqd.cli import cli
from streamqd.model import Assignment
from streamqd.registration import ensure_topics
from streamqd.store import groups, messages, topics
from streamqd.store.client import Connection
from streamqd.store.store import Store
from tests.support.doctor_case import GROUP, TOPIC, DoctorCase
from tests.support.servers import Server


@pytest.fixture
def doctor_case(tmp_path: Path, server: Server, link: Connection) -> DoctorCase:
    made = DoctorCase(tmp_path, server.url, link)
    made.settle_in()
    return made


def test_doctor_finds_nothing_in_a_healthy_system(doctor_case: DoctorCase) -> None:
    """The doctor finds nothing while messages are in every healthy state."""
    harness = doctor_case.harness
    harness.add("1-0", "payload", "a")
    harness.add("*", "payload", "b")
    harness.add("*", "payload", "c")
    harness.fetch(2)
    place = [(f"m:{harness.do('XPENDING', harness.stream, GROUP)[1].decode()}".encode(), 60.0, {})]
    harness.link.run(messages.retry(doctor_case.keys, harness.leased("t0"), place))
    assert harness.do("ZCARD", harness.delayed) == 1
    areas = [
        word
        for name in ("permissions", "topics", "partitions", "fleet", "host")
        for word in ("--only", name)
    ]
    report = doctor_case.run(*areas, code=0)
    assert (report["findings"], report["unseen"]) == ([], [])
    assert len(report["checks"]) > 35


def test_doctor_accepts_a_consumer_of_dead_letters(doctor_case: DoctorCase) -> None:
    with doctor_case.path.open("a") as file:
        file.write(
            '[[consumers]]\ntopic = "access"\ngroup = "undo"\nsource = "dlq"\n'
            'handler = "work:undo"\n'
        )
    settings = config.load(doctor_case.path)
    ensure_topics(doctor_case.link, settings)
    doctor_case.heartbeat(offers=[[TOPIC, GROUP], [TOPIC, "undo@dlq"]])
    doctor_case.do("XADD", doctor_case.harness.dlq, "*", "payload", "x")
    areas = [word for name in ("topics", "partitions", "fleet") for word in ("--only", name)]
    assert doctor_case.run(*areas, code=0)["findings"] == []
    doctor_case.do("XGROUP", "DESTROY", doctor_case.harness.dlq, "undo@dlq")
    assert doctor_case.finding("partitions.group-missing")["about"] == "access/undo@dlq"


# --- topics ---------------------------------------------------------------------------------------


def test_doctor_finds_a_registered_name_without_topic(doctor_case: DoctorCase) -> None:
    doctor_case.silent("topics.without-meta")
    doctor_case.do("SADD", doctor_case.keys.registry(), "ghost")
    found = doctor_case.finding("topics.without-meta")
    assert found["about"] == "ghost"
    assert "SREM streaming:mq:topics:registry ghost" in found["fix"]


def test_doctor_finds_an_unregistered_topic(doctor_case: DoctorCase) -> None:
    doctor_case.silent("topics.unregistered")
    doctor_case.do("SREM", doctor_case.keys.registry(), TOPIC)
    assert (
        "SADD streaming:mq:topics:registry access"
        in doctor_case.finding("topics.unregistered")["fix"]
    )


def test_doctor_finds_a_wrong_partition_set(doctor_case: DoctorCase) -> None:
    doctor_case.silent("topics.partition-set")
    name = doctor_case.keys.partitions(TOPIC)
    doctor_case.do("SREM", name, doctor_case.keys.stream(TOPIC, 1))
    doctor_case.do("SADD", name, doctor_case.keys.stream(TOPIC, 7))
    evidence = doctor_case.finding("topics.partition-set")["evidence"]
    assert evidence["lacking"] == [doctor_case.keys.stream(TOPIC, 1)]
    assert evidence["unexpected"] == [doctor_case.keys.stream(TOPIC, 7)]


@pytest.mark.parametrize(("count", "severity"), [("4", "warning"), ("1", "problem")])
def test_doctor_finds_another_configured_partition_count(
    doctor_case: DoctorCase, count: str, severity: str
) -> None:
    doctor_case.silent("topics.configured-count")
    doctor_case.write(partitions=count)
    found = doctor_case.finding("topics.configured-count")
    assert found["severity"] == severity
    assert ("topic grow access 4" in found["fix"]) == (count == "4")


def test_doctor_finds_an_interrupted_topic_delete(doctor_case: DoctorCase) -> None:
    doctor_case.silent("topics.deletion")
    assert doctor_case.link.run(topics.retire_call(doctor_case.keys, TOPIC)).word == "OK"
    assert "topic delete access --yes" in doctor_case.finding("topics.deletion")["fix"]
    doctor_case.silent("topics.without-meta")


@pytest.mark.parametrize(("field", "value"), [("partitionCount", "two"), ("settings", "[1")])
def test_doctor_finds_unreadable_topic_settings(
    doctor_case: DoctorCase, field: str, value: str
) -> None:
    doctor_case.silent("topics.unreadable")
    doctor_case.do("HSET", doctor_case.keys.meta(TOPIC), field, value)
    assert doctor_case.finding("topics.unreadable")["about"] == TOPIC


def test_doctor_finds_topic_meta_of_another_type(doctor_case: DoctorCase) -> None:
    """The fix does not suggest `topic create`, because that command would fail on such a key."""
    meta = doctor_case.keys.meta(TOPIC)
    doctor_case.do("DEL", meta)
    doctor_case.do("RPUSH", meta, "x")
    found = doctor_case.finding("topics.unreadable")
    assert found["about"] == TOPIC
    assert "is not a hash" in found["text"]
    assert f"redis-cli RENAME {meta}" in found["fix"]
    doctor_case.silent("topics.without-meta")


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
    doctor_case: DoctorCase, change: tuple[str, ...], found: str
) -> None:
    """`status` also lists a topic that has no partition count."""
    meta = doctor_case.keys.meta(TOPIC)
    doctor_case.do(change[0], meta, *change[1:])
    result = CliRunner().invoke(cli, ["--config", str(doctor_case.path), "status"])
    assert result.exit_code == 0
    assert found.format(meta=meta) in result.stderr
    named = [
        each
        for each in doctor_case.run("--only", "topics", "--only", "values", code=1)["findings"]
        if meta in each["text"]
    ]
    assert named


def test_status_names_a_topic_that_could_not_be_created(doctor_case: DoctorCase) -> None:
    """`status` lists a topic whose meta key already had another type at its first start."""
    settings = config.load(doctor_case.path)
    meta = doctor_case.keys.meta(TOPIC)
    doctor_case.do("FLUSHALL")
    doctor_case.do("SET", meta, "x")
    assert ensure_topics(doctor_case.link, settings) == {}
    result = CliRunner().invoke(cli, ["--config", str(doctor_case.path), "status"])
    assert f"{meta} cannot be read: it is of another type" in result.stderr
    doctor_case.do("DEL", meta)
    assert ensure_topics(doctor_case.link, settings) == {TOPIC: settings.topics[TOPIC].partitions}


def test_doctor_accepts_a_topic_being_deleted(doctor_case: DoctorCase) -> None:
    """The doctor accepts a missing count, because deleting a topic removes it on purpose."""
    assert doctor_case.link.run(topics.retire_call(doctor_case.keys, TOPIC)).word == "OK"
    result = CliRunner().invoke(cli, ["--config", str(doctor_case.path), "status"])
    assert "cannot be read" not in result.stderr


# --- partitions -----------------------------------------------------------------------------------


def test_doctor_finds_a_partition_key_of_another_type(doctor_case: DoctorCase) -> None:
    doctor_case.silent("partitions.wrong-type")
    stream, attempts = doctor_case.harness.stream, doctor_case.harness.attempts
    doctor_case.do("DEL", stream)
    doctor_case.do("SET", stream, "x")
    assert doctor_case.finding("partitions.wrong-type")["evidence"] == {
        "key": stream,
        "type": "string",
    }
    doctor_case.run()  # no other check fails

    doctor_case.do("DEL", stream)
    doctor_case.harness.groups()
    doctor_case.do("SADD", attempts, "x")
    assert doctor_case.finding("partitions.wrong-type")["evidence"] == {
        "key": attempts,
        "type": "set",
    }


def test_doctor_finds_a_missing_group(doctor_case: DoctorCase) -> None:
    doctor_case.silent("partitions.group-missing")
    doctor_case.do("XGROUP", "DESTROY", doctor_case.keys.stream(TOPIC, 1), GROUP)
    found = doctor_case.finding("partitions.group-missing")
    assert found["evidence"] == {"partitions": [1], "of": 2}
    assert "streamqd reload" in found["fix"]


def test_doctor_accepts_a_deleted_group(doctor_case: DoctorCase) -> None:
    harness = doctor_case.harness
    for number in range(2):
        assignment = Assignment(TOPIC, number, "old")
        harness.link.run(messages.ensure_group(doctor_case.keys, assignment, "0"))
        harness.link.run(groups.delete(doctor_case.keys, assignment, force=True, token="t9"))
    doctor_case.silent("partitions.group-missing")


@pytest.mark.fault("F29")
def test_doctor_finds_an_abandoned_group(doctor_case: DoctorCase) -> None:
    doctor_case.silent("partitions.group-abandoned")
    doctor_case.harness.link.run(
        messages.ensure_group(doctor_case.keys, Assignment(TOPIC, 0, "old"), "0")
    )
    doctor_case.silent("partitions.group-abandoned")
    doctor_case.harness.add("*", "payload", "x")
    found = doctor_case.finding("partitions.group-abandoned")
    assert found["about"] == "access/old"
    assert "group delete access old" in found["fix"]


def test_doctor_finds_a_held_floor(doctor_case: DoctorCase) -> None:
    doctor_case.harness.add(f"{doctor_case.ago(7200)}-0", "payload", "x")
    doctor_case.silent("partitions.floor-held")
    doctor_case.write(topic='retention = { max_age = "1h" }')
    found = doctor_case.finding("partitions.floor-held")
    assert "2 hours old" in found["text"]
    assert "streamqd why access/0/hits" in found["fix"]
    doctor_case.do("XACK", doctor_case.harness.stream, GROUP, *doctor_case.harness.fetch())
    doctor_case.silent("partitions.floor-held")


def test_doctor_finds_a_lagging_archive(doctor_case: DoctorCase) -> None:
    entry = f"{doctor_case.ago(7200)}-0"
    doctor_case.harness.add(entry, "payload", "x")
    doctor_case.write(topic='archive = "required"\nretention = { max_age = "1h" }')
    assert doctor_case.finding("partitions.archive-lag")["evidence"] == {"partitions": [0]}
    doctor_case.do("HSET", doctor_case.harness.trim, "archived", entry)
    doctor_case.silent("partitions.archive-lag")


def test_doctor_finds_entries_of_other_clients(doctor_case: DoctorCase) -> None:
    doctor_case.harness.add("*", "payload", "x")
    doctor_case.harness.add("*", "payload", "y")
    doctor_case.harness.fetch(1)
    doctor_case.silent("partitions.other-client")
    doctor_case.harness.fetch(1, consumer="worker-7f")
    found = doctor_case.finding("partitions.other-client")
    assert found["evidence"]["consumers"] == ["worker-7f"]
    assert found["evidence"]["pending"] == 1


@pytest.mark.parametrize("keep", [0, 1])
def test_doctor_finds_missing_entries(doctor_case: DoctorCase, keep: int) -> None:
    for name in ("1-0", "2-0"):
        doctor_case.harness.add(name, "payload", "x")
    doctor_case.harness.fetch()
    doctor_case.silent("partitions.missing-entries")
    doctor_case.do("XTRIM", doctor_case.harness.stream, "MAXLEN", keep)
    assert doctor_case.finding("partitions.missing-entries")["evidence"]["oldest_pending"] == {
        "0": "1-0"
    }


def test_doctor_finds_a_missing_entry_of_the_retry_stream(doctor_case: DoctorCase) -> None:
    doctor_case.harness.add("1-0", "payload", "x", stream=doctor_case.harness.retry)
    doctor_case.harness.fetch(stream=doctor_case.harness.retry)
    doctor_case.silent("partitions.missing-entries")
    doctor_case.do("XTRIM", doctor_case.harness.retry, "MAXLEN", 0)
    doctor_case.finding("partitions.missing-entries")


def test_doctor_finds_a_large_message(doctor_case: DoctorCase) -> None:
    doctor_case.write(daemon='max_message_bytes = "10KiB"')
    doctor_case.harness.add("*", "payload", "x" * 10_240)
    doctor_case.silent("partitions.oversize")
    doctor_case.harness.add("*", "payload", "x" * 10_241)
    assert doctor_case.finding("partitions.oversize")["evidence"]["bytes"] == {"0": 10_241}


# --- delayed messages -----------------------------------------------------------------------------


def test_doctor_finds_a_due_time_without_a_message(doctor_case: DoctorCase) -> None:
    doctor_case.silent("partitions.waiting-lost")
    doctor_case.do("ZADD", doctor_case.harness.delayed, doctor_case.ago(-60), "m:1-0")
    found = doctor_case.finding("partitions.waiting-lost")
    assert found["evidence"]["members"] == ["m:1-0"]
    assert "m:1-0" in found["fix"]


def test_doctor_finds_a_message_without_a_due_time(doctor_case: DoctorCase) -> None:
    doctor_case.silent("partitions.waiting-stuck")
    doctor_case.do("HSET", doctor_case.harness.delayed_send_items, "send-1", "x")
    found = doctor_case.finding("partitions.waiting-stuck")
    assert f"ZADD {doctor_case.harness.delayed_sends} 0 send-1" in found["fix"]


def test_doctor_distinguishes_stuck_and_lost_retries(doctor_case: DoctorCase) -> None:
    doctor_case.do("ZADD", doctor_case.harness.delayed, doctor_case.ago(-60), "m:1-0")
    doctor_case.do("HSET", doctor_case.harness.items, "m:2-0", "x")
    doctor_case.finding("partitions.waiting-lost")
    doctor_case.finding("partitions.waiting-stuck")


def test_doctor_counts_retries_above_the_comparison_limit(doctor_case: DoctorCase) -> None:
    pairs = [part for n in range(1_100) for part in (f"m:{n}-0", "x")]
    doctor_case.do("HSET", doctor_case.harness.items, *pairs)
    assert "1,100 messages" in doctor_case.finding("partitions.waiting-stuck")["text"]


def test_doctor_finds_overdue_retries(doctor_case: DoctorCase) -> None:
    for due in (doctor_case.ago(10), doctor_case.ago(-10)):
        doctor_case.do("ZADD", doctor_case.harness.delayed, due, f"m:{due}-0")
        doctor_case.do("HSET", doctor_case.harness.items, f"m:{due}-0", "x")
    doctor_case.silent("partitions.overdue")
    doctor_case.do("ZADD", doctor_case.harness.delayed, doctor_case.ago(600), "m:1-0")
    doctor_case.do("HSET", doctor_case.harness.items, "m:1-0", "x")
    assert "10 minutes ago" in doctor_case.finding("partitions.overdue")["text"]


# --- dead letters ---------------------------------------------------------------------------------


def test_doctor_finds_many_dead_letters(
    doctor_case: DoctorCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "MANY", 3)
    for _ in range(3):
        doctor_case.do("XADD", doctor_case.harness.dlq, "*", "payload", "x")
    doctor_case.silent("partitions.dead-letters-many")
    doctor_case.do("XADD", doctor_case.keys.dlq(TOPIC, 1), "*", "payload", "x")
    assert doctor_case.finding("partitions.dead-letters-many")["evidence"] == {"dead_letters": 4}


def test_doctor_finds_old_dead_letters(doctor_case: DoctorCase) -> None:
    doctor_case.do("XADD", doctor_case.harness.dlq, f"{doctor_case.ago(86_400)}-0", "payload", "x")
    doctor_case.silent("partitions.dead-letters-old")
    doctor_case.write(topic='dlq_retention = "2h"')
    assert "partition 0 of access" in doctor_case.finding("partitions.dead-letters-old")["text"]


def test_doctor_finds_growing_dead_letters(doctor_case: DoctorCase) -> None:
    assignment = {"topic": TOPIC, "partition": 0, "group": GROUP, "rates": {"dead_lettered": 0.0}}
    doctor_case.publish(assignments=[assignment])
    doctor_case.silent("partitions.dead-letters-growing")
    doctor_case.publish(assignments=[{**assignment, "rates": {"dead_lettered": 0.5}}, {"rates": 7}])
    assert "30.0 dead letters" in doctor_case.finding("partitions.dead-letters-growing")["text"]


# --- bounds ---------------------------------------------------------------------------------------


def test_doctor_reports_unchecked_partitions(
    doctor_case: DoctorCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "PARTITIONS_MAX", 3)
    topics.create(doctor_case.store, "other", config.Topic(partitions=4))
    report = doctor_case.run("--only", "partitions.missing-entries", code=0)
    assert report["unseen"] == ["4 of 6 partitions: the last of each topic"]


# --- changes between two checks -------------------------------------------------------------------


class Busy:
    """Make a change between two commands of the doctor, once, right after the command `word`."""

    def __init__(self, link: Connection, word: str, work: Callable[[], object]) -> None:
        self.link, self.word, self.work = link, word, work
        self.run_many, self.run_each = link.run_many, link.run_each

    def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        replies = self.link.pipeline(commands)
        if any(command[0] == self.word for command in commands):
            self.work()
            self.word = ""
        return replies


def busy_store(doctor_case: DoctorCase, word: str, work: Callable[[], object]) -> Store:
    return Store(cast(Connection, Busy(doctor_case.link, word, work)), doctor_case.keys)


def test_doctor_tolerates_concurrent_promotions(doctor_case: DoctorCase) -> None:
    pair = doctor_case.harness.delayed, doctor_case.harness.items
    doctor_case.do("ZADD", pair[0], 1, "m:1-0")
    busy = busy_store(doctor_case, "HKEYS", lambda: doctor_case.do("HSET", pair[1], "m:1-0", "x"))
    assert facts.gather_delays(ViewReader(busy), [pair]) == [Delays(pair[0], 1, 1, [], [])]


def test_doctor_tolerates_a_new_owner(doctor_case: DoctorCase) -> None:
    assignment = Assignment(TOPIC, 0, GROUP)
    doctor_case.do("HDEL", doctor_case.harness.fence, "token")
    busy = busy_store(
        doctor_case,
        "PTTL",
        lambda: doctor_case.do("HSET", doctor_case.harness.fence, "token", "t0"),
    )
    reader = ViewReader(busy)
    topics_found = facts.gather_topics(reader, config.load(doctor_case.path), [])
    places, _ = facts.select_partitions(topics_found)
    looked = facts.gather_partitions(reader.for_store(doctor_case.store), places, bodies=False)
    found = facts.gather_assignments(reader, looked)
    [assignment_found] = [each for each in found if each.assignment == assignment]
    assert [lease_check.lease_matches for lease_check in assignment_found.lease_checks] == [
        False,
        True,
    ]
    seen = DiagnosisFacts(config.load(doctor_case.path), doctor_case.ago(0), assignments=found)
    [check] = select_checks(["fleet.lease-without-fence"])
    assert list(check.run(seen)) == []


# --- ids and entries without a consumer -----------------------------------------------------------


def test_doctor_finds_a_partition_without_free_ids(doctor_case: DoctorCase) -> None:
    """The largest possible ID is an error, because no entry can follow it.

    An ID in the future is only a warning.
    """
    doctor_case.harness.add("*", "payload", "x")
    doctor_case.silent("partitions.no-room")
    ahead = doctor_case.harness.now_unix_ms() + 10 * 86_400_000
    doctor_case.do("XADD", doctor_case.harness.stream, f"{ahead}-0", "payload", "x")
    found = doctor_case.finding("partitions.no-room")
    assert (found["severity"], found["about"]) == ("warning", "access/0")
    doctor_case.do(
        "XADD", doctor_case.harness.stream, f"{(1 << 64) - 1}-{(1 << 64) - 1}", "payload", "x"
    )
    found = doctor_case.finding("partitions.no-room")
    assert found["severity"] == "problem"
    assert "create a topic under another name" in found["fix"]


def test_doctor_finds_entries_without_a_consumer(doctor_case: DoctorCase) -> None:
    """The doctor finds entries without a consumer, which XNACK of Redis 8.8 leaves.

    Here, the consumer '' has the same effect.
    """
    doctor_case.harness.add("1-0", "payload", "x")
    doctor_case.harness.add("2-0", "payload", "x")
    doctor_case.harness.fetch(2)
    doctor_case.silent("partitions.unowned")
    doctor_case.do("XCLAIM", doctor_case.harness.stream, GROUP, "", 0, "1-0", "JUSTID")
    found = doctor_case.finding("partitions.unowned")
    assert (found["about"], found["evidence"]["unowned"]) == ("access/hits", 1)
    doctor_case.silent("partitions.other-client")
    shown = CliRunner().invoke(cli, ["--config", str(doctor_case.path), "pending", TOPIC])
    assert "(unowned)" in shown.stdout
    told = CliRunner().invoke(
        cli, ["--config", str(doctor_case.path), "pending", TOPIC, "--sort", "idle", "--json"]
    )
    first = json.loads(told.stdout)["rows"][0]
    assert (first["place"], first["consumer"], first["idle_ms"]) == ("m:1-0", "", None)
    why = CliRunner().invoke(cli, ["--config", str(doctor_case.path), "why", "access/0"])
    assert "access/0/hits has 1 message pending without a consumer" in why.stdout


def test_doctor_prints_the_repair_of_a_bad_value(doctor_case: DoctorCase) -> None:
    """The doctor prints the exact command that repairs the value.

    Other files test the other fields.
    """
    doctor_case.silent("values.unreadable")
    doctor_case.do("HSET", doctor_case.harness.fence, "epoch", "zzz")
    found = doctor_case.finding("values.unreadable")
    assert found["about"] == "access/0/hits"
    assert f"`redis-cli HDEL {doctor_case.harness.fence} epoch`" in found["fix"].replace("'", "")
    command = found["fix"].split("`")[1].split()[1:]
    doctor_case.do(*(word.strip("'") for word in command))
    doctor_case.silent("values.unreadable")
    doctor_case.do("SADD", doctor_case.keys.registry(), b"\xff")
    found = doctor_case.finding("values.unreadable")
    assert found["fix"] == f"`redis-cli SREM {doctor_case.keys.registry()} $'\\xff'`"
    doctor_case.do("SADD", doctor_case.keys.registry(), b"\xfe")
    findings = doctor_case.run("--only", "values")["findings"]
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
    doctor_case: DoctorCase, kind: str, change: tuple[str, ...], found: str
) -> None:
    """`why` names the key itself, not the stream of its partition. This also holds for a lease."""
    key = getattr(doctor_case.keys, kind)(TOPIC, 0, GROUP)
    doctor_case.do("DEL", doctor_case.keys.fence(TOPIC, 0, GROUP))
    doctor_case.do("DEL", key)
    doctor_case.do(change[0], key, *change[1:])
    result = CliRunner().invoke(cli, ["--config", str(doctor_case.path), "why", f"{TOPIC}/0"])
    assert f"! {key} cannot be read: {found}\n" in result.stderr
    assert f"{doctor_case.keys.stream(TOPIC, 0)} cannot be read" not in result.stderr
    assert "WRONGTYPE" not in result.output

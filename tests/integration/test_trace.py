"""`trace` shows the history of one message, in every possible state."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from streamqd.admin import outbox_messages
from streamqd.admin import trace as admin
from streamqd.message import LAST_ERROR
from streamqd.outbox.rows import new_uid
from streamqd.store import members, messages
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from tests.contract.harness import Harness
from tests.support.commands import HarnessAt, Run, document
from tests.support.optional import need

UID = "access/0/1000-0"
FAILED = {
    b"originalId": b"1000-0",
    b"retryCount": b"2",
    b"crashCount": b"1",
    b"errorClass": b"app.BankError",
    b"errorMessage": b"the card was\x1b[31m declined",
}


@pytest.fixture
def delivered_message(harness_at: HarnessAt) -> Harness:
    """A message that was delivered to an owner, with other messages around it."""
    harness = harness_at(0)
    harness.groups()
    for entry_id in ("999-0", "1000-0", "1001-0"):
        harness.add(entry_id, "payload", f"body of {entry_id}", "key", "alice")
    harness.own("t1", owner="west-1")
    harness.fetch(3)
    return harness


def trace_group(run: Run, uid: str = UID, group: str = "hits") -> dict[str, Any]:
    found = document(run("trace", uid, "--json"))
    [row] = [each for each in found["groups"] if each["group"] == group]
    return {**row, "trace": found}


def test_trace_shows_unread_pending_and_acknowledged(run: Run, harness_at: HarnessAt) -> None:
    """`trace` shows for each group if the message is unread, pending or acknowledged."""
    harness, other = harness_at(0), harness_at(0, "agents")
    harness.groups()
    other.groups()
    harness.add("1000-0", "payload", "hello", "key", "alice")
    assert trace_group(run)["state"] == "unread"
    harness.own("t1", owner="west-1")
    harness.fetch()
    row = trace_group(run)
    assert (row["state"], row["place"], row["deliveries"], row["attempt"]) == (
        "pending", "m:1000-0", 1, 1,
    )  # fmt: skip
    assert trace_group(run, group="agents")["state"] == "unread"
    harness.do("XACK", harness.stream, "hits", "1000-0")
    row = trace_group(run)
    assert row["state"] == "acknowledged"
    assert row["trace"]["entry"] == {
        "id": "1000-0",
        "written_unix_ms": 1000,
        "key": "alice",
        "payload_bytes": 5,
        "schedule": "",
        "scheduled_for": "",
        "send_id": "",
        "copy_of": "",
        "replay_of": "",
        "edited_from": "",
        "trace_id": "",
    }
    said = run("trace", UID).stdout.splitlines()
    assert said[0] == UID
    assert said[1].endswith("ago), key alice, 5 bytes, in the partition")
    assert said[2:] == [
        "agents: unread",
        "hits: acknowledged (no copy is left in Redis)",
    ]


def test_trace_shows_a_running_message(
    run: Run, delivered_message: Harness, link: Connection, keys: Keys
) -> None:
    """A message is shown as running if its owner reports so."""
    link.run(
        members.heartbeat(keys, "default", "west-1", "n1", {"offers": [["access", "hits"]]}, 15.0)
    )
    assignment = {
        "topic": "access",
        "partition": 0,
        "group": "hits",
        "owned": True,
        "state": "ready",
    }
    assignment |= {"running": "m:1000-0", "longest_run_seconds": 12.0, "epoch": 1}
    link.execute(
        "SET", keys.instance("default", "west-1"), json.dumps({"assignments": [assignment]})
    )
    delivered_message.add("1002-0")
    said = run("trace", "access/0/1002-0").stdout
    assert "hits: unread, another message is running on west-1" in said
    assert "hits: running for 12s on west-1, attempt 1" in run("trace", UID).stdout
    assert trace_group(run, "access/0/999-0")["state"] == "pending"


def test_trace_shows_a_message_blocked_in_place(run: Run, delivered_message: Harness) -> None:
    """A message that blocks its partition is shown as pending, with the time of its next run."""
    harness = delivered_message
    due = harness.now_unix_ms() + 90_500
    harness.do("HSET", harness.attempts, "m:1000-0:f", "2", "m:1000-0:due", due, "m:1000-0:c", "zz")
    row = trace_group(run)
    assert (row["state"], row["attempt"], row["crashes"]) == ("pending", 3, 0)
    assert row["due_unix_ms"] == due
    assert "hits: pending, delivered " in run("trace", UID).stdout
    assert ", attempt 3, which runs in 1m" in run("trace", UID).stdout


def test_trace_shows_each_state_of_a_retry(run: Run, delivered_message: Harness) -> None:
    """The retries of a message are found, even by their IDs in the retry stream."""
    harness = delivered_message
    # These are the fields that a worker writes. Only its dead letters have the class and the
    # message of an error in separate fields.
    told = {b"originalId": b"1000-0", b"retryCount": b"2", b"crashCount": b"1"}
    told[LAST_ERROR] = b"BankError: the card was\x1b[31m declined"
    call = messages.retry(harness.keys, harness.leased("t1"), [(b"m:1000-0", 60.0, told)])
    assert harness.link.run(call).word == "OK"
    row = trace_group(run)
    assert (row["state"], row["attempt"], row["crashes"]) == ("waiting", 3, 1)
    assert row["due_unix_ms"] > row["trace"]["now_unix_ms"]
    said = run("trace", UID).stdout
    assert "hits: waiting for attempt 3, due in " in said
    assert r"after a crash: BankError: the card was\x1b[31m declined" in said

    harness.do("ZADD", harness.delayed, 1, "m:1000-0")
    harness.link.run(messages.promote_retries(harness.keys, harness.assignment, 10))
    assert trace_group(run)["state"] == "retry-unread"
    said = run("trace", UID).stdout
    assert "ready for attempt 3 after a crash, not read yet" in said
    [again] = harness.fetch(1, stream=harness.retry)
    row = trace_group(run)
    assert (row["state"], row["place"], row["attempt"]) == ("pending", f"r:{again.decode()}", 3)

    later = told | {b"retryCount": b"3"}
    call = messages.retry(harness.keys, harness.leased("t1"), [(b"r:" + again, 60.0, later)])
    assert harness.link.run(call).word == "OK"
    row = trace_group(run)
    assert (row["state"], row["place"], row["attempt"]) == ("waiting", f"r:{again.decode()}", 4)


def test_trace_shows_a_dead_letter_and_its_replay(run: Run, delivered_message: Harness) -> None:
    """`trace` names the dead letter of a message, and finds a replay to every group."""
    harness = delivered_message
    letter = FAILED | {b"group": b"hits", b"reason": b"attempts", b"attempts": b"5"}
    letter |= {b"originalTopic": b"access", b"originalPartition": b"0"}
    call = messages.dead(harness.keys, harness.leased("t1"), [(b"m:1000-0", letter)])
    assert harness.link.run(call).word == "OK"
    row = trace_group(run)
    [name] = row["dead_letter_ids"]
    assert row["state"] == "dead-lettered"
    assert row["trace"]["dead_letters"][0]["attempts"] == 5
    said = run("trace", UID).stdout
    assert re.search(rf"hits: dead letter {name} after 5 attempts \S+ ago \(attempts\): ", said)
    assert f"  -> streamqd dlq show access {name}" in said

    run("dlq", "replay", "access", "--id", name, "--all-groups", "--yes")
    row = trace_group(run)
    [again] = row["trace"]["replays"]
    assert (row["state"], row["dead_letter_ids"]) == ("unread", [])
    assert f"replayed to every group as {again}" in run("trace", UID).stdout
    harness.fetch()
    assert trace_group(run)["place"] == f"m:{again}"


def test_trace_shows_where_to_search_for_a_removed_entry(
    run: Run, delivered_message: Harness
) -> None:
    """An entry that was removed is reported as gone, with the place to search next."""
    harness = delivered_message
    trim = harness.keys.trim("access", 0)
    harness.do("XACK", harness.stream, "hits", "999-0", "1000-0")
    harness.do("HSET", trim, "archived", "999-0")
    assert "not archived yet" in run("trace", UID).stdout
    harness.do("HSET", trim, "archived", "1001-0", "first", "1001-0")
    harness.do("XTRIM", harness.stream, "MINID", "=", "1001-0")
    found = document(run("trace", UID, "--json"))
    assert (found["where"], found["archived"], found["entry"]) == ("trimmed", True, None)
    said = run("trace", UID).stdout
    assert "not in the partition: trimmed, or never written" in said
    assert "archived (pass --archive DIR to find the file)" in said
    # It is unknown if the partition has ever contained this entry.
    between = document(run("trace", "access/0/1000-7", "--json"))
    assert (between["where"], between["written"]) == ("trimmed", None)
    assert [each["state"] for each in between["groups"]] == ["missing"]
    said = run("trace", "access/0/1000-7").stdout
    assert "not in the partition: trimmed, or never written" in said
    assert "hits: handled, or never written" in said
    assert "acknowledged" not in said
    assert (
        "the last one written to its partition is 1001-0"
        in run("trace", "access/0/1001-5", code=8).stderr
    )


def test_trace_does_not_find_an_unwritten_message(run: Run, delivered_message: Harness) -> None:
    """Retention alone does not prove that a message was written.

    If nothing was removed, a wrong digit is refused.
    """
    harness = delivered_message
    harness.do("XACK", harness.stream, "hits", "999-0", "1000-0", "1001-0")
    harness.do("HSET", harness.keys.trim("access", 0), "first", "999-0")
    if b"entries-added" not in harness.do("XINFO", "STREAM", harness.stream):
        said = run("trace", "access/0/1000-7").stdout
        assert "hits: handled, or never written" in said
        return
    refused = "was never written; check the topic, partition and ID"
    assert refused in run("trace", "access/0/1000-7", code=8).stderr
    assert refused in run("trace", "access/0/998-0", code=8).stderr


def test_trace_reports_an_id_in_a_gap_as_unwritten(run: Run, delivered_message: Harness) -> None:
    """An ID in a gap was never written.

    Trimming removes the oldest entries, and the server keeps the greatest ID that was deleted.
    """
    harness = delivered_message
    harness.do("XACK", harness.stream, "hits", "999-0", "1000-0", "1001-0")
    if b"max-deleted-entry-id" not in harness.do("XINFO", "STREAM", harness.stream):
        pytest.skip("this server does not keep the greatest id that was deleted")
    harness.do("XTRIM", harness.stream, "MINID", "=", "1000-0")
    refused = run("trace", "access/0/1000-7", code=8).stderr
    assert "was never written; check the topic, partition and ID" in refused
    assert "handled, or never written" in run("trace", "access/0/999-7").stdout
    harness.do("XDEL", harness.stream, "1001-0")
    said = run("trace", "access/0/1000-7").stdout
    assert "not in the partition: deleted, or never written" in said


def test_trace_counts_crashed_runs(run: Run, delivered_message: Harness) -> None:
    """Runs that crashed also count as attempts."""
    harness = delivered_message
    letter = FAILED | {b"group": b"hits", b"reason": b"crashes", b"attempts": b"0"}
    letter |= {b"originalTopic": b"access", b"originalPartition": b"0", b"crashes": b"3"}
    call = messages.dead(harness.keys, harness.leased("t1"), [(b"m:1000-0", letter)])
    assert harness.link.run(call).word == "OK"
    assert " after 3 attempts " in run("trace", UID).stdout


def test_trace_finds_a_delayed_send_by_its_send_id(
    run: Run, harness_at: HarnessAt, link: Connection, keys: Keys
) -> None:
    """A message that is yet to be written is found by its send ID."""
    harness_at(0).groups()
    link.execute("HSET", keys.delayed_send_items("access", 0), "abc123", "x")
    due = harness_at(0).now_unix_ms() + 3_600_000
    link.execute("ZADD", keys.delayed_sends("access", 0), due, "abc123")
    found = document(run("trace", "access/0/abc123", "--json"))
    assert (found["where"], found["due_unix_ms"]) == ("delayed", due)
    said = run("trace", "access/0/abc123").stdout
    assert re.search("  a delayed send: it is written to the partition in (59m|1h)", said)
    assert "access/0/abc124 not found" in run("trace", "access/0/abc124", code=8).stderr


def test_trace_finds_a_promoted_delayed_send_by_its_uid(run: Run, harness_at: HarnessAt) -> None:
    """The value that the send returned identifies the message at any time."""
    harness = harness_at(0)
    harness.groups()
    harness.add("1000-0", "payload", "hello", "sendId", "abc123")
    found = document(run("trace", "access/0/abc123", "--json"))
    assert (found["uid"], found["send_id"], found["where"]) == (UID, "abc123", "present")
    assert "a delayed send until then: access/0/abc123" in run("trace", "access/0/abc123").stdout


def test_trace_finds_a_row_of_an_outbox_in_any_partition(run: Run, harness_at: HarnessAt) -> None:
    """The relay chooses the partition of a row, so the search looks in every partition."""
    harness_at(0).groups()
    harness = harness_at(1)
    harness.groups()
    unix_ms = harness.now_unix_ms()
    uid = new_uid(unix_ms)
    name = f"access/outbox/{uid}"
    refused = run("trace", name, code=8).stderr
    assert f"message {name} is not in topic access; a message is sent after" in refused
    assert "streamqd outbox status" in refused
    harness.add(f"{unix_ms + 9}-0", "payload", "other", "sendId", new_uid(unix_ms))
    harness.add(f"{unix_ms + 9}-1", "payload", "hello", "sendId", uid)
    found = document(run("trace", name, "--json"))
    assert (found["uid"], found["where"]) == (f"access/1/{unix_ms + 9}-1", "present")
    assert (found["outbox_uid"], found["send_id"]) == (name, "")
    said = run("trace", name).stdout
    assert f"sent by an outbox as {name}" in " ".join(said.split())
    assert "hits: unread" in said


def test_trace_finds_a_delayed_row_of_an_outbox(
    run: Run, harness_at: HarnessAt, link: Connection
) -> None:
    harness = harness_at(2)
    harness.groups()
    uid, due = new_uid(harness.now_unix_ms()), harness.now_unix_ms() + 3_600_000
    link.execute("ZADD", harness.keys.delayed_sends("access", 2), due, uid)
    found = document(run("trace", f"access/outbox/{uid}", "--json"))
    assert (found["where"], found["partition"], found["due_unix_ms"]) == ("delayed", 2, due)
    assert "sent by an outbox as" in run("trace", f"access/outbox/{uid}").stdout


def test_trace_of_an_outbox_reports_its_limit(
    run: Run, harness_at: HarnessAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search has a limit.

    A row that was due late is still found if it is among the newest entries.
    """
    monkeypatch.setattr(outbox_messages, "CALLS_MAX", 1)
    monkeypatch.setattr(outbox_messages, "NEWEST", 1)
    harness = harness_at(0)
    harness.groups()
    unix_ms = harness.now_unix_ms()
    uid = new_uid(unix_ms)
    for number in range(520):
        harness.add(f"{unix_ms}-{number}", "payload", "x")
    harness.add(f"{unix_ms}-600", "payload", "hello", "sendId", uid)
    assert document(run("trace", f"access/outbox/{uid}", "--json"))["where"] == "present"
    harness.add(f"{unix_ms}-601", "payload", "hello")
    refused = run("trace", f"access/outbox/{uid}", code=8).stderr
    assert "was not found among the entries that were searched" in refused


def test_trace_of_an_outbox_isolates_an_unreadable_partition(
    run: Run, harness_at: HarnessAt, link: Connection
) -> None:
    broken, harness = harness_at(0), harness_at(1)
    harness.groups()
    uid = new_uid(harness.now_unix_ms())
    link.execute("SET", broken.stream, "x")
    link.execute("SET", broken.keys.delayed_sends("access", 0), "x")
    refused = run("trace", f"access/outbox/{uid}", code=8).stderr
    assert "was not found among the entries that were searched" in refused
    harness.add("*", "payload", "hello", "sendId", uid)
    assert document(run("trace", f"access/outbox/{uid}", "--json"))["partition"] == 1


def test_trace_reports_a_topic_trimmed_after_a_row(run: Run, harness_at: HarnessAt) -> None:
    harness = harness_at(0)
    harness.groups()
    unix_ms = harness.now_unix_ms()
    harness.do("HSET", harness.keys.trim("access", 0), "first", f"{unix_ms + 5}-0")
    refused = run("trace", f"access/outbox/{new_uid(unix_ms)}", code=8).stderr
    assert "which was trimmed since" in refused


@pytest.mark.parametrize(
    ("headers", "schedule", "line"),
    [
        (
            '{"x-schedule":"nightly","x-scheduled-for":"2026-11-26T03:00:00Z"}',
            "nightly",
            "  sent by schedule nightly, tick 2026-11-26T03:00:00Z\n",
        ),
        ('{"x-schedule":"a\\u001b[31m"}', "a\x1b[31m", "schedule a\\x1b[31m, tick \n"),
        ("frog", "", "in the partition\n"),
        ('["x-schedule"]', "", "in the partition\n"),
    ],
)
def test_trace_shows_the_schedule_of_a_message(
    run: Run, harness_at: HarnessAt, headers: str, schedule: str, line: str
) -> None:
    harness = harness_at(0)
    harness.add("1000-0", "payload", "x", "headers", headers)

    assert document(run("trace", UID, "--json"))["entry"]["schedule"] == schedule
    assert line in run("trace", UID).stdout


@pytest.mark.parametrize(
    ("uid", "code", "text"),
    [
        ("access", 2, "is not a uid such as"),
        ("access/0/", 2, "is not a uid such as"),
        ("access/x/1-0", 2, "is not a uid such as"),
        ("access/0/1-0/2", 2, "is not a uid such as"),
        ("access/outbox/1-0", 2, "is not an ID of an outbox; pass"),
        ("access/outbox/" + "A" * 32, 2, "is not an ID of an outbox; pass"),
        ("acces/outbox/0197c1a4e0d27c3f8a51b6d2f0e4c7a9", 8, "did you mean access?"),
        ("acces/0/1-0", 8, "did you mean access?"),
        ("access/3/1-0", 8, "numbered 0 to 2"),
        ("access/0/1-0", 8, "the last one written to its partition is 0-0"),
    ],
)
def test_trace_without_a_result_exits_with_its_code(
    run: Run, harness_at: HarnessAt, uid: str, code: int, text: str
) -> None:
    """If there is no result, `trace` prints one sentence and exits with the documented code."""
    assert text in run("trace", uid, code=code).stderr


def test_trace_isolates_a_group_with_a_wrong_key_type(run: Run, harness_at: HarnessAt) -> None:
    """If one group cannot be read, the others are still shown."""
    harness_at(0).groups()
    harness_at(0, "agents").groups()
    harness_at(0).add("1000-0")
    harness_at(0).do("DEL", harness_at(0).retry)
    harness_at(0).do("SET", harness_at(0).retry, "x")
    assert trace_group(run)["state"] == "unreadable"
    assert trace_group(run, group="agents")["state"] == "unread"
    said = run("trace", UID).stdout
    assert "hits: unknown: " in said
    assert "WRONGTYPE" in said


def test_trace_reports_when_its_search_was_bounded(
    run: Run, harness_at: HarnessAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trace` reports that its search was bounded. It does not read a long stream to its end."""
    monkeypatch.setattr(admin, "CALLS_MAX", 1)
    harness = harness_at(0)
    harness.groups()
    for number in range(7):
        harness.link.pipeline(
            [("XADD", harness.stream, f"{1000 + 100 * number + n}-0", "f", "v") for n in range(100)]
        )
    assert document(run("trace", UID, "--json"))["complete"] is False
    assert "there may be more" in run("trace", UID).stdout


@need("pyarrow", "deltalake")
def test_trace_refuses_a_missing_archive(
    run: Run, delivered_message: Harness, tmp_path: Any
) -> None:
    """`trace` reports that the archive is missing. It starts no Spark to read one."""
    refused = run("trace", UID, "--archive", str(tmp_path), code=8).stderr
    assert "is not an archive" in refused


def test_trace_writes_nothing(run: Run, delivered_message: Harness) -> None:
    before = delivered_message.dump()
    run("trace", UID)
    assert delivered_message.dump() == before


TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize(
    ("headers", "field", "value", "line"),
    [
        ('{"x-replay-of":"access/1/5-0"}', "replay_of", "access/1/5-0", "a replay of access/1/5-0"),
        ('{"x-edited-from":"a\\u001b"}', "edited_from", "a\x1b", "sent from a\\x1b"),
        (
            f'{{"traceparent":"00-{TRACE_ID}-b7ad6b7169203331-00"}}',
            *("trace_id", TRACE_ID, f"the trace {TRACE_ID}"),
        ),
        (f'{{"traceparent":"00-{"0" * 32}-b7ad6b7169203331-01"}}', "trace_id", "", ""),
        (f'{{"traceparent":"00-{TRACE_ID}-b7ad6b7169203331-01-x"}}', "trace_id", "", ""),
        ('{"traceparent":7}', "trace_id", "", ""),
    ],
)
def test_trace_shows_the_origin_from_the_headers(
    run: Run, harness_at: HarnessAt, headers: str, field: str, value: str, line: str
) -> None:
    harness = harness_at(0)
    harness.add("1000-0", "payload", "x", "headers", headers)

    assert document(run("trace", UID, "--json"))["entry"][field] == value
    said = run("trace", UID).stdout
    assert line in said
    assert value or "sent" not in said


def test_trace_of_a_copy_names_the_message_and_its_send(run: Run, harness_at: HarnessAt) -> None:
    harness = harness_at(0)
    harness.add("1000-0", "payload", "x", "originalId", "900-0", "sendId", "0f3e")

    entry = document(run("trace", UID, "--json"))["entry"]
    assert (entry["copy_of"], entry["send_id"]) == ("access/0/900-0", "0f3e")
    assert "written again by a replay of access/0/900-0" in run("trace", UID).stdout

"""Commands run with a real server, with the right output, JSON and exit codes."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamqd import config, startup
from streamqd.admin import tail
from streamqd.housekeeper.script_loader import ScriptLoader
from streamqd.store import members, topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from streamqd.words import precise_duration
from tests.integration.test_admin import write_dead_letter
from tests.support.commands import HarnessAt, Run, document
from tests.support.proxy import Fault, FaultProxy
from tests.support.servers import Server
from tests.support.waiting import wait_until


@pytest.fixture
def file(tmp_path: Path, server: Server) -> Path:
    path = tmp_path / "streamq.toml"
    path.write_text(f'[redis]\nurl = "{server.url}"\n[topics.orders]\npartitions = 3\n')
    return path


def entries(
    link: Connection, keys: Keys, topic: str, count: int
) -> list[tuple[int, dict[str, bytes]]]:
    found = []
    for number in range(count):
        for _, raw in link.execute("XRANGE", keys.stream(topic, number), "-", "+"):
            names = [name.decode() for name in raw[::2]]
            found.append((number, dict(zip(names, raw[1::2], strict=True))))
    return found


def start_command(file: Path, *args: str) -> list[str]:
    return [sys.executable, "-m", "streamqd", "--config", str(file), *args]


@contextlib.contextmanager
def run_process(file: Path, *args: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    with subprocess.Popen(start_command(file, *args), **pipes) as started:
        try:
            yield started
        finally:
            if started.poll() is None:
                started.kill()


# --- empty states ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("topic", "list"), "no topics\n"),
        (("partitions",), "no topics\n"),
        (("dlq", "list"), "no dead letters\n"),
    ],
    ids=" ".join,
)
def test_status_reports_an_empty_server(run: Run, args: tuple[str, ...], text: str) -> None:
    assert run(*args).stdout == text


def test_empty_topic_is_reported(run: Run, harness_at: HarnessAt) -> None:
    assert run("partitions").stdout == "no group reads access\n"
    harness_at(0).groups()
    assert run("dlq", "list", "access").stdout == "no dead letters in access\n"
    assert "no group x reads topic access" in run("dlq", "list", "access", "-g", "x", code=8).stderr
    assert (
        run("dlq", "list", "access", "-g", "hits").stdout == "no dead letters in access for hits\n"
    )
    assert run("dlq", "stats", "access").stdout == "no dead letters in access\n"
    assert run("pending", "access").stdout == "no pending messages in access for hits\n"
    assert run("tail", "access").stderr == "no messages in access\n"
    assert "no group x reads any topic" in run("partitions", "-g", "x", code=8).stderr
    assert "no group x reads topic access" in run("partitions", "access", "-g", "x", code=8).stderr


@pytest.mark.parametrize(
    "args",
    [
        *(("partitions", "acces"), ("pending", "acces"), ("tail", "acces")),
        *(("topic", "describe", "acces"), ("dlq", "list", "acces"), ("dlq", "stats", "acces")),
        *(("dlq", "show", "acces", "0:1-0"), ("dlq", "replay", "acces", "--all", "--yes")),
        ("dlq", "purge", "acces", "--all", "--yes"),
    ],
    ids=" ".join,
)
def test_missing_topic_exits_8(run: Run, harness_at: HarnessAt, args: tuple[str, ...]) -> None:
    result = run(*args, code=8)

    assert result.stderr == "Error: topic acces does not exist; did you mean access?\n"
    assert result.stdout == ""


# --- topics ---------------------------------------------------------------------------------------


def test_topic_create_prints_the_partition_count(run: Run, store: Store) -> None:
    assert run("topic", "create", "a").stdout == "a created with 1 partition\n"
    assert (
        run("topic", "create", "b", "--partitions", "4").stdout == "b created with 4 partitions\n"
    )
    assert run("topic", "create", "orders").stdout == "orders created with 3 partitions\n"
    again = run("topic", "create", "b", "--partitions", "4", "--json")
    assert document(again) == {"topic": "b", "partitions": 4, "created": False}
    refused = run("topic", "create", "b", "--partitions", "5", code=8)
    assert "already exists, with 4 partitions" in refused.stderr
    assert topics.partition_count(store, "b") == 4
    assert [row["topic"] for row in document(run("topic", "list", "--json"))["rows"]] == [
        "a",
        "b",
        "orders",
    ]


def test_topic_describe_shows_its_partitions(run: Run, harness_at: HarnessAt) -> None:
    harness_at(1).groups()
    harness_at(1).add("5-0")

    detail = document(run("topic", "describe", "access", "--json"))
    shown = run("topic", "describe", "access").stdout

    assert list(detail) == [
        *("topic", "created_unix_ms", "settings", "configured", "effective", "growing_to"),
        *("groups", "totals", "partitions", "unreadable"),
    ]
    row = detail["partitions"][1]
    assert row.pop("bytes") > 0
    assert row == {
        "partition": 1,
        "messages": 1,
        "added": 1,
        "first_id": "5-0",
        "last_id": "5-0",
        "delayed_sends": 0,
        "dead_letters": 0,
        "groups": [
            {"group": "hits", "lag": 1, "lag_exact": True, "pending": 0, "waiting_retries": 0}
        ],
    }
    assert detail["totals"]["groups"] == row["groups"]
    assert shown.startswith("topic access: 3 partitions\ncreated 20")
    assert 'archive = "off"\n' in shown
    assert "groups: hits\n" in shown


# --- partitions, pending, status ------------------------------------------------------------------


def test_partitions_are_printed_as_table_and_json(run: Run, harness_at: HarnessAt) -> None:
    epoch = harness_at(0).own("t1", owner="west-1")
    for number in range(3):
        harness_at(number).groups()
    harness_at(0).pending("1-0")

    [heading, first, second, _] = run("partitions", "access").stdout.splitlines()
    seen = document(run("partitions", "access", "--json"))

    assert heading.split() == [
        *("PARTITION", "OWNER", "EPOCH", "SINCE", "LAG", "PENDING", "RETRIES", "OLDEST")
    ]
    assert first.split()[:3] == ["access/0/hits", "west-1", str(epoch)]
    assert first.split()[4:7] == ["0", "1", "0"]
    assert second.split() == ["access/1/hits", "-", "-", "-", "0", "0", "0", "-"]
    assert list(seen["assignments"][0]) == [
        *("topic", "partition", "group", "state", "owner", "epoch", "since_unix_ms", "lag"),
        *("pending", "waiting_retries", "oldest_unix_ms", "oldest_unread_unix_ms"),
    ]


def test_tables_fit_into_80_columns(run: Run, harness_at: HarnessAt) -> None:
    harness_at(0).own("t1", owner="west-1.local")
    for number in range(3):
        harness_at(number).groups()
    write_dead_letter(harness_at(1), "1700000000000-0")
    harness_at(0).pending("1700000000000-0")

    for args in (
        *(("partitions",), ("status",), ("topic", "list"), ("topic", "describe", "access")),
        *(("pending", "access"), ("dlq", "list"), ("dlq", "stats", "access")),
    ):
        widths = [len(line) for line in run(*args).stdout.splitlines()]
        assert max(widths) <= 80, args


def test_pending_continues_at_the_cursor(run: Run, harness_at: HarnessAt) -> None:
    harness_at(0).pending("1-0", "3-0")
    harness_at(1).pending("2-0")

    page = run("pending", "access", "-n", "2")
    found = re.search(r"--cursor (\S+)", page.stderr)
    assert found
    rest = run("pending", "access", "-n", "2", "--cursor", found[1])

    assert [line.split()[1] for line in page.stdout.splitlines()] == ["PLACE", "m:1-0", "m:2-0"]
    assert [line.split()[1] for line in rest.stdout.splitlines()] == ["PLACE", "m:3-0"]
    assert "3 pending messages in access for hits" in page.stderr
    assert "--cursor" not in rest.stderr
    assert document(run("pending", "access", "--json", "-s", "idle"))["rows"][0].keys() == {
        *("partition", "place", "written_unix_ms", "idle_ms", "deliveries", "crashes"),
        "consumer",
    }


def test_pending_requires_a_group_if_there_are_several(run: Run, harness_at: HarnessAt) -> None:
    refused = run("pending", "access", code=8)
    assert "no group reads" in refused.stderr
    harness_at(0, "hits").groups()
    harness_at(0, "agents").groups()
    assert "one of agents, hits" in run("pending", "access", code=8).stderr
    run("pending", "access", "--group", "hits")


def test_status_reports_a_missing_instance(run: Run, harness_at: HarnessAt) -> None:
    shown = run("status").stdout

    assert shown.startswith("fleet default: no instances, no groups\n")
    assert "! no instance of the fleet default is live" in shown
    assert list(document(run("status", "--json"))) == [
        *(
            "fleet",
            "now_unix_ms",
            "directives",
            "unreadable_directives",
            "problems",
            "instances",
            "groups",
        ),
        *("assignments", "lagging", "dead_letters", "schedules", "unreadable"),
    ]


def test_status_shows_exact_totals_for_each_group(
    run: Run, harness_at: HarnessAt, link: Connection, keys: Keys
) -> None:
    """`status` shows the exact totals of all groups in a row per group, for all topics or one.

    The DLQ column must not show an old count of an instance. It once showed 0 next to "3 dead
    letters".
    """
    told = []
    for group in ("agents", "hits"):
        for number in range(3):
            harness_at(number, group).groups()
            harness_at(number, group).own(f"t{number}{group}", owner="west-1")
            assignment = {"topic": "access", "partition": number, "group": group, "owned": True}
            assignment |= {"state": "halted", "waits_seconds": 7.0, "dead_letters": 7}
            failure = {"error": "builtins.ConnectionError", "count": 3, "seconds_ago": 2.0}
            told.append(assignment | {"dead_letters": 9, "failures": [failure]})
    told[3] |= {"state": "ready", "longest_run_seconds": 12.4, "failures": []}
    told[4] |= {"state": "ready", "longest_run_seconds": 0.2, "failures": []}
    told[5] |= {"state": "ready", "failures": []}
    for number in range(3):
        harness_at(number).add("1000-0")
        for letter in range(number):
            harness_at(number).do(
                "XADD", harness_at(number).dlq, f"{1 + letter}-0", "group", "agents"
            )
    info = {"offers": [["access", "hits"], ["access", "agents"]], "started": time.time()}
    link.run(members.heartbeat(keys, "default", "west-1", "n1", info, 15.0))
    summary = {"instance": "west-1", "state": "working", "assignments": told}
    link.execute("SET", keys.instance("default", "west-1"), json.dumps(summary))

    seen = document(run("status", "--json"))
    agents, hits = seen["groups"]
    said = run("status").stdout
    one = run("status", "access").stdout

    assert (agents["condition"], agents["condition_partitions"]) == ("circuit-open", 3)
    assert (agents["reason"], agents["dead_letters"]) == ("ConnectionError", 3)
    assert (hits["condition"], hits["condition_partitions"]) == ("running", 1)
    assert (hits["dead_letters"], hits["lag"], hits["owned"]) == (0, 3, 3)
    assert [each["condition"] for each in seen["assignments"][3:]] == ["running", "ready", "ready"]
    assert seen["problems"] == [
        (
            "the circuit breaker of access/0/agents is open on west-1, so no message runs, next"
            " attempt in 7 s; last: builtins.ConnectionError, 2 s ago; the same in partitions 1-2"
        ),
        (
            "the handler of access/0/hits on west-1 has been working on one message for 12 s; 1"
            " unread and 0 pending, the oldest"
            f" {precise_duration(seen['now_unix_ms'] / 1000 - 1)} old"
        ),
        "access has 3 dead letters; see `streamqd dlq list access`",
    ]
    rows = said[said.index("GROUP ") :].splitlines()
    assert re.fullmatch(r"access/agents +3/3 .* 3 +\S+ +circuit open", rows[1])
    assert re.fullmatch(r"access/hits +3/3 .* 0 +\S+ +running 12s \(1/3\)", rows[2])
    assert re.match(r"total +6/6 +- +6 ", rows[3]) or re.match(r"total +6/6 +0.0 +6 ", rows[3])
    assert len(rows) == 4, "24 partitions are not 24 rows"
    rows = one[one.index("PARTITION ") :].splitlines()
    assert re.fullmatch(r"0/hits +.* running 12s +west-1", rows[4])
    assert one.startswith("topic access in the fleet default: 6 of 6 partitions owned\n")
    assert "INSTANCE" not in one
    assert "did you mean access?" in run("status", "acces", code=8).stderr


# --- produce --------------------------------------------------------------------------------------


def test_produce_sends_one_message_per_line(
    run: Run, link: Connection, keys: Keys, tmp_path: Path
) -> None:
    (tmp_path / "log").write_bytes(b"one\ntwo\r\n\nthr\xffee")

    result = run("produce", "orders", "--from", str(tmp_path / "log"), "-H", "a=b=c")

    assert re.fullmatch(r"3 messages sent to orders in \d\.\d\d s\n", result.stdout)
    assert result.stderr == "1 empty line skipped\n"
    found = entries(link, keys, "orders", 3)
    assert {fields["payload"] for _, fields in found} == {b"one", b"two", b"thr\xffee"}
    assert {fields["headers"] for _, fields in found} == {b'{"a":"b=c"}'}
    assert sorted(number for number, _ in found) == [0, 1, 2]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_produce_accepts_gzipped_standard_input(run: Run, pack: Any) -> None:
    result = run("produce", "orders", "--from", "-", "--json", typed=pack(b"one\ntwo\n"))

    sent = document(result)
    assert sent.pop("seconds") >= 0
    assert sent == {
        "topic": "orders",
        "sent": 2,
        "unknown": 0,
        "lines": 2,
        "empty": 0,
        "without_key": 0,
        "duplicate": None,
        "error": None,
    }


def test_produce_reads_the_key_from_a_regex(run: Run, link: Connection, keys: Keys) -> None:
    text = "GET /a 1\nnonsense\nGET /b 2\nGET /a 3\n"
    result = run("produce", "orders", "--from", "-", "--key-regex", r"GET (\S+)", typed=text)

    assert "1 message without a key" in result.stderr
    for number, fields in entries(link, keys, "orders", 3):
        if b"GET" in fields["payload"]:
            assert fields["key"] == fields["payload"].split()[1]
            assert number == zlib.crc32(fields["key"]) % 3
        else:
            assert "key" not in fields


def test_produce_rejects_a_key_with_a_surrogate(run: Run) -> None:
    text = '{"u": "a"}\n{"u": "\\ud800"}\n'
    result = run(
        *("produce", "orders", "--from", "-", "--format", "jsonl", "--key-field", "u"),
        typed=text,
        code=2,
    )
    assert "line 2 of" in result.stderr
    assert r"has a u that is not a valid key: the key contains '\ud800', half of" in result.stderr


def test_produce_reads_the_key_from_a_json_field(run: Run, link: Connection, keys: Keys) -> None:
    text = '{"u": "a", "x":  1}\n{"u": 7}\n{"u": null}\n[1]\n{"u": {"b": 1}}\n'
    result = run(
        *("produce", "orders", "--from", "-", "--format", "jsonl", "--key-field", "u"), typed=text
    )

    assert "2 messages without a key" in result.stderr
    found = {fields["payload"]: fields.get("key") for _, fields in entries(link, keys, "orders", 3)}
    assert found == {
        b'{"u": "a", "x":  1}': b"a",
        b'{"u": 7}': b"7",
        b'{"u": null}': None,
        b"[1]": None,
        b'{"u": {"b": 1}}': b'{"b":1}',
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{nope}", "is not JSON: Expecting property name"),
        (b"{} {}", "is not JSON: Extra data"),
        (b'{"a": NaN}', "is not JSON: NaN"),
        (b"\xff", "is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
    ids=["broken", "two", "nan", "bytes", "deep"],
)
def test_produce_sends_the_lines_before_a_bad_line(
    run: Run, link: Connection, keys: Keys, line: bytes, words: str
) -> None:
    text = b"".join(b'{"n": %d}\n' % n for n in range(700)) + line + b"\n{}\n"

    result = run("produce", "orders", "--from", "-", "--format", "jsonl", typed=text, code=2)

    assert result.stdout.startswith("700 messages sent")
    assert result.stderr.startswith("Error: line 701 of standard input ")
    assert words in result.stderr
    assert len(entries(link, keys, "orders", 3)) == 700


def test_produce_refuses_a_too_long_line(
    run: Run, file: Path, link: Connection, keys: Keys
) -> None:
    file.write_text(file.read_text() + "[daemon]\nmax_message_bytes = 10\n")

    result = run("produce", "orders", "--from", "-", typed="1234567890\n12345678901\n", code=2)

    assert "line 2 of standard input is longer than max_message_bytes (10)" in result.stderr
    assert len(entries(link, keys, "orders", 3)) == 1


def test_produce_sends_a_file_as_one_message(
    run: Run, link: Connection, keys: Keys, tmp_path: Path
) -> None:
    """The payload is all bytes of the file (even if it looks like gzip) or of standard input."""
    raw = b"\x1f\x8b\x00\r\n\xff\n\n"
    (tmp_path / "cat.png").write_bytes(raw)
    run("produce", "images", "--create", "--from", str(tmp_path / "cat.png"), "--format", "file")
    run("produce", "images", "--format", "file", typed=b"")
    rows = link.execute("XRANGE", keys.stream("images", 0), "-", "+")
    assert [fields[1] for _, fields in rows] == [raw, b""]
    (tmp_path / "big").write_bytes(b"x" * ((1 << 20) + 1))
    big = ("produce", "images", "--from", str(tmp_path / "big"), "--format", "file")
    assert "big is longer than max_message_bytes (1,048,576)" in run(*big, code=2).stderr
    folder = run("produce", "images", "--from", str(tmp_path), "--format", "file", code=2)
    assert "cannot be read" in folder.stderr


def test_produce_accepts_at_expires_and_dedup_id(run: Run, link: Connection, keys: Keys) -> None:
    """`--at`, `--expires` and `--dedup-id` work as in `send`, and mistakes exit with code 2."""
    again = ("produce", "images", "x", "--create", "--dedup-id", "x-1", "--expires", "1h")
    assert "1 message sent to images" in run(*again).stdout
    second = run(*again)
    [(place, _)] = link.execute("XRANGE", keys.stream("images", 0), "-", "+")
    uid = f"images/0/{place.decode()}"
    assert second.stdout == ""
    assert second.stderr == f"not sent again: this --dedup-id was used for {uid}\n"
    found = document(run(*again, "--json"))
    assert (found["sent"], found["duplicate"]) == (0, uid)
    [(_, fields)] = link.execute("XRANGE", keys.stream("images", 0), "-", "+")
    assert fields == [b"payload", b"x", b"expiresAfter", b"3600000"]
    run("produce", "images", "y", "--at", "2040-01-01T12:00:00.5")
    run("produce", "images", "y", "--at", "2040-01-01T13:00:00.5+01:00")
    due = link.execute("ZRANGE", keys.delayed_sends("images", 0), 0, -1, "WITHSCORES")[1::2]
    assert due == [b"2209032000500"] * 2
    for words, said in (
        (("--from", "-", "--dedup-id", "x"), "--dedup-id allows only one message"),
        (("x", "--dedup-id", ""), "must not be empty"),
        (("x", "--at", "12h"), "pass a duration as --delay"),
        (("x", "--at", "2040-01-01", "--delay", "1h"), "cannot be used with"),
        (("x", "--at", "9000-01-01"), "out of range"),
        (("x", "--expires", "99999999h"), "100 years"),
    ):
        assert said in run("produce", "images", *words, typed="a\nb\n", code=2).stderr
    assert link.execute("XLEN", keys.stream("images", 0)) == 1


def test_produce_accepts_partition_and_delay(run: Run, link: Connection, keys: Keys) -> None:
    run("produce", "orders", "--from", "-", "--partition", "2", "--delay", "1h", typed="a\nb\n")
    assert link.execute("ZCARD", keys.delayed_sends("orders", 2)) == 2
    refused = run("produce", "orders", "--from", "-", "--partition", "3", typed="a\n", code=8)
    assert "partition 3 of topic orders not found" in refused.stderr


def test_produce_no_create_prevents_a_new_topic(run: Run, store: Store) -> None:
    refused = run("produce", "orders", "--from", "-", "--no-create", typed="a\n", code=8)

    assert "streamqd topic create orders" in refused.stderr
    assert topics.names(store) == []


def test_produce_reports_counts_after_a_lost_connection(
    run: Run,
    proxy: FaultProxy,
    file: Path,
    link: Connection,
    store: Store,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamqd.producer.sender.CHUNK_COUNT", 10)
    topics.create(store, "orders", config.Topic())
    ScriptLoader(link).run()
    file.write_text(f'[redis]\nurl = "{proxy.url}"\n')
    proxy.arm(Fault.DROP_REPLY, command="EVALSHA", nth=3)
    text = "".join(f"{n}\n" for n in range(100))
    result = run("produce", "orders", "--from", "-", "--json", typed=text, code=4)

    sent = document(result)
    # A chunk is one transaction, so either all of it is written or none of it.
    assert (sent["sent"], sent["unknown"]) == (20, 10)
    assert "may or may not have been written" in sent["error"]
    assert "may or may not have been written" in result.stderr
    assert len(entries(link, keys, "orders", 1)) in (20, 30)


def test_produce_of_ten_thousand_lines_uses_little_cpu(
    run: Run, link: Connection, keys: Keys, tmp_path: Path
) -> None:
    line = '1.2.3.4 - - [10/Oct/2000:13:55:36 +0000] "GET /i HTTP/1.1" 200 2326 "-" "Mozilla"\n'
    (tmp_path / "log").write_text(line * 10_000)

    before = time.process_time()
    run("produce", "orders", "--from", str(tmp_path / "log"), "--key-regex", r"^(\S+)")
    used = time.process_time() - before

    assert sum(link.execute("XLEN", keys.stream("orders", n)) for n in range(3)) == 10_000
    # This takes 0.1 s here. One round trip per line would take several times as long as the bound.
    assert used < 0.5


# --- tail -----------------------------------------------------------------------------------------


def test_tail_shows_the_last_lines(run: Run, harness_at: HarnessAt) -> None:
    for number in range(1, 16):
        harness_at(number % 3).add(f"{number}-0", "payload", f"body\n{number}\x1b", "key", "k")

    shown = run("tail", "access", "-n", "2").stdout
    seen = [json.loads(line) for line in run("tail", "access", "--json").stdout.splitlines()]

    assert shown == "2:14-0  k  body\\n14\\x1b\n0:15-0  k  body\\n15\\x1b\n"
    assert [each["id"] for each in seen] == [f"{n}-0" for n in range(6, 16)]
    assert list(seen[0]) == [
        *("topic", "partition", "id", "written_unix_ms", "key", "headers", "payload")
    ]
    assert run("tail", "access", "-n", "1", "-p", "1").stdout.startswith("1:13-0  ")
    assert (
        "partition 9 of topic access not found" in run("tail", "access", "-p", "9", code=8).stderr
    )


def test_tail_follows_until_interrupted(
    file: Path, link: Connection, keys: Keys, harness_at: HarnessAt
) -> None:
    harness_at(0).add("1-0", "payload", "before")
    with run_process(file, "tail", "access", "-f", "-n", "1") as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"0:1-0  -  before\n"
        harness_at(1).add("2-0", "payload", "after")
        assert started.stdout.readline() == b"1:2-0  -  after\n"
        started.send_signal(signal.SIGINT)
        assert started.wait(10) == 130
        assert started.stderr is not None
        assert started.stderr.read().strip() == b""


def test_tail_exits_silently_when_its_reader_closes(
    file: Path, link: Connection, harness_at: HarnessAt
) -> None:
    for number in range(1, 2001):
        harness_at(0).add(f"{number}-0", "payload", "x" * 100)
    with run_process(file, "tail", "access", "-n", "2000") as started:
        assert started.stdout is not None
        started.stdout.readline()
        started.stdout.close()
        assert started.wait(20) == 128 + signal.SIGPIPE
        assert started.stderr is not None
        assert started.stderr.read() == b""


# --- dead letters ---------------------------------------------------------------------------------


def test_dlq_commands_work_from_list_to_replay(run: Run, harness_at: HarnessAt) -> None:
    names = [write_dead_letter(harness_at(number), "1700000000000-0") for number in range(3)]

    overview = run("dlq", "list").stdout
    listed = run("dlq", "list", "access", "-n", "2")
    newest = sorted(names, key=lambda name: (name.partition(":")[2], name), reverse=True)
    shown = run("dlq", "show", "access", names[0]).stdout
    one = run("dlq", "replay", "access", "--id", names[0])
    rest = run("dlq", "replay", "access", "--all", "--yes", "--json")

    assert overview.splitlines()[1].split()[:2] == ["access", "3"]
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["ID", *newest[:2]]
    assert "3 dead letters in access" in listed.stderr
    assert f"more: --cursor {newest[1]}" in listed.stderr
    assert "no \\x1b[31mcolour" in shown
    assert "body of 1700000000000-0" in shown
    assert "Traceback:\n  somewhere\n" in shown
    assert one.stdout == "1 dead letter of access replayed\n"
    told = {"topic": "access", "replayed": 2, "missing": 0, "refused": {}, "result": "done"}
    assert told.items() <= document(rest).items()
    assert run("dlq", "list").stdout == "no dead letters\n"
    assert [harness_at(n).do("XLEN", harness_at(n).retry) for n in range(3)] == [1, 1, 1]


def test_dlq_show_masked_hides_all_user_data(run: Run, harness_at: HarnessAt) -> None:
    name = write_dead_letter(harness_at(1), "1700000000000-0")
    bare = run("dlq", "show", "access", name)
    masked = [run("dlq", "show", "access", name, "--mask", *more) for more in ((), ("--json",))]

    for secret in ("no \\x1b[31mcolour", "body of 1700000000000-0", "somewhere"):
        assert secret in bare.stdout
        for shown in masked:
            assert secret not in shown.stdout
    assert "payload: ***" in masked[0].stdout
    letter = document(masked[1])
    assert letter["payload"] == letter["traceback"] == letter["error_message"] == "***"
    assert (
        letter["error_class"]
        == document(run("dlq", "show", "access", name, "--json"))["error_class"]
    )


def test_dlq_show_json_is_flat(run: Run, harness_at: HarnessAt) -> None:
    name = write_dead_letter(harness_at(1), "1700000000000-0")

    row = document(run("dlq", "list", "access", "--json"))["rows"][0]
    letter = document(run("dlq", "show", "access", name, "--json"))

    assert list(row) == [
        *("id", "group", "reason", "error_class", "error_message", "attempts", "crashes"),
        *("replays", "uid", "key", "failed_unix_ms", "original_unix_ms", "fingerprint"),
    ]
    assert row.items() <= letter.items()
    assert set(letter) - set(row) == {
        *("topic", "partition", "instance", "handler", "traceback", "frame", "moving_to"),
        *("trace_id", "span_id"),
        *("signal", "exit_code", "pid", "rss", "headers", "payload", "other"),
    }


def test_dlq_replay_with_refused_dead_letters_exits_8(run: Run, harness_at: HarnessAt) -> None:
    write_dead_letter(harness_at(0, "old"), "1-0")
    harness_at(0).do("XGROUP", "DESTROY", harness_at(0, "old").retry, "old")

    result = run("dlq", "replay", "access", "--all", "--yes", code=8)

    assert result.stdout == "no dead letters of access replayed\n"
    assert "not replayed: 1 dead letter: its group no longer exists" in result.stderr


def test_irreversible_command_needs_yes(run: Run, harness_at: HarnessAt) -> None:
    name = write_dead_letter(harness_at(0), "1-0")
    before = harness_at(0).dump()

    for args in (
        ("dlq", "replay", "access", "--all"),
        ("dlq", "purge", "access", "--all"),
        ("dlq", "purge", "access", "--id", name),
        ("dlq", "purge", "access", "--older-than", "0s"),
    ):
        assert "pass --yes" in run(*args, code=8, typed="y\n").stderr
    run("dlq", "purge", "access", "--id", "0:9-9", "--yes", code=8)

    assert harness_at(0).dump() == before


def test_dlq_purge_selects_by_age_and_by_name(run: Run, harness_at: HarnessAt) -> None:
    names = [write_dead_letter(harness_at(number), "1-0") for number in range(3)]

    assert run("dlq", "purge", "access", "--older-than", "1h").stdout == (
        "nothing matches, nothing purged\n"
    )
    by_name = run("dlq", "purge", "access", "--id", names[0], "--yes")
    assert by_name.stdout == "1 dead letter of access purged\n"
    by_age = run("dlq", "purge", "access", "--older-than", "0s", "--group", "hits", "--yes")
    assert by_age.stdout == "2 dead letters of access purged for hits\n"


@pytest.mark.parametrize(("answer", "code", "left"), [(b"y\n", 0, 0), (b"n\n", 8, 1)])
def test_dlq_purge_asks_for_confirmation_on_a_terminal(
    file: Path, link: Connection, harness_at: HarnessAt, answer: bytes, code: int, left: int
) -> None:
    write_dead_letter(harness_at(0), "1-0")
    ours, theirs = pty.openpty()
    try:
        with run_process(file, "dlq", "purge", "access", "--all", stdin=theirs) as started:
            os.write(ours, answer)
            assert started.wait(20) == code
            assert started.stderr is not None
            assert b"Delete 1 dead letter of access permanently? [y/N]" in started.stderr.read()
    finally:
        os.close(ours)
        os.close(theirs)

    assert harness_at(0).do("XLEN", harness_at(0).dlq) == left


def test_dlq_purge_without_dead_letters_is_done(run: Run, harness_at: HarnessAt) -> None:
    done = document(run("dlq", "purge", "access", "--all", "--json"))

    assert (done["topic"], done["purged"], done["result"]) == ("access", 0, "done")


# --- check ----------------------------------------------------------------------------------------


def test_check_reports_problems_of_the_server(
    file: Path, server: Server, link: Connection, store: Store
) -> None:
    topics.create(store, "orders", config.Topic(partitions=5))
    link.execute("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        with run_process(file, "check", "--json") as started:
            raw, _ = started.communicate(timeout=60)
    finally:
        link.execute("CONFIG", "SET", "maxmemory-policy", "noeviction")

    report = json.loads(raw)
    assert started.returncode == 1
    texts = {(each["about"], each["level"]): each["text"] for each in report["findings"]}
    assert server.product in texts["redis", "ok"]
    assert "allkeys-lru" in texts["redis", "problem"]
    assert "append-only" in texts["redis", "warning"]
    assert "set 5" in texts["topics", "problem"]
    assert ("permissions", "ok") in texts


def test_status_counts_many_dead_letters(run: Run, harness_at: HarnessAt, link: Connection) -> None:
    """The DLQ column shows a number even for 31,744 dead letters."""
    harness_at(0, "hits").groups()
    stream = harness_at(0, "hits").dlq
    letter = ("payload", "x", "group", "hits")
    for _ in range(32):
        link.pipeline([("XADD", stream, "*", *letter)] * 1_000)
    link.pipeline([("XADD", stream, "*", "payload", "x", "group", "agents")] * 9)
    (hits,) = document(run("status", "--json"))["groups"]
    assert hits["dead_letters"] == 32_000


@pytest.mark.parametrize("password", [None, "wrong"])
def test_refused_login_error_names_the_address_once(
    tmp_path: Path, server: Server, link: Connection, password: str | None
) -> None:
    """The error contains the server's answer, and names the address only once."""
    path = tmp_path / "refused.toml"
    path.write_text(f'[redis]\nurl = "{server.url}"\n')
    if password is not None:
        (tmp_path / "secret").write_text(password)
        (tmp_path / "secret").chmod(0o600)
        with path.open("a") as more:
            more.write('password_file = "secret"\nusername = "nobody-there"\n')
    else:
        link.execute("ACL", "SETUSER", "default", "resetpass", ">right")
    address = server.url
    try:
        for args in (("status",), ("topic", "list"), ("check",)):
            with run_process(path, *args) as started:
                out, err = started.communicate(timeout=60)
            lines = (out + err).decode().splitlines()
            (told,) = [line for line in lines if "refused the connection" in line]
            assert told.count(address) == 1
            assert "no answer" not in told
            assert ("WRONGPASS" if password else "NOAUTH") in told
            assert started.returncode == (1 if args == ("check",) else 4)
    finally:
        link.execute("ACL", "SETUSER", "default", "nopass")


def send_heartbeat(link: Connection, **info: object) -> None:
    told = {"host": "web-2", "pid": 9, "ttl": 10.0, **info}
    call = members.heartbeat(Keys(), "default", "west-1", "n1", told, 10.0)
    assert link.run(call).word == "OK"


@pytest.mark.parametrize(
    ("info", "level"),
    [({}, "problem"), ({"silent": True}, "warning"), ({"leaving": True}, "warning")],
)
def test_check_reports_another_run_of_the_instance(
    file: Path, link: Connection, info: dict[str, object], level: str
) -> None:
    """`check` reports that a daemon on another host uses the name of this instance."""
    with file.open("a") as more:
        more.write('[daemon]\ninstance = "west-1"\n')
    send_heartbeat(link, **info)
    with run_process(file, "check", "--json") as started:
        while started.poll() is None:
            time.sleep(0.05)
            if not info.get("silent"):
                send_heartbeat(link, **info)
        raw, _ = started.communicate(timeout=60)

    report = json.loads(raw)
    found = [each for each in report["findings"] if each["about"] == "daemon.instance"]
    assert [each["level"] for each in found] == [level]
    assert "west-1" in found[0]["text"]
    assert "web-2 (pid 9)" in found[0]["text"]


def test_check_accepts_the_name_of_its_own_daemon(
    file: Path, tmp_path: Path, link: Connection
) -> None:
    """`check` accepts its own daemon, which holds the lock of this state directory."""
    with file.open("a") as more:
        more.write('[daemon]\ninstance = "west-1"\nstate_dir = "var"\n')
    lock = startup.InstanceLock(file.parent / "var", "west-1")
    assert lock.acquire() is None
    send_heartbeat(link, lock=lock.identity)
    lock.release()
    with run_process(file, "check", "--json") as started:
        raw, _ = started.communicate(timeout=60)
    assert b"daemon.instance" not in raw


def test_check_names_every_key_of_a_wrong_type(file: Path, link: Connection, keys: Keys) -> None:
    """`check` names each key of a wrong type, instead of showing the error of a script."""
    wrong = [keys.members("default"), keys.info("default"), keys.meta("orders")]
    for key in wrong:
        link.execute("SET", key, "x")
    with run_process(file, "check", "--json") as started:
        raw, _ = started.communicate(timeout=60)
    assert started.returncode == 1
    texts = [each["text"] for each in json.loads(raw)["findings"] if each["level"] == "problem"]
    for key in wrong:
        assert any(key in text for text in texts), key


def test_check_names_a_pipeline_without_a_topic(file: Path, store: Store) -> None:
    topics.create(store, "access", config.Topic())
    with file.open("a") as more:
        more.write("".join(f"[pipelines.{each}]\n" for each in ("orders", "access", "order")))

    with run_process(file, "check", "--json") as started:
        raw, _ = started.communicate(timeout=60)

    found = [each for each in json.loads(raw)["findings"] if each["about"] == "pipelines.order"]
    assert [(each["level"], each["text"]) for each in found] == [
        (
            "warning",
            "topic order does not exist, so this section has no effect",
        )
    ]
    assert b"pipelines.access" not in raw


def test_check_names_missing_permissions_of_a_pipeline(
    tmp_path: Path, server: Server, link: Connection
) -> None:
    """`check` names the missing permissions. Without SMEMBERS, the list of topics is unknown."""
    link.execute("ACL", "SETUSER", "limited", "reset", "on", ">secret", "~*", "+@all", "-smembers")
    secret, path = tmp_path / "secret", tmp_path / "limited.toml"
    secret.write_text("secret")
    secret.chmod(0o600)
    path.write_text(
        f'[redis]\nurl = "{server.url}"\nusername = "limited"\npassword_file = "secret"\n'
        "[pipelines.orders]\n"
    )
    try:
        with run_process(path, "check", "--json") as started:
            raw, _ = started.communicate(timeout=60)
    finally:
        link.execute("ACL", "DELUSER", "limited")

    rights = [
        each["text"] for each in json.loads(raw)["findings"] if each["about"] == "permissions"
    ]
    assert any("SMEMBERS" in text for text in rights)


# --- the daemon's own server ----------------------------------------------------------------------


def test_tail_block_is_shorter_than_the_connection_timeout() -> None:
    from streamqd.cli.session import TIMEOUT

    assert tail.BLOCK_MS / 1000 < TIMEOUT


def test_produce_shows_a_progress_bar_only_on_a_terminal(
    file: Path, link: Connection, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text("x\n" * 5000)
    ours, theirs = pty.openpty()
    try:
        args = ("produce", "orders", "--from", str(tmp_path / "log"))
        with run_process(file, *args, stderr=theirs) as started:
            assert started.wait(20) == 0
            assert started.stdout is not None
            assert started.stdout.read().startswith(b"5,000 messages sent")
        seen = wait_until(lambda: os.read(ours, 65536), what="the bar")
    finally:
        os.close(ours)
        os.close(theirs)

    assert b"orders" in seen
    assert b"100%" in seen

"""The figures of a report on a real log equal counts that are made without Spark."""

from __future__ import annotations

import datetime as dt
import gzip
import itertools
import json
import zlib
from collections import Counter
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from click.testing import CliRunner

from streamqd import config
from streamqd.cli import cli
from streamqd.errors import InvalidRequestError, RequestRefusedError
from streamqd.policy.fingerprint import fingerprint
from streamqd.spark.pipelines.archive import Archiver
from streamqd.spark.pipelines.report import report
from streamqd.spark.pipelines.report_queries import ReportScope
from streamqd.spark.pipelines.storage import Archive
from streamqd.store import history, topics
from streamqd.store.client import Connection
from streamqd.store.history import HistoryRow, Interval
from streamqd.store.store import Store
from tests.support.servers import Server

if TYPE_CHECKING:
    from tests.spark.conftest import Shop


BEGIN, STEP = 1_763_600_000_000, 7919  # unix ms of the first entry, ms between entries
PARTITIONS = 3
GARBAGE = b"\xff\x00\x1b[31m<script>\xe2\x80\xae"
TRACE = """Traceback (most recent call last):
  File "/srv/weblog.py", line 9, in count_hit
    parse(text)
  File "/usr/lib/python3.11/json/decoder.py", line 1, in decode
ValueError: <b>no</b>
"""


class Sent(NamedTuple):
    """The messages that were written, as the test counts them."""

    partition: int
    ms: int
    key: bytes | None
    line: bytes


@pytest.fixture
def settings(server: Server) -> config.Settings:
    return replace(config.Settings(), redis=server.settings)


def log(count: int) -> list[Sent]:
    """Return the first lines of a real access log as messages, with the client as the key."""
    packed = resources.files("streamqd.examples") / "data" / "apache_access.log.gz"
    with packed.open("rb") as file, gzip.open(file) as lines:
        found = [line.rstrip(b"\n") for line in itertools.islice(lines, count)]
    sent = []
    for number, line in enumerate(found):
        key = GARBAGE if number % 15 == 7 else line.split(b" ")[0]
        partition = zlib.crc32(key) % PARTITIONS
        sent.append(Sent(partition, BEGIN + STEP * number, None if number % 9 == 0 else key, line))
    return sent


def write(shop: Shop, entries: list[Sent]) -> None:
    shop.link.pipeline(
        [
            (
                *("XADD", shop.keys.stream("access", each.partition), f"{each.ms}-0"),
                *("payload", each.line, *(() if each.key is None else ("key", each.key))),
            )
            for each in entries
        ]
    )


def write_other(shop: Shop) -> None:
    """Write a topic with a failing group, one whose JSON is partly broken, and an empty one."""
    shop.topic("next", 1)
    shop.topic("empty", 2)
    stream = shop.keys.stream("next", 0)
    now = int(shop.link.execute("TIME")[0]) * 1000
    for number in range(5):
        body = json.dumps({"id": number, "who": "ann" if number else "<b>"})
        shop.link.execute("XADD", stream, f"{now - 3_600_000}-{number}", "payload", body)
    shop.link.execute("XADD", stream, f"{now}-0", "payload", '{"id": "x", "who": "zed"}')
    shop.link.execute("XGROUP", "CREATE", stream, "mail", "0")
    shop.link.execute("ZADD", shop.keys.retry("next", 0, "mail"), now + 60_000, "m:1-0")


def write_dead_letters(shop: Shop) -> list[dict[str, Any]]:
    """Write dead letters of two hours, some of them retried, some without a fingerprint."""
    written = []
    for number in range(12):
        failed = BEGIN + number * 500_000
        letter = {
            "payload": "p",
            "originalTopic": "access",
            "originalId": f"{failed - 1000 * (number + 1)}-0",
            "timestamp": failed - 1000 * (number + 1),
            "group": "hits" if number % 3 else "agents",
            "handler": "weblog:count_hit",
            "attempts": 5 if number % 2 else 1,
            "reason": "attempts",
            "errorClass": "ValueError" if number < 8 else "KeyError",
            "errorMessage": "<b>no</b>",
            "failedAt": failed,
            "traceback": TRACE,
        }
        if number < 4:
            letter["fingerprint"] = "told"
        written.append(letter)
        flat = [part for pair in letter.items() for part in pair]
        shop.link.execute(
            "XADD", shop.keys.dlq("access", number % PARTITIONS), f"{failed}-0", *flat
        )
    shop.link.execute("XADD", shop.keys.dlq("access", 0), f"{BEGIN + 9_000_000}-0", "payload", "")
    return written


def test_report_of_a_real_log_has_exact_figures(
    shop: Shop, settings: config.Settings, tmp_path: Path
) -> None:
    shop.topic("access", PARTITIONS)
    sent = log(600)
    write(shop, sent[:400])
    archiver = Archiver(settings, tmp_path / "archive", lambda: shop.spark, lambda _: None)
    assert [each.rows for each in archiver.run(["access"])] == [400]
    archiver.close()
    for number in range(PARTITIONS):
        shop.link.execute("XTRIM", shop.keys.stream("access", number), "MAXLEN", 0)
    write(shop, sent[400:])
    write_other(shop)
    letters = write_dead_letters(shop)
    archive, out = Archive(tmp_path / "archive"), tmp_path / "out"
    asked = ReportScope(archive=archive, schemas={"next": "id long, who string"})

    first = report(settings, lambda: shop.spark, out, asked)

    assert [each["topic"] for each in first["topics"]] == ["next", "access", "empty"]
    following, access, empty = first["topics"]
    check_entries(access, sent)
    check_deaths(access, letters)
    assert (empty["entries"], empty["dead_letters"], empty["partition_count"]) == (0, 0, 2)
    check_fields(following["fields"])
    assert [(each["severity"], each["about"], each["messages"]) for each in first["findings"]] == [
        ("problem", "fleet default", 6),
        ("problem", "next/mail", 6),
        ("warning", "access", 13),
        ("warning", "next/mail", 1),
        ("warning", "next", 1),
        ("note", "access", 600),
    ]
    assert first["changes"] == []
    assert json.loads((out / "report.json").read_bytes()) == first
    page = (out / "report.html").read_text("utf-8")
    assert "<script" not in page
    assert "\\xff\\x00\\x1b[31m&lt;script&gt;\\u202e" in page
    check_changes(shop, settings, asked, first, out)
    check_window(shop, settings, archive, sent, letters, out)


def check_entries(found: dict[str, Any], sent: list[Sent]) -> None:
    assert (found["entries"], found["bytes"]) == (len(sent), sum(len(e.line) for e in sent))
    rows = Counter(each.partition for each in sent)
    assert {each["partition"]: each["entries"] for each in found["partitions"]} == rows
    assert min(e["first_unix_ms"] for e in found["partitions"]) == BEGIN
    keys = Counter(each.key for each in sent if each.key is not None)
    assert {each["keys"] for each in found["keys"]} == {len(keys)}
    assert [each["entries"] for each in found["keys"]] == sorted(keys.values(), reverse=True)[:50]
    hashes = {zlib.crc32(key): rows for key, rows in keys.items()}
    assert {each["crc32"]: each["entries"] for each in found["keys"]}.items() <= hashes.items()
    assert GARBAGE.decode("utf-8", "backslashreplace") in {each["key"] for each in found["keys"]}
    width = found["width_ms"]
    assert width == 300_000  # for the 150 minutes until the last dead letter
    counted = Counter(each.ms // width * width for each in sent)
    assert {e["at_unix_ms"]: e["entries"] for e in found["timeline"] if e["entries"]} == counted


def check_deaths(found: dict[str, Any], letters: list[dict[str, Any]]) -> None:
    assert found["dead_letters"] == len(letters) + 1
    assert sum(each["dead_letters"] for each in found["timeline"]) == len(letters) + 1
    frame, handler = "weblog.py:count_hit", "weblog:count_hit"
    died = Counter(
        (
            each["group"],
            each.get("fingerprint") or fingerprint(each["errorClass"], frame, handler),
            each["errorClass"],
        )
        for each in letters
    )
    died["", fingerprint("", "", ""), ""] = 1
    causes = {(e["group"], e["fingerprint"], e["error_class"]): e for e in found["causes"]}
    assert {name: each["dead_letters"] for name, each in causes.items()} == died
    told = causes["hits", "told", "ValueError"]
    assert (told["place"], told["error_message"]) == (frame, "<b>no</b>")
    assert told["id"] == f"2:{letters[2]['failedAt']}-0"
    assert (told["p50_ms"], told["p99_ms"]) == (2000, 3000)


def check_fields(found: dict[str, Any]) -> None:
    assert (found["fits"], found["bad"]) == (5, 1)
    number, who = found["rows"]
    assert [number[name] for name in ("name", "type", "count", "nulls", "least", "greatest")] == [
        *("id", "bigint", 5, 0, "0", "4"),
    ]
    assert who["distinct"] == 2
    assert who["top"] == [{"item": "ann", "count": 4}, {"item": "<b>", "count": 1}]


def check_changes(
    shop: Shop, settings: config.Settings, asked: ReportScope, first: dict[str, Any], out: Path
) -> None:
    """Check that the next report in the same folder shows the changes."""
    letter = ("payload", "p", "group", "hits", "errorClass", "TypeError", "attempts", 1)
    shop.link.execute("XADD", shop.keys.dlq("access", 0), "*", *letter)
    shop.link.execute("XADD", shop.keys.stream("next", 0), "*", "payload", "p")
    second = report(settings, lambda: shop.spark, out, asked)
    assert second["compared_with"] == first["made_unix_ms"]
    assert second["changes"] == [
        {"measure": "next/mail: unread", "before": 6, "now": 7},
        {"measure": "access/hits: dead letters with TypeError", "before": 0, "now": 1},
        {"measure": "entries of next", "before": 6, "now": 7},
    ]


def check_window(
    shop: Shop,
    settings: config.Settings,
    archive: Archive,
    sent: list[Sent],
    letters: list[dict[str, Any]],
    out: Path,
) -> None:
    first, last = sent[350].ms, sent[450].ms
    since, until = (dt.datetime.fromtimestamp(ms / 1000, dt.UTC) for ms in (first, last))
    asked = ReportScope(("access",), archive, since, until)
    found = report(settings, lambda: shop.spark, out, asked)
    (topic,) = found["topics"]
    assert topic["entries"] == 100
    assert topic["dead_letters"] == sum(first <= each["failedAt"] < last for each in letters)
    assert "other topics" in found["compared_with"]


def test_report_reads_fields_like_the_parser(
    shop: Shop, settings: config.Settings, tmp_path: Path
) -> None:
    shop.topic("orders", 1)
    bodies = ['{"n": 1.5}', '{"n": "2.5"}', '{"n": 3.5} {}', '{"n": 4.5, "n": 4.5}', "{'n': 5.5}"]
    for body in [*bodies, '{"n": 1e500000000}', '{"n": "1e500000000"}']:
        shop.link.execute("XADD", shop.keys.stream("orders", 0), "*", "payload", body)
    asked = ReportScope(schemas={"orders": "n decimal(10,2)"})
    (topic,) = report(settings, lambda: shop.spark, tmp_path / "out", asked)["topics"]
    assert (topic["fields"]["fits"], topic["fields"]["bad"]) == (2, 5)
    (field,) = topic["fields"]["rows"]
    assert (field["count"], field["least"], field["greatest"]) == (2, "1.50", "2.50")


@pytest.mark.timeout(900)
def test_report_includes_history_and_quarantine(
    shop: Shop, settings: config.Settings, tmp_path: Path
) -> None:
    """The report covers a history that is half in the archive and half only in Redis."""
    shop.topic("orders", 1)
    settings = replace(settings, pipelines={"orders": config.Pipeline("n int NOT NULL")})
    for body in ('{"n": 1}', '{"n": "x"}', "{}", "{"):
        shop.link.execute("XADD", shop.keys.stream("orders", 0), "*", "payload", body)
    fast, slow = 15, 25  # histogram buckets of run times
    for half in range(2):
        for number in range(30):
            until = BEGIN - BEGIN % 60_000 + (30 * half + number) * 60_000 + 60_100
            counts = dict.fromkeys(history.COUNTS, 0) | {"acked": 100, "failed": number % 2}
            runs = {fast: 97, slow: 3} if half else {fast: 100}
            row = HistoryRow("orders", "bill", 0, "shop:bill", counts, 10 + number, 0, runs)
            written = Interval("", "web-1", until, 60.0, assignments=[row])
            history.append(shop.store, "default", written, 10 * 365 * 86_400.0)
        if not half:
            archiver = Archiver(settings, tmp_path / "archive", lambda: shop.spark, lambda _: None)
            archiver.run()
            archiver.close()
    asked = ReportScope(archive=Archive(tmp_path / "archive"))

    (topic,) = report(settings, lambda: shop.spark, tmp_path / "out", asked)["topics"]

    past = topic["history"]
    shortest, longest = ((1 << (10 + each)) / 1e9 for each in (fast, slow))
    [group] = past["groups"]
    assert (group["group"], group["handler"], group["most_lag"]) == ("bill", "shop:bill", 39)
    assert (group["handled"], group["failed"]) == (6_000, 30)
    assert (group["p50_seconds"], group["p95_seconds"], group["p99_seconds"]) == (
        *(shortest, shortest, longest),
    )
    assert past["width_ms"] == 60_000
    assert sum(each["handled"] for each in past["timeline"]) == 6_000
    assert {each["p99_seconds"] for each in past["timeline"]} == {shortest, longest}
    assert topic["quarantine"]["rows"] == 3
    assert sum(each["rows"] for each in topic["quarantine"]["reasons"]) == 3
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "Messages handled per minute (UTC)" in page
    assert "shop:<wbr>bill" in page


def test_report_refuses_an_invalid_schema(
    shop: Shop, settings: config.Settings, tmp_path: Path
) -> None:
    shop.topic("access", 1)
    for schema in ("", "int", "a int, A", "a int, a string", "__does_not_fit int"):
        asked = ReportScope(schemas={"access": schema or " "})
        with pytest.raises(InvalidRequestError, match="is not valid"):
            report(settings, lambda: shop.spark, tmp_path / "out", asked)
    assert list(tmp_path.iterdir()) == []


def fail_if_started() -> Any:
    pytest.fail("Spark was started for nothing")


def test_invalid_report_is_rejected_before_spark_starts(
    settings: config.Settings, store: Store, tmp_path: Path
) -> None:
    topics.create(store, "access", config.Topic(partitions=1))
    moment = dt.datetime.now(dt.UTC)
    for asked, sentence in (
        (ReportScope(("nothing",)), "topic nothing does not exist"),
        (ReportScope(schemas={"nothing": "a int"}), "topic nothing does not exist"),
        (ReportScope(since=moment, until=moment), "start of the window must be before its end"),
    ):
        with pytest.raises(RequestRefusedError, match=sentence):
            report(settings, fail_if_started, tmp_path / "out", asked)
    (tmp_path / "report.html").touch()
    with pytest.raises(RequestRefusedError, match="was not written by a report"):
        report(settings, fail_if_started, tmp_path, ReportScope())
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_report_command_returns_its_exit_code(
    server: Server, link: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without topics, the command writes a report and does not start Spark."""
    monkeypatch.setenv("STREAMQ_REDIS__URL", server.url)
    monkeypatch.chdir(tmp_path)
    command = ("pipeline", "report", "--out", "out")
    done = CliRunner().invoke(cli, [*command, "--json"])
    assert (done.exit_code, json.loads(done.stdout)["topics"]) == (0, [])
    assert "There are no topics" in (tmp_path / "out" / "report.html").read_text("utf-8")
    again = CliRunner().invoke(cli, command)
    assert (again.exit_code, again.stdout.splitlines()[-1]) == (
        *(0, "1 finding in no topics: out/report.html"),
    )
    assert CliRunner().invoke(cli, [*command, "--overwrite"]).exit_code == 0
    assert CliRunner().invoke(cli, [*command, "--since", "yesterday"]).exit_code == 2
    assert CliRunner().invoke(cli, [*command, "--schema", "access"]).exit_code == 2
    assert CliRunner().invoke(cli, [*command, "--archive", "none"]).exit_code == 8
    (tmp_path / "out" / "report.json").write_text("mine")
    refused = CliRunner().invoke(cli, command)
    assert refused.exit_code == 8
    assert "/out/report.json was not written by a report" in refused.stderr

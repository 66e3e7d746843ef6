"""The report's figures on a real log, against the same figures counted without Spark."""

from __future__ import annotations

import datetime as dt
import gzip
import itertools
import json
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from click.testing import CliRunner
from pyarrow import parquet

from streamqd import config
from streamqd.cli import cli
from streamqd.errors import Refused
from streamqd.policy.fingerprint import fingerprint
from streamqd.spark.pipelines.archive import Archiver
from streamqd.spark.pipelines.report import Reporter
from streamqd.spark.pipelines.report_queries import Window
from streamqd.spark.pipelines.storage import Archive
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.store import Store
from tests.support.servers import Server

if TYPE_CHECKING:
    from tests.spark.conftest import Shop

pytestmark = [pytest.mark.timeout(300)]

BEGIN, STEP = 1_763_600_000_000, 7919  # unix ms of the first entry, ms between two
PARTITIONS = 3
GARBAGE = b"\xff\x00\x1b[31m<script>\xe2\x80\xae"
TRACE = """Traceback (most recent call last):
  File "/srv/weblog.py", line 9, in count_hit
    parse(text)
  File "/usr/lib/python3.11/json/decoder.py", line 1, in decode
ValueError: <b>no</b>
"""


class Sent(NamedTuple):
    """What was written, as the test knows it."""

    partition: int
    ms: int
    key: bytes | None
    line: bytes


@pytest.fixture
def settings(server: Server) -> config.Settings:
    return replace(config.Settings(), redis=server.settings)


def log(count: int) -> list[Sent]:
    """The first lines of a real access log, as a producer would send them, by client."""
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
    """A topic of messages that tell where they come from, and one without any."""
    shop.topic("next", 1)
    shop.topic("empty", 2)
    stream = shop.keys.stream("next", 0)
    for number, took in enumerate((10, 20, 400, -5)):
        headers = json.dumps({"uid": f"access/0/{BEGIN - took}-0"})
        shop.link.execute("XADD", stream, f"{BEGIN}-{number}", "payload", "", "headers", headers)
    sent_at = ("sentAt", BEGIN + 1 - 3000)
    shop.link.execute("XADD", stream, f"{BEGIN + 1}-0", "payload", "p", *sent_at)
    worst = ("sentAt", "-9223372036854775808", "originalId", "x", "headers", "[")
    shop.link.execute("XADD", stream, f"{BEGIN + 2}-0", "payload", "p", *worst)


def bury(shop: Shop) -> list[dict[str, Any]]:
    """Dead letters: told and untold fingerprints, retried and not, in two hours."""
    written = []
    for number in range(12):
        failed = BEGIN + number * 500_000
        letter = {
            "payload": "p",
            "originalTopic": "access",
            "originalId": f"{failed - 1000 * (number + 1)}-0",
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


def ranked(values: list[int], share: float) -> int:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def test_figures_of_a_real_log_hot_and_cold(
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
    letters = bury(shop)

    told: list[Any] = []
    archive = Archive(tmp_path / "archive")
    reporter = Reporter(settings, lambda: shop.spark, told.append, archive=archive)
    document = reporter.run(tmp_path / "out")

    assert [each["topic"] for each in document["topics"]] == ["access", "empty", "next"]
    access, empty, following = document["topics"]
    check_entries(access, sent)
    check_deaths(access, letters)
    assert (empty["rows"], empty["letters"], empty["latency"]) == (0, 0, [])
    assert [each["rows"] for each in empty["partitions"]] == [0, 0]
    check_latencies(access, following, letters)
    assert (told[-1].done, told[-1].total) == (606, 606)
    assert shop.link.execute("KEYS", shop.keys.progress("*").replace("{", "*")) == []

    out = tmp_path / "out"
    assert json.loads((out / "report.json").read_bytes()) == document
    keys = parquet.read_table(out / "keys.parquet").to_pylist()
    assert {row["key"]: row["rows"] for row in keys}[GARBAGE] == Counter(each.key for each in sent)[
        GARBAGE
    ]
    page = (out / "report.html").read_text("utf-8")
    assert "<script" not in page
    assert "\\xff\\x00\\x1b[31m&lt;script&gt;\\u202e" in page
    check_window(shop, settings, archive, sent, letters, out)


def check_entries(found: dict[str, Any], sent: list[Sent]) -> None:
    assert (found["rows"], found["bytes"]) == (len(sent), sum(len(each.line) for each in sent))
    rows = Counter(each.partition for each in sent)
    assert {each["partition"]: each["rows"] for each in found["partitions"]} == rows
    assert found["rows_max_over_mean"] == max(rows.values()) * PARTITIONS / len(sent)
    keys = Counter(each.key for each in sent if each.key is not None)
    assert found["keyed_rows"] == keys.total()
    assert found["keys_about"] == pytest.approx(len(keys), rel=0.02)
    hottest = max(keys.values())
    assert found["hottest_key_share"] == hottest / len(sent)
    assert [each["rows"] for each in found["keys"]] == sorted(keys.values(), reverse=True)[:50]
    assert {each["key_hex"]: each["rows"] for each in found["keys"]}.items() <= {
        key.hex(): number for key, number in keys.items()
    }.items()
    width = round(found["throughput"][0]["width_seconds"] * 1000)
    assert width == 60_000  # 600 entries over 79 minutes
    counted: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for each in sent:
        at = dt.datetime.fromtimestamp(each.ms // width * width / 1000, dt.UTC)
        stamp = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        counted[stamp] = (counted[stamp][0] + 1, counted[stamp][1] + len(each.line))
    assert {e["at"]: (e["rows"], e["bytes"]) for e in found["throughput"] if e["rows"]} == counted


def check_deaths(found: dict[str, Any], letters: list[dict[str, Any]]) -> None:
    assert found["letters"] == len(letters) + 1
    classes = Counter(each["errorClass"] for each in letters)
    assert {e["error_class"]: e["letters"] for e in found["dead_by_class"]} == {**classes, "": 1}
    groups = Counter(each["group"] for each in letters)
    handlers = {e["group"]: e["letters"] for e in found["dead_by_handler"] if e["handler"]}
    assert handlers == groups
    frame, handler = "weblog.py:count_hit", "weblog:count_hit"
    prints = Counter(
        each.get("fingerprint") or fingerprint(each["errorClass"], frame, handler)
        for each in letters
    )
    prints[fingerprint("", "", "")] = 1
    by_print = {each["fingerprint"]: each for each in found["dead_by_fingerprint"]}
    assert {name: each["letters"] for name, each in by_print.items()} == prints
    newest = letters[3]
    assert by_print["told"]["newest"] == f"0:{newest['failedAt']}-0"
    assert (by_print["told"]["place"], by_print["told"]["error_message"]) == (frame, "<b>no</b>")
    hours = Counter((each["failedAt"] // 3_600_000) for each in letters)
    hours[(BEGIN + 9_000_000) // 3_600_000] += 1
    assert [each["letters"] for each in found["dead_by_hour"]] == [
        number for _, number in sorted(hours.items())
    ]


def check_latencies(
    access: dict[str, Any], following: dict[str, Any], letters: list[dict[str, Any]]
) -> None:
    took: dict[tuple[str, str], list[int]] = defaultdict(list)
    for each in letters:
        kind = "dead after retries" if each["attempts"] > 1 else "dead at once"
        original = int(each["originalId"].partition("-")[0])
        took[kind, each["group"]].append(each["failedAt"] - original)
    found = {(each["measure"], each["of"]): each for each in access["latency"]}
    assert {
        pair: [each[name] for name in ("count", "p50_ms", "p90_ms", "p99_ms", "max_ms", "skipped")]
        for pair, each in found.items()
    } == {
        pair: [len(all_), *(ranked(all_, share) for share in (0.5, 0.9, 0.99)), max(all_), 0]
        for pair, all_ in took.items()
    }
    others = {(each["measure"], each["of"]): each for each in following["latency"]}
    assert set(others) == {("forwarded", "access"), ("scheduled", "")}
    forwarded = others["forwarded", "access"]
    assert [forwarded[name] for name in ("count", "p50_ms", "max_ms", "skipped")] == [3, 20, 400, 1]
    assert others["scheduled", ""]["max_ms"] == 3000


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
    window = Window(since, until)
    reporter = Reporter(
        settings, lambda: shop.spark, lambda _: None, archive=archive, window=window
    )
    (topic,) = reporter.run(out, ["access"], overwrite=True)["topics"]
    assert topic["rows"] == 100
    assert topic["letters"] == sum(first <= each["failedAt"] < last for each in letters)


def unasked() -> Any:
    pytest.fail("Spark was started for nothing")


@pytest.fixture
def reporter(settings: config.Settings) -> Callable[..., Reporter]:
    return lambda **more: Reporter(settings, unasked, lambda _: None, **more)


def test_what_cannot_be_reported_is_refused_before_spark_starts(
    reporter: Callable[..., Reporter], store: Store, tmp_path: Path
) -> None:
    topics.create(store, "access", config.Topic(partitions=1))
    with pytest.raises(Refused, match="there is no topic nothing"):
        reporter().run(tmp_path / "out", ["nothing"])
    (tmp_path / "mine").touch()
    with pytest.raises(Refused, match="say --overwrite"):
        reporter().run(tmp_path)
    moment = dt.datetime.now(dt.UTC)
    with pytest.raises(Refused, match="window is empty"):
        reporter(window=Window(moment, moment)).run(tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_without_topics_there_is_a_report_and_no_spark(
    reporter: Callable[..., Reporter], link: Connection, tmp_path: Path
) -> None:
    assert reporter().run(tmp_path / "out")["topics"] == []
    assert "There are no topics" in (tmp_path / "out" / "report.html").read_text("utf-8")


def test_the_command_refuses_with_its_exit_code(
    server: Server, link: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMQ_REDIS__URL", server.url)
    monkeypatch.chdir(tmp_path)
    command = ("pipeline", "report", "--out", "out")
    done = CliRunner().invoke(cli, [*command, "--json"])
    assert (done.exit_code, json.loads(done.stdout)["topics"]) == (0, [])
    again = CliRunner().invoke(cli, command)
    assert again.exit_code == 8
    assert again.stderr.startswith("Error: ")
    assert "say --overwrite" in again.stderr
    shown = CliRunner().invoke(cli, [*command, "--overwrite", "--since", "2025-11-20"])
    assert (shown.exit_code, shown.stdout.splitlines()[-1]) == (0, "no topics in out/report.html")
    assert CliRunner().invoke(cli, [*command, "--since", "yesterday"]).exit_code == 2
    assert CliRunner().invoke(cli, [*command, "--archive", "none"]).exit_code == 8

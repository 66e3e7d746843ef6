"""The commands in the Spark guides work, and print what the guides show.

The blocks run in the order of the pages, on a real server and a real Spark. Shell commands run in a
terminal, Python and SQL in the tests' session, and settings are written to the configuration.
"""

from __future__ import annotations

import io
import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQuery

from streamqd import config
from streamqd.spark.pipelines.archive import Archiver
from streamqd.spark.pipelines.statements import SqlSplitter
from streamqd.store.client import connect
from streamqd.store.keys import Keys
from tests.pages.reader import Fence, Reader, fences
from tests.pages.test_pages import README, ROOT, TUTORIALS, make_reader
from tests.pages.test_snippets import PAGES
from tests.spark.conftest import Shop
from tests.support import tls
from tests.support.optional import skip_without
from tests.support.servers import ProcessServer, require
from tests.support.warm import warm

# Servers and terminals are started by fork, and Python warns of that if a session has threads.
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]

PATIENCE = 150.0  # seconds; Spark needs only a few on an idle machine
HOW_TO, REFERENCE = ROOT / "docs" / "how-to", ROOT / "docs" / "reference"
READ, ARCHIVE, PARSE, DECODE, QUERY, REPLAY, REPORT = (
    HOW_TO / f"{name}.md"
    for name in (
        "read-from-spark",
        "archive-topics",
        "parse-payloads",
        "decode-payloads",
        "query-with-sql",
        "replay-messages",
        "report-on-topics",
    )
)
OPTIONS = REFERENCE / "spark-options.md"
SECURE = "secure = {"
# The first line of each skipped block, with the reason for skipping it.
LEFT_OUT = {
    "# in a clone of streamqd": "it makes the environment that the tests run in",
    SECURE: "it needs a server with TLS: see test_tls_block_of_the_guide_works",
    "from pyspark.sql.avro.functions import from_avro": "it needs jars that PyPI does not have",
}
TYPED = {"sh", "text", "toml", "python", "sql"}
SPARK = re.compile(r"streamqd pipeline|import spark|streamqd\.spark|spark\.read")

AT = 1_763_632_800_000  # 2025-11-20T10:00:00Z
MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
LETTER = "1795255351300-0"  # the id in docs/how-to/report-on-topics.md, in partition 2
DELETED = "1763683205000-0"  # the id that docs/how-to/parse-payloads.md deletes, in partition 3


class Guide:
    """Follows a guide like a reader. `names` keeps the variables of its Python code."""

    def __init__(self, shop: Shop, reader: Reader, home: Path) -> None:
        self.shop, self.reader, self.home = shop, reader, home
        self.names: dict[str, Any] = {"spark": shop.spark}

    def follow(self, page: Path) -> None:
        """Follow a page, and fail if a result differs from the page."""
        for fence in fences(page):
            if first_line(fence) in LEFT_OUT:
                continue
            try:
                self.obey(fence)
            except Exception as error:
                raise AssertionError(f"{page.name}:{fence.line}: {error}") from error

    def obey(self, fence: Fence) -> None:
        """Execute one block of a page."""
        text = self.reader.mine(fence.text)
        if fence.language == "toml":
            with (self.home / "streamq.toml").open("a") as file:
                file.write(text)
        elif fence.language == "python":
            self._run(text)
        elif fence.language == "sql" and not fence.file:
            for statement in SqlSplitter().add(text):
                self.shop.spark.sql(statement).collect()
        elif "--from latest" in text:
            with visitors(self.shop):
                self.reader.obey(fence)
        else:
            self.reader.obey(fence)

    def _run(self, text: str) -> None:
        """Run a piece of Python, read each table, and let each query process all available data."""
        before = dict(self.names)
        exec(text, self.names)
        for made in [each for name, each in self.names.items() if each is not before.get(name)]:
            if isinstance(made, DataFrame) and not made.isStreaming:
                made.collect()
            elif isinstance(made, StreamingQuery):
                try:
                    made.processAllAvailable()
                finally:
                    made.stop()


def first_line(fence: Fence) -> str:
    return fence.text.partition("\n")[0]


# --- data and paths of the pages ------------------------------------------------------------------


def places(home: Path, server: ProcessServer) -> dict[str, str]:
    """Return the replacements for the folders and servers that the pages name."""
    return {
        "redis://localhost:6379/0": server.url,
        "redis-cli": f"redis-cli -s {server.socket_path}",
        "/data": str(home / "data"),
        '"hits': f'"{home}/hits',  # relative to a session that was started elsewhere
        '"shouted-': f'"{home}/shouted-',
        '"orders.parquet': f'"{home}/orders.parquet',
    }


def line(status: int) -> str:
    """Return a line of a web server's log."""
    return f'10.0.0.7 - - [20/Nov/2025:10:00:00 +0000] "GET / HTTP/1.1" {status} 17'


def fill(shop: Shop) -> None:
    """Fill `access` and `orders` with messages and dead letters of two days."""
    shop.topic("access", 4)
    for number in range(15):
        at = AT + number * 5 * MINUTE if number < 8 else AT + HOUR + number
        at += DAY if number >= 12 else 0
        user = 7 if number in (7, 9) else number % 5
        more = ("headers", json.dumps({"tenant": "blue"})) if number == 7 else ()
        payload = line(500 if number in (0, 7, 9) else 200)
        key = shop.keys.stream("access", number % 4)
        fields = ("payload", payload, "key", f"user-{user}", *more)
        shop.link.execute("XADD", key, f"{at}-0", *fields)
    shop.topic("orders", 4)
    for partition, entry, order in (
        (0, f"{AT}-0", '{"id": 1, "amount": 10, "at": "2025-11-20T09:00:00Z"}'),
        (1, f"{AT}-0", '{"id": 2, "amount": 20, "at": "2025-11-20T10:00:00Z", "items": []}'),
        (3, DELETED, '{"id": 3, "amount": 1.5, "at": "2025-11-21T00:00:05Z"}'),
        (3, f"{AT + DAY}-0", '{"id": 4, "amount": 1, "at": "2025-11-21T00:01:00Z"}'),
        (0, f"{AT + 1}-0", '{"at": "2025-11-20"}'),
        (0, f"{AT + 2}-0", '{"at": "2025-11-20"}'),
        (1, f"{AT + 1}-0", "half a li"),
    ):
        shop.link.execute("XADD", shop.keys.stream("orders", partition), entry, "payload", order)
    for partition, entry, reason in (
        (2, LETTER, "attempts"), (1, LETTER, "attempts"), (0, f"{AT + 9 * DAY}-0", "dead"),
    ):  # fmt: skip
        letter = {
            "payload": line(200),
            "originalTopic": "access",
            "originalPartition": partition,
            "originalId": f"{AT}-0",
            "timestamp": AT,
            "group": "hits",
            "handler": "weblog:count_hit",
            "attempts": 5,
            "reason": reason,
            "errorClass": "ValueError",
            "errorMessage": "no",
            "failedAt": entry.partition("-")[0],
        }
        flat = [part for pair in letter.items() for part in pair]
        shop.link.execute("XADD", shop.keys.dlq("access", partition), entry, *flat)


@contextmanager
def visitors(shop: Shop) -> Iterator[None]:
    """Send messages while a query is waiting for new ones."""
    gone = threading.Event()

    def come() -> None:
        while not gone.wait(0.2):
            key = shop.keys.stream("access", 0)
            shop.link.execute("XADD", key, "*", "payload", line(500))

    coming = threading.Thread(target=come)
    coming.start()
    try:
        yield
    finally:
        gone.set()
        coming.join()


@pytest.fixture(scope="module")
def program() -> Iterator[Path]:
    """Create a folder with a program `streamqd` whose commands share one Spark."""
    with tempfile.TemporaryDirectory(prefix="sqe-") as folder, warm(Path(folder)):
        yield Path(folder)


@pytest.fixture
def guide(shop: Shop, process_server: ProcessServer, state_dir: Path) -> Iterator[Guide]:
    """A reader at the start of a guide, in a project whose topics are filled."""
    fill(shop)
    (state_dir / "data").mkdir()
    (state_dir / "streamq.toml").write_text(f'[redis]\nurl = "{process_server.url}"\n')
    with make_reader(state_dir, PATIENCE, places(state_dir, process_server)) as reader:
        yield Guide(shop, reader, state_dir)


@pytest.fixture
def typing(guide: Guide, program: Path) -> Guide:
    """The same reader, with a terminal whose commands share one Spark."""
    guide.reader.env |= {"PATH": f"{program}:{guide.reader.env['PATH']}"}
    return guide


# --- the pages ------------------------------------------------------------------------------------


def test_spark_guide_works_as_shown(guide: Guide) -> None:
    shop, spark = guide.shop, guide.shop.spark
    settings = replace(config.Settings(), redis=shop.server.settings)
    folder = guide.home / "data" / "archive"
    with closing(Archiver(settings, folder, lambda: spark, lambda _: None)) as archiver:
        archiver.run()
    shop.link.execute("XADD", shop.keys.stream("access", 3), "*", "payload", "not archived")
    spark.sql("SELECT 'user-8' AS customer, 5 AS amount").createOrReplaceTempView("sales")
    orders = "VALUES ('user-1', 'one', 'a'), ('user-2', 'two', 'b') AS rows(customer, body, uid)"
    spark.sql(f"SELECT * FROM {orders}").write.parquet(str(guide.home / "orders.parquet"))

    try:
        guide.follow(READ)
    finally:
        spark.sql("DROP TABLE IF EXISTS orders")
        spark.sql("DROP VIEW sales")

    access = shop.payloads("access", 4)
    assert guide.names["everything"].count() == len(access) == 16
    assert guide.names["only_files"].count() == 15
    assert spark.read.parquet(str(guide.home / "hits")).count() == 16
    assert shop.payloads("shouted", 4) == sorted(each.upper() for each in access)
    written = shop.payloads("orders", 4)
    assert {b'{"amount": 3}', b'{"customer":"user-8","amount":5}', b"one", b"two"} < {*written}
    [once] = [fence for fence in fences(READ) if "idColumn" in fence.text]
    guide.obey(once)
    assert shop.payloads("orders", 4) == written


def test_archive_guide_works_as_shown(typing: Guide) -> None:
    pytest.importorskip("duckdb")
    pytest.importorskip("polars")

    for page in (ARCHIVE, PARSE, QUERY, REPLAY):  # each page uses the archive of the previous ones
        typing.follow(page)

    deleted = [
        row
        for row in typing.names["DeltaTable"](f"{typing.home}/data/archive/tables/orders")
        .to_pyarrow_table()
        .to_pylist()
        if row["id"] == DELETED
    ]
    assert deleted == []
    shop = typing.shop
    assert shop.payloads("hits_per_minute", 1)
    assert set(shop.payloads("errors", 2)) == {line(500).encode()}


def test_encoding_guide_works_as_shown(guide: Guide) -> None:
    """A payload that cannot be decoded gets a reason, and the payloads next to it get fields."""
    for package in ("fastavro", "google"):
        skip_without(package)
    avro, protobuf = encoders(guide.home / "data")
    wanted = {"1-0": ("north", 1.5), "9-0": ("süd", -3.0)}
    for topic, encode in (("readings", avro), ("measured", protobuf)):
        guide.shop.topic(topic, 1)
        north, south = (encode(*values) for values in wanted.values())
        payloads = (north, north[:-1], north + b"\x02", b"\xff" * 20, b"no", b"\x0a\x01\xff", south)
        for number, payload in zip((1, 2, 3, 4, 5, 6, 9), payloads, strict=True):
            key = guide.shop.keys.stream(topic, 0)
            guide.shop.link.execute("XADD", key, f"{number}-0", "payload", payload)

    guide.follow(DECODE)

    names = guide.names
    assert {row["id"]: (row["sensor"], row["celsius"]) for row in names["good"].collect()} == wanted
    bad = {row["id"]: row["reading"]["error"] for row in names["bad"].collect()}
    assert {*bad} == {f"{number}-0" for number in (2, 3, 4, 5, 6)}
    assert bad["3-0"] == "ValueError: the record is followed by more bytes"
    rows = {row["id"]: row["reading"] for row in names["values"].collect()}
    found = {key: (row["sensor"], row["celsius"]) for key, row in rows.items() if not row["error"]}
    assert found == wanted
    assert rows["2-0"]["error"].startswith("DecodeError: ")


def encoders(folder: Path) -> tuple[Callable[..., bytes], Callable[..., bytes]]:
    """Write the guide's schemas to a folder, and return an encoder for each."""
    import fastavro
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    fields = [{"name": "sensor", "type": "string"}, {"name": "celsius", "type": "double"}]
    more = {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}
    schema = {"type": "record", "name": "Reading", "fields": [*fields, more]}
    (folder / "reading.avsc").write_text(json.dumps(schema))
    file = descriptor_pb2.FileDescriptorProto(name="reading.proto", package="weather")
    file.syntax = "proto3"
    message = file.message_type.add(name="Reading")
    kinds = descriptor_pb2.FieldDescriptorProto
    one, optional = kinds.TYPE_STRING, kinds.LABEL_OPTIONAL
    message.field.add(name="sensor", number=1, type=one, label=optional)
    message.field.add(name="celsius", number=2, type=kinds.TYPE_DOUBLE, label=optional)
    every = descriptor_pb2.FileDescriptorSet(file=[file])
    (folder / "reading.desc").write_bytes(every.SerializeToString())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    reading: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("weather.Reading"))

    def avro(sensor: str, celsius: float) -> bytes:
        stream = io.BytesIO()
        row = {"sensor": sensor, "celsius": celsius, "at": 0}
        fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), row)
        return stream.getvalue()

    def protobuf(sensor: str, celsius: float) -> bytes:
        return bytes(reading(sensor=sensor, celsius=celsius).SerializeToString())

    return avro, protobuf


def test_report_guide_works_as_shown(typing: Guide) -> None:
    typing.reader.obey(
        Fence("sh", [], {}, "streamqd pipeline archive --archive /data/archive\n", 0)
    )

    typing.follow(REPORT)

    told = json.loads((typing.home / "report" / "report.json").read_text())
    names = re.findall(r"^\| (`[^|]+) \|", REPORT.read_text(), re.MULTILINE)
    assert len(names) > 5
    assert {name for each in names for name in re.findall(r"`(\w+)`", each)} <= told.keys()
    assert (typing.home / "report" / "report.html").exists()


def test_tls_block_of_the_guide_works(shop: Shop, state_dir: Path) -> None:
    require(tls.certificates, state_dir)
    (state_dir / "spark.password").write_text("not-for-anybody-to-see")
    (state_dir / "spark.password").chmod(0o600)
    [block] = [fence for fence in fences(READ) if first_line(fence) == SECURE]
    with closing(require(tls.start, state_dir)) as guarded:
        with closing(connect(guarded.settings, timeout=10.0, name="test")) as link:
            rule = ("on", ">not-for-anybody-to-see", "~*", "&*", "+@all")
            link.execute("ACL", "SETUSER", "spark", *rule)
            inside = Shop(shop.spark, guarded, link, Keys())
            inside.topic("access", 1)
            inside.fill("access", 0, 1, 3)
        found = {
            "redis.internal:6380": f"127.0.0.1:{guarded.port}",
            "/etc/streamqd/client.": f"{state_dir}/server.",
            "/etc/streamqd": str(state_dir),
        }
        with make_reader(state_dir, PATIENCE, found) as reader:
            guide = Guide(inside, reader, state_dir)
            guide.obey(block)
            assert guide.names["access"].count() == 3


def test_every_code_block_is_run_or_skipped_with_a_reason() -> None:
    pages = {
        page: [*fences(page)]
        for page in (READ, ARCHIVE, PARSE, DECODE, QUERY, REPLAY, REPORT, OPTIONS)
    }
    every = [first_line(fence) for found in pages.values() for fence in found]
    assert len(every) > 30
    assert [each for each in LEFT_OUT if every.count(each) != 1] == []
    neither = [
        f"{page.name}:{fence.line}"
        for page, found in pages.items()
        for fence in found
        if fence.language not in TYPED and first_line(fence) not in LEFT_OUT
    ]
    assert neither == []


def test_only_the_tested_pages_have_spark_blocks() -> None:
    """Only pages that a test covers have blocks with Spark code.

    test_tutorial.py covers the tutorial and the README. The Chinese README has the same code.
    """
    typed = {READ, ARCHIVE, PARSE, DECODE, QUERY, REPLAY, REPORT, TUTORIALS["first-archive"]}
    typed |= {README, ROOT / "docs" / "README.zh-CN.md"}
    found = [
        f"{page.name}:{fence.line}"
        for page in PAGES
        if page not in typed
        for fence in fences(page)
        if SPARK.search(fence.text)
    ]
    assert found == []

"""One Spark session for all tests here, on a real server. Without Java, the tests are skipped."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from streamqd import config, extras
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support.servers import Server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import DataStreamReader, StreamingQuery

HERE = Path(__file__).parent
DEADLINE = 90  # seconds for one query
PATIENCE = 300  # seconds for one test; some tests start their own Spark and wait for up to 240 s


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.spark)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(PATIENCE))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> None:
    """Skip the check for threads, because a session always has some and no test here forks."""


@pytest.fixture(scope="session")
def event_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the session's event log, in the format of Spark's history server."""
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="session")
def spark(event_log: Path) -> Iterator[SparkSession]:
    """The Spark session that all tests share. Never stop it."""
    for package in ("pyspark", "pyarrow"):
        if importlib.util.find_spec(package) is None:
            _without(f"{package} is not installed: {extras.hint('spark')}")
    from streamqd import spark as ours

    try:
        made = ours.session(
            "streamqd tests",
            "local[2]",
            {
                "spark.driver.memory": "1g",
                "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
                "spark.sql.shuffle.partitions": "2",
                "spark.sql.streaming.minBatchesToRetain": "5",
                "spark.ui.showConsoleProgress": "false",
                "spark.eventLog.enabled": "true",
                "spark.eventLog.compress": "false",
                "spark.eventLog.dir": event_log.as_uri(),
            },
        )
    except ours.JavaMissingError as error:
        _without(str(error))
    made.sparkContext.setLogLevel("ERROR")
    yield made
    made.stop()


def _without(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


class Shop:
    """Topics on the server, and Spark queries that read and write them."""

    def __init__(self, spark: SparkSession, server: Server, link: Connection, keys: Keys) -> None:
        self.spark, self.server, self.link, self.keys = spark, server, link, keys

    @property
    def store(self) -> Store:
        return Store(self.link, self.keys)

    def topic(self, name: str, partitions: int) -> None:
        topics.create(self.store, name, config.Topic(partitions=partitions))

    def grow(self, name: str, partitions: int) -> None:
        self.link.execute("HSET", self.keys.meta(name), "partitionCount", partitions)

    def add(self, name: str, partition: int, *ids: str, **fields: bytes) -> None:
        """Write entries with these ids. Each payload names its entry's partition and id."""
        key = self.keys.stream(name, partition)
        more = [part for pair in fields.items() for part in pair]
        self.link.pipeline(
            [("XADD", key, each, "payload", f"{partition}:{each}", *more) for each in ids]
        )

    def fill(self, name: str, partition: int, first: int, last: int) -> None:
        self.add(name, partition, *(f"{number}-0" for number in range(first, last + 1)))

    def payloads(self, name: str, partitions: int) -> list[bytes]:
        """Return all payloads of a topic, sorted."""
        found = []
        for number in range(partitions):
            entries = self.link.execute("XRANGE", self.keys.stream(name, number), "-", "+")
            found += [dict(zip(f[::2], f[1::2], strict=True))[b"payload"] for _, f in entries]
        return sorted(found)

    # --- Spark ---

    def read(self, topic: str, schema: str = "", **options: object) -> DataFrame:
        reader = self.spark.read.format("streamq").options(
            **self._texts(subscribe=topic, **options)
        )
        return (reader.schema(schema) if schema else reader).load()

    def stream(self, topic: str, **options: object) -> DataFrame:
        every = {"startingOffsets": "earliest"} | options
        reader: DataStreamReader = self.spark.readStream.format("streamq")
        return reader.options(**self._texts(subscribe=topic, **every)).load()

    def write_options(self, **options: object) -> dict[str, str]:
        return self._texts(**options)

    def _texts(self, **options: object) -> dict[str, str]:
        every = {"url": self.server.url} | options
        return {name: str(value) for name, value in every.items()}

    def take(self, frame: DataFrame, checkpoint: Path) -> list[list[tuple[Any, ...]]]:
        """Run a streaming query until it has read all entries. Return the rows of each batch."""
        batches: list[list[tuple[Any, ...]]] = []

        def collect(batch: DataFrame, number: int) -> None:
            found = [tuple(row) for row in batch.collect()]
            if found:
                batches.append(found)

        writer = frame.writeStream.option("checkpointLocation", str(checkpoint))
        run(writer.foreachBatch(collect).trigger(availableNow=True).start())
        return batches


def run(query: StreamingQuery) -> None:
    """Wait until a query stops, and raise its error if it failed."""
    try:
        assert query.awaitTermination(DEADLINE), "the query does not end"
    finally:
        query.stop()


@pytest.fixture
def shop(spark: SparkSession, server: Server, link: Connection, keys: Keys) -> Shop:
    return Shop(spark, server, link, keys)

"""How far the batches of a streaming read go, on a real server and without a JVM."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from streamqd import config
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support.servers import Server

pytest.importorskip("pyarrow")
streaming = pytest.importorskip("pyspark.sql.streaming.datasource")
types = pytest.importorskip("pyspark.sql.types")
source = pytest.importorskip("streamqd.spark.source")

ALL = streaming.ReadAllAvailable()
SCHEMA = types.StructType([types.StructField("id", types.StringType())])


class Shop:
    """A topic of two partitions, and a streaming reader of it."""

    def __init__(self, server: Server, link: Connection, keys: Keys) -> None:
        self.server, self.link, self.keys = server, link, keys
        topics.create(Store(link, keys), "access", config.Topic(partitions=2))

    def reader(self, **given: object) -> Any:
        every = {"url": self.server.url, "subscribe": "access", "startingOffsets": "earliest"}
        options = {name.lower(): str(value) for name, value in (every | given).items()}
        made = source.StreamqSource(options).streamReader(schema=SCHEMA)
        # Spark carries readers between processes.
        return pickle.loads(pickle.dumps(made))

    def fill(self, partition: int, first: int, last: int) -> None:
        key = self.keys.stream("access", partition)
        self.link.pipeline(
            [("XADD", key, f"{number}-0", "payload", "x") for number in range(first, last + 1)]
        )

    def grow(self, partitions: int) -> None:
        self.link.execute("HSET", self.keys.meta("access"), "partitionCount", partitions)


@pytest.fixture
def shop(server: Server, link: Connection, keys: Keys) -> Shop:
    return Shop(server, link, keys)


def at(*ids: str) -> dict[str, Any]:
    """The offset of a reader that has read every entry up to these, written 1-0, 2-0 …"""
    return {
        "access": {str(number): each for number, each in enumerate(ids)},
        "#": {"access": {str(n): int(each.partition("-")[0]) for n, each in enumerate(ids)}},
    }


def rows(reader: Any, start: dict[str, Any], end: dict[str, Any]) -> list[str]:
    found = []
    for partition in reader.partitions(start, end):
        for batch in reader.read(partition):
            found += [f"{partition.span.place[1]}:{each}" for each in batch["id"].to_pylist()]
    return sorted(found)


def test_the_first_offset(shop: Shop) -> None:
    shop.fill(0, 1, 30)
    assert shop.reader().initialOffset() == at("0-0", "0-0")
    assert shop.reader(startingOffsets="latest").initialOffset() == at("30-0", "0-0")
    by_time = shop.reader(startingTimestamp=21).initialOffset()
    assert by_time["access"]["0"] == f"20-{(1 << 64) - 1}"
    assert by_time["#"]["access"]["0"] == 20


def test_the_first_offset_stays_the_same(shop: Shop) -> None:
    reader = shop.reader(startingOffsets="latest")
    first = reader.initialOffset()
    shop.fill(0, 1, 5)
    assert reader.initialOffset() == first


def test_an_unlimited_batch_goes_to_the_end(shop: Shop) -> None:
    shop.fill(0, 1, 30)
    reader = shop.reader()
    end = reader.latestOffset(at("0-0", "0-0"), ALL)
    assert end == at("30-0", "0-0")
    assert len(rows(reader, at("0-0", "0-0"), end)) == 30


def test_without_news_the_offset_is_the_same_text(shop: Shop) -> None:
    shop.fill(0, 1, 30)
    reader = shop.reader()
    start = json.loads('{"access": {"0": "30-0", "1": "0-0"}}')
    assert json.dumps(reader.latestOffset(start, ALL)) == json.dumps(start)
    start = at("30-0", "0-0")
    assert json.dumps(reader.latestOffset(start, ALL)) == json.dumps(start)


def test_a_limited_batch_is_shared_by_backlog(shop: Shop) -> None:
    shop.fill(0, 1, 300)
    shop.fill(1, 1, 100)
    reader = shop.reader(maxOffsetsPerTrigger=40)
    limit = reader.getDefaultReadLimit()
    assert limit == streaming.ReadMaxRows(40)
    first = reader.latestOffset(at("0-0", "0-0"), limit)
    assert first == at("30-0", "10-0")
    second = reader.latestOffset(first, limit)
    assert len(rows(reader, first, second)) == 40


def test_nobody_starves(shop: Shop) -> None:
    shop.fill(0, 1, 3000)
    shop.fill(1, 1, 1)
    reader = shop.reader()
    assert reader.latestOffset(at("0-0", "0-0"), streaming.ReadMaxRows(10)) == at("9-0", "1-0")
    shop.fill(1, 2, 2)
    assert reader.latestOffset(at("9-0", "1-0"), streaming.ReadMaxRows(1)) == at("9-0", "2-0")


def test_a_query_that_is_to_end_does_not_look_at_what_comes_later(shop: Shop) -> None:
    shop.fill(0, 1, 50)
    reader = shop.reader(minOffsetsPerTrigger=1000, maxTriggerDelay="1h")
    reader.prepareForTriggerAvailableNow()
    shop.fill(0, 51, 80)
    shop.grow(3)
    shop.fill(2, 1, 5)
    limit = streaming.ReadMaxRows(30)
    first = reader.latestOffset(at("0-0", "0-0"), limit)
    assert first == at("30-0", "0-0")
    second = reader.latestOffset(first, limit)
    assert second == at("50-0", "0-0")
    assert reader.latestOffset(second, limit) == second
    assert len(rows(reader, first, second)) == 20
    assert reader.reportLatestOffset() == at("80-0", "0-0", "5-0")


def test_a_partition_that_is_new_is_read_from_its_first_entry(shop: Shop) -> None:
    reader = shop.reader(startingOffsets="latest")
    start = at("0-0", "0-0")
    shop.grow(3)
    shop.fill(2, 1, 5)
    end = reader.latestOffset(start, ALL)
    assert end == at("0-0", "0-0", "5-0")
    assert rows(reader, start, end) == [f"2:{number}-0" for number in range(1, 6)]


def test_too_few_entries_wait_for_more(shop: Shop) -> None:
    reader = shop.reader(minOffsetsPerTrigger=10, maxTriggerDelay="1h")
    start = at("0-0", "0-0")
    shop.fill(0, 1, 3)
    # The first batch does not wait.
    start = reader.latestOffset(start, ALL)
    assert start == at("3-0", "0-0")
    shop.fill(0, 4, 12)
    assert reader.latestOffset(start, ALL) == start
    shop.fill(1, 1, 1)
    assert reader.latestOffset(start, ALL) == at("12-0", "1-0")
    impatient = shop.reader(minOffsetsPerTrigger=10, maxTriggerDelay="0s")
    assert impatient.latestOffset(at("11-0", "1-0"), ALL) == at("12-0", "1-0")


def test_a_loss_is_counted_and_then_left_behind(shop: Shop, link: Connection, keys: Keys) -> None:
    if shop.server.version < (7,):
        pytest.skip("Redis 6.2 does not count what a foreign XTRIM removes")
    shop.fill(0, 1, 100)
    start = at("10-0", "0-0")
    link.execute("XTRIM", keys.stream("access", 0), "MINID", "31-0")
    reader = shop.reader(failOnDataLoss="false")
    end = reader.latestOffset(start, streaming.ReadMaxRows(50))
    assert end == at("80-0", "0-0")
    assert len(rows(reader, start, end)) == 50
    strict = shop.reader()
    with pytest.raises(Exception, match="20 entries of access partition 0 behind 10-0"):
        strict.partitions(start, end)


def test_positions_of_partitions_that_are_not_read_any_more_are_kept(shop: Shop) -> None:
    shop.fill(0, 1, 5)
    start = at("0-0", "0-0", "7-0")
    assert shop.reader().latestOffset(start, ALL) == at("5-0", "0-0", "7-0")


def test_a_batch_can_be_cut_into_pieces(shop: Shop) -> None:
    shop.fill(0, 1, 100)
    for options, count in (({"minPartitions": 4}, 4), ({"maxRecordsPerPartition": 30}, 4)):
        reader = shop.reader(**options)
        assert len(reader.partitions(at("0-0"), at("100-0"))) == count
        assert len(rows(reader, at("0-0"), at("100-0"))) == 100

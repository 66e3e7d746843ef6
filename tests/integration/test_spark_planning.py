"""The bounds of the batches of a streaming read, on a real server and without a JVM."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from streamqd import config
from streamqd.admin import topics_deletion
from streamqd.errors import RequestRefusedError, TopicNotFoundError
from streamqd.spark.streams import Catalog, DataLossError
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
    """A topic of two partitions, and its streaming reader."""

    def __init__(self, server: Server, link: Connection, keys: Keys) -> None:
        self.server, self.link, self.keys = server, link, keys
        topics.create(Store(link, keys), "access", config.Topic(partitions=2))

    def reader(self, **given: object) -> Any:
        every = {"url": self.server.url, "subscribe": "access", "startingOffsets": "earliest"}
        wanted = {name: value for name, value in (every | given).items() if value is not None}
        options = {name.lower(): str(value) for name, value in wanted.items()}
        made = source.StreamqSource(options).streamReader(schema=SCHEMA)
        # Spark carries readers from one process to another.
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


def offset_at(*ids: str) -> dict[str, Any]:
    """Return the offset of a reader that has read up to these entries, whose IDs are 1-0, 2-0 …"""
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


def test_initial_offset_is_the_start(shop: Shop) -> None:
    shop.fill(0, 1, 30)
    assert shop.reader().initialOffset() == offset_at("0-0", "0-0")
    assert shop.reader(startingOffsets="latest").initialOffset() == offset_at("30-0", "0-0")
    by_time = shop.reader(startingTimestamp=21).initialOffset()
    assert by_time["access"]["0"] == f"20-{(1 << 64) - 1}"
    assert by_time["#"]["access"]["0"] == 20


def test_initial_offset_does_not_change(shop: Shop) -> None:
    reader = shop.reader(startingOffsets="latest")
    first = reader.initialOffset()
    shop.fill(0, 1, 5)
    assert reader.initialOffset() == first


def test_unlimited_batch_reaches_the_end(shop: Shop) -> None:
    shop.fill(0, 1, 30)
    reader = shop.reader()
    end = reader.latestOffset(offset_at("0-0", "0-0"), ALL)
    assert end == offset_at("30-0", "0-0")
    assert len(rows(reader, offset_at("0-0", "0-0"), end)) == 30


def test_offset_without_new_entries_is_unchanged(shop: Shop) -> None:
    shop.fill(0, 1, 30)
    reader = shop.reader()
    start = json.loads('{"access": {"0": "30-0", "1": "0-0"}}')
    assert json.dumps(reader.latestOffset(start, ALL)) == json.dumps(start)
    start = offset_at("30-0", "0-0")
    assert json.dumps(reader.latestOffset(start, ALL)) == json.dumps(start)


def test_limited_batch_is_split_by_backlog(shop: Shop) -> None:
    shop.fill(0, 1, 300)
    shop.fill(1, 1, 100)
    reader = shop.reader(maxOffsetsPerTrigger=40)
    limit = reader.getDefaultReadLimit()
    assert limit == streaming.ReadMaxRows(40)
    first = reader.latestOffset(offset_at("0-0", "0-0"), limit)
    assert first == offset_at("30-0", "10-0")
    second = reader.latestOffset(first, limit)
    assert len(rows(reader, first, second)) == 40


def test_limited_batch_starves_no_partition(shop: Shop) -> None:
    shop.fill(0, 1, 3000)
    shop.fill(1, 1, 1)
    reader = shop.reader()
    assert reader.latestOffset(offset_at("0-0", "0-0"), streaming.ReadMaxRows(10)) == offset_at(
        "9-0", "1-0"
    )
    shop.fill(1, 2, 2)
    assert reader.latestOffset(offset_at("9-0", "1-0"), streaming.ReadMaxRows(1)) == offset_at(
        "9-0", "2-0"
    )


def test_available_now_query_ignores_later_entries(shop: Shop) -> None:
    shop.fill(0, 1, 50)
    reader = shop.reader(minOffsetsPerTrigger=1000, maxTriggerDelay="1h")
    reader.prepareForTriggerAvailableNow()
    shop.fill(0, 51, 80)
    shop.grow(3)
    shop.fill(2, 1, 5)
    limit = streaming.ReadMaxRows(30)
    first = reader.latestOffset(offset_at("0-0", "0-0"), limit)
    assert first == offset_at("30-0", "0-0")
    second = reader.latestOffset(first, limit)
    assert second == offset_at("50-0", "0-0")
    assert reader.latestOffset(second, limit) == second
    assert len(rows(reader, first, second)) == 20
    lag = {"#lag": {"total": 35, "max": 30, "avg": 11.7}}
    assert reader.reportLatestOffset() == offset_at("80-0", "0-0", "5-0") | lag


def test_new_partition_is_read_from_its_first_entry(shop: Shop) -> None:
    reader = shop.reader(startingOffsets="latest")
    start = offset_at("0-0", "0-0")
    shop.grow(3)
    shop.fill(2, 1, 5)
    end = reader.latestOffset(start, ALL)
    assert end == offset_at("0-0", "0-0", "5-0")
    assert rows(reader, start, end) == [f"2:{number}-0" for number in range(1, 6)]


def test_small_batch_waits_for_min_offsets_or_max_delay(shop: Shop) -> None:
    reader = shop.reader(minOffsetsPerTrigger=10, maxTriggerDelay="1h")
    start = offset_at("0-0", "0-0")
    shop.fill(0, 1, 3)
    # The first batch does not wait for more entries.
    start = reader.latestOffset(start, ALL)
    assert start == offset_at("3-0", "0-0")
    shop.fill(0, 4, 12)
    assert reader.latestOffset(start, ALL) == start
    shop.fill(1, 1, 1)
    assert reader.latestOffset(start, ALL) == offset_at("12-0", "1-0")
    impatient = shop.reader(minOffsetsPerTrigger=10, maxTriggerDelay="0s")
    assert impatient.latestOffset(offset_at("11-0", "1-0"), ALL) == offset_at("12-0", "1-0")


def test_lost_entries_are_reported_once(shop: Shop, link: Connection, keys: Keys) -> None:
    if shop.server.version < (7,):
        pytest.skip("Redis 6.2 does not count what a foreign XTRIM removes")
    shop.fill(0, 1, 100)
    start = offset_at("10-0", "0-0")
    link.execute("XTRIM", keys.stream("access", 0), "MINID", "31-0")
    reader = shop.reader(failOnDataLoss="false")
    end = reader.latestOffset(start, streaming.ReadMaxRows(50))
    assert end == offset_at("80-0", "0-0")
    assert len(rows(reader, start, end)) == 50
    strict = shop.reader()
    with pytest.raises(Exception, match="20 entries of access partition 0 after 10-0"):
        strict.partitions(start, end)


def test_recreated_stream_of_equal_count_is_read(shop: Shop) -> None:
    """If a new stream has issued as many entries as were read, its later entries are read."""
    shop.fill(0, 6, 15)
    start = offset_at("10-0", "0-0")
    reader = shop.reader()
    end = reader.latestOffset(start, streaming.ReadMaxRows(1000))
    assert end["access"]["0"] == "15-0"
    assert rows(reader, start, end) == [f"0:{number}-0" for number in range(11, 16)]


def test_trimming_by_other_clients_skips_no_entries(shop: Shop) -> None:
    """No entry is skipped or read twice, even without counts (Redis 6.2)."""
    key = shop.keys.stream("access", 0)
    shop.fill(0, 1, 10)
    reader = lenient_reader(shop, maxOffsetsPerTrigger=4)
    limit = reader.getDefaultReadLimit()
    found: list[str] = []
    start = offset_at("0-0", "0-0")
    for number in range(11, 17):
        end = reader.latestOffset(start, limit)
        found += rows(reader, start, end)
        start = end
        shop.link.execute("XDEL", key, f"{number - 10}-0")
        shop.link.execute("XADD", key, "MAXLEN", "8", f"{number}-0", "payload", "x")
    end = reader.latestOffset(start, ALL)
    found += rows(reader, start, end)
    assert len(found) == len(set(found))
    assert set(found) >= {f"0:{number}-0" for number in range(9, 17)}


def test_positions_of_unread_partitions_are_kept(shop: Shop) -> None:
    shop.fill(0, 1, 5)
    shop.grow(3)
    start = offset_at("0-0", "0-0", "7-0")
    reader = shop.reader(subscribe=None, assign='{"access": [0, 1]}')
    end = reader.latestOffset(start, ALL)
    assert end == offset_at("5-0", "0-0", "7-0")
    assert len(rows(reader, start, end)) == 5


# --- loss -----------------------------------------------------------------------------------------


def lenient_reader(shop: Shop, **given: object) -> Any:
    return shop.reader(failOnDataLoss="false", **given)


def read_despite_loss(
    caplog: pytest.LogCaptureFixture, reader: Any, start: Any, end: Any
) -> list[str]:
    """Return the entries of a lenient query, and check that it reports its loss only once."""
    caplog.clear()
    found = rows(reader, start, end)
    assert [each.levelname for each in caplog.records] == ["WARNING"], caplog.text
    assert rows(reader, end, reader.latestOffset(end, ALL)) == []
    assert len(caplog.records) == 1
    return found


@pytest.mark.parametrize(
    "how", [{"subscribe": None, "subscribePattern": "acc.*"}, {}, {"subscribe": "access,other"}]
)
def test_deleted_topic_is_a_loss(
    shop: Shop, caplog: pytest.LogCaptureFixture, how: dict[str, object]
) -> None:
    """A deleted topic is a loss if it had entries that the query has not read, 500 in this case."""
    topics.create(Store(shop.link, shop.keys), "other", config.Topic(partitions=1))
    shop.fill(0, 1, 600)
    start = offset_at("100-0", "0-0")
    running = shop.reader(maxOffsetsPerTrigger=1, **how)
    running.latestOffset(start, running.getDefaultReadLimit())
    topics_deletion.delete(Store(shop.link, shop.keys), "access", force=True)
    for reader, many in ((shop.reader(**how), "entries that were not read"),
                         (running, "at least 500 entries")):  # fmt: skip
        end = reader.latestOffset(start, ALL)
        assert "access" not in end
        for _ in range(2):
            message = f"partition 0 after 100-0 no longer exists, and {many} are lost"
            with pytest.raises(DataLossError, match=message):
                reader.partitions(start, end)
    caplog.clear()
    reader = lenient_reader(shop, **how)
    end = reader.latestOffset(start, ALL)
    assert rows(reader, start, end) == []
    assert [each.levelname for each in caplog.records][:2] == ["WARNING"] * 2  # one per partition
    caplog.clear()
    assert rows(reader, end, reader.latestOffset(end, ALL)) == []
    assert "is gone" not in caplog.text
    # If a topic with this name is created later, it is read from its first entry.
    topics.create(Store(shop.link, shop.keys), "access", config.Topic(partitions=1))
    shop.fill(0, 1, 3)
    assert len(rows(reader, end, reader.latestOffset(end, ALL))) == 3


def test_removed_partitions_are_a_loss(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """It is a loss if the topic is recreated with fewer partitions."""
    start = offset_at("0-0", "7-0")
    topics_deletion.delete(Store(shop.link, shop.keys), "access", force=True)
    topics.create(Store(shop.link, shop.keys), "access", config.Topic(partitions=1))
    shop.fill(0, 1, 3)
    for how in ({}, {"subscribe": None, "assign": '{"access": [0, 1]}'}):
        reader = shop.reader(**how)
        end = reader.latestOffset(start, ALL)
        assert end == offset_at("3-0")
        with pytest.raises(DataLossError, match="access partition 1 after 7-0 no longer exists"):
            reader.partitions(start, end)
        assert len(read_despite_loss(caplog, lenient_reader(shop, **how), start, end)) == 3


@pytest.mark.parametrize(
    ("first", "count"),
    [
        *((1, count) for count in (0, 1, 99)),
        *((50, count) for count in (1, 51, 99)),
        *((first, count) for first in (101, 1000) for count in (0, 1, 99, 100, 101, 300)),
    ],
)
def test_recreated_stream_is_a_loss(
    shop: Shop, caplog: pytest.LogCaptureFixture, first: int, count: int
) -> None:
    """A recreated stream is a loss, with any number of entries and with any IDs."""
    if shop.server.version < (7,) and first <= 100 <= first + count - 1:
        pytest.skip("Redis 6.2 does not count: ids of the past may be those of the one stream")
    shop.fill(0, 1, 100)
    start = offset_at("100-0", "0-0")
    shop.link.execute("DEL", shop.keys.stream("access", 0))
    shop.fill(0, first, first + count - 1)
    reader = shop.reader()
    end = reader.latestOffset(start, ALL)
    assert end != start
    with pytest.raises(DataLossError, match="is not the stream that was read before"):
        reader.partitions(start, end)
    assert len(read_despite_loss(caplog, lenient_reader(shop), start, end)) == count


def test_recreated_stream_with_smaller_ids_is_a_loss(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """A recreated stream is a loss even if its counts would also fit the old stream."""
    shop.link.execute("XADD", shop.keys.stream("access", 0), "5000-0", "payload", "x")
    start = shop.reader().latestOffset(offset_at("0-0", "0-0"), ALL)
    shop.link.execute("DEL", shop.keys.stream("access", 0))
    shop.fill(0, 1, 30)
    reader = shop.reader()
    end = reader.latestOffset(start, ALL)
    with pytest.raises(DataLossError, match="is not the stream that was read before"):
        reader.partitions(start, end)
    assert len(read_despite_loss(caplog, lenient_reader(shop), start, end)) == 30


def test_recreated_stream_is_read_in_portions(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """Limits and a fixed end also apply to the new stream, and the loss is reported."""
    shop.fill(0, 1, 100)
    reader = lenient_reader(shop, maxOffsetsPerTrigger=40)
    limit = reader.getDefaultReadLimit()
    start = reader.latestOffset(offset_at("0-0", "0-0"), limit)
    reader.prepareForTriggerAvailableNow()
    shop.link.execute("DEL", shop.keys.stream("access", 0))
    shop.fill(0, 1, 30)
    found: list[str] = []
    for _ in range(5):
        end = reader.latestOffset(start, limit)
        found += rows(reader, start, end)
        start = end
    assert found == sorted(f"0:{number}-0" for number in range(1, 31))
    assert "at least 60 entries are lost" in caplog.text
    assert len(caplog.records) == 1


def test_stream_recreated_after_planning_is_read_once(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """The read returns each entry of the new stream exactly once."""
    shop.fill(0, 1, 100)
    start = offset_at("0-0", "0-0")
    reader = lenient_reader(shop)
    end = reader.latestOffset(start, ALL)
    shop.link.execute("DEL", shop.keys.stream("access", 0))
    shop.fill(0, 50, 80)
    assert rows(reader, start, end) == []
    assert "is not the stream that was read before" in caplog.text
    onward = reader.latestOffset(end, ALL)
    assert len(rows(reader, end, onward)) == 31


def test_stream_recreated_during_a_read_is_a_loss(shop: Shop) -> None:
    """If the stream is recreated during a read, the task reports that its entries are gone."""
    shop.fill(0, 1, 100)
    start = offset_at("0-0", "0-0")
    for options in ({}, {"minPartitions": 2}):
        reader = shop.reader(**options)
        planned = reader.partitions(start, reader.latestOffset(start, ALL))
        shop.link.execute("DEL", shop.keys.stream("access", 0))
        shop.fill(0, 101, 300)
        many = "at least 100 entries" if not options else "at least 54 entries"
        with pytest.raises(
            DataLossError,
            match=f"and {many} are lost, because the topic was deleted.* a failover lost",
        ):
            list(reader.read(planned[0]))
        shop.link.execute("DEL", shop.keys.stream("access", 0))
        shop.fill(0, 1, 100)


def test_unknown_topic_is_an_error(shop: Shop) -> None:
    """An unknown name in the options is a mistake, even if there is a checkpoint."""
    reader = shop.reader(subscribe="access,nowhere")
    with pytest.raises(TopicNotFoundError, match="topic nowhere does not exist"):
        reader.initialOffset()
    with pytest.raises(TopicNotFoundError, match="topic nowhere does not exist"):
        reader.latestOffset(offset_at("0-0", "0-0"), ALL)


def test_batch_is_split_into_pieces(shop: Shop) -> None:
    shop.fill(0, 1, 100)
    for options, count in (({"minPartitions": 4}, 4), ({"maxRecordsPerPartition": 30}, 4)):
        reader = shop.reader(**options)
        assert len(reader.partitions(offset_at("0-0"), offset_at("100-0"))) == count
        assert len(rows(reader, offset_at("0-0"), offset_at("100-0"))) == 100


@pytest.mark.parametrize("count", [2_000, 20_000])
def test_pieces_are_even_despite_uneven_times(shop: Shop, count: int) -> None:
    """Pieces are even.

    If a partition were divided by time, one old entry and many new ones would give one task almost
    all entries.
    """
    shop.fill(0, 1, 1)
    burst = 1_795_180_000_000
    shop.fill(0, burst, burst + count - 2)
    reader = shop.reader(minPartitions=8)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    sizes = [
        sum(len(batch) for batch in reader.read(each)) for each in reader.partitions(start, end)
    ]
    assert (len(sizes), sum(sizes)) == (8, count)
    assert max(sizes) <= 1.25 * count / 8
    capped = shop.reader(minPartitions=3, maxRecordsPerPartition=count // 5)
    assert len(capped.partitions(start, end)) == 5


def test_dense_entries_are_split_in_few_steps(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense entries are split in few steps.

    The IDs suggest only one entry after the start, but the number of steps and tasks does not
    depend on that.
    """
    count, burst = 20_000, 1_795_180_000_000
    shop.fill(0, 1, 1)
    shop.fill(0, burst, burst + count // 100)
    key = shop.keys.stream("access", 0)
    dense = [("XADD", key, f"{burst + count}-{n}", "payload", "x") for n in range(count)]
    shop.link.pipeline(dense)
    walked, walk = [], Catalog.walk

    def counted(self: Catalog, wanted: Any) -> Any:
        walked.append(wanted)
        return walk(self, wanted)

    monkeypatch.setattr(Catalog, "walk", counted)
    start = {"access": {"0": f"{burst}-0", "1": "0-0"}}
    entries = count // 100 + count
    for options, tasks in (
        ({"minPartitions": 8}, 8),
        ({"maxRecordsPerPartition": 3_000}, 7),
        ({"maxRecordsPerPartition": 3_000, "minPartitions": 2}, 7),
        ({"maxRecordsPerPartition": 30_000, "minPartitions": 6}, 6),
    ):
        walked.clear()
        reader = shop.reader(**options)
        planned = reader.partitions(start, reader.latestOffset(start, ALL))
        sizes = [sum(len(batch) for batch in reader.read(each)) for each in planned]
        assert (len(sizes), sum(sizes)) == (tasks, entries), options
        assert max(sizes) <= 1.25 * entries / tasks, options
        assert len(walked) <= 800, options


def test_evenly_spaced_entries_are_split_without_a_count(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.fill(0, 1, 20_000)
    monkeypatch.setattr(Catalog, "walk", None)
    reader = shop.reader(minPartitions=4)
    sizes = [
        sum(len(batch) for batch in reader.read(each))
        for each in reader.partitions(offset_at("0-0", "0-0"), offset_at("20000-0", "0-0"))
    ]
    assert len(sizes) == 4
    assert max(sizes) <= 5_500
    assert sum(sizes) == 20_000


def test_stream_deleted_before_its_read_is_a_loss(shop: Shop) -> None:
    """The loss is reported in this batch already, not only in the next one."""
    shop.fill(0, 1, 100)
    reader = shop.reader(minPartitions=2)
    planned = reader.partitions(
        offset_at("0-0", "0-0"), reader.latestOffset(offset_at("0-0", "0-0"), ALL)
    )
    assert len(planned) == 2
    shop.link.execute("DEL", shop.keys.stream("access", 0))
    for piece in planned:
        with pytest.raises(DataLossError, match="is not the stream that was read before"):
            list(reader.read(piece))


class Trimmer:
    """Trims partition 0 while the catalog walks it for the first time."""

    def __init__(self, shop: Shop, monkeypatch: pytest.MonkeyPatch, keep_from: str) -> None:
        self.trims = [("XTRIM", shop.keys.stream("access", 0), "MINID", keep_from)]
        self.link, self.walk = shop.link, Catalog.walk
        monkeypatch.setattr(Catalog, "walk", lambda catalog, wanted: self(catalog, wanted))

    def __call__(self, catalog: Catalog, wanted: Any) -> Any:
        while self.trims:
            self.link.execute(*self.trims.pop())
        return self.walk(catalog, wanted)


def test_trim_during_the_count_is_not_a_later_loss(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count at a batch's end equals the stream's, so the next batch finds no loss."""
    if shop.server.version < (7,):
        pytest.skip("Redis 6.2 does not count what a foreign XTRIM removes")
    shop.fill(0, 1, 100)
    Trimmer(shop, monkeypatch, "31-0")
    reader = lenient_reader(shop)
    end = reader.latestOffset(offset_at("10-0", "0-0"), streaming.ReadMaxRows(20))
    assert end == offset_at("50-0", "0-0")
    assert len(rows(reader, offset_at("10-0", "0-0"), end)) == 20


def test_trimming_during_the_first_count_hides_no_loss(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later loss is reported in the same way as an earlier one."""
    if shop.server.version < (7,):
        pytest.skip("Redis 6.2 does not count what a foreign XTRIM removes")
    shop.fill(0, 1, 100)
    trimmer = Trimmer(shop, monkeypatch, "71-0")
    given = {"startingOffsets": '{"access": {"0": "50-0", "1": "earliest"}}'}
    for _ in range(2):
        reader = shop.reader(**given)
        start = reader.initialOffset()
        assert start["#"] == {"access": {"1": 0}}
        with pytest.raises(DataLossError, match="an unknown number of entries"):
            reader.partitions(start, reader.latestOffset(start, ALL))
    assert not trimmer.trims


def test_unread_partition_in_the_options_is_refused(shop: Shop) -> None:
    """The options may not name a missing partition, unless a checkpoint takes precedence."""
    places = '{"access": {"0": "1-0", "1": "1-0", "7": "1-0"}}'
    text = "Offsets contains partition 7 of access, which does not exist"
    reader = shop.reader(startingOffsets=places)
    with pytest.raises(RequestRefusedError, match=f"starting{text}"):
        reader.initialOffset()
    batch = {"url": shop.server.url, "subscribe": "access", "endingoffsets": places}
    with pytest.raises(RequestRefusedError, match=f"ending{text}"):
        source.StreamqSource(batch).reader(schema=SCHEMA).partitions()
    shop.fill(0, 1, 5)
    assert reader.latestOffset(offset_at("0-0", "0-0"), ALL) == offset_at("5-0", "0-0")


@pytest.mark.parametrize(
    "ending",
    [
        {"endingOffsets": "latest"},
        {"endingTimestamp": "5"},
        {"endingOffsetsByTimestamp": '{"access": {"0": 5, "1": 5}}'},
    ],
)
def test_streaming_read_refuses_an_end(shop: Shop, ending: dict[str, str]) -> None:
    """A streaming read refuses an end. A stream has none, so the option would be ignored."""
    with pytest.raises(ValueError, match="a stream has no end; remove endingOffsets"):
        shop.reader(**ending)


def test_batch_read_refuses_a_start_after_its_end(shop: Shop) -> None:
    """A batch read refuses a start after its end, which would return no rows and no error."""
    shop.fill(0, 1, 9)

    def planned(start: str, end: str) -> int:
        given = {"url": shop.server.url, "subscribe": "access"}
        given |= {"startingoffsets": start, "endingoffsets": end}
        reader = source.StreamqSource(given).reader(schema=SCHEMA)
        return len(reader.partitions())

    with pytest.raises(
        RequestRefusedError, match="access partition 0 has no entries to read: its start, 7-0"
    ):
        planned("7-0", "3-0")
    assert planned("3-0", "7-0") > 0
    assert planned("3-0", "3-0") == 0

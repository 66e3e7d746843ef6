"""Streams start in the archive and continue in Redis, on a real server and without a JVM."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamqd import config
from streamqd.errors import RequestRefusedError
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support.servers import Server

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("deltalake")
streaming = pytest.importorskip("pyspark.sql.streaming.datasource")
types = pytest.importorskip("pyspark.sql.types")
source = pytest.importorskip("streamqd.spark.source")

from streamqd.spark import backfill as planning  # noqa: E402
from streamqd.spark.backfill import Backfill  # noqa: E402
from streamqd.spark.location import location  # noqa: E402
from streamqd.spark.offsets import PART_MAX, ZERO, Id, Position, read_id  # noqa: E402
from streamqd.spark.options import read_options  # noqa: E402
from streamqd.spark.pipelines import compact, writer  # noqa: E402
from streamqd.spark.pipelines.storage import Archive, ArchiveError, ArchiveTable  # noqa: E402
from streamqd.spark.reader import EntryReader  # noqa: E402
from streamqd.spark.streams import DataLossError  # noqa: E402

ALL = streaming.ReadAllAvailable()
SCHEMA = types.StructType(
    [
        types.StructField("partition", types.IntegerType()),
        types.StructField("id", types.StringType()),
        types.StructField("value", types.BinaryType()),
    ]
)
BEGIN = {"access": {"0": "0-0", "1": "0-0"}, "#": {"access": {"0": 0, "1": 0}}}
Found = list[tuple[int, str]]


class Shop:
    """A topic of two partitions, its archive, and streams that read both."""

    def __init__(self, server: Server, link: Connection, keys: Keys, folder: Path) -> None:
        self.server, self.link, self.keys = server, link, keys
        self.folder: Path | str = folder
        self.stored: dict[str, str] = {}  # the options of an object store
        topics.create(Store(link, keys), "access", config.Topic(partitions=2))

    def add(self, partition: int, *ids: str) -> None:
        key = self.keys.stream("access", partition)
        self.link.pipeline([("XADD", key, each, "payload", f"{partition}:{each}") for each in ids])

    def fill(self, partition: int, first: int, last: int) -> None:
        self.add(partition, *(f"{number}-0" for number in range(first, last + 1)))

    def archive(self, *, rows_max: int = 1_000_000) -> ArchiveTable:
        """Archive all entries in batches of `rows_max` entries, as the pipeline does."""
        table = Archive(self.folder, create=True, options=self.stored).table("access", create=True)
        assert table is not None
        given = {"url": self.server.url, "subscribe": "access", "minPartitions": "1"}
        given |= {"maxOffsetsPerTrigger": str(rows_max)}
        reader = writer.FileStreamReader(read_options(given, {}), table.folder)
        reader.prepareForTriggerAvailableNow()
        while (end := reader.latestOffset({"batch": 0}, ALL)) != {"batch": 0}:
            names = [each.split()[0] for each in writer._DDL.split(", ")]
            make = types.Row(*names)
            found = [make(*row) for part in reader.partitions({}, end) for row in reader.read(part)]
            table.reload()
            table.append(*writer.parse_rows(found))
        return table

    def need_counts(self) -> None:
        """Skip a test that needs the server to count the entries of a foreign XTRIM."""
        if self.server.version < (7,):
            pytest.skip("Redis 6.2 does not count what a foreign XTRIM removes")

    def trim(self, partition: int, keep_from: str) -> None:
        self.link.execute("XTRIM", self.keys.stream("access", partition), "MINID", "=", keep_from)

    def reader(self, **given: object) -> Any:
        every = {"url": self.server.url, "subscribe": "access", "startingOffsets": "archive"}
        every |= {"archivePath": str(self.folder)}
        options = {name.lower(): str(value) for name, value in (every | given).items()}
        # Spark carries readers from one process to another.
        return pickled(source.StreamqSource(options).streamReader(schema=SCHEMA))


@pytest.fixture
def shop(server: Server, link: Connection, keys: Keys, tmp_path: Path) -> Shop:
    return Shop(server, link, keys, tmp_path / "archive")


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def rows(reader: Any, start: dict[str, Any], end: dict[str, Any]) -> Found:
    """Return the rows of a batch. Check that each has the payload of its entry."""
    found = []
    for partition in reader.partitions(start, end):
        for batch in pickled(reader).read(pickled(partition)):
            assert batch.schema.names == SCHEMA.names
            for row in batch.to_pylist():
                assert row["value"].decode() == f"{row['partition']}:{row['id']}"
                found.append((row["partition"], row["id"]))
    return found


def read_to_end(
    reader: Any, start: dict[str, Any], limit: Any = ALL, found: list[Found] | None = None
) -> list[Found]:
    """Return the rows of each batch until the end.

    `found` collects them, so that rows read before an error are not lost.
    """
    found = [] if found is None else found
    while (end := reader.latestOffset(start, limit)) != start:
        found.append(rows(reader, start, end))
        start = end
    return found


def flat(batches: list[Found]) -> Found:
    return sorted(row for each in batches for row in each)


def expected_rows(partition: int, first: int, last: int) -> Found:
    return sorted((partition, f"{number}-0") for number in range(first, last + 1))


# --- one batch and many ---------------------------------------------------------------------------


def test_stream_reads_the_archive_and_then_redis(shop: Shop) -> None:
    shop.need_counts()
    shop.fill(0, 1, 300)
    shop.fill(1, 1, 100)
    shop.archive(rows_max=90)
    shop.trim(0, "250-0")
    shop.trim(1, "101-0")
    shop.fill(0, 301, 350)
    reader = shop.reader()
    start = reader.initialOffset()
    assert start == BEGIN
    end = reader.latestOffset(start, ALL)
    found = rows(reader, start, end)
    assert sorted(found) == sorted(expected_rows(0, 1, 350) + expected_rows(1, 1, 100))
    assert end == {
        "access": {"0": "350-0", "1": "100-0"},
        "#": {"access": {"0": 350, "1": 100}},
    }
    # A repeated batch has the same rows, even if the archive has grown in the meantime.
    shop.archive()
    shop.trim(0, "340-0")
    assert sorted(rows(shop.reader(), start, end)) == sorted(found)
    assert reader.latestOffset(end, ALL) == end


@pytest.mark.parametrize("compacted", [False, True])
def test_limits_apply_to_archive_and_redis(shop: Shop, compacted: bool) -> None:
    shop.need_counts()
    shop.fill(0, 1, 300)
    shop.fill(1, 1, 100)
    table = shop.archive(rows_max=70)
    if compacted:
        compact.rewrite(table, 1 << 20)
    shop.trim(0, "301-0")
    shop.fill(0, 301, 400)
    limit = streaming.ReadMaxRows(80)
    batches = read_to_end(shop.reader(), BEGIN, limit)
    assert flat(batches) == sorted(expected_rows(0, 1, 400) + expected_rows(1, 1, 100))
    assert max(len(each) for each in batches) <= 80
    assert [len(each) for each in batches[:4]] == [80] * 4
    # Each restart continues from the checkpoint, in either phase.
    start: dict[str, Any] = BEGIN
    found: list[Found] = []
    while (end := shop.reader().latestOffset(start, limit)) != start:
        found.append(rows(shop.reader(), start, end))
        start = json.loads(json.dumps(end))
    assert flat(found) == flat(batches)


def test_compacted_files_have_bounded_row_groups(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task reads whole row groups, so their size limits how many rows it reads needlessly."""
    monkeypatch.setattr(compact, "GROUP_ROWS", 64)
    shop.fill(0, 1, 300)
    table = shop.archive(rows_max=150)
    compact.rewrite(table, 1 << 20)
    [file] = table.files(0)
    groups = pq.read_metadata(table.locate(file))
    assert [groups.row_group(n).num_rows for n in range(groups.num_row_groups)] == [64] * 4 + [44]


def test_stream_reads_a_growing_archive(shop: Shop) -> None:
    """A stream reads the archive while it grows.

    Entries are archived and trimmed between and during the batches.
    """
    shop.fill(0, 1, 100)
    shop.archive(rows_max=30)
    limit = streaming.ReadMaxRows(45)
    reader, start = shop.reader(), BEGIN
    found: list[Found] = []
    for last in range(100, 400, 50):
        shop.fill(0, last + 1, last + 50)
        end = reader.latestOffset(start, limit)
        shop.archive(rows_max=20)
        shop.trim(0, f"{last + 40}-0")
        found.append(rows(reader, start, end))
        start = end
    found += read_to_end(reader, start, limit)
    assert flat(found) == sorted(expected_rows(0, 1, 400))


def test_entries_trimmed_during_a_task_are_read_from_the_archive(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task reads entries from the archive if they are trimmed after its first page."""
    shop.need_counts()
    shop.fill(0, 1, 50)
    shop.archive()
    shop.fill(0, 51, 400)
    fetch, fetched = EntryReader._fetch, []

    def slow(self: EntryReader, cursor: str, end: str, count: int) -> Any:
        fetched.append(cursor)
        if len(fetched) % 3 == 2:
            with monkeypatch.context() as plain:
                plain.setattr(EntryReader, "_fetch", fetch)
                shop.archive()
            shop.trim(0, f"{read_id(cursor.strip('('))[0] + 60}-0")
        return fetch(self, cursor, end, count)

    for options in ({}, {"minPartitions": 3}):
        fetched.clear()
        reader = shop.reader(fetchSize=20, **options)
        end = reader.latestOffset(BEGIN, ALL)
        planned = reader.partitions(BEGIN, end)
        with monkeypatch.context() as patched:
            patched.setattr(EntryReader, "_fetch", slow)
            found = [
                (row["partition"], row["id"])
                for each in planned
                for batch in reader.read(each)
                for row in batch.to_pylist()
            ]
        last = int(end["access"]["0"].split("-")[0])
        assert sorted(found) == sorted(expected_rows(0, 1, last))
        assert len(fetched) > 3
        shop.fill(0, last + 1, last + 350)


@pytest.mark.parametrize("archived", [False, True])
def test_stream_without_fail_on_loss_skips_trimmed_entries(
    shop: Shop, archived: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without fail-on-loss, trimmed entries are skipped.

    The start has no count, so only a gap between two pages shows a loss during a task.
    """
    Archive(shop.folder, create=True)
    shop.fill(0, 1, 400)
    fetch, fetched = EntryReader._fetch, []

    def slow(self: EntryReader, cursor: str, end: str, count: int) -> Any:
        fetched.append(cursor)
        if len(fetched) == 2:
            with monkeypatch.context() as plain:
                plain.setattr(EntryReader, "_fetch", fetch)
                if archived:
                    shop.archive()
            shop.trim(0, "101-0")
        return fetch(self, cursor, end, count)

    reader = shop.reader(fetchSize=20, failOnDataLoss="false", assign='{"access": [0]}',
                         subscribe="")  # fmt: skip
    start = {"access": {"0": "0-0"}}
    [planned] = reader.partitions(start, reader.latestOffset(start, ALL))
    assert planned.span.rows is None
    with monkeypatch.context() as patched:
        patched.setattr(EntryReader, "_fetch", slow)
        found = [
            (row["partition"], row["id"])
            for batch in reader.read(planned)
            for row in batch.to_pylist()
        ]
    assert len(fetched) > 3
    wanted = (
        expected_rows(0, 1, 400)
        if archived
        else expected_rows(0, 1, 20) + expected_rows(0, 101, 400)
    )
    assert sorted(found) == sorted(wanted)
    lost = "an unknown number of entries of access partition 0 after 0-0 were trimmed"
    assert (lost in caplog.text) is not archived


def test_available_now_stops_at_its_target(shop: Shop) -> None:
    """The stream stops at its target, although the archive may contain later entries."""
    shop.need_counts()
    shop.fill(0, 1, 100)
    shop.archive()
    reader = shop.reader()
    reader.prepareForTriggerAvailableNow()
    shop.fill(0, 101, 200)
    shop.archive()
    shop.trim(0, "201-0")
    for limit in (ALL, streaming.ReadMaxRows(30)):
        batches = read_to_end(reader, BEGIN, limit)
        assert flat(batches) == sorted(expected_rows(0, 1, 100))
    batches = read_to_end(shop.reader(), BEGIN, streaming.ReadMaxRows(30))
    assert flat(batches) == sorted(expected_rows(0, 1, 200))


def test_starts_by_time_or_id_can_be_in_the_archive(shop: Shop) -> None:
    shop.fill(0, 1, 100)
    shop.fill(1, 1, 9)
    shop.archive()
    shop.trim(0, "91-0")
    shop.fill(0, 101, 110)
    for given in (
        {"startingTimestamp": 51, "startingOffsets": ""},
        {"startingOffsets": '{"access": {"0": "50-0", "1": "latest"}}'},
    ):
        reader = shop.reader(**given)
        found = flat(read_to_end(reader, reader.initialOffset(), streaming.ReadMaxRows(20)))
        assert found == sorted(expected_rows(0, 51, 110)), given
    late = shop.reader(startingOffsets="latest")
    assert read_to_end(late, late.initialOffset()) == []
    shop.fill(0, 111, 130)
    start = late.initialOffset()
    shop.archive()
    shop.trim(0, "131-0")
    assert flat(read_to_end(late, start)) == expected_rows(0, 111, 130)


def test_new_partition_is_read_from_the_archive(shop: Shop) -> None:
    shop.archive()
    reader = shop.reader()
    shop.link.execute("HSET", shop.keys.meta("access"), "partitionCount", 3)
    shop.fill(2, 1, 20)
    shop.archive()
    shop.trim(2, "15-0")
    assert flat(read_to_end(reader, BEGIN, streaming.ReadMaxRows(7))) == expected_rows(2, 1, 20)


# --- missing entries ------------------------------------------------------------------------------


def test_entries_in_neither_archive_nor_redis_are_a_loss(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    shop.fill(0, 1, 100)
    shop.archive()
    shop.fill(0, 101, 200)
    shop.trim(0, "151-0")
    shop.need_counts()
    reader = shop.reader()
    end = reader.latestOffset(BEGIN, ALL)
    with pytest.raises(DataLossError, match="50 entries of access partition 0 after 100-0 were"):
        reader.partitions(BEGIN, end)
    limited = streaming.ReadMaxRows(60)
    first = reader.latestOffset(BEGIN, limited)
    assert len(rows(reader, BEGIN, first)) == 60, "the archived part is complete"
    lenient = shop.reader(failOnDataLoss="false")
    found = flat(read_to_end(lenient, BEGIN, limited))
    assert found == sorted(expected_rows(0, 1, 100) + expected_rows(0, 151, 200))
    assert "50 entries of access partition 0" in caplog.text


@pytest.mark.parametrize("limit", [ALL, streaming.ReadMaxRows(30)])
def test_recreated_stream_follows_the_archive_after_a_loss(
    shop: Shop, limit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The new stream follows the archive, whether its IDs are smaller or larger."""
    shop.fill(0, 1, 100)
    shop.archive()
    for first in (1, 201):
        shop.link.execute("DEL", shop.keys.stream("access", 0))
        shop.fill(0, first, first + 20)
        found: list[Found] = []
        with pytest.raises(DataLossError, match="is not the stream that was read before"):
            read_to_end(shop.reader(), BEGIN, limit, found)
        assert flat(found) == expected_rows(0, 1, 100)
        caplog.clear()
        lenient = flat(read_to_end(shop.reader(failOnDataLoss="false"), BEGIN, limit))
        assert lenient == sorted(expected_rows(0, 1, 100) + expected_rows(0, first, first + 20))
        assert "is not the stream that was read before" in caplog.text


@pytest.mark.parametrize("limit", [ALL, streaming.ReadMaxRows(30)])
def test_archive_of_a_deleted_topic_is_read_before_its_loss(
    shop: Shop, limit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    shop.fill(0, 1, 100)
    shop.archive()
    one = {"assign": '{"access": [0]}', "subscribe": ""}
    reader, lenient = shop.reader(**one), shop.reader(**one, failOnDataLoss="false")
    begin = {"access": {"0": "0-0"}, "#": {"access": {"0": 0}}}
    start = reader.latestOffset(begin, streaming.ReadMaxRows(10))
    first = rows(reader, begin, start)
    shop.link.execute("DEL", shop.keys.meta("access"), shop.keys.stream("access", 0))
    found = [first]
    with pytest.raises(DataLossError, match="no longer exists"):
        read_to_end(reader, start, limit, found)
    assert flat(found) == expected_rows(0, 1, 100)
    assert flat([first, *read_to_end(lenient, start, limit)]) == expected_rows(0, 1, 100)
    assert "no longer exists" in caplog.text


def test_start_by_time_without_a_table_is_the_oldest_entry(shop: Shop, store: Store) -> None:
    """Without a table, the start is the oldest entry.

    Another topic is archived here, so there are archived entries from before the oldest ones in
    Redis.
    """
    shop.need_counts()
    shop.fill(0, 1, 100)
    shop.archive()
    topics.create(store, "other", config.Topic(partitions=1))
    key = shop.keys.stream("other", 0)
    shop.link.pipeline([("XADD", key, f"{n}-0", "payload", f"0:{n}-0") for n in range(1, 31)])
    shop.link.execute("XTRIM", key, "MINID", "=", "21-0")
    shop.trim(0, "81-0")
    reader = shop.reader(subscribe="access,other", startingTimestamp=11, startingOffsets="")
    start = reader.initialOffset()
    assert start["other"]["0"] == f"20-{PART_MAX}"
    found = flat(read_to_end(reader, start))
    assert found == sorted(expected_rows(0, 11, 100) + expected_rows(0, 21, 30))


def test_stream_after_its_archive_needs_only_redis(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> Any:
        raise ArchiveError("the object store does not answer")

    shop.fill(0, 1, 100)
    shop.fill(1, 1, 10)
    shop.archive()
    reader = shop.reader()
    end = reader.latestOffset(BEGIN, ALL)
    assert rows(reader, BEGIN, end)
    shop.fill(0, 101, 120)
    monkeypatch.setattr(source, "REOPEN_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(Backfill, "open_tables", away)
    last = reader.latestOffset(end, ALL)
    found = [batch for each in reader.partitions(end, last) for batch in reader.read(each)]
    assert sum(batch.num_rows for batch in found) == 20
    assert shop.reader().latestOffset(end, ALL) == last  # the same after a restart
    shop.trim(0, "111-0")
    for each in (reader, shop.reader()):
        with pytest.raises(ArchiveError, match="does not answer"):
            each.latestOffset(end, ALL)


def test_stream_continues_if_the_archive_is_unavailable(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*_: object) -> Any:
        raise ArchiveError("the object store does not answer")

    shop.fill(0, 1, 100)
    shop.archive()
    reader = shop.reader()
    start = reader.latestOffset(BEGIN, streaming.ReadMaxRows(30))
    monkeypatch.setattr(source, "REOPEN_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(Backfill, "open_tables", away)
    assert flat(read_to_end(reader, start, streaming.ReadMaxRows(30))) == expected_rows(0, 31, 100)
    assert "the object store does not answer. Continuing with the archive" in caplog.text


def test_lag_includes_archived_entries(shop: Shop) -> None:
    shop.need_counts()
    shop.fill(0, 1, 300)
    shop.fill(1, 1, 100)
    shop.archive(rows_max=90)
    shop.trim(0, "301-0")
    shop.fill(0, 301, 350)
    reader = shop.reader()
    start, read = BEGIN, 0
    while (end := reader.latestOffset(start, streaming.ReadMaxRows(80))) != start:
        read += len(rows(reader, start, end))
        shown = reader.reportLatestOffset().get("#lag", {}).get("total", 0)
        assert abs(shown - (450 - read)) < 10, "the share of a file is an estimate"
        start = end
    assert read == 450


def test_limit_applies_to_a_file_with_a_dense_end(shop: Shop) -> None:
    """The limit applies even if, judged by time, only few rows of the file are after the start."""
    day = 86_400_000
    shop.add(0, *(f"{day * number}-0" for number in range(1, 11)))
    shop.add(0, *(f"{day * 10}-{number}" for number in range(1, 500)))
    shop.archive()
    shop.trim(0, f"{day * 11}-0")
    start = {"access": {"0": f"{day * 5}-0", "1": "0-0"}}
    batches = read_to_end(shop.reader(), start, streaming.ReadMaxRows(300))
    assert [len(each) for each in batches] == [300, 204]


def test_topic_without_a_table_starts_in_redis(shop: Shop) -> None:
    Archive(shop.folder, create=True)
    shop.fill(0, 1, 10)
    reader = shop.reader()
    assert flat(read_to_end(reader, reader.initialOffset())) == expected_rows(0, 1, 10)
    shop.trim(0, "6-0")
    if shop.server.version >= (7,):
        end = reader.latestOffset(BEGIN, ALL)
        with pytest.raises(DataLossError, match="5 entries of access partition 0 after 0-0 were"):
            reader.partitions(BEGIN, end)


def test_missing_archive_error_is_one_sentence(shop: Shop) -> None:
    with pytest.raises(RequestRefusedError, match="is not an archive; create it with"):
        shop.reader().latestOffset(BEGIN, ALL)


def test_missing_archive_file_error_is_one_sentence(shop: Shop) -> None:
    shop.fill(0, 1, 10)
    table = shop.archive()
    reader = shop.reader()
    end = reader.latestOffset(BEGIN, ALL)
    planned = reader.partitions(BEGIN, end)
    [file] = table.files(0)
    path = Path(table.locate(file))
    content = path.read_bytes()
    for damage in (path.unlink, lambda: path.write_bytes(content[:-9])):
        damage()
        with pytest.raises(ArchiveError, match=r"\.parquet cannot be read: .+"):
            list(reader.read(planned[0]))
        with pytest.raises(ArchiveError, match=r"\.parquet cannot be read: .+"):
            shop.reader().latestOffset(BEGIN, streaming.ReadMaxRows(5))


def test_archive_in_a_bucket_uses_the_configured_options(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("moto")
    from tests.support.s3 import BucketServer

    shop.fill(0, 1, 60)
    with BucketServer() as store:
        shop.folder, shop.stored = "s3://bucket/archive", store.options
        shop.archive(rows_max=20)
        shop.trim(0, "41-0")
        shop.fill(0, 61, 80)
        file = tmp_path / "streamq.toml"
        lines = [f'{name} = "{value}"' for name, value in store.options.items()]
        file.write_text("\n".join(["[archive.options]", *lines, ""]), "utf-8")
        file.chmod(0o600)
        monkeypatch.setenv("STREAMQ_CONFIG", str(file))
        batches = read_to_end(shop.reader(), BEGIN, streaming.ReadMaxRows(25))
    assert flat(batches) == expected_rows(0, 1, 80)
    assert [len(each) for each in batches] == [25, 25, 10, 20]


def test_batch_read_refuses_an_archive(shop: Shop) -> None:
    given = {"url": shop.server.url, "subscribe": "access", "archivepath": str(shop.folder)}
    with pytest.raises(ValueError, match="archivePath applies only to streams; read archived"):
        source.StreamqSource(given).reader(schema=SCHEMA)


# --- finding rows ---------------------------------------------------------------------------------


def read_archived_ids(shop: Shop, after: Id, upto: Id) -> list[Id]:
    made = pickled(Backfill(location(shop.folder)))
    made.open_tables(["access"])
    chosen = source.chosen_columns(SCHEMA, read_options(
        {"url": "redis://h", "subscribe": "access"}, {}
    ))  # fmt: skip
    found = [
        read_id(each)
        for part in made.parts(("access", 0), after, upto)
        for batch in made.read(part, chosen)
        for each in batch["id"].to_pylist()
    ]
    assert len(found) == len(set(found))
    return sorted(found)


def boundary_ids() -> Iterator[Id]:
    for ms in (1, 2, 7_000, PART_MAX >> 1, (PART_MAX >> 1) + 1, PART_MAX - 1, PART_MAX):
        for seq in (1, 2, PART_MAX >> 1, (PART_MAX >> 1) + 1, PART_MAX - 1, PART_MAX):
            yield ms, seq


@pytest.mark.parametrize("compacted", [False, True])
def test_walk_finds_every_row_by_its_number(
    shop: Shop, compacted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The walk finds every row by its number, for all IDs that a server accepts, sorted or not."""
    monkeypatch.setattr(planning, "TASK_ROWS", 5)
    every = list(boundary_ids())
    for at in range(0, len(every), 7):
        shop.add(0, *(f"{ms}-{seq}" for ms, seq in every[at : at + 7]))
        table = shop.archive()
    if compacted:
        compact.rewrite(table, 1 << 20)
    made = Backfill(location(shop.folder))
    ends = made.open_tables(["access"])
    assert ends["access", 0].id == every[-1]
    for count in range(1, len(every) + 2):
        wanted = every[count - 1] if count <= len(every) else every[-1]
        assert made.walk(("access", 0), ZERO, every[-1], count) == wanted
    for at in range(0, len(every) - 1, 5):
        assert (
            made.walk(("access", 0), every[at], every[-1], 3) == every[min(at + 3, len(every) - 1)]
        )
        assert read_archived_ids(shop, every[at], every[-2]) == every[at + 1 : -1]
    assert read_archived_ids(shop, ZERO, every[-1]) == every
    assert made.count_rows(("access", 0), every[-1], every[-1]) == 0
    assert Position(every[-1], len(every)) == ends["access", 0]

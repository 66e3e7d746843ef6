"""A topic read from its archive and from Redis as one, on real files and a real server, no JVM."""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from streamqd import config
from streamqd.errors import Refused
from streamqd.spark import rows
from streamqd.spark.offsets import ZERO, Id, read_id
from streamqd.spark.options import read_options
from streamqd.spark.pipelines import manifest as manifests
from streamqd.spark.pipelines.manifest import File, Manifest, ManifestError, Range
from streamqd.spark.pipelines.storage import Archive
from streamqd.spark.streams import DataLossError
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support.servers import Server

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
datasource = pytest.importorskip("pyspark.sql.datasource")
source = pytest.importorskip("streamqd.spark.source")

FULL = rows.columns(dead=False, headers=True, fields=True)
Row = tuple[int, str]  # partition, id


class Shop:
    """A topic of two partitions, its ledger, and an archive of it."""

    def __init__(self, server: Server, link: Connection, keys: Keys, folder: Path) -> None:
        self.server, self.link, self.keys = server, link, keys
        self.archive = Archive(folder, create=True)
        self.ledger: list[Row] = []
        self.issued = [0, 0]
        topics.create(Store(link, keys), "access", config.Topic(partitions=2))

    def add(self, partition: int, *ids: str) -> None:
        key = self.keys.stream("access", partition)
        more = ("headers", '{"a":"b"}', "sentAt", "5")
        self.link.pipeline([("XADD", key, each, "payload", f"v{each}", *more) for each in ids])
        self.ledger += [(partition, each) for each in ids]

    def trim(self, partition: int, keep_from: str) -> None:
        """Trim to the entry (the housekeeper trims whole nodes), and note it as he does: Redis 6.2
        does not know by itself what went."""
        command = ("XTRIM", self.keys.stream("access", partition), "MINID", "=", keep_from)
        removed = self.link.execute(*command)
        self.link.execute("HINCRBY", self.keys.trim("access", partition), "removed", removed)

    def store(self, *upto: str) -> Manifest:
        """Archive each partition up to an id: one batch, a file of at most three rows each."""
        known = self.archive.current("access")
        held, number = manifests.ends(known), len(known)
        ready = self.archive.stage("access", number) / "batch"
        ranges, files = {}, []
        for partition, last in enumerate(upto):
            start: Id = held[partition].end if partition in held else ZERO
            if read_id(last) <= start:
                continue
            entries = self._entries(partition, start, read_id(last))
            for at in range(0, len(entries), 3):
                part = entries.slice(at, 3)
                path = f"dt=1970-01-01/partition={partition}/part-{number}-{partition}-{at}.parquet"
                (ready / path).parent.mkdir(parents=True, exist_ok=True)
                kept = part.drop_columns(["topic", "partition"])
                parquet.write_table(kept, ready / path, row_group_size=2)
                ids = [read_id(each) for each in part["id"].to_pylist()]
                files.append(File(path, partition, len(ids), 100, ids[0], ids[-1]))
            before = held[partition].passed or 0 if partition in held else 0
            passed = before + entries.num_rows
            ranges[partition] = Range(start, read_id(last), entries.num_rows, passed)
        ready.mkdir(parents=True, exist_ok=True)
        made = Manifest("access", number, number, 0, ranges, tuple(files))
        self.archive.publish(ready, made)
        return made

    def _entries(self, partition: int, start: Id, end: Id) -> Any:
        one = {"assign": f'{{"access": [{partition}]}}', "subscribe": None}
        found = self.batches(includeHeaders="true", includeFields="true", **one)
        whole = pa.Table.from_batches(found, rows.arrow_schema(FULL))
        return whole.filter(
            pa.array([start < read_id(each) <= end for each in whole["id"].to_pylist()], pa.bool_())
        )

    # --- reading ---

    def reader(self, filters: Sequence[Any] = (), **given: object) -> Any:
        every = {"url": self.server.url, "subscribe": "access"} | given
        raw = {name.lower(): str(value) for name, value in every.items() if value is not None}
        options = read_options(raw, {})
        kind = source.FilteringReader if filters else source.TopicReader
        chosen = rows.columns(dead=False, headers=options.headers, fields=options.fields)
        reader = kind(options, chosen)
        if filters:
            reader.pushFilters(list(filters))
        # Spark carries readers between processes.
        return pickle.loads(pickle.dumps(reader))

    def batches(self, filters: Sequence[Any] = (), **given: object) -> list[Any]:
        reader = self.reader(filters, **given)
        parts = pickle.loads(pickle.dumps(reader.partitions()))
        return [batch for part in parts for batch in reader.read(part)]

    def tier(self, name: str, filters: Sequence[Any] = (), **given: object) -> list[Row]:
        found = self.batches(filters, tier=name, archivePath=self.archive.root, **given)
        return [
            (each["partition"], each["id"])
            for batch in found
            for each in batch.select(["partition", "id"]).to_pylist()
        ]


@pytest.fixture
def shop(server: Server, link: Connection, keys: Keys, tmp_path: Path) -> Iterator[Shop]:
    return Shop(server, link, keys, tmp_path / "archive")


def numbered(first: int, last: int) -> list[str]:
    return [f"{number}-0" for number in range(first, last + 1)]


def test_every_entry_of_one_tier(shop: Shop) -> None:
    """Wherever the watermark is, and wherever retention is behind it."""
    shop.add(0, *numbered(1, 9))
    shop.add(1, *numbered(1, 2))
    shop.store("4-0", "2-0")
    shop.store("7-0")
    for keep_from in ("1-0", "5-0", "8-0"):
        shop.trim(0, keep_from)
        hot, cold = shop.tier("hot"), shop.tier("cold")
        assert sorted(hot) == [(0, "8-0"), (0, "9-0")]
        assert sorted(hot + cold) == sorted(shop.tier("all")) == sorted(shop.ledger)
    shop.trim(0, "9-0")
    with pytest.raises(DataLossError, match="1 entries of access partition 0 behind 7-0"):
        shop.tier("all")
    left = shop.tier("all", failOnDataLoss="false")
    assert sorted(left) == sorted(set(shop.ledger) - {(0, "8-0")})


def test_a_row_of_a_file_is_that_of_the_stream(shop: Shop) -> None:
    shop.add(0, *numbered(1, 3))
    both = {"includeHeaders": "true", "includeFields": "true"}
    of_redis = pa.Table.from_batches(shop.batches(**both))
    shop.store("3-0")
    of_files = pa.Table.from_batches(
        shop.batches(tier="cold", archivePath=shop.archive.root, **both)
    )
    assert of_files.schema == of_redis.schema
    assert of_files.to_pylist() == of_redis.to_pylist()


def test_bounds_hold_over_both_tiers(shop: Shop) -> None:
    """Any watermark, any retention behind it, any start and end: what the ledger says, once."""
    chance = random.Random(4711)
    ids = [f"{ms}-{seq}" for ms in range(10, 22) for seq in range(chance.randint(0, 2))]
    shop.add(0, *ids)
    shop.add(1, *ids[::2])
    for upto in sorted((chance.choice(ids) for _ in range(3)), key=read_id):
        shop.store(upto, upto)
        shop.trim(0, chance.choice([each for each in ids if read_id(each) <= read_id(upto)]))
    archived = manifests.ends(shop.archive.current("access"))
    for _ in range(40):
        low, high = chance.choice(["earliest", *ids]), chance.choice(["latest", *ids])
        bounds: dict[str, object] = {"startingOffsets": low, "endingOffsets": high}
        start = ZERO if low == "earliest" else read_id(low)
        end = (99, 0) if high == "latest" else read_id(high)
        if chance.random() < 0.3:
            bounds = {"startingTimestamp": start[0], "endingTimestamp": end[0]}
            start, end = (start[0] - 1, 99), (end[0] - 1, 99)
        wanted = sorted(row for row in shop.ledger if start < read_id(row[1]) <= end)
        assert sorted(shop.tier("all", **bounds)) == wanted, bounds
        cold = [row for row in wanted if read_id(row[1]) <= archived[row[0]].end]
        assert sorted(shop.tier("cold", **bounds)) == cold, bounds
        assert sorted(shop.tier("hot", **bounds)) == sorted(set(wanted) - set(cold)), bounds


def test_the_archive_goes_on_while_it_is_planned(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its manifests and the streams: what was hot is stored, and trimmed at once."""
    shop.add(0, *numbered(1, 9))
    shop.store("3-0")
    read = Archive.current
    left = [lambda: (shop.store("7-0"), shop.trim(0, "8-0"))]

    def then_go_on(archive: Archive, topic: str) -> list[Manifest]:
        found = read(archive, topic)
        if left:
            left.pop()()
        return found

    monkeypatch.setattr(Archive, "current", then_go_on)
    assert sorted(shop.tier("all")) == shop.ledger
    assert not left


def test_a_compaction_puts_files_aside_while_they_are_read(shop: Shop) -> None:
    shop.add(0, *numbered(1, 5))
    held = shop.store("5-0")
    reader = shop.reader(tier="cold", archivePath=shop.archive.root)
    parts = reader.partitions()
    aside = shop.archive.root / manifests.retired_folder(held)
    aside.parent.mkdir(parents=True)
    (shop.archive.root / held.folder).rename(aside)
    found = [each for part in parts for batch in reader.read(part) for each in batch["id"]]
    assert [each.as_py() for each in found] == numbered(1, 5)
    shutil.rmtree(aside)
    with pytest.raises(ManifestError, match="is gone: if a compaction has replaced it"):
        list(reader.read(parts[0]))


def test_a_file_that_is_another(shop: Shop) -> None:
    shop.add(0, *numbered(1, 3))
    held = shop.store("3-0")
    path = shop.archive.root / held.folder / held.files[0].path
    parquet.write_table(parquet.read_table(path, partitioning=None).slice(1), path)
    with pytest.raises(ManifestError, match="has 2 rows, not 3"):
        shop.tier("cold")


def test_cold_alone_asks_redis_nothing(shop: Shop) -> None:
    shop.add(0, *numbered(1, 4))
    shop.store("4-0")
    shop.link.execute("FLUSHALL")
    assert shop.tier("cold", url=None) == [(0, each) for each in numbered(1, 4)]
    by_pattern = {"subscribe": None, "subscribePattern": "acc.*"}
    assert len(shop.tier("cold", url=None, **by_pattern)) == 4
    with pytest.raises(Refused, match="nothing of orders is archived in"):
        shop.tier("cold", subscribe="orders")
    with pytest.raises(Refused, match="only Redis knows"):
        shop.tier("cold", startingOffsets="group:hits")


def test_files_that_cannot_pass_are_not_opened(shop: Shop) -> None:
    shop.add(0, *numbered(1, 9))
    shop.add(1, *numbered(1, 9))
    held = shop.store("9-0", "9-0")
    for file in held.files:
        if file.partition == 1 or file.last < (7, 0):
            (shop.archive.root / held.folder / file.path).unlink()
    filters = [
        datasource.EqualTo(("partition",), 0),
        datasource.GreaterThanOrEqual(("id_ms",), 7),
    ]
    assert shop.tier("cold", filters) == [(0, each) for each in numbered(7, 9)]


def test_tasks_take_whole_files(shop: Shop) -> None:
    shop.add(0, *numbered(1, 9))
    shop.store("9-0")

    def tasks(**given: object) -> list[int]:
        reader = shop.reader(tier="all", archivePath=shop.archive.root, **given)
        return [sum(b.num_rows for b in reader.read(each)) for each in reader.partitions()]

    assert tasks() == [9]
    assert tasks(minPartitions=3) == [3, 3, 3]
    assert tasks(maxRecordsPerPartition=6) == [6, 3]


def test_a_stream_has_no_tiers() -> None:
    given = {"url": "redis://nowhere", "subscribe": "access", "archivepath": "/archive"}
    with pytest.raises(ValueError, match="a stream reads Redis only"):
        source.StreamqSource(given).streamReader(schema=None)


def test_a_message_is_looked_up_in_the_archive_without_spark(shop: Shop) -> None:
    """U13: `trace --archive` names the file that holds a message, and says when none does."""
    from streamqd.spark.pipelines.lookup import look

    shop.add(0, "1000-0", "1001-0", "1003-0", "1004-0", "2000-0")
    shop.add(1, "1001-0")
    shop.store("1004-0", "1001-0")
    folder = shop.archive.root

    found = look(folder, "access", 0, "1001-0")
    assert found.found
    assert Path(found.file).is_file()
    between = look(folder, "access", 0, "1002-0")
    assert (between.file, between.found) == (found.file, False)
    assert look(folder, "access", 0, "2000-0").file == ""
    assert look(folder, "other", 0, "1001-0").found is False
    with pytest.raises(Refused, match="there is no archive"):
        look(folder / "nowhere", "access", 0, "1001-0")

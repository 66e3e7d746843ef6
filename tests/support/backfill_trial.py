"""A streaming query that starts in an archive while entries are written, archived and trimmed.

The query is stopped at random times and restarted from its checkpoint. At the end, a ledger of all
confirmed entries is compared with the rows in the query's batches.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import parquet
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import Row

from streamqd import config
from streamqd.spark import stream_topic
from streamqd.spark.options import read_options
from streamqd.spark.pipelines import compact, writer
from streamqd.spark.pipelines.storage import Archive, ArchiveTable
from streamqd.store import topics
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support.servers import Server
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

TOPIC = "hits"
PARTITIONS = 3
PAGE = 500
PATIENCE = 600  # seconds for all rows
SLOW_START = "Python worker failed to connect back"

Entry = tuple[int, str]  # partition, ID


@dataclass
class Figures:
    """The results of a trial."""

    archived: int = 0  # entries in the archive when the query started
    live: int = 0  # entries written while the query ran
    batches: int = 0
    stops: int = 0
    slow_starts: int = 0  # Python starts that took more than ten seconds, which is Spark's limit
    archive_runs: int = 0  # archive runs while the query ran
    trimmed: int = 0  # entries removed from Redis
    rows: int = 0
    missing: int = 0
    repeated: int = 0
    seconds: float = 0.0


@dataclass
class BackfillTrial:
    """A topic, its archive, and a query that reads both.

    `rows` entries are written before the query starts, and as many again while it runs.
    """

    spark: SparkSession
    server: Server
    keys: Keys
    folder: str
    home: Path
    rows: int
    chance: random.Random
    store_options: dict[str, str] = field(default_factory=dict)  # options of the object store
    figures: Figures = field(default_factory=Figures)
    ledger: Counter[Entry] = field(default_factory=Counter)
    failures: list[BaseException] = field(default_factory=list)

    def run(self, stops: int) -> Figures:
        """Run the query to the end of all entries. It is stopped `stops` times before that."""
        began = time.monotonic()
        link = self._connect()
        topics.create(Store(link, self.keys), TOPIC, config.Topic(partitions=PARTITIONS))
        self._write(link, self.rows)
        self._archive()
        self.figures.archived = self._trim(link)
        with self._background(self._keep_writing), self._background(self._keep_archiving):
            for _ in range(stops):
                self._query_until(self.chance.randint(1, 2 * self.rows))
                self.figures.stops += 1
            self._query_until(2 * self.rows)
        self._check()
        self.figures.seconds = round(time.monotonic() - began, 1)
        link.close()
        return self.figures

    # --- entries ---

    def _connect(self) -> Connection:
        return connect(self.server.settings, timeout=30, name="trial")

    def _write(self, link: Connection, count: int) -> None:
        while count > 0:
            places = [self.chance.randrange(PARTITIONS) for _ in range(min(PAGE, count))]
            found = link.pipeline(
                [
                    ("XADD", self.keys.stream(TOPIC, each), "*", "payload", b"x" * 20)
                    for each in places
                ]
            )
            self.ledger.update(zip(places, (each.decode() for each in found), strict=True))
            count -= len(places)

    def _keep_writing(self, _: threading.Event) -> None:
        link = self._connect()
        for _page in range(0, self.rows, PAGE):
            self._write(link, min(PAGE, self.rows - self.figures.live))
            self.figures.live = len(self.ledger) - self.rows
            time.sleep(self.chance.random() * 20 * PAGE / self.rows)  # about ten seconds in total
        link.close()

    def _keep_archiving(self, stopped: threading.Event) -> None:
        link = self._connect()
        while not stopped.wait(0.5):
            table = self._archive()
            self.figures.trimmed += self._trim(link)
            self.figures.archive_runs += 1
            compact.merge_small_files(table, 1)
        link.close()

    def _opened(self) -> Archive:
        return Archive(self.folder, create=True, options=self.store_options)

    def _archive(self) -> ArchiveTable:
        """Archive all entries that exist now, as the tasks and the driver of the pipeline do."""
        table = self._opened().table(TOPIC, create=True)
        assert table is not None
        given = {"url": self.server.url, "subscribe": TOPIC, "minPartitions": "1"}
        given["maxOffsetsPerTrigger"] = str(1 + self.rows // self.chance.randint(2, 6))
        reader = writer.FileStreamReader(read_options(given, {}), table.folder)
        reader.prepareForTriggerAvailableNow()
        make = Row(*(each.split()[0] for each in writer._DDL.split(", ")))
        while (end := reader.latestOffset({"batch": 0}, ReadAllAvailable())) != {"batch": 0}:
            parts = reader.partitions({}, end)
            table.append(
                *writer.parse_rows([make(*row) for each in parts for row in reader.read(each)])
            )
            table.reload()
        return table

    def _trim(self, link: Connection) -> int:
        """Remove all archived entries from Redis, as retention may do. Return their number."""
        table = self._opened().table(TOPIC)
        assert table is not None
        return sum(
            link.execute(
                "XTRIM", self.keys.stream(*place), "MINID", "=", f"{end.id[0]}-{end.id[1] + 1}"
            )
            for place, end in table.positions.items()
        )

    @contextmanager
    def _background(self, work: Any) -> Iterator[None]:
        stopped = threading.Event()

        def guarded() -> None:
            try:
                work(stopped)
            except BaseException as error:  # noqa: BLE001
                self.failures.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()
        if self.failures:
            raise self.failures[0]

    # --- the query ---

    def _query_until(self, rows: int) -> None:
        """Run the query until its batches have this number of rows, then stop it during a batch."""
        while not self._runs_until(rows):
            self.figures.slow_starts += 1

    def _runs_until(self, rows: int) -> bool:
        """Make one attempt at this. Return False if Spark gave up waiting for a Python process."""
        query = self._started()
        try:
            wait_until(
                lambda: self.failures or query.exception() or self._rows() >= rows,
                timeout=PATIENCE,
                what=f"{rows} rows",
            )
        finally:
            query.stop()
        error = query.exception()
        if error is not None and SLOW_START not in str(error):
            raise error
        return error is None

    def _started(self) -> StreamingQuery:
        settings = replace(
            config.Settings(),
            redis=self.server.settings,
            archive=config.ArchiveStore(json.dumps(self.store_options)),
        )
        stream = stream_topic(
            *(self.spark, TOPIC),
            settings=settings,
            startingOffsets="archive",
            archivePath=self.folder,
            maxOffsetsPerTrigger=1 + self.rows // 4,
            minPartitions=4,
            columns="partition,id",
        )
        writer = stream.writeStream.foreachBatch(self._keep)
        return writer.option("checkpointLocation", str(self.home / "checkpoint")).start()

    def _keep(self, batch: DataFrame, number: int) -> None:
        """Store the rows of a batch. A batch that is repeated replaces its rows."""
        new = self.home / f"{number}.new"
        parquet.write_table(batch.toArrow(), new)
        new.replace(self.home / f"{number}.parquet")

    def _rows(self) -> int:
        return sum(parquet.read_metadata(each).num_rows for each in self.home.glob("*.parquet"))

    def _check(self) -> None:
        files = sorted(self.home.glob("*.parquet"))
        table = pa.concat_tables(parquet.read_table(each) for each in files)
        found = Counter(zip(table["partition"].to_pylist(), table["id"].to_pylist(), strict=True))
        self.figures.batches, self.figures.rows = len(files), table.num_rows
        self.figures.missing = (self.ledger - found).total()
        self.figures.repeated = (found - self.ledger).total()

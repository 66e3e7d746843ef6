"""Write topics into Delta tables, each entry exactly once, and advance the watermark in Redis.

Each run starts at the position up to which the table contains all entries. Spark's checkpoint is
deleted at the end of the run, so it can never contradict the table.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from streamqd import config
from streamqd.errors import (
    InvalidValueError,
    RedisResponseError,
    RefusalKind,
    RequestRefusedError,
    SparkError,
)
from streamqd.model import TopicPartition
from streamqd.spark import offsets, register_once
from streamqd.spark.location import Location, source_name
from streamqd.spark.offsets import Id, Offsets, Position, StreamFacts
from streamqd.spark.options import DLQ, of_settings, read_options
from streamqd.spark.pipelines import batches, compact, parsed
from streamqd.spark.pipelines.dead_letters import DeadLetterArchiver
from streamqd.spark.pipelines.lease import PipelineLease
from streamqd.spark.pipelines.minutes import MinuteArchiver
from streamqd.spark.pipelines.parts import WrittenFile
from streamqd.spark.pipelines.progress import OnProgress, ProgressMeter
from streamqd.spark.pipelines.queries import to_streamqd_error, wait
from streamqd.spark.pipelines.storage import Archive, ArchiveError, ArchiveTable
from streamqd.spark.streams import Catalog, report_loss, topic_names
from streamqd.store import archives, untrusted
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.store.replies import check_replies
from streamqd.store.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TIMEOUT = 10.0  # seconds that one round trip to Redis may take
BATCH_ROWS = 4_000_000  # rows per batch; large, as each batch costs almost 1 s of Java CPU
FETCH_ROWS = 5_000  # entries in one page; fewer if large entries reach `fetchBytes` first


@dataclass
class ArchiveResult:
    """The result of a run for one topic."""

    topic: str
    batches: int = 0
    rows: int = 0
    size: int = 0
    files: int = 0
    missing: int = 0  # entries in the range that were trimmed, or deleted by another client
    parsed: int = 0  # entries whose payload fits the topic's schema
    quarantined: int = 0
    dead_letters: int = 0
    seconds: float = 0.0
    archived: dict[str, str] = field(default_factory=dict)  # last archived ID by partition
    problem: str = ""  # reason why no more payloads are parsed


class Archiver:
    """Archives topics into one directory.

    `run` processes one topic after another. For each topic, it acquires the lease and takes these
    steps:

    1. Report to Redis which entries are already committed, because a previous run may have been
       killed before it did so. Streams that were recreated are left out.
    2. Archive all entries that exist at the start, batch by batch. For each batch, Spark's tasks
       write the files, a commit adds them to the table, and the archived position is reported to
       Redis.
    3. Merge small files, and delete files that no reader needs any longer.
    4. Archive dead letters, without Spark.
    5. If the configuration has a schema, parse the payloads.

    After the topics, `run` archives the history. A problem with dead letters, payloads or the
    history never prevents entries from being archived.
    """

    def __init__(
        self,
        settings: config.Settings,
        folder: str | Path | Location,
        spark: Callable[[], SparkSession],
        on_progress: OnProgress,
        *,
        warn: Callable[[str], None] = lambda _: None,
        batch_rows: int = BATCH_ROWS,
        allow_loss: bool = False,
    ) -> None:
        """Connect to Redis, and open or create the archive.

        `spark` is called only if a topic has entries to archive or to parse, and must return a
        session. `warn` is called once for each problem with `[pipelines.TOPIC]`, as soon as it is
        found.
        """
        self.settings = config.resolve_url(settings)
        self.keys = Keys(settings.keys.control, settings.keys.streams)
        self._spark = spark
        self._on_progress = on_progress
        self._warn = warn
        self._warned: set[str] = set()
        self.batch_rows = batch_rows
        self.allow_loss = allow_loss
        self.progress_key = self.keys.progress(secrets.token_hex(4))
        self.link = self._connect()
        self.meter_link = self._connect()
        self.archive = Archive(folder, create=True, options=settings.archive.pairs)
        self.history_rows = 0  # history rows written by the last run
        self.problems: dict[
            str, RequestRefusedError | SparkError
        ] = {}  # problems of this run, by topic or key
        self._unread: list[str] = []  # topics whose schemas have not been read in this run

    def run(self, wanted: Sequence[str] = ()) -> list[ArchiveResult]:
        """Archive all entries that exist now, in the given topics or in all topics.

        An error in archiving entries stops the run and is raised. Problems with payloads, dead
        letters or the history do not stop the run, and are collected in `problems` instead.
        """
        known = topic_names(Store(self.link, self.keys))
        missing = [name for name in wanted if name not in known]
        if missing:
            raise RequestRefusedError(f"topic {missing[0]} does not exist")
        for name, text in config.find_useless(self.settings, known):
            self._warn_once(f"pipelines.{name}: {text}")
        names = wanted or known
        self.problems, self._unread = {}, [each for each in names if self._pipeline(each).schema]
        done = [self._topic(name) for name in names]
        for each in done:
            each.problem = str(self.problems.get(each.topic, ""))
        self.history_rows = 0
        key = self.keys.history(self.settings.daemon.fleet)
        with self._isolate(key, "the history is not archived"):
            self.history_rows = self._history()
        return done

    def _history(self) -> int:
        """Archive the history of the fleet. Return the number of new rows.

        If another run is already archiving the history, do nothing and return 0.
        """
        store, fleet = Store(self.link, self.keys), self.settings.daemon.fleet
        name = f"history:{self.archive.id[:12]}"
        with ExitStack() as held:
            try:
                lease = held.enter_context(PipelineLease(self._connect, self.keys, fleet, name))
            except RequestRefusedError:
                return 0
            archiver = MinuteArchiver(self.archive, store, fleet)
            rows = archiver.run(lease.check)
        if archiver.unreadable:
            self._warn_once(
                f"{self.keys.history(fleet)} has entries that cannot be read, because another"
                " client or a later version wrote them; they are left out"
            )
        return rows

    def _pipeline(self, topic: str) -> config.Pipeline:
        return self.settings.pipelines.get(topic, config.Pipeline())

    def _start_session(self) -> SparkSession:
        """Return the Spark session, after checking all schemas of this run.

        Some schemas may not be needed until hours later. They are all checked at once, so that
        problems are reported at the start of the run.
        """
        spark = self._spark()
        for topic in self._unread:
            try:
                parsed.read_columns(self._pipeline(topic))
            except RequestRefusedError as error:
                self._warn_once(str(self._note_problem(topic, error)))
        self._unread = []
        return spark

    def _note_problem(
        self, topic: str, error: RequestRefusedError | SparkError
    ) -> RequestRefusedError | SparkError:
        return self.problems.setdefault(topic, type(error)(f"pipelines.{topic}: {error}"))

    @contextmanager
    def _isolate(self, about: str, text: str) -> Iterator[None]:
        """Record an error in the block as a problem of one table or key, and continue after it."""
        try:
            yield
        except (RequestRefusedError, SparkError) as error:
            self.problems[about] = type(error)(f"{text}: {error}")
        except (InvalidValueError, RedisResponseError) as error:
            if (
                isinstance(error, RedisResponseError)
                and error.kind is not RefusalKind.BAD_KEY_OR_COMMAND
            ):
                raise
            self.problems[about] = RequestRefusedError(f"{text}: {error}")

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)

    def close(self) -> None:
        """Close the connections to Redis."""
        self.link.close()
        self.meter_link.close()

    def _connect(self) -> Connection:
        return connect(self.settings.redis, timeout=TIMEOUT, name="streamqd:pipeline")

    def _topic(self, topic: str) -> ArchiveResult:
        began = time.monotonic()
        with PipelineLease(self._connect, self.keys, topic, self.archive.lease_name) as lease:
            table = self.archive.table(topic, create=True)
            assert table is not None
            self._verify_new(table, "archived")
            run = _Run(self, table, lease)
            facts = run.facts()
            self.advance(offsets.reachable_positions(table.positions, facts))
            total = run.backlog(facts)
            if total:
                spark = self._start_session()
                meter = ProgressMeter(self.meter_link, self.progress_key, self._on_progress)
                meter.begin(topic, total)
                run.run(spark, meter)
                meter.end()
                compact.merge_small_files(table, run.done.batches)
            with self._isolate(topic + DLQ, f"dead letters of {topic} are not archived"):
                run.done.dead_letters = self._dead_letters(topic, lease)
            self._parse(table, lease, run.done)
        run.done.seconds = round(time.monotonic() - began, 3)
        run.done.archived = {
            str(partition): offsets.write_id(each.id)
            for (_, partition), each in sorted(table.positions.items())
        }
        return run.done

    def _dead_letters(self, topic: str, lease: PipelineLease) -> int:
        dead_letters = DeadLetterArchiver(self.archive, self.settings, topic)
        return dead_letters.run(
            check=lease.check,
            reported=lambda table: self._verify_new(table, "dead_archived"),
            advance=self.advance_dead,
        )

    def _parse(self, table: ArchiveTable, lease: PipelineLease, done: ArchiveResult) -> None:
        pipeline = self._pipeline(table.topic)
        if not pipeline.schema:
            return
        try:
            fitted = parsed.parse(self.archive, table, pipeline, self._start_session, lease.check)
        except (RequestRefusedError, SparkError) as error:
            self._note_problem(table.topic, error)
            return
        done.parsed, done.quarantined = fitted.rows, fitted.quarantined
        found = {column: name for name, column in sorted(fitted.case_variants)}
        for column, name in found.items():
            self._warn_once(
                f"pipelines.{table.topic}: payloads have the name {ascii(name)[:100]}, and the"
                f" schema has {column}, which is another column; correct the case of one of them"
            )

    def _verify_new(self, table: ArchiveTable, field: str) -> dict[TopicPartition, Id]:
        """Verify the files that were not yet reported to Redis, and return the reported positions.

        Redis may delete entries once they are reported as archived, so their files must be intact
        first. `field` is the field of a partition's trimming record that holds the reported
        position.
        """
        reported: dict[TopicPartition, Id] = {}
        for place, end in table.positions.items():
            key = self.keys.trim(*place)
            raw = self.link.execute("HGET", key, field)
            text = untrusted.entry_id(raw, key, field, default=offsets.write_id(offsets.ZERO))
            told = reported[place] = offsets.read_id(text)
            if end.id > told:
                table.verify(each for each in table.files(place[1]) if each.last > told)
        return reported

    def advance(self, ends: Offsets) -> None:
        """Report the archived positions of partitions to Redis."""
        calls = [
            archives.advance(self.keys, *place, offsets.write_id(end.id))
            for place, end in ends.items()
        ]
        check_replies(self.link.run_many(calls))

    def advance_dead(self, ends: Offsets) -> None:
        """Report the archived positions of dead letters to Redis."""
        calls = [
            archives.advance(self.keys, *place, offsets.write_id(end.id), dead=True)
            for place, end in ends.items()
        ]
        check_replies(self.link.run_many(calls))


class _Run:
    """A run for one topic.

    It archives batches until all entries that existed at its start are stored.
    """

    def __init__(self, archiver: Archiver, table: ArchiveTable, lease: PipelineLease) -> None:
        self._of = archiver
        self._table = table
        self._lease = lease
        self._failures: list[Exception] = []
        self.done = ArchiveResult(table.topic)
        self._given = of_settings(archiver.settings) | {
            "subscribe": table.topic,
            "fetchSize": str(FETCH_ROWS),
            "failOnDataLoss": str(not archiver.allow_loss).lower(),
            "progressKey": archiver.progress_key,
            "maxOffsetsPerTrigger": str(archiver.batch_rows),
        }

    def facts(self) -> dict[TopicPartition, StreamFacts]:
        """Return the facts about the stream of each partition."""
        catalog = Catalog(read_options(self._given, {}))
        return catalog.facts(catalog.places())

    def backlog(self, facts: Mapping[TopicPartition, StreamFacts]) -> int:
        """Return the approximate number of entries to archive.

        Raises DataLossError if entries were lost, unless the run allows losses.
        """
        targets = {place: each.latest for place, each in facts.items()}
        starts = batches.incomplete_partitions(self._table.positions, targets, facts)
        for place, start in starts.items():
            loss = offsets.find_loss(start, facts[place])
            if loss is not None and not self._of.allow_loss:
                report_loss(place, start.id, loss, fail=True)
        # Each of these partitions counts as at least 1. The run therefore starts even if all
        # entries that remained to be archived were lost, and reports the loss.
        return sum(max(1, offsets.backlog(start, facts[place])) for place, start in starts.items())

    def run(self, spark: SparkSession, meter: ProgressMeter) -> None:
        """Archive the topic.

        The error that stops a run is raised with a message of one sentence.
        """
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException

        from streamqd.spark.pipelines.writer import FORMAT, file_source

        name = source_name(FORMAT, self._table.folder)
        register_once(spark, file_source(self._table.folder, name))
        options = self._given | {"minPartitions": str(spark.sparkContext.defaultParallelism)}
        stream = spark.readStream.format(name).options(**options).load()
        with tempfile.TemporaryDirectory(prefix="streamqd-archive-") as checkpoint:
            writer = stream.writeStream.foreachBatch(self._store)
            writer = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True)
            try:
                query = writer.start()
                try:
                    wait([query], meter.refresh)
                finally:
                    query.stop()
            except (Py4JError, PySparkException) as error:
                raise (self._failures or [to_streamqd_error(error)])[0] from error

    def _store(self, frame: DataFrame, _: int) -> None:
        """Commit one batch.

        Spark passes on only the text of an error, so the error itself is stored for `run` to raise.
        """
        from pyspark.errors import PySparkException

        try:
            self._commit(frame)
        except PySparkException:
            raise
        except Exception as error:
            self._failures.append(error)
            raise

    def _commit(self, frame: DataFrame) -> None:
        from streamqd.spark.pipelines.writer import parse_rows

        files, ends = parse_rows(frame.collect())
        table = self._table
        self._count_missing(files, ends)
        self._lease.check()
        table.append(files, ends)
        self._lease.check()
        self._of.advance(ends)
        self.done.batches += 1
        self.done.rows += sum(each.rows for each in files)
        self.done.size += sum(each.size for each in files)
        self.done.files += len(files)

    def _count_missing(self, files: Sequence[WrittenFile], ends: Offsets) -> None:
        """Count the entries that the streams have issued but that are missing in the new files.

        Raises ArchiveError if there are more rows than entries, unless the run allows losses.
        """
        found = Counter[int]()
        for each in files:
            found[each.partition] += each.rows
        for place, end in ends.items():
            start = self._table.positions.get(place, Position(offsets.ZERO, 0))
            if start.passed is None or end.passed is None:
                continue
            missing = end.passed - start.passed - found[place[1]]
            # The counts of a recreated stream start at zero again, so `missing` may be negative.
            if missing < 0 and not self._of.allow_loss:
                raise ArchiveError(
                    f"{place[0]}: the archive has {-missing} more rows than the topic had entries"
                    f" up to {offsets.write_id(end.id)}"
                )
            self.done.missing += max(0, missing)

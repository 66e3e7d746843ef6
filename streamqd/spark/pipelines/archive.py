"""Topics into Parquet, each entry exactly once, and the watermark that lets Redis forget them.

What is archived is what the manifests say. Spark's checkpoint only says what a batch that was
broken off was to hold; when it is lost, a new one begins where the manifests end.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamqd import config
from streamqd.errors import RedisRefused, Refused, StreamqdError
from streamqd.spark import offsets
from streamqd.spark.offsets import Position
from streamqd.spark.options import of_settings, read_options
from streamqd.spark.pipelines import manifest as manifests
from streamqd.spark.pipelines import tables
from streamqd.spark.pipelines.lease import Lease
from streamqd.spark.pipelines.manifest import Manifest, ManifestError, Range
from streamqd.spark.pipelines.parts import files_of
from streamqd.spark.pipelines.progress import POLL, Meter, Tell
from streamqd.spark.pipelines.storage import Archive
from streamqd.spark.streams import Catalog
from streamqd.store import archives, topics
from streamqd.store.client import Link
from streamqd.store.keys import Keys

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TIMEOUT = 10.0  # seconds that one exchange with Redis may take
FILE_ROWS_MAX = 5_000_000
_CAUSE = re.compile(r"\b(?:[a-z_]+\.)*([A-Z]\w+(?:Error|Refused|Missing|Unavailable)): ([^\n]+)")


class PipelineError(StreamqdError):
    """A pipeline stopped. What it had finished stays; run it again once the cause is mended."""


@dataclass
class Done:
    """What a run did with one topic."""

    topic: str
    batches: int = 0
    rows: int = 0
    size: int = 0
    files: int = 0
    missing: int = 0  # entries of the range that were gone: trimmed or deleted by somebody
    seconds: float = 0.0
    archived: dict[str, str] = field(default_factory=dict)  # partition -> id


class Archiver:
    """Archives topics into one folder.

    1. `run` goes over the topics once; each is done under its lease.
    2. A topic first has finished what a killed run left, and its watermark told to Redis.
    3. Spark then plans batches; each is staged, renamed, named in a manifest, told to Redis.
    """

    def __init__(
        self,
        settings: config.Settings,
        folder: Path,
        spark: Callable[[], SparkSession],
        tell: Tell,
        *,
        batch_rows: int = 200_000,
        allow_loss: bool = False,
    ) -> None:
        """Prepare. `spark` is asked for a session only when there is something to do."""
        self.settings = config.resolved(settings)
        self.keys = Keys(settings.keys.control, settings.keys.streams)
        self._spark = spark
        self._tell = tell
        self.batch_rows = batch_rows
        self.allow_loss = allow_loss
        self.progress_key = self.keys.progress(secrets.token_hex(4))
        self.link = self._connect()
        # Spark calls back with each batch from a thread of its own, while ours looks how far it
        # is: the two must never share a connection.
        self.meter_link = self._connect()
        self.archive = Archive(folder, create=True)

    def run(self, wanted: Sequence[str] = ()) -> list[Done]:
        """Archive all that is there now, of these topics or of all. Raises what stops it."""
        known = topics.registered(self.link, self.keys)
        missing = [name for name in wanted if name not in known]
        if missing:
            raise Refused(f"there is no topic {missing[0]}")
        return [self._topic(name) for name in wanted or known]

    def close(self) -> None:
        """Close the connections."""
        self.link.close()
        self.meter_link.close()

    def _connect(self) -> Link:
        return Link(self.settings.redis, timeout=TIMEOUT, name="streamqd:pipeline")

    def _topic(self, topic: str) -> Done:
        began = time.monotonic()
        with Lease(self._connect, self.keys, topic, lease_name(self.archive)) as lease:
            self.archive.recover(topic)
            known = self.archive.current(topic)
            self._verify_new(topic, known)
            self.advance(topic, known)
            query = _Query(self, topic, lease, known)
            total = query.backlog()
            if total:
                meter = Meter(self.meter_link, self.progress_key, self._tell)
                meter.begin(topic, total)
                query.run(self._spark(), meter)
                meter.end()
            query.done.seconds = round(time.monotonic() - began, 3)
            query.done.archived = {
                str(partition): offsets.write_id(each.end)
                for partition, each in sorted(manifests.ends(query.known).items())
            }
            return query.done

    def _verify_new(self, topic: str, known: Sequence[Manifest]) -> None:
        """Look at the files of which Redis has not been told yet: it deletes what it is told."""
        told = {}
        for partition in manifests.ends(known):
            raw = self.link.execute("HGET", self.keys.trim(topic, partition), "archived")
            told[partition] = offsets.read_id(raw) if raw else offsets.ZERO
        self.archive.verify(
            each
            for each in known
            if any(part.end > told.get(p, offsets.ZERO) for p, part in each.ranges.items())
        )

    def advance(self, topic: str, known: Sequence[Manifest]) -> None:
        """Tell Redis up to where the manifests go."""
        calls = [
            archives.advance(self.keys, topic, partition, offsets.write_id(each.end))
            for partition, each in manifests.ends(known).items()
        ]
        for reply in self.link.run_many(calls):
            if isinstance(reply, RedisRefused):
                raise reply


class _Query:
    """One topic's streaming query. Called back by Spark with each batch."""

    def __init__(self, archiver: Archiver, topic: str, lease: Lease, known: list[Manifest]) -> None:
        self._of = archiver
        self._topic = topic
        self._lease = lease
        self.known = known
        self.done = Done(topic)
        self._failure: StreamqdError | ManifestError | None = None
        self._checkpoint, self._first = self._books()
        self._options = of_settings(archiver.settings) | {
            "subscribe": topic,
            "includeHeaders": "true",
            "includeFields": "true",
            "startingOffsets": self._starting(),
            "maxOffsetsPerTrigger": str(archiver.batch_rows),
            "failOnDataLoss": str(not archiver.allow_loss).lower(),
            "progressKey": archiver.progress_key,
        }

    def backlog(self) -> int:
        """How many entries there are to archive, about."""
        catalog = Catalog(read_options(self._options, {}))
        ends = manifests.ends(self.known)
        waiting = 0
        for place, facts in catalog.facts(catalog.places()).items():
            end = ends.get(place[1])
            start = Position(end.end, end.passed) if end else Position(offsets.ZERO, 0)
            if facts.last > start.id:
                # One at least: what is gone without having been archived must be told.
                waiting += max(1, offsets.backlog(start, facts))
        return waiting

    def run(self, spark: SparkSession, meter: Meter) -> None:
        """Archive what there is now. Raises what stopped it, as a sentence."""
        from pyspark.errors import StreamingQueryException

        from streamqd.spark.pipelines import writer

        writer.register(spark)
        reading = spark.readStream.format("streamq").options(**self._options).load()
        query = (
            reading.writeStream.foreachBatch(self._batch)
            .option("checkpointLocation", str(self._checkpoint))
            .queryName(f"archive {self._topic}")
            .trigger(availableNow=True)
            .start()
        )
        try:
            while not query.awaitTermination(POLL):  # type: ignore[arg-type]
                meter.look()
        except StreamingQueryException as error:
            raise self._failure or PipelineError(sentence(error)) from error
        finally:
            query.stop()

    # --- where it begins ---

    def _books(self) -> tuple[Path, int]:
        """The checkpoint to go on with, and the number of its first batch."""
        folder = self._of.archive.root / "_checkpoint" / self._topic
        following = self.known[-1].last + 1 if self.known else 0
        found = sorted(int(each.name) for each in folder.iterdir()) if folder.is_dir() else []
        if found and found[-1] > following:
            raise ManifestError(
                f"{folder / str(found[-1])} is ahead of the manifests, which end before batch"
                f" {following}: if manifests were lost, bring them back; else move it away"
            )
        first = found[-1] if found else following
        return folder / str(first), first

    def _starting(self) -> str:
        """Where a query begins that has no checkpoint: behind what is archived."""
        if not self.known or (self._checkpoint / "offsets").is_dir():
            return "earliest"
        return tables.starts_behind(
            of_settings(self._of.settings),
            self._topic,
            self.known,
            fail=not self._of.allow_loss,
        )

    # --- batches ---

    def _batch(self, frame: DataFrame, batch_id: int) -> None:
        try:
            self._store(frame, self._first + batch_id, self._planned(batch_id))
        except (StreamqdError, ManifestError) as error:
            # Spark carries texts only.
            self._failure = error
            raise

    def _planned(self, batch_id: int) -> dict[int, Position]:
        """Up to where the batch goes, as Spark wrote it down before the batch began."""
        text = (self._checkpoint / "offsets" / str(batch_id)).read_text("utf-8")
        found = offsets.from_json(json.loads(text.splitlines()[2]))
        return {partition: position for (_, partition), position in found.items()}

    def _store(self, frame: DataFrame, number: int, planned: dict[int, Position]) -> None:
        ends = manifests.ends(self.known)
        following = self.known[-1].last + 1 if self.known else 0
        if number < following:
            self._see_that_it_is_there(number, planned)
            return
        if number > following:
            raise ManifestError(
                f"batch {following} of {self._topic} was never stored, {number} is next: the"
                " archive's _checkpoint is of another archive, move it away"
            )
        archive = self._of.archive
        staged = archive.stage(self._topic, number)
        reports = self._write(frame, staged)
        ready = archive.gather(staged, [(Path(each["source"]), each["path"]) for each in reports])
        rows: dict[int, int] = {}
        for each in reports:
            rows[each["partition"]] = rows.get(each["partition"], 0) + each["rows"]
        ranges = {}
        for partition, end in planned.items():
            before = ends.get(partition)
            start = before.end if before else offsets.ZERO
            if end.id > start:
                ranges[partition] = Range(start, end.id, rows.get(partition, 0), end.passed)
                self._count_missing(before.passed if before else 0, ranges[partition])
        written = round(time.time() * 1000)
        new = Manifest(self._topic, number, number, 0, ranges, files_of(reports), written)
        self._lease.check()
        archive.publish(ready, new)
        self.known.append(new)
        self._of.advance(self._topic, self.known)
        self.done.batches += 1
        self.done.rows += new.rows
        self.done.size += new.size
        self.done.files += len(new.files)

    def _write(self, frame: DataFrame, staged: Path) -> list[dict[str, Any]]:
        from streamqd.spark.pipelines import writer

        # A killed driver's workers may live on for a moment: their files must not meet ours.
        own = staged / "tasks" / secrets.token_hex(4)
        return writer.write_parts(frame, own, rows_max=FILE_ROWS_MAX)

    def _see_that_it_is_there(self, number: int, planned: dict[int, Position]) -> None:
        """A batch that Spark does again after a kill must be what was archived under its number."""
        held = next(each for each in self.known if each.first <= number <= each.last)
        wrong = [
            partition
            for partition, each in held.ranges.items()
            if number == held.last and planned.get(partition, Position(offsets.ZERO)).id != each.end
        ]
        if wrong:
            raise ManifestError(
                f"batch {number} of {self._topic} is archived up to another id of partition"
                f" {wrong[0]}: the archive's _checkpoint is of another archive, move it away"
            )

    def _count_missing(self, passed: int | None, found: Range) -> None:
        if passed is None or found.passed is None:
            return
        missing = found.passed - passed - found.rows
        if missing < 0:
            raise ManifestError(
                f"{self._topic}: {-missing} rows more than entries up to"
                f" {offsets.write_id(found.end)}"
            )
        self.done.missing += missing


def lease_name(archive: Archive) -> str:
    """The name of the lease of whoever writes to an archive."""
    return f"archive:{archive.id[:12]}"


def sentence(error: Exception) -> str:
    """What made Spark fail, without Spark's own words when the cause is one of ours."""
    found = _CAUSE.findall(str(error))
    if found:
        return str(found[-1][1]).strip()
    return first_line(error)


def first_line(error: Exception) -> str:
    """What Spark says first, without its codes."""
    return str(error).strip().splitlines()[0].partition(" SQLSTATE:")[0]

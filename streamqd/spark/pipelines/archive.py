"""Topics into Parquet, each entry exactly once, and the watermark that lets Redis forget them.

What is archived is what the manifests say, and each batch begins where they end.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from streamqd import config
from streamqd.errors import Refused, StreamqdError
from streamqd.spark import offsets
from streamqd.spark.options import of_settings, read_options
from streamqd.spark.pipelines import batches
from streamqd.spark.pipelines import manifest as manifests
from streamqd.spark.pipelines.batches import Stretch
from streamqd.spark.pipelines.lease import PipelineLease
from streamqd.spark.pipelines.manifest import Manifest, ManifestError, Range
from streamqd.spark.pipelines.parts import files_of
from streamqd.spark.pipelines.progress import ProgressMeter, Tell
from streamqd.spark.pipelines.storage import Archive
from streamqd.spark.streams import Catalog, registered, tell_loss
from streamqd.store import archives
from streamqd.store.client import Connection, accepted
from streamqd.store.cluster import connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

TIMEOUT = 10.0  # seconds that one exchange with Redis may take
BATCH_ROWS = 1_000_000
FETCH_ROWS = 5_000  # of one page; `fetchBytes` bounds it before that when entries are large
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
    3. Batches follow: Spark's tasks read and write one into staging; it is renamed, named in a
       manifest, told to Redis.
    """

    def __init__(
        self,
        settings: config.Settings,
        folder: Path,
        spark: Callable[[], SparkSession | SparkContext],
        tell: Tell,
        *,
        batch_rows: int = BATCH_ROWS,
        allow_loss: bool = False,
    ) -> None:
        """Prepare. `spark` is asked only when there is something to do."""
        self.settings = config.resolved(settings)
        self.keys = Keys(settings.keys.control, settings.keys.streams)
        self._spark = spark
        self._tell = tell
        self.batch_rows = batch_rows
        self.allow_loss = allow_loss
        self.progress_key = self.keys.progress(secrets.token_hex(4))
        self.link = self._connect()
        self.meter_link = self._connect()
        self.archive = Archive(folder, create=True)

    def run(self, wanted: Sequence[str] = ()) -> list[Done]:
        """Archive all that is there now, of these topics or of all. Raises what stops it."""
        known = registered(Store(self.link, self.keys))
        missing = [name for name in wanted if name not in known]
        if missing:
            raise Refused(f"there is no topic {missing[0]}")
        return [self._topic(name) for name in wanted or known]

    def close(self) -> None:
        """Close the connections."""
        self.link.close()
        self.meter_link.close()

    def _connect(self) -> Connection:
        return connect(self.settings.redis, timeout=TIMEOUT, name="streamqd:pipeline")

    def _topic(self, topic: str) -> Done:
        began = time.monotonic()
        with PipelineLease(self._connect, self.keys, topic, lease_name(self.archive)) as lease:
            self.archive.recover(topic)
            known = self.archive.current(topic)
            self._verify_new(topic, known)
            self.advance(topic, known)
            run = _Run(self, topic, lease, known)
            total = run.backlog()
            if total:
                meter = ProgressMeter(self.meter_link, self.progress_key, self._tell)
                meter.begin(topic, total)
                run.run(context_of(self._spark()), meter)
                meter.end()
            run.done.seconds = round(time.monotonic() - began, 3)
            run.done.archived = {
                str(partition): offsets.write_id(each.end)
                for partition, each in sorted(manifests.ends(run.known).items())
            }
            return run.done

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
        accepted(self.link.run_many(calls))


class _Run:
    """One topic's run: batch after batch, until all is archived that was there when it began."""

    def __init__(
        self, archiver: Archiver, topic: str, lease: PipelineLease, known: list[Manifest]
    ) -> None:
        self._of = archiver
        self._topic = topic
        self._lease = lease
        self.known = known
        self.done = Done(topic)
        given = {
            "subscribe": topic,
            "fetchSize": str(FETCH_ROWS),
            "failOnDataLoss": str(not archiver.allow_loss).lower(),
            "progressKey": archiver.progress_key,
        }
        self._options = read_options(of_settings(archiver.settings) | given, {})
        self._catalog = Catalog(self._options)
        facts = self._catalog.facts(self._catalog.places())
        self._targets = {place: each.latest for place, each in facts.items()}

    def backlog(self) -> int:
        """How many entries there are to archive, about."""
        starts = batches.starts(manifests.ends(self.known), self._targets)
        facts = self._catalog.facts(list(starts))
        # One at least: what is gone without having been archived must be told.
        return sum(max(1, offsets.backlog(starts[place], facts[place])) for place in starts)

    def run(self, context: SparkContext, meter: ProgressMeter) -> None:
        """Archive it. Raises what stopped it, as a sentence."""
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException

        try:
            while planned := self._plan(context.defaultParallelism):
                self._store(planned, context, meter)
        except (Py4JError, PySparkException) as error:
            raise PipelineError(sentence(error)) from error

    def _plan(self, tasks: int) -> list[Stretch]:
        """The next batch. Raises DataLossError for what is gone, unless that is allowed."""
        starts = batches.starts(manifests.ends(self.known), self._targets)
        facts = self._catalog.facts(list(starts))
        stretches = []
        for place, start in starts.items():
            begin = start
            loss = offsets.lost(start, facts[place])
            if loss is not None:
                tell_loss(place, start.id, loss, fail=not self._of.allow_loss)
                begin = offsets.after_loss(start, facts[place])
            stretches.append(Stretch(place, start, begin, self._targets[place]))
        return batches.plan(stretches, facts, self._of.batch_rows, tasks)

    def _store(self, planned: list[Stretch], context: SparkContext, meter: ProgressMeter) -> None:
        from streamqd.spark.pipelines.writer import StreamPart, write_parts

        number = self.known[-1].last + 1 if self.known else 0
        archive = self._of.archive
        staged = archive.stage(self._topic, number)
        parts = [
            StreamPart(self._options, span, each.limit) for each in planned for span in each.spans
        ]
        # A killed driver's workers may live on for a moment: their files must not meet ours.
        own = staged / "tasks" / secrets.token_hex(4)
        receipts = write_parts(context, parts, own, meter=meter)
        files = [file for each in receipts for file in each.files]
        ready = archive.gather(staged, [(Path(each["source"]), each["path"]) for each in files])
        ranges = {}
        for each in planned:
            own_receipts = [one for one in receipts if one.place == each.place]
            end = max((one.end for one in own_receipts), default=each.target.id)
            found = batches.reached(each, end, sum(one.rows for one in own_receipts))
            self._count_missing(each, found)
            ranges[each.place[1]] = found
        written = round(time.time() * 1000)
        new = Manifest(self._topic, number, number, 0, ranges, files_of(files), written)
        self._lease.check()
        archive.publish(ready, new)
        self.known.append(new)
        self._of.advance(self._topic, self.known)
        self.done.batches += 1
        self.done.rows += new.rows
        self.done.size += new.size
        self.done.files += len(new.files)

    def _count_missing(self, stretch: Stretch, found: Range) -> None:
        if stretch.start.passed is None or found.passed is None:
            return
        missing = found.passed - stretch.start.passed - found.rows
        if missing < 0:
            raise ManifestError(
                f"{self._topic}: {-missing} rows more than entries up to"
                f" {offsets.write_id(found.end)}"
            )
        self.done.missing += missing


def context_of(given: SparkSession | SparkContext) -> SparkContext:
    """The context below a session. Tasks that write files need no more, and it is up sooner."""
    from pyspark import SparkContext

    return given if isinstance(given, SparkContext) else given.sparkContext


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

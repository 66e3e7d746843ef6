"""What is in topics and their dead letters, in figures: tables, a document and a page to read.

It reads and changes nothing but its own folder, so it needs no lease. What arrives while it runs
may be in it or not.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamqd import config
from streamqd.errors import Refused
from streamqd.spark import streams
from streamqd.spark.pipelines import report_document as documents
from streamqd.spark.pipelines import report_figures as figures
from streamqd.spark.pipelines import report_files as files
from streamqd.spark.pipelines import report_page, report_tables, tables
from streamqd.spark.pipelines import report_queries as queries
from streamqd.spark.pipelines.archive import PipelineError, sentence
from streamqd.spark.pipelines.progress import POLL, ProgressMeter, Tell
from streamqd.spark.pipelines.report_queries import ROWS_MAX, Window
from streamqd.spark.pipelines.report_tables import Counts
from streamqd.spark.pipelines.storage import Archive
from streamqd.store import topics as registry
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from streamqd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

KEYS_MAX = 50  # keys of a topic that are told one by one


class Reporter:
    """Makes one report.

    1. What is asked for is checked: topics, the folder, the archive. Nothing is started before.
    2. Spark reads the entries once and keeps what the figures need of them; then it counts.
    3. The folder is written aside and renamed.
    """

    def __init__(
        self,
        settings: config.Settings,
        spark: Callable[[], SparkSession],
        tell: Tell,
        *,
        archive: Archive | None = None,
        window: Window | None = None,
    ) -> None:
        """Prepare. `spark` is asked for a session only when there is something to read."""
        self._settings = settings
        self._keys = Keys(settings.keys.control, settings.keys.streams)
        self._spark = spark
        self._tell = tell
        self._archive = archive
        self._window = window or Window()

    def run(
        self, out: Path, wanted: Sequence[str] = (), *, overwrite: bool = False
    ) -> dict[str, Any]:
        """Report on these topics, or on all; return the document. Raises Refused."""
        began = time.monotonic()
        out = out.absolute()
        files.check(out, overwrite=overwrite)
        if self._window.since and self._window.until and self._window.since >= self._window.until:
            raise Refused("the window is empty: its begin must lie before its end")
        link = tables.connect(self._settings)
        try:
            sizes, registered = self._topics(link, wanted)
            counts = self._counted(link, sizes, registered)
        finally:
            link.close()
        found = report_tables.tables(counts)
        made = {
            "made": figures.iso(round(time.time() * 1000)),
            "version": __version__,
            "window": {"from": _iso(self._window.since), "to": _iso(self._window.until)},
            "archive": None if self._archive is None else str(self._archive.root),
            "seconds": round(time.monotonic() - began, 3),
        }
        document = documents.document(made, found, counts.truncated)
        files.write(out, document, found, report_page.page(document), overwrite=overwrite)
        return document

    def _topics(self, link: Connection, wanted: Sequence[str]) -> tuple[dict[str, int], list[str]]:
        """The partitions of each topic, and which topics Redis knows."""
        registered = streams.registered(Store(link, self._keys))
        archived = [] if self._archive is None else self._archive.topics()
        every = sorted({*registered, *archived})
        missing = [name for name in wanted if name not in every]
        if missing:
            raise Refused(f"there is no topic {missing[0]}")
        chosen = [name for name in every if not wanted or name in wanted]
        hot = [name for name in chosen if name in registered]
        sizes = {
            name: (registry.partition_count(Store(link, self._keys), name) or 0)
            if name in hot
            else 0
            for name in chosen
        }
        return sizes, [name for name in hot if sizes[name]]

    # --- counting ---

    def _counted(self, link: Connection, sizes: dict[str, int], hot: list[str]) -> Counts:
        counts = Counts(sizes)
        if not sizes:
            return counts
        from pyspark.errors import PySparkException

        known = (
            {name: self._archive.current(name) for name in sizes}
            if self._archive is not None
            else {}
        )
        waiting = sum(each.rows for held in known.values() for each in held)
        waiting += self._length(link, hot, sizes)
        progress_key = self._keys.progress(secrets.token_hex(4))
        meter = ProgressMeter(link, progress_key, self._tell)
        meter.begin("reading", waiting)
        spark = self._spark()
        with contextlib.ExitStack() as kept:
            try:
                every = queries.entries(
                    spark, self._settings, hot, self._archive, known, self._window, progress_key
                )
                frame = kept.enter_context(_kept(every))
                with _watched(meter):
                    counts.places = queries.places(frame)
                dead = queries.letters(spark, self._settings, hot, self._window)
                _count(counts, frame, kept.enter_context(_kept(dead)))
            except PySparkException as error:
                raise PipelineError(sentence(error)) from error
            finally:
                meter.end()
        return counts

    def _length(self, link: Connection, hot: Sequence[str], sizes: dict[str, int]) -> int:
        names = [self._keys.stream(name, n) for name in hot for n in range(sizes[name])]
        return sum(link.pipeline([("XLEN", name) for name in names])) if names else 0


def _count(counts: Counts, frame: DataFrame, dead: DataFrame) -> None:
    """Ask everything else, of what Spark keeps."""
    asked = {
        "keys": queries.top_keys(frame, KEYS_MAX),
        "throughput": queries.throughput(frame, report_tables.widths(counts)),
        "latency": queries.latencies(frame, dead),
        "deaths": queries.deaths(dead),
    }
    for name, rows in asked.items():
        if len(rows) > ROWS_MAX:
            counts.truncated.append(name)
        setattr(counts, name, rows[:ROWS_MAX])


@contextlib.contextmanager
def _kept(frame: DataFrame) -> Iterator[DataFrame]:
    """A frame that Spark computes once, in memory and beyond that on disk."""
    from pyspark import StorageLevel

    kept = frame.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        yield kept
    finally:
        kept.unpersist()


@contextlib.contextmanager
def _watched(meter: ProgressMeter) -> Iterator[None]:
    """Show how far it is while the block runs. The meter's connection is the thread's meanwhile."""
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(POLL):
            meter.look()

    thread = threading.Thread(target=look, name="report-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _iso(moment: dt.datetime | None) -> str | None:
    return None if moment is None else figures.iso(round(moment.timestamp() * 1000))

"""Report on the problems and contents of topics, as a page and as figures in JSON.

A report needs no lease, because it changes only its own directory. Entries that arrive while it
runs may or may not be included.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from streamqd import config
from streamqd.admin import fleet
from streamqd.admin.published import Fleet
from streamqd.errors import RequestRefusedError
from streamqd.spark import rows, streams
from streamqd.spark.location import DiskFolder, Location, location, unusable_error
from streamqd.spark.pipelines import report_findings, report_history, tables
from streamqd.spark.pipelines import report_queries as queries
from streamqd.spark.pipelines.derived import QUARANTINE
from streamqd.spark.pipelines.queries import to_streamqd_error
from streamqd.spark.pipelines.report_queries import ReportScope
from streamqd.store import topics as registry
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from streamqd.version import __version__

FIGURES, PAGE = "report.json", "report.html"
BYTES_MAX = 64 << 20  # maximum size of the last report's figures, above which they are not read
_LETTERS = rows.ddl(rows.columns(dead=True, headers=True, fields=False))


def report(
    settings: config.Settings,
    spark: Callable[[], SparkSession],
    out: str | Path | Location,
    scope: ReportScope,
) -> dict[str, Any]:
    """Write a report to a directory, and return its figures.

    The next report in the same directory lists the changes since these figures. `spark` is called
    only if there are topics to report on, and must return a session.

    Raises RequestRefusedError or InvalidRequestError if the request is not valid, and PipelineError
    if Spark fails.
    """
    out = location(out, settings.archive.pairs)
    began, last = time.monotonic(), _read_last_report(out)
    if scope.since and scope.until and scope.since >= scope.until:
        raise RequestRefusedError("the start of the window must be before its end")
    sizes, dying = _sizes(settings, scope), _fleet(settings).dead_letters
    topics = [
        _topic(settings, spark(), scope, name, size, dead=name in dying)
        for name, size in sizes.items()
    ]
    past = _histories(settings, spark(), scope) if topics else {}
    topics = [each | {"history": past.get(each["topic"])} for each in topics]
    seen = _fleet(settings)  # read again, because the first result is outdated once Spark is done
    document = {
        "format": report_findings.FORMAT,
        "version": __version__,
        "made_unix_ms": seen.now_unix_ms,
        "asked": {
            "topics": sorted(scope.topics),
            "archive": scope.archive and str(scope.archive.root),
            "since": scope.since is not None,
            "until": scope.until is not None,
        },
        "since_unix_ms": scope.since and round(scope.since.timestamp() * 1000),
        "until_unix_ms": scope.until and round(scope.until.timestamp() * 1000),
        "seconds": round(time.monotonic() - began, 3),
        **report_findings.assess_status(seen, topics),
    }
    document |= report_findings.compare_reports(last, document)
    _write(out, document)
    return document


def _sizes(settings: config.Settings, scope: ReportScope) -> dict[str, int | None]:
    """Return the number of partitions of each selected topic, or None if it is only archived.

    Raises RequestRefusedError if a selected topic does not exist.
    """
    with _store(settings) as store:
        live = streams.topic_names(store)
        every = sorted({*live, *(() if scope.archive is None else scope.archive.topics())})
        missing = [name for name in (*scope.topics, *scope.schemas) if name not in every]
        if missing:
            raise RequestRefusedError(f"topic {missing[0]} does not exist")
        return {
            name: registry.partition_count(store, name) if name in live else None
            for name in every
            if not scope.topics or name in scope.topics
        }


def _fleet(settings: config.Settings) -> fleet.StatusView:
    daemon = settings.daemon
    with _store(settings) as store:
        return fleet.status(Fleet(store, daemon.fleet, daemon.lease_ttl))


@contextlib.contextmanager
def _store(settings: config.Settings) -> Iterator[Store]:
    link = tables.connect(settings)
    try:
        yield Store(link, Keys(settings.keys.control, settings.keys.streams))
    finally:
        link.close()


def _topic(
    settings: config.Settings,
    spark: SparkSession,
    scope: ReportScope,
    name: str,
    size: int | None,
    *,
    dead: bool,
) -> dict[str, Any]:
    """Return the contents of a topic.

    `size` is the number of its partitions in Redis, or None if the topic is only archived. `dead`
    must be True if the topic has dead letters.
    """
    try:
        tier = "cold" if size is None else "all"
        entries = tables.topic_table(spark, settings, name, scope.archive, tier)
        none = spark.createDataFrame([], _LETTERS)
        dead_letters = tables.dead_letter_table(spark, settings, name) if dead else none
        pipeline = settings.pipelines.get(name, config.Pipeline())
        if name in scope.schemas:
            pipeline = config.Pipeline(scope.schemas[name], codec=pipeline.codec)
        found = queries.figures(scope.in_window(entries), scope.in_window(dead_letters), pipeline)
    except PySparkException as error:
        raise to_streamqd_error(error) from error
    parts = found["partitions"]
    return {
        "topic": name,
        "live": size is not None,
        # The archive may contain partitions that the topic no longer has in Redis.
        "partition_count": max(size or 0, 1, *(each["partition"] + 1 for each in parts)),
        "entries": sum(each["entries"] for each in parts),
        "bytes": sum(each["bytes"] for each in parts),
        "dead_letters": sum(each["dead_letters"] for each in found["timeline"]),
        "quarantine": _quarantine(spark, scope, name),
        **found,
    }


def _quarantine(spark: SparkSession, scope: ReportScope, topic: str) -> dict[str, Any] | None:
    """Describe the quarantine of a topic: the name of its view, and its rows in the window.

    Returns None if there is no quarantine.
    """
    archive = scope.archive
    table = None if archive is None else archive.derived_table(topic, QUARANTINE)
    if archive is None or table is None:
        return None
    found = queries.reasons(scope.in_window(tables.read_files(spark, table, table.files())))
    return {
        "archive": str(archive.root),
        "view": tables.view_name("quarantine", topic),
        "rows": sum(each["rows"] for each in found),
        "reasons": found,
    }


def _histories(
    settings: config.Settings, spark: SparkSession, scope: ReportScope
) -> dict[str, dict[str, Any]]:
    """Return the history of each topic that has one.

    If the history cannot be read, a warning is logged and {} is returned.
    """
    try:
        return report_history.histories(spark, settings, scope)
    except PySparkException as error:
        streams.warn_once(f"{to_streamqd_error(error)}, so the report is without the history")
        return {}


def _read_last_report(out: Location) -> dict[str, Any] | None:
    """Return the figures of the last report in a directory, or None if there is none.

    Raises RequestRefusedError if the directory cannot be used, or if its file of figures was not
    written by a report.
    """
    if isinstance(out, DiskFolder) and (
        out.path.is_symlink() or (out.path.exists() and not out.path.is_dir())
    ):
        raise RequestRefusedError(f"{out} is not a directory")
    try:
        existing = set(out.names()) & {FIGURES, PAGE}
    except OSError as error:
        text = f"{out} cannot be read: {out.describe_error(error)}"
        raise unusable_error(out, text) from out.cause(error)
    if not existing:
        return None
    try:
        with out.open_input(FIGURES) as file:
            found = json.loads(file.read(BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not str(found.get("format", "")).startswith(
        report_findings.FAMILY
    ):
        raise RequestRefusedError(
            f"{out}/{FIGURES} was not written by a report, so it is not overwritten"
        )
    return found


def _write(out: Location, document: Mapping[str, Any]) -> None:
    """Write the page and the figures. Each file is replaced atomically."""
    from streamqd.spark.pipelines.report_page import page

    figures = json.dumps(document, indent=2) + "\n"
    try:
        out.make()
        out.write(PAGE, page(document).encode("utf-8", "replace"))
        out.write(FIGURES, figures.encode("utf-8", "replace"))
    except OSError as error:
        text = f"the report cannot be written to {out}: {out.describe_error(error)}"
        raise unusable_error(out, text) from out.cause(error)

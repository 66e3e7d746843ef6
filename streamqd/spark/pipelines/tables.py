"""Read topics as tables of archived entries and entries in Redis, each entry once.

Spark reads entries up to the end of the Delta table from files, and later entries from the stream,
because Redis may trim archived entries at any time.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from streamqd import config
from streamqd.errors import RequestRefusedError
from streamqd.spark import offsets, read_topic, rows
from streamqd.spark.location import BucketFolder
from streamqd.spark.options import DLQ, of_settings, read_options
from streamqd.spark.pipelines.derived import PARSED, QUARANTINE, RESULTS
from streamqd.spark.pipelines.parts import WrittenFile
from streamqd.spark.pipelines.storage import Archive, ArchiveTable, TableKind
from streamqd.spark.streams import Catalog, DataLossError, report_loss, topic_names
from streamqd.store import client
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = rows.columns(dead=False, headers=True, fields=True)
NO_ADDRESS = "redis://localhost"
TIMEOUT = 10.0  # seconds that one round trip to Redis may take
_SHOWS = re.compile(r"\s*show\s+(tables|views)\b", re.IGNORECASE)
# Maps the prefix of a view's name to the kind of table that the view shows.
_DERIVED = {"parsed": PARSED, "quarantine": QUARANTINE, "table": RESULTS}


def read_cold(spark: SparkSession, topic: str, table: ArchiveTable | None) -> DataFrame:
    """Return the rows of a topic's table in its opened version, or no rows if there is no table."""
    from pyspark.sql import functions as f

    if table is None:
        return spark.createDataFrame([], rows.ddl(COLUMNS))
    frame = read_files(spark, table, table.files())
    return frame.withColumn("topic", f.lit(topic)).select(*(each.name for each in COLUMNS))


def read_files(spark: SparkSession, table: ArchiveTable, files: Sequence[WrittenFile]) -> DataFrame:
    """Return the rows of these files of a table, with all its columns."""
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = from_arrow_schema(arrow_columns(table))
    if not files:
        return spark.createDataFrame([], schema)
    if isinstance(table.folder, BucketFolder):
        from streamqd.spark.pipelines import bucket_files

        return bucket_files.read(spark, table, files, schema)
    reader = spark.read.schema(schema).option("basePath", str(table.folder))
    return reader.parquet(*(table.locate(each) for each in files))


def arrow_columns(table: ArchiveTable) -> pa.Schema:
    """Return the Arrow columns of a table, including columns that were added later."""
    import pyarrow as pa

    return pa.schema(table.delta.schema().to_arrow())


def read_hot(
    spark: SparkSession,
    options: Mapping[str, str],
    topic: str,
    table: ArchiveTable | None,
    *,
    fail: bool = True,
) -> DataFrame:
    """Return the entries of a topic in Redis that come after those in a table.

    `options` contains the options of the data source. Raises DataLossError if entries were trimmed
    before they were archived. If `fail` is False, such a loss is only logged.
    """
    given = {**options, "includeHeaders": "true", "includeFields": "true"}
    if table is not None:
        given["startingOffsets"] = starting_offsets(given, topic, table, fail=fail)
    given |= {"subscribe": topic, "pushdown": "true"}
    return spark.read.format("streamq").options(**given).load()


def starting_offsets(
    options: Mapping[str, str], topic: str, table: ArchiveTable | None, *, fail: bool = True
) -> str:
    """Return the option startingOffsets for a read that starts after the entries in a table.

    The offsets include the table's counts of entries, which show whether entries were trimmed
    before they were archived. In that case, this raises DataLossError, or only logs the loss if
    `fail` is False.
    """
    catalog = Catalog(read_options({**options, "subscribe": topic}, os.environ))
    facts = catalog.facts(catalog.places())
    known = {} if table is None else table.positions
    starts = {place: known[place] for place in facts if place in known}
    new = {str(place[1]): "earliest" for place in facts if place not in known}
    for place, start in starts.items():
        if loss := offsets.find_loss(start, facts[place]):
            report_loss(place, start.id, loss, fail=fail)
            starts[place] = offsets.resume_position(start, facts[place])
    found = offsets.to_json(starts)
    return json.dumps({**found, topic: found.get(topic, {}) | new})


def topic_table(
    spark: SparkSession,
    settings: config.Settings,
    topic: str,
    archive: Archive | None,
    tier: str = "all",
) -> DataFrame:
    """Return the entries of a topic, each entry once.

    `tier` selects where they are read from: `all` for both the archive and Redis, `cold` for the
    archive only, or `hot` for the entries in Redis that are not archived.
    """
    return read_tiers(spark, of_settings(settings), topic, archive, tier)


def read_tiers(
    spark: SparkSession,
    options: Mapping[str, str],
    topic: str,
    archive: Archive | None,
    tier: str = "all",
) -> DataFrame:
    """Return the entries of a topic as `topic_table` does, with these options of the data source.

    The table is opened before the streams are read, so entries that are archived in between are
    read from Redis. If they were already trimmed, the table has grown, so it is opened again. Use
    the result soon, because Redis may trim entries that Spark has not read yet.

    Raises RequestRefusedError if the options do not fit the tier or the archive.
    """
    if tier not in ("all", "hot", "cold"):
        raise RequestRefusedError(f"tier must be all, hot or cold, not {tier}")
    bounds = [name for name in options if name.lower().startswith(("starting", "ending"))]
    if bounds and archive is not None:
        raise RequestRefusedError(
            f"{bounds[0]} cannot be used with an archive, where timestamp or id_ms are"
            " filtered instead"
        )
    if archive is None:
        if tier == "cold":
            raise RequestRefusedError("the tier cold requires an archive; pass archivePath")
        return read_hot(spark, options, topic, None)
    if tier == "cold":
        # The options are checked as for other tiers, but the address of Redis is not needed.
        chosen = read_options({"url": NO_ADDRESS, **options, "subscribe": topic}, {}).columns
        return _select_columns(read_cold(spark, topic, archive.table(topic)), chosen)
    given = read_options({**options, "subscribe": topic}, os.environ)
    table = archive.table(topic)
    while True:
        try:
            hot_rows = read_hot(spark, options, topic, table)
            break
        except DataLossError:
            newer = archive.table(topic)
            if newer is None or (table is not None and newer.positions == table.positions):
                hot_rows = read_hot(spark, options, topic, table, fail=given.fail_on_data_loss)
                break
            table = newer
    if tier == "hot":
        return hot_rows
    return _select_columns(read_cold(spark, topic, table), given.columns).unionByName(hot_rows)


def _select_columns(frame: DataFrame, names: Sequence[str]) -> DataFrame:
    """Select columns by their names, or all columns if no names are given.

    Raises ValueError for an unknown name.
    """
    if not names:
        return frame
    return frame.select(*(column.name for column in rows.select_columns(COLUMNS, names)))


def dead_letter_table(spark: SparkSession, settings: config.Settings, topic: str) -> DataFrame:
    """Return the dead letters of a topic that are in Redis."""
    return read_topic(spark, topic + DLQ, settings=settings, includeHeaders="true")


def view_name(kind: str, name: str) -> str:
    """Return the name of a view, such as `topic_access` or `dlq_access`.

    Characters that a view's name must not contain become `_`.
    """
    return f"{kind}_" + re.sub(r"\W", "_", name)


def stream_table(
    spark: SparkSession, settings: config.Settings, name: str, options: Mapping[str, str]
) -> DataFrame:
    """Return a topic, or its dead letters if the name ends with `:dlq`, as a stream."""
    given = of_settings(settings) | {"subscribe": name, "includeHeaders": "true"}
    if not name.endswith(DLQ):
        given["includeFields"] = "true"
    return spark.readStream.format("streamq").options(**given, **options).load()


def make_views(
    spark: SparkSession,
    settings: config.Settings,
    archive: Archive | None,
    query: str,
    *,
    stream: Mapping[str, str] | None = None,
) -> list[str]:
    """Create the views that a query uses, and return their names.

    For SHOW TABLES and SHOW VIEWS, all views are created. If `stream` contains options, the views
    are streams with these options. Raises RequestRefusedError if the query uses a name that two
    views share.
    """
    from streamqd.spark.pipelines.overviews import OVERVIEWS

    every = _SHOWS.match(query) is not None
    words = {word.lower() for word in re.findall(r"\w+", query)}
    made: dict[str, str] = {}
    for name, overview in OVERVIEWS.items() if stream is None else ():
        if name in words:
            overview(spark, settings, archive).createOrReplaceTempView(name)
        elif every:  # listed only; a statement that uses the view creates it
            spark.createDataFrame([], "listed string").createOrReplaceTempView(name)
        if every or name in words:
            made[name] = name
    for kind, of in _view_names(settings, archive):
        name = view_name(kind, of)
        if not every and name.lower() not in words:
            continue
        if name.lower() in made:
            if every:
                continue
            raise RequestRefusedError(
                f"{name} is ambiguous: it could be {made[name.lower()]} or {of}"
            )
        made[name.lower()] = of
        if kind in _DERIVED:
            assert archive is not None
            frame = _derived_table(spark, archive, of, _DERIVED[kind])
        elif stream is not None:
            frame = stream_table(spark, settings, of + DLQ if kind == "dlq" else of, stream)
        elif kind == "dlq":
            frame = dead_letter_table(spark, settings, of)
        else:
            frame = topic_table(spark, settings, of, archive)
        frame.createOrReplaceTempView(name)
    return sorted(made)


def _view_names(settings: config.Settings, archive: Archive | None) -> Iterator[tuple[str, str]]:
    """Yield the kind and the name of each topic or table that has a view."""
    for topic in _topic_names(settings):
        yield "topic", topic
        yield "dlq", topic
    if archive is not None:
        for kind, table_kind in _DERIVED.items():
            for name in archive.names(table_kind):
                yield kind, name


def _derived_table(
    spark: SparkSession, archive: Archive, name: str, table_kind: TableKind
) -> DataFrame:
    table = archive.derived_table(name, table_kind)
    assert table is not None
    return read_files(spark, table, table.files())


def connect(settings: config.Settings) -> Connection:
    """Open a connection to the Redis server in the configuration."""
    redis = config.resolve_url(settings).redis
    return client.connect(redis, timeout=TIMEOUT, name="streamqd:pipeline")


def _topic_names(settings: config.Settings) -> list[str]:
    link = connect(settings)
    try:
        return topic_names(Store(link, Keys(settings.keys.control, settings.keys.streams)))
    finally:
        link.close()

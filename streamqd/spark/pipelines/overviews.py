"""Views over all topics: the history of messages, and dead letters, in the archive and in Redis.

Each row is in a view once. The tables are opened first, and what follows their positions is read
from Redis.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

from streamqd import config
from streamqd.spark import offsets, register, rows
from streamqd.spark.options import DLQ, of_settings, read_options
from streamqd.spark.pipelines import minutes, tables
from streamqd.spark.pipelines.kinds import DEAD, HISTORY, minute_columns
from streamqd.spark.pipelines.letters import COLUMNS
from streamqd.spark.pipelines.storage import Archive, ArchiveTable
from streamqd.spark.streams import Catalog, registered
from streamqd.store.keys import Keys
from streamqd.store.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def messages(spark: SparkSession, settings: config.Settings, archive: Archive | None) -> DataFrame:
    """Return the figures of all fleets in the archive, and of the configured fleet in Redis."""
    import pyarrow as pa

    own = settings.daemon.fleet
    names = sorted({own, *(archive.names(HISTORY) if archive else ())})
    frames = []
    for fleet in names:
        table = archive.derived(fleet, HISTORY) if archive else None
        if table is not None:
            frames.append(_of_fleet(tables.read_files(spark, table, table.files()), fleet))
        if fleet == own:
            waiting = pa.Table.from_pylist(_waiting(settings, table), minute_columns())
            frames.append(_of_fleet(spark.createDataFrame(waiting), fleet))
    return reduce(lambda one, other: one.unionByName(other), frames)


def _of_fleet(frame: DataFrame, fleet: str) -> DataFrame:
    from pyspark.sql import functions as f

    chosen = (each.name for each in minute_columns() if each.name != "date")
    return frame.select(*chosen, f.lit(fleet).alias("fleet"))


def _waiting(settings: config.Settings, table: ArchiveTable | None) -> list[dict[str, Any]]:
    link = tables.connect(settings)
    try:
        store = Store(link, Keys(settings.keys.control, settings.keys.streams))
        return minutes.waiting(store, table, settings.daemon.fleet)
    finally:
        link.close()


def dead_letters(
    spark: SparkSession, settings: config.Settings, archive: Archive | None
) -> DataFrame:
    """Return the dead letters of all topics: archived ones, and those in Redis after them."""
    from pyspark.sql import functions as f

    found = {name: archive.derived(name, DEAD) for name in archive.names(DEAD)} if archive else {}
    known = {name: table for name, table in found.items() if table is not None}
    names = [each.name for each in COLUMNS]
    frames = [
        tables.read_files(spark, table, table.files())
        .withColumn("topic", f.lit(name))
        .select(*names)
        for name, table in known.items()
    ]
    link = tables.connect(settings)
    try:
        live = registered(Store(link, Keys(settings.keys.control, settings.keys.streams)))
    finally:
        link.close()
    if live:
        frame = _behind(spark, settings, live, known)
        topic = f.regexp_replace("topic", f"{DLQ}$", "")
        frames.append(frame.withColumn("topic", topic).select(*names))
    if not frames:
        return spark.createDataFrame([], rows.ddl(COLUMNS))
    return reduce(lambda one, other: one.unionByName(other), frames)


def _behind(
    spark: SparkSession,
    settings: config.Settings,
    live: list[str],
    known: Mapping[str, ArchiveTable],
) -> DataFrame:
    """Return the dead letters in Redis that follow those in the tables."""
    register(spark)
    given = of_settings(settings) | {"subscribe": ",".join(name + DLQ for name in live)}
    starts: dict[str, dict[str, str]] = {}
    for name, number in Catalog(read_options(given, {})).places():
        table = known.get(name.removesuffix(DLQ))
        end = None if table is None else table.positions.get((table.topic, number))
        at = "earliest" if end is None else offsets.write_id(end.id)
        starts.setdefault(name, {})[str(number)] = at
    given |= {"startingOffsets": json.dumps(starts), "pushdown": "true"}
    given |= {"includeHeaders": "true", "includeFields": "true"}
    return spark.read.format("streamq").options(**given).load()


Overview = Callable[["SparkSession", config.Settings, "Archive | None"], "DataFrame"]
OVERVIEWS: dict[str, Overview] = {"messages": messages, "dead_letters": dead_letters}

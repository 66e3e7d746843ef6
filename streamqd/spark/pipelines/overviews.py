"""Create views of all topics: the history of messages, and the dead letters.

The views combine the archive and Redis. To include each row only once, the tables are opened first,
and only later entries are read from Redis. If dead letters are archived during this, the tables and
Redis are read again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
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
from streamqd.spark import offsets, register, rows
from streamqd.spark.offsets import Offsets
from streamqd.spark.options import DLQ, of_settings
from streamqd.spark.pipelines import minutes, tables
from streamqd.spark.pipelines.dead_letters import COLUMNS
from streamqd.spark.pipelines.kinds import DEAD, HISTORY, minute_columns
from streamqd.spark.pipelines.storage import Archive, ArchiveTable, TableKind
from streamqd.spark.streams import partition_counts, topic_names, warn_once
from streamqd.store.keys import Keys
from streamqd.store.store import Store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

READ_ATTEMPTS = 5  # attempts to read dead letters while others are being archived


def messages(spark: SparkSession, settings: config.Settings, archive: Archive | None) -> DataFrame:
    """Return the figures of all fleets in the archive, and newer ones of the configured fleet.

    If a table cannot be read, it is left out and a warning is logged.
    """
    own = settings.daemon.fleet
    names = sorted({own, *(archive.names(HISTORY) if archive else ())})
    frames = []
    for fleet in names:
        table = _table(archive, fleet, HISTORY, "messages")
        if table is not None:
            frames.append(_select_fleet(tables.read_files(spark, table, table.files()), fleet))
        if fleet == own:
            waiting = spark.createDataFrame(_unarchived_rows(settings, table))
            frames.append(_select_fleet(waiting, fleet))
    return reduce(lambda one, other: one.unionByName(other), frames)


def _select_fleet(frame: DataFrame, fleet: str) -> DataFrame:
    from pyspark.sql import functions as f
    from pyspark.sql.pandas.types import from_arrow_type

    chosen = [each.name for each in minute_columns() if each.name != "date"]
    # A table from an older version has no delays until a run of this version writes to it.
    missing = {
        each.name: f.lit(None).cast(from_arrow_type(each.type))
        for each in minute_columns()
        if each.name not in frame.columns
    }
    return frame.withColumns(missing).select(*chosen, f.lit(fleet).alias("fleet"))


def _table(archive: Archive | None, name: str, kind: TableKind, view: str) -> ArchiveTable | None:
    """Return a table, or None if there is none or if it cannot be read.

    If the table cannot be read, a warning is logged.
    """
    try:
        return archive.derived_table(name, kind) if archive else None
    except (RequestRefusedError, SparkError) as error:
        warn_once(f"{error}, so the view {view} is without this table")
        return None


def _unarchived_rows(settings: config.Settings, table: ArchiveTable | None) -> pa.Table:
    link = tables.connect(settings)
    try:
        store = Store(link, Keys(settings.keys.control, settings.keys.streams))
        return minutes.unarchived_rows(store, table, settings.daemon.fleet)
    finally:
        link.close()


def dead_letters(
    spark: SparkSession, settings: config.Settings, archive: Archive | None
) -> DataFrame:
    """Return the dead letters of all topics: archived ones, and later ones in Redis.

    If a table or a partition cannot be read, it is skipped and a warning is logged. Raises
    RequestRefusedError if dead letters are archived during every one of READ_ATTEMPTS attempts.
    """
    from pyspark.sql import functions as f

    for _ in range(READ_ATTEMPTS):
        known = _dead_letter_tables(archive)
        places = _dead_letter_places(settings)
        # The rows are read now and kept, because Redis may remove dead letters once they are
        # archived.
        behind = [place for place in places if place[0] in known]
        read = _unarchived_dead_letters(spark, settings, behind, known)
        read = [each.localCheckpoint() for each in read]
        if _positions(_dead_letter_tables(archive)) == _positions(known):
            break
    else:
        raise RequestRefusedError(
            "dead letters were archived during each of several reads; try again"
        )
    read += _unarchived_dead_letters(
        spark, settings, [each for each in places if each not in behind], {}
    )
    names = [each.name for each in COLUMNS]
    frames = [
        tables.read_files(spark, table, table.files())
        .withColumn("topic", f.lit(name))
        .select(*names)
        for name, table in known.items()
    ]
    frames += [
        each.withColumn("topic", f.regexp_replace("topic", f"{DLQ}$", "")).select(*names)
        for each in read
    ]
    if not frames:
        return spark.createDataFrame([], rows.ddl(COLUMNS))
    return reduce(lambda one, other: one.unionByName(other), frames)


def _dead_letter_tables(archive: Archive | None) -> dict[str, ArchiveTable]:
    """Return the dead-letter tables by topic. Tables that cannot be read are left out."""
    names = archive.names(DEAD) if archive else []
    found = {name: _table(archive, name, DEAD, "dead_letters") for name in names}
    return {name: table for name, table in found.items() if table is not None}


def _positions(known: Mapping[str, ArchiveTable]) -> dict[str, Offsets]:
    return {name: table.positions for name, table in known.items()}


def _dead_letter_places(settings: config.Settings) -> list[TopicPartition]:
    """Return the partitions with dead letters in Redis. Those that cannot be read are left out."""
    keys = Keys(settings.keys.control, settings.keys.streams)
    link = tables.connect(settings)
    try:
        counts: dict[str, int] = {}
        for name in topic_names(Store(link, keys)):
            try:
                counts |= partition_counts(link, keys, [name])
            except InvalidValueError as error:
                warn_once(f"{error}, so the view dead_letters is without topic {name}")
        places = [(name, number) for name, count in counts.items() for number in range(count)]
        found = link.pipeline([("XLEN", keys.dlq(*place)) for place in places])
    finally:
        link.close()
    filled = []
    for place, length in zip(places, found, strict=True):
        if not isinstance(length, RedisResponseError):
            filled += [place] if length else []
        elif length.kind is RefusalKind.BAD_KEY_OR_COMMAND:
            warn_once(f"{keys.dlq(*place)}: {length}, so the view dead_letters is without it")
        else:
            raise length
    return filled


def _unarchived_dead_letters(
    spark: SparkSession,
    settings: config.Settings,
    places: Sequence[TopicPartition],
    known: Mapping[str, ArchiveTable],
) -> list[DataFrame]:
    """Return the dead letters in these partitions of Redis that come after those in the tables.

    The list contains one DataFrame, or none if there are no partitions.
    """
    register(spark)
    chosen: dict[str, list[int]] = {}
    starts: dict[str, dict[str, str]] = {}
    for name, number in places:
        table = known.get(name)
        end = None if table is None else table.positions.get((name, number))
        at = "earliest" if end is None else offsets.write_id(end.id)
        chosen.setdefault(name + DLQ, []).append(number)
        starts.setdefault(name + DLQ, {})[str(number)] = at
    if not places:
        return []
    given = of_settings(settings) | {"assign": json.dumps(chosen), "pushdown": "true"}
    given |= {"startingOffsets": json.dumps(starts)}
    given |= {"includeHeaders": "true", "includeFields": "true"}
    return [spark.read.format("streamq").options(**given).load()]


Overview = Callable[["SparkSession", config.Settings, "Archive | None"], "DataFrame"]
OVERVIEWS: dict[str, Overview] = {"messages": messages, "dead_letters": dead_letters}

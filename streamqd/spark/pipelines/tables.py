"""Topics as tables: what is archived and what is still in Redis, each entry once.

The manifests decide: what they hold is read from files, what lies behind them from the stream. It
does not matter what Redis has trimmed of the first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from streamqd import config
from streamqd.errors import Refused
from streamqd.spark import offsets, read_topic, rows
from streamqd.spark.offsets import Place, Position
from streamqd.spark.options import DLQ, of_settings, read_options
from streamqd.spark.pipelines import manifest as manifests
from streamqd.spark.pipelines.manifest import Manifest
from streamqd.spark.pipelines.storage import Archive
from streamqd.spark.streams import Catalog, registered, tell_loss
from streamqd.store import cluster
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = rows.columns(dead=False, headers=True, fields=True)
TIMEOUT = 10.0  # seconds that one exchange with Redis may take


def cold(spark: SparkSession, archive: Archive, known: Sequence[Manifest]) -> DataFrame:
    """What manifests of one topic hold, with the columns of the data source."""
    paths = [str(path) for path in archive.files(known)]
    names = [column.name for column in COLUMNS]
    reader = spark.read.schema(rows.ddl(COLUMNS)).option("basePath", str(archive.root))
    if not paths:
        return spark.createDataFrame([], rows.ddl(COLUMNS))
    return reader.parquet(*paths).select(*names)


def hot(
    spark: SparkSession, settings: config.Settings, topic: str, known: Sequence[Manifest]
) -> DataFrame:
    """What Redis holds of a topic behind what is archived."""
    options = {"includeHeaders": "true", "includeFields": "true"}
    if known:
        options["startingOffsets"] = starts_behind(of_settings(settings), topic, known)
    return read_topic(spark, topic, settings=settings, **options)


def starts_behind(
    options: Mapping[str, str], topic: str, known: Sequence[Manifest], *, fail: bool = True
) -> str:
    """Where reading begins behind what manifests hold, as the option startingOffsets has it.

    With the counts of the manifests: an id alone does not tell whether what is gone behind it was
    archived. Raises DataLossError when it was not, unless told not to `fail`.
    """
    ends = manifests.ends(known)
    catalog = Catalog(read_options({**options, "subscribe": topic}, {}))
    starts: dict[Place, Position] = {}
    new: dict[str, str] = {}
    for place, facts in catalog.facts(catalog.places()).items():
        end = ends.get(place[1])
        if end is None:
            new[str(place[1])] = "earliest"
            continue
        starts[place] = Position(end.end, end.passed)
        loss = offsets.lost(starts[place], facts)
        if loss is not None:
            tell_loss(place, end.end, loss, fail=fail)
            starts[place] = offsets.after_loss(starts[place], facts)
    found = offsets.to_json(starts)
    return json.dumps({**found, topic: found.get(topic, {}) | new})


def topic_table(
    spark: SparkSession,
    settings: config.Settings,
    topic: str,
    archive: Archive | None,
    tier: str = "all",
) -> DataFrame:
    """A topic, each entry once: archived or in Redis (all), or one of both only."""
    if archive is None:
        if tier == "cold":
            raise Refused("what is archived cannot be read without an archive")
        return hot(spark, settings, topic, ())
    known = archive.current(topic)
    if tier == "cold":
        return cold(spark, archive, known)
    if tier == "hot":
        return hot(spark, settings, topic, known)
    return cold(spark, archive, known).unionByName(hot(spark, settings, topic, known))


def letter_table(spark: SparkSession, settings: config.Settings, topic: str) -> DataFrame:
    """The dead letters of a topic."""
    return read_topic(spark, topic + DLQ, settings=settings, includeHeaders="true")


def view_name(topic: str, *, dead: bool = False) -> str:
    """The name of a topic's view: `topic_access`, `dlq_access`; other characters become `_`."""
    return ("dlq_" if dead else "topic_") + re.sub(r"\W", "_", topic)


def stream_table(
    spark: SparkSession, settings: config.Settings, name: str, options: Mapping[str, str]
) -> DataFrame:
    """A topic, or with `:dlq` its dead letters, as a stream."""
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
    """Make the views that a query names; return their names. Raises Refused for a clash.

    Views of streams with the options of `stream`, when that is given.
    """
    words = {word.lower() for word in re.findall(r"\w+", query)}
    made: dict[str, str] = {}
    for topic in _registered(settings):
        for dead in (False, True):
            name = view_name(topic, dead=dead)
            if name.lower() not in words:
                continue
            if name.lower() in made:
                raise Refused(f"{name} could be {made[name.lower()]} or {topic}")
            made[name.lower()] = topic
            if stream is not None:
                frame = stream_table(spark, settings, topic + DLQ if dead else topic, stream)
            elif dead:
                frame = letter_table(spark, settings, topic)
            else:
                frame = topic_table(spark, settings, topic, archive)
            frame.createOrReplaceTempView(name)
    return sorted(made)


def ask(
    spark: SparkSession, settings: config.Settings, archive: Archive | None, query: str
) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns and rows that answer a query over views. Raises Refused for one that cannot be.

    All rows are held at once.
    """
    from pyspark.errors import AnalysisException, ParseException

    from streamqd.spark.pipelines.archive import first_line

    try:
        make_views(spark, settings, archive, query)
        frame = spark.sql(query)
    except (AnalysisException, ParseException) as error:
        raise Refused(first_line(error)) from error
    return frame.columns, [row.asDict(recursive=True) for row in frame.collect()]


def connect(settings: config.Settings) -> Connection:
    """A connection to the Redis of a configuration."""
    return cluster.connect(
        config.resolved(settings).redis, timeout=TIMEOUT, name="streamqd:pipeline"
    )


def _registered(settings: config.Settings) -> list[str]:
    link = connect(settings)
    try:
        return registered(Store(link, Keys(settings.keys.control, settings.keys.streams)))
    finally:
        link.close()

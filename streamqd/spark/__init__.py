"""Spark: topics as sources and sinks of PySpark, and pipelines on them.

Importing this needs neither pyspark nor Java; using it does, and says so.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from streamqd import config, extras
from streamqd.errors import StreamqdError
from streamqd.spark.java import JavaMissingError, ensure_java
from streamqd.spark.options import of_settings

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

    from streamqd.spark.source import StreamqSource

__all__ = [
    "JavaMissingError",
    "SparkMissingError",
    "StreamqSource",
    "context",
    "ensure_java",
    "of_settings",
    "read_topic",
    "register",
    "session",
]

_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_ADDRESS = "SPARK_LOCAL_IP"
_LOOPBACK = "127.0.0.1"
# For a session of one machine. Each can be overridden.
_CONF = {
    _PUSHDOWN: "true",
    "spark.ui.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
# For a context whose Java machine only places tasks: nothing there ever gets hot.
_LAUNCHER = "SPARK_LAUNCHER_OPTS"
_LIGHT_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_LIGHT_CONF = {
    "spark.driver.extraJavaOptions": _LIGHT_JAVA,
    "spark.driver.memory": "512m",
}
# Spark warns when a source is registered again.
_registered: WeakSet[SparkSession] = WeakSet()


class SparkMissingError(StreamqdError):
    """pyspark or pyarrow is not installed. The message says how to install both."""


def __getattr__(name: str) -> Any:
    if name == "StreamqSource":
        need_spark()
        from streamqd.spark.source import StreamqSource

        return StreamqSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def session(
    app: str, master: str | None = None, conf: Mapping[str, str] | None = None
) -> SparkSession:
    """Return a Spark session that knows `streamq`: the one that runs, else a new one.

    `master` is local[*] unless given; `conf` overrides what would be set. Raises SparkMissingError
    and JavaMissingError.
    """
    _prepare_start()
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder
    master, wanted = _wanted(master, conf)
    builder = builder.appName(app).master(master)
    for name, value in wanted.items():
        builder = builder.config(name, value)
    made: SparkSession = builder.getOrCreate()
    register(made)
    return made


def context(
    app: str, master: str | None = None, conf: Mapping[str, str] | None = None
) -> SparkContext:
    """Return a Spark context: the one that runs, else a new one.

    For tasks that need no tables. It is up in half the time of a session, and its Java machine is
    set to start fast. `session` makes a session of it. Raises as `session` does.
    """
    _prepare_start()
    os.environ.setdefault(_LAUNCHER, _LIGHT_JAVA)
    from pyspark import SparkConf, SparkContext

    master, wanted = _wanted(master, conf)
    wanted = _LIGHT_CONF | wanted
    chosen = SparkConf().setAppName(app).setMaster(master).setAll(list(wanted.items()))
    return SparkContext.getOrCreate(chosen)


def _prepare_start() -> None:
    need_spark()
    ensure_java()
    # The workers must be this Python, with these packages, whatever is first on PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def _wanted(master: str | None, conf: Mapping[str, str] | None) -> tuple[str, dict[str, str]]:
    """Where Spark is to run, and its settings."""
    wanted = dict(_CONF)
    master = master or "local[*]"
    if master.startswith("local"):
        os.environ.setdefault(_ADDRESS, _LOOPBACK)
        wanted["spark.sql.shuffle.partitions"] = str(max(2, os.cpu_count() or 2))
    return master, wanted | dict(conf or {})


def register(spark: SparkSession) -> None:
    """Make `format("streamq")` known to a session, and let it push filters down."""
    need_spark()
    from streamqd.spark.source import StreamqSource

    spark.conf.set(_PUSHDOWN, "true")
    if spark not in _registered:
        spark.dataSource.register(StreamqSource)
        _registered.add(spark)


def read_topic(
    spark: SparkSession,
    topic: str,
    *,
    settings: config.Settings | None = None,
    **options: object,
) -> DataFrame:
    """Read a topic (or `TOPIC:dlq`) as it is now, with filters pushed down.

    Options are those of the data source; `settings` stand in for its address.
    """
    register(spark)
    given = of_settings(settings) if settings is not None else {}
    given |= {name: _text(value) for name, value in options.items()}
    reader = spark.read.format("streamq").options(**given)
    return reader.option("subscribe", topic).option("pushdown", "true").load()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def need_spark() -> None:
    """Raise SparkMissingError unless pyspark and pyarrow are there. Imports neither."""
    missing = [name for name in ("pyspark", "pyarrow") if importlib.util.find_spec(name) is None]
    if missing:
        raise SparkMissingError(
            f"{' and '.join(missing)} cannot be imported: {extras.hint('spark')}"
        )

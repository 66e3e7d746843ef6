"""Read and write topics with PySpark, and run pipelines over them.

This package can be imported without pyspark and Java. Its functions need both, and raise an error
if one of them is missing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from streamqd import config, extras
from streamqd.errors import SparkError
from streamqd.spark.java import JavaMissingError, ensure_java
from streamqd.spark.options import of_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import DataSource

    from streamqd.spark.source import StreamqSource

__all__ = [
    "JavaMissingError",
    "SparkMissingError",
    "StreamqSource",
    "ensure_java",
    "of_settings",
    "read_topic",
    "register",
    "session",
    "stream_topic",
]

_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_ADDRESS = "SPARK_LOCAL_IP"
_LOOPBACK = "127.0.0.1"
# Defaults for a session on one machine. The caller can override each of them.
_CONF = {
    _PUSHDOWN: "true",
    "spark.ui.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
# In a light session, Java only schedules tasks, so optimizing its own code would not pay off.
_LAUNCHER = "SPARK_LAUNCHER_OPTS"
_LIGHT_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_LIGHT_CONF = {
    "spark.driver.extraJavaOptions": _LIGHT_JAVA,
    "spark.driver.memory": "512m",
}
_PYTHON = "PYSPARK_PYTHON"
# The names of the sources already registered in each session. Spark logs a warning if a source is
# registered twice, so a name that is found here is not registered again.
_registered: WeakKeyDictionary[SparkSession, set[str]] = WeakKeyDictionary()

# Spark's workers must run this Python, because it has the required packages, even if another Python
# comes first on PATH. The variable is set on import so that every session created later reads it.
os.environ.setdefault(_PYTHON, sys.executable)


class SparkMissingError(SparkError):
    """A required package, such as pyspark or pyarrow, cannot be used.

    The message explains what to install or set.
    """


def __getattr__(name: str) -> Any:
    if name == "StreamqSource":
        need_spark()
        from streamqd.spark.source import StreamqSource

        return StreamqSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def session(
    app: str,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    *,
    light: bool = False,
) -> SparkSession:
    """Return the active Spark session, or create one, and register `streamq` in it.

    `master` defaults to local[*], and `conf` overrides the default Spark settings. Set `light` if
    the work is done mostly in Python: the session then starts faster, because Java does not
    optimize its code. Raises SparkMissingError or JavaMissingError if a requirement is missing.
    """
    _prepare_start()
    if light:
        os.environ.setdefault(_LAUNCHER, _LIGHT_JAVA)
        conf = _LIGHT_CONF | dict(conf or {})
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder
    master, wanted = _session_conf(master, conf)
    builder = builder.appName(app).master(master)
    for name, value in wanted.items():
        builder = builder.config(name, value)
    made: SparkSession = builder.getOrCreate()
    register(made)
    return made


def _prepare_start() -> None:
    need_spark()
    ensure_java()


def _session_conf(master: str | None, conf: Mapping[str, str] | None) -> tuple[str, dict[str, str]]:
    """Return the master URL of the session and its Spark settings."""
    wanted = dict(_CONF)
    master = master or "local[*]"
    if master.startswith("local"):
        os.environ.setdefault(_ADDRESS, _LOOPBACK)
        wanted["spark.sql.shuffle.partitions"] = str(max(2, os.cpu_count() or 2))
    return master, wanted | dict(conf or {})


def register(spark: SparkSession) -> None:
    """Register `format("streamq")` in a session and enable filter pushdown.

    Raises SparkMissingError if the session's workers run a different Python, which may lack the
    required packages.
    """
    need_spark()
    _check_python(spark)
    from streamqd.spark.source import StreamqSource

    spark.conf.set(_PUSHDOWN, "true")
    register_once(spark, StreamqSource)


def register_once(spark: SparkSession, source: type[DataSource]) -> None:
    """Register a source in a session unless it is already registered there."""
    names = _registered.setdefault(spark, set())
    if source.name() not in names:
        spark.dataSource.register(source)
        names.add(source.name())


def _check_python(spark: SparkSession) -> None:
    """Raise SparkMissingError if the workers of a local session use another Python.

    This happens if the session was created before this package, which selects the Python for the
    workers, was imported.
    """
    context = getattr(spark, "sparkContext", None)  # Spark Connect has no such attribute
    program = getattr(context, "pythonExec", "")
    if sys.prefix == sys.base_prefix or "local" not in getattr(context, "master", ""):
        return
    found = shutil.which(program)
    if found is not None and Path(found).parent != Path(sys.executable).parent:
        raise SparkMissingError(
            f"the workers of this session run {found}, which lacks the packages of this Python;"
            " import streamqd.spark before you create the session, or set"
            f" {_PYTHON}={sys.executable}"
        )


def read_topic(
    spark: SparkSession,
    topic: str,
    *,
    settings: config.Settings | None = None,
    **options: object,
) -> DataFrame:
    """Read the current content of a topic (or of its dead letters, `TOPIC:dlq`) as a DataFrame.

    Filters on the DataFrame are pushed down to the source. Pass the options of the data source as
    `options`. Connection options that you leave out are taken from `settings`.

    To include archived entries, set `archivePath` to the path or URL of the archive. An entry that
    is in both Redis and the archive is read only once. Set `tier` to `hot` to read only entries
    that are not archived, or to `cold` to read only archived ones. The default, `all`, reads both.
    For an archive in an object store, credentials and other client options are taken from the
    environment and from [archive.options] in `settings`.
    """
    register(spark)
    given = _read_options(settings, options)
    folder, tier = given.pop("archivePath", ""), given.pop("tier", "")
    if folder or tier:
        from streamqd.spark.pipelines import tables
        from streamqd.spark.pipelines.storage import Archive

        stored = None if settings is None else settings.archive.pairs
        archive = Archive(folder, options=stored) if folder else None
        return tables.read_tiers(spark, given, topic, archive, tier or "all")
    reader = spark.read.format("streamq").options(**given)
    return reader.option("subscribe", topic).option("pushdown", "true").load()


def stream_topic(
    spark: SparkSession,
    topic: str,
    *,
    settings: config.Settings | None = None,
    **options: object,
) -> DataFrame:
    """Read a topic (or its dead letters, `TOPIC:dlq`) as a stream.

    Pass the options of the data source as `options`. Connection options that you leave out are
    taken from `settings`. To let the stream start in an archive, set `archivePath` to its path or
    URL. For an archive in an object store, credentials and other client options are taken from the
    environment and from [archive.options] in `settings`.
    """
    register(spark)
    given = _read_options(settings, options)
    source = "streamq"
    if given.get("archivePath"):
        from streamqd.spark.location import location, source_name
        from streamqd.spark.source import archive_source

        folder = location(
            given["archivePath"], None if settings is None else settings.archive.pairs
        )
        source = source_name("streamq_archive", folder)
        register_once(spark, archive_source(folder, source))
    reader = spark.readStream.format(source).options(**given)
    return reader.option("subscribe", topic).load()


def _read_options(
    settings: config.Settings | None, options: Mapping[str, object]
) -> dict[str, str]:
    """Return the options of a read as strings, as Spark expects.

    The caller's options override `settings`.
    """
    given = of_settings(settings) if settings is not None else {}
    return given | {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
    }


def need_spark(*more: str) -> None:
    """Raise SparkMissingError unless pyspark, pyarrow and these packages are installed.

    The check does not import the packages.
    """
    need("pyspark", "pyarrow", *more)


def need(*packages: str) -> None:
    """Raise SparkMissingError unless these packages are installed.

    The check does not import them.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise SparkMissingError(
            f"{' and '.join(missing)} cannot be imported: {extras.hint('spark')}"
        )

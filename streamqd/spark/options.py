"""Parse the options of the data source once, and report all problems together.

Spark passes the options as strings, with lower-case names. Options that Spark's Kafka source also
has keep the same name and meaning here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from streamqd import config
from streamqd.config.endpoint import url_fault
from streamqd.config.setting import NAME, NAME_HINT
from streamqd.config.topology import EMBEDDED
from streamqd.config.values import parse_duration
from streamqd.model import TopicPartition
from streamqd.spark.form import OptionParser, OptionsError
from streamqd.spark.offsets import ARCHIVE, EARLIEST, LATEST, Bound, read_id

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DLQ = ":dlq"  # suffix for dead letters: `access:dlq` stands for the dead letters of `access`
URL_VARIABLE = "STREAMQ_URL"

_ARCHIVED = "read archived entries with `streamqd.spark.read_topic(spark, TOPIC, archivePath=…)`"
NO_ARCHIVE = f"streamq: archivePath applies only to streams; {_ARCHIVED}"
# Options of the Kafka source or of older versions that do not exist here, with advice on
# alternatives.
_ELSEWHERE = {
    "path": "use `subscribe` to read, or `topic` to write",
    "kafka.bootstrap.servers": "set the address with `url`",
    "tier": _ARCHIVED,
    "kafka.group.id": "use `group`, which only shows the position of the query",
    "groupidprefix": "use `group`, the full name under which the position of the query is shown",
    "fetchoffset.numretries": "use `retries`",
    "fetchoffset.retryintervalms": "use `retryIntervalMs`",
    "kafkaconsumer.polltimeoutms": "use `timeoutMs`",
    "roworder": "a batch is written once, so the order of its rows does not matter",
    "startingoffsetsbytimestampstrategy": (
        "every timestamp has a position, because entry ids are times"
    ),
}
# Maps each option to the corresponding setting of `config.Redis`.
_LOGIN = {
    "username": "username",
    "passwordFile": "password_file",
    "sentinelUsername": "sentinel_username",
    "sentinelPasswordFile": "sentinel_password_file",
    "caFile": "ca_file",
    "certFile": "cert_file",
    "keyFile": "key_file",
}


def option(name: str, default: Any, kind: Callable[..., Any], **how: Any) -> Any:
    """Return a dataclass field for an option. `kind` is a method of `OptionParser`."""
    read = partial(kind, name=name, default=default, **how)
    return field(default=default, metadata={name: read})


def _milliseconds(parser: OptionParser, name: str, default: float, low: int) -> float:
    return parser.integer(name, round(1000 * default), low=low) / 1000


@dataclass(frozen=True, slots=True)
class SparkConnection:
    """The address of Redis, the connection timeouts and retries, and the key prefixes."""

    redis: config.Redis
    timeout: float = option("timeoutMs", 10.0, _milliseconds, low=50)
    retries: int = option("retries", 3, OptionParser.integer, low=0, high=100)
    retry_interval: float = option("retryIntervalMs", 0.5, _milliseconds, low=0)
    control: str = option(
        "controlPrefix", config.KeyPrefixes().control, OptionParser.read, parse=str
    )
    streams: str = option(
        "streamPrefix", config.KeyPrefixes().streams, OptionParser.read, parse=str
    )


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The topics and partitions to read, the range within them, and the batch sizes.

    If `columns` is empty, all columns are read. `starting` and `ending` contain a bound for each
    partition, or are None if one bound applies to all partitions. That bound is then in
    `starting_default` or `ending_default`. If the options set no bound at all, both are None, and
    the default depends on the kind of read (batch or stream).

    If `group` is set, a stream publishes its position as the group `spark:GROUP`. If `hold` is also
    set, retention keeps the entries that the stream has not read yet.
    """

    connection: SparkConnection
    subscribe: tuple[str, ...]
    pattern: str
    assign: tuple[TopicPartition, ...]
    starting: Mapping[TopicPartition, Bound] | None
    starting_default: Bound | None
    ending: Mapping[TopicPartition, Bound] | None
    ending_default: Bound | None
    fail_on_data_loss: bool = option("failOnDataLoss", True, OptionParser.flag)
    max_per_trigger: int = option("maxOffsetsPerTrigger", 200_000, OptionParser.integer, low=1)
    min_per_trigger: int = option("minOffsetsPerTrigger", 0, OptionParser.integer, low=0)
    max_trigger_delay: float = option(
        "maxTriggerDelay", 900.0, OptionParser.read, parse=parse_duration
    )
    min_partitions: int = option("minPartitions", 0, OptionParser.integer, low=0)
    max_per_partition: int = option("maxRecordsPerPartition", 0, OptionParser.integer, low=0)
    columns: tuple[str, ...] = option("columns", (), OptionParser.names)
    headers: bool = option("includeHeaders", False, OptionParser.flag)
    fields: bool = option("includeFields", False, OptionParser.flag)
    fetch_size: int = option("fetchSize", 1000, OptionParser.integer, low=1, high=100_000)
    fetch_bytes: int = option("fetchBytes", 4 << 20, OptionParser.size)
    archive: str = option("archivePath", "", OptionParser.read, parse=str)
    pushdown: bool = option("pushdown", False, OptionParser.flag)
    progress_key: str = option("progressKey", "", OptionParser.read, parse=str)
    group: str = option("group", "", OptionParser.read, parse=str)
    hold: bool = option("holdRetention", False, OptionParser.flag)

    @property
    def dead(self) -> bool:
        """True if dead letters are read.

        It is enough to check one name, because a read cannot combine topics with dead letters.
        """
        names = self.subscribe or tuple(name for name, _ in self.assign) or (self.pattern,)
        return names[0].endswith(DLQ)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The topic that rows are written to, and the protection against duplicate rows.

    If `partitions` is not 0, a missing topic is created with this number of partitions. Otherwise
    the topic must exist. `max_staged_bytes` limits how many bytes of rows one task may stage in
    Redis.
    """

    connection: SparkConnection
    topic: str = option("topic", "", OptionParser.read, parse=str)
    partitions: int = option("partitions", 0, OptionParser.integer, low=0, high=4096)
    idempotent: bool = option("idempotent", True, OptionParser.flag)
    id_column: str = option("idColumn", "", OptionParser.read, parse=str)
    dedup_window: float = option("dedupWindow", 600.0, OptionParser.read, parse=parse_duration)
    batch_rows: int = option("batchRows", 1000, OptionParser.integer, low=1, high=1000)
    batch_bytes: int = option("batchBytes", 1 << 20, OptionParser.size)
    max_message_bytes: int = option("maxMessageBytes", 1 << 20, OptionParser.size)
    max_staged_bytes: int = option("maxStagedBytes", 256 << 20, OptionParser.size)
    commit_retention: float = option(
        "commitRetention", 604_800.0, OptionParser.read, parse=parse_duration
    )
    fail_on_data_loss: bool = option("failOnDataLoss", True, OptionParser.flag)


_EDGES = ("Offsets", "Timestamp", "OffsetsByTimestamp")
# All options of reads and writes. Both are accepted everywhere, because a table can be both read
# and written. A read ignores the options of writes, and a write ignores those of reads.
_NAMES = (
    *("url", *_LOGIN, "subscribe", "subscribePattern", "assign"),
    *(f"{edge}{kind}" for edge in ("starting", "ending") for kind in _EDGES),
    *(
        name
        for kind in (SparkConnection, ReadOptions, WriteOptions)
        for each in fields(kind)
        for name in each.metadata
    ),
)

_ONLY_BATCH = ("pushdown",)
_ONLY_STREAMS = (
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "group",
    "holdRetention",
)


def _read(parser: OptionParser, kind: type) -> dict[str, Any]:
    """Parse the fields of a dataclass that are options. Return their values by field name."""
    return {each.name: read(parser) for each in fields(kind) for read in each.metadata.values()}


def read_options(raw: Mapping[str, str], environ: Mapping[str, str]) -> ReadOptions:
    """Parse the options of a read. Raises OptionsError, which lists all problems."""
    parser = OptionParser(raw, _NAMES, _ELSEWHERE)
    connection = _connection(parser, environ)
    subscribe, pattern, assign = _subscription(parser)
    bounds = (*_bounds(parser, "starting", assign), *_bounds(parser, "ending", assign))
    options = ReadOptions(
        connection, subscribe, pattern, assign, *bounds, **_read(parser, ReadOptions)
    )
    options = replace(
        options,
        headers=options.headers or "headers" in options.columns,
        fields=options.fields or "fields" in options.columns,
    )
    _check_group(parser, options)
    _check_archive(parser, options)
    if options.min_per_trigger > options.max_per_trigger:
        parser.problems.append("minOffsetsPerTrigger must not exceed maxOffsetsPerTrigger")
    parser.finish()
    return options


def refuse_ignored(given: Mapping[str, str], *, stream: bool) -> None:
    """Raise OptionsError for options that would have no effect on this batch read or stream.

    Pass only the options that the user set on this read. A table's options are not checked, because
    a table can be used for both kinds of read, so it may have options for both.
    """
    ignored, other = (_ONLY_BATCH, "batch reads") if stream else (_ONLY_STREAMS, "streams")
    own = {name.lower() for name, value in given.items() if str(value).strip().lower() != "false"}
    found = [name for name in ignored if name.lower() in own]
    if found:
        raise OptionsError([f"{name} applies only to {other}; remove it" for name in found])


def write_options(raw: Mapping[str, str], environ: Mapping[str, str]) -> WriteOptions:
    """Parse the options of a write. Raises OptionsError, which lists all problems."""
    parser = OptionParser(raw, _NAMES, _ELSEWHERE)
    options = WriteOptions(_connection(parser, environ), **_read(parser, WriteOptions))
    if options.topic and not NAME.fullmatch(options.topic):
        parser.problems.append(f"topic: {options.topic!r} is not a valid topic name ({NAME_HINT})")
    if options.dedup_window < 0.001:
        parser.problems.append('dedupWindow must be a duration of at least 1 ms, such as "10m"')
    if options.commit_retention < 3600:
        parser.problems.append('commitRetention must be at least 1 h, such as "7d"')
    parser.finish()
    return options


def of_settings(settings: config.Settings) -> dict[str, str]:
    """Return the data source's connection options that correspond to a configuration."""
    redis = config.resolve_url(settings).redis
    found = {"url": redis.url} | {name: getattr(redis, own) for name, own in _LOGIN.items()}
    found |= {"controlPrefix": settings.keys.control, "streamPrefix": settings.keys.streams}
    return {name: str(value) for name, value in found.items() if value}


# --- parts ----------------------------------------------------------------------------------------


def _connection(parser: OptionParser, environ: Mapping[str, str]) -> SparkConnection:
    url = parser.text("url") or environ.get(URL_VARIABLE, "")
    if not url and (file := config.find(environ)):
        parser.default(of_settings(config.load(file, environ=environ)))
        url = parser.text("url")
    if not url:
        parser.problems.append(
            f"url is missing; set the option, set {URL_VARIABLE}, or run where a streamq.toml is"
        )
    elif url == EMBEDDED:
        parser.problems.append(
            'url: "embedded:" is not supported here; use the socket of the'
            " embedded server, unix:///PATH"
        )
    elif fault := url_fault(url):
        parser.problems.append(f"url: {fault}")
    login = {
        own: parser.read(name, Path if name.endswith("File") else str, None)
        for name, own in _LOGIN.items()
    }
    return SparkConnection(config.Redis(url=url, **login), **_read(parser, SparkConnection))


def _check_group(parser: OptionParser, options: ReadOptions) -> None:
    if options.group and not NAME.fullmatch(options.group):
        parser.problems.append(f"group: {options.group!r} is not a valid group name ({NAME_HINT})")
    elif options.group and options.dead:
        parser.problems.append("group: dead letters have no groups")
    elif options.hold and not options.group:
        parser.problems.append(
            "holdRetention requires group, the name of the position of the query"
        )


def _check_archive(parser: OptionParser, options: ReadOptions) -> None:
    starts = [*(options.starting or {}).values(), options.starting_default]
    ends = [*(options.ending or {}).values(), options.ending_default]
    if ARCHIVE in ends:
        parser.problems.append("endingOffsets cannot be archive, which is a start")
    if ARCHIVE in starts and not options.archive:
        parser.problems.append(
            "startingOffsets archive requires archivePath, the directory or URL of the archive"
        )
    if not options.archive:
        return
    if options.dead:
        parser.problems.append("archivePath: a stream of dead letters reads only Redis")
    if options.fields and not options.headers:
        parser.problems.append(
            "includeFields with archivePath requires includeHeaders, because archives have both"
        )
    if options.max_per_partition:
        parser.problems.append("maxRecordsPerPartition cannot be used with archivePath")


def _subscription(parser: OptionParser) -> tuple[tuple[str, ...], str, tuple[TopicPartition, ...]]:
    given = [
        name for name in ("subscribe", "subscribePattern", "assign") if parser.text(name).strip()
    ] or ["topic"]
    text = parser.text(given[0]).strip()
    if len(given) != 1 or not text:
        parser.problems.append(
            "set exactly one of subscribe, subscribePattern and assign, or only topic"
        )
        return (), "", ()
    [kind] = given
    if kind == "subscribePattern":
        try:
            re.compile(text.removesuffix(DLQ))
        except re.error as error:
            parser.problems.append(f"subscribePattern is not a regular expression: {error}")
        return (), text, ()
    places = sorted(set(parser.partitions(kind, text))) if kind == "assign" else []
    listed = [] if kind == "assign" else [part.strip() for part in text.split(",")]
    names = [name for name, _ in places] or list(dict.fromkeys(filter(None, listed)))
    bad = [name for name in names if not NAME.fullmatch(name.removesuffix(DLQ))]
    parser.problems += [f"{kind}: {name!r} is not a valid topic name" for name in bad]
    if not names:
        parser.problems.append(f"{kind} contains no topic")
    if len({name.endswith(DLQ) for name in names}) > 1:
        parser.problems.append(
            f"{kind}: topics and DLQs have different columns and cannot be read together"
        )
    return (() if places else tuple(names)), "", tuple(places)


def _bounds(
    parser: OptionParser, edge: str, assign: tuple[TopicPartition, ...]
) -> tuple[Mapping[TopicPartition, Bound] | None, Bound | None]:
    """Return a bound for each partition, or one bound for all partitions.

    As in the Kafka source, if a single timestamp for all partitions is set, the other options for
    this edge are ignored.
    """
    one_time = f"{edge}Timestamp"
    by_time = f"{edge}OffsetsByTimestamp"
    by_id = f"{edge}Offsets"
    if parser.text(one_time):
        return None, parser.read(one_time, _time_bound, None)
    if text := parser.text(by_time):
        return parser.places(by_time, text, assign, _time_bound), None
    text = parser.text(by_id).strip()
    if text.startswith("{"):
        return parser.places(by_id, text, assign, _id_bound), None
    if not text:
        return None, None
    try:
        return None, _id_bound(text)
    except ValueError as error:
        parser.problems.append(f"{by_id}: {error}")
        return None, None


def _id_bound(value: Any) -> Bound:
    if value in ("earliest", -2):
        return EARLIEST
    if value in ("latest", -1):
        return LATEST
    if value == "archive":
        return ARCHIVE
    if isinstance(value, str) and value.startswith("group:") and len(value) > len("group:"):
        return Bound("group", value.removeprefix("group:"))
    if isinstance(value, str):
        return Bound("id", read_id(value))
    raise ValueError(
        f"{value!r} is not a valid offset; use an entry ID, archive, earliest, latest or group:NAME"
    )


def _time_bound(value: Any) -> Bound:
    """Parse Unix milliseconds or an ISO 8601 time, and round it up to a whole millisecond.

    A time without a time zone is in UTC. Raises ValueError for any other value.
    """
    text = str(value)
    with contextlib.suppress(ValueError, OverflowError):
        if re.fullmatch("[0-9]{1,19}", text):
            return Bound("time", int(text))
        found = datetime.fromisoformat(text)
        found = found if found.tzinfo else found.replace(tzinfo=UTC)
        if found >= _EPOCH:
            return Bound("time", -((_EPOCH - found) // timedelta(milliseconds=1)))
    raise ValueError(
        f"{value!r} is not a time in unix milliseconds, or in UTC such as 2026-11-21T08:30"
    )

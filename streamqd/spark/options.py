"""The options of the data source: read once, checked all at once. Pure.

Spark hands them over as texts with their names in lower case. Names and meanings are those of
Spark's Kafka source wherever it has the same thing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamqd import config
from streamqd.config.endpoint import EMBEDDED, url_fault
from streamqd.config.setting import NAME, NAME_HINT
from streamqd.config.values import parse_duration
from streamqd.spark.form import Form
from streamqd.spark.offsets import EARLIEST, LATEST, Bound, Place, read_id

DLQ = ":dlq"  # `access:dlq` is read as the dead letters of `access`
URL_VARIABLE = "STREAMQ_URL"

_CONNECTION = (
    *("url", "username", "passwordFile", "caFile", "certFile", "keyFile", "timeoutMs", "retries"),
    *("retryIntervalMs", "controlPrefix", "streamPrefix"),
    *("sentinelUsername", "sentinelPasswordFile"),
)
_READ = (
    *("subscribe", "subscribePattern", "assign", "startingOffsets", "endingOffsets"),
    *("startingTimestamp", "endingTimestamp", "startingOffsetsByTimestamp"),
    *("endingOffsetsByTimestamp", "failOnDataLoss", "maxOffsetsPerTrigger", "minOffsetsPerTrigger"),
    *("maxTriggerDelay", "minPartitions", "maxRecordsPerPartition", "includeHeaders"),
    *("includeFields", "fetchSize", "fetchBytes", "pushdown", "progressKey", "tier", "archivePath"),
)
_WRITE = (
    *("topic", "partitions", "idempotent", "idColumn", "dedupWindow", "batchRows"),
    *("batchBytes", "maxMessageBytes", "maxStagedBytes", "commitRetention"),
)
# Where somebody coming from Kafka, or from an older version, looks in vain; what to do instead.
_ELSEWHERE = {
    "path": "name topics with `subscribe`, or the target with `topic`",
    "kafka.bootstrap.servers": "the address is `url`",
    "kafka.group.id": "reading takes no consumer group; begin at one with `group:NAME`",
    "groupidprefix": "reading takes no consumer group; begin at one with `group:NAME`",
    "fetchoffset.numretries": "it is called `retries`",
    "fetchoffset.retryintervalms": "it is called `retryIntervalMs`",
    "kafkaconsumer.polltimeoutms": "it is called `timeoutMs`",
    "roworder": "a batch is written once in whatever order its rows come: leave it away",
    "startingoffsetsbytimestampstrategy": "an id is a time: every timestamp has its place",
}


@dataclass(frozen=True, slots=True)
class SparkConnection:
    """Where Redis is, how long to wait for it, and how keys are called there."""

    redis: config.Redis
    timeout: float = 10.0
    retries: int = 3
    retry_interval: float = 0.5
    control: str = "streaming:mq"
    streams: str = "stream:topic"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What is read, from where to where, and in which portions.

    `starting` and `ending` hold the bounds of single partitions; `starting_default` and
    `ending_default` those of all others, None when the partitions named are all that is meant.
    """

    connection: SparkConnection
    subscribe: tuple[str, ...] = ()
    pattern: str = ""
    assign: tuple[Place, ...] = ()
    starting: Mapping[Place, Bound] | None = None
    starting_default: Bound | None = None
    ending: Mapping[Place, Bound] | None = None
    ending_default: Bound | None = None
    fail_on_data_loss: bool = True
    max_per_trigger: int = 200_000
    min_per_trigger: int = 0
    max_trigger_delay: float = 900.0
    min_partitions: int = 0
    max_per_partition: int = 0
    headers: bool = False
    fields: bool = False
    fetch_size: int = 1000
    fetch_bytes: int = 4 << 20
    pushdown: bool = False
    progress_key: str = ""
    tier: str = "hot"  # hot | cold | all
    archive: str = ""  # folder; with it, hot is what lies behind what is archived

    @property
    def dead(self) -> bool:
        """Whether dead letters are read: all that is subscribed are DLQs, or nothing is."""
        names = self.subscribe or tuple(name for name, _ in self.assign) or (self.pattern,)
        return names[0].endswith(DLQ)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Where rows go, and what keeps a repeated row from being a second message."""

    connection: SparkConnection
    topic: str = ""
    partitions: int = 0  # create the topic with so many; 0 = it must exist
    idempotent: bool = True
    id_column: str = ""
    dedup_window: float = 600.0
    batch_rows: int = 1000
    batch_bytes: int = 1 << 20
    max_message_bytes: int = 1 << 20
    max_staged_bytes: int = 256 << 20  # by one task
    commit_retention: float = 604_800.0


def read_options(raw: Mapping[str, str], environ: Mapping[str, str]) -> ReadOptions:
    """The options of a read. Raises OptionsError."""
    form = Form(raw, (*_CONNECTION, *_READ), _WRITE, _ELSEWHERE)
    archive = form.text("archivePath")
    tier = form.text("tier").strip().lower() or ("all" if archive else "hot")
    connection = _connection(form, environ, needed=tier != "cold")
    subscribe, pattern, assign = _subscription(form)
    starting, starting_default = _bounds(form, "starting", assign)
    ending, ending_default = _bounds(form, "ending", assign)
    options = ReadOptions(
        connection=connection,
        subscribe=subscribe,
        pattern=pattern,
        assign=assign,
        starting=starting,
        starting_default=starting_default,
        ending=ending,
        ending_default=ending_default,
        fail_on_data_loss=form.flag("failOnDataLoss", True),
        max_per_trigger=form.whole("maxOffsetsPerTrigger", 200_000, low=1),
        min_per_trigger=form.whole("minOffsetsPerTrigger", 0, low=0),
        max_trigger_delay=form.read("maxTriggerDelay", parse_duration, 900.0),
        min_partitions=form.whole("minPartitions", 0, low=0),
        max_per_partition=form.whole("maxRecordsPerPartition", 0, low=0),
        headers=form.flag("includeHeaders", False),
        fields=form.flag("includeFields", False),
        fetch_size=form.whole("fetchSize", 1000, low=1, high=100_000),
        fetch_bytes=form.size("fetchBytes", 4 << 20),
        pushdown=form.flag("pushdown", False),
        progress_key=form.text("progressKey"),
        tier=tier,
        archive=archive,
    )
    _check_tier(form, options)
    if options.min_per_trigger > options.max_per_trigger:
        form.problems.append("minOffsetsPerTrigger must not exceed maxOffsetsPerTrigger")
    form.finish()
    return options


def write_options(raw: Mapping[str, str], environ: Mapping[str, str]) -> WriteOptions:
    """The options of a write. Raises OptionsError."""
    form = Form(raw, (*_CONNECTION, *_WRITE), _READ, _ELSEWHERE)
    options = WriteOptions(
        connection=_connection(form, environ),
        topic=form.text("topic"),
        partitions=form.whole("partitions", 0, low=0, high=4096),
        idempotent=form.flag("idempotent", True),
        id_column=form.text("idColumn"),
        dedup_window=form.read("dedupWindow", parse_duration, 600.0),
        batch_rows=form.whole("batchRows", 1000, low=1, high=1000),
        batch_bytes=form.size("batchBytes", 1 << 20),
        max_message_bytes=form.size("maxMessageBytes", 1 << 20),
        max_staged_bytes=form.size("maxStagedBytes", 256 << 20),
        commit_retention=form.read("commitRetention", parse_duration, 604_800.0),
    )
    if options.topic and not NAME.fullmatch(options.topic):
        form.problems.append(f"topic: {options.topic!r} is not the name of a topic: {NAME_HINT}")
    if options.dedup_window < 0.001:
        form.problems.append('dedupWindow must be a time, as "10m"')
    if options.commit_retention < 60:
        form.problems.append('commitRetention must be a minute or more, as "7d"')
    form.finish()
    return options


def of_settings(settings: config.Settings) -> dict[str, str]:
    """The options that connect as a configuration does."""
    redis = config.resolved(settings).redis
    found = {
        "url": redis.url,
        "username": redis.username,
        "passwordFile": redis.password_file,
        "sentinelUsername": redis.sentinel_username,
        "sentinelPasswordFile": redis.sentinel_password_file,
        "caFile": redis.ca_file,
        "certFile": redis.cert_file,
        "keyFile": redis.key_file,
        "controlPrefix": settings.keys.control,
        "streamPrefix": settings.keys.streams,
    }
    return {name: str(value) for name, value in found.items() if value}


# --- parts ----------------------------------------------------------------------------------------


def _connection(form: Form, environ: Mapping[str, str], *, needed: bool = True) -> SparkConnection:
    url = form.text("url") or environ.get(URL_VARIABLE, "")
    if not url and not needed:
        pass
    elif not url:
        form.problems.append(f"url is missing: give it, or set {URL_VARIABLE}")
    elif url == EMBEDDED:
        form.problems.append("url: the embedded server is named by its socket, unix:///PATH")
    elif fault := url_fault(url):
        form.problems.append(f"url: {fault}")
    redis = config.Redis(
        url=url,
        username=form.text("username") or None,
        password_file=form.read("passwordFile", Path, None),
        sentinel_username=form.text("sentinelUsername") or None,
        sentinel_password_file=form.read("sentinelPasswordFile", Path, None),
        ca_file=form.read("caFile", Path, None),
        cert_file=form.read("certFile", Path, None),
        key_file=form.read("keyFile", Path, None),
    )
    return SparkConnection(
        redis=redis,
        timeout=form.whole("timeoutMs", 10_000, low=50) / 1000,
        retries=form.whole("retries", 3, low=0, high=100),
        retry_interval=form.whole("retryIntervalMs", 500, low=0) / 1000,
        control=form.text("controlPrefix") or config.KeyPrefixes().control,
        streams=form.text("streamPrefix") or config.KeyPrefixes().streams,
    )


def _check_tier(form: Form, options: ReadOptions) -> None:
    if options.tier not in ("hot", "cold", "all"):
        form.problems.append(f"tier must be hot, cold or all, not {options.tier!r}")
    elif options.tier != "hot" and not options.archive:
        form.problems.append(f"tier={options.tier} needs the folder of the archive: archivePath")
    elif options.archive and options.dead:
        form.problems.append("dead letters are not archived: leave tier and archivePath away")
    elif options.archive and options.fields and not options.headers:
        form.problems.append("with archivePath, includeFields needs includeHeaders")


def _subscription(form: Form) -> tuple[tuple[str, ...], str, tuple[Place, ...]]:
    given = [
        name for name in ("subscribe", "subscribePattern", "assign") if form.text(name).strip()
    ]
    if len(given) != 1:
        form.problems.append("give exactly one of subscribe, subscribePattern and assign")
        return (), "", ()
    text = form.text(given[0]).strip()
    names: list[str] = []
    places: list[Place] = []
    if given[0] == "subscribePattern":
        try:
            re.compile(text.removesuffix(DLQ))
        except re.error as error:
            form.problems.append(f"subscribePattern is not a regular expression: {error}")
        return (), text, ()
    if given[0] == "subscribe":
        names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    else:
        places = sorted(set(form.partitions("assign", text)))
        names = [name for name, _ in places]
    bad = [name for name in names if not NAME.fullmatch(name.removesuffix(DLQ))]
    form.problems += [f"{given[0]}: {name!r} is not the name of a topic" for name in bad]
    if not names:
        form.problems.append(f"{given[0]} names no topic")
    if len({name.endswith(DLQ) for name in names}) > 1:
        form.problems.append(f"{given[0]}: topics and DLQs have different columns, read one kind")
    return (tuple(names) if given[0] == "subscribe" else ()), "", tuple(places)


def _bounds(
    form: Form, edge: str, assign: tuple[Place, ...]
) -> tuple[Mapping[Place, Bound] | None, Bound | None]:
    """The start or the end. As with Kafka, one timestamp for all goes before all others."""
    one_time = f"{edge}Timestamp"
    by_time = f"{edge}OffsetsByTimestamp"
    by_id = f"{edge}Offsets"
    if form.text(one_time):
        return None, Bound("time", form.whole(one_time, 0, low=0))
    if text := form.text(by_time):
        return form.places(by_time, text, assign, _time_bound), None
    text = form.text(by_id).strip()
    if text.startswith("{"):
        return form.places(by_id, text, assign, _id_bound), None
    if not text:
        return None, None
    try:
        return None, _id_bound(text)
    except ValueError as error:
        form.problems.append(f"{by_id}: {error}")
        return None, None


def _id_bound(value: Any) -> Bound:
    if value in ("earliest", -2):
        return EARLIEST
    if value in ("latest", -1):
        return LATEST
    if isinstance(value, str) and value.startswith("group:") and len(value) > len("group:"):
        return Bound("group", value.removeprefix("group:"))
    if isinstance(value, str):
        return Bound("id", read_id(value))
    raise ValueError(f"{value!r} is neither an entry id, earliest, latest nor group:NAME")


def _time_bound(value: Any) -> Bound:
    if isinstance(value, int) and value >= 0:
        return Bound("time", value)
    raise ValueError(f"{value!r} is not a time in unix milliseconds")

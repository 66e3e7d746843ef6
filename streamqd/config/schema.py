"""The sections of the configuration and their settings, as frozen dataclasses.

The loader, etc/streamq.toml, the JSON schema and `config show` are all based on these fields, so
each setting is described only once. Durations are in seconds, and sizes are in bytes. This module
reads no configuration.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field, fields
from pathlib import Path

from streamqd.config.archive_store import ArchiveStore
from streamqd.config.consumers import Consumer
from streamqd.config.outboxes import OutboxSettings
from streamqd.config.pipelines import Pipeline
from streamqd.config.schedules import Schedule
from streamqd.config.secrets import mask_url
from streamqd.config.setting import DOTTED_NAME, NAMED, Bytes, Seconds, Shape, describe, setting
from streamqd.config.topics import Topic
from streamqd.model import Backoff

_PREFIX = Shape(re.compile(r"[A-Za-z0-9._:-]{1,64}"), "use 1 to 64 of A-Z a-z 0-9 . _ : -")
_MODULE = Shape(
    re.compile(DOTTED_NAME),
    'write the name of a Python module, such as "weblog" or "shop.handlers"',
)
_HOST = Shape(
    re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?"),
    'write names of hosts without a port, such as "metrics.example.com"',
)
_PATH_PREFIX = Shape(
    re.compile(r"/(?:[A-Za-z0-9._~-]+/)*"), 'write a path such as "/q/", with a slash at both ends'
)
_HEADER = Shape(
    re.compile(r"[A-Za-z][A-Za-z0-9-]{0,63}"),
    'write the name of a header, such as "X-Forwarded-User"',
)
_PEER = Shape(
    re.compile(r"[0-9A-Fa-f.:]{2,39}(/[0-9]{1,3})?"),
    'write addresses or networks, such as "10.0.0.5" or "10.0.0.0/24"',
)
_MASK = Shape(
    re.compile(r"(/|header:).+"),
    'write JSON pointers such as "/card/number", or "header:" and a name',
)
_TRACE_URL = Shape(
    re.compile(r"https?://[^\s/?#{}\"'<>\\@]+[/?#][^\s{}\"'<>\\]*\{trace_id\}[^\s{}\"'<>\\]*"),
    'write a URL such as "https://tempo.example/trace/{trace_id}", with http:// or https://',
)
_ARCHIVE = Shape(
    re.compile(r"(/|[a-z][a-z0-9]*://).+"),
    'write an absolute path, or a URL such as "s3://bucket/archive"',
)
_BODIES = ("show", "masked", "hidden")
_BODY_VALUES = (
    "show: unchanged. masked: without keys, error texts, and the parts in `masks`. A payload that"
    " is neither JSON nor MessagePack is not shown either. hidden: none of them are shown."
)
_CRASH_BACKOFF = Backoff(kind="exponential", base=0.5, max=60.0, jitter="full")


@dataclass(frozen=True, slots=True)
class Redis:
    """The connection to Redis."""

    url: str = setting(
        "embedded:",
        'The address of Redis. With "embedded:", the daemon starts its own server in state_dir.'
        ' Other forms are "redis://host:6379/0", "rediss://host:6379/0" (TLS),'
        ' "unix:///path/redis.sock?db=0", "redis+sentinel://host:26379,host:26379/mymaster/0" and'
        ' "redis+cluster://host:7000,host:7001" (one or more nodes). To use TLS with Sentinel or'
        ' Cluster, write "rediss+" instead of "redis+". If the URL contains a password, this file'
        " must be readable only by its owner.",
        secret=True,
    )
    username: str | None = setting(
        None, "The ACL user for the login to Redis. Empty means the default user."
    )
    password_file: Path | None = setting(
        None,
        "The file that contains the password. It must be readable only by its owner. If this"
        ' setting is empty, the systemd credential "redis-password" is used, if it exists.',
    )
    sentinel_username: str | None = setting(
        None, "The ACL user for the login to the Sentinels. Empty means the default user."
    )
    sentinel_password_file: Path | None = setting(
        None,
        "The file that contains the password for the Sentinels. It must be readable only by its"
        ' owner. If this setting is empty, the systemd credential "redis-sentinel-password" is'
        " used, if it exists. Otherwise, no password is sent.",
    )
    ca_file: Path | None = setting(
        None,
        "The PEM file with CA certificates that are trusted in addition to those of the operating"
        " system.",
    )
    cert_file: Path | None = setting(
        None, "The PEM file with the client certificate. Requires key_file."
    )
    key_file: Path | None = setting(
        None, "The PEM file with the private key of the client certificate. Requires cert_file."
    )
    allow_eviction: bool = setting(
        False,
        "If true, the daemon starts even if the server may evict keys (any `maxmemory-policy`"
        " except `noeviction`). If the server evicts a stream, the messages in it are lost.",
    )
    allow_insecure: bool = setting(
        False,
        "If true, connections to other hosts are allowed without TLS. Anyone on the network path"
        " can then read and change all data, and read the password.",
    )
    connect_timeout: Seconds = setting(
        2.0, "The maximum time for one attempt to connect to Redis.", min=0.05, max=60
    )

    def __repr__(self) -> str:
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        shown["url"] = mask_url(self.url)
        return f"Redis({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


@dataclass(frozen=True, slots=True)
class Daemon:
    """This instance: its name, its processes and its share of the partitions."""

    instance: str = field(
        default_factory=socket.gethostname,
        metadata=describe(
            "The name of this instance, which must be unique in the fleet. Empty means the host"
            " name.",
            empty_is_default=True,
            shape=NAMED,
        ),
    )
    fleet: str = setting(
        "default",
        "The name of the fleet. The instances of a fleet share the partitions of their consumers.",
        shape=NAMED,
    )
    state_dir: Path = setting(
        Path("./var"),
        "The directory for the lock and for the data of the embedded server. Every relative path"
        " in this file, including this one, is relative to the directory of this file.",
    )
    handlers: tuple[str, ...] = setting(
        (),
        "The Python modules that contain @handler functions. They can be in the same directory as"
        " this file.",
        shape=_MODULE,
    )
    preload: tuple[str, ...] = setting(
        (),
        "The libraries that are imported before the workers are forked, so that all workers share"
        " the memory of these libraries. Do not list handler modules. A change takes effect after"
        " a restart.",
        shape=_MODULE,
    )
    lease_ttl: Seconds = setting(
        15.0,
        "The time after which the lease of a partition expires, unless its owner renews it. The"
        " owner renews it every `lease_ttl / 5`. After a host is lost, other instances own its"
        " partitions within `1.6 * lease_ttl`.",
        min=1,
        max=3_600,
    )
    drain_timeout: Seconds = setting(
        30.0,
        "The maximum time for which a shutdown waits for running messages. Messages that have not"
        " finished by then run again later. The stop timeout of a container must be at least 17 s"
        " longer.",
        min=0,
        max=86_400,
    )
    boot_timeout: Seconds = setting(
        60.0,
        "The maximum time that a worker may take to import its handler and become ready.",
        min=1,
        max=3_600,
    )
    event_loop: str = setting(
        "asyncio",
        "The event loop on which async handlers run. asyncio: the standard loop, or the loop of"
        " the policy that a handler module sets. uvloop: a faster loop, which requires the uvloop"
        " extra and rounds timers up to whole milliseconds.",
        choices=("asyncio", "uvloop"),
    )
    loop_blocked_after: Seconds = setting(
        1.0,
        "The time after which a coroutine that blocks its worker's event loop is reported in the"
        " log, as `loop.blocked`. With 0, it is never reported.",
        min=0,
        max=3_600,
    )
    weight: int = setting(
        1,
        "The share of the partitions that this instance takes, relative to other instances. For"
        " example, an instance with weight 2 takes twice as many partitions as one with weight 1.",
        min=1,
        max=1_000,
    )
    max_partitions: int = setting(
        0,
        "The maximum number of assignments that this instance owns, each of which has one worker"
        " process. 0 means no limit.",
        min=0,
        max=4_096,
    )
    rebalance_delay: Seconds = setting(
        3.0,
        "The time for which a change in the fleet must last before partitions move between live"
        " instances.",
        min=0,
        max=3_600,
    )
    rebalance_hold: Seconds = setting(
        10.0, "The minimum time between two moves of the same partition.", min=0, max=86_400
    )
    rebalance_moves: int = setting(
        4,
        "The maximum number of partitions that this instance hands over at the same time.",
        min=1,
        max=4_096,
    )
    crash_backoff: Backoff = setting(
        _CRASH_BACKOFF, "The delay before a crashed worker is restarted."
    )
    crash_loop: int = setting(
        5,
        "The number of consecutive crashes after which this instance releases the partition. It"
        " does not take the partition back until crash_cooldown has passed. A crash while a"
        " message runs counts only as `1 / (max_crashes + 1)`, so one bad message alone does not"
        " cause the release.",
        min=1,
        max=1_000,
    )
    crash_cooldown: Seconds = setting(
        60.0,
        "The time after which this instance may take back a partition that it released because of"
        " crash_loop.",
        min=1,
        max=86_400,
    )
    history: Seconds = setting(
        86_400.0,
        "The time for which Redis keeps the statistics of each minute, which the console shows as"
        " charts and `streamqd pipeline archive` stores. Per minute, they need about 80 bytes for"
        " each instance, topic and group, and 110 bytes for each partition with messages. With 0,"
        " no statistics are written.",
        min=0,
        max=7 * 86_400,
    )
    max_message_bytes: Bytes = setting(
        1 << 20,
        "The maximum size of a payload. The key and the headers of a message together have the"
        " same limit. Producers reject larger messages, and workers dead-letter them.",
        min=1,
        max=512 << 20,
    )


@dataclass(frozen=True, slots=True)
class Http:
    """The HTTP endpoints for metrics, health checks and the status page. They are read-only."""

    bind: str = setting(
        "127.0.0.1:9464",
        'The address of the endpoints, such as "127.0.0.1:9464" or "unix:./var/http.sock". To'
        ' disable the endpoints, set it to `""`. An address that other hosts can reach requires'
        " token_file or allow_public.",
    )
    token_file: Path | None = setting(
        None,
        "The file that contains the token, readable only by its owner. All endpoints except the"
        " health checks then require this token (`Authorization: Bearer TOKEN`). If this setting"
        ' is empty, the systemd credential "http-token" is used, if it exists. Otherwise, no token'
        " is required.",
    )
    allow_public: bool = setting(
        False,
        "If true, all endpoints answer any client that can reach the address, without a token.",
    )
    hosts: tuple[str, ...] = setting(
        (),
        "The host names that clients may use in addition to IP addresses and localhost, such as"
        " the name of a proxy. If other hosts can reach the address, every name is accepted.",
        shape=_HOST,
    )

    @property
    def address(self) -> tuple[str, int] | Path | None:
        """The host and the port, or the path of a Unix socket, or None if HTTP is disabled."""
        if not self.bind:
            return None
        if self.bind.startswith("unix:"):
            return Path(self.bind.removeprefix("unix:"))
        host, _, port = self.bind.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True, slots=True)
class Console:
    """The web console, which is a separate process: `streamqd console`."""

    bind: str = setting(
        "127.0.0.1:9466",
        'The address of the console, as "HOST:PORT". Port 0 selects a free port. An address that'
        " other hosts can reach requires users_file or proxy_header.",
    )
    prefix: str = setting(
        "/", "The path under which a proxy serves the console.", shape=_PATH_PREFIX
    )
    read_only: bool = setting(
        False, "If true, every user is treated as a viewer, so the console changes nothing."
    )
    users_file: Path | None = setting(
        None,
        "The file with the users who can log in. `streamqd console --add-user` writes it, and it"
        " must be readable only by its owner. If this setting is empty, the console prints a link"
        " with a one-time token that logs in an admin.",
    )
    proxy_header: str | None = setting(
        None,
        "The header in which an authenticating proxy sends the name of the user.",
        shape=_HEADER,
    )
    proxy_from: tuple[str, ...] = setting(
        (),
        "The addresses or networks of the proxies whose proxy_header is accepted.",
        shape=_PEER,
    )
    proxy_role: str = setting(
        "viewer",
        "The role of users who are named in proxy_header but not in users_file.",
        choices=("viewer", "operator", "admin"),
    )
    viewer_bodies: str = setting(
        "show",
        f"How viewers see the keys, headers and payloads of messages. {_BODY_VALUES}",
        choices=_BODIES,
    )
    operator_bodies: str = setting(
        "show",
        f"How operators see the keys, headers and payloads of messages. {_BODY_VALUES}",
        choices=_BODIES,
    )
    admin_bodies: str = setting(
        "show",
        f"How admins see the keys, headers and payloads of messages. {_BODY_VALUES}",
        choices=_BODIES,
    )
    masks: tuple[str, ...] = setting(
        (),
        'The parts of messages that users with "masked" cannot see: JSON pointers into the'
        ' payload, such as "/card/number", and headers, such as "header:authorization".',
        shape=_MASK,
    )
    trace_url: str | None = setting(
        None,
        "The URL of a trace in your tracing backend, such as"
        ' "https://tempo.example/trace/{trace_id}". The pages of messages and dead letters link to'
        " it.",
        shape=_TRACE_URL,
    )
    archive: str | None = setting(
        None,
        "The absolute path or the URL of the archive that `pipeline archive` writes. Message pages"
        " then also find archived messages. Requires the spark extra.",
        shape=_ARCHIVE,
    )

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port on which the console listens."""
        host, _, port = self.bind.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True, slots=True)
class Log:
    """The format and the level of the log, which the daemon writes to standard error."""

    format: str = setting(
        "auto",
        "The format of the log. text: readable lines. json: one JSON object per line. auto: text"
        " on a terminal, and JSON otherwise.",
        choices=("auto", "text", "json"),
    )
    level: str = setting(
        "info",
        "The lowest level of events that are logged.",
        choices=("debug", "info", "warning", "error"),
    )


@dataclass(frozen=True, slots=True)
class Telemetry:
    """OpenTelemetry traces, and reports to Sentry."""

    traces: bool = setting(
        False,
        "If true, a span is created for each run, and for each send of a producer that reads this"
        " file. This requires the otel extra. The standard OTEL_* variables, such as"
        " OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_SERVICE_NAME, configure the rest.",
    )
    producer_span: str = setting(
        "link",
        "How the span of a run is related to the span of its producer. Batches always use links."
        " link: the run starts its own trace, with a link to the producer's span. parent: the run"
        " continues the producer's trace.",
        choices=("link", "parent"),
    )
    sentry: bool = setting(
        False,
        "If true, failed runs are reported to Sentry, each cause at most once a minute. This"
        " requires the sentry extra. If SENTRY_TRACES_SAMPLE_RATE is set, runs are also recorded"
        " as transactions. The variables SENTRY_DSN, SENTRY_ENVIRONMENT and SENTRY_RELEASE"
        " configure the rest.",
    )


@dataclass(frozen=True, slots=True)
class KeyPrefixes:
    """The prefixes of the keys in Redis. A fleet and its producers must use the same prefixes."""

    control: str = setting(
        "streaming:mq",
        "The prefix of the keys for leases, members, topics and other bookkeeping.",
        shape=_PREFIX,
    )
    streams: str = setting("stream:topic", "The prefix of the keys of streams.", shape=_PREFIX)


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole configuration.

    `source` is the file from which it was read, and relative paths in it are relative to
    `base_dir`.
    """

    redis: Redis = field(default_factory=Redis)
    daemon: Daemon = field(default_factory=Daemon)
    http: Http = field(default_factory=Http)
    console: Console = field(default_factory=Console)
    log: Log = field(default_factory=Log)
    telemetry: Telemetry = field(default_factory=Telemetry)
    keys: KeyPrefixes = field(default_factory=KeyPrefixes)
    archive: ArchiveStore = field(default_factory=ArchiveStore)
    topics: dict[str, Topic] = field(default_factory=dict)
    pipelines: dict[str, Pipeline] = field(default_factory=dict)
    consumers: tuple[Consumer, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    outboxes: tuple[OutboxSettings, ...] = ()
    base_dir: Path = Path()
    source: str = "defaults"
    # The time at which the configuration was read, by the clock of the host. If two releases define
    # a schedule differently, the definition that was read later is used.
    read_unix_ms: int = field(default=0, compare=False, repr=False)

    def message_groups(self, topic: str) -> list[str]:
        """Return the groups of this configuration that read the messages of a topic.

        Groups that read its dead letters are not included.
        """
        return [
            each.group
            for each in self.consumers
            if each.topic == topic and not each.reads_dead_letters
        ]


SECTIONS: dict[str, type] = {
    "redis": Redis,
    "daemon": Daemon,
    "http": Http,
    "console": Console,
    "log": Log,
    "telemetry": Telemetry,
    "keys": KeyPrefixes,
    "archive": ArchiveStore,
}
# Sections that have one table per name, such as [topics.NAME].
NAMED_SECTIONS: dict[str, type] = {"topics": Topic, "pipelines": Pipeline}

"""The sections of the configuration and their settings, as frozen dataclasses.

The loader, etc/streamq.toml, the JSON schema and `config show` are all based on these fields, so
each setting is described only once. Durations are in seconds, sizes in bytes. Nothing is read here.
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
_CRASH_BACKOFF = Backoff(kind="exponential", base=0.5, max=60.0, jitter="full")


@dataclass(frozen=True, slots=True)
class Redis:
    """Connection to Redis."""

    url: str = setting(
        "embedded:",
        'Address of Redis. "embedded:" starts a server in state_dir. Other forms are'
        ' "redis://host:6379/0", "rediss://host:6379/0" (TLS), "unix:///path/redis.sock?db=0",'
        ' "redis+sentinel://host:26379,host:26379/mymaster/0" and'
        ' "redis+cluster://host:7000,host:7001" (one or more nodes), and "rediss+…" with TLS. If'
        " the URL contains a password, this file must be readable only by its owner.",
        secret=True,
    )
    username: str | None = setting(None, "ACL user. Empty means the default user.")
    password_file: Path | None = setting(
        None,
        "File with the password, readable only by its owner. Empty means the systemd credential"
        ' "redis-password", if it exists.',
    )
    sentinel_username: str | None = setting(
        None, "ACL user on the sentinels. Empty means the default user."
    )
    sentinel_password_file: Path | None = setting(
        None,
        "File with the password for the sentinels, readable only by its owner. Empty means the"
        ' systemd credential "redis-sentinel-password", if it exists, otherwise no password.',
    )
    ca_file: Path | None = setting(
        None,
        "PEM file with CA certificates that are trusted in addition to those of the operating"
        " system.",
    )
    cert_file: Path | None = setting(None, "PEM file of the client certificate. Requires key_file.")
    key_file: Path | None = setting(None, "PEM file of the client key. Requires cert_file.")
    allow_eviction: bool = setting(
        False,
        "Start even if the server may evict keys (maxmemory-policy other than noeviction). If it"
        " evicts a stream, its messages are lost.",
    )
    allow_insecure: bool = setting(
        False,
        "Connect to another host without TLS. Anyone on the network path can then read and change"
        " all data, and read the password.",
    )
    connect_timeout: Seconds = setting(
        2.0, "Maximum time for one attempt to connect.", min=0.05, max=60
    )

    def __repr__(self) -> str:
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        shown["url"] = mask_url(self.url)
        return f"Redis({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


@dataclass(frozen=True, slots=True)
class Daemon:
    """This instance: its name, processes and share of the partitions."""

    instance: str = field(
        default_factory=socket.gethostname,
        metadata=describe(
            "Name of this instance, unique in the fleet. Empty means the host name.",
            empty_is_default=True,
            shape=NAMED,
        ),
    )
    fleet: str = setting(
        "default",
        "Name of the fleet. Instances of one fleet share the partitions of their consumers.",
        shape=NAMED,
    )
    state_dir: Path = setting(
        Path("./var"),
        "Directory for the lock and the data of the embedded server. All paths in this file are"
        " relative to its directory.",
    )
    handlers: tuple[str, ...] = setting(
        (),
        "Modules with @handler functions. They can be in the directory of this file.",
        shape=_MODULE,
    )
    preload: tuple[str, ...] = setting(
        (),
        "Libraries to import before the workers are forked, so that all workers share their memory."
        " Do not list handler modules. A change requires a restart.",
        shape=_MODULE,
    )
    lease_ttl: Seconds = setting(
        15.0,
        "Time until the lease of a partition expires. Its owner renews it every lease_ttl / 5."
        " After a host is lost, other instances own its partitions within 1.6 * lease_ttl.",
        min=1,
        max=3_600,
    )
    drain_timeout: Seconds = setting(
        30.0,
        "How long a shutdown waits for running messages. Messages that are still running after it"
        " run again. The stop timeout of a container must be at least 17 s longer.",
        min=0,
        max=86_400,
    )
    boot_timeout: Seconds = setting(
        60.0, "Maximum time for a worker to import its handler and become ready.", min=1, max=3_600
    )
    event_loop: str = setting(
        "asyncio",
        "Event loop of async handlers. asyncio: the standard loop, or that of the policy that a"
        " handler module sets. uvloop: a faster loop that requires the uvloop extra and rounds"
        " timers up to whole milliseconds.",
        choices=("asyncio", "uvloop"),
    )
    loop_blocked_after: Seconds = setting(
        1.0,
        "Log a loop.blocked event when a coroutine blocks its worker's event loop for this long."
        " 0 means never.",
        min=0,
        max=3_600,
    )
    weight: int = setting(
        1,
        "Share of the partitions that this instance takes, relative to the other instances.",
        min=1,
        max=1_000,
    )
    max_partitions: int = setting(
        0,
        "Maximum number of assignments (worker processes) that this instance owns."
        " 0 means no limit.",
        min=0,
        max=4_096,
    )
    rebalance_delay: Seconds = setting(
        3.0,
        "How long a change of the fleet must last before partitions move between live instances.",
        min=0,
        max=3_600,
    )
    rebalance_hold: Seconds = setting(
        10.0, "Minimum time between two moves of a partition.", min=0, max=86_400
    )
    rebalance_moves: int = setting(
        4, "Maximum number of partitions that this instance releases at a time.", min=1, max=4_096
    )
    crash_backoff: Backoff = setting(_CRASH_BACKOFF, "Delay before a crashed worker is restarted.")
    crash_loop: int = setting(
        5,
        "Consecutive crashes after which this instance releases the partition and does not take it"
        " back for crash_cooldown. A crash while a message runs counts as 1 / (max_crashes + 1),"
        " so one bad message alone does not cause the release.",
        min=1,
        max=1_000,
    )
    crash_cooldown: Seconds = setting(
        60.0,
        "Time before this instance takes back a partition that it released because of crash_loop.",
        min=1,
        max=86_400,
    )
    history: Seconds = setting(
        86_400.0,
        "How long the statistics of each minute are kept in Redis, for the console's charts and"
        " for `streamqd pipeline archive`. They use about 80 bytes per minute, instance, topic and"
        " group, and 110 bytes per partition with messages. With 0, no statistics are written.",
        min=0,
        max=7 * 86_400,
    )
    max_message_bytes: Bytes = setting(
        1 << 20,
        "Maximum size of the payload, and of the key and headers together. Producers reject larger"
        " messages, and workers dead-letter them.",
        min=1,
        max=512 << 20,
    )


@dataclass(frozen=True, slots=True)
class Http:
    """HTTP endpoints for metrics, health checks and the status page. They are read-only."""

    bind: str = setting(
        "127.0.0.1:9464",
        'Address of the endpoints: "127.0.0.1:9464", "unix:./var/http.sock", or "" to disable'
        " them. An address that other hosts can reach requires token_file or allow_public.",
    )
    token_file: Path | None = setting(
        None,
        "File with the token that all endpoints except the health checks require"
        ' ("Authorization: Bearer TOKEN"), readable only by its owner. Empty means the systemd'
        ' credential "http-token" if it exists, otherwise no token.',
    )
    allow_public: bool = setting(
        False, "Serve all endpoints without a token to any client that can reach the address."
    )
    hosts: tuple[str, ...] = setting(
        (),
        "Host names that clients may use, in addition to addresses and localhost, such as the name"
        " of a proxy. If other hosts can reach the address, every name is accepted.",
        shape=_HOST,
    )

    @property
    def address(self) -> tuple[str, int] | Path | None:
        """Host and port, or the path of a unix socket. None: no HTTP server."""
        if not self.bind:
            return None
        if self.bind.startswith("unix:"):
            return Path(self.bind.removeprefix("unix:"))
        host, _, port = self.bind.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True, slots=True)
class Console:
    """The web console, a separate process: `streamqd console`."""

    bind: str = setting(
        "127.0.0.1:9466",
        'Address of the console: "HOST:PORT". Port 0 selects a free port. An address that other'
        " hosts can reach requires users_file or proxy_header.",
    )
    prefix: str = setting("/", "Path under which a proxy serves the console.", shape=_PATH_PREFIX)
    read_only: bool = setting(
        False, "Treat every user as a viewer. The console then changes nothing."
    )
    users_file: Path | None = setting(
        None,
        "File with the users who can log in, written by `streamqd console --add-user` and readable"
        " only by its owner. If empty, the console prints a link with a one-time token that logs in"
        " an admin.",
    )
    proxy_header: str | None = setting(
        None,
        "Header with the user name, set by an authenticating proxy.",
        shape=_HEADER,
    )
    proxy_from: tuple[str, ...] = setting(
        (),
        "Addresses or networks of the proxies that may set proxy_header.",
        shape=_PEER,
    )
    proxy_role: str = setting(
        "viewer",
        "Role of users from proxy_header who are not in users_file.",
        choices=("viewer", "operator", "admin"),
    )
    viewer_bodies: str = setting(
        "show", "Keys, headers and payloads of messages for viewers.", choices=_BODIES
    )
    operator_bodies: str = setting(
        "show", "Keys, headers and payloads of messages for operators.", choices=_BODIES
    )
    admin_bodies: str = setting(
        "show", "Keys, headers and payloads of messages for admins.", choices=_BODIES
    )
    masks: tuple[str, ...] = setting(
        (),
        'Parts that are hidden in masked messages: JSON pointers such as "/card/number", and'
        ' headers such as "header:authorization".',
        shape=_MASK,
    )
    trace_url: str | None = setting(
        None,
        'URL of a trace in your tracing backend, such as "https://tempo.example/trace/{trace_id}".'
        " Messages and dead letters link to it.",
        shape=_TRACE_URL,
    )
    archive: str | None = setting(
        None,
        "Absolute path or URL of the archive of `pipeline archive`. Message pages then also find"
        " archived messages. Requires the spark extra.",
        shape=_ARCHIVE,
    )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.bind.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True, slots=True)
class Log:
    """The log on standard error."""

    format: str = setting(
        "auto",
        "Format of the log. text: readable lines. json: one JSON object per line. auto: text on a"
        " terminal, and JSON otherwise.",
        choices=("auto", "text", "json"),
    )
    level: str = setting(
        "info",
        "Minimum level of the logged events.",
        choices=("debug", "info", "warning", "error"),
    )


@dataclass(frozen=True, slots=True)
class Telemetry:
    """OpenTelemetry traces, and reports to Sentry."""

    traces: bool = setting(
        False,
        "Create a span for each run, and for each send of a producer that reads this file."
        " Requires the otel extra. The standard OTEL_* variables, such as"
        " OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_SERVICE_NAME, configure the rest.",
    )
    producer_span: str = setting(
        "link",
        "Relation of a run's span to its producer's span. Batches always use links. link: the run"
        " starts its own trace, with a link to the producer's span. parent: the run continues the"
        " producer's trace.",
        choices=("link", "parent"),
    )
    sentry: bool = setting(
        False,
        "Report failed runs to Sentry, each cause at most once a minute. Requires the sentry extra."
        " With SENTRY_TRACES_SAMPLE_RATE, also record runs as transactions. The variables"
        " SENTRY_DSN, SENTRY_ENVIRONMENT and SENTRY_RELEASE configure the rest.",
    )


@dataclass(frozen=True, slots=True)
class KeyPrefixes:
    """Prefixes of the keys in Redis. A fleet and its producers must use the same prefixes."""

    control: str = setting(
        "streaming:mq", "Prefix of leases, members, topics and other bookkeeping.", shape=_PREFIX
    )
    streams: str = setting("stream:topic", "Prefix of the streams.", shape=_PREFIX)


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole configuration. `source` is its file. Paths are relative to `base_dir`."""

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
    # The time of reading, by the host's clock. If two releases define a schedule differently, the
    # definition that was read later is used.
    read_unix_ms: int = field(default=0, compare=False, repr=False)

    def groups_of(self, topic: str) -> list[str]:
        """Return the groups that read a topic's messages here, but not its dead letters."""
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
# Sections with one table per name: [topics.NAME].
NAMED_SECTIONS: dict[str, type] = {"topics": Topic, "pipelines": Pipeline}

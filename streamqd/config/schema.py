"""The sections of the configuration and their settings. Frozen dataclasses; nothing is read here.

The loader, etc/streamq.toml, the JSON schema and `config show` are all made from these fields, so
a setting is described once. Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field
from pathlib import Path

from streamqd.config.connection import Redis
from streamqd.config.consumers import Consumer
from streamqd.config.setting import NAME, NAME_HINT, Kind, described
from streamqd.config.topics import Topic
from streamqd.model import Backoff

_PREFIX = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_PREFIX_HINT = "use 1 to 64 of A-Z a-z 0-9 . _ : -"
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_MODULE_HINT = 'write the name of a Python module, such as "weblog" or "shop.handlers"'
_CRASH_BACKOFF = Backoff(kind="exponential", base=0.5, max=60.0, jitter="full")


@dataclass(frozen=True, slots=True)
class Daemon:
    """This instance: its name, its processes, its share of the work."""

    instance: str = field(
        default_factory=socket.gethostname,
        metadata=described(
            "Name of this instance, unique in the fleet. Empty: the host name.",
            empty_is_default=True,
            pattern=NAME,
            pattern_hint=NAME_HINT,
        ),
    )
    fleet: str = field(
        default="default",
        metadata=described(
            "Instances of one fleet share the partitions of their consumers.",
            pattern=NAME,
            pattern_hint=NAME_HINT,
        ),
    )
    state_dir: Path = field(
        default=Path("./var"),
        metadata=described(
            "Directory for the lock and the embedded server's data. Relative to this file, as every"
            " path here.",
            Kind.PATH,
        ),
    )
    handlers: tuple[str, ...] = field(
        default=(),
        metadata=described(
            "Modules to import for their @handler functions; found beside this file too.",
            Kind.TEXTS,
            pattern=_MODULE,
            pattern_hint=_MODULE_HINT,
        ),
    )
    preload: tuple[str, ...] = field(
        default=(),
        metadata=described(
            "Libraries to import once, before the workers are forked, so that they share the"
            " memory. Never handler modules. A changed list needs a restart.",
            Kind.TEXTS,
            pattern=_MODULE,
            pattern_hint=_MODULE_HINT,
        ),
    )
    lease_ttl: float = field(
        default=15.0,
        metadata=described(
            "How long a partition stays owned after the last renewal. The partitions of a lost host"
            " are taken over this much later; a renewal happens every fifth of it.",
            Kind.DURATION,
            min=1,
            max=3_600,
        ),
    )
    drain_timeout: float = field(
        default=30.0,
        metadata=described(
            "How long a stop waits for the running messages before it releases them unfinished."
            " Keep systemd's TimeoutStopSec above it.",
            Kind.DURATION,
            min=0,
            max=86_400,
        ),
    )
    boot_timeout: float = field(
        default=60.0,
        metadata=described(
            "How long a worker may take to import its handler and become ready.",
            Kind.DURATION,
            min=1,
            max=3_600,
        ),
    )
    weight: int = field(
        default=1,
        metadata=described(
            "Share of the partitions that this instance takes, compared with the others'.",
            Kind.INTEGER,
            min=1,
            max=1_000,
        ),
    )
    max_partitions: int = field(
        default=0,
        metadata=described(
            "Partitions (worker processes) that this instance owns at most. 0: no limit.",
            Kind.INTEGER,
            min=0,
            max=4_096,
        ),
    )
    rebalance_delay: float = field(
        default=3.0,
        metadata=described(
            "How long a change of the fleet must last before owned partitions move.",
            Kind.DURATION,
            min=0,
            max=3_600,
        ),
    )
    rebalance_hold: float = field(
        default=10.0,
        metadata=described(
            "How long a partition stays where it is before it may move again.",
            Kind.DURATION,
            min=0,
            max=86_400,
        ),
    )
    rebalance_moves: int = field(
        default=4,
        metadata=described(
            "Partitions that this instance hands over at once at most.",
            Kind.INTEGER,
            min=1,
            max=4_096,
        ),
    )
    crash_backoff: Backoff = field(
        default=_CRASH_BACKOFF,
        metadata=described(
            "How long a worker that keeps crashing waits before it is started again.",
            Kind.TABLE,
            table=Backoff,
        ),
    )
    crash_loop: int = field(
        default=5,
        metadata=described(
            "Crashes in a row before a worker is given up for crash_cooldown and its partition"
            " released. A crash while handling a message counts less:"
            " 1 / (max_crashes + 1).",
            Kind.INTEGER,
            min=1,
            max=1_000,
        ),
    )
    crash_cooldown: float = field(
        default=60.0,
        metadata=described(
            "How long a worker that was given up rests before the next try.",
            Kind.DURATION,
            min=1,
            max=86_400,
        ),
    )
    max_message_bytes: int = field(
        default=1 << 20,
        metadata=described(
            "Largest payload that a producer accepts.",
            Kind.SIZE,
            min=1,
            max=512 << 20,
        ),
    )


@dataclass(frozen=True, slots=True)
class Http:
    """Metrics, health and the status page. Read only."""

    bind: str = field(
        default="127.0.0.1:9464",
        metadata=described(
            'Where to listen: "127.0.0.1:9464", "unix:./var/http.sock", or "" for nowhere. An'
            " address that other hosts reach needs token_file or allow_public.",
        ),
    )
    token_file: Path | None = field(
        default=None,
        metadata=described(
            'File with the token that all pages but the health checks ask for ("Authorization:'
            ' Bearer TOKEN"), readable by its owner only. Empty: the systemd credential'
            ' "http-token", if there is one, else no token.',
            Kind.PATH,
            optional=True,
        ),
    )
    allow_public: bool = field(
        default=False,
        metadata=described(
            "Serve the pages without a token to whoever reaches the address.",
            Kind.BOOLEAN,
        ),
    )
    hosts: tuple[str, ...] = field(
        default=(),
        metadata=described(
            "Names by which clients may ask for the pages, besides addresses and localhost: that of"
            " a proxy in front, for example. An address that other hosts reach takes every name.",
            Kind.TEXTS,
        ),
    )

    @property
    def address(self) -> tuple[str, int] | Path | None:
        """Host and port, or the path of a unix socket, or None for no server."""
        if not self.bind:
            return None
        if self.bind.startswith("unix:"):
            return Path(self.bind.removeprefix("unix:"))
        host, _, port = self.bind.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True, slots=True)
class Log:
    """What is written to standard error, and how."""

    format: str = field(
        default="auto",
        metadata=described(
            "auto: text on a terminal, JSON lines otherwise.",
            choices=("auto", "text", "json"),
        ),
    )
    level: str = field(
        default="info",
        metadata=described(
            "Least important lines that are written.",
            choices=("debug", "info", "warning", "error"),
        ),
    )


@dataclass(frozen=True, slots=True)
class KeyPrefixes:
    """Prefixes of the keys in Redis. The same for every producer and instance of a fleet."""

    control: str = field(
        default="streaming:mq",
        metadata=described(
            "Prefix of leases, members, topics and other bookkeeping.",
            pattern=_PREFIX,
            pattern_hint=_PREFIX_HINT,
        ),
    )
    streams: str = field(
        default="stream:topic",
        metadata=described(
            "Prefix of the streams.",
            pattern=_PREFIX,
            pattern_hint=_PREFIX_HINT,
        ),
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole configuration. `source` says where it is from; paths are relative to `base_dir`."""

    redis: Redis = field(default_factory=Redis)
    daemon: Daemon = field(default_factory=Daemon)
    http: Http = field(default_factory=Http)
    log: Log = field(default_factory=Log)
    keys: KeyPrefixes = field(default_factory=KeyPrefixes)
    topics: dict[str, Topic] = field(default_factory=dict)
    consumers: tuple[Consumer, ...] = ()
    base_dir: Path = Path()
    source: str = "defaults"

    def groups_of(self, topic: str) -> list[str]:
        """The groups that read the messages of a topic here; not those of its dead letters."""
        return [
            each.group for each in self.consumers if each.topic == topic and not each.reads_letters
        ]


SECTIONS: dict[str, type] = {
    "redis": Redis,
    "daemon": Daemon,
    "http": Http,
    "log": Log,
    "keys": KeyPrefixes,
}

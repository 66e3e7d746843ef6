"""The section [redis]: where the data is, and how to log in there."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from streamqd.config.secrets import masked_url
from streamqd.config.setting import Kind, described


@dataclass(frozen=True, slots=True)
class Redis:
    """Where the data is."""

    url: str = field(
        default="embedded:",
        metadata=described(
            'Where Redis is: "embedded:" starts a server of our own in state_dir, others'
            ' are "redis://host:6379/0", "rediss://host:6379/0" (TLS) and'
            ' "unix:///path/redis.sock?db=0". Several nodes are'
            ' "redis+sentinel://host:26379,host:26379/mymaster/0" and'
            ' "redis+cluster://host:7000,host:7001" (some of its nodes), with TLS "rediss+…".'
            " A password in the URL is accepted only when nobody but the owner may read this file.",
            secret=True,
        ),
    )
    username: str | None = field(
        default=None,
        metadata=described(
            "ACL user. Empty: the default user.",
            optional=True,
        ),
    )
    password_file: Path | None = field(
        default=None,
        metadata=described(
            "File that holds the password, readable by its owner only. Empty: the systemd"
            ' credential "redis-password", if there is one.',
            Kind.PATH,
            optional=True,
        ),
    )
    sentinel_username: str | None = field(
        default=None,
        metadata=described(
            "ACL user of the sentinels themselves. Empty: their default user.",
            optional=True,
        ),
    )
    sentinel_password_file: Path | None = field(
        default=None,
        metadata=described(
            "File that holds the password of the sentinels themselves. Empty: the systemd"
            ' credential "redis-sentinel-password", if there is one, else no password.',
            Kind.PATH,
            optional=True,
        ),
    )
    ca_file: Path | None = field(
        default=None,
        metadata=described(
            "PEM file of the authorities that may sign the server's certificate. Empty:"
            " the system's.",
            Kind.PATH,
            optional=True,
        ),
    )
    cert_file: Path | None = field(
        default=None,
        metadata=described(
            "PEM file of the client certificate; needs key_file.",
            Kind.PATH,
            optional=True,
        ),
    )
    key_file: Path | None = field(
        default=None,
        metadata=described(
            "PEM file of the client key; needs cert_file.",
            Kind.PATH,
            optional=True,
        ),
    )
    allow_eviction: bool = field(
        default=False,
        metadata=described(
            "Start although the server may evict keys (maxmemory-policy other than noeviction)."
            " An evicted stream is lost messages.",
            Kind.BOOLEAN,
        ),
    )
    allow_insecure: bool = field(
        default=False,
        metadata=described(
            "Connect to another host without TLS. Whoever is between can read and change all"
            " that is sent, the password too.",
            Kind.BOOLEAN,
        ),
    )
    connect_timeout: float = field(
        default=2.0,
        metadata=described(
            "How long one attempt to connect may take.",
            Kind.DURATION,
            min=0.05,
            max=60,
        ),
    )

    def __repr__(self) -> str:
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        shown["url"] = masked_url(self.url)
        return f"Redis({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

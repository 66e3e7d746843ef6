"""Determine the address and the login of a server from the settings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamqd.config import topology
from streamqd.config.secrets import credential
from streamqd.config.topology import Address
from streamqd.errors import ConfigError

if TYPE_CHECKING:
    from streamqd import config
    from streamqd.config.topology import Topology

_DEFAULT_PORT = 6379


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server, identified by a host and port or by the `path` of a Unix socket.

    The certificate authorities in `ca_file` are trusted in addition to those of the system.
    `password_file` takes precedence over `password`. The file is read at each login, so a rotated
    password takes effect without a restart. The displayed form contains no credentials.
    """

    host: str = "localhost"
    port: int = _DEFAULT_PORT
    path: str = ""
    tls: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    password_file: Path | None = None

    def __str__(self) -> str:
        return f"unix://{self.path}" if self.path else str(self.address)

    @property
    def address(self) -> Address:
        """The host and port."""
        return Address(self.host, self.port)

    def login(self) -> list[tuple[Any, ...]]:
        """Return the commands to send at login. Raises OSError if the password cannot be read."""
        password = self.password
        if self.password_file is not None:
            password = self.password_file.read_text(encoding="utf-8").strip("\r\n")
        commands: list[tuple[Any, ...]] = []
        if self.username:
            commands.append(("AUTH", self.username, password))
        elif password:
            commands.append(("AUTH", password))
        if self.db:
            commands.append(("SELECT", self.db))
        return commands


def make_endpoint(settings: config.Redis, where: Topology) -> Endpoint:
    """Return the endpoint of the server in the URL.

    Raises ConfigError if the URL describes sentinels or a cluster.
    """
    if where.kind != topology.SERVER:
        raise ConfigError(["redis.url: it does not name one server"])
    [address] = where.addresses or (Address("", _DEFAULT_PORT),)
    return replace(endpoint_at(settings, where, address), path=where.path)


def parse_topology(settings: config.Redis) -> Topology:
    """Parse `redis.url`. Raises ConfigError if it is invalid."""
    try:
        return topology.parse(settings.url)
    except ValueError as error:
        raise ConfigError([f"redis.url: {error}"]) from None


def endpoint_at(settings: config.Redis, where: Topology, address: Address) -> Endpoint:
    """Return the endpoint of a data server."""
    made = Endpoint(
        *address,
        tls=where.tls,
        db=where.db,
        username=settings.username or where.username,
        password=where.password,
        password_file=credential("redis-password") or settings.password_file,
    )
    return _with_files(made, settings)


def sentinel_at(settings: config.Redis, where: Topology, address: Address) -> Endpoint:
    """Return the endpoint of a sentinel, which has its own login."""
    made = Endpoint(
        *address,
        tls=where.tls,
        username=settings.sentinel_username or "",
        password_file=credential("redis-sentinel-password") or settings.sentinel_password_file,
    )
    return _with_files(made, settings)


def _with_files(endpoint: Endpoint, settings: config.Redis) -> Endpoint:
    if not endpoint.tls:
        return endpoint
    return replace(
        endpoint,
        ca_file=settings.ca_file,
        cert_file=settings.cert_file,
        key_file=settings.key_file,
    )

"""Parse the URL of Redis, which names one server, the sentinels of a master, or cluster nodes."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

EMBEDDED = "embedded:"
SERVER, SENTINEL, CLUSTER = "server", "sentinel", "cluster"
_SCHEMES = {
    "redis": (SERVER, False),
    "rediss": (SERVER, True),
    "unix": (SERVER, False),
    "redis+sentinel": (SENTINEL, False),
    "rediss+sentinel": (SENTINEL, True),
    "redis+cluster": (CLUSTER, False),
    "rediss+cluster": (CLUSTER, True),
}
WRITE = {
    SERVER: (
        'write "embedded:", "redis://HOST:PORT/DB", "rediss://HOST:PORT/DB" or "unix:///PATH"'
    ),
    SENTINEL: 'write "redis+sentinel://HOST:PORT,HOST:PORT/MASTER/DB"',
    CLUSTER: 'write "redis+cluster://HOST:PORT,HOST:PORT"',
}
_DEFAULT_PORT = {SERVER: 6379, SENTINEL: 26379, CLUSTER: 6379}
_HOST = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]+))?"
)
_MASTER = re.compile(r"/(?P<name>[A-Za-z0-9._-]+)(?:/(?P<db>[0-9]{1,5})?)?")
PORT_MAX = 65_535
SOCKET_BYTES_MAX = 107  # sun_path has 108 bytes, including the terminating zero


class Address(NamedTuple):
    """The host and the port of one node.

    As a string, it is HOST:PORT, with brackets around an IPv6 address.
    """

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Topology:
    """The parts of a Redis URL. `kind` is SERVER, SENTINEL, CLUSTER or EMBEDDED.

    `addresses` contains the server, the sentinels, or some nodes of the cluster, which report the
    other nodes. For a Unix socket, `path` is set instead. `master` is set only for SENTINEL.
    `username` and `password` are for the nodes that store data, not for the sentinels.
    """

    kind: str
    tls: bool
    addresses: tuple[Address, ...] = ()
    master: str = ""
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    path: str = ""

    def __str__(self) -> str:
        """Return a description for people, without credentials."""
        nodes = self.path or ",".join(map(str, self.addresses))
        return f"{self.kind} {nodes}" + (f" ({self.master})" if self.master else "")


# The result is cached, so that workers use the one that the supervisor has parsed. If each worker
# ran the parser, it would copy 0.1 MiB of memory that is otherwise shared.
@functools.cache
def parse(url: str) -> Topology:
    """Parse a Redis URL.

    Raises ValueError with a clause about the problem, which contains no secret parts.
    """
    if url == EMBEDDED:
        return Topology(EMBEDDED, False)
    scheme, colon, _ = url.partition(":")
    if not colon or scheme not in _SCHEMES:
        raise ValueError(f"is not a Redis URL ({WRITE[SERVER]})")
    kind, tls = _SCHEMES[scheme]
    try:
        parts = urlsplit(url)
        if kind == SERVER:
            parts.port  # noqa: B018 - raises ValueError for an invalid port
    except ValueError:
        raise ValueError(
            f"has an invalid host or port ({WRITE[kind]}, with a percent-encoded password)"
        ) from None
    found = _one_server(parts, tls) if kind == SERVER else _parse_several(parts, kind, tls)
    username, _, password = parts.netloc.rpartition("@")[0].partition(":")
    return replace(found, username=unquote(username), password=unquote(password))


def _one_server(parts: SplitResult, tls: bool) -> Topology:
    db = _parameter(parts)
    if parts.scheme == "unix":
        return Topology(SERVER, tls, path=_path(parts), db=int(db or 0))
    host, port = parts.hostname, parts.port
    if not host or port == 0:
        raise ValueError(f"has no host, or port 0 ({WRITE[SERVER]})")
    if not re.fullmatch(r"/?|/[0-9]{1,5}", parts.path):
        raise ValueError(
            'must end with a database number after the host, as in "redis://host:6379/0"'
        )
    address = Address(unquote(host), port or _DEFAULT_PORT[SERVER])
    return Topology(SERVER, tls, (address,), db=int(db or parts.path.strip("/") or 0))


def _parameter(parts: SplitResult) -> str:
    """Return the database in the parameter `db`, or ''. Raises ValueError for other parameters."""
    found = parse_qs(parts.query, keep_blank_values=True)
    extra = sorted(found.keys() - {"db"})
    if extra or parts.fragment:
        what = f'the parameter "{extra[0]}"' if extra else "a fragment (#)"
        raise ValueError(
            f"contains {what}, but the only parameter is db (other options are [redis] settings)"
        )
    values = found.get("db", [])
    if not all(re.fullmatch("[0-9]{1,5}", value) for value in values):
        raise ValueError('must have a database number as db, such as "?db=0"')
    return next(iter(values), "")


def _path(parts: SplitResult) -> str:
    if parts.netloc.rpartition("@")[2] or not parts.path.startswith("/"):
        raise ValueError(
            "must give the absolute path of a socket, with three slashes, as in"
            ' "unix:///run/redis.sock"'
        )
    size = len(parts.path.encode("utf-8", "surrogatepass"))
    if size > SOCKET_BYTES_MAX:
        raise ValueError(f"has a socket path of {size} bytes (maximum: {SOCKET_BYTES_MAX})")
    return unquote(parts.path)


def _parse_several(parts: SplitResult, kind: str, tls: bool) -> Topology:
    if parts.query or parts.fragment:
        raise ValueError("contains parameters (?, #), which are set under [redis] here")
    addresses = _addresses(kind, parts.netloc.rpartition("@")[2])
    master, db = _master(kind, parts)
    return Topology(kind, tls, addresses, master, db)


def _addresses(kind: str, text: str) -> tuple[Address, ...]:
    if not text:
        raise ValueError(f"has no host ({WRITE[kind]})")
    found = []
    for one in text.split(","):
        match = _HOST.fullmatch(one)
        port = int((match and match["port"]) or _DEFAULT_PORT[kind])
        if match is None or not 0 < port <= PORT_MAX:
            raise ValueError(
                f"has an invalid host or port ({WRITE[kind]}, with a percent-encoded password)"
            )
        found.append(Address(match["v6"] or match["name"], port))
    return tuple(dict.fromkeys(found))


def _master(kind: str, parts: SplitResult) -> tuple[str, int]:
    if kind == CLUSTER:
        if parts.path not in ("", "/", "/0"):
            raise ValueError(
                f"must not contain a database other than 0 on a cluster ({WRITE[kind]})"
            )
        return "", 0
    match = _MASTER.fullmatch(parts.path)
    if match is None:
        raise ValueError(f"must contain the master's name after the hosts ({WRITE[kind]})")
    return match["name"], int(match["db"] or 0)

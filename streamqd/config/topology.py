"""Where the nodes are, when there are several: the URLs of Sentinel and of Redis Cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

SENTINEL, CLUSTER = "sentinel", "cluster"
SCHEMES = {
    "redis+sentinel": (SENTINEL, False),
    "rediss+sentinel": (SENTINEL, True),
    "redis+cluster": (CLUSTER, False),
    "rediss+cluster": (CLUSTER, True),
}
WRITE = {
    SENTINEL: 'write "redis+sentinel://HOST:PORT,HOST:PORT/MASTER/DB"',
    CLUSTER: 'write "redis+cluster://HOST:PORT,HOST:PORT"',
}
_DEFAULT_PORT = {SENTINEL: 26379, CLUSTER: 6379}
_HOST = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]+))?"
)
_MASTER = re.compile(r"/(?P<name>[A-Za-z0-9._-]+)(?:/(?P<db>[0-9]{1,5})?)?")
PORT_MAX = 65_535


class Address(NamedTuple):
    """One node."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Topology:
    """What a URL of several nodes says. `kind` is SENTINEL or CLUSTER.

    `addresses` are those of sentinels, or of some nodes of the cluster, to ask for the others.
    `master` and `db` belong to Sentinel. The login is the one for the nodes that hold data.
    """

    kind: str
    tls: bool
    addresses: tuple[Address, ...]
    master: str = ""
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        """For people: never with credentials."""
        nodes = ",".join(map(str, self.addresses))
        return f"{self.kind} {nodes}" + (f" ({self.master})" if self.master else "")


def parse(url: str) -> Topology | None:
    """Read the URL of several nodes; None when it names only one.

    ValueError with a clause that says what is wrong, without any part that may be secret.
    """
    scheme = url.partition(":")[0]
    if scheme not in SCHEMES:
        return None
    kind, tls = SCHEMES[scheme]
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(f"its hosts cannot be read: {WRITE[kind]}") from None
    if parts.query or parts.fragment:
        raise ValueError("parameters (?, #) are not understood here: there are [redis] settings")
    username, colon, password = parts.netloc.rpartition("@")[0].partition(":")
    addresses = _addresses(kind, parts.netloc.rpartition("@")[2])
    master, db = _master(kind, parts)
    return Topology(
        kind=kind,
        tls=tls,
        addresses=addresses,
        master=master,
        db=db,
        username=unquote(username),
        password=unquote(password) if colon else "",
    )


def _addresses(kind: str, text: str) -> tuple[Address, ...]:
    if not text:
        raise ValueError(f"it names no host: {WRITE[kind]}")
    found = []
    for one in text.split(","):
        match = _HOST.fullmatch(one)
        port = int((match and match["port"]) or _DEFAULT_PORT[kind])
        if match is None or not 0 < port <= PORT_MAX:
            raise ValueError(
                f"one of its hosts or ports cannot be read: {WRITE[kind]}; a password must be"
                " percent-encoded"
            )
        found.append(Address(match["v6"] or match["name"], port))
    return tuple(dict.fromkeys(found))


def _master(kind: str, parts: SplitResult) -> tuple[str, int]:
    if kind == CLUSTER:
        if parts.path not in ("", "/", "/0"):
            raise ValueError(f"a cluster has no databases but 0: {WRITE[kind]}")
        return "", 0
    match = _MASTER.fullmatch(parts.path)
    if match is None:
        raise ValueError(f"behind the hosts comes the name of the master: {WRITE[kind]}")
    return match["name"], int(match["db"] or 0)

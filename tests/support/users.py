"""The users of etc/acl, on a server of the suite.

With `pytest --acl` every server that the suite starts has them, and what is tested works as one of
them: daemons, workers and housekeepers as `daemon`, verbs as `admin`, the producer of a `Daemon` as
`producer`. What a test itself does is done by the server's default user, who may do all.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from streamqd import config
from streamqd.errors import RedisRefused
from streamqd.store.client import Connection

FOLDER = Path(__file__).parents[2] / "etc" / "acl"
OLDER = FOLDER / "redis-6.2"  # the same users for a server without selectors
NAMES = ("admin", "daemon", "producer", "producer-scripts")
_chosen: list[str] = []  # --acl, once


def choose() -> None:
    """Let all servers that are started from now on have the users, and all that is tested too."""
    _chosen.append("--acl")


def chosen() -> bool:
    """Whether the suite runs with --acl."""
    return bool(_chosen)


def section(name: str) -> dict[str, str]:
    """What of `[redis]` makes a configuration that of a user; nothing without --acl."""
    return {"username": read(name).user} if _chosen else {}


def acting(redis: config.Redis, name: str) -> config.Redis:
    """The settings as those of a user; as they are without --acl."""
    return replace(redis, **section(name))


def file() -> str:
    """The text of an ACL file for a server of the suite; nobody has a password."""
    lines = ["user default on nopass ~* &* +@all", *(f"{line(name)} nopass" for name in NAMES)]
    return "\n".join(lines) + "\n"


class User(NamedTuple):
    """What a file says, its selectors included. Commands as `hget` and `xinfo|stream`."""

    user: str
    keys: set[str]
    commands: set[str]


def line(name: str, *, older: bool = False) -> str:
    """The line of a file: all that it holds. `older`: for Redis 6.2, where there is another one."""
    path = FOLDER / f"{name}.acl"
    if older and (OLDER / path.name).exists():
        path = OLDER / path.name
    (only,) = path.read_text().splitlines()
    return only


def read(name: str, *, older: bool = False) -> User:
    """Read a file."""
    _, user, *rules = line(name, older=older).replace("(", "").replace(")", "").split()
    keys = {rule.partition("~")[2] for rule in rules if "~" in rule}
    return User(user, keys, {rule[1:] for rule in rules if rule.startswith("+")})


def rules(text: str) -> list[str]:
    """The arguments of `ACL SETUSER` behind the word `user`: a selector is one of them."""
    return re.findall(r"\([^)]*\)|\S+", text)[1:]


def grant(link: Connection, *, without: str = "") -> None:
    """Make the users, each without a password, and without one right when it is named."""
    older = not has_selectors(link)
    for name in NAMES:
        granted = [rule for rule in rules(line(name, older=older)) if rule != f"+{without}"]
        link.execute("ACL", "SETUSER", *granted, "nopass")


def has_selectors(link: Connection) -> bool:
    """Whether the server knows selectors, as Redis 7 and Valkey do."""
    try:
        link.execute("ACL", "SETUSER", "streamqd-probe", "(+get)")
    except RedisRefused:
        return False
    link.execute("ACL", "DELUSER", "streamqd-probe")
    return True


def revoke(link: Connection) -> None:
    """Take them away; their connections end. With --acl they are as they were."""
    if _chosen:
        grant(link)
        return
    for name in NAMES:
        link.execute("ACL", "DELUSER", read(name).user)

"""The users of etc/acl, on a server of the suite.

With `pytest --acl`, every server that the suite starts has these users, and the tested code works
as one of them: daemons, workers and housekeepers as `daemon`, commands as `admin`, and the producer
of a `Daemon` as `producer`. The test itself uses the server's default user, which has all
permissions.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from streamqd import config
from streamqd.errors import RedisResponseError
from streamqd.store.client import Connection

FOLDER = Path(__file__).parents[2] / "etc" / "acl"
OLDER = FOLDER / "redis-6.2"  # the same users, for a server without selectors
NAMES = ("admin", "daemon", "producer", "producer-scripts", "viewer")
_chosen: list[str] = []  # contains --acl if it was given


def enable() -> None:
    """Give the users to all servers that start from now on, and use them in all tested code."""
    _chosen.append("--acl")


def are_enabled() -> bool:
    """Return True if the suite runs with --acl."""
    return bool(_chosen)


def redis_section(name: str) -> dict[str, str]:
    """Return the `[redis]` settings that select a user, or none without --acl."""
    return {"username": read(name).user} if _chosen else {}


def settings_as(redis: config.Redis, name: str) -> config.Redis:
    """Return the settings with a user selected, or the unchanged settings without --acl."""
    return replace(redis, **redis_section(name))


def file() -> str:
    """Return the text of an ACL file for a server of the suite, without passwords."""
    lines = ["user default on nopass ~* &* +@all", *(f"{read_line(name)} nopass" for name in NAMES)]
    return "\n".join(lines) + "\n"


class User(NamedTuple):
    """The content of a user's file with its selectors.

    Commands have forms like `hget` and `xinfo|stream`.
    """

    user: str
    keys: set[str]
    commands: set[str]


def read_line(name: str, *, older: bool = False) -> str:
    """Return the only line of a file. `older` selects the file for Redis 6.2, if there is one."""
    path = FOLDER / f"{name}.acl"
    if older and (OLDER / path.name).exists():
        path = OLDER / path.name
    (only,) = path.read_text().splitlines()
    return only


def read(name: str, *, older: bool = False) -> User:
    """Read the file of a user."""
    _, user, *acl_rules = read_line(name, older=older).replace("(", "").replace(")", "").split()
    keys = {rule.partition("~")[2] for rule in acl_rules if "~" in rule}
    return User(user, keys, {rule[1:] for rule in acl_rules if rule.startswith("+")})


def acl_rules(text: str) -> list[str]:
    """Return the arguments of `ACL SETUSER` after the word `user`. A selector is one argument."""
    return re.findall(r"\([^)]*\)|\S+", text)[1:]


def grant(link: Connection, *, without: str = "") -> None:
    """Create the users without passwords, and without one permission if `without` names it."""
    older = not has_selectors(link)
    for name in NAMES:
        granted = [
            rule for rule in acl_rules(read_line(name, older=older)) if rule != f"+{without}"
        ]
        link.execute("ACL", "SETUSER", *granted, "nopass")


def has_selectors(link: Connection) -> bool:
    """Return True if the server supports selectors, as Redis 7 and Valkey do."""
    try:
        link.execute("ACL", "SETUSER", "streamqd-probe", "(+get)")
    except RedisResponseError:
        return False
    link.execute("ACL", "DELUSER", "streamqd-probe")
    return True


def revoke(link: Connection) -> None:
    """Delete the users, which closes their connections. With --acl, restore them instead."""
    if _chosen:
        grant(link)
        return
    for name in NAMES:
        link.execute("ACL", "DELUSER", read(name).user)

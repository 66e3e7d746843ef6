"""The settings of outboxes, checks of these settings, and the addresses of databases."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from streamqd.config import problems as wording
from streamqd.config.problems import Problems
from streamqd.config.secrets import credential, has_password, mask_url
from streamqd.config.setting import NAMED, Seconds, Shape, describe, section_settings, setting

TABLE = "streamqd_outbox"
# Leaves room for the suffix `_dead`, because a name in PostgreSQL has up to 63 bytes, and a name in
# MySQL up to 64 characters.
TABLE_CHARS_MAX = 48
TABLE_NAME = Shape(
    re.compile(
        rf"(?=.{{1,{TABLE_CHARS_MAX}}}$)(?:[A-Za-z_][A-Za-z0-9_]*\.)?[A-Za-z_][A-Za-z0-9_]*",
    ),
    f"use 1 to {TABLE_CHARS_MAX} of A-Z a-z 0-9 _ with no digit first, and at most one dot after a"
    " schema",
)
SCHEMES = {
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class OutboxSettings:
    """An outbox: a table in your database whose messages one instance sends to Redis."""

    name: str = field(
        metadata=describe(
            "The name of the outbox, which must be unique in this Redis.", shape=NAMED
        )
    )
    database: str = field(
        metadata=describe(
            'The address of the database: "postgresql://user@host/name", "mysql://user@host/name"'
            ' or "sqlite:///file.db". Each `${VARIABLE}` is replaced by that environment variable.'
            " If the URL contains a password, this file must be readable only by its owner.",
            secret=True,
        )
    )
    password_file: Path | None = setting(
        None,
        "The file that contains the password. It must be readable only by its owner. If this"
        ' setting is empty, the systemd credential "outbox-NAME-password" is used, if it exists.',
    )
    table: str = setting(
        TABLE,
        'The table that contains the messages, such as "streamqd_outbox" or'
        ' "shop.streamqd_outbox". Rows that cannot be sent are moved to a second table, whose name'
        " has the suffix `_dead`.",
        shape=TABLE_NAME,
    )
    batch: int = setting(
        512, "The maximum number of rows that the relay reads at a time.", min=1, max=4_096
    )
    poll: Seconds = setting(
        1.0,
        "The interval at which the relay checks an empty table for new rows. With PostgreSQL, it"
        " also reads the table immediately after a commit.",
        min=0.05,
        max=3_600,
    )
    max_backlog: int | None = setting(
        None,
        "The number of waiting messages at which the relay stops sending to a partition. It"
        ' continues when the partition has room. "none" means no limit.',
        min=1,
    )
    wait_replicas: int = setting(
        0,
        "The number of Redis replicas that must confirm the messages before the relay deletes"
        " their rows.",
        min=0,
        max=16,
    )
    lease_ttl: Seconds = setting(
        15.0,
        "The time after which another instance takes over the outbox of a lost host. The lease is"
        " renewed every `lease_ttl / 3`.",
        min=1,
        max=3_600,
    )

    # The directory to which relative paths refer.
    base_dir: Path = field(default=Path(), compare=False, repr=False)

    def __repr__(self) -> str:
        stated = {name: getattr(self, name) for name in section_settings(type(self))}
        stated["database"] = mask_url(self.database)
        return f"OutboxSettings({', '.join(f'{name}={each!r}' for name, each in stated.items())})"

    def url(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return the address, with its variables replaced and any path of an SQLite file absolute.

        Raises ValueError with a clause that contains no secret parts.
        """
        for name in dict.fromkeys(_VARIABLE.findall(self.database)):
            if not environ.get(name):
                raise ValueError(f"environment variable {name} is not set")
        url = _VARIABLE.sub(lambda found: environ[found[1]], self.database)
        split(url)
        return absolute_url(url, self.base_dir)

    def password(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """Return the password from the credential or the file, or None if there is neither.

        Raises ValueError with a clause if the file cannot be read.
        """
        path = credential(f"outbox-{self.name}-password", environ) or self.password_file
        if path is None:
            return None
        try:
            return path.read_text(encoding="utf-8").strip("\r\n")
        except OSError as error:
            clause = f"{path} cannot be read ({error.strerror})"
            raise ValueError(clause) from None

    def dialect(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return postgresql, mysql or sqlite. Raises ValueError in the same cases as `url`."""
        return split(self.url(environ))[0]

    def fault(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return one sentence about why this process cannot open the database, or '' if it can."""
        for of, read in (("database", self.url), ("password_file", self.password)):
            try:
                read(environ)
            except ValueError as error:
                return f"{of} of outbox {self.name}: {error}"
        return ""


def split(url: str) -> tuple[str, SplitResult]:
    """Return the dialect and the parts of a database URL.

    A driver after a plus sign, as in `postgresql+psycopg://`, is accepted and ignored. Raises
    ValueError with a clause that does not contain the URL.
    """
    scheme, separator, rest = url.partition("://")
    dialect = SCHEMES.get(scheme.partition("+")[0].lower())
    if not separator or dialect is None:
        raise ValueError(
            "must start with postgresql://, mysql:// or sqlite:///, such as"
            " postgresql://shop@db.example.com/shop"
        )
    try:
        parts = urlsplit(f"{dialect}://{rest}")
        _ = parts.port
    except ValueError:
        raise ValueError(
            "is not a valid URL; percent-encode special characters in a password, such as %40 for @"
        ) from None
    if dialect == "sqlite" and (parts.netloc or not parts.path.strip("/")):
        raise ValueError("must name a file, such as sqlite:///shop.db or sqlite:////srv/shop.db")
    if dialect == "mysql" and not parts.path.strip("/"):
        raise ValueError("must name a database, such as mysql://shop@db.example.com/shop")
    return dialect, parts


def absolute_url(url: str, base_dir: Path) -> str:
    """Return the URL. If it names an SQLite file by a relative path, prepend `base_dir`."""
    scheme, separator, rest = url.partition(":///")
    if SCHEMES.get(scheme.partition("+")[0].lower()) != "sqlite" or not rest.strip("/"):
        return url
    return url if rest.startswith("/") else f"{scheme}{separator}{quote(str(base_dir))}/{rest}"


def table_location(
    outbox: OutboxSettings, environ: Mapping[str, str] = os.environ
) -> tuple[object, ...] | None:
    """Return a value that identifies the database and the table of an outbox.

    Return None if the URL is invalid. Only the URLs are compared, whereas a relay compares the
    tables themselves.
    """
    try:
        dialect, parts = split(outbox.url(environ))
    except ValueError:
        return None
    path = parts.path
    if dialect == "sqlite":
        path = os.path.realpath(unquote(path).removeprefix("/"))
    options = dict(parse_qsl(parts.query))
    socket = options.get("unix_socket") or options.get("host", "")
    host = (parts.hostname or "localhost").replace("127.0.0.1", "localhost")
    port = parts.port or {"postgresql": 5432, "mysql": 3306}.get(dialect, 0)
    return (dialect, host, port, socket, path, outbox.table)


def inline_password(outbox: OutboxSettings) -> bool:
    """Return True if the database URL contains a password, and not only a variable for it."""
    return has_password(re.sub(rf":?{_VARIABLE.pattern}", "", outbox.database))


def check_outbox(
    outbox: OutboxSettings, path: wording.Path, problems: Problems, environ: Mapping[str, str]
) -> None:
    """Add the problems of one outbox, except for problems of its files.

    A variable in the database URL need not be set, because producers and commands also read the
    daemon's configuration, and may run without this variable.
    """
    here = (*path, "database")
    missing = [name for name in _VARIABLE.findall(outbox.database) if not environ.get(name)]
    if missing or not problems.ok(here):
        return
    try:
        dialect, parts = split(outbox.url(environ))
    except ValueError as error:
        problems.add(here, str(error))
        return
    if outbox.password_file is None:
        return
    if dialect == "sqlite":
        problems.add((*path, "password_file"), "cannot be used with SQLite")
    elif parts.password is not None:
        problems.add(here, "contains a password, but password_file is also set")


def check_names(
    outboxes: tuple[OutboxSettings, ...], problems: Problems, environ: Mapping[str, str]
) -> None:
    """Add a problem for each name and each table that more than one outbox uses."""
    first: dict[tuple[object, ...], int] = {}
    for at, outbox in enumerate(outboxes):
        path = ("outboxes", at)
        if not problems.ok(path):
            continue
        other = first.setdefault((outbox.name,), at)
        if other != at:
            problems.add(
                (*path, "name"),
                f"{wording.quote(outbox.name)} is already the name of outboxes[{other}]",
            )
        place = table_location(outbox, environ) or (outbox.database, outbox.table)
        other = first.setdefault(place, at)
        if other != at:
            problems.add((*path, "table"), f"is already the table of outboxes[{other}]")

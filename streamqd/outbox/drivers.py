"""The database drivers: open a connection by its URL, and interpret errors.

A driver is imported when its first connection is opened. All connections are in autocommit mode.
They return strings as bytes, because no text in a table is trusted until it has been decoded.
"""

from __future__ import annotations

import re
import select
import socket
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote

from streamqd import extras
from streamqd.config.outboxes import split
from streamqd.config.secrets import mask_passwords
from streamqd.errors import DatabaseResponseError, DatabaseUnavailableError
from streamqd.outbox.table import MYSQL, POSTGRESQL, SQLITE, Dialect
from streamqd.words import escape_unprintable

Wait = Callable[[float, int | None], None]  # gets seconds, and a file descriptor or None

TIMEOUT = 10.0  # seconds of silence after which a connection counts as lost
ERROR_CHARS_MAX = 300


@dataclass(frozen=True, slots=True)
class Opened:
    """One open connection, and functions that hide the differences between drivers.

    `wait` waits until a time has passed, the database notifies of new rows, or a file descriptor is
    readable. `errors` lists the driver's exception classes. `refusal` returns advice if the server
    returned the error, or None if the connection was lost.
    """

    dialect: Dialect
    connection: Any  # a DB-API connection in autocommit mode
    errors: tuple[type[Exception], ...]
    refusal: Callable[[Exception], str | None]
    wait: Wait


def open_connection(
    url: str, *, password: str | None = None, listen: str = "", create: bool = False
) -> Opened:
    """Open a connection.

    `listen` is the PostgreSQL channel to listen to. If `create` is True, a missing SQLite file is
    created. Raises ValueError for an invalid URL, DatabaseUnavailableError, DatabaseResponseError.
    """
    name, parts = split(url)
    if name == "sqlite":
        return _sqlite(parts, create=create)
    return _OPENERS[name](parts, password, listen)


def refused_text(what: str, error: Exception, advice: str) -> str:
    """Return the text with which an error that a database returned is reported."""
    return f"{what} ({error_text(error)})" + (f"; {advice}" if advice else "")


def error_text(error: Exception) -> str:
    """Return the text of a driver's error on a single line, with passwords masked."""
    detail = error.args[1] if len(error.args) == 2 else error  # MySQL has a number and a text
    line = " ".join(str(detail).split())
    return mask_passwords(escape_unprintable(line[:ERROR_CHARS_MAX]))


def _missing(what: str, package: str, error: ImportError) -> DatabaseResponseError:
    return DatabaseResponseError(
        f"{what} needs the package {package}, which cannot be imported ({error_text(error)}); run"
        f" {extras.hint('outbox')}"
    )


def _wait(descriptors: list[int], seconds: float) -> list[int]:
    """Return the descriptors that are readable, after waiting up to `seconds`."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(max(0, seconds) * 1000)]


def _sleep(seconds: float, wake_fd: int | None) -> None:
    """Wait for a time or a descriptor. This is used for databases without notifications."""
    _wait([] if wake_fd is None else [wake_fd], seconds)


# --- PostgreSQL -----------------------------------------------------------------------------------

_COLUMNS = "compare its columns with `streamqd outbox create --sql`"
_GRANT = "grant SELECT and DELETE on the table, and SELECT and INSERT on its dead-letter table"
_LOGIN = "correct the user and the password in the URL"
_CREATE = "create it with `streamqd outbox create`"
_PRIMARY = "use the URL of a server that accepts writes"
_POSTGRESQL = {
    "42P01": _CREATE,
    "42703": _COLUMNS,
    "42804": _COLUMNS,
    "42501": _GRANT,
    "25006": _PRIMARY,
}
# Error codes of a server that is busy, starting or stopping. The statement may succeed later.
_POSTGRESQL_TRANSIENT = ("08", "40", "53", "55P03", "57")
# libpq reports no code for a refused login, so these texts are searched for. If a server's messages
# are not in English, a refused login is therefore reported as an unavailable server.
_POSTGRESQL_LOGINS = {
    "password authentication failed": _LOGIN,
    "no password supplied": "set password_file, or write the password into the URL",
    "no pg_hba.conf entry": "allow this host and user in pg_hba.conf",
    "Peer authentication failed": "run as the user of the URL, or allow a password in pg_hba.conf",
    "invalid connection option": "remove the option from the URL",
    "invalid URI": "correct the URL",
}
_UNKNOWN = re.compile(r'(database|role) ".*" does not exist')
# With asynchronous commits, a crash of the server could bring back the deleted rows of several
# batches, but the relay's records contain only the rows of the last batch.
_DURABLE = (
    "SELECT set_config('synchronous_commit', 'on', false)"
    " WHERE current_setting('synchronous_commit') = 'off'"
)


def _postgresql(parts: SplitResult, password: str | None, listen: str) -> Opened:
    try:
        import psycopg
    except ImportError as error:  # also if libpq is missing
        raise _missing("PostgreSQL", "psycopg", error) from error
    options: dict[str, Any] = {
        "connect_timeout": round(TIMEOUT),
        "application_name": "streamqd-outbox",
        # With these values, a server that has disappeared is detected within about 10 seconds.
        "keepalives_idle": 4,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": round(TIMEOUT * 1000),
    }
    stated = dict(parse_qsl(parts.query))
    options = {name: value for name, value in options.items() if name not in stated}
    if password is not None:
        options["password"] = password
    try:
        connection = psycopg.connect(
            parts.geturl(),
            autocommit=True,
            prepare_threshold=None,
            client_encoding="utf8",
            **options,
        )
        connection.execute(_DURABLE)
    except psycopg.Error as error:
        raise _postgresql_login(error_text(error)) from error

    class Raw(psycopg.adapt.Loader):
        """Makes psycopg return strings as bytes, as the other drivers do."""

        def load(self, data: Any) -> bytes:
            return bytes(data)

    for name in ("text", "varchar", "bpchar"):
        connection.adapters.register_loader(name, Raw)
    wait: Wait = _sleep
    if listen:
        connection.execute(f"LISTEN {POSTGRESQL.quote(listen)}")
        wait = _listening(connection)
    return Opened(POSTGRESQL, connection, (psycopg.Error,), _postgresql_refusal, wait)


def _postgresql_login(text: str) -> DatabaseUnavailableError:
    for sign, advice in _POSTGRESQL_LOGINS.items():
        if sign in text:
            return DatabaseResponseError(f"PostgreSQL rejected the login ({text}); {advice}")
    found = _UNKNOWN.search(text)
    if found:
        return DatabaseResponseError(
            f"PostgreSQL rejected the login ({text}); create the {found[1]}, or correct the URL"
        )
    return DatabaseUnavailableError(f"PostgreSQL cannot be reached ({text})")


def _postgresql_refusal(error: Any) -> str | None:
    code = error.sqlstate
    if code is None or code.startswith(_POSTGRESQL_TRANSIENT):
        return None
    return _POSTGRESQL.get(code, "")


def _listening(connection: Any) -> Wait:
    """Return a function that waits for a notification.

    A notification may already have arrived together with the reply to an earlier statement. In that
    case, the function returns immediately.
    """
    arrived: list[Any] = []
    connection.add_notify_handler(arrived.append)

    def wait(seconds: float, wake_fd: int | None) -> None:
        if not arrived:
            own = connection.fileno()
            if own in _wait([own] if wake_fd is None else [own, wake_fd], seconds):
                connection.pgconn.consume_input()
                while connection.pgconn.notifies() is not None:
                    pass
        arrived.clear()

    return wait


# --- MySQL and MariaDB ----------------------------------------------------------------------------

_MYSQL = {
    1044: _LOGIN,
    1045: _LOGIN,
    1049: "create the database, or correct the URL",
    1054: _COLUMNS,
    1142: _GRANT,
    1143: _GRANT,
    1146: _CREATE,
    1290: _PRIMARY,
    1698: _LOGIN,
    1836: _PRIMARY,
}
# Error numbers for too many connections, shutdown, lock wait, deadlock, or a killed statement.
_MYSQL_TRANSIENT = frozenset({0, 1020, 1040, 1053, 1077, 1158, 1159, 1160, 1161, 1203, 1205, 1213})


def _mysql(parts: SplitResult, password: str | None, _listen: str) -> Opened:
    try:
        import pymysql
    except ImportError as error:
        raise _missing("MySQL", "pymysql", error) from error
    options = dict(parse_qsl(parts.query))
    unknown = sorted(options.keys() - {"unix_socket", "ssl_ca", "charset"})
    if unknown:
        raise DatabaseResponseError(
            f"the URL has the unknown option {escape_unprintable(unknown[0])}; use unix_socket or"
            " ssl_ca"
        )
    options.pop("charset", None)  # other tools put it into URLs, so it is accepted but not used
    path = options.get("unix_socket")
    stated = None if parts.password is None else unquote(parts.password)
    try:
        connection = pymysql.connect(
            host=parts.hostname or "localhost",
            port=parts.port or 3306,
            user=unquote(parts.username or ""),
            password=(stated if password is None else password) or "",
            database=unquote(parts.path.strip("/")),
            charset="utf8mb4",
            use_unicode=False,
            autocommit=True,
            connect_timeout=TIMEOUT,
            read_timeout=TIMEOUT,
            write_timeout=TIMEOUT,
            defer_connect=True,
            **options,
        )
        connection.connect(_unix_socket(path) if path else None)
    except (pymysql.MySQLError, OSError) as error:
        advice = _mysql_refusal(error)
        if advice is None:
            raise DatabaseUnavailableError(
                f"MySQL cannot be reached ({error_text(error)})"
            ) from error
        raise DatabaseResponseError(
            refused_text("MySQL rejected the login", error, advice)
        ) from error
    errors = (pymysql.MySQLError, OSError)
    return Opened(MYSQL, connection, errors, _mysql_refusal, _sleep)


def _unix_socket(path: str) -> socket.socket:
    """Return a connected socket for the driver.

    If the driver opened the socket itself, it would not close it after a failed attempt to connect.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(TIMEOUT)
        made.connect(path)
    except OSError:
        made.close()
        raise
    return made


def _mysql_refusal(error: Exception) -> str | None:
    code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
    if isinstance(error, OSError) or code in _MYSQL_TRANSIENT or 2000 <= code < 3000:
        return None
    return _MYSQL.get(code, "")


# --- SQLite ---------------------------------------------------------------------------------------

_SQLITE = {
    "SQLITE_CANTOPEN": "correct the path, or create the file with `streamqd outbox create`",
    "SQLITE_READONLY": "allow this user to write the file and its directory",
    "SQLITE_NOTADB": "correct the path",
    "SQLITE_PERM": "allow this user to read and write the file and its directory",
    "SQLITE_FULL": "free space on the disk",
}


def _sqlite(parts: SplitResult, *, create: bool) -> Opened:
    path = Path(unquote(parts.path).removeprefix("/"))
    mode = "rwc" if create else "rw"
    try:
        # One thread may open the connection, and another thread close it.
        connection = sqlite3.connect(
            f"file:{quote(str(path))}?mode={mode}",
            uri=True,
            timeout=TIMEOUT / 2,
            isolation_level=None,
            check_same_thread=False,
        )
        connection.text_factory = bytes
        connection.execute("PRAGMA synchronous = FULL")  # some builds have a different default
        connection.execute("SELECT name FROM sqlite_master LIMIT 1").fetchall()
    except sqlite3.Error as error:
        advice = _sqlite_refusal(error)
        text = f"SQLite cannot open {escape_unprintable(str(path))}"
        if advice is None:
            raise DatabaseUnavailableError(f"{text} ({error_text(error)})") from error
        raise DatabaseResponseError(refused_text(text, error, advice)) from error
    errors = (sqlite3.Error, _FileReplacedError)
    return Opened(SQLITE, connection, errors, _sqlite_refusal, _watching(path))


class _FileReplacedError(Exception):
    """Raised if the file of a connection is no longer at its path.

    SQLite itself reports no error in this case, because it can still read the old file.
    """


def _watching(path: Path) -> Wait:
    """Return a function that waits, and fails if the file was moved, deleted or replaced."""

    def identity() -> tuple[int, int] | None:
        try:
            found = path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    opened = identity()

    def wait(seconds: float, wake_fd: int | None) -> None:
        if identity() != opened:
            raise _FileReplacedError(f"{path} was moved or replaced")
        _sleep(seconds, wake_fd)

    return wait


def _sqlite_refusal(error: Exception) -> str | None:
    # The name may be longer, such as SQLITE_READONLY_DBMOVED, so only its start is compared.
    name = "_".join(getattr(error, "sqlite_errorname", "").split("_")[:2])
    if name in ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_IOERR", "SQLITE_PROTOCOL"):
        return None
    if isinstance(error, _FileReplacedError):
        return None
    text = str(error)
    if "no such table" in text:
        return _CREATE
    if "no such column" in text or "has no column" in text:
        return _COLUMNS
    return _SQLITE.get(name, "")


_OPENERS = {"postgresql": _postgresql, "mysql": _mysql}

"""Create the tables of an outbox, and check existing ones."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from streamqd.errors import DatabaseResponseError, DatabaseUnavailableError
from streamqd.outbox.database import Database
from streamqd.outbox.drivers import error_text
from streamqd.outbox.rows import OutboxRow
from streamqd.outbox.table import DEAD_KINDS, KINDS
from streamqd.words import escape_unprintable

_NO_ROW = OutboxRow(-1)  # databases assign IDs from 1 on
_ADVICE = "compare it with `streamqd outbox create --sql`"

# Each query returns the name and type of each column in a table.
_COLUMNS = {
    "postgresql": (
        "SELECT attname::text, format_type(atttypid, NULL)::text FROM pg_attribute"
        " WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
    ),
    "mysql": (
        "SELECT column_name, data_type FROM information_schema.columns"
        " WHERE table_schema = COALESCE(%s, DATABASE()) AND table_name = %s"
    ),
    "sqlite": "SELECT name, type FROM pragma_table_info(?, ?)",
}
_ENGINE = (
    "SELECT engine FROM information_schema.tables"
    " WHERE table_schema = COALESCE(%s, DATABASE()) AND table_name = %s"
)
# Each query returns True if the column `id` alone is a key, does not allow NULL, and gets its
# values from the database.
_KEY = {
    "postgresql": (
        "SELECT attnotnull AND (attidentity <> '' OR"
        " COALESCE(pg_get_expr(adbin, adrelid), '') LIKE 'nextval(%%') AND EXISTS ("
        "SELECT FROM pg_index WHERE indrelid = attrelid AND indisunique AND indisvalid"
        " AND indpred IS NULL AND indnkeyatts = 1 AND indkey[0] = attnum)"
        " FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum"
        " WHERE attrelid = to_regclass(%s) AND attname = 'id'"
    ),
    "mysql": (
        "SELECT extra LIKE '%%auto_increment%%' AND column_key IN ('PRI', 'UNI')"
        " FROM information_schema.columns WHERE table_schema = COALESCE(%s, DATABASE())"
        " AND table_name = %s AND column_name = 'id'"
    ),
    # In SQLite, a column is an alias of the row ID if it has exactly this type and is the only
    # primary key.
    "sqlite": (
        "WITH given(t, s) AS (SELECT ?, ?) SELECT upper(type) = 'INTEGER' AND pk = 1"
        " AND (SELECT max(pk) = 1 FROM pragma_table_info(t, s))"
        " AND NOT EXISTS (SELECT 1 FROM pragma_index_list(t, s) WHERE origin = 'pk')"
        " FROM given, pragma_table_info(t, s) WHERE name = 'id'"
    ),
}
# Each query returns True if the column `uid` is unique.
_UNIQUE = {
    "postgresql": (
        "SELECT count(*) > 0 FROM pg_index JOIN pg_attribute ON attrelid = indrelid"
        " AND attnum = indkey[0] WHERE indrelid = to_regclass(%s) AND attname = 'uid'"
        " AND indisunique AND indisvalid AND indpred IS NULL AND indnkeyatts = 1"
    ),
    "mysql": (
        "SELECT column_key IN ('PRI', 'UNI') FROM information_schema.columns"
        " WHERE table_schema = COALESCE(%s, DATABASE()) AND table_name = %s"
        " AND column_name = 'uid'"
    ),
    "sqlite": (
        "WITH given(t, s) AS (SELECT ?, ?) SELECT count(*) > 0 FROM given, pragma_index_list(t, s)"
        ' AS i WHERE i."unique" AND NOT i.partial'
        " AND (SELECT group_concat(name) FROM pragma_index_info(i.name, s)) = 'uid'"
    ),
}
# Each query returns the setting with which a crash can lose commits, or no row.
_LOST_COMMITS = {
    "postgresql": (
        "SELECT 'synchronous_commit is off'::text FROM pg_settings"
        " WHERE name = 'synchronous_commit' AND reset_val = 'off'"
    ),
    "mysql": (
        "SELECT CONCAT('innodb_flush_log_at_trx_commit is ',"
        " @@innodb_flush_log_at_trx_commit) FROM DUAL WHERE @@innodb_flush_log_at_trx_commit <> 1"
    ),
}
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a host
# Each query returns values that identify the server or file, and the table in it.
_IDENTITY = {
    # The start time identifies a server, as no two servers start in the same microsecond.
    "postgresql": (
        "SELECT CAST(extract(epoch FROM pg_postmaster_start_time()) AS text),"
        " CAST(current_database() AS text), CAST(to_regclass(%s)::oid AS text)"
    ),
    # If two servers run in copies of one container, only the creation time of the table may differ.
    "mysql": (
        "SELECT @@hostname, @@port, @@datadir, table_schema, table_name, create_time"
        " FROM information_schema.tables WHERE table_schema = COALESCE(%s, DATABASE())"
        " AND table_name = %s"
    ),
    "sqlite": "SELECT file, ? FROM pragma_database_list WHERE name = ?",
}
_TRIGGER = (
    "SELECT 1 FROM pg_trigger JOIN pg_proc ON pg_proc.oid = tgfoid"
    " WHERE tgrelid = to_regclass(%s) AND tgenabled <> 'D' AND prosrc LIKE '%%pg_notify%%'"
)


@dataclass(frozen=True, slots=True)
class OutboxCheck:
    """The state of an outbox's tables: problems that stop the relay, and notes that do not."""

    table: str
    dialect: str
    problems: list[str]
    notes: list[str]


def create(database: Database, *, notify: bool = True) -> None:
    """Create missing tables. In PostgreSQL, also create the trigger that notifies the relay.

    Raises DatabaseResponseError if the user is not allowed to create them, and
    DatabaseUnavailableError.
    """
    try:
        database.run_all(database.table.create(notify=notify))
    except DatabaseResponseError as error:
        cause = error.__cause__
        detail = error_text(cause) if isinstance(cause, Exception) else str(error)
        raise DatabaseResponseError(
            f"table {database.table.name} was not created ({detail}); run the output of"
            " `streamqd outbox create --sql` as its owner"
        ) from error


def check(database: Database) -> OutboxCheck:
    """Compare both tables with the required columns, and try the relay's statements.

    The statements are tried with rows that cannot exist, so they change nothing. Raises
    DatabaseUnavailableError.
    """
    table = database.table
    problems: list[str] = []
    for name, kinds in ((table.name, KINDS), (table.dead_name, DEAD_KINDS)):
        problems += _column_faults(database, name, kinds)
    if not problems:
        problems += _statement_faults(database)
    notes = [] if problems else _notes(database)
    return OutboxCheck(table.name, database.dialect, problems, notes)


def identity(database: Database) -> str:
    """Return a string that identifies the table, or '' if the table does not exist.

    The string is the same for different URLs of one table. If a PostgreSQL server restarts, it
    changes. Raises DatabaseUnavailableError.
    """
    found = database.rows(
        _IDENTITY[database.dialect], table_parameters(database, database.table.name)
    )
    if not found or None in found[0]:
        return ""
    parts = [bytes(each) if isinstance(each, bytes) else str(each).encode() for each in found[0]]
    if database.dialect == "sqlite":
        try:
            file = Path(os.fsdecode(parts[0])).stat()
            boot = _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
        except OSError as error:
            raise DatabaseUnavailableError(f"{database.table.name}: {error.strerror}") from error
        parts[0] = f"{boot}:{file.st_dev}:{file.st_ino}".encode()
    return hashlib.sha256(b"\0".join([database.dialect.encode(), *parts])).hexdigest()[:32]


def _notes(database: Database) -> list[str]:
    """Return sentences about the usable tables and their server that the user should know."""
    table, notes = database.table, []
    if not _is_true(database, _UNIQUE[database.dialect], table.name):
        notes.append(
            "two rows can have one uid, and the relay sends only one of them; run CREATE UNIQUE"
            f" INDEX {table.channel}_uid ON {table.name} (uid)"
        )
    lost = _LOST_COMMITS.get(database.dialect)
    for (setting,) in database.rows(lost) if lost else ():
        notes.append(
            f"{bytes(setting).decode()} for this user, so a crash of the database can lose commits;"
            " see the page Send in a database transaction"
        )
    if database.dialect == "postgresql":
        trigger = database.rows(_TRIGGER, (table.dialect.quote(table.name),))
        notes.append(
            "a trigger notifies the relay of each commit"
            if trigger
            else "no trigger notifies the relay, so it reads the table after each pause (poll)"
        )
    return notes


def _column_faults(database: Database, name: str, kinds: dict[str, str]) -> list[str]:
    found = _columns(database, name)
    if not found:
        return [f"table {name} was not found; create it with `streamqd outbox create`"]
    faults = []
    for column, kind in kinds.items():
        accepted = database.table.dialect.kinds[kind]
        if column not in found:
            faults.append(f"table {name} has no column {column}; {_ADVICE}")
        elif found[column] not in accepted:
            faults.append(
                f"the column {column} of {name} is"
                f" {escape_unprintable(found[column]) or 'without a type'}, not {kind}; {_ADVICE}"
            )
    if not faults and not _is_true(database, _KEY[database.dialect], name):
        faults.append(
            f"the column id of {name} is not a primary key that the database generates; {_ADVICE}"
        )
    if database.dialect == "mysql":
        [(engine,)] = database.rows(_ENGINE, _schema_and_name(name))
        if engine is not None and bytes(engine).lower() != b"innodb":
            faults.append(
                f"table {name} has the engine {escape_unprintable(bytes(engine).decode())}, without"
                f" transactions; run ALTER TABLE {name} ENGINE=InnoDB"
            )
    return faults


def _columns(database: Database, name: str) -> dict[str, str]:
    """Return the type of each column in a table, in lower case and without a length."""
    found = database.rows(_COLUMNS[database.dialect], table_parameters(database, name))
    return {
        bytes(column).decode("utf-8", "replace"): _bare_type(bytes(kind).decode("utf-8", "replace"))
        for column, kind in found
    }


def _is_true(database: Database, query: str, name: str) -> bool:
    found = database.rows(query, table_parameters(database, name))
    return bool(found and found[0][0])


def table_parameters(database: Database, name: str) -> tuple[str | None, ...]:
    """Return the parameters with which the queries above select a table."""
    schema, bare = _schema_and_name(name)
    values: dict[str, tuple[str | None, ...]] = {
        "postgresql": (database.table.dialect.quote(name),),
        "mysql": (schema, bare),
        "sqlite": (bare, schema or "main"),
    }
    return values[database.dialect]


def _bare_type(kind: str) -> str:
    return kind.lower().partition("(")[0].removesuffix(" unsigned").strip()


def _schema_and_name(name: str) -> tuple[str | None, str]:
    schema, _, bare = name.rpartition(".")
    return schema or None, bare


def _statement_faults(database: Database) -> list[str]:
    """Return the errors of the relay's statements. They show, for example, missing permissions."""
    faults = []
    for attempt in (
        lambda: database.read_oldest(1),
        lambda: database.delete([_NO_ROW]),
        lambda: database.move_to_dead_table(_NO_ROW, ""),
        lambda: database.read_dead(1),
    ):
        try:
            attempt()
        except DatabaseResponseError as error:
            faults.append(str(error))
    return list(dict.fromkeys(faults))

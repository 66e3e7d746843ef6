"""Create the tables of an outbox, and check those that exist."""

from __future__ import annotations

from dataclasses import dataclass

from streamqd.errors import DatabaseRefused
from streamqd.outbox.database import Database
from streamqd.outbox.drivers import text_of
from streamqd.outbox.rows import OutboxRow
from streamqd.outbox.table import DEAD_KINDS, KINDS
from streamqd.words import harmless

_NO_ROW = OutboxRow(-1)  # no database gives an ID below 1
_ADVICE = "compare it with `streamqd outbox create --sql`"

# Each returns the name and the type of each column of one table.
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
_TRIGGER = (
    "SELECT 1 FROM pg_trigger JOIN pg_proc ON pg_proc.oid = tgfoid"
    " WHERE tgrelid = to_regclass(%s) AND tgenabled <> 'D' AND prosrc LIKE '%%pg_notify%%'"
)


@dataclass(frozen=True, slots=True)
class OutboxCheck:
    """The state of an outbox's tables: problems that stop it, and notes on how it works."""

    table: str
    dialect: str
    problems: list[str]
    notes: list[str]


def create(database: Database, *, notify: bool = True) -> None:
    """Create the missing tables, and in PostgreSQL the trigger that notifies the relay.

    Raises DatabaseRefused when the user may not create them, and DatabaseUnavailable.
    """
    try:
        database.run_all(database.table.create(notify=notify))
    except DatabaseRefused as error:
        cause = error.__cause__
        detail = text_of(cause) if isinstance(cause, Exception) else str(error)
        raise DatabaseRefused(
            f"the table {database.table.name} was not created ({detail}); run the output of"
            " `streamqd outbox create --sql` as its owner"
        ) from error


def check(database: Database) -> OutboxCheck:
    """Compare both tables with the columns that are needed, and try the relay's statements.

    They are tried on no rows, so nothing changes. Raises DatabaseUnavailable.
    """
    table = database.table
    problems: list[str] = []
    for name, kinds in ((table.name, KINDS), (table.dead_name, DEAD_KINDS)):
        problems += _column_faults(database, name, kinds)
    if not problems:
        problems += _statement_faults(database)
    notes = []
    if not problems and database.dialect == "postgresql":
        trigger = database.rows(_TRIGGER, (table.dialect.quoted(table.name),))
        notes.append(
            "a trigger notifies the relay of each commit"
            if trigger
            else "no trigger notifies the relay, so it reads the table after each pause (poll)"
        )
    return OutboxCheck(table.name, database.dialect, problems, notes)


def _column_faults(database: Database, name: str, kinds: dict[str, str]) -> list[str]:
    found = _columns(database, name)
    if not found:
        return [f"the table {name} was not found; create it with `streamqd outbox create`"]
    faults = []
    for column, kind in kinds.items():
        accepted = database.table.dialect.kinds[kind]
        if column not in found:
            faults.append(f"the table {name} has no column {column}; {_ADVICE}")
        elif found[column] not in accepted:
            faults.append(
                f"the column {column} of {name} is {harmless(found[column]) or 'without a type'},"
                f" not {kind}; {_ADVICE}"
            )
    if database.dialect == "mysql":
        [(engine,)] = database.rows(_ENGINE, _schema_and_name(name))
        if engine is not None and bytes(engine).lower() != b"innodb":
            faults.append(
                f"the table {name} has the engine {harmless(bytes(engine).decode())}, without"
                f" transactions; run ALTER TABLE {name} ENGINE=InnoDB"
            )
    return faults


def _columns(database: Database, name: str) -> dict[str, str]:
    """Return the type of each column of a table, in lower case and without its length."""
    schema, bare = _schema_and_name(name)
    values = {
        "postgresql": (database.table.dialect.quoted(name),),
        "mysql": (schema, bare),
        "sqlite": (bare, schema or "main"),
    }[database.dialect]
    return {
        bytes(column).decode("utf-8", "replace"): _bare(bytes(kind).decode("utf-8", "replace"))
        for column, kind in database.rows(_COLUMNS[database.dialect], values)
    }


def _bare(kind: str) -> str:
    return kind.lower().partition("(")[0].removesuffix(" unsigned").strip()


def _schema_and_name(name: str) -> tuple[str | None, str]:
    schema, _, bare = name.rpartition(".")
    return schema or None, bare


def _statement_faults(database: Database) -> list[str]:
    """Return the errors of the relay's statements, which name the missing permission."""
    faults = []
    for attempt in (
        lambda: database.oldest(1),
        lambda: database.delete([_NO_ROW]),
        lambda: database.bury(_NO_ROW, ""),
        lambda: database.dead(1),
    ):
        try:
            attempt()
        except DatabaseRefused as error:
            faults.append(str(error))
    return list(dict.fromkeys(faults))
